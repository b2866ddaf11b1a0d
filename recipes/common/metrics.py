"""metrics.jsonl, progress on the terminal, throughput."""

import json
import math
import os
import pathlib
import sys
import time

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from recipes import STARTED
from recipes.common.cli import Run


class NonFiniteError(RuntimeError):
    """A step's loss or gradient is not a finite number."""


def is_main_process() -> bool:
    return jax.process_index() == 0


def say(*lines: str) -> None:
    """Prints, on the first process only."""
    if is_main_process():
        print(*lines, sep="\n", flush=True)


def quote(text: str, most: int = 24) -> list[str]:
    """Lines to print of text that nobody has checked: no control characters, and not too many."""
    clean = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}"
        for c in text.expandtabs()
    )
    lines = ["  | " + line for line in clean.split("\n")]
    return lines[:most] + (["  | …"] if len(lines) > most else [])


class Log:
    """Writes metrics one step late, so that the device always has the next step to do.

    Args:
      path: metrics.jsonl, or None for no file; lines of steps after `first` are dropped, as those
        steps run again.
      first: steps done so far.
      unit, per_step: what throughput counts ("tokens"), and how many of it a step has.
    """

    def __init__(self, path: pathlib.Path | None, first: int, run: Run, unit: str, per_step: int):
        last = run.steps
        self._first, self._last, self._every = first, last, run.log_every
        self._unit, self._per_step = unit, per_step
        self._pending: tuple[int, dict] | None = None
        self._wait, self._began = 0.0, 0.0
        self._since, self._since_step = time.perf_counter(), first
        self._main = is_main_process()
        self._file = None
        if self._main and path:
            _keep_until(path, first)
            self._file = path.open("a", buffering=1)
        self._bar = None
        if self._main and sys.stdout.isatty() and last > first:
            columns = (
                "{task.description}",
                "loss {task.fields[loss]}",
                "{task.fields[speed]}",
                "left",
            )
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"), BarColumn(20),
                *map(TextColumn, columns), TimeRemainingColumn(), console=Console(),
            )  # fmt: skip
            self._task = self._bar.add_task("", total=last, completed=first, loss="", speed="")
            self._bar.start()

    def step(self, step: int, metrics: dict[str, jax.Array], input_wait: float) -> None:
        """Hands over the metrics of a step that is under way; settles those of the one before."""
        self.settle()
        self._pending = (step, metrics)
        self._wait += input_wait

    def settle(self) -> None:
        """Waits for the step handed over last and writes its line. Raises NonFiniteError."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._began = self._began or time.perf_counter() - STARTED
        for name, value in values.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"{name} is {value} at step {step}")
        if step % self._every and step != self._last:
            return
        now, steps = time.perf_counter(), step - self._since_step
        seconds, waited = (now - self._since) / steps, self._wait / steps
        self._since, self._since_step, self._wait = now, step, 0.0
        speed = self._per_step / seconds
        self.write(
            {"step": step, **values, "step_seconds": seconds, "input_wait_seconds": waited,
             f"{self._unit}_per_second": speed}
        )  # fmt: skip
        self._show(step, values["loss"], speed, seconds)

    def write(self, record: dict) -> None:
        """One line of metrics.jsonl, on the first process."""
        if self._file:
            self._file.write(json.dumps(record) + "\n")

    def _show(self, step, loss, speed, seconds):
        speed_text = f"{speed:,.0f} {self._unit}/s"
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=speed_text)
        elif self._main:  # not a terminal: about ten lines a run
            stride = max(1, (self._last - self._first) // self._every // 10) * self._every
            if step % stride < self._every or step == self._last:
                left = (self._last - step) * seconds
                print(f"step {step}/{self._last}  loss {loss:.4f}  {speed_text}  {_clock(left)} left",
                      flush=True)  # fmt: skip

    def times(self) -> str:
        """How long the run took, from the command on."""
        begin = f", {self._began:.1f} s of it before the first step was done" if self._began else ""
        return f"Took {time.perf_counter() - STARTED:.0f} s{begin}."

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        if self._file:
            self._file.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        if minutes >= 60
        else f"{minutes}:{seconds:02}"
    )


def _keep_until(path: pathlib.Path, step: int) -> None:
    """Drops the lines of later steps, and a line that a kill has torn."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (json.JSONDecodeError, KeyError):
            continue
    beside = path.with_suffix(".tmp")
    beside.write_text("".join(line + "\n" for line in kept))
    os.replace(beside, path)
