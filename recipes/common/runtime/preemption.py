"""SIGTERM and SIGINT: a training run finishes its step, saves and exits with 0.

A single process watches Python's signals. Several must stop at the same step, or their collectives
wait forever: JAX's preemption service passes a SIGTERM on to all of them and names the step.
"""

import contextlib
import os
import signal
import sys
import threading
from typing import TextIO

from jax.experimental import multihost_utils

from recipes.common.runtime import lock, processes

RELEASE_SECONDS = 5  # for the workdir's lock, which others else wait for

_asked = ""  # the signal that asked this process to stop
_training = False


def watch() -> None:
    """Handles SIGTERM and SIGINT in this process. With several, JAX later handles SIGTERM itself."""
    signal.signal(signal.SIGTERM, _handle)
    signal.signal(signal.SIGINT, _handle)


@contextlib.contextmanager
def training():
    """Inside, a signal waits for the end of the step; outside, it ends the process at once."""
    global _training
    _training = True
    try:
        yield
    finally:
        _training = False


def requested(step: int) -> str:
    """Why the run should stop after this step, or "". The same on all processes; call each step."""
    if processes.count() == 1:
        return _asked
    return (_asked or "SIGTERM") if multihost_utils.reached_preemption_sync_point(step) else ""


def _handle(number: int, _frame) -> None:
    global _asked
    twice, _asked = _asked == "SIGINT", signal.Signals(number).name
    if twice and number == signal.SIGINT:
        _leave(130, sys.stderr, "\nStopped at once; checkpoints saved before are intact.\n")
    if processes.count() > 1:
        signal.raise_signal(signal.SIGTERM)  # JAX's own handler, which tells the others
    elif not _training:
        _leave(
            0, sys.stdout, f"Stopped by {_asked} outside of training; the same command resumes.\n"
        )


def _leave(code: int, stream: TextIO, text: str) -> None:
    os.write(stream.fileno(), text.encode())  # the signal may have interrupted a print …
    # … or, in this thread, the lock's own work.
    releasing = threading.Thread(target=lock.release_all, daemon=True)
    releasing.start()
    releasing.join(RELEASE_SECONDS)
    os._exit(code)
