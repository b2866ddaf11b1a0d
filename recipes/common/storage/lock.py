"""A lock that allows one run per workdir, and is released when its process dies, however it dies.

On a disk it is the system's file lock. In a bucket it is the object lock.json, created only if there is
none (ifGenerationMatch=0) and rewritten every few seconds. A run that finds a lock watches it: if the
owner still writes, the workdir is in use; if it has been silent for long, the run takes over. If
several try, the bucket lets exactly one succeed.
"""

import contextlib
import datetime
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
import weakref
from typing import Any

from data import UserError, buckets
from recipes.common.storage import folders

BEAT_SECONDS = 5  # between two writes of lock.json
STALE_SECONDS = 30  # silence after which an owner is considered dead or unreachable
SURE_SECONDS = 1  # between writes of lock.json: a bucket accepts one a second for each object

_taken: set["BucketLock"] = set()  # by this process


def take(workdir: pathlib.Path, config: str) -> "Lock":
    """Takes the lock of a workdir. Raises UserError if another run has it, else any I/O error.

    Args:
      config: name of the workdir's file that the lock's `write` replaces.
    """
    path = workdir / config
    return FileLock(path) if folders.at(workdir).appends else BucketLock(path)


def release_all() -> None:
    """Releases all locks before this process exits, so that the next run needn't wait."""
    for lock in list(_taken):
        lock.close()


def _in_use(workdir: pathlib.Path, owner: str = "a running process") -> UserError:
    return UserError(
        f"--workdir={workdir} is in use by {owner}; wait for it to end, or use a different --workdir"
    )


class FileLock:
    """A locked file on a disk, released when this object or its process goes away."""

    lost = False  # whether another run has taken over; on a disk none can

    def __init__(self, path: pathlib.Path):
        self._file = path.open("a")
        self.close = weakref.finalize(self, self._file.close)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path.parent) from None

    def write(self, text: str) -> None:
        """Replaces the file's content."""
        self._file.truncate(0)
        print(text, file=self._file, flush=True)

    def check(self) -> None:
        """Does nothing: another run can't take it over."""


class BucketLock:
    """lock.json next to the file that `write` replaces. Unless closed, it must go stale first."""

    def __init__(self, path: pathlib.Path):
        self._path, self._object = path, path.with_name("lock.json")
        self._me = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._me |= {"process": _process(os.getpid())}
        self.lost, self._one, self._end = False, threading.Lock(), threading.Event()
        self._sure_until = 0.0
        self._generation = self._take()
        _taken.add(self)
        threading.Thread(target=self._beat, daemon=True).start()

    def write(self, text: str) -> None:
        folders.write(self._path, text.encode() + b"\n")

    def check(self) -> None:
        """Rewrites lock.json. Raises OSError if this run was silent for long, and another took over."""
        with self._one:
            now = time.monotonic()
            if not self._end.is_set() and not self.lost and now > self._sure_until:
                try:
                    self._generation = self._put(self._generation)
                    self._sure_until = now + SURE_SECONDS
                except FileExistsError:
                    self.lost = True
        if self.lost:
            raise OSError(
                f"this process was silent for {STALE_SECONDS} s, and another run has taken over "
                f"{self._path.parent}"
            )

    def close(self) -> None:
        """Deletes lock.json, unless another run has taken it over."""
        if self._end.is_set():
            return
        self._end.set()
        _taken.discard(self)
        with self._one, contextlib.suppress(*folders.errors()):
            if not self.lost:
                buckets.request("DELETE", self._object, ifGenerationMatch=str(self._generation))

    def _beat(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            with contextlib.suppress(*folders.errors()):  # the next save reports a lost lock
                self.check()

    def _take(self) -> int:
        first, since, warned = None, time.monotonic(), False
        while True:
            with contextlib.suppress(FileExistsError):
                return self._put(0)
            with contextlib.suppress(FileNotFoundError):  # its owner has just closed it
                generation, silent, owner = self._look()
                first = first or generation
                with contextlib.suppress(FileExistsError):  # another run was faster
                    if silent > STALE_SECONDS or _is_dead(owner):
                        return self._put(generation)
                who = f"process {owner.get('pid')} on {owner.get('host')}"
                if generation != first:
                    raise _in_use(self._path.parent, who)
                if not warned and time.monotonic() > since + 2 * BEAT_SECONDS:
                    warned = True
                    print(f"{self._path.parent} is still locked by {who}, which does not respond; "
                          f"taking over {STALE_SECONDS} s after its last sign of life",
                          file=sys.stderr, flush=True)  # fmt: skip
                time.sleep(0.5)

    def _put(self, generation: int) -> int:
        """Writes lock.json over this generation, 0 for none, and returns the new one.

        Raises FileExistsError if the object has a different generation.
        """
        match, content = {"ifGenerationMatch": str(generation)}, json.dumps(self._me).encode()
        try:
            made = buckets.post(
                self._object, uploadType="media", data=content, json_out=True, **match
            )
            return int(made["generation"])
        except FileExistsError:
            # Perhaps a response was lost, and the library's retry ran into our own first write.
            with contextlib.suppress(FileNotFoundError):
                now, _, owner = self._look()
                if owner.get("id") == self._me["id"]:
                    return now
            raise

    def _look(self) -> tuple[int, float, dict[str, Any]]:
        """Returns (generation, seconds since it was written by the bucket's own clock, owner)."""
        import email.utils  # takes 10 ms, which a run on a disk saves

        headers, about = buckets.request("GET", self._object)
        facts = json.loads(about)
        now = email.utils.parsedate_to_datetime(headers["Date"])
        then = datetime.datetime.fromisoformat(facts["updated"].replace("Z", "+00:00"))
        _, content = buckets.request("GET", self._object, alt="media")
        owner: Any = {}
        with contextlib.suppress(ValueError):
            owner = json.loads(content)
        owner = owner if isinstance(owner, dict) else {}
        return int(facts["generation"]), (now - then).total_seconds(), owner


def _process(pid: int) -> str:
    """An ID of a running process, unique across machines, containers and reboots; "" if none."""
    if sys.platform != "linux":
        return ""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        facts = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        alive = facts[0] not in "XZ"
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {facts[19]}" if alive else ""
    except (OSError, IndexError):
        return ""


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine and has ended, so there is no need to wait."""
    here = _process(os.getpid()).split()[:2]  # the boot and the container
    process = str(owner.get("process", "")).split()
    return (
        len(process) == 4
        and process[:2] == here
        and _process(owner.get("pid", 0)) != owner["process"]
    )


Lock = FileLock | BucketLock
