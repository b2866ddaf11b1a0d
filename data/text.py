"""Text as examples of `seq_len` tokens: windows of it, or rows packed with whole documents.

The default corpus is the Python standard library's own source, which every machine has, in bytes:
a token is a byte, 0 to 255, and 256 precedes each document. data/sources.py lists what else there
is. Windows overlap by one token, so that every token but the first is a target once an epoch.

Of conversations (data/conversations.py) only what the assistant says is a target. They are always packed.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import NamedTuple

import grain
import numpy as np

from data import DataError, chat, conversations, corpus, packing, sources
from data.batches import Dataset, Example
from data.conversations import Document, dated, size
from data.corpus import Corpus, Split
from data.tokenizer import BYTES, START, Tokenizer


def load(
    dataset: str = "stdlib",
    text_column: str = "text",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    pack: str = "",
    eval_dataset: str = "",
) -> Dataset:
    """A dataset as examples of `seq_len` tokens.

    Args:
      dataset, text_column: as `sources.find` takes them. Several sources are each packed alone, and
        mixed by their weights; the held-out rows are all of theirs, in order.
      tokenizer: None: bytes.
      pack: "true", rows of whole documents; "false", windows; "", rows where there is a tokenizer or
        a conversation.
      eval_dataset: what to hold out in place of a part of `dataset`, all of which is then trained on.

    Raises DataError if there is no such text, or less of it than one example.
    """
    tokenizer = tokenizer or BYTES
    found = sources.find(dataset, text_column, whole=bool(eval_dataset))
    made = [(source, corpus.prepare(source, tokenizer)) for source in found]
    every = [_Part(*one, part, part) for part in corpus.SPLITS for one in made]
    if eval_dataset:
        try:
            others = sources.find(eval_dataset, text_column, whole=True)
            others = [(source, corpus.prepare(source, tokenizer)) for source in others]
        except DataError as error:
            raise DataError(str(error).replace("--dataset=", "--eval_dataset=")) from error
        made += others
        every[len(found) :] = [_Part(*one, corpus.TRAIN, corpus.HELD_OUT) for one in others]
    masked = [part.source.name for part in every if part.split.targets is not None]
    if masked and pack == "false":
        raise DataError(f"--pack=false would cut the conversations of {masked[0]}; leave it out")
    packed = pack == "true" or (pack == "" and bool(tokenizer.files or masked))
    # Where each source is one document, its windows need no segments.
    bounds = packed or any(len(part.split.starts) > 1 for part in every)
    rows = [part.rows(seq_len, packed, bounds) for part in every]
    for part, its in zip(every, rows, strict=True):
        if part.use == corpus.HELD_OUT or eval_dataset != dataset:  # else it is the same text twice
            _check(part, its, seq_len)
    filler = example(np.full(seq_len + 1, -1, np.int32))
    train, held_out = rows[: len(found)], rows[len(found) :]
    return Dataset(
        train=_together(train),
        held_out=_together(held_out),
        filler=filler if bounds else {k: v for k, v in filler.items() if k != "segment_ids"},
        unit="tokens",
        units=seq_len,
        config={"vocab_size": tokenizer.size} if tokenizer.files else {},
        facts={"dataset": dataset, "seq_len": seq_len, "fingerprint": _fingerprint(made, found)}
        | ({"eval_dataset": eval_dataset} if eval_dataset else {})
        | ({"tokenizer": tokenizer.sha256} if tokenizer.files else {})
        | ({"template": conversations.key(tokenizer)} if masked else {})
        | ({"pack": True} if packed else {}),
        parts=tuple((len(its), s.weight) for its, s in zip(train, found, strict=True)),
        held_out_bytes=sum(
            _bytes_behind(part.split, len(its), seq_len, tokenizer, packed)
            for part, its in zip(every[len(found) :], held_out, strict=True)
        ),
        notes=tuple(
            note
            for part, its in zip(every, rows, strict=True)
            if part.split.targets is not None
            for note in _notes(part, its.lost, seq_len, tokenizer)
        ),
    )


class _Part(NamedTuple):
    """What is trained on of one source, or held out."""

    source: sources.Source
    corpus: Corpus
    name: str  # of corpus.SPLITS: which it is there
    use: str  # likewise: what it is for

    @property
    def split(self) -> Split:
        return getattr(self.corpus, self.name)

    def rows(self, seq_len: int, pack: bool, bounds: bool):
        if pack:
            folder = self.corpus.folder / f"{self.name}.packed{packing.CODE}-{seq_len}"
            return packing.Packed(self.split, seq_len, folder)
        return _Windows(self.split, seq_len, bounds)


def _fingerprint(made: list[tuple[sources.Source, Corpus]], found: list) -> str:
    """Of all corpora, and of their shares where there are several of these."""
    prints = [one.fingerprint for _, one in made]
    if len(made) == 1:
        return prints[0]
    told = [prints, [source.weight for source in found]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _check(part: _Part, rows, seq_len: int) -> None:
    """Held-out rows need not be full, and neither need those of conversations."""
    tokens, what = len(part.split.tokens), part.use.replace("train", "training").replace("_", "-")
    if part.split.targets is not None:
        if not len(rows):
            raise DataError(
                f"--dataset={part.source.name}: no answer of its {what} rows begins within the first "
                f"--seq_len={seq_len} tokens; use --seq_len={rows.lost.longest} for all of the longest"
            )
    elif not len(rows) or (part.use == corpus.TRAIN and tokens <= seq_len):
        raise DataError(
            f"--dataset={part.source.name} has {tokens} {what} tokens, fewer than one window of "
            f"--seq_len={seq_len} and its target; use more text or a shorter --seq_len"
        )


def _notes(part: _Part, lost: packing.Lost, seq_len: int, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines about conversations: what the targets are, and what is not trained on."""
    split = part.split
    what = "Training data" if part.use == corpus.TRAIN else "Held out"
    rows = f"{split.rows:,} row{'s' * (split.rows != 1)} of {part.source.name}"
    if len(split.starts) > split.rows:
        rows += f", {len(split.starts):,} turns one by one"
    day = f"; to the template today is {chat.TRAINING_DAY:%d %b %Y}" if dated(tokenizer) else ""
    yield f"{what}: the answers in {rows}, {lost.of:,} of {len(split.tokens):,} tokens{day}."
    if lost.documents:
        yield (
            f"warning: {lost.documents:,} of them are cut at --seq_len={seq_len}, which loses "
            f"{lost.targets:,} of the {lost.of:,} tokens; --seq_len={lost.longest} keeps all."
        )


