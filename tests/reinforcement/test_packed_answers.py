"""Answers packed into rows: the same losses and gradients as a row for each."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from recipes.common import entries
from recipes.common.generation.rollouts import Answers
from recipes.common.reinforcement.losses import PolicyLoss, RowsOfAnswers
from recipes.common.reinforcement.objective import Objective
from recipes.common.reinforcement.rows import Packing, answer_rows
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.reinforcement.test_policy_losses import CASES, IS_TARGET, LONGEST, T, numbers
from tests.support.models import random_variables, worst
from tests.support.quick import QUICK

pytestmark = pytest.mark.promise("reinforcement")


@functools.partial(jax.jit, static_argnums=0)
def of_rows(loss: PolicyLoss, x, is_target_BT, segments_BT=None):
    answers = RowsOfAnswers()
    if segments_BT is not None:
        answers = RowsOfAnswers.packed(segments_BT, 5)

    def mean(policy_BT):
        total, count, metrics = loss(
            policy_BT, x["old"], x["sampler"], x["advantage"], is_target_BT,
            longest=LONGEST, reference_BT=x["reference"] if loss.kl else None, answers=answers,
        )  # fmt: skip
        return total / count, metrics

    return jax.value_and_grad(mean, has_aux=True)(x["policy"])


@pytest.mark.parametrize("name", full_except(CASES, ["grpo", "kl of tokens", "of sequences"]))
def test_a_loss_of_packed_answers_is_that_of_single_ones(name):
    """The last, without tokens, is padding; the third row begins with padding."""
    places = [(2, 1), (0, 0), (0, T), (1, 0)]  # row and first position of each
    x = {key: value.astype(np.float32) for key, value in numbers().items()}
    packed = {key: np.full((3, 2 * T), 9, np.float32) for key in x}
    is_target = np.zeros((3, 2 * T), bool)
    segments = np.zeros((3, 2 * T), np.int32)
    for b, (row, first) in enumerate(places):
        place = row, slice(first, first + T)
        segments[place] = 1 + segments[row].max()
        is_target[place] = IS_TARGET[b]
        for key, value in x.items():
            packed[key][place] = value[b]
    (wanted, wanted_metrics), wanted_BT = of_rows(CASES[name], x, IS_TARGET)
    (found, metrics), gradient = of_rows(CASES[name], packed, is_target, segments)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for key, value in wanted_metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-6, err_msg=key)
    for b, (row, first) in enumerate(places):
        np.testing.assert_allclose(gradient[row, first : first + T], wanted_BT[b], atol=1e-7)
    assert len({*segments[0]}) > 1, "two in a row"


# ---- rows ----------------------------------------------------------------------------------------

ROWS, LENGTH, WIDTH = 16, 16, 40


def answered(seed: int = 0) -> tuple[list[np.ndarray], Answers]:
    """Prompts of 1 to 5 tokens with answers of 1 to 10."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 257, n, np.int32) for n in random.integers(1, 6, ROWS)]
    tokens_BN = random.integers(0, 257, (ROWS, 10), np.int32)
    tokens_BN[np.arange(10)[None] >= random.integers(1, 11, ROWS)[:, None]] = -1
    log_probs_BN = random.normal(-3, 1, tokens_BN.shape).astype(np.float32)
    return prompts, Answers(tokens_BN, log_probs_BN, log_probs_BN)


def both_kinds(divisor: int = 1):
    """A batch of a row for each answer, and the same answers packed."""
    prompts, answers = answered()
    rows, sizes_B = answer_rows(prompts, answers, LENGTH)
    rows["advantage"] = np.linspace(-1, 1, ROWS, dtype=np.float32)
    return rows, Packing(WIDTH, LENGTH, ROWS, divisor)(rows, sizes_B)


@pytest.mark.parametrize("divisor", [1, 4])
def test_each_answer_is_in_a_row_once(divisor):
    rows, packed = both_kinds(divisor)
    prompts, answers = answered()
    R, T = packed["tokens"].shape
    assert T == WIDTH
    assert R % divisor == 0
    assert R < ROWS
    assert packed["segment_ids"].max() <= Packing(WIDTH, LENGTH, ROWS).most_answers
    found = {}
    for r in range(R):
        for n in range(1, packed["segment_ids"][r].max() + 1):
            (at,) = np.flatnonzero(packed["segment_ids"][r] == n)[[0, -1]][None]
            place = r, slice(at[0], at[1] + 1)
            assert (packed["segment_ids"][place] == n).all(), "its positions are neighbours"
            b = int(np.searchsorted(rows["advantage"], packed["advantage"][r, at[0]]))
            found[b] = place
    assert [*sorted(found)] == [*range(ROWS)]
    for b, place in found.items():
        written = answers.tokens_BN[b][answers.tokens_BN[b] >= 0]
        both = np.concatenate([prompts[b], written])
        np.testing.assert_array_equal(packed["tokens"][place], both[:-1])
        targets = np.where(np.arange(1, len(both)) >= len(prompts[b]), both[1:], -1)
        np.testing.assert_array_equal(packed["targets"][place], targets)
        is_target = targets >= 0
        log_probs = packed["sampler_log_probs"][place]
        np.testing.assert_array_equal(log_probs[is_target], answers.log_probs_BN[b, : len(written)])
        assert (packed["advantage"][place] == rows["advantage"][b]).all()
    padding = packed["segment_ids"] == 0
    assert (packed["targets"][padding] == -1).all()


