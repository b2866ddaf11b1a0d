"""Kills processes of a run at random moments; the result is bit-equal to an undisturbed run's.

python -m tests.by_hand.random_kills --processes=4 --kills=20
"""

import argparse
import os
import pathlib
import random
import tempfile
import time

from recipes.common import checkpoint
from tests.support.local_processes import LocalProcesses
from tests.support.runs import TINY, assert_bit_equal, records, state_of

IMPATIENT = """
from recipes.common.runtime import processes
processes.HEARTBEAT_SECONDS, processes.PATIENCE_SECONDS, processes.START_SECONDS = 6, 60, 60
"""
STEPS = 40
FLAGS = (*TINY, "--mesh=4x2", "--log_every=1", "--checkpoint_every=2", f"--steps={STEPS}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--processes", type=int, default=4)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["ZOO_CACHE"] = str(folder / "cache")  # compiled programs, for all starts
        book = folder / "book.txt"
        book.write_text(
            (pathlib.Path(__file__).parents[2] / "zoo" / "core" / "attention.py").read_text()
        )
        flags = (*FLAGS, f"--dataset={book}")
        alone, killed = folder / "alone", folder / "killed"
        ends = start(given.processes, flags, alone).finish()
        assert all(code == 0 for code, _, _ in ends), ends
        for number in range(given.kills):
            one_kill(number + 1, given.processes, flags, killed, chance)
        ends = start(given.processes, flags, killed).finish()
        assert all(code == 0 for code, _, _ in ends), ends
        assert_bit_equal(state_of(killed, STEPS), state_of(alone, STEPS))
        fields = ("step", "loss", "grad_norm", "learning_rate")
        assert records(killed, *fields) == records(alone, *fields)
        assert [step for step, *_ in records(killed, *fields)] == list(range(1, STEPS + 1))
        print(f"{given.kills} kills of {given.processes} processes: the same, bit for bit")


def start(count: int, flags: tuple[str, ...], workdir: pathlib.Path):
    return LocalProcesses(count, *flags, f"--workdir={workdir}", around=IMPATIENT)


def one_kill(
    number: int, count: int, flags: tuple[str, ...], workdir: pathlib.Path, chance: random.Random
) -> None:
    """Starts the run, kills one process of it, and waits until the others have ended by themselves."""
    before = newest(workdir)
    run, which = start(count, flags, workdir), chance.randrange(count)
    if chance.random() < 0.7:  # while it trains, else while it starts
        until = before + 2 * chance.randrange(1, 3)
        while newest(workdir) < min(until, STEPS) and run.processes[0].poll() is None:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)
    else:
        time.sleep(chance.random() * 20)
    run.processes[which].kill()
    killed = time.monotonic()
    codes = [code for code, _, _ in run.finish()]
    took = time.monotonic() - killed
    folders = [workdir / "checkpoints" / str(step) for step in steps(workdir)]
    assert all(checkpoint.verify(folder) == "" for folder in folders)
    print(f"kill {number}: process {which}, exit codes {codes}, others ended after {took:.1f} s, "
          f"saved {before} → {newest(workdir)}", flush=True)  # fmt: skip


def steps(workdir: pathlib.Path) -> list[int]:
    return checkpoint.steps_in(workdir / "checkpoints")


def newest(workdir: pathlib.Path) -> int:
    return max(steps(workdir), default=0)


if __name__ == "__main__":
    main()
