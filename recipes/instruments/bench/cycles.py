"""Cycles of a train step, as the TPU compiler estimates them, without a TPU.

python -m recipes.bench cycles --size=8b --devices=v5p:16 --save=before.hlo
python -m recipes.bench cycles --size=8b --devices=v5p:16 --mesh=4x4 --against=before.hlo
"""

import dataclasses
import math
import pathlib
import tempfile
from collections import Counter
from typing import Any

import numpy as np

from recipes.common import entries
from recipes.common.flags.config_flags import Settings, read_set, replace
from recipes.common.report import kernel as kernel_report
from recipes.common.report import report
from recipes.common.runtime import mesh as meshes
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import choose, flag
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import trace_shape
from recipes.common.train.offload import Offload
from recipes.common.train.optimizer import OPTIMIZERS
from recipes.instruments.bench import documents
from recipes.instruments.bench.common import Table, machine, make_step, read_integers
from recipes.instruments.bench.targets import mesh_name
from recipes.instruments.plan import step_cycles as plan_cycles
from recipes.instruments.plan.compilers import TooLarge, compile_step, missing_compiler, topology
from recipes.instruments.plan.estimate import Estimate, abstract_mesh, estimate
from recipes.instruments.plan.hardware import Devices, parse_devices
from recipes.instruments.plan.step_cycles import Cycles, Reading, read_hlo, write_program
from recipes.instruments.plan.textbook import device_tokens, devices_of_a_row
from zoo.experts.expert_strategies import EXPERT


@dataclasses.dataclass(frozen=True)
class CyclesFlags(Settings, Offload):
    entry: str = flag("transformer", "Zoo entry.", "model", choices=entries.ENTRIES)
    size: str = flag("124m", "Size of the model, a key of its zoo file's SIZES.", group="model")
    remat: str = flag("full", "Remat policy.", group="model")
    seq_len: int = flag(8_192, "Tokens of context, for text.", group="data", at_least=1)
    tokens: int = flag(8_192, "Tokens per chip.", group="data", at_least=1)
    dataset: str = flag(
        "stdlib",
        "Text whose packed rows attention is also counted for, as in the Transformer's recipe.",
        group="data",
    )
    tokenizer: str = flag("bytes", "Its tokenizer, as in the recipe.", group="data")
    mean_lengths: str = flag(
        "4000,1000", "Mean tokens of documents of random lengths, likewise.", group="data"
    )
    devices: str = flag("v5p:16", "Kind and number of TPUs.")
    mesh: str = flag("", "Mesh of these devices, as in the recipes; empty: all on data.")
    rules: str = flag("", "Strategy; empty: the mesh's default.")
    optimizer: str = flag("adamw", "Optimizer.", choices=OPTIMIZERS)
    top: int = flag(10, "Operations in the table of the slowest.", at_least=1)
    save: str = flag("", "Write the compiled program to this file.")
    program: str = flag("", "Read this saved program instead of compiling.")
    against: str = flag("", "Compare with this saved program, for the same work.")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, read."""

    name: str
    reading: Reading
    cycles: Cycles
    peak: str  # memory


def cycles(flags: CyclesFlags) -> None:
    sizes, devices = entries.sizes(flags.entry), parse_devices(flags.devices)
    size = choose("size", flags.size, sizes)
    axes = _axes(flags, devices)
    for name, path in (("program", flags.program), ("against", flags.against)):
        if path and not pathlib.Path(path).is_file():
            raise UserError(f"--{name}={path}: there is no such file; write one with --save")
    folder = pathlib.Path(flags.save).parent
    if not folder.is_dir():
        raise UserError(f"--save={flags.save}: there is no folder {folder}; make it first")
    plan = _plan(flags, sizes[size](), axes, devices)
    program = _read(flags.program, devices) if flags.program else _compile(flags, plan)
    others = [_read(flags.against, devices)] if flags.against else []
    program, *others = (_with_even_load(x, plan) for x in (program, *others))
    _print_totals([program, *others], plan)
    _print_kernels(program, devices)
    _print_documents(program, flags, devices)
    _print_collectives([program, *others], devices)
    _print_slowest(program, devices, flags.top)
    print0("", f"{flags.entry} {flags.size}, {plan.layout.strategy} on {devices} {mesh_name(axes)}, "
           f"{plan.layout.batch_size} × {flags.seq_len:,} tokens, remat {flags.remat}. M cycles are "
           f"millions of cycles of a step on one device at {plan_cycles.clock(devices) / 1e9:.2f} GHz.",
           machine())  # fmt: skip


def _axes(flags: CyclesFlags, devices: Devices) -> dict[str, int]:
    """Mesh axis → devices along it. Raises UserError if the flags don't fit each other."""
    if not plan_cycles.has_cycles(devices):
        raise UserError(
            f"--devices={flags.devices} is not one slice of TPUs, whose compiler estimates cycles; use "
            "--devices=v5p:16"
        )
    axes = meshes.parse(flags.mesh or str(devices.count))
    chips = math.prod(axes.values())
    if chips != devices.count:
        raise UserError(
            f"--mesh={flags.mesh} has {chips} devices, but --devices={flags.devices} has "
            f"{devices.count}; try --mesh={devices.count}"
        )
    return axes


