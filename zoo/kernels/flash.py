"""Attention block by block: `flash`, for any platform, and derivatives, of splash.py and triton.py too.

Shapes: B batch, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim. In
tiles, X = B · K.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .shared import NOT_SEEN, TRITON_BLOCK, Settings, in_window, soft_cap
from ..core.layers import dot

TILE = 512  # queries, and keys, of one step of `flash`


def attend_by_blocks(kernel: str, settings, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    """One device's part of attention.attend by one of choice.JOINABLE: [B, T, N, H]."""
    T = settings.positions
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros(q_BTNH.shape[:2], jnp.int32)
    # Whole tiles; the padding is a segment of its own.
    size = {"flash": min(T, TILE), "triton": TRITON_BLOCK}.get(kernel, 1)
    pad = (0, -T % size)
    ids_BT = jnp.pad(segment_ids_BT, ((0, 0), pad), constant_values=jnp.iinfo(jnp.int32).min)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), pad, (0, 0))) for x in heads_first)
    out: Any = _attend(kernel, settings, q, (k, v, ids_BT), sinks_N)
    return out[:, :, :T].swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel, settings, q_BNTH, kv, sinks_N):
    return _attend_forward(kernel, settings, q_BNTH, kv, sinks_N)[0]


def _attend_forward(kernel, settings, q_BNTH, kv, sinks_N):
    output, _ = _functions(kernel, settings)
    out, log_sum = output(settings, q_BNTH, kv, kv[2], jnp.int32(0))
    if sinks_N is not None:
        total = jnp.logaddexp(log_sum, sinks_N.astype(jnp.float32)[None, :, None])
        out = out * jnp.exp(log_sum - total)[..., None]
        log_sum = total
    out = out.astype(q_BNTH.dtype)
    return out, (q_BNTH, kv, sinks_N, out, log_sum)


def _attend_backward(kernel, settings, saved, grad):
    q_BNTH, kv, sinks_N, out, log_sum = saved
    _, gradients = _functions(kernel, settings)
    dq, dk, dv = gradients(settings, q_BNTH, kv, kv[2], jnp.int32(0), out, log_sum, grad)
    dsinks_N = None
    if sinks_N is not None:
        share_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - log_sum)
        dsinks_N = -(share_BNT * dot("BNTH,BNTH->BNT", out, grad)).sum((0, 2))
        dsinks_N = dsinks_N.astype(sinks_N.dtype)
    dkv = dk.astype(kv[0].dtype), dv.astype(kv[1].dtype), None
    return dq.astype(q_BNTH.dtype), dkv, dsinks_N


_attend.defvjp(_attend_forward, _attend_backward)


def _functions(kernel, settings):
    """Forward and backward functions of a kernel, wrapped for a ring if needed."""
    output, gradients = flash, flash_gradients
    if kernel == "splash":
        from .splash import splash, splash_gradients

        output, gradients = splash, splash_gradients
    elif kernel == "triton":
        from .triton import triton, triton_gradients

        output, gradients = triton, triton_gradients
    return settings.around(output, gradients) if settings.around else (output, gradients)


def flash(settings: Settings, q_BNTH, kv, ids_BT, offset):
    """For any platform: computes scores tile by tile, and none where all are masked.

    Memory is linear in T (Rabe & Staats 2021, Dao et al. 2022).

    Args:
      kv: (k_BKSH, v_BKSH, ids_BS).
      offset: query i sees key j if 0 ≤ i + offset - j < window, or its absolute value is, if not
        settings.causal.

    Returns: (output [B, N, T, H], logarithm of the softmax's denominator [B, N, T]), float32.
    """

    def tile(seen_XT1S, queries, keys, sums, key_sums):
        (q_XTGH,) = queries
        k_XSH, v_XSH = keys
        most, total, out = sums
        scores = jnp.where(seen_XT1S, _scores(settings, q_XTGH, k_XSH), NOT_SEEN)
        higher = jnp.maximum(most, scores.max(-1))
        weights = jnp.exp(scores - higher[..., None])
        decay = jnp.exp(most - higher)
        out = out * decay[..., None] + dot("XTGS,XSH->XTGH", weights.astype(v_XSH.dtype), v_XSH)
        return [higher, total * decay + weights.sum(-1), out], key_sums

    zeros_BNT = jnp.zeros(q_BNTH.shape[:3])
    sums = zeros_BNT + NOT_SEEN, zeros_BNT, jnp.zeros((*zeros_BNT.shape, kv[1].shape[-1]))
    (most, total, out), _ = _over_tiles(settings, tile, (q_BNTH,), kv, ids_BT, offset, sums, ())
    total = jnp.where(total > 0, total, 1)
    return out / total[..., None], most + jnp.log(total)


