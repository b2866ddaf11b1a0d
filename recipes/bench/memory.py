"""Memory of a train step on a chip: the compiler's peak against an analytical sum.

python -m recipes.bench memory           # every remat policy, part by part
python -m recipes.bench memory --which   # the policy that recomputes least and still fits
"""

import dataclasses
import itertools
from collections.abc import Iterable

import jax.numpy as jnp

from recipes.bench.common import Step, Table, machine, make_step, numbers, one_of
from recipes.bench.targets import GPUS, KINDS, KINDS_HELP, TPUS, MeshFlags, caveats, check_targets, mesh_name
from recipes.common.analysis.hardware import HARDWARE
from recipes.common.analysis.targets import DOES_NOT_FIT, TooLarge, compile_step, topology
from recipes.common.analysis import report
from recipes.common.analysis.flops import kinds_of_layers
from recipes.common.analysis.kernel import attention_kernel
from recipes.common.runtime.flags import flag
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.rules import shards, used_axes
from zoo.layers import positions_at_once
from zoo.transformer import REMAT, RULES, SIZES

Case = tuple[str, str, int]  # size, kind of chip, number of chips
# Only sequence parallelism gathers activations: elsewhere, "gathered" is "full".
POLICIES = [name for name in REMAT if name != "gathered"]


@dataclasses.dataclass(frozen=True)
class MemoryFlags(MeshFlags):
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
    which: bool = flag(False, "Print only the remat policy that recomputes least and still fits.")


def memory(flags: MemoryFlags) -> None:
    sizes, kinds = one_of("sizes", flags.sizes, SIZES), one_of("kinds", flags.kinds, KINDS)
    counts, remats = numbers("chips", flags.chips), one_of("remats", flags.remats, REMAT)
    meshes = [mesh_name(flags.axes(size, n, flags.rules)) for size in sizes for n in counts]
    check_targets(kinds, counts)
    cases = itertools.product(sizes, kinds, counts)
    (_which if flags.which else _parts)(flags, cases, remats)
    each = "chip" if used_axes(RULES[flags.rules]) == {"data"} else "group of chips"
    print0("", f"{flags.rules} on {' and '.join(dict.fromkeys(meshes))}, {flags.rows} × {flags.seq_len:,} "
           f"tokens per {each}, with segment ids. The sum is computed analytically.", machine(),
           *caveats(kinds))  # fmt: skip


def _parts(flags: MemoryFlags, cases: Iterable[Case], remats: list[str]) -> None:
    table = Table("size", "chips", "remat", "parameters", "optimizer", "gradients",
                  "saved activations", "live working set", "sum", "compiled peak", "sum / peak")  # fmt: skip
    for (size, kind, chips), remat in itertools.product(cases, remats):
        step = _step(flags, size, kind, chips, remat)
        text, peak = _peak(step, kind, f"{size} {remat}")
        parts = memory_parts(step)
        total = sum(parts.values())
        cells = map(report.size, [*parts.values(), total])
        table.row(size, f"{chips} {kind}", remat, *cells, text, f"{total / peak:.2f}")


def _which(flags: MemoryFlags, cases: Iterable[Case], remats: list[str]) -> None:
    """The first policy whose step fits; REMAT has them from least to most recomputation."""
    table = Table("size", "chips", "attention", "remat", "compiled peak", "next policy needs")
    for size, kind, chips in cases:
        above, found, text = "-", "none of them fits", "-"
        for remat in (remat for remat in REMAT if remat in remats):
            step = _step(flags, size, kind, chips, remat)
            total = sum(memory_parts(step).values())
            if kind in GPUS and total > 1.2 * HARDWARE[kind].memory:  # not worth a minute's compilation
                above = f"{remat}: {report.size(total)}, estimated"
                continue
            text, peak = _peak(step, kind, f"{size} {remat}")
            if not text.startswith(DOES_NOT_FIT):
                found = remat
                break
            above = f"{remat}: {report.size(peak)}"
        table.row(size, f"{chips} {kind}", kernel(step), found, text, above)


def _step(flags: MemoryFlags, size: str, kind: str, chips: int, remat: str) -> Step:
    config = dataclasses.replace(SIZES[size](), dtype="bfloat16", remat=remat)
    axes = flags.axes(size, chips, flags.rules)
    rows = flags.rows * shards(RULES[flags.rules], "batch", axes)
    return make_step(config, flags.rules, topology(kind, axes), rows, flags.seq_len, segments=True)


