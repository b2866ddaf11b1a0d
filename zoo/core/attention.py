"""Grouped-query attention with rotary embeddings: the module, and attention over a mesh.

Shapes: B batch, T query positions, S key positions, D embed, N heads, K kv heads, H head dim.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..kernels import choice
from .layers import AttentionType, multiply, rope_angles, rotate, sublayer_input
from .sharding import Axis, constrain, explicit, mesh_axes, param, per_device, shards


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023). Tensor parallelism splits the heads, and then
    the output costs one all-reduce.
    """

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.q = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.v = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        config.add_weights(self, rngs, q=1, k=1, v=1, o=2)

    def __call__(self, x_BTD, inputs: "AttentionInputs", kind: AttentionType, cache_index=None):
        """Returns (output to add to the residual, (keys, values))."""
        x_BTD = sublayer_input(x_BTD, self.q)
        q_BTNH = multiply(x_BTD, self.q)
        k_BTKH = multiply(x_BTD, self.k)
        v_BTKH = multiply(x_BTD, self.v)
        q_BTNH = inputs.rotate(q_BTNH, kind)
        k_BTKH = inputs.rotate(k_BTKH, kind)
        out_BTNH = inputs.attend(q_BTNH, k_BTKH, v_BTKH, kind, cache_index)
        return multiply(out_BTNH, self.o, contract=2, seq="residual_seq"), (k_BTKH, v_BTKH)


# ---- what attention depends on besides the residual stream ---------------------------------------


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Where the positions of rows are while they attend: each device has whole rows, for its own
    heads. parallel/context.py has other layouts.
    """

    exchange: str | None = None  # between devices, for the choice of a kernel
    seq: str | None = None  # the logical axis of T
    heads: Axis = "heads"  # that of N
    kv_heads: Axis = "kv_heads"  # that of K

    def positions(self, seq_len: int) -> jax.Array:
        """The positions 0 to T - 1 in the order that they have on the devices, [T]."""
        return jnp.arange(seq_len)

    def reorder(self, x_BT, *axes: str, back: bool = False) -> Any:
        """Brings [B, T, ...] or None into that order, or `back`; axes: of the dims after T."""
        return x_BT

    def on_device(self, settings: choice.Settings) -> choice.Settings:
        """The settings of a kernel on each device, from those of full rows."""
        return settings


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The positions of a call's tokens and what they may attend to; all layers share it."""

    segment_ids_BT: jax.Array | None  # positions attend within their segment. None: one per row
    positions_BT: jax.Array  # [B or 1, T], int: the place of each token in its row
    angles: dict[AttentionType, jax.Array]  # [B or 1, T, H/2], rotary embeddings, float32 radians
    counted_BT: jax.Array  # bool: the positions that metrics of experts count
    layout: RowLayout
    kernel: str  # Config.attention
    causal: bool
    generates: bool = False  # whether layers return what a cache keeps, and experts drop nothing

    def rotate(self, x_BTNH: jax.Array, kind: AttentionType) -> jax.Array:
        """Queries or keys with the rotary embeddings of a kind of layer, if it has any."""
        if kind.rope_theta is None:
            return x_BTNH
        return rotate(x_BTNH, self.angles[kind], kind.magnitude)

    def attend(
        self,
        q_BTNH,
        k_BTKH,
        v_BTKH,
        kind: AttentionType,
        cache_index=None,
        *,
        soft_cap: float | None = None,
        sinks_N=None,
    ) -> jax.Array:
        """The output of attention, [B, T, N, H]; cache_index: the layer's number in a cache."""
        return attend(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            self.segment_ids_BT,
            window=kind.window,
            kernel=self.kernel,
            layout=self.layout,
            soft_cap=soft_cap,
            sinks_N=sinks_N,
            causal=self.causal,
        )

    def of_layers(self, layers, first: int = 0) -> Any:
        """The cache_index of each of a stack's layers, [L], the first one's being `first`."""
        return None


