"""The log of a run: what each step measured, handed to the sinks; and how long the run took."""

import contextlib
import math
import pathlib
import time
from collections.abc import Iterator, Sequence

import jax

from recipes import STARTED
from recipes.common.runtime import Run, processes, warn
from recipes.common.storage import folders, jsonl
from recipes.common.storage.lock import Lock
from recipes.common.train import sinks


class NonFiniteError(RuntimeError):
    """A step's loss or gradient is not a finite number, and the update was not skipped."""


class Log:
    """Writes metrics one step late, so that the device always has a next step to run.

    Args:
      path: metrics.jsonl; None for a run that writes nothing. Lines of steps after `first` are
        dropped: the run takes those steps again.
      first: steps done so far.
      unit, per_step: what throughput counts ("tokens"), and how many a step has.
      peak: units per second at the devices' peak, for MFU; None if unknown.
      locks: the run folder's.
    """

    def __init__(
        self,
        path: pathlib.Path | None,
        first: int,
        run: Run,
        unit: str,
        per_step: int,
        peak: float | None = None,
        locks: Sequence[Lock] = (),
    ):
        self._last, self._every = run.steps, run.log_every
        self._unit, self._per_step, self._peak = unit, per_step, peak
        self._timed: list[tuple[int, float]] = []  # (steps, seconds) of each line
        self._pending: tuple[int, dict] | None = None
        self._wait, self._first_step_seconds = 0.0, 0.0
        self.before_first_step: dict[str, float] = {}  # what took how many seconds
        self._tolerated, self._in_a_row, self._skipped = run.skip_nonfinite, 0, 0
        self._since, self._since_step = time.perf_counter(), first
        self._record: jsonl.DiskLog | jsonl.BucketLog | None = None
        self._sinks: list[sinks.Sink] = []
        self._terminal: sinks.Terminal | None = None
        if not processes.is_first():
            return
        if path:
            # A run evaluates its first state if it was killed before that evaluation, starts from a
            # given model, or has no step to take.
            due = run.eval_every and first % run.eval_every == 0
            lines = jsonl.kept(path, first, evaluates_again=first >= run.steps or due or not first)
            self._record = jsonl.rewrite(path, lines, warn, locks)
            if run.tensorboard:
                with _warns(sinks.TensorBoard):
                    self._sinks.append(sinks.TensorBoard(path.parent, lines))
            if run.wandb:
                with _warns(sinks.WeightsAndBiases):
                    self._sinks.append(sinks.WeightsAndBiases(run.wandb, path.parent, lines))
        self._terminal = sinks.Terminal(run, first, unit, per_step, peak)
        self._sinks.append(self._terminal)

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
        self._first_step_seconds = self._first_step_seconds or time.perf_counter() - STARTED
        self._check(step, values)
        self._show(step, values["loss"])
        if step % self._every and step != self._last:
            return
        end, steps = time.perf_counter(), step - self._since_step
        seconds, waited = (end - self._since) / steps, self._wait / steps
        self._since, self._since_step, self._wait = end, step, 0.0
        speed = self._per_step / seconds
        self._timed.append((steps, seconds * steps))
        if "skipped" in values:  # since the line before
            values["skipped"], self._skipped = self._skipped, 0
        self.write(
            {"step": step, **values, "step_seconds": seconds, "input_wait_seconds": waited,
             f"{self._unit}_per_second": speed}
            | ({"mfu": speed / self._peak} if self._peak else {})
        )  # fmt: skip

    def _show(self, step: int, loss: float) -> None:
        """Shows a step's loss in the terminal, which is dropped if it fails."""
        if terminal := self._terminal:
            self._terminal = None
            with _warns(terminal):
                terminal.progress(step, loss)
                self._terminal = terminal

    def _check(self, step: int, values: dict[str, float]) -> None:
        """Raises NonFiniteError, unless --skip_nonfinite tolerates this many in a row."""
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
        if processes.is_first():
            warn(f"{what}; this update is skipped")

    def held_out(self, step: int, metrics: dict[str, float], seconds: float = 0.0) -> None:
        """Writes the line of an evaluation after a step: "held_out_loss" for "loss".

        Args:
          seconds: the evaluation's, which do not count as training.
        """
        self._since += seconds
        if self._terminal:
            self._terminal.pause(seconds)
        named = {sinks.HELD_OUT + name: value for name, value in metrics.items()}
        self.write({"step": step, **named})

    def write(self, line: jsonl.Line) -> None:
        """Hands a line to metrics.jsonl and all other sinks."""
        if self._record:
            self._record.write(line)
        before, self._sinks = self._sinks, []
        for sink in before:
            with _warns(sink):
                sink.write(line)
                self._sinks.append(sink)

    def times(self) -> str:
        """How long the run took, from the start of the command, and how fast its steps were."""
        began = self._first_step_seconds
        parts = {name: spent for name, spent in self.before_first_step.items() if spent > 0.1}
        spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items())
        where = f" ({spent})" if began and parts else ""
        begin = f", {began:.1f} s to the first step{where}" if began else ""
        # Caches are cold in the first line's steps.
        timed = self._timed[1:] or self._timed
        steps, seconds = (sum(column) for column in zip(*timed, strict=True)) if timed else (0, 1)
        per_second = steps * self._per_step / seconds
        mfu = per_second / self._peak if self._peak else None
        speed = f"; {sinks.throughput(per_second, self._unit, mfu)}" if steps else ""
        return f"Took {time.perf_counter() - STARTED:.0f} s{begin}{speed}."

    def flush(self) -> None:
        """Makes the lines of metrics.jsonl survive a crash of this process and its machine."""
        if self._record:
            self._record.flush()

    def pause(self) -> None:
        """Stops the progress bar."""
        if self._terminal:
            self._terminal.close()
        self.flush()

    def close(self) -> None:
        self.pause()
        for sink in [self._record, *self._sinks]:
            if sink:
                with _warns(sink):
                    sink.close()


@contextlib.contextmanager
def _warns(sink: sinks.Sink | type[sinks.Sink]) -> Iterator[None]:
    """Turns an error of a sink into a warning."""
    try:
        yield
    except Exception as error:  # libraries raise exceptions of their own
        warn(f"{sink.name} failed ({folders.reason(error)}); training continues without it")
