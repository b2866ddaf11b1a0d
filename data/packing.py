"""Packs documents into rows of a fixed length by best-fit decreasing, with an index made once.

Rows are read by random access, so a batch stays a pure function of (seed, k) on any number of
processes. A document that fits a row is never cut. A longer one fills rows of its own, and its
remainder is packed like a short document. Each piece begins with the last token before it, so every
token of a document except its first is a target exactly once.

In conversations only some tokens are targets, and a piece without its beginning would teach answers
without their questions. A conversation longer than a row is cut to one row, or dropped if that row
has no target.
"""

import bisect
import json
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from data.batches import Rows
from data.conversations import Document, target_bytes
from data.corpus import ABOUT, Split, cached, is_whole, new_folder, write_about
from data.tokenizer import Tokenizer

CODE = 1  # raise it when the same documents would be packed differently
BLOCK = 2**20  # pieces that are packed together; bounds memory


class Lost(NamedTuple):
    """How much of the conversations does not fit into rows."""

    documents: int = 0  # number cut or dropped
    targets: int = 0  # number not trained on
    of: int = 0  # number of all targets
    longest: int = 0  # positions of the longest document


class Packed(Rows):
    """A split's documents, packed into rows of `length` positions.

    A row is {"tokens", "targets", "segment_ids"}, int32 [length]. Segment ids are 1, 2, … for the
    pieces of a row. Padding, at its end, has segment id 0 and target -1.
    """

    def __init__(self, split: Split, length: int, folder: pathlib.Path | None = None):
        """Opens the index in `folder`, or makes it there; by default next to the split's files."""
        folder = folder or split.path.with_name(f"{split.path.name}.packed{CODE}-{length}")
        if not is_whole(folder):
            with cached(), new_folder(folder) as made:
                _write(split, length, made)
        self._split, self._length = split, length
        self._tokens, self._targets = split.tokens, split.targets
        about = json.loads((folder / ABOUT).read_text())
        self.lost = Lost(*about.get("lost", ()))
        # pieces: [pieces, 2], first token and positions; rows: [rows + 1], the first piece of each.
        self._rows = np.memmap(folder / "rows", np.int64, "r")
        pieces = np.memmap(folder / "pieces", np.int64, "r") if self._rows[-1] else self._rows[:0]
        self._pieces = pieces.reshape(-1, 2)

    def __len__(self):
        return len(self._rows) - 1

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        T, N = self._length, len(indices)
        first, count = self._rows[indices], self._rows[indices + 1] - self._rows[indices]
        row_of_P = np.repeat(np.arange(N), count)  # P: all pieces of the rows
        number_P = _within(count)
        first_P, size_P = self._pieces[np.repeat(first, count) + number_P].T
        # A piece begins in its row where the pieces before it end.
        begin_P = np.cumsum(size_P) - size_P
        begin_P -= np.repeat(begin_P[np.minimum(np.cumsum(count) - count, len(size_P) - 1)], count)
        within = _within(size_P)
        to = np.repeat(row_of_P * T + begin_P, size_P) + within
        source = np.repeat(first_P, size_P) + within
        tokens, targets, segment_ids = (np.full(N * T, fill, np.int32) for fill in (0, -1, 0))
        tokens[to], targets[to] = self._tokens[source], self._tokens[source + 1]
        if self._targets is not None:
            targets[to] = np.where(self._targets[source + 1], targets[to], -1)
        segment_ids[to] = np.repeat(number_P + 1, size_P)
        named = {"tokens": tokens, "targets": targets, "segment_ids": segment_ids}
        return {name: flat.reshape(N, T) for name, flat in named.items()}

    def text_bytes(self, tokenizer: Tokenizer) -> int:
        """Bytes of text that the rows' targets stand for.

        This is all text except each document's first token, which has no text if the tokenizer
        starts documents. For conversations it is the answers without what is cut off.
        """
        split = self._split
        if split.targets is not None:
            return split.bytes - self._lost_bytes(tokenizer)
        begins = split.starts[split.starts < len(split.tokens)]
        firsts, counts = np.unique(split.tokens[begins], return_counts=True)
        sizes = [tokenizer.text_bytes(first[None]) for first in firsts]
        return split.bytes - int(np.dot(sizes, counts))

    def _lost_bytes(self, tokenizer: Tokenizer) -> int:
        """Bytes of text of the targets that do not fit into a row."""
        split, targets, kept = self._split, self._targets, self._length + 1
        ends, lost = np.append(split.starts[1:], len(split.tokens)), 0
        assert targets is not None
        sizes = np.diff(np.append(split.texts, split.bytes))
        for number in np.flatnonzero(ends - split.starts > kept):
            begin, end = split.starts[number], ends[number]
            document = Document(split.tokens[begin:end], targets[begin:end])
            cut = Document(document.tokens[:kept], document.targets[:kept])
            if cut.targets.any():
                lost += target_bytes(document, tokenizer) - target_bytes(cut, tokenizer)
            else:
                lost += int(sizes[number])
        return lost


