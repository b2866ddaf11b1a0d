"""How a run ends other than by finishing; runtime/start.py turns these into exit codes."""


class UserError(ValueError):
    """Something only the user can fix; the message is one line with the value and the fix."""


class Stopped(Exception):  # noqa: N818  a preempted run that has saved is no error
    """The run ends here, and the message says where it can resume.

    Args:
      code: the exit code; 0 where it was asked to stop.
    """

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code
