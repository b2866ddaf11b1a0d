"""Texts with labels, for encoders that classify.

    {"text": "A fine film.", "label": "positive"}
    {"text": "Dull.", "label": 0}

Names of classes are the labels, sorted. Numbers below the number of a given model's classes are its
classes, in its order. The default texts are pieces of the standard library's source: code,
comments and docstrings.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from data import DataError, snippets, whole_texts
from data.batches import Dataset, Example, Rows
from data.tokenizer import BYTES, Tokenizer
from data.whole_texts import Row, Texts

WHERE = "a piece of the standard library"
MOST = 120  # characters of such a piece


class Labelled(Rows):
    """Examples {"tokens", "segment_ids", "label"}."""

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
) -> Dataset:
    """Loads labelled texts of at most seq_len tokens; longer ones are cut.

    Args:
      dataset: stdlib, or JSON Lines, Parquet, CSV or hf: datasets as in `sources.find`.
      eval_dataset: the held-out texts; without it, a twentieth of the texts, at least one.
      labels: names of a model's classes, in its order; kept if they include all of the dataset's.

    Raises DataError if there are no such texts, a row lacks a text or a label, there is one class
    alone, or a held-out text has a class that no training text has.
    """
    tokenizer = tokenizer or BYTES
    made = _made() if dataset == "stdlib" else ()
    parts = [*whole_texts.splits(dataset, eval_dataset, made, text_column, "text_column")]
    named = [[_label(row, label_column, where) for where, row in part] for part in parts]
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
    for part, label_names in zip(parts, named, strict=True):
        texts = [whole_texts.text(row, text_column, "text_column", where) for where, row in part]
        label_N = np.array([_number(name, names) for name in label_names], np.int32)
        loaded.append(Labelled(whole_texts.encode(texts, tokenizer, seq_len), label_N))
    train, held_out = loaded
    prints = [x for part in loaded for x in (part.texts.fingerprint, part.label_N.tobytes())]
    return Dataset(
        train=train,
        held_out=held_out,
        filler=whole_texts.filler(seq_len) | {"label": np.array(-1, np.int32)},
        unit="texts",
        units=1,
        config={"labels": names},
        facts=whole_texts.facts(
            dataset, eval_dataset, seq_len, tokenizer, [repr(names).encode(), *prints]
        ),
        notes=(
            f"Training data: {len(train):,} texts of {len(names)} classes; held out: {len(held_out):,}.",
            *train.texts.notes(),
        ),
    )


def classes(found: Sequence[str], labels: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the classes of labels: the given ones, if they include all, or sorted."""
    distinct = {*found}
    if labels and (distinct <= {*labels} or distinct <= {*map(str, range(len(labels)))}):
        return tuple(labels)
    numbers = all(name.removeprefix("-").isdigit() for name in distinct)
    return tuple(sorted(distinct, key=int if numbers else str))


def _number(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else int(name)


def _label(row: Any, column: str, where: str) -> str:
    """The name of a row's class. Raises DataError, naming the row, if it has none."""
    value = whole_texts.cell(row, column, "label_column", where)
    if isinstance(value, bool | str) or (isinstance(value, float | int) and value == int(value)):
        name = str(value) if isinstance(value, bool | str) else str(int(value))
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
