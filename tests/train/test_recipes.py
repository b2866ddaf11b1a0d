"""The Transformer's recipe as users run it: commands in, text and files out.

Most of these tests share one run; each inspects it or continues from a copy.
"""

import json
import pathlib
import re
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.train.optimizer import LearningRate, adamw
from tests.support.quick import quick as quick
from tests.support.runs import TINY, assert_bit_equal, records, state_of, steps_saved

pytestmark = pytest.mark.promise("resume")


@pytest.fixture
def train(inside, book, quick):
    """Returns a function of flags that trains a tiny Transformer and returns its output."""

    def command(*flags, by=inside):
        done = by("recipes.transformer", *TINY, book, *flags)
        assert done.code == 0, done.err
        assert done.err == "", "the terminal is for what the user needs"
        return done.out

    return command


class Made(NamedTuple):
    out: str
    workdir: pathlib.Path

    def copy(self, to: pathlib.Path, step: int) -> pathlib.Path:
        """Copies its folder as if the run had stopped after `step`."""
        shutil.copytree(self.workdir, to)
        for later in steps_saved(to):
            if later > step:
                shutil.rmtree(to / "checkpoints" / str(later))
        return to


STEPS, HALF = 12, 8
FLAGS = (f"--steps={STEPS}", "--checkpoint_every=4", "--log_every=1")
FIRST = ("--mesh=4x2", *FLAGS, "--sample_bytes=40", "--prompt=def ")


@pytest.fixture(scope="module")
def made() -> dict[str, Made]:
    return {}


@pytest.fixture
def first(made, train, tmp_path_factory) -> Made:
    """A run of 12 steps on 4x2, made on first use, with checkpoints 8 and 12."""
    if not made:
        workdir = tmp_path_factory.mktemp("first") / "w"
        made["first"] = Made(train(*FIRST, f"--workdir={workdir}"), workdir)
    return made["first"]


# ---- what it prints and leaves -------------------------------------------------------------------


def check_output(out: str, workdir: pathlib.Path) -> None:
    marks = [
        "mesh 4x2 (data 4 × model 2) · rules fsdp_tp · 8 simulated CPU devices",
        "parameter ",
        "layers/attention/q           2×64×16×8  float32  layers embed heads head_dim      (-, data, model, -)        8.2 kB",
        "123,200 parameters. Per device: parameters 62.7 kB, gradients 62.7 kB, optimizer state 125.4 kB.",
        "Compiled step, per device: ",
        "Collectives a step, per device: 29 all-gather of 442.4 kB; ",
        "Starts at step 0 with new parameters.",
        "step 6/12  loss ",
        "step 12/12  loss ",
        "Held-out loss ",
        "Sample:\n  | def ",
        f"Loss curve: {workdir}/pictures/loss.png",
        f"Checkpoint: {workdir}/checkpoints/12",
        "On another mesh: python -m recipes.transformer --mesh=1x8 --restore_from=",
        f"Its layout in pictures: python -m recipes.explore --from={workdir}",
        "Took ",
    ]  # fmt: skip
    at = [re.sub(" +", " ", out).find(re.sub(" +", " ", mark)) for mark in marks]
    assert -1 not in at, marks[at.index(-1)]
    assert at == sorted(at)
    assert len(out.splitlines()) < 80
    assert max(len(line) for line in out.splitlines() if str(workdir) not in line) < 120


def test_output_of_a_run_in_order(first):
    check_output(first.out, first.workdir)


@pytest.mark.full
def test_commands_print_the_same_and_resume_bit_equal(train, run, tmp_path):
    """Uses real processes and XLA's normal optimizations."""
    whole = Made(train(*FIRST, f"--workdir={tmp_path / 'whole'}", by=run), tmp_path / "whole")
    check_output(*whole)
    parts = whole.copy(tmp_path / "parts", HALF)
    check_resumed(whole.workdir, parts, train(*FIRST, f"--workdir={parts}", by=run))


def test_files_that_a_run_leaves(first):
    folder = first.workdir
    assert {p.name for p in folder.iterdir()} == {
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "pictures",
        "sample.json",
    }
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["12", "8"]
    config = json.loads((folder / "config.json").read_text())
    assert config["flags"]["steps"] == STEPS
    assert config["flags"]["seed"] == 0
    assert config["versions"]["jax"] == jax.__version__
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1), STEPS]
    step = {"step", "loss", "grad_norm", "learning_rate", "step_seconds", "input_wait_seconds"}
    assert set(lines[0]) == step | {"tokens_per_second"}
    metrics = {f"held_out_{name}" for name in ("loss", "targets", "perplexity", "bits_per_byte")}
    assert set(lines[-1]) == {"step"} | metrics
    items = folder / "checkpoints" / "12"
    data = json.loads((items / "data" / "metadata").read_text())
    assert data["next_batch"] == STEPS
    metadata = json.loads((items / "metadata" / "metadata").read_text())
    assert metadata["entry"] == "transformer"
    assert metadata["step"] == STEPS
    assert metadata["config"]["embed"] == 64
    assert metadata["rules"]["name"] == "fsdp_tp"
    assert metadata["rules"]["table"]["embed"] == "data"
    assert metadata["mesh"] == {"data": 4, "model": 2}
    assert metadata["logical_axes"]["layers/mlp/up"] == ["layers", "embed", "mlp"]
    assert metadata["data"]["fingerprint"] == data["fingerprint"]
    assert metadata["versions"] == config["versions"]


