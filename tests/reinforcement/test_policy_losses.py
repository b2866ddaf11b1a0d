"""Losses of sampled answers against their papers' definitions in float64, values and gradients."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.reinforcement.losses import CLIPS, TINY, PolicyLoss
from tests.conftest import ROOT

pytestmark = pytest.mark.promise("reinforcement")

B, T, LONGEST = 4, 6, 5
LENGTHS = (5, 3, 1, 0)  # tokens of the answers; the last row is padding
FIRST = 1  # position of an answer's first token


def numbers(seed: int = 0) -> dict[str, np.ndarray]:
    """Log-probabilities whose ratios are on both sides of every clip, and advantages of both signs."""
    random = np.random.default_rng(seed)
    policy_BT = random.normal(-1.5, 0.3, (B, T))
    return {
        "policy": policy_BT,
        "old": policy_BT - np.resize([0.5, -0.4, 0.1, 0.3, -0.1, -0.6, 0.22], (B, T)),
        "sampler": policy_BT - random.normal(0, 0.5, (B, T)),
        "reference": policy_BT - random.normal(0, 0.3, (B, T)),
        "advantage": np.array([-1.25, 0.75, 1.5, 3.0]),
    }


IS_TARGET = np.array([[FIRST <= t < FIRST + n for t in range(T)] for n in LENGTHS])


def definition(loss: PolicyLoss, x: dict[str, np.ndarray], with_reference: bool) -> float:
    """The mean loss, answer by answer and token by token."""
    low, high = loss.clips
    answers = []  # the terms of each answer's tokens
    for b in range(B):
        places = np.flatnonzero(IS_TARGET[b])
        if not len(places):
            continue
        policy, old, sampler, reference = (
            x[name][b, places] for name in ("policy", "old", "sampler", "reference")
        )
        ratios = np.exp(policy - old)
        if loss.loss == "gspo":
            ratios = np.full(len(places), np.prod(ratios) ** (1 / len(places)))
        weights = np.exp(old - sampler)
        if loss.importance_of == "sequence":
            weights = np.full(len(places), np.prod(weights))
        if loss.importance == "none":
            weights = np.ones(len(places))
        elif loss.importance == "mask":
            weights = np.where(weights > loss.importance_cap, 0, weights)
        weights = np.minimum(weights, loss.importance_cap)
        gains = [
            min(r * x["advantage"][b], np.clip(r, 1 - low, 1 + high) * x["advantage"][b])
            for r in ratios
        ]
        terms = -np.array(gains) * weights
        if with_reference:
            terms += loss.kl * (np.exp(reference - policy) - 1 - (reference - policy))
        answers.append(terms)
    match loss.loss:
        case "dapo":
            return np.concatenate(answers).mean()
        case "dr_grpo":
            return float(np.mean([terms.sum() / LONGEST for terms in answers]))
        case _:
            return float(np.mean([terms.mean() for terms in answers]))


CASES = {
    **{name: PolicyLoss(name) for name in CLIPS},
    "a wide clip": PolicyLoss("gspo", clip_low=0.1, clip_high=0.15),
    "kl": PolicyLoss("grpo", kl=0.3),
    "kl of tokens": PolicyLoss("dapo", kl=0.3),
    "masked": PolicyLoss("grpo", importance="mask", importance_cap=1.2),
    "of sequences": PolicyLoss("gspo", importance_of="sequence", importance_cap=1.5),
    "of masked sequences": PolicyLoss(
        "dr_grpo", importance="mask", importance_of="sequence", importance_cap=1.5
    ),
    "no weights": PolicyLoss("dapo", importance="none"),
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradient(loss: PolicyLoss, with_reference: bool, x):
    def mean(policy_BT):
        total, count, metrics = loss(
            policy_BT, x["old"], x["sampler"], x["advantage"], IS_TARGET,
            longest=LONGEST, reference_BT=x["reference"] if with_reference else None,
        )  # fmt: skip
        return total / count, metrics

    return jax.value_and_grad(mean, has_aux=True)(x["policy"])


@pytest.mark.parametrize("name", CASES)
def test_a_loss_and_its_gradient_are_the_papers(name):
    loss, x = CASES[name], numbers()
    with_reference = loss.kl > 0
    arrays = {key: jnp.asarray(value, jnp.float32) for key, value in x.items()}
    (found, metrics), gradient_BT = with_gradient(loss, with_reference, arrays)
    np.testing.assert_allclose(found, definition(loss, x, with_reference), rtol=3e-6)
    clipped = float(metrics["clipped"][0])
    assert name not in CLIPS or clipped > 0, "some gradients stop at a clip"
    h = 1e-6
    for b, t in np.ndindex(B, T):
        higher, lower = (x["policy"].copy() for _ in range(2))
        higher[b, t] += h
        lower[b, t] -= h
        ends = (definition(loss, x | {"policy": p}, with_reference) for p in (higher, lower))
        slope = (next(ends) - next(ends)) / (2 * h)
        np.testing.assert_allclose(gradient_BT[b, t], slope, rtol=2e-5, atol=1e-7)


# What TRL's trainer computes: see tests/by_hand/trl_policy_losses.py.
TRL = json.loads((ROOT / "tests/golden/trl_policy_losses.json").read_text())["cases"]


@pytest.mark.parametrize("name", TRL)
def test_a_loss_and_its_gradient_are_those_of_trl(name):
    case = TRL[name]
    low, high = case["clips"]
    settings = {"kl": case["kl"], "clip_low": low, "clip_high": high, "importance": "none"}
    loss = PolicyLoss(case["loss"], **settings)
    policy, old, reference, advantage = (
        jnp.asarray(case[x], jnp.float32) for x in ("policy", "old", "reference", "advantage")
    )
    is_target_BT = np.array(case["mask"])

    def mean(policy_BT):
        total, count, _ = loss(
            policy_BT, old, old, advantage, is_target_BT,
            longest=case["longest"], reference_BT=reference if case["kl"] else None,
        )  # fmt: skip
        return total / count

    found, gradient_BT = jax.jit(jax.value_and_grad(mean))(policy)
    np.testing.assert_allclose(found, case["mean_loss"], rtol=3e-6)
    np.testing.assert_allclose(gradient_BT, case["gradient"], rtol=2e-5, atol=1e-7)


def test_a_padding_row_changes_nothing():
    loss, x = PolicyLoss("grpo", kl=0.1), numbers()
    other = {key: value.copy() for key, value in x.items()}
    for value in other.values():
        value[-1] = 7.0
    found = [with_gradient(loss, True, jax.tree.map(jnp.float32, y))[0][0] for y in (x, other)]
    assert found[0] == found[1]


def test_weights_are_never_infinite():
    """Also where the sampler was certain of what training finds impossible, or the other way round."""
    far = jnp.asarray([[0.0, -200.0]] * B)
    for kind in ("truncate", "mask"):
        weights = PolicyLoss(importance=kind).weights(far, far[:, ::-1], jnp.ones((B, 2), bool))
        assert np.isfinite(weights).all()
        assert weights.max() <= 2


def test_advantages_compare_answers_to_one_prompt():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    found = PolicyLoss("grpo").advantages(rewards)
    deviation = np.sqrt(4 * 0.25 / 3)  # of a sample
    np.testing.assert_allclose(found[0], np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + TINY))
    np.testing.assert_array_equal(found[1], 0)
    np.testing.assert_allclose(PolicyLoss("dr_grpo").advantages(rewards)[0], [0.5, -0.5, -0.5, 0.5])
