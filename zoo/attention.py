"""Grouped-query attention with rotary embeddings: module, kernels for each device.

Files that only some calls need: splash.py on TPUs, context.py if rules split positions, and cache.py
to generate.

Shapes: B batch, T query positions, S key positions or slots of the cache, D embed, N heads, K kv
heads, G = N/K, H head dim, L layers.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import (
    adapters, add_bias, dot, gather, project, rope_angles, rotate, soft_cap, stripe, unembed,
)  # fmt: skip
from .sharding import constrain, device, explicit, param, per_device, reshape, shards


class Kind(NamedTuple):
    """The attention settings that may differ between the layers of a model."""

    window: int | None  # a position sees itself and the window - 1 before it; None: all before it
    rope_theta: float | None  # base of the rotary wavelengths; None: no rotary embeddings
    # Stretches rotary wavelengths for longer contexts. All of them: ("linear", factor). The long
    # ones, as Llama 3: (factor, low_freq_factor, high_freq_factor, original length); or with YaRN:
    # ("yarn", factor, beta_fast, beta_slow, original length, truncate, magnitude).
    rope_scaling: tuple | None = None

    @property
    def magnitude(self) -> float:
        """The factor by which YaRN (Peng et al. 2023) scales queries and keys; 1 otherwise."""
        scaling: tuple = self.rope_scaling or (None,)
        return scaling[-1] if scaling[0] == "yarn" else 1.0


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023). Tensor parallelism splits the heads, and then
    the output costs one all-reduce.

    Args:
      biases: the projections that have one, some of "qkvo".
      norm: makes the norms of queries and keys from H (QK-norm); None: none.
      soft_cap, sinks: see `attend`; whether each head has a sink.
      scale: of scores, beside 1 / sqrt(H).
    """

    def __init__(
        self, config, biases: str = "", norm=None, soft_cap: float | None = None,
        scale: float = 1.0, sinks: bool = False, *, rngs: nnx.Rngs,
    ):  # fmt: skip
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.config = config
        self.q = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.v = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        inner = {"q": ("heads", N), "k": ("kv_heads", K), "v": ("kv_heads", K)}
        for name, (axis, heads) in inner.items():
            if name in biases:
                setattr(self, f"{name}_bias", param(rngs, (heads, H), (axis, "head_dim"), 0.0))
        if "o" in biases:
            self.o_bias = param(rngs, (D,), ("norm",), 0.0)
        self.biases, self.normed, self.soft_cap, self.scale = biases, bool(norm), soft_cap, scale
        self.sinks = param(rngs, (N,), ("heads",), 1.0) if sinks else None
        if norm:
            self.q_norm, self.k_norm = norm(H), norm(H)
        self.lora = adapters(self, config, rngs, q=1, k=1, v=1, o=2)

    def __call__(self, x_BTD, at: "Positions", kind: Kind, past=None):
        """Returns (output to add to the residual, (keys, values)); `past`: those in the cache."""
        x_BTD = gather(x_BTD, self.q)
        q, k, v = (self._project(name, x_BTD) for name in "qkv")
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if kind.rope_theta is not None:
            q, k = (rotate(x, at.angles[kind], kind.magnitude) for x in (q, k))
        q = q * self.scale if self.scale != 1 else q
        cap, sinks_N = self.soft_cap, None if self.sinks is None else self.sinks[...]
        if past is None:
            how = (self.config.attention, self.config.context, at.striped)
            out_BTNH = attend(q, k, v, at.segments, kind.window, *how, cap, sinks_N)
        else:
            from .cache import attend_to_cache

            keys, values, root = ((q, k, past[0]),), (v, past[1]), math.sqrt(q.shape[-1])
            out_BTNH = attend_to_cache(keys, values, at.seen[kind], root, cap, sinks_N)
        return self._project("o", out_BTNH, contract=2, seq="residual_seq"), (k, v)

    def _project(self, name: str, x, **how):
        y = project(self, name, x, **how)
        return add_bias(y, getattr(self, f"{name}_bias")) if name in self.biases else y


