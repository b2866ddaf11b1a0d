"""The sharding explorer: one HTML file that shows what every strategy does to every array.

The page holds the zoo's tables as JSON (`tables`) and the formulas of this package as syntax trees
(portable.py), so that whatever it shows is computed by the same code as a report or a plan.
"""

import ast
import contextlib
import importlib
import io
import itertools
import json
import pathlib
import sys
import tokenize
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from recipes.common import entries
from recipes.common.report.report import size
from recipes.common.runtime import describe
from recipes.common.sharding import layout as layouts
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.abstract import AbstractModel, abstract_model, paths
from recipes.common.sharding.rules import Rules
from recipes.common.sharding.shape import Shape, shape_of
from recipes.instruments.explore.portable import Library
from recipes.instruments.plan import memory, search, textbook
from recipes.instruments.plan.hardware import HARDWARE, USABLE
from zoo.sharding import AxisNames, optimizer_axis

ASSETS = pathlib.Path(__file__).parent
ROOT = pathlib.Path(__file__).parents[3]
FORMULAS = (
    layouts.make_layout, textbook.transfers, memory.memory_parts, search.meshes,
    sharding_rules.default_strategy, sharding_rules.partition_spec, size, describe,
)  # fmt: skip
RUN = "run"  # the size of a run that is shown
MOST_ROWS, MOST_TOKENS = 2**16, 2**17  # beyond, products exceed what JavaScript counts exactly
ROWS, LENGTH = 3, 16  # of the batch that `activations` traces
PODS = (128, 256, 512)  # devices, beside the 8 to 64 of every kind
Array = tuple[tuple[str | None, ...], tuple[int, ...]]  # (logical axes, shape)


class Shown(NamedTuple):
    """The state that the page begins with (the first eight fields), and a run to add."""

    entry: str
    size: str  # a key of SIZES, or RUN
    device: str  # a key of HARDWARE
    devices: int
    mesh: str
    rules: str  # a key of RULES, or the name of a table to add
    batch_size: int
    seq_len: int
    table: Rules
    config: Any = None  # of RUN
    accumulate: int = 1
    offload: str = ""


def page(models: Mapping[str, type], shown: Shown | None, source: str) -> str:
    """The whole page.

    Args:
      models: name of an entry → its class.
      source: what links to lines of the zoo begin with.
    """
    library = Library()
    exported = {name: tables(model, library) for name, model in models.items()}
    if shown:
        exported[shown.entry]["tables"]["RULES"] |= {shown.rules: shown.table}
    if shown and shown.config:
        of_run = arrays(models[shown.entry], shown.config, library)
        of_run |= {"accumulate": shown.accumulate, "offload": shown.offload}
        exported[shown.entry]["sizes"][RUN] = of_run
    data = {
        "formulas": {formula.__name__: library.add(formula)[1] for formula in FORMULAS},
        "definitions": library.definitions,
        "names": {"query": textbook.HEADS, "choice": textbook.EXPERT, "stack": textbook.LAYERS},
        "entries": exported,
        "chips": {
            kind: {
                "name": x.name,
                "platform": x.platform,
                "memory": x.memory,
                "pods": [n for n in PODS if n <= x.most or not x.torus],
            }
            for kind, x in HARDWARE.items()
        },
        "usable": USABLE,
        "most": {"batch_size": MOST_ROWS, "seq_len": MOST_TOKENS},
        "source": source,
        "start": {name: str(getattr(shown, name)) for name in Shown._fields[:8]} if shown else {},
    }
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    names = ("style.css", "python.js", "compute.js", "page.js")
    parts = {name: (ASSETS / name).read_text() for name in names} | {"data": text}
    html = (ASSETS / "page.html").read_text()
    for name, part in parts.items():
        html = html.replace(f"{{{{{name}}}}}", part)
    return html


# ---- an entry's tables ---------------------------------------------------------------------------


def tables(model: type, library: Library) -> dict[str, Any]:
    """An entry's rules and where they stand, and the arrays of all its sizes."""
    zoo = sys.modules[model.__module__]
    return {
        "tables": {
            "RULES": dict(zoo.RULES),  # `page` may add one
        },
        "names": library.add(model.axes),
        "causes": causes(zoo, model.axes),
        "sizes": {
            name: arrays(model, config(), library)
            for name, config in entries.sizes(zoo.__name__.rpartition(".")[2]).items()
        },
    }


