"""The table from a device to its kernels, and the attention that XLA compiles for short rows.

Other kernels are in files of their own, which are imported for the devices that use them.

Shapes: B batch, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..core.layers import dot
from ..core.sharding import constrain, device, explicit, mesh_axes, reshape, shards
from .shared import NOT_SEEN, Settings, block_of, compute_capability, in_window, is_target

JOINABLE = ("flash", "splash", "triton")  # outputs for several parts of the keys can be joined
KERNELS = ("auto", "xla", *JOINABLE, "cudnn")  # valid values of Config.attention
# The kernel's outputs for earlier and for later positions are joined, so it has to be one of JOINABLE:
RING = "ring"  # of several devices
SPANS = "spans"  # that see in both directions
LONGEST_MASK = 8_192  # positions up to which GPUs before Hopper get a mask of T × T for segments
FLASH_FROM = 8_192  # positions from which `flash` is faster on CPUs than `blockwise`


# ---- which kernel --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Request:
    """What the choice of a kernel depends on."""

    seq_len: int  # positions of a row
    head_dim: int
    dtype: str
    segments: bool  # whether rows have segment ids
    # between devices that split T, see context.choose_exchange, or SPANS; None: neither
    exchange: str | None
    soft_cap: bool = False  # whether scores have one
    sinks: bool = False  # whether heads have them
    two_sided: bool = False  # whether a window reaches to later positions too


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel, and why it is this one."""

    kernel: str  # one of KERNELS, but not "auto"
    blocks: int = 0  # positions in a block, of kernels that have blocks
    obstacle: str = ""  # what the platform's first kernel can't do, if it was not chosen


def choose_kernel(name: str, request: Request) -> Choice:
    """Chooses the kernel for a value of Config.attention.

    "auto" chooses for the active mesh, or for the default device without one. Another name chooses
    that kernel if it supports the request, else "flash".
    """
    platform = device().platform
    if name == "auto" and platform not in ("tpu", "gpu"):
        name = "xla" if request.seq_len < FLASH_FROM else "flash"
    if name != "auto":
        unfit = request.soft_cap or request.exchange in (RING, SPANS)
        if name == "cudnn":
            unfit = unfit or request.two_sided
        if name == "xla":
            unfit = unfit or request.sinks or request.exchange is not None
        if name == "splash":
            return _splash(request)
        return Choice("flash" if unfit and name not in JOINABLE else name)
    plain = not request.soft_cap and not request.sinks
    if shards("head_dim") > 1 and not request.exchange and plain:
        return Choice("xla", obstacle="rules that split head_dim")
    return _splash(request) if platform == "tpu" else _on_gpu(request)


def _splash(request: Request) -> Choice:
    seq_len = request.seq_len // (shards("seq") if request.exchange == "ring" else 1)
    if blocks := block_of(seq_len):
        return Choice("splash", blocks=blocks)
    return Choice("flash", obstacle=f"{seq_len:,} positions, not a multiple of 128")


def _on_gpu(request: Request) -> Choice:
    gpu = device().device_kind
    capability = compute_capability(gpu)
    if capability < 8:
        return Choice("flash", obstacle=gpu)
    if request.head_dim > 256:
        return Choice("flash", obstacle=f"a head dim of {request.head_dim}")
    obstacle = _obstacle_of_cudnn(request, capability)
    return Choice("triton" if obstacle else "cudnn", obstacle=obstacle)


def _obstacle_of_cudnn(request: Request, capability: float) -> str:
    if request.dtype == "float32":
        return request.dtype
    if request.head_dim > 128 and capability < 9:
        return f"a head dim of {request.head_dim}"
    if request.exchange in (RING, SPANS):
        return {RING: "a ring", SPANS: "spans that see both ways"}[request.exchange]
    if request.soft_cap:
        return "soft caps"
    if request.two_sided:
        return "windows to both sides"
    masks = request.seq_len <= LONGEST_MASK and request.seq_len % 2 == 0
    if request.segments and capability < 9 and not masks:
        return f"{request.seq_len:,} positions with segments"
    return ""


