"""One run per workdir: a lock that is gone when its process is, however it dies.

On a disk the system holds it. In a bucket it is the object lock.json, made only if there is none
(ifGenerationMatch=0) and written again every few seconds. Who finds one waits for that: a lock whose
owner writes is in use, one that has been silent for long is taken over. Of several that try, the bucket
lets exactly one.
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

from data import buckets
from recipes.common.runtime import folders
from recipes.common.runtime.errors import UserError

BEAT_SECONDS = 5  # between two writes of lock.json
STALE_SECONDS = 30  # after which an owner that has not written is dead, or out of reach
SURE_SECONDS = 1  # after a write, before another is worth while: a bucket takes one a second

_held: set["BucketLock"] = set()  # of this process


def take(workdir: pathlib.Path, config: str) -> "FileLock | BucketLock":
    """The lock of a workdir. Raises UserError if another run has it, or an I/O error.

    Args:
      config: the name of the file in it that `write` is for.
    """
    kind = BucketLock if folders.in_bucket(workdir) else FileLock
    return kind(workdir / config)


def release_all() -> None:
    """Before this process exits: those of a dead process keep others waiting."""
    for lock in list(_held):
        lock.close()


def _in_use(workdir: pathlib.Path, owner: str = "a running process") -> UserError:
    return UserError(
        f"--workdir={workdir} is in use by {owner}; wait for it to end, or use a different --workdir"
    )


class FileLock:
    """A file, held locked until this object or its process is gone."""

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

    lost = False  # nobody can take it away

    def check(self) -> None:
        """Whether it is still held: always."""


class BucketLock:
    """lock.json beside the file that `write` is for. It has to be closed, or it goes stale."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        bucket, _, self._name = str(path.with_name("lock.json"))[len("gs://") :].partition("/")
        self._files, self._bucket = buckets.filesystem(), bucket
        self._me = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._me |= {"process": _process(os.getpid())}
        self.lost, self._one, self._end = False, threading.Lock(), threading.Event()
        self._sure_until = 0.0
        self._generation = self._take()
        _held.add(self)
        threading.Thread(target=self._beat, daemon=True).start()

    def write(self, text: str) -> None:
        """Replaces the file's content."""
        folders.write(self._path, text.encode() + b"\n")

    def check(self) -> None:
        """Raises OSError if another run has taken the lock, because this one was silent for long."""
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
        """Leaves the workdir to others."""
        if self._end.is_set():
            return
        self._end.set()
        _held.discard(self)
        with self._one, contextlib.suppress(*folders.errors()):
            if not self.lost:
                match = {"ifGenerationMatch": str(self._generation)}
                self._files.call("DELETE", "b/{}/o/{}", self._bucket, self._name, **match)

    def _beat(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            with contextlib.suppress(*folders.errors()):  # tried again; lost: told by the next save
                self.check()

    def _take(self) -> int:
        first, since, told = None, time.monotonic(), False
        while True:
            with contextlib.suppress(FileExistsError):
                return self._put(0)
            with contextlib.suppress(FileNotFoundError):  # it was closed just now
                generation, silent, owner = self._look()
                first = first or generation
                with contextlib.suppress(FileExistsError):  # another was faster
                    if silent > STALE_SECONDS or _is_dead(owner):
                        return self._put(generation)
                who = f"process {owner.get('pid')} on {owner.get('host')}"
                if generation != first:
                    raise _in_use(self._path.parent, who)
                if not told and time.monotonic() > since + 2 * BEAT_SECONDS:
                    told = True
                    print(f"{self._path.parent} was left locked by {who}, which does not answer: it is "
                          f"taken over {STALE_SECONDS} s after its last sign", file=sys.stderr, flush=True)  # fmt: skip
                time.sleep(0.5)

    def _put(self, generation: int) -> int:
        """Writes lock.json over this generation, 0: over none. Raises FileExistsError over another."""
        where = self._files._location + "/upload/storage/v1/b/{}/o"
        told = {"uploadType": "media", "name": self._name, "ifGenerationMatch": str(generation)}
        content = json.dumps(self._me).encode()
        try:
            made = self._files.call(
                "POST", where, self._bucket, data=content, json_out=True, **told
            )
            return int(made["generation"])
        except FileExistsError:
            # Perhaps an answer was lost on its way, and the library's second try has met our first.
            with contextlib.suppress(FileNotFoundError):
                now, _, owner = self._look()
                if owner.get("id") == self._me["id"]:
                    return now
            raise

    def _look(self) -> tuple[int, float, dict[str, Any]]:
        """(generation, seconds since it was written by the bucket's own clock, owner)."""
        object_ = (self._bucket, self._name)
        import email.utils  # a hundredth of a second, which a run on a disk does without

        headers, about = self._files.call("GET", "b/{}/o/{}", *object_)
        facts = json.loads(about)
        now = email.utils.parsedate_to_datetime(headers["Date"])
        then = datetime.datetime.fromisoformat(facts["updated"].replace("Z", "+00:00"))
        _, content = self._files.call("GET", "b/{}/o/{}", *object_, alt="media")
        owner: Any = {}
        with contextlib.suppress(ValueError):
            owner = json.loads(content)
        owner = owner if isinstance(owner, dict) else {}
        return int(facts["generation"]), (now - then).total_seconds(), owner


def _process(pid: int) -> str:
    """Names a running process among all machines, containers and times; "" if there is none."""
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
    """Whether the process was of this machine, and is no more: no need to wait."""
    mine, theirs = _process(os.getpid()).split()[:2], str(owner.get("process", "")).split()
    return (
        len(theirs) == 4 and theirs[:2] == mine and _process(owner.get("pid", 0)).split() != theirs
    )
