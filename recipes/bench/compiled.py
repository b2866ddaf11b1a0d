"""What the TPU compiler makes of a train step, with no TPU: bytes sent, memory, compile time.

TPU topologies need libtpu (the extra `tpu-aot`). Nothing is allocated and nothing runs.
"""

import dataclasses
import itertools
import math
import os
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from recipes.bench.common import (
    Step,
    Table,
    machine,
    make_step,
    numbers,
    one_of,
    progress,
    version,
)  # fmt: skip
from recipes.common.analysis import report
from recipes.common.analysis.hlo import sent_by_kind
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.mesh import arrange, make_mesh
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.rules import mesh_axes, shards, used_axes
from zoo.transformer import REMAT, RULES, SIZES

# Kind → chips → how they are wired.
TOPOLOGIES = {
    "v4": {16: "2x2x4", 256: "4x8x8"},
    "v5e": {16: "4x4", 256: "16x16"},
    "v5p": {16: "2x2x4", 256: "4x8x8"},
    "v6e": {16: "4x4", 256: "16x16"},
}


@dataclasses.dataclass(frozen=True)
class CollectivesFlags:
    sizes: str = flag("124m", "Sizes of the Transformer, comma-separated.", group="model")
    seq_len: int = flag(256, "Tokens of context.", group="data", at_least=1)
    tokens: int = flag(4_096, "Tokens per chip.", group="data", at_least=1)
    chips: str = flag("16,256", "Numbers of chips, comma-separated.")
    kind: str = flag("v5e", "Kind of TPU; cpu: simulated devices.", choices=[*TOPOLOGIES, "cpu"])
    rules: str = flag(",".join(RULES), "Strategies, comma-separated.")
    model: int = flag(
        0, "Chips along model; 0: 8, 4 or 2, as the kv heads are divisible, and 1 where the rules "
        "have replica groups.", at_least=0,
    )  # fmt: skip
    group: int = flag(16, "Chips along fsdp, where the rules use it.", at_least=1)


def collectives(flags: CollectivesFlags) -> None:
    sizes, chips = one_of("sizes", flags.sizes, SIZES), numbers("chips", flags.chips)
    strategies = one_of("rules", flags.rules, RULES)
    cases = [
        (size, strategy, _axes(flags, size, count, strategy))
        for size, count, strategy in itertools.product(sizes, chips, strategies)
    ]
    check_slices([flags.kind], chips)
    table = Table("size", "chips", "rules", "mesh", "remat", "gathered", "scattered or permuted",
                  "all-reduced", "total", "textbook", "ratio")  # fmt: skip
    for case in cases:
        _collectives_row(table, flags, *case)
    print0("", "Bytes that one chip sends in a step, assuming ring collectives, with "
           f"{flags.tokens:,} tokens per chip; {flags.kind}.", machine())  # fmt: skip


