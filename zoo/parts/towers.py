"""A tower of SigLIP or CLIP: a Transformer with LayerNorm before each sublayer, biases and GELU.

Shapes: B batch, T positions, D embed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.attention import make_inputs
from ..options.compute_options import ComputeOptions
from .gelu import GELU, PlainMLP
from .norms import layer_norm
from ..options.general_attention import GeneralAttention
from ..core.layers import AttentionType, add_output
from ..core.sharding import constrain
from ..core.stack import stack
from ..options.periods import scan_by_kind
from ..core.strategies import DECODER, LAYERS


@dataclasses.dataclass(frozen=True)
class TowerConfig(ComputeOptions):
    """The architecture of one tower. transformer.Config explains the fields without a comment."""

    embed: int
    num_layers: int
    num_heads: int
    mlp: int
    norm_eps: float
    activation: str  # a key of gelu.GELU
    causal: bool
    layer_kinds: tuple[AttentionType, ...] = (AttentionType(window=None, rope_theta=None),)

    def __post_init__(self):
        if self.embed % self.num_heads:
            raise ValueError(f"embed={self.embed} is not divisible by num_heads={self.num_heads}")
        super().__post_init__()

    @property
    def head_dim(self) -> int:
        return self.embed // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads


def image_and_text(config) -> tuple[TowerConfig, TowerConfig]:
    """The towers of a siglip.Config. Raises ValueError if they can't be."""
    own = config.embed, config.num_layers, config.num_heads, config.mlp
    text = config.text_tower or own
    if len(text) != len(own):
        raise ValueError(f"text_tower={text} has {len(text)} numbers instead of {len(own)}")
    compute = {field.name: vars(config)[field.name] for field in dataclasses.fields(ComputeOptions)}
    make = functools.partial(TowerConfig, norm_eps=config.norm_eps, activation=config.activation)
    return make(*own, causal=False, **compute), make(*text, causal=config.clip, **compute)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.embed, config.norm_eps, config.dtype)
        self.attention_norm = norm()
        self.attention = GeneralAttention(config, biases=("q", "k", "v", "o"), rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = PlainMLP(config, GELU[config.activation], rngs=rngs)

    def __call__(self, x_BTD, inputs, kind):
        out_BTD, _ = self.attention(self.attention_norm(x_BTD), inputs, kind)
        x_BTD = add_output(x_BTD, out_BTD)
        x_BTD = add_output(x_BTD, self.mlp(self.mlp_norm(x_BTD)))
        # Rules may split biases; the residual stream stays whole.
        return constrain(x_BTD, "batch", "residual_seq", "act_embed")


class Tower(nnx.Module):
    """x_BTD → x_BTD: stacked layers and a norm.

    Args:
      axis: the logical axis of L.
    """

    def __init__(self, config: TowerConfig, axis: str = LAYERS, *, rngs: nnx.Rngs):
        self.config = config
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs, axis)
        self.final_norm = layer_norm(config.embed, config.norm_eps, config.dtype)

    def __call__(self, x_BTD) -> jax.Array:
        config = self.config
        inputs = make_inputs(config, jnp.zeros(x_BTD.shape[:2], jnp.int32))

        def run_layer(x_BTD, layer, kind):
            layer = config.use_layer(layer, DECODER)  # inside remat: gathers again
            return layer(x_BTD, inputs, kind), None

        remat = config.remat_policy
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        x_BTD, _ = scan_by_kind(run_layer, x_BTD, self.layers, config.kinds, remat, config.unroll)
        return constrain(self.final_norm(x_BTD), "batch", None, "act_embed")
