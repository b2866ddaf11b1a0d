"""The gated delta rule by chunks (Yang et al. 2024), for delta.py.

Products within all chunks are computed at once; a scan over chunks then carries the state. A chunk of
one position is the rule itself, which decodes.

Shapes: B batch, T positions, N heads, K key dim, V value dim of a head, C positions of a chunk, X
columns of a state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 64  # C; more: longer matmuls, but their work per position grows with C


class Chunks(NamedTuple):
    """How n chunks read and update the state S before them, each [n, B, N, ...]."""

    read: jax.Array  # [C, K]: queries, times the decay since the chunk's start
    within: jax.Array  # [C, C]: products of queries with the chunk's own keys
    erase: jax.Array  # [C, K]: what S holds for the chunk's keys is erase · S,
    values: jax.Array  # [C, V]: and values - erase · S is written instead,
    keys: jax.Array  # [C, K]: at these keys, times the decay until the chunk's end
    keep: jax.Array  # [1, 1]: the decay of S; 0 if a segment starts in the chunk


def chunk(q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, write_BTN, starts_BT, size: int = CHUNK) -> Chunks:
    """Computes what doesn't depend on the state, for all chunks at once.

    Args:
      starts_BT: whether a position is the first of a segment.
      size: C; T is padded to a multiple of it.
    """
    T = q_BTNK.shape[1]
    C = min(size, T)

    def split(x_BTN):  # [B, T, N, ...] → [n, B, N, C, ...]
        x = jnp.pad(x_BTN, ((0, 0), (0, -T % C), *[(0, 0)] * (x_BTN.ndim - 2)))
        x = x.reshape(x.shape[0], -1, C, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2)) if x.ndim > 3 else x.swapaxes(0, 1)

    q, k, v, log_decay, write = map(split, (q_BTNK, k_BTNK, v_BTNV, log_decay_BTN, write_BTN))
    segment = jnp.cumsum(split(starts_BT.astype(jnp.int32)), axis=-1)[:, :, None]  # of the chunk
    since_start, pairs = decays(log_decay)
    is_same = segment[..., :, None] == segment[..., None, :]
    pairs = jnp.where(is_same & jnp.tri(C, dtype=bool)[None, None, None], pairs, 0)
    since_start = jnp.where(segment == 0, since_start, 0)[..., None]
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


def decays(log_decay_C) -> tuple[jax.Array, jax.Array]:
    """The decay from before the chunk to each position, [..., C], and from each position to each
    later one, [..., C, C].

    Logarithms are summed over just the positions between; a difference of two sums from the chunk's
    start would lose the digits of a slow decay after a fast one.
    """
    C = log_decay_C.shape[-1]
    later, between, earlier = jnp.ogrid[:C, :C, :C]
    is_between = ((earlier < between) & (between <= later)).astype(log_decay_C.dtype)
    sums_CC = jnp.einsum(
        "...l,ilj->...ij", log_decay_C, is_between, precision=jax.lax.Precision.HIGHEST
    )
    return jnp.exp(jnp.cumsum(log_decay_C, axis=-1)), jnp.exp(sums_CC)


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
    out = jnp.moveaxis(out, (0, 2), (1, 3))  # [n, B, N, C, X] → [B, n, C, N, X]
    return state, out.reshape(out.shape[0], -1, *out.shape[3:])
