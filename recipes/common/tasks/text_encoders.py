"""What recipes of text encoders share: the task, the Config for it, and the loss of pairs of texts.

Shapes: B pairs, T positions, D embed, R = 2B texts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from recipes.common import checkpoint
from recipes.common.preference.objective import side_by_side
from recipes.common.runtime import Run
from recipes.common.sharding import Tree
from zoo.core.sharding import constrain, reshape
from zoo.parts.classes import unit
from zoo.parts.pairs import loss_of_pairs


def task_of(task: str, run: Run) -> str:
    """The task of a run: --task, else its checkpoint's, else filling masks in."""
    if task or not run.restore_from:
        return task or "fill"
    source = checkpoint.find(run.restore_from, "--restore_from", hash_files=False)
    return source.metadata["config"].get("task", "fill")


def for_task(config: Any, task: str) -> Any:
    """A text encoder's Config with another head. Vectors of BERT's form come from its pooler to classify."""
    if config.task == task:
        return config
    pooling = "mean" if config.modern or task == "embed" else "pooler"
    changes = {"task": task, "pooling": pooling, "normalize": task == "embed", "labels": ()}
    return dataclasses.replace(config, **changes)


def count_right(model, batch: Tree) -> Tree:
    """An extra sum for an evaluation: masked tokens that are the likeliest ones."""
    wanted_BT = batch["targets"]
    guess_BT = model(batch["tokens"], batch.get("segment_ids")).argmax(axis=-1)
    right = (guess_BT == wanted_BT).sum()  # padding has the target -1
    return {"accuracy": (right, (wanted_BT >= 0).sum())}


def class_logits(model: Any, batch: Tree) -> jax.Array:
    return model.classify(batch["tokens"], batch["segment_ids"])


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The symmetric InfoNCE loss of a batch of pairs, as AbstractModel.loss: each text is to find its
    partner among all of the batch, by cosine times `scale`.
    """

    scale: float
    exchange: str  # one of zoo.parts.pairs.EXCHANGES

    def __call__(self, model: Any, **batch: jax.Array) -> tuple[jax.Array, jax.Array, Tree]:
        return self.compare(model, *self.embed(model, **batch))

    def embed(
        self, model: Any, *, tokens, segment_ids, other_tokens, other_segment_ids, counted
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(vectors of both sides, [B, D], of length 1, and which rows count, bool [B])."""
        B = len(tokens)
        tokens_RT = side_by_side(tokens, other_tokens)
        vectors_RD = unit(model.pool(tokens_RT, side_by_side(segment_ids, other_segment_ids)))
        pairs_B2D = reshape(vectors_RD, (B, 2, vectors_RD.shape[1]), "batch", None, None)
        return pairs_B2D[:, 0], pairs_B2D[:, 1], counted

    def compare(self, model: Any, x_BD, y_BD, counted_B) -> tuple[jax.Array, jax.Array, Tree]:
        """The loss of all pairs of the batch: (sum over rows, number of rows, metrics)."""
        total = loss_of_pairs(
            x_BD, y_BD, counted_B, jnp.float32(self.scale), jnp.float32(0),
            loss="softmax", exchange=self.exchange,
        )  # fmt: skip
        count = counted_B.sum().astype(jnp.float32)
        return total, count, {"loss": (total, count)}

    def count_found(self, model: Any, batch: Tree) -> Tree:
        """An extra sum for an evaluation: texts whose partner is the nearest in the batch."""
        x_BD, y_BD, counted_B = self.embed(model, **batch)
        y_BD = constrain(y_BD, None, None)
        score_BB = jnp.where(constrain(counted_B, None)[None], x_BD @ y_BD.T, -2.0)
        found_B = constrain(score_BB, "batch", None).argmax(axis=1) == constrain(
            jnp.arange(len(x_BD)), "batch"
        )
        right = (found_B & constrain(counted_B, "batch")).sum().astype(jnp.float32)
        return {"accuracy": (right, counted_B.sum().astype(jnp.float32))}
