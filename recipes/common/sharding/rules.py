"""Sharding rules: chooses them, and checks that they fit the model and the mesh.

Rules map logical axes to mesh axes. The only name of an axis or a strategy in this file is `batch`,
the dim that data parallelism splits. Each model states its logical axes, and what rules may do with
them, in `axes`.
"""

import difflib
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from recipes.common.runtime import UserError, describe
from recipes.common.runtime.mesh import AXES, ORDER
from recipes.common.sharding.abstract import AbstractModel, Tree
from zoo.core.sharding import AxisNames, Rules, optimizer_axes, optimizer_axis
from zoo.experts.expert_strategies import STRATEGIES

Weights = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # path → (shape, logical axes)


def target_axes(target: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The value of a rule as a tuple of mesh axes."""
    return () if target is None else (target,) if isinstance(target, str) else tuple(target)


def used_axes(rules: Rules) -> set[str]:
    """The mesh axes that rules use."""
    return {axis for target in rules.values() for axis in target_axes(target)}


def count_shards(rules: Rules, axis: str, mesh: Mapping[str, int]) -> int:
    """Number of parts into which rules split a dim with this logical axis."""
    return math.prod(mesh[name] for name in target_axes(rules[axis]))


def partition_spec(axes: tuple[str, ...], rules: Rules) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes."""
    return PartitionSpec(*(rules[axis] for axis in axes))


# ---- which rules ---------------------------------------------------------------------------------


def select(
    strategies: dict[str, Rules],
    names: AxisNames,
    rules: str | Rules | None,
    mesh: Mesh | AbstractMesh,
) -> tuple[str, Rules]:
    """Finds the requested sharding rules: (their name, the rules with every logical axis).

    Args:
      strategies: the model's RULES.
      names: the model's logical axes.
      rules: a key of RULES, a path of a .json file, or a dict; empty: the mesh's default.

    Raises UserError if there are no such rules.
    """
    if isinstance(rules, dict):
        return "(yours)", dict.fromkeys(names.logical_axes) | rules
    if rules and rules.endswith(".json"):
        return rules, dict.fromkeys(names.logical_axes) | _read(pathlib.Path(rules).expanduser())
    name = rules or default_strategy(strategies, mesh)
    if name not in strategies:
        near = difflib.get_close_matches(name.lower(), strategies, n=1)
        near = [] if name in STRATEGIES else near  # it is another entry's
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(strategies)}"
        raise UserError(f"--rules={name} is not a strategy of this entry; {hint}")
    return name, strategies[name]


def default_strategy(rules: dict[str, Rules], mesh: Mesh | AbstractMesh) -> str:
    """The strategy that uses the most axes of the mesh, those of more than one device first.

    Of several, it is the last in STRATEGIES, the zoo's order; other names come after these, by
    name. If no strategy fits, it is the first in that order.
    """

    def order(name: str) -> tuple[int, str]:
        return (STRATEGIES.index(name) if name in STRATEGIES else len(STRATEGIES)), name

    def rank(name: str) -> tuple:
        used = used_axes(rules[name])
        return sum(mesh.shape[axis] > 1 for axis in used), len(used), order(name)

    fitting = [name for name in rules if used_axes(rules[name]) <= set(mesh.axis_names)]
    return max(fitting, key=rank) if fitting else min(rules, key=order)


def _read(path: pathlib.Path) -> Rules:
    """Reads a user's own rules from JSON, so loading never executes code. Raises UserError."""
    try:
        rules = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--rules={path} can't be read ({error.strerror}); fix the path") from None
    except ValueError as error:
        raise UserError(f"--rules={path} is not JSON ({error}); fix the file") from None
    if not isinstance(rules, dict):
        raise UserError(f'--rules={path} is not a JSON object; write {{"batch": "data", ...}}')
    for axis, target in rules.items():
        names = target if isinstance(target, list) else [target]
        if target is not None and not all(isinstance(name, str) for name in names):
            raise UserError(
                f"--rules={path} maps {axis!r} to {json.dumps(target)}; use the name of a mesh "
                "axis, a list of names, or null"
            )
    return {axis: tuple(t) if isinstance(t, list) else t for axis, t in rules.items()}


# ---- whether it fits -----------------------------------------------------------------------------


