"""Pictures as tokens of a decoder: SigLIP's tower, whose patches are averaged, normed and projected.

Shapes: P pictures, W height and width of a picture, C channels, G = W / patch, T = G² patches, K tokens
of a picture, g = √K, D embed of the tower, E embed of the decoder, L layers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from .patches import embed_patches
from .towers import Tower, TowerConfig
from ..core.layers import RMSNorm, dot
from ..core.sharding import AxisNames, constrain, explicit, param, reshape, zeros

TOWER_LAYERS = "tower_layers"  # L, which no pipeline splits

# The logical axes of a decoder, and of its tower's weights. No strategy splits the last four.
LOGICAL_AXES = {
    TOWER_LAYERS: "stack",
    "patch_rows": "weights",
    "patch_columns": "weights",
    "channels": "weights",  # C
    "patch_positions": "weights",  # T
}


def with_tower(names: AxisNames) -> AxisNames:
    """A decoder's names of axes, with those of a tower."""
    return dataclasses.replace(
        names,
        logical_axes=names.logical_axes | LOGICAL_AXES,
        uneven=names.uneven | dict.fromkeys(("channels", "patch_positions"), "replicated"),
    )


class PictureTokens(nnx.Module):
    """Pictures [P, W, W, C] → tokens [P, K, E].

    Args:
      config: has the fields below and those of a decoder.
      tower: the architecture of the tower.
    """

    def __init__(self, config, tower: TowerConfig, *, rngs: nnx.Rngs):
        patch, C, D, E = config.patch, config.channels, tower.embed, config.embed
        patches = (config.image_size // patch) ** 2
        axes = ("patch_rows", "patch_columns", "channels", "embed")
        self.config = config
        self.patch = param(rngs, (patch, patch, C, D), axes, (patch * patch * C) ** -0.5)
        self.patch_bias = zeros((D,), ("norm",))
        self.positions = param(rngs, (patches, D), ("patch_positions", "embed"), 0.5)
        self.tower = Tower(tower, TOWER_LAYERS, rngs=rngs)
        self.norm = RMSNorm(D, tower.norm_eps, zero_centered=True)
        self.projection = param(rngs, (D, E), ("embed", "norm"), D**-0.5)

    def __call__(self, images_PWWC, axes: AxisNames) -> jax.Array:
        """Tokens of pictures, in the compute dtype.

        Args:
          images_PWWC: uint8; C numbers from 0 to 255 of each pixel.
          axes: the decoder's.
        """
        config = self.config
        mean, std = (jnp.array(x, jnp.float32)[None, None, None] for x in (config.mean, config.std))
        pixels = (images_PWWC.astype(jnp.float32) / 255 - mean) / std
        x_PTD = embed_patches(pixels, self.patch, self.patch_bias, axes, config)
        table_TD = constrain(config.use_weights(self.positions, axes)[...], None, "act_embed")
        # In float32, so that the table's gradient is summed over P in float32.
        x_PTD = x_PTD.astype(jnp.float32) + table_TD.astype(jnp.float32)[None]
        x_PTD = self.tower(x_PTD.astype(config.dtype))
        x_PKD = self.norm(averaged(x_PTD, config.picture_tokens))
        project_DE = config.use_weights(self.projection, axes)[...].astype(x_PKD.dtype)
        return dot("PKD,DE->PKE", x_PKD, project_DE, explicit("batch", None, None)).astype(
            config.dtype
        )


def averaged(x_PTD: jax.Array, tokens: int) -> jax.Array:
    """Means over squares of patches, [P, K, D]: K = tokens, the patches being row by row."""
    P, T, D = x_PTD.shape
    G, g = math.isqrt(T), math.isqrt(tokens)
    squares = reshape(x_PTD, (P, g, G // g, g, G // g, D), "batch", *[None] * 5)
    means = squares.astype(jnp.float32).mean(axis=(2, 4)).astype(x_PTD.dtype)
    return reshape(means, (P, tokens, D), "batch", None, None)
