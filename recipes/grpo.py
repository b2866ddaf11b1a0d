"""Tunes a language model by rewards of its own answers: GRPO and its successors.

    python -m recipes.grpo                                           # a laptop: Python that parses
    python -m recipes.grpo --restore_from=hf:DIR --dataset=prompts.jsonl --reward=reward.py:reward
    python -m recipes.grpo --loss=dapo --mask_cut --restore_from=runs/sft --dataset=hf:NAME --lora_rank=8

A step answers some prompts, several times each, under rules of its own (--sample_rules); rewards are
a user's functions; the gradient raises the probability of answers that are better than others to the
same prompt. Running the same command again resumes. The result is a checkpoint like any other.
"""

import dataclasses
import math
from typing import Any

from data import questions
from recipes.common import checkpoint, entries, language
from recipes.common.checkpoint import flags_of, open_run, probe
from recipes.common.flags.config_flags import configure, describe_set
from recipes.common.generation.rollouts import Sampler, sampling_layout
from recipes.common.language import DECODER, Training
from recipes.common.preference.preference_flags import STORED, Reference
from recipes.common.preference.reference import describe, frozen_start
from recipes.common.reinforcement.losses import PolicyLoss
from recipes.common.reinforcement.objective import Objective
from recipes.common.reinforcement.online import Online
from recipes.common.reinforcement.rewards import RewardFlags, Rewards
from recipes.common.reinforcement.rollout_flags import Rollout
from recipes.common.reinforcement.rows import Packing
from recipes.common.report import flops, kernel
from recipes.common.report.report import size
from recipes.common.runtime import Run, UserError, make_mesh, print0
from recipes.common.runtime.flags import refuse_unused
from recipes.common.runtime.start import start
from recipes.common.sharding import Layout, make_layout
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
    Run(steps=40, batch_size=64, learning_rate=3e-4, schedule="constant", eval_every=10),
    Rollout(), MODEL, PolicyLoss(), RewardFlags(), Reference(), Training(warmup_steps=4),
)  # fmt: skip


