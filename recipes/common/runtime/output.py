"""Standard output and error whose reader may leave: `… | head -1`, a closed terminal, a full disk."""

import io
import sys
from typing import Any


class _Unfailing(io.FileIO):
    """A file whose writes never fail; what can't be written is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def unfailing(descriptor: int, encoding: str, line_buffering: bool) -> io.TextIOWrapper:
    """A text stream onto a file descriptor, which stays open.

    Escapes characters that the encoding lacks, and bytes of file names that are no UTF-8.
    """
    # The raw file ignores errors, not `print`: so Python's own flush at exit succeeds too.
    raw = io.BufferedWriter(_Unfailing(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=line_buffering)


def outlive_readers() -> None:
    """Lets a command go on, quietly, when nobody reads its output any more."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
            continue  # another one's, such as a test's or a notebook's
        stream.flush()
        setattr(sys, name, unfailing(stream.fileno(), stream.encoding, stream.line_buffering))
