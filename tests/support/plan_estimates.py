"""The planner's estimates of the cases that compilers measured: tests/golden/plan_*.jsonl."""

import dataclasses
from typing import NamedTuple

from recipes.common import entries
from recipes.common.runtime.mesh import parse
from recipes.common.sharding import make_layout
from recipes.instruments.plan import step_cycles
from recipes.instruments.plan.estimate import Estimate, abstract_mesh, estimate
from recipes.instruments.plan.hardware import parse_devices


class Case(NamedTuple):
    entry: str
    size: str
    devices: str
    rules: str
    mesh: str
    seq_len: int
    remat: str = "full"
    rows: int = 0  # 0: one for each shard of the batch
    accumulate: int = 1
    layers: int = 0  # 0: all
    dropless: bool = False


def estimated(case: Case) -> Estimate:
    config = dataclasses.replace(
        entries.sizes(case.entry)[case.size](), dtype="bfloat16", remat=case.remat
    )
    if case.dropless:
        config = dataclasses.replace(config, capacity=None)
    if case.layers:
        config = dataclasses.replace(config, num_layers=case.layers)
    devices, axes = parse_devices(case.devices), parse(case.mesh)
    mesh, model = abstract_mesh(axes, devices), entries.model(case.entry)
    shards = make_layout(model, config, mesh, case.rules).batch_shards
    pipe = axes.get("pipe", 1)
    rows = case.rows or shards * (4 * pipe if pipe > 1 else 1)
    layout = make_layout(
        model, config, mesh, case.rules, batch_size=rows, seq_len=case.seq_len,
        microbatches=case.accumulate,
    )  # fmt: skip
    return estimate(layout, devices, case.accumulate)


def ratio(plan: Estimate, counted: dict[str, float]) -> float:
    """A step's estimated time, divided by its cycles'."""
    return plan.step * step_cycles.clock(plan.devices) / sum(counted.values())
