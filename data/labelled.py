"""Texts with labels, or pairs of texts with labels, for encoders that classify.

    {"text": "A fine film.", "label": "positive"}
    {"text": "Dull.", "label": 0}
    {"premise": "It rains.", "hypothesis": "It is dry.", "label": "contradiction"}

Names of classes are the labels, sorted. Numbers below the number of a given model's classes are its
classes, in its order. The default texts are pieces of the standard library's source: code,
comments and docstrings.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from data import DataError, snippets, whole_texts
from data.batches import Dataset, Example, Rows
from data.tokenizer import BYTES, Tokenizer
from data.whole_texts import Row, Texts

WHERE = "a piece of the standard library"
MOST = 120  # characters of such a piece
DECIMAL = re.compile(r"[+-]?\d+\.\d*")
GAPS = ("", "nan", "null", "<na>", "n/a", "#n/a")  # as programs write an empty cell, in lower case
# Columns of datasets whose rows have two texts: natural language inference, paraphrases, reranking.
TWO_TEXTS = (
    ("text", "text_pair"),
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("query", "passage"),
    ("query", "document"),
)
GAPS_OF_NUMBERS = ("none", "na", "-", "?")  # names of classes among other names


class Labelled(Rows):
    """Examples {"tokens", "segment_ids", "label"}, and "types" of tokens if the texts have any."""

    def __init__(self, texts: Texts, label_N: np.ndarray):
        self.texts = texts
        self.label_N = label_N

    def __len__(self):
        return len(self.texts)

    def take(self, numbers: np.ndarray) -> Example:
        return self.texts.take(numbers) | {"label": self.label_N[np.asarray(numbers)]}


def load(
    dataset: str = "stdlib",
    text_column: str = "text",
    label_column: str = "label",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    eval_dataset: str = "",
    labels: Sequence[str] = (),
    pair_column: str = "",
    types: bool = False,
) -> Dataset:
    """Loads labelled texts of at most seq_len tokens; longer ones are cut.

    Args:
      dataset: stdlib, or JSON Lines, Parquet, CSV or hf: datasets as in `sources.find`.
      eval_dataset: the held-out texts; without it, a twentieth of the texts, at least one.
      labels: names of a model's classes, in its order; kept if they include all of the dataset's.
      pair_column: column of a row's second text; empty: as `text_columns` finds it.
      types: whether the model knows the types of tokens, by which it tells two texts apart.

    Raises DataError if there are no such texts, a row lacks a text or a label, there is one class
    alone, or a held-out text has a class that no training text has.
    """
    tokenizer = tokenizer or BYTES
    made = _made() if dataset == "stdlib" else ()
    train_rows, held_out_rows = whole_texts.read(dataset, eval_dataset, made)
    text_column, *pair = text_columns(train_rows[0][1], text_column, pair_column)
    if held_out_rows is None:
        parts = [*whole_texts.hold_out(train_rows, dataset, text_column, "text_column")]
    else:
        parts = [train_rows, held_out_rows]
    named = [[_label(row, label_column, where) for where, row in part] for part in parts]
    for part, labels_of_part in zip(parts, named, strict=True):
        _check_gaps(part, labels_of_part, label_column)
    names = classes(named[0], labels)
    if len(names) < 2:
        raise DataError(
            f"--dataset={dataset} has a single class, {''.join(names)!r}; add texts of another one"
        )
    known = {*named[0]} if names != tuple(labels) else {*names, *map(str, range(len(names)))}
    for (where, _), name in zip(parts[1], named[1], strict=True):
        if name not in known:
            raise DataError(
                f"{where} has the label {name!r}, which no training text has "
                f"({', '.join(sorted(known)[:10])}); remove the row, or add such texts to train on"
            )
    loaded = []
    spelled = []
    for part, label_names in zip(parts, named, strict=True):
        texts = whole_texts.column(part, text_column, "text_column")
        others = [whole_texts.column(part, name, "pair_column") for name in pair]
        label_N = np.array([_number(name, names) for name in label_names], np.int32)
        if others:
            encoded = whole_texts.encode_pairs(texts, others[0], tokenizer, seq_len, types)
        else:
            encoded = whole_texts.encode(texts, tokenizer, seq_len)
        loaded.append(Labelled(encoded, label_N))
        spelled += [" ".join(of_row) for of_row in zip(texts, *others, strict=True)]
    train, held_out = loaded
    prints = [x for part in loaded for x in (part.texts.fingerprint, part.label_N.tobytes())]
    return Dataset(
        train=train,
        held_out=held_out,
        filler={name: np.zeros_like(x) for name, x in train[0].items()}
        | {"label": np.array(-1, np.int32)},
        unit="texts",
        units=1,
        config={"labels": names},
        facts=whole_texts.facts(
            dataset, eval_dataset, seq_len, tokenizer, [repr(names).encode(), *prints]
        ),
        notes=(
            f"Training data: {len(train):,} texts of {len(names)} classes; held out: {len(held_out):,}.",
            *_two_texts_note(text_column, pair, types),
            *whole_texts.unused(parts, [text_column, *pair, label_column]),
            *train.texts.notes(),
            *whole_texts.spelled(spelled, "texts", tokenizer),
        ),
    )


def text_columns(row: Any, text_column: str, pair_column: str = "") -> tuple[str, ...]:
    """The column of a row's text, or those of its two texts.

    Args:
      text_column, pair_column: as the flags name them. Without pair_column, TWO_TEXTS decides: the
        partner of text_column, or the only pair of the row if it lacks the default column.
    """
    columns = row if isinstance(row, dict) else {}
    if pair_column:
        return text_column, pair_column
    both = [pair for pair in TWO_TEXTS if {*pair} <= {*columns}]
    if text_column in columns or text_column != "text":
        both = [pair for pair in both if pair[0] == text_column]
    return both[0] if len(both) == 1 else (text_column,)


def _two_texts_note(first: str, second: Sequence[str], types: bool) -> list[str]:
    told_apart = "told apart by types of tokens" if types else "told apart by control tokens alone"
    return [f"Two texts a row: {first!r} and {name!r}, {told_apart}." for name in second]


def classes(of_rows: Sequence[str], labels: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the classes of labels: the given ones, if they include all, or sorted."""
    distinct = {*of_rows}
    if labels and (distinct <= {*labels} or distinct <= {*map(str, range(len(labels)))}):
        return tuple(labels)
    numbers = all(name.removeprefix("-").isdigit() for name in distinct)
    return tuple(sorted(distinct, key=int if numbers else str))


