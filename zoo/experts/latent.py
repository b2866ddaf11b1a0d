"""Experts that compute a latent of each position, smaller than D (LatentMoE, NVIDIA 2025, Nemotron 3).

Shapes: B batch, T positions, D embed, C latent.
"""

from typing import Any

from flax import nnx

from ..core.attention import AttentionInputs
from ..core.layers import add_bias, gather_positions, multiply
from ..core.sharding import constrain, param
from .mixture import GatedExperts


class LatentExperts(nnx.Module):
    """up(mixture(down(x))), whose router reads x. Rows of C numbers travel to their experts.

    Tensor parallelism splits the experts' hidden dim; every device computes the latents.

    Args:
      config: with expert_latent (C) and mlp_bias: whether both projections have biases.
      arguments: of GatedExperts.
    """

    def __init__(self, config, *, rngs: nnx.Rngs, **arguments: Any):
        D, C = config.embed, config.expert_latent
        has_bias = config.mlp_bias
        self.latent_down = param(rngs, (D, C), ("embed", "latent"), D**-0.5)
        self.latent_up = param(rngs, (C, D), ("latent", "embed"), C**-0.5)
        self.latent_down_bias = param(rngs, (C,), ("norm",), 0.0) if has_bias else None
        self.latent_up_bias = param(rngs, (D,), ("norm",), 0.0) if has_bias else None
        self.mixture = GatedExperts(config, reads=C, rngs=rngs, **arguments)
        config.add_weights(self, rngs, latent_down=1, latent_up=1)

    @property
    def bias(self) -> Any:
        """The Balance bias of the experts' choice."""
        return self.mixture.bias

    def __call__(self, x_BTD, inputs: AttentionInputs):
        """Returns the output to add to the residual, and the metrics of `mixture.measure`."""
        x_BTD = gather_positions(x_BTD)
        latent_BTC = add_bias(multiply(x_BTD, self.latent_down), self.latent_down_bias)
        latent_BTC = constrain(latent_BTC, "batch", "seq", None)
        out_BTC, metrics = self.mixture(latent_BTC, inputs, scored_BTD=x_BTD)
        out_BTD = multiply(out_BTC, self.latent_up, seq="residual_seq")
        return add_bias(out_BTD, self.latent_up_bias), metrics