def on_device(kernel: str, settings: Settings, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    """One device's part of attention by a kernel other than XLA's: [B, T, N, H]."""
    if kernel == "cudnn":
        from .cudnn import cudnn

        return cudnn(settings, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)
    from .flash import attend_by_blocks

    return attend_by_blocks(kernel, settings, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)


def cross_entropies(logits_RMV: jax.Array, targets_RM: jax.Array) -> jax.Array:
    """Cross entropies [R, M] of the targets, from logits in float32."""
    if device().platform == "gpu" and shards("vocab") == 1:
        from .gpu_loss import nats_in_one_pass

        nats_RM: Any = nats_in_one_pass(logits_RMV, targets_RM)
        return nats_RM
    picked_RM = jnp.where(is_target(logits_RMV, targets_RM), logits_RMV, 0).sum(axis=-1)
    return jax.nn.logsumexp(logits_RMV, axis=-1) - picked_RM


# ---- the kernel of XLA ---------------------------------------------------------------------------


def blockwise(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kv_heads, causal: bool = True
):
    """Attention for any platform: multiplies each block of queries by the keys that it may see.

    With a causal mask, this halves the work. XLA's CPU backend runs the blocks in parallel (1.6 times
    faster). kv_heads is the logical axis of K.
    """
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    G = N // K
    q = reshape(q_BTNH, (B, T, K, G, H), "batch", "seq", kv_heads, None, "head_dim")
    q_BKGTH = q.transpose(0, 2, 3, 1, 4)
    k_BKSH, v_BKSH = k_BSKH.swapaxes(1, 2), v_BSKH.swapaxes(1, 2)
    if segment_ids_BT is not None and mesh_axes("seq"):  # one device; the mask has T twice
        segment_ids_BT = constrain(segment_ids_BT, "batch", None)
    block = max(128, -(-T // 8))
    outputs = []
    for start in range(0, T, block):
        end = min(start + block, T)
        first = 0 if window is None else max(0, start + 1 - window)
        last = end if causal else T if window is None else min(T, end + window - 1)
        # M is G and T as one dim: on CPUs the step is 1.5% faster than with five dims.
        q_BKMH = reshape(q_BKGTH[:, :, :, start:end], (B, K, -1, H), "batch", kv_heads)
        k, v = k_BKSH[:, :, first:last], v_BKSH[:, :, first:last]
        logits = dot("BKMH,BKSH->BKMS", q_BKMH, k)
        age = jnp.arange(start, end)[:, None] - jnp.arange(first, last)[None, :]
        seen = in_window(age if causal else abs(age), window)[None, None, None]
        if segment_ids_BT is not None:
            same = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, first:last]
            seen &= same[:, None, None]
        mask_rows = None if segment_ids_BT is None else "batch"
        scores_BKMS = masked_scores(logits, math.sqrt(H), seen, mask_rows, G, kv_heads)
        largest_BKM1 = jax.lax.stop_gradient(scores_BKMS.max(axis=-1, keepdims=True))
        weights_BKMS = jnp.exp(scores_BKMS - largest_BKM1)
        sum_BKM1 = weights_BKMS.sum(axis=-1, keepdims=True)
        # Divides outputs, which are fewer numbers than weights. Those stay in float32: gradients of q and
        # k are differences between terms of numerator and sum, which rounding one of them would spoil.
        out_BKMH = (dot("BKMS,BKSH->BKMH", weights_BKMS, v) / sum_BKM1).astype(v.dtype)
        outputs.append(reshape(out_BKMH, (B, K, G, -1, v.shape[-1]), "batch", kv_heads))
    out_BKGTH = jnp.concatenate(outputs, axis=3)
    out_BTKGH = out_BKGTH.transpose(0, 3, 1, 2, 4)
    return reshape(out_BTKGH, (B, T, N, -1), "batch", "seq", "heads", "head_dim")


def masked_scores(logits_BKMS, root: float, seen_B11TS, rows, G: int, kv_heads) -> jax.Array:
    """The logits over `root`, and NOT_SEEN where a query doesn't see a key: [B, K, M, S].

    On CPUs by an addition: NOT_SEEN takes up what is added to it, so both expressions are equal bit by bit.
    The compiler joins an addition with the products before and after it in one loop over tiles, which
    leaves scores in the processor's caches. It doesn't do so with a choice, nor with more dims.

    Args:
      seen_B11TS: bool; all rows may share one.
      rows: the logical axis of its B; None: they do.
    """
    B, K, _, S = logits_BKMS.shape
    masks, _, _, T, _ = seen_B11TS.shape
    if device().platform == "cpu":
        mask_B11TS = jnp.where(seen_B11TS, 0.0, NOT_SEEN)
        sharding = explicit(rows, None, None, None, None)
        mask_B1GTS = jnp.broadcast_to(mask_B11TS, (masks, 1, G, T, S), out_sharding=sharding)
        logits_BKMS = constrain(logits_BKMS, "batch", kv_heads, None, None)
        return logits_BKMS / root + reshape(mask_B1GTS, (masks, 1, G * T, S), rows)
    logits_BKGTS = reshape(logits_BKMS, (B, K, G, T, S), "batch", kv_heads)
    scores_BKGTS = jnp.where(seen_B11TS, logits_BKGTS / root, NOT_SEEN)
    return reshape(scores_BKGTS, logits_BKMS.shape, "batch", kv_heads)
