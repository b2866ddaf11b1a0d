"""Trains DotReluDot, two matmuls and a ReLU, to copy a random teacher; draws which device holds what.

    python -m recipes.dot_relu_dot --mesh=2x4               # FSDP over 2, tensor parallel over 4
    python -m recipes.dot_relu_dot --mesh=8 --rules=dp      # compare: every device holds everything

Running the same command again resumes; --help lists the flags.
"""

import dataclasses
from typing import Any

import jax

from data import synthetic
from recipes.common import checkpoint
from recipes.common.checkpoint import RunFolder, open_run
from recipes.common.flags.config_flags import configure, describe_set, model_flags
from recipes.common.report import picture, report
from recipes.common.runtime import Run, flag, make_mesh, print0
from recipes.common.runtime.processes import is_first
from recipes.common.runtime.start import start
from recipes.common.sharding import Layout, Tree, elsewhere, make_layout
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from recipes.common.train.training_flags import Optimization
from zoo.dot_relu_dot import RULES, Config, DotReluDot


@dataclasses.dataclass(frozen=True)
class Flags:
    """Recipe-specific flags."""

    warmup_steps: int = flag(
        20, "Steps in which the learning rate rises to its peak.", "optimizer", at_least=0
    )


# The flags of the model: fields of its Config.
MODEL = model_flags(Config, ("embed", "hidden"))


def main(run: Run, model: Any, flags: Flags) -> PlannedStep | None:
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh, folder = make_mesh(run.mesh), open_run("dot_relu_dot", run, model, flags)
    config = checkpoint.config_of(folder.start) if folder.start else Config.small()
    config = configure(config, model, mesh.devices.flat[0])
    layout = make_layout(
        DotReluDot, config, mesh, run.rules, seed=run.seed, batch_size=run.batch_size
    )
    adam = Optimization(warmup_steps=flags.warmup_steps, weight_decay=0.0)
    if run.plan:
        return PlannedStep(layout, adam)
    print0(*describe_set(model))

    # ---- Data: examples are computed on demand, each from (seed, its number) ---------------------
    teacher = synthetic.load(config.embed, config.hidden, run.seed)

    # ---- Step, state and training ----------------------------------------------------------------
    step = make_step(layout, run, adam)
    state, log, metrics = fit(run, folder, step, teacher)

    # ---- What it has learned, and which device holds what ----------------------------------------
    (total, count), (_, square) = metrics["loss"], metrics["unexplained"]
    print0(
        f"Held-out loss {total / count:.6f}: {total / square:.2%} of the teacher's mean square is "
        "unexplained."
    )
    draw(layout, state["params"], folder)
    reshard(layout, state["params"]["w1"])
    finish(folder, layout, log)


def draw(layout: Layout, params: Tree, folder: RunFolder) -> None:
    """Draws the parts of weights and activations that devices hold, on the terminal and as PNG."""
    B, (D, F) = layout.batch_size, params["w1"].shape
    arrays = {
        "x": (("batch", "act_embed"), (B, D)),
        "w1": (("embed", "hidden"), (D, F)),
        "relu(x · w1)": (("batch", "hidden"), (B, F)),
        "w2": (("hidden", "embed"), (F, D)),
        "y": (("batch", "act_embed"), (B, D)),
    }
    drawn = {name: (axes, shape, layout.sharding(*axes)) for name, (axes, shape) in arrays.items()}
    if is_first():
        for name, (axes, shape, where) in drawn.items():
            print(f"{name} {list(shape)} ({', '.join(axes)}): {tuple(where.spec)}")
            jax.debug.visualize_sharding(shape, where, use_color=False, max_width=100)
    if folder.in_use:
        picture.layouts(folder.path / "layout.png", drawn)
        print0(f"The same as a picture: {folder.shown / 'layout.png'}")


def reshard(layout: Layout, w1_DF: jax.Array) -> None:
    """Moves w1 to the shardings of the other strategies, and prints what that sends."""
    for strategy in RULES:
        other = elsewhere(layout, strategy)
        target = other and other.sharding("embed", "hidden")
        if target is None or target.is_equivalent_to(w1_DF.sharding, 2):
            continue
        moved_DF, there = report.reshard(w1_DF, target)
        _, back = report.reshard(moved_DF, w1_DF.sharding)
        print0(f"Resharding w1 from {layout.strategy} to {strategy} takes {there}; back: {back}.")


if __name__ == "__main__":
    start(main, Run(steps=200, batch_size=1024, learning_rate=0.1), MODEL, Flags())
