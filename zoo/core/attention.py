"""Grouped-query attention with rotary embeddings: the module, and attention over a mesh.

Files that only some calls need: splash.py on TPUs, context.py if rules split positions, and cache.py
to generate.

Shapes: B batch, T query positions, S key positions or slots of the cache, D embed, N heads, K kv
heads, H head dim.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..kernels.choice import Request, Settings, blockwise, choose_kernel
from .layers import Kind, adapters, add_bias, gather, project, rope_angles, rotate
from .sharding import constrain, explicit, mesh_axes, param, per_device, shards


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023). Tensor parallelism splits the heads, and then
    the output costs one all-reduce.

    Args:
      biases: the projections that have one, some of "q", "k", "v" and "o".
      norm: makes the norms of queries and keys from H (QK-norm); None: none.
      joint: whether these norm all heads together.
      soft_cap: of scores, see `attend`.
      scale: of scores, in addition to 1 / sqrt(H).
      growth: see `grown`.
      sinks: whether each head has a sink, see `attend`.
      gated: whether each head's output is multiplied by a sigmoid of the input; the gates' weights
        are the second half of `q`, [D, N, 2H].
    """

    def __init__(
        self,
        config,
        *,
        biases: tuple[str, ...] = (),
        norm=None,
        joint: bool = False,
        soft_cap: float | None = None,
        scale: float = 1.0,
        growth: float = 0.0,
        sinks: bool = False,
        gated: bool = False,
        rngs: nnx.Rngs,
    ):
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.config = config
        self.soft_cap = soft_cap
        self.scale = scale
        self.growth = growth
        self.gated = gated
        self.q = param(rngs, (D, N, 2 * H if gated else H), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.v = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        bias = functools.partial(param, rngs, stddev=0.0)
        self.q_bias = bias((N, H), ("heads", "head_dim")) if "q" in biases else None
        self.k_bias = bias((K, H), ("kv_heads", "head_dim")) if "k" in biases else None
        self.v_bias = bias((K, H), ("kv_heads", "head_dim")) if "v" in biases else None
        self.o_bias = bias((D,), ("norm",)) if "o" in biases else None
        self.sinks = param(rngs, (N,), ("heads",), 1.0) if sinks else None
        if norm and joint:
            self.q_norm: Any = norm((N, H), axes=("heads", "head_dim"))
            self.k_norm: Any = norm((K, H), axes=("kv_heads", "head_dim"))
        else:
            self.q_norm = norm(H) if norm else None
            self.k_norm = norm(H) if norm else None
        self.lora = adapters(self, config, rngs, q=1, k=1, v=1, o=2)

    def __call__(self, x_BTD, positions: "Positions", kind: Kind, past=None):
        """Returns (output to add to the residual, (keys, values)).

        Args:
          past: the layer's number in the cache; None: attends to x itself.
        """
        x_BTD = gather(x_BTD, self.q)
        q_BTNH = add_bias(project(self, "q", x_BTD), self.q_bias)
        k_BTKH = add_bias(project(self, "k", x_BTD), self.k_bias)
        v_BTKH = add_bias(project(self, "v", x_BTD), self.v_bias)
        if self.gated:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
            k_BTKH = self.k_norm(k_BTKH)
        if kind.rope_theta is not None:
            q_BTNH = rotate(q_BTNH, positions.angles[kind], kind.magnitude)
            k_BTKH = rotate(k_BTKH, positions.angles[kind], kind.magnitude)
        if self.scale != 1:
            q_BTNH = q_BTNH * self.scale
        if self.growth:
            q_BTNH = grown(q_BTNH, positions.numbers_BT, self.growth, kind)
        sinks_N = None if self.sinks is None else self.sinks[...]
        if past is None:
            out_BTNH = attend(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                positions.segment_ids_BT,
                window=kind.window,
                kernel=self.config.attention,
                context=self.config.context,
                striped=positions.striped,
                soft_cap=self.soft_cap,
                sinks_N=sinks_N,
                causal=self.config.causal,
            )
        else:
            from ..options.cache import attend_to_cache

            past_k_BSKH, past_v_BSKH = positions.cache.of_layer(past)
            out_BTNH = attend_to_cache(
                keys=((q_BTNH, k_BTKH, past_k_BSKH),),
                values=(v_BTKH, past_v_BSKH),
                seen_BS=positions.seen[kind],
                root=math.sqrt(q_BTNH.shape[-1]),
                cap=self.soft_cap,
                sinks_N=sinks_N,
            )
        if self.gated:
            out_BTNH = out_BTNH * jax.nn.sigmoid(gate_BTNH)
        out_BTD = project(self, "o", out_BTNH, contract=2, seq="residual_seq")
        return add_bias(out_BTD, self.o_bias), (k_BTKH, v_BTKH)


def grown(q_BTNH: jax.Array, numbers_BT: jax.Array, growth: float, kind: Kind) -> jax.Array:
    """Queries, larger at positions beyond multiples of the original length (variant.Variant)."""
    scaling: Any = kind.rope_scaling
    times_BT = jnp.maximum(numbers_BT, 0) // scaling.original_length  # padding is before 0
    factor_BT11 = (1 + growth * jnp.log1p(times_BT.astype(jnp.float32)))[..., None, None]
    return q_BTNH * factor_BT11.astype(q_BTNH.dtype)


# ---- positions -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Positions:
    """The positions of a call's tokens and what they may attend to; all layers share it."""

    segment_ids_BT: jax.Array | None  # positions attend within their segment. None: one per row
    numbers_BT: jax.Array  # [B or 1, T], int: the place of each token in its row
    angles: dict[Kind, jax.Array]  # [B or 1, T, H/2], rotary embeddings, float32 radians
    counted_BT: jax.Array  # bool: the positions that metrics of experts count
    striped: bool = False  # whether T is in stripes, see context.has_stripes
    generates: bool = False  # whether keys and values are kept, and experts drop nothing
    seen: dict[Kind, jax.Array] = dataclasses.field(default_factory=dict)  # [B, S], bool: slots
    cache: Any = None  # a Cache


def make_positions(
    config,
    tokens_BT,
    segment_ids_BT=None,
    targets_BT=None,
    positions_BT=None,
    cache=None,
    lengths_B1=None,
) -> Positions:
    """The Positions of a call.

    Args:
      targets_BT: in training; metrics count positions whose target is ≥ 0. None: all.
      positions_BT: in generation; None: 0 to T - 1.
      cache: a Cache to attend to; None: none.
      lengths_B1: in generation: each row's tokens so far, for rotary scalings that depend on the
        length. None: T, or the length of each document.
    """
    seq_len = tokens_BT.shape[1]
    counted_BT = constrain(tokens_BT if targets_BT is None else targets_BT, "batch", "seq") >= 0
    generates = positions_BT is not None
    striped = False
    if not generates:
        position_T = jnp.arange(seq_len)
        if shards("seq") > 1:
            from ..parallel.context import has_stripes, positions_in_order

            striped = has_stripes(config, seq_len)
            position_T = positions_in_order(config, seq_len)
        positions_BT = position_T[None]
    positions_BT = constrain(positions_BT, "batch" if len(positions_BT) > 1 else None, "seq")
    rotary = [kind for kind in config.kinds if kind.rope_theta is not None]
    length: Any = seq_len
    if lengths_B1 is not None:
        length = constrain(lengths_B1, "batch", None)[..., None]
    elif segment_ids_BT is not None and config.scales_by_length:
        from ..options.rope_scaling import places_in_documents

        ids_BT = stripe(config, segment_ids_BT, back=True)
        positions_BT, length_BT = (stripe(config, x_BT) for x_BT in places_in_documents(ids_BT))
        length = length_BT[..., None]
    return Positions(
        segment_ids_BT=segment_ids_BT,
        numbers_BT=positions_BT,
        angles={
            kind: rope_angles(kind, config.rotary_dim, positions_BT, length) for kind in rotary
        },
        counted_BT=counted_BT,
        striped=striped,
        generates=generates,
        seen={kind: cache.seen(kind.window) for kind in config.kinds} if cache else {},
        cache=cache,
    )


def stripe(config, x_BT, *axes: str, back: bool = False) -> Any:
    """Brings [B, T, ...] into the order that positions have on a ring, or `back`; see context.py.

    Args:
      axes: the logical axes of the dims after T.
    """
    if x_BT is None or shards("seq") == 1:
        return x_BT
    from ..parallel.context import reorder

    return reorder(config, x_BT, *axes, back=back)


# ---- attention over a mesh -----------------------------------------------------------------------


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None = None,
    kernel: str = "auto",
    context: str = "auto",
    striped: bool = False,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    causal: bool = True,
) -> jax.Array:
    """Softmax attention with the best kernel for the device. Returns [B, T, N, H].

    A position attends to itself and to earlier positions in its own segment and sliding window.
    Values, and so outputs, may have another H than queries and keys.

    Args:
      kernel: Config.attention; see kernels.choose_kernel.
      context: how positions on different devices attend to each other; see context.choose_exchange.
      striped: whether positions are in stripes; see context.has_stripes.
      soft_cap: limits scores smoothly; see layers.soft_cap.
      sinks_N: a score per head that takes part in the softmax and has no value.
      causal: False: it also attends to later positions, in a window to as many as before.
    """
    _, T, N, H = q_BTNH.shape
    settings = Settings(positions=T, window=window, causal=causal, soft_cap=soft_cap)
    exchange = None
    if shards("seq") > 1:
        from ..parallel.context import around_devices, choose_exchange

        exchange = choose_exchange(context, N)
        if exchange == "ring":
            settings = around_devices(settings, striped)
    request = Request(
        seq_len=T,
        head_dim=H,
        dtype=str(q_BTNH.dtype),
        segments=segment_ids_BT is not None,
        exchange=exchange,
        soft_cap=soft_cap is not None,
        sinks=sinks_N is not None,
        two_sided=window is not None and not causal,
    )
    kernel = choose_kernel(kernel, request).kernel
    seq = "seq" if exchange == "ring" else None  # else each device has all positions of its heads
    heads, kv_heads = "heads", "kv_heads"
    if exchange == "all-to-all":
        heads, kv_heads = ("heads", "seq"), ("kv_heads", "seq")
    k_BSKH, v_BSKH, kv_heads = with_own_kv_heads(k_BSKH, v_BSKH, seq, heads, kv_heads)
    if kernel == "xla":
        return blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, kv_heads, causal)
    q_axes = ("batch", seq, heads, None)  # H whole, whatever the rules
    kv_axes = ("batch", seq, kv_heads, None)
    out_BTNH = per_device(
        functools.partial(attend_on_device, kernel, settings),
        (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N),
        (q_axes, kv_axes, kv_axes, ("batch", seq), (heads,)),
        check_vma=False,
    )
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim") if exchange else out_BTNH


