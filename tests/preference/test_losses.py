"""Losses of preference pairs against their papers' definitions in float64, and TRL's numbers."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.preference.losses import Loss, Pair
from tests.conftest import ROOT

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


def pair_of(numbers) -> Pair | None:
    return None if numbers is None else Pair(*jnp.asarray(numbers, jnp.float32))


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


@functools.partial(jax.jit, static_argnums=0)
def with_gradient(loss: Loss, policy: Pair, *others) -> tuple[jax.Array, Pair]:
    """(losses, the gradient of their sum)."""
    found, pull = jax.vjp(lambda policy: loss(policy, *others), policy)
    return found, *pull(jnp.ones_like(found))


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_the_papers(name):
    loss, definition = CASES[name]
    policy, reference = arguments(name)
    found, gradients = with_gradient(loss, pair_of(policy), pair_of(reference))
    expected = definition(policy, reference)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
    step = 1e-5
    for side, gradient in enumerate(gradients):
        moved = np.zeros_like(policy)
        moved[side] = step
        difference = definition(policy + moved, reference) - definition(policy - moved, reference)
        np.testing.assert_allclose(gradient, difference / (2 * step), rtol=2e-5, atol=1e-6)


# What TRL's trainers compute: see tests/by_hand/trl_losses.py.
SETTINGS = ("loss", "beta", "label_smoothing", "target_margin", "good_weight", "bad_weight")
TRL = json.loads((ROOT / "tests/golden/trl_losses.json").read_text())["cases"]


@pytest.mark.parametrize("name", TRL)
def test_losses_gradients_and_rewards_are_those_of_trl(name):
    case = TRL[name]
    loss = Loss(**{name: case[name] for name in SETTINGS})
    policy, reference = (pair_of(case[x]) for x in ("policy", "reference"))
    is_good_B = None if case["labels"] is None else jnp.array(case["labels"])
    found, gradients = with_gradient(loss, policy, reference, is_good_B)
    np.testing.assert_allclose(np.mean(found), case["mean_loss"], rtol=2e-6)
    gradient = np.stack(gradients) / found.size  # of the mean
    np.testing.assert_allclose(gradient, case["gradient"], rtol=2e-5, atol=1e-7)
    if case["mean_reward"] is not None:
        reward = loss.rewards(policy, reference).chosen.mean()
        np.testing.assert_allclose(reward, case["mean_reward"], rtol=2e-6)


def kto(policy, reference, labels, beta, good, bad):
    """Ethayarajh et al. 2024, equations 7 and 8; z, the reference point, has no gradient."""
    z = max(0.0, np.mean(KTO_POLICY[1] - KTO_REFERENCE[1]))
    r = policy[0] - reference[0]
    value = np.where(labels, good * sigmoid(beta * (r - z)), bad * sigmoid(beta * (z - r)))
    return np.where(labels, good, bad) - value


KTO_POLICY, KTO_REFERENCE = (np.array(TRL["kto"][x]) for x in ("policy", "reference"))


def test_kto_and_its_gradient_are_the_papers():
    labels = np.array(TRL["kto"]["labels"])
    assert np.mean(KTO_POLICY[1] - KTO_REFERENCE[1]) > 0, "otherwise z is 0"
    loss = Loss("kto", 0.2, good_weight=1.25, bad_weight=0.5)
    reference = pair_of(KTO_REFERENCE)
    found, gradients = with_gradient(loss, pair_of(KTO_POLICY), reference, labels)
    definition = functools.partial(kto, labels=labels, beta=0.2, good=1.25, bad=0.5)
    np.testing.assert_allclose(found, definition(KTO_POLICY, KTO_REFERENCE), rtol=2e-6)
    step = np.array([[1e-5], [0]])
    difference = definition(KTO_POLICY + step, KTO_REFERENCE)
    difference = difference - definition(KTO_POLICY - step, KTO_REFERENCE)
    np.testing.assert_allclose(gradients.chosen, difference / 2e-5, rtol=2e-5, atol=1e-7)
    np.testing.assert_array_equal(gradients.rejected, 0)
    padded = [
        pair_of(np.append(pair, [[-1.0], [-1.0]], axis=1)) for pair in (KTO_POLICY, KTO_REFERENCE)
    ]
    counts_B = np.arange(len(labels) + 1) < len(labels)
    without, _ = with_gradient(loss, *padded, np.append(labels, True), counts_B)
    np.testing.assert_allclose(without[:-1], found, rtol=1e-6, err_msg="padding does not move z")


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
    found = with_gradient(loss, pair_of([[0.0, -1e-9], [-1.0, 0.0]]))
    assert np.isfinite(jax.tree.leaves(found)).all()


def test_dpo_and_kto_sum():
    averages = {name: Loss(name).averages for name in ("dpo", "kto", "ipo", "simpo", "orpo")}
    assert [name for name in averages if not averages[name]] == ["dpo", "kto"]
    assert Loss("dpo", length_normalized="true").averages
    assert not Loss("ipo", length_normalized="false").averages
