"""Trains the MLP to read handwritten digits, sharded over any mesh.

    python -m recipes.mlp --mesh=4x2                          # a laptop: 8 simulated devices
    python -m recipes.mlp --mesh=1x8 --rules=tp --steps=0     # evaluates that run on another mesh
    python -m recipes.mlp --dataset=hf:ylecun/mnist           # other images, from the Hub

Running the same command again resumes; --help lists the flags.
"""

import dataclasses
from typing import Any

from data import digits
from recipes.common import checkpoint
from recipes.common.checkpoint import open_run
from recipes.common.flags.config_flags import check_set, configure, describe_set, model_flags
from recipes.common.report.plan import plan
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.tasks.classification import confusion, show
from recipes.common.train.loop import finish, fit
from recipes.common.train.optimizer import (
    OPTIMIZERS,
    LearningRate,
    decaying,
    hidden_matrices,
    make_optimizer,
)
from recipes.common.train.step import TrainStep
from zoo.mlp import MLP, Config


@dataclasses.dataclass(frozen=True)
class Flags:
    """Recipe-specific flags."""

    dataset: str = flag(
        "digits", "Images: digits, a folder with train and test files, or hf:NAME.", "data"
    )
    image_column: str = flag("image", "Column with the images.", "data")
    label_column: str = flag("label", "Column with the labels.", "data")
    optimizer: str = flag("adamw", "Optimizer.", "optimizer", choices=OPTIMIZERS)
    warmup_steps: int = flag(
        50, "Steps in which the learning rate rises to its peak.", "optimizer", at_least=0
    )
    weight_decay: float = flag(
        0.1, "Weight decay of kernels, times the learning rate.", "optimizer", at_least=0.0
    )
    clip_norm: float = flag(1.0, "Largest global norm of a gradient.", "optimizer", at_least=1e-9)


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = model_flags(Config, ("embed", "hidden", "depth"))


def main(run: Run, model: Any, flags: Flags) -> None:
    # ---- Data: batch k is a pure function of (seed, k); images decide the input and output sizes -
    images = digits.load(flags.dataset, flags.image_column, flags.label_column)

    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh, folder = make_mesh(run.mesh), open_run("mlp", run, model, flags)
    check_set(model, images.config)
    new = Config(**images.config)
    config = checkpoint.config_of(folder.start) if folder.start else new
    config = configure(config, model, mesh.devices.flat[0])
    for name, wanted in images.config.items():
        if getattr(config, name) != wanted:
            raise UserError(
                f"--dataset={flags.dataset} needs a model with {wanted} {name}, and the checkpoint's "
                f"has {getattr(config, name)}; use the dataset that it was trained on"
            )
    # The last dims of a Linear's kernel and bias have the same logical axis, so the same sharding.
    layout = make_layout(MLP, config, mesh, run.rules, seed=run.seed, batch_size=run.batch_size)
    if run.plan:
        return print0(*plan(layout, optimizer=flags.optimizer))
    print0(*describe_set(model))

    # ---- Step, state and training ----------------------------------------------------------------
    lr = LearningRate(run.learning_rate, flags.warmup_steps, run.steps, run.schedule)
    optimizer = make_optimizer(
        flags.optimizer, lr, flags.weight_decay, flags.clip_norm,
        matrices=hidden_matrices(layout), decays=decaying(layout),
    )  # fmt: skip
    step = TrainStep(layout, optimizer, lr, skip_nonfinite=run.skip_nonfinite > 0)
    _, log, metrics = fit(run, folder, step, images, extra=confusion(config.classes))

    # ---- What it has learned ---------------------------------------------------------------------
    show(folder, metrics)
    finish(folder, layout, log)


if __name__ == "__main__":
    start(main, Run(steps=400, batch_size=128, learning_rate=3e-3), MODEL, Flags())
