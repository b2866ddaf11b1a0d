"""The objective of a batch of sampled answers.

Shapes: B rows, T positions, W bytes of a bit for each token of the vocabulary,
L layers with experts, J experts per position.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from recipes.common.preference.objective import with_layers
from recipes.common.reinforcement.losses import PolicyLoss, RowsOfAnswers
from recipes.common.sharding import Layout, Tree
from recipes.common.sharding.abstract import unadapted, variables_of
from recipes.common.train.offload import to_device
from zoo.core.sharding import constrain
from zoo.experts.replay import replaying
from zoo.options.log_probs import log_probs_and_metrics

OUTSIDE = 0.1  # how far a ratio of probabilities is from 1 to be counted


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss of a model on its own answers, as AbstractModel.loss: (sum, count, metrics)."""

    loss: PolicyLoss
    longest: int  # tokens of an answer at most
    temperature: float = 1.0  # at which they were sampled
    reference: Layout | None = None  # with --kl
    most: int = 1  # answers of a packed row

    def __call__(
        self,
        model: Any,
        *,
        tokens: jax.Array,
        targets: jax.Array,
        sampler_log_probs: jax.Array,
        advantage: jax.Array,
        segment_ids: jax.Array | None = None,
        kept: jax.Array | None = None,
        experts: jax.Array | None = None,
        old_log_probs: jax.Array | None = None,
        frozen: Tree | None = None,
    ) -> tuple[jax.Array, jax.Array, Tree]:
        """
        Args:
          tokens, targets: prompts with answers, [B, T]; only answers' tokens are targets, others -1.
          sampler_log_probs: of the targets, [B, T].
          advantage: of each answer, [B], or in packed rows of each position, [B, T].
          segment_ids: of packed rows, [B, T]: 1, 2, … for the answers of a row, 0 for padding.
          kept: the tokens among which each target was sampled, [B, T, W]; None: among all.
          experts: that computed each position while it was sampled, [B, T, L, J]; None: those that the
            model's routers choose.
          old_log_probs: of the targets by the policy that wrote them, [B, T]; None: the current one.
          frozen: the reference's variables; None: the model's own, without its adapter.
        """
        with replaying(model, experts):
            policy_BT, layer_metrics = log_probs_and_metrics(
                model, tokens, targets, segment_ids, temperature=self.temperature, kept=kept
            )
        old_BT = jax.lax.stop_gradient(policy_BT)
        if old_log_probs is not None:
            old_BT = constrain(old_log_probs, "batch", "seq")
        reference_BT = None
        if self.reference:
            variables = unadapted(variables_of(model)) if frozen is None else frozen
            reference_BT = self.reference_log_probs(variables, tokens, targets, segment_ids, kept)
        is_target_BT = constrain(targets, "batch", "seq") >= 0
        answers = RowsOfAnswers()
        if segment_ids is not None:
            answers = RowsOfAnswers.packed(constrain(segment_ids, "batch", "seq"), self.most)
        total, count, aux = self.loss(
            policy_BT,
            old_BT,
            constrain(sampler_log_probs, "batch", "seq"),
            constrain(advantage, *("batch", "seq")[: advantage.ndim]),
            is_target_BT,
            longest=self.longest,
            reference_BT=reference_BT,
            answers=answers,
        )
        count = jnp.maximum(count, 1)  # a batch of which nothing counts has no gradient
        number = is_target_BT.sum().astype(jnp.float32)
        apart_BT = jnp.where(is_target_BT, old_BT - sampler_log_probs, 0)
        is_outside_BT = abs(jnp.expm1(apart_BT)) > OUTSIDE
        aux |= {
            "loss": (total, count),
            "mismatch": (abs(apart_BT).sum(), number),
            "outside": (is_outside_BT.sum().astype(jnp.float32), number),
        }
        updates = not self.reference or frozen is not None  # or the reference would change too
        total, means = with_layers(model, total, count, aux, layer_metrics, targets, updates)
        return total, count, aux | means

    def reference_log_probs(self, variables: Tree, tokens, targets, segment_ids, kept) -> jax.Array:
        """The reference's log-probabilities under its own rules, [B, T], sharded by the active rules."""
        assert self.reference
        with self.reference.trace():
            variables = jax.tree.map(to_device, variables)  # of a copy in the host's memory
            model = self.reference.model.merge(jax.lax.stop_gradient(variables))
            rows = jax.tree.map(
                lambda x: constrain(x, "batch", "seq"), (tokens, targets, segment_ids)
            )
            log_probs_BT, _ = log_probs_and_metrics(
                model, *rows, temperature=self.temperature, kept=kept
            )
        return constrain(log_probs_BT, "batch", "seq")