def with_own_kv_heads(k_BSKH, v_BSKH, seq, heads, kv_heads) -> tuple:
    """Gives each device the kv heads of its own queries, repeated no more than that takes.

    Args:
      seq, heads, kv_heads: the logical axes of S, of the queries' N and of K.

    Returns: (keys, values, the logical axes of their K).
    """
    K = k_BSKH.shape[2]
    if mesh_axes(heads) == mesh_axes(kv_heads) and K % shards(kv_heads) == 0:
        return k_BSKH, v_BSKH, kv_heads
    times = math.lcm(K, shards(heads)) // K
    if times > 1:
        repeat = functools.partial(
            jnp.repeat,
            repeats=times,
            axis=2,
            out_sharding=explicit("batch", "seq", "kv_heads", "head_dim"),
        )
        k_BSKH, v_BSKH = repeat(k_BSKH), repeat(v_BSKH)
    k_BSKH = constrain(k_BSKH, "batch", seq, heads, None)
    v_BSKH = constrain(v_BSKH, "batch", seq, heads, None)
    return k_BSKH, v_BSKH, heads


def attend_on_device(kernel: str, settings, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N):
    """One device's part of `attend`: [B, T, N, H]."""
    if kernel == "cudnn":
        from ..kernels.cudnn import cudnn

        return cudnn(settings, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)
    from ..kernels.flash import attend_by_blocks

    return attend_by_blocks(kernel, settings, q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N)
