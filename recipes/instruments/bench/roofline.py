"""Least times of a train step on one GPU, by kind of kernel, from the compiled program.

python -m recipes.bench roofline --size=124m --seq_len=1024 --batch_size=32
"""

import dataclasses
import pathlib
from collections import defaultdict
from typing import Any

import jax

from recipes.common import entries
from recipes.common.flags.config_flags import Settings, default_unroll, read_set, replace
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import choose, flag
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.bench.common import ONE_DEVICE, Table, machine, make_step
from recipes.instruments.plan.compilers import TooLarge, compile_step, missing_compiler, topology
from recipes.instruments.plan.gpu_program import read_hlo
from recipes.instruments.plan.hardware import HARDWARE
from recipes.instruments.plan.step_cycles import write_program


@dataclasses.dataclass(frozen=True)
class RooflineFlags(Settings):
    entry: str = flag("transformer", "Zoo entry.", "model", choices=entries.ENTRIES)
    size: str = flag("124m", "Size of the model, a key of its zoo file's SIZES.", group="model")
    remat: str = flag("none", "Remat policy.", group="model")
    unroll: int = flag(
        0, "Layers per iteration of the compiled loop; 0: a GPU's default.", "model", at_least=0
    )
    seq_len: int = flag(1_024, "Tokens of context, for text.", group="data", at_least=1)
    batch_size: int = flag(32, "Rows of a batch.", group="data", at_least=1)
    segments: bool = flag(True, "Rows of several documents, as the recipes train.", group="data")
    kind: str = flag("h100", "Kind of GPU.", choices=("h100", "h200"))
    top: int = flag(10, "Kernels in the table of those that take longest.", at_least=1)
    save: str = flag("", "Write the compiled program to this file.")
    program: str = flag("", "Read this saved program instead of compiling.")


def roofline(flags: RooflineFlags) -> None:
    sizes = entries.sizes(flags.entry)
    config = sizes[choose("size", flags.size, sizes)]()
    if flags.program and not pathlib.Path(flags.program).is_file():
        raise UserError(f"--program={flags.program}: there is no such file; write one with --save")
    folder = pathlib.Path(flags.save).parent
    if not folder.is_dir():
        raise UserError(f"--save={flags.save}: there is no folder {folder}; make it first")
    hardware = HARDWARE[flags.kind]
    if flags.program:
        reading = read_hlo(pathlib.Path(flags.program).read_text(), hardware)
    else:
        compiled = _compile(flags, config)
        reading = read_hlo(compiled.as_text(), hardware)
        if flags.save:
            write_program(compiled.as_text(), pathlib.Path(flags.save), {})
    kernels = sorted(reading.kernels, key=lambda x: -x.least(hardware))
    by_kind = defaultdict(list)
    for kernel in kernels:
        by_kind[kernel.kind].append(kernel)
    by_kind = dict(sorted(by_kind.items(), key=lambda x: -sum(y.least(hardware) for y in x[1])))
    table = Table("kind", "kernels", "GFLOP", "GB read and written", "least ms")
    for kind, group in (by_kind | {"all": kernels}).items():
        table.row(
            kind, f"{sum(x.times for x in group):,}",
            f"{sum(x.times * x.flops for x in group) / 1e9:,.0f}",
            f"{sum(x.times * x.bytes for x in group) / 1e9:.2f}",
            f"{1e3 * sum(x.least(hardware) for x in group):.2f}",
        )  # fmt: skip
    print0("")
    table = Table("kernel", "kind", "executions", "bound", "MB", "least ms")
    for x in kernels[: flags.top]:
        bound = "memory" if x.flops / x.rate < x.bytes / hardware.bandwidth else "compute"
        least = f"{1e3 * x.least(hardware):.2f}"
        table.row(x.name, x.kind, x.times, bound, f"{x.bytes / 1e6:,.0f}", least)
    what = f"{flags.entry} {flags.size}, {flags.batch_size} × {flags.seq_len:,} tokens, remat {flags.remat}"
    print0("", f"{flags.program or what}, on one {hardware.name}. A kernel takes at least its matmuls' FLOPs at "
           "the peak of their format, and its bytes at the memory's bandwidth; attention counts as for "
           f"one document a row. The host waits {reading.waits} times a step for the GPU to say whether "
           "a loop goes on.", machine())  # fmt: skip


def _compile(flags: RooflineFlags, config: Any) -> jax.stages.Compiled:
    """The compiled step. Raises UserError if there is no compiler, or too little memory."""
    if missing := missing_compiler(flags.kind):
        raise UserError(f"{missing}, or read a saved program with --program")
    mesh = topology(flags.kind, {"data": 1})  # first: hybrids ask JAX for its devices
    model = entries.model(flags.entry)
    shape = trace_shape(model, config)
    changes = {"dtype": "bfloat16", "remat": flags.remat} if shape.dtype else {}
    config = replace(config, changes | read_set(type(config), flags.set, vars(flags)))
    if shape.dtype:
        unroll = flags.unroll or default_unroll(config, mesh.devices.flat[0])
        config = dataclasses.replace(config, unroll=unroll)
    is_text = shape.vocab_size > 0
    example = None if is_text else entries.example(flags.entry, config)
    length = flags.seq_len if is_text else 0
    step = make_step(
        config, ONE_DEVICE, mesh, flags.batch_size, length, flags.segments, model, example=example
    )
    compiled = compile_step(step, flags.kind, f"{flags.entry} {flags.size}")
    if isinstance(compiled, TooLarge):
        raise UserError(
            f"{flags.entry} {flags.size} {compiled.text}; use fewer rows, a smaller --batch_size"
        )
    print0(f"peak memory: {report.size(report.peak_memory(compiled))}")
    return compiled
