"""Describes a plan: the table, why the first is first, why others lose, the command to run."""

from typing import Any

from recipes.common.report import kernel
from recipes.common.report.report import size
from recipes.common.runtime import describe, slice_groups
from recipes.common.sharding.layout import Layout
from recipes.common.train.planned import PlannedStep
from recipes.instruments.plan import tpu_slice
from recipes.instruments.plan.calibration import FACTORS
from recipes.instruments.plan.estimate import Estimate, estimate, with_frozen
from recipes.instruments.plan.hardware import HARDWARE, Devices
from recipes.instruments.plan.search import RULES_OUT, TIE, Plan, usable
from zoo.parallel.pipeline import rounds

HEAD = ("mesh", "rules", "remat", "matmul", "accumulate", "memory", "host", "inside", "between",
        "bound by", "step", "per second", "MFU")  # fmt: skip
WORDS = {  # key of Estimate.seconds → a phrase
    "compute": "compute",
    "memory": "memory traffic",
    "links": "weights and gradients inside a {group}",
    "network": "weights and gradients between {group}s",
    "waiting": "activations that travel while devices wait",
    "bubble": "the pipeline's bubble",
    "update": "the optimizer's update",
    "ends": "the first weights and the last gradients",
    "host": "layers' inputs to the host's memory and back",
}
# Platform → how many times as long as estimated published runs take, least and most: the last column
# of the tables behind recipes/instruments/results/planner.md.
PUBLISHED = {"tpu": (0.87, 1.29), "gpu": (1.08, 2.63)}


def group(devices: Devices) -> str:
    """The word for devices with a fast network inside."""
    return {"tpu": "slice", "gpu": "node", "cpu": "process"}[devices.hardware.platform]


def mesh_of(candidate: Estimate) -> str:
    return describe(dict(candidate.layout.mesh.shape))


def distinct(candidates: list[Estimate]) -> list[Estimate]:
    """Drops a candidate whose mesh has an axis of size 1 and whose step is that of an earlier one.

    With one replica group, for example, `hsdp_tp` on 1x32x2 is `fsdp_tp` on 32x2.
    """
    kept: list[Estimate] = []
    for candidate in candidates:
        if 1 not in candidate.layout.mesh.shape.values() or not twin(candidate, kept):
            kept.append(candidate)
    return kept


def twin(candidate: Estimate, others: list[Estimate]) -> Estimate | None:
    """The first of `others` whose step computes, holds and sends the same as the candidate's."""
    return next((other for other in others if _step(other) == _step(candidate)), None)


def _step(x: Estimate) -> tuple:
    """All metrics of a step, and the sizes of the mesh that are in use."""
    used = tuple(size for size in x.layout.mesh.shape.values() if size > 1)
    return used, x.layout.config, x.accumulate, x.memory, x.host, x.links, x.network, x.seconds


def rounds_of(candidate: Estimate) -> int:
    """How often a microbatch visits each stage; 1 without stages."""
    return rounds(candidate.layout.config) if candidate.layout.stages > 1 else 1


def schedule_of(candidate: Estimate) -> str:
    """Says how many rounds a pipeline has, after a strategy or mesh; "" for one."""
    v = rounds_of(candidate)
    return f", {v} rounds" if v > 1 else ""


def cells(candidate: Estimate) -> list[str]:
    """The columns of HEAD."""
    there = usable(candidate.devices)
    over = "" if candidate.fits else f" (+{size(candidate.peak - there)})"
    shape = candidate.layout.shape
    bound = "activations" if candidate.bound == "waiting" else candidate.bound
    return [
        mesh_of(candidate), candidate.layout.strategy + schedule_of(candidate),
        shape.remat or "-", shape.matmul or "-", str(candidate.accumulate),
        size(candidate.peak) + over, size(sum(candidate.host.values())), size(candidate.links),
        size(candidate.network),
        bound, duration(candidate.step), f"{candidate.tokens / candidate.step:,.0f}",
        f"{candidate.mfu:.0%}",
    ]  # fmt: skip


def table(candidates: list[Estimate]) -> list[str]:
    """A Markdown table."""
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|---|---|" + "---:|" * (len(HEAD) - 4)]
    return lines + [f"| {' | '.join(cells(candidate))} |" for candidate in candidates]


def duration(seconds: float) -> str:
    """Formats seconds.

    >>> duration(7.816), duration(0.0342), duration(3e-5), duration(0)
    ('7.82 s', '34.2 ms', '30.0 µs', '0 s')
    """
    for unit, parts in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * parts >= 1:
            return f"{seconds * parts:.{2 if unit == 's' else 1}f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


