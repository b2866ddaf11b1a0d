"""Evaluates text encoders: the pseudo-perplexity of a model that fills masks in, the accuracy of a
classifier.

A pseudo-perplexity (Salazar et al. 2020) is exp of the mean loss of each token, masked alone: a row of
a batch for each token of the text.
"""

import math
from typing import Any

from data import labelled, masked
from data.batches import Dataset
from data.tokenizer import Tokenizer
from recipes.common.runtime import UserError, print0
from recipes.common.sharding import Tree
from recipes.common.tasks.classification import confusion, few
from recipes.common.tasks.text_encoders import class_logits, count_right
from recipes.common.train.evaluation import Extra


def load(name: str, flags: Any, length: int, tokenizer: Tokenizer, config: Any) -> Dataset:
    """A dataset whose held-out part is what to evaluate. Raises DataError, UserError.

    Args:
      flags: those of recipes.evaluate.
      config: the model's.
    """
    if config.task == "fill":
        held_out = flags.part == "held_out"
        data = masked.load_one_by_one(name, flags.text_column, length, tokenizer, held_out)
        print0(*data.notes)
        return data
    columns, held_out = (flags.text_column, flags.label_column), name if flags.part == "all" else ""
    data = labelled.load(
        name, *columns, length, tokenizer, held_out, config.labels, flags.pair_column,
        types=config.token_types > 1,
    )  # fmt: skip
    if data.config["labels"] != config.labels:
        raise UserError(
            f"--dataset={name} has the labels {', '.join(data.config['labels'][:10])}, and the model's "
            f"are {', '.join(config.labels[:10])}; use texts with labels of these"
        )
    print0(f"Evaluates {len(data.held_out):,} texts.", *data.notes[1:])
    return data


def extra(config: Any) -> Extra:
    """More sums of an evaluation."""
    if config.task == "classify":
        return confusion(len(config.labels), class_logits)
    return count_right


def in_words(totals: Tree, config: Any) -> str:
    (nats, count), (right, _) = totals["loss"], totals["accuracy"]
    loss, share = f"loss {nats / count:.4f} nats", f"{right / count:.2%} right"
    if config.task == "classify":
        return "; ".join(
            [f"{share}, {loss}, {right:.0f} of {count:.0f} texts", *few(count, "texts")]
        )
    perplexity = math.exp(min(nats / count, 700))
    return f"pseudo-perplexity {perplexity:.2f}, {loss}/token, {share}, over {count:,.0f} tokens"


def metrics(totals: Tree, config: Any) -> dict[str, Any]:
    """What recipes.evaluate adds to --out."""
    if config.task == "classify":
        return {"labels": config.labels, "confusion": totals["confusion"].tolist()}
    return {"pseudo_perplexity": math.exp(min(totals["loss"][0] / totals["loss"][1], 700))}
