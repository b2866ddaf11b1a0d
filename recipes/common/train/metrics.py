"""metrics.jsonl, progress on the terminal, throughput."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from recipes import STARTED
from recipes.common.runtime import Run, folders, jsonl, processes
from recipes.common.train.tensorboard import Board
from recipes.common.train.uploaded import Uploaded


class NonFiniteError(RuntimeError):
    """A step's loss or gradient is not a finite number, and the update was not skipped."""


class Log:
    """Writes metrics one step late, so that the device always has a next step to run.

    Args:
      path: metrics.jsonl, or None for no file; lines of steps after `first` are dropped, as these
        steps run again.
      first: steps done so far.
      unit, per_step: what throughput counts ("tokens"), and how many of them a step has.
      peak: units per second that the devices could do at most, for MFU; None where that is unknown.
      locks: of the folder, RunFolder's; who has lost one writes to a bucket no more.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        first: int,
        run: Run,
        unit: str,
        per_step: int,
        peak: float | None = None,
        locks: Sequence[Any] = (),
    ):
        self.path, last = path, run.steps
        self._first, self._last, self._every = first, last, run.log_every
        self._unit, self._per_step, self._peak = unit, per_step, peak
        self._timed: list[tuple[int, float]] = []  # (steps, seconds) of each line
        self._pending: tuple[int, dict] | None = None
        self._wait, self._began = 0.0, 0.0
        self._tolerated, self._in_a_row, self._skipped = run.skip_nonfinite, 0, 0
        self._since, self._since_step = time.perf_counter(), first
        self._main = processes.is_first()
        self._file, self._unwritten, self._warned, self._board = None, b"", False, None
        self._object: Uploaded | None = None  # in place of a file, in a bucket
        if self._main and path:
            # The evaluation after the last saved step may be missing, so it is repeated, and that
            # of a given model before the first step.
            evaluates = (
                first >= last or (run.eval_every and first % run.eval_every == 0) or not first
            )
            lines = _keep_until(path, first, evaluates_again=evaluates)
            if run.tensorboard:
                self._board = Board(path.parent / "tensorboard", first, lines)
            if folders.in_bucket(path):
                text = "".join(json.dumps(line) + "\n" for line in lines)
                self._object = Uploaded(path, text, *(held.check for held in locks))
            else:
                self._file = path.open("ab", buffering=0)
                folders.sync(path.parent)  # its name, or that it has replaced the former one
                weakref.finalize(self, self._file.close)  # however the run ends
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
        """Takes the metrics of a step that is running; settles those of the step before."""
        self.settle()
        self._pending = (step, metrics)
        self._wait += input_wait

    def settle(self) -> None:
        """Waits for the step taken last and writes its line. Raises NonFiniteError."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._began = self._began or time.perf_counter() - STARTED
        self._check(step, values)
        if step % self._every and step != self._last:
            return
        now, steps = time.perf_counter(), step - self._since_step
        seconds, waited = (now - self._since) / steps, self._wait / steps
        self._since, self._since_step, self._wait = now, step, 0.0
        speed = self._per_step / seconds
        self._timed.append((steps, seconds * steps))
        if "skipped" in values:  # of the steps since the line before
            values["skipped"], self._skipped = self._skipped, 0
        self.write(
            {"step": step, **values, "step_seconds": seconds, "input_wait_seconds": waited,
             f"{self._unit}_per_second": speed}
            | ({"mfu": speed / self._peak} if self._peak else {})
        )  # fmt: skip
        self._show(step, values["loss"], speed, seconds)

    def _check(self, step: int, values: dict[str, float]) -> None:
        """Raises NonFiniteError, unless so many skipped updates in a row are tolerated."""
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if not bad:
            return
        name, value = min(bad.items(), key=lambda item: item[0] != "loss")
        what = f"{name} is {value} at step {step}"
        if self._in_a_row > self._tolerated:
            row = f", after {self._tolerated} skipped in a row" if self._tolerated else ""
            raise NonFiniteError(what + row)
        self._skipped += 1
        if self._main:
            print(f"warning: {what}; this update is skipped", file=sys.stderr, flush=True)

    def held_out(self, step: int, figures: dict[str, float], seconds: float = 0.0) -> None:
        """The line of an evaluation after a step: "held_out_loss" for "loss".

        Args:
          seconds: that it took, which are no step's.
        """
        self._since += seconds
        self.write({"step": step, **{f"held_out_{k}": value for k, value in figures.items()}})
        if self._main and step < self._last:
            shown = (k for k in figures if k != "targets" and not k[-1].isdigit())  # one of many
            told = (f"{k.replace('_', ' ')} {figures[k]:.4f}" for k in shown)
            print(f"step {step}/{self._last}  held-out {', '.join(told)}", flush=True)

    def write(self, record: dict) -> None:
        """One line of metrics.jsonl, on the first process. A number that is not finite is null."""
        if self._file is None and self._object is None:
            return
        finite = {k: v if math.isfinite(v) else None for k, v in record.items()}
        if self._board:
            self._board.write(finite)
        if self._object:
            self._object.add(json.dumps(finite) + "\n")
            return
        self._unwritten += json.dumps(finite).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(self._unwritten) == len(self._unwritten):
                self._unwritten = b""
                return
            why = "not all of it"
        except OSError as error:
            why = error.strerror
        self._file.truncate(size)  # no torn line: the lines are tried again with the next one
        if not self._warned:
            print(f"warning: {self._file.name} could not be written ({why}); training continues, and "
                  "writing is tried again with each line", file=sys.stderr, flush=True)  # fmt: skip
        self._warned = True

    def _show(self, step, loss, speed, seconds):
        speed_text = self._speed(speed)
        if self._bar:
            self._bar.update(self._task, completed=step, loss=f"{loss:.4f}", speed=speed_text)
        elif self._main:  # not a terminal: about ten lines a run
            stride = max(1, (self._last - self._first) // self._every // 10) * self._every
            if step % stride < self._every or step == self._last:
                left = (self._last - step) * seconds
                print(f"step {step}/{self._last}  loss {loss:.4f}  {speed_text}  {_clock(left)} left",
                      flush=True)  # fmt: skip

    def times(self) -> str:
        """How long the run took, from the start of the command, and how fast its steps were."""
        begin = f", {self._began:.1f} s of it before the first step was done" if self._began else ""
        # The first line's steps find caches empty.
        timed = self._timed[1:] or self._timed
        steps, seconds = (sum(column) for column in zip(*timed, strict=True)) if timed else (0, 1)
        speed = f"; {self._speed(steps * self._per_step / seconds)}" if steps else ""
        return f"Took {time.perf_counter() - STARTED:.0f} s{begin}{speed}."

    def _speed(self, units: float) -> str:
        mfu = f"  MFU {units / self._peak:.1%}" if self._peak else ""
        return f"{units:,.0f} {self._unit}/s{mfu}"

    def flush(self) -> None:
        """What is written so far is kept, whatever happens to this process or its machine."""
        if self._object:
            self._object.flush()
        elif self._file:
            with contextlib.suppress(OSError):  # `write` tells what can't be written
                os.fsync(self._file.fileno())

    def pause(self) -> None:
        """Stops the progress bar."""
        if self._bar:
            self._bar.stop()
        self.flush()

    def close(self) -> None:
        self.pause()
        if self._file:
            self._file.close()
        if self._object:
            self._object.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        if minutes >= 60
        else f"{minutes}:{seconds:02}"
    )


def _keep_until(path: pathlib.Path, step: int, evaluates_again: bool) -> list[dict[str, Any]]:
    """Drops the lines that this run will write again, and a line torn by a kill; returns the rest."""
    kept = []
    for record in jsonl.read(path):
        again = evaluates_again and record["step"] == step and "step_seconds" not in record
        if record["step"] <= step and not again:
            kept.append(record)
    if not folders.in_bucket(path) and path.exists():
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(json.dumps(record) + "\n" for record in kept))
        folders.sync(beside)
        os.replace(beside, path)
    return kept
