"""cuDNN's attention kernel, for NVIDIA GPUs.

JAX has no public function for packed rows or for sinks, so this file binds the primitives behind
jax.nn.dot_product_attention.

Shapes: B batch, T positions, N heads, K kv heads, H head dim, X = B · T, P documents of a pass.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .shared import Settings, compute_capability
from ..core.layers import dot
from ..core.sharding import device

NOT_SEEN = -(2.0**41)  # as in JAX; cuDNN subtracts larger numbers wrongly


class Scores(NamedTuple):
    """Static settings of the kernel's scores."""

    scale: float
    window: int | None
    causal: bool


def cudnn(settings: Settings, q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N):
    """Attention, [B, T, N, H], with sinks and windows to earlier positions, without soft caps.

    The library wants one H, a multiple of 8, so others are padded with zeros.

    Args:
      ids_BT: segment ids; equal ids of a row are neighbours. None: one segment per row.
    """
    value_dim = v_BTKH.shape[-1]
    widest = max(q_BTNH.shape[-1], value_dim)
    scale = q_BTNH.shape[-1] ** -0.5
    scores = Scores(scale=scale, window=settings.window, causal=settings.causal)
    q_BTNH, k_BTKH, v_BTKH = (
        jnp.pad(x, (*[(0, 0)] * 3, (0, widest + -widest % 8 - x.shape[-1])))
        for x in (q_BTNH, k_BTKH, v_BTKH)
    )
    out_BTNH: Any = _cudnn(scores, q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N)
    return out_BTNH[..., :value_dim]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cudnn(scores, q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N):
    return _forward(scores, q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N)[0]


def _forward(scores, q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N):
    arrays = q_BTNH, k_BTKH, v_BTKH
    if ids_BT is None or not packs():
        out, log_sum = _attend(scores, arrays, sinks_N, bias=_bias(ids_BT, q_BTNH.dtype))
        return out, (arrays, ids_BT, sinks_N, out, log_sum)

    def attend(documents: Documents):
        return _attend(scores, arrays, sinks_N, documents=documents)

    out, log_sum = attend(find_documents(ids_BT, 0))
    (out,) = _more_passes(lambda documents: attend(documents)[:1], ids_BT, (out,))
    return out, (arrays, ids_BT, sinks_N, out, log_sum)


def _backward(scores, saved, grad_BTNH):
    arrays, ids_BT, sinks_N, out, log_sum = saved
    gradients = functools.partial(_gradients, scores, arrays, sinks_N, out, grad_BTNH)
    if ids_BT is None or not packs():
        *dqkv, dsinks_N = gradients(log_sum, bias=_bias(ids_BT, grad_BTNH.dtype))
        return *dqkv, None, dsinks_N

    def of_pass(documents: Documents):
        # Rows of that many documents are rare, so their sums are computed again, not kept.
        _, log_sum = _attend(scores, arrays, sinks_N, documents=documents)
        return gradients(log_sum, documents=documents)

    grads = gradients(log_sum, documents=find_documents(ids_BT, 0))
    *dqkv, dsinks_N = _more_passes(of_pass, ids_BT, grads)
    return *dqkv, None, dsinks_N


_cudnn.defvjp(_forward, _backward)


def packs() -> bool:
    """Whether the GPU's kernel takes rows of several documents; older ones get a mask of T × T."""
    return compute_capability(device().device_kind) >= 9


# ---- several documents in a row ------------------------------------------------------------------


class Documents(NamedTuple):
    """The documents of one pass, in the order of their positions.

    After the last document, starts are X and lengths 0.
    """

    starts_P: jax.Array  # in X
    lengths_P: jax.Array
    slot_BT: jax.Array  # the document of each position, an index into P
    place_BT: jax.Array  # each position's place in its document
    seen_BT: jax.Array  # whether the position's document is in this pass


def find_documents(ids_BT, number) -> Documents:
    """The documents of pass `number`: the kernel takes P of them, so each pass has the next P."""
    B, T = ids_BT.shape
    X = B * T
    P = B * documents_per_row(T)
    first_BT = jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first_X = first_BT.reshape(X)
    position_X = jnp.arange(X)
    start_X = jax.lax.cummax(jnp.where(first_X, position_X, 0))
    slot_X = jnp.cumsum(first_X) - 1 - number * P
    seen_X = (slot_X >= 0) & (slot_X < P)
    starts_X = jnp.sort(jnp.where(first_X & (slot_X >= 0), position_X, X))
    starts = jnp.pad(starts_X, (0, P), constant_values=X)[: P + 1]  # and of the next pass
    by_position = (x.reshape(B, T) for x in (slot_X, position_X - start_X, seen_X))
    return Documents(starts[:P], jnp.diff(starts), *by_position)


