"""Killed with SIGKILL at any instant and started again until it is done, a run is the unbroken run.

pytest tests/test_crashes.py --kills=20 -s      # the long version; prints where each kill fell
"""

import random
import subprocess
import sys
import threading
import time

import pytest

from recipes.common import checkpoint
from tests.conftest import ROOT
from tests.runs import TINY, assert_bit_equal, records, state_of, steps_saved

STEPS = 40
FLAGS = (*TINY, "--mesh=4x2", f"--steps={STEPS}", "--checkpoint_every=3", "--log_every=1")
STARTUP = ("parameter ", "Compiled step", "Resumes ", "Starts ")  # lines that mark how far it is


def start(book, workdir):
    command = [sys.executable, "-m", "recipes.transformer", *FLAGS, book, f"--workdir={workdir}"]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def saves_under_way(workdir):
    folder = workdir / "checkpoints"
    return [p for p in folder.glob("*.*") if p.is_dir()] if folder.exists() else []


def kill_at(process, workdir, moment: str, chance: random.Random) -> str:
    """Kills the process at a moment of this kind; returns where that was."""
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))
    reader.start()
    if moment in ("init", "restore"):
        mark = chance.choice(STARTUP[:2] if moment == "init" else STARTUP[2:])
        while process.poll() is None and not any(line.startswith(mark) for line in lines):
            time.sleep(0.002)
        time.sleep(chance.random() * 0.3)
    else:
        while process.poll() is None and not any(line.startswith(STARTUP[2:]) for line in lines):
            time.sleep(0.01)
        time.sleep(chance.random())
        while moment == "save" and process.poll() is None and not saves_under_way(workdir):
            time.sleep(0.0005)
        if moment == "save":
            time.sleep(chance.random() * 0.05)
    process.kill()
    code = process.wait()
    reader.join()
    process.stdout.close()
    last = next((line for line in reversed(lines) if line.strip()), "").strip()
    half = [path.name for path in saves_under_way(workdir)]
    return f"{moment:7} exit {code:3}  after {last[:60]!r}  half written: {half}"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, book):
    workdir = tmp_path_factory.mktemp("unbroken")
    process = start(book, workdir)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return workdir


def test_killed_at_any_instant_and_started_again(request, unbroken, book, tmp_path):
    kills, chance = request.config.getoption("--kills"), random.Random(0)
    moments = (["save", "init", "step", "restore", "save"] * kills)[:kills]
    workdir, done = tmp_path / "w", 0
    for number, moment in enumerate(moments):
        where = kill_at(start(book, workdir), workdir, moment, chance)
        print(f"kill {number + 1}: {where}", flush=True)
        done += "exit  -9" in where
        if workdir.exists() and (workdir / "metrics.jsonl").exists():
            newest = steps_saved_whole(workdir)
            assert all(checkpoint.verify(workdir / "checkpoints" / str(s)) == "" for s in newest)
            if newest and newest[-1] >= STEPS - 6:  # nothing left to kill: begin again
                check(unbroken, book, workdir)
                workdir = tmp_path / f"w{number}"
    assert done >= kills - 2, "kills that fell after the end"
    check(unbroken, book, workdir)


def steps_saved_whole(workdir):
    return checkpoint.steps_in(workdir / "checkpoints")


def check(unbroken, book, workdir):
    process = start(book, workdir)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert steps_saved(workdir) == steps_saved(unbroken), "and nothing half written is left"
    assert_bit_equal(state_of(workdir, STEPS), state_of(unbroken, STEPS))
    fields = ("step", "loss", "grad_norm", "learning_rate")
    assert [step for step, *_ in records(workdir, *fields)] == list(range(1, STEPS + 1))
    assert records(workdir, *fields) == records(unbroken, *fields)
    held_out = ("step", "held_out_loss", "held_out_targets")
    assert records(workdir, *held_out) == records(unbroken, *held_out)
    text = (workdir / "metrics.jsonl").read_text()
    assert text.count("\n") == STEPS + 1
    assert text.endswith("\n")
