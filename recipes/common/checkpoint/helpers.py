"""Hashing that is shared out: process 0 asks, and each process hashes the files that it wrote.

They talk by JAX's coordination service, as processes.decide does: a save is in the background, where
no collective may run. Each reads only the names of its own share.
"""

import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

from recipes.common.runtime import folders, processes

Hash = Callable[[pathlib.Path, list[str]], dict[str, str]]  # folder, names → name → digest

_asked = threading.local()  # .topic, .number of requests: on process 0 while others help


def with_help(topic: str, hash_them: Hash, work: Callable[[], Any]) -> Callable[[], Any]:
    """`work`, to be called on process 0, whose calls of `digests` the other processes help with.

    They do it in here, until that work is done. `topic` names it, once in a run.
    """

    def asking() -> Any:
        _asked.topic, _asked.number = topic, 0
        try:
            return work()
        finally:
            processes.publish(f"{topic}/{_asked.number}", None)
            _asked.topic = None

    if processes.count() == 1:
        return work
    if not processes.is_first():
        help_with(topic, hash_them)
    return asking


def help_with(topic: str, hash_them: Hash) -> None:
    """Hashes what process 0 asks this one for, until it asks no more."""
    number = 0
    while request := processes.await_published(f"{topic}/{number}"):
        answer: dict[str, Any] = {}
        try:
            names = processes.await_published(f"{topic}/{number}/names/{processes.index()}")
            answer = {"digests": hash_them(folders.at(request), names)}
        except Exception as error:  # whatever it is: process 0 waits for an answer
            code, where = (getattr(error, name, None) for name in ("errno", "filename"))
            answer = {"error": [code, folders.reason(error), where]}
            if not isinstance(error, folders.errors()):
                raise
        finally:
            processes.publish(f"{topic}/{number}/{processes.index()}", answer)
        number += 1


def digests(folder: pathlib.Path, names: list[str], hash_them: Hash) -> dict[str, str]:
    """Name → digest, in the order of names; with the others' help if they are there."""
    topic = getattr(_asked, "topic", None)
    if not topic or not names:
        return hash_them(folder, names)
    number, shares = _asked.number, share(names, processes.count())
    others = range(1, processes.count())
    for other in others:
        processes.publish(f"{topic}/{number}/names/{other}", shares[other])
    processes.publish(f"{topic}/{number}", str(folder))
    _asked.number += 1
    found = hash_them(folder, shares[0])
    answers = [processes.await_published(f"{topic}/{number}/{other}") for other in others]
    processes.forget(f"{topic}/{number}")  # all have read it; a long run saves often
    for answer in answers:
        if "error" in answer:
            raise OSError(*answer["error"])
        found |= answer["digests"]
    return {name: found[name] for name in names}


def share(names: list[str], count: int) -> list[list[str]]:
    """The names for each process: those that it wrote if as many wrote them, else every count-th."""
    writers = [re.search(r"ocdbt\.process_(\d+)/", name) for name in names]
    if {int(found[1]) for found in writers if found} != set(range(count)):
        return [names[number::count] for number in range(count)]
    shares: list[list[str]] = [[] for _ in range(count)]
    for name, found in zip(names, writers, strict=True):
        shares[int(found[1]) if found else 0].append(name)
    return shares
