"""The recipe of every language model. Read `main` from top to bottom: it is the whole run."""

import dataclasses
from collections.abc import Callable
from typing import Any

from data.tokenizer import Tokenizer
from recipes.common import checkpoint, contexts, entries
from recipes.common.checkpoint import Source, flags_of, open_run
from recipes.common.config_flags import check_vocabulary, configure, describe_set
from recipes.common.language.flags import Text, Training
from recipes.common.language.sample import Sample, prompt_of_row
from recipes.common.report import flops, kernel
from recipes.common.report.plan import plan
from recipes.common.runtime import Run, UserError, describe, make_mesh, print0
from recipes.common.sharding import Layout, Tree, make_layout
from recipes.common.sharding.rules import count_shards
from recipes.common.train.evaluation import in_words
from recipes.common.train.loop import finish, fit
from recipes.common.train.offload import check_offload
from recipes.common.train.optimizer import LearningRate, decaying, hidden_matrices, make_optimizer
from recipes.common.train.step import TrainStep
from zoo.parallel.pipeline import microbatches, rounds, ticks

LEARNED_POSITIONS = (
    "note: learned positions count from a row's start, so a row's second document continues those of the "
    "first. A program that numbers each document's from 0 trains others."
)


def main(
    entry: str,
    run: Run,
    text: Text,
    flags: Any,
    training: Training,
    sample: Sample | None = None,
    extra: Callable[..., Tree] | None = None,
) -> None:
    """Trains a language model, evaluates it and prints a sample of its writing.

    Args:
      entry: the model's name in entries.py.
      flags: of the model, from model_flags.
      sample: None for a model that writes no text.
      extra: more sums of an evaluation, as in `fit`.
    """
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh = make_mesh(run.mesh)
    samples = (sample,) if sample else ()
    folder = open_run(entry, run, text, flags, training, *samples)  # what to resume or start from
    tokenizer = checkpoint.tokenizer_for(text.tokenizer, folder.start)
    config = model_config(entry, flags, folder.start, tokenizer, mesh.devices.flat[0])
    if sample:
        sample.begin(tokenizer)  # raises if the tokenizer has no chat template
    model = entries.model(entry)  # a class, such as zoo.transformer.Transformer
    layout = make_layout(  # a NamedSharding for every array: logical axes → rules → mesh axes
        model, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=text.seq_len,
    )  # fmt: skip
    kernel.check(layout)
    check_heads(layout)
    check_stages(layout, training.accumulate)
    check_offload(layout, training.offload)
    if sample and sample.sample_rules:
        sample.layout(model, layout, text.seq_len)  # raises if they can't generate
    if run.plan:
        long = contexts.beyond(entry, flags.size, text.seq_len)
        return print0(
            *long, *plan(layout, training.accumulate, training.offload, training.optimizer)
        )

    # ---- Data: batch k is a pure function of (seed, k), on any mesh and number of processes ------
    corpus = text.load(tokenizer, run.seed)
    is_packed = "segment_ids" in corpus.filler
    if is_packed and layout.shape.max_positions is not None:
        print0(LEARNED_POSITIONS)
    print0(*corpus.notes, *kernel.report(layout, text.seq_len, is_packed))
    print0(
        *kernel.experts(layout),
        *kernel.matmul(layout),
        *stages(layout, training.accumulate),
        *describe_set(flags),
    )

    # ---- Step: (state, batch) → (state, metrics), a pure function --------------------------------
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

    # ---- State and training: compiled once for the layout, each shard made on its own device -----
    sequence = flops.decoder(layout.shape, text.seq_len)["causal"]
    extra = extra if layout.stages == 1 else None  # it calls the model, which stages can't
    state, log, metrics = fit(
        run, folder, step, corpus, tokenizer, extra=extra, example_flops=sequence
    )

    # ---- What it has learned ---------------------------------------------------------------------
    print0(f"Held-out {in_words(metrics, corpus.held_out_bytes)}.")
    if "dropped" in metrics:
        print0(use_of_experts(metrics))
    if sample and sample.sample_bytes and layout.stages > 1 and not sample.sample_rules:
        print0(
            f"No sample: {layout.stages} stages of layers can't generate; --sample_rules=fsdp, for example, can."
        )
    elif sample and sample.sample_bytes:
        written = sample.write(
            model, layout, state, tokenizer, context=text.seq_len, seed=run.seed,
            held_out=prompt_of_row(corpus.held_out[0]),
        )  # fmt: skip
        print0(*written.lines)
        if folder.in_use and folder.last_good():
            sample.save(folder.path / "sample.json", state, written)
    finish(folder, layout, log)


