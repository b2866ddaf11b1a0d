"""Trains a model that sees, Gemma 3 with its tower, on rows with pictures, sharded over any mesh.

    python -m recipes.gemma3_vision --mesh=4x2                    # questions about handwritten digits
    python -m recipes.gemma3_vision --mesh=data=2,seq=4           # resumes, with rows split
    python -m recipes.gemma3_vision --dataset=rows.jsonl --restore_from=hf:DIR --lora_rank=8

Running the same command again resumes; --help lists the flags.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from data import pictured
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common import checkpoint, language
from recipes.common.checkpoint import open_run
from recipes.common.language import DECODER, Training
from recipes.common.report import flops
from recipes.common.runtime import Run, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import Tree, make_layout
from recipes.common.train.checks import check_step
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from zoo.gemma3_vision import SIZES, Config, Gemma3Vision


@dataclasses.dataclass(frozen=True)
class PicturedRows:
    """Flags of rows with pictures."""

    dataset: str = flag(
        "digits", "Rows with pictures: digits, a .jsonl or .parquet file, or hf:NAME, with messages, or "
        "prompt and completion, and a column image or images.", "data",
    )  # fmt: skip
    tokenizer: str = flag(
        "", "Tokenizer: bytes, a tokenizer.json or a folder with one, or ORG/NAME on the Hub; empty: "
        "the checkpoint's, or bytes.", "data", may_change=True,
    )  # fmt: skip
    seq_len: int = flag(64, "Tokens of a row, those of its pictures included.", "data", at_least=1)


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, SIZES, Config.REMAT)
NEW = (
    Run(steps=600, batch_size=64, learning_rate=2e-3),
    PicturedRows(),
    MODEL,
    Training(),
)


def main(run: Run, data: PicturedRows, flags: Any, training: Training) -> PlannedStep | None:
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh, folder = make_mesh(run.mesh), open_run("gemma3_vision", run, data, flags, training)
    tokenizer = checkpoint.tokenizer_for(data.tokenizer, folder.start)
    device = mesh.devices.flat[0]
    config = language.model_config("gemma3_vision", flags, folder.start, tokenizer, device)
    layout = make_layout(
        Gemma3Vision, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=data.seq_len,
    )  # fmt: skip
    check_step(layout, training)
    if run.plan:
        return PlannedStep(layout, training)

    # ---- Data: batch k is a pure function of (seed, k); pictures are read for their batch ---------
    rows = load(data, config, tokenizer, run.seed)
    print0(*language.messages.before_training(layout, rows, training, flags))

    # ---- Step, state and training ----------------------------------------------------------------
    step = make_step(layout, run, training)
    sequence = flops.decoder(layout.shape, data.seq_len)["causal"]  # without the tower's
    extra = answers if layout.stages == 1 else None  # it calls the model, which stages can't
    _, log, metrics = fit(run, folder, step, rows, tokenizer, extra=extra, example_flops=sequence)

    # ---- What it has learned ---------------------------------------------------------------------
    nats, count = metrics["loss"]
    print0(f"Held-out loss {nats / count:.4f} nats a token of answers.")
    show(metrics)
    finish(folder, layout, log)


def load(data: PicturedRows, config: Config, tokenizer: Tokenizer, seed: int) -> Dataset:
    """The rows as examples for this model. Raises DataError."""
    picture = pictured.PictureTokens(
        config.picture_begin, config.image_token, config.picture_end, config.picture_tokens
    )
    return pictured.load(
        data.dataset, data.seq_len, config.image_size, config.channels, config.resample,
        tokenizer, picture, seed,
    )  # fmt: skip


def answers(model: Any, batch: Tree) -> Tree:
    """An extra sum for `fit`: rows whose tokens are all answered right, by their number of pictures."""
    right_BT, counted_BT = right_tokens(model, batch)
    K = model.config.picture_tokens
    pictures_B = (batch["tokens"] == model.config.image_token).sum(axis=1) // K
    is_right_B = (right_BT | ~counted_BT).all(axis=1)
    sums = {}
    for pictures in (1, 2):
        of_kind_B = (pictures_B == pictures) & counted_BT.any(axis=1)
        total = of_kind_B.sum().astype(jnp.float32)
        sums[f"right_{pictures}"] = (of_kind_B & is_right_B).sum().astype(jnp.float32), total
    return sums


def right_tokens(model: Any, batch: Tree) -> tuple[jax.Array, jax.Array]:
    """(where the likeliest token is the target, where there is a target), bool [B, T]."""
    logits_BTV = model(batch["tokens"], batch["segment_ids"], batch["images"])
    guess_BT = logits_BTV.argmax(axis=-1).astype(jnp.int32)
    return guess_BT == batch["targets"], batch["targets"] >= 0


def show(metrics: Tree) -> None:
    """Prints the share of right answers."""
    for pictures, what in ((1, "one picture"), (2, "two pictures")):
        right, total = map(float, metrics.get(f"right_{pictures}", (0, 0)))
        if total:
            print0(
                f"Held-out answers about {what}: {right / total:.2%} right, {right:.0f} of "
                f"{total:.0f}."
            )


if __name__ == "__main__":
    start(main, *NEW)
