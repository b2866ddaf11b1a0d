"""Every mesh and strategy for some devices, ranked by the estimated time of a train step."""

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx

from recipes.common.runtime import UserError, slice_groups
from recipes.common.runtime.mesh import ORDER
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.abstract import AbstractModel, abstract_model
from recipes.common.sharding.layout import Layout
from recipes.common.sharding.rules import Rules, used_axes
from recipes.common.sharding.shape import shape_of
from recipes.instruments.plan.estimate import Estimate, abstract_mesh, estimate
from recipes.instruments.plan.hardware import USABLE, Devices
from zoo.core.strategies import RESIDUAL_SEQ, SEQ
from zoo.parallel.pipeline import rounds

TIE = 1.03  # a step that takes up to 3% longer is as good
# Why candidates are left out, as printed; the first that applies counts.
RULES_OUT = {
    "slices": "an inner axis would cross slices or nodes, and only outer ones may",
    "rows": "the batch's rows are not divisible by the devices that share them",
    "length": "the positions of a row are not divisible by the devices that share them",
    "dims": "a dim of a weight is not divisible by its devices, or heads would be computed twice",
    "stages": "a stage boundary would cut a period of layers",
}


class Job(NamedTuple):
    """A request: a model, and the batch of a step."""

    model: Any  # the entry's class
    config: Any
    rows: int  # of a batch
    seq_len: int  # 0: examples without positions
    offload: str = ""  # "optimizer": its state is in the host's memory
    optimizer: str = "adamw"  # one of OPTIMIZERS
    rules: dict[str, Rules] | None = None  # of a user's own model
    pictures: int = 1  # slots of a row, for a model that sees

    @property
    def strategies(self) -> dict[str, Rules]:
        return self.rules or sys.modules[self.model.__module__].RULES


class Plan(NamedTuple):
    """All candidates, best first, each with the remat and accumulation that suit it best."""

    job: Job
    devices: Devices
    ranked: list[Estimate]  # those that fit, then the others by memory
    tied: int  # how many of them are within 3% of the fastest
    left_out: dict[str, int]  # a key of RULES_OUT → candidates
    tried: int  # number of estimates

    @property
    def best(self) -> Estimate | None:
        return self.ranked[0] if self.ranked and self.ranked[0].fits else None

    def per_strategy(self) -> dict[str, Estimate]:
        """Strategy → its best candidate, in the order of their ranks."""
        best: dict[str, Estimate] = {}
        for candidate in self.ranked:
            best.setdefault(candidate.layout.strategy, candidate)
        return best


def search(job: Job, devices: Devices, abstract: AbstractModel | None = None) -> Plan:
    """Estimates every candidate. Traces the model, unless `abstract` is given."""
    abstract = abstract or trace(job)
    left_out = dict.fromkeys(RULES_OUT, 0)
    candidates: list[Estimate] = []
    tried = 0
    for strategy, rules in job.strategies.items():
        for axes in meshes(devices.count, rules, devices.groups):
            layout = _layout(job, devices, abstract, strategy, rules, axes)
            if isinstance(layout, str):
                left_out[layout] += 1
                continue
            options = [*_options(layout, devices, job)]
            tried += len(options)
            fitting = [option for option in options if option.fits]
            key = _seconds if fitting else (lambda x: x.peak)
            candidates.append(min(fitting or options, key=key))
    ranked, tied = _rank(candidates, [*job.strategies])
    return Plan(job, devices, ranked, tied, left_out, tried)


def _seconds(option: Estimate) -> float:
    """Of a step; more rounds must save enough to be worth it."""
    layout = option.layout
    return option.step * (TIE if layout.stages > 1 and rounds(layout.config) > 1 else 1)


def trace(job: Job) -> AbstractModel:
    """The model's shapes and logical axes; nothing is allocated."""
    return abstract_model(lambda: job.model(job.config, rngs=nnx.Rngs(0)))


