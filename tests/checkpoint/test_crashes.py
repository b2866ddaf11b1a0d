"""A run killed with SIGKILL at any moment and started again ends equal to an uninterrupted one.

pytest tests/checkpoint/test_crashes.py --full --kills=20 -s   # the long version; prints where each kill fell
... --run="moe --mesh=data=2,expert=4 --capacity=none"           # another run
"""

import os
import random
import subprocess
import sys
import threading
import time

import pytest

from recipes.common import checkpoint
from tests.conftest import ROOT
from tests.support.pictured_folder import write_folder
from tests.support.quick import XLA_FLAGS, environment
from tests.support.runs import TINY, assert_bit_equal, records, state_of, steps_saved, to_reinforce

pytestmark = [pytest.mark.promise("resume"), pytest.mark.full]  # a dozen real processes

STEPS = 36
FLAGS = (
    f"--steps={STEPS}",
    "--checkpoint_every=3",
    "--log_every=1",
    "--eval_every=6",
    "--keep_best",
)
# A run that reads a picture's file for each row of a batch.
WITH_PICTURES = ("--size=tiny", "--mesh=2x1", "--seq_len=24", "--batch_size=4", "--questions=0")


@pytest.fixture(scope="module")
def start(request, book):
    """Starts the run of --run in a workdir."""
    recipe, *flags = request.config.getoption("--run").split()
    return starting(recipe, *TINY, *FLAGS, *flags, book)


def starting(recipe: str, *flags: str):
    """A function that starts a run in a workdir."""
    command = [sys.executable, "-m", f"recipes.{recipe}", *flags]

    def start(workdir):
        return subprocess.Popen(
            [*command, f"--workdir={workdir}"], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=environment() | {"XLA_FLAGS": XLA_FLAGS},
        )  # fmt: skip

    return start


def newest(workdir) -> int:
    return max(checkpoint.steps_in(workdir / "checkpoints"), default=0)


def unfinished(workdir) -> list[str]:
    folder = workdir / "checkpoints"
    return [path.name for path in folder.glob("*.*")] if folder.exists() else []


