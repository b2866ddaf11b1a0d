"""Compares sharding strategies and meshes by their compiled train steps.

    python -m recipes.meshes                                  # the laptop's Transformer, eight devices
    python -m recipes.meshes --size=124m --meshes=8x1,2x4     # nothing is allocated, only compiled
    python -m recipes.meshes --entry=mlp --batch_size=128     # another entry of the zoo

Bytes are per device. Everything comes from the compiler: nothing runs.
"""

import dataclasses
import math

from recipes.common import entries
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import choose, flag, refuse_unused, split
from recipes.common.runtime.mesh import make_mesh, parse
from recipes.common.runtime.start import start
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.abstract import Tree
from recipes.common.sharding.layout import Layout, make_layout
from recipes.common.sharding.shape import check_length, trace_shape
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.step import TrainStep


@dataclasses.dataclass(frozen=True)
class Flags:
    entry: str = flag("transformer", "Zoo entry.", group="model", choices=entries.ENTRIES)
    size: str = flag("small", "Size of the model, a key of its zoo file's SIZES.", group="model")
    meshes: str = flag(
        "8x1,4x2,2x4,1x8,2x2x2", "Meshes to compare, comma-separated; with axis names, as in "
        "data=2,expert=4, separated by semicolons.",
    )  # fmt: skip
    batch_size: int = flag(16, "Examples per step, over all devices.", group="data", at_least=1)
    seq_len: int = flag(128, "Tokens of context, for text.", group="data", at_least=1)


def main(flags: Flags) -> None:
    zoo = entries.zoo_file(flags.entry)
    names = split(flags.meshes, ";" if "=" in flags.meshes else ",")
    flags = dataclasses.replace(flags, size=choose("size", flags.size, entries.sizes(flags.entry)))
    config = entries.sizes(flags.entry)[flags.size]()
    check_length(trace_shape(entries.model(flags.entry), config), flags.seq_len)
    # The first mesh determines how many devices are simulated.
    largest_first = sorted(names, key=lambda name: -math.prod(parse(name).values()))
    meshes = {name: make_mesh(name) for name in largest_first}
    example = entries.dataset(flags.entry, vars(config) | vars(flags) | {"seed": 0}).filler
    if "targets" not in example:
        refuse_unused(flags, ("seq_len",), f"text, which {flags.entry} doesn't read")
    print0(
        "| strategy | mesh | parameters | optimizer | temporary | all-gather | all-reduce | other |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    )
    left_out = {}  # messages in order, without duplicates
    for strategy in zoo.RULES:
        for name in names:
            try:
                layout = make_layout(
                    entries.model(flags.entry), config, meshes[name], strategy,
                    batch_size=flags.batch_size, seq_len=flags.seq_len,
                )  # fmt: skip
            except UserError as error:
                left_out[str(error)] = None
                continue
            print0(row(layout, name, example))
    if left_out:
        print0("", "Left out:", *(f"- {why}" for why in left_out))


def row(layout: Layout, mesh: str, example: Tree) -> str:
    """One line of the table: what a train step with this layout costs each device."""
    lr = LearningRate(1e-3, 1, 10)
    step = TrainStep(layout, adamw(lr, weight_decay=0.1, clip_norm=1.0), lr)
    abstract = step.abstract_state()
    compiled = step.lower(abstract, example).compile()
    sent = report.totals(compiled)
    gathered, reduced = (
        f"{report.size(sent[kind][1])} ({sent[kind][0]})" if kind in sent else "-"
        for kind in ("all-gather", "all-reduce")
    )
    other = "; ".join(
        f"{report.held(kind, bytes_)} {kind} ({count})"
        for kind, (count, bytes_) in sent.items()
        if kind not in ("all-gather", "all-reduce")
    )
    bytes_by_part = [report.bytes_per_device(abstract[part]) for part in ("params", "opt_state")]
    bytes_by_part.append(report.memory(compiled).temp_size_in_bytes)
    cells = [
        layout.strategy,
        mesh,
        *map(report.size, bytes_by_part),
        gathered,
        reduced,
        other or "-",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    start(main, Flags())