class Positions(NamedTuple):
    """The positions of a call's tokens and what they may attend to; all layers share it."""

    segments: jax.Array | None  # [B, T]; positions attend within their segment. None: one per row
    angles: dict[Kind, jax.Array]  # [B or 1, T, H/2], rotary embeddings, float32 radians
    seen: dict[Kind, jax.Array]  # [B, S], bool: cache slots to attend to; {} without a cache
    striped: bool  # whether they are in stripes
    numbers: jax.Array  # [B or 1, T], int: the place of each token in its row
    cache: Any = None  # a Cache


def positions(config, tokens_BT, segment_ids_BT, positions_BT=None, cache=None) -> Positions:
    """The Positions of a call, with or without a Cache. positions_BT None: 0 to T - 1."""
    striped, at_T = False, jnp.arange(tokens_BT.shape[1])
    if positions_BT is None and shards("seq") > 1:
        from .context import in_stripes

        striped, at_T = in_stripes(config, at_T)
    positions_BT = at_T[None] if positions_BT is None else positions_BT
    positions_BT = constrain(positions_BT, "batch" if len(positions_BT) > 1 else None, "seq")
    rotary = [kind for kind in kinds(config) if kind.rope_theta is not None]
    rope_dim = getattr(config, "rope_dim", config.head_dim)
    angles = {kind: rope_angles(kind, rope_dim, positions_BT) for kind in rotary}
    seen = {kind: cache.seen(kind.window) for kind in kinds(config)} if cache else {}
    return Positions(segment_ids_BT, angles, seen, striped, positions_BT, cache)


def logits_in_order(model, tokens_BT, segment_ids_BT=None) -> jax.Array:
    """A decoder's logits, [B, T, V] in float32, in the order of its tokens."""
    tokens_BT, segment_ids_BT = (stripe(model.config, x) for x in (tokens_BT, segment_ids_BT))
    x_BTD, table_RVD, _ = model.trunk(tokens_BT, segment_ids_BT)
    logits_BTV = unembed(x_BTD, table_RVD, model.config)
    return stripe(model.config, logits_BTV, "vocab", back=True)


def read_prompts(model, tokens_BT, lengths_B, slots: int):
    """A decoder's logits after left-padded prompts, [B, V], and a Cache of `slots` slots."""
    from .cache import prefill

    return prefill(model, tokens_BT, lengths_B, slots)


def read_token(model, tokens_B, cache):
    """A decoder's logits after one more token per row, [B, V], and the extended Cache."""
    from .cache import decode

    return decode(model, tokens_B, cache)


def kinds(config) -> tuple[Kind, ...]:
    """The kinds of one period of layers; layer l has kind l mod len(kinds)."""
    if config.layer_kinds:
        return tuple(Kind(*kind) for kind in config.layer_kinds)
    return (Kind(config.sliding_window, config.rope_theta, config.rope_scaling),)


def attend(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kernel: str = "auto",
    context: str = "auto", striped: bool = False, cap: float | None = None, sinks_N=None,
):  # fmt: skip
    """Causal softmax attention with the best kernel for the device. Returns [B, T, N, H].

    A position attends to itself and to earlier positions in its own segment and sliding window.
    Values, and so outputs, may have another H than queries and keys.

    Args:
      context: how positions on different devices attend to each other; see context.way_to_attend.
      striped: whether positions are in stripes; see context.has_stripes.
      cap: the scores' soft cap; see `soft_cap`.
      sinks_N: a score per head that takes part in the softmax and has no value.
    """
    (_, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    way, how = None, How(T, window, cap)
    if shards("seq") > 1:
        from .context import on_devices

        way, how = on_devices(how, context, N, striped)
    plain = cap is None and sinks_N is None
    facts = T, segment_ids_BT is not None, H, str(q_BTNH.dtype)
    kernel, _ = best_kernel(kernel, *facts, way, plain)
    seq = "seq" if way == "ring" else None  # otherwise each device has all positions of its heads
    heads, kv_heads = "heads", "kv_heads"
    if way == "all-to-all":
        heads, kv_heads = ("heads", "seq"), ("kv_heads", "seq")
    if shards(heads) > shards(kv_heads) or K % shards(kv_heads):
        # Give each device the kv heads of its own queries, repeated no more than that takes.
        times, kv_heads = math.lcm(K, shards(heads)) // K, heads
        rest, axes = explicit("batch", "seq", "kv_heads", "head_dim"), ("batch", seq, heads, None)
        k_BSKH, v_BSKH = (
            constrain(jnp.repeat(x, times, 2, out_sharding=rest), *axes) for x in (k_BSKH, v_BSKH)
        )
    if kernel == "xla":
        return blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, kv_heads)
    q, kv = (("batch", seq, axis, None) for axis in (heads, kv_heads))
    axes = (q, kv, kv, ("batch", seq), (heads,))  # H whole, whatever the rules
    arrays = (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)
    compute = functools.partial(KERNELS[kernel], how)
    out_BTNH = per_device(compute, arrays, axes, check_vma=False)
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim") if way else out_BTNH


