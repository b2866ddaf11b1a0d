"""Finds what is correct in a train step but wasteful."""

import math
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from recipes.common.report.hlo import collectives, source_frames
from recipes.common.report.report import bytes_per_device, size
from recipes.common.sharding import Layout, Tree, paths
from recipes.common.sharding.abstract import variables_of
from recipes.common.train.state import abstract_state
from recipes.instruments.prove.run import trace_loss
from recipes.instruments.prove.source import (
    COLLECTIVES,
    bodies,
    constraint,
    folder_of,
    line_of,
    num_consts,
    source_line,
)

LARGE = 0.05  # share of all weights from which one is large


class Waste(NamedTuple):
    """Something that costs memory or time without need."""

    what: str
    line: str  # of the user's file; "" if JAX doesn't know it

    def __str__(self) -> str:
        return f"{self.line}: {self.what}" if self.line else self.what


def wasteful(
    layout: Layout,
    optimizer: optax.GradientTransformation,
    batch: Tree,
    step: jax.stages.Compiled,
) -> Iterator[Waste]:
    """All warnings about one layout.

    Args:
      step: the compiled train step.
    """
    folder = folder_of(nnx.eval_shape(layout.build))
    yield from _whole_arrays(layout, optimizer, folder)
    yield from _gathered_rows(layout, step, folder)
    yield from _constant_in_loop(layout, batch, folder)


def _whole_arrays(
    layout: Layout, optimizer: optax.GradientTransformation, folder: pathlib.Path
) -> Iterator[Waste]:
    """Large weights and optimizer state that each device holds whole, though others are split."""
    state = abstract_state(layout, optimizer)
    params = paths(state["params"])
    total = sum(x.size for x in params.values())
    split = {path for path, x in params.items() if not x.sharding.is_fully_replicated}
    if not split:
        return
    lines = _lines_of_weights(layout, folder)
    for path, x in params.items():
        if path not in split and x.size > LARGE * total:
            yield Waste(
                f"no rule splits {path} {list(x.shape)}, {x.size / total:.0%} of all weights: each "
                f"device holds {size(bytes_per_device(x))}",
                lines[path],
            )
    for path, x in paths(state["opt_state"]).items():
        if (
            x.sharding.is_fully_replicated
            and x.size > LARGE * total
            and path.endswith(tuple(split))
        ):
            yield Waste(
                f"optimizer state {path} {list(x.shape)} is whole on each device, and its weight is "
                "split",
                "",
            )


def _lines_of_weights(layout: Layout, folder: pathlib.Path) -> dict[str, str]:
    """Path → the line that makes a weight."""
    closed, shapes = jax.make_jaxpr(
        lambda: variables_of(layout.build())["params"], return_shape=True
    )()
    made = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    values = zip(paths(shapes), closed.jaxpr.outvars, strict=True)
    return {
        path: source_line(made[var], folder) if isinstance(var, Var) and var in made else ""
        for path, var in values
    }


def _gathered_rows(
    layout: Layout, step: jax.stages.Compiled, folder: pathlib.Path
) -> Iterator[Waste]:
    """All-gathers that bring all rows of a batch to each device."""
    if layout.batch_shards == 1:
        return
    frames = source_frames(step.as_text())
    weights = _shapes_of_weights(layout)
    for collective in collectives(step.as_text()):
        for shape in collective.shapes:
            is_weight = tuple(sorted(shape)) in weights
            if collective.kind == "all-gather" and layout.batch_size in shape and not is_weight:
                yield Waste(
                    f"each device gathers the activations {list(shape)} of all rows, "
                    f"{size(collective.bytes)}, {collective.times} times a step",
                    line_of(frames.get(collective.frame, []), folder),
                )


def _shapes_of_weights(layout: Layout) -> set[tuple[int, ...]]:
    """Sorted dims that a device may hold of a layer's weight: whole, or split as in use."""
    shapes = set()
    for kind, tree in layout.model.axes.items():
        sizes = paths(layout.model.shapes[kind])
        for path, axes in paths(tree).items():
            parts = [layout.count_shards(layout.names.while_used(axis)) for axis in axes]
            shape = sizes[path].shape
            in_use = tuple(dim // n for dim, n in zip(shape, parts, strict=True))
            # With and without the dim of stacked layers.
            shapes |= {tuple(sorted(dims[first:])) for dims in (shape, in_use) for first in (0, 1)}
    return shapes


# ---- constant in a loop --------------------------------------------------------------------------


def _constant_in_loop(layout: Layout, batch: Tree, folder: pathlib.Path) -> Iterator[Waste]:
    """Collectives in a scan's body that would give the same in each iteration."""
    closed = trace_loss(layout, layout.model, batch).jaxpr
    for eqn in _constant_collectives(closed.jaxpr, frozenset(), in_loop=False):
        array = eqn.invars[0].aval
        yield Waste(
            f"{eqn.primitive.name} of {array.str_short()} in a loop over layers is the same in each "
            "iteration: do it before the loop",
            source_line(eqn, folder),
        )


def _constant_collectives(
    jaxpr: Jaxpr, constants: frozenset[Var], in_loop: bool
) -> Iterator[JaxprEqn]:
    """Equations that communicate and depend on `constants` alone, in the bodies of scans."""
    known = {*constants, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        variables = [x for x in eqn.invars if not isinstance(x, Literal)]
        is_constant = in_loop and known.issuperset(variables)
        if is_constant:
            known.update(eqn.outvars)
        if is_constant and variables and _communicates(eqn):
            yield eqn
            continue
        for body in bodies(eqn):
            if eqn.primitive.name == "scan":
                inner = body.invars[: num_consts(eqn)]
                outer = eqn.invars[: num_consts(eqn)]
                still = [b for a, b in zip(outer, inner, strict=True) if not in_loop or a in known]
                yield from _constant_collectives(body, frozenset(still), in_loop=True)
            elif len(body.invars) == len(eqn.invars):
                pairs = zip(eqn.invars, body.invars, strict=True)
                inner = frozenset(b for a, b in pairs if isinstance(a, Literal) or a in known)
                yield from _constant_collectives(body, inner if in_loop else frozenset(), in_loop)


def _communicates(eqn: JaxprEqn) -> bool:
    """Whether an equation moves data between devices."""
    name = eqn.primitive.name
    if name in COLLECTIVES:
        return True
    if (after := constraint(eqn)) is not None:
        operand: Any = eqn.invars[0].aval
        return _parts(operand.sharding) > _parts(after)
    return name == "shard_map" and any(map(_communicates, eqn.params["jaxpr"].eqns))


def _parts(sharding: Any) -> int:
    """The number of parts into which an array is divided."""
    targets = (target if isinstance(target, tuple) else (target,) for target in sharding.spec)
    return math.prod(sharding.mesh.shape[axis] for axes in targets for axis in axes if axis)
