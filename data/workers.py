"""Tokenising, here or in processes of its own: these import neither jax nor grain nor datasets.

They are started by their own command, not by multiprocessing, which would import the recipe and with
it jax in each. They end when the process that started them does, however it dies.
"""

import concurrent.futures
import contextlib
import ctypes
import errno
import gc
import os
import pathlib
import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from data import DataError, conversations
from data.sources import Part
from data.tokenizer import Tokenizer

# Bytes of text in one call of the library, unless one part has more: it keeps 117 times as much
# meanwhile of English, 418 of digits, each of which is a token.
AT_ONCE = 2**16
# At most: a process takes 100 MB, a thread less than 1 MB. What reads the text gives about 8 MB of
# JSON Lines a second, and a core tokenises 1 MB.
PROCESSES, THREADS = 2, 8


def dtype(tokenizer: Tokenizer) -> np.dtype:
    """What holds every token."""
    return np.dtype(np.uint16 if tokenizer.size <= 2**16 else np.uint32)


class Tokenised(NamedTuple):
    """A part of the corpus; one that is a row of conversations can give several."""

    tokens: np.ndarray
    size: int  # bytes of text
    held_out: bool
    begins: bool  # whether a document begins here
    targets: np.ndarray | None = None  # bool, of each token, where only some are to be learned
    first: bool = True  # of what its row gives


def write(
    path: pathlib.Path, parts: list[Part], tokenizer: Tokenizer, at_once: int = AT_ONCE
) -> None:
    """Tokenises to a file, which is there only when it is whole.

    It has the tokens of all parts and, for each part, its number of tokens, its bytes of text, and
    whether it is held out and begins a document. Of conversations it has the targets, too, and for
    each document whether its row begins there.

    Raises DataError for a row that can't be tokenised.
    """
    kind = dtype(tokenizer)
    made = [
        one._replace(tokens=one.tokens.astype(kind))
        for group in _grouped(parts, at_once)
        for one in (_rows if group[0].row else _texts)(group, tokenizer)
    ]
    arrays = {
        "tokens": np.concatenate([one.tokens for one in made]),
        "lengths": np.array([len(one.tokens) for one in made], np.int64),
        "sizes": np.array([one.size for one in made], np.int64),
        "held_out": np.array([one.held_out for one in made]),
        "begins": np.array([one.begins for one in made]),
    }
    if made[0].targets is not None:
        arrays["targets"] = np.concatenate([one.targets for one in made])
        arrays["firsts"] = np.array([one.first for one in made])
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    with beside.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(beside, path)


def _texts(parts: list[Part], tokenizer: Tokenizer) -> Iterator[Tokenised]:
    start, end = (np.array(ids, np.int32) for ids in (tokenizer.start, tokenizer.end[:1]))
    # Some tokenizers put a space in front of a text, which a later part of a document has not.
    before = tokenizer.encode(["\n"])[0]
    texts = [part.text if part.begins else b"\n" + part.text for part in parts]
    for part, ids in zip(parts, tokenizer.encode(texts), strict=True):
        if not part.begins:
            apart = ids[: len(before)].tolist() == before.tolist()
            ids = ids[len(before) :] if apart else tokenizer.encode([part.text])[0]
        around = [start[: part.begins * len(start)], ids, end[: part.ends * len(end)]]
        yield Tokenised(np.concatenate(around), len(part.text), part.held_out, part.begins)


def _rows(parts: list[Part], tokenizer: Tokenizer) -> Iterator[Tokenised]:
    for part in parts:
        found = conversations.documents(part.text, tokenizer, part.row)
        for number, one in enumerate(found):
            size = conversations.size(one, tokenizer)
            yield Tokenised(one.tokens, size, part.held_out, True, one.targets, number == 0)


def _grouped(parts: list[Part], at_once: int) -> Iterable[list[Part]]:
    group, size = [], 0
    for part in parts:
        if group and size + len(part.text) > at_once:
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part.text)
    yield group


