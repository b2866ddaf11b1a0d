"""metrics.jsonl: one JSON object per line, appended on a disk, or rewritten in a bucket.

Neither kind of log stops a run: a failure is a warning, and the next write has what was missed.
"""

import contextlib
import json
import math
import os
import pathlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from recipes.common.storage import folders
from recipes.common.storage.lock import Lock

Line = dict[str, Any]  # "step", and numbers by name; None for one that was not finite
THEN = "; training continues, and writing is tried again with each line"
UPLOAD_SECONDS = 2  # between uploads; a bucket accepts about one write a second to one object


def encode(line: Line) -> str:
    """The line as JSON. A number that is not finite is null."""
    values = {k: v if v is not None and math.isfinite(v) else None for k, v in line.items()}
    return json.dumps(values) + "\n"


def read(path: pathlib.Path) -> list[Line]:
    """The file's lines, without one torn by a kill; [] if there is no file."""
    lines = []
    content = path.read_bytes() if path.exists() else b""
    for text in content.decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
            if isinstance(line["step"], int):
                lines.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return lines


def kept(path: pathlib.Path, step: int, evaluates_again: bool) -> list[Line]:
    """The file's lines, without those that a run resuming at `step` writes again.

    Args:
      evaluates_again: whether the run first repeats the evaluation of `step`.
    """
    lines = []
    for line in read(path):
        again = evaluates_again and line["step"] == step and "step_seconds" not in line
        if line["step"] <= step and not again:
            lines.append(line)
    return lines


def rewrite(
    path: pathlib.Path, lines: list[Line], warn: Callable[[str], None], locks: Sequence[Lock]
) -> "DiskLog | BucketLog":
    """Replaces the file's lines; returns a log that appends to them.

    Args:
      warn: called with a message when a write fails for the first time.
      locks: the workdir's, for a log in a bucket: a run that lost its lock stops writing.
    """
    if folders.at(path).appends:
        return DiskLog(path, lines, warn)
    return BucketLog(path, lines, warn, locks)


class DiskLog:
    """A file on a disk. When the disk is full, lines wait for room, and none is torn."""

    def __init__(self, path: pathlib.Path, lines: list[Line], warn: Callable[[str], None]):
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(map(encode, lines)))
        folders.sync(temporary)
        os.replace(temporary, path)
        folders.sync(path.parent)  # the new name
        self._file, self._unwritten = path.open("ab", buffering=0), b""
        self._warn: Callable[[str], None] | None = warn  # until it has warned
        self.close = weakref.finalize(self, self._file.close)  # however the run ends

    def write(self, line: Line) -> None:
        self._unwritten += encode(line).encode()
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(self._unwritten) == len(self._unwritten):
                self._unwritten = b""
                return
            reason = "not all of it"
        except OSError as error:
            reason = error.strerror
        self._file.truncate(size)  # no torn line
        if self._warn:
            self._warn(f"{self._file.name} could not be written ({reason}){THEN}")
        self._warn = None

    def flush(self) -> None:
        """Makes the lines survive a crash of this process and its machine."""
        with contextlib.suppress(OSError):  # `write` warns of a disk that fails
            os.fsync(self._file.fileno())


class BucketLog:
    """An object, which each upload replaces. Uploads run in the background, and delay no step."""

    def __init__(self, path: pathlib.Path, lines: list[Line], warn, locks: Sequence[Lock]):
        self._path, self._locks = path, locks
        self._texts = ["".join(map(encode, lines))]
        self._sent = 1
        self._warn: Callable[[str], None] | None = warn  # until it has warned
        self._lock, self._timer = threading.Lock(), None

    def write(self, line: Line) -> None:
        self._texts.append(encode(line))
        if not self._timer:
            self._timer = threading.Timer(UPLOAD_SECONDS, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def flush(self) -> None:
        """Uploads new lines."""
        with self._lock:
            self._timer = None  # the next line starts another
            texts = self._texts[:]
            if len(texts) == self._sent:
                return
            try:
                for lock in self._locks:
                    lock.check()
                folders.write(self._path, "".join(texts).encode())
                self._sent = len(texts)
            except folders.errors() as error:
                if self._warn:
                    self._warn(f"{self._path} could not be written ({folders.reason(error)}){THEN}")
                self._warn = None

    def close(self) -> None:
        self.flush()