def arrays(model: type, config: Any, library: Library) -> dict[str, Any]:
    """A size's config, as nodes for python.js, and the logical axes and shapes of its arrays."""
    abstract = abstract_model(lambda: model(config, rngs=nnx.Rngs(0)))
    shape = shape_of(abstract, config)
    read = vars(config) | {"shape": shape}
    entry = {
        "config": {name: library.add(value) for name, value in read.items()},
        "weights": {
            kind: [
                [path, leaf.shape, paths(abstract.axes[kind])[path], leaf.dtype.itemsize]
                for path, leaf in paths(tree).items()
            ]
            for kind, tree in abstract.shapes.items()
        },
        "activations": activations(
            abstract, _batch(model.__module__.rpartition(".")[2], config, shape)
        ),
        "has_rows": shape.vocab_size > 0,
    }
    if shape.attention and shape.attention.cached:
        entry["cache"] = cache(abstract)
    return entry


def activations(abstract: AbstractModel, batch: dict[str, Any]) -> list[Array]:
    """The activations that the loss shards, as traced: those with a name for each dim.

    A dim of 0 stands for the batch's rows, and one of -1 for a row's positions.
    """
    names = abstract.names
    inside, *between = names.positions or ("",)
    tied = {axis: (axis, inside) for axis in between}  # a shard_map needs all axes of T

    def loss(variables, batch):
        return abstract.merge(variables).loss(**batch)[0]

    with _axes_as_mesh(names, AxisType.Auto, {}, tied):
        traced = jax.make_jaxpr(loss)(abstract.shapes, batch)
    rows = dict.fromkeys(names.positions, -1) | {"batch": 0}
    arrays = [
        _named(spec, shape, rows)
        for spec, shape in _constraints(traced.jaxpr)
        if len(spec) == len(shape) and shape[0] == ROWS and None not in spec
    ]
    return [*dict.fromkeys(array for array in arrays if array[0][0] == "batch")]


def cache(abstract: AbstractModel) -> list[Array]:
    """The keys and values that generation keeps; a dim of 0 or -1 as in `activations`."""
    names = abstract.names
    known, positions = names.logical_axes, names.positions
    elsewhere = {a for a, on in known.items() if on in ("weights", "both", "stack")}
    (slots,) = known.keys() - elsewhere - {"batch", *positions, *names.in_use.values()}
    rules = {axis: None for axis, on in known.items() if on in ("weights", "stack")}
    # Explicit axes must agree: an array's heads are queries' or keys', its T positions or slots.
    rules |= dict.fromkeys(positions) | {textbook.HEADS: memory.KV_HEADS}

    def prefill(variables, tokens, lengths):
        return abstract.merge(variables).prefill(tokens, lengths, LENGTH)[1]

    tokens, lengths = (jax.ShapeDtypeStruct(dims, np.int32) for dims in ((ROWS, LENGTH), (ROWS,)))
    with _axes_as_mesh(names, AxisType.Explicit, {slots: 2}, rules):
        kept = jax.eval_shape(prefill, abstract.shapes, tokens, lengths)
    return [_named(x.sharding.spec, x.shape, {"batch": 0, slots: -1}) for x in (kept.k, kept.v)]


def _named(spec: Any, shape: tuple[int, ...], stand_ins: dict[str, int]) -> Array:
    axes = tuple(axis[0] if isinstance(axis, tuple) else axis for axis in spec)
    return axes, tuple(stand_ins.get(axis, n) for axis, n in zip(axes, shape, strict=True))


