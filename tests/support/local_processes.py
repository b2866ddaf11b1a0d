"""Runs of several processes on this machine."""

import pathlib
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.conftest import ROOT
from tests.support.quick import XLA_FLAGS, environment
from tests.support.runs import TINY

FLAGS = (*TINY, "--mesh=4x2", "--log_every=1", "--checkpoint_every=1000")

# What ends a process that has lost another: our own error, JAX's coordination service, or Gloo, which
# aborts in its own thread where one process still waits in a collective that another has given up.
LOST = (
    "error: this process can't continue without the others (",
    "distributed service detected fatal",
    "terminate called after throwing an instance of 'gloo::",
)

# Flags for recipes.dot_relu_dot, which starts fastest.
SMALLEST = ("--batch_size=16", "--mesh=4x2", "--log_every=1", "--checkpoint_every=1000")

# Records what each process reads and feeds to its devices, and which files it hashes.
WATCHED = """
import pathlib, runpy, sys
import numpy as np
from data import packing, text
from recipes.common.checkpoint import integrity
from recipes.common.runtime import mesh, processes
from recipes.common.train import evaluation, feed

folder, fed, read, hashed = pathlib.Path(sys.argv.pop(1)), [], [], []
sha256 = integrity.sha256
integrity.sha256 = lambda folder, names: hashed.extend(names) or sha256(folder, names)
to_devices = feed.to_devices
evaluation.to_devices = feed.to_devices = lambda rows, *rest: fed.append(rows) or to_devices(rows, *rest)
def watch(rows, take):
    rows.take = lambda self, i: read.extend((len(self._tokens), n) for n in i) or take(self, i)
for rows in (text.Windows, packing.Packed):
    watch(rows, rows.take)
try:
    runpy.run_module("recipes.transformer", run_name="__main__")
finally:
    if fed:
        fed = {name: np.stack([rows[name] for rows in fed]) for name in fed[0]}
        np.savez(folder / f"{processes._id}.npz", read=np.stack(read), hashed=np.array(hashed, str), **fed)
"""

# Where no collective fails, missing heartbeats reveal that a process has died.
IMPATIENT = "from recipes.common.runtime import processes; processes.HEARTBEAT_SECONDS = 6\n"

RECIPE = """
import runpy
runpy.run_module("recipes.{}", run_name="__main__", alter_sys=True)
"""


class LocalProcesses:
    """The processes of one run, each with its own exit code and output."""

    def __init__(
        self,
        count: int,
        *flags: str,
        watch: pathlib.Path | None = None,
        around: str = "",  # runs before the recipe
        program: str = "",  # runs in place of the recipe
        each: Sequence[tuple[str, ...]] = (),  # further flags of the first ones
        recipe: str = "transformer",
    ):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        command = ["-m", f"recipes.{recipe}"]
        if program:
            command = ["-c", program]
        elif watch:
            command = ["-c", around + WATCHED, str(watch)]
        elif around:
            command = ["-c", around + RECIPE.format(recipe)]
        own = [*each, *[()] * count]
        shared = [*command, *flags, f"--num_processes={count}", f"--coordinator=localhost:{port}"]
        self.processes = [
            subprocess.Popen(
                [sys.executable, *shared, f"--process_id={i}", *own[i]],
                cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=environment() | {"XLA_FLAGS": XLA_FLAGS},  # each compiles all for itself
            )
            for i in range(count)
        ]  # fmt: skip

    def read_until(self, mark: str) -> None:
        """Waits until process 0 prints a line that starts with `mark`."""
        assert any(line.startswith(mark) for line in self.processes[0].stdout), self.finish()

    def finish(self) -> list[tuple[int, str, str]]:
        """Waits for all; returns the (exit code, stdout, stderr) of each."""
        ends = [process.communicate(timeout=300) for process in self.processes]
        return [(p.returncode, *end) for p, end in zip(self.processes, ends, strict=True)]


@pytest.fixture
def smallest(inside, quick):
    """Runs recipes.dot_relu_dot with SMALLEST and more flags in this process; returns its output."""

    def command(*flags):
        done = inside("recipes.dot_relu_dot", *SMALLEST, *flags)
        assert done.code == 0, done.err
        return done.out

    return command
