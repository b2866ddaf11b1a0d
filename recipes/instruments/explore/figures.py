"""Figures of every layout of a model: which rules it follows, its memory and the bytes that it sends."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from recipes.common.runtime import UserError, describe
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.abstract import AbstractModel
from recipes.common.sharding.layout import Layout, check_periods
from recipes.common.sharding.rules import Rules
from recipes.common.sharding.shape import Shape
from recipes.instruments.plan import search, step_memory, textbook
from recipes.instruments.plan.estimate import abstract_mesh
from recipes.instruments.plan.hardware import Devices
from recipes.instruments.plan.textbook import Transfer
from zoo.core.strategies import HEADS, LAYERS
from zoo.experts.expert_strategies import EXPERT


class Job(NamedTuple):
    """A model, and the batches that it is shown with."""

    config: Any
    abstract: AbstractModel
    shape: Shape
    strategies: dict[str, Rules]
    kind: str  # of devices, a key of HARDWARE
    rows: list[int]  # of a batch
    lengths: list[int]  # of a row, each with all of `rows`; [0]: examples without positions
    accumulate: int = 1
    offload: str = ""


def figures(
    job: Job, meshes: Mapping[int, Mapping[str, Iterable[dict[str, int]]]]
) -> dict[str, Any]:
    """The figures of all layouts that fit: {"sublayers": …, "transfers": …, "layouts": …}.

    Args:
      meshes: number of devices → strategy → meshes.

    Layouts are devices → strategy → mesh → figures; see `_layout_figures`.
    """
    parts = Sublayers(job.abstract)
    transfers: dict[tuple, int] = {}  # (sublayer, purpose, kind, mesh axes) → its number
    layouts: dict[int, dict[str, dict[str, Any]]] = {}
    for count, of_strategies in meshes.items():
        for strategy, every in of_strategies.items():
            for axes in every:
                try:
                    layout = _layout(job, strategy, axes)
                except UserError:
                    continue
                facts = _layout_figures(job, layout, parts, transfers)
                layouts.setdefault(count, {}).setdefault(strategy, {})[describe(axes)] = facts
    return {"sublayers": parts.as_json(), "transfers": [*transfers], "layouts": layouts}


def all_meshes(strategies: dict[str, Rules], counts: Iterable[int]) -> dict[int, dict[str, list]]:
    """The meshes that each strategy is offered, by number of devices."""
    return {
        count: {name: [*search.meshes(count, rules)] for name, rules in strategies.items()}
        for count in counts
    }


def _layout(job: Job, strategy: str, axes: dict[str, int]) -> Layout:
    """A layout without batches. Raises UserError if rules, model and mesh don't fit each other."""
    mesh = abstract_mesh(axes, Devices(job.kind, 1))
    requested = job.strategies[strategy]
    fitting, uneven = sharding_rules.fit(strategy, requested, job.abstract, mesh)
    build = functools.partial(job.abstract.merge, {})  # never called
    layout = _with_shape(job, Layout(
        mesh, job.strategies, job.config, strategy, fitting, uneven, build, job.abstract, 0, 0
    ))  # fmt: skip
    check_periods(layout)
    return layout


def _with_shape(job: Job, layout: Layout) -> Layout:
    """Spares a layout reading its shape, which all of a model's layouts share."""
    vars(layout)["shape"] = job.shape
    return layout


def _layout_figures(
    job: Job, layout: Layout, parts: "Sublayers", transfers: dict[tuple, int]
) -> dict[str, Any]:
    """What the page shows of a layout.

    {"dropped": axes whose rules are not followed, "uneven": those that weights at rest don't follow,
    "memory": {purpose: bytes}, "sent": {number of a transfer: bytes}}. Bytes are a list of one for each
    batch, lengths inside rows, or one number if all are equal; null if the mesh can't divide the batch.
    """
    requested = job.strategies[layout.strategy]
    weight_transfers = [
        (parts.of_path(x), t) for x, t in textbook.single_weight_transfers(layout, job.accumulate)
    ]
    sizes = step_memory.weights(layout)
    kept, sent = [], []
    for rows in job.rows:
        for length in job.lengths:
            batch = _with_batch(job, layout, rows, length)
            kept.append(batch and step_memory.memory_parts(
                batch, job.accumulate, offload=job.offload, sizes=sizes
            ))  # fmt: skip
            sent.append(batch and _sent(batch, weight_transfers, parts, job.accumulate))
    for key in (key for each in sent for key in each or ()):
        transfers.setdefault(key, len(transfers))
    return {
        "dropped": [a for a, target in requested.items() if target != layout.rules.get(a)],
        "uneven": [*layout.uneven],
        "memory": _columns(kept),
        "sent": {transfers[key]: counts for key, counts in _columns(sent).items()},
    }


