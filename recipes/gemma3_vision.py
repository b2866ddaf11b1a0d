"""Trains a model that sees, Gemma 3 with its tower, on rows with pictures, sharded over any mesh.

    python -m recipes.gemma3_vision --mesh=4x2                    # questions about handwritten digits
    python -m recipes.gemma3_vision --mesh=data=2,seq=4           # resumes, with rows split
    python -m recipes.gemma3_vision --dataset=rows.jsonl --restore_from=hf:DIR --lora_rank=8

Running the same command again resumes; --help lists the flags.
"""

import dataclasses
import functools
from typing import Any

from recipes.common import checkpoint, language
from recipes.common.checkpoint import open_run
from recipes.common.language import DECODER, Training
from recipes.common.report import flops
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.tasks import picture_answers
from recipes.common.tasks.picture_questions import Questions
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
    tower: str = flag(
        "", "The tower and its projection: trained or frozen; empty: frozen where the run starts from a "
        "model, as they are beside adapters.", "model", choices=["", "trained", "frozen"],
    )  # fmt: skip
    questions: int = flag(
        4, "Held-out questions to show at the end, with the model's answers; 0: none.",
        at_least=0, may_change=True,
    )  # fmt: skip


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, SIZES, Config.REMAT)
NEW = (
    Run(steps=600, batch_size=64, learning_rate=2e-3),
    PicturedRows(),
    MODEL,
    Training(),
)
defaults = functools.partial(language.fine_tuning, "gemma3_vision", NEW)


def main(run: Run, data: PicturedRows, flags: Any, training: Training) -> PlannedStep | None:
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh, folder = make_mesh(run.mesh), open_run("gemma3_vision", run, data, flags, training)
    tokenizer = checkpoint.tokenizer_for(data.tokenizer, folder.start)
    device = mesh.devices.flat[0]
    config = language.model_config("gemma3_vision", flags, folder.start, tokenizer, device)
    if data.tower == "trained" and flags.lora_rank:
        raise UserError(
            f"--tower=trained is not for adapters (--lora_rank={flags.lora_rank}), beside which the tower "
            "is frozen; leave one out"
        )
    is_frozen = data.tower == "frozen" or (not data.tower and bool(folder.flags["restore_from"]))
    config = dataclasses.replace(config, freeze_tower=is_frozen)
    layout = make_layout(
        Gemma3Vision, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=data.seq_len,
    )  # fmt: skip
    check_step(layout, training)
    if run.plan:
        return PlannedStep(layout, training)

    # ---- Data: batch k is a pure function of (seed, k); pictures are read for their batch ---------
    rows = picture_answers.load(data.dataset, data.seq_len, config, tokenizer, run.seed)
    print0(*language.messages.before_training(layout, rows, training, flags))

    # ---- Step, state and training ----------------------------------------------------------------
    step = make_step(layout, run, training)
    sequence = flops.decoder(layout.shape, data.seq_len)["causal"]
    if tower := layout.shape.tower:  # empty slots count, as padding does
        sequence += tower.flops(len(rows.filler["images"]))
    whole = layout.stages == 1  # else nothing calls the model
    questions = Questions(Gemma3Vision, layout, tokenizer, rows, data.questions)
    state, log, metrics = fit(
        run, folder, step, rows, tokenizer, extra=picture_answers.right_answers if whole else None,
        example_flops=sequence, prepare=questions.begin,
    )  # fmt: skip

    # ---- What it has learned ---------------------------------------------------------------------
    print0(*language.messages.results(metrics, rows))
    print0(*picture_answers.in_words(metrics))
    questions.show(state)
    finish(folder, layout, log)


if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
