"""The delta rule with a decay for each channel of a key, by chunks (Kimi Linear, Kimi Team 2025); for kimi_delta.py.

A decay between two positions is a vector here, so it can't be factored out of the product of their keys:

    product of i and j = Σ over channels of row_i · key_j · exp(sum of log_decay between j and i)

The sum is split at a position between j and i: the part before it belongs to the key, the part after
it to the row, and neither exponent is above zero. Halving a chunk again and again gives each pair such
a position, and makes each half's pairs one matmul. delta_rule.py has the rest, and decays of heads.

Shapes: B batch, T positions, N heads, K key dim, V value dim of a head, C positions of a chunk, n
chunks, R kinds of rows, m blocks.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .chunks import split_chunks
from .delta_rule import Chunks, inverse

CHUNK = 64  # C on all platforms; see recipes/docs/states.md


def chunk(
    q_BTNK, k_BTNK, v_BTNV, log_decay_BTNK, write_BTN, starts_BT, size: int = CHUNK
) -> Chunks:
    """Computes what doesn't depend on the state, for all chunks at once; see `delta_rule.chunk`."""
    split = functools.partial(split_chunks, size=size)
    q, k, v, log_decay, write = map(split, (q_BTNK, k_BTNK, v_BTNV, log_decay_BTNK, write_BTN))
    C = k.shape[-2]
    segment = jnp.cumsum(split(starts_BT.astype(jnp.int32)), axis=-1)[:, :, None]  # of the chunk
    is_same = segment[..., :, None] == segment[..., None, :]
    pairs = decayed_products(jnp.stack((q, k)), k, log_decay)
    within, overlaps = jnp.where(
        is_same & jnp.tri(C, dtype=bool)[None, None, None], pairs.products, 0
    )
    is_first = (segment == 0)[..., None]
    is_last = (segment == segment[..., -1:])[..., None]
    since_start = jnp.where(is_first, jnp.exp(pairs.since_start), 0)
    rows = write[..., None] * jnp.concatenate((since_start * k, v), axis=-1)
    solved = inverse(write[..., None] * overlaps) @ rows
    K = k.shape[-1]
    return Chunks(
        read=q * since_start,
        within=within,
        erase=solved[..., :K],
        values=solved[..., K:],
        keys=k * jnp.where(is_last, jnp.exp(pairs.until_end), 0),
        keep=since_start[..., -1, :, None],
    )


BLOCK = 8  # positions whose pairs share matmuls; more: fewer of these, with more zeros


class Decayed(NamedTuple):
    """Products of rows and keys, and logarithms of the decays around them."""

    products: jax.Array  # [R, ..., C, C]: 0 where the key is later
    since_start: jax.Array  # [..., C, K]: from before the chunk to each position
    until_end: jax.Array  # [..., C, K]: from each position to the chunk's end