def _bytes_behind(split: Split, rows: int, seq_len: int, tokenizer: Tokenizer, pack: bool) -> int:
    """Bytes of text that the targets of a split's rows stand for.

    Windows in bytes: the number of targets, among which the STARTs count as bytes, as they always
    have. Other windows: the text of their tokens without that of the first. Packed rows: all text
    without that of each document's first token, which has none where the tokenizer puts a start in
    front. `corpus.bytes_before` says how a character counts that is cut.
    """
    if split.targets is not None:
        return split.bytes - _lost_bytes(split, seq_len, tokenizer)
    if pack:
        begins = split.starts[split.starts < len(split.tokens)]
        firsts, counts = np.unique(split.tokens[begins], return_counts=True)
        none = [tokenizer.text_bytes(first[None]) for first in firsts]
        return split.bytes - int(np.dot(none, counts))
    if not tokenizer.files:
        return rows * seq_len
    first = tokenizer.text_bytes(split.tokens[:1])
    return corpus.bytes_before(split, rows * seq_len + 1, tokenizer) - first


def _lost_bytes(split: Split, seq_len: int, tokenizer: Tokenizer) -> int:
    """Bytes of text that targets stand for which do not fit into a row."""
    ends, lost = np.append(split.starts[1:], len(split.tokens)), 0
    for number in np.flatnonzero(ends - split.starts > seq_len + 1):
        begin, end = split.starts[number], ends[number]
        sizes = [
            size(Document(split.tokens[begin:last], split.targets[begin:last]), tokenizer)
            for last in (begin + seq_len + 1, end)
        ]
        lost += sizes[1] - sizes[0]
    return lost


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