def make_inputs(
    config, tokens_BT, segment_ids_BT=None, targets_BT=None, positions_BT=None, lengths_B1=None
) -> AttentionInputs:
    """The AttentionInputs of a call.

    Args:
      targets_BT: in training; metrics count positions whose target is ≥ 0. None: all.
      positions_BT: None: 0 to T - 1.
      lengths_B1: with positions_BT: each row's tokens so far.
    """
    seq_len = tokens_BT.shape[1]
    layout = config.row_layout(seq_len)
    counted_BT = constrain(tokens_BT if targets_BT is None else targets_BT, "batch", "seq") >= 0
    if positions_BT is None:
        positions_BT = layout.positions(seq_len)[None]
    positions_BT = constrain(positions_BT, "batch" if len(positions_BT) > 1 else None, "seq")
    positions_BT, length = config.rope_places(positions_BT, segment_ids_BT, seq_len, lengths_B1)
    rotary = [kind for kind in config.kinds if kind.rope_theta is not None]
    return AttentionInputs(
        segment_ids_BT=segment_ids_BT,
        positions_BT=positions_BT,
        angles={
            kind: rope_angles(kind, config.rotary_dim, positions_BT, length) for kind in rotary
        },
        counted_BT=counted_BT,
        layout=layout,
        kernel=config.attention,
        causal=config.causal,
    )


# ---- attention over a mesh -----------------------------------------------------------------------


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *,
    window: int | None = None,
    kernel: str = "auto",
    layout: RowLayout = RowLayout(),
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    causal: bool = True,
) -> jax.Array:
    """Softmax attention with the best kernel for the device. Returns [B, T, N, H].

    A position attends to itself and to earlier positions in its own segment and sliding window.
    Values, and so outputs, may have another H than queries and keys.

    Args:
      kernel: Config.attention; see kernels/choice.py.
      layout: where positions are while they attend.
      soft_cap: limits scores smoothly; see layers.soft_cap.
      sinks_N: a score per head that takes part in the softmax and has no value.
      causal: False: it also attends to later positions, in a window to as many as before.
    """
    _, T, _, H = q_BTNH.shape
    settings = choice.Settings(positions=T, window=window, causal=causal, soft_cap=soft_cap)
    settings = layout.on_device(settings)
    request = choice.Request(
        seq_len=T,
        head_dim=H,
        dtype=str(q_BTNH.dtype),
        segments=segment_ids_BT is not None,
        exchange=layout.exchange,
        soft_cap=soft_cap is not None,
        sinks=sinks_N is not None,
        two_sided=window is not None and not causal,
    )
    kernel = choice.choose_kernel(kernel, request).kernel
    seq, heads = layout.seq, layout.heads
    k_BSKH, v_BSKH, kv_heads = with_own_kv_heads(k_BSKH, v_BSKH, layout)
    if kernel == "xla":
        return choice.blockwise(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, kv_heads, causal)
    q_axes = ("batch", seq, heads, None)  # H whole, whatever the rules
    kv_axes = ("batch", seq, kv_heads, None)
    out_BTNH = per_device(
        functools.partial(choice.on_device, kernel, settings),
        (q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, sinks_N),
        (q_axes, kv_axes, kv_axes, ("batch", seq), (heads,)),
        check_vma=False,
    )
    if layout.exchange is None:
        return out_BTNH
    return constrain(out_BTNH, "batch", "seq", "heads", "head_dim")


def with_own_kv_heads(k_BSKH, v_BSKH, layout: RowLayout) -> tuple:
    """Gives each device the kv heads of its own queries, repeated no more than that takes.

    Returns: (keys, values, the logical axes of their K).
    """
    K = k_BSKH.shape[2]
    heads = layout.heads
    if mesh_axes(heads) == mesh_axes(layout.kv_heads) and K % shards(layout.kv_heads) == 0:
        return k_BSKH, v_BSKH, layout.kv_heads
    times = math.lcm(K, shards(heads)) // K
    if times > 1:
        repeat = functools.partial(
            jnp.repeat,
            repeats=times,
            axis=2,
            out_sharding=explicit("batch", "seq", "kv_heads", "head_dim"),
        )
        k_BSKH, v_BSKH = repeat(k_BSKH), repeat(v_BSKH)
    k_BSKH = constrain(k_BSKH, "batch", layout.seq, heads, None)
    v_BSKH = constrain(v_BSKH, "batch", layout.seq, heads, None)
    return k_BSKH, v_BSKH, heads