def notes(plan: Plan) -> list[str]:
    """Lines on how candidates were found, left out and ranked."""
    there, devices = size(usable(plan.devices)), plan.devices
    lines = [
        f"{len(plan.ranked)} meshes and strategies, {plan.tried} with remat and accumulation. A device "
        f"may use {there} ({usable(devices) / devices.hardware.memory:.0%}). Bytes are what a device "
        f"sends in a step inside its {group(devices)} and between {group(devices)}s."
    ]
    for rule, count in plan.left_out.items():
        if count:
            lines.append(f"Left out: {count}, because {RULES_OUT[rule]}.")
    lines += [note for note in (tie_note(plan), bounds_note(plan)) if note]
    if slice_note := tpu_slice.note(devices):
        lines.append(slice_note)
    return lines


def tie_note(plan: Plan) -> str:
    """Says why the first need not be the fastest; "" if it is."""
    if plan.tied < 2:
        return ""
    return (
        f"{plan.tied} take at most {TIE - 1:.0%} longer than the fastest. Of these the simplest is "
        "first: fewest mesh axes, then the order of RULES."
    )


def bounds_note(plan: Plan) -> str:
    """Says how far the estimated times are from real ones."""
    platform = plan.devices.hardware.platform
    if platform not in PUBLISHED:
        return "The devices are simulated, so times are made up."
    if plan.devices.kind not in FACTORS:
        return "Times are lower bounds: nothing is measured on these devices."
    least, most = PUBLISHED[platform]
    basis = {"tpu": "follow the compiler's cycles", "gpu": "follow one H100's kernels"}[platform]
    return (
        f"Times {basis}: published runs on {platform.upper()}s take {least:.1f} to {most:.1f} times as "
        "long (recipes/docs/plan.md)."
    )


def why_first(plan: Plan) -> str:
    """One sentence: why the first is first, and what would change the order."""
    best = plan.best
    assert best
    s, name = best.seconds, f"{best.layout.strategy} on {mesh_of(best)}"
    layers = max(s["compute"], s["memory"])
    sent = "links" if s["links"] >= s["network"] else "network"
    travels = WORDS[sent].format(group=group(plan.devices))
    unit = "tokens" if plan.job.seq_len else "examples"
    others = [x for x in plan.per_strategy().values() if x.layout.strategy != best.layout.strategy]
    rival = next((x for x in others if x.fits), None)
    against = "no other strategy fits"
    if rival:
        much = rival.step / best.step
        against = f"{rival.layout.strategy}, the next strategy, takes {much:.2f} times as long"
        if much <= TIE:
            against += " and is less simple" if much >= 1 else ", too little for a less simple one"
    if not s[sent]:
        return f"{name} is first: its weights and gradients need not travel, and {against}."
    if s[sent] <= layers:
        least = best.tokens * s[sent] / layers
        return (
            f"{name} is first: {travels} take {duration(s[sent])} and hide behind {duration(layers)} "
            f"of {'compute' if s['compute'] >= s['memory'] else 'memory traffic'}, and {against}; below "
            f"about {least:,.0f} {unit} a step they would no longer hide."
        )
    most = best.tokens * s[sent] / layers
    return (
        f"{name} is first although {travels} take {duration(s[sent])}, longer than its {duration(layers)} "
        f"of work, and {against}; from about {most:,.0f} {unit} a step they would hide."
    )


def why_others_lose(plan: Plan) -> list[str]:
    """One line for each other strategy, the fastest first: its best mesh and why it loses."""
    best, lines, there = plan.best, [], usable(plan.devices)
    of_strategies = sorted(
        plan.per_strategy().items(),
        key=lambda item: (not item[1].fits, item[1].step if item[1].fits else item[1].peak),
    )
    for strategy, other in of_strategies:
        if best and strategy == best.layout.strategy:
            continue
        where = f"- {strategy}, best on {mesh_of(other)}{schedule_of(other)}"
        equal = twin(other, plan.ranked[: plan.ranked.index(other)])
        if equal and 1 in other.layout.mesh.shape.values():
            name = f"{equal.layout.strategy} on {mesh_of(equal)}"
            lines.append(f"{where}: the same step as {name}, since an axis of its mesh has size 1.")
        elif not other.fits:
            largest = max(other.memory, key=lambda part: other.memory[part])
            lines.append(
                f"{where}: does not fit, {size(other.peak)} of {size(there)}, of which {largest} "
                f"{size(other.memory[largest])}."
            )
        elif best and other.step <= TIE * best.step:
            lines.append(f"{where}: {duration(other.step)}, within {TIE - 1:.0%}, but less simple.")
        elif best:
            grown = {k: other.seconds[k] - best.seconds[k] for k in WORDS}
            part = max(grown, key=lambda k: grown[k])
            what = WORDS[part].format(group=group(plan.devices))
            lines.append(
                f"{where}: {other.step / best.step:.2f} times as long, mostly by {what}: "
                f"{duration(other.seconds[part])} instead of {duration(best.seconds[part])}."
            )
    return lines


