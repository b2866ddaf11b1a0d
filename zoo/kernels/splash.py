"""Splash attention: JAX's Pallas kernel for TPUs.

Shapes: B batch, T positions, N heads, H head dim.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .shared import NOT_SEEN, Settings, block_of, in_window
from ..core.sharding import device

COMPUTED = 512  # most keys of a block whose scores are computed at a time
PARTIAL = 8  # most blocks of keys for which a fused backward kernel keeps a partial dQ


def splash(settings: Settings, q_BNTH, kv, ids_BT, offset):
    """Keeps scores on chip. Skips blocks in which no row's query sees a key, and doesn't load them.

    Returns what `flash.flash` does.

    Peak memory of 8b with 4 layers, fsdp, a row of 32,768 on each of 16 v5p: 9.8 GB (XLA: 95.4).
    """
    tpu, masks, options = _splash(settings, ids_BT, kv[2], offset)
    kernel = tpu.SplashAttentionKernel(*masks, **options)
    ids = tpu.SegmentIds(ids_BT, kv[2])
    out, (log_sum,) = jax.vmap(kernel)(q_BNTH * q_BNTH.shape[-1] ** -0.5, *kv[:2], ids)
    if not settings.blind:
        return out, log_sum
    nothing = log_sum < NOT_SEEN  # the kernel divides by zero
    return jnp.where(nothing[..., None], 0, out), jnp.maximum(log_sum, NOT_SEEN)


def splash_gradients(
    settings: Settings, q_BNTH, kv, ids_BT, offset, out_BNTH, log_sum_BNT, grad_BNTH
):
    """`flash.flash_gradients`, by one kernel for dK and dV, and for dQ too or by another.

    A fused kernel computes scores once, not twice, and keeps a dQ for each block of keys: 0.5 GB for
    32 heads and a row of 8,192, 17 GB for one of 32,768 in blocks of 512. So only short rows use it,
    and none with windows: it sums blocks that it doesn't visit, too.
    """
    tpu, (_, *masks), options = _splash(settings, ids_BT, kv[2], offset)

    def gradients(grad, *saved):
        return tpu._splash_attention_bwd(*options.values(), (*saved, *masks), grad)[3:6]

    scale = q_BNTH.shape[-1] ** -0.5
    ids = tpu.SegmentIds(ids_BT, kv[2])
    saved = (q_BNTH * scale, *kv[:2], ids, None, out_BNTH, log_sum_BNT)
    dq, dk, dv = jax.vmap(gradients)(grad_BNTH, *saved)
    return dq * scale, dk, dv


def count_partial_gradients(T: int, window: int | None, causal: bool = True) -> int:
    """Number of dQ that the backward pass keeps, one for each block of keys; 0 if it isn't fused."""
    tiles = T // block_of(T, window)
    return tiles if visited_blocks(T, window, causal) == tiles <= PARTIAL else 0


def visited_blocks(T: int, window: int | None, causal: bool = True) -> int:
    """Most blocks of keys that a block of queries sees."""
    size = block_of(T, window)
    tiles = T // size
    if window is None:
        return tiles
    sides = 1 if causal else 2
    return min(tiles, sides * -(-(window - 1) // size) + 1)


def _splash(settings: Settings, ids_BT, ids_BS, offset):
    """(the library, its masks for outputs, dQ, and dK with dV, its options).

    The compiled program makes the masks; on the host that takes 79 s for a row of 131,072. All rows
    share them: the kernel takes one mask, and a call for each row would copy arrays.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as tpu

    T = ids_BT.shape[1]
    window = settings.window
    size = block_of(T, window)
    tiles = T // size
    causal = settings.causal
    visited = visited_blocks(T, window, causal)
    own = jnp.arange(tiles)
    other = jnp.arange(visited)
    sees = may_see(window, ids_BT, ids_BS, offset, size, causal)

    def mask(loads, seen):
        """Blocks to load and whether to compute them, in the order of the kernel's grid."""
        small = jnp.int8 if tiles <= 128 else jnp.int16  # scalar memory is scarce
        positions_T = jnp.arange(T, dtype=jnp.int32) + offset
        masks = (loads[None].astype(small), None, seen[None].astype(jnp.int8), None, positions_T)
        return tpu.mask_info_lib.MaskInfo(*masks)  # pyright: ignore[reportPrivateImportUsage]

    first = 0 * own if window is None else (own * size + offset - window + 1) // size
    key = jnp.clip(first, 0, tiles - visited)[:, None] + other[None]
    ahead = 0 if causal or window is None else window - 1
    query = (
        jnp.clip((own * size - offset - ahead) // size, 0, tiles - visited)[None] + other[:, None]
    )
    seen = sees[own[:, None], key]
    by_query = mask(_loads(key, seen), seen)
    seen = sees[query, own[None]]
    by_key = mask(_loads(query.T, seen.T, axis=1).T, seen)  # heads come between blocks of keys
    is_fused = count_partial_gradients(T, window, causal) > 0
    names = ("q", "kv", "q_dkv", "kv_dkv", *(() if is_fused else ("q_dq", "kv_dq")))
    blocks: dict[str, Any] = {f"block_{name}": size for name in names}
    computed = COMPUTED if size % COMPUTED == 0 else size
    blocks |= {"block_kv_compute": computed, "block_kv_dkv_compute": computed}
    options = {  # in the order of the backward function's arguments
        "save_residuals": True,
        "mask_value": tpu.DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "block_sizes": tpu.BlockSizes(**blocks, use_fused_bwd_kernel=is_fused),
        "residual_checkpoint_name": None,
        "mask_function": lambda q, k: in_window(q - k if causal else abs(q - k), window),
        "attn_logits_soft_cap": settings.soft_cap,
        "interpret": device().platform == "cpu",
    }
    return tpu, (by_query, by_query, by_key), options


def may_see(
    window: int | None, ids_BT, ids_BS, offset, size: int, causal: bool = True
) -> jax.Array:
    """Which blocks of queries and keys may see each other in some row: bool [T/size, S/size].

    Compares the ranges of their ids: exact for packed rows, whose ids ascend; otherwise some blocks
    may see each other that don't. The arguments are those of `splash`.
    """

    def ranges(ids):
        # Padding ends a row, with id 0. As the highest id, it leaves the range of other blocks alone.
        blocks = (ids - 1).astype(jnp.uint32).reshape(len(ids), -1, size)
        return blocks.min(-1), blocks.max(-1)

    (low_BQ, high_BQ), (low_BK, high_BK) = ranges(ids_BT), ranges(ids_BS)
    share = (low_BQ[:, :, None] <= high_BK[:, None]) & (low_BK[:, None] <= high_BQ[:, :, None])
    Q, K = share.shape[1:]
    age = (jnp.arange(Q)[:, None] - jnp.arange(K)[None]) * size + offset  # between their starts
    seen = in_window(age if causal else abs(age), window, size - 1)
    return seen & (share.sum(0) > 0)


def _loads(visit, seen, axis=None):
    """The block that each step of a grid loads: the next one to be computed, so that it arrives in time.

    After the last computed one, of the whole grid or along the axis, steps keep that block. So skipped
    blocks are never loaded.
    """
    steps = jnp.arange(seen.size).reshape(seen.shape)
    last = jnp.where(seen, steps, 0).max(axis, keepdims=True)
    coming = jax.lax.cummin(jnp.where(seen, steps, seen.size).ravel(), reverse=True)
    return visit.ravel()[jnp.minimum(coming.reshape(seen.shape), last)]
