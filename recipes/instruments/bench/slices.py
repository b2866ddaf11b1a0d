"""Bytes that a train step sends between TPU slices, from the TPU compiler without a TPU."""

import dataclasses
import itertools
from collections import Counter

import jax
import jax.numpy as jnp

from recipes.common.report import report
from recipes.common.report.hlo import crossing
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.terminal import print0
from recipes.instruments.bench.common import Step, Table, machine, make_step, one_of, read_integers
from recipes.instruments.bench.targets import TPUS, MeshFlags, check_targets, mesh_name
from recipes.instruments.plan.compilers import TooLarge, compile_step, topology
from recipes.instruments.plan.textbook import stage_transfers
from zoo.llama_relatives import RULES
from zoo.sizes import TRANSFORMER as SIZES


@dataclasses.dataclass(frozen=True)
class SlicesFlags(MeshFlags):
    sizes: str = flag("124m", "Sizes of the Transformer, comma-separated.", group="model")
    seq_len: int = flag(256, "Tokens of context.", group="data", at_least=1)
    tokens: int = flag(4_096, "Tokens per chip.", group="data", at_least=1)
    slices: str = flag("2,4", "Numbers of slices, comma-separated.")
    chips: int = flag(16, "Chips per slice.", at_least=1)
    kind: str = flag("v5e", "Kind of TPU.", choices=TPUS)
    rules: str = flag("dp,cp,hsdp_tp,fsdp_pp", "Strategies, comma-separated.")


def slices(flags: SlicesFlags) -> None:
    sizes, counts = one_of("sizes", flags.sizes, SIZES), read_integers("slices", flags.slices, 2)
    strategies = one_of("rules", flags.rules, RULES)
    if flags.tokens % flags.seq_len:
        raise UserError(
            f"--tokens={flags.tokens} is not divisible by --seq_len={flags.seq_len}; try "
            f"--tokens={max(flags.tokens // flags.seq_len, 1) * flags.seq_len}"
        )
    inside = dataclasses.replace(flags, pipe=1)  # stages lie on different slices
    cases = [
        (size, count, strategy, inside.axes(size, flags.chips, strategy))
        for size, count, strategy in itertools.product(sizes, counts, strategies)
    ]
    check_targets([flags.kind], [flags.chips])
    table = Table("size", "slices", "rules", "mesh", "crosses", "textbook", "ratio", "by transfer")
    for case in cases:
        _row(table, flags, *case)
    print0("", f"Bytes that one chip of a slice of {flags.chips} {flags.kind} chips sends to other "
           f"slices in a step, with {flags.tokens:,} tokens per chip.", machine())  # fmt: skip


def _row(
    table: Table, flags: SlicesFlags, size: str, count: int, strategy: str, inside: dict[str, int]
) -> None:
    # `pipe` runs across slices, or else `data`; other axes inside one.
    across = "pipe" if "pipe" in inside else "data"
    axes = {across: inside[across] * count}
    axes |= {axis: n for axis, n in inside.items() if axis != across}
    mesh = topology(flags.kind, axes, count)
    config = dataclasses.replace(SIZES[size](), dtype="bfloat16", remat="full")
    rows = flags.tokens * mesh.size // flags.seq_len
    step = make_step(config, strategy, mesh, rows, flags.seq_len, segments=True)
    name = mesh_name(axes)
    compiled = compile_step(step, flags.kind, f"{size} {strategy} on {name}")
    if isinstance(compiled, TooLarge):
        table.row(size, count, strategy, name, compiled.text, "-", "-", "-")
        return
    sent = crossing(compiled.as_text())
    total, least = sum(x.times * x.bytes for x in sent), textbook(step, flags.chips)
    kinds = Counter()
    for x in sent:
        kinds[x.kind] += x.times * x.bytes
    each = ", ".join(f"{kind} {report.size(sum_)}" for kind, sum_ in kinds.most_common())
    cells = (report.size(total), report.size(least), f"{total / least:.2f}", each)
    table.row(size, count, strategy, name, *cells)


def textbook(step: Step, chips: int) -> float:
    """Bytes that a chip must send to other slices: its part of the gradients, in the compute dtype.

    Gradients are reduced inside a slice first, so each chip has the sum of 1 / chips of them. Stages
    send each other activations, and sum the gradients of the weights outside of the layers, in
    float32.
    """
    shapes, width = step.layout.model.shapes["params"], jnp.dtype(step.config.dtype).itemsize
    if step.layout.stages == 1:
        return sum(leaf.size for leaf in jax.tree.leaves(shapes)) * width / chips
    shared = sum(leaf.size for leaf in jax.tree.leaves({**shapes, "layers": {}}))
    return sum(x.bytes for x in stage_transfers(step.layout)) + 4 * shared / chips