def command(entry: str, size: str, best: Estimate) -> str:
    """The recipe's command that runs a candidate."""
    layout, shape = best.layout, best.layout.shape
    flags: dict[str, Any] = {"size": size} if shape.remat else {}
    flags |= {"mesh": mesh_of(best), "rules": layout.strategy}
    flags |= {"batch_size": layout.batch_size}
    flags |= {"seq_len": layout.seq_len} if layout.seq_len else {}
    flags |= {"remat": shape.remat} if shape.remat else {}
    flags |= {"matmul": shape.matmul} if shape.matmul else {}
    flags |= {"accumulate": best.accumulate} if best.accumulate > 1 else {}
    flags |= {"offload": best.offload} if best.offload else {}
    flags |= {"optimizer": best.optimizer} if best.optimizer != "adamw" else {}
    if (v := rounds_of(best)) > 1:
        flags |= {"pipeline": "interleaved", "pipe_rounds": v}
    return f"python -m recipes.{entry} " + " ".join(f"--{k}={v}" for k, v in flags.items())


def describe_step(planned: PlannedStep) -> list[str]:
    """Lines of a recipe's --plan: the estimate for its own mesh and rules on its own devices."""
    layout, training = planned.layout, planned.training
    devices = _devices_of(layout)
    own = estimate(layout, devices, training.accumulate, training.offload, training.optimizer)
    if planned.frozen:
        own = with_frozen(own, planned.frozen)
    parts = ", ".join(f"{part} {size(count)}" for part, count in own.memory.items())
    what = f"fits in {size(usable(devices))}" if own.fits else "does not fit"
    simulated = devices.kind == "cpu"
    return [
        *table([own]),
        f"Memory of a device, estimated: {parts}; this {what}."
        + (" Its devices are simulated, so times are made up." if simulated else ""),
        *kernel.experts(layout),
        "Nothing was allocated or written; leave --plan out to train.",
        *planned.notes,
    ]


def _devices_of(layout: Layout) -> Devices:
    """The devices of a mesh that exists."""
    every = [*layout.mesh.devices.flat]
    kind = every[0].device_kind
    known = [k for k, hardware in HARDWARE.items() if hardware.name in kind]
    name = max(known, key=lambda k: len(HARDWARE[k].name), default="cpu")
    groups = len(slice_groups.groups(every))
    return Devices(name, len(every) // groups, groups)


def as_json(plan: Plan, entry: str, size_name: str, most: int) -> dict[str, Any]:
    """The plan as JSON, for other programs."""
    ranked = [to_json(x) for x in distinct(plan.ranked)[:most]]
    best = plan.best
    return {
        "entry": entry,
        "size": size_name,
        "devices": str(plan.devices),
        "batch_size": plan.job.rows,
        "seq_len": plan.job.seq_len,
        "usable_bytes": usable(plan.devices),
        "slice": tpu._asdict() if (tpu := tpu_slice.find(plan.devices)) else None,
        "left_out": {RULES_OUT[k]: n for k, n in plan.left_out.items() if n},
        "candidates": ranked,
        "why": why_first(plan) if best else None,
        "command": command(entry, size_name, best) if best and not plan.job.rules else None,
    }


def to_json(x: Estimate) -> dict[str, Any]:
    return {
        "mesh": dict(x.layout.mesh.shape),
        "rules": x.layout.strategy,
        "remat": x.layout.shape.remat,
        "matmul": x.layout.shape.matmul,
        "pipe_rounds": rounds_of(x),
        "accumulate": x.accumulate,
        "fits": x.fits,
        "memory": x.memory,
        "host": x.host,
        "sent_inside": x.links,
        "sent_between": x.network,
        "collectives": [
            {"purpose": t.purpose, "kind": t.kind, "axes": sorted(t.axes), "bytes": t.bytes}
            for t in x.transfers
        ],
        "seconds": x.seconds | {"step": x.step},
        "bound": x.bound,
        "tokens_per_second": x.tokens / x.step,
        "mfu": x.mfu,
    }
