"""The recipe of every model that sees. Read `main` from top to bottom: it is the whole run."""

import dataclasses
from typing import Any

from recipes.common import checkpoint, entries, language
from recipes.common.checkpoint import open_run
from recipes.common.language import Training
from recipes.common.report import flops
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0
from recipes.common.sharding import make_layout
from recipes.common.tasks import picture_answers
from recipes.common.tasks.picture_questions import Questions
from recipes.common.train.checks import check_step
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step


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
    pack: bool = flag(
        True, "Rows of as many whole documents as fit; false: a row for each document.", "data"
    )
    tower: str = flag(
        "", "The tower and its projection: trained or frozen; empty: frozen where the run starts from a "
        "model, as they are beside adapters.", "model", choices=["", "trained", "frozen"],
    )  # fmt: skip
    questions: int = flag(
        4, "Held-out questions to show at the end, with the model's answers; 0: none.",
        at_least=0, may_change=True,
    )  # fmt: skip


def main(
    entry: str, run: Run, data: PicturedRows, flags: Any, training: Training
) -> PlannedStep | None:
    """Trains a model that sees on rows with pictures, evaluates it and shows a few answers.

    Args:
      entry: the model's name in entries.py.
      flags: of the model, from language.model_flags.
    """
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh, folder = make_mesh(run.mesh), open_run(entry, run, data, flags, training)
    tokenizer = checkpoint.tokenizer_for(data.tokenizer, folder.start)
    device = mesh.devices.flat[0]
    config = language.model_config(entry, flags, folder.start, tokenizer, device)
    if data.tower == "trained" and flags.lora_rank:
        raise UserError(
            f"--tower=trained is not for adapters (--lora_rank={flags.lora_rank}), beside which the tower "
            "is frozen; leave one out"
        )
    is_frozen = data.tower == "frozen" or (not data.tower and bool(folder.flags["restore_from"]))
    config = dataclasses.replace(config, freeze_tower=is_frozen)
    model = entries.model(entry)  # a class, such as zoo.gemma3_vision.Gemma3Vision
    layout = make_layout(
        model, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=data.seq_len,
    )  # fmt: skip
    check_step(layout, training)

    # ---- Data: batch k is a pure function of (seed, k); pictures are read for their batch ---------
    rows = picture_answers.load(
        data.dataset, data.seq_len, config, tokenizer, run.seed, pack=data.pack
    )
    layout = dataclasses.replace(layout, pictures=len(rows.filler["images"]))
    if run.plan:
        counted = f"Pictures of a row that this counts: {layout.pictures}, as many as the fullest row has."
        return PlannedStep(layout, training, notes=[counted])
    print0(*language.messages.before_training(layout, rows, training, flags))

    # ---- Step, state and training ----------------------------------------------------------------
    step = make_step(layout, run, training)
    sequence = flops.decoder(layout.shape, data.seq_len)["causal"]
    if tower := layout.shape.tower:  # empty slots count, as padding does
        sequence += tower.flops(layout.pictures)
    can_call_model = layout.stages == 1  # else nothing calls the model
    questions = Questions(model, layout, tokenizer, rows, data.questions)
    state, log, metrics = fit(
        run, folder, step, rows, tokenizer, extra=picture_answers.right_answers if can_call_model else None,
        example_flops=sequence, prepare=questions.begin,
    )  # fmt: skip

    # ---- What it has learned ---------------------------------------------------------------------
    print0(*language.messages.results(metrics, rows))
    print0(*picture_answers.in_words(metrics))
    questions.show(state)
    finish(folder, layout, log)
