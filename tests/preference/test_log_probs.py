"""Log-probabilities of answers: each position's, over shards of the vocabulary and chunks of positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.preference.losses import Loss
from recipes.common.preference.objective import Objective
from recipes.common.report import report
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from tests.conftest import full_except
from tests.support.models import packed_batch, random_variables
from tests.support.quick import QUICK
from zoo.bert import Bert
from zoo.bert import Config as BertConfig
from zoo.llama_relatives import Config, Transformer
from zoo.options import log_probs as zoo_log_probs

pytestmark = pytest.mark.promise("preferences")

ROWS = packed_batch()
# Each row's log-probabilities count differently, as in a loss of pairs.
WEIGHTS_B = np.linspace(-1, 2, 8, dtype=np.float32)
MESHES = [("1x1", ""), ("4x2", "fsdp_tp"), ("1x8", "tp"), ("2x2x2", "hsdp_tp")]
MESHES += [("data=2,seq=2,model=2", "fsdp_cp_tp"), ("data=1,seq=8", "fsdp_cp")]


def layout_on(mesh: str, strategy: str, **changes):
    config = dataclasses.replace(Config.tiny(), loss_chunk=8, **changes)
    return make_layout(
        Transformer,
        config,
        make_mesh(mesh),
        strategy,
        batch_size=8,
        seq_len=ROWS["tokens"].shape[1],
    )


def some_kept() -> np.ndarray:
    """For each position its target and some other tokens, bool [B, T, V]; for padding none."""
    targets_BT1 = ROWS["targets"][..., None]
    V = Config.tiny().vocab_size
    kept_BTV = np.random.default_rng(0).random((*ROWS["targets"].shape, V)) < 0.1
    return (kept_BTV | (np.arange(V) == targets_BT1)) & (targets_BT1 >= 0)


@functools.cache
def log_probs_and_gradients(mesh: str, strategy: str, truncated: bool = False):
    layout = layout_on(mesh, strategy)
    rows = ROWS | ({"kept": np.packbits(some_kept(), axis=2)} if truncated else {})

    def weighted(variables, batch, weights_B):
        log_probs_BT, _ = zoo_log_probs.log_probs_and_metrics(
            layout.model.merge(variables), **batch
        )
        return (log_probs_BT.sum(axis=1) * weights_B).sum(), log_probs_BT

    arguments = (
        random_variables(layout),
        *jax.device_put((rows, WEIGHTS_B), layout.batch_shardings((rows, WEIGHTS_B))),
    )
    program = layout.compile(
        jax.value_and_grad(weighted, has_aux=True), *arguments, compiler_options=QUICK
    )
    (_, log_probs_BT), gradients = program(*arguments)
    return np.asarray(log_probs_BT), {k: np.asarray(v) for k, v in paths(gradients).items()}


@functools.cache
def from_logits(truncated: bool = False):
    """The definition, from all logits, without chunks."""
    layout = layout_on("1x1", "")
    is_left_BTV = some_kept() | (ROWS["targets"] < 0)[..., None] | (not truncated)

    def weighted(variables):
        logits_BTV = layout.model.merge(variables)(ROWS["tokens"], ROWS["segment_ids"])
        logits_BTV = jnp.where(is_left_BTV, logits_BTV, -1e9)
        log_probs_BTV = jax.nn.log_softmax(logits_BTV)
        is_target_BTV = jnp.arange(log_probs_BTV.shape[-1]) == ROWS["targets"][..., None]
        each_BT = jnp.where(is_target_BTV, log_probs_BTV, 0).sum(axis=-1)
        return (each_BT.sum(axis=1) * WEIGHTS_B).sum(), (each_BT, logits_BTV)

    with layout.trace():
        (_, (each_BT, logits_BTV)), gradients = jax.jit(
            jax.value_and_grad(weighted, has_aux=True), compiler_options=QUICK
        )(random_variables(layout))
    return np.asarray(each_BT), {k: np.asarray(v) for k, v in paths(gradients).items()}, logits_BTV


@pytest.mark.parametrize("truncated", [False, True])
def test_one_device_has_the_log_softmax_of_float64(truncated):
    found_BT, gradients = log_probs_and_gradients("1x1", "", truncated)
    _, expected, logits_BTV = from_logits(truncated)
    logits_BTV = np.asarray(logits_BTV, np.float64)
    log_sum_BT = np.log(np.exp(logits_BTV).sum(axis=-1))
    targets_BT = ROWS["targets"]
    picked_BT = np.take_along_axis(logits_BTV, np.maximum(targets_BT, 0)[..., None], 2)[..., 0]
    each_BT = np.where(targets_BT < 0, 0, picked_BT - log_sum_BT)
    np.testing.assert_allclose(found_BT, each_BT, atol=2e-6)
    for path, gradient in expected.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(gradients[path], gradient, atol=2e-6 * scale, err_msg=path)


@pytest.mark.full
def test_a_bias_of_logits_counts():
    """Bert's: log-probabilities and the bias's gradient are those of all logits."""
    rows = {name: rows[:2] for name, rows in ROWS.items()}
    layout = make_layout(
        Bert, dataclasses.replace(BertConfig.tiny(), loss_chunk=8), make_mesh("1x1")
    )
    weights_B1 = WEIGHTS_B[:2, None]

    def chunked(variables):
        return zoo_log_probs.log_probs(layout.model.merge(variables), **rows)

    def from_all_logits(variables):
        logits_BTV = layout.model.merge(variables)(rows["tokens"], rows["segment_ids"])
        picked = jnp.arange(logits_BTV.shape[-1]) == rows["targets"][..., None]
        return jnp.where(picked, jax.nn.log_softmax(logits_BTV), 0).sum(axis=-1)

    def both(variables):
        results = []
        for function in (chunked, from_all_logits):

            def weighted(variables, function=function):
                each_BT = function(variables)
                return (each_BT * weights_B1).sum(), each_BT

            grads, each_BT = jax.grad(weighted, has_aux=True)(variables)
            results.append((each_BT, grads))
        return results

    variables = random_variables(layout)
    assert jnp.abs(variables["params"]["unembed_bias"]).max() > 0.1
    program = layout.compile(both, variables, compiler_options=QUICK)
    (found_BT, grads), (expected_BT, expected) = program(variables)
    np.testing.assert_allclose(found_BT, expected_BT, atol=2e-5)
    expected = paths(expected)
    for path, gradient in paths(grads).items():
        scale = np.abs(expected[path]).max()
        np.testing.assert_allclose(gradient, expected[path], atol=2e-5 * scale, err_msg=path)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("mesh", "strategy"), full_except(MESHES[1:], []))
def test_meshes_agree(mesh, strategy, truncated):
    found_BT, gradients = log_probs_and_gradients(mesh, strategy, truncated)
    expected_BT, expected = log_probs_and_gradients("1x1", "", truncated)
    np.testing.assert_allclose(found_BT, expected_BT, atol=1e-5)
    for path, gradient in expected.items():
        error = np.linalg.norm(gradients[path] - gradient) / np.linalg.norm(gradient)
        assert error < 1e-5, path


@pytest.mark.full
def test_there_are_never_logits_of_all_positions():
    layout = layout_on("4x2", "fsdp_tp", vocab_size=4096)
    batch = layout.abstract_batch({name: rows[0] for name, rows in ROWS.items()})

    def weighted(variables, batch):
        return zoo_log_probs.log_probs(layout.model.merge(variables), **batch).sum()

    program = layout.compile(jax.grad(weighted), layout.variables(), batch, compiler_options=QUICK)
    text = program.as_text() or ""
    rows, positions, vocabulary = 2, ROWS["tokens"].shape[1], 4096 // 2  # of a device
    for shape in (f"{rows},{positions},{vocabulary}", f"{rows * positions},{vocabulary}"):
        assert shape not in text
    assert f"{rows * 8},{vocabulary}" in text, "of a chunk"
    assert report.memory(program).temp_size_in_bytes > 0


@pytest.mark.full
def test_bfloat16_adds_up_in_float32():
    """A long answer's log-probability is a sum of thousands of terms."""
    rows = {"tokens": np.zeros((2, 2048), np.int32), "targets": np.zeros((2, 2048), np.int32)}
    rows["tokens"][:] = rows["targets"][:] = np.random.default_rng(0).integers(0, 257, (2, 2048))
    found, summed = {}, {}
    simpo = Objective(Loss("simpo", length_normalized="false"))
    for dtype in ("float32", "bfloat16"):
        config = dataclasses.replace(Config.tiny(), dtype=dtype)
        layout = make_layout(Transformer, config, make_mesh("1x1"))
        program = layout.compile(
            lambda v, b, layout=layout: simpo.answers(layout.model.merge(v), *b.values()),
            layout.variables(), rows, compiler_options=QUICK,
        )  # fmt: skip
        answers = program(random_variables(layout), rows)
        found[dtype], summed[dtype] = answers.each_RT, np.concatenate(answers.pair)
        assert found[dtype].dtype == jnp.float32
    exact, rounded = (np.asarray(x, np.float64).sum(axis=1) for x in found.values())
    assert np.abs(exact).min() > 8_000, "in bfloat16, numbers there are 64 apart"
    assert np.abs(rounded / exact - 1).max() < 1e-3
    for dtype, sums in {"float32": exact, "bfloat16": rounded}.items():
        assert summed[dtype].dtype == np.float32
        np.testing.assert_allclose(summed[dtype], sums, rtol=1e-6, err_msg="the objective's sum")
