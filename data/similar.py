"""Pairs of texts that mean the same, for encoders that compare texts.

    {"anchor": "How do I sort a list?", "positive": "Call list.sort, or sorted for a new one."}
    {"anchor": "…", "positive": "…", "negative": "Call list.reverse."}

All other rows of a batch are what a text does not mean, and so are all negatives. The default pairs are docstrings of the
standard library with their functions' code.
"""

import functools
import re
from typing import Any

import numpy as np

from data import DataError, snippets, whole_texts
from data.batches import Dataset, Example, Rows
from data.tokenizer import BYTES, Tokenizer
from data.whole_texts import Row, Texts

WHERE = "a function of the standard library"
MOST = 120  # characters of a docstring and of a function's code
NEGATIVE = "negative"  # the default column
NEGATIVES = re.compile(r"(hard_)?neg(ative)?s?(_?\d+)?", re.IGNORECASE)  # names of such columns


class Similar(Rows):
    """Examples {"tokens", "segment_ids", "other_tokens", "other_segment_ids", "counted"}.

    With negatives they have "negative_tokens" and "negative_segment_ids", too.
    """

    def __init__(self, anchors: Texts, positives: Texts, negatives: Texts | None = None):
        self.anchors = anchors
        self.others = {"other": positives}
        if negatives is not None:
            self.others["negative"] = negatives

    @property
    def sides(self) -> list[Texts]:
        return [self.anchors, *self.others.values()]

    def __len__(self):
        return len(self.anchors)

    def take(self, numbers: np.ndarray) -> Example:
        batch = self.anchors.take(numbers) | {"counted": np.ones(len(numbers), bool)}
        for side, texts in self.others.items():
            batch |= {f"{side}_{name}": x for name, x in texts.take(numbers).items()}
        return batch


def load(
    dataset: str = "stdlib",
    anchor_column: str = "anchor",
    positive_column: str = "positive",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    eval_dataset: str = "",
    negative_column: str = NEGATIVE,
) -> Dataset:
    """Loads pairs of texts of at most seq_len tokens each; longer ones are cut.

    Args:
      negative_column: used if a row has it; then every row needs one.
      dataset: stdlib, or JSON Lines, Parquet, CSV or hf: datasets as in `sources.find`.
      eval_dataset: the held-out pairs; without it, those of a twentieth of the anchors, at least one.

    Raises DataError if there are no such pairs, or a row lacks one of its texts.
    """
    tokenizer = tokenizer or BYTES
    columns = {"anchor_column": anchor_column, "positive_column": positive_column}
    made = _made() if dataset == "stdlib" else ()
    train_rows, held_out_rows = whole_texts.read(dataset, eval_dataset, made)
    first_row = train_rows[0][1] if isinstance(train_rows[0][1], dict) else {}
    if any(negative_column in row for _, row in train_rows if isinstance(row, dict)):
        columns["negative_column"] = negative_column
    elif negative_column != NEGATIVE:
        raise DataError(
            f"--negative_column={negative_column} is in no row of --dataset={dataset}; it has "
            f"{', '.join(map(repr, first_row))}: leave it out, or name one of them"
        )
    _check_negatives(first_row, list(columns.values()), dataset)
    if held_out_rows is None:
        parts = whole_texts.hold_out(train_rows, dataset, anchor_column, "anchor_column")
    else:
        parts = (train_rows, held_out_rows)
    pairs = []
    spelled = []
    for part in parts:
        sides = [whole_texts.column(part, column, flag) for flag, column in columns.items()]
        spelled += [" ".join(of_row) for of_row in zip(*sides, strict=True)]
        pairs.append(Similar(*(whole_texts.encode(side, tokenizer, seq_len) for side in sides)))
    train, held_out = pairs
    return Dataset(
        train=train,
        held_out=held_out,
        filler={name: np.zeros_like(x) for name, x in train[0].items()},
        unit="pairs",
        units=1,
        config={},
        facts=whole_texts.facts(
            dataset, eval_dataset, seq_len, tokenizer,
            [side.fingerprint for pair in pairs for side in pair.sides],
        ),
        notes=(
            f"Training data: {len(train):,} pairs of texts"
            f"{', each with a negative' * ('negative' in train.others)}; held out: {len(held_out):,}.",
            *whole_texts.unused(parts, list(columns.values())),
            *(note for side in train.sides for note in side.notes()),
            *whole_texts.spelled(spelled, "pairs", tokenizer),
        ),
    )  # fmt: skip


def _check_negatives(row: Any, used: list[str], dataset: str) -> None:
    """Raises DataError if a row has negatives that would not be learned from."""
    others = [name for name in row if NEGATIVES.fullmatch(name) and name not in used]
    if others:
        raise DataError(
            f"--dataset={dataset} has columns of negatives that the loss does not use: {len(others)} "
            f"({', '.join(map(repr, others))}); name one by --negative_column, and remove the others"
        )


@functools.cache
def _made() -> tuple[Row, ...]:
    return tuple(
        (WHERE, {"anchor": function.docstring[:MOST], "positive": function.code[:MOST]})
        for function in snippets.functions()
    )
