"""Pictures as grids of squares, each of which becomes a token of a decoder (Gemma 4).

A picture keeps its aspect ratio: it has R × C squares of S × S pixels, at most K. With a tower
(axial_tower.py), a square has G × G patches, whose outputs are averaged; without one, its pixels are
normed and projected. So a batch has the squares of each picture, row by row, and its grid:

    squares [P, K, S, S, C], grids [P, 2]  →  tokens [P, K, E], of which the first R · C count

Shapes: P pictures, K squares, S height and width of a square, C channels, G patches on a side of a
square, T = K · G² patches, D embed of the tower, E embed of the decoder, X places of a table.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.layers import add_bias, dot, multiply
from ..core.sharding import (
    AxisNames, constrain, explicit, ones, param, per_device, reshape, variable, zeros,
)  # fmt: skip
from ..experts.normed import rms_normed
from . import picture_tokens
from .axial_tower import Patches, Tower, TowerConfig
from .norms import layer_norm
from .picture_tokens import TOWER_LAYERS

COLUMN_AND_ROW = "column_and_row"  # the logical axis of the two tables of places
PROJECTION_EPS = 1e-5  # of the norms without a tower


def with_squares(names: AxisNames) -> AxisNames:
    """A decoder's names of axes, with those of a tower."""
    names = picture_tokens.with_tower(names)
    return dataclasses.replace(
        names,
        logical_axes=names.logical_axes | {COLUMN_AND_ROW: "weights"},
        uneven=names.uneven | {COLUMN_AND_ROW: "replicated"},
    )


class Standard(nnx.Variable):
    """A statistic of tokens: a buffer, which training leaves as it is."""


class SquareTokens(nnx.Module):
    """Squares with a tower: (squares, grids) → tokens [P, K, E].

    Args:
      config: has the fields below and those of a decoder.
      tower: the architecture of the tower.
    """

    def __init__(self, config, tower: TowerConfig, *, rngs: nnx.Rngs):
        patch, C, D, E = config.patch, config.channels, tower.embed, config.embed
        axes = ("patch_rows", "patch_columns", "channels", "embed")
        self.config = config
        self.patch = param(rngs, (patch, patch, C, D), axes, (patch * patch * C) ** -0.5)
        self.positions = position_table(config.places, D, rngs)
        self.tower = Tower(tower, TOWER_LAYERS, rngs=rngs)
        is_standard = config.standardized
        self.mean = variable(jnp.zeros(D), ("norm",), Standard) if is_standard else None
        self.factor = ones((D,), ("norm",), Standard) if is_standard else None
        self.projection = param(rngs, (D, E), ("embed", "norm"), D**-0.5)

    def __call__(self, images, axes: AxisNames) -> jax.Array:
        """Tokens of pictures, in the compute dtype.

        Args:
          images: (squares [P, K, S, S, C], uint8: numbers from 0 to 255 of each pixel; grids).
          axes: the decoder's.
        """
        squares_PKSSC, grids_P2 = images
        config = self.config
        P, K, *_, C = squares_PKSSC.shape
        G, p = config.pooling, config.patch
        D = self.projection.shape[-2]
        pixels = squares_PKSSC.astype(jnp.float32) / 127.5 - 1
        pixels = reshape(pixels, (P, K, G, p, G, p, C), "batch", *[None] * 6).swapaxes(3, 4)
        pixels = reshape(pixels, (P, K * G * G, p, p, C), "batch", *[None] * 4)
        x_PTD = multiply(
            pixels.astype(config.dtype), config.use_weights(self.patch, axes), contract=3
        )
        patches = patches_of(grids_P2, K, G)
        # In float32, so that the table's gradient is summed in float32.
        x_PTD = x_PTD.astype(jnp.float32) + look_up_places(self.positions, patches, axes, config)
        x_PTD = self.tower(x_PTD.astype(config.dtype), patches)
        x_PTD = jnp.where(patches.is_padding_PT[..., None], 0, x_PTD.astype(jnp.float32))
        x_PKD = reshape(x_PTD, (P, K, G * G, D), "batch", None, None, None).mean(axis=2) * D**0.5
        if self.mean is not None and self.factor is not None:
            mean_D, factor_D = (constrain(x[...], None) for x in (self.mean, self.factor))
            x_PKD = (x_PKD - mean_D[None, None]) * factor_D[None, None]
        return projected(x_PKD.astype(config.dtype), self.projection, axes, config)


