"""Sharding rules: which table is in force, and whether it fits the model and the mesh.

A table maps logical axes to mesh axes. Nothing here knows a strategy or an axis by its name, but
`batch`, the dim that data parallelism splits; what logical axes there are, and what a weight's axes
are called in use, is declared in each zoo file (LOGICAL_AXES, IN_USE).
"""

import difflib
import itertools
import json
import math
import pathlib
import types
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from recipes.common.runtime import UserError, describe
from recipes.common.runtime.mesh import AXES
from recipes.common.sharding.abstract import AbstractModel, Tree, paths

Table = dict[str, str | tuple[str, ...] | None]


def mesh_axes(target: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """A table's value as a tuple of mesh axes."""
    return () if target is None else (target,) if isinstance(target, str) else tuple(target)


def used_axes(table: Table) -> set[str]:
    """The mesh axes that a table uses."""
    return {axis for target in table.values() for axis in mesh_axes(target)}


def shards(table: Table, axis: str, mesh: Mapping[str, int]) -> int:
    """How many parts a dim with this logical axis is cut into."""
    return math.prod(mesh[name] for name in mesh_axes(table[axis]))


def partition_spec(axes: tuple[str, ...], table: Table) -> PartitionSpec:
    """Logical axes → mesh axes."""
    return PartitionSpec(*(table[axis] for axis in axes))


# ---- which table ---------------------------------------------------------------------------------


def select(
    zoo: types.ModuleType, rules: str | Table | None, mesh: Mesh | AbstractMesh
) -> tuple[str, Table]:
    """(name, complete table) of the sharding rules asked for.

    Args:
      zoo: the entry's zoo file.
      rules: a key of its RULES; the path of a .json file; a table; empty: what suits the mesh.

    Raises UserError if there are no such rules.
    """
    if isinstance(rules, dict):
        return "(yours)", dict.fromkeys(zoo.LOGICAL_AXES) | rules
    if rules and rules.endswith(".json"):
        return rules, dict.fromkeys(zoo.LOGICAL_AXES) | _read(pathlib.Path(rules).expanduser())
    name = rules or default_strategy(zoo.RULES, mesh)
    if name not in zoo.RULES:
        near = difflib.get_close_matches(name, zoo.RULES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(zoo.RULES)}"
        raise UserError(f"--rules={name} is not a strategy of this entry; {hint}")
    return name, zoo.RULES[name]


def default_strategy(rules: dict[str, Table], mesh: Mesh | AbstractMesh) -> str:
    """The most specific strategy whose mesh axes are all there.

    That is the one with most mesh axes, of these the one that splits most logical axes, and of these
    the last. The first of all where none fits.
    """
    fits = [name for name, table in rules.items() if used_axes(table) <= set(mesh.axis_names)]

    def specific(name: str) -> tuple[int, int, int]:
        split = sum(target is not None for target in rules[name].values())
        return len(used_axes(rules[name])), split, fits.index(name)

    return max(fits, key=specific, default=next(iter(rules)))


def _read(path: pathlib.Path) -> Table:
    """A user's own table: a JSON object, so that loading never executes code. Raises UserError."""
    try:
        table = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--rules={path} can't be read ({error.strerror}); fix the path") from None
    except ValueError as error:
        raise UserError(f"--rules={path} is not JSON ({error}); fix the file") from None
    if not isinstance(table, dict):
        raise UserError(f'--rules={path} is not a JSON object; write {{"batch": "data", ...}}')
    for axis, target in table.items():
        names = target if isinstance(target, list) else [target]
        if target is not None and not all(isinstance(name, str) for name in names):
            raise UserError(
                f"--rules={path} maps {axis!r} to {json.dumps(target)}; use the name of a mesh axis, "
                "a list of names, or null"
            )
    return {axis: tuple(t) if isinstance(t, list) else t for axis, t in table.items()}


# ---- whether it fits -----------------------------------------------------------------------------


def fit(
    zoo: types.ModuleType,
    name: str,
    table: Table,
    model: AbstractModel,
    mesh: Mesh | AbstractMesh,
) -> tuple[Table, Table]:
    """(the table to compute by, what of `table` does not hold for weights at rest).

    The zoo file's UNEVEN names dims that a mesh axis need not divide. Where one doesn't, the dim is
    whole on each device: wherever it occurs if UNEVEN says "replicated"; in weights at rest if it
    says "padded", and in the step the model pads it. Allocates nothing.

    Raises UserError if the table does not fit the model or the mesh.

    Args:
      zoo: declares LOGICAL_AXES and IN_USE, and UNEVEN and WITHIN if it has any.
      name: of the table, for messages.
      table: complete.
    """
    known, sizes = zoo.LOGICAL_AXES, dict(mesh.shape)
    for axis in table.keys() - known.keys():
        near = difflib.get_close_matches(axis, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise UserError(f"rules {name!r} name logical axis {axis!r}, unknown to the model; {hint}")
    weights = _every_weight(model)
    for path, (_, axes) in weights.items():
        for axis in set(axes) - known.keys():
            raise UserError(
                f"rules {name!r} are missing logical axis {axis!r} of {path}; add it to "
                "LOGICAL_AXES in the zoo file"
            )
    for axis, target in table.items():
        for mesh_axis in mesh_axes(target):
            if mesh_axis not in sizes:
                present = " and ".join(repr(name) for name in sizes)
                raise UserError(
                    f"rules {name!r} need mesh axis {mesh_axis!r} (for {axis!r}), and "
                    f"--mesh={describe(sizes)} has {present}; "
                    f"try --mesh={_with_axes(sizes, used_axes(table))}"
                )
    for axis, target in table.items():
        if known[axis] == "stack" and mesh_axes(target):
            raise UserError(
                f"rules {name!r} split {axis!r} over mesh axis {mesh_axes(target)[0]!r}, and what is "
                "stacked along it is computed one by one; replicate it (None, or null in JSON)"
            )
    for axis, other in getattr(zoo, "WITHIN", {}).items():
        for mesh_axis in mesh_axes(table[axis]):
            if mesh_axis not in mesh_axes(table[other]):
                raise UserError(
                    f"rules {name!r} split {axis!r} over mesh axis {mesh_axis!r}, and {other!r} not; "
                    "split both over it, or neither"
                )
    may_be_uneven, uneven = getattr(zoo, "UNEVEN", {}), {}
    for path, (shape, axes) in weights.items():
        _check_once(name, table, path, axes)
        _check_once(name, table, f"{path} in use", tuple(zoo.IN_USE.get(a, a) for a in axes))
        for dim, axis in zip(shape, axes, strict=True):
            count = shards(table, axis, sizes)
            if dim % count and axis in may_be_uneven:
                uneven[axis] = table[axis]
            elif dim % count:
                over = " and ".join(repr(name) for name in mesh_axes(table[axis]))
                raise UserError(
                    f"rules {name!r} split dim {axis!r} of {path} {list(shape)} over {count} devices "
                    f"(mesh axis {over} of --mesh={describe(sizes)}), and {dim} is not divisible by "
                    f"{count}; {_meshes_that_fit(table, weights, sizes, may_be_uneven)}"
                )
    # An activation has the axes that only activations have, and one of those that weights share.
    outer = [a for a, on in known.items() if on == "activations" and a not in zoo.IN_USE.values()]
    for axis, on in known.items():
        if on in ("activations", "both") and axis not in outer:
            _check_once(name, table, "an activation", (*outer, axis))
    dropped = {axis: None for axis in uneven if may_be_uneven[axis] == "replicated"}
    return table | dropped, uneven


def check_used(zoo: types.ModuleType, name: str, table: Table, mesh: Mesh | AbstractMesh) -> None:
    """Raises UserError if the rules leave out a mesh axis that was asked for by its name.

    All devices along it would do the same work. The axes that --mesh=4x2 has unasked may be left out.
    """
    used, unasked = used_axes(table), {axis for axes in AXES.values() for axis in axes}
    for axis in mesh.axis_names:
        if mesh.shape[axis] == 1 or axis in used | unasked:
            continue
        others = {n: t for n, t in zoo.RULES.items() if axis in used_axes(t) <= {*mesh.axis_names}}
        fix = f"--rules={default_strategy(others, mesh)}" if others else "a mesh without it"
        raise UserError(
            f"rules {name!r} use no mesh axis {axis!r}, so the {mesh.shape[axis]} devices along it "
            f"(--mesh={describe(mesh.shape)}) would all do the same work; use {fix}"
        )


def check_batch(
    name: str, table: Table, mesh: Mesh | AbstractMesh, batch_size: int, microbatches: int = 1
) -> None:
    """Raises UserError if the rows of a microbatch can't be shared out over the mesh."""
    if batch_size % microbatches:
        raise UserError(
            f"--batch_size={batch_size} is not divisible by --accumulate={microbatches}; try "
            f"--batch_size={max(round(batch_size / microbatches), 1) * microbatches}"
        )
    count, rows = shards(table, "batch", mesh.shape), batch_size // microbatches
    if rows % count:
        where = f"the {count} shards of 'batch' (rules {name!r} on --mesh={describe(mesh.shape)})"
        whole = max(round(rows / count), 1) * count * microbatches
        if microbatches == 1:
            raise UserError(
                f"--batch_size={batch_size} is not divisible by {where}; try --batch_size={whole}"
            )
        raise UserError(
            f"--batch_size={batch_size} in --accumulate={microbatches} parts leaves {rows} to "
            f"each, not divisible by {where}; try --batch_size={whole}"
        )


def _every_weight(model: AbstractModel) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Path → (shape, logical axes) of all variables."""
    shapes, axes = {}, {}
    for kind in model.shapes:
        shapes |= paths(model.shapes[kind])
        axes |= paths(model.axes[kind])
    return {path: (shape.shape, axes[path]) for path, shape in shapes.items()}


def _with_axes(sizes: dict[str, int], wanted: set[str]) -> str:
    """A mesh of as many devices with these axes too, new ones of size 2 where that fits."""
    named = next((axes for axes in AXES.values() if wanted | sizes.keys() <= set(axes)), None)
    if named is None:
        return describe(sizes | dict.fromkeys(sorted(wanted - sizes.keys()), 1))
    left, inner = math.prod(sizes.values()), {}
    for axis in named[1:]:
        inner[axis] = 2 if left % 2 == 0 else 1
        left //= inner[axis]
    return describe({named[0]: left} | inner)


def _check_once(name: str, table: Table, what: str, axes: tuple[str, ...]) -> None:
    """No mesh axis twice in one array."""
    first: dict[str, str] = {}
    for axis in axes:
        for mesh_axis in mesh_axes(table[axis]):
            if mesh_axis in first:
                raise UserError(
                    f"rules {name!r} use mesh axis {mesh_axis!r} twice on {what}, for "
                    f"{first[mesh_axis]!r} and {axis!r}; replicate one of the two (None, or null in JSON)"
                )
            first[mesh_axis] = axis


def _meshes_that_fit(table: Table, weights: Tree, sizes: dict[str, int], uneven) -> str:
    """Advice: the largest meshes with these axes, none of them longer, that divide every dim."""
    dims = {pair for shape, axes in weights.values() for pair in zip(shape, axes, strict=True)}
    dims = {(dim, axis) for dim, axis in dims if axis not in uneven}

    def fits(candidate):
        return all(dim % shards(table, axis, candidate) == 0 for dim, axis in dims)

    every = [
        dict(zip(sizes, c, strict=True))
        for c in itertools.product(*(range(1, size + 1) for size in sizes.values()))
    ]
    found = sorted(filter(fits, every), key=lambda c: -math.prod(c.values()))[:3]
    return "meshes that fit: " + ", ".join(f"--mesh={describe(c)}" for c in found)
