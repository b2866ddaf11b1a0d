"""SIGTERM and SIGINT: a training run finishes its step, saves and exits with 0; others just end.

A single process handles Python's signals. Several must stop at the same step, or their collectives
would wait forever: JAX's preemption service forwards a SIGTERM to all of them and picks the step.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import TextIO

from jax.experimental import multihost_utils

from recipes.common.runtime import processes
from recipes.common.storage import lock

RELEASE_SECONDS = 5  # limit for releasing the workdir's lock, which spares the next run a wait

_asked = ""  # the signal that asked this process to stop
_training = False
_resumes = True  # whether the command is one that resumes


def watch(resumes: bool = True) -> None:
    """Installs the handlers. With several processes, JAX later replaces the one of SIGTERM.

    Args:
      resumes: whether the same command goes on where it stopped, as a training run does.
    """
    global _resumes
    _resumes = resumes
    signal.signal(signal.SIGTERM, _handle)
    signal.signal(signal.SIGINT, _handle)


@contextlib.contextmanager
def training():
    """Inside the block a signal waits for the end of the step; outside it ends the process at once."""
    global _training
    _training = True
    try:
        yield
    finally:
        _training = False


def requested(step: int) -> str:
    """The signal that asks to stop after this step, or ""; equal on all processes. Call it each step."""
    if processes.count() == 1:
        return _asked
    return (_asked or "SIGTERM") if multihost_utils.reached_preemption_sync_point(step) else ""


def _handle(number: int, _frame) -> None:
    global _asked
    twice, _asked = _asked == "SIGINT", signal.Signals(number).name
    if twice and number == signal.SIGINT:
        _leave(130, sys.stderr, "\nStopped at once; checkpoints saved before are intact.\n")
    if processes.count() > 1:
        signal.raise_signal(signal.SIGTERM)  # JAX's handler tells the other processes
    elif not _resumes:
        _leave(128 + number, sys.stderr, f"Stopped by {_asked}.\n")
    elif not _training:
        _leave(
            0, sys.stdout, f"Stopped by {_asked} outside of training; the same command resumes.\n"
        )


def _leave(code: int, stream: TextIO, text: str) -> None:
    # The signal may have interrupted a print, or the lock's own code in this thread.
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(stream.fileno(), text.encode())
    releasing = threading.Thread(target=lock.release_all, daemon=True)
    releasing.start()
    releasing.join(RELEASE_SECONDS)
    os._exit(code)