def _plan(flags: CyclesFlags, config: Any, axes: dict[str, int], devices: Devices) -> Estimate:
    """The planner's estimate for the step that the flags ask for. Raises UserError."""
    shape = trace_shape(entries.model(flags.entry), config)
    changes = {"dtype": "bfloat16", "remat": flags.remat} if shape.dtype else {}
    config = replace(config, changes | read_set(type(config), flags.set, vars(flags)))
    is_text = shape.vocab_size > 0
    length = flags.seq_len if is_text else 0
    rows, over = divmod(flags.tokens * devices.count, length or shape.positions)
    if over and is_text:
        raise UserError(
            f"--tokens={flags.tokens} on {devices.count} chips is not a whole number of rows of "
            f"--seq_len={length}; try --tokens={length}"
        )
    layout = make_layout(
        entries.model(flags.entry), config, abstract_mesh(axes, devices), flags.rules,
        batch_size=rows if is_text else rows // devices.count * devices.count, seq_len=length,
    )  # fmt: skip
    if is_text:
        kernel_report.check(layout)
    return estimate(layout, devices, offload=flags.offload, optimizer=flags.optimizer)


def _compile(flags: CyclesFlags, plan: Estimate) -> Program:
    """Compiles the step, with its kernels' bundles."""
    layout, kind = plan.layout, plan.devices.kind
    if missing := missing_compiler(kind):
        raise UserError(f"{missing}, or read a saved program with --program")
    with tempfile.TemporaryDirectory() as folder:
        plan_cycles.dump_bundles(pathlib.Path(folder))
        step = make_step(
            layout.config, layout.strategy, topology(kind, dict(layout.mesh.shape)),
            layout.batch_size, layout.seq_len, True, entries.model(flags.entry), flags.offload,
            flags.optimizer, None if layout.seq_len else entries.example(flags.entry, layout.config),
        )  # fmt: skip
        name = f"{flags.size} {layout.strategy}"
        compiled = compile_step(step, kind, name)
        bundles = plan_cycles.read_bundles(pathlib.Path(folder))
    if isinstance(compiled, TooLarge):
        raise UserError(f"{name} {compiled.text}; use more chips or fewer --tokens")
    if flags.save:
        write_program(compiled.as_text(), pathlib.Path(flags.save), bundles)
    reading = read_hlo(compiled.as_text(), plan.devices, bundles)
    peak = report.size(report.peak_memory(compiled))
    return Program(name, reading, plan_cycles.count(reading, plan.devices), peak)


def _read(path: str, devices: Devices) -> Program:
    """Reads a saved program."""
    text, bundles = plan_cycles.read_program(pathlib.Path(path))
    reading = read_hlo(text, devices, bundles)
    return Program(pathlib.Path(path).stem, reading, plan_cycles.count(reading, devices), "-")


def _with_even_load(program: Program, plan: Estimate) -> Program:
    """With an even load of dropless experts: their kernels and what they exchange depend on it."""
    layout = plan.layout
    mixtures = [layer.experts for layer in layout.shape.layers if layer.experts]
    if not mixtures:
        return program
    experts = max(mixtures, key=lambda experts: experts.per_token)
    tokens = device_tokens(layout)
    rows = tokens * devices_of_a_row(experts, layout.count_shards(EXPERT))
    reading = plan_cycles.with_even_load(program.reading, tokens * experts.per_token, rows)
    counted = plan_cycles.count(reading, plan.devices)
    return dataclasses.replace(program, reading=reading, cycles=counted)


# ---- tables --------------------------------------------------------------------------------------


def _million(cycles: float) -> str:
    return f"{cycles / 1e6:,.1f}"