def _check_gaps(part: Sequence[Row], names: Sequence[str], column: str) -> None:
    """Raises DataError, naming the row, for a word that stands for no label where all others are numbers."""
    words = {name for name in names if not name.isdigit()}
    if words == {*names} or not {name.lower() for name in words} <= {*GAPS_OF_NUMBERS}:
        return
    for (where, _), name in zip(part, names, strict=True):
        if name in words:
            raise DataError(
                f"{where} has {name!r} in the column {column!r}, where other rows have numbers; fill it, or remove "
                "the row"
            )


def _number(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else int(name)


def _label(row: Any, column: str, where: str) -> str:
    """The name of a row's class. Raises DataError, naming the row, if it has none."""
    value = whole_texts.cell(row, column, "label_column", where)
    is_gap = isinstance(value, float) and math.isnan(value)  # as pandas reads an empty cell
    if is_gap or (isinstance(value, str) and value.strip().lower() in GAPS):
        raise DataError(
            f"{where} has no label in the column {column!r}; fill it, or remove the row"
        )
    if isinstance(value, str) and DECIMAL.fullmatch(value.strip()):
        value = float(value)  # as pandas writes whole numbers of a column with gaps
    name = value.strip() if isinstance(value, str) else None
    if isinstance(value, bool):
        name = str(value)
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        name = str(int(value))
    if name and re.fullmatch(r"-\d+", name):
        raise DataError(
            f"{where} has the label {name} in the column {column!r}, which stands for no label in many "
            "datasets; remove the row, or write names of classes"
        )
    if name:
        return name
    raise DataError(
        f"{where} has {value!r} in the column {column!r}; a label is a name or a whole number"
    )


@functools.cache
def _made() -> tuple[Row, ...]:
    """As many pieces of each kind, in turn."""
    functions = snippets.functions()
    kinds = {
        "code": [function.code for function in functions],
        "comment": list(snippets.comments()),
        "docstring": [function.docstring for function in functions],
    }
    rows = zip(*kinds.values(), strict=False)
    return tuple(
        (WHERE, {"text": text[:MOST], "label": name})
        for row in rows
        for name, text in zip(kinds, row, strict=True)
    )
