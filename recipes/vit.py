"""Trains a Vision Transformer to classify pictures, sharded over any mesh.

    python -m recipes.vit --mesh=4x2                          # a laptop reads handwritten digits
    python -m recipes.vit --dataset=pets --size=s16 --flip    # a folder with a subfolder for each class
    python -m recipes.vit --dataset=pets --restore_from=hf:google/vit-base-patch16-224   # fine-tunes

Running the same command again resumes; --help lists the flags.
"""

import dataclasses
from typing import Any

import jax

from data import images as pictures
from recipes.common import checkpoint
from recipes.common.checkpoint import NewHead, open_run
from recipes.common.flags.config_flags import (
    ENCODER,
    check_set,
    configure,
    describe_set,
    model_flags,
)
from recipes.common.flags.pictures import INPUTS, Pictures
from recipes.common.report import flops, kernel
from recipes.common.runtime import Run, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.tasks.classification import confusion, show
from recipes.common.train.loop import finish, fit
from recipes.common.train.offload import check_offload
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from recipes.common.train.training_flags import Training
from zoo.core.stack import REMAT_POLICIES
from zoo.vit import SIZES, Config, ViT

HEAD = ("head", "head_bias")  # parameters that other classes need anew
KERNEL = "attention: xla, because the kernels attend to earlier positions alone"


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = model_flags(Config, ("image_size", "patch", *ENCODER), SIZES, REMAT_POLICIES)


def main(run: Run, flags: Any, data: Pictures, training: Training) -> PlannedStep | None:
    # ---- Data: batch k is a pure function of (seed, k); pictures decide the classes --------------
    mesh, folder = make_mesh(run.mesh), open_run("vit", run, flags, data, training)
    config = model_config(flags, folder.start, mesh.devices.flat[0])
    inputs = {name: getattr(config, name) for name in INPUTS} if folder.start else {}
    images = pictures.load(
        **dataclasses.asdict(data), **inputs, image_size=config.image_size, seed=run.seed
    )

    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    check_set(flags, images.config)
    config = dataclasses.replace(config, **images.config)
    layout = make_layout(
        ViT, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
    )  # fmt: skip
    check_offload(layout, training.offload)
    if run.plan:
        return PlannedStep(layout, training)
    if folder.source and inputs["labels"] != config.labels:
        folder = dataclasses.replace(folder, source=NewHead(folder.source, layout, HEAD))
        print0(f"The head is new and starts at zero, for {config.classes} other classes.")
    print0(*images.notes, KERNEL, *kernel.matmul(layout), *describe_set(flags))

    # ---- Step, state and training ----------------------------------------------------------------
    step = make_step(layout, run, training)
    extra, cost = confusion(config.classes), flops.encoder(layout)
    _, log, metrics = fit(run, folder, step, images, extra=extra, example_flops=cost)

    # ---- What it has learned ---------------------------------------------------------------------
    show(folder, metrics, config.labels)
    finish(folder, layout, log)


def model_config(flags: Any, start: checkpoint.WeightSource | None, device: jax.Device) -> Config:
    """The size's Config, or the checkpoint's, changed by flags. Raises UserError if these don't fit.

    Args:
      device: one of the mesh's; decides the default of --dtype.
    """
    if start and not flags.size:
        config = checkpoint.config_of(start)
    else:
        config = SIZES[flags.size or "small"]()
    return configure(config, flags, device)


if __name__ == "__main__":
    start(main, Run(steps=1000, batch_size=64, learning_rate=2e-3), MODEL, Pictures(), Training())
