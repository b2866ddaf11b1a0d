"""The recipe of every language model. Read `main` from top to bottom: it is the whole run."""

import dataclasses
from collections.abc import Callable
from typing import Any

from data.tokenizer import Tokenizer
from recipes.common import checkpoint, entries
from recipes.common.checkpoint import WeightSource, flags_of, open_run
from recipes.common.flags.config_flags import check_vocabulary, configure
from recipes.common.language import messages
from recipes.common.language.sample import Sample
from recipes.common.language.text_flags import Text, Training
from recipes.common.report import contexts, flops
from recipes.common.runtime import Run, UserError, make_mesh, print0
from recipes.common.sharding import Tree, make_layout
from recipes.common.train.checks import check_step
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step


def main(
    entry: str,
    run: Run,
    text: Text,
    flags: Any,
    training: Training,
    sample: Sample | None = None,
    extra: Callable[..., Tree] | None = None,
) -> PlannedStep | None:
    """Trains a language model, evaluates it and prints a sample of its writing.

    Args:
      entry: the model's name in entries.py.
      flags: of the model, from model_flags.
      sample: None for a model that writes no text.
      extra: more sums of an evaluation, as in `fit`.
    """
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh = make_mesh(run.mesh)
    groups = (run, text, flags, training, *([sample] if sample else []))
    folder = open_run(entry, *groups)  # what to resume or start from
    tokenizer = checkpoint.tokenizer_for(text.tokenizer, folder.start)
    config = model_config(entry, flags, folder.start, tokenizer, mesh.devices.flat[0])
    model = entries.model(entry)  # a class, such as zoo.transformer.Transformer
    layout = make_layout(  # a NamedSharding for every array: logical axes → rules → mesh axes
        model, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=text.seq_len,
    )  # fmt: skip
    check_step(layout, training)
    if sample:
        sample.check(model, layout, tokenizer)
    if run.plan:
        print0(*contexts.beyond(entry, flags.size, text.seq_len))
        return PlannedStep(layout, training)

    # ---- Data: batch k is a pure function of (seed, k), on any mesh and number of processes ------
    corpus = text.load(tokenizer, run.seed)
    print0(*messages.before_training(layout, corpus, training, flags))

    # ---- Step: (state, batch) → (state, metrics), a pure function --------------------------------
    step = make_step(layout, run, training)

    # ---- State and training: compiled once for the layout, each shard made on its own device -----
    sequence = flops.decoder(layout.shape, text.seq_len)["causal"]
    extra = extra if layout.stages == 1 else None  # it calls the model, which stages can't
    writer = None
    if sample:
        writer = sample.writer(model, layout, tokenizer, corpus, seed=run.seed)
    state, log, metrics = fit(
        run, folder, step, corpus, tokenizer, extra=extra, example_flops=sequence,
        prepare=writer.begin if writer else None,
    )  # fmt: skip

    # ---- What it has learned ---------------------------------------------------------------------
    print0(*messages.results(metrics, corpus))
    if writer:
        writer.show(state, folder)
    finish(folder, layout, log)


def model_config(
    entry: str,
    flags: Any,
    start: WeightSource | None,
    tokenizer: Tokenizer,
    device: Any,
    change: Callable[[Any], Any] | None = None,
) -> Any:
    """The entry's Config: the architecture, and how to compute it.

    Args:
      start: the checkpoint that the run begins from, if any. It decides the architecture unless --size
        is given.
      device: one of the mesh's.
      change: makes of the size's or the checkpoint's Config one of another task.

    Raises UserError if the flags don't fit together.
    """
    if start and not flags.size:
        config = checkpoint.config_of(start)
        if entry == "bert" and config.task != "fill" and not change:
            raise UserError(
                f"{start.path} has no head that fills masks in, which --task=fill trains; use a "
                "…ForMaskedLM, or --size for a new model"
            )
    else:
        config = entries.sizes(entry)[flags.size or "small"]()
        if tokenizer.files:  # bytes use the size's own vocabulary
            config = dataclasses.replace(config, vocab_size=tokenizer.size)
    config = change(config) if change else config
    config = configure(config, flags, device)
    check_vocabulary(config.vocab_size, tokenizer.size)
    return config


def decoder_of(restore_from: str) -> str:
    """The entry of a checkpoint. Raises UserError if it is no language model."""
    entry = checkpoint.find(restore_from, hash_files=False).metadata["entry"]
    if entry in entries.ENTRIES and entries.ENTRIES[entry].data != "data.text":
        raise UserError(
            f"--restore_from={restore_from} is a {entry!r} model, which writes no answers; use a "
            "language model"
        )
    return entry


def for_another_loss(config: Any) -> Any:
    """The config of a model whose outputs a recipe compares before it has a loss.

    The head for the second-next token is left out, and stages run all microbatches forward first.
    """
    changes = {"pipeline": "gpipe", "pipe_rounds": type(config).pipe_rounds}
    changes |= {"mtp_depth": 0} if "mtp_depth" in vars(config) else {}
    return dataclasses.replace(config, **changes)


Groups = tuple[Any, ...]  # a recipe's flags: Run, Text, of the model, Training, Sample


def fine_tuning(entry: str, new: Groups, run: Run, _, flags: Any, *__) -> Groups:
    """Flag defaults for this command line; fine-tuning lowers the learning rate and warmup.

    Args:
      new: defaults for training a new model.
      run, flags: parsed with those defaults.
    """
    before = flags_of(entry, run.workdir)
    if not run.steps or not (run.restore_from or before.get("restore_from")):
        return new
    new_run, text, model, training, *sample = new
    # A new model's learning rate would undo what the parameters have learned.
    lr = 5e-4 if flags.lora_rank else 5e-5
    # A warmup of one step would be a step with a learning rate of 0.
    warmup = min(training.warmup_steps, run.steps // 10) if run.steps >= 20 else 0
    # A resumed run keeps the values that it began with, whatever --steps is now.
    lower_run = dataclasses.replace(new_run, learning_rate=before.get("learning_rate", lr))
    lower_training = dataclasses.replace(training, warmup_steps=before.get("warmup_steps", warmup))
    return lower_run, text, model, lower_training, *sample