def test_rows_are_enough_for_any_lengths_and_of_few_sizes():
    random = np.random.default_rng(0)
    packing = Packing(length=50, longest=12, answers=64, divisor=2)
    sizes = {packing.rows(n) for n in range(packing.most_rows + 1)}
    assert len(sizes) <= 8
    assert max(sizes) == packing.most_rows == 16
    for _ in range(50):
        sizes_B = random.integers(random.integers(1, 12), 13, 64)
        ones = np.where(np.arange(12)[None] < sizes_B[:, None], 1, -1)
        found = packing({"targets": ones, "tokens": ones}, sizes_B)
        assert len(found["tokens"]) in sizes
        assert (found["targets"] == 1).sum() == sizes_B.sum()


def test_an_answer_that_teaches_nothing_takes_no_room():
    rows, sizes_B = answer_rows(*answered(), LENGTH)
    rows["advantage"] = np.zeros(ROWS, np.float32)
    rows["targets"][3:] = -1
    found = Packing(WIDTH, LENGTH, ROWS)(rows, sizes_B)
    assert (found["segment_ids"] > 0).sum() == sizes_B[:3].sum()
    rows["targets"][:] = -1
    found = Packing(WIDTH, LENGTH, ROWS)(rows, sizes_B)
    assert found["tokens"].size > 0
    assert (found["targets"] == -1).all()


# ---- a model -------------------------------------------------------------------------------------

LOSSES = {
    "grpo": PolicyLoss("grpo", kl=0.0),
    "dr_grpo": PolicyLoss("dr_grpo", importance="none"),
    "dapo": PolicyLoss("dapo"),
    "gspo": PolicyLoss("gspo", importance_of="sequence", importance="mask", importance_cap=50.0),
}
MESHES = {"": "1x1", "fsdp_tp": "4x2", "fsdp_cp_tp": "data=2,seq=2,model=2"}


@functools.cache
def gradients_of(name: str, strategy: str, packs: bool):
    """(metrics, gradients by path); off-policy, so that ratios are clipped."""
    mesh = make_mesh(MESHES[strategy])
    shards = {"": 1, "fsdp_tp": 4, "fsdp_cp_tp": 2}[strategy]
    rows, packed = both_kinds(shards)
    batch = packed if packs else rows
    entry = "transformer"
    config = dataclasses.replace(entries.sizes(entry)["tiny"](), loss_chunk=8)
    length = WIDTH if packs else LENGTH
    layout = make_layout(
        entries.model(entry), config, mesh, strategy or None,
        batch_size=len(batch["tokens"]), seq_len=length,
    )  # fmt: skip
    objective = Objective(LOSSES[name], longest=10, temperature=0.8, most=ROWS)
    layout = dataclasses.replace(layout, model=layout.model._replace(loss=objective))
    batch["old_log_probs"] = batch["sampler_log_probs"] - np.float32(0.05)
    variables = random_variables(layout)
    placed = jax.device_put(batch, layout.batch_shardings(batch))

    def both(state, batch):
        grads, _, means = gradients(layout, state, batch)
        return means, grads

    means, grads = layout.compile(both, variables, placed, compiler_options=QUICK)(
        variables, placed
    )
    means = {name: float(x) for name, x in means.items()}
    return means, {path: np.asarray(x) for path, x in paths(grads).items()}


PACKED = [(name, strategy) for name in LOSSES for strategy in MESHES]


@pytest.mark.parametrize(
    ("name", "strategy"),
    full_except(PACKED, [], [x for x in PACKED if x != ("gspo", "fsdp_tp")]),
)
def test_a_gradient_of_packed_answers_is_that_of_single_ones(name, strategy):
    means, grads = gradients_of(name, strategy, packs=True)
    wanted, wanted_grads = gradients_of(name, "", packs=False)
    assert means.keys() == wanted.keys()
    for key, value in wanted.items():
        assert means[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert 0 < wanted["clipped"] < 1 or name == "dr_grpo"
    assert worst(grads, wanted_grads) < 2e-5