class Pool:
    """Processes that `write`, with threads for the cores that there are; leaving its context ends them.

    One is started and makes the others by forks, so that all share the tokenizer's memory.
    """

    def __init__(self, tokenizer: Tokenizer, cores: int):
        count = min(cores, PROCESSES)
        threads = min(-(-cores // count), THREADS)
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [end.fileno() for _, end in pairs]
        # One thread until it has forked, which is safe then; no signal from the terminal reaches them.
        alone = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
        alone |= {"MALLOC_ARENA_MAX": "1"}  # glibc's threads would keep 10 MB of their own each
        self._first = subprocess.Popen(
            [sys.executable, "-m", "data.workers", *map(str, (threads, *theirs))],
            cwd=pathlib.Path(__file__).parent.parent, env=os.environ | alone, pass_fds=theirs,
            stdin=subprocess.PIPE, process_group=0,
        )  # fmt: skip
        self._lines: queue.SimpleQueue = queue.SimpleQueue()  # to the processes that are free
        for ours, end in pairs:
            end.close()
            self._lines.put(ours)
        self._ours = [ours for ours, _ in pairs]
        with contextlib.suppress(BrokenPipeError), self._first.stdin as stdin:
            pickle.dump(tokenizer, stdin)
        self._threads = concurrent.futures.ThreadPoolExecutor(count)  # one for each waits for it
        self._pending: set[concurrent.futures.Future] = set()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._first.pid, signal.SIGKILL)
        self._first.wait()
        self._threads.shutdown()
        for line in self._ours:
            line.close()

    def write(self, path: pathlib.Path, parts: list[Part]) -> None:
        """Hands the work to the next process that is free; holds few parts in memory."""
        self.wait(len(self._ours))
        self._pending.add(self._threads.submit(self._ask, path, parts))

    def wait(self, most: int = 0) -> None:
        """Until at most so many are in work.

        Raises ChildProcessError if a process has died, OSError if a file can't be written, DataError
        for a row that can't be tokenised.
        """
        while len(self._pending) > most:
            done, self._pending = concurrent.futures.wait(
                self._pending, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for one in done:
                one.result()

    def _ask(self, path: pathlib.Path, parts: list[Part]) -> None:
        line = self._lines.get()
        try:
            work = pickle.dumps((path.absolute(), [tuple(part) for part in parts]))
            line.sendall(len(work).to_bytes(8) + work)
            with line.makefile("rb") as sent:
                error = pickle.load(sent)
        except (BrokenPipeError, ConnectionResetError, EOFError, pickle.UnpicklingError):
            error = ChildProcessError()
        finally:
            self._lines.put(line)
        if error:
            raise error


def _serve(threads: int, lines: list[int]) -> None:
    """Reads the tokenizer from stdin, and has a process for each line, which does what it is sent.

    Args:
      threads: of the tokenizer in each process.
      lines: file descriptors of sockets. One ends when the other process does, and so do these.
    """
    tokenizer = pickle.load(sys.stdin.buffer)
    tokenizer.encode(["a"])  # loads it
    gc.freeze()
    # glibc keeps what is freed: after loading, half of all memory. Others have no such function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    trim(0)
    mine = next((line for line in lines[1:] if not os.fork()), lines[0])
    for line in {*lines} - {mine}:
        os.close(line)
    if threads > 1:  # the library reads these when it is next called
        os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads)}
    at_once = AT_ONCE * min(threads, 4)
    with socket.socket(fileno=mine) as line, line.makefile("rb") as sent:
        while size := sent.read(8):
            path, parts = pickle.loads(sent.read(int.from_bytes(size)))
            answer = None
            try:
                write(path, [Part(*part) for part in parts], tokenizer, at_once)
            except OSError as error:
                answer = OSError(error.errno or errno.EIO, os.strerror(error.errno or errno.EIO))
            except DataError as error:
                answer = error
            del parts
            trim(0)
            line.sendall(pickle.dumps(answer))


if __name__ == "__main__":
    # The process that started this one has ended.
    with contextlib.suppress(
        EOFError, pickle.UnpicklingError, BrokenPipeError, ConnectionResetError
    ):
        _serve(int(sys.argv[1]), [int(line) for line in sys.argv[2:]])
