"""Text as examples of `seq_len` tokens: windows of it, or rows packed with whole documents.

The default corpus is the Python standard library's own source, which every machine has, in bytes:
a token is a byte, 0 to 255, and 256 precedes each document. data/sources.py lists what else there
is. Windows overlap by one token, so that every token but the first is a target once an epoch.
"""

import hashlib
import json

import grain
import numpy as np

from data import DataError, corpus, packing, sources
from data.batches import Dataset, Example
from data.corpus import Corpus, Split
from data.tokenizer import BYTES, START, Tokenizer

VOCAB_SIZE = 384  # 257 tokens, padded to a multiple of 128 so that the dim can be sharded


def encode(text: str | bytes) -> np.ndarray:
    """Text → uint16 tokens in bytes, without the START in front."""
    return BYTES.encode([text])[0].astype(np.uint16)


def decode(tokens) -> str:
    """Tokens → text; START and padding are dropped, bytes that are not UTF-8 become U+FFFD."""
    return BYTES.decode(tokens)


def load(
    dataset: str = "stdlib",
    text_column: str = "text",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    pack: str = "",
) -> Dataset:
    """A dataset as examples of `seq_len` tokens.

    Args:
      dataset, text_column: as `sources.find` takes them. Several sources are each packed alone, and
        mixed by their weights; the held-out rows are all of theirs, in order.
      tokenizer: None: bytes.
      pack: "true", rows of whole documents; "false", windows; "", rows where there is a tokenizer.

    Raises DataError if there is no such text, or less of it than one example.
    """
    tokenizer = tokenizer or BYTES
    packed = pack == "true" or (pack == "" and bool(tokenizer.files))
    found = sources.find(dataset, text_column)
    made = [corpus.prepare(source, tokenizer) for source in found]
    # Where each source is one document, its windows need no segments.
    bounds = packed or any(len(split.starts) > 1 for one in made for split in one[:2])
    train, held_out = (
        [_rows(one, part, seq_len, packed, bounds) for one in made] for part in corpus.SPLITS
    )
    for source, one, *rows in zip(found, made, train, held_out, strict=True):
        _check(source.name, one, rows, seq_len)
    filler = example(np.full(seq_len + 1, -1, np.int32))
    prints = [one.fingerprint for one in made]
    if len(made) > 1:
        shares = [source.weight for source in found]
        prints = [hashlib.sha256(json.dumps([prints, shares]).encode()).hexdigest()]
    facts = {"dataset": dataset, "seq_len": seq_len, "fingerprint": prints[0]}
    if tokenizer.files:
        facts["tokenizer"] = tokenizer.sha256
    return Dataset(
        train=_together(train),
        held_out=_together(held_out),
        filler=filler if bounds else {k: v for k, v in filler.items() if k != "segment_ids"},
        unit="tokens",
        units=seq_len,
        config={"vocab_size": tokenizer.size} if tokenizer.files else {},
        facts=facts | ({"pack": True} if packed else {}),
        parts=tuple((len(rows), s.weight) for rows, s in zip(train, found, strict=True)),
        held_out_bytes=sum(
            _bytes_behind(one.held_out, len(rows), seq_len, tokenizer, packed)
            for one, rows in zip(made, held_out, strict=True)
        ),
    )


def _check(name: str, one: Corpus, rows: list, seq_len: int) -> None:
    """Held-out rows need not be full; they are read only once."""
    few = len(one.train.tokens) <= seq_len
    for part, split, bad in (
        ("training", one.train, few or not len(rows[0])),
        ("held-out", one.held_out, not len(rows[1])),
    ):
        if bad:
            raise DataError(
                f"--dataset={name} has {len(split.tokens)} {part} tokens, fewer than one window of "
                f"--seq_len={seq_len} and its target; use more text or a shorter --seq_len"
            )


