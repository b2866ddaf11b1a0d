"""Trains two towers, of images and of texts, on pairs of them, sharded over any mesh.

    python -m recipes.siglip --mesh=4x2                            # digits with captions in words
    python -m recipes.siglip --mesh=8 --pairs=ring --loss=softmax  # texts visit all devices; CLIP
    python -m recipes.siglip --dataset='web/*.tar' --size=b16 --restore_from=hf:ORG/NAME   # fine-tunes

Running the same command again resumes; --help lists the flags.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from data import captions
from data.captions import Texts
from data.tokenizer import BYTES
from recipes.common import checkpoint
from recipes.common.checkpoint import open_run
from recipes.common.config_flags import (
    ENCODER,
    check_set,
    check_vocabulary,
    configure,
    describe_set,
    model_flags,
)
from recipes.common.pictures import INPUTS, CaptionedPictures
from recipes.common.report.plan import plan
from recipes.common.runtime import Run, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.train.flags import Training
from recipes.common.train.loop import finish, fit
from recipes.common.train.offload import check_offload
from recipes.common.train.optimizer import LearningRate, decaying, hidden_matrices, make_optimizer
from recipes.common.train.step import TrainStep
from zoo.sharding import constrain
from zoo.siglip import Config, Siglip
from zoo.sizes import SIGLIP as SIZES

LOCAL = (
    "warning: --pairs=local compares the pairs of each device alone: another loss on each mesh, with "
    "fewer negatives on more devices."
)


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = model_flags(Config, ("image_size", "patch", "loss", "pairs", *ENCODER), SIZES, Config.REMAT)


def main(run: Run, flags: Any, data: CaptionedPictures, training: Training) -> None:
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
        return print0(*plan(layout, training.accumulate, training.offload, training.optimizer))
    print0(*pairs.notes, *describe_set(flags), *([LOCAL] if config.pairs == "local" else []))

    # ---- Step, state and training: microbatches have the loss of the whole batch -----------------
    lr = LearningRate(run.learning_rate, training.warmup_steps, run.steps, run.schedule)
    optimizer = make_optimizer(
        training.optimizer, lr, training.weight_decay, training.clip_norm,
        matrices=hidden_matrices(layout), decays=decaying(layout),
    )  # fmt: skip
    step = TrainStep(
        layout, optimizer, lr,
        microbatches=training.accumulate, skip_nonfinite=run.skip_nonfinite > 0,
        offload=training.offload,
    )  # fmt: skip
    extra = zero_shot(config, layout, texts) if config.labels else retrieval
    _, log, metrics = fit(run, folder, step, pairs, tokenizer, extra=extra)

    # ---- What it has learned: pictures are classified by captions alone, or find their own -------
    (nats, count), (right, _) = metrics["loss"], metrics["accuracy"]
    found, among = (
        ("Zero-shot accuracy", f"by the captions of {len(config.labels)} classes")
        if config.labels
        else ("Retrieval", f"find their own caption among those of {run.batch_size} pairs")
    )
    print0(f"{found} {right / count:.4f}: {right:.0f} of {count:.0f} held-out images {among}; "
           f"loss {nats / count:.4f} nats.")  # fmt: skip
    finish(folder, layout, log)


def zero_shot(config: Config, layout: Layout, texts: Texts) -> Callable[..., Tree]:
    """An extra sum for `fit`: images whose own class has the nearest captions."""
    by_class = captions.class_tokens(config.labels, texts)
    tokens_MT = np.concatenate(by_class)
    share_MK = np.zeros((len(tokens_MT), len(by_class)), np.float32)
    first = 0
    for k, tokens in enumerate(by_class):
        share_MK[first : first + len(tokens), k] = 1 / len(tokens)
        first += len(tokens)
    padding = ((0, -len(tokens_MT) % layout.batch_shards), (0, 0))  # rows that no class has
    tokens_MT, share_MK = np.pad(tokens_MT, padding), np.pad(share_MK, padding)

    def count(model, batch: Tree) -> Tree:
        text_MD = constrain(model.embed_texts(jnp.asarray(tokens_MT)), None, None)
        return nearest(model, batch, jnp.asarray(share_MK).T @ text_MD, batch["label"])

    return count


def retrieval(model, batch: Tree) -> Tree:
    """An extra sum for `fit`: images whose own caption is the nearest of the batch's."""
    text_BD = constrain(model.embed_texts(batch["tokens"]), None, None)
    is_pair_B = constrain(batch["label"], None) >= 0
    return nearest(model, batch, text_BD, jnp.arange(len(text_BD)), is_pair_B)


def nearest(model, batch: Tree, text_KD, own_B, is_candidate_K: Any = True) -> Tree:
    """How many images are nearest to their own text, of number `own_B` among the candidates."""
    image_BD = constrain(model.embed_images(batch["image"]), "batch", None)
    score_BK = jnp.where(is_candidate_K, image_BD @ text_KD.T, -2.0)  # below any cosine
    counted_B = constrain(batch["label"], "batch") >= 0
    right_B = (score_BK.argmax(axis=1) == constrain(own_B, "batch")) & counted_B
    return {"accuracy": (right_B.sum().astype(jnp.float32), counted_B.sum().astype(jnp.float32))}


if __name__ == "__main__":
    start(
        main,
        Run(steps=600, batch_size=128, learning_rate=2e-3),
        MODEL,
        CaptionedPictures(),
        Training(),
    )
