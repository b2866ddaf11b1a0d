"""Gemma 4's tower: a Transformer over the patches of pictures of any height and width.

Half of a head's dims rotate by a patch's column, the other half by its row. Queries and keys are normed
with a scale, values without one; scores are not divided by √H; each sublayer has a norm before and one
after it. Inputs and outputs of the linear layers may be clipped, to bounds that a folder has: buffers.
The facts are those of Gemma4VisionModel in `transformers` (Google 2026).

Shapes: P pictures, T patches, D embed, F mlp, N heads, H head dim.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.attention import make_inputs
from ..core.layers import (
    AttentionType, GatedMLP, RMSNorm, add_output, multiply, rope_angles, rotate,
)  # fmt: skip
from ..core.sharding import constrain, param, variable
from ..core.stack import stack
from ..core.strategies import DECODER
from ..experts.normed import rms_normed
from ..options.compute_options import ComputeOptions
from ..options.periods import scan_by_kind

LINEAR = ("q", "k", "v", "o", "gate", "up", "down")  # the linear layers of a layer


@dataclasses.dataclass(frozen=True)
class TowerConfig(ComputeOptions):
    """The architecture. transformer.Config explains the fields without a comment."""

    embed: int
    num_layers: int
    num_heads: int
    head_dim: int  # a multiple of 4
    mlp: int
    norm_eps: float
    theta: float  # base of the rotary embeddings of columns and of rows
    clips: bool  # whether linear layers have bounds
    causal: bool = False
    rope_theta: None = None  # no place in a row rotates

    def __post_init__(self):
        super().__post_init__()
        if self.head_dim % 4:
            raise ValueError(
                f"head_dim={self.head_dim} of the tower must be a multiple of 4: columns rotate half "
                "of its pairs, rows the other half"
            )

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


class Patches(NamedTuple):
    """Where patches are in their pictures."""

    column_PT: jax.Array  # int
    row_PT: jax.Array
    is_padding_PT: jax.Array  # bool: no patch of the picture


class Bound(nnx.Variable):
    """A bound of a linear layer: a buffer, which training leaves as it is."""


class Clip(nnx.Module):
    """Bounds of what goes into a linear layer and of what comes out; at first there are none."""

    def __init__(self):
        self.input_min, self.output_min = bound(-math.inf), bound(-math.inf)
        self.input_max, self.output_max = bound(math.inf), bound(math.inf)

    def __call__(self, product, x: jax.Array) -> jax.Array:
        """`product` of clipped x, clipped."""
        y = product(clipped(x, self.input_min, self.input_max))
        return clipped(y, self.output_min, self.output_max)


def bound(value: float) -> Bound:
    return variable(jnp.full((), value, jnp.float32), (), Bound)


def clipped(x: jax.Array, least: Bound, most: Bound) -> jax.Array:
    return jnp.clip(x, least[...].astype(x.dtype), most[...].astype(x.dtype))


class Attention(nnx.Module):
    """The weights and norms of attention."""

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs):
        D, N, H = config.embed, config.num_heads, config.head_dim
        inner = ("embed", "heads", "head_dim")
        inner_kv = ("embed", "kv_heads", "head_dim")
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.q = param(rngs, (D, N, H), inner, D**-0.5)
        self.k = param(rngs, (D, N, H), inner_kv, D**-0.5)
        self.v = param(rngs, (D, N, H), inner_kv, D**-0.5)
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        self.q_norm = RMSNorm(H, config.norm_eps)
        self.k_norm = RMSNorm(H, config.norm_eps)
        # Scores begin divided by √H, which then is learned.
        self.k_norm.scale = variable(jnp.full(H, H**-0.5, jnp.float32), ("norm",))


class Layer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, config.embed, config.norm_eps)
        self.eps = config.norm_eps
        self.attention_norm = norm()
        self.attention = Attention(config, rngs=rngs)
        self.post_attention_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config, jax.nn.gelu, rngs=rngs)  # by tanh
        self.post_mlp_norm = norm()
        self.clips: Any = nnx.Dict({name: Clip() for name in LINEAR}) if config.clips else None

    def __call__(self, x_PTD, inputs, kind: AttentionType, angles) -> jax.Array:
        out_PTD = self.attend(self.attention_norm(x_PTD), inputs, kind, angles)
        x_PTD = add_output(x_PTD, out_PTD, self.post_attention_norm)
        out_PTD = self.feed_forward(self.mlp_norm(x_PTD))
        x_PTD = add_output(x_PTD, out_PTD, self.post_mlp_norm)
        return constrain(x_PTD, "batch", "residual_seq", "act_embed")

    def attend(self, x_PTD, inputs, kind, angles) -> jax.Array:
        q_PTNH = self.attention.q_norm(self.linear("q", x_PTD))
        k_PTNH = self.attention.k_norm(self.linear("k", x_PTD))
        v_PTNH = rms_normed(self.linear("v", x_PTD), self.eps)
        q_PTNH = rotate_by_place(q_PTNH, angles) * math.sqrt(q_PTNH.shape[-1])
        k_PTNH = rotate_by_place(k_PTNH, angles)
        out_PTNH = inputs.attend(q_PTNH, k_PTNH, v_PTNH, kind)
        return self.linear("o", out_PTNH, contract=2)

    def feed_forward(self, x_PTD) -> jax.Array:
        if self.clips is None:
            return self.mlp(x_PTD)
        hidden_PTF = self.mlp.activation(self.linear("gate", x_PTD)) * self.linear("up", x_PTD)
        return self.linear("down", hidden_PTF)

    def linear(self, name: str, x, contract: int = 1) -> jax.Array:
        """A linear layer's output."""
        weights = vars(self.mlp if name in ("gate", "up", "down") else self.attention)
        product = functools.partial(multiply, weight=weights[name], contract=contract)
        return product(x) if self.clips is None else self.clips[name](product, x)


def rotate_by_place(x_PTNH: jax.Array, angles) -> jax.Array:
    """Rotates the first half of H by the first of two angles [P, T, H/4], the other by the second."""
    halves = zip(jnp.split(x_PTNH, 2, axis=-1), angles, strict=True)
    return jnp.concatenate([rotate(half, angle_PTH) for half, angle_PTH in halves], axis=-1)


class Tower(nnx.Module):
    """x_PTD → x_PTD: stacked layers.

    Args:
      axis: the logical axis of their number.
    """

    def __init__(self, config: TowerConfig, axis: str, *, rngs: nnx.Rngs):
        self.config = config
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs, axis)

    def __call__(self, x_PTD, patches: Patches) -> jax.Array:
        """Padding attends to padding alone, and no patch to it."""
        config = self.config
        segments_PT = patches.is_padding_PT.astype(jnp.int32)
        inputs = make_inputs(config, jnp.zeros_like(segments_PT), segments_PT)
        turns = AttentionType(None, config.theta)
        angles = [
            rope_angles(turns, config.head_dim // 2, place_PT)
            for place_PT in (patches.column_PT, patches.row_PT)
        ]

        def run_layer(x_PTD, layer, kind):
            layer = config.use_layer(layer, DECODER)  # inside remat: gathers again
            return layer(x_PTD, inputs, kind, angles), None

        x_PTD = constrain(x_PTD, "batch", "residual_seq", "act_embed")
        remat = config.remat_policy
        x_PTD, _ = scan_by_kind(run_layer, x_PTD, self.layers, config.kinds, remat, config.unroll)
        return constrain(x_PTD, "batch", None, "act_embed")
