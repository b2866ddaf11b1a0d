"""Pairs of texts that mean the same, for encoders that compare texts.

    {"anchor": "How do I sort a list?", "positive": "Call list.sort, or sorted for a new one."}

All other rows of a batch are what a text does not mean. The default pairs are docstrings of the
standard library with their functions' code.
"""

import functools

import numpy as np

from data import snippets, whole_texts
from data.batches import Dataset, Example, Rows
from data.tokenizer import BYTES, Tokenizer
from data.whole_texts import Row, Texts

WHERE = "a function of the standard library"
MOST = 120  # characters of a docstring and of a function's code


class Similar(Rows):
    """Examples {"tokens", "segment_ids", "other_tokens", "other_segment_ids", "counted"}."""

    def __init__(self, anchors: Texts, positives: Texts):
        self.anchors = anchors
        self.positives = positives

    def __len__(self):
        return len(self.anchors)

    def take(self, numbers: np.ndarray) -> Example:
        others = {f"other_{name}": x for name, x in self.positives.take(numbers).items()}
        return self.anchors.take(numbers) | others | {"counted": np.ones(len(numbers), bool)}


def load(
    dataset: str = "stdlib",
    anchor_column: str = "anchor",
    positive_column: str = "positive",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    eval_dataset: str = "",
) -> Dataset:
    """Loads pairs of texts of at most seq_len tokens each; longer ones are cut.

    Args:
      dataset: stdlib, or JSON Lines, Parquet, CSV or hf: datasets as in `sources.find`.
      eval_dataset: the held-out pairs; without it, those of a twentieth of the anchors, at least one.

    Raises DataError if there are no such pairs, or a row lacks one of its texts.
    """
    tokenizer = tokenizer or BYTES
    columns = {"anchor_column": anchor_column, "positive_column": positive_column}
    made = _made(*columns.values()) if dataset == "stdlib" else ()
    parts = whole_texts.splits(dataset, eval_dataset, made, anchor_column, "anchor_column")
    pairs = []
    for part in parts:
        sides = [
            [whole_texts.text(row, column, flag, where) for where, row in part]
            for flag, column in columns.items()
        ]
        pairs.append(Similar(*(whole_texts.encode(side, tokenizer, seq_len) for side in sides)))
    train, held_out = pairs
    row = whole_texts.filler(seq_len)
    return Dataset(
        train=train,
        held_out=held_out,
        filler=row
        | {f"other_{name}": x for name, x in row.items()}
        | {"counted": np.array(False)},
        unit="pairs",
        units=1,
        config={},
        facts=whole_texts.facts(
            dataset, eval_dataset, seq_len, tokenizer,
            [x.fingerprint for pair in pairs for x in (pair.anchors, pair.positives)],
        ),
        notes=(
            f"Training data: {len(train):,} pairs of texts; held out: {len(held_out):,}.",
            *train.anchors.notes(),
            *train.positives.notes(),
        ),
    )  # fmt: skip


@functools.cache
def _made(anchor: str, positive: str) -> tuple[Row, ...]:
    return tuple(
        (WHERE, {anchor: function.docstring[:MOST], positive: function.code[:MOST]})
        for function in snippets.functions()
    )
