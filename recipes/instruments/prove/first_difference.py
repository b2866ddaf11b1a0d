"""Finds the first submodule that differs from one device: forward, then backward.

While a loss is traced, each submodule marks its inputs and outputs in the jaxpr. The jaxpr is then
evaluated so that it returns the marked arrays, those of a scan's iterations stacked, and adds zeros
to them, whose gradients are the marked arrays' cotangents.
"""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]  # JAX 0.12 calls it Jaxpr too
    Jaxpr,
    JaxprEqn,
    Literal,
)
from jax.sharding import NamedSharding, PartitionSpec

from recipes.common.report.report import show_axis
from recipes.common.sharding import Layout, Tree, abstract_model, paths, shardings
from recipes.common.sharding.compiler_options import QUICK
from recipes.common.train.feed import to_devices
from recipes.instruments.prove.comparison import ZERO_SHARE, difference, zeros
from recipes.instruments.prove.run import trace_loss
from recipes.instruments.prove.source import (
    COLLECTIVES,
    bodies,
    constraint,
    folder_of,
    num_carry,
    num_consts,
    source_line,
)

PREFIX = "proof"  # of the names of marks
SEPARATOR = "|"
PATH = "path_in_proof"  # attribute of submodules
TOLERANCE = 1e-5  # relative, of the arrays between submodules
INLINED = ("jit", "pjit", "closed_call", "checkpoint", "remat2")  # calls that may hold marks


@dataclasses.dataclass(frozen=True)
class Place:
    """The first submodule that differs."""

    module: str  # its path in the model
    phase: str  # "forward" or "backward"
    what: str  # the array that differs first
    shape: tuple[int, ...]
    layer: tuple[int, ...]  # iterations of the scans around it
    inputs: tuple[str, ...]  # sharding of the submodule's inputs on the mesh
    output: str  # sharding of the array on the mesh
    relative: float  # difference
    near: tuple[str, ...]  # constraints and collectives in the submodule, with file and line

    def __str__(self) -> str:
        layer = f" (layer {', '.join(map(str, self.layer))})" if self.layer else ""
        near = "; next to it: " + ", ".join(self.near[-3:]) if self.near else ""
        inputs = f"inputs {', '.join(self.inputs)} and " if self.inputs else ""
        return (
            f"{self.phase}: {self.module or 'the model'}{layer} differs first, by {self.relative:.1e}: "
            f"{self.what} {list(self.shape)}; on the mesh its {inputs}output {self.output}, on one "
            f"device whole{near}"
        )


class Mark(NamedTuple):
    """A marked array."""

    module: str
    side: str  # "in" or "out"
    leaf: int  # number among the call's inputs or outputs
    call: int  # number among the calls of this submodule
    position: tuple[int, ...]  # number of the equation, in each of the scans around it
    near: tuple[str, ...]  # of an output: constraints and collectives since the input


# ---- marks ---------------------------------------------------------------------------------------


def tagged(build: Callable[[], nnx.Module]) -> Callable[[], nnx.Module]:
    """Wraps `build` so that each submodule stores its path."""

    def build_tagged() -> nnx.Module:
        model = build()
        for path, module in nnx.iter_graph(model):
            if isinstance(module, nnx.Module):
                setattr(module, PATH, "/".join(map(str, path)))
        return model

    return build_tagged


