"""Attention on NVIDIA GPUs from Ampere on, by kernels that Pallas compiles with Triton.

flash.py uses this file where cuDNN has no kernel, so a model can be copied without it for other
devices. JAX 0.12 deprecates Pallas' Triton; for Ampere there is nothing else yet.

Shapes: B batch, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim. Inside
kernels T and S are those of a block, but for references to whole rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .kernels import NOT_SEEN, TRITON_BLOCK, Settings, in_window
from .layers import dot, soft_cap
from .sharding import device
from .splash import may_see


def triton(settings: Settings, q_BNTH, kv, ids_BT, offset):
    """Keeps scores on chip, and loads only blocks of keys between the first and the last that a row's
    queries see.

    Returns what `flash.flash` does.
    """
    k_BKSH, v_BKSH, ids_BS = kv
    B, N, T = q_BNTH.shape[:3]
    G = N // k_BKSH.shape[1]
    seen_BTS = _seen_blocks(settings, ids_BT, ids_BS, offset)
    keys = functools.partial(_rows, shared_by=G)
    q, k, v = map(_pad, (q_BNTH, k_BKSH, v_BKSH))
    out, log_sum = _call(
        functools.partial(_output, settings, q_BNTH.shape[-1] ** -0.5),
        (offset[None], *_ranges(seen_BTS), ids_BT, ids_BS, q, k, v),
        (_ONE, _NUMBER, _NUMBER, _IDS, _all_ids(ids_BS), _block(q), keys(k), keys(v)),
        grid=(T // TRITON_BLOCK, N, B),
        results=((B, N, T, v.shape[-1]), (B, N, T)),
    )
    return out[..., : v_BKSH.shape[-1]], log_sum


def triton_gradients(
    settings: Settings, q_BNTH, kv, ids_BT, offset, out_BNTH, log_sum_BNT, grad_BNTH
):
    """`flash.flash_gradients`, by one kernel for dQ and another for dK and dV."""
    k_BKSH, v_BKSH, ids_BS = kv
    (B, N, T, H), (K, S) = q_BNTH.shape, k_BKSH.shape[1:3]
    G = N // K
    seen_BTS = _seen_blocks(settings, ids_BT, ids_BS, offset)
    inner_BNT = dot("BNTH,BNTH->BNT", out_BNTH, grad_BNTH)
    q, k, v, grad = map(_pad, (q_BNTH, k_BKSH, v_BKSH, grad_BNTH))
    arrays = ids_BT, ids_BS, q, k, v, grad, log_sum_BNT, inner_BNT
    keys = functools.partial(_rows, shared_by=G)
    (dq,) = _call(
        functools.partial(_query_gradient, settings, H**-0.5),
        (offset[None], *_ranges(seen_BTS), *arrays),
        (_ONE, _NUMBER, _NUMBER, _IDS, _all_ids(ids_BS), _block(q), keys(k), keys(v), _block(grad),
         _block(log_sum_BNT), _block(inner_BNT)),
        grid=(T // TRITON_BLOCK, N, B),
        results=(q.shape,),
    )  # fmt: skip
    queries = functools.partial(_rows, heads=G)
    dk, dv = _call(
        functools.partial(_key_gradients, settings, H**-0.5),
        (offset[None], *_ranges(seen_BTS.swapaxes(1, 2)), *arrays),
        (_ONE, _NUMBER, _NUMBER, _all_ids(ids_BT), _IDS, queries(q), _block(k), _block(v),
         queries(grad), queries(log_sum_BNT), queries(inner_BNT)),
        grid=(S // TRITON_BLOCK, K, B),
        results=(k.shape, v.shape),
    )  # fmt: skip
    return dq[..., :H], dk[..., :H], dv[..., : v_BKSH.shape[-1]]


# ---- calls: a program for each block of positions, head and row ----------------------------------

_ONE = pl.BlockSpec((None,), lambda i, n, b: (0,))
_NUMBER = pl.BlockSpec((None, None), lambda i, n, b: (b, i))  # of the block
_IDS = pl.BlockSpec((None, TRITON_BLOCK), lambda i, n, b: (b, i))


def _all_ids(ids_BT):
    return pl.BlockSpec((None, ids_BT.shape[1]), lambda i, n, b: (b, 0))


def _block(x):
    """The program's block of [B, N, T, ...]."""
    rest = x.shape[3:]
    return pl.BlockSpec(
        (None, None, TRITON_BLOCK, *rest), lambda i, n, b: (b, n, i, *[0] * len(rest))
    )


def _rows(x, shared_by: int = 1, heads: int | None = None):
    """All positions of [B, N, T, ...], of one head or several.

    Args:
      shared_by: how many programs in a row have the same head.
      heads: of a program; None: one, without a dim of its own.
    """
    rest = x.shape[2:]
    return pl.BlockSpec(
        (None, heads, *rest), lambda i, n, b: (b, n // shared_by, *[0] * len(rest))
    )


def _call(kernel, arrays, specs, grid, results):
    """Runs `kernel` for each place of the grid; results: shapes of float32 arrays in blocks."""
    from jax.experimental.pallas import triton as gpu

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    width = max(x.shape[3] for x in arrays if x.ndim == 4)
    run = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=specs,
        out_specs=[_block(x) for x in shapes],
        out_shape=shapes,
        compiler_params=gpu.CompilerParams(num_warps=4 if width <= 128 else 8, num_stages=2),
        interpret=device().platform == "cpu",
    )
    return run(*arrays)