def flash_gradients(
    settings: Settings, q_BNTH, kv, ids_BT, offset, out_BNTH, log_sum_BNT, grad_BNTH
):
    """Gradients of q, k and v, float32. The last three arguments are of the output by all keys."""

    def tile(seen_XT1S, queries, keys, query_sums, key_sums):
        q_XTGH, grad, log_sum, inner = queries
        k_XSH, v_XSH = keys
        (dq,) = query_sums
        dk, dv = key_sums
        scores = _scores(settings, q_XTGH, k_XSH)
        weights = jnp.exp(jnp.where(seen_XT1S, scores, NOT_SEEN) - log_sum[..., None])
        dscores = weights * (dot("XTGH,XSH->XTGS", grad, v_XSH) - inner[..., None])
        if settings.soft_cap is not None:
            dscores *= 1 - jnp.square(scores / settings.soft_cap)
        dscores = (dscores * q_XTGH.shape[-1] ** -0.5).astype(k_XSH.dtype)
        dk += dot("XTGS,XTGH->XSH", dscores, q_XTGH)
        dv += dot("XTGS,XTGH->XSH", weights.astype(grad.dtype), grad)
        return [dq + dot("XTGS,XSH->XTGH", dscores, k_XSH)], [dk, dv]

    queries = q_BNTH, grad_BNTH, log_sum_BNT, dot("BNTH,BNTH->BNT", out_BNTH, grad_BNTH)
    dq, *dkv = (jnp.zeros(x.shape) for x in (q_BNTH, *kv[:2]))
    (dq,), dkv = _over_tiles(settings, tile, queries, kv, ids_BT, offset, (dq,), dkv)
    return dq, *dkv


def _over_tiles(settings: Settings, tile, queries, kv, ids_BT, offset, query_sums, key_sums):
    """Runs `tile` for each pair of TILE queries and TILE keys in which a query attends to a key.

    queries and query_sums are arrays [B, N, T, ...], in tiles [X, T, G, ...]; keys and key_sums are
    [B, K, S, ...], in tiles [X, S, ...]. `tile` takes the mask and tiles of all four, and returns
    new tiles of both sums. Returns both sums.
    """
    *keys, ids_BS = kv
    # Otherwise JAX hoists all masks out of the layer loop: T² bits.
    queries, ids_BS, ids_BT, offset = jax.lax.optimization_barrier(
        (queries, ids_BS, ids_BT, offset)
    )
    B, N, T = queries[0].shape[:3]
    K = keys[0].shape[1]
    size = min(TILE, T)
    X = B * K
    G = N // K
    window = settings.window

    def cut_keys(x):  # [B, K, S, ...] → [tiles, X, S, ...]
        return x.reshape(X, T // size, size, *x.shape[3:]).swapaxes(0, 1)

    def cut_queries(x):
        return jnp.moveaxis(x.reshape(X, G, T // size, size, *x.shape[3:]), (2, 3), (0, 2))

    def tiles_of(pair, queries, keys):
        return [x[pair[0]] for x in queries], [x[pair[1]] for x in keys]

    def visit_pair(sums, pair):
        i, j = pair
        age_TS = (i - j) * size + offset + jnp.arange(size)[:, None] - jnp.arange(size)[None]
        seen_TS = in_window(age_TS if settings.causal else abs(age_TS), window)
        seen_XTS = seen_TS[None] & (ids_T[i][:, :, None] == ids_S[j][:, None])
        run = functools.partial(tile, seen_XTS[:, :, None], *tiles_of(pair, queries, keys))
        new_tiles = jax.lax.cond(
            seen_XTS.any(), run, lambda *unchanged: unchanged, *tiles_of(pair, *sums)
        )
        for n, arrays, new in zip(pair, sums, new_tiles, strict=True):
            arrays[:] = [x.at[n].set(y) for x, y in zip(arrays, new, strict=True)]
        return sums, None

    queries = [cut_queries(x) for x in queries]
    query_sums = [cut_queries(x) for x in query_sums]
    keys = [cut_keys(x) for x in keys]
    key_sums = [cut_keys(x) for x in key_sums]
    ids_S, ids_T = (cut_keys(jnp.repeat(x[:, None], K, axis=1)) for x in (ids_BS, ids_BT))
    back = T if window is None else -(-(window - 1) // size)
    tiles = range(T // size)
    ahead = 0 if settings.causal else back
    pairs = [(i, j) for i in tiles for j in tiles if settings.ring or -ahead <= i - j <= back]
    (query_sums, key_sums), _ = jax.lax.scan(visit_pair, (query_sums, key_sums), jnp.array(pairs))
    query_sums = [
        jnp.moveaxis(x, (0, 2), (2, 3)).reshape(B, N, T, *x.shape[4:]) for x in query_sums
    ]
    return query_sums, [x.swapaxes(0, 1).reshape(B, K, T, *x.shape[3:]) for x in key_sums]


def _scores(settings: Settings, q_XTGH, k_XSH):
    scores = dot("XTGH,XSH->XTGS", q_XTGH, k_XSH) * q_XTGH.shape[-1] ** -0.5
    return soft_cap(scores, settings.soft_cap)
