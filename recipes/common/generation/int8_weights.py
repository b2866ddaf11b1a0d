"""Models whose layers store their matrices in int8, for inference: half the bytes of bfloat16."""

import dataclasses

from flax import nnx

from recipes.common.runtime import UserError, flag
from recipes.common.sharding import Layout, Tree, abstract_model, shardings
from recipes.common.sharding.abstract import variables_of
from zoo.options.low_precision import store


def weights_flag(group: str = "run") -> str:
    """--weights."""
    return flag(
        "", "Number format in which the layers' matrices are stored: int8, with scales; empty: --dtype.",
        group, choices=["", "int8"],
    )  # fmt: skip


def to_int8(model: type, layout: Layout, variables: Tree) -> tuple[Layout, Tree]:
    """Rounds the layers' matrices. Returns the new layout and its variables.
    Raises UserError if the model has no such matrices.

    While it runs, a device holds both: one and a half times the bytes of bfloat16.

    Args:
      model: the entry's class; layout and variables: of a model that is not trained.
    """
    if layout.shape.matmul is None:
        raise UserError(
            "--weights=int8 is not for this model, whose weights are in --dtype alone; leave it out"
        )
    names, config = layout.names.in_use, dataclasses.replace(layout.config, matmul="int8_weights")

    def build() -> nnx.Module:
        return store(model(config, rngs=nnx.Rngs(0)), names)

    rounded = dataclasses.replace(layout, config=config, build=build, model=abstract_model(build))
    convert = layout.compile(
        lambda variables: variables_of(store(layout.model.merge(variables), names)),
        {kind: variables[kind] for kind in layout.model.shapes},
        out_shardings=shardings(rounded.variables()),
    )
    return rounded, convert({kind: variables[kind] for kind in layout.model.shapes})