def _rows(one: Corpus, part: str, seq_len: int, pack: bool, bounds: bool):
    split: Split = getattr(one, part)
    if pack:
        folder = one.folder / f"{part}.packed{packing.CODE}-{seq_len}"
        return packing.Packed(split, seq_len, folder)
    return _Windows(split, seq_len, bounds)


def _bytes_behind(split: Split, rows: int, seq_len: int, tokenizer: Tokenizer, pack: bool) -> int:
    """Bytes of text that the targets of a split's rows stand for.

    Windows in bytes: the number of targets, among which the STARTs count as bytes, as they always
    have. Other windows: the text of their tokens without that of the first. Packed rows: all text
    without that of each document's first token, which has none where the tokenizer puts a start in
    front. `corpus.bytes_before` says how a character counts that is cut.
    """
    if pack:
        begins = split.starts[split.starts < len(split.tokens)]
        firsts, counts = np.unique(split.tokens[begins], return_counts=True)
        none = [corpus.text_bytes(first[None], tokenizer) for first in firsts]
        return split.bytes - int(np.dot(none, counts))
    if not tokenizer.files:
        return rows * seq_len
    first = corpus.text_bytes(split.tokens[:1], tokenizer)
    return corpus.bytes_before(split, rows * seq_len + 1, tokenizer) - first


class _Together(grain.sources.RandomAccessDataSource):
    """Several sources, one after another."""

    def __init__(self, sources: list):
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self):
        return int(self._ends[-1])

    def __getitem__(self, i):
        return {name: rows[0] for name, rows in self.take(np.array([i])).items()}

    def take(self, indices: np.ndarray) -> Example:
        of = np.searchsorted(self._ends, indices, side="right")
        taken = {}
        for number in np.unique(of):
            source, mine = self._sources[number], of == number
            part = source.take(indices[mine] - (self._ends[number] - len(source)))
            for name, rows in part.items():
                whole = taken.setdefault(name, np.empty((len(of), *rows.shape[1:]), rows.dtype))
                whole[mine] = rows
        return taken


def _together(sources: list):
    return sources[0] if len(sources) == 1 else _Together(sources)


# ---- windows -------------------------------------------------------------------------------------


def example(window: np.ndarray) -> Example:
    """The loss's arguments, [..., T], for windows of T + 1 tokens in bytes; -1 is padding.

    Segment ids count documents: a position attends only within its own.
    """
    tokens = np.maximum(window[..., :-1], 0)
    segment_ids = np.cumsum(tokens == START, axis=-1, dtype=np.int32)
    return {"tokens": tokens, "targets": window[..., 1:], "segment_ids": segment_ids}


class _Windows(grain.sources.RandomAccessDataSource):
    """Example i of a split: its tokens from i · length on."""

    def __init__(self, split: Split, length: int, bounds: bool = True):
        """`bounds`: whether there are documents to tell apart."""
        self._tokens, self._length, self._bounds = split.tokens, length, bounds
        self._starts = np.asarray(split.starts)  # without memmap's slow views

    def __len__(self):
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, i):
        return {name: rows[0] for name, rows in self.take(np.array([i])).items()}

    def take(self, indices: np.ndarray) -> Example:
        """Examples [N] of any order, stacked."""
        T, begin_N = self._length, np.asarray(indices, np.int64) * self._length
        window_NT = np.stack([self._tokens[begin : begin + T + 1] for begin in begin_N])
        window_NT = window_NT.astype(np.int32)
        batch = {"tokens": window_NT[:, :-1], "targets": window_NT[:, 1:]}
        if self._bounds:
            # Counts the documents that begin in a window, up to each position.
            first_N, end_N = (np.searchsorted(self._starts, at) for at in (begin_N, begin_N + T))
            marks_NT = np.zeros((len(begin_N), T), np.int32)
            for marks_T, begin, first, end in zip(marks_NT, begin_N, first_N, end_N, strict=True):
                marks_T[self._starts[first:end] - begin] = 1
            batch["segment_ids"] = np.cumsum(marks_NT, axis=1, dtype=np.int32)
        return batch
