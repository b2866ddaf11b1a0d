"""Tunes a language model by preferences: pairs of a chosen and a rejected answer to a prompt.

    python -m recipes.dpo                                            # a laptop: the zoo's 3M model
    python -m recipes.dpo --restore_from=hf:DIR --dataset=pairs.jsonl --lora_rank=8
    python -m recipes.dpo --loss=simpo --beta=2 --restore_from=runs/sft --dataset=pairs.parquet

The checkpoint decides the model, any decoder of the zoo, and is the reference that --loss=dpo and ipo
keep it near. Running the same command again resumes. The result is a checkpoint like any other.
"""

import dataclasses
from typing import Any

from recipes.common import checkpoint, entries, language
from recipes.common.checkpoint import flags_of, open_run, probe
from recipes.common.flags.config_flags import configure, describe_set
from recipes.common.language import DECODER, Training
from recipes.common.preference import reference as references
from recipes.common.preference.losses import Loss
from recipes.common.preference.objective import Objective
from recipes.common.preference.preference_flags import STORED, Pairs, Reference
from recipes.common.preference.stored import with_reference
from recipes.common.report import flops, kernel
from recipes.common.runtime import Run, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.tasks.classification import few
from recipes.common.train.checks import check_step
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from zoo.llama_relatives import Config

START = "transformer.stdlib_3m"  # where the bare command starts


# The flags of the model: how to compute it, and its adapters. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, (), Config.REMAT)
NEW = (
    Run(steps=60, batch_size=8, learning_rate=3e-4, eval_every=20), Pairs(), MODEL, Loss(),
    Reference(), Training(warmup_steps=6),
)  # fmt: skip


def main(
    run: Run, data: Pairs, flags: Any, loss: Loss, ref: Reference, training: Training,
) -> PlannedStep | None:  # fmt: skip
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    mesh = make_mesh(run.mesh)
    run = dataclasses.replace(
        run, workdir=run.workdir or "runs/dpo", restore_from=started_from(run)
    )
    entry = language.decoder_of(run.restore_from)
    folder = open_run(entry, run, data, flags, loss, ref, training, recipe=probe.PAIRS)
    tokenizer = checkpoint.tokenizer_for(data.tokenizer, folder.start)
    assert folder.start
    config = configure(checkpoint.config_of(folder.start), flags, mesh.devices.flat[0])
    config = language.for_another_loss(config)
    model = entries.model(entry)
    layout = make_layout(
        model, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=data.seq_len,
    )  # fmt: skip
    check_step(layout, training)

    # ---- The reference: the model without its adapter, a frozen copy, or stored numbers ----------
    reference = references.choose(loss, ref, layout, model, folder, run)
    objective = Objective(loss, reference.layout if reference else None)
    if run.plan:
        answers = dataclasses.replace(layout, batch_size=2 * run.batch_size)
        frozen = reference.in_plan if reference and ref.reference != STORED else None
        notes = references.describe(reference, ref)
        return PlannedStep(answers, training, frozen, notes)

    # ---- Data: batch k is a pure function of (seed, k); a row is a pair --------------------------
    dataset = data.load(tokenizer, labelled=loss.loss == probe.LABELLED)
    print0(*dataset.notes, *kernel.report(layout, data.seq_len, False), *describe_set(flags))
    print0(*language.messages.without_effect(layout, flags), *references.describe(reference, ref))
    if reference:
        dataset = dataset._replace(facts=dataset.facts | {"frozen": reference.key})
    if reference and ref.reference == STORED:
        dataset = with_reference(dataset, objective, layout, reference)
        reference = None

    # ---- Step, state and training ----------------------------------------------------------------
    layout = dataclasses.replace(layout, model=layout.model._replace(loss=objective))
    step = make_step(layout, run, training)
    pair = 2 * flops.decoder(layout.shape, data.seq_len)["causal"]
    if reference:
        pair += 2 * flops.decoder(reference.layout.shape, data.seq_len)["causal"] / 3  # forward
    copy = reference if reference and not reference.shares_weights else None
    _, log, metrics = fit(run, folder, step, dataset, tokenizer, example_flops=pair, frozen=copy)

    # ---- What it has learned ---------------------------------------------------------------------
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    print0(
        f"Held-out {', '.join(f'{name} {mean:.4f}' for name, mean in means.items())}.",
        *few(float(metrics["accuracy"][1]), "pairs"),
    )
    finish(folder, layout, log)


def started_from(run: Run) -> str:
    """The checkpoint that the run starts from, or started from before it was stopped."""
    return run.restore_from or flags_of("dpo", run.workdir).get("restore_from") or START


def defaults(run: Run, *groups: Any) -> tuple:
    """Flag defaults for this command line: smaller steps for a model of your own."""
    started = started_from(run)
    if started == START:
        return NEW
    lr = 5e-5 if groups[1].lora_rank else 5e-6
    before = flags_of("dpo", run.workdir).get("learning_rate", lr)
    return dataclasses.replace(NEW[0], learning_rate=before), *NEW[1:]


if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