def meshes(count: int, rules: Rules, groups: int = 1) -> Iterator[dict[str, int]]:
    """Every mesh of `count` devices with exactly the axes of some rules.

    Every axis except `data` has at least two devices; with one, a strategy without it is equal.

    >>> [*meshes(8, {"batch": "data", "mlp": "model"})]
    [{'data': 4, 'model': 2}, {'data': 2, 'model': 4}, {'data': 1, 'model': 8}]
    """
    used = used_axes(rules)
    axes = ["data", *(axis for axis in ORDER if axis in used and axis != "data")]
    axes += sorted(used - {*axes})

    def sizes(left: int, names: list[str]) -> Iterator[tuple[int, ...]]:
        if not names:
            yield ()
            return
        for size in (n for n in range(2, left + 1) if left % n == 0):
            yield from ((size, *inner) for inner in sizes(left // size, names[1:]))

    inner = axes[1:]
    for chosen in sizes(count, inner):
        mesh = {"data": count // math.prod(chosen)} | dict(zip(inner, chosen, strict=True))
        yield mesh
        if groups > 1 and "pipe" in mesh:  # stages on different slices
            yield {"pipe": mesh["pipe"]} | mesh


def _layout(
    job: Job, devices: Devices, abstract: AbstractModel, strategy: str, rules: Rules, axes: dict
) -> Layout | str:
    """The layout of a candidate, or the key of RULES_OUT that it breaks."""
    if slice_groups.cut(axes, slice_groups.across(axes, devices.groups)):
        return "slices"
    if job.rows % sharding_rules.count_shards(rules, "batch", axes):
        return "rows"
    for axis in abstract.names.positions:
        if job.seq_len % sharding_rules.count_shards(rules, axis, axes):
            return "length"
    mesh = abstract_mesh(axes, devices)
    try:
        fitting, uneven = sharding_rules.fit(strategy, rules, abstract, mesh)
    except UserError:
        return "dims"
    if any(abstract.names.uneven.get(axis) == "replicated" for axis in uneven):
        return "dims"

    def build() -> nnx.Module:  # random keys need devices, and --confirm may simulate more of them
        return job.model(job.config, rngs=nnx.Rngs(0))

    layout = Layout(
        mesh, job.strategies, job.config, strategy, fitting, uneven, build, abstract, job.rows,
        job.seq_len, job.pictures,
    )  # fmt: skip
    shape = layout.shape
    cut = shape.num_layers // layout.stages % shape.period
    if layout.stages > 1 and (cut or shape.mtp_layers):  # the MTP head comes after the last stage
        return "stages"
    return layout


def _options(layout: Layout, devices: Devices, job: Job) -> Iterator[Estimate]:
    """Each remat policy and schedule of stages with the least accumulation that fits, or else with
    the most possible.
    """
    rows = layout.batch_size // layout.batch_shards
    counts = [n for n in range(1, rows + 1) if rows % n == 0 and (n & (n - 1) == 0 or n == rows)]
    remats = [remat for remat in layout.shape.remats if worthwhile(layout, remat)]
    of_remats = [_with(layout, remat=remat) for remat in remats] or [layout]
    for changed in (_with(x, **schedule) for x in of_remats for schedule in _schedules(layout)):
        for count in counts:
            option = estimate(changed, devices, count, job.offload, job.optimizer)
            if option.fits or count == counts[-1]:
                yield option
                break


def _schedules(layout: Layout) -> Iterator[dict[str, Any]]:
    """Changes of the config: the schedule that it has, and interleaved stages of 2 or 4 rounds."""
    yield {}
    if layout.stages > 1:
        periods = layout.shape.stacked_layers // layout.stages // layout.shape.period
        for v in (v for v in (2, 4) if periods % v == 0):
            yield {"pipeline": "interleaved", "pipe_rounds": v}


def _with(layout: Layout, **changes: Any) -> Layout:
    if not changes:
        return layout
    return dataclasses.replace(layout, config=dataclasses.replace(layout.config, **changes))


def worthwhile(layout: Layout, remat: str) -> bool:
    """False where "gathered" equals "full", without sequence-sharded tensor parallelism, and for
    "offload" in stages, which can't.
    """
    if remat == "offload":
        return layout.stages == 1
    return remat != "gathered" or layout.count_shards(RESIDUAL_SEQ) > layout.count_shards(SEQ)


def _rank(candidates: list[Estimate], order: list[str]) -> tuple[list[Estimate], int]:
    """(candidates, best first; how many tie with the fastest). Those that don't fit come last."""
    fitting = sorted((x for x in candidates if x.fits), key=lambda x: x.step)
    tied = sum(x.step <= TIE * fitting[0].step for x in fitting)
    ranked = []
    while fitting:
        ties = [x for x in fitting if x.step <= TIE * fitting[0].step]
        ranked.append(min(ties, key=lambda x: simplicity(x, order)))
        fitting.remove(ranked[-1])
    return ranked + sorted((x for x in candidates if not x.fits), key=lambda x: x.peak), tied


def simplicity(candidate: Estimate, order: list[str]) -> tuple[int, int, int]:
    """(mesh axes in use, place of the strategy in RULES, accumulation); the smallest is simplest."""
    axes = sum(size > 1 for size in candidate.layout.mesh.shape.values())
    return axes, order.index(candidate.layout.strategy), candidate.accumulate


class Change(NamedTuple):
    """A change of the job or the devices with which a candidate fits."""

    text: str
    best: Estimate


def cheapest_change(plan: Plan) -> Change | None:
    """Offload, shorter rows with as many tokens, or else more devices; None if nothing helps.

    Remat and accumulation are part of every candidate, so fewer rows alone would not help.
    """
    job, devices = plan.job, plan.devices
    abstract = trace(job)
    tries: list[tuple[str, Job, Devices]] = []
    if shape_of(abstract, job.config).remat is not None and not job.offload:
        tries.append(("--offload=optimizer", job._replace(offload="optimizer"), devices))
    if job.seq_len:
        tries += [
            (f"--seq_len={job.seq_len // n}", job._replace(rows=job.rows * n, seq_len=job.seq_len // n), devices)
            for n in (2, 4, 8) if job.seq_len % n == 0
        ]  # fmt: skip
    for n in (2, 4, 8, 16):
        more = devices._replace(each=devices.each * n)
        if more.each > devices.hardware.most:
            more = devices._replace(groups=devices.groups * n)
        if job.rows % n == 0 or job.rows >= more.count:
            tries.append((f"--devices={more}", job, more))
    for text, other, there in tries:
        try:
            best = search(other, there, abstract).best
        except UserError:  # no such slice
            continue
        if best:
            return Change(text, best)
    return None


def usable(devices: Devices) -> float:
    """Bytes of a device that a program may use."""
    return USABLE * devices.hardware.memory
