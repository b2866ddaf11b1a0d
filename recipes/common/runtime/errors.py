"""Exceptions that end a run; runtime/start.py turns them into exit codes."""

import contextlib
from collections.abc import Iterator

from data import UserError as UserError


class Stopped(Exception):  # noqa: N818  not an error if a preempted run has saved
    """Ends the run; the message says where it can resume.

    Args:
      code: exit code; 0 if a signal asked the run to stop.
    """

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def needs_instruments(what: str) -> Iterator[None]:
    """Raises UserError if an import inside fails because recipes/instruments was removed.

    Args:
      what: the flag or command that needs it.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("recipes.instruments"):
            raise
        raise UserError(
            f"{what} needs recipes/instruments, which is not here; git checkout recipes/instruments "
            "brings it back"
        ) from None