@contextlib.contextmanager
def marking(model: nnx.Module) -> Iterator[None]:
    """While this is open, calls of the model's submodules mark their inputs and outputs."""
    calls = itertools.count()

    def mark(tree: Any, module: Any, side: str, call: int) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact):
                name = SEPARATOR.join((PREFIX, vars(module)[PATH], side, str(i), str(call)))
                leaves[i] = checkpoint_name(leaf, name)
        return jax.tree.unflatten(structure, leaves)

    def marked(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(module, *args, **kwargs):
            number = next(calls)
            args, kwargs = mark((args, kwargs), module, "in", number)
            return mark(function(module, *args, **kwargs), module, "out", number)

        return call

    kinds = {type(x): None for _, x in nnx.iter_graph(model) if isinstance(x, nnx.Module)}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if "__call__" in vars(kind):
                wrapped = marked(vars(kind)["__call__"])
                stack.enter_context(mock.patch.object(kind, "__call__", wrapped))
        yield


def marks_of(jaxpr: Jaxpr, folder: pathlib.Path) -> list[Mark]:
    """All marks in the order of evaluation, those inside of scans included."""
    marks: list[Mark] = []
    numbers = itertools.count()
    calls: dict[str, list[str]] = {}  # module → the numbers of its calls
    inside: list[tuple[str, list[str]]] = []  # calls that have begun: (number, what is near)
    near: dict[str, tuple[str, ...]] = {}  # number of a call that has ended → what is near

    def visit(jaxpr: Jaxpr, scans: tuple[int, ...]) -> None:
        for eqn in jaxpr.eqns:
            position = (*scans, next(numbers))
            body = _body(eqn)
            if name := _mark_name(eqn):
                _, module, side, leaf, call = name.split(SEPARATOR)
                begun = calls.setdefault(module, [])
                if call not in begun:
                    begun.append(call)
                    inside.extend([(call, [])] * (side == "in"))
                if side == "out" and inside and inside[-1][0] == call:
                    near[call] = tuple(inside.pop()[1])
                marks.append(
                    Mark(module, side, int(leaf), begun.index(call), position, near.get(call, ()))
                )
            elif body is not None and _count_marks(body.jaxpr):
                visit(body.jaxpr, position if eqn.primitive.name == "scan" else scans)
            elif inside:
                inside[-1][1].extend(_near(eqn, folder))

    visit(jaxpr, ())
    return marks


def _mark_name(eqn: JaxprEqn) -> str:
    name = eqn.params["name"] if eqn.primitive.name == "name" else ""
    return name if name.startswith(PREFIX + SEPARATOR) else ""


def _body(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation evaluates once, or in each iteration of a scan."""
    if eqn.primitive.name not in ("scan", *INLINED):
        return None
    body = eqn.params["jaxpr"]
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


def _count_marks(jaxpr: Jaxpr) -> int:
    bodies = (body.jaxpr for body in map(_body, jaxpr.eqns) if body is not None)
    return sum(bool(_mark_name(eqn)) for eqn in jaxpr.eqns) + sum(map(_count_marks, bodies))


def _near(eqn: JaxprEqn, folder: pathlib.Path) -> Iterator[str]:
    """Descriptions of the constraint or the collectives of an equation."""
    name, params = eqn.primitive.name, eqn.params
    line = source_line(eqn, folder)
    where = f" at {line}" if line else ""
    if name == "shard_map":
        specs = (", ".join(map(str, params[side])) for side in ("in_specs", "out_specs"))
        yield f"shard_map {' → '.join(specs)}{where}"
    elif (sharding := constraint(eqn)) is not None:
        yield f"constraint to {sharding.spec}{where}"
    elif name in (*COLLECTIVES, "axis_index"):
        axes = params.get("axes", params.get("axis_name"))
        yield f"{name} over {axes}{where}"
    elif name == "dot_general" and params["out_sharding"] is not None:
        yield f"product constrained to {params['out_sharding'].spec}{where}"
    for body in bodies(eqn):
        for inner in body.eqns:
            yield from _near(inner, folder)


# ---- evaluation ----------------------------------------------------------------------------------


def evaluate(
    closed: ClosedJaxpr, arguments: list, probes: Iterator[jax.Array] | None
) -> tuple[list, list[jax.Array]]:
    """Returns (results, marked arrays); `probes` are added to the marked arrays."""
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env |= dict(zip(closed.jaxpr.invars, arguments, strict=True))
    arrays: list[jax.Array] = []

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        values, body = [read(atom) for atom in eqn.invars], _body(eqn)
        if _mark_name(eqn):
            results = [values[0] if probes is None else values[0] + next(probes)]
            arrays += results
        elif body is None or not _count_marks(body.jaxpr):
            with eqn.ctx.manager:  # its mesh
                parameters = eqn.primitive.get_bind_params(eqn.params)
                results = eqn.primitive.bind(*values, **parameters)
            results = results if eqn.primitive.multiple_results else [results]
        elif eqn.primitive.name == "scan":
            results, inner = _scan(eqn, body, values, probes)
            arrays += inner
        else:
            results, inner = evaluate(body, values, probes)
            arrays += inner
        env |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars], arrays


def _scan(eqn: JaxprEqn, body: ClosedJaxpr, values: list, probes: Iterator | None):
    params, consts, carries = eqn.params, num_consts(eqn), num_carry(eqn)

    def step(carry, x):
        x, probe = x
        arguments = [*values[:consts], *carry, *x]
        results, arrays = evaluate(body, arguments, None if probe is None else iter(probe))
        return results[:carries], (results[carries:], arrays)

    stacked = probes and [next(probes) for _ in range(_count_marks(body.jaxpr))]
    carry, (ys, arrays) = jax.lax.scan(
        step,
        values[consts : consts + carries],
        (values[consts + carries :], stacked),
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *ys], arrays


class Record(NamedTuple):
    """What a loss computes on the way: marked arrays, their cotangents, gradients of parameters."""

    marks: list[Mark]
    arrays: list[jax.Array]
    cotangents: list[jax.Array]
    grads: dict[str, jax.Array]


def record(layout: Layout, initial: Tree, batch: Tree) -> Record:
    """Runs the loss and its gradient.

    Args:
      initial: the model's variables, on the host.
    """
    build = tagged(layout.build)
    model = abstract_model(build)._replace(loss=layout.model.loss)
    example = nnx.eval_shape(build)

    with marking(example):
        closed = trace_loss(layout, model, batch).jaxpr
    variables = layout.variables()
    rows = layout.abstract_batch(jax.tree.map(lambda x: x[0], batch))

    def program(variables, batch):
        def total(params, probes):
            leaves = jax.tree.leaves((variables | {"params": params}, batch))
            (result, *_), arrays = evaluate(closed, leaves, probes and iter(probes))
            return result, arrays

        _, arrays = total(variables["params"], None)
        probes = [jnp.zeros_like(x) for x in arrays]
        gradient = jax.grad(total, argnums=(0, 1), has_aux=True)
        (grads, cotangents), arrays = gradient(variables["params"], probes)
        return arrays, cotangents, grads

    compiled = layout.compile(program, variables, rows, compiler_options=QUICK)
    arrays, cotangents, grads = compiled(
        jax.device_put(initial, shardings(variables)), to_devices(batch, layout)
    )
    marks = marks_of(closed.jaxpr, folder_of(example))
    return Record(marks, arrays, cotangents, paths(grads))


# ---- the first difference ------------------------------------------------------------------------


class Event(NamedTuple):
    """A comparison of one array, in one iteration of the scans around it."""

    order: tuple[int, ...]  # in the forward pass
    mark: Mark
    layer: tuple[int, ...]
    relative: float
    what: str
    shape: tuple[int, ...]


def locate(layout: Layout, one: Layout, initial: Tree, batch: Tree) -> Place | None:
    """Finds the first submodule that differs between a layout and one device's; None: none does."""
    on_mesh, on_one = record(layout, initial, batch), record(one, initial, batch)
    forward = sorted(_events(on_mesh, on_one, on_mesh.arrays, on_one.arrays, "put"))
    phase, first = "forward", next(filter(_differs, forward), None)
    if first is None:
        backward = [
            *_events(on_mesh, on_one, on_mesh.cotangents, on_one.cotangents, "put's gradient"),
            *_weights(on_mesh, on_one),
        ]
        phase = "backward"
        first = next(filter(_differs, sorted(backward, reverse=True)), None)
    if first is None:
        return None
    mark = first.mark
    # An input that differs comes from the code around the submodule; so does an output's gradient.
    is_around = mark.side == ("in" if phase == "forward" else "out")
    module = _parent(mark.module, {m.module for m in on_mesh.marks}) if is_around else mark.module
    what = f"{first.what} of {mark.module}" if is_around else first.what
    shardings_of = {
        (m.module, m.side, m.leaf, m.call): _show(x, m)
        for m, x in zip(on_mesh.marks, on_mesh.arrays, strict=True)
    }
    inputs = [
        text
        for (name, side, _, call), text in shardings_of.items()
        if (name, side, call) == (mark.module, "in", mark.call)
    ]
    near = [m.near for m in on_mesh.marks if m.module == module and m.side == "out"]
    return Place(
        module=module,
        phase=phase,
        what=what,
        shape=first.shape,
        layer=first.layer,
        inputs=tuple(inputs),
        output=shardings_of[mark.module, mark.side, mark.leaf, mark.call],
        relative=first.relative,
        near=near[mark.call if mark.call < len(near) else 0] if near else (),
    )


def _differs(event: Event) -> bool:
    return not event.relative <= TOLERANCE


def _events(
    on_mesh: Record, on_one: Record, arrays: list, others: list, what: str
) -> Iterator[Event]:
    """Compares marked arrays that both records have."""
    known = {mark[:4]: np.asarray(x) for mark, x in zip(on_one.marks, others, strict=True)}
    for mark, array in zip(on_mesh.marks, arrays, strict=True):
        if mark[:4] in known:
            yield from _layers(mark, (), array, known[mark[:4]], f"{mark.side}{what}")


def _weights(on_mesh: Record, on_one: Record) -> Iterator[Event]:
    """Compares gradients of parameters; each is complete just before its module's inputs'."""
    modules = {mark.module for mark in on_mesh.marks}
    ignored = zeros({path: np.asarray(x) for path, x in on_one.grads.items()})
    for path, grad in on_mesh.grads.items():
        module = _parent(path, modules)
        if module in modules and path not in ignored:
            first = next(mark for mark in on_mesh.marks if mark.module == module)
            mark = first._replace(side="in")
            yield from _layers(mark, (1,), grad, on_one.grads[path], f"gradient of {path}")


def _layers(mark: Mark, last: tuple, array: Any, other: Any, what: str) -> Iterator[Event]:
    """Compares an array for each iteration of the scans around its mark."""
    a, b, scans = np.asarray(array), np.asarray(other), len(mark.position) - 1
    if a.shape != b.shape or not b.any():
        return
    least = ZERO_SHARE * float(np.linalg.norm(np.ravel(b)))
    for layer in np.ndindex(a.shape[:scans]):
        pairs = itertools.zip_longest(mark.position, layer)
        order = tuple(n for pair in pairs for n in pair if n is not None)
        if np.linalg.norm(np.ravel(b[layer])) > least:
            relative = difference(a[layer], b[layer])
            yield Event((*order, *last), mark, layer, relative, what, a.shape[scans:])


def _parent(path: str, modules: Iterable[str]) -> str:
    """The innermost of the modules around what is at a path; "": the model."""
    above = [module for module in modules if path.startswith(f"{module}/")]
    return max(above, key=len, default="")


def _show(array: jax.Array, mark: Mark) -> str:
    """The sharding of one iteration's array."""
    spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else PartitionSpec()
    parts = [*spec, *[None] * (array.ndim - len(spec))][len(mark.position) - 1 :]
    return f"({', '.join(map(show_axis, parts))})"
