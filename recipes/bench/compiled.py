"""What the TPU's own compiler makes of a train step, with no TPU at hand: bytes sent, memory, time.

Needs libtpu (the extra `tpu-aot`) for TPU topologies. Nothing is allocated, nothing runs.
"""

import dataclasses
import itertools
import math
import os
import re
import time
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from recipes.bench.common import (
    SIZES,
    Step,
    Table,
    machine,
    make_step,
    numbers,
    one_of,
    progress,
    version,
)  # fmt: skip
from recipes.common import report, sharding
from recipes.common.cli import flag
from recipes.common.errors import UserError
from recipes.common.mesh import arrange, make_mesh
from recipes.common.metrics import say
from zoo.transformer import REMAT, RULES

# Kind → chips → how they are wired.
TOPOLOGIES = {
    "v4": {16: "2x2x4", 256: "4x8x8"},
    "v5e": {16: "4x4", 256: "16x16"},
    "v5p": {16: "2x2x4", 256: "4x8x8"},
    "v6e": {16: "4x4", 256: "16x16"},
}


@dataclasses.dataclass(frozen=True)
class CollectivesFlags:
    sizes: str = flag("124m", "of the Transformer, with commas between them")
    chips: str = flag("16,256", "how many, with commas between them")
    kind: str = flag("v5e", "of TPU, or cpu: simulated devices", choices=[*TOPOLOGIES, "cpu"])
    rules: str = flag("dp,fsdp,tp,fsdp_tp,hsdp_tp", "strategies, with commas between them")
    model: int = flag(
        0, "devices along model; 0: 4 for 124m, else 8, and 1 for hsdp_tp", at_least=0
    )
    group: int = flag(16, "devices along fsdp, for hsdp_tp", at_least=1)
    seq_len: int = flag(256, "tokens of context", at_least=1)
    tokens: int = flag(4_096, "a device", at_least=1)


def collectives(flags: CollectivesFlags) -> None:
    sizes, chips = one_of("sizes", flags.sizes, SIZES), numbers("chips", flags.chips)
    strategies = one_of("rules", flags.rules, RULES)
    cases = [
        (size, strategy, _axes(flags, size, count, strategy))
        for size, count, strategy in itertools.product(sizes, chips, strategies)
    ]
    check_slices([flags.kind], chips)
    table = Table("size", "chips", "rules", "mesh", "remat", "gathered", "scattered or permuted",
                  "all-reduced", "all of it", "textbook", "ratio")  # fmt: skip
    for case in cases:
        _collectives_row(table, flags, *case)
    say(
        "",
        f"Bytes that one device sends in a step over rings, {flags.tokens} tokens a "
        f"device; {flags.kind}.",
        machine(),
    )