def best_kernel(
    name: str, seq_len: int, segments: bool, head_dim: int, dtype: str, way, plain: bool = True
):
    """Chooses the kernel: ("xla" or a key of KERNELS, its blocks or why it is not the platform's).

    "auto" chooses for the active mesh, or for the default device without one; another name is
    returned unchanged if it can do what is asked, else "flash". segments: whether rows have ids.
    plain: whether scores have neither soft caps nor sinks.
    """
    platform, gpu = device().platform, device().device_kind
    if name == "auto" and platform not in ("tpu", "gpu"):
        name = "xla" if seq_len < FLASH_FROM else "flash"
    if name != "auto":
        unfit = not plain or way == "ring" or (way and name == "xla")
        return ("flash" if unfit and name not in PARTS else name), ""
    if shards("head_dim") > 1 and not way and plain:
        return "xla", "no kernel for rules that split head_dim"
    if platform == "tpu":
        seq_len //= shards("seq") if way == "ring" else 1
        name, note = "splash", f"blocks of {block_of(seq_len)}"
        misfit = {f"{seq_len:,} positions, not a multiple of 128": not block_of(seq_len)}
    else:
        name, note, widest = "cudnn", "", 256 if _capability(gpu) >= 9 else 128
        misfit = {gpu: _capability(gpu) < 8, dtype: dtype == "float32"}
        misfit |= {f"a head dim of {head_dim}": head_dim % 8 > 0 or widest < head_dim}
        misfit |= {"segments": segments, "a ring": way == "ring"}  # cuDNN masks segments by T × T
        misfit["soft caps or sinks"] = not plain
    why = next((what for what, found in misfit.items() if found), None)
    return ("flash", f"no other kernel for {why}") if why else (name, note)


# ---- one device's part ---------------------------------------------------------------------------


class How(NamedTuple):
    """Static settings of a kernel on one device."""

    T: int  # positions on the device
    window: int | None
    soft_cap: float | None = None
    ring: tuple[str, ...] = ()  # mesh axes that split T between devices
    devices: int = 1  # on the ring
    striped: bool = False


def on_device(kernel: str, how: How, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    """Attends with a kernel of PARTS: [B, T, N, H]."""
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros(q_BTNH.shape[:2], jnp.int32)
    # Whole tiles for `flash`; the padding is a segment of its own.
    pad = (0, -how.T % TILE if how.T > TILE and kernel == "flash" else 0)
    ids_BT = jnp.pad(segment_ids_BT, ((0, 0), pad), constant_values=jnp.iinfo(jnp.int32).min)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), pad, (0, 0))) for x in heads_first)
    out: Any = _attend(kernel, how, q, (k, v, ids_BT), sinks_N)
    return out[:, :, : how.T].swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel, how, q_BNTH, own_kv, sinks_N):
    return _attend_forward(kernel, how, q_BNTH, own_kv, sinks_N)[0]


def _attend_forward(kernel, how, q_BNTH, own_kv, sinks_N):
    out, log_sum = _parts(kernel, how)[0](how, q_BNTH, own_kv, own_kv[2], jnp.int32(0))
    if sinks_N is not None:
        total = jnp.logaddexp(log_sum, sinks_N.astype(jnp.float32)[None, :, None])
        out, log_sum = out * jnp.exp(log_sum - total)[..., None], total
    out = out.astype(q_BNTH.dtype)
    return out, (q_BNTH, own_kv, sinks_N, out, log_sum)


