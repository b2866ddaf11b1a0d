"""Text with masked tokens to fill in, for encoders (Devlin et al. 2019).

Of the positions that data/text.py has targets for, 15% are drawn. A drawn position's token becomes the
mask token in 80% of cases, a random token in 10% and stays in 10%; its target is what it was. All
other targets are -1.

Which positions are drawn is a function of (seed, number of the example, epoch), so batch k is one of
(seed, k) on any number of processes. Held-out examples are always masked alike.
"""

import numpy as np

from data import DataError, sources, text, whole_texts
from data.batches import Dataset, Example, Rows
from data.conversations import TEXT
from data.tokenizer import BYTES, START, Tokenizer
from data.whole_texts import Texts

MASK = START + 1  # in bytes


class Masked(Rows):
    """Rows of a source of text, with masked tokens; see the module's docstring."""

    def __init__(self, source: Rows, tokenizer: Tokenizer, rate: float, key: tuple[int, ...]):
        """`key` and an example's number decide what is masked. Numbers go on after an epoch."""
        self._source = source
        self._rate = rate
        self._key = key
        self._mask = mask_token(tokenizer)
        self._tokens = tokenizer.vocabulary  # a random token is below
        self._special = [*tokenizer.special]  # never masked

    def __len__(self):
        return len(self._source)

    def take(self, numbers: np.ndarray) -> Example:
        batch = self._source.take(np.asarray(numbers) % len(self))
        tokens_NT = batch["tokens"]
        shape = (2, tokens_NT.shape[1])
        drawn = np.empty(tokens_NT.shape)
        other = np.empty(tokens_NT.shape)
        for row, number in enumerate(numbers):
            random = np.random.default_rng((*self._key, int(number)))
            drawn[row], other[row] = random.random(shape)
        is_text = (batch["targets"] >= 0) & ~np.isin(tokens_NT, self._special)
        chosen = is_text & (drawn < self._rate)
        # `other` decides between the three cases, and draws the random token in the second.
        part = np.clip((other - 0.8) / 0.1, 0, 1 - 1e-9)
        random_NT = (part * self._tokens).astype(tokens_NT.dtype)
        shown = np.where(other < 0.8, self._mask, np.where(other < 0.9, random_NT, tokens_NT))
        return batch | {
            "tokens": np.where(chosen, shown, tokens_NT).astype(np.int32),
            "targets": np.where(chosen, tokens_NT, -1).astype(np.int32),
        }


class OneByOne(Rows):
    """Each token of some texts in a row of its own, masked alone: for a pseudo-perplexity."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer):
        self._texts = texts
        self._mask = mask_token(tokenizer)
        special, places = [*tokenizer.special, *tokenizer.closing], []
        for row in range(len(texts)):
            batch = texts.take(np.array([row]))
            is_text = (batch["segment_ids"][0] > 0) & ~np.isin(batch["tokens"][0], special)
            places += [(row, position) for position in np.flatnonzero(is_text)]
        self._places_N2 = np.array(places, np.int64).reshape(-1, 2)

    def __len__(self):
        return len(self._places_N2)

    def take(self, numbers: np.ndarray) -> Example:
        rows_N, positions_N = self._places_N2[np.asarray(numbers)].T
        batch = self._texts.take(rows_N)
        here_NT = np.arange(batch["tokens"].shape[1]) == positions_N[:, None]
        return batch | {
            "tokens": np.where(here_NT, self._mask, batch["tokens"]).astype(np.int32),
            "targets": np.where(here_NT, batch["tokens"], -1).astype(np.int32),
        }


def mask_token(tokenizer: Tokenizer) -> int:
    """The id of the token that stands for a masked one. Raises DataError if there is none."""
    if not tokenizer.files:
        return MASK
    mask = tokenizer.control("mask")
    if mask is None:
        raise DataError(
            f"--tokenizer={tokenizer.name} names no mask_token in its tokenizer_config.json; use an "
            "encoder's tokenizer, or bytes"
        )
    return mask[0]


def load(
    dataset: str = "stdlib",
    text_column: str = "text",
    seq_len: int = 128,
    tokenizer: Tokenizer | None = None,
    pack: str = "",
    eval_dataset: str = "",
    mask_rate: float = 0.15,
    seed: int = 0,
) -> Dataset:
    """Loads a dataset as `data.text.load` does, with masked tokens.

    Args:
      mask_rate: the share of positions that are targets.
      seed: decides what is masked in training.

    Raises DataError if there is no such text, too little, or no mask token.
    """
    tokenizer = tokenizer or BYTES
    data = text.load(dataset, text_column, seq_len, tokenizer, pack, eval_dataset)
    assert isinstance(data.train, Rows)
    assert isinstance(data.held_out, Rows)
    return data._replace(
        train=Masked(data.train, tokenizer, mask_rate, key=(seed, 1)),
        held_out=Masked(data.held_out, tokenizer, mask_rate, key=(0, 0)),
        facts=data.facts | {"mask_rate": mask_rate},
        held_out_bytes=None,
        by_epoch=True,
    )


def load_one_by_one(
    dataset: str, text_column: str, seq_len: int, tokenizer: Tokenizer, held_out: bool = False
) -> Dataset:
    """Loads all of a text, each token masked alone; documents longer than seq_len become several rows.

    Args:
      held_out: only what a training run on the same text holds out.

    Raises DataError if there is no such text, or no mask token.
    """
    text_sources = sources.find(dataset, text_column, train_only=not held_out)
    if any(source.form() != TEXT for source in text_sources):
        raise DataError(f"--dataset={dataset} has conversations; use rows of text for an encoder")
    parts = (
        part for source in text_sources for part in source.parts() if part.held_out == held_out
    )
    texts = whole_texts.encode_windows((part.text for part in parts), tokenizer, seq_len)
    rows = OneByOne(texts, tokenizer)
    if not len(rows):
        raise DataError(f"--dataset={dataset} has no text to evaluate; use another one")
    return Dataset(
        train=rows,
        held_out=rows,
        filler=whole_texts.filler(seq_len) | {"targets": np.full(seq_len, -1, np.int32)},
        unit="tokens",
        units=1,
        config={},
        facts={"dataset": dataset, "seq_len": seq_len},
        notes=(f"Evaluates {len(rows):,} tokens in {len(texts):,} rows, each token masked alone.",),
    )
