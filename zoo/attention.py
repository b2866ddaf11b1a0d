"""Grouped-query attention with rotary embeddings: the module, kernels for each device, and the KV cache.

Shapes: B batch, T query positions, S key positions or slots of the cache, D embed, N heads, K kv heads,
G = N/K, H head dim, L layers.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import RMSNorm, adapters, project
from .sharding import constrain, device, param, per_device, reshape, shards


class Kind(NamedTuple):
    """What sets the attention of one layer apart from another's in the same model."""

    window: int | None  # a position sees itself and the window - 1 before it; None: all before it
    rope_theta: float  # base of the rotary wavelengths
    # Stretches wavelengths for longer contexts; all of them: ("linear", factor); those that turn
    # little within the original length: (factor, low_freq_factor, high_freq_factor, original length)
    # (Llama 3), ("yarn", factor, beta_fast, beta_slow, original length, truncate, magnitude).
    rope_scaling: tuple | None = None

    @property
    def magnitude(self) -> float:
        """Yarn (Peng et al. 2023) also makes queries and keys this many times longer."""
        return (
            self.rope_scaling[-1] if self.rope_scaling and self.rope_scaling[0] == "yarn" else 1.0
        )


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023). Under tensor parallelism heads are split, and the
    output is one all-reduce.

    Args:
      config: has embed, num_layers, num_heads, num_kv_heads, head_dim, norm_eps, qkv_bias, qk_norm,
        attention (a kernel's name or "auto") and the fields of `adapters`.
    """

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.config = config
        self.q = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.v = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        if config.qkv_bias:
            self.q_bias = param(rngs, (N, H), ("heads", "head_dim"), 0.0)
            self.k_bias = param(rngs, (K, H), ("kv_heads", "head_dim"), 0.0)
            self.v_bias = param(rngs, (K, H), ("kv_heads", "head_dim"), 0.0)
        if config.qk_norm:
            self.q_norm = RMSNorm(H, config.norm_eps)
            self.k_norm = RMSNorm(H, config.norm_eps)
        self.lora = adapters(self, config, rngs, q=1, k=1, v=1, o=2)

    def __call__(self, x_BTD, at: "Positions", kind: Kind, past=None):
        """Returns (what it adds to the residual, the keys and values for a cache).

        Args:
          past: this layer's keys and values in the cache, of the positions before x; None: no cache.
        """
        q, k, v = (project(self, name, x_BTD) for name in ("q", "k", "v"))
        if self.config.qkv_bias:
            q = q + self.q_bias[...].astype(q.dtype)[None, None]
            k = k + self.k_bias[...].astype(k.dtype)[None, None]
            v = v + self.v_bias[...].astype(v.dtype)[None, None]
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(x, at.angles[kind], kind.magnitude) for x in (q, k))
        if past is None:
            out_BTNH = attend(q, k, v, at.segments, kind.window, self.config.attention)
        else:
            out_BTNH = attend_to_cache(q, k, v, *past, at.seen[kind])
        return project(self, "o", out_BTNH, contract=2), (k, v)


class Positions(NamedTuple):
    """What all layers of a call share: the places of its tokens, and what they may attend to."""

    segments: jax.Array | None  # [B, T]; positions attend within their own segment. None: one a row
    angles: dict[Kind, jax.Array]  # [B or 1, T, H/2] of the rotary embeddings, float32 radians
    seen: dict[Kind, jax.Array]  # [B, S], the slots of the cache to attend to; {} without a cache


def positions(config, tokens_BT, segment_ids_BT, positions_BT=None, cache=None) -> Positions:
    """The Positions of a call, which may read a Cache.

    Args:
      positions_BT: the tokens' places in their sequences; None: 0 to T - 1.
    """
    if positions_BT is None:
        positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    angles = {kind: rope_angles(kind, config.head_dim, positions_BT) for kind in kinds(config)}
    seen = {kind: cache.seen(kind.window) for kind in kinds(config)} if cache else {}
    return Positions(segment_ids_BT, angles, seen)


def kinds(config) -> tuple[Kind, ...]:
    """The kinds of one period of layers; layer l has kind l mod their number."""
    alike = Kind(config.sliding_window, config.rope_theta, config.rope_scaling)
    return tuple(Kind(*kind) for kind in config.layer_kinds) or (alike,)


def check_config(config, remat) -> None:
    """Raises ValueError if a decoder can't have this configuration.

    Args:
      remat: the names that config.remat may have.
    """
    for name, value in vars(config).items():
        least = 0 if name == "lora_rank" else 1
        if type(value) is int and value < least:
            raise ValueError(f"{name}={value} must be ≥ {least}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} is not divisible by num_kv_heads={config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim={config.head_dim} must be even: rotary embeddings rotate pairs of dims"
        )
    if config.layer_kinds and config.sliding_window is not None:
        raise ValueError(
            f"sliding_window={config.sliding_window} and layer_kinds exclude each other; state each "
            "kind's window in layer_kinds"
        )
    if len(config.layer_kinds) > config.num_layers:
        raise ValueError(
            f"layer_kinds has {len(config.layer_kinds)} kinds, and num_layers={config.num_layers}"
        )
    for window in (kind.window for kind in kinds(config)):
        if window is not None and window < 1:
            raise ValueError(f"layer_kinds has window={window}, which must be ≥ 1, or None")
    known = {"remat": remat, "attention": ("auto", "xla", *KERNELS)}
    for name, names in known.items():
        if getattr(config, name) not in names:
            raise ValueError(f"{name}={getattr(config, name)!r} is not one of {', '.join(names)}")
    known = type(config).lora_targets
    for target in {*config.lora_targets} - {*known}:
        raise ValueError(f"lora_targets has {target!r}, which is not one of {', '.join(known)}")


# ---- rotary embeddings (Su et al. 2021) ----------------------------------------------------------


def rotate(x_BTNH: jax.Array, angles_BTH: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """Rotary position embedding: dims i and i + H/2 turn as a pair (Hugging Face's convention)."""
    cos, sin = (f(angles_BTH)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def rope_angles(kind: Kind, head_dim: int, positions_BT: jax.Array) -> jax.Array:
    """Rotation of each pair of dims at these positions: [B, T, H/2], float32 radians."""
    scaling, theta = kind.rope_scaling, kind.rope_theta
    frequency = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        keep, factor = 1, 1
    elif scaling[0] == "linear":
        keep, factor = 0, scaling[1]
    elif scaling[0] == "yarn":
        _, factor, fast, slow, original, truncate, _ = scaling
        # The pair of dims that makes so many turns within the original length.
        first, last = (
            math.log(original / (n * 2 * math.pi), theta) * head_dim / 2 for n in (fast, slow)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pair = jnp.arange(head_dim // 2, dtype=jnp.float32)
        keep = 1 - jnp.clip((pair - first) / (last - first or 0.001), 0, 1)
    else:
        factor, low, high, original = scaling
        turns = original * frequency / (2 * math.pi)  # made within the original length
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
    if scaling is not None:
        frequency = frequency * (keep + (1 - keep) / factor)
    return positions_BT.astype(jnp.float32)[:, :, None] * frequency[None, None]


# ---- attention without a cache -------------------------------------------------------------------


def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kernel: str = "auto"):
    """Causal softmax attention by the best kernel for the device. Returns [B, T, N, H].

    A position sees itself and what is before it, in its own segment and sliding window.
    """
    (_, T, N, H), kv_heads = q_BTNH.shape, "kv_heads"
    if shards("heads") > shards("kv_heads"):  # each device takes the kv heads of its own queries
        axes, kv_heads = ("batch", "seq", "heads", "head_dim"), "heads"
        G = N // k_BSKH.shape[2]
        k_BSKH, v_BSKH = (constrain(jnp.repeat(x, G, axis=2), *axes) for x in (k_BSKH, v_BSKH))
    segments = segment_ids_BT is not None
    kernel, _ = best_kernel(kernel, T, segments, H, str(q_BTNH.dtype), window)
    if kernel == "xla":
        return blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, kv_heads)
    local = functools.partial(KERNELS[kernel], window=window)
    kv, ids = ("batch", None, kv_heads, None), ("batch", None)  # T and H whole, whatever the rules
    axes = (("batch", None, "heads", None), kv, kv, ids)
    return per_device(local, (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT), axes, check_vma=False)


def best_kernel(
    name: str, seq_len: int, segments: bool, head_dim: int, dtype: str, window: int | None
) -> tuple[str, str]:
    """("xla" or a key of KERNELS, a description with the reason for "xla").

    Args:
      name: "auto" chooses for a device of the mesh in force, else for the default device; any other
        name is returned.
      seq_len: T, positions of a row.
      segments: whether rows have segment ids.
    """
    where = device()
    if name != "auto" or where.platform not in ("tpu", "gpu"):
        name = "xla" if name == "auto" else name
        return name, name
    unsupported = {
        f"rows whose {axis} the rules split": shards(axis) > 1 for axis in ("seq", "head_dim")
    }
    if where.platform == "tpu":
        block = _block(seq_len)
        name, described = "splash", f"splash, blocks of {block}"
        unsupported[f"{seq_len:,} positions, no multiple of 128"] = not block
    else:
        name = described = "triton" if segments else "cudnn"
        capability = _capability(where.device_kind)
        widest = 256 if capability >= 9 and name == "cudnn" else 128
        unsupported[where.device_kind] = capability < 8
        unsupported[dtype] = dtype == "float32"
        unsupported[f"a head dim of {head_dim}"] = head_dim % 8 or widest < head_dim
        unsupported["segments and a sliding window together"] = segments and window is not None
    why = next((f"xla, no kernel for {what}" for what, found in unsupported.items() if found), None)
    return ("xla", why) if why else (name, described)


def attention_kernels(config, seq_len: int, segments: bool) -> list[tuple[str, str]]:
    """`best_kernel` of each kind of layer in a model."""
    facts = (config.attention, seq_len, segments, config.head_dim, config.dtype)
    return [best_kernel(*facts, kind.window) for kind in kinds(config)]


def splash(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None) -> jax.Array:
    """TPU: scores stay on chip, and blocks that are masked are skipped.

    8b with 4 layers, fsdp, a row of 32,768 on each of 16 v5p: 9.8 GB at the peak, XLA's 95.4.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    T, N, H = q_BTNH.shape[1:]
    mask = tpu.CausalMask((T, T)) if window is None else tpu.LocalMask((T, T), (window - 1, 0), 0)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    # Two kernels backward: a single one keeps a partial dQ for each block of keys, 15 GB more there.
    sizes = tpu.BlockSizes(**{f"block_{name}": _block(T) for name in names})
    kernel = tpu.make_splash_mha(
        tpu.MultiHeadMask([mask] * N), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        interpret=device().platform == "cpu",
    )  # fmt: skip
    ids = None if segment_ids_BT is None else tpu.SegmentIds(segment_ids_BT, segment_ids_BT)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTNH * H**-0.5, k_BSKH, v_BSKH))
    return jax.vmap(kernel)(*heads_first, ids).swapaxes(1, 2)


def triton(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: None) -> jax.Array:
    """NVIDIA: segments without a mask of T × T in memory, which cuDNN wants: 2.1 GB a row of 32,768."""
    from jax.experimental.pallas.ops.gpu import attention as gpu

    if window is not None:
        raise ValueError(f"attention='triton' has no sliding window, got {window}; use 'xla'")
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros((B, T), jnp.int32)
    block, rest = (64, 32) if H > 64 else (128, 64)  # what fits 100 kB of shared memory
    wide = ((0, 0), (0, -T % block), (0, 0), (0, 0))
    k, v = (jnp.pad(jnp.repeat(x, N // K, 2), wide) for x in (k_BSKH, v_BSKH))
    ids = jnp.pad(segment_ids_BT, wide[:2], constant_values=-1)  # padding is a segment of its own
    sizes = gpu.BlockSizes(block, block, rest, rest, rest, rest)
    out_BTNH = gpu.mha(
        jnp.pad(q_BTNH, wide), k, v, ids, sm_scale=H**-0.5, causal=True, block_sizes=sizes,
        interpret=device().platform == "cpu",
    )  # fmt: skip
    return out_BTNH[:, :T]


def cudnn(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None) -> jax.Array:
    """NVIDIA, rows without segments. A mask for segments would be T × T in memory."""
    if segment_ids_BT is not None:
        raise ValueError("attention='cudnn' has no segments; use 'triton' or 'xla'")
    left = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, is_causal=True, local_window_size=left, implementation="cudnn"
    )


KERNELS = {"splash": splash, "triton": triton, "cudnn": cudnn}


def _block(seq_len: int) -> int:
    """Positions in a block of the TPU's kernel; 0 if it can't have this many in a row."""
    return next((block for block in (512, 384, 256, 128) if seq_len % block == 0), 0)


def _capability(kind: str) -> float:
    """CUDA's compute capability of a kind of GPU; 0.0 for AMD's."""
    for gpu in jax.devices():
        text = str(getattr(gpu, "compute_capability", ""))
        if gpu.device_kind == kind and text.replace(".", "").isdigit():
            return float(text)
    return 9.0 if "NVIDIA" in kind else 0.0  # compiled for a machine that is elsewhere


def blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kv_heads: str):
    """Any platform: a block of queries at a time, against only the keys that it may see.

    Half the work of the full square, and blocks that XLA's CPU backend runs side by side (1.6 times
    faster there).

    Args:
      kv_heads: the logical axis of K.
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
        # M: G and T as one dim, for a step 1.5% shorter on the CPU backend than with five dims.
        q_BKMH = reshape(q_BKGTH[:, :, :, start:end], (B, K, -1, H), "batch", kv_heads)
        k, v = k_BKSH[:, :, first:end], v_BKSH[:, :, first:end]
        logits = jnp.einsum("BKMH,BKSH->BKMS", q_BKMH, k, preferred_element_type=jnp.float32)
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


# ---- generation ----------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The keys and values of the tokens that a model has read in generation. L layers, S slots.

    A row is padded in front: the newest token of every row is in slot `length` - 1.
    """

    k: jax.Array  # [L, B, S, K, H], rotated, in config.dtype; sharded by `batch` and `kv_heads`
    v: jax.Array  # likewise
    first: jax.Array  # [B], int32: the slot of each row's first token
    length: jax.Array  # int32: slots that are filled

    def seen(self, window: int | None) -> jax.Array:
        """[B, S]: the slots that the next position of a row attends to, besides itself."""
        slots_S = jnp.arange(self.k.shape[2])
        least = 0 if window is None else self.length + 1 - window
        first_B1 = jnp.maximum(self.first, least)[:, None]
        return (slots_S[None] >= first_B1) & (slots_S[None] < self.length)

    @property
    def next_B1(self) -> jax.Array:
        """The place of each row's next token in its sequence."""
        return (self.length - self.first)[:, None]

    def append(self, kv) -> "Cache":
        """The cache with one more token a row. Donated, it is written in place."""
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(old, new, self.length, axis=2)
            for old, new in zip((self.k, self.v), kv, strict=True)
        )
        return Cache(k, v, self.first, self.length + 1)


def left_padded(tokens_BT: jax.Array, lengths_B: jax.Array):
    """Of prompts that are padded in front: (slot of each first token [B], positions and segments
    [B, T]). The padding is a segment of its own.
    """
    T = tokens_BT.shape[1]
    first_B = constrain(T - lengths_B, "batch")
    positions_BT = jnp.arange(T)[None] - first_B[:, None]
    return first_B, positions_BT, (positions_BT >= 0).astype(jnp.int32)


def fill_cache(kv, first_B: jax.Array, slots: int) -> Cache:
    """A cache with these keys and values, [L, B, T, K, H], in the first of its slots."""
    T = kv[0].shape[2]
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, slots - T), (0, 0), (0, 0))) for x in kv)
    return Cache(k, v, first_B, jnp.int32(T))


