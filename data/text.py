"""Text as examples of `seq_len` tokens: windows of it, or rows packed with whole documents.

The default corpus is the Python standard library's source, which every machine has, in bytes: a
token is a byte, 0 to 255, and 256 precedes each document. data/sources.py lists the other corpora.
Windows overlap by one token, so every token except the first is a target once an epoch.

Conversations (data/conversations.py) are always packed; only what the assistant says is a target.
"""

import functools
import hashlib
import json
from collections.abc import Iterator

import numpy as np

from data import DataError, chat, corpus, whole_texts
from data.batches import Dataset, Example, Rows
from data.corpus import Corpus, Split
from data.packing import Packed
from data.tokenizer import BYTES, START, Tokenizer


def load(
    dataset: str = "stdlib",
    text_column: str = "text",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    pack: str = "",
    eval_dataset: str = "",
    training: bool = True,
) -> Dataset:
    """Loads a dataset as examples of `seq_len` tokens.

    Args:
      dataset, text_column: see `sources.find`. Several sources are packed separately and mixed by
        their weights; the held-out rows are those of all sources, in order.
      tokenizer: None means bytes.
      pack: "true": rows of whole documents; "false": windows; "": rows if there is a tokenizer or a
        conversation.
      eval_dataset: the held-out data; without it, part of `dataset` is held out.
      training: whether notes tell about the training rows, too.

    Raises DataError if there is no such text, or too little for one example.
    """
    tokenizer = tokenizer or BYTES
    corpora = corpus.load(dataset, text_column, tokenizer, train_only=bool(eval_dataset))
    train, held_out = [one.train for one in corpora], [one.held_out for one in corpora]
    fingerprints, weights = corpora, [one.weight for one in corpora]
    unused = {one.train.source: one.unused for one in corpora if one.unused}
    if eval_dataset:
        others = corpus.load(eval_dataset, text_column, tokenizer, True, "eval_dataset")
        held_out, fingerprints = [one.train for one in others], [*corpora, *others]
        unused |= {one.train.source: one.unused for one in others if one.unused}
    masked = [split.source for split in (*train, *held_out) if split.targets is not None]
    if masked and pack == "false":
        raise DataError(f"--pack=false would cut the conversations of {masked[0]}; leave it out")
    packed = pack == "true" or (pack == "" and bool(tokenizer.files or masked))
    # Windows need no segments if each source is a single document.
    segments = packed or any(len(split.starts) > 1 for split in (*train, *held_out))
    make = Packed if packed else functools.partial(Windows, segments=segments)
    train_rows, held_out_rows = ([make(one, seq_len) for one in kind] for kind in (train, held_out))
    if eval_dataset != dataset:  # otherwise the same text is both
        _check(train, train_rows, seq_len, training=True)
    _check(held_out, held_out_rows, seq_len, training=False)
    filler = example(np.full(seq_len + 1, -1, np.int32))
    return Dataset(
        train=_concatenate(train_rows),
        held_out=_concatenate(held_out_rows),
        filler=filler if segments else {k: v for k, v in filler.items() if k != "segment_ids"},
        unit="tokens",
        units=seq_len,
        config={"vocab_size": tokenizer.size} if tokenizer.files else {},
        facts={"dataset": dataset, "seq_len": seq_len}
        | {"fingerprint": _fingerprint(fingerprints, weights)}
        | ({"eval_dataset": eval_dataset} if eval_dataset else {})
        | ({"tokenizer": tokenizer.sha256} if tokenizer.files else {})
        | ({"template": tokenizer.chat_key} if masked else {})
        | ({"pack": True} if packed else {}),
        parts=tuple(zip(map(len, train_rows), weights, strict=True)),
        has_answers=all(split.targets is not None for split in held_out),
        held_out_bytes=sum(rows.text_bytes(tokenizer) for rows in held_out_rows),
        notes=(
            *(whole_texts.unused_note(columns, source) for source, columns in unused.items()),
            *(_notes("Training data", train, train_rows, seq_len, tokenizer) if training else ()),
            *_notes("Held out", held_out, held_out_rows, seq_len, tokenizer),
        ),
    )


def _fingerprint(corpora: list[Corpus], weights: list[float]) -> str:
    """Hash of all corpora and, if there are several, of their weights in training."""
    fingerprints = [one.fingerprint for one in corpora]
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(json.dumps([fingerprints, weights]).encode()).hexdigest()


def _check(splits: list[Split], rows: list, seq_len: int, training: bool) -> None:
    """Raises DataError if a split has too little text; only training windows must be full."""
    what = "training" if training else "held-out"
    for split, examples in zip(splits, rows, strict=True):
        if split.targets is not None:
            if not len(examples):
                raise DataError(
                    f"--dataset={split.source}: no answer in its {what} rows begins within the first "
                    f"--seq_len={seq_len} tokens; --seq_len={examples.lost.longest} keeps all rows whole"
                )
        elif not len(examples) or (training and len(split.tokens) <= seq_len):
            raise DataError(
                f"--dataset={split.source} has {len(split.tokens)} {what} tokens, fewer than one window "
                f"of --seq_len={seq_len} and its target; use more text or a shorter --seq_len"
            )


