"""cuDNN's attention by the contract of JAX's primitives, in plain XLA, so that CPUs can test zoo/kernels/cudnn.py.

What the library leaves undefined is NaN here: outputs, gradients and sums of positions without a document.
"""

import types

import jax
import jax.numpy as jnp
import pytest

from zoo.kernels import cudnn as zoo


def use_xla(monkeypatch: pytest.MonkeyPatch, packs: bool = True, documents: int = 0) -> None:
    """Puts XLA in cuDNN's place.

    Args:
      packs: whether the kernel takes packed rows, as from Hopper on.
      documents: of a row in one pass, on average; 0: as on a GPU.
    """
    original = zoo._library

    def library(*arguments):
        _, options = original(*arguments)
        primitives = {
            "_dot_product_attention_fwd_p": _forward,
            "_dot_product_attention_bwd_p": _backward,
        }
        fake = {name: types.SimpleNamespace(bind=bind) for name, bind in primitives.items()}
        return types.SimpleNamespace(**fake), options

    monkeypatch.setattr(zoo, "_library", library)
    monkeypatch.setattr(zoo, "packs", lambda: packs)
    if documents:
        monkeypatch.setattr(zoo, "documents_per_row", lambda T: documents)


def _documents(array_BTNH, lengths, offsets):
    """(the document of each position in B · T, or -1; first positions and lengths of documents)."""
    B, T, N, H = array_BTNH.shape
    lengths_P = lengths.reshape(-1)
    starts_P = offsets.reshape(-1)[: lengths_P.size] // (N * H)
    at_X = jnp.arange(B * T)[None]
    inside_PX = (at_X >= starts_P[:, None]) & (at_X < (starts_P + lengths_P)[:, None])
    return jnp.where(inside_PX.any(0), inside_PX.argmax(0), -1), starts_P, lengths_P


def _scores(q_BTNH, k_BSKH, v_BSKH, bias, lengths, key_lengths, offsets, key_offsets, options):
    """(scores, -inf where nothing is seen; the values of each head; the documents or None)."""
    (B, T, N, _), K = q_BTNH.shape, k_BSKH.shape[2]
    k, v = (jnp.repeat(x, N // K, axis=2).astype(jnp.float32) for x in (k_BSKH, v_BSKH))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH.astype(jnp.float32), k) * options["scale"]
    age_TS = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    window = options["sliding_window_length"]
    causal = "CAUSAL" in options["mask_type"].name
    assert causal or window is None, "the library has no windows to both sides"
    age_TS = age_TS if causal else abs(age_TS)
    seen = ((age_TS >= 0) & (age_TS < (window or T)))[None, None]
    if options["variadic_args"][0]:
        scores += bias.astype(jnp.float32)
    documents = None
    assert q_BTNH.shape[-1] == v_BSKH.shape[-1]
    assert q_BTNH.shape[-1] % 8 == 0
    names = ("NO_MASK", "CAUSAL") if offsets.ndim == 1 else ("PADDING", "PADDING_CAUSAL")
    assert options["mask_type"].name == names[causal]
    if offsets.ndim == 2:
        documents = _documents(q_BTNH, lengths, offsets)
        number_BT = documents[0].reshape(B, T)
        key_BT = _documents(k_BSKH, key_lengths, key_offsets)[0].reshape(B, T)
        same_BTS = (number_BT[:, :, None] == key_BT[:, None]) & (number_BT >= 0)[:, :, None]
        seen = seen & same_BTS[:, None]
    return jnp.where(seen, scores, -jnp.inf), k, v, documents


def _forward(q, k, v, bias, lengths, key_lengths, offsets, key_offsets, *_, is_training, **options):
    assert is_training
    B, T, N, _ = q.shape
    given = bias, lengths, key_lengths, offsets, key_offsets
    scores, _, v_BSNH, documents = _scores(q, k, v, *given, options)
    log_sum_BNT = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("BNTS,BSNH->BTNH", jnp.exp(scores - log_sum_BNT[..., None]), v_BSNH)
    if documents is None:
        return out.astype(q.dtype), log_sum_BNT
    number_X, starts_P, lengths_P = documents
    out = jnp.where((number_X >= 0).reshape(B, T, 1, 1), out, jnp.nan).astype(q.dtype)
    at_PT = jnp.minimum(starts_P[:, None] + jnp.arange(T)[None], B * T - 1)
    log_sum_PNT = log_sum_BNT.swapaxes(0, 1).reshape(N, B * T)[:, at_PT].swapaxes(0, 1)
    inside_PT = jnp.arange(T)[None] < lengths_P[:, None]
    return out, jnp.where(inside_PT[:, None], log_sum_PNT, jnp.nan)


def _backward(
    q, k, v, bias, lengths, key_lengths, offsets, key_offsets, _, __, log_sum, out, grad, **options
):
    (B, T, N, H), K = q.shape, k.shape[2]
    given = bias, lengths, key_lengths, offsets, key_offsets
    scores, k_BSNH, v_BSNH, documents = _scores(q, k, v, *given, options)
    seen_BT = jnp.ones((B, T), bool)
    if documents is not None:
        number_X, starts_P, _ = documents
        seen_BT = (number_X >= 0).reshape(B, T)
        place_X = jnp.arange(B * T) - starts_P[number_X]
        log_sum = log_sum[number_X, :, place_X].reshape(B, T, N).swapaxes(1, 2)
    seen_BT11 = seen_BT[..., None, None]
    grad, out = (jnp.where(seen_BT11, x, 0).astype(jnp.float32) for x in (grad, out))
    weights = jnp.where(scores > -jnp.inf, jnp.exp(scores - log_sum[..., None]), 0)
    inner_BNT = (grad * out).sum(-1).swapaxes(1, 2)
    dscores = weights * (jnp.einsum("BTNH,BSNH->BNTS", grad, v_BSNH) - inner_BNT[..., None])
    dscores *= options["scale"]

    def by_kv_head(x_BSNH):
        return x_BSNH.reshape(B, T, K, N // K, H).sum(3)

    dq = jnp.einsum("BNTS,BSNH->BTNH", dscores, k_BSNH)
    dk = by_kv_head(jnp.einsum("BNTS,BTNH->BSNH", dscores, q.astype(jnp.float32)))
    dv = by_kv_head(jnp.einsum("BNTS,BTNH->BSNH", weights, grad))
    return tuple(
        jnp.where(seen_BT11, gradient, jnp.nan).astype(x.dtype)
        for gradient, x in ((dq, q), (dk, k), (dv, v))
    )