def attend_to_cache(q_BTNH, k_BTKH, v_BTKH, k_BSKH, v_BSKH, seen_BS) -> jax.Array:
    """Attention of one new position, T = 1, to a layer's cache and to itself. Returns [B, 1, N, H]."""
    (B, T, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    axes = ("batch", "seq", "kv_heads", "head_dim")  # the cache's layout, wherever the heads are
    q_BTNH = constrain(q_BTNH, *axes)
    q_BKGH = reshape(q_BTNH, (B, K, N // K, H), "batch", "kv_heads", None, "head_dim")
    to = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The cache on the left: on the right, XLA's CPU backend would transpose it first.
    logits_BKGS = to("BSKH,BKGH->BKSG", k_BSKH, q_BKGH).swapaxes(2, 3)
    logits_BKGS = jnp.where(seen_BS[:, None, None], logits_BKGS, -jnp.inf)
    own_BKGT = to("BKGH,BTKH->BKGT", q_BKGH, k_BTKH)
    logits = jnp.concatenate([logits_BKGS, own_BKGT], axis=-1) / math.sqrt(H)
    weights_BKGS = jax.nn.softmax(logits, axis=-1).astype(v_BSKH.dtype)
    out_BKGH = jnp.einsum("BKGS,BSKH->BKGH", weights_BKGS[..., :-T], v_BSKH)
    out_BKGH += jnp.einsum("BKGT,BTKH->BKGH", weights_BKGS[..., -T:], v_BTKH)
    out_BTNH = reshape(out_BKGH, (B, T, N, H), *axes)
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim")