def padding(packed: Packed) -> float:
    """Share of all positions that are padding."""
    return 1 - float(packed._pieces[:, 1].sum()) / (len(packed) * packed._length)


def best_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Row of each piece by best fit, decreasing: the fullest row that has room for it.

    Handles pieces of equal size, and rows with equal room, together: a million pieces take a second.

    Args:
      sizes: [P], from 1 to `room`.

    Returns: [P], rows from 0.
    """
    row_of, made, done = np.empty(len(sizes), np.int64), 0, 0
    order = np.argsort(-sizes, kind="stable")
    with_room: dict[int, list[np.ndarray]] = {}  # room left → rows
    rooms: list[int] = []  # its keys, in order
    for size, count in zip(*np.unique(-sizes, return_counts=True), strict=True):
        size, pieces, done = -int(size), order[done : done + count], done + int(count)
        while len(pieces):
            place = bisect.bisect_left(rooms, size)
            left = rooms[place] if place < len(rooms) else room
            each = left // size  # fill the row: less room left makes it the better fit
            wanted = -(-len(pieces) // each)
            if place == len(rooms):
                rows, made = np.arange(made, made + wanted), made + wanted
            else:
                rows, rest = np.split(with_room[left].pop(), [wanted])
                if len(rest):
                    with_room[left].append(rest)
                if not with_room[left]:
                    del with_room[left], rooms[place]
            into, pieces = np.split(pieces, [each * len(rows)])
            row_of[into] = np.repeat(rows, each)[: len(into)]
            last = len(into) - each * (len(rows) - 1)  # pieces in the last row
            for part, filled in ((rows[:-1], each), (rows[-1:], last)):
                if len(part) and left > filled * size:
                    space_left = left - filled * size
                    if space_left not in with_room:
                        bisect.insort(rooms, space_left)
                    with_room.setdefault(space_left, []).append(part)
    return row_of


def _within(counts: np.ndarray) -> np.ndarray:
    """Concatenates 0 … count - 1 for each count."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _pieces(split: Split, length: int) -> Iterator[np.ndarray]:
    """Yields [P, 2], the first token and the length of each piece, at most BLOCK at a time."""
    for document in range(0, len(split.starts), BLOCK):
        begins = split.starts[document : document + BLOCK + 1]
        if document + BLOCK >= len(split.starts):
            begins = np.append(begins, len(split.tokens))
        targets = np.maximum(np.diff(begins) - 1, 0)
        counts = -(-targets // length)
        ends = np.cumsum(counts)
        for piece in range(0, int(ends[-1]), BLOCK):
            numbers = np.arange(piece, min(piece + BLOCK, int(ends[-1])))
            of = np.searchsorted(ends, numbers, side="right")
            offset = (numbers - ends[of] + counts[of]) * length
            yield np.stack([begins[of] + offset, np.minimum(targets[of] - offset, length)], axis=1)


def _beginnings(
    split: Split, of_tokens: np.ndarray, length: int, lost: list[int]
) -> Iterator[np.ndarray]:
    """Yields pieces like `_pieces`: the beginning of each conversation, if a target is in it.

    Args:
      of_tokens: the split's targets, bool [tokens].
      lost: the fields of Lost, increased by what does not fit a row.
    """
    for document in range(0, len(split.starts), BLOCK):
        begin = split.starts[document : document + BLOCK]
        end = np.append(split.starts[document + 1 : document + BLOCK + 1], len(split.tokens))
        end = end[: len(begin)]
        size = np.minimum(end - begin - 1, length)  # never 0: the last token is a target
        targets = of_tokens[: end[-1]]
        edges = np.stack([begin + 1, begin + 1 + size], axis=1).ravel()
        kept = np.add.reduceat(targets, edges[edges < len(targets)], dtype=np.int64)[::2]
        every = np.add.reduceat(targets, begin + 1, dtype=np.int64)
        lost[0] += int((kept < every).sum())
        lost[1] += int((every - kept).sum())
        lost[2] += int(every.sum())
        lost[3] = max(lost[3], int((end - begin).max()) - 1)
        yield np.stack([begin, size], axis=1)[kept > 0]


def _write(split: Split, length: int, folder: pathlib.Path) -> None:
    """Writes the index: `pieces`, row by row, and `rows`, the number of each row's first piece."""
    total, lost = 0, [*Lost()]
    if split.targets is None:
        blocks = _pieces(split, length)
    else:
        blocks = _beginnings(split, split.targets, length, lost)
    with (folder / "pieces").open("wb") as pieces_file, (folder / "rows").open("wb") as rows_file:
        for pieces in blocks:
            row_of = best_fit(pieces[:, 1], length)
            pieces[np.argsort(row_of, kind="stable")].tofile(pieces_file)
            counts = np.bincount(row_of)
            (total + np.cumsum(counts) - counts).tofile(rows_file)
            total += len(pieces)
        np.array([total]).tofile(rows_file)
    write_about(folder, {} if split.targets is None else {"lost": lost})
