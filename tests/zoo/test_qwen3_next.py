"""Qwen3-Next: layers of two kinds in turn, packed rows, and generation with states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.generation.generator import Generator, Sampling, cap_windows
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import full_except
from tests.support.decoding import check_decoding
from tests.support.models import built, random_variables
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.qwen3_next import Config, Qwen3Next

pytestmark = [pytest.mark.promise("recurrent-layers"), pytest.mark.usefixtures("strict")]

DENSE = dataclasses.replace(Config.tiny(), num_experts=0, shared_mlp=0, experts_per_token=0)
B, T = 8, 32
RANDOM = np.random.default_rng(0)
TOKENS_BT = RANDOM.integers(0, 257, (B, T), np.int32)
STARTS_BT = RANDOM.random((B, T)) < 5 / T
IDS_BT = np.cumsum(STARTS_BT, axis=1, dtype=np.int32)


@functools.cache
def build(config) -> Qwen3Next:
    return built(Qwen3Next, config)


@pytest.mark.parametrize("layers", full_except([3, 8], [3]))
def test_layers_run_in_turn(layers):
    """Every third layer attends: a period without a loop; two trips of it, and two layers after."""
    config = dataclasses.replace(DENSE, num_layers=layers, attention_every=3)
    model = build(config)

    def one_by_one(model):
        positions = make_inputs(config, jnp.asarray(TOKENS_BT), jnp.asarray(IDS_BT))
        x_BTD = model.embed[...][TOKENS_BT]
        for l in range(layers):
            attends = l % 3 == 2
            number = l // 3 if attends else l - l // 3
            stack = model.layers["attention" if attends else "delta"]
            layer = jax.tree.map(lambda x, number=number: x[number], stack)
            x_BTD, _, _ = layer(x_BTD, positions, config.kinds[2 if attends else 0])
        return model.final_norm(x_BTD) @ model.unembed[...].T

    logits = jax.jit(lambda model: model(TOKENS_BT, IDS_BT), compiler_options=QUICK)(model)
    want = jax.jit(one_by_one, compiler_options=QUICK)(model)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)


def test_a_program_does_not_grow_with_depth():
    """Each layer of a period is traced once."""

    def operations(layers: int) -> int:
        config = dataclasses.replace(DENSE, num_layers=layers)
        model = nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0)))
        program = jax.make_jaxpr(lambda model: model.loss(TOKENS_BT, TOKENS_BT, IDS_BT)[0])(model)
        return str(program).count(" = ")

    assert operations(48) == operations(8)


def test_a_packed_document_has_the_logits_it_has_alone():
    model = build(DENSE)
    logits = jax.jit(lambda model, *x: model(*x), compiler_options=QUICK)
    packed = logits(model, TOKENS_BT[:1], IDS_BT[:1])
    for segment in np.unique(IDS_BT[0]):
        (places,) = np.nonzero(IDS_BT[0] == segment)
        tokens = np.zeros((1, T), np.int32)
        tokens[0, : len(places)] = TOKENS_BT[0, places]
        alone = logits(model, tokens, np.zeros((1, T), np.int32))
        np.testing.assert_allclose(packed[0, places], alone[0, : len(places)], atol=1e-5)


@pytest.mark.full
def test_a_cache_has_states_beside_keys():
    """Two rows of three bytes after a padded prompt of 16, and the states of two layers."""
    layout = make_layout(Qwen3Next, DENSE, make_mesh("1x1"), batch_size=2)
    generator = Generator(layout, random_variables(layout), Sampling(), (), 257)
    prompts = [TOKENS_BT[0, :5], TOKENS_BT[1, :3]]
    assert len(list(generator(prompts, 3))) == 3
    delta, attention = layout.shape.layers
    numbers = delta.count * delta.recurrence.cached
    numbers += attention.count * attention.attention.cached * (16 + 3)
    assert generator.cache_bytes == 2 * 4 * numbers


def test_a_sample_s_windows_are_capped_where_layers_attend():
    capped = cap_windows(DENSE, 32)
    assert [kind.window for kind in capped.kinds] == [None, 32]
    assert [kind.window for kind in cap_windows(capped, 48).kinds] == [None, 32]


@pytest.mark.parametrize(
    "mesh", full_except(("1x1", "4x2", "data=2,seq=4", "data=2,expert=4"), ["1x1"])
)
def test_decoding_is_the_forward_pass(mesh):
    """Left-padded prompts of unequal length; the shortest is shorter than the convolution."""
    config = dataclasses.replace(Config.tiny(), capacity=None)
    check_decoding(Qwen3Next, config, mesh, TOKENS_BT, random_variables)
