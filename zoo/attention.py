"""Grouped-query attention with rotary embeddings: module, kernels for each device, KV cache.

Shapes: B batch, T query positions, S key positions or slots of the cache, D embed, N heads, K kv
heads, G = N/K, H head dim, L layers.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import RMSNorm, adapters, project, rope_angles, rotate
from .sharding import constrain, device, param, per_device, reshape, shards


class Kind(NamedTuple):
    """The attention settings that may differ between the layers of a model."""

    window: int | None  # a position sees itself and the window - 1 before it; None: all before it
    rope_theta: float  # base of the rotary wavelengths
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
    """Grouped-query attention (Ainslie et al. 2023), with optional QK-norm and q, k and v biases.
    Tensor parallelism splits the heads, and then the output costs one all-reduce.
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
        """Returns (the output to add to the residual, (keys, values) for a cache).

        Args:
          past: this layer's cached keys and values, of the positions before x; None: no cache.
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
            out_BTNH = attend_to_cache(q, k, v, *past, seen_BS=at.seen[kind])
        return project(self, "o", out_BTNH, contract=2), (k, v)


class Positions(NamedTuple):
    """The positions of a call's tokens and what they may attend to; all layers share it."""

    segments: jax.Array | None  # [B, T]; positions attend within their segment. None: one per row
    angles: dict[Kind, jax.Array]  # [B or 1, T, H/2], rotary embeddings, float32 radians
    seen: dict[Kind, jax.Array]  # [B, S], bool: cache slots to attend to; {} without a cache


def positions(config, tokens_BT, segment_ids_BT, positions_BT=None, cache=None) -> Positions:
    """The Positions of a call, with or without a Cache. positions_BT None: 0 to T - 1."""
    if positions_BT is None:
        positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    angles = {kind: rope_angles(kind, config.head_dim, positions_BT) for kind in kinds(config)}
    seen = {kind: cache.seen(kind.window) for kind in kinds(config)} if cache else {}
    return Positions(segment_ids_BT, angles, seen)


def kinds(config) -> tuple[Kind, ...]:
    """The kinds of one period of layers; layer l has kind l mod len(kinds)."""
    alike = Kind(config.sliding_window, config.rope_theta, config.rope_scaling)
    return tuple(Kind(*kind) for kind in config.layer_kinds) or (alike,)


def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kernel: str = "auto"):
    """Causal softmax attention with the best kernel for the device. Returns [B, T, N, H].

    A position attends to itself and to earlier positions in its own segment and sliding window.
    """
    (_, T, N, H), kv_heads = q_BTNH.shape, "kv_heads"
    if shards("heads") > shards("kv_heads"):  # give each device the kv heads of its own queries
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
    """Chooses the kernel: ("xla" or a key of KERNELS, a description with the reason for "xla").

    Args:
      name: "auto" chooses for the active mesh, or for the default device without one; any other
        name is returned unchanged.
      seq_len: T, positions per row.
      segments: whether rows have segment ids.
    """
    where = device()
    if name != "auto" or where.platform not in ("tpu", "gpu"):
        name = "xla" if name == "auto" else name
        return name, name
    unsupported = {f"rules that split {axis}": shards(axis) > 1 for axis in ("seq", "head_dim")}
    if where.platform == "tpu":
        block = _block(seq_len)
        name, described = "splash", f"splash, blocks of {block}"
        unsupported[f"{seq_len:,} positions, not a multiple of 128"] = not block
    else:
        name = described = "triton" if segments else "cudnn"
        capability = _capability(where.device_kind)
        widest = 256 if capability >= 9 and name == "cudnn" else 128
        unsupported[where.device_kind] = capability < 8
        unsupported[dtype] = dtype == "float32"
        unsupported[f"a head dim of {head_dim}"] = head_dim % 8 > 0 or widest < head_dim
        unsupported["segments and a sliding window together"] = segments and window is not None
    why = next((f"xla, no kernel for {what}" for what, found in unsupported.items() if found), None)
    return ("xla", why) if why else (name, described)


def attention_kernels(config, seq_len: int, segments: bool) -> list[tuple[str, str]]:
    """The `best_kernel` of each kind of layer in a model."""
    facts = (config.attention, seq_len, segments, config.head_dim, config.dtype)
    return [best_kernel(*facts, kind.window) for kind in kinds(config)]


