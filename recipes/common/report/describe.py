"""Reports any Flax module: what is sharded how, what each device holds, what a compiled step sends.

    print(describe(module, RULES["fsdp_tp"], mesh, compiled))

A copied model needs no zoo, no flags and no checkpoint for this; a module that never was in the zoo, too.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipes.common.report import report
from recipes.common.runtime import UserError
from recipes.common.sharding.rules import Rules, target_axes, used_axes

Names = tuple[str | None, ...]  # a variable's logical axes; a mesh axis may stand there itself


def describe(
    module: nnx.Module | nnx.State,
    rules: Rules | tuple,
    mesh: Mesh,
    compiled: jax.stages.Compiled | None = None,
) -> str:
    """The report that recipes print at their start, for a module of your own.

    Args:
      module: the module or its nnx.State, with arrays, or abstract (nnx.eval_shape(build)).
      rules: logical axis → mesh axis, a tuple of them or None; or pairs, as nnx.logical_axis_rules has.
      mesh: the mesh, of devices that exist or are simulated.
      compiled: your train step, jax.jit(step).lower(state, batch).compile(); without it, the report
        is about the variables alone.

    Arrays that are already on this mesh are shown as they lie, and a line names each that lies
    otherwise than the rules say. Raises UserError if a rule does not fit a variable.
    """
    named = dict(rules)
    variables = module if isinstance(module, nnx.State) else nnx.state(module)
    rows, placed, notes = [report.HEAD], {"params": [], "others": []}, []
    unmapped: dict[str, str] = {}  # logical axis → the first variable that has it
    for key, variable in nnx.to_flat_state(variables):
        if isinstance(variable, nnx.RngState) or not hasattr(variable, "shape"):
            continue  # a key or counter, or a value that is no array
        path = "/".join(map(str, key))
        shape = tuple(variable.shape)
        axes: Names = getattr(variable, "out_sharding", None) or (None,) * len(shape)
        wanted = NamedSharding(mesh, _spec(path, shape, axes, named, mesh))
        actual = _sharding(variable, mesh)
        if actual and not actual.is_equivalent_to(wanted, len(shape)):
            notes.append(
                f"Not as the rules say: {path} lies as {_show(actual)}, and its axes "
                f"({', '.join(map(str, axes))}) make {_show(wanted)}."
            )
        for axis in axes:
            if axis and axis not in named and axis not in mesh.shape:
                unmapped.setdefault(axis, path)
        array = jax.ShapeDtypeStruct(shape, variable.dtype, sharding=actual or wanted)
        rows.append(report.row(path, array, axes))
        placed["params" if isinstance(variable, nnx.Param) else "others"].append(array)
    if unmapped:
        listed = ", ".join(f"{axis} (of {path})" for axis, path in unmapped.items())
        notes.append(
            f"No rule names these logical axes, so each device holds all of them: {listed}."
        )
    used = used_axes(named) | (_used_by(compiled) if compiled else set())
    idle = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]
    lines = [
        report.headline_of(mesh, "(yours)", idle),
        *report.columns(rows),
        _total(placed),
        *notes,
    ]
    return "\n".join([*lines, *([report.step(compiled)] if compiled else [])])


def _used_by(compiled: jax.stages.Compiled) -> set[str]:
    """The mesh axes that split a compiled function's arguments, such as a batch."""
    shardings: list[Any] = jax.tree.leaves(compiled.input_shardings)
    specs = [sharding.spec for sharding in shardings if isinstance(sharding, NamedSharding)]
    return {name for spec in specs for target in spec for name in target_axes(target)}


def _spec(
    path: str, shape: tuple[int, ...], axes: Names, rules: Rules, mesh: Mesh
) -> PartitionSpec:
    """The PartitionSpec of a variable. Raises UserError if it can't be split so."""
    if len(axes) != len(shape):
        raise UserError(
            f"{path} {list(shape)} has {len(axes)} logical axes ({', '.join(map(str, axes))}); give "
            f"it {len(shape)}, one for each dim"
        )
    targets = []
    for dim, axis in zip(shape, axes, strict=True):
        target = rules.get(axis, axis if axis in mesh.shape else None) if axis else None
        for name in target_axes(target):
            if name not in mesh.shape:
                raise UserError(
                    f"the rules split {axis!r} of {path} over mesh axis {name!r}, and the mesh has "
                    f"{', '.join(map(repr, mesh.shape))}; use one of these, or None"
                )
            if any(name in target_axes(other) for other in targets):
                raise UserError(
                    f"the rules split two dims of {path} ({', '.join(map(str, axes))}) over mesh axis "
                    f"{name!r}; give one of them another mesh axis, or None"
                )
        count = math.prod(mesh.shape[name] for name in target_axes(target))
        if dim % count:
            raise UserError(
                f"the rules split dim {axis!r} of {path} {list(shape)} over {count} devices, and "
                f"{dim} is not divisible by {count}; change the mesh or the dim"
            )
        targets.append(target)
    return PartitionSpec(*targets)


def _sharding(variable: nnx.Variable, mesh: Mesh) -> NamedSharding | None:
    """Where an array lies, if it is one and lies on this mesh."""
    sharding: Any = getattr(variable.get_value(), "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    return None


def _show(sharding: NamedSharding) -> str:
    return f"({', '.join(report.show_axis(part) for part in sharding.spec)})"


def _total(placed: Mapping[str, list]) -> str:
    """One line: the number of parameters, and what a device holds of them and of other variables."""
    count = sum(math.prod(array.shape) for array in placed["params"])
    held = {kind: report.size(report.bytes_per_device(tree)) for kind, tree in placed.items()}
    line = (
        f"{count:,} parameters. Per device: parameters {held['params']}, gradients {held['params']}"
    )
    return f"{line}, other variables {held['others']}." if placed["others"] else f"{line}."
