"""Log-likelihoods of many token sequences, batched by length; one compiled program per length."""

import itertools
import math
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from recipes.common.runtime import processes
from recipes.common.sharding import Layout, Tree

SHORTEST = 32  # fewest positions of a program
LOGITS = 2**29  # most logits of a program on one device: 2 GiB


class Row(NamedTuple):
    tokens: list[int]  # at least one more than `scored`
    scored: int  # how many of the last tokens are scored


class Scorer:
    """Scores rows with a model on its mesh.

    Rows of similar length form a batch, padded at the end to a power of two, with one program for
    each length. All processes score the same rows and get the same results.
    """

    def __init__(self, layout: Layout, variables: Tree, batch_size: int, context: int):
        """Compiles nothing yet.

        Args:
          variables: the model's variables, {"params": …}, on the layout's mesh.
          batch_size: most rows at a time; rounded up to a multiple of the batch shards.
          context: positions of the longest program.
        """
        self._layout, self._variables = layout, variables
        self._batch_size, self._context = batch_size, context
        self._programs: dict[int, jax.stages.Compiled] = {}

    def __call__(self, rows: list[Row]) -> list[tuple[float, bool]]:
        """For each row: (sum of log-probabilities in nats, whether every token was the likeliest).

        Args:
          rows: at most `context` + 1 tokens each.
        """
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        with_some = [i for i, row in enumerate(rows) if row.scored]
        order = sorted(with_some, key=lambda i: -len(rows[i].tokens))  # fails early
        batches = []
        for length, members in itertools.groupby(order, lambda i: self.length(rows[i])):
            alike, size = list(members), self.rows(length)
            batches += [(length, alike[k : k + size]) for k in range(0, len(alike), size)]
        silent = not (processes.is_first() and sys.stdout.isatty())
        for length, members in track(batches, "Scoring", disable=silent, transient=True):
            nats_B, likeliest_B = self._score(length, [rows[i] for i in members])
            for i, nats, likeliest in zip(members, nats_B, likeliest_B, strict=False):
                scores[i] = (-float(nats), bool(likeliest))
        return scores

    def length(self, row: Row) -> int:
        """Positions of the program for a row: a power of two, or the whole context.

        Rounded up to what the mesh divides.
        """
        own = len(row.tokens) - 1
        length = min(2 ** math.ceil(math.log2(max(own, SHORTEST))), self._context)
        return -(-length // self._layout.seq_shards) * self._layout.seq_shards

    def rows(self, length: int) -> int:
        """Rows of the program for a length: a multiple of the batch shards."""
        layout, shards = self._layout, self._layout.batch_shards
        fit = LOGITS * layout.seq_shards // (length * layout.config.vocab_size)  # rows per shard
        return shards * max(1, min(-(-self._batch_size // shards), fit))

    def _score(self, length: int, rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
        shape = (self.rows(length), length)
        tokens_BT, targets_BT = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        padding_BT = np.ones(shape, np.int32)
        for b, (tokens, scored) in enumerate(rows):
            end = len(tokens) - 1
            tokens_BT[b, :end] = tokens[:-1]
            padding_BT[b, :end] = 0
            targets_BT[b, end - scored : end] = tokens[-scored:]
        sharding = self._layout.batch_shardings(tokens_BT)
        arrays = [tokens_BT, targets_BT]
        if self._layout.config.scales_by_length:  # else padding at the end changes nothing
            arrays.append(padding_BT)
        batch = [  # every process has all rows, and its devices take theirs
            jax.make_array_from_callback(shape, sharding, rows_BT.__getitem__) for rows_BT in arrays
        ]
        if length not in self._programs:
            self._programs[length] = self._layout.compile(
                self._program, self._variables, *batch, out_shardings=self._layout.replicated
            )
        return jax.device_get(self._programs[length](self._variables, *batch))

    def _program(self, variables, tokens_BT, targets_BT, padding_BT=None):
        # Padding is a document of its own, on whose length no scaling of the row depends.
        logits_BTV = self._layout.model.merge(variables)(tokens_BT, padding_BT)
        counts_BT = targets_BT >= 0
        picked_BTV = jnp.arange(logits_BTV.shape[-1])[None, None] == targets_BT[..., None]
        picked_BT = jnp.where(picked_BTV, logits_BTV, 0).sum(axis=-1)
        nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - picked_BT
        likeliest_BT = (logits_BTV.argmax(axis=-1) == targets_BT) | ~counts_BT
        return jnp.where(counts_BT, nats_BT, 0).sum(axis=1), likeliest_BT.all(axis=1)