def _attend_backward(kernel, how, saved, grad):
    q_BNTH, own_kv, sinks_N, out, log_sum = saved
    given = q_BNTH, own_kv, own_kv[2], jnp.int32(0), out, log_sum, grad
    dq, *dkv = _parts(kernel, how)[1](how, *given)
    dkv, dsinks = [x.astype(y.dtype) for x, y in zip(dkv, own_kv[:2], strict=True)], None
    if sinks_N is not None:
        share_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - log_sum)
        dsinks = -(share_BNT * dot("BNTH,BNTH->BNT", out, grad)).sum((0, 2)).astype(sinks_N.dtype)
    return dq.astype(q_BNTH.dtype), (*dkv, None), dsinks


_attend.defvjp(_attend_forward, _attend_backward)


def _parts(kernel, how):
    """A kernel's functions for its output and for its gradients; on a ring, made of these."""
    found: Any = (flash, flash_gradients)
    if kernel == "splash":
        from .splash import splash, splash_gradients

        found = (splash, splash_gradients)
    if how.ring:
        from .context import around_ring

        found = around_ring(*found)
    return found


# ---- kernels: outputs and gradients by the keys of one device ------------------------------------

NOT_SEEN = -1e30  # a score without weight
TILE = 512  # queries, and keys, of one step of `flash`
FLASH_FROM = 8_192  # positions from which `flash` is faster on CPUs than `blockwise`


def flash(how: How, q_BNTH, kv, ids_BT, offset):
    """For any platform: computes scores tile by tile, and none where all are masked.

    Memory is linear in T (Rabe & Staats 2021, Dao et al. 2022). kv: (k_BKSH, v_BKSH, ids_BS).
    Returns (output [B, N, T, H], logarithm of the softmax's denominator [B, N, T]), float32.
    """

    def tile(seen_XT1S, mine, theirs, own, shared):
        (q_XTGH,), (k_XSH, v_XSH), (most, total, out) = mine, theirs, own
        scores = jnp.where(seen_XT1S, _scores(how, q_XTGH, k_XSH), NOT_SEEN)
        higher = jnp.maximum(most, scores.max(-1))
        weights, decay = jnp.exp(scores - higher[..., None]), jnp.exp(most - higher)
        out = out * decay[..., None] + dot("XTGS,XSH->XTGH", weights.astype(v_XSH.dtype), v_XSH)
        return [higher, total * decay + weights.sum(-1), out], shared

    zeros_BNT = jnp.zeros(q_BNTH.shape[:3])
    own = zeros_BNT + NOT_SEEN, zeros_BNT, jnp.zeros((*zeros_BNT.shape, kv[1].shape[-1]))
    (most, total, out), _ = _over_tiles(how, tile, (q_BNTH,), kv, ids_BT, offset, own, ())
    total = jnp.where(total > 0, total, 1)
    return out / total[..., None], most + jnp.log(total)


def flash_gradients(how: How, q_BNTH, kv, ids_BT, offset, out_BNTH, log_sum_BNT, grad_BNTH):
    """Gradients of q, k and v, float32. The last three arguments are of the output by all keys."""

    def tile(seen_XT1S, mine, theirs, own, shared):
        (q_XTGH, grad, log_sum, inner), (k_XSH, v_XSH) = mine, theirs
        (dq,), (dk, dv), scores = own, shared, _scores(how, q_XTGH, k_XSH)
        weights = jnp.exp(jnp.where(seen_XT1S, scores, NOT_SEEN) - log_sum[..., None])
        dscores = weights * (dot("XTGH,XSH->XTGS", grad, v_XSH) - inner[..., None])
        if how.soft_cap is not None:
            dscores *= 1 - jnp.square(scores / how.soft_cap)
        dscores = (dscores * q_XTGH.shape[-1] ** -0.5).astype(k_XSH.dtype)
        dk += dot("XTGS,XTGH->XSH", dscores, q_XTGH)
        dv += dot("XTGS,XTGH->XSH", weights.astype(grad.dtype), grad)
        return [dq + dot("XTGS,XSH->XTGH", dscores, k_XSH)], [dk, dv]

    queries = q_BNTH, grad_BNTH, log_sum_BNT, dot("BNTH,BNTH->BNT", out_BNTH, grad_BNTH)
    dq, *dkv = (jnp.zeros(x.shape) for x in (q_BNTH, *kv[:2]))
    (dq,), dkv = _over_tiles(how, tile, queries, kv, ids_BT, offset, (dq,), dkv)
    return dq, *dkv