def _axes(flags: CollectivesFlags, size: str, chips: int, strategy: str) -> dict[str, int]:
    """Mesh axis → chips along it. Raises UserError if the chips are not divisible that way."""
    used, inner, said = used_axes(RULES[strategy]), {}, []
    groups = "fsdp" in used  # replica groups: each has one copy of the weights
    model = flags.model or (1 if groups else math.gcd(8, SIZES[size]().num_kv_heads))
    if groups:
        inner["fsdp"] = min(flags.group, max(chips // model, 1))
        said.append(f"--group={inner['fsdp']}")
    if "model" in used:
        inner["model"] = model
        said.append(f"--model={model}")
    data, over = divmod(chips, math.prod(inner.values()))
    if over:
        raise UserError(
            f"--chips={chips} is not divisible by {' times '.join(said)} (rules {strategy!r}); use "
            f"a different {said[0].partition('=')[0]}"
        )
    return {"data": data} | inner


def _collectives_row(
    table: Table, flags: CollectivesFlags, size: str, strategy: str, axes: dict[str, int]
) -> None:
    chips, model = math.prod(axes.values()), axes.get("model", 1)
    mesh = topology(flags.kind, axes)
    # Saving the sublayers' outputs spares tensor parallelism one of five all-reduces per layer.
    remat = "sublayers" if model > 1 else "full"
    rows = max(flags.tokens * chips // flags.seq_len, chips // model)
    dtype = "float32" if flags.kind == "cpu" else "bfloat16"  # XLA's CPU backend sends float32
    config = dataclasses.replace(SIZES[size](), dtype=dtype, remat=remat)
    step = make_step(config, strategy, mesh, rows, flags.seq_len)
    name = "x".join(map(str, axes.values()))
    compiled = _compile(step, f"{size} {strategy} on {flags.kind} {name}")
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
    """Bytes that a device must send in a step if each matmul is where the sharding rules put it.

    All of it in the compute dtype. Over a ring of n an all-gather or a reduce-scatter sends
    (n - 1) / n of the whole array, an all-reduce twice that.
    """
    elements = _of_weights(step) + _of_activations(step)
    return elements * jnp.dtype(step.config.dtype).itemsize


def _of_weights(step: Step) -> float:
    """Elements sent for weights and their gradients.

    Weights that rest in smaller parts than they are used: two all-gathers, for the forward pass and
    the backward pass, and a reduce-scatter of the gradient. Gradients are also all-reduced over the
    mesh axes that split the batch and not the weight at rest.
    """
    layout, total = step.layout, 0.0
    shapes = paths(layout.model.shapes["params"])
    for path, axes in paths(layout.model.axes["params"]).items():
        rest = _mesh_axes(step, axes)
        use = _mesh_axes(step, _in_use(step, axes))
        whole = shapes[path].size / _devices(step, use)
        total += 3 * _ring(_devices(step, rest - use)) * whole
        reduced = _mesh_axes(step, ["batch"]) - rest
        total += 2 * _ring(_devices(step, reduced)) * whole / _devices(step, rest - use)
    return total


def _of_activations(step: Step) -> float:
    """Elements sent for activations.

    A weight in use has an axis of the residual stream, one that IN_USE maps to. Where its other axes
    are split, each device has a partial sum: the module that owns such weights (its own, not those of
    a submodule) costs one all-reduce of the residual stream forward and one backward, for each of the
    layers that are stacked in it.
    """
    layout, zoo = step.layout, step.layout.zoo
    shapes = paths(layout.model.shapes["params"])
    widths: dict[str, int] = {}  # module → elements per token
    split: dict[str, set[str]] = {}  # module → mesh axes
    for path, axes in paths(layout.model.axes["params"]).items():
        module, axes = path.rpartition("/")[0], _in_use(step, axes)
        residual = set(axes) & set(zoo.IN_USE.values())
        stacked = {axis for axis in axes if zoo.LOGICAL_AXES[axis] == "weights"}
        if residual:
            dims = zip(axes, shapes[path].shape, strict=True)
            widths[module] = math.prod(n for axis, n in dims if axis in residual | stacked)
            split.setdefault(module, set()).update(_mesh_axes(step, set(axes) - residual - stacked))
    tokens = layout.batch_size * step.seq_len / layout.batch_shards
    rings = {module: _ring(_devices(step, axes)) for module, axes in split.items()}
    return sum(2 * 2 * rings[module] * widths[module] * tokens for module in widths)


def _in_use(step: Step, axes: Iterable[str]) -> list[str]:
    """A weight's logical axes while it is multiplied."""
    return [step.layout.zoo.IN_USE.get(axis, axis) for axis in axes]


def _mesh_axes(step: Step, axes: Iterable[str]) -> set[str]:
    """The mesh axes that split these logical axes."""
    return {name for axis in axes for name in mesh_axes(step.layout.table[axis])}


def _devices(step: Step, axes: Iterable[str]) -> int:
    """Devices along these mesh axes."""
    return math.prod(step.layout.mesh.shape[axis] for axis in axes)


def _ring(devices: int) -> float:
    """The part of an array that each device sends in an all-gather over a ring."""
    return (devices - 1) / devices


# ---- the compiler ----------------------------------------------------------------------------------


def check_slices(kinds: list[str], counts: list[int]) -> None:
    """Raises UserError for a slice that nothing can be compiled for here; before a table begins."""
    for kind, chips in itertools.product(kinds, counts):
        if kind == "cpu":
            continue
        if not version("libtpu"):
            raise UserError(
                f"kind {kind} needs the TPU compiler, which runs on any Linux machine; install it "
                "with pip install -e '.[tpu-aot]', or use kind cpu"
            )
        if chips not in TOPOLOGIES[kind]:
            known = " or ".join(map(str, TOPOLOGIES[kind]))
            raise UserError(f"--chips has {chips}, and {kind} needs {known}; use one of these")


def topology(kind: str, axes: dict[str, int], slices: int = 1) -> Mesh:
    """A mesh over the chips of TPU slices that need not exist; see check_slices."""
    chips = math.prod(axes.values()) // slices
    if kind == "cpu":
        return make_mesh(",".join(f"{axis}={n}" for axis, n in axes.items()))
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to query
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # or to share
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    name = f"{kind}:{TOPOLOGIES[kind][chips]}"
    # The two cores of a v4 chip shall be one device, as in newer kinds by default.
    config = {"chip_config_name": "megacore"} if kind == "v4" else {}
    if name.count("x") == 2 and chips >= 64:
        config["wrap"] = [True] * 3  # slices made of whole 4x4x4 cubes are tori
    if slices > 1:
        config["num_slices"] = slices
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **config)
    return arrange(axes, described.devices)


class TooLarge(NamedTuple):
    """What the compiler says of a program that does not fit its chip."""

    text: str
    bytes: float  # needed


def _compile(step: Step, what: str) -> jax.stages.Compiled | TooLarge:
    start = time.perf_counter()
    try:
        compiled = step.compile()
    except jax.errors.JaxRuntimeError as error:
        compiled = too_large(str(error), report.bytes_per_device(step.abstract))
        if compiled is None:
            raise
    progress(f"{what}: compiled in {time.perf_counter() - start:.0f} s")
    return compiled


def too_large(error: str, arguments: float) -> TooLarge | None:
    """Parses the TPU compiler's error about memory, in units of 1,024; None for any other error.

    Args:
      error: its text, which has either all that the program needs, or the temporaries alone.
      arguments: bytes of the step's state on a device.
    """
    number = r"([\d.]+)([KMGT])"
    whole = re.search(rf"Used {number} of {number} hbm", error)
    found = whole or re.search(
        rf"temporaries \({number}\) exceeds available HBM \({number}\)", error
    )
    if not found:
        return None
    needed, there = (float(found[i]) * 1024 ** " KMGT".index(found[i + 1]) for i in (1, 3))
    needed += 0 if whole else arguments
    return TooLarge(f"does not fit: {report.size(needed)} of {report.size(there)}", needed)


# ---- memory ----------------------------------------------------------------------------------------


ON_DATA = [name for name, table in RULES.items() if used_axes(table) == {"data"}]  # strategies


@dataclasses.dataclass(frozen=True)
class MemoryFlags:
    size: str = flag("8b", "Size of the Transformer.", group="model", choices=SIZES)
    remats: str = flag(",".join(reversed(REMAT)), "Remat policies, comma-separated.", group="model")
    seq_len: int = flag(4_096, "Tokens of context.", group="data", at_least=1)
    rows: int = flag(1, "Sequences per chip.", group="data", at_least=1)
    chips: str = flag("16,256", "Numbers of chips, comma-separated.")
    kinds: str = flag("v4,v5e,v5p,v6e", "Kinds of TPU, or cpu, comma-separated.")
    rules: str = flag(
        ON_DATA[-1], "Strategy, of those that use no mesh axis but data.", choices=ON_DATA
    )


def memory(flags: MemoryFlags) -> None:
    kinds = one_of("kinds", flags.kinds, [*TOPOLOGIES, "cpu"])
    counts = numbers("chips", flags.chips)
    check_slices(kinds, counts)
    cases = itertools.product(kinds, counts, one_of("remats", flags.remats, REMAT))
    table = Table("kind", "chips", "remat", "parameters", "optimizer", "gradients",
                  "saved activations", "live working set", "sum", "compiled peak", "sum / peak")  # fmt: skip
    for kind, chips, remat in cases:
        config = dataclasses.replace(SIZES[flags.size](), dtype="bfloat16", remat=remat)
        mesh = topology(kind, {"data": chips})
        step = make_step(config, flags.rules, mesh, flags.rows * chips, flags.seq_len)
        compiled = _compile(step, f"{flags.size} {remat} on {chips} {kind}")
        if isinstance(compiled, TooLarge):
            peak, bytes_ = compiled
        else:
            bytes_ = compiled.memory_analysis().peak_memory_in_bytes
            peak = report.size(bytes_)
        parts = memory_parts(step)
        total = sum(parts.values())
        cells = map(report.size, [*parts.values(), total])
        table.row(kind, chips, remat, *cells, peak, f"{total / bytes_:.2f}")
    print0("", f"{flags.size}, {flags.rules}, {flags.rows} × {flags.seq_len:,} tokens per chip. The "
           "sum is computed analytically.", machine())  # fmt: skip


def memory_parts(step: Step) -> dict[str, float]:
    """Bytes on a device at the step's peak, computed analytically, by what they are.

    Saved for the backward pass: each layer's input, and what its remat policy names. The peak is the
    larger of two. In the loss: the unembedding table in use, its gradient, one chunk's logits and
    their gradient. In the layers' backward pass: all their gradients at rest and the table's
    gradient, whole; and as the live working set the weights in use of two layers (one of them is on
    its way), what one layer computes again, float32 attention scores included, and all layers'
    weights in the compute dtype, which the compiler casts at once, before the loop.
    """
    layout, config = step.layout, step.config
    width = jnp.dtype(config.dtype).itemsize

    def over(axis):
        return shards(layout.table, axis, layout.mesh.shape)

    rows, length = layout.batch_size // layout.batch_shards, step.seq_len
    D, F = config.embed, config.mlp // over("mlp")
    q = config.num_heads * config.head_dim // over("heads")
    kv = 2 * config.num_kv_heads * config.head_dim // over("kv_heads")
    block = max(128, -(-length // 8))  # of queries, as `attend` takes them
    ends = [min(start + block, length) for start in range(0, length, block)]
    seen = sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False))
    scores = rows * config.num_heads // over("heads") * seen * 4
    layer = (D * (2 * q + kv) + 3 * D * F) * width
    kept = {"full": D, "sublayers": 2 * D, "dots": 2 * D + q + kv + 2 * F}
    # Whatever a derivative needs: 6 D in float32; keys and values once per block of queries.
    kept["none"] = 6 * D * 4 // width + 5 * D + 6 * F + 2 * q + kv * sum(ends) // length
    saved = rows * length * kept[config.remat] * width
    if config.remat == "none":  # also weights in use, and scores before and after the softmax
        saved += layer + scores * (4 + width) // 4
    chunk = min(length, config.loss_chunk)
    logits = rows * chunk * config.vocab_size // over("vocab") * (4 + width)
    in_use = config.vocab_size // over("vocab") * D * width
    inside = rows * length * (2 * q + kv + 3 * F + 2 * D) * width
    params = report.bytes_per_device(step.abstract["params"])
    stacked = report.bytes_per_device(step.abstract["params"]["layers"])
    cast = stacked * width // 4 if width < 4 else 0
    loss = in_use, in_use + logits
    backward = stacked + in_use, cast + 2 * layer + inside + scores
    grads, live = max(loss, backward, key=sum)
    return {
        "parameters": params,
        "optimizer": report.bytes_per_device(step.abstract["opt_state"]),
        "gradients": grads,
        "saved activations": config.num_layers * saved,
        "live working set": live,
    }


# ---- depth -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DepthFlags:
    size: str = flag("tiny", "Size of the Transformer.", group="model", choices=SIZES)
    depths: str = flag("8,80", "Numbers of layers, comma-separated.", group="model")
    mesh: str = flag("4x2", "Mesh of simulated devices, as in every recipe.")
    rounds: int = flag(3, "Compilations of each depth, interleaved.", at_least=1)


def depth(flags: DepthFlags) -> None:
    mesh = make_mesh(flags.mesh)
    depths = numbers("depths", flags.depths)
    seconds = {n: [] for n in depths}
    jax.config.update("jax_compilation_cache_dir", None)  # compile everything anew
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
