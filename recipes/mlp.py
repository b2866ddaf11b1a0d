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
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.tasks.classification import confusion, show
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from recipes.common.train.training_flags import Optimization
from zoo.mlp import MLP, Config


@dataclasses.dataclass(frozen=True)
class Images:
    """Flags of the images."""

    dataset: str = flag(
        "digits", "Images: digits, a folder with train and test files, or hf:NAME.", "data"
    )
    image_column: str = flag("image", "Column with the images.", "data")
    label_column: str = flag("label", "Column with the labels.", "data")


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = model_flags(Config, ("embed", "hidden", "depth"))


def main(run: Run, model: Any, data: Images, optimization: Optimization) -> PlannedStep | None:
    # ---- Data: batch k is a pure function of (seed, k); images decide the input and output sizes -
    images = digits.load(data.dataset, data.image_column, data.label_column)

    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh, folder = make_mesh(run.mesh), open_run("mlp", run, model, data, optimization)
    check_set(model, images.config)
    new = Config(**images.config)
    config = checkpoint.config_of(folder.start) if folder.start else new
    config = configure(config, model, mesh.devices.flat[0])
    for name, wanted in images.config.items():
        if getattr(config, name) != wanted:
            raise UserError(
                f"--dataset={data.dataset} needs a model with {wanted} {name}, and the checkpoint's "
                f"has {getattr(config, name)}; use the dataset that it was trained on"
            )
    # The last dims of a Linear's kernel and bias have the same logical axis, so the same sharding.
    layout = make_layout(MLP, config, mesh, run.rules, seed=run.seed, batch_size=run.batch_size)
    if run.plan:
        return PlannedStep(layout, optimization)
    print0(*describe_set(model))

    # ---- Step, state and training ----------------------------------------------------------------
    step = make_step(layout, run, optimization)
    _, log, metrics = fit(run, folder, step, images, extra=confusion(config.classes))

    # ---- What it has learned ---------------------------------------------------------------------
    show(folder, metrics)
    finish(folder, layout, log)


if __name__ == "__main__":
    start(
        main,
        Run(steps=400, batch_size=128, learning_rate=3e-3),
        MODEL,
        Images(),
        Optimization(warmup_steps=50),
    )
