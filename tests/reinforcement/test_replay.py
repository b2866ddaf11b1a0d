"""The sampler's experts in training: the definition, equal choices, and others on purpose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common import entries
from recipes.common.generation.rollouts import Sampler, sampling_layout
from recipes.common.reinforcement.losses import PolicyLoss
from recipes.common.reinforcement.objective import Objective
from recipes.common.reinforcement.rows import Packing, answer_rows
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.move import move
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support.models import random_variables, worst
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.experts.mixture import GatedExperts
from zoo.experts.replay import Given
from zoo.moe import Config

pytestmark = pytest.mark.promise("reinforcement")


@pytest.mark.parametrize("normalize", full_except([True, False], []))
def test_given_experts_have_the_weights_of_the_router_over_them(normalize):
    """Ma et al. 2025, equations 5 to 7: a softmax over the given experts, whose gradient is the router's."""
    B, T, E, J = 2, 4, 8, 2
    config = dataclasses.replace(Config.tiny(), capacity=None)
    experts = GatedExperts(config, biased=False, normalize=normalize, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    x_BTD = jnp.asarray(random.normal(size=(B, T, config.embed)), jnp.float32)
    given_BTJ = np.stack([random.permutation(E)[:J] for _ in range(B * T)]).reshape(B, T, J)
    inputs = make_inputs(config, jnp.zeros((B, T), jnp.int32))
    experts.routes.given = Given(jnp.asarray(given_BTJ, jnp.int32))

    graph, state = nnx.split(experts)

    def replayed(router):
        module = nnx.merge(graph, state)
        module.router = module.router.replace(router)
        return (module(x_BTD, inputs)[0] * x_BTD).sum()

    def definition(router):
        scores_BTE = x_BTD @ router
        scores_BTJ = jnp.take_along_axis(scores_BTE, given_BTJ, axis=2)
        if normalize:
            weight_BTJ = jax.nn.softmax(scores_BTJ)
        else:
            weight_BTJ = jnp.take_along_axis(jax.nn.softmax(scores_BTE), given_BTJ, axis=2)
        gate, up, down = (w[...][given_BTJ] for w in (experts.gate, experts.up, experts.down))
        hidden = jax.nn.silu(jnp.einsum("BTD,BTJDF->BTJF", x_BTD, gate))
        hidden *= jnp.einsum("BTD,BTJDF->BTJF", x_BTD, up)
        out_BTD = jnp.einsum("BTJF,BTJFD,BTJ->BTD", hidden, down, weight_BTJ)
        return (out_BTD * x_BTD).sum()

    router = experts.router[...] + 0
    found, wanted = (jax.jit(jax.value_and_grad(f))(router) for f in (replayed, definition))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4)
    assert abs(wanted[1]).max() > 0.01
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-3, atol=1e-5)


# ---- models --------------------------------------------------------------------------------------

ROWS, LENGTH, LONGEST = 8, 16, 8
PROMPTS = [np.arange(1, 2 + n % 3, dtype=np.int32) for n in range(ROWS)]
IDS = np.array([(3, n // 2, n % 2) for n in range(ROWS)])
# Entry, strategy, mesh, slots, packed.
CASES = [
    ("moe", "", "1x1", 0, False), ("moe", "fsdp_ep", "data=2,expert=4", 0, True),
    ("moe", "fsdp_cp_tp", "data=2,seq=2,model=2", 4, False),
    *((entry, "", "1x1", 4, True) for entry in ("deepseek", "gpt_oss", "qwen3_next", "gemma4", "hybrid")),
]  # fmt: skip


def config_of(entry: str):
    config = entries.sizes(entry)["tiny"]()
    if entry == "gemma4":
        config = dataclasses.replace(config, num_experts=8, experts_per_token=2, expert_mlp=32)
    return dataclasses.replace(config, loss_chunk=8, capacity=None)


@functools.cache
def step_of(entry, strategy, mesh, slots, packs, shift: int | None = 0):
    """(answers, metrics, gradients) of a rollout and a gradient after it.

    Args:
      shift: added to the number of each expert before training; None: nothing is replayed.
    """
    layout = make_layout(
        entries.model(entry), config_of(entry), make_mesh(mesh), strategy or None,
        batch_size=ROWS, seq_len=LENGTH,
    )  # fmt: skip
    variables = random_variables(layout)
    sampler = Sampler(
        sampling_layout(entries.model(entry), layout), (7,), 300, LONGEST, 0.8,
        slots=slots, keeps_experts=shift is not None,
    )  # fmt: skip
    answers = sampler(move(variables, layout, sampler.layout), PROMPTS, IDS)
    batch, sizes_B = answer_rows(PROMPTS, answers, LENGTH)
    batch["advantage"] = np.linspace(-1, 1, ROWS, dtype=np.float32)
    if packs:
        batch = Packing(2 * LENGTH, LENGTH, ROWS, layout.batch_shards)(batch, sizes_B)
    if shift:
        batch["experts"] = (batch["experts"] + shift) % layout.config.num_experts
    layout = dataclasses.replace(layout, batch_size=len(batch["tokens"]))
    objective = Objective(PolicyLoss("grpo"), LONGEST, temperature=0.8, most=ROWS)
    layout = dataclasses.replace(layout, model=layout.model._replace(loss=objective))
    placed = jax.device_put(batch, layout.batch_shardings(batch))

    def both(state, batch):
        grads, _, means = gradients(layout, state, batch)
        return means, grads

    means, grads = layout.compile(both, variables, placed, compiler_options=QUICK)(
        variables, placed
    )
    means = {name: float(x) for name, x in means.items() if name != "balance"}  # a row's
    return answers, means, {path: np.asarray(x) for path, x in paths(grads).items()}


def compare(found, wanted) -> None:
    np.testing.assert_array_equal(found[0].tokens_BN, wanted[0].tokens_BN)
    for name, value in wanted[1].items():
        if name in found[1]:
            assert found[1][name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


@pytest.mark.parametrize("case", full_except([(x,) for x in CASES], [], [(x,) for x in CASES[2:]]))
def test_the_sampler_s_experts_are_the_router_s_where_nothing_rounds(case):
    """In float32: log-probabilities, metrics and gradients are those without replay on one device."""
    found = step_of(*case)
    assert found[1]["mismatch"] < 2e-6
    wanted = step_of(case[0], "", "1x1", 0, case[4], None)
    compare(found, wanted)
    assert worst(found[2], wanted[2]) < 1e-4


@pytest.mark.parametrize("case", full_except([(x,) for x in CASES], [], [(x,) for x in CASES[1:]]))
def test_training_computes_by_other_experts_if_the_sampler_did(case):
    """Choices that differ on purpose: on any mesh, and for the sampler's tokens alone."""
    found = step_of(*case, shift=1)
    assert found[1]["mismatch"] > 1e-3
    wanted = step_of(case[0], "", "1x1", 0, case[4], shift=1)
    compare(found, wanted)
    assert worst(found[2], wanted[2]) < 1e-4
