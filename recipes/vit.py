"""Trains a Vision Transformer to classify pictures, sharded over any mesh.

    python -m recipes.vit --mesh=4x2                          # a laptop reads handwritten digits
    python -m recipes.vit --dataset=pets --size=s16 --flip    # a folder with a subfolder for each class
    python -m recipes.vit --dataset=pets --restore_from=hf:google/vit-base-patch16-224   # fine-tunes

Running the same command again resumes; --help lists the flags.
"""

import dataclasses

import jax

from data import images as pictures
from recipes.common import checkpoint
from recipes.common.checkpoint import NewHead, open_run
from recipes.common.classification import confusion, show
from recipes.common.plan.answer import of_layout
from recipes.common.report import flops
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.train import adapters
from recipes.common.train.loop import finish, fit
from recipes.common.train.matmul import (
    describe_matmul,
    matmul_backward_flag,
    matmul_emulate_flag,
    matmul_fields,
    matmul_flag,
)
from recipes.common.train.offload import check_offload, offload_flag
from recipes.common.train.optimizer import (
    OPTIMIZERS,
    LearningRate,
    decaying,
    hidden_matrices,
    make_optimizer,
)
from recipes.common.train.step import TrainStep
from zoo.stack import REMAT_POLICIES
from zoo.vit import SIZES, Config, ViT

# For --optimizer=muon: logical axes of weights that are not hidden matrices, and of stacks of them.
MATRICES = {
    "ends": ("channels", "positions", "classes"),
    "stacks": ("layers",),
    "ranks": ("lora",),
}
HEAD = ("head", "head_bias")  # parameters that other classes need anew
KERNEL = "attention: xla, because the kernels attend to earlier positions alone"


@dataclasses.dataclass(frozen=True)
class Flags:
    """Recipe-specific flags."""

    size: str = flag(
        "", "Size of the model; empty: small, or that of the checkpoint.", "model",
        choices=["", *SIZES],
    )  # fmt: skip
    image_size: int = flag(
        0, "Height and width to resize pictures to, in pixels; 0: the size's.", "model", at_least=0
    )
    patch: int = flag(0, "Height and width of a patch; 0: the size's.", "model", at_least=0)
    dtype: str = flag(
        "", "Dtype of activations and matmuls; empty: bfloat16 on accelerators, else float32.",
        "model", choices=["", "float32", "bfloat16"], may_change=True,
    )  # fmt: skip
    matmul: str = matmul_flag()
    matmul_backward: str = matmul_backward_flag()
    matmul_emulate: bool = matmul_emulate_flag()
    remat: str = flag(
        "", "What a layer keeps for its backward pass; empty: the size's default.", "model",
        choices=["", *REMAT_POLICIES], may_change=True,
    )  # fmt: skip
    lora_rank: int = adapters.rank_flag()
    lora_alpha: float = adapters.alpha_flag()
    lora_targets: str = adapters.targets_flag(Config.lora_targets)
    base: str = adapters.base_flag()
    dataset: str = flag(
        "digits",
        "Pictures: digits, a folder with one subfolder for each class, or hf:NAME.",
        "data",
    )
    image_column: str = flag("image", "Column with the images of hf: datasets.", "data")
    label_column: str = flag("label", "Column with their labels.", "data")
    crop: bool = flag(True, "Shift training pictures at random, by up to an eighth.", "data")
    flip: bool = flag(False, "Mirror half of the training pictures, left to right.", "data")
    optimizer: str = flag("adamw", "Optimizer.", "optimizer", choices=OPTIMIZERS)
    warmup_steps: int = flag(
        40, "Steps in which the learning rate rises to its peak.", "optimizer", at_least=0
    )
    weight_decay: float = flag(
        0.1, "Weight decay of matrices, times the learning rate.", "optimizer", at_least=0.0
    )
    clip_norm: float = flag(1.0, "Largest global norm of a gradient.", "optimizer", at_least=1e-9)
    accumulate: int = flag(
        1, "Gradient-accumulation steps: microbatches in a batch.", "optimizer", at_least=1
    )
    offload: str = offload_flag()


def main(run: Run, flags: Flags) -> None:
    # ---- Data: batch k is a pure function of (seed, k); pictures decide the classes --------------
    mesh, folder = make_mesh(run.mesh), open_run("vit", run, flags)
    config, given = model_config(flags, folder.start, mesh.devices.flat[0]), {}
    if folder.start:  # its inputs stay as they were
        given = {k: getattr(config, k) for k in ("channels", "labels", "mean", "std", "resample")}
    images = pictures.load(
        flags.dataset, config.image_size, **given, crop=flags.crop, flip=flags.flip, seed=run.seed,
        image_column=flags.image_column, label_column=flags.label_column,
    )  # fmt: skip

    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    config = dataclasses.replace(config, **images.config)
    layout = make_layout(
        ViT, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=flags.accumulate,
    )  # fmt: skip
    check_offload(layout, flags.offload)
    if run.plan:
        return print0(*of_layout(layout, flags.accumulate, flags.offload))
    if folder.source and given["labels"] != config.labels:
        folder = dataclasses.replace(folder, source=NewHead(folder.source, layout, HEAD))
        print0(f"The head is new and starts at zero, for {config.classes} other classes.")
    print0(KERNEL, *describe_matmul(layout))

    # ---- Step, state and training ----------------------------------------------------------------
    lr = LearningRate(run.learning_rate, flags.warmup_steps, run.steps, run.schedule)
    matrices = hidden_matrices(layout, **MATRICES)
    optimizer = make_optimizer(
        flags.optimizer, lr, flags.weight_decay, flags.clip_norm, matrices, decaying(layout)
    )
    step = TrainStep(layout, optimizer, lr, flags.accumulate, run.skip_nonfinite > 0, flags.offload)
    extra, cost = confusion(config.classes), flops.encoder(layout)
    _, log, figures = fit(run, folder, step, images, extra=extra, example_flops=cost)

    # ---- What it has learned ---------------------------------------------------------------------
    show(folder, figures, config.labels)
    finish(folder, layout, log)


def model_config(flags: Flags, start: checkpoint.Source | None, device: jax.Device) -> Config:
    """The size's Config, or the checkpoint's, changed by flags. Raises UserError if these don't fit.

    Args:
      device: one of the mesh's; decides the default of --dtype.
    """
    size = SIZES[flags.size or "small"]()
    dtype = flags.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    how = {"dtype": dtype, **matmul_fields(flags, device)}
    try:
        given = dataclasses.replace(flags, lora_targets="")  # lora_fields reads it
        config = checkpoint.configure(size, None if flags.size else start, given)
        fields = adapters.lora_fields(flags, Config.lora_targets)
        return dataclasses.replace(config, **how, **fields)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{error}; use another --image_size or --patch") from None


if __name__ == "__main__":
    start(main, Run(steps=1000, batch_size=64, learning_rate=2e-3), Flags())
