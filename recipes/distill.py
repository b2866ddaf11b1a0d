"""Trains a small language model with a larger one as its teacher, each under its own sharding rules.

    python -m recipes.distill                               # a laptop: 3.2M parameters teach 0.85M
    python -m recipes.distill --alpha=0 --workdir=runs/alone   # the same student without a teacher
    python -m recipes.distill --teacher=hf:BIG --restore_from=hf:SMALL --mesh=4x2 --teacher_rules=tp

The student learns the teacher's distribution of each next token beside the text. Running the same
command again resumes. The result is a checkpoint like any other.
"""

import dataclasses
from typing import Any

from recipes.common import checkpoint, entries, language
from recipes.common.checkpoint import WeightSource, open_run
from recipes.common.distillation.student_loss import Distillation, Distilling, check_vocabularies
from recipes.common.distillation.teacher_logits import with_teacher
from recipes.common.flags.config_flags import configure, describe_set
from recipes.common.language import DECODER, Text, Training
from recipes.common.report import flops, kernel
from recipes.common.runtime import Run, UserError, make_mesh, print0
from recipes.common.runtime.flags import choose, refuse_unused
from recipes.common.runtime.start import start
from recipes.common.sharding import Layout, make_layout
from recipes.common.sharding.rules import check_batch
from recipes.common.train.checks import check_stages, check_step
from recipes.common.train.evaluation import in_words
from recipes.common.train.frozen import Frozen
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from zoo.llama_relatives import Config

# The flags of the student: how to compute it, and its adapters. --set reaches the others.
MODEL = language.model_flags(Config, DECODER, (), Config.REMAT)
NEW = (
    Run(steps=200, batch_size=16, learning_rate=4e-3), Text(), MODEL, Distillation(), Training()
)  # fmt: skip


def main(
    run: Run, text: Text, flags: Any, distillation: Distillation, training: Training
) -> PlannedStep | None:
    # ---- Teacher, student and mesh: checked together before anything is allocated or written -----
    mesh = make_mesh(run.mesh)
    run = dataclasses.replace(run, workdir=run.workdir or "runs/distill")
    source = checkpoint.find(distillation.teacher, "--teacher", run.verify)
    entry, size = entry_and_size(run, distillation)
    folder = open_run(entry, run, text, flags, distillation, training, recipe="distill")
    tokenizer = checkpoint.tokenizer_for(text.tokenizer, source)
    if folder.start:
        checkpoint.tokenizer_for(text.tokenizer or "", folder.start)
        config = checkpoint.config_of(folder.start)
    else:
        words = source.metadata["config"].get("vocab_size", tokenizer.size)
        config = dataclasses.replace(entries.sizes(entry)[size](), vocab_size=words)
    config = language.for_another_loss(configure(config, flags, mesh.devices.flat[0]))
    layout = make_layout(
        entries.model(entry), config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=text.seq_len,
    )  # fmt: skip
    check_step(layout, training)
    teacher = frozen_teacher(source, layout, distillation) if distillation.alpha else None
    live = (
        None if distillation.teacher_logits else teacher
    )  # whose forward pass is part of the step
    about = f"Teacher: {teacher or 'none, because of --alpha=0'}."
    if run.plan:
        return PlannedStep(layout, training, live and live.in_plan, notes=[about])

    # ---- Data: batch k is a pure function of (seed, k) -------------------------------------------
    corpus = text.load(tokenizer, run.seed)
    packed = "segment_ids" in corpus.filler
    print0(*corpus.notes, *kernel.report(layout, text.seq_len, packed), *describe_set(flags))
    print0(*language.messages.without_effect(layout, flags), about)

    # ---- Step, state and training: the teacher is "frozen" in the state --------------------------
    sequence = flops.decoder(layout.shape, text.seq_len)["causal"]
    if teacher:
        distilling = Distilling(distillation, teacher.layout)
        if distillation.teacher_logits:
            corpus = with_teacher(corpus, distilling, layout, teacher)
        else:
            sequence += flops.decoder(teacher.layout.shape, text.seq_len)["causal"] / 3  # forward
        corpus = corpus._replace(facts=corpus.facts | {"frozen": teacher.key})
        layout = dataclasses.replace(layout, model=layout.model._replace(loss=distilling))
    step = make_step(layout, run, training)
    _, log, metrics = fit(run, folder, step, corpus, tokenizer, example_flops=sequence, frozen=live)

    # ---- What it has learned ---------------------------------------------------------------------
    print0(f"Held-out {in_words(metrics, corpus.held_out_bytes)}.")
    if teacher:
        apart, count = metrics["divergence"]
        print0(f"Held-out divergence from the teacher: {apart / count:.4f} nats/token.")
    finish(folder, layout, log)


def entry_and_size(run: Run, flags: Distillation) -> tuple[str, str]:
    """The student's entry, and its size if it is new. Raises UserError if there is no such student."""
    if run.restore_from:
        use = f"a new student, and --restore_from={run.restore_from} is a trained one"
        refuse_unused(flags, ("student",), use)
        return checkpoint.find(run.restore_from, hash_files=False).metadata["entry"], ""
    entry, _, size = flags.student.partition(".")
    texts = [name for name, one in entries.ENTRIES.items() if one.data == "data.text"]
    entry = choose("student", entry, texts)
    return entry, choose("student", size, entries.sizes(entry))


def frozen_teacher(source: WeightSource, layout: Layout, flags: Distillation) -> Frozen:
    """The teacher on the student's mesh, under its own rules. Raises UserError if it doesn't fit."""
    entry, dtype = source.metadata["entry"], flags.teacher_dtype
    if entries.ENTRIES.get(entry, entries.ENTRIES["mlp"]).data != "data.text":
        raise UserError(
            f"--teacher={flags.teacher} is a {entry!r} model, which teaches no text; use a language model"
        )
    changes = {"dtype": dtype or layout.config.dtype}
    if "mtp_depth" in source.metadata["config"]:
        changes["mtp_depth"] = 0
    try:
        its = checkpoint.layout_of(
            source, layout.mesh, flags.teacher_rules, seq_len=layout.seq_len, **changes
        )
        check_batch(its.strategy, its.rules, its.mesh, layout.batch_size)
        if its.stages > 1:
            check_stages(its, accumulate=1)
    except UserError as error:
        raise UserError(str(error).replace("--rules", "--teacher_rules")) from None
    check_vocabularies(its.config, layout.config, flags)
    checkpoint.check_variables(source, its)
    return Frozen(dataclasses.replace(its, batch_size=layout.batch_size), source, dtype)


if __name__ == "__main__":
    start(main, *NEW)
