"""Abstract models: shapes and logical axes of a model's variables, without arrays."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from recipes.common.runtime import UserError
from zoo.core.sharding import AxisNames, has_slot

UNNAMED = "(unnamed)"  # logical axis of dims without one; no rule splits it
AXES = "logical_axes"  # metadata of a variable: its axes, in place of those in out_sharding
Tree = Any  # nested dicts with the same kind of leaf


def own_loss(model: Any, **batch) -> tuple:
    """The loss that a model has: (sum, count, {name: (sum, count)})."""
    return model.loss(**batch)


def own_embed_pairs(model: Any, **batch) -> tuple:
    return model.embed_pairs(**batch)


def own_compare(model: Any, *embedded) -> tuple:
    return model.compare(*embedded)


class Variable(NamedTuple):
    """A variable without its array."""

    array: jax.ShapeDtypeStruct
    axes: tuple[str, ...]  # logical axes, one for each dim


class Phases(NamedTuple):
    """The two phases of a loss over all pairs of a batch, see zoo/siglip.py. Both get the model first."""

    embed: Callable[..., tuple]  # (**batch) → (embeddings of both sides, which rows count)
    compare: Callable[..., tuple]  # (*embedded) → as the loss


class AbstractModel(NamedTuple):
    """A model without its arrays.

    Trees of variables are nested dicts by kind, as in a training state. "params" are trained; in a
    model with adapters these are all nnx.LoRAParam (the adapters, and a head that is trained with
    them), and the frozen parameters are "base". "buffers" are variables other than nnx.Param.
    """

    graph: nnx.GraphDef
    states: dict[str, nnx.State]  # kind → state of ShapeDtypeStructs
    shapes: Tree  # leaves: ShapeDtypeStructs
    axes: Tree  # leaves: tuples of logical axis names, one per dim
    variables: dict[str, dict[str, Variable]]  # kind → path → the leaves of both
    names: AxisNames  # what rules may do with these names
    recurrences: dict[str, Any]  # path of a module → what its recurrence computes and keeps
    positions: int = 1  # of an example, of a user's model without tokens
    phases: Phases | None = None  # of a loss over all pairs
    loss: Callable[..., tuple] = own_loss  # (model, **batch) → (sum, count, {name: (sum, count)})
    # (array of a batch, the logical axes of its first dims), of arrays that are not [B, T, ...].
    batch_axes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    frozen: tuple[str, ...] = ()  # how paths begin of "params" without gradients or updates

    def is_trained(self) -> Tree:
        """Whether each of the "params" is updated: a tree of bools."""
        flat = self.variables["params"]
        return nested({path: not path.startswith(self.frozen) for path in flat})

    def merge(self, variables: Tree) -> Any:
        """Builds the model from its variables, arrays or tracers.

        Args:
          variables: a dict with at least the keys of `shapes`, such as a training state.
        """
        filled = [
            # A state's keys are sorted, as a dict's are.
            jax.tree.unflatten(
                jax.tree.structure(state), jax.tree.leaves(variables[kind], is_leaf=has_slot)
            )
            for kind, state in self.states.items()
        ]
        return nnx.merge(self.graph, *filled)

    def buffers(self, model: nnx.Module) -> Tree:
        """The current {"buffers": …} of a model; {} if it has none."""
        if "buffers" not in self.states:
            return {}
        return {"buffers": nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))}


def abstract_model(build: Callable[[], nnx.Module], mesh: Any = None) -> AbstractModel:
    """Traces `build` without allocating anything.

    Args:
      mesh: whose devices run recurrences, for what these cost; None: JAX's default device.
    """
    model = nnx.eval_shape(build)
    graph, states = _split(model)
    shapes = {kind: nnx.to_pure_dict(state) for kind, state in states.items()}
    axes = {kind: _axes(state) for kind, state in states.items()}
    modules: Any = nnx.iter_modules(model)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if mesh else contextlib.nullcontext():
        recurrences = {
            "/".join(map(str, path)): module.recurrence
            for path, module in modules
            if "recurrence" in dir(type(module))
        }
    names = declared_names(model) or _names_of_dims(axes)
    variables = {}
    for kind, tree in shapes.items():
        axes_of = paths(axes[kind])
        variables[kind] = {path: Variable(x, axes_of[path]) for path, x in paths(tree).items()}
    has_phases = {"embed_pairs", "compare"} <= {*dir(type(model))}
    phases = Phases(own_embed_pairs, own_compare) if has_phases else None
    stated: Any = type(model)
    batch_axes = tuple(stated.batch_axes.items()) if "batch_axes" in dir(stated) else ()
    module: Any = model
    frozen = module.frozen if "frozen" in dir(stated) else ()
    return AbstractModel(
        graph, states, shapes, axes, variables, names, recurrences,
        phases=phases, batch_axes=batch_axes, frozen=frozen,
    )  # fmt: skip


def variables_of(model: nnx.Module) -> Tree:
    """A model's arrays: kind → nested dict."""
    return {kind: nnx.to_pure_dict(state) for kind, state in _split(model)[1].items()}


