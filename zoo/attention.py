"""Grouped-query attention with rotary embeddings: module, kernels for each device, KV cache.

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
    adapters, add_bias, dot, fit_positions, gather, next_logits, project, rope_angles, rotate,
    soft_cap, unembed,
)  # fmt: skip
from .sharding import (
    auto, constrain, device, explicit, mesh_axes, param, per_device, reshape, shards,
)  # fmt: skip


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
        x_BTD = gather(x_BTD)
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
            out_BTNH = attend_to_cache(q, k, v, past[0], past[1], at.seen[kind], cap, sinks_N)
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


def positions(config, tokens_BT, segment_ids_BT, positions_BT=None, cache=None) -> Positions:
    """The Positions of a call, with or without a Cache. positions_BT None: 0 to T - 1."""
    T, n = tokens_BT.shape[1], shards("seq")
    striped = positions_BT is None and has_stripes(config, T)
    if positions_BT is None:
        at_T = jnp.arange(T)
        positions_BT = (at_T % (T // n) * n + at_T // (T // n) if striped else at_T)[None]
    positions_BT = constrain(positions_BT, "batch" if len(positions_BT) > 1 else None, "seq")
    rotary = [kind for kind in kinds(config) if kind.rope_theta is not None]
    angles = {kind: rope_angles(kind, config.head_dim, positions_BT) for kind in rotary}
    seen = {kind: cache.seen(kind.window) for kind in kinds(config)} if cache else {}
    return Positions(segment_ids_BT, angles, seen, striped, positions_BT)


def has_stripes(config, seq_len: int) -> bool:
    """Whether, on a ring, device d of n has each nth position from d on, so that all devices see
    equally many keys (Brandon et al. 2023). With windows, keys are near, and parts are consecutive.
    """
    on_ring = way_to_attend(config.context, config.num_heads) == "ring"
    windows = any(kind.window for kind in kinds(config))
    return on_ring and not windows and seq_len % shards("seq") ** 2 == 0


def stripe(config, x_BT, *axes: str, back: bool = False) -> Any:
    """Brings [B, T, ...] into stripes, or `back`, if the model `has_stripes`; else returns it."""
    if x_BT is None or not has_stripes(config, x_BT.shape[1]):
        return x_BT
    (B, T, *rest), n = x_BT.shape, shards("seq")
    parts, split = (n, n, T // n**2) if back else (n, T // n**2, n), ("batch", "seq", None, None)
    x = reshape(x_BT, (B, *parts, *rest), *split, *axes)
    x = constrain(jnp.moveaxis(x, 1, 3) if back else jnp.moveaxis(x, 3, 1), *split, *axes)
    return reshape(x, x_BT.shape, "batch", "seq", *axes)


def logits_in_order(model, tokens_BT, segment_ids_BT) -> jax.Array:
    """A decoder's logits, [B, T, V] in float32, in the order of its tokens."""
    tokens_BT, segment_ids_BT = (stripe(model.config, x) for x in (tokens_BT, segment_ids_BT))
    x_BTD, table_RVD, _ = model.trunk(tokens_BT, segment_ids_BT)
    logits_BTV = unembed(x_BTD, table_RVD, model.config)
    return stripe(model.config, logits_BTV, "vocab", back=True)


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

    Args:
      context: how positions on different devices attend to each other; see `way_to_attend`.
      striped: whether positions are in the order of `stripe`.
      cap: the scores' soft cap; see `soft_cap`.
      sinks_N: a score per head that takes part in the softmax and has no value.
    """
    (_, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    way, segments = way_to_attend(context, N), segment_ids_BT is not None
    plain = cap is None and sinks_N is None
    kernel, _ = best_kernel(kernel, T, segments, H, str(q_BTNH.dtype), way, plain)
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
    how = How(T, window, cap)
    if way == "ring":
        how = How(T // shards("seq"), window, cap, mesh_axes("seq"), shards("seq"), striped)
    q, kv = (("batch", seq, axis, None) for axis in (heads, kv_heads))
    axes = (q, kv, kv, ("batch", seq), (heads,))  # H whole, whatever the rules
    arrays = (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)
    compute = functools.partial(KERNELS[kernel], how)
    out_BTNH = per_device(compute, arrays, axes, check_vma=False)
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim") if way else out_BTNH


def way_to_attend(context: str, num_heads: int) -> str | None:
    """How positions attend to those on other devices; None if the rules don't split T.

    all-to-all (Ulysses, Jacobs et al. 2023): while they attend, devices split heads instead of T.
    ring (Liu et al. 2023): keys and values visit every device. On many devices it sends more
    bytes, but it needs no more heads.

    "auto" is all-to-all if every device gets a head; another `context` is returned unchanged.
    """
    if shards("seq") == 1:
        return None
    enough = num_heads % shards(("heads", "seq")) == 0
    return ("all-to-all" if enough else "ring") if context == "auto" else context


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
        name, note = "splash", f"blocks of {_block(seq_len)}"
        misfit = {f"{seq_len:,} positions, not a multiple of 128": not _block(seq_len)}
    else:
        name, note, widest = "cudnn", "", 256 if _capability(gpu) >= 9 else 128
        misfit = {gpu: _capability(gpu) < 8, dtype: dtype == "float32"}
        misfit |= {f"a head dim of {head_dim}": head_dim % 8 > 0 or widest < head_dim}
        misfit |= {"segments": segments, "a ring": way == "ring"}  # cuDNN masks segments by T × T
        misfit["soft caps or sinks"] = not plain
    why = next((what for what, found in misfit.items() if found), None)
    return ("flash", f"no other kernel for {why}") if why else (name, note)


# ---- attention to the keys of one device after another -------------------------------------------


class How(NamedTuple):
    """Static settings of a kernel on one device."""

    T: int  # positions on the device
    window: int | None
    soft_cap: float | None = None
    ring: tuple[str, ...] = ()  # mesh axes that split T between devices
    devices: int = 1  # on the ring
    striped: bool = False

    @property
    def hops(self) -> int:
        """How many devices back the earliest visible keys are."""
        back = self.devices if self.window is None else -(-(self.window - 1) // self.T)
        return min(back, self.devices - 1)

    def offset(self, hop):
        """Query i sees key j, which came `hop` devices, if 0 ≤ i + offset - j < window."""
        here = jax.lax.axis_index(self.ring) if self.ring else jnp.int32(0)
        there = (here - hop) % self.devices
        return -(there > here).astype(jnp.int32) if self.striped else (here - there) * self.T

    def send(self, arrays, hops: int):
        """Sends arrays to the device that is `hops` further on the ring."""
        pairs = [(i, (i + hops) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.ring, pairs), arrays)


def visit(kernel: str, how: How, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    """Attends to the keys of each device on the ring, with a kernel of PARTS: [B, T, N, H]."""
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros(q_BTNH.shape[:2], jnp.int32)
    # Whole tiles for `flash`; the padding is a segment of its own.
    pad = (0, -how.T % TILE if how.T > TILE and kernel == "flash" else 0)
    ids_BT = jnp.pad(segment_ids_BT, ((0, 0), pad), constant_values=jnp.iinfo(jnp.int32).min)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), pad, (0, 0))) for x in heads_first)
    out: Any = _visit(kernel, how, q, (k, v, ids_BT), sinks_N)
    return out[:, :, : how.T].swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _visit(kernel, how, q_BNTH, own_kv, sinks_N):
    return _visit_forward(kernel, how, q_BNTH, own_kv, sinks_N)[0]


def _visit_forward(kernel, how, q_BNTH, own_kv, sinks_N):
    """Joins each device's output by its share in the softmax's denominator."""
    attend_to, hops, ids_BT = PARTS[kernel][0], how.hops, own_kv[2]

    def join(kv, hop, out, log_sum):
        more, log_more = attend_to(how, q_BNTH, kv, ids_BT, how.offset(hop))
        total = jnp.logaddexp(log_sum, log_more)
        old, new = jnp.exp(log_sum - total)[..., None], jnp.exp(log_more - total)[..., None]
        return out * old + more * new, total

    def hop_on(carry, hop):
        kv, *so_far = carry
        return (how.send(kv, 1), *join(kv, hop, *so_far)), None

    if hops:
        start = own_kv, jnp.zeros(q_BNTH.shape), jnp.full(q_BNTH.shape[:3], NOT_SEEN)
        (kv, out, log_sum), _ = jax.lax.scan(hop_on, start, jnp.arange(hops))
        out, log_sum = join(kv, hops, out, log_sum)
    else:
        out, log_sum = attend_to(how, q_BNTH, own_kv, ids_BT, how.offset(0))
    if sinks_N is not None:
        total = jnp.logaddexp(log_sum, sinks_N.astype(jnp.float32)[None, :, None])
        out, log_sum = out * jnp.exp(log_sum - total)[..., None], total
    out = out.astype(q_BNTH.dtype)
    return out, (q_BNTH, own_kv, sinks_N, out, log_sum)


def _visit_backward(kernel, how, saved, grad):
    """Gradients of keys and values travel with them, in their dtype, and then home."""
    q_BNTH, own_kv, sinks_N, out, log_sum = saved
    gradients, hops, ids_BT = PARTS[kernel][1], how.hops, own_kv[2]

    def add(kv, hop, *sums):
        found = gradients(how, q_BNTH, kv, ids_BT, how.offset(hop), out, log_sum, grad)
        return [(x + y).astype(x.dtype) for x, y in zip(sums, found, strict=True)]

    def hop_on(carry, hop):
        kv, *sums = carry
        dq, *dkv = add(kv, hop, *sums)
        return (how.send(kv, 1), dq, *how.send(dkv, 1)), None

    carry = own_kv, jnp.zeros(q_BNTH.shape), *map(jnp.zeros_like, own_kv[:2])
    if hops:
        carry, _ = jax.lax.scan(hop_on, carry, jnp.arange(hops))
    dq, *dkv = add(carry[0], hops, *carry[1:])
    dkv, dsinks = how.send(dkv, -hops) if hops else dkv, None
    if sinks_N is not None:
        share_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - log_sum)
        dsinks = -(share_BNT * dot("BNTH,BNTH->BNT", out, grad)).sum((0, 2)).astype(sinks_N.dtype)
    return dq.astype(q_BNTH.dtype), (*dkv, None), dsinks


_visit.defvjp(_visit_forward, _visit_backward)


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
    own = zeros_BNT + NOT_SEEN, zeros_BNT, jnp.zeros(q_BNTH.shape)
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


def splash(how: How, q_BNTH, kv, ids_BT, offset):
    """TPU kernel: keeps scores on chip and skips masked blocks. Returns what `flash` does.

    Peak memory of 8b with 4 layers, fsdp, a row of 32,768 on each of 16 v5p: 9.8 GB (XLA: 95.4).
    """
    tpu, masks, settings = _splash(how, q_BNTH.shape[2], offset)
    kernel, ids = tpu.SplashAttentionKernel(*masks, **settings), tpu.SegmentIds(ids_BT, kv[2])
    out, (log_sum,) = jax.vmap(kernel)(q_BNTH * q_BNTH.shape[-1] ** -0.5, *kv[:2], ids)
    nothing = log_sum < NOT_SEEN  # the kernel divides by zero
    return jnp.where(nothing[..., None], 0, out), jnp.maximum(log_sum, NOT_SEEN)


def splash_gradients(how: How, q_BNTH, kv, ids_BT, offset, out_BNTH, log_sum_BNT, grad_BNTH):
    """`flash_gradients` on TPUs, by one kernel for dQ and one for dK and dV.

    A fused kernel keeps a partial dQ for each block of keys, 15 GB more for the row of 32,768.
    """
    tpu, (_, *masks), settings = _splash(how, q_BNTH.shape[2], offset)

    def gradients(grad, *saved):
        return tpu._splash_attention_bwd(*settings.values(), (*saved, *masks), grad)[3:6]

    scale, ids = q_BNTH.shape[-1] ** -0.5, tpu.SegmentIds(ids_BT, kv[2])
    saved = (q_BNTH * scale, *kv[:2], ids, None, out_BNTH, log_sum_BNT)
    dq, dk, dv = jax.vmap(gradients)(grad_BNTH, *saved)
    return dq * scale, dk, dv


def _splash(how: How, T: int, offset):
    """(the library, its masks for outputs, dQ, and dK with dV, its settings).

    The program itself makes the masks; on the host that takes 79 s for a row of 131,072.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as tpu

    window, size = how.window, _block(T)
    tiles = T // size
    visited = tiles if window is None else min(tiles, -(-(window - 1) // size) + 1)
    own, other = jnp.arange(tiles), jnp.arange(visited)

    def mask(query, key, visit):
        """Blocks to visit, in the order of the kernel's grid; it skips those that see nothing."""
        age = (query - key) * size + offset  # from the start of a block of keys to one of queries
        seen = (age > -size) & (window is None or age < window - 1 + size)
        small = jnp.int8 if tiles <= 128 else jnp.int16  # scalar memory is scarce
        visit, seen = jnp.where(seen, visit, 0).astype(small), seen.astype(jnp.int8)
        masks = (visit[None], None, seen[None], None, jnp.arange(T, dtype=jnp.int32) + offset)
        return tpu.mask_info_lib.MaskInfo(*masks)  # pyright: ignore[reportPrivateImportUsage]

    first = 0 * own if window is None else (own * size + offset - window + 1) // size
    key = jnp.clip(first, 0, tiles - visited)[:, None] + other[None]
    query = jnp.clip((own * size - offset) // size, 0, tiles - visited)[None] + other[:, None]
    by_query, by_key = mask(own[:, None], key, key), mask(query, own[None], query)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    blocks: dict[str, Any] = {f"block_{name}": size for name in names}
    settings = {  # in the order of the backward function's arguments
        "save_residuals": True,
        "mask_value": tpu.DEFAULT_MASK_VALUE,
        "is_mqa": False,
        "block_sizes": tpu.BlockSizes(**blocks),
        "residual_checkpoint_name": None,
        "mask_function": lambda q, k: (q >= k) if window is None else (q >= k) & (q - k < window),
        "attn_logits_soft_cap": how.soft_cap,
        "interpret": device().platform == "cpu",
    }
    return tpu, (by_query, by_query, by_key), settings


def cudnn(how: How, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, _) -> jax.Array:
    """NVIDIA kernel for rows without segments."""
    if segment_ids_BT is not None:
        raise ValueError("attention='cudnn' does not support segment ids; use 'flash'")
    left = None if how.window is None else (how.window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, is_causal=True, local_window_size=left, implementation="cudnn"
    )


PARTS: dict[str, tuple] = {"flash": (flash, flash_gradients), "splash": (splash, splash_gradients)}
KERNELS = {name: functools.partial(visit, name) for name in PARTS} | {"cudnn": cudnn}
KERNEL_NAMES = ("auto", "xla", *KERNELS)  # valid values of Config.attention
SCHEDULES = ("1f1b", "gpipe")  # valid values of Config.pipeline
WAYS = ("auto", "all-to-all", "ring")  # valid values of Config.context


def check_config(config, **choices) -> None:
    """Raises ValueError if a decoder's Config is invalid; `choices`: field → its valid values."""
    choices |= {"attention": KERNEL_NAMES, "context": WAYS, "pipeline": SCHEDULES}
    for name, value in vars(config).items():
        least = 0 if name in ("lora_rank", "pipe_microbatches") else 1
        if type(value) is int and value < least:
            raise ValueError(f"{name}={value} must be ≥ {least}")
        if name in choices and value not in choices[name]:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices[name])}")
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


def _block(seq_len: int) -> int:
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
        outputs.append(reshape(out_BKMH, (B, K, G, -1, H), "batch", kv_heads))
    out_BKGTH = jnp.concatenate(outputs, axis=3)
    out_BTKGH = out_BKGTH.transpose(0, 3, 1, 2, 4)
    return reshape(out_BTKGH, (B, T, N, H), "batch", "seq", "heads", "head_dim")


CACHE = (None, "batch", "slots", "kv_heads", "head_dim")  # the logical axes of keys and values


class Cache(NamedTuple):
    """Keys and values of the tokens that a model has read so far. L layers, S slots.

    Rows are left-padded: the newest token of every row is in slot `length` - 1.
    """

    k: jax.Array  # [L, B, S, K, H], rotated, in config.dtype; sharded as CACHE says
    v: jax.Array  # likewise
    first: jax.Array  # [B], int32: the slot of each row's first token
    length: jax.Array  # int32: the number of filled slots

    def seen(self, window: int | None) -> jax.Array:
        """[B, S], bool: the slots that each row's next position attends to, besides itself."""
        slots_S = jnp.arange(self.k.shape[2])
        least = 0 if window is None else self.length + 1 - window
        first_B1 = jnp.maximum(self.first, least)[:, None]
        return (slots_S[None] >= first_B1) & (slots_S[None] < self.length)

    @property
    def next_B1(self) -> jax.Array:
        """The position of each row's next token in its sequence."""
        return (self.length - self.first)[:, None]

    def append(self, kv) -> "Cache":
        """Returns the cache with one more token per row; a donated cache is updated in place."""
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=2)
        put = auto(put, *CACHE) if shards("slots") > 1 else put
        k, v = (put(old, new, self.length) for old, new in zip(self[:2], kv, strict=True))
        return Cache(k, v, self.first, self.length + 1)


