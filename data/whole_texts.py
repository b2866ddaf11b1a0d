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
    """Tokenized texts, in memory. A row has `length` positions.

    Args:
      types: the type of each token, for rows of two texts and models that tell them apart.
    """

    def __init__(
        self,
        rows: Sequence[np.ndarray],
        length: int,
        longest: int = 0,
        cut: int = 0,
        types: Sequence[np.ndarray] | None = None,
    ):
        self.length = length
        self._types = None if types is None else np.concatenate([np.zeros(0, np.int32), *types])
        self.longest = longest  # tokens of the longest text, whole
        self.cut = cut  # texts that are cut
        self._ends = np.cumsum([0, *(len(row) for row in rows)])
        self._tokens = np.concatenate([np.zeros(0, np.int32), *rows])

    def __len__(self):
        return len(self._ends) - 1

    def take(self, numbers: np.ndarray) -> Example:
        """Rows [N, T]: tokens, segment ids that are 1 for the text and 0 for padding, and any types."""
        tokens_NT = np.zeros((len(numbers), self.length), np.int32)
        segments_NT = np.zeros_like(tokens_NT)
        types_NT = np.zeros_like(tokens_NT)
        for n, number in enumerate(np.asarray(numbers).tolist()):
            begin, end = self._ends[number], self._ends[number + 1]
            tokens_NT[n, : end - begin] = self._tokens[begin:end]
            segments_NT[n, : end - begin] = 1
            if self._types is not None:
                types_NT[n, : end - begin] = self._types[begin:end]
        types = {} if self._types is None else {"types": types_NT}
        return {"tokens": tokens_NT, "segment_ids": segments_NT} | types

    @property
    def fingerprint(self) -> bytes:
        digest = hashlib.sha256(self._tokens.tobytes() + self._ends.tobytes())
        if self._types is not None:
            digest.update(self._types.tobytes())
        return digest.digest()

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


def encode_pairs(
    firsts: Sequence[str], seconds: Sequence[str], tokenizer: Tokenizer, length: int, types: bool
) -> Texts:
    """Tokenizes rows of two texts, with the tokenizer's tokens around and between them.

    Of longer rows, tokens of the longer text are cut, like "longest_first" of `transformers`.

    Args:
      types: whether rows have the types of tokens.
    """
    form = tokenizer.two_texts
    controls = len(form.before) + len(form.between) + len(form.after)
    if length < controls + 2:
        raise DataError(
            f"--seq_len={length} has no room for two texts between the {controls} control tokens around them; "
            f"use --seq_len={controls + 2} or more"
        )
    rows, of_types, longest, cut = [], [], 0, 0
    for begin in range(0, len(firsts), AT_ONCE):
        sides = (tokenizer.encode(texts[begin : begin + AT_ONCE]) for texts in (firsts, seconds))
        for first, second in zip(*sides, strict=True):
            longest = max(longest, len(first) + len(second) + controls)
            cut += len(first) + len(second) + controls > length
            kept, kept_second = longest_first(len(first), len(second), length - controls)
            parts = (form.before, first[:kept], form.between, second[:kept_second], form.after)
            rows.append(np.concatenate([np.array(part, np.int32) for part in parts]))
            first_types, second_types = [form.first_type] * kept, [form.second_type] * kept_second
            parts = (
                *form.before_types, *first_types, *form.between_types, *second_types,
                *form.after_types,
            )  # fmt: skip
            of_types.append(np.array(parts, np.int32))
    return Texts(rows, length, longest, cut, of_types if types else None)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that are kept of two texts, which have `room` together.

    >>> longest_first(3, 9, 8), longest_first(9, 9, 7), longest_first(7, 2, 20)
    ((3, 5), (3, 4), (7, 2))
    """
    shorter, longer = sorted((first, second))
    if shorter + longer > room:
        shorter = min(shorter, room // 2)
        longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


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
    if isinstance(row, dict) and column not in row:
        texts = [repr(name) for name, value in row.items() if isinstance(value, str)]
        raise DataError(
            f"{where} has no column {column!r}; it has {', '.join(texts) or 'no text'}: "
            + (f"set --{flag} to one of them" if texts else f"add {column!r}")
        )
    value = cell(row, column, flag, where)
    if not isinstance(value, str) or not value.strip():
        what = "an empty text" if isinstance(value, str) else type(value).__name__
        raise DataError(
            f"{where} has {what} in the column {column!r}; write a text, or remove the row"
        )
    return value


def unused(parts: Sequence[Sequence[Row]], used: Sequence[str]) -> list[str]:
    """A line that names the columns that a task does not use, if there are any."""
    names = {
        name for part in parts for _, row in part for name in (row if isinstance(row, dict) else ())
    } - {*used}
    return [unused_note(sorted(names))] if names else []


def unused_note(names: Sequence[str], of: str = "") -> str:
    shown = ", ".join(map(repr, names[:10])) + ", …" * (len(names) > 10)
    return f"Columns{f' of {of}' * bool(of)} that are not used: {len(names)} ({shown})."


def spelled(texts: Iterable[str], what: str, tokenizer: Tokenizer) -> list[str]:
    """A line that counts texts in which control tokens are spelled, if they are many."""
    spells = [tokenizer.spells_control(text) for text in texts]
    return control_note(sum(spells), len(spells), what)


def control_note(count: int, total: int, what: str) -> list[str]:
    """A warning about texts that were rendered before: from a tenth of them on."""
    if not count or count * 10 < total:
        return []
    return [
        f"warning: {count:,} of {total:,} {what} spell control tokens of the tokenizer, as rendered chats do, "
        "and the model reads them as letters; use rows of messages, or texts without them."
    ]


def column(part: Sequence[Row], name: str, flag: str) -> list[str]:
    """The texts of a column. Raises DataError, naming the row without one."""
    return [text(row, name, flag, where) for where, row in part]


def read(
    dataset: str, eval_dataset: str, made: Sequence[Row]
) -> tuple[list[Row], list[Row] | None]:
    """Rows to train on, and rows to evaluate on or None if none are given. Raises DataError.

    Args:
      made: the rows of --dataset=stdlib.
    """

    def read_one(name: str) -> tuple[list[Row], list[Row] | None]:
        if name == "stdlib":
            return list(made), None
        train, of_split = sources.rows(name)
        return list(train), None if of_split is None else list(of_split)

    train, held_out = read_one(dataset)
    if eval_dataset:
        train += held_out or []
        held_out, of_split = read_one(eval_dataset)
        held_out += of_split or []
    for rows, name in ((train, dataset), (held_out, eval_dataset or dataset)):
        if rows == []:
            raise DataError(f"--dataset={name} has no rows; use another file")
    return train, held_out


def hold_out(train: list[Row], dataset: str, column: str, flag: str) -> tuple[list[Row], list[Row]]:
    """Rows to train on and rows to evaluate on. Raises DataError if one of them would be empty.

    Args:
      column: its hash decides what is held out; `flag` names it.
    """
    digests = [
        hashlib.sha256(json.dumps(text(row, column, flag, where)).encode()).digest()
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
    return [row for row, digest in rows if digest > last], [
        row for row, digest in rows if digest <= last
    ]


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
