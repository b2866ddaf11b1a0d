"""Losses of preference pairs against their papers' definitions in float64, and TRL's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.preference.losses import Loss, Pair

pytestmark = pytest.mark.promise("preferences")

# Log-probabilities of chosen and rejected answers, by the policy and by the reference: near ones, ones
# of long answers, and ones on either side.
POLICY = np.array([[-1.25, -3.5, -0.75, -410.0, -0.25], [-2.5, -1.75, -0.75, -455.0, -9.0]])
REFERENCE = np.array([[-1.5, -3.0, -0.75, -430.0, -0.5], [-2.0, -2.25, -0.75, -440.0, -3.0]])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dpo(policy, reference, beta, smoothing):
    """Rafailov et al. 2023, equation 7; with smoothing, their conservative DPO."""
    (pi_w, pi_l), (ref_w, ref_l) = policy, reference
    h = beta * np.log(np.exp(pi_w - ref_w)) - beta * np.log(np.exp(pi_l - ref_l))
    return -(1 - smoothing) * np.log(sigmoid(h)) - smoothing * np.log(sigmoid(-h))


def ipo(policy, reference, beta):
    """Azar et al. 2023, equation 17: h = log π(w) π_ref(l) / π(l) π_ref(w)."""
    (pi_w, pi_l), (ref_w, ref_l) = policy, reference
    return ((pi_w + ref_l) - (pi_l + ref_w) - 0.5 / beta) ** 2


def simpo(policy, beta, gamma, smoothing):
    """Meng et al. 2024, equation 6, of log-probabilities divided by lengths."""
    h = beta * policy[0] - beta * policy[1] - gamma
    return -(1 - smoothing) * np.log(sigmoid(h)) - smoothing * np.log(sigmoid(-h))


def orpo(policy, beta):
    """Hong et al. 2024, equations 3, 4, 6 and 7, of log-probabilities divided by lengths."""
    p_w, p_l = np.exp(policy)
    ratio = (p_w / (1 - p_w)) / (p_l / (1 - p_l))
    return -np.log(p_w) - beta * np.log(sigmoid(np.log(ratio)))


CASES = {
    "dpo": (Loss("dpo", 0.1), lambda p, r: dpo(p, r, 0.1, 0.0)),
    "dpo smoothed": (Loss("dpo", 0.3, 0.2), lambda p, r: dpo(p, r, 0.3, 0.2)),
    "ipo": (Loss("ipo", 0.2), lambda p, r: ipo(p, r, 0.2)),
    "simpo": (Loss("simpo", 2.0, target_margin=0.7), lambda p, _: simpo(p, 2.0, 0.7, 0.0)),
    "simpo smoothed": (Loss("simpo", 2.0, 0.1), lambda p, _: simpo(p, 2.0, 1.0, 0.1)),
    "orpo": (Loss("orpo", 0.25), lambda p, _: orpo(p, 0.25)),
}


def arguments(name: str):
    """(policy, reference) in float64. Odds are of answers that a float64 can hold."""
    averaged = name.partition(" ")[0] in ("simpo", "orpo")
    scale = 0.02 if averaged else 1.0
    return POLICY * scale - (0.01 if averaged else 0.0), None if averaged else REFERENCE


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_the_papers(name):
    loss, definition = CASES[name]
    policy, reference = arguments(name)
    pair = lambda x: None if x is None else Pair(*jnp.asarray(x, jnp.float32))  # noqa: E731
    found, pull = jax.vjp(functools.partial(loss, reference=pair(reference)), pair(policy))
    expected = definition(policy, reference)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
    (gradients,) = pull(jnp.ones_like(found))
    step = 1e-5
    for side, gradient in enumerate(gradients):
        moved = np.zeros_like(policy)
        moved[side] = step
        difference = definition(policy + moved, reference) - definition(policy - moved, reference)
        np.testing.assert_allclose(gradient, difference / (2 * step), rtol=2e-5, atol=1e-6)


# What the formulas of TRL 1.16 give in float64 on the arguments above (dpo_trainer's "sigmoid" and "ipo",
# cpo_trainer's "simpo", orpo_trainer): the mean loss, and the mean reward of the chosen answers.
TRL = {
    "dpo": (0.5104690156018902, 0.4),
    "ipo": (218.375, 0.8),
    "simpo": (0.8988913839328065, -3.346),
    "orpo": (1.8025951655821824, -0.41825),
}


@pytest.mark.parametrize("name", TRL)
def test_losses_and_rewards_are_those_of_trl(name):
    loss, _ = CASES[name]
    pairs = [None if x is None else Pair(*jnp.asarray(x, jnp.float32)) for x in arguments(name)]
    mean_loss, mean_reward = TRL[name]
    np.testing.assert_allclose(loss(*pairs).mean(), mean_loss, rtol=2e-6)
    np.testing.assert_allclose(loss.rewards(*pairs).chosen.mean(), mean_reward, rtol=2e-6)


def test_a_margin_is_the_difference_of_rewards():
    loss = Loss("dpo", 0.5)
    policy, reference = (Pair(*jnp.asarray(x, jnp.float32)) for x in (POLICY, REFERENCE))
    chosen_B, rejected_B = loss.rewards(policy, reference)
    np.testing.assert_allclose(chosen_B, 0.5 * (POLICY[0] - REFERENCE[0]))
    np.testing.assert_allclose(rejected_B, 0.5 * (POLICY[1] - REFERENCE[1]))
    found_B = -jax.nn.log_sigmoid(chosen_B - rejected_B)
    np.testing.assert_allclose(found_B, loss(policy, reference), rtol=1e-6)


def test_certain_answers_have_finite_losses_and_gradients():
    loss = Loss("orpo")
    value, gradient = jax.value_and_grad(lambda p: loss(p).sum())(
        Pair(jnp.array([0.0, -1e-9]), jnp.array([-1.0, 0.0]))
    )
    assert np.isfinite([value, *gradient.chosen, *gradient.rejected]).all()


def test_only_dpo_sums():
    assert [Loss(name).averages for name in ("dpo", "ipo", "simpo", "orpo")] == [False] + [True] * 3
    assert Loss("dpo", length_normalized="true").averages
    assert not Loss("ipo", length_normalized="false").averages
