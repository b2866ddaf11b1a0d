"""An MLP with GELU, of GPT-2, BERT, ViT and towers.

Shapes: B batch, T positions, D embed, F mlp.
"""

import functools

import jax
from flax import nnx

from ..core.layers import add_bias, multiply, sublayer_input
from ..core.sharding import param


def quick_gelu(x: jax.Array) -> jax.Array:
    """CLIP's approximation of GELU: x · sigmoid(1.702 x)."""
    return x * jax.nn.sigmoid(1.702 * x)


GELU = {  # name → function (Hendrycks & Gimpel 2016)
    "exact": functools.partial(jax.nn.gelu, approximate=False),
    "tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick": quick_gelu,
}


class GeluMLP(nnx.Module):
    """gelu(x · up + up_bias) · down + down_bias; costs as much communication as GatedMLP.

    Args:
      activation: a key of GELU.
    """

    def __init__(self, config, activation: str, *, rngs: nnx.Rngs):
        D = config.embed
        F = config.mlp
        self.activation = GELU[activation]
        self.up = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up_bias = param(rngs, (F,), ("mlp",), 0.0)
        self.down = param(rngs, (F, D), ("mlp", "embed"), (F * 2 * config.num_layers) ** -0.5)
        self.down_bias = param(rngs, (D,), ("norm",), 0.0)
        config.add_weights(self, rngs, up=1, down=1)

    def __call__(self, x_BTD):
        x_BTD = sublayer_input(x_BTD, self.up)
        hidden_BTF = add_bias(multiply(x_BTD, self.up), self.up_bias)
        out_BTD = multiply(self.activation(hidden_BTF), self.down, seq="residual_seq")
        return add_bias(out_BTD, self.down_bias)