def splash(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None) -> jax.Array:
    """TPU kernel: keeps scores on chip and skips masked blocks.

    Peak memory of 8b with 4 layers, fsdp, a row of 32,768 on each of 16 v5p: 9.8 GB (XLA: 95.4).
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    T, N, H = q_BTNH.shape[1:]
    mask = tpu.CausalMask((T, T)) if window is None else tpu.LocalMask((T, T), (window - 1, 0), 0)
    # Two backward kernels: a fused one keeps a partial dQ for each block of keys, 15 GB more there.
    b = _block(T)
    sizes = tpu.BlockSizes(
        block_q=b, block_kv=b, block_q_dkv=b, block_kv_dkv=b, block_q_dq=b, block_kv_dq=b
    )
    kernel = tpu.make_splash_mha(
        tpu.MultiHeadMask([mask] * N), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        interpret=device().platform == "cpu",
    )  # fmt: skip
    ids = None if segment_ids_BT is None else tpu.SegmentIds(segment_ids_BT, segment_ids_BT)
    heads_first = (x.swapaxes(1, 2) for x in (q_BTNH * H**-0.5, k_BSKH, v_BSKH))
    out_BNTH = jax.vmap(kernel)(*heads_first, ids)  # its annotation is of another use
    return out_BNTH.swapaxes(1, 2)  # pyright: ignore[reportAttributeAccessIssue]


def triton(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: None) -> jax.Array:
    """NVIDIA kernel for segments, where cuDNN needs a T × T mask: 2.1 GB for a row of 32,768."""
    from jax.experimental.pallas.ops.gpu import attention as gpu

    if window is not None:
        raise ValueError(f"attention='triton' does not support sliding_window={window}; use 'xla'")
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    if segment_ids_BT is None:
        segment_ids_BT = jnp.zeros((B, T), jnp.int32)
    block, rest = (64, 32) if H > 64 else (128, 64)  # fits into 100 kB of shared memory
    wide = ((0, 0), (0, -T % block), (0, 0), (0, 0))
    k, v = (jnp.pad(jnp.repeat(x, N // K, 2), wide) for x in (k_BSKH, v_BSKH))
    ids = jnp.pad(segment_ids_BT, wide[:2], constant_values=-1)  # padding is its own segment
    sizes = gpu.BlockSizes(block, block, rest, rest, rest, rest)
    out_BTNH = gpu.mha(
        jnp.pad(q_BTNH, wide), k, v, ids, sm_scale=H**-0.5, causal=True, block_sizes=sizes,
        interpret=device().platform == "cpu",
    )  # fmt: skip
    return out_BTNH[:, :T]  # pyright: ignore[reportIndexIssue]: custom_vjp hides the type


def cudnn(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None) -> jax.Array:
    """NVIDIA kernel for rows without segments."""
    if segment_ids_BT is not None:
        raise ValueError("attention='cudnn' does not support segment ids; use 'triton' or 'xla'")
    left = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, is_causal=True, local_window_size=left, implementation="cudnn"
    )


KERNELS = {"splash": splash, "triton": triton, "cudnn": cudnn}
KERNEL_NAMES = ("auto", "xla", *KERNELS)  # valid values of Config.attention


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


def blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kv_heads: str):
    """Attention for any platform: multiplies each block of queries by the keys that it may see.

    This halves the work of the full square, and XLA's CPU backend runs the blocks in parallel (1.6
    times faster).

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
        # M is G and T as one dim: on the CPU backend the step is 1.5% faster than with five dims.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens that a model has read so far. L layers, S slots.

    Rows are left-padded: the newest token of every row is in slot `length` - 1.
    """

    k: jax.Array  # [L, B, S, K, H], rotated, in config.dtype; sharded by `batch` and `kv_heads`
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
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(old, new, self.length, axis=2)
            for old, new in zip((self.k, self.v), kv, strict=True)
        )
        return Cache(k, v, self.first, self.length + 1)


def left_padded(tokens_BT: jax.Array, lengths_B: jax.Array):
    """Places left-padded prompts: (slot of each first token [B], positions and segments [B, T])."""
    T = tokens_BT.shape[1]
    first_B = constrain(T - lengths_B, "batch")
    positions_BT = jnp.arange(T)[None] - first_B[:, None]
    return first_B, positions_BT, (positions_BT >= 0).astype(jnp.int32)  # padding: segment 0


def fill_cache(kv, first_B: jax.Array, slots: int) -> Cache:
    """A Cache of `slots` slots whose first T hold these keys and values, [L, B, T, K, H]."""
    T = kv[0].shape[2]
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, slots - T), (0, 0), (0, 0))) for x in kv)
    return Cache(k, v, first_B, jnp.int32(T))


def attend_to_cache(q_BTNH, k_BTKH, v_BTKH, k_BSKH, v_BSKH, seen_BS) -> jax.Array:
    """Attention of one new position (T = 1) to a layer's cache and itself. Returns [B, 1, N, H]."""
    (B, T, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    axes = ("batch", "seq", "kv_heads", "head_dim")  # as the cache, however heads are split
    q_BTNH = constrain(q_BTNH, *axes)
    q_BKGH = reshape(q_BTNH, (B, K, N // K, H), "batch", "kv_heads", None, "head_dim")
    to = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # The cache is the left operand: XLA's CPU backend would transpose a right one first.
    logits_BKGS = to("BSKH,BKGH->BKSG", k_BSKH, q_BKGH).swapaxes(2, 3)
    logits_BKGS = jnp.where(seen_BS[:, None, None], logits_BKGS, -jnp.inf)
    own_BKGT = to("BKGH,BTKH->BKGT", q_BKGH, k_BTKH)
    logits = jnp.concatenate([logits_BKGS, own_BKGT], axis=-1) / math.sqrt(H)
    weights_BKGS = jax.nn.softmax(logits, axis=-1).astype(v_BSKH.dtype)
    out_BKGH = jnp.einsum("BKGS,BSKH->BKGH", weights_BKGS[..., :-T], v_BSKH)
    out_BKGH += jnp.einsum("BKGT,BTKH->BKGH", weights_BKGS[..., -T:], v_BTKH)
    out_BTNH = reshape(out_BKGH, (B, T, N, H), *axes)
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim")
