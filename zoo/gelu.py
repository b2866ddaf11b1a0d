"""Parts of layers of GPT-2, BERT and ViT: an MLP with GELU, and LayerNorm.

Shapes: B batch, T positions, D embed, F mlp.
"""

import functools

import jax
from flax import nnx

from .layers import adapters, add_bias, gather, project
from .sharding import param


class GeluMLP(nnx.Module):
    """gelu(x · up + up_bias) · down + down_bias; costs as much communication as GatedMLP.

    Args:
      approximate: computes GELU (Hendrycks & Gimpel 2016) by tanh.
    """

    def __init__(self, config, approximate: bool, *, rngs: nnx.Rngs):
        D = config.embed
        F = config.mlp
        self.activation = functools.partial(jax.nn.gelu, approximate=approximate)
        self.up = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up_bias = param(rngs, (F,), ("mlp",), 0.0)
        self.down = param(rngs, (F, D), ("mlp", "embed"), (F * 2 * config.num_layers) ** -0.5)
        self.down_bias = param(rngs, (D,), ("norm",), 0.0)
        self.lora = adapters(self, config, rngs, up=1, down=1)

    def __call__(self, x_BTD):
        hidden_BTF = add_bias(project(self, "up", gather(x_BTD, self.up)), self.up_bias)
        out_BTD = project(self, "down", self.activation(hidden_BTF), seq="residual_seq")
        return add_bias(out_BTD, self.down_bias)


def layer_norm(dim: int, eps: float, dtype: str, use_bias: bool = True) -> nnx.LayerNorm:
    """LayerNorm (Ba et al. 2016), computed in float32; returns `dtype`."""
    names = {"out_sharding": ("norm",), "eager_sharding": False}
    metadata = {"scale_metadata": names, "bias_metadata": names}
    options = {"dtype": dtype, "use_fast_variance": False, "rngs": nnx.Rngs(0)}
    return nnx.LayerNorm(dim, epsilon=eps, use_bias=use_bias, **metadata, **options)
