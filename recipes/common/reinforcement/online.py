"""Batches that the model itself makes: it answers prompts, the answers get rewards, and become rows.

Step k's answers depend on the state before it and on (seed, k, prompt, number) alone, so a resumed run
makes them again. Shapes: B answers, P prompts of a step, G answers of a prompt, T positions, N new tokens, W bytes of a bit
for each token of the vocabulary.
"""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from data.batches import Dataset
from data.questions import Question, Questions
from data.tokenizer import Tokenizer
from recipes.common.checkpoint import RunFolder
from recipes.common.generation.rollouts import Answers, Sampler
from recipes.common.reinforcement.losses import PolicyLoss
from recipes.common.reinforcement.rewards import Answered, Rewards
from recipes.common.reinforcement.rollout_flags import Rollout
from recipes.common.reinforcement.rows import Packing, answer_rows
from recipes.common.runtime import Stopped, processes, warn
from recipes.common.sharding import Layout, Tree
from recipes.common.sharding.move import move
from recipes.common.storage import folders, jsonl
from recipes.common.train.feed import to_devices
from recipes.common.train.step import TrainStep
from zoo.experts.replay import replaying
from zoo.options.log_probs import log_probs_and_metrics

EVALUATION = 2**32 - 1  # in place of a step's number, for the random numbers of held-out answers
# Dtype of activations → the largest mean difference between training and sampling, in nats a token, that
# rounding explains: see recipes/docs/precision.md. Experts that rounding chooses otherwise are included.
LARGEST_MISMATCH = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}


