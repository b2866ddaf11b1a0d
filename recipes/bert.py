"""Trains a text encoder, sharded over any mesh: to fill masked tokens in, to classify or to compare texts.

    python -m recipes.bert --mesh=4x2                     # a laptop: 8 simulated devices
    python -m recipes.bert --mesh=4x2 --size=bert_base --tokenizer=DIR --dataset=texts.jsonl
    python -m recipes.bert --task=classify --restore_from=hf:DIR --dataset=labelled.jsonl
    python -m recipes.bert --task=embed --restore_from=runs/bert --dataset=pairs.parquet

Running the same command again resumes. The default model has ModernBERT's form.
"""

import dataclasses
import functools
from typing import Any

from data import labelled, masked, similar, sources
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common import checkpoint, language
from recipes.common.checkpoint import open_run
from recipes.common.flags.config_flags import check_set, describe_set, read_set
from recipes.common.language import DECODER, Text, Training
from recipes.common.report import flops, kernel
from recipes.common.runtime import Run, UserError, flag, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.sharding.abstract import Phases
from recipes.common.tasks.classification import confusion, few, show
from recipes.common.tasks.text_encoders import (
    PairLoss,
    class_logits,
    count_right,
    for_task,
    task_of,
)
from recipes.common.train.checks import check_step
from recipes.common.train.loop import finish, fit
from recipes.common.train.new_parts import NewParts
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from zoo.bert import TASKS, Bert, Config
from zoo.parts.pairs import EXCHANGES
from zoo.sizes import BERT as SIZES


@dataclasses.dataclass(frozen=True)
class EncoderText(Text):
    """Flags of the task and of its text."""

    task: str = flag(
        "", "What to train: fill (masked tokens in), classify (labelled texts) or embed (pairs of texts); "
        "empty: as the checkpoint, or fill.", "data", choices=["", *TASKS],
    )  # fmt: skip
    mask_rate: float = flag(
        0.15, "Share of the tokens to fill in.", "data", at_least=0.01, at_most=1.0
    )
    pair_column: str = flag(
        "", "Column of a row's second text, to classify two texts; empty: text_pair, hypothesis, sentence2 and "
        "others beside their first text.", "data",
    )  # fmt: skip
    label_column: str = flag("label", "Column of labels, names or numbers, to classify.", "data")
    anchor_column: str = flag("anchor", "Column of the first texts of pairs, to embed.", "data")
    positive_column: str = flag("positive", "Column of the texts that mean the same.", "data")
    negative_column: str = flag(
        "negative", "Column of texts that mean something else, if rows have one.", "data"
    )
    scale: float = flag(
        20.0, "Factor of cosines, to embed: 1 / temperature.", "data", at_least=0.01
    )
    pairs: str = flag(
        "gather", "How texts to embed meet those of other devices; local: not at all, another loss.",
        "data", choices=EXCHANGES,
    )  # fmt: skip

    def load(self, tokenizer: Tokenizer, seed: int) -> Dataset:
        sources.check_column(self.text_column, self.dataset, self.eval_dataset)
        return masked.load(
            self.dataset, self.text_column, self.seq_len, tokenizer, self.pack, self.eval_dataset,
            self.mask_rate, seed,
        )  # fmt: skip

    def load_whole(self, tokenizer: Tokenizer, config: Config) -> Dataset:
        """Loads labelled texts, or pairs. `config`: the model's, with a checkpoint's labels."""
        of_both = (self.seq_len, tokenizer, self.eval_dataset)
        if self.task == "classify":
            columns = (self.text_column, self.label_column)
            types = config.token_types > 1
            return labelled.load(
                self.dataset, *columns, *of_both, config.labels, self.pair_column, types
            )
        columns = (self.anchor_column, self.positive_column)
        return similar.load(self.dataset, *columns, *of_both, self.negative_column)


OF_TASKS = {  # flag → the tasks that it is for; all others are for every task
    "mask_rate": ("fill",), "pack": ("fill",), "text_column": ("fill", "classify"),
    "pair_column": ("classify",), "label_column": ("classify",), "anchor_column": ("embed",), "positive_column": ("embed",),
    "negative_column": ("embed",), "scale": ("embed",), "pairs": ("embed",),
}  # fmt: skip


# The flags of the model: a Config's fields that are set most often. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, SIZES, Config.REMAT)
NEW = (Run(steps=600, batch_size=16, learning_rate=4e-3), EncoderText(), MODEL, Training())
WHOLE = (Run(steps=300, batch_size=32, learning_rate=2e-3), *NEW[1:])  # to classify or embed


