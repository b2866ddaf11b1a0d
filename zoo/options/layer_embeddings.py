"""Embeddings of tokens that each layer has for itself (Gemma 4 E2B and E4B).

One table has the embeddings of all layers, so a token is looked up once. Each is combined with a
projection of the token's first embedding, and gated by the layer that it is for.

Shapes: B batch, T positions, D embed, P layer embed, V vocab, L layers.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.layers import RMSNorm, gather_positions, multiply, sublayer_input
from ..core.sharding import AxisNames, constrain, param, reshape
from ..core.vocabulary import look_up


class LayerEmbeddings(nnx.Module):
    """What the layers read besides the residual stream."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, P, L = config.embed, config.layer_embed, config.num_layers
        self.table = param(rngs, (config.vocab_size, L * P), ("vocab", "embed"), P**-0.5)
        self.projection = param(rngs, (D, L * P), ("embed", "layer_embed"), D**-0.5)
        self.norm = RMSNorm(P, config.norm_eps)

    def __call__(self, x_BTD, tokens_BT, config, axes: AxisNames) -> jax.Array:
        """(norm(projection of x) + embedding) / √2 for each layer: [L, B, T, P].

        Args:
          x_BTD: the embeddings of the tokens, times √D.
          axes: the model's.
        """
        B, T = tokens_BT.shape
        P, L = config.layer_embed, config.num_layers
        by_layer = (B, T, L, P)
        names = ("batch", "seq", None, "layer_embed")
        own_BTC = look_up(config.use_table(self.table), tokens_BT) * math.sqrt(P)
        own_BTLP = reshape(constrain(own_BTC, "batch", "seq", None), by_layer, *names)
        projection = config.use_weights(self.projection, axes)
        x_BTD = gather_positions(x_BTD) * config.embed**-0.5
        projected_BTLP = self.norm(reshape(multiply(x_BTD, projection), by_layer, *names))
        return jnp.moveaxis((projected_BTLP + own_BTLP) * 2**-0.5, 2, 0)


class LayerEmbedding(nnx.Module):
    """What one layer adds to the residual stream: (gelu(x · gate) * embedding) · out."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, P = config.embed, config.layer_embed
        self.gate = param(rngs, (D, P), ("embed", "layer_embed"), D**-0.5)
        self.out = param(
            rngs, (P, D), ("layer_embed", "embed"), (P * 2 * config.num_layers) ** -0.5
        )

    def __call__(self, x_BTD, embedding_BTP) -> jax.Array:
        x_BTD = sublayer_input(x_BTD, self.gate)
        gate_BTP = jax.nn.gelu(multiply(x_BTD, self.gate))  # by tanh
        return multiply(gate_BTP * embedding_BTP, self.out, seq="residual_seq")
