"""Bytes that a compiled train step sends, for hardware that need not exist, and compile time."""

import dataclasses
import itertools
import math
import time

import jax

from recipes.common import entries
from recipes.common.flags.config_flags import field_flag
from recipes.common.report import report
from recipes.common.report.hlo import host_copies, sent_by_kind
from recipes.common.runtime.flags import flag
from recipes.common.runtime.mesh import make_mesh
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.shape import trace_shape
from recipes.common.train.offload import Offload
from recipes.common.train.optimizer import OPTIMIZERS
from recipes.instruments.bench.common import Table, machine, make_step, one_of, read_integers
from recipes.instruments.bench.targets import (
    KINDS,
    KINDS_HELP,
    MeshFlags,
    caveats,
    check_targets,
    mesh_name,
)
from recipes.instruments.plan.compilers import TooLarge, compile_step, topology
from recipes.instruments.plan.textbook import textbook
from zoo.options.compute_options import ComputeOptions
from zoo.sizes import TRANSFORMER as SIZES

ATTENTIVE = [
    name for name, entry in entries.ENTRIES.items() if entry.data in ("data.text", "data.images")
]


@dataclasses.dataclass(frozen=True)
class CollectivesFlags(MeshFlags, Offload):
    entry: str = flag("transformer", "Zoo entry with attention.", "model", choices=ATTENTIVE)
    sizes: str = flag("124m", "Sizes of the model, comma-separated.", group="model")
    seq_len: int = flag(256, "Tokens of context.", group="data", at_least=1)
    tokens: int = flag(4_096, "Tokens per chip.", group="data", at_least=1)
    chips: str = flag("16,256", "Numbers of chips, comma-separated.")
    kind: str = flag("v5e", f"Kind of chip: {KINDS_HELP}.", choices=KINDS)
    rules: str = flag("", "Strategies, comma-separated; empty: all.")
    matmul: str = field_flag(ComputeOptions, "matmul")
    optimizer: str = flag("adamw", "Optimizer.", choices=OPTIMIZERS)


def collectives(flags: CollectivesFlags) -> None:
    zoo, chips = entries.zoo_file(flags.entry), read_integers("chips", flags.chips)
    sizes = one_of("sizes", flags.sizes, entries.sizes(flags.entry))
    strategies = one_of("rules", flags.rules or ",".join(zoo.RULES), zoo.RULES)
    cases = [
        (size, strategy, flags.axes(size, count, strategy, flags.entry))
        for size, count, strategy in itertools.product(sizes, chips, strategies)
    ]
    check_targets([flags.kind], chips)
    table = Table("size", "chips", "rules", "mesh", "remat", "matmul", "gathered",
                  "scattered or permuted", "all-reduced", "total", "textbook", "ratio", "host")  # fmt: skip
    for case in cases:
        _collectives_row(table, flags, *case)
    print0("", "Bytes that one chip sends in a step, assuming ring collectives, with "
           f"{flags.tokens:,} tokens per chip; {flags.kind}. Host: what it copies to the host's memory and "
           "back.", machine(), *caveats([flags.kind]))  # fmt: skip


def _collectives_row(
    table: Table, flags: CollectivesFlags, size: str, strategy: str, axes: dict[str, int]
) -> None:
    chips, model = math.prod(axes.values()), axes.get("model", 1)
    mesh = topology(flags.kind, axes)
    # Saving the sublayers' outputs saves tensor parallelism one of five all-reduces per layer, and
    # saving what experts receive one of five all-to-alls.
    remat = "sublayers" if model > 1 else "dispatched" if "expert" in axes else "full"
    dtype = "float32" if flags.kind == "cpu" else "bfloat16"  # XLA's CPU backend sends float32
    sizes, model_class = entries.sizes(flags.entry), entries.model(flags.entry)
    config = dataclasses.replace(sizes[size](), dtype=dtype, remat=remat, matmul=flags.matmul)
    shape = trace_shape(model_class, config)
    is_text = shape.vocab_size > 0
    positions = flags.seq_len if is_text else shape.positions  # of a row
    rows = max(flags.tokens * chips // positions, chips // model)
    rows = rows if is_text else rows // chips * chips
    length = positions if is_text else 0
    step = make_step(config, strategy, mesh, rows, length, True, model_class, flags.offload,
                     flags.optimizer, None if is_text else entries.example(flags.entry, config))  # fmt: skip
    name = mesh_name(axes)
    compiled = compile_step(step, flags.kind, f"{size} {strategy} on {flags.kind} {name}")
    row = size, chips, strategy, name, remat, flags.matmul or "-"
    if isinstance(compiled, TooLarge):
        table.row(*row, "-", "-", "-", compiled.text, "-", "-", "-")
        return
    sent = sent_by_kind(compiled.as_text(), chips)
    least = textbook(step.layout, optimizer=flags.optimizer, offload=flags.offload)
    bound = "≤ " if "ragged-all-to-all" in sent else ""  # its buffer need not be full
    gathered, reduced = sent.pop("all-gather", 0), sent.pop("all-reduce", 0)
    total = gathered + reduced + sum(sent.values())
    gathered, other, reduced, all_, book = map(
        report.size, (gathered, sum(sent.values()), reduced, total, least)
    )
    ratio = f"{bound}{total / least:.2f}" if least else "-"
    host = report.size(sum(host_copies(compiled.as_text()).values()))
    cells = (gathered, bound + other, reduced, bound + all_, book, ratio, host)
    table.row(*row, *cells)


# ---- depth ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DepthFlags:
    size: str = flag("tiny", "Size of the Transformer.", group="model", choices=SIZES)
    depths: str = flag("8,80", "Numbers of layers, comma-separated.", group="model")
    mesh: str = flag("4x2", "Mesh of simulated devices, as in the recipes.")
    rounds: int = flag(3, "Compilations of each depth, interleaved.", at_least=1)


def depth(flags: DepthFlags) -> None:
    mesh = make_mesh(flags.mesh)
    depths = read_integers("depths", flags.depths)
    seconds = {n: [] for n in depths}
    jax.config.update("jax_compilation_cache_dir", None)  # compile everything again
    for _ in range(flags.rounds):
        for n in depths:
            config = dataclasses.replace(SIZES[flags.size](), num_layers=n)
            step = make_step(config, "", mesh, 8 * mesh.size, 128)
            start, used = time.perf_counter(), time.process_time()
            lowered = step.lower()
            traced = time.perf_counter() - start
            lowered.compile()
            now = time.perf_counter()
            seconds[n].append((traced, now - start - traced, time.process_time() - used))
    table = Table("layers", "tracing, s", "compiling, s", "CPU time, s", "ratio")
    best = {n: [min(column) for column in zip(*times, strict=True)] for n, times in seconds.items()}
    for n, (traced, compiled, used) in best.items():
        ratio = (traced + compiled) / sum(best[depths[0]][:2])
        table.row(n, f"{traced:.1f}", f"{compiled:.1f}", f"{used:.1f}", f"{ratio:.2f}")
    print0("", f"Layers of size {flags.size} on mesh {flags.mesh}, best of {flags.rounds} interleaved "
           "rounds.", machine())  # fmt: skip
