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
from tests.support.quick import XLA_FLAGS
from tests.support.runs import TINY, assert_bit_equal, records, state_of, steps_saved

pytestmark = [pytest.mark.promise("resume"), pytest.mark.full]  # a dozen real processes

STEPS = 36
FLAGS = (*TINY, f"--steps={STEPS}", "--checkpoint_every=3", "--log_every=1")
FLAGS += ("--eval_every=6", "--keep_best")


@pytest.fixture(scope="module")
def start(request, book):
    """Starts the run of --run in a workdir."""
    recipe, *flags = request.config.getoption("--run").split()
    command = [sys.executable, "-m", f"recipes.{recipe}", *FLAGS, *flags, book]

    def start(workdir):
        return subprocess.Popen(
            [*command, f"--workdir={workdir}"], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=os.environ | {"XLA_FLAGS": XLA_FLAGS},
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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, start):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    process = start(workdir)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return workdir


def test_a_run_survives_a_kill_at_any_moment(request, uninterrupted, start, tmp_path):
    kills, chance = request.config.getoption("--kills"), random.Random(0)
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
