"""The lines of metrics.jsonl as TensorBoard's event files."""

import importlib.util
import pathlib
import sys
import time
import weakref
from typing import Any

from recipes.common.runtime import UserError, folders


def check(workdir: pathlib.Path) -> None:
    """Raises UserError if the library is not installed, or can't write there."""
    if folders.in_bucket(workdir):
        raise UserError(
            f"--tensorboard appends to files, and --workdir={workdir} is in a bucket, which appends to "
            "none; leave it out: metrics.jsonl has the same figures"
        )
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("--tensorboard needs tensorboardX; run pip install -e '.[tensorboard]'")


class Board:
    """Writes WORKDIR/tensorboard: step 10's "loss" is "train/loss", its "held_out_loss" "held_out/loss".

    tensorboardX's SummaryWriter writes from a thread, which a full disk ends and the next lines then
    wait for. So this writes its events itself, each at once.

    Args:
      first: steps done so far; what an earlier run wrote of this step and later is purged.
      lines: of metrics.jsonl so far; those that an earlier run did not write are written now.
    """

    def __init__(self, folder: pathlib.Path, first: int, lines: list[dict[str, Any]]):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob("events*"))
        # Files are read in the order of their names, which begin with the time in whole seconds.
        self._file = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        weakref.finalize(self, self._file.close)  # however the run ends
        if earlier:
            first = min(first, self._last_step(earlier[-1]))  # runs since may have had no board
            self._file.write_event(
                Event(step=first, session_log=SessionLog(status=SessionLog.START))
            )
        for line in lines:
            if not earlier or line["step"] >= first:
                self.write(line)

    def _last_step(self, path: pathlib.Path) -> int:
        """The step of the last event in a file; 0 where there is none."""
        records, begin, event = path.read_bytes(), 0, b""
        while begin + 16 <= len(records):  # size, its checksum, event, its checksum
            end = begin + 12 + int.from_bytes(records[begin : begin + 8], "little")
            if end + 4 > len(records):  # torn by a kill
                break
            event, begin = records[begin + 12 : end], end + 4
        try:
            return self._event.FromString(event).step
        except Exception:  # protobuf's: not an event
            return 0

    def write(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if self._file is None:
            return
        values = [
            self._summary.Value(tag=tag(key), simple_value=value)
            for key, value in line.items()
            if key != "step" and value is not None
        ]
        event = self._event(step=line["step"], wall_time=time.time())
        event.summary.CopyFrom(self._summary(value=values))
        try:
            self._file.write_event(event)
            self._file.flush()
        except OSError as error:
            print(f"warning: TensorBoard's events could not be written ({error.strerror}); training "
                  "continues without them", file=sys.stderr, flush=True)  # fmt: skip
            self._file = None


def tag(key: str) -> str:
    group, name = (
        ("held_out", key.removeprefix("held_out_"))
        if key.startswith("held_out_")
        else ("train", key)
    )
    return f"{group}/{name}"