def kill_at(process, workdir, moment: str, chance: random.Random) -> str:
    """Kills the process at a moment of this kind; returns a line that describes it."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))
    reader.start()
    before = newest(workdir)

    def wait(condition):
        while process.poll() is None and not condition():
            time.sleep(0.001)

    def printed(mark):
        return lambda: any(line.startswith(mark) for line in lines)

    if moment == "init":  # imports, data, tracing, compiling
        wait(printed(chance.choice(["", "parameter "])))
        time.sleep(chance.random())
    elif moment == "restore":  # or, with nothing to restore yet, new parameters
        wait(printed("Compiled step"))
        time.sleep(chance.random() * 0.3)
    else:
        wait(printed(("Resumes ", "Starts ")))
        saves = chance.randrange(3)
        wait(lambda: newest(workdir) >= before + 3 * saves)
        if moment == "save":
            wait(lambda: unfinished(workdir))
        time.sleep(chance.random() * 0.05)
    process.kill()
    code = process.wait()
    reader.join()
    process.stdout.close()
    last = next((line for line in reversed(lines) if line.strip()), "").strip()
    return (
        f"{moment:7} exit {code:3}  saved {newest(workdir):2}  unfinished "
        f"{unfinished(workdir)}  after {last[:50]!r}"
    )


def finished(start, workdir):
    """The workdir of a run that nothing interrupts."""
    process = start(workdir)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return workdir


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, start):
    return finished(start, tmp_path_factory.mktemp("uninterrupted"))


def test_a_run_survives_a_kill_at_any_moment(request, uninterrupted, start, tmp_path):
    survive(request.config.getoption("--kills"), uninterrupted, start, tmp_path)


def test_a_run_with_pictures_survives_a_kill_at_any_moment(request, tmp_path):
    write_folder(tmp_path)
    start = starting(
        "gemma3_vision", *WITH_PICTURES, *FLAGS, f"--dataset={tmp_path / 'rows.jsonl'}"
    )
    whole = finished(start, tmp_path / "whole")
    survive(request.config.getoption("--kills"), whole, start, tmp_path)


def test_a_hybrid_survives_a_kill_at_any_moment(request, book, tmp_path):
    """Of Mamba-2, whose state travels along `seq`, short convolutions, attention and experts."""
    start = starting("hybrid", *TINY, *FLAGS, "--mesh=data=2,seq=2,model=2", book)
    whole = finished(start, tmp_path / "whole")
    survive(request.config.getoption("--kills"), whole, start, tmp_path)


def survive(kills: int, uninterrupted, start, tmp_path) -> None:
    """Kills runs at moments of each kind; each ends equal to the uninterrupted one."""
    chance = random.Random(0)
    moments = (["save", "init", "step", "restore"] * kills)[:kills]
    workdir, fell = tmp_path / "w", 0
    for number, moment in enumerate(moments):
        where = kill_at(start(workdir), workdir, moment, chance)
        print(f"kill {number + 1}: {where}", flush=True)
        fell += "exit  -9" in where
        for step in checkpoint.steps_in(workdir / "checkpoints"):
            assert checkpoint.verify(workdir / "checkpoints" / str(step)) == ""
        best = checkpoint.steps_in(workdir / "best")
        assert all(checkpoint.verify(workdir / "best" / str(step)) == "" for step in best)
        assert best or newest(workdir) <= 6, "once there, it stays"
        if newest(workdir) > STEPS - 12:  # little is left to kill: finish it and start another
            check(uninterrupted, start, workdir)
            workdir = tmp_path / f"w{number}"
    assert fell > kills * 0.8, "the others had finished before"
    check(uninterrupted, start, workdir)


def check(uninterrupted, start, workdir):
    process = start(workdir)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert steps_saved(workdir) == steps_saved(uninterrupted), "and nothing unfinished is left"
    assert_bit_equal(state_of(workdir, STEPS), state_of(uninterrupted, STEPS))
    assert os.listdir(workdir / "best") == os.listdir(uninterrupted / "best")
    fields = ("step", "loss", "grad_norm", "learning_rate")
    assert [step for step, *_ in records(workdir, *fields)] == list(range(1, STEPS + 1))
    assert records(workdir, *fields) == records(uninterrupted, *fields)
    held_out = ("step", "held_out_loss", "held_out_targets")
    assert records(workdir, *held_out) == records(uninterrupted, *held_out)
    text = (workdir / "metrics.jsonl").read_text()
    assert text.count("\n") == STEPS + STEPS // 6
    assert text.endswith("\n")


# ---- a run that makes its own batches ------------------------------------------------------------

ROLLOUTS = 6
SAMPLING = (
    "--mesh=2x2", "--seq_len=48", "--max_new_tokens=6", "--group_size=4", f"--steps={ROLLOUTS}",
    "--checkpoint_every=2", "--batch_size=8", "--log_every=1", "--eval_every=2", "--updates=2",
    "--learning_rate=0.003", "--warmup_steps=1", "--eval_prompts=3", "--keep_best",
)  # fmt: skip
REWARD_THAT_KILLS = """
import json, os, pathlib, signal

def reward(prompts, completions, rows):
    # The one held-out prompt does not count.
    if os.environ.get("KILL_IN_REWARD") and len(rows) > 1:
        calls = pathlib.Path(os.environ["KILL_IN_REWARD"])
        calls.write_text(calls.read_text() + "." if calls.exists() else ".")
        if calls.stat().st_size == 2:
            os.kill(os.getppid(), signal.SIGKILL)
    return [sum(letter < "a" for letter in text) / 6 + row["bonus"] / 1000
            for text, row in zip(completions, rows)]