def _peak(step: Step, kind: str, what: str) -> tuple[str, float]:
    """The compiler's peak for a step: (text, bytes)."""
    compiled = compile_step(step, kind, f"{what} on {step.layout.mesh.size} {kind}")
    if isinstance(compiled, TooLarge):
        return compiled
    peak = report.memory(compiled).peak_memory_in_bytes
    return report.size(peak), peak


def kernel(step: Step) -> str:
    """The attention kernel of a step."""
    with step.layout.trace():
        name, _ = attention_kernel(step.config, step.seq_len, "segment_ids" in step.example)
    return name


def memory_parts(step: Step) -> dict[str, float]:
    """Bytes on a device at the step's peak by purpose, computed analytically.

    Saved activations are each layer's input and whatever its remat policy saves. The peak is in one
    of two places. In the loss: the unembedding table in use, its gradient, one chunk's logits and
    their gradient. Or in the layers' backward pass: gradients are those of all layers at rest and
    that of the table, whole; the live working set is the weights in use of two layers (one is being
    gathered), the recomputed activations of one layer, including float32 attention scores unless a
    kernel keeps them on chip, and all layers' weights in the compute dtype, because the compiler
    casts them before the loop.
    """
    layout, config = step.layout, step.config
    width = jnp.dtype(config.dtype).itemsize

    def over(axis):
        return shards(layout.rules, axis, layout.mesh.shape)

    rows, length = layout.batch_size // layout.batch_shards, step.seq_len // layout.seq_shards
    between = step.seq_len // over("residual_seq")  # positions, between sublayers
    D, F = config.embed, config.mlp // over("mlp")
    q = config.num_heads * config.head_dim // over("heads")
    kv = 2 * config.num_kv_heads * config.head_dim // over("kv_heads")
    layer = (D * (2 * q + kv) + 3 * D * F) * width
    # Per position, between sublayers and inside them.
    kept = {"full": (D, 0), "gathered": (D, 2 * D), "sublayers": (2 * D, 0)}
    kept["dots"] = 2 * D, q + kv + 2 * F
    saved, largest = 0, 0
    for kind, layers in kinds_of_layers(config):
        heads = config.num_heads // over("heads")
        attention, scores = _of_attention(step, kind.window, rows, heads, q, kv)
        # All inputs of derivatives; q, k and v share theirs, and so do gate and up.
        kept["none"] = 6 * D * 4 // width, 2 * D + 6 * F + attention
        outside, inside = kept[config.remat]
        saved += layers * rows * (between * outside + length * inside) * width
        if config.remat == "none":  # also weights in use, and scores before and after the softmax
            saved += layers * (layer + scores * (4 + width) // 4)
        largest = max(largest, scores)
    with layout.trace():
        chunk = positions_at_once(config.loss_chunk, rows, length)
    logits = rows * chunk * config.vocab_size // over("vocab") * (4 + width)
    in_use = config.vocab_size // over("vocab") * D * width
    recomputed = rows * length * (2 * q + kv + 3 * F + 2 * D) * width
    params = report.bytes_per_device(step.abstract["params"])
    stacked = report.bytes_per_device(step.abstract["params"]["layers"])
    cast = stacked * width // 4 if width < 4 and config.remat != "none" else 0  # or saved, in use
    loss = in_use, in_use + logits
    backward = stacked + in_use, cast + 2 * layer + recomputed + largest
    grads, live = max(loss, backward, key=sum)
    return {
        "parameters": params,
        "optimizer": report.bytes_per_device(step.abstract["opt_state"]),
        "gradients": grads,
        "saved activations": saved,
        "live working set": live,
    }


def _of_attention(
    step: Step, window: int | None, rows: int, heads: int, q: int, kv: int
) -> tuple[int, int]:
    """(elements per token that attention's derivative needs, bytes of its float32 scores).

    Args:
      window: of the kind of layer.
      rows, heads, q, kv: numbers on a device of sequences, query heads, elements of all queries,
        and elements of all keys and values.
    """
    length, norms = step.seq_len, heads * 4 // jnp.dtype(step.config.dtype).itemsize
    match kernel(step):
        case "xla":  # keys and values count once per block of queries, as in the model
            block, back = max(128, -(-length // 8)), length if window is None else window - 1
            blocks = [(a, min(a + block, length)) for a in range(0, length, block)]
            keys = [b - max(0, a - back) for a, b in blocks]
            seen = sum((b - a) * k for (a, b), k in zip(blocks, keys, strict=True))
            scores = rows * heads * seen * 4 // step.layout.seq_shards
            return 2 * q + kv * sum(keys) // length, scores
        case _:  # the output counts twice: the kernel and the projection lay it out differently
            return 3 * q + kv + norms, 0
