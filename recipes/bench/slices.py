"""Bytes that a train step sends between TPU slices, from the TPU compiler without a TPU."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from recipes.bench.common import Step, Table, machine, make_step, numbers, one_of
from recipes.bench.targets import TPUS, TooLarge, check_targets, compile_step, topology
from recipes.common.analysis import report
from recipes.common.analysis.hlo import crossing
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.rules import used_axes
from zoo.transformer import RULES, SIZES


@dataclasses.dataclass(frozen=True)
class SlicesFlags:
    sizes: str = flag("124m", "Sizes of the Transformer, comma-separated.", group="model")
    seq_len: int = flag(256, "Tokens of context.", group="data", at_least=1)
    tokens: int = flag(4_096, "Tokens per chip.", group="data", at_least=1)
    slices: str = flag("2,4", "Numbers of slices, comma-separated.")
    chips: int = flag(16, "Chips per slice.", at_least=1)
    kind: str = flag("v5e", "Kind of TPU.", choices=TPUS)
    rules: str = flag("dp,hsdp_tp", "Strategies, comma-separated.")
    model: int = flag(1, "Chips along model, if the rules use it.", at_least=1)


def slices(flags: SlicesFlags) -> None:
    sizes, counts = one_of("sizes", flags.sizes, SIZES), numbers("slices", flags.slices, 2)
    strategies = one_of("rules", flags.rules, RULES)
    if flags.chips % flags.model:
        raise UserError(
            f"--model={flags.model} does not divide --chips={flags.chips}; try --model=1"
        )
    if flags.tokens % flags.seq_len:
        raise UserError(
            f"--tokens={flags.tokens} is not divisible by --seq_len={flags.seq_len}; try "
            f"--tokens={max(flags.tokens // flags.seq_len, 1) * flags.seq_len}"
        )
    check_targets([flags.kind], [flags.chips])
    table = Table("size", "slices", "rules", "mesh", "crosses", "textbook", "ratio", "transfers")
    for size, count, strategy in itertools.product(sizes, counts, strategies):
        _row(table, flags, size, count, strategy)
    print0("", f"Bytes that one chip of a slice of {flags.chips} {flags.kind} chips sends to other "
           f"slices in a step, with {flags.tokens:,} tokens per chip.", machine())  # fmt: skip


def _row(table: Table, flags: SlicesFlags, size: str, count: int, strategy: str) -> None:
    axes = _axes(flags, count, strategy)
    mesh = topology(flags.kind, axes, count)
    config = dataclasses.replace(SIZES[size](), dtype="bfloat16", remat="full")
    rows = flags.tokens * mesh.size // flags.seq_len
    step = make_step(config, strategy, mesh, rows, flags.seq_len, segments=True)
    name = "x".join(map(str, axes.values()))
    compiled = compile_step(step, flags.kind, f"{size} {strategy} on {name}")
    if isinstance(compiled, TooLarge):
        table.row(size, count, strategy, name, compiled.text, "-", "-", "-")
        return
    sent = crossing(compiled.as_text())
    total, least = sum(x.times * x.bytes for x in sent), textbook(step, flags.chips)
    kinds = ", ".join(sorted({x.kind for x in sent}))
    cells = (report.size(total), report.size(least), f"{total / least:.2f}", kinds)
    table.row(size, count, strategy, name, *cells)


def _axes(flags: SlicesFlags, count: int, strategy: str) -> dict[str, int]:
    """Mesh axis → chips along it: `data` runs across slices, other axes inside one."""
    used = used_axes(RULES[strategy])
    model = {"model": flags.model} if "model" in used else {}
    rest = flags.chips // (flags.model if model else 1)
    if "fsdp" in used:
        return {"data": count, "fsdp": rest} | model
    return {"data": count * rest} | model


def textbook(step: Step, chips: int) -> float:
    """Bytes that a chip must send to other slices: its part of the gradients, in the compute dtype.

    Gradients are reduced inside a slice first, so each chip has the sum of 1 / chips of them.
    """
    elements = sum(leaf.size for leaf in jax.tree.leaves(step.layout.model.shapes["params"]))
    return elements * jnp.dtype(step.config.dtype).itemsize / chips