def model_config(
    entry: str,
    flags: Any,
    start: Source | None,
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


def check_heads(layout: Layout) -> None:
    """Raises UserError if --context=all-to-all has more shards than heads."""
    heads, sizes = layout.config.num_heads, layout.mesh.shape
    parts = count_shards(layout.rules, "heads", sizes) * layout.seq_shards
    if layout.config.context == "all-to-all" and heads % parts:
        raise UserError(
            f"--context=all-to-all shares out {heads} heads over {parts} devices (rules "
            f"{layout.strategy!r} on --mesh={describe(sizes)}); use --context=ring"
        )


def for_another_loss(config: Any) -> Any:
    """The config of a model whose outputs a recipe compares before it has a loss.

    The head for the second-next token is left out, and stages run all microbatches forward first.
    """
    changes = {"pipeline": "gpipe", "pipe_rounds": type(config).pipe_rounds}
    changes |= {"mtp_depth": 0} if "mtp_depth" in vars(config) else {}
    return dataclasses.replace(config, **changes)


def check_stages(layout: Layout, accumulate: int) -> None:
    """Raises UserError if flags of a pipeline don't fit its schedule, or its microbatches the batch.

    `make_layout` has checked that the stages fit the layers.
    """
    config, parts, mesh = layout.config, layout.stages, describe(layout.mesh.shape)
    wanted = config.pipe_microbatches
    if config.pipe_rounds not in (rounds(config), type(config).pipe_rounds):
        raise UserError(
            f"--pipe_rounds={config.pipe_rounds} is for --pipeline=interleaved, and not for "
            f"{config.pipeline}; leave it out, or use --pipeline=interleaved"
        )
    if parts == 1:
        if wanted:
            raise UserError(
                f"--pipe_microbatches={wanted} is for a pipeline, and rules {layout.strategy!r} on "
                f"--mesh={mesh} have none; use --pipe_microbatches=0, or a mesh with `pipe`"
            )
        return
    if layout.shape.mtp_layers:
        raise UserError(
            f"--mesh={mesh} has {parts} stages of layers, and mtp_depth=1 has a layer after the last "
            "stage; use --mtp_depth=0, or a mesh without `pipe`"
        )
    rows = rows_of_a_device(layout, accumulate)
    if wanted and rows % wanted:
        raise UserError(
            f"--pipe_microbatches={wanted} does not divide the {rows} rows of a device; use a divisor"
        )


def rows_of_a_device(layout: Layout, accumulate: int) -> int:
    return layout.batch_size // accumulate // layout.batch_shards


def stages(layout: Layout, accumulate: int) -> list[str]:
    """A line of the report about the pipeline, if there is one."""
    if (S := layout.stages) == 1:
        return []
    M = microbatches(layout.config, rows_of_a_device(layout, accumulate), S)
    v = rounds(layout.config)
    schedule = layout.config.pipeline + (f" in {v} rounds" if v > 1 else "")
    bubble = 1 - v * M / ticks(M, S, v)
    return [f"pipeline: {schedule}, {S} stages, {M} microbatches, bubble {bubble:.1%}"]


def use_of_experts(metrics: Tree) -> str:
    """A line on how evenly the experts are used, and on choices that were dropped.

    Args:
      metrics: held-out, name → (sum, count).
    """
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    loads = [value for name, value in means.items() if name.startswith("load_")]
    each = f" ({', '.join(f'{load:.2f}' for load in loads)})" if len(loads) <= 16 else ""
    return (
        f"Use of the {len(loads)} experts, in even shares: {min(loads):.2f} to {max(loads):.2f}{each}; "
        f"no room for {means['dropped']:.2%} of what was chosen."
    )


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
