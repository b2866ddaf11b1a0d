"""Rows of a cache that answers take in turn, and the answers that wait for one.

Shapes: B answers, M slots, D shards of B and M, Q answers of a shard.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from recipes.common.sharding import Layout


class Slots(NamedTuple):
    """What the rows of a cache are at."""

    answer_M: jax.Array  # the answer that a slot has, or had
    number_M: jax.Array  # the number of its next token
    token_M: jax.Array  # its last token
    is_going_M: jax.Array  # False: the slot is free


class Queue(NamedTuple):
    """Answers that wait for a slot, in order: each shard of the batch has its own."""

    rows_DQ: jax.Array  # of the shard's cache of prompts; those that wait come first
    count_D: jax.Array  # how many wait
    next_D: jax.Array  # how many of them have begun

    @classmethod
    def of(cls, is_waiting_B: jax.Array, layout: Layout) -> "Queue":
        D = layout.batch_shards if layout.mesh.explicit_axes else 1
        is_waiting_DQ = is_waiting_B.reshape(D, -1)
        rows_DQ = jnp.argsort(~is_waiting_DQ, axis=1, stable=True)
        return cls(rows_DQ, is_waiting_DQ.sum(axis=1), jnp.zeros(D, int))

    def waits(self) -> jax.Array:
        return (self.next_D < self.count_D).any()

    def take(self, is_going_M, answer_M) -> "tuple[Queue, jax.Array, jax.Array, jax.Array]":
        """Gives free slots to the next answers.

        Returns: (the queue after that, the slots that have another answer, the rows of their shards'
          prompts, all slots' answers), each [M].
        """
        D, Q = self.rows_DQ.shape
        is_free_DM = ~is_going_M.reshape(D, -1)
        place_DM = self.next_D[:, None] + jnp.cumsum(is_free_DM, axis=1) - 1
        is_new_DM = is_free_DM & (place_DM < self.count_D[:, None])
        rows_DM = jnp.take_along_axis(self.rows_DQ, jnp.clip(place_DM, 0, Q - 1), axis=1)
        answer_DM = rows_DM + Q * jnp.arange(D)[:, None]
        is_new_M = is_new_DM.reshape(-1)
        answer_M = jnp.where(is_new_M, answer_DM.reshape(-1), answer_M)
        after = self._replace(next_D=self.next_D + is_new_DM.sum(axis=1))
        return after, is_new_M, rows_DM.reshape(-1), answer_M
