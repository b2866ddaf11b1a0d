"""Which mesh, which table? Compiles the Transformer's train step for each, and prints what it costs.

    python -m recipes.meshes                                  # the laptop's model on eight devices
    python -m recipes.meshes --size=124m --meshes=8x1,2x4     # nothing is allocated, only compiled

Bytes are those of one device. Everything comes from the compiler: nothing runs.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
from flax import nnx

from recipes.common import report, sharding
from recipes.common.cli import flag, start
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh, parse
from recipes.common.metrics import say
from recipes.common.optimizer import adamw, apply, gradients, schedule
from zoo.transformer import RULES, Config, Transformer

SIZES = {"tiny": Config.tiny, "small": Config.small, "124m": Config.gpt2_124m}
SIZES |= {"1b": Config.llama_1b, "8b": Config.llama_8b}


@dataclasses.dataclass(frozen=True)
class Flags:
    size: str = flag("small", "of the Transformer", choices=SIZES)
    meshes: str = flag("8x1,4x2,2x4,1x8,2x2x2", "to compare, with commas between them")
    batch_size: int = flag(16, "windows a step, over all devices", at_least=1)
    seq_len: int = flag(128, "tokens of context", at_least=1)


def main(flags: Flags) -> None:
    names = flags.meshes.split(",")  # the first mesh decides how many devices are simulated
    largest_first = sorted(names, key=lambda name: -math.prod(parse(name).values()))
    meshes = {name: make_mesh(name) for name in largest_first}
    say(
        "| strategy | mesh | parameters | optimizer | temporary | all-gather | all-reduce | other |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    )
    refused = {}
    for strategy in RULES:
        for text in names:
            build = functools.partial(_model, SIZES[flags.size]())
            dims = {"batch": ("--batch_size", flags.batch_size)}
            try:
                layout = sharding.lay_out(build, RULES, strategy, meshes[text], dims)
            except UserError as error:
                refused[strategy, text] = str(error)
                continue
            say(row(layout, text, flags))
    if refused:
        say("", "Not above:", *(f"- {what}" for what in dict.fromkeys(refused.values())))


def _model(config: Config) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0))


def row(layout: sharding.Layout, mesh: str, flags: Flags) -> str:
    """One line of the table: what a train step under this layout costs each device."""
    optimizer = adamw(schedule(1e-3, 1, 10), weight_decay=0.1, clip_norm=1.0)
    abstract = sharding.abstract_state(layout, optimizer)
    window = layout.abstract_batch(jnp.zeros(flags.seq_len + 1, jnp.int32), flags.batch_size)

    def loss(params, window_BT):
        return layout.plan.bind(params).loss(window_BT[:, :-1], window_BT[:, 1:])

    def train_step(state, window_BT):
        mean_loss, grads = gradients(loss, state["params"], window_BT)
        return apply(optimizer, state, grads), mean_loss

    pinned = dict(donate_argnums=0, out_shardings=(sharding.shardings(abstract), None))
    compiled = layout.compile(train_step, abstract, window, **pinned)
    sent = report.totals(compiled)
    gathered, reduced = (
        f"{report.size(sent[kind][1])} ({sent[kind][0]})" if kind in sent else "-"
        for kind in ("all-gather", "all-reduce")
    )
    other = "; ".join(
        f"{report.size(held)} {kind} ({count})"
        for kind, (count, held) in sent.items()
        if kind not in ("all-gather", "all-reduce")
    )
    held = [report.bytes_per_device(abstract[part]) for part in ("params", "opt_state")]
    held.append(compiled.memory_analysis().temp_size_in_bytes)
    cells = [layout.strategy, mesh, *map(report.size, held), gathered, reduced, other or "-"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    start(main, Flags())
