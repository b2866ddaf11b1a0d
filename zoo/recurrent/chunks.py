"""Chunks of positions, and decays within them; for the recurrences that are computed by chunks.

Shapes: B batch, T positions, N heads, C positions of a chunk, n chunks.
"""

import jax
import jax.numpy as jnp

from ..core.sharding import device


def chunk_length() -> int:
    """C of recurrences with a decay for each head; longer chunks have longer matmuls, but more work
    per position. By the measurements in recipes/docs/states.md.
    """
    return 128 if device().platform == "tpu" else 64


def split_chunks(x_BTN, size: int) -> jax.Array:
    """[B, T, N, ...] → [n, B, N, C, ...], or [B, T] → [n, B, C]; T is padded with zeros."""
    T = x_BTN.shape[1]
    C = min(size, T)
    x = jnp.pad(x_BTN, ((0, 0), (0, -T % C), *[(0, 0)] * (x_BTN.ndim - 2)))
    x = x.reshape(x.shape[0], -1, C, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2)) if x.ndim > 3 else x.swapaxes(0, 1)


def join_chunks(x_nBNC) -> jax.Array:
    """[n, B, N, C, ...] → [B, n · C, N, ...]."""
    x = jnp.moveaxis(x_nBNC, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def decays_in_segments(log_decay_nBNC, starts_nBC) -> tuple[jax.Array, jax.Array]:
    """`decays`, zero where a segment starts between.

    Args:
      starts_nBC: 1 where a position is the first of a segment, else 0.
    """
    C = log_decay_nBNC.shape[-1]
    segment = jnp.cumsum(starts_nBC, axis=-1)[:, :, None]  # of the chunk
    since_start, pairs = decays(log_decay_nBNC)
    is_same = segment[..., :, None] == segment[..., None, :]
    pairs = jnp.where(is_same & jnp.tri(C, dtype=bool)[None, None, None], pairs, 0)
    return jnp.where(segment == 0, since_start, 0), pairs


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
