"""A text file in a bucket, to which nothing can be appended: it is written again as a whole."""

import pathlib
import sys
import threading
import weakref
from collections.abc import Callable

from recipes.common.runtime import folders

SECONDS = 2  # between two uploads: a bucket takes one a second of one object


class Uploaded:
    """Lines are uploaded in the background, so that a slow bucket does not hold up training.

    Args:
      path: the object; one that is there already is replaced with the first line that is added.
      text: what it begins with.
      check: raises OSError if the object is another's to write by now.
    """

    def __init__(self, path: pathlib.Path, text: str, check: Callable[[], None] = lambda: None):
        self._path, self._texts, self._sent, self._check = path, [text], 1, check
        self._lock, self._warned = threading.Lock(), False
        self._due, self._end = threading.Event(), threading.Event()
        threading.Thread(
            target=_upload_when_due, args=(weakref.ref(self), self._due, self._end), daemon=True
        ).start()

    def add(self, line: str) -> None:
        self._texts.append(line)
        self._due.set()

    def flush(self) -> None:
        """Uploads what is not there yet. A failure is told once, and tried again with what follows."""
        with self._lock:
            texts = self._texts[:]
            if len(texts) == self._sent:
                return
            try:
                self._check()
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


def _upload_when_due(uploaded: weakref.ref, due: threading.Event, end: threading.Event) -> None:
    """Until the end, or until nobody has the file any more."""
    while not end.is_set():
        if due.wait(SECONDS):
            due.clear()
            if (file := uploaded()) is None:
                return
            file.flush()
            del file
            end.wait(SECONDS)
        elif uploaded() is None:
            return