@dataclasses.dataclass(frozen=True)
class Online:
    """What `fit` takes for batches that the model makes: a feed, a step around the step, an evaluation.

    A step of the run is a rollout and its updates, so that a run resumes between rollouts.
    """

    flags: Rollout
    loss: PolicyLoss
    layout: Layout  # of training
    sampler: Sampler
    questions: Questions
    rewards: Rewards
    tokenizer: Tokenizer
    folder: RunFolder
    batch_size: int  # answers of an update
    seed: int
    packing: Packing | None = None
    train_step: TrainStep | None = None  # with packing, which compiles it for other numbers of rows
    _programs: dict[str, jax.stages.Compiled] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(  # phase → those of each step
        default_factory=lambda: {"sample": [], "reward": [], "train": []}
    )

    @property
    def answers(self) -> int:
        """B: answers of a rollout."""
        return self.batch_size * self.flags.updates

    def dataset(self) -> Dataset:
        """Facts about the rows, for `fit`; its examples are the prompts."""
        T = self.packing.length if self.packing else self.flags.seq_len
        filler = {
            "tokens": np.zeros(T, np.int32),
            "targets": np.full(T, -1, np.int32),
            "sampler_log_probs": np.zeros(T, np.float32),
            "advantage": np.zeros(T if self.packing else (), np.float32),
        }
        if self.packing:
            filler["segment_ids"] = np.zeros(T, np.int32)
        if self.sampler.truncates:
            filler["kept"] = np.zeros((T, self._bytes), np.uint8)
        if self.sampler.keeps_experts:
            shape = (T, *self.sampler.experts_of_position())
            filler["experts"] = np.zeros(shape, self.sampler.experts_dtype)
        if self.flags.updates > 1:
            filler["old_log_probs"] = np.zeros(T, np.float32)
        return Dataset(
            train=self.questions.train,  # type: ignore[arg-type]
            held_out=self.questions.held_out,  # type: ignore[arg-type]
            filler=filler,
            unit="tokens",
            units=self.flags.seq_len * self.flags.updates,
            config={},
            facts=self.questions.facts | {"rewards": self.rewards.names},
            notes=self.questions.notes,
        )

    @property
    def _bytes(self) -> int:
        """W."""
        return -(-self.layout.config.vocab_size // 8)

    # ---- training

    def feed(self, first: int) -> Iterator[tuple[int, float]]:
        """The number of each step, from `first` on: its batch is made from the state before it."""
        return ((k, 0.0) for k in itertools.count(first))

    def around(self, step: Callable[[Tree, Tree], tuple[Tree, Tree]]) -> Callable:
        """(state, the step's number) → (state, metrics), which makes the batch first."""
        mismatch: list[Any] = []
        updates = self.flags.updates

        def number(n: int) -> jax.Array:
            return jax.device_put(np.int32(n), self.layout.replicated)

        def with_rollout(state: Tree, k: int) -> tuple[Tree, Tree]:
            self._check_mismatch(k, mismatch)
            batches, measured = self.rollout(state, k)
            every = []
            start = time.perf_counter()
            for n, batch in enumerate(batches):
                jax.block_until_ready(every)  # simulated devices: at most two programs in flight
                # The learning rate follows the updates, the run counts rollouts.
                state, metrics = step(state | {"step": number(k * updates + n)}, batch)
                every.append(metrics)
            mismatch[:] = [every[0]["mismatch"]]
            means = {name: sum(x[name] for x in every) / updates for name in every[0]}
            jax.block_until_ready(state)  # the next rollout waits for it anyway
            measured["train_seconds"] = time.perf_counter() - start
            for phase, seconds in self.seconds.items():
                seconds.append(measured[f"{phase}_seconds"])
            return state | {"step": number(k + 1)}, means | measured

        self._begin_samples()
        return with_rollout

    def for_any_rows(self, step: Callable[[Tree, Tree], tuple[Tree, Tree]]) -> Callable:
        """The compiled step, also for fewer rows than it was compiled for."""

        def with_rows(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            rows = len(batch["tokens"])
            if not self.train_step or rows == self.layout.batch_size:
                return step(state, batch)
            if f"{rows} rows" not in self._programs:
                layout = dataclasses.replace(self.train_step.layout, batch_size=rows)
                abstract = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
                )
                fewer = dataclasses.replace(self.train_step, layout=layout)
                lowered = fewer.lower(abstract, self.dataset().filler)
                self._programs[f"{rows} rows"] = lowered.compile()
            return self._programs[f"{rows} rows"](state, batch)

        return with_rows

    def times(self) -> str:
        """The seconds of a step by phase, without those of a first step that compiles; "" without steps."""
        means = {name: float(np.mean(x[1:] or x)) for name, x in self.seconds.items() if x}
        if not means:
            return ""
        return (
            f"A step took {means['sample']:.2f} s to generate, {means['reward']:.2f} s for rewards and "
            f"{means['train']:.2f} s to train."
        )

    def _check_mismatch(self, k: int, mismatch: list[Any]) -> None:
        """Raises Stopped if the step before shows another model or text than was sampled from."""
        largest = LARGEST_MISMATCH[self.layout.dtype or "float32"]
        if mismatch and not (nats := float(mismatch[0])) <= largest:
            raise Stopped(
                f"after step {k}, training and sampling differ by {nats:.2e} nats a token, and rounding in "
                f"{self.layout.dtype} explains {largest:.0e}; python -m recipes.prove --generate=CHECKPOINT "
                "measures where that comes from"
            )

    def rollout(self, state: Tree, k: int) -> tuple[list[Tree], dict[str, float]]:
        """The batches of step k's updates on the devices, and metrics of its answers."""
        G = self.flags.group_size
        start = time.perf_counter()
        asked = self._prompts_of(k, self.answers // G)
        ids_B3 = np.array([(k, number, g) for number, _ in asked for g in range(G)])
        questions = [question for _, question in asked for _ in range(G)]
        variables = move(state, self.layout, self.sampler.layout)
        answers = self.sampler(variables, [q.tokens for q in questions], ids_B3)
        del variables
        sampled = time.perf_counter()
        texts, rewards_BF, failed = self._rewarded(questions, answers)
        rewarded = time.perf_counter()
        reward_B = rewards_BF @ np.array(self.rewards.weights)
        rewards_PG = reward_B.reshape(-1, G)
        is_even_P = np.ptp(rewards_PG, axis=1) == 0
        rows, sizes_B = answer_rows([q.tokens for q in questions], answers, self.flags.seq_len)
        rows["advantage"] = self.loss.advantages(rewards_PG).reshape(-1).astype(np.float32)
        written_B = (answers.tokens_BN >= 0).sum(axis=1)
        is_cut_B = ~self._ended(answers)
        if self.flags.mask_cut:
            rows["targets"][is_cut_B] = -1
        if self.loss.loss == "dapo":
            rows["targets"][np.repeat(is_even_P, G)] = -1
        self._show_samples(k, questions[:G], texts, rewards_BF[:G], is_cut_B)
        parts = [slice(n, n + self.batch_size) for n in range(0, self.answers, self.batch_size)]
        batches = [{name: x[part] for name, x in rows.items()} for part in parts]
        if self.packing:
            sizes = [sizes_B[part] for part in parts]
            batches = [self.packing(*x) for x in zip(batches, sizes, strict=True)]
        positions = sum(batch["tokens"].size for batch in batches)
        batches = [self._on_devices(batch) for batch in batches]
        if len(batches) > 1:
            batches = [batch | {"old_log_probs": self._old(state, batch)} for batch in batches]
        by_name = dict(zip(self.rewards.names, rewards_BF.mean(axis=0), strict=True))
        return batches, {
            "reward": reward_B.mean(),
            "reward_deviation": rewards_PG.std(axis=1).mean(),
            "no_variance": is_even_P.mean(),
            **({f"reward_{n}": x for n, x in by_name.items()} if len(by_name) > 1 else {}),
            "reward_errors": float(failed),
            "length": written_B.mean(),
            "cut": is_cut_B.mean(),
            "padding": 1 - sizes_B.sum() / positions,
            "entropy": answers.entropies_BN.sum() / written_B.sum(),
            "sample_seconds": sampled - start,
            "reward_seconds": rewarded - sampled,
        }

    def _on_devices(self, rows: dict[str, np.ndarray]) -> Tree:
        layout = dataclasses.replace(self.layout, batch_size=len(rows["tokens"]))
        own = layout.process_rows
        return to_devices({name: x[own] for name, x in rows.items()}, layout)

    def _old(self, state: Tree, batch: Tree) -> jax.Array:
        """Log-probabilities of a batch's answers by training's forward pass, before any update, [B, T]."""
        variables = {kind: state[kind] for kind in self.layout.model.shapes}
        names = ("tokens", "targets", "segment_ids", "kept", "experts")
        rows = {name: batch[name] for name in names if name in batch}

        def log_probs(variables, rows):
            model = self.layout.model.merge(variables)
            others = {key: x for key, x in rows.items() if key != "experts"}
            with replaying(model, rows.get("experts")):
                return log_probs_and_metrics(model, **others, temperature=self.flags.temperature)[0]

        name = f"old of {len(rows['tokens'])} rows"
        if name not in self._programs:
            self._programs[name] = self.layout.compile(
                log_probs, variables, rows, out_shardings=batch["sampler_log_probs"].sharding
            )
        return self._programs[name](variables, rows)

    def _prompts_of(self, k: int, count: int) -> list[tuple[int, Question]]:
        """The prompts of step k with their numbers: each epoch has all of them in an order of its own."""
        train = self.questions.train
        picked, orders = [], {}
        for i in range(k * count, (k + 1) * count):
            epoch, place = divmod(i, len(train))
            if epoch not in orders:
                orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(len(train))
            picked.append((int(orders[epoch][place]), train[orders[epoch][place]]))
        return picked

    def _ended(self, answers: Answers) -> np.ndarray:
        """Whether an answer ended before its limit, or with it, [B]."""
        return np.asarray(np.isin(answers.tokens_BN, self.sampler.end).any(axis=1))

    def _rewarded(
        self, questions: list[Question], answers: Answers
    ) -> tuple[list[str], np.ndarray, int]:
        """(texts, rewards [answers, functions], how many failed), computed by process 0."""
        end = np.array(self.sampler.end, np.int32)
        texts = []
        for question, tokens_N in zip(questions, answers.tokens_BN, strict=True):
            written = tokens_N[(tokens_N >= 0) & ~np.isin(tokens_N, end)]
            texts.append(self.tokenizer.decode(written, after=question.tokens))

        def compute() -> tuple[list[list[float]], int]:
            before = self.rewards.failed
            asked = [
                Answered(q.prompt, text, q.row, q.where)
                for q, text in zip(questions, texts, strict=True)
            ]
            return self.rewards(asked).tolist(), self.rewards.failed - before

        rewards, failed = processes.broadcast_from_first(compute)
        return texts, np.array(rewards, np.float64), failed

    # ---- evaluation

    def __call__(self, state: Tree) -> Tree:
        """Held-out metrics, name → (sum, count): one answer to each prompt, with random numbers of its own.

        "loss" is the negative reward, which --keep_best compares.
        """
        held_out = self.questions.held_out[: self.flags.eval_prompts]
        variables = move(state, self.layout, self.sampler.layout)
        by_name = [f"reward_{name}" for name in self.rewards.names]
        several = by_name if len(by_name) > 1 else []
        sums = dict.fromkeys(["reward", *several, "length", "cut", "loss"], 0.0)
        for first in range(0, len(held_out), self.batch_size):
            part = held_out[first : first + self.batch_size]
            asked = part + part[:1] * (self.batch_size - len(part))  # one program for all
            ids_B3 = np.array([(EVALUATION, first + b, 0) for b in range(len(asked))])
            answers = self.sampler(variables, [q.tokens for q in asked], ids_B3)
            answers = answers.first(len(part))
            _, rewards_BF, _ = self._rewarded(part, answers)
            reward = float((rewards_BF @ np.array(self.rewards.weights)).sum())
            sums["reward"] += reward
            for name, total in zip(by_name, rewards_BF.sum(axis=0).tolist(), strict=True):
                if several:
                    sums[name] += total
            sums["loss"] -= reward
            sums["length"] += float((answers.tokens_BN >= 0).sum())
            sums["cut"] += float((~self._ended(answers)).sum())
        count = np.float64(len(held_out))
        return {name: (np.float64(total), count) for name, total in sums.items()}

    def metrics(self, totals: Tree) -> dict[str, float]:
        return {name: float(total / count) for name, (total, count) in totals.items()}

    # ---- samples.jsonl

    def _begin_samples(self) -> None:
        """Drops lines of steps that the run takes again; only process 0 writes, and not into buckets."""
        path = self.folder.path / "samples.jsonl"
        if (
            not processes.is_first()
            or not folders.at(self.folder.path).appends
            or not path.exists()
        ):
            return
        kept = [line for line in jsonl.read(path) if line["step"] <= self.folder.step]
        folders.write(path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def _show_samples(self, k: int, questions, texts, rewards_GF, is_cut_B) -> None:
        """Appends the answers to a step's first prompt."""
        if not processes.is_first() or not self.folder.in_use:
            return
        if not folders.at(self.folder.path).appends:
            return
        path = self.folder.path / "samples.jsonl"
        lines = [
            {"step": k + 1, "prompt": question.prompt, "completion": texts[g]}
            | dict(zip(self.rewards.names, rewards_GF[g].tolist(), strict=True))
            | {"cut": bool(is_cut_B[g])}
            for g, question in enumerate(questions)
        ]
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        except OSError as error:
            warn(f"{path} could not be written ({error.strerror}); training continues")