@fit_positions
def read_prompts(model, tokens_BT, lengths_B, slots: int) -> tuple[jax.Array, Cache]:
    """A decoder's logits after left-padded prompts, [B, V], and a Cache of `slots` slots."""
    T, none = tokens_BT.shape[1], (0, 0)
    first_B = constrain(T - lengths_B, "batch")
    positions_BT = constrain(jnp.arange(T)[None] - first_B[:, None], "batch", "seq")
    segments_BT = (positions_BT >= 0).astype(jnp.int32)  # padding: segment 0
    x_BTD, table_RVD, kv = model.trunk(tokens_BT, segments_BT, positions_BT)
    pad = functools.partial(jnp.pad, pad_width=(none, none, (0, slots - T), none, none))
    pad = auto(pad, *CACHE) if shards("slots") > 1 else pad
    k, v = map(pad, kv)
    logits_BV = next_logits(x_BTD, table_RVD, model.config)
    return logits_BV, Cache(k, v, first_B, jnp.int32(T))


@fit_positions
def read_token(model, tokens_B, cache: Cache) -> tuple[jax.Array, Cache]:
    """A decoder's logits after one more token per row, [B, V], and the extended cache."""
    x_B1D, table_RVD, kv = model.trunk(tokens_B[:, None], None, cache.next_B1, cache)
    return next_logits(x_B1D, table_RVD, model.config), cache.append(kv)


