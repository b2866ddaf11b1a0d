"""What recipes of text encoders share: the task, the Config for it, and the loss of pairs of texts.

Shapes: B pairs, T positions, D embed, S sides (2, or 3 with negatives), R = S · B texts, C candidates.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from recipes.common import checkpoint
from recipes.common.checkpoint import WeightSource
from recipes.common.hf import sentence_transformers
from recipes.common.hf.sentence_transformers import Sentences
from recipes.common.runtime import Run
from recipes.common.sharding import Tree
from zoo.core.sharding import constrain, reshape
from zoo.kernels.shared import NOT_SEEN
from zoo.parts.classes import unit
from zoo.parts.pairs import loss_of_pairs

LONGEST = 512  # tokens of a text to make a vector of, if nothing states them


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


def sentences_of(source: WeightSource) -> Sentences:
    """How texts become vectors: what the model's folder said, with the most tokens of a text."""
    stated = sentence_transformers.of_metadata(source.metadata)
    most = stated.max_seq_length or min(checkpoint.context(source), LONGEST)
    learned = source.metadata["config"].get("max_positions") or most
    return dataclasses.replace(stated, max_seq_length=min(most, learned))


def count_right(model, batch: Tree) -> Tree:
    """An extra sum for an evaluation: masked tokens that are the likeliest ones."""
    wanted_BT = batch["targets"]
    guess_BT = model(batch["tokens"], batch.get("segment_ids")).argmax(axis=-1)
    right = (guess_BT == wanted_BT).sum()  # padding has the target -1
    return {"accuracy": (right, (wanted_BT >= 0).sum())}


def class_logits(model: Any, batch: Tree) -> jax.Array:
    return model.classify(batch["tokens"], batch["segment_ids"], batch.get("types"))


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The symmetric InfoNCE loss of a batch of pairs, as AbstractModel.loss: each text is to find its
    partner among all of the batch, by cosine times `scale`. Negatives are further candidates for all
    anchors.
    """

    scale: float
    exchange: str  # one of zoo.parts.pairs.EXCHANGES

    def __call__(self, model: Any, **batch: jax.Array) -> tuple[jax.Array, jax.Array, Tree]:
        return self.compare(model, *self.embed(model, **batch))

    def embed(
        self,
        model: Any,
        *,
        tokens,
        segment_ids,
        other_tokens,
        other_segment_ids,
        counted,
        negative_tokens=None,
        negative_segment_ids=None,
    ) -> tuple[jax.Array, ...]:
        """(vectors of each side, [B, D], of length 1, and which rows count, bool [B])."""
        tokens_SBT, ids_SBT = [tokens, other_tokens], [segment_ids, other_segment_ids]
        if negative_tokens is not None:
            tokens_SBT.append(negative_tokens)
            ids_SBT.append(negative_segment_ids)
        vectors_RD = unit(model.pool(_side_by_side(tokens_SBT), _side_by_side(ids_SBT)))
        shape = (len(tokens), len(tokens_SBT), vectors_RD.shape[1])
        vectors_BSD = reshape(vectors_RD, shape, "batch", None, None)
        return *(vectors_BSD[:, side] for side in range(len(tokens_SBT))), counted

    def compare(self, model: Any, x_BD, y_BD, *rest) -> tuple[jax.Array, jax.Array, Tree]:
        """The loss of all pairs of the batch: (sum over rows, number of rows, metrics).

        Args:
          rest: (any vectors of negatives, which rows count).
        """
        *negatives, counted_B = rest
        total = loss_of_pairs(
            x_BD, y_BD, counted_B, jnp.float32(self.scale), jnp.float32(0),
            loss="softmax", exchange=self.exchange,
        )  # fmt: skip
        for z_BD in negatives:
            total += self._more_candidates(x_BD, y_BD, z_BD, counted_B) / 2  # one of two ways
        count = counted_B.sum().astype(jnp.float32)
        return total, count, {"loss": (total, count)}

    def _more_candidates(self, x_BD, y_BD, z_BD, counted_B) -> jax.Array:
        """How many nats the loss of finding y rises by if all z are candidates, too.

        Vectors of all candidates are gathered, whatever --pairs is.
        """

        @jax.checkpoint
        def log_sum(candidates_BD):
            score_BC = self.scale * _scores(x_BD, candidates_BD)
            score_BC = jnp.where(constrain(counted_B, None)[None], score_BC, NOT_SEEN)
            return constrain(jax.nn.logsumexp(score_BC, axis=1), "batch")

        more_B = jax.nn.softplus(log_sum(z_BD) - log_sum(y_BD))
        return jnp.where(constrain(counted_B, "batch"), more_B, 0).sum()

    def count_found(self, model: Any, batch: Tree) -> Tree:
        """An extra sum for an evaluation: texts whose partner is the nearest in the batch."""
        x_BD, *candidates, counted_B = self.embed(model, **batch)
        counted_1B = constrain(counted_B, None)[None]
        scores = [jnp.where(counted_1B, _scores(x_BD, y_BD), -2.0) for y_BD in candidates]
        score_BC = constrain(jnp.concatenate(scores, axis=1), "batch", None)
        found_B = score_BC.argmax(axis=1) == constrain(jnp.arange(len(x_BD)), "batch")
        right = (found_B & constrain(counted_B, "batch")).sum().astype(jnp.float32)
        return {"accuracy": (right, counted_B.sum().astype(jnp.float32))}


def _scores(x_BD, candidates_BD) -> jax.Array:
    """The products of each row with all candidates of the batch, [B, C], float32."""
    candidates_CD = constrain(candidates_BD.astype(jnp.float32), None, None)
    return jnp.matmul(x_BD.astype(jnp.float32), candidates_CD.T, precision="highest")


def _side_by_side(sides: list[jax.Array]) -> jax.Array:
    """[B, T] of each side → [R, T], the texts of a row in neighbouring rows, on one device."""
    B, T = sides[0].shape
    stacked_BST = jnp.stack([constrain(x, "batch", "seq") for x in sides], axis=1)
    return reshape(stacked_BST, (len(sides) * B, T), "batch", "seq")
