"""Attention on NVIDIA GPUs from Ampere on, by kernels that Pallas compiles with Triton.

They serve where cuDNN has no kernel. JAX 0.12 deprecates Pallas' Triton, but has nothing else for
Ampere.

Shapes: B batch, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim. Inside
kernels, T and S are those of a block; names with G are of whole rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as gpu

from .shared import NOT_SEEN, TRITON_BLOCK, Settings, compute_capability, in_window, soft_cap
from ..core.layers import dot
from ..core.sharding import device
from .splash import may_see

LARGE = (8.0, 9.0)  # compute capabilities of GPUs with more than 99 KiB of shared memory


def triton(settings: Settings, q_BNTH, kv, ids_BT, offset):
    """Keeps scores on chip, and visits blocks from the first to the last that a row's queries see.

    Returns what `flash.flash` does.
    """
    q, k, v = map(_pad, (q_BNTH, *kv[:2]))
    ids_T, ids_S = ids_BT[:, None], kv[2][:, None]
    out, log_sum = _call(
        functools.partial(_attention, settings, q_BNTH.shape[-1] ** -0.5),
        _visits(settings, ids_BT, kv[2], offset, size := _block_size(q, v, forward=True)),
        blocks=(ids_T, q),
        rows=(ids_S, k, v),
        results=((*q.shape[:3], v.shape[-1]), q.shape[:3]),
        size=size,
    )
    return out[..., : kv[1].shape[-1]], log_sum


def triton_gradients(
    settings: Settings, q_BNTH, kv, ids_BT, offset, out_BNTH, log_sum_BNT, grad_BNTH
):
    """`flash.flash_gradients`, by one kernel for dQ and another for dK and dV."""
    H = q_BNTH.shape[-1]
    q, k, v, grad = map(_pad, (q_BNTH, *kv[:2], grad_BNTH))
    size = _block_size(q, v)
    queries = ids_BT[:, None], q, grad, log_sum_BNT, dot("BNTH,BNTH->BNT", out_BNTH, grad_BNTH)
    keys = kv[2][:, None], k, v
    (dq,) = _call(
        functools.partial(_attention_dq, settings, H**-0.5),
        _visits(settings, ids_BT, kv[2], offset, size),
        blocks=queries,
        rows=keys,
        results=(q.shape,),
        size=size,
    )
    dk, dv = _call(
        functools.partial(_attention_dkv, settings, H**-0.5),
        _visits(settings, ids_BT, kv[2], offset, size, by_key=True),
        blocks=keys,
        rows=queries,
        results=(k.shape, v.shape),
        size=size,
    )
    return dq[..., :H], dk[..., :H], dv[..., : kv[1].shape[-1]]


def _pad(x_BNTH):
    """Triton wants powers of two, from 16 on for products."""
    H = x_BNTH.shape[-1]
    return jnp.pad(x_BNTH, (*[(0, 0)] * 3, (0, max(16, pl.next_power_of_2(H)) - H)))


def _block_size(*arrays, forward: bool = False) -> int:
    """Positions of a block: with more, registers would spill, or shared memory not be enough."""
    itemsize = arrays[0].dtype.itemsize
    large = forward and compute_capability(device().device_kind) in LARGE
    most = (32_768 if large else 16_384) // itemsize  # numbers
    return max(16, min(2 * TRITON_BLOCK // itemsize, most // max(x.shape[-1] for x in arrays)))


def _visits(settings: Settings, ids_BT, ids_BS, offset, size: int, by_key: bool = False):
    """For each block of queries: (first block of keys, end, offset, 0), [B, T/size, 4].

    by_key: for each block of keys, the blocks of queries.
    """

    def of_row(ids_T, ids_S):
        return may_see(settings.window, ids_T[None], ids_S[None], offset, size, settings.causal)

    seen = jax.vmap(of_row)(ids_BT, ids_BS)
    seen = seen.swapaxes(1, 2) if by_key else seen
    first = seen.argmax(-1)
    end = jnp.where(seen.any(-1), seen.shape[-1] - seen[..., ::-1].argmax(-1), 0)
    return jnp.stack([first, end, jnp.full_like(first, offset), jnp.zeros_like(first)], axis=-1)


def _call(kernel, visits, blocks, rows, results, size: int):
    """Runs a program for each block of positions, head and row.

    Args:
      blocks: arrays [B, heads or 1, T, ...] of which a program gets a block of its head, [T, ...].
      rows: such arrays of which it gets all positions, [G, T, ...]; G is 1 for fewer heads.
      results: shapes of float32 arrays like `blocks`.
    """
    B, programs, T = results[0][:3]

    def part(x, all_positions: bool = False):
        heads = x.shape[1]
        G = max(1, heads // programs)
        dims = (G, x.shape[2]) if all_positions else (None, size)
        rest = x.shape[3:]

        def place(i, n, b):
            return (
                b,
                n * heads // programs // (G if all_positions else 1),
                0 if all_positions else i,
                *[0] * len(rest),
            )

        return pl.BlockSpec((None, *dims, *rest), place)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    visit = pl.BlockSpec((None, None, 4), lambda i, n, b: (b, i, 0))
    run = pl.pallas_call(
        kernel,
        grid=(T // size, programs, B),
        in_specs=[visit, *map(part, blocks), *(part(x, all_positions=True) for x in rows)],
        out_specs=[part(x) for x in shapes],
        out_shape=shapes,
        compiler_params=gpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=device().platform == "cpu",
    )
    return run(visits, *blocks, *rows)


# ---- kernels, of references; traces show their names ---------------------------------------------


def _attention(settings, scale, visit, ids_T, q_TH, ids_GS, k_GSH, v_GSH, out_TH, log_sum_T):
    i = pl.program_id(0)
    size = ids_T.shape[0]

    def add_block(j, sums):
        most, total, out = sums
        at = pl.ds(j * size, size)
        age = (i - j) * size + visit[2]
        scores, seen = _scores(
            settings, scale, q_TH[...], k_GSH[0, at], ids_T[...], ids_GS[0, at], age
        )
        scores = jnp.where(seen, scores, NOT_SEEN)
        higher = jnp.maximum(most, scores.max(1))
        weights = jnp.exp(scores - higher[:, None])
        decay = jnp.exp(most - higher)
        v = v_GSH[0, at]
        out = out * decay[:, None] + _dot(weights.astype(v.dtype), v)
        return higher, total * decay + weights.sum(1), out

    zeros_T = jnp.zeros(log_sum_T.shape)
    sums = zeros_T + NOT_SEEN, zeros_T, jnp.zeros(out_TH.shape)
    most, total, out = jax.lax.fori_loop(visit[0], visit[1], add_block, sums)
    total = jnp.where(total > 0, total, 1)
    out_TH[...] = out / total[:, None]
    log_sum_T[...] = most + jnp.log(total)


def _attention_dq(settings, scale, visit, *references):
    *queries, ids_GS, k_GSH, v_GSH, dq_TH = references
    i = pl.program_id(0)
    size = dq_TH.shape[0]

    def add_block(j, dq):
        at = pl.ds(j * size, size)
        age = (i - j) * size + visit[2]
        keys = ids_GS[0, at], k_GSH[0, at], v_GSH[0, at]
        _, dscores = _weights(settings, scale, [x[...] for x in queries], keys, age)
        return dq + _dot(dscores, keys[1])

    dq_TH[...] = jax.lax.fori_loop(visit[0], visit[1], add_block, jnp.zeros(dq_TH.shape))


def _attention_dkv(settings, scale, visit, *references):
    *keys, ids_GT, q_GTH, grad_GTH, log_sum_GT, inner_GT, dk_SH, dv_SH = references
    j = pl.program_id(0)
    size, G = dk_SH.shape[0], q_GTH.shape[0]

    def add_block(number, sums):
        dk, dv = sums
        i, g = jax.lax.div(number, G), jax.lax.rem(number, G)
        at = pl.ds(i * size, size)
        age = (i - j) * size + visit[2]
        queries = ids_GT[0, at], *(x[g, at] for x in (q_GTH, grad_GTH, log_sum_GT, inner_GT))
        weights, dscores = _weights(settings, scale, queries, [x[...] for x in keys], age)
        _, q, grad, *_ = queries
        return dk + _dot(dscores.T, q), dv + _dot(weights.astype(grad.dtype).T, grad)

    sums = jnp.zeros(dk_SH.shape), jnp.zeros(dv_SH.shape)
    dk_SH[...], dv_SH[...] = jax.lax.fori_loop(visit[0] * G, visit[1] * G, add_block, sums)


def _weights(settings, scale, queries, keys, age):
    """(weights, float32; gradients of the products of q and k, in the dtype of keys)."""
    ids_T, q_TH, grad_TH, log_sum_T, inner_T = queries
    ids_S, k_SH, v_SH = keys
    scores, seen = _scores(settings, scale, q_TH, k_SH, ids_T, ids_S, age)
    weights = jnp.exp(jnp.where(seen, scores, NOT_SEEN) - log_sum_T[:, None])
    dscores = weights * (_dot(grad_TH, v_SH.T) - inner_T[:, None])
    if settings.soft_cap is not None:
        dscores *= 1 - jnp.square(scores / settings.soft_cap)
    return weights, (dscores * scale).astype(k_SH.dtype)


def _scores(settings, scale, q_TH, k_SH, ids_T, ids_S, age):
    """(scores, which of them are seen); age: positions from the first key to the first query."""
    scores = soft_cap(_dot(q_TH, k_SH.T) * scale, settings.soft_cap)
    age_TS = age + jnp.arange(len(ids_T))[:, None] - jnp.arange(len(ids_S))[None]
    seen = in_window(age_TS if settings.causal else abs(age_TS), settings.window)
    return scores, seen & (ids_T[:, None] == ids_S[None])


def _dot(x, y):
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