def _notes(
    what: str, splits: list[Split], rows: list, seq_len: int, tokenizer: Tokenizer
) -> Iterator[str]:
    """Lines to print: which control tokens are letters and, of conversations, targets and what is lost."""
    asks_for_date = "strftime_now" in tokenizer.template
    date = f"; templates see the date {chat.TRAINING_DAY:%d %b %Y}" if asks_for_date else ""
    for split, examples in zip(splits, rows, strict=True):
        total = split.rows or len(split.starts)
        spells = min(split.spells, total)  # the end of a split may have become the held-out one
        yield from whole_texts.control_note(spells, total, f"rows of {split.source}")
        if split.targets is None:
            continue
        lost, count = examples.lost, f"{split.rows:,} row{'s' * (split.rows != 1)}"
        turns = f", {len(split.starts):,} turns one by one" * (len(split.starts) > split.rows)
        yield (
            f"{what}: the answers in {count} of {split.source}{turns}, "
            f"{lost.of:,} of {len(split.tokens):,} tokens{date}."
        )
        if split.ignored:
            yield (
                f"warning: the chat template ignores the tools of {split.ignored:,} of them, so the "
                "model learns calls of tools that it is never shown; use a template that renders tools."
            )
        if lost.documents:
            yield (
                f"warning: {lost.documents:,} of them are cut at --seq_len={seq_len}, which loses "
                f"{lost.targets:,} of the {lost.of:,} tokens; --seq_len={lost.longest} keeps all."
            )


class _Concatenated(Rows):
    """Several sources, joined end to end."""

    def __init__(self, sources: list):
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self):
        return int(self._ends[-1])

    def take(self, indices: np.ndarray) -> Example:
        source_N = np.searchsorted(self._ends, indices, side="right")
        taken = {}
        for number in np.unique(source_N):
            source, chosen = self._sources[number], source_N == number
            part = source.take(indices[chosen] - (self._ends[number] - len(source)))
            for name, rows in part.items():
                shape = (len(indices), *rows.shape[1:])
                taken.setdefault(name, np.empty(shape, rows.dtype))[chosen] = rows
        return taken


def _concatenate(sources: list):
    return sources[0] if len(sources) == 1 else _Concatenated(sources)


# ---- windows -------------------------------------------------------------------------------------


def example(window: np.ndarray) -> Example:
    """The loss's arguments, [..., T], for windows of T + 1 byte tokens; -1 is padding.

    Segment ids count documents: a position attends only within its own document.
    """
    tokens = np.maximum(window[..., :-1], 0)
    segment_ids = np.cumsum(tokens == START, axis=-1, dtype=np.int32)
    return {"tokens": tokens, "targets": window[..., 1:], "segment_ids": segment_ids}


class Windows(Rows):
    """Windows of a split: example i has its tokens from i · length on."""

    def __init__(self, split: Split, length: int, segments: bool = True):
        """Makes no copy of the tokens; without `segments`, examples have no segment ids."""
        self._split, self._tokens, self._length = split, split.tokens, length
        self._segments = segments
        self._starts = np.asarray(split.starts)  # avoids memmap's slow views

    def __len__(self):
        return (len(self._tokens) - 1) // self._length

    def take(self, indices: np.ndarray) -> Example:
        T, begin_N = self._length, np.asarray(indices, np.int64) * self._length
        window_NT = np.stack([self._tokens[begin : begin + T + 1] for begin in begin_N])
        window_NT = window_NT.astype(np.int32)
        batch = {"tokens": window_NT[:, :-1], "targets": window_NT[:, 1:]}
        if self._segments:
            # Counts the documents that begin in a window, up to each position.
            first_N, end_N = (np.searchsorted(self._starts, at) for at in (begin_N, begin_N + T))
            marks_NT = np.zeros((len(begin_N), T), np.int32)
            for marks_T, begin, first, end in zip(marks_NT, begin_N, first_N, end_N, strict=True):
                marks_T[self._starts[first:end] - begin] = 1
            batch["segment_ids"] = np.cumsum(marks_NT, axis=1, dtype=np.int32)
        return batch

    def text_bytes(self, tokenizer: Tokenizer) -> int:
        """Bytes of text that the windows' targets stand for.

        With the bytes tokenizer this is the number of targets: each START counts as a byte.
        """
        if not tokenizer.files:
            return len(self) * self._length
        first = tokenizer.text_bytes(self._tokens[:1])
        return self._split.bytes_before(len(self) * self._length + 1, tokenizer) - first
