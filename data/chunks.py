"""Tokenizes a corpus in chunks, each to a file of its own, on several threads.

The tokenizer's library releases Python's lock while it encodes, so threads use several cores and
share one copy of the vocabulary. Nothing outlives the process, however it ends.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from data import conversations
from data.sources import Part
from data.tokenizer import Tokenizer

# Most bytes of text in one call of the library (a single part may have more), and in all concurrent
# calls. While it encodes, the library holds 117 times as much memory for English and 418 times as
# much for digits, each of which is a token.
AT_ONCE, IN_ALL = 2**16, 2**19
# More threads would take more memory. A core tokenizes about 1 MB/s.
THREADS = 8
# glibc keeps memory that a thread has freed: 50 MB a thread after long parts of digits. Returning it
# takes time, so only long parts do it. Other systems lack this call.
_give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


class Tokenized(NamedTuple):
    """A part of the corpus; a row of conversations can become several."""

    tokens: np.ndarray
    size: int  # bytes of text
    held_out: bool
    begins: bool  # whether a document begins here
    targets: np.ndarray | None = None  # bool per token, where only some are targets
    first: bool = True  # whether it is the first of its row
    ignored: bool = False  # whether it is, and the template ignores the row's tools
    spells: bool = False  # whether it begins here, and its text spells a control token


def write_all(
    chunks: Iterable[tuple[pathlib.Path, list[Part]]], tokenizer: Tokenizer, cores: int
) -> None:
    """Tokenizes each chunk to its file, with few chunks in memory at a time.

    Raises OSError if a file can't be written, DataError for a row that can't be tokenized.
    """
    threads = min(cores, THREADS) if tokenizer.files else 1  # bytes are only copied
    stop, pending = threading.Event(), collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        try:
            for path, parts in chunks:
                pending.append(pool.submit(write, path, parts, tokenizer, stop))
                if len(pending) > threads + 1:
                    pending.popleft().result()
            while pending:
                pending.popleft().result()
        finally:
            stop.set()  # after an error or Ctrl-C, unfinished chunks are dropped


def write(
    path: pathlib.Path, parts: list[Part], tokenizer: Tokenizer, stop: threading.Event | None = None
) -> None:
    """Tokenizes to a file, which appears only when it is complete.

    The file has the tokens of all parts and, for each part, its number of tokens, its bytes of
    text, and whether it is held out, begins a document and spells a control token. For conversations it also has the
    targets and, for each document, whether it is the first of its row, and whether the template
    ignores the row's tools.

    Args:
      stop: once this is set, the call gives up and writes nothing.

    Raises DataError for a row that can't be tokenized.
    """
    made: list[Tokenized] = []
    for group in groups(parts, AT_ONCE):
        if stop and stop.is_set():
            return
        with _room(sum(len(part.text) for part in group)):
            tokenized = (_rows if group[0].row else _texts)(group, tokenizer)
            made += (one._replace(tokens=one.tokens.astype(tokenizer.dtype)) for one in tokenized)
    arrays = {
        "tokens": np.concatenate([one.tokens for one in made]),
        "lengths": np.array([len(one.tokens) for one in made], np.int64),
        "sizes": np.array([one.size for one in made], np.int64),
        "held_out": np.array([one.held_out for one in made]),
        "begins": np.array([one.begins for one in made]),
        "spells": np.array([one.spells for one in made]),
    }
    targets = [one.targets for one in made if one.targets is not None]
    if targets:
        arrays["targets"] = np.concatenate(targets)
        arrays["firsts"] = np.array([one.first for one in made])
        arrays["ignored"] = np.array([one.ignored for one in made])
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(partial, path)


_used, _room_changed = 0, threading.Condition()


@contextlib.contextmanager
def _room(size: int) -> Iterator[None]:
    """Waits until `size` more bytes may be encoded: all threads together encode at most IN_ALL."""
    global _used
    size = min(size, IN_ALL)
    with _room_changed:
        _room_changed.wait_for(lambda: _used + size <= IN_ALL)
        _used += size
    try:
        yield
    finally:
        if size > AT_ONCE:
            _give_back(0)
        with _room_changed:
            _used -= size
            _room_changed.notify_all()


def _texts(parts: list[Part], tokenizer: Tokenizer) -> Iterator[Tokenized]:
    start, end = (np.array(ids, np.int32) for ids in (tokenizer.start, tokenizer.end[:1]))
    # Some tokenizers put a space in front of a text. A later part of a document must not get one,
    # so it is encoded after a newline, whose tokens are then removed.
    newline = tokenizer.encode(["\n"])[0]
    texts = [part.text if part.begins else b"\n" + part.text for part in parts]
    for part, ids in zip(parts, tokenizer.encode(texts), strict=True):
        if not part.begins:
            separate = ids[: len(newline)].tolist() == newline.tolist()
            ids = ids[len(newline) :] if separate else tokenizer.encode([part.text])[0]
        pieces = [start[: part.begins * len(start)], ids, end[: part.ends * len(end)]]
        yield Tokenized(
            np.concatenate(pieces), len(part.text), part.held_out, part.begins,
            spells=part.begins and tokenizer.spells_control(part.text.decode(errors="replace")),
        )  # fmt: skip


def _rows(parts: list[Part], tokenizer: Tokenizer) -> Iterator[Tokenized]:
    for part in parts:
        documents = conversations.documents(part.text, tokenizer, part.row)
        ignored = conversations.ignores_tools(part.text, tokenizer)
        spells = conversations.spells_control(part.text, tokenizer)
        for number, one in enumerate(documents):
            size, first = conversations.target_bytes(one, tokenizer), number == 0
            yield Tokenized(
                one.tokens, size, part.held_out, True, one.targets, first, first and ignored,
                first and spells,
            )  # fmt: skip


def groups(parts: Iterable[Part], most: int) -> Iterator[list[Part]]:
    """Groups consecutive parts, in at most `most` bytes of memory unless a single part has more."""
    group, size = [], 0
    for part in parts:
        bytes_in_memory = len(part.text) + 100  # an empty document takes space too
        if group and size + bytes_in_memory > most:
            yield group
            group, size = [], 0
        group.append(part)
        size += bytes_in_memory
    if group:
        yield group
