"""Whole texts as an encoder reads them: a row each, with the tokenizer's control tokens around it.

Also what datasets of such texts share: reading columns, and what is held out.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from data import DataError, sources
from data.batches import Example
from data.tokenizer import Tokenizer

HELD_OUT = 20  # one text of so many is held out, if the dataset has no split for it
AT_ONCE = 1_000  # texts that are tokenized at once
Row = tuple[str, dict[str, Any]]  # (place, columns); the place is for messages


class Texts:
    """Tokenized texts, in memory. A row has `length` positions."""

    def __init__(self, rows: Sequence[np.ndarray], length: int, longest: int = 0, cut: int = 0):
        self.length = length
        self.longest = longest  # tokens of the longest text, whole
        self.cut = cut  # texts that are cut
        self._ends = np.cumsum([0, *(len(row) for row in rows)])
        self._tokens = np.concatenate([np.zeros(0, np.int32), *rows])

    def __len__(self):
        return len(self._ends) - 1

    def take(self, numbers: np.ndarray) -> Example:
        """Rows [N, T]: tokens, and segment ids that are 1 for the text and 0 for padding."""
        tokens_NT = np.zeros((len(numbers), self.length), np.int32)
        segments_NT = np.zeros_like(tokens_NT)
        for n, number in enumerate(np.asarray(numbers).tolist()):
            tokens = self._tokens[self._ends[number] : self._ends[number + 1]]
            tokens_NT[n, : len(tokens)] = tokens
            segments_NT[n, : len(tokens)] = 1
        return {"tokens": tokens_NT, "segment_ids": segments_NT}

    @property
    def fingerprint(self) -> bytes:
        return hashlib.sha256(self._tokens.tobytes() + self._ends.tobytes()).digest()

    def notes(self) -> Iterator[str]:
        """A line about texts that are cut."""
        if self.cut:
            yield (
                f"warning: {self.cut:,} of {len(self):,} texts are cut at --seq_len={self.length}; "
                f"--seq_len={self.longest} keeps all."
            )


def encode(texts: Sequence[str], tokenizer: Tokenizer, length: int) -> Texts:
    """Tokenizes texts; longer ones are cut. Raises DataError if `length` has no room for a text."""
    room, rows, longest, cut = room_of(tokenizer, length), [], 0, 0
    for first in range(0, len(texts), AT_ONCE):
        for tokens in tokenizer.encode(texts[first : first + AT_ONCE]):
            longest = max(longest, len(tokens) - room + length)
            cut += len(tokens) > room
            rows.append(around(tokens[:room], tokenizer))
    return Texts(rows, length, longest, cut)


def encode_windows(texts: Iterable[bytes], tokenizer: Tokenizer, length: int) -> Texts:
    """Tokenizes texts of any length: longer ones become several rows."""
    room, rows = room_of(tokenizer, length), []
    for one in texts:
        (tokens,) = tokenizer.encode([one])
        for first in range(0, len(tokens), room):
            rows.append(around(tokens[first : first + room], tokenizer))
    return Texts(rows, length)


def around(tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of a text, int32, with the control tokens around it."""
    return np.array([*tokenizer.start, *tokens, *tokenizer.closing], np.int32)


def room_of(tokenizer: Tokenizer, length: int) -> int:
    """Tokens of text that a row has room for. Raises DataError if there are none."""
    controls = len(tokenizer.start) + len(tokenizer.closing)
    if controls >= length:
        raise DataError(
            f"--seq_len={length} has no room for a text between the {controls} control tokens around it; "
            f"use --seq_len={controls + 1} or more"
        )
    return length - controls


def filler(length: int) -> Example:
    """A row that is all padding."""
    return {name: np.zeros(length, np.int32) for name in ("tokens", "segment_ids")}


def cell(row: Any, column: str, flag: str, where: str) -> Any:
    """A row's value in a column. Raises DataError, naming the row, if there is none.

    Args:
      flag: the flag that names the column.
    """
    columns = list(row) if isinstance(row, dict) else []
    if column not in columns:
        raise DataError(
            f"{where} has no column {column!r}; it has {', '.join(map(repr, columns)) or 'none'}: set "
            f"--{flag} to one of them"
        )
    if row[column] is None:
        raise DataError(f"{where} has null in the column {column!r}; fill it, or remove the row")
    return row[column]


def text(row: Any, column: str, flag: str, where: str) -> str:
    """A row's text in a column. Raises DataError, naming the row, if it is empty or no text."""
    value = cell(row, column, flag, where)
    if not isinstance(value, str) or not value.strip():
        what = "an empty text" if isinstance(value, str) else type(value).__name__
        raise DataError(
            f"{where} has {what} in the column {column!r}; write a text, or remove the row"
        )
    return value


def splits(
    dataset: str, eval_dataset: str, made: Sequence[Row], column: str, flag: str
) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to evaluate on. Raises DataError if one of them would be empty.

    Args:
      made: the rows of --dataset=stdlib.
      column: its hash decides what is held out, if no split is given; `flag` names it.
    """

    def read(name: str) -> tuple[list[Row], list[Row] | None]:
        if name == "stdlib":
            return list(made), None
        train, of_split = sources.rows(name)
        return list(train), None if of_split is None else list(of_split)

    train, held_out = read(dataset)
    if eval_dataset:
        train += held_out or []
        held_out, of_split = read(eval_dataset)
        held_out += of_split or []
    elif held_out is None:
        digests = [
            hashlib.sha256(
                json.dumps(cell(row, column, flag, where), default=str).encode()
            ).digest()
            for where, row in train
        ]
        distinct = sorted({*digests})
        if len(distinct) < 2:
            raise DataError(
                f"--dataset={dataset} has {len(distinct)} different texts, and one is held out to "
                "evaluate on; add rows, or use --eval_dataset=FILE, which may be the same file"
            )
        last = distinct[max(1, len(distinct) // HELD_OUT) - 1]
        rows = list(zip(train, digests, strict=True))
        train = [row for row, digest in rows if digest > last]
        held_out = [row for row, digest in rows if digest <= last]
    for rows, name in ((train, dataset), (held_out, eval_dataset or dataset)):
        if not rows:
            raise DataError(f"--dataset={name} has no rows; use another file")
    return train, held_out


def facts(
    dataset: str, eval_dataset: str, length: int, tokenizer: Tokenizer, parts: Sequence[bytes]
) -> dict[str, Any]:
    """A Dataset's facts: what its examples depend on."""
    return (
        {"dataset": dataset, "seq_len": length}
        | {"fingerprint": hashlib.sha256(b"".join(parts)).hexdigest()}
        | ({"eval_dataset": eval_dataset} if eval_dataset else {})
        | ({"tokenizer": tokenizer.sha256} if tokenizer.files else {})
    )