def main(run: Run, text: EncoderText, flags: Any, training: Training) -> PlannedStep | None:
    task = task_of(text.task, run)
    read_set(Config, flags.set, ("task",))  # raises: the task has a flag
    check_used(task, text)
    if task == "fill":  # like a language model: recipes/common/language/recipe.py
        text = dataclasses.replace(text, task="")
        return language.main("bert", run, text, flags, training, extra=count_right)

    # ---- Data: batch k is a pure function of (seed, k); labels decide the classes ----------------
    run = dataclasses.replace(run, workdir=run.workdir or f"runs/bert_{task}")
    text = dataclasses.replace(text, task=task)
    mesh, folder = make_mesh(run.mesh), open_run("bert", run, text, flags, training)
    tokenizer = checkpoint.tokenizer_for(text.tokenizer, folder.start)
    config = language.model_config(
        "bert", flags, folder.start, tokenizer, mesh.devices.flat[0],
        change=functools.partial(for_task, task=task),
    )  # fmt: skip
    texts = text.load_whole(tokenizer, config)
    has_negatives = "negative_tokens" in texts.filler
    if has_negatives and text.pairs == "local":
        raise UserError(
            "--pairs=local compares a device's own texts alone, and negatives are compared with all of the "
            "batch; use --pairs=gather"
        )
    check_set(flags, texts.config)
    config = dataclasses.replace(config, **texts.config)

    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    layout = make_layout(
        Bert, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=text.seq_len,
    )  # fmt: skip
    layout.check_whole(f"--task={task}")
    check_step(layout, training)
    if run.plan:
        texts_at_once = run.batch_size * (2 + has_negatives if task == "embed" else 1)
        layout = dataclasses.replace(layout, batch_size=texts_at_once)
        return PlannedStep(layout, training)
    print0(*texts.notes, *kernel.report(layout, text.seq_len, True), *kernel.matmul(layout))
    print0(*describe_set(flags))
    if folder.source:
        source = NewParts(folder.source, layout)
        if (new := source.new()) and config.lora_rank:
            raise UserError(
                f"--lora_rank={config.lora_rank} trains adapters alone, and {', '.join(new)} would be "
                "new; leave it out, or restore a model with this head"
            )
        folder = dataclasses.replace(folder, source=source)
        print0(*([f"New: {', '.join(new)}."] if new else []))

    # ---- The loss: of classes, or of all pairs of a batch on all devices -------------------------
    sequence = flops.decoder(layout.shape, text.seq_len)["causal"]
    if task == "classify":
        extra = confusion(len(config.labels), class_logits)
    else:
        loss = PairLoss(text.scale, text.pairs)
        extra, sequence = loss.count_found, (2 + has_negatives) * sequence
        phases = Phases(loss.embed, loss.compare)
        model = layout.model._replace(loss=loss, phases=phases)
        layout = dataclasses.replace(layout, model=model)

    # ---- Step, state and training ----------------------------------------------------------------
    step = make_step(layout, run, training)
    _, log, metrics = fit(run, folder, step, texts, tokenizer, extra=extra, example_flops=sequence)

    # ---- What it has learned ---------------------------------------------------------------------
    if task == "classify":
        show(folder, metrics, config.labels, "texts")
    else:
        (nats, count), (right, _) = metrics["loss"], metrics["accuracy"]
        print0(
            f"Held-out loss {nats / count:.4f} nats a pair; {right:.0f} of {count:.0f} texts are nearest to "
            f"their own partner among {min(run.batch_size, int(count)) * (1 + has_negatives)} "
            f"({right / count:.2%}).",
            *few(count, "pairs"),
        )
    finish(folder, layout, log)


def check_used(task: str, text: EncoderText) -> None:
    """Raises UserError for a flag of another task, which would have no effect."""
    for name, tasks in OF_TASKS.items():
        value = getattr(text, name)
        if task not in tasks and value != EncoderText.__dataclass_fields__[name].default:
            raise UserError(
                f"--{name}={value} is for --task={' and '.join(tasks)}, and this run's task is {task}; "
                "leave it out"
            )


def defaults(run: Run, text: EncoderText, *groups: Any) -> tuple:
    """Flag defaults for this command line: those of the task, and of fine-tuning."""
    if text.task in ("", "fill"):
        return language.fine_tuning("bert", NEW, run, text, *groups)
    run = dataclasses.replace(run, workdir=run.workdir or f"runs/bert_{text.task}")
    return language.fine_tuning("bert", WHOLE, run, text, *groups)


if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
