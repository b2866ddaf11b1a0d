"""Memory of a train step on a chip: the compiler's peak against an analytical sum.

python -m recipes.bench memory           # every remat policy, part by part
python -m recipes.bench memory --which   # the policy that recomputes least and still fits
"""

import dataclasses
import itertools
from collections.abc import Iterable

from recipes.common.flags.config_flags import field_flag
from recipes.common.report import report
from recipes.common.runtime.flags import flag
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.rules import count_shards, used_axes
from recipes.common.train.offload import Offload
from recipes.common.train.optimizer import OPTIMIZERS
from recipes.instruments.bench.common import Step, Table, machine, make_step, one_of, read_integers
from recipes.instruments.bench.targets import (
    GPUS,
    KINDS,
    KINDS_HELP,
    TPUS,
    MeshFlags,
    caveats,
    check_targets,
    mesh_name,
)
from recipes.instruments.plan.compilers import DOES_NOT_FIT, TooLarge, compile_step, topology
from recipes.instruments.plan.hardware import HARDWARE
from recipes.instruments.plan.step_memory import kernel, memory_parts, on_host
from zoo.core.stack import REMAT_POLICIES
from zoo.llama_relatives import RULES
from zoo.options.compute_options import ComputeOptions
from zoo.sizes import TRANSFORMER as SIZES

Case = tuple[str, str, int]  # size, kind of chip, number of chips
# Only sequence parallelism gathers activations: elsewhere, "gathered" is "full".
POLICIES = [name for name in REMAT_POLICIES if name != "gathered"]


@dataclasses.dataclass(frozen=True)
class MemoryFlags(MeshFlags, Offload):
    sizes: str = flag("8b", "Sizes of the Transformer, comma-separated.", group="model")
    remats: str = flag(
        ",".join(reversed(POLICIES)), "Remat policies, comma-separated.", group="model"
    )
    seq_len: int = flag(4_096, "Tokens of context.", group="data", at_least=1)
    rows: int = flag(
        1, "Sequences per chip, or per group of chips that share their positions or heads.",
        group="data", at_least=1,
    )  # fmt: skip
    chips: str = flag("16,256", "Numbers of chips, comma-separated.")
    kinds: str = flag(",".join(TPUS), f"Kinds of chips, comma-separated: {KINDS_HELP}.")
    rules: str = flag("fsdp", "Strategy.", choices=RULES)
    matmul: str = field_flag(ComputeOptions, "matmul")
    optimizer: str = flag("adamw", "Optimizer.", choices=OPTIMIZERS)
    which: bool = flag(False, "Print only the remat policy that recomputes least and still fits.")


def memory(flags: MemoryFlags) -> None:
    sizes, kinds = one_of("sizes", flags.sizes, SIZES), one_of("kinds", flags.kinds, KINDS)
    counts, remats = (
        read_integers("chips", flags.chips),
        one_of("remats", flags.remats, REMAT_POLICIES),
    )
    meshes = [mesh_name(flags.axes(size, n, flags.rules)) for size in sizes for n in counts]
    check_targets(kinds, counts)
    cases = itertools.product(sizes, kinds, counts)
    (_which if flags.which else _parts)(flags, cases, remats)
    each = "chip" if used_axes(RULES[flags.rules]) == {"data"} else "group of chips"
    print0("", f"{flags.rules} on {' and '.join(dict.fromkeys(meshes))}, {flags.rows} × {flags.seq_len:,} "
           f"tokens per {each}, with segment ids. The sum is computed analytically; what is in the host's "
           "memory is not in it.", machine(),
           *caveats(kinds))  # fmt: skip


def _parts(flags: MemoryFlags, cases: Iterable[Case], remats: list[str]) -> None:
    table = Table("size", "chips", "remat", "matmul", "parameters", "optimizer", "gradients",
                  "saved activations", "live working set", "sum", "compiled peak",
                  "sum / peak", "host")  # fmt: skip
    for (size, kind, chips), remat in itertools.product(cases, remats):
        step = _step(flags, size, kind, chips, remat)
        text, peak = _peak(step, kind, f"{size} {remat}")
        parts = memory_parts(step.layout, offload=flags.offload, optimizer=flags.optimizer)
        total = sum(parts.values())
        host = sum(on_host(step.layout, offload=flags.offload, optimizer=flags.optimizer).values())
        cells = map(report.size, [*parts.values(), total])
        ratio, matmul = f"{total / peak:.2f}", flags.matmul or "-"
        table.row(size, f"{chips} {kind}", remat, matmul, *cells, text, ratio, report.size(host))


def _which(flags: MemoryFlags, cases: Iterable[Case], remats: list[str]) -> None:
    """The first policy whose step fits; REMAT_POLICIES has them from least to most recomputation."""
    table = Table(
        "size", "chips", "attention", "remat", "matmul", "compiled peak", "next policy needs"
    )
    for size, kind, chips in cases:
        above, chosen, text = "-", "none of them fits", "-"
        for remat in (remat for remat in REMAT_POLICIES if remat in remats):
            step = _step(flags, size, kind, chips, remat)
            parts = memory_parts(step.layout, offload=flags.offload, optimizer=flags.optimizer)
            total = sum(parts.values())
            if (
                kind in GPUS and total > 1.2 * HARDWARE[kind].memory
            ):  # not worth a minute's compilation
                above = f"{remat}: {report.size(total)}, estimated"
                continue
            text, peak = _peak(step, kind, f"{size} {remat}")
            if not text.startswith(DOES_NOT_FIT):
                chosen = remat
                break
            above = f"{remat}: {report.size(peak)}"
        table.row(
            size, f"{chips} {kind}", kernel(step.layout), chosen, flags.matmul or "-", text, above
        )


def _step(flags: MemoryFlags, size: str, kind: str, chips: int, remat: str) -> Step:
    config = dataclasses.replace(SIZES[size](), dtype="bfloat16", remat=remat, matmul=flags.matmul)
    axes = flags.axes(size, chips, flags.rules)
    rows = flags.rows * count_shards(RULES[flags.rules], "batch", axes)
    return make_step(
        config, flags.rules, topology(kind, axes), rows, flags.seq_len, segments=True,
        offload=flags.offload, optimizer=flags.optimizer,
    )  # fmt: skip


def _peak(step: Step, kind: str, what: str) -> tuple[str, float]:
    """The compiler's peak for a step: (text, bytes)."""
    compiled = compile_step(step, kind, f"{what} on {step.layout.mesh.size} {kind}")
    if isinstance(compiled, TooLarge):
        return compiled
    peak = report.peak_memory(compiled)
    return report.size(peak), peak
