"""The objective of a batch of preference pairs, and the reference that it compares the model with.

The reference is the checkpoint that the run starts from. It computes inside the train step: the model
itself without its adapter, or a frozen copy, "frozen" in the training state, under rules of its own.
Or its log-probabilities are columns of the data: see stored.py.

Shapes: B pairs, R = 2B answers, T positions.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from recipes.common.preference.losses import Loss, Pair
from recipes.common.sharding import Layout, Tree
from recipes.common.sharding.abstract import unadapted, variables_of
from recipes.common.train.offload import to_device
from zoo.core.sharding import constrain, reshape
from zoo.core.vocabulary import Objective as DecoderObjective
from zoo.options.log_probs import log_probs_and_metrics


class Answers(NamedTuple):
    """A model's log-probabilities of the answers of a batch."""

    each_RT: jax.Array  # of each token; 0 for those that are no targets
    pair: Pair  # of each answer: the sum or the mean of its tokens'
    metrics: dict  # of the layers: name → [L, ...], sums over targets


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a model on pairs, as AbstractModel.loss: (sum, number of pairs, metrics)."""

    loss: Loss
    reference: Layout | None = None  # of a reference that computes inside the step

    def __call__(
        self,
        model: Any,
        *,
        tokens: jax.Array,
        targets: jax.Array,
        rejected_tokens: jax.Array,
        rejected_targets: jax.Array,
        reference_chosen: jax.Array | None = None,
        reference_rejected: jax.Array | None = None,
        label: jax.Array | None = None,
        frozen: Tree | None = None,
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """
        Args:
          tokens, targets: of the chosen answers with their prompts, [B, T]; see data/pairs.py.
          reference_chosen, reference_rejected: the reference's log-probabilities, [B], if stored.
          label: for kto, 1 for a good answer and 0 for a bad one, [B]; "rejected" is another answer.
          frozen: the reference's variables; None: the model's own, without its adapter.
        """
        tokens_RT = side_by_side(tokens, rejected_tokens)
        targets_RT = side_by_side(targets, rejected_targets)
        policy = self.answers(model, tokens_RT, targets_RT)
        stored = reference = None
        if reference_chosen is not None and reference_rejected is not None:
            stored = Pair(reference_chosen, reference_rejected)
        elif self.reference:
            variables = unadapted(variables_of(model)) if frozen is None else frozen
            reference = self.reference_answers(variables, tokens_RT, targets_RT)
        theirs = reference.pair if reference else stored
        is_pair_B = (targets >= 0).any(axis=1)  # others pad the last held-out batch
        is_good_B = None if label is None else label > 0
        loss_B = self.loss(policy.pair, theirs, is_good_B, is_pair_B)
        if is_good_B is not None:
            ratios = self.loss.log_ratios(policy.pair, theirs)
            margin_B = self.loss.distances(ratios, is_good_B, is_pair_B)
            means = {}
        else:
            rewards = self.loss.rewards(policy.pair, theirs)
            margin_B = rewards.chosen - rewards.rejected
            means = {"reward_chosen": rewards.chosen, "reward_rejected": rewards.rejected}
        means |= {"loss": loss_B, "accuracy": margin_B > 0, "margin": margin_B}
        count = is_pair_B.sum().astype(jnp.float32)
        aux = {name: (jnp.where(is_pair_B, x, 0).sum(), count) for name, x in means.items()}
        if reference:
            aux["kl"] = _divergence(policy.each_RT, reference.each_RT, targets_RT)
        total = aux["loss"][0]
        updates = not reference or frozen is not None  # or the reference would change too
        total, means = with_layers(model, total, count, aux, policy.metrics, targets_RT, updates)
        return total, count, aux | means

    def reference_answers(self, variables: Tree, tokens_RT, targets_RT) -> Answers:
        """The reference's answers under its own rules, sharded by the active rules."""
        assert self.reference
        with self.reference.trace():
            variables = jax.tree.map(to_device, variables)  # of a copy in the host's memory
            model = self.reference.model.merge(jax.lax.stop_gradient(variables))
            rows = (constrain(x, "batch", "seq") for x in (tokens_RT, targets_RT))
            answers = self.answers(model, *rows)
        pair = Pair(*(constrain(x, "batch") for x in answers.pair))
        return Answers(constrain(answers.each_RT, "batch", "seq"), pair, {})

    def reference_pair(self, variables: Tree, batch: Tree) -> jax.Array:
        """The reference's log-probabilities of a batch's answers, [B, 2]."""
        rows = [
            side_by_side(batch[name], batch[f"rejected_{name}"]) for name in ("tokens", "targets")
        ]
        return jnp.stack(self.reference_answers(variables, *rows).pair, axis=1)

    def answers(self, model: Any, tokens_RT: jax.Array, targets_RT: jax.Array) -> Answers:
        """A model's log-probabilities of the answers."""
        each_RT, metrics = log_probs_and_metrics(model, tokens_RT, targets_RT)
        answer_R = each_RT.sum(axis=1)
        if self.loss.averages:
            answer_R = answer_R / jnp.maximum((targets_RT >= 0).sum(axis=1), 1)
        pairs_B2 = reshape(answer_R, (len(answer_R) // 2, 2), "batch", None)
        return Answers(each_RT, Pair(pairs_B2[:, 0], pairs_B2[:, 1]), metrics)


def with_layers(
    model: Any, total, count, aux: Tree, metrics: Tree, targets_RT: jax.Array, updates: bool
) -> tuple[jax.Array, Tree]:
    """Adds the costs of layers, such as experts', to a loss whose count is not its targets.

    Costs are means over targets, as in training.

    Args:
      total, count, aux: of the loss.
      metrics: of the layers: name → [L, ...], sums over targets.
      updates: whether the model's buffers change.

    Returns: (the sum with costs, the means of the metrics for aux).
    """
    if not metrics:
        return total, {}
    targets = jnp.maximum((targets_RT >= 0).sum(), 1).astype(jnp.float32)
    costs = {name: count * (metric / targets) for name, metric in metrics.items()}
    total = model.add_costs(total, costs)
    means = model.layer_means(metrics, targets)
    if updates:
        model.update_buffers(DecoderObjective(total, targets, aux | means, metrics))
    return total, means


def side_by_side(chosen_BT: jax.Array, rejected_BT: jax.Array) -> jax.Array:
    """[B, T] of either side → [2B, T], the answers of a pair in neighbouring rows, on one device."""
    B, T = chosen_BT.shape
    pairs_B2T = jnp.stack([constrain(x, "batch", "seq") for x in (chosen_BT, rejected_BT)], axis=1)
    return reshape(pairs_B2T, (2 * B, T), "batch", "seq")


def _divergence(policy_RT, reference_RT, targets_RT) -> tuple[jax.Array, jax.Array]:
    """An estimate of KL(reference ‖ policy) at a token of an answer: (sum, number of tokens).

    Its terms, π/π_ref − 1 − log π/π_ref, are never negative (Schulman 2020).
    """
    ratio_RT = policy_RT - reference_RT
    terms_RT = jnp.expm1(ratio_RT) - ratio_RT  # 0 where there is no target
    return terms_RT.sum(), (targets_RT >= 0).sum().astype(jnp.float32)