def _with_batch(job: Job, layout: Layout, rows: int, length: int) -> Layout | None:
    """The layout with batches; None if the mesh can't divide them."""
    of_mesh = layout.strategy, layout.rules, layout.mesh
    try:
        sharding_rules.check_batch(*of_mesh, rows, job.accumulate)
        sharding_rules.check_positions(layout.names, *of_mesh, length, trains=True)
    except UserError:
        return None
    return _with_shape(job, dataclasses.replace(layout, batch_size=rows, seq_len=length))


def _sent(
    layout: Layout,
    weight_transfers: list[tuple[str, Transfer]],
    parts: "Sublayers",
    accumulate: int,
) -> dict[tuple, float]:
    """(sublayer, purpose, kind, mesh axes) → bytes; the sublayer is "" outside of all that are shown."""
    sums: dict[tuple, float] = {}
    module_transfers = (
        (parts.of_module(x), t) for x, t in textbook.module_transfers(layout, accumulate)
    )
    others = (("", transfer) for transfer in textbook.row_transfers(layout, accumulate))
    for name, (purpose, kind, axes, count) in itertools.chain(
        weight_transfers, module_transfers, others
    ):
        if count:
            key = name, purpose, kind, tuple(a for a in layout.mesh.axis_names if a in axes)
            sums[key] = sums.get(key, 0) + count
    return sums


def _columns(rows: list[dict | None]) -> dict[Any, Any]:
    """Key → its value in each row, in whole bytes."""
    columns = {}
    for key in dict.fromkeys(key for row in rows for key in row or ()):
        column = [None if row is None else round(row.get(key, 0)) for row in rows]
        columns[key] = column[0] if len({*column}) == 1 else column
    return columns


class Sublayers:
    """The sublayers of a layer: of one of each stack, or in models without stacks of every layer.

    A sublayer is a group of weights whose paths begin alike, at least one of them a matrix. Of numbered
    blocks, the first is shown.
    """

    def __init__(self, model: AbstractModel):
        every = [
            (path, leaf.axes)
            for variables in model.variables.values() for path, leaf in variables.items()
        ]  # fmt: skip
        stacked = [(path, axes) for path, axes in every if axes[0] == LAYERS]
        self._names: dict[str, str] = {}  # path → its sublayer
        self._matrices: dict[str, dict[str, tuple]] = {}  # sublayer → path → logical axes
        for path, axes in stacked or every:
            first, *rest = path.split("/")
            name = "/".join([first, *rest[:1]]) if stacked or rest[:1] == ["0"] else first
            number = rest[:1] and rest[0].isdigit() and rest[0] != "0"
            if not number and model.names.in_use.keys() & {*axes}:
                self._matrices.setdefault(name, {})[path] = axes
            self._names[path] = name
        self._modules = {
            path.rpartition("/")[0]: name
            for name, matrices in self._matrices.items() for path in matrices
        }  # fmt: skip
        self._in_use = model.names.in_use

    def of_path(self, path: str) -> str:
        """The sublayer of a weight; "" if it is in none that is shown."""
        name = self._names.get(path, "")
        return name if name in self._matrices else ""

    def of_module(self, path: str) -> str:
        """The sublayer of the module at `path`, likewise."""
        return self._modules.get(path, "")

    def as_json(self) -> list[dict[str, Any]]:
        """Each with the names of its matrices: those that read the residual stream, and that write it."""
        sublayers = []
        for name, matrices in self._matrices.items():
            writes = [path for path, axes in matrices.items() if axes[-1] in self._in_use]
            reads = [path for path in matrices if path not in writes]
            axes = {axis for each in matrices.values() for axis in each}
            has = {"attends": HEADS in axes, "routes": EXPERT in axes}
            sublayers.append(
                {"name": name, "reads": _labels(reads), "writes": _labels(writes)} | has
            )
        return sublayers


def _labels(matrices: list[str]) -> str:
    """The last names of paths."""
    last = (path.removesuffix("/kernel").rpartition("/")[2] for path in matrices)
    return ", ".join(dict.fromkeys(last))
