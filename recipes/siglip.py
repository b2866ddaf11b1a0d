"""Trains two towers, of images and of texts, on pairs of them, sharded over any mesh.

    python -m recipes.siglip --mesh=4x2                            # digits with captions in words
    python -m recipes.siglip --mesh=8 --pairs=ring --loss=softmax  # texts visit all devices; CLIP
    python -m recipes.siglip --dataset='web/*.tar' --size=b16 --restore_from=hf:ORG/NAME   # fine-tunes

Running the same command again resumes; --help lists the flags.
"""

import dataclasses
from typing import Any

from data import captions
from data.captions import Texts
from data.tokenizer import BYTES
from recipes.common import checkpoint
from recipes.common.checkpoint import open_run
from recipes.common.flags.config_flags import (
    ENCODER,
    check_set,
    check_vocabulary,
    configure,
    describe_set,
    model_flags,
)
from recipes.common.flags.pictures import INPUTS, CaptionedPictures
from recipes.common.report import flops
from recipes.common.runtime import Run, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.tasks import zero_shot
from recipes.common.tasks.classification import few
from recipes.common.train.loop import finish, fit
from recipes.common.train.offload import check_offload
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from recipes.common.train.training_flags import Training
from zoo.siglip import Config, Siglip
from zoo.sizes import SIGLIP as SIZES

LOCAL = (
    "warning: --pairs=local compares the pairs of each device alone: another loss on each mesh, with "
    "fewer negatives on more devices."
)


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = model_flags(Config, ("image_size", "patch", "loss", "pairs", *ENCODER), SIZES, Config.REMAT)


def main(run: Run, flags: Any, data: CaptionedPictures, training: Training) -> PlannedStep | None:
    # ---- Data: batch k is a pure function of (seed, k) -------------------------------------------
    mesh, folder = make_mesh(run.mesh), open_run("siglip", run, flags, data, training)
    tokenizer = (folder.start.tokenizer() if folder.start else None) or BYTES
    if folder.start and not flags.size:
        config = checkpoint.config_of(folder.start)
    else:
        config = SIZES[flags.size or "small"]()
    config = configure(config, flags, mesh.devices.flat[0])
    check_vocabulary(config.vocab_size, tokenizer.size)
    texts = Texts(config.max_positions, tokenizer, end=config.clip)
    inputs = {name: getattr(config, name) for name in INPUTS} if folder.start else {}
    pairs = captions.load(
        **dataclasses.asdict(data), **inputs, seed=run.seed, image_size=config.image_size,
        max_positions=config.max_positions, center_crop=config.center_crop, texts=texts,
    )  # fmt: skip

    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    check_set(flags, pairs.config)
    config = dataclasses.replace(config, **pairs.config)
    layout = make_layout(
        Siglip, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
    )  # fmt: skip
    check_offload(layout, training.offload)
    if run.plan:
        return PlannedStep(layout, training)
    print0(*pairs.notes, *describe_set(flags), *([LOCAL] if config.pairs == "local" else []))

    # ---- Step, state and training: microbatches have the loss of the whole batch -----------------
    step = make_step(layout, run, training)
    classes = zero_shot.Classes(config.labels, texts) if config.labels else None
    extra = zero_shot.accuracy(classes, layout) if classes else zero_shot.retrieval
    cost = flops.encoder(layout)
    _, log, metrics = fit(run, folder, step, pairs, tokenizer, extra=extra, example_flops=cost)

    # ---- What it has learned: pictures are classified by captions alone, or find their own -------
    (nats, count), (right, _) = metrics["loss"], metrics["accuracy"]
    measure, among = (
        ("Zero-shot accuracy", f"by the captions of {len(config.labels)} classes")
        if config.labels
        else ("Retrieval", f"find their own caption among those of {run.batch_size} pairs")
    )
    print0(f"{measure} {right / count:.4f}: {right:.0f} of {count:.0f} held-out images {among}; "
           f"loss {nats / count:.4f} nats.", *few(count, "images"))  # fmt: skip
    finish(folder, layout, log)


if __name__ == "__main__":
    start(
        main,
        Run(steps=600, batch_size=128, learning_rate=2e-3),
        MODEL,
        CaptionedPictures(),
        Training(),
    )
