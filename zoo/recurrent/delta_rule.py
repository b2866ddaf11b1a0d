"""The gated delta rule by chunks (Yang et al. 2024), for delta.py; channel_decays.py has its relative.

Products within all chunks are computed at once; a scan over chunks then carries the state. A chunk of
one position is the rule itself, which decodes.

Shapes: B batch, T positions, N heads, K key dim, V value dim of a head, C positions of a chunk, X
columns of a state.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .chunks import chunk_length, decays_in_segments, join_chunks, split_chunks


class Chunks(NamedTuple):
    """How n chunks read and update the state S before them, each [n, B, N, ...]."""

    read: jax.Array  # [C, K]: queries, times the decay since the chunk's start
    within: jax.Array  # [C, C]: products of queries with the chunk's own keys
    erase: jax.Array  # [C, K]: what S holds for the chunk's keys is erase · S,
    values: jax.Array  # [C, V]: and values - erase · S is written instead,
    keys: jax.Array  # [C, K]: at these keys, times the decay until the chunk's end
    keep: jax.Array  # [1, 1] or [K, 1]: the decay of S; 0 if a segment starts in the chunk


def chunk(q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, write_BTN, starts_BT, size: int = 0) -> Chunks:
    """Computes what doesn't depend on the state, for all chunks at once.

    Args:
      starts_BT: whether a position is the first of a segment.
      size: C, of which T is padded to a multiple; 0: `chunk_length`.
    """
    split = functools.partial(split_chunks, size=size or chunk_length())
    q, k, v, log_decay, write = map(split, (q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, write_BTN))
    since_start, pairs = decays_in_segments(log_decay, split(starts_BT.astype(jnp.int32)))
    since_start = since_start[..., None]
    overlaps = write[..., None] * pairs * jnp.einsum("...ik,...jk->...ij", k, k)
    rows = write[..., None] * jnp.concatenate((since_start * k, v), axis=-1)
    solved = inverse(overlaps) @ rows
    K = k.shape[-1]
    return Chunks(
        read=q * since_start,
        within=pairs * jnp.einsum("...ik,...jk->...ij", q, k),
        erase=solved[..., :K],
        values=solved[..., K:],
        keys=k * pairs[..., -1, :, None],
        keep=since_start[..., -1:, :],
    )


@jax.custom_vjp
def inverse(lower_CC) -> jax.Array:
    """Inverts a unit lower triangular matrix; reads only the part below the diagonal.

    Joins inverted diagonal blocks in pairs, so all work is in matmuls. This is as exact as
    substitution; the product of powers of two is shorter, but its terms grow with
    repeated keys.
    """
    C = lower_CC.shape[-1]
    row, column = jnp.ogrid[:C, :C]
    inverted = jnp.broadcast_to(jnp.eye(C, dtype=lower_CC.dtype), lower_CC.shape)
    size = 1
    while size < C:
        is_between = (row // size // 2 == column // size // 2) & (row // size > column // size)
        between = jnp.where(is_between[None, None, None], lower_CC, 0)
        inverted -= inverted @ between @ inverted
        size *= 2
    return inverted


def _inverse_forward(lower_CC):
    inverted = inverse(lower_CC)
    return inverted, inverted


def _inverse_backward(inverted, grad):
    return (-jnp.tril(inverted.mT @ grad @ inverted.mT, -1),)


inverse.defvjp(_inverse_forward, _inverse_backward)


def run(chunks: Chunks, state_BNKX) -> tuple[jax.Array, jax.Array]:
    """Returns the state after all chunks, and the outputs of all positions, [B, n · C, N, X].

    A state may have X > V columns; values are written to the last V.
    """
    columns = state_BNKX.shape[-1] - chunks.values.shape[-1]  # without values

    def one(state, chunk: Chunks):
        values = jnp.pad(chunk.values, ((0, 0), (0, 0), (0, 0), (columns, 0)))
        new = values - chunk.erase @ state
        out = chunk.read @ state + chunk.within @ new
        return chunk.keep * state + chunk.keys.mT @ new, out

    state, out = jax.lax.scan(one, state_BNKX, chunks)
    return state, join_chunks(out)
