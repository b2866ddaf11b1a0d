"""Answers to questions about pictures: how many are right, and a few to show."""

from typing import Any

import jax
import jax.numpy as jnp

from data import pictured
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common.generation.picture_prompts import tokens_of
from recipes.common.sharding import Tree

SHOWN = 2  # kinds of rows whose right answers are counted apart: with one picture, with two


def load(
    dataset: str,
    seq_len: int,
    config: Any,
    tokenizer: Tokenizer,
    seed: int = 0,
    part: str = "held_out",
) -> Dataset:
    """Rows with pictures as examples for a model; see pictured.load. Raises DataError."""
    shape = {
        name: vars(config)[name]
        for name in ("image_size", "patch", "pooling", "picture_tokens")
        if name in vars(config)
    }
    return pictured.load(
        dataset, seq_len, channels=config.channels, resample=config.resample, tokenizer=tokenizer,
        picture=tokens_of(config), seed=seed, part=part, **shape,
    )  # fmt: skip


def right_answers(model: Any, batch: Tree) -> Tree:
    """Sums for an Evaluation: rows whose tokens are all answered right, by their number of pictures."""
    right_BT, counted_BT = right_tokens(model, batch)
    pictures_B = (batch["tokens"] == model.config.picture_begin).sum(axis=1)
    is_right_B = (right_BT | ~counted_BT).all(axis=1)
    answers_B = counted_BT.any(axis=1)
    kinds = {str(count): pictures_B == count for count in range(SHOWN + 1)}
    kinds["more"] = pictures_B > SHOWN
    sums = {}
    for name, is_kind_B in kinds.items():
        of_kind_B = is_kind_B & answers_B
        total = of_kind_B.sum().astype(jnp.float32)
        sums[f"right_{name}"] = (of_kind_B & is_right_B).sum().astype(jnp.float32), total
    return sums


def right_tokens(model: Any, batch: Tree) -> tuple[jax.Array, jax.Array]:
    """(where the likeliest token is the target, where there is a target), bool [B, T]."""
    pictures = {name: batch[name] for name in model.batch_axes}
    logits_BTV = model(batch["tokens"], batch["segment_ids"], **pictures)
    guess_BT = logits_BTV.argmax(axis=-1).astype(jnp.int32)
    return guess_BT == batch["targets"], batch["targets"] >= 0


def in_words(totals: Tree) -> list[str]:
    """Lines about the shares of right answers."""
    kinds = {"0": "no picture", "1": "one picture", "2": "two pictures", "more": "more pictures"}
    lines = []
    for name, what in kinds.items():
        right, total = map(float, totals.get(f"right_{name}", (0, 0)))
        if total:
            lines.append(
                f"Answers about {what}: {right / total:.2%} right, {right:.0f} of {total:.0f}."
            )
    return lines
