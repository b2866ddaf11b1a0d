"""Parameters of a checkpoint for a model with another head."""

import dataclasses
import pathlib
from typing import Any

from data.tokenizer import Tokenizer
from recipes.common.checkpoint import WeightSource
from recipes.common.sharding import Layout, Tree, paths
from recipes.common.sharding.abstract import nested, unadapted
from recipes.common.train.state import new_values


@dataclasses.dataclass(frozen=True)
class NewParts:
    """A WeightSource of the parameters that a checkpoint and a model share.

    Others of the checkpoint are left out; others of the model have a new model's values.
    """

    source: WeightSource
    layout: Layout  # the model's
    files = ()

    @property
    def path(self) -> pathlib.Path:
        return self.source.path

    @property
    def step(self) -> int:
        return self.source.step

    @property
    def metadata(self) -> dict[str, Any]:
        return self.source.metadata

    def shapes(self) -> Tree:
        return unadapted(self.layout.model.shapes)

    def new(self) -> list[str]:
        """Paths of the parameters that the checkpoint lacks, or has in another shape."""
        stored = paths(self.source.shapes()["params"])
        return [
            path
            for path, leaf in paths(self.shapes()["params"]).items()
            if path not in stored or stored[path].shape != leaf.shape
        ]

    def read(self, abstract: Tree) -> Tree:
        wanted, new = paths(abstract["params"]), self.new()
        shared = {path: leaf for path, leaf in wanted.items() if path not in new}
        variables = self.source.read({"params": nested(shared)})
        made = new_values(self.layout, {path: wanted[path] for path in new})
        return {"params": nested(paths(variables["params"]) | made)}

    def tokenizer(self) -> Tokenizer | None:
        return self.source.tokenizer()