def _over_tiles(how: How, tile, queries, kv, ids_BT, offset, own, shared):
    """Runs `tile` for all pairs of TILE queries and TILE keys in which some see each other.

    queries and own are arrays [B, N, T, ...], in tiles [X, T, G, ...] with X = B · K; keys and
    shared are [B, K, S, ...], in tiles [X, S, ...]. `tile` takes what sees what and tiles of all
    four, and returns new tiles of own and shared, which are returned in the end.
    """
    *keys, ids_BS = kv
    # Or else JAX would compute the masks of all pairs once for all layers, and keep them: T² bits.
    given = queries, ids_BS, ids_BT, offset
    queries, ids_BS, ids_BT, offset = jax.lax.optimization_barrier(given)
    (B, N, T), K = queries[0].shape[:3], keys[0].shape[1]
    size, X, G = min(TILE, T), B * K, N // K

    def cut(x):  # [B, K, S, ...] → [tiles, X, S, ...]
        return x.reshape(X, T // size, size, *x.shape[3:]).swapaxes(0, 1)

    def cut_queries(x):
        return jnp.moveaxis(x.reshape(X, G, T // size, size, *x.shape[3:]), (2, 3), (0, 2))

    def visit_pair(carry, pair):
        i, j = pair
        age_TS = (i - j) * size + offset + jnp.arange(size)[:, None] - jnp.arange(size)[None]
        seen_TS = (age_TS >= 0) & (how.window is None or age_TS < how.window)
        seen_XTS = seen_TS[None] & (ids_T[i][:, :, None] == ids_S[j][:, None])
        run = functools.partial(tile, seen_XTS[:, :, None], *at(pair, queries, keys))
        parts = jax.lax.cond(seen_XTS.any(), run, lambda *same: same, *at(pair, *carry))
        for n, arrays, new in zip(pair, carry, parts, strict=True):
            arrays[:] = [x.at[n].set(y) for x, y in zip(arrays, new, strict=True)]
        return carry, None

    def at(pair, queries, keys):
        return [x[pair[0]] for x in queries], [x[pair[1]] for x in keys]

    queries, own = ([cut_queries(x) for x in arrays] for arrays in (queries, own))
    keys, shared = ([cut(x) for x in arrays] for arrays in (keys, shared))
    ids_S, ids_T = (cut(jnp.repeat(x[:, None], K, axis=1)) for x in (ids_BS, ids_BT))
    back, tiles = T if how.window is None else -(-(how.window - 1) // size), range(T // size)
    pairs = [(i, j) for i in tiles for j in tiles if how.ring or 0 <= i - j <= back]
    (own, shared), _ = jax.lax.scan(visit_pair, (own, shared), jnp.array(pairs))
    own = [jnp.moveaxis(x, (0, 2), (2, 3)).reshape(B, N, T, *x.shape[4:]) for x in own]
    return own, [x.swapaxes(0, 1).reshape(B, K, T, *x.shape[3:]) for x in shared]


def _scores(how: How, q_XTGH, k_XSH):
    scores = dot("XTGH,XSH->XTGS", q_XTGH, k_XSH) * q_XTGH.shape[-1] ** -0.5
    return soft_cap(scores, how.soft_cap)


def cudnn(how: How, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, _) -> jax.Array:
    """NVIDIA kernel for rows without segments."""
    if segment_ids_BT is not None:
        raise ValueError("attention='cudnn' does not support segment ids; use 'flash'")
    left, V = None if how.window is None else (how.window - 1, 0), v_BSKH.shape[-1]
    v_BSKH = jnp.pad(v_BSKH, (*[(0, 0)] * 3, (0, q_BTNH.shape[-1] - V)))  # jax.nn wants one H
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, is_causal=True, local_window_size=left, implementation="cudnn"
    )[..., :V]


PARTS = ("flash", "splash")  # kernels whose outputs for several parts of the keys can be joined
KERNELS = {name: functools.partial(on_device, name) for name in PARTS} | {"cudnn": cudnn}
KERNEL_NAMES = ("auto", "xla", *KERNELS)  # valid values of Config.attention
SCHEDULES = ("1f1b", "gpipe")  # valid values of Config.pipeline
WAYS = ("auto", "all-to-all", "ring")  # valid values of Config.context; see context.py


def check_config(config, **choices) -> None:
    """Raises ValueError if a decoder's Config is invalid; `choices`: field → its valid values."""
    choices |= {"attention": KERNEL_NAMES, "context": WAYS, "pipeline": SCHEDULES}
    choices |= {"matmul": ("", "int8", "fp8", "int8_weights"), "matmul_backward": ("", "bfloat16")}
    for name, value in vars(config).items():
        least = 0 if vars(type(config)).get(name) == 0 else 1  # by its default
        if type(value) is int and value < least:
            raise ValueError(f"{name}={value} must be ≥ {least}")
        if name in choices and value not in choices[name]:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, choices[name]))}")
    L, N, K, H = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
    kinds, window = config.layer_kinds, vars(config).get("sliding_window")
    known = type(config).lora_targets
    rotary = not kinds or any(kind[1] is not None for kind in kinds)
    other = min({*config.lora_targets} - {*known}, default=None)
    least = min((kind[0] for kind in kinds if kind[0] is not None), default=1)
    both = f"sliding_window={window} and layer_kinds exclude each other"
    for invalid, message in (
        (N % K, f"num_heads={N} is not divisible by num_kv_heads={K}"),
        (rotary and H % 2, f"head_dim={H} must be even: rotary embeddings rotate pairs of dims"),
        (other is not None, f"lora_targets has {other!r}, which is not one of {', '.join(known)}"),
        (least < 1, f"layer_kinds has window={least}, which must be ≥ 1, or None"),
        (len(kinds) > L, f"layer_kinds has {len(kinds)} kinds, more than num_layers={L}"),
        (kinds and window, f"{both}; state each kind's window in layer_kinds"),
    ):
        if invalid:
            raise ValueError(message)