def _batch(entry: str, config: Any, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of a model's loss."""
    row = jax.ShapeDtypeStruct((LENGTH,), np.int32)
    example = (
        {"tokens": row, "targets": row} if shape.vocab_size else entries.example(entry, config)
    )
    return {name: jax.ShapeDtypeStruct((ROWS, *x.shape), x.dtype) for name, x in example.items()}


def _constraints(jaxpr: Any) -> Iterator[tuple[tuple, tuple[int, ...]]]:
    """(spec, shape) of every array that a program constrains."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            yield tuple(equation.params["sharding"].spec), equation.outvars[0].aval.shape
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _constraints(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@contextlib.contextmanager
def _axes_as_mesh(
    names: AxisNames, kind: AxisType, sizes: Mapping[str, int], rules: dict[str, Any]
):
    """A context to trace in, whose mesh axes are the logical axes: specs name these.

    Args:
      sizes: of the axes that have more than one device.
      rules: of the axes that are not mapped to themselves alone.
    """
    axes = tuple(names.logical_axes)
    mesh = AbstractMesh(
        tuple(sizes.get(name, 1) for name in axes), axes, axis_types=(kind,) * len(axes),
        abstract_device=AbstractDevice("cpu", None, "cpu"),
    )  # fmt: skip
    rules = {axis: axis for axis in axes} | rules
    for axis, other in names.within.items():
        rules[other] = (other, axis)
    with jax.sharding.use_abstract_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        yield


# ---- which line of the zoo causes a sharding -----------------------------------------------------


class Source:
    """A zoo file's syntax tree and comments."""

    def __init__(self, module: types.ModuleType):
        self.module, self.path = module, pathlib.Path(str(module.__file__))
        text = self.path.read_text()
        self.tree, lines = ast.parse(text), text.splitlines()
        self.comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
        }
        self.alone = {n for n in self.comments if lines[n - 1].lstrip().startswith("#")}

    def beside(self, line: int) -> str:
        """The comment at the end of a line, and its continuation on the next ones."""
        own = self.comments.get(line, "")
        return " ".join([own, *self._run(line, 1)]) if own else ""

    def above(self, line: int) -> str:
        return " ".join(reversed(self._run(line, -1)))

    def _run(self, line: int, step: int) -> list[str]:
        lines = itertools.takewhile(self.alone.__contains__, itertools.count(line + step, step))
        return [self.comments[each] for each in lines]

    def imported(self) -> Iterator["Source"]:
        """The zoo files that this one needs, and those that they need."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                other = Source(importlib.import_module(f".{node.module}", "zoo"))
                yield from (other, *other.imported())

    def tables(self) -> Iterator[tuple[dict[str, Any], str, str, list[ast.Constant]]]:
        """Dicts that the file defines: (value, name, the comment above, the keys that stand here)."""
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            value = getattr(self.module, target.id, None) if isinstance(target, ast.Name) else None
            if isinstance(target, ast.Name) and isinstance(value, dict):
                dicts = [each for each in ast.walk(node) if isinstance(each, ast.Dict)]
                keys = [key for each in dicts for key in each.keys if isinstance(key, ast.Constant)]
                yield value, target.id, self.above(node.lineno), keys


def causes(zoo: types.ModuleType, names: AxisNames) -> dict[str, Any]:
    """Where each rule of each strategy stands: {"rows": …, "strategies": name → axis → its row}.

    A strategy is a union of the tables whose rules it all has. An axis that is in none of them, such
    as the experts' D, is split as another one is: its row is that of the other.
    """
    known = names.logical_axes | {optimizer_axis(axis): "optimizer" for axis in names.logical_axes}
    tables_of_rows: dict[tuple, dict[str, Any]] = {}  # row → the table that it is in
    own = Source(zoo)
    for source in (own, *own.imported()):
        file = source.path.relative_to(ROOT).as_posix()
        for table, name, about, keys in source.tables():
            for key in keys:
                row = (key.value, name, about, file, key.lineno, source.beside(key.lineno))
                if key.value in known and key.value in table:
                    tables_of_rows.setdefault(row, table)
    strategies: dict[str, dict[str, int]] = {}
    for strategy, rules in zoo.RULES.items():
        rows = [
            (row, i)
            for i, (row, table) in enumerate(tables_of_rows.items())
            if table.items() <= rules.items()
        ]
        split = strategies[strategy] = {}
        for axis in (axis for axis, target in rules.items() if target):
            alike = [
                (row[0] != axis, i)
                for row, i in rows
                if known[row[0]] == known[axis] and rules[row[0]] == rules[axis]
            ]
            if alike:
                split[axis] = min(alike)[1]
    return {"rows": [row[1:] for row in tables_of_rows], "strategies": strategies}
