"""recipes.grpo: its objective on every mesh, and whole runs that learn and resume bit-equal."""

import dataclasses
import functools
import json
import shutil
import sys

import jax
import numpy as np
import pytest

from data.questions import Question, Questions
from data.tokenizer import BYTES
from recipes import grpo
from recipes.common import checkpoint, entries, language
from recipes.common.checkpoint import probe
from recipes.common.checkpoint.run_folder import open_run
from recipes.common.generation.rollouts import Answers, Sampler, sampling_layout
from recipes.common.reinforcement import online
from recipes.common.reinforcement.losses import PolicyLoss
from recipes.common.reinforcement.objective import Objective
from recipes.common.reinforcement.rollout_flags import Rollout
from recipes.common.report.report import bytes_per_device
from recipes.common.runtime import Stopped
from recipes.common.runtime.flags import Run, parse
from recipes.common.runtime.mesh import make_mesh
from recipes.common.runtime.start import show_plan
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.sharding.move import move
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support.models import random_values
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import NoFlags, assert_bit_equal, records, state_of, to_reinforce

pytestmark = pytest.mark.promise("reinforcement")

ROWS, LENGTH, LONGEST = 8, 16, 8
PROMPTS = [np.arange(1, 2 + n % 3, dtype=np.int32) for n in range(ROWS)]
IDS = np.array([(3, n // 2, n % 2) for n in range(ROWS)])
MESHES = {
    "dp": "8", "fsdp": "8", "zero1": "8", "tp": "1x8", "fsdp_tp": "4x2", "fsdp_tp_sp": "4x2",
    "hsdp_tp": "2x2x2", "fsdp_cp_tp": "data=2,seq=2,model=2",
}  # fmt: skip
EXPERTS = {"fsdp_ep": "data=2,expert=4"}
CASES = [("transformer", *x) for x in MESHES.items()] + [("moe", *x) for x in EXPERTS.items()]
# The other strategies of both, before a release.
OTHERS = {
    "tp_sp": "1x8", "hsdp_tp_sp": "2x2x2", "cp": "data=4,seq=2", "fsdp_cp": "data=2,seq=4",
    "pp": "data=4,pipe=2", "pp_zero1": "data=4,pipe=2", "fsdp_pp": "data=4,pipe=2",
    "fsdp_pp_tp": "data=2,pipe=2,model=2",
}  # fmt: skip
OTHER_EXPERTS = MESHES | OTHERS | {
    "ep": "data=2,expert=4", "fsdp_ep_tp": "data=2,expert=2,model=2",
    "fsdp_ep_pp": "data=2,pipe=2,expert=2", "fsdp_ep_cp": "data=2,seq=2,expert=2",
    "fsdp_ep_cp_tp": "data=1,seq=2,expert=2,model=2",
}  # fmt: skip
COMPLETE = [
    *CASES, *(("transformer", *x) for x in OTHERS.items()),
    *(("moe", *x) for x in OTHER_EXPERTS.items()),
]  # fmt: skip
# Strategy with stages, which can't sample → rules to sample with.
WITHOUT_STAGES = {
    "pp": "dp", "pp_zero1": "dp", "fsdp_pp": "fsdp", "fsdp_pp_tp": "fsdp_tp", "fsdp_ep_pp": "fsdp_ep",
}  # fmt: skip
TRUNCATED = [CASES[4], CASES[-2]]  # split vocabularies, and positions in another order


def layout_on(entry: str, strategy: str, mesh: str):
    config = dataclasses.replace(entries.sizes(entry)["tiny"](), loss_chunk=8)
    config = language.for_another_loss(config)
    if entry == "moe":
        config = dataclasses.replace(config, capacity=None)
    return make_layout(
        entries.model(entry), config, make_mesh(mesh), strategy or None,
        batch_size=ROWS, seq_len=LENGTH,
    )  # fmt: skip


@functools.cache
def step_of(entry: str, strategy: str, mesh: str, top_k: int = 0, top_p: float = 1.0):
    """(answers, log-probabilities, metrics, gradients) of a rollout and the gradient after it."""
    layout = layout_on(entry, strategy, mesh)
    variables = jax.device_put(random_values(layout.model.shapes), shardings(layout.variables()))
    sampler = Sampler(
        sampling_layout(entries.model(entry), layout, WITHOUT_STAGES.get(strategy, "")),
        (7,), 300, LONGEST, 0.8, top_k, top_p,
    )  # fmt: skip
    answers = sampler(move(variables, layout, sampler.layout), PROMPTS, IDS)
    batch = {
        "tokens": np.zeros((ROWS, LENGTH), np.int32),
        "targets": np.full((ROWS, LENGTH), -1, np.int32),
        "sampler_log_probs": np.zeros((ROWS, LENGTH), np.float32),
        "advantage": np.linspace(-1, 1, ROWS, dtype=np.float32),
    }
    if sampler.truncates:
        batch["kept"] = np.zeros((ROWS, LENGTH, answers.kept_BNW.shape[2]), np.uint8)
    for b, prompt in enumerate(PROMPTS):
        tokens = answers.tokens_BN[b][answers.tokens_BN[b] >= 0]
        first, row = len(prompt) - 1, np.concatenate([prompt, tokens])
        batch["tokens"][b, : len(row) - 1] = row[:-1]
        batch["targets"][b, first : first + len(tokens)] = tokens
        batch["sampler_log_probs"][b, first : first + len(tokens)] = answers.log_probs_BN[
            b, : len(tokens)
        ]
        if sampler.truncates:
            batch["kept"][b, first : first + len(tokens)] = answers.kept_BNW[b, : len(tokens)]
    objective = Objective(PolicyLoss("grpo"), LONGEST, temperature=0.8)
    layout = dataclasses.replace(layout, model=layout.model._replace(loss=objective))
    placed = jax.device_put(batch, layout.batch_shardings(batch))

    def both(state, batch):
        grads, _, means = gradients(layout, state, batch)
        return means, grads

    means, grads = layout.compile(both, variables, placed, compiler_options=QUICK)(
        variables, placed
    )
    grads = {path: np.asarray(x) for path, x in paths(grads).items()}
    return answers, {name: float(x) for name, x in means.items()}, grads


@pytest.mark.parametrize(
    ("entry", "strategy", "mesh"),
    full_except(COMPLETE, [], [x for x in COMPLETE if x != ("transformer", "fsdp_tp", "4x2")]),
)
def test_a_step_is_one_device_s(entry, strategy, mesh):
    """Its answers, their log-probabilities, and the gradient: sampled, moved and trained in other layouts."""
    compare(step_of(entry, strategy, mesh), step_of(entry, "", "1x1"))


def compare(found, expected) -> None:
    answers, means, grads = found
    wanted, wanted_means, wanted_grads = expected
    np.testing.assert_array_equal(answers.tokens_BN, wanted.tokens_BN)
    assert len({tuple(row) for row in answers.tokens_BN}) == ROWS, "answers to a prompt differ"
    np.testing.assert_allclose(answers.log_probs_BN, wanted.log_probs_BN, atol=1e-5)
    assert means["mismatch"] < 2e-6, "at the sampling temperature too"
    assert means["outside"] == 0
    assert means["importance"] == pytest.approx(1, abs=1e-5)
    for name, value in wanted_means.items():
        assert means[name] == pytest.approx(value, rel=1e-5, abs=2e-6), name
    whole = np.sqrt(sum(np.sum(x**2) for x in wanted_grads.values()))
    assert whole > 0.01
    for path, gradient in wanted_grads.items():
        size = max(np.linalg.norm(gradient), 1e-3 * whole)
        assert np.linalg.norm(grads[path] - gradient) / size < 2e-5, path


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (20, 0.8)])
def test_training_knows_among_which_tokens_a_token_was_chosen(top_k, top_p):
    answers, means, _ = step_of("transformer", "", "1x1", top_k, top_p)
    written_BN = answers.tokens_BN >= 0
    kept_BNV = np.unpackbits(answers.kept_BNW, axis=2)
    chosen_BN = np.take_along_axis(kept_BNV, np.maximum(answers.tokens_BN, 0)[..., None], 2)[..., 0]
    np.testing.assert_array_equal(chosen_BN, written_BN)
    counts = kept_BNV.sum(axis=2)[written_BN]
    assert 1 < counts.mean() < 0.6 * 257
    assert not top_k or counts.max() <= top_k
    assert (answers.entropies_BN[written_BN] < np.log(counts) + 1e-5).all()
    assert means["mismatch"] < 2e-6
    assert means["outside"] == 0


@pytest.mark.full
@pytest.mark.parametrize(("entry", "strategy", "mesh"), TRUNCATED)
def test_a_truncated_step_is_one_device_s(entry, strategy, mesh):
    found = step_of(entry, strategy, mesh, 20, 0.8)
    expected = step_of(entry, "", "1x1", 20, 0.8)
    compare(found, expected)
    np.testing.assert_array_equal(found[0].kept_BNW, expected[0].kept_BNW)


def test_an_answer_does_not_depend_on_its_neighbours():
    layout = layout_on("transformer", "", "1x1")
    variables = jax.device_put(random_values(layout.model.shapes), shardings(layout.variables()))
    end = tuple(range(100))  # a third of the tokens that are written
    sampler = Sampler(sampling_layout(entries.model("transformer"), layout), end, 300, LONGEST)
    every = sampler(variables, PROMPTS, IDS)
    some = sampler(variables, PROMPTS[::-1], IDS[::-1])
    np.testing.assert_array_equal(some.tokens_BN[::-1], every.tokens_BN)
    ended = np.argwhere((every.tokens_BN >= 0) & (every.tokens_BN < 100))
    assert any(n < LONGEST - 1 for _, n in ended)
    for b, n in ended:
        assert (every.tokens_BN[b, n + 1 :] == -1).all()
        assert (every.log_probs_BN[b, n + 1 :] == 0).all()
    assert (every.entropies_BN[every.tokens_BN >= 0] > 0).all()


def test_the_cases_are_all_strategies():
    for entry in ("transformer", "moe"):
        rules = sys.modules[entries.model(entry).__module__].RULES
        assert {strategy for name, strategy, _ in COMPLETE if name == entry} == {*rules}


@pytest.mark.parametrize(
    ("entry", "strategy", "mesh"),
    full_except(CASES[:1] + CASES[4:5] + CASES[-1:], [CASES[4]]),
)
def test_a_plan_s_memory_is_what_sampling_allocates(entry, strategy, mesh):
    layout = layout_on(entry, strategy, mesh)
    sampler = Sampler(sampling_layout(entries.model(entry), layout), (7,), 300, LONGEST)
    weights, cache = sampler.bytes_per_device(ROWS, longest=3)
    variables = jax.device_put(
        random_values(layout.model.shapes), shardings(sampler.layout.variables())
    )
    assert weights == bytes_per_device(variables)
    config, slots = layout.config, 8 + LONGEST  # the prompts are padded to 8
    whole = 2 * config.num_layers * ROWS * slots * config.num_kv_heads * config.head_dim * 4
    assert cache == whole / layout.count_shards("batch", "kv_heads")


class Recorder:
    """In place of a sampler: keeps what it is asked, and answers a token per prompt."""

    end, truncates = (7,), False

    def __init__(self, layout):
        self.layout = layout
        self.asked: list[tuple[bytes, tuple]] = []  # of each answer: its prompt, its id

    def __call__(self, variables, prompts, ids) -> Answers:
        self.asked += zip(map(bytes, prompts), map(tuple, ids.tolist()), strict=True)
        zeros_B1 = np.zeros((len(prompts), 1))
        return Answers(zeros_B1.astype(np.int32), zeros_B1, zeros_B1)


class Even:
    """In place of rewards."""

    names, weights, failed = ["even"], [1.0], 0

    def __call__(self, answers):
        return np.ones((len(answers), 1))


def test_an_answer_s_id_is_its_step_prompt_and_number(tmp_path):
    """Across epochs of 5 prompts, 2 a step: whatever the order, a prompt has one number."""
    layout, folder = layout_on("transformer", "", "1x1"), open_run("grpo", Run(), NoFlags())
    texts = [f"{n}?" for n in range(5)]
    prompts = [Question(np.array([*text.encode()], np.int32), text, {}, "") for text in texts]
    flags = dataclasses.replace(Rollout(), seq_len=LENGTH, max_new_tokens=1, group_size=4)
    made = online.Online(
        flags=flags, loss=PolicyLoss(), layout=layout, sampler=Recorder(layout),
        questions=Questions(prompts, prompts, {}, ()), rewards=Even(), tokenizer=BYTES,
        folder=folder, batch_size=ROWS, seed=3,
    )  # fmt: skip
    state = jax.device_put(random_values(layout.model.shapes), shardings(layout.variables()))
    for k in range(5):
        made.rollout(state, k)
    asked, numbers = made.sampler.asked, {bytes(q.tokens): n for n, q in enumerate(prompts)}
    assert len(asked) == 5 * ROWS
    for place, (prompt, found) in enumerate(asked):
        assert found == (place // ROWS, numbers[prompt], place % 4)
    orders = [[number for _, (_, number, g) in asked if g == 0][5 * n : 5 * n + 5] for n in (0, 1)]
    assert [*map(sorted, orders)] == [[0, 1, 2, 3, 4]] * 2, "an epoch has each prompt once"
    assert orders[0] != orders[1]


# ---- whole runs ----------------------------------------------------------------------------------

STEPS = 4
FLAGS = (
    "--seq_len=48", "--max_new_tokens=6", "--group_size=4", f"--steps={STEPS}",
    "--checkpoint_every=2", "--batch_size=8", "--log_every=1", "--eval_every=2",
    "--learning_rate=0.003", "--warmup_steps=1", "--eval_prompts=3", "--keep_best",
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model with a chat template, questions, and a reward that reads a column."""
    folder = tmp_path_factory.mktemp("start")
    return folder, to_reinforce(folder)


@pytest.fixture
def tune(start, monkeypatch, capsys):
    """Runs recipes.grpo in this process; returns its output."""
    folder, first = start
    monkeypatch.setenv("ZOO_CACHE", str(folder / "cache"))

    def run(*flags: str) -> str:
        argv = [*first, *FLAGS, *flags]
        first_groups = parse(argv, *grpo.NEW) or []
        planned = grpo.main(*(parse(argv, *grpo.defaults(*first_groups)) or []))
        if planned:
            show_plan(planned)
        return capsys.readouterr().out

    return run


MEASURED = ("reward", "length", "cut", "entropy", "loss", "mismatch")


@pytest.mark.full
def test_a_run_resumes_bit_equal_with_its_samples(tune, tmp_path, quick):
    """Answers take turns in four slots."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    out = tune("--mesh=2x2", "--sample_slots=4", f"--workdir={whole}")
    assert "Training data: 23 prompts." in out
    assert "Samples with rules fsdp_tp, gathered once." in out
    shutil.copytree(whole, killed)  # as if it was killed after its first checkpoint
    shutil.rmtree(killed / "checkpoints" / "4")
    assert "Resumes at step 2, from " in tune(
        "--mesh=2x2", "--sample_slots=4", f"--workdir={killed}"
    )  # fmt: skip
    assert_bit_equal(state_of(killed, 4), state_of(whole, 4))
    assert records(killed, *MEASURED) == records(whole, *MEASURED)
    assert len(records(whole, *MEASURED)) == STEPS
    samples = (whole / "samples.jsonl").read_text()
    assert (killed / "samples.jsonl").read_text() == samples
    lines = [json.loads(line) for line in samples.splitlines()]
    assert [line["step"] for line in lines] == [n + 1 for n in range(STEPS) for _ in range(4)]
    assert all(line["prompt"] == lines[0]["prompt"] for line in lines[:4])
    assert [*(whole / "best").iterdir()], "the checkpoint with the highest reward"
    source = checkpoint.find(str(whole))
    kept = probe.batch(source.metadata, checkpoint.tokenizer_for("", source))
    assert (kept["targets"] >= 0).any(), "it can be published"


@pytest.mark.full
def test_later_updates_of_a_rollout_are_clipped_and_resume(tune, tmp_path, quick):
    """In packed rows."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    flags = (
        "--mesh=1x1",
        "--updates=2",
        "--steps=3",
        "--eval_every=0",
        "--keep_best=false",
        "--clip_low=0.001",
        "--top_p=0.9",
        "--pack_len=120",
    )
    tune(*flags, "--learning_rate=0.02", f"--workdir={whole}")
    assert [n for n, _ in records(whole, "step", "loss")] == [1, 2, 3], "rollouts"
    assert max(x for (x,) in records(whole, "mismatch")) < 1e-5, "old log-probabilities, truncated"
    clipped = [x for (x,) in records(whole, "clipped")]
    assert clipped[0] == 0, "the warmup begins with a learning rate of 0"
    assert max(clipped) > 0.05
    assert max(x for (x,) in records(whole, "padding")) < 0.5
    rates = [x for (x,) in records(whole, "learning_rate")]
    assert rates == pytest.approx([0.005, 0.02, 0.02]), "the mean of both updates"
    shutil.copytree(whole, killed)
    shutil.rmtree(killed / "checkpoints" / "3")
    tune(*flags, "--learning_rate=0.02", f"--workdir={killed}")
    assert_bit_equal(state_of(killed, 3), state_of(whole, 3))
    assert records(killed, *MEASURED) == records(whole, *MEASURED)


@pytest.mark.full
def test_a_run_learns_what_is_rewarded(tune, tmp_path, quick):
    """Letters before "a"."""
    tune(
        "--mesh=1x1", "--steps=10", "--batch_size=32", "--learning_rate=0.02", "--eval_every=0",
        "--keep_best=false", f"--workdir={tmp_path / 'w'}",
    )  # fmt: skip
    rewards = [reward for (reward,) in records(tmp_path / "w", "reward")]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1


@pytest.mark.full
def test_the_reference_of_an_adapter_is_the_model_without_it(tune, start, tmp_path, quick):
    """With the same reward twice: metrics have both, and their sum."""
    workdir, reward = tmp_path / "w", start[1][-1]
    out = tune(
        "--mesh=1x1", "--lora_rank=4", "--kl=0.01", "--learning_rate=0.02", "--top_k=20",
        reward, "--reward_weights=1,0.5", f"--workdir={workdir}",
    )  # fmt: skip
    assert "Reference: the model without its adapter, which takes no more memory" in out
    kls = [kl for (kl,) in records(workdir, "kl")]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-4
    for prefix, count in {"": STEPS, "held_out_": 3}.items():
        names = [f"{prefix}{name}" for name in ("reward", "reward_reward_0", "reward_reward_1")]
        rewards = records(workdir, *names)
        assert len(rewards) == count
        for total, first, second in rewards:
            assert first == second
            assert total == pytest.approx(1.5 * first)


@pytest.mark.full
def test_another_model_than_the_sampled_one_stops_the_run(tune, monkeypatch, tmp_path, quick):
    """A wrong move: training's weights are others."""

    def wrong(state, source, target):
        moved = move(state, source, target)
        return jax.tree.map(lambda x: x * 1.05, moved)

    monkeypatch.setattr(online, "move", wrong)
    with pytest.raises(Stopped, match="training and sampling differ by"):
        tune("--mesh=1x1", f"--workdir={tmp_path / 'w'}", "--eval_every=0", "--keep_best=false")


MISTAKES = {
    "--batch_size=9": "--batch_size=9 answers are not divisible by --group_size=8; use --batch_size=8",
    "--max_new_tokens=200": "--max_new_tokens=200 leave no room for a prompt in --seq_len=96",
    "--reference=copy": "--reference=copy is for a reference, and --kl=0 has none",
    "--kl=0.1 --reference=stored": "--reference=stored needs answers that are there before",
    "--restore_from=mlp.digits": "which writes no answers",
    "--reward=reward.txt:f": "is not FILE.py:FUNCTION",
    "--sample_rules=absent": "--sample_rules=absent",
    "--replay_routes": "--replay_routes is for models with experts, and this one has none; leave it out",
    "--sample_slots=6 --mesh=4x2": "--sample_slots=6 is not divisible by the 4 shards of 'batch'",
    "--seq_len=50": "prompt of at most 3 tokens",
    "--pack_len=90": "--pack_len=90 is shorter than a prompt with its answer, --seq_len=96; use",
}


@pytest.mark.parametrize("flags", full_except(MISTAKES, [*MISTAKES][:3]))
def test_a_mistake_is_one_line(flags, inside, tmp_path):
    done = inside("recipes.grpo", "--mesh=1x1", *flags.split(), f"--workdir={tmp_path / 'w'}")
    assert done.code == 2
    assert MISTAKES[flags] in done.err
    assert done.err.count("\n") == 1
    assert not (tmp_path / "w").exists()


@pytest.mark.full
def test_a_plan_counts_the_reference_and_writes_nothing(tune, tmp_path):
    out = tune("--mesh=4x2", "--plan", "--kl=0.1", f"--workdir={tmp_path / 'w'}")
    assert "Reference: a frozen copy of model, rules fsdp_tp, " in out
    assert "While it samples, a device also has weights of " in out
    assert not (tmp_path / "w").exists()