def decayed_products(rows_RCK, keys_CK, log_decay_CK) -> Decayed:
    """Products of all rows with the keys of earlier positions and their own.

    Blocks are joined in pairs: the second one's rows meet the first one's keys between both.

    Args:
      rows_RCK: [R, ..., C, K]; keys_CK, log_decay_CK: [..., C, K].
    """
    C, K = keys_CK.shape[-2:]
    padded = 1 << (C - 1).bit_length()  # a power of two
    c = min(BLOCK, padded)

    batch = keys_CK.shape[:-2]

    # The batch dims are one, as XLA's CPU backend (JAX 0.10) crashes in sums of arrays of 7 dims.
    def in_blocks(x):  # [..., C, K] → [batch, m, c, K]
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, padded - C), (0, 0)])
        return x.reshape(-1, padded // c, c, K)

    def in_positions(x):  # back
        return x.reshape(*batch, padded, K)[..., :C, :]

    keys, log_decay = in_blocks(keys_CK), in_blocks(log_decay_CK)
    rows = in_blocks(rows_RCK).reshape(-1, *keys.shape)
    products = products_in_blocks(rows, keys, log_decay)
    start, end = (x[0] for x in sums_in_blocks(log_decay, [c]))
    totals_mK = start[..., -1, :]
    joined = doubling(padded // c)  # numbers of blocks
    before, after = sums_in_blocks(totals_mK, [*joined, padded // c], with_own=False)
    since_start, until_end = start[None] + before[..., None, :], end[None] + after[..., None, :]
    for n, size in enumerate(joined):
        rows_2 = in_pairs(rows * jnp.exp(since_start[n])[None], size)[..., 1, :, :]
        keys_1 = in_pairs(keys * jnp.exp(until_end[n]), size)[..., 0, :, :]
        between = jnp.einsum("r...ik,...jk->r...ij", rows_2, keys_1)
        products_1, products_2 = products[..., 0::2, :, :], products[..., 1::2, :, :]
        products = jnp.block([[products_1, jnp.zeros_like(between)], [between, products_2]])
    return Decayed(
        products=products.reshape(-1, *batch, padded, padded)[..., :C, :C],
        since_start=in_positions(since_start[-1]),
        until_end=in_positions(until_end[-1]),
    )


def products_in_blocks(rows_RmcK, keys_mcK, log_decay_mcK) -> jax.Array:
    """`Decayed.products` of each block, [R, ..., m, c, c].

    The pairs of smaller blocks share matmuls, with zeros in place of the rows and keys that don't
    meet: matmuls of one, two and four positions would take longer.
    """
    c = keys_mcK.shape[-2]
    place = jnp.arange(c)
    products = (rows_RmcK * keys_mcK[None]).sum(axis=-1)[..., None]
    products = products * constant(jnp.eye(c), products)
    if c == 1:
        return products
    starts, ends = sums_in_blocks(log_decay_mcK, doubling(c))
    for start, end, size in zip(starts, ends, doubling(c), strict=True):
        is_second = (place // size % 2)[:, None]
        rows = rows_RmcK * (jnp.exp(start) * constant(is_second, start))[None]
        keys = keys_mcK * jnp.exp(end) * constant(1 - is_second, end)
        between = jnp.einsum("r...ik,...jk->r...ij", rows, keys)
        pair = place // (2 * size)
        products += between * constant(pair[:, None] == pair[None], between)
    return products


def doubling(end: int) -> list[int]:
    """1, 2, 4, … below `end`."""
    return [1 << n for n in range((end - 1).bit_length())]


def sums_in_blocks(x_PK, sizes: list[int], with_own: bool = True) -> tuple[jax.Array, jax.Array]:
    """Sums over the earlier and the later places of the same block of each size, two [S, ..., P, K].

    Args:
      with_own: whether the earlier ones include the place itself.
    """
    place = jnp.arange(x_PK.shape[-2])
    row, column = place[:, None], place[None]
    blocks = jnp.stack([row // size == column // size for size in sizes])
    is_earlier = column <= row if with_own else column < row
    masks = jnp.stack((blocks & is_earlier[None], blocks & (column > row)[None]))
    earlier, later = jnp.einsum(
        "tsij,...jk->ts...ik",
        masks.astype(x_PK.dtype),
        x_PK,
        precision=jax.lax.Precision.HIGHEST,
    )
    return earlier, later


def in_pairs(x_mcK, size: int) -> jax.Array:
    """Pairs of `size` blocks each, [..., m, c, K] → [..., m / (2 · size), 2, size · c, K]."""
    *batch, m, c, K = x_mcK.shape
    return x_mcK.reshape(*batch, m // (2 * size), 2, size * c, K)


def constant(matrix: jax.Array, like: jax.Array) -> jax.Array:
    """A matrix with the number of dims and the dtype of `like`."""
    return matrix.astype(like.dtype).reshape(*[1] * (like.ndim - 2), *matrix.shape)