def block_of(seq_len: int) -> int:
    """Positions in a block of the TPU kernel; 0 if it doesn't support rows of this length."""
    return next((block for block in (512, 384, 256, 128) if seq_len % block == 0), 0)


def _capability(kind: str) -> float:
    """The CUDA compute capability of a kind of GPU; 0.0 for AMD GPUs."""
    for gpu in jax.devices():
        text = str(getattr(gpu, "compute_capability", ""))
        if gpu.device_kind == kind and text.replace(".", "").isdigit():
            return float(text)
    return 9.0 if "NVIDIA" in kind else 0.0  # compiling for a GPU that this machine lacks


def blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kv_heads):
    """Attention for any platform: multiplies each block of queries by the keys that it may see.

    This halves the work of the full square, and XLA's CPU backend runs the blocks in parallel (1.6
    times faster). kv_heads is the logical axis of K.
    """
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    G = N // K
    q = reshape(q_BTNH, (B, T, K, G, H), "batch", "seq", kv_heads, None, "head_dim")
    q_BKGTH = q.transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    block = max(128, -(-T // 8))
    outputs = []
    for start in range(0, T, block):
        end = min(start + block, T)
        first = 0 if window is None else max(0, start + 1 - window)
        # M is G and T as one dim: on CPUs the step is 1.5% faster than with five dims.
        q_BKMH = reshape(q_BKGTH[:, :, :, start:end], (B, K, -1, H), "batch", kv_heads)
        k, v = k_BKSH[:, :, first:end], v_BKSH[:, :, first:end]
        logits = dot("BKMH,BKSH->BKMS", q_BKMH, k)
        logits_BKGTS = reshape(logits, (B, K, G, end - start, end - first), "batch", kv_heads)
        age = jnp.arange(start, end)[:, None] - jnp.arange(first, end)[None, :]
        seen = ((age >= 0) if window is None else (age >= 0) & (age < window))[None, None, None]
        if segment_ids_BT is not None:
            same = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, first:end]
            seen &= same[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, logits_BKGTS / math.sqrt(H), -1e30), axis=-1)
        weights_BKMS = reshape(weights.astype(v.dtype), logits.shape, "batch", kv_heads)
        out_BKMH = jnp.einsum("BKMS,BKSH->BKMH", weights_BKMS, v)
        outputs.append(reshape(out_BKMH, (B, K, G, -1, v.shape[-1]), "batch", kv_heads))
    out_BKGTH = jnp.concatenate(outputs, axis=3)
    out_BTKGH = out_BKGTH.transpose(0, 3, 1, 2, 4)
    return reshape(out_BTKGH, (B, T, N, -1), "batch", "seq", "heads", "head_dim")
