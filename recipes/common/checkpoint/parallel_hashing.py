"""SHA-256 of a checkpoint's files, with the work shared by all processes of a run.

Process 0 decides what to hash and sends requests; the others serve them, each reading the files that
it wrote. Messages go through JAX's coordination service, because a save runs in the background, where
collectives are not allowed. Each process downloads only its own list of names.
"""

import concurrent.futures
import hashlib
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

from recipes.common.runtime import folders, processes

_open = threading.local()  # on process 0, while others serve: .topic, .number of requests so far


def call_on_first(topic: str, work: Callable[[], Any]) -> Any:
    """Runs `work` on process 0, whose `sha256` all share, and returns its value on all processes.

    Every process must call this. Raises the UserError of `work` on all of them.
    """
    if processes.count() > 1 and not processes.is_first():
        serve(topic)
    return processes.broadcast_from_first(lambda: share(topic, work))


def share(topic: str, work: Callable[[], Any]) -> Any:
    """Returns `work()`; inside it, processes that `serve` the topic share the work of `sha256`.

    Args:
      topic: a name used once in a run.
    """
    if processes.count() == 1:
        return work()
    _open.topic, _open.number = topic, 0
    try:
        return work()
    finally:
        processes.publish(f"{topic}/{_open.number}", None)
        _open.topic = None


def serve(topic: str) -> None:
    """Hashes what process 0 requests, until its `share` ends."""
    number = 0
    while request := processes.await_published(f"{topic}/{number}"):
        answer: dict[str, Any] = {}
        try:
            names = processes.await_published(f"{topic}/{number}/names/{processes.index()}")
            answer = {"digests": sha256_here(folders.to_path(request), names)}
        except Exception as error:  # any error must be answered: process 0 waits
            code, where = (getattr(error, name, None) for name in ("errno", "filename"))
            answer = {"error": [code, folders.reason(error), where]}
            if not isinstance(error, folders.errors()):
                raise
        finally:
            processes.publish(f"{topic}/{number}/{processes.index()}", answer)
        number += 1


def sha256(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    """File name → SHA-256, in the order of `names`; shared if called inside `share`.

    Raises `folders.errors` if a process can't read a file.
    """
    topic = getattr(_open, "topic", None)
    if not topic or not names:
        return sha256_here(folder, names)
    number, parts = _open.number, split(names, processes.count())
    others = range(1, processes.count())
    for other in others:
        processes.publish(f"{topic}/{number}/names/{other}", parts[other])
    processes.publish(f"{topic}/{number}", str(folder))
    _open.number += 1
    found = sha256_here(folder, parts[0])
    answers = [processes.await_published(f"{topic}/{number}/{other}") for other in others]
    processes.unpublish(f"{topic}/{number}")  # everyone has read it, and a long run saves often
    for answer in answers:
        if "error" in answer:
            raise OSError(*answer["error"])
        found |= answer["digests"]
    return {name: found[name] for name in names}


def sha256_here(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    """File name → SHA-256, in the order of `names`, computed by this process."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # hashing releases Python's lock
        return dict(zip(names, pool.map(digest, names), strict=True))


def split(names: list[str], count: int) -> list[list[str]]:
    """File names for each of `count` processes.

    Each process gets the files that it wrote if the checkpoint has `count` writers, else every
    count-th file.
    """
    writers = [re.search(r"ocdbt\.process_(\d+)/", name) for name in names]
    if {int(found[1]) for found in writers if found} != set(range(count)):
        return [names[number::count] for number in range(count)]
    parts: list[list[str]] = [[] for _ in range(count)]
    for name, found in zip(names, writers, strict=True):
        parts[int(found[1]) if found else 0].append(name)
    return parts
