"""Results of a classifier: held-out accuracy, and the confusion matrix as a picture."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from recipes.common.checkpoint import RunFolder
from recipes.common.report import picture
from recipes.common.runtime import print0
from recipes.common.sharding import Tree
from recipes.common.train.loop import best_effort

ENOUGH = 50  # examples for an accuracy: each moves it by 2%


def logits_of_images(model: Any, batch: Tree) -> jax.Array:
    return model(batch["image"])


def confusion(
    classes: int, logits: Callable[[Any, Tree], jax.Array] = logits_of_images
) -> Callable[..., Tree]:
    """An extra sum for `fit`: counts examples by true class (rows) and predicted class (columns).

    Args:
      logits: (model, batch) → [B, classes].
    """

    def count(model, batch: Tree) -> Tree:
        true_BC = jax.nn.one_hot(batch["label"], classes)  # label -1: a row of zeros
        guess_BC = jax.nn.one_hot(logits(model, batch).argmax(axis=1), classes)
        return {"confusion": (true_BC[:, :, None] * guess_BC[:, None]).sum(axis=0)}

    return count


def few(count: float, unit: str) -> list[str]:
    """A line that says that an accuracy of so few examples is no measure; [] if it is one."""
    if count >= ENOUGH:
        return []
    return [
        f"warning: {count:.0f} held-out {unit} are too few to measure an accuracy, each moves it by "
        f"{1 / max(count, 1):.1%}; evaluate on {ENOUGH} or more."
    ]


def show(folder: RunFolder, metrics: Tree, names: Sequence[str] = (), unit: str = "images") -> None:
    """Prints what the model has learned, and draws it.

    Args:
      metrics: totals from `fit`, with the confusion.
      names: names of the classes; empty: their numbers.
    """
    (nats, count), (right, _) = metrics["loss"], metrics["accuracy"]
    print0(f"Held-out accuracy {right / count:.4f}: {right:.0f} of {count:.0f} {unit}; "
           f"loss {nats / count:.4f} nats.", *few(count, unit))  # fmt: skip
    if folder.in_use:
        with best_effort(folder):
            log = folder.path / "metrics.jsonl"
            picture.learning(folder.path / "learning.png", log, metrics["confusion"], names)
            print0(f"Loss curve and confusion matrix: {folder.shown / 'learning.png'}")
