"""Attention kernels, each for one device's part, and the choice among them.

Shapes: B batch, T query positions, S key positions, N heads, K kv heads, G = N/K, H head dim. In
tiles, X = B · K.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from .layers import dot, soft_cap
from .sharding import constrain, device, mesh_axes, reshape, shards

JOINABLE = ("flash", "splash")  # kernels whose outputs for several parts of the keys can be joined
KERNELS = ("auto", "xla", *JOINABLE, "cudnn")  # valid values of Config.attention
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
    exchange: str | None  # between devices that split T, see context.choose_exchange; None: none
    soft_cap: bool = False  # whether scores have one
    sinks: bool = False  # whether heads have them
    two_sided: bool = False  # whether a window reaches to later positions too


@dataclasses.dataclass(frozen=True)
class Choice:
    """A kernel, and why it is this one."""

    kernel: str  # one of KERNELS, but not "auto"
    blocks: int = 0  # positions in a block, of kernels that have blocks
    obstacle: str = ""  # what the platform's own kernel can't do, if it was not chosen


def choose_kernel(name: str, request: Request) -> Choice:
    """Chooses the kernel for a value of Config.attention.

    "auto" chooses for the active mesh, or for the default device without one. Another kernel is
    taken as it is if it can do what is asked, else "flash".
    """
    platform = device().platform
    if name == "auto" and platform not in ("tpu", "gpu"):
        name = "xla" if request.seq_len < FLASH_FROM else "flash"
    if name != "auto":
        unfit = request.soft_cap or request.exchange == "ring"
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
    return _splash(request) if platform == "tpu" else _cudnn(request)


def _splash(request: Request) -> Choice:
    seq_len = request.seq_len // (shards("seq") if request.exchange == "ring" else 1)
    if blocks := block_of(seq_len):
        return Choice("splash", blocks=blocks)
    return Choice("flash", obstacle=f"{seq_len:,} positions, not a multiple of 128")


def _cudnn(request: Request) -> Choice:
    gpu = device().device_kind
    capability = compute_capability(gpu)
    widest = 256 if capability >= 9 else 128
    if capability < 8:
        return Choice("flash", obstacle=gpu)
    if request.dtype == "float32":
        return Choice("flash", obstacle=request.dtype)
    if request.head_dim > widest:
        return Choice("flash", obstacle=f"a head dim of {request.head_dim}")
    if request.exchange == "ring":
        return Choice("flash", obstacle="a ring")
    if request.soft_cap:
        return Choice("flash", obstacle="soft caps")
    if request.two_sided:
        return Choice("flash", obstacle="windows to both sides")
    masks = request.seq_len <= LONGEST_MASK and request.seq_len % 2 == 0
    if request.segments and capability < 9 and not masks:
        return Choice("flash", obstacle=f"{request.seq_len:,} positions with segments")
    return Choice("cudnn")


def block_of(seq_len: int, window: int | None = None) -> int:
    """Positions in a block of the TPU kernel; 0 if it doesn't support rows of this length.

    Blocks of 1,024 spare more passes over scores than they compute beyond a causal mask: a row of
    8,192 takes a fifth fewer cycles than with 512. Beyond a narrow window they compute more.
    """
    largest = (1_024,) if window is None or window >= 1_024 else ()
    return next((block for block in (*largest, 512, 384, 256, 128) if seq_len % block == 0), 0)


def compute_capability(kind: str) -> float:
    """The CUDA compute capability of a kind of GPU; 0.0 for AMD GPUs."""
    for gpu in jax.devices():
        text = str(getattr(gpu, "compute_capability", ""))
        if gpu.device_kind == kind and text.replace(".", "").isdigit():
            return float(text)
    return 9.0 if "NVIDIA" in kind else 0.0  # compiling for a GPU that this machine lacks


# ---- kernels: outputs and gradients by the keys of one device ------------------------------------

NOT_SEEN = -1e30  # a score without weight
TILE = 512  # queries, and keys, of one step of `flash`


@dataclasses.dataclass(frozen=True)
class Settings:
    """Static settings of a kernel on one device."""

    positions: int  # T on the device
    window: int | None
    causal: bool = True  # False: a position sees later ones too
    soft_cap: float | None = None
    ring: tuple[str, ...] = ()  # mesh axes that split T between devices
    devices: int = 1  # on the ring
    striped: bool = False  # see context.has_stripes


def may_see(
    window: int | None, ids_BT, ids_BS, offset, size: int, causal: bool = True
) -> jax.Array:
    """Which blocks of queries and keys may see each other in some row: bool [T/size, S/size].

    Compares the ranges of their ids: exact for packed rows, whose ids ascend; otherwise some blocks
    may see each other that don't. The arguments are those of `flash`.
    """

    def ranges(ids):
        # Padding ends a row, with id 0. As the highest id, it leaves the range of other blocks alone.
        blocks = (ids - 1).astype(jnp.uint32).reshape(len(ids), -1, size)
        return blocks.min(-1), blocks.max(-1)

    (low_BQ, high_BQ), (low_BK, high_BK) = ranges(ids_BT), ranges(ids_BS)
    share = (low_BQ[:, :, None] <= high_BK[:, None]) & (low_BK[:, None] <= high_BQ[:, :, None])
    Q, K = share.shape[1:]
    age = (jnp.arange(Q)[:, None] - jnp.arange(K)[None]) * size + offset  # between their starts
    seen = in_window(age if causal else abs(age), window, size - 1)
    return seen & (share.sum(0) > 0)


def in_window(age, window: int | None, slack: int = 0):
    """Whether a query sees a key that is `age` positions before it, in blocks `slack` more or less."""
    return (age >= -slack) & (window is None or age < window + slack)


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
    """Runs `tile` for all pairs of TILE queries and TILE keys in which some see each other.

    queries and query_sums are arrays [B, N, T, ...], in tiles [X, T, G, ...]; keys and key_sums are
    [B, K, S, ...], in tiles [X, S, ...]. `tile` takes what sees what and tiles of all four, and
    returns new tiles of both sums, which are returned in the end.
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


def blockwise(
    q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window: int | None, kv_heads, causal: bool = True
):
    """Attention for any platform: multiplies each block of queries by the keys that it may see.

    This halves the work of a causal mask's square, and XLA's CPU backend runs the blocks in parallel (1.6
    times faster). kv_heads is the logical axis of K.
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
        logits_BKGTS = reshape(logits, (B, K, G, end - start, last - first), "batch", kv_heads)
        age = jnp.arange(start, end)[:, None] - jnp.arange(first, last)[None, :]
        seen = in_window(age if causal else abs(age), window)[None, None, None]
        if segment_ids_BT is not None:
            same = segment_ids_BT[:, start:end, None] == segment_ids_BT[:, None, first:last]
            seen &= same[:, None, None]
        weights = jax.nn.softmax(jnp.where(seen, logits_BKGTS / math.sqrt(H), NOT_SEEN), axis=-1)
        weights_BKMS = reshape(weights.astype(v.dtype), logits.shape, "batch", kv_heads)
        out_BKMH = jnp.einsum("BKMS,BKSH->BKMH", weights_BKMS, v)
        outputs.append(reshape(out_BKMH, (B, K, G, -1, v.shape[-1]), "batch", kv_heads))
    out_BKGTH = jnp.concatenate(outputs, axis=3)
    out_BTKGH = out_BKGTH.transpose(0, 3, 1, 2, 4)
    return reshape(out_BTKGH, (B, T, N, -1), "batch", "seq", "heads", "head_dim")
