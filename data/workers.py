"""Tokenising, here or in processes of its own: these import neither jax nor grain nor datasets.

They are started by their own command, not by multiprocessing, which would import the recipe and with
it jax in each. They end when the process that started them does, however it dies.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterable

import numpy as np

from data.sources import Part
from data.tokenizer import Tokenizer

AT_ONCE = 2**18  # bytes of text in one call of the library: it keeps 30 times as much meanwhile


def dtype(tokenizer: Tokenizer) -> np.dtype:
    """What holds every token."""
    return np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)


def write(path: pathlib.Path, parts: list[Part], tokenizer: Tokenizer) -> None:
    """Tokenises to a file, which is there only when it is whole.

    It has the tokens of all parts and, for each part, its number of tokens, its bytes of text, and
    whether it is held out and begins a document.
    """
    around = [np.array(ids, np.int32) for ids in (tokenizer.start, tokenizer.end[:1])]
    tokens = []
    for texts, group in _grouped(parts):
        for part, ids in zip(group, tokenizer.encode(texts), strict=True):
            start, end = around[0] if part.begins else (), around[1] if part.ends else ()
            tokens.append(np.concatenate([start, ids, end]).astype(dtype(tokenizer)))
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    with beside.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate(tokens),
            lengths=np.array([len(ids) for ids in tokens], np.int64),
            sizes=np.array([len(part.text) for part in parts], np.int64),
            held_out=np.array([part.held_out for part in parts]),
            begins=np.array([part.begins for part in parts]),
        )
    os.replace(beside, path)


def _grouped(parts: list[Part]) -> Iterable[tuple[list[bytes], list[Part]]]:
    group, size = [], 0
    for part in parts:
        group.append(part)
        size += len(part.text)
        if size >= AT_ONCE or part is parts[-1]:
            yield [one.text for one in group], group
            group, size = [], 0


class Pool:
    """Processes that `write`; leaving its context ends them."""

    def __init__(self, tokenizer: Tokenizer, count: int):
        root = pathlib.Path(__file__).parent.parent
        # Each is one thread, and no signal from the terminal reaches it.
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "data.workers"], cwd=root, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
            )
            for _ in range(count)
        ]  # fmt: skip
        self._idle: queue.SimpleQueue = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put((process, pickle.dumps(tokenizer)))
        self._threads = concurrent.futures.ThreadPoolExecutor(count)  # one for each waits for it
        self._pending: set[concurrent.futures.Future] = set()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # what it has not read
                process.stdin.close()
            process.stdout.close()
            process.wait()

    def write(self, path: pathlib.Path, parts: list[Part]) -> None:
        """Hands the work to the next process that is free; holds few parts in memory."""
        self.wait(len(self._processes))
        self._pending.add(self._threads.submit(self._ask, path, parts))

    def wait(self, most: int = 0) -> None:
        """Until at most so many are in work. Raises ChildProcessError if a process has died."""
        while len(self._pending) > most:
            done, self._pending = concurrent.futures.wait(
                self._pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for one in done:
                one.result()

    def _ask(self, path: pathlib.Path, parts: list[Part]) -> None:
        process, first = self._idle.get()
        try:
            process.stdin.write(first)
            pickle.dump((path, [tuple(part) for part in parts]), process.stdin)
            process.stdin.flush()
            if process.stdout.read(1) == b".":
                return
        except BrokenPipeError:
            pass
        finally:
            self._idle.put((process, b""))
        raise ChildProcessError(f"exit code {process.wait()}")


def _serve() -> None:
    """The tokenizer and then work from stdin, to stdout a byte for each that is done."""
    try:
        tokenizer = pickle.load(sys.stdin.buffer)
        while True:
            path, parts = pickle.load(sys.stdin.buffer)
            write(path, [Part(*part) for part in parts], tokenizer)
            sys.stdout.buffer.write(b".")
            sys.stdout.buffer.flush()
    except (EOFError, pickle.UnpicklingError, BrokenPipeError):  # the other process has ended
        return


if __name__ == "__main__":
    _serve()