def documents_per_row(T: int) -> int:
    """Documents of a row, on average, that fit into one pass.

    The kernel launches the blocks of all P documents, present or not: with 8 instead of 4, rows of
    1,024 take a quarter longer. JAX uses 1 for rows that aren't packed.
    """
    return min(max(2, T // 256), 8)


def _more_passes(run, ids_BT, results):
    """Joins the results of pass 0 with those of `run` for all others.

    Arrays [B, T, ...] are taken from the pass that sees the position; others, None or [N], added.
    """
    B, T = ids_BT.shape
    first_BT = ids_BT[:, 1:] != ids_BT[:, :-1]
    passes = (first_BT.sum() + B - 1) // (B * documents_per_row(T)) + 1

    def next_pass(state):
        number, old = state
        documents = find_documents(ids_BT, number)

        def join(old, new):
            if old.ndim == 1:
                return old + new
            return jnp.where(documents.seen_BT[..., None, None], new, old)

        return number + 1, jax.tree.map(join, old, run(documents))

    state = jnp.int32(1), results
    return jax.lax.while_loop(lambda state: state[0] < passes, next_pass, state)[1]


# ---- one call of the kernel ----------------------------------------------------------------------


def _attend(scores: Scores, arrays, sinks_N, bias=None, documents: Documents | None = None):
    """(output, logarithm of the softmax's denominator [B, N, T] or [P, N, T])."""
    library, options = _library(scores, bias, documents)
    operands = _operands(arrays, bias, documents)
    out, log_sum = library._dot_product_attention_fwd_p.bind(*operands, **options, is_training=True)
    if sinks_N is None:
        return out, log_sum
    total = jnp.logaddexp(log_sum, sinks_N.astype(jnp.float32)[None, :, None])
    share_BTN = _by_position(jnp.exp(log_sum - total), documents)
    return out * share_BTN[..., None].astype(out.dtype), total


def _gradients(
    scores: Scores, arrays, sinks_N, out_BTNH, grad_BTNH, log_sum, bias=None, documents=None
):
    """Gradients of q, k, v and the sinks; log_sum: as `_attend` returns it."""
    library, options = _library(scores, bias, documents)
    operands = _operands(arrays, bias, documents)
    dqkv = library._dot_product_attention_bwd_p.bind(
        *operands, log_sum, out_BTNH, grad_BTNH, **options
    )
    if sinks_N is None:
        return *dqkv, None
    sinks_1N1 = sinks_N.astype(jnp.float32)[None, :, None]
    share_BTN = _by_position(jnp.exp(sinks_1N1 - log_sum), documents)
    if documents is not None:
        share_BTN = jnp.where(documents.seen_BT[..., None], share_BTN, 0)
    dsinks_N = -(share_BTN * dot("BTNH,BTNH->BTN", out_BTNH, grad_BTNH)).sum((0, 1))
    return *dqkv, dsinks_N.astype(sinks_N.dtype)


def _by_position(x, documents: Documents | None):
    """[B, N, T] or [P, N, T] → [B, T, N]."""
    if documents is None:
        return x.swapaxes(1, 2)
    head_11N = jnp.arange(x.shape[1])[None, None]
    return x[documents.slot_BT[..., None], head_11N, documents.place_BT[..., None]]


def _operands(arrays, bias, documents: Documents | None):
    q_BTNH, k_BTKH, _ = arrays
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    unused = jnp.zeros(0, q_BTNH.dtype)
    lengths = offsets = key_offsets = unused
    if documents is not None:
        lengths = documents.lengths_P.astype(jnp.int32).reshape(B, -1)
        starts = documents.starts_P.astype(jnp.int32)
        starts = jnp.pad(starts, (0, B), constant_values=B * T).reshape(B, -1)  # one more a row
        offsets = starts * (N * H)  # in elements
        key_offsets = starts * (K * H)
    bias = unused if bias is None else bias
    return *arrays, bias, lengths, lengths, offsets, key_offsets, unused, unused


def _library(scores: Scores, bias, documents: Documents | None):
    """(JAX's module for cuDNN, the options of its primitives)."""
    from jax._src.cudnn import fused_attention_stablehlo as library

    masks = library.MaskType
    mask = masks.CAUSAL if scores.causal else masks.NO_MASK
    if documents is not None:
        mask = masks.PADDING_CAUSAL if scores.causal else masks.PADDING
    options: dict[str, Any] = {
        "scale": scores.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # whether there is a bias, and its gradient
        "mask_type": mask,
        "layout": library.AttentionLayout.BTNH.value,
        "sliding_window_length": scores.window,
    }
    if jax.__version_info__ >= (0, 12):
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return library, options


def _bias(ids_BT, dtype):
    """What is added to scores: [B, 1, T, T], or None without segments."""
    if ids_BT is None:
        return None
    same_B1TT = ids_BT[:, None, :, None] == ids_BT[:, None, None]
    return jnp.where(same_B1TT, 0, NOT_SEEN).astype(dtype)
