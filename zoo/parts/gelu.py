"""An MLP without a gate: with GELU in GPT-2, BERT, ViT and towers, squared ReLU in Nemotron-H.

Shapes: B batch, T positions, D embed, F mlp.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.layers import add_bias, multiply, sublayer_input
from ..core.sharding import param


def quick_gelu(x: jax.Array) -> jax.Array:
    """CLIP's approximation of GELU: x · sigmoid(1.702 x)."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: jax.Array) -> jax.Array:
    """relu(x)² (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


GELU = {  # name → function (Hendrycks & Gimpel 2016)
    "exact": functools.partial(jax.nn.gelu, approximate=False),
    "tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick": quick_gelu,
}


class PlainMLP(nnx.Module):
    """activation(x · up + up_bias) · down + down_bias; costs as much communication as GatedMLP.

    Args:
      width: F; 0: config.mlp.
      biased: whether each product has a bias.
    """

    def __init__(
        self, config, activation: Callable, width: int = 0, biased: bool = True, *, rngs: nnx.Rngs
    ):
        D = config.embed
        F = width or config.mlp
        self.activation = activation
        self.up = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up_bias = param(rngs, (F,), ("mlp",), 0.0) if biased else None
        self.down = param(rngs, (F, D), ("mlp", "embed"), (F * 2 * config.num_layers) ** -0.5)
        self.down_bias = param(rngs, (D,), ("norm",), 0.0) if biased else None
        config.add_weights(self, rngs, up=1, down=1)

    def __call__(self, x_BTD):
        x_BTD = sublayer_input(x_BTD, self.up)
        hidden_BTF = add_bias(multiply(x_BTD, self.up), self.up_bias)
        out_BTD = multiply(self.activation(hidden_BTF), self.down, seq="residual_seq")
        return add_bias(out_BTD, self.down_bias)
