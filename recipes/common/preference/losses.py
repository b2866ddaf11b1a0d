"""Losses of pairs of answers, a chosen and a rejected one, and of single ones with a label, from the
answers' log-probabilities.

    dpo    −log σ(β · margin)                           Rafailov et al. 2023, equation 7
    ipo    (margin − 1 / 2β)²                           Azar et al. 2023, equation 17
    simpo  −log σ(β · margin − target margin)           Meng et al. 2024, equation 6
    orpo   −log p(chosen) − β · log σ(log odds ratio)   Hong et al. 2024, equations 6 and 7
    kto    λ · (1 − σ(±β · (log ratio − z)))            Ethayarajh et al. 2024, equations 7 and 8

The margin is the chosen answer's log-probability less the rejected one's; dpo and ipo take each
relative to a reference model's. kto has a good (+) or bad (−) answer as the chosen one; the rejected
one is another prompt's answer: z is the mean log ratio of these, at least 0, and has no gradient.
Shapes: B pairs. All arrays are float32.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from recipes.common.checkpoint.probe import LABELLED
from recipes.common.runtime import UserError, flag
from recipes.common.runtime.flags import refuse_unused

WITH_REFERENCE = ("dpo", "ipo", LABELLED)
# An answer's log-probability is that of a token, the mean. IPO's authors average too, though the
# paper doesn't say so.
AVERAGED = ("ipo", "simpo", "orpo")
CERTAIN = -1e-6  # largest log-probability in odds, which are infinite at 0


class Pair(NamedTuple):
    """A number for each pair's chosen and rejected answer."""

    chosen: jax.Array  # [B]
    rejected: jax.Array  # [B]


@dataclasses.dataclass(frozen=True)
class Loss:
    """Flags of the loss of preference pairs."""

    loss: str = flag(
        "dpo", "Loss of a pair, or of a labelled answer (kto); simpo and orpo need no reference.", "optimizer",
        choices=["dpo", "ipo", "simpo", "orpo", LABELLED],
    )  # fmt: skip
    beta: float = flag(
        0.1, "β of the loss: how strongly the reference holds the model (dpo, ipo, kto), the scale of the margin "
        "(simpo: try 2), or the weight of the odds ratio (orpo).", "optimizer", at_least=1e-6,
    )  # fmt: skip
    label_smoothing: float = flag(
        0.0, "Share of pairs assumed to be labelled the wrong way round (dpo, simpo).", "optimizer",
        at_least=0.0, at_most=0.5,
    )  # fmt: skip
    target_margin: float = flag(
        1.0, "Margin that simpo asks for, its γ.", "optimizer", at_least=0.0
    )
    length_normalized: str = flag(
        "", "Divide an answer's log-probability by its tokens; empty: for all losses but dpo and kto.",
        "optimizer", choices=["", "true", "false"],
    )  # fmt: skip
    good_weight: float = flag(1.0, "Weight λ of good answers (kto).", "optimizer", at_least=0.0)
    bad_weight: float = flag(1.0, "Weight λ of bad answers (kto).", "optimizer", at_least=0.0)

    def __post_init__(self):
        if self.label_smoothing and self.loss not in ("dpo", "simpo"):
            raise UserError(
                f"--label_smoothing={self.label_smoothing} is for dpo and simpo, not --loss={self.loss}; "
                "leave it out"
            )
        if self.loss != "simpo":
            refuse_unused(self, ("target_margin",), f"simpo, not --loss={self.loss}")
        if self.loss != LABELLED and (self.good_weight, self.bad_weight) != (1, 1):
            raise UserError(
                f"--good_weight and --bad_weight are for kto, not --loss={self.loss}; leave them out"
            )
        if self.loss == "orpo" and not self.averages:
            raise UserError(
                "--length_normalized=false gives --loss=orpo odds of whole answers, which are almost 0; "
                "leave it out"
            )

    @property
    def averages(self) -> bool:
        """Whether an answer's log-probability is the mean of its tokens', not the sum."""
        return (self.length_normalized or str(self.loss in AVERAGED).lower()) == "true"

    def log_ratios(self, policy: Pair, reference: Pair | None) -> Pair:
        """Log-probabilities, relative to the reference's if there is one."""
        if reference is None:
            return policy
        return Pair(*(ours - theirs for ours, theirs in zip(policy, reference, strict=True)))

    def distances(self, ratios: Pair, is_good_B, counts_B=None) -> jax.Array:
        """Kto's ±β · (log ratio − z), [B]: above 0 on the side of z that the label asks for.

        Args:
          is_good_B: the labels, bool.
          counts_B: rows that count in z, bool; None: all.
        """
        z = jnp.maximum(jnp.mean(ratios.rejected, where=counts_B), 0)
        distance_B = self.beta * (ratios.chosen - jax.lax.stop_gradient(z))
        return jnp.where(is_good_B, distance_B, -distance_B)

    def __call__(
        self, policy: Pair, reference: Pair | None = None, is_good_B=None, counts_B=None
    ) -> jax.Array:
        """The loss of each pair, [B], from the answers' log-probabilities, sums or means.

        Args:
          is_good_B, counts_B: as in `distances`, for kto.
        """
        ratios = self.log_ratios(policy, reference)
        if self.loss == LABELLED:
            assert is_good_B is not None
            weight_B = jnp.where(is_good_B, self.good_weight, self.bad_weight)
            return weight_B * (1 - jax.nn.sigmoid(self.distances(ratios, is_good_B, counts_B)))
        margin_B = ratios.chosen - ratios.rejected
        if self.loss == "ipo":
            return (margin_B - 1 / (2 * self.beta)) ** 2
        if self.loss == "orpo":
            log_odds_ratio_B = _log_odds(policy.chosen) - _log_odds(policy.rejected)
            return -policy.chosen - self.beta * jax.nn.log_sigmoid(log_odds_ratio_B)
        logits_B = self.beta * margin_B
        if self.loss == "simpo":
            logits_B = logits_B - self.target_margin
        right_B = jax.nn.log_sigmoid(logits_B)
        wrong_B = jax.nn.log_sigmoid(-logits_B)
        return -(1 - self.label_smoothing) * right_B - self.label_smoothing * wrong_B

    def rewards(self, policy: Pair, reference: Pair | None = None) -> Pair:
        """The rewards that the loss implies: β · log-probability, relative to the reference."""
        ratios = self.log_ratios(policy, reference)
        return Pair(self.beta * ratios.chosen, self.beta * ratios.rejected)


def _log_odds(log_prob_B):
    """log(p / (1 − p)) of p = exp(log_prob)."""
    log_prob_B = jnp.minimum(log_prob_B, CERTAIN)
    return log_prob_B - jnp.log(-jnp.expm1(log_prob_B))
