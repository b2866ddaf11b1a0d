"""Checks that all processes of a run see the same folder."""

import contextlib
import os
import pathlib
import socket
import tempfile
import time

from recipes.common.runtime import UserError, processes
from recipes.common.runtime.folders import in_bucket, nearest

PATIENCE_SECONDS = 5  # for a network file system to show what another host has written


def check(path: pathlib.Path, flag: str) -> None:
    """Raises UserError, on all processes, if one can't see a file that process 0 writes at `path`.

    The empty file is briefly in the folder, or in its nearest existing parent.
    """
    if processes.count() == 1 or in_bucket(path):
        return

    def require_all(gathered: list[tuple[str, bool]]) -> None:
        for number, (host, sees) in enumerate(gathered):
            if not sees:
                raise UserError(
                    f"--{flag}={path} is not one folder: process {number} ({host}) does not see what "
                    f"process 0 ({gathered[0][0]}) writes there; use a file system that all hosts share"
                )

    made = ""
    try:
        if processes.is_first():
            with contextlib.suppress(OSError):  # reported when the run first writes there
                handle, made = tempfile.mkstemp(prefix=".shared-", dir=nearest(path))
                os.close(handle)
        name = processes.decide(made, lambda names: names[0])
        processes.decide([socket.gethostname(), not name or _appears(name)], require_all)
    finally:
        if made:
            os.unlink(made)


def _appears(name: str) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not os.path.exists(name):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