def fit(
    name: str, rules: Rules, model: AbstractModel, mesh: Mesh | AbstractMesh
) -> tuple[Rules, Rules]:
    """Fits rules to model and mesh: (rules to compute with, rules that weights at rest skip).

    The model's axes.uneven names dims that need not be divisible by their mesh axes. If one is
    not divisible, each device holds all of it: everywhere if it is "replicated" or layers are in stages;
    only in weights at rest if it is "padded", since the model pads it in the step. Optimizer state that is not divisible
    follows its weight. Allocates nothing.

    Args:
      name: the name of the rules, for messages.
      rules: maps every logical axis.

    Raises UserError if the rules do not fit the model or the mesh.
    """
    names = model.names
    sizes = dict(mesh.shape)
    weights = _every_weight(model)
    _check_names(name, rules, names, weights)
    _check_mesh_axes(name, rules, sizes, _divides(rules, weights, names.uneven))
    for axis, other in names.within.items():
        for mesh_axis in target_axes(rules[axis]):
            if mesh_axis not in target_axes(rules[other]):
                raise UserError(
                    f"rules {name!r} split {axis!r} over mesh axis {mesh_axis!r}, but not "
                    f"{other!r}; split both over it, or neither"
                )
    uneven = _check_weights(name, rules, names, weights, sizes)
    _check_activations(name, rules, names)
    state_follows = {*uneven} & _of_optimizer(names)
    rules = {axis: target for axis, target in rules.items() if axis not in state_follows}
    in_stages = any(
        count_shards(rules, axis, sizes) > 1 for axis in names.stacks
    )  # these pad nothing
    dropped = {axis: None for axis in uneven if in_stages or names.uneven.get(axis) == "replicated"}
    # A mesh axis of size 1 would make a pipeline of one stage, or a ring of one device.
    for axis in (*names.stacks, *names.positions, *names.substitutes):
        if count_shards(rules, axis, sizes) == 1:
            dropped[axis] = None
    return rules | dropped, uneven


def _of_optimizer(names: AxisNames) -> set[str]:
    """The names that weights' axes have in the optimizer's state."""
    return {optimizer_axis(axis) for axis, on in names.logical_axes.items() if on != "activations"}


