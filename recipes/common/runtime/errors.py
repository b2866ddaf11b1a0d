"""Exceptions that end a run; runtime/start.py turns them into exit codes."""

from data import UserError as UserError


class Stopped(Exception):  # noqa: N818  not an error if a preempted run has saved
    """Ends the run; the message says where it can resume.

    Args:
      code: exit code; 0 if a signal asked the run to stop.
    """

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code
