"""A model without its arrays: shapes and logical axes of its variables, and the way back to it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from recipes.common.runtime import UserError

Tree = Any  # nested dicts with the same kind of leaf

KINDS = {
    "params": nnx.Param,
    "buffers": ...,
}  # of variables: buffers are all that are no parameters


class AbstractModel(NamedTuple):
    """A model whose arrays are elsewhere.

    Trees of its variables are dicts of nested dicts, {"params": …}, with "buffers" only where the
    model has variables that are no nnx.Param: as in a checkpoint's state.
    """

    graph: nnx.GraphDef
    states: dict[str, nnx.State]  # of ShapeDtypeStruct
    shapes: Tree  # of ShapeDtypeStruct
    axes: Tree  # of tuples of logical axis names, one for each dim

    def merge(self, variables: Tree) -> Any:
        """The model with these variables, arrays or tracers.

        Args:
          variables: a dict with at least the keys of `shapes`; a whole training state will do.
        """
        filled = [
            # A state's keys are sorted, as a dict's are.
            jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(variables[kind]))
            for kind, state in self.states.items()
        ]
        return nnx.merge(self.graph, *filled)

    def buffers(self, model: nnx.Module) -> Tree:
        """{"buffers": …} as they are in `model` now; {} where it has none."""
        if "buffers" not in self.states:
            return {}
        return {"buffers": nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))}


def abstract_model(build: Callable[[], nnx.Module]) -> AbstractModel:
    """`build` traced without allocating anything."""
    graph, *found = nnx.split(nnx.eval_shape(build), *KINDS.values())
    states = {kind: state for kind, state in zip(KINDS, found, strict=True) if state}
    shapes = {kind: nnx.to_pure_dict(state) for kind, state in states.items()}
    axes = {kind: _axes(state) for kind, state in states.items()}
    return AbstractModel(graph, states, shapes, axes)


def variables_of(model: nnx.Module) -> Tree:
    """{"params": …} of a model's own arrays, and "buffers" where it has any."""
    found = dict(zip(KINDS, nnx.split(model, *KINDS.values())[1:], strict=True))
    return {kind: nnx.to_pure_dict(state) for kind, state in found.items() if state}


def _axes(state: nnx.State) -> Tree:
    """The logical axis names of each variable. Raises UserError where some have none."""
    axes = {}
    for path, variable in nnx.to_flat_state(state):
        axes[path] = getattr(variable, "out_sharding", None)
        if axes[path] is None or len(axes[path]) != len(variable.shape):
            raise UserError(
                f"{'/'.join(map(str, path))} {list(variable.shape)} has logical axes {axes[path]}; "
                "give it out_sharding=(...) with one name for each dim, and eager_sharding=False"
            )
    return nnx.traversals.unflatten_mapping(axes)


def paths(tree: Tree) -> dict[str, Any]:
    """{"layers/attention/q": leaf}: a parameter's path, as in messages, reports and goldens."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in flat}