def main(
    run: Run, rollout: Rollout, flags: Any, loss: PolicyLoss, reward: RewardFlags, ref: Reference,
    training: Training,
) -> PlannedStep | None:  # fmt: skip
    # ---- Model and mesh: checked together before anything is allocated or written ----------------
    rollout.check(run.batch_size)
    mesh = make_mesh(run.mesh)
    run = dataclasses.replace(
        run, workdir=run.workdir or "runs/grpo", restore_from=started_from(run)
    )
    entry = language.decoder_of(run.restore_from)
    folder = open_run(entry, run, rollout, flags, loss, reward, ref, training, recipe=probe.ANSWERS)
    tokenizer = checkpoint.tokenizer_for(rollout.tokenizer, folder.start)
    assert folder.start
    config = configure(checkpoint.config_of(folder.start), flags, mesh.devices.flat[0])
    config = language.for_another_loss(config)
    if "capacity" in vars(config):
        config = dataclasses.replace(config, capacity=None)  # a generator drops no choice either
    model = entries.model(entry)
    layout = make_layout(
        model, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
        seq_len=rollout.pack_len or rollout.seq_len,
    )  # fmt: skip
    check_step(layout, training)

    # ---- The sampler, under rules of its own, and the reference, if --kl asks for one ------------
    if rollout.replay_routes:
        check_routes(layout)
    sampling = sampling_layout(model, layout, rollout.sample_rules)
    sampler = Sampler(
        layout=sampling,
        end=tokenizer.end,
        vocabulary=tokenizer.vocabulary,
        new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        seed=run.seed,
        slots=rollout.sample_slots,
        keeps_experts=rollout.replay_routes,
    )
    sampler.check(rollout.longest_prompt)
    reference = None
    if loss.kl and ref.reference == STORED:
        raise UserError(
            "--reference=stored needs answers that are there before the run; use --reference=copy"
        )
    if loss.kl:
        reference = frozen_start(ref, layout, model, folder, run, rows=run.batch_size)
    else:
        refuse_unused(ref, vars(ref), "a reference, and --kl=0 has none", "add --kl=0.01")
    packing = None
    if rollout.pack_len:
        shards = math.lcm(layout.batch_shards, reference.layout.batch_shards if reference else 1)
        packing = Packing(
            rollout.pack_len, rollout.seq_len, run.batch_size, shards * training.accumulate
        )
        layout = dataclasses.replace(layout, batch_size=packing.most_rows)
    copy = reference if reference and not reference.shares_weights else None
    about = f"Samples with rules {sampling.strategy}.", *describe(reference, ref)
    if run.plan:
        answers = run.batch_size * rollout.updates
        weights, cache = map(size, sampler.bytes_per_device(answers, rollout.longest_prompt))
        about = (
            *about,
            f"While it samples, a device also has weights of {weights} and a cache of {cache}.",
        )
        return PlannedStep(layout, training, reference and reference.in_plan, notes=about)

    # ---- Prompts and rewards; batch k is a function of (seed, k) and the state before it ---------
    asked = questions.load(
        rollout.dataset, rollout.longest_prompt, tokenizer, rollout.eval_dataset, rollout.as_chat
    )
    print0(
        *asked.notes,
        *kernel.report(layout, layout.seq_len, packing is not None),
        *describe_set(flags),
        *about,
    )

    # ---- Step, state and training ----------------------------------------------------------------
    objective = Objective(
        loss,
        rollout.max_new_tokens,
        rollout.temperature,
        reference.layout if reference else None,
        packing.most_answers if packing else 1,
    )
    trained = dataclasses.replace(layout, model=layout.model._replace(loss=objective))
    step = make_step(
        trained,
        dataclasses.replace(run, steps=run.steps * rollout.updates),
        dataclasses.replace(training, warmup_steps=training.warmup_steps * rollout.updates),
    )
    online = Online(
        flags=rollout,
        loss=loss,
        layout=layout,
        sampler=sampler,
        questions=asked,
        rewards=Rewards(reward),
        tokenizer=tokenizer,
        folder=folder,
        batch_size=run.batch_size,
        seed=run.seed,
        packing=packing,
        train_step=step if packing else None,
    )
    row = rollout.updates * flops.decoder(layout.shape, rollout.seq_len)["causal"]
    data = online.dataset()
    if reference:
        data = data._replace(facts=data.facts | {"frozen": reference.key})
    try:
        _, log, metrics = fit(
            run, folder, step, data, tokenizer, example_flops=row, frozen=copy, online=online
        )
    finally:
        online.rewards.close()

    # ---- What it has learned ---------------------------------------------------------------------
    means = online.metrics(metrics)
    print0(
        f"Held-out {', '.join(f'{name} {x:.4f}' for name, x in means.items() if name != 'loss')}.",
        *few(float(metrics["reward"][1]), "prompts"),
        *filter(None, [online.times()]),
    )
    finish(folder, layout, log)


def check_routes(layout: Layout) -> None:
    """Raises UserError if --replay_routes has nothing to replay, or stages to replay it in."""
    if not vars(layout.config).get("num_experts"):
        raise UserError(
            "--replay_routes is for models with experts, and this one has none; leave it out"
        )
    layout.check_whole("--replay_routes")


def started_from(run: Run) -> str:
    """The checkpoint that the run starts from, or started from before it was stopped."""
    return run.restore_from or flags_of("grpo", run.workdir).get("restore_from") or START


def defaults(run: Run, *groups: Any) -> tuple:
    """Flag defaults for this command line: smaller steps for a model of your own."""
    if started_from(run) == START:
        return NEW
    lr = 1e-5 if groups[1].lora_rank else 1e-6
    before = flags_of("grpo", run.workdir).get("learning_rate", lr)
    return dataclasses.replace(NEW[0], learning_rate=before), *NEW[1:]


if __name__ == "__main__":
    start(main, *NEW, defaults=defaults)