class ProjectedSquares(nnx.Module):
    """Squares without a tower (12B), otherwise as SquareTokens."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        S, C, D, E = config.square, config.channels, config.tower_embed, config.embed
        axes = ("patch_rows", "patch_columns", "channels", "embed")
        self.config = config
        self.pixel_norm = layer_norm(S * S * C, PROJECTION_EPS, "float32")
        self.patch = param(rngs, (S, S, C, D), axes, (S * S * C) ** -0.5)
        self.patch_bias = zeros((D,), ("norm",))
        self.patch_norm = layer_norm(D, PROJECTION_EPS, "float32")
        self.positions = position_table(config.places, D, rngs)
        self.position_norm = layer_norm(D, PROJECTION_EPS, config.dtype)
        self.projection = param(rngs, (D, E), ("embed", "norm"), D**-0.5)

    def __call__(self, images, axes: AxisNames) -> jax.Array:
        squares_PKSSC, grids_P2 = images
        config = self.config
        P, K, S, _, C = squares_PKSSC.shape
        pixels = reshape(squares_PKSSC, (P, K, S * S * C), "batch", None, None)
        pixels = self.pixel_norm(pixels.astype(jnp.float32) / 255)
        pixels = reshape(pixels.astype(config.dtype), (P, K, S, S, C), "batch", *[None] * 4)
        x_PKD = multiply(pixels, config.use_weights(self.patch, axes), contract=3)
        x_PKD = constrain(add_bias(x_PKD, self.patch_bias), "batch", None, None)
        x_PKD = self.patch_norm(x_PKD)
        squares = patches_of(grids_P2, K, 1)
        x_PKD = x_PKD + look_up_places(self.positions, squares, axes, config)
        return projected(self.position_norm(x_PKD), self.projection, axes, config)


def position_table(places: int, embed: int, rngs: nnx.Rngs) -> nnx.Param:
    """Embeddings of columns and, after them, of rows."""
    return param(rngs, (2, places, embed), (COLUMN_AND_ROW, "patch_positions", "embed"), 0.5)


def patches_of(grids_P2: jax.Array, squares: int, side: int) -> Patches:
    """The places of patches that are in the order of their squares, and in each row by row.

    Args:
      grids_P2: the rows and columns of each picture's squares; (0, 0): an empty slot.
      squares: K, the most of a picture.
      side: G, patches on a side of a square.
    """
    square_1T = (jnp.arange(squares * side**2) // side**2)[None]
    inside_1T = (jnp.arange(squares * side**2) % side**2)[None]
    grids_P2 = constrain(grids_P2, "batch", None)
    rows_P1, columns_P1 = grids_P2[:, :1], grids_P2[:, 1:]
    width_P1 = jnp.maximum(columns_P1, 1)
    is_padding_PT = square_1T >= rows_P1 * columns_P1
    column_PT = square_1T % width_P1 * side + inside_1T % side
    row_PT = square_1T // width_P1 * side + inside_1T // side
    zero = jnp.int32(0)
    return Patches(
        column_PT=jnp.where(is_padding_PT, zero, column_PT),
        row_PT=jnp.where(is_padding_PT, zero, row_PT),
        is_padding_PT=is_padding_PT,
    )


def look_up_places(table: nnx.Param, patches: Patches, axes: AxisNames, config) -> jax.Array:
    """The embeddings of patches' columns and rows, added, float32 [P, T, D]; zeros for padding.

    Each device looks its own pictures' up, so a table's gradient is added up in float32.
    """
    table_2XD = constrain(config.use_weights(table, axes)[...], None, None, None)

    def on_device(table_2XD, column_PT, row_PT, is_padding_PT):
        x_PTD = table_2XD[0][column_PT] + table_2XD[1][row_PT]
        return jnp.where(is_padding_PT[..., None], 0, x_PTD)

    places = ("batch", None)
    return per_device(
        on_device,
        (table_2XD.astype(jnp.float32), *patches),
        ((None, None, None), places, places, places),
        ("batch", None, None),
    )


def projected(x_PKD, projection: nnx.Param, axes: AxisNames, config) -> jax.Array:
    """Normed tokens times the projection, [P, K, E]."""
    x_PKD = rms_normed(x_PKD, config.tower_norm_eps)
    project_DE = config.use_weights(projection, axes)[...].astype(x_PKD.dtype)
    out_PKE = dot("PKD,DE->PKE", x_PKD, project_DE, explicit("batch", None, None))
    return out_PKE.astype(config.dtype)