def _axes(flags: CollectivesFlags, size: str, chips: int, strategy: str) -> dict[str, int]:
    """Mesh axis → chips along it. Raises UserError where that leaves some over."""
    if strategy == "hsdp_tp":  # groups of chips, each with a whole copy of the weights
        model = flags.model or 1
        group = min(flags.group, max(chips // model, 1))
        inner, said = {"fsdp": group, "model": model}, f"--group={group} times --model={model}"
    elif "tp" in strategy:
        model = flags.model or (4 if size == "124m" else 8)
        inner, said = {"model": model}, f"--model={model}"
    else:
        return {"data": chips}
    data, over = divmod(chips, math.prod(inner.values()))
    if over or not data:
        raise UserError(f"{chips} chips do not divide by {said}, for {strategy}")
    return {"data": data} | inner


def _collectives_row(
    table: Table, flags: CollectivesFlags, size: str, strategy: str, axes: dict[str, int]
):
    chips, model = math.prod(axes.values()), axes.get("model", 1)
    split = model > 1
    mesh = topology(flags.kind, axes)
    # Keeping the sublayers' outputs saves `tp` one of five all-reduces a layer; the others have none.
    remat = "sublayers" if split else "full"
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
    gathered, reduced = sent.pop("all-gather", 0), sent.pop("all-reduce", 0)
    total = gathered + reduced + sum(sent.values())
    held = map(report.size, (gathered, sum(sent.values()), reduced, total, least))
    ratio = f"{total / least:.2f}" if least else "-"
    table.row(size, chips, strategy, name, remat, *held, ratio)


def textbook(step: Step) -> float:
    """Bytes that a device must send in a step, the matmuls being where the table puts them.

    Over a ring of n an all-gather or a reduce-scatter sends (n - 1) / n of the whole array, an
    all-reduce twice that. Weights and gradients travel in the compute dtype.
      gradients: reduce-scattered over the axes that split the weight at rest, all-reduced over the
        other axes that split the batch;
      weights that rest otherwise than they are used: gathered for the forward pass and the backward;
      activations: where `model` splits the sublayers, an all-reduce after each in the forward pass
        and in the backward; one for the lookup and one for the loss, where it splits the vocabulary.
    """
    layout, config = step.layout, step.config
    mesh, table = dict(layout.mesh.shape), layout.table
    width = 2 if config.dtype == "bfloat16" else 4
    around = lambda n: (n - 1) / n  # noqa: E731
    batch = sharding.mesh_axes(table["batch"])
    total = 0.0
    shapes = sharding.paths(layout.plan.shapes)
    for path, axes in sharding.paths(layout.plan.axes).items():
        rest = {a for axis in axes for a in sharding.mesh_axes(table[axis])}
        use = {a for axis in axes for a in sharding.mesh_axes(
            table["act_embed" if axis == "embed" else axis])}  # fmt: skip
        whole = math.prod(shapes[path].shape) * width / math.prod(mesh[a] for a in use)
        gathered = math.prod(mesh[a] for a in rest - use)
        total += 3 * around(gathered) * whole  # twice there, and the gradient back
        copies = math.prod(mesh[a] for a in batch if a not in rest)
        total += 2 * around(copies) * whole / gathered
    split = math.prod(mesh[a] for a in sharding.mesh_axes(table["mlp"]))
    tokens = math.prod(step.window.shape[:1]) * (step.window.shape[1] - 1) / layout.batch_shards
    total += 2 * around(split) * (4 * config.num_layers + 2) * tokens * config.embed * width
    return total


def sent_by_kind(hlo: str, devices: int) -> dict[str, float]:
    """Kind of collective → bytes that a device sends in a step, each over a ring of its group."""
    sums: dict[str, float] = {}
    for found in report.collectives(hlo):
        n = group_size(found.groups, devices)
        factor = {
            "all-gather": (n - 1) / n,  # of the result, which is the whole
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1,  # of the result, which is a part
            "all-to-all": (n - 1) / n,
            "ragged-all-to-all": (n - 1) / n,
            "collective-permute": 1,  # a ring written out: what a device sends its neighbour
        }[found.kind]
        sums[found.kind] = sums.get(found.kind, 0) + factor * found.times * found.bytes
    return sums


def group_size(groups: str, devices: int) -> int:
    """How many devices exchange with each other, from the compiler's notations.

    >>> group_size("{{0,1,2},{3,4,5}}", 6), group_size("[4,8]<=[32]", 32)
    (3, 8)
    >>> group_size("mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", 16), group_size("", 16)
    (8, 16)
    """
    if named := re.match(r"mesh\[(.*?)\] \{(.*?)\}", groups):
        sizes = {name: int(n) for name, n in re.findall(r"('[\w.]+')=(\d+)", named[1])}
        return math.prod(sizes[name] for name in re.findall(r"'[\w.]+'", named[2]))
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota[1])
    if listed := re.match(r"\{\{([\d,]+)\}", groups):
        return len(listed[1].split(","))
    return devices


# ---- the compiler ----------------------------------------------------------------------------------


def check_slices(kinds: list[str], counts: list[int]) -> None:
    """Before a table begins. Raises UserError for a slice whose programs cannot be compiled here."""
    for kind, chips in itertools.product(kinds, counts):
        if kind == "cpu":
            continue
        if not version("libtpu"):
            raise UserError(
                f"kind {kind} needs the TPU compiler, which runs on any Linux machine; "
                "pip install -e '.[tpu-aot]' brings it, and kind cpu does without"
            )
        if chips not in TOPOLOGIES[kind]:
            known = ", ".join(map(str, TOPOLOGIES[kind]))
            raise UserError(f"--chips has {chips}, and {kind} slices here are of {known}")


def topology(kind: str, axes: dict[str, int]) -> Mesh:
    """A mesh over the chips of a TPU slice that need not exist, see check_slices."""
    chips = math.prod(axes.values())
    if kind == "cpu":
        return make_mesh(",".join(f"{axis}={n}" for axis, n in axes.items()))
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to ask for
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # and none to share
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    name = f"{kind}:{TOPOLOGIES[kind][chips]}"
    # Two cores of a v4 chip are one device to JAX's meshes; newer kinds are so of themselves.
    config = {"chip_config_name": "megacore"} if kind == "v4" else {}
    if name.count("x") == 2 and chips >= 64:
        config["wrap"] = [True] * 3  # slices of whole cubes, 4x4x4, are tori
    described = topologies.get_topology_desc(platform="tpu", topology_name=name, **config)
    return arrange(axes, described.devices)


class TooLarge(NamedTuple):
    """The compiler's word on a program that its chip cannot hold."""

    text: str
    bytes: float  # that it needs


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
    """What an error of the TPU compiler says of memory, which it counts in powers of 1,024.

    Args:
      error: either counts all that the program needs, or its temporaries.
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


@dataclasses.dataclass(frozen=True)
class MemoryFlags:
    size: str = flag("8b", "of the Transformer", choices=SIZES)
    chips: str = flag("16,256", "how many, with commas between them")
    kinds: str = flag("v4,v5e,v5p,v6e", "of TPU, or cpu, with commas between them")
    remats: str = flag("full,sublayers,dots,none", "policies, with commas between them")
    rules: str = flag(
        "fsdp", "strategy, of those that need no axis but data", choices=["dp", "fsdp"]
    )
    seq_len: int = flag(4_096, "tokens of context", at_least=1)
    rows: int = flag(1, "sequences a device", at_least=1)


def memory(flags: MemoryFlags) -> None:
    kinds = one_of("kinds", flags.kinds, [*TOPOLOGIES, "cpu"])
    counts = numbers("chips", flags.chips)
    check_slices(kinds, counts)
    cases = itertools.product(kinds, counts, one_of("remats", flags.remats, REMAT))
    table = Table("kind", "chips", "remat", "parameters", "optimizer", "gradients", "kept activations",
                  "at work", "sum", "compiled peak", "sum / peak")  # fmt: skip
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
    say(
        "",
        f"{flags.size}, {flags.rules}, {flags.rows} × {flags.seq_len} tokens a device.",
        machine(),
    )


def memory_parts(step: Step) -> dict[str, float]:
    """What a device holds at the larger of two moments, in bytes.

    Kept for the backward pass: each layer's input, and what its policy names. Either the loss is
    taken: the table in use, its gradient, one chunk's logits and theirs. Or it is the layers'
    backward pass: their gradients at rest, and that of the table, whole; at work are two layers'
    weights in use (one of them on its way), what one layer computes again, its float32 attention
    scores among it, and all layers' weights in compute dtype, which the compiler makes at once,
    before the loop.
    """
    layout, config = step.layout, step.config
    mesh, table = layout.mesh.shape, layout.table
    width = 2 if config.dtype == "bfloat16" else 4

    def over(axis):
        return math.prod(mesh[a] for a in sharding.mesh_axes(table[axis]))

    rows, length = step.window.shape[0] // layout.batch_shards, step.window.shape[1] - 1
    D, F = config.embed, config.mlp // over("mlp")
    q = config.num_heads * config.head_dim // over("heads")
    kv = 2 * config.num_kv_heads * config.head_dim // over("kv_heads")
    block = max(128, -(-length // 8))  # of queries, as `attend` takes them
    ends = [min(start + block, length) for start in range(0, length, block)]
    seen = sum((end - start) * end for start, end in zip([0, *ends], ends, strict=False))
    scores = rows * config.num_heads // over("heads") * seen * 4
    layer = (D * (2 * q + kv) + 3 * D * F) * width
    kept = {"full": D, "sublayers": 2 * D, "dots": 2 * D + q + kv + 2 * F}
    # Whatever a derivative needs: 6 D in float32, keys and values once for each block of queries.
    kept["none"] = 6 * D * 4 // width + 5 * D + 6 * F + 2 * q + kv * sum(ends) // length
    saved = rows * length * kept[config.remat] * width
    if config.remat == "none":  # and weights in use, and scores before and after the softmax
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
    grads, at_work = max(loss, backward, key=sum)
    return {
        "parameters": params,
        "optimizer": report.bytes_per_device(step.abstract["opt_state"]),
        "gradients": grads,
        "kept activations": config.num_layers * saved,
        "at work": at_work,
    }


# ---- depth -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DepthFlags:
    size: str = flag("tiny", "of a layer, as in this Transformer", choices=SIZES)
    depths: str = flag("8,80", "layers, with commas between them")
    mesh: str = flag("4x2", "simulated devices, as of every recipe")
    rounds: int = flag(3, "compilations of each, in turn", at_least=1)


def depth(flags: DepthFlags) -> None:
    mesh = make_mesh(flags.mesh)
    depths = numbers("depths", flags.depths)
    seconds = {n: [] for n in depths}
    jax.config.update("jax_compilation_cache_dir", None)  # nothing is compiled yet
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
    table = Table("layers", "tracing s", "compiling s", "CPU s", "ratio")
    best = {n: [min(column) for column in zip(*times, strict=True)] for n, times in seconds.items()}
    for n, (traced, compiled, used) in best.items():
        ratio = (traced + compiled) / sum(best[depths[0]][:2])
        table.row(n, f"{traced:.1f}", f"{compiled:.1f}", f"{used:.1f}", f"{ratio:.2f}")
    say("", f"{flags.size}'s layers on {flags.mesh}, best of {flags.rounds}.", machine())