def _pad(x_BNTH):
    """Triton wants powers of two, from 16 on for products."""
    H = x_BNTH.shape[-1]
    return jnp.pad(x_BNTH, (*[(0, 0)] * 3, (0, max(16, pl.next_power_of_2(H)) - H)))


def _seen_blocks(settings: Settings, ids_BT, ids_BS, offset):
    def of_row(ids_T, ids_S):
        blocks = settings.window, ids_T[None], ids_S[None], offset, TRITON_BLOCK, settings.causal
        return may_see(*blocks)

    return jax.vmap(of_row)(ids_BT, ids_BS)


def _ranges(seen_BTS):
    """(the first block of S that each of T sees, the one after the last), [B, T]."""
    S = seen_BTS.shape[-1]
    first_BT = seen_BTS.argmax(-1)
    last_BT = S - seen_BTS[..., ::-1].argmax(-1)
    return first_BT, jnp.where(seen_BTS.any(-1), last_BT, 0)


# ---- kernels: their arguments are references -----------------------------------------------------


def _output(
    settings, scale, offset, first, last, ids_T, ids_S, q_TH, k_SH, v_SH, out_TH, log_sum_T
):
    i = pl.program_id(0)

    def add_block(j, sums):
        most, total, out = sums
        at = pl.ds(j * TRITON_BLOCK, TRITON_BLOCK)
        age = (i - j) * TRITON_BLOCK + offset[...]
        scores, seen = _scores(settings, scale, q_TH[...], k_SH[at, :], ids_T[...], ids_S[at], age)
        scores = jnp.where(seen, scores, NOT_SEEN)
        higher = jnp.maximum(most, scores.max(1))
        weights = jnp.exp(scores - higher[:, None])
        decay = jnp.exp(most - higher)
        v = v_SH[at, :]
        out = out * decay[:, None] + _dot(weights.astype(v.dtype), v)
        return higher, total * decay + weights.sum(1), out

    zeros_T = jnp.zeros(log_sum_T.shape)
    sums = zeros_T + NOT_SEEN, zeros_T, jnp.zeros(out_TH.shape)
    most, total, out = jax.lax.fori_loop(first[...], last[...], add_block, sums)
    total = jnp.where(total > 0, total, 1)
    out_TH[...] = out / total[:, None]
    log_sum_T[...] = most + jnp.log(total)


def _query_gradient(
    settings, scale, offset, first, last, ids_T, ids_S, q_TH, k_SH, v_SH, grad_TH, log_sum_T,
    inner_T, dq_TH,
):  # fmt: skip
    i = pl.program_id(0)

    def add_block(j, dq):
        at = pl.ds(j * TRITON_BLOCK, TRITON_BLOCK)
        age = (i - j) * TRITON_BLOCK + offset[...]
        queries = q_TH[...], grad_TH[...], log_sum_T[...], inner_T[...], ids_T[...]
        k = k_SH[at, :]
        _, dscores = _weights(settings, scale, queries, k, v_SH[at, :], ids_S[at], age)
        return dq + _dot(dscores, k)

    dq_TH[...] = jax.lax.fori_loop(first[...], last[...], add_block, jnp.zeros(dq_TH.shape))


def _key_gradients(
    settings, scale, offset, first, last, ids_T, ids_S, q_GTH, k_SH, v_SH, grad_GTH, log_sum_GT,
    inner_GT, dk_SH, dv_SH,
):  # fmt: skip
    j = pl.program_id(0)
    G = q_GTH.shape[0]

    def add_block(number, sums):
        dk, dv = sums
        i = jax.lax.div(number, G)
        g = jax.lax.rem(number, G)
        at = pl.ds(i * TRITON_BLOCK, TRITON_BLOCK)
        age = (i - j) * TRITON_BLOCK + offset[...]
        q = q_GTH[g, at, :]
        grad = grad_GTH[g, at, :]
        queries = q, grad, log_sum_GT[g, at], inner_GT[g, at], ids_T[at]
        weights, dscores = _weights(
            settings, scale, queries, k_SH[...], v_SH[...], ids_S[...], age
        )
        return dk + _dot(dscores.T, q), dv + _dot(weights.astype(grad.dtype).T, grad)

    sums = jnp.zeros(dk_SH.shape), jnp.zeros(dv_SH.shape)
    dk_SH[...], dv_SH[...] = jax.lax.fori_loop(first[...] * G, last[...] * G, add_block, sums)


def _weights(settings, scale, queries, k_SH, v_SH, ids_S, age):
    """(weights, float32; gradients of unscaled scores without a cap, in the dtype of keys)."""
    q_TH, grad_TH, log_sum_T, inner_T, ids_T = queries
    scores, seen = _scores(settings, scale, q_TH, k_SH, ids_T, ids_S, age)
    weights = jnp.exp(jnp.where(seen, scores, NOT_SEEN) - log_sum_T[:, None])
    dscores = weights * (_dot(grad_TH, v_SH.T) - inner_T[:, None])
    if settings.soft_cap is not None:
        dscores *= 1 - jnp.square(scores / settings.soft_cap)
    return weights, (dscores * scale).astype(k_SH.dtype)


def _scores(settings, scale, q_TH, k_SH, ids_T, ids_S, age):
    """(scores, which of them are seen); age: of the block's first key, for its first query."""
    scores = soft_cap(_dot(q_TH, k_SH.T) * scale, settings.soft_cap)
    age_TS = age + jnp.arange(len(ids_T))[:, None] - jnp.arange(len(ids_S))[None]
    seen = in_window(age_TS if settings.causal else abs(age_TS), settings.window)
    return scores, seen & (ids_T[:, None] == ids_S[None])


def _dot(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