def test_parameter_paths_are_public(first, golden):
    state = state_of(first.workdir, STEPS)
    golden(
        "transformer_paths.txt",
        "".join(f"{p} {list(v.shape)} {v.dtype}\n" for p, v in state.items()),
    )


# ---- how it is resumed ---------------------------------------------------------------------------


def check_resumed(whole: pathlib.Path, parts: pathlib.Path, out: str) -> None:
    assert f"Resumes at step {HALF}, from {parts}/checkpoints/{HALF}." in out
    assert_bit_equal(state_of(parts, STEPS), state_of(whole, STEPS))
    fields = ("step", "loss", "grad_norm", "learning_rate")
    assert [step for step, *_ in records(parts, *fields)] == list(range(1, STEPS + 1))
    assert records(parts, *fields) == records(whole, *fields)
    held_out = ("step", "held_out_loss", "held_out_targets")
    assert records(parts, *held_out) == records(whole, *held_out)


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(first, train, tmp_path):
    """Stops after step 8 of 12, keeps only the newest checkpoint, and starts again."""
    parts = first.copy(tmp_path / "w", HALF)
    check_resumed(first.workdir, parts, train(*FIRST, f"--workdir={parts}"))


@pytest.mark.full  # in the fast tier: test_lora.py, an adapter
@pytest.mark.parametrize("mesh", ["1x8", "2x2x2"])
def test_another_mesh_continues_the_same_run(mesh, first, train, tmp_path):
    """A workdir resumes on another mesh with the same batches; losses differ in their last bits."""
    workdir = first.copy(tmp_path / "w", HALF)
    train(f"--mesh={mesh}", *FLAGS, f"--workdir={workdir}")
    ours, whole = (records(path, "step", "loss") for path in (workdir, first.workdir))
    assert ours[:HALF] == whole[:HALF]
    np.testing.assert_allclose(ours[HALF:], whole[HALF:], rtol=1e-5)


@pytest.mark.full
def test_more_steps_resume_and_say_what_that_does_to_the_learning_rate(first, train, tmp_path):
    workdir = first.copy(tmp_path / "w", STEPS)
    flags = ("--mesh=4x2", f"--workdir={workdir}", "--steps=20")  # and log_every may change
    out = train(*flags)
    assert f"Resumes at step 12, from {workdir}/checkpoints/12." in out
    before, after = (LearningRate(4e-3, 40, steps)(STEPS) for steps in (STEPS, 20))
    assert (
        "--steps was 12 and is 20: the learning rate now decays until step 20, and at step 12 it is "
        f"{after:.2e} instead of {before:.2e}." in out
    )
    assert [step for (step,) in records(workdir, "step")] == [*range(1, 13), 12, 20, 20]
    done = train(*flags)
    assert "Resumes at step 20" in done
    assert "step 20/20" not in done


def test_restore_from_evaluates_and_leaves_no_files(first, train, tmp_path):
    held_out = records(first.workdir, "held_out_loss")[-1][0]
    flags = (f"--restore_from={first.workdir}", f"--workdir={tmp_path / 'w'}")
    out = train("--mesh=1x8", "--rules=tp", "--steps=0", *flags)
    assert f"Evaluates {first.workdir}/checkpoints/12, step 12." in out
    assert f"Held-out loss {held_out:.4f} nats/byte" in out
    assert not (tmp_path / "w").exists()


def test_restore_from_starts_a_new_run_on_given_parameters(first, train, tmp_path):
    flags = (f"--restore_from={first.workdir}", f"--workdir={tmp_path / 'w'}")
    flags += ("--learning_rate=0.004", "--warmup_steps=40")  # as another test: the same program
    out = train("--mesh=1x8", *FLAGS, *flags)
    assert f"Starts at step 0 from the parameters of {first.workdir}/checkpoints/12." in out
    before, after = state_of(first.workdir, STEPS), state_of(tmp_path / "w", STEPS)
    assert set(before) == set(after)
    assert int(after["step"]) == STEPS
    assert (before["params/embed"] != after["params/embed"]).any()
    (first_loss, *_), (new, *_) = (
        records(path, "loss") for path in (tmp_path / "w", first.workdir)
    )
    assert first_loss < new, "it begins where the other ended"


# ---- the optimizer -------------------------------------------------------------------------------


@pytest.mark.full  # in the fast tier: test_buffers.py, one step
def test_accumulated_gradients_are_those_of_the_whole_batch(first, train, tmp_path):
    train("--mesh=4x2", *FLAGS, "--accumulate=4", f"--workdir={tmp_path}")
    fields = ("step", "loss", "grad_norm")
    ours, whole = (records(path, *fields)[:5] for path in (tmp_path, first.workdir))
    np.testing.assert_allclose(ours, whole, rtol=2e-5)


def test_learning_rate_warms_up_and_decays_and_vectors_do_not_decay():
    rate = jax.jit(LearningRate(1.0, 10, 100))
    assert [round(float(rate(i)), 3) for i in (0, 5, 10, 55, 100)] == [0, 0.5, 1, 0.55, 0.1]
    optimizer = adamw(lambda _: 1.0, weight_decay=0.5, clip_norm=1.0)
    params = {"q": jnp.ones((2, 2)), "scale": jnp.ones((2, 2)), "q_bias": jnp.ones((2, 2, 2))}
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda: optimizer.update(zero, optimizer.init(params), params))()
    assert float(updates["q"][0, 0]) == -0.5
    assert not updates["scale"].any()
    assert not updates["q_bias"].any()