def unadapted(variables: Tree) -> Tree:
    """Drops adapters: the other parameters become "params", as in a checkpoint of the base."""
    others = {kind: tree for kind, tree in variables.items() if kind not in ("params", "base")}
    if "base" not in variables:
        return {"params": variables["params"], **others}
    trained = {p: leaf for p, leaf in paths(variables["params"]).items() if "/lora/" not in p}
    return {"params": nested(paths(variables["base"]) | trained), **others}


def _split(model: nnx.Module) -> tuple[nnx.GraphDef, dict[str, nnx.State]]:
    """(graph, kind → state), without kinds that the model lacks."""
    graph, adapters, params, buffers = nnx.split(model, nnx.LoRAParam, nnx.Param, ...)
    states = {"params": adapters, "base": params} if adapters else {"params": params}
    states["buffers"] = buffers
    return graph, {kind: state for kind, state in states.items() if state}


def _axes(state: nnx.State) -> Tree:
    """The logical axis names of each variable. Raises UserError if some have none."""
    axes = {}
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        axes[path] = metadata.get(AXES, metadata.get("out_sharding"))
        if axes[path] is None or len(axes[path]) != len(variable.shape):
            raise UserError(
                f"{'/'.join(map(str, path))} {list(variable.shape)} has logical axes {axes[path]}; "
                "give it out_sharding=(...) with one name per dim, and eager_sharding=False"
            )
    return nnx.traversals.unflatten_mapping(axes)


def declared_names(model: Any) -> AxisNames | None:
    """What a model declares as `axes`; None if it does not."""
    declared: Any = getattr(type(model), "axes", None)
    if "logical_axes" not in dir(declared):
        return None
    return AxisNames(**vars(declared))  # a copied model has a class of its own


def _names_of_dims(axes: Tree) -> AxisNames:
    """The names of the dims of variables, for a model that declares none.

    The residual stream is the axis that most matrices have; it is not gathered for use.
    """
    every = [names for tree in axes.values() for names in paths(tree).values()]
    of_matrices = Counter(
        axis for names in every if len(names) > 1 for axis in {*names} - {UNNAMED}
    )
    stream = [axis for axis, _ in of_matrices.most_common(1)]
    return AxisNames(
        logical_axes=dict.fromkeys(
            [*(axis for names in every for axis in names), "batch"], "weights"
        ),
        in_use=dict(zip(stream, stream, strict=True)),
    )


def paths(tree: Tree) -> dict[str, Any]:
    """{"layers/attention/q": leaf, …}: leaves by path, as in messages, reports and goldens."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in flat}


def nested(flat: dict[str, Any]) -> Tree:
    """The inverse of `paths`."""
    return nnx.traversals.unflatten_mapping({tuple(path.split("/")): x for path, x in flat.items()})