def _check_names(name: str, rules: Rules, names: AxisNames, weights: Weights) -> None:
    """Raises UserError if rules and model name different logical axes."""
    known = names.logical_axes
    for axis in rules.keys() - known.keys() - _of_optimizer(names):
        near = difflib.get_close_matches(axis, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
        raise UserError(f"rules {name!r} name logical axis {axis!r}, unknown to the model; {hint}")
    for path, (_, axes) in weights.items():
        for axis in set(axes) - known.keys():
            raise UserError(
                f"rules {name!r} are missing logical axis {axis!r} of {path}; add it to "
                "the model's logical_axes"
            )


def _check_mesh_axes(name: str, rules: Rules, sizes: dict[str, int], fits) -> None:
    """Raises UserError if rules name mesh axes that the mesh lacks; fits: see `_divides`."""
    for axis, target in rules.items():
        for mesh_axis in target_axes(target):
            if mesh_axis not in sizes:
                present = " and ".join(repr(name) for name in sizes)
                raise UserError(
                    f"rules {name!r} need mesh axis {mesh_axis!r} (for {axis!r}), and "
                    f"--mesh={describe(sizes)} has {present}; "
                    f"try --mesh={_with_axes(sizes, used_axes(rules), fits)}"
                )


def _check_weights(
    name: str, rules: Rules, names: AxisNames, weights: Weights, sizes: dict[str, int]
) -> Rules:
    """Raises UserError if rules split a weight twice over a mesh axis, or into uneven parts.

    Returns: the rules of dims that are not divisible and need not be.
    """
    of_optimizer = _of_optimizer(names)
    uneven = {}
    for path, (shape, axes) in weights.items():
        _check_once(name, rules, path, axes)
        _check_once(name, rules, f"{path} in use", tuple(names.while_used(a) for a in axes))
        state_axes = optimizer_axes(axes, rules)
        _check_once(name, rules, f"the optimizer's state of {path}", state_axes)
        for dim, axis in zip(shape, state_axes, strict=True):
            if axis in of_optimizer and dim % count_shards(rules, axis, sizes):
                uneven[axis] = rules[axis]
        for dim, axis in zip(shape, axes, strict=True):
            count = count_shards(rules, axis, sizes)
            if dim % count and axis in names.uneven:
                uneven[axis] = rules[axis]
            elif dim % count:
                over = " and ".join(repr(name) for name in target_axes(rules[axis]))
                raise UserError(
                    f"rules {name!r} split dim {axis!r} of {path} {list(shape)} over {count} "
                    f"devices (mesh axis {over} of --mesh={describe(sizes)}), and {dim} is not "
                    f"divisible by {count}; "
                    f"{_meshes_that_fit(rules, weights, sizes, names.uneven)}"
                )
    return uneven


def _check_activations(name: str, rules: Rules, names: AxisNames) -> None:
    """Raises UserError if rules split an activation twice over a mesh axis.

    An activation has every axis that only activations have (or its substitute) and one axis that
    weights have too.
    """
    known, substitutes = names.logical_axes, names.substitutes
    inner = dict.fromkeys(names.in_use.values())
    outer = [
        axis
        for axis, on in known.items()
        if on == "activations" and axis not in inner and axis not in substitutes
    ]
    for axis, on in known.items():
        if axis in substitutes:
            others = [a for a in outer if a != substitutes[axis]]
            for other in inner:
                _check_once(name, rules, "an activation", (*others, axis, other))
        elif on in ("activations", "both") and axis not in outer:
            _check_once(name, rules, "an activation", (*outer, axis))
        elif on == "stack":  # its stages take turns with the batch
            _check_once(name, rules, "a pipeline", (axis, *outer))
            split = [other for other in names.positions if rules[axis] and rules[other]]
            if split:
                raise UserError(
                    f"rules {name!r} split {axis!r} and {split[0]!r}, and the stages of a pipeline "
                    "need whole rows; replicate one of the two (None, or null in JSON)"
                )


def check_used(
    strategies: dict[str, Rules], name: str, rules: Rules, mesh: Mesh | AbstractMesh
) -> None:
    """Raises UserError if the rules do not use a mesh axis that the user named.

    All devices along it would do the same work. Axes that --mesh=4x2 only implies may be unused.
    """
    used, unasked = used_axes(rules), {axis for axes in AXES.values() for axis in axes}
    for axis in mesh.axis_names:
        if mesh.shape[axis] == 1 or axis in used | unasked:
            continue
        others = {n: t for n, t in strategies.items() if axis in used_axes(t) <= {*mesh.axis_names}}
        fix = f"--rules={default_strategy(others, mesh)}" if others else _without(axis, mesh.shape)
        raise UserError(
            f"rules {name!r} use no mesh axis {axis!r}, so the {mesh.shape[axis]} devices along it "
            f"(--mesh={describe(mesh.shape)}) would all do the same work; use {fix}"
        )


def check_batch(
    name: str,
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    batch_size: int,
    microbatches: int = 1,
    flag: str = "--batch_size=",
) -> None:
    """Raises UserError if the mesh does not divide the rows of a microbatch.

    Args:
      flag: what the message calls batch_size.
    """
    if batch_size % microbatches:
        raise UserError(
            f"--batch_size={batch_size} is not divisible by --accumulate={microbatches}; try "
            f"--batch_size={max(round(batch_size / microbatches), 1) * microbatches}"
        )
    count, rows = count_shards(rules, "batch", mesh.shape), batch_size // microbatches
    if rows % count:
        where = f"the {count} shards of 'batch' (rules {name!r} on --mesh={describe(mesh.shape)})"
        nearest = max(round(rows / count), 1) * count * microbatches
        if microbatches == 1:
            raise UserError(f"{flag}{batch_size} is not divisible by {where}; try {flag}{nearest}")
        raise UserError(
            f"--batch_size={batch_size} in --accumulate={microbatches} parts leaves {rows} to "
            f"each, not divisible by {where}; try --batch_size={nearest}"
        )


def check_positions(
    names: AxisNames,
    name: str,
    rules: Rules,
    mesh: Mesh | AbstractMesh,
    seq_len: int,
    *,
    trains: bool = False,
    flag: str = "--seq_len=",
) -> None:
    """Raises UserError if the mesh does not divide the positions of a row.

    Args:
      seq_len: the positions; 0 passes.
      flag: what the message calls seq_len.
      trains: whether the mesh must divide the positions of the residual stream too. Otherwise a
        model may replicate them, as in decoding.
    """
    axes = names.positions[: None if trains else 1]
    counts = {axis: count_shards(rules, axis, mesh.shape) for axis in axes}
    for axis, count in counts.items():
        if seq_len % count:
            multiple = math.lcm(*counts.values())
            raise UserError(
                f"rows of {seq_len:,} tokens are not divisible by the {count} shards of {axis!r} "
                f"(rules {name!r} on --mesh={describe(mesh.shape)}); "
                f"try {flag}{max(round(seq_len / multiple), 1) * multiple}"
            )


def _every_weight(model: AbstractModel) -> Weights:
    """Path → (shape, logical axes) of all variables."""
    every = (pair for of_kind in model.variables.values() for pair in of_kind.items())
    return {path: (variable.array.shape, variable.axes) for path, variable in every}


def _without(axis: str, sizes: Mapping[str, int]) -> str:
    """Advice: a mesh with the same number of devices, without an axis."""
    (first, size), *inner = [pair for pair in sizes.items() if pair[0] != axis] or [("data", 1)]
    return f"--mesh={describe({first: size * sizes[axis], **dict(inner)})}"


def _with_axes(sizes: Mapping[str, int], wanted: set[str], fits: Callable) -> str:
    """Advice: the most similar mesh with as many devices that also has the wanted axes.

    Each axis gets at least two devices if there are enough. Axes that the rules don't use go, except
    `data`, which a mesh like 4x2 always has.

    Args:
      fits: whether a mesh divides the model.
    """
    kept = [axis for axis in sizes if axis in wanted or axis == "data"]
    names = [axis for axis in ORDER if axis in wanted or axis in kept]
    names += sorted({*wanted, *kept} - {*names})

    def meshes(left: int, names: list[str]) -> Iterator[dict[str, int]]:
        if len(names) == 1:
            yield {names[0]: left}
            return
        for size in (n for n in range(1, left + 1) if left % n == 0):
            yield from ({names[0]: size} | inner for inner in meshes(left // size, names[1:]))

    def unlikeness(mesh: dict[str, int]) -> tuple[bool, int, float, int]:
        moved = sum(abs(math.log2(mesh[axis] / sizes[axis])) for axis in kept)
        idle = sum(mesh[axis] == 1 for axis in names)
        return not fits(mesh), idle, round(moved, 6), -mesh[names[0]]

    return describe(min(meshes(math.prod(sizes.values()), names), key=unlikeness))


def _check_once(name: str, rules: Rules, what: str, axes: tuple[str, ...]) -> None:
    """Raises UserError if an array would be split twice over the same mesh axis."""
    first: dict[str, str] = {}
    for axis in axes:
        for mesh_axis in target_axes(rules[axis]):
            if mesh_axis in first:
                raise UserError(
                    f"rules {name!r} use mesh axis {mesh_axis!r} twice on {what}, for "
                    f"{first[mesh_axis]!r} and {axis!r}; replicate one of the two (None, or null "
                    "in JSON)"
                )
            first[mesh_axis] = axis


def _divides(rules: Rules, weights: Tree, uneven) -> Callable[[Mapping[str, int]], bool]:
    """A function of a mesh: whether it divides every dim that has to be."""
    dims = {pair for shape, axes in weights.values() for pair in zip(shape, axes, strict=True)}
    dims = {(dim, axis) for dim, axis in dims if axis not in uneven}
    return lambda mesh: all(dim % count_shards(rules, axis, mesh) == 0 for dim, axis in dims)


def _meshes_that_fit(rules: Rules, weights: Tree, sizes: dict[str, int], uneven) -> str:
    """Advice: the largest meshes with these axes, none larger than now, that divide every dim."""
    fits = _divides(rules, weights, uneven)
    every = [
        dict(zip(sizes, c, strict=True))
        for c in itertools.product(*(range(1, size + 1) for size in sizes.values()))
    ]
    fitting = sorted(filter(fits, every), key=lambda c: -math.prod(c.values()))[:3]
    return "meshes that fit: " + ", ".join(f"--mesh={describe(c)}" for c in fitting)
