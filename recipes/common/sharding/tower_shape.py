"""The tower of a model that sees: what it multiplies, for reports and plans."""

import dataclasses
import math
from typing import Any

from zoo.core.strategies import HEADS, MLP
from zoo.parts.picture_tokens import TOWER_LAYERS

PATCHES = "patch_positions"  # the logical axis of the tower's learned positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerShape:
    """A tower (zoo/parts/picture_tokens.py or square_tokens.py), or squares that are projected.

    Without layers, a patch is a square.
    """

    layers: int  # L
    embed: int  # D
    heads: int
    head_dim: int
    mlp: int  # F
    weights: int  # of a layer that a patch is multiplied with
    patch: int  # weights that a patch is multiplied with before the layers
    patch_numbers: int  # of a patch
    projection: int  # weights that a token is multiplied with after them
    patches: int  # T, of a picture
    tokens: int  # K, of a picture in the decoder
    trained: bool  # whether its weights have gradients

    def flops(self, pictures: float) -> float:
        """FLOPs of training on so many pictures: all patches of one attend to each other."""
        multiplied = (self.layers * self.weights + self.patch) * self.patches
        multiplied += self.projection * self.tokens
        attention = 2 * self.layers * self.heads * self.head_dim * self.patches**2
        return (6 if self.trained else 2) * (multiplied + attention) * pictures


def tower_of(weights: dict[str, tuple], config: Any, trained: bool) -> TowerShape | None:
    """The tower among a model's weights; None if it doesn't see.

    Args:
      weights: path → (logical axes, shape).
      config: the model's.
      trained: whether it has gradients.
    """
    entrance = next((path for path, (axes, _) in weights.items() if "patch_rows" in axes), "")
    if not entrance or "picture_tokens" not in dir(config):
        return None
    root = entrance.partition("/")[0]
    own = {path: x for path, x in weights.items() if path.startswith(f"{root}/")}
    patch = own[entrance][1]
    matrices = [
        (axes[1:], shape)
        for path, (axes, shape) in own.items()
        if axes[:1] == (TOWER_LAYERS,) and len(axes) > 2 and not path.endswith("bias")
    ]
    queries, hidden = (0, patch[-1], 0, 0), 0  # without layers
    if matrices:
        queries = next(shape for axes, shape in matrices if HEADS in axes and axes[0] != HEADS)
        hidden = next(shape[1 + axes.index(MLP)] for axes, shape in matrices if MLP in axes)
    ends = [
        math.prod(shape)
        for axes, shape in own.values()
        if len(axes) == 2 and TOWER_LAYERS not in axes and PATCHES not in axes
    ]
    return TowerShape(
        layers=queries[0],
        embed=queries[1],
        heads=queries[2],
        head_dim=queries[3],
        mlp=hidden,
        weights=sum(math.prod(shape[1:]) for _, shape in matrices),
        patch=math.prod(patch),
        patch_numbers=math.prod(patch[:-1]),
        projection=sum(ends),
        patches=config.patches if matrices else config.picture_tokens,
        tokens=config.picture_tokens,
        trained=trained,
    )
