"""A trained model with a new head: a Source that takes all other parameters from a checkpoint."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from data.tokenizer import Tokenizer
from recipes.common.sharding import Layout, Tree, paths, shardings
from recipes.common.sharding.abstract import nested


@dataclasses.dataclass(frozen=True)
class NewHead:
    """A Source in which some of a checkpoint's parameters are replaced by zeros of a new shape.

    A head of zeros gives all classes the same probability, and makes the first gradients of all
    other parameters zero.
    """

    source: Any  # Source
    layout: Layout  # the new model's
    names: tuple[str, ...]  # paths of the head's parameters

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
        found, ours = self.source.shapes(), paths(self.layout.model.shapes["params"])
        kept = paths(found["params"]) | {name: ours[name] for name in self.names}
        return found | {"params": nested(kept)}

    def read(self, abstract: Tree) -> Tree:
        """Reads what `abstract` names, except for the head."""
        wanted = paths(abstract["params"])
        head = {name: leaf for name, leaf in wanted.items() if name in self.names}
        rest = {name: leaf for name, leaf in wanted.items() if name not in self.names}
        found = self.source.read(abstract | {"params": nested(rest)})
        zeros = functools.partial(
            jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), head
        )
        made = jax.jit(zeros, out_shardings=shardings(head))()
        return found | {"params": nested(paths(found["params"]) | made)}

    def tokenizer(self) -> Tokenizer | None:
        return self.source.tokenizer()