"""
# Kills its own process after the n-th call of a phase, before anything can follow from it.
KILLED = """
import os, runpy, signal, sys
from recipes.common.checkpoint.saver import Saver
from recipes.common.generation.rollouts import Sampler
from recipes.common.reinforcement.online import Online

phase, count = sys.argv.pop(1), int(sys.argv.pop(1))
calls = []

def kill_if_last():
    calls.append(phase)
    if len(calls) == count:
        os.kill(os.getpid(), signal.SIGKILL)

def kill_after(owner, name, counts=lambda *arguments: True):
    method = getattr(owner, name)
    def wrapped(self, *arguments):
        result = method(self, *arguments)
        if counts(*arguments):
            kill_if_last()
        return result
    setattr(owner, name, wrapped)

if phase == "rollout":  # of a step, not of an evaluation
    kill_after(Sampler, "__call__", counts=lambda variables, prompts, ids: ids[0, 0] < 2**31)
if phase == "step":
    around = Online.around
    def with_kill(self, step):
        def update(*arguments):
            result = step(*arguments)
            kill_if_last()
            return result
        return around(self, update)
    Online.around = with_kill
if phase == "save":
    kill_after(Saver, "save")  # it writes in the background
if phase == "commit":
    kill_after(Saver, "_finalize")  # all is written, and only the name of the folder is missing
runpy.run_module("recipes.grpo", run_name="__main__", alter_sys=True)
"""
# Phase and call → the newest checkpoint afterwards. The kills follow each other in one workdir.
KILLS = {
    ("rollout", 2): 0,
    ("save", 1): 0,
    ("reward", 2): 0,
    ("commit", 1): 0,
    ("step", 7): 2,  # between the updates of step 4
    ("save", 2): 4,
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """Returns a function that runs recipes.grpo in a workdir; a phase and a number kill it there."""
    folder = tmp_path_factory.mktemp("sample")
    flags = (*SAMPLING, *to_reinforce(folder, REWARD_THAT_KILLS))

    def run(workdir, phase="none", count=0) -> tuple[int, str]:
        variables = environment() | {"XLA_FLAGS": XLA_FLAGS, "ZOO_CACHE": str(folder / "cache")}
        if phase == "reward":
            assert count == 2
            calls = workdir.parent / "calls"
            calls.unlink(missing_ok=True)
            variables["KILL_IN_REWARD"] = str(calls)
        command = [sys.executable, "-c", KILLED, phase, str(count), *flags, f"--workdir={workdir}"]
        done = subprocess.run(
            command, cwd=ROOT, env=variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def test_a_kill_while_a_run_samples_rewards_updates_or_saves_changes_nothing(sample, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, out = sample(whole)
    assert code == 0, out
    for (phase, count), saved in KILLS.items():
        code, out = sample(killed, phase, count)
        assert code == -9, (phase, out)
        steps = [*checkpoint.steps_in(killed / "checkpoints")]
        assert max(steps, default=0) == saved, phase
        assert all(checkpoint.verify(killed / "checkpoints" / str(step)) == "" for step in steps)
    code, out = sample(killed)
    assert code == 0, out
    assert steps_saved(killed) == steps_saved(whole), "and nothing unfinished is left"
    assert_bit_equal(state_of(killed, ROLLOUTS), state_of(whole, ROLLOUTS))
    fields = ("step", "loss", "reward", "length", "entropy", "mismatch", "clipped", "learning_rate")
    assert records(killed, *fields) == records(whole, *fields)
    assert [step for step, *_ in records(killed, *fields)] == [n + 1 for n in range(ROLLOUTS)]
    held_out = ("step", "held_out_reward")
    assert records(killed, *held_out) == records(whole, *held_out)
    assert len(records(killed, *held_out)) == 1 + ROLLOUTS // 2
    assert (killed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert os.listdir(killed / "best") == os.listdir(whole / "best")
