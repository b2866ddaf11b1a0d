"""Segment ids of packed rows: of a dataset, or of documents of random lengths."""

import numpy as np

from data import text, tokenizer
from data.packing import best_fit

ROWS = 64  # most rows that stand for all
SPREAD = 1.0  # standard deviation of the logarithm of random lengths; the web's is near it


def dataset_lengths(name: str, tokenizer_name: str, seq_len: int) -> np.ndarray:
    """Segment ids [rows, seq_len] of a dataset, in the order of a run. Raises DataError."""
    rows = text.load(name, seq_len=seq_len, tokenizer=tokenizer.find(tokenizer_name), pack="true")
    numbers = np.random.default_rng(0).permutation(len(rows.train))[:ROWS]
    return np.stack([rows.train[int(number)]["segment_ids"] for number in numbers])


def random_lengths(mean: int, seq_len: int) -> np.ndarray:
    """Segment ids [rows, seq_len] of documents of lognormal lengths, packed as data/packing.py does."""
    random = np.random.default_rng(0)
    count = max(1_000, 4 * ROWS * seq_len // mean)
    lengths = np.ceil(mean * np.exp(random.normal(-(SPREAD**2) / 2, SPREAD, count))).astype(int)
    full_rows = np.full(int((lengths // seq_len).sum()), seq_len)  # rows of their own
    pieces = np.concatenate([full_rows, lengths[lengths % seq_len > 0] % seq_len])
    row_of = best_fit(pieces, seq_len)
    ids = np.zeros((ROWS, seq_len), np.int32)
    for row_ids, row in zip(ids, random.permutation(row_of.max() + 1), strict=False):
        lengths = pieces[row_of == row]
        numbers = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        row_ids[: len(numbers)] = numbers
    return ids