def attend_to_cache(
    q_BTNH, k_BTKH, v_BTKH, k_BSKH, v_BSKH, seen_BS, cap: float | None = None, sinks_N=None
) -> jax.Array:
    """Attention of one new position (T = 1) to a layer's cache and itself. Returns [B, 1, N, H].

    Devices that share out the slots exchange sums, not keys.
    """
    (B, T, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    axes = ("batch", "seq", "kv_heads", "head_dim")  # as the cache, however heads are split
    q_BTNH = constrain(q_BTNH, *axes)
    q_BKGH = reshape(q_BTNH, (B, K, N // K, H), "batch", "kv_heads", None, "head_dim")
    # The cache is the left operand: XLA's CPU backend would transpose a right one first.
    logits_BKGS = dot("BSKH,BKGH->BKSG", k_BSKH, q_BKGH).swapaxes(2, 3) / math.sqrt(H)
    logits_BKGS = jnp.where(seen_BS[:, None, None], soft_cap(logits_BKGS, cap), NOT_SEEN)
    own_BKG1 = soft_cap(dot("BKGH,BTKH->BKGT", q_BKGH, k_BTKH) / math.sqrt(H), cap)
    most_BKG1 = jnp.maximum(logits_BKGS.max(-1, keepdims=True), own_BKG1)
    if sinks_N is not None:
        sinks_KG = reshape(sinks_N.astype(jnp.float32), (K, N // K), "kv_heads", None)
        most_BKG1 = jnp.maximum(most_BKG1, sinks_1KG1 := sinks_KG[None, :, :, None])
    weights_BKGS, own_BKG1 = jnp.exp(logits_BKGS - most_BKG1), jnp.exp(own_BKG1 - most_BKG1)
    total_BKG1 = weights_BKGS.sum(-1, keepdims=True) + own_BKG1
    if sinks_N is not None:
        total_BKG1 += jnp.exp(sinks_1KG1 - most_BKG1)
    total = auto(functools.partial(dot, "BKGS,BSKH->BKGH"), "batch", "kv_heads", None, "head_dim")
    out_BKGH = total(weights_BKGS.astype(v_BSKH.dtype), v_BSKH)
    out_BKGH += own_BKG1 * v_BTKH.swapaxes(1, 2).astype(jnp.float32)
    out_BTNH = reshape((out_BKGH / total_BKG1).astype(q_BTNH.dtype), (B, T, N, H), *axes)
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim")
