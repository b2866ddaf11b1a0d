"""Rotary scalings of other models than Llama 3, and how saved configs state them.

Shapes: H head dim.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..core.attention import RowLayout
from ..core.layers import Llama3, RopeScaling
from ..core.sharding import auto, constrain


@dataclasses.dataclass(frozen=True)
class Linear(RopeScaling):
    """Stretches all rotary wavelengths (Chen et al. 2023)."""

    factor: float

    magnitude = 1.0

    def scale(self, frequency_11H, theta: float, head_dim: int, length):
        return frequency_11H * (1 / self.factor)

    def as_tuple(self) -> tuple:
        return ("linear", self.factor)


@dataclasses.dataclass(frozen=True)
class Dynamic(RopeScaling):
    """Raises theta with the length of the row beyond the original one (`dynamic` in `transformers`)."""

    factor: float
    original_length: int

    magnitude = 1.0
    by_length = True

    def scale(self, frequency_11H, theta: float, head_dim: int, length):
        excess = jnp.maximum(length / self.original_length - 1, 0)
        # theta times this to the power of head_dim / (head_dim - 2)
        growth = 1 + self.factor * excess
        return frequency_11H * growth ** -(jnp.arange(0, head_dim, 2)[None, None] / (head_dim - 2))

    def as_tuple(self) -> tuple:
        return ("dynamic", self.factor, self.original_length)


@dataclasses.dataclass(frozen=True)
class LongRope(RopeScaling):
    """Stretches each wavelength by a factor of its own (Ding et al. 2024): those of `short` for rows
    up to the original length, those of `long` for longer ones.
    """

    short: tuple[float, ...]  # H/2 factors
    long: tuple[float, ...]
    original_length: int
    magnitude: float

    by_length = True

    def scale(self, frequency_11H, theta: float, head_dim: int, length):
        short_11H, long_11H = jnp.asarray((self.short, self.long), jnp.float32)[:, None, None]
        return frequency_11H / jnp.where(length > self.original_length, long_11H, short_11H)

    def as_tuple(self) -> tuple:
        return ("longrope", *dataclasses.astuple(self))

    def check(self, pairs: int) -> None:
        super().check(pairs)
        for factors in sorted((len(self.short), len(self.long))):
            if factors != pairs:
                raise ValueError(
                    f"a LongRope has {factors} factors, and a head has {pairs} rotary pairs"
                )


@dataclasses.dataclass(frozen=True)
class Yarn(RopeScaling):
    """Stretches the long wavelengths and scales queries and keys (Peng et al. 2023)."""

    factor: float
    beta_fast: float  # turns within the original length, above which nothing is stretched
    beta_slow: float  # turns, below which all is
    original_length: int
    truncate: bool  # whether the border pairs are rounded to whole numbers
    magnitude: float

    def scale(self, frequency_11H, theta: float, head_dim: int, length):
        # Indices of the pairs of dims that make this many turns within the original length.
        lengths = (turns * 2 * math.pi for turns in (self.beta_fast, self.beta_slow))
        first, last = (
            math.log(self.original_length / length, theta) * head_dim / 2 for length in lengths
        )
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, head_dim - 1)
        pair = jnp.arange(head_dim // 2, dtype=jnp.float32)[None, None]
        kept = 1 - jnp.clip((pair - first) / (last - first or 0.001), 0, 1)
        return frequency_11H * (kept + (1 - kept) / self.factor)

    def as_tuple(self) -> tuple:
        return ("yarn", *dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Proportional(RopeScaling):
    """Rotates a fraction of the pairs of a head, with the wavelengths of the whole head (Gemma 4).

    The head dim is the scaling's own, so layers of one model may differ in it.
    """

    head_dim: int
    fraction: float  # of the pairs, the first ones; the others don't rotate

    magnitude = 1.0

    def scale(self, frequency_11H, theta: float, head_dim: int, length):
        pairs = self.head_dim // 2
        pair_11H = jnp.arange(pairs, dtype=jnp.float32)[None, None]
        turning = int(self.fraction * self.head_dim // 2)
        return jnp.where(pair_11H < turning, theta ** -(pair_11H / pairs), 0.0)

    def as_tuple(self) -> tuple:
        return ("proportional", self.head_dim, self.fraction)

    def check(self, pairs: int) -> None:
        super().check(pairs)
        if self.fraction > 1:
            raise ValueError(f"rope_scaling has fraction={self.fraction}, which must be ≤ 1")


def from_tuple(stored) -> RopeScaling:
    """A rotary scaling from its `as_tuple`. Raises ValueError."""
    match stored:
        case "linear", factor:
            return Linear(factor)
        case "yarn", *fields if len(fields) == 6:
            return Yarn(*fields)
        case "dynamic", factor, original:
            return Dynamic(factor, original)
        case "proportional", head_dim, fraction:
            return Proportional(head_dim, fraction)
        case "longrope", short, long, original, magnitude:
            return LongRope(tuple(short), tuple(long), original, magnitude)
        case factor, low, high, original if not isinstance(factor, str):
            return Llama3(factor, low, high, original)
    raise ValueError(
        f"rope_scaling={stored!r} is not a Linear, Llama3, Yarn, Dynamic, LongRope or Proportional"
    )


def places_of_rows(
    positions_BT, segment_ids_BT, lengths_B1, layout: RowLayout
) -> tuple[jax.Array, Any]:
    """Config.rope_places where attention depends on the length of a row or on places in it."""
    if lengths_B1 is not None:
        return positions_BT, constrain(lengths_B1, "batch", None)[..., None]
    if segment_ids_BT is None:
        return positions_BT, positions_BT.shape[1]
    ids_BT = layout.reorder(segment_ids_BT, back=True)
    positions_BT, length_BT = (layout.reorder(x_BT) for x_BT in places_in_documents(ids_BT))
    return positions_BT, length_BT[..., None]


def places_in_documents(segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Each token's place in its document and the document's length, both [B, T].

    So a packed document is scaled like one that has a row of its own. Documents are runs of equal ids.
    """
    last_T = segment_ids_BT.shape[1] - 1

    def find(ids_BT):
        place_1T = jnp.arange(ids_BT.shape[1])[None]
        ends_BT = ids_BT[:, 1:] != ids_BT[:, :-1]  # whether the next token is of another document
        is_first_BT = jnp.pad(ends_BT, ((0, 0), (1, 0)), constant_values=True)
        is_last_BT = jnp.pad(ends_BT, ((0, 0), (0, 1)), constant_values=True)
        first_BT = jax.lax.cummax(jnp.where(is_first_BT, place_1T, 0), axis=1)
        last_BT = jax.lax.cummin(jnp.where(is_last_BT, place_1T, last_T), axis=1, reverse=True)
        return jnp.stack((place_1T - first_BT, last_BT - first_BT + 1))

    place_BT, length_BT = auto(find, None, "batch", "seq")(
        constrain(segment_ids_BT, "batch", "seq")
    )
    return place_BT, length_BT
