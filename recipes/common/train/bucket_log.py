"""metrics.jsonl in a bucket, where nothing can be appended: each upload replaces the whole object."""

import pathlib
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from recipes.common.runtime import folders, jsonl

SECONDS = 2  # between uploads; a bucket accepts about one write a second to one object


class BucketLog:
    """A sink that uploads in the background, so that a slow bucket does not hold up training.

    Args:
      path: the object. The first new line replaces it.
      lines: the lines it starts with.
      locks: the workdir's. `check` raises OSError if another run has taken over, so that this one
        stops writing.
    """

    name = "metrics.jsonl"

    def __init__(self, path: pathlib.Path, lines: list[dict[str, Any]], locks: Sequence[Any]):
        self._path, self._locks = path, locks
        self._texts = ["".join(map(jsonl.encode, lines))]
        self._sent, self._warned = 1, False
        self._lock, self._due, self._end = threading.Lock(), threading.Event(), threading.Event()
        # The thread holds no reference, so a log that nobody holds any more ends it.
        arguments = (weakref.ref(self), self._due, self._end)
        threading.Thread(target=_upload_when_due, args=arguments, daemon=True).start()

    def write(self, line: dict[str, Any]) -> None:
        self._texts.append(jsonl.encode(line))
        self._due.set()

    def flush(self) -> None:
        """Uploads new lines. Warns of the first failure; the next upload includes what was missed."""
        with self._lock:
            texts = self._texts[:]
            if len(texts) == self._sent:
                return
            try:
                for lock in self._locks:
                    lock.check()
                folders.write(self._path, "".join(texts).encode())
                self._sent = len(texts)
            except folders.errors() as error:
                if not self._warned:
                    print(f"warning: {self._path} could not be written ({folders.reason(error)}); "
                          "training continues, and writing is tried again with each line",
                          file=sys.stderr, flush=True)  # fmt: skip
                self._warned = True

    def close(self) -> None:
        self.flush()
        self._end.set()
        self._due.set()


def _upload_when_due(log: weakref.ref, due: threading.Event, end: threading.Event) -> None:
    while not end.is_set():
        if due.wait(SECONDS):
            due.clear()
            if (held := log()) is None:
                return
            held.flush()
            del held
            end.wait(SECONDS)
        elif log() is None:
            return
