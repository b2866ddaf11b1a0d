"""Policy losses of sampled answers with advantages, from their tokens' log-probabilities.

    grpo     clipped ratios of tokens, a mean over each answer's tokens, then over answers
             Shao et al. 2024, equation 3
    dr_grpo  the same sum with a constant length, and advantages without the group's deviation
             Liu et al. 2025, section 3.2
    dapo     a mean over all tokens, a higher upper clip; groups without variance don't count
             Yu et al. 2025, equations 8 to 12
    gspo     the clipped ratio of a whole answer, per token
             Zheng et al. 2025, equations 5 and 7

A ratio is π(token) / π_old(token). π_old is the policy that wrote the answer, as training computes it; the
sampler's own log-probabilities differ by rounding (recipes/docs/precision.md), for which importance weights
π_old / π_sampler correct. Shapes: B rows, T positions, A answers of a row, G answers of a prompt. All arrays are float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from recipes.common.runtime import flag

# Loss → (lower, upper) clip of its paper.
CLIPS = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}
TRUNCATE, MASK, NO_WEIGHTS = "truncate", "mask", "none"
TINY = 1e-4  # added to a group's deviation, as TRL does


@dataclasses.dataclass(frozen=True)
class RowsOfAnswers:
    """Which answer of its row each position belongs to.

    Args:
      is_of_BTA: bool; None: a row has one answer, and A is 1.
    """

    is_of_BTA: jax.Array | None = None

    @classmethod
    def packed(cls, segment_ids_BT: jax.Array, most: int) -> "RowsOfAnswers":
        """Rows of at most `most` answers with segment ids 1, 2, …; 0 is padding."""
        return cls(segment_ids_BT[..., None] == 1 + jnp.arange(most)[None, None])

    def sums(self, x_BT: jax.Array) -> jax.Array:
        """The sum over each answer's positions, [B, A]."""
        if self.is_of_BTA is None:
            return x_BT.sum(axis=1, keepdims=True)
        return jnp.where(self.is_of_BTA, x_BT[..., None], 0).sum(axis=1)

    def spread(self, x_BA: jax.Array) -> jax.Array:
        """Each position's number of its answer, [B, T], or [B, 1] where a row has one answer."""
        if self.is_of_BTA is None:
            return x_BA
        return jnp.where(self.is_of_BTA, x_BA[:, None], 0).sum(axis=2)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Flags of the policy loss."""

    loss: str = flag(
        "grpo", "Loss of an answer's tokens; dr_grpo is GRPO without its biases.", "optimizer",
        choices=[*CLIPS],
    )  # fmt: skip
    clip_low: float = flag(
        0.0, "How far a ratio may fall below 1 before its gradient stops; 0: as in the loss's paper.",
        "optimizer", at_least=0.0, at_most=1.0,
    )  # fmt: skip
    clip_high: float = flag(
        0.0, "How far a ratio may rise above 1 likewise; 0: as in the paper.", "optimizer", at_least=0.0
    )  # fmt: skip
    kl: float = flag(
        0.0, "Weight of the divergence from the starting checkpoint, at each token; 0: no reference.",
        "optimizer", at_least=0.0,
    )  # fmt: skip
    importance: str = flag(
        TRUNCATE, "What to do with importance weights above --importance_cap: truncate them, mask their "
        "tokens, or use no weights.", "optimizer", choices=[TRUNCATE, MASK, NO_WEIGHTS],
    )  # fmt: skip
    importance_of: str = flag(
        "token", "Whether a token or a whole answer has an importance weight.", "optimizer",
        choices=["token", "sequence"],
    )  # fmt: skip
    importance_cap: float = flag(2.0, "Largest importance weight.", "optimizer", at_least=1.0)

    @property
    def clips(self) -> tuple[float, float]:
        low, high = CLIPS[self.loss]
        return self.clip_low or low, self.clip_high or high

    def advantages(self, rewards_PG: np.ndarray) -> np.ndarray:
        """How much better each answer is than its group, [P, G] in float64."""
        advantages_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
        if self.loss == "dr_grpo":
            return advantages_PG
        return advantages_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + TINY)

    def weights(
        self, old_BT, sampler_BT, is_target_BT, answers: RowsOfAnswers = RowsOfAnswers()
    ) -> jax.Array:
        """Importance weights π_old / π_sampler, [B, T] or [B, 1], at most the cap; no gradient."""
        if self.importance == NO_WEIGHTS:
            return jnp.ones_like(old_BT)
        log_weight_BT = jnp.where(is_target_BT, old_BT - sampler_BT, 0)
        if self.importance_of == "sequence":
            log_weight_BT = answers.spread(answers.sums(log_weight_BT))
        cap = jnp.log(self.importance_cap)
        weight_BT = jnp.exp(jnp.minimum(log_weight_BT, cap))  # never infinite
        if self.importance == MASK:
            weight_BT = jnp.where(log_weight_BT > cap, 0, weight_BT)
        return jax.lax.stop_gradient(weight_BT)

    def __call__(
        self,
        policy_BT: jax.Array,
        old_BT: jax.Array,
        sampler_BT: jax.Array,
        advantage: jax.Array,
        is_target_BT: jax.Array,
        *,
        longest: int,
        reference_BT: jax.Array | None = None,
        answers: RowsOfAnswers = RowsOfAnswers(),
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """(sum, count, metrics: name → (sum, count)); the loss is sum / count.

        Args:
          policy_BT: log-probabilities of the answers' tokens; only these have gradients.
          old_BT: of the policy that wrote them, by training's forward pass.
          sampler_BT: by the sampler.
          advantage: of each row's answer, [B], or of each position's, [B, T].
          is_target_BT: the tokens of answers; an answer without any is padding.
          longest: the limit of an answer, for dr_grpo.
          answers: the answers of packed rows.
        """
        tokens_BA = answers.sums(is_target_BT.astype(jnp.float32))
        per_token_BA = jnp.where(tokens_BA > 0, 1 / jnp.maximum(tokens_BA, 1), 0)
        log_ratio_BT = jnp.where(is_target_BT, policy_BT - old_BT, 0)
        if self.loss == "gspo":
            # The answer's ratio, whose gradient is the mean of its tokens'.
            log_ratio_BT = answers.spread(answers.sums(log_ratio_BT) * per_token_BA)
        ratio_BT = jnp.exp(log_ratio_BT)
        low, high = self.clips
        advantage_BT = advantage if advantage.ndim > 1 else advantage[:, None]
        gain_BT = ratio_BT * advantage_BT
        clipped_BT = jnp.clip(ratio_BT, 1 - low, 1 + high) * advantage_BT
        weight_BT = self.weights(old_BT, sampler_BT, is_target_BT, answers)
        loss_BT = -jnp.minimum(gain_BT, clipped_BT) * weight_BT
        loss_BT = jnp.where(is_target_BT, loss_BT, 0)  # of gspo, each token has its answer's
        tokens = tokens_BA.sum()
        metrics: dict[str, Any] = {
            "clipped": (jnp.where(is_target_BT & (clipped_BT < gain_BT), 1.0, 0.0).sum(), tokens),
            "importance": (jnp.where(is_target_BT, weight_BT, 0).sum(), tokens),
        }
        if reference_BT is not None:
            # Schulman 2020: π_ref/π − 1 − log π_ref/π, never negative, unbiased for KL(π ‖ π_ref).
            apart_BT = jnp.where(is_target_BT, reference_BT - policy_BT, 0)
            kl_BT = jnp.expm1(apart_BT) - apart_BT
            loss_BT = loss_BT + self.kl * kl_BT
            metrics["kl"] = (kl_BT.sum(), tokens)
        count = (tokens_BA > 0).sum().astype(jnp.float32)
        if self.loss == "dapo":
            return loss_BT.sum(), tokens, metrics
        if self.loss == "dr_grpo":
            return loss_BT.sum(), count * longest, metrics
        return (answers.sums(loss_BT) * per_token_BA).sum(), count, metrics
