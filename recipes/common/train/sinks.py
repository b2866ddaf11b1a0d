"""Where metrics go: metrics.jsonl, the terminal, TensorBoard, Weights & Biases.

metrics.jsonl is the record. TensorBoard and Weights & Biases show it: they first get the lines of
earlier starts, so --tensorboard and --wandb can be added when a run resumes.
"""

import collections
import json
import math
import pathlib
import secrets
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from recipes.common.runtime import Run
from recipes.common.storage import folders
from recipes.common.storage.jsonl import Line

HELD_OUT = "held_out_"  # prefix of an evaluation's numbers
SILENT_SECONDS = 60  # between lines, where stdout is no terminal
AVERAGED_STEPS = 10  # over which the shown speed is averaged


class Sink(Protocol):
    """Gets each line of metrics, on process 0. If it raises an error, the run warns and drops it."""

    name: str  # for messages

    def write(self, line: Line) -> None: ...
    def close(self) -> Any: ...


class Terminal:
    """A live line from the first step on; where stdout is no terminal, lines. And evaluations.

    There, the first step has a line, then each tenth of the run, and at least one step a minute.

    Args:
      first: steps done so far.
      unit, per_step: what throughput counts ("tokens"), and how many a step has.
      peak: units per second at the devices' peak, for MFU; None if unknown.
    """

    name = "the terminal"

    def __init__(self, run: Run, first: int, unit: str, per_step: int, peak: float | None = None):
        self._first, self._last, self._every = first, run.steps, run.log_every
        self._unit, self._per_step, self._peak = unit, per_step, peak
        now = time.perf_counter()
        self._printed = now
        # (step, when it was done) of the last steps, over which speed is averaged.
        self._done = collections.deque([(first, now)], maxlen=1 + AVERAGED_STEPS)
        self._bar = None
        if sys.stdout.isatty() and self._last > first:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"), BarColumn(20),
                TextColumn("{task.fields[text]}"), console=Console(),
            )  # fmt: skip
            self._task = self._bar.add_task("", total=run.steps, completed=first, text="starting")
            self._bar.start()

    def progress(self, step: int, loss: float) -> None:
        """Shows a step that is done."""
        now = time.perf_counter()
        self._done.append((step, now))
        since_step, since = self._done[0]
        seconds = max((now - since) / (step - since_step), 1e-9)
        speed = self._per_step / seconds
        mfu = speed / self._peak if self._peak else None
        left = clock((self._last - step) * seconds)
        text = f"loss {loss:.4f}  {throughput(speed, self._unit, mfu)}  {left} left"
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
            return
        stride = max(1, (self._last - self._first) // self._every // 10) * self._every
        due = step % stride == 0 or step in (self._first + 1, self._last)
        if due or now - self._printed >= SILENT_SECONDS:
            self._printed = now
            print(f"step {step}/{self._last}  {text}", flush=True)

    def pause(self, seconds: float) -> None:
        """Leaves out an evaluation that just took this long."""
        self._done = collections.deque(
            ((step, when + seconds) for step, when in self._done), maxlen=self._done.maxlen
        )

    def write(self, line: Line) -> None:
        step = line["step"]
        # One number per expert would be too many.
        shown = [k for k in line if k.startswith(HELD_OUT) and not k[-1].isdigit()]
        shown = {k.removeprefix(HELD_OUT): line[k] for k in shown if k != f"{HELD_OUT}targets"}
        values = (f"{name.replace('_', ' ')} {value:.4f}" for name, value in shown.items())
        if shown and step < self._last:
            print(f"step {step}/{self._last}  held-out {', '.join(values)}", flush=True)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()


class TensorBoard:
    """WORKDIR/tensorboard: step 10's "loss" is "train/loss", its "held_out_loss" "held_out/loss".

    Events are written at once, by tensorboardX's EventsWriter. Its SummaryWriter writes them from a
    thread; a full disk ends that thread, and then training hangs on its queue.
    """

    name = "TensorBoard"

    def __init__(self, workdir: pathlib.Path, lines: list[Line]):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2

        protos: Any = event_pb2
        self._event, self._scalar = protos.Event, summary.scalar
        folder = workdir / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # All lines are written again. The newest file stays: a running TensorBoard may be reading it.
        for stale in sorted(folder.glob("events*"))[:-1]:
            stale.unlink()
        # The suffix orders files that start in the same second.
        self._file = event_file_writer.EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self.close = weakref.finalize(self, self._file.close)  # however the run ends
        # Makes TensorBoard forget what it has read from the file before.
        start = protos.SessionLog(status=protos.SessionLog.START)
        self._file.write_event(self._event(step=0, session_log=start))
        for line in lines:
            self.write(line)

    def write(self, line: Line) -> None:
        event = self._event(step=line["step"], wall_time=time.time())
        for name, value in scalars(line):
            event.summary.MergeFrom(self._scalar(name, value))
        self._file.write_event(event)
        self._file.flush()


class WeightsAndBiases:
    """A run of a wandb project, with TensorBoard's names. WORKDIR/wandb has its id, to resume it.

    Logging hands a line to wandb's own process, which uploads it: a slow network delays no step.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, workdir: pathlib.Path, lines: list[Line]):
        import wandb

        id_file = workdir / "wandb" / "id"
        if not id_file.exists():
            folders.at(id_file.parent).make()
            folders.write(id_file, secrets.token_hex(4).encode())
        config = workdir / "config.json"
        self._run = wandb.init(
            project=project,
            id=id_file.read_text(),
            resume="allow",
            name=workdir.name,
            config=json.loads(config.read_text())["flags"] if config.exists() else None,
            dir=workdir if folders.at(workdir).appends else tempfile.mkdtemp(),
            settings=wandb.Settings(silent=True, console="off"),
        )
        local = pathlib.Path(self._run.dir).parent
        place = f"{local}; to upload: wandb sync {local}" if self._run.offline else self._run.url
        print(f"{self.name}: {place}", flush=True)
        for line in lines:
            self.write(line)

    def write(self, line: Line) -> None:
        # A resumed run repeats the steps since its checkpoint; wandb has them, and rejects repeats.
        if line["step"] >= self._run.starting_step:
            self._run.log(dict(scalars(line)), step=line["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(line: Line) -> Iterator[tuple[str, float]]:
    """("train/loss", 1.5), … of a line, without numbers that are not finite."""
    for name, value in line.items():
        if name != "step" and value is not None and math.isfinite(value):
            group = "held_out" if name.startswith(HELD_OUT) else "train"
            yield f"{group}/{name.removeprefix(HELD_OUT)}", value


def throughput(per_second: float, unit: str, mfu: float | None) -> str:
    return f"{per_second:,.0f} {unit}/s" + (f"  MFU {mfu:.1%}" if mfu else "")


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