def _print_totals(programs: list[Program], plan: Estimate) -> None:
    """Cycles by kind of operation, and what follows from their sum."""
    table = Table("M cycles", *(program.name for program in programs))
    kinds = {kind for program in programs for kind in program.cycles.operations}
    least = 5e-4 * max(program.cycles.total for program in programs)
    for kind in sorted(kinds, key=lambda x: -programs[0].cycles.operations.get(x, 0)):
        counts = [program.cycles.operations.get(kind, 0) for program in programs]
        if max(counts) >= least:
            table.row(kind, *map(_million, counts))
    table.row("kernels", *(_million(x.cycles.kernels) for x in programs))
    table.row("waiting for collectives", *(_million(x.cycles.exposed) for x in programs))
    table.row("total", *(_million(x.cycles.total) for x in programs))
    seconds = [x.cycles.total / plan_cycles.clock(plan.devices) for x in programs]
    peak_flops = plan.devices.hardware.peak * plan.devices.count
    table.row("step, s", *(f"{x:.3f}" for x in seconds))
    table.row("MFU", *(f"{plan.useful / peak_flops / x:.1%}" for x in seconds))
    table.row("peak memory", *(x.peak for x in programs))


def _print_kernels(program: Program, devices: Devices) -> None:
    if not program.reading.kernels:
        return
    print0("")
    table = Table("kernel", "executions", "grid steps", "bundles", "M cycles")
    for kernel in program.reading.kernels:
        bundles = f"{kernel.bundles:,}" if kernel.bundles else "unknown"
        counted = _million(plan_cycles.kernel_cycles(kernel, devices))
        table.row(kernel.name, kernel.times, f"{kernel.steps:,.0f}", bundles, counted)


def _print_documents(program: Program, flags: CyclesFlags, devices: Devices) -> None:
    """What attention takes for rows of several documents: it skips blocks that share none."""
    grids = [(x.times, x.grid) for x in program.reading.kernels if x.grid]
    grids = [(times, grid) for times, grid in grids if grid.length == flags.seq_len]
    if not grids:
        return
    rows = {
        "one a row": np.ones((max(grid.rows for _, grid in grids), flags.seq_len), np.int32),
        f"{flags.dataset}, {flags.tokenizer}": documents.dataset_lengths(
            flags.dataset, flags.tokenizer, flags.seq_len
        ),
    }
    for mean in read_integers("mean_lengths", flags.mean_lengths):
        rows[f"of {mean:,} tokens"] = documents.random_lengths(mean, flags.seq_len)
    print0("")
    table = Table("documents", "in a row", "blocks", "kernels, M cycles", "total")
    executions = sum(times for times, _ in grids)
    causal = sum(times * grid.blocks() for times, grid in grids) / executions
    for name, ids in rows.items():
        counted = plan_cycles.count(plan_cycles.with_documents(program.reading, ids), devices)
        visited = sum(times * grid.blocks(ids) for times, grid in grids) / executions
        table.row(
            name, f"{ids.max(1).mean():.1f}", f"{visited:.1f} of {causal:.1f}",
            _million(counted.kernels), _million(counted.total),
        )  # fmt: skip


def _print_collectives(programs: list[Program], devices: Devices) -> None:
    """Collectives by kind and by what the core does meanwhile."""
    print0("")
    what = ("times", "sent", "M cycles", "of them waiting")
    columns = [f"{program.name}: {column}" for program in programs for column in what]
    table = Table("collectives", *columns)
    groups = [Counter((x.kind, x.overlap) for x in p.reading.transfers) for p in programs]
    for kind, overlap in sorted({key for group in groups for key in group}):
        cells = []
        for program in programs:
            same = [x for x in program.reading.transfers if (x.kind, x.overlap) == (kind, overlap)]
            cells += [sum(x.times for x in same), report.size(sum(x.sent for x in same))]
            cells.append(_million(sum(plan_cycles.transfer_cycles(x, devices) for x in same)))
            cells.append(_million(sum(plan_cycles.waiting(x, devices) for x in same)))
        table.row(f"{kind}, {overlap}", *cells)


def _print_slowest(program: Program, devices: Devices, top: int) -> None:
    """The operations that take most cycles, against the fewest that the hardware needs."""
    print0("")
    table = Table("operation", "kind", "executions", "M cycles", "of the roofline", "bound", "from")
    operations = sorted(program.reading.operations, key=lambda x: -x.times * x.cycles)
    for x in operations[:top]:
        fewest, bound = plan_cycles.roofline(x, devices)
        source = "/".join(x.source.split("/")[-3:])
        table.row(
            x.name, x.kind, x.times, _million(x.times * x.cycles), f"{fewest / x.cycles:.0%}", bound,
            source,
        )  # fmt: skip
