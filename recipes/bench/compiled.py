"""Bytes that a compiled train step sends, for hardware that need not exist, and compile time."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from recipes.bench.common import Step, Table, machine, make_step, numbers, one_of
from recipes.bench.targets import KINDS, KINDS_HELP, MeshFlags, caveats, check_targets, mesh_name
from recipes.common.analysis.targets import TooLarge, compile_step, topology
from recipes.common import entries
from recipes.common.analysis import report
from recipes.common.analysis.hlo import sent_by_kind
from recipes.common.runtime.flags import flag
from recipes.common.runtime.mesh import make_mesh
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.rules import mesh_axes
from zoo.attention import way_to_attend
from zoo.pipeline import microbatches
from zoo.sharding import shards
from zoo.transformer import SIZES


@dataclasses.dataclass(frozen=True)
class CollectivesFlags(MeshFlags):
    entry: str = flag(
        "transformer", "Language model without experts.", "model",
        choices=["transformer", "gpt2", "gemma3"],
    )  # fmt: skip
    sizes: str = flag("124m", "Sizes of the model, comma-separated.", group="model")
    seq_len: int = flag(256, "Tokens of context.", group="data", at_least=1)
    tokens: int = flag(4_096, "Tokens per chip.", group="data", at_least=1)
    chips: str = flag("16,256", "Numbers of chips, comma-separated.")
    kind: str = flag("v5e", f"Kind of chip: {KINDS_HELP}.", choices=KINDS)
    rules: str = flag("", "Strategies, comma-separated; empty: all.")


def collectives(flags: CollectivesFlags) -> None:
    zoo, chips = entries.zoo_file(flags.entry), numbers("chips", flags.chips)
    sizes = one_of("sizes", flags.sizes, zoo.SIZES)
    strategies = one_of("rules", flags.rules or ",".join(zoo.RULES), zoo.RULES)
    cases = [
        (size, strategy, flags.axes(size, count, strategy, zoo))
        for size, count, strategy in itertools.product(sizes, chips, strategies)
    ]
    check_targets([flags.kind], chips)
    table = Table("size", "chips", "rules", "mesh", "remat", "gathered", "scattered or permuted",
                  "all-reduced", "total", "textbook", "ratio")  # fmt: skip
    for case in cases:
        _collectives_row(table, flags, *case)
    print0("", "Bytes that one chip sends in a step, assuming ring collectives, with "
           f"{flags.tokens:,} tokens per chip; {flags.kind}.", machine(), *caveats([flags.kind]))  # fmt: skip


def _collectives_row(
    table: Table, flags: CollectivesFlags, size: str, strategy: str, axes: dict[str, int]
) -> None:
    chips, model = math.prod(axes.values()), axes.get("model", 1)
    mesh = topology(flags.kind, axes)
    # Saving the sublayers' outputs saves tensor parallelism one of five all-reduces per layer.
    remat = "sublayers" if model > 1 else "full"
    rows = max(flags.tokens * chips // flags.seq_len, chips // model)
    dtype = "float32" if flags.kind == "cpu" else "bfloat16"  # XLA's CPU backend sends float32
    sizes, model_class = entries.zoo_file(flags.entry).SIZES, entries.model(flags.entry)
    config = dataclasses.replace(sizes[size](), dtype=dtype, remat=remat)
    step = make_step(config, strategy, mesh, rows, flags.seq_len, True, model_class)
    name = mesh_name(axes)
    compiled = compile_step(step, flags.kind, f"{size} {strategy} on {flags.kind} {name}")
    if isinstance(compiled, TooLarge):
        table.row(size, chips, strategy, name, remat, "-", "-", "-", compiled.text, "-", "-")
        return
    sent = sent_by_kind(compiled.as_text(), chips)
    least = textbook(step)
    bound = "≤ " if "ragged-all-to-all" in sent else ""  # its buffer need not be full
    gathered, reduced = sent.pop("all-gather", 0), sent.pop("all-reduce", 0)
    total = gathered + reduced + sum(sent.values())
    gathered, other, reduced, all_, book = map(
        report.size, (gathered, sum(sent.values()), reduced, total, least)
    )
    ratio = f"{bound}{total / least:.2f}" if least else "-"
    cells = (gathered, bound + other, reduced, bound + all_, book, ratio)
    table.row(size, chips, strategy, name, remat, *cells)


def textbook(step: Step) -> float:
    """Bytes that a device must send per step if each matmul is where the sharding rules put it.

    Everything is in the compute dtype, except gradients of stages, which are in float32. Over a ring of n devices, an all-gather or a reduce-scatter
    sends (n - 1) / n of the whole array, and an all-reduce twice that. Nothing that remat repeats
    counts, other than gathers of weights and attention's exchanges.
    """
    elements = _of_weights(step) + _of_activations(step) + _of_attention(step) + of_stages(step)
    return elements * jnp.dtype(step.config.dtype).itemsize


def _of_weights(step: Step) -> float:
    """Elements sent for weights and their gradients.

    A weight whose parts at rest are smaller than in use needs two all-gathers, for the forward and
    the backward pass, and a reduce-scatter of the gradient. Gradients are also all-reduced over the
    mesh axes that split the batch, its rows or positions, but not the weight at rest. In stages,
    weights are gathered once, and those that all stages share have a gradient on each.
    """
    layout, total = step.layout, 0.0
    stacked = _mesh_axes(step, ["layers"])
    gathers, width = (1, 4 / jnp.dtype(step.config.dtype).itemsize) if stacked else (2, 1)
    shapes = paths(layout.model.shapes["params"])
    for path, axes in paths(layout.model.axes["params"]).items():
        rest = _mesh_axes(step, axes)
        use = _mesh_axes(step, _in_use(step, axes))
        whole = shapes[path].size / _devices(step, use)
        total += (gathers + width) * _ring(_devices(step, rest - use)) * whole
        reduced = (_mesh_axes(step, layout.batch_axes) | stacked) - rest
        total += 2 * width * _ring(_devices(step, reduced)) * whole / _devices(step, rest - use)
    return total


def _of_activations(step: Step) -> float:
    """Elements sent for activations.

    Consider weights in use with an axis of the residual stream, one that IN_USE maps to. If their
    other axes are split, each device has a partial sum: each module with such weights (not counting
    its submodules) costs one all-reduce of the residual stream forward and one backward, for each
    of its stacked layers.
    """
    layout, zoo = step.layout, step.layout.zoo
    shapes = paths(layout.model.shapes["params"])
    widths: dict[str, float] = {}  # module → elements per token
    split: dict[str, set[str]] = {}  # module → mesh axes
    for path, axes in paths(layout.model.axes["params"]).items():
        module, axes = path.rpartition("/")[0], _in_use(step, axes)
        residual = set(axes) & set(zoo.IN_USE.values())
        stacked = {axis for axis in axes if zoo.LOGICAL_AXES[axis] in ("weights", "stack")}
        if residual:
            dims = zip(axes, shapes[path].shape, strict=True)
            widths[module] = math.prod(n for axis, n in dims if axis in residual | stacked)
            split.setdefault(module, set()).update(_mesh_axes(step, set(axes) - residual - stacked))
    rings = {module: _ring(_devices(step, axes)) for module, axes in split.items()}
    stages, parts = step.layout.stages, _microbatches(step)
    if stages > 1:  # a device has its stage's layers, and works while it waits
        busy = (parts + stages - 1) / parts / stages
        widths = {m: n * (busy if m.startswith("layers") else 1) for m, n in widths.items()}
    return sum(2 * 2 * rings[module] * widths[module] * step.device_tokens for module in widths)


def of_stages(step: Step) -> float:
    """Elements that travel between stages: activations, and their parts for the loss.

    A microbatch's activations and their gradients go to the next stage in every tick, also in the
    bubble. The last stage's output is scattered over all stages, and its gradient gathered.
    """
    stages, parts = step.layout.stages, _microbatches(step)
    if stages == 1:
        return 0.0
    each = step.device_tokens / parts * step.config.embed
    return 2 * (parts + stages - 1) * each + 2 * parts * _ring(stages) * each


def _microbatches(step: Step) -> int:
    """M of the pipeline."""
    layout = step.layout
    return microbatches(step.config, layout.batch_size // layout.batch_shards, layout.stages)


def _of_attention(step: Step) -> float:
    """Elements sent so that positions attend to those on other devices.

    Each layer does it forward, again unless remat keeps everything, and backward. An all-to-all
    exchanges queries, keys, values and outputs; a ring passes on keys and values, and backward
    their gradients too.
    """
    config, n = step.config, step.layout.seq_shards
    with step.layout.trace():
        way, heads = way_to_attend(config.context, config.num_heads), shards("heads")
    forward = 1 if config.remat == "none" else 2
    tokens = config.num_layers * step.device_tokens * config.head_dim
    queries, kv = config.num_heads // heads, math.lcm(config.num_kv_heads, heads) // heads
    if way == "all-to-all":
        kv = math.lcm(config.num_kv_heads, heads * n) // heads
        return (forward + 1) * 2 * (queries + kv) * tokens * _ring(n)
    return (forward + 2) * 2 * kv * tokens * (n - 1) if way else 0.0


def _in_use(step: Step, axes: Iterable[str]) -> list[str]:
    """A weight's logical axes while it is multiplied."""
    return [step.layout.zoo.IN_USE.get(axis, axis) for axis in axes]


def _mesh_axes(step: Step, axes: Iterable[str]) -> set[str]:
    """The mesh axes that split these logical axes."""
    return {name for axis in axes for name in mesh_axes(step.layout.rules[axis])}


def _devices(step: Step, axes: Iterable[str]) -> int:
    """Devices along these mesh axes."""
    return math.prod(step.layout.mesh.shape[axis] for axis in axes)


def _ring(devices: int) -> float:
    """The fraction of an array that each device sends in an all-gather over a ring."""
    return (devices - 1) / devices


# ---- depth ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DepthFlags:
    size: str = flag("tiny", "Size of the Transformer.", group="model", choices=SIZES)
    depths: str = flag("8,80", "Numbers of layers, comma-separated.", group="model")
    mesh: str = flag("4x2", "Mesh of simulated devices, as in the recipes.")
    rounds: int = flag(3, "Compilations of each depth, interleaved.", at_least=1)


def depth(flags: DepthFlags) -> None:
    mesh = make_mesh(flags.mesh)
    depths = numbers("depths", flags.depths)
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
