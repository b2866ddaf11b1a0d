"""State space duality (Dao & Gu 2024): the recurrence of Mamba-2 by chunks, for mamba.py.

Each head keeps a state S, which a number a decays:

    S ← a · S + k · vᵀ;   out = Sᵀq

Heads of a group share q and k. All of it is in matmuls: products within all chunks at once, what each
chunk adds to the state, and what its queries read of the state before it. Only the states themselves
are carried from chunk to chunk. A chunk of one position is the recurrence itself, which decodes.

Shapes: B batch, T positions, N heads, G groups of them, H = N / G heads of a group, K key dim, V value
dim of a head, C positions of a chunk, n chunks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .chunks import chunk_length, decays_in_segments, join_chunks, split_chunks
from .maps import ScalarMap, ScalarOutputs


def run(
    q_BTGK, k_BTGK, v_BTNV, log_decay_BTN, starts_BT, state: Any, size: int = 0
) -> tuple[Any, Any]:
    """Returns the state after all positions, and the outputs of these, [B, T, N, V].

    Args:
      starts_BT: whether a position is the first of a segment.
      size: C; 0: `chunk_length`.
      state: [B, N, K, V]; or a ScalarMap, and then what is returned is one too, with ScalarOutputs.
    """
    B, T, G, K = q_BTGK.shape
    N, V = v_BTNV.shape[2:]
    H = N // G
    is_map = isinstance(state, ScalarMap)
    split = functools.partial(split_chunks, size=size or chunk_length())
    q, k, v, log_decay = map(split, (q_BTGK, k_BTGK, v_BTNV, log_decay_BTN))

    def by_group(x):  # [n, B, N, ...] → [n, B, G, H, ...]
        return x.reshape(*x.shape[:2], G, H, *x.shape[3:])

    def by_head(x):  # back
        return x.reshape(*x.shape[:2], N, *x.shape[4:])

    since_start, pairs = decays_in_segments(log_decay, split(starts_BT.astype(jnp.int32)))
    since_start, pairs, v = map(by_group, (since_start, pairs, v))
    scores = jnp.einsum("nbgik,nbgjk->nbgij", q, k)
    out = (pairs * scores[:, :, :, None]) @ v
    until_end = pairs[..., -1, :, None]
    added = jnp.einsum("nbgck,nbghcv->nbghkv", k, until_end * v)
    keep = since_start[..., -1:, None]  # 0 if a segment starts in the chunk
    scale, offset = state if is_map else (None, state)

    def one(before, chunk):
        scale, offset = before
        keep, added = chunk
        after = None if scale is None else keep * scale, keep * offset + added
        return after, before

    start = jax.tree.map(lambda x: x.reshape(B, G, H, *x.shape[2:]), (scale, offset))
    # Unrolled: on TPUs, each turn of a loop would copy its states.
    (scale, offset), (scales, states) = jax.lax.scan(one, start, (keep, added), unroll=True)
    out += since_start[..., None] * jnp.einsum("nbgck,nbghkv->nbghcv", q, states)
    out = join_chunks(by_head(out))[:, :T]
    offset = offset.reshape(B, N, K, V)
    if not is_map:
        return offset, out
    so_far = join_chunks(by_head(since_start * scales[..., 0]))[:, :T]
    return ScalarMap(scale.reshape(B, N, 1, 1), offset), ScalarOutputs(out, q_BTGK, so_far)
