"""Patches of images, and their embeddings: what ViT and SigLIP begin with.

Shapes: B batch, W image height and width, P patch height and width, G = W / P, C image channels, D
embed, T = G².
"""

import jax
from flax import nnx

from .layers import add_bias, multiply
from .sharding import constrain, in_use, reshape


def embed_patches(
    image_BWWC: jax.Array, patch: nnx.Param, bias: nnx.Param, names: dict[str, str], dtype: str
) -> jax.Array:
    """Cuts images into patches and multiplies each by `patch` [P, P, C, D]: [B, T, D], row by row.

    Args:
      names: see sharding.in_use.
    """
    (B, W, _, C), P = image_BWWC.shape, patch.shape[0]
    G = W // P
    image = constrain(image_BWWC.astype(dtype), "batch", None, None, None)
    rows = reshape(image, (B, G, P, G, P, C), "batch", *[None] * 5)
    patches = reshape(rows.swapaxes(2, 3), (B, G * G, P, P, C), "batch", *[None] * 4)
    x_BTD = multiply(patches, in_use(patch, names, dtype), contract=3)
    return constrain(add_bias(x_BTD, bias), "batch", None, "act_embed")
