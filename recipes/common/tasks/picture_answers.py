"""Answers to questions about pictures: how many are right, and a few to show."""

from typing import Any

import jax
import jax.numpy as jnp

from data import pictured
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common import entries
from recipes.common.generation.picture_prompts import tokens_of
from recipes.common.sharding import Tree
from zoo.core.sharding import constrain

SHOWN = 2  # kinds of answers that are counted apart: about one picture, about two


def load(
    dataset: str,
    seq_len: int,
    config: Any,
    tokenizer: Tokenizer,
    seed: int = 0,
    part: str = "held_out",
    pack: bool = True,
) -> Dataset:
    """Rows with pictures as examples for a model; see pictured.load. Raises DataError."""
    own = {
        "dataset": dataset,
        "seq_len": seq_len,
        "tokenizer": tokenizer,
        "picture": tokens_of(config),
    }
    own |= {"seed": seed, "part": part, "pack": pack}
    return entries.with_options(pictured.load, vars(config) | own)


def right_answers(model: Any, batch: Tree) -> Tree:
    """Sums for an Evaluation: answers whose tokens are all right, by the pictures before them.

    An answer is a run of targets, and its pictures are those of its document up to it.
    """
    right_BT, counted_BT = right_tokens(model, batch)
    tokens_BT, segments_BT, right_BT, counted_BT = (
        constrain(x, "batch", None)
        for x in (batch["tokens"], batch["segment_ids"], right_BT, counted_BT)
    )
    begins_BT = counted_BT & ~_shifted(counted_BT, (1, 0))
    ends_BT = counted_BT & ~_shifted(counted_BT, (0, 1))
    is_first_BT = segments_BT != _shifted(segments_BT, (1, 0), fill=-1)
    wrong_BT = _count_since(begins_BT, counted_BT & ~right_BT)
    pictures_BT = _count_since(is_first_BT, tokens_BT == model.config.picture_begin)
    kinds = {str(count): pictures_BT == count for count in range(SHOWN + 1)}
    kinds["more"] = pictures_BT > SHOWN
    sums = {}
    for name, is_kind_BT in kinds.items():
        of_kind_BT = is_kind_BT & ends_BT
        total = of_kind_BT.sum().astype(jnp.float32)
        sums[f"right_{name}"] = (of_kind_BT & (wrong_BT == 0)).sum().astype(jnp.float32), total
    return sums


def _shifted(x_BT: jax.Array, empty: tuple[int, int], fill: Any = False) -> jax.Array:
    """Positions moved so that as many at the beginning and end are `fill`."""
    before, after = empty
    T = x_BT.shape[1]
    return jnp.pad(x_BT[:, after : T - before], ((0, 0), empty), constant_values=fill)


def _count_since(starts_BT: jax.Array, x_BT: jax.Array) -> jax.Array:
    """How often x was true since the last start, this position included."""
    x_BT = x_BT.astype(jnp.int32)
    count_BT = jnp.cumsum(x_BT, axis=1)
    before_BT = jnp.where(starts_BT, count_BT - x_BT, 0)
    return count_BT - jax.lax.cummax(before_BT, axis=1)


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
