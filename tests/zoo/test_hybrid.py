"""Hybrids: layers in an order without a period, packed rows, and generation with states."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.sharding.shape import trace_shape
from tests.conftest import full_except
from tests.support.decoding import check_decoding
from tests.support.models import built, random_variables
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.hybrid import STACKS, Config, Hybrid
from zoo.options import cache as zoo_cache
from zoo.options import stretches

pytestmark = [pytest.mark.promise("recurrent-layers"), pytest.mark.usefixtures("strict")]

DENSE = dataclasses.replace(
    Config.tiny(), pattern="M-C*", num_experts=0, experts_per_token=0, shared_mlp=0
)
# Sublayers of Nemotron-H 8B, and of LFM2.
NEMOTRON = Config.nemotron_h_8b().order
LFM2 = Config.lfm2_1b().order
RANDOM = np.random.default_rng(0)
B, T = 8, 16
TOKENS_BT = RANDOM.integers(0, 257, (B, T), np.int32)
IDS_BT = np.cumsum(RANDOM.random((B, T)) < 3 / T, axis=1, dtype=np.int32)


@functools.cache
def build(config) -> Hybrid:
    return built(Hybrid, config)


# ---- the order of layers -------------------------------------------------------------------------


def unrolled(program: stretches.Program, order: str) -> str:
    """The layers that a program runs, one after another."""
    return "".join(
        order[item] if isinstance(item, int) else item[0] * unrolled(item[1], order)
        for item in program
    )


@pytest.mark.parametrize(
    ("order", "bodies"),
    [
        (NEMOTRON, 7),
        (Config.nemotron_nano_9b().order, 26),
        (LFM2, 10),
        (Config.granite4_h_tiny().order, 6),
        ("M*CE" * 2, 4),
        ("*", 1),
        ("M*", 2),
    ],
)
def test_stretches_run_the_layers_in_their_order(order, bodies):
    program = stretches.find_stretches(tuple(order))
    assert unrolled(program, order) == order
    assert stretches.bodies(program) <= bodies


def test_a_program_grows_with_stretches_and_not_with_depth():
    def operations(pattern: str) -> int:
        config = dataclasses.replace(DENSE, pattern=pattern, num_layers=len(pattern))
        model = nnx.eval_shape(lambda: Hybrid(config, rngs=nnx.Rngs(0)))
        program = jax.make_jaxpr(lambda model: model.loss(TOKENS_BT, TOKENS_BT, IDS_BT)[0])(model)
        return str(program).count(" = ")

    few = operations("M-M-*-M-M-M-")
    assert operations("M-" * 9 + "*-" + "M-" * 20) == few
    assert operations("M-M*-*M-C*M-") > 1.4 * few


# Loops within a loop whose turns have two layers of a stack, and a layer of it outside.
NESTED = "MM-*" * 3 + "M"


@pytest.mark.parametrize("pattern", ["M-M-*CM-M-*", NESTED])
def test_layers_run_in_order(pattern):
    """Nested loops, layers outside of them, and a layer of each stack that is the only one."""
    config = dataclasses.replace(DENSE, pattern=pattern, num_layers=len(pattern))
    kind_of = dict(zip(config.pattern, config.kinds, strict=True))
    model = build(config)

    def one_by_one(model):
        inputs = make_inputs(config, jnp.asarray(TOKENS_BT), jnp.asarray(IDS_BT))
        x_BTD = model.embed[...][TOKENS_BT]
        counts = dict.fromkeys(STACKS, 0)
        for letter in pattern:
            number = counts[letter]
            layer = jax.tree.map(lambda x, n=number: x[n], model.layers[STACKS[letter]])
            x_BTD, _, _ = layer(x_BTD, inputs, kind_of[letter])
            counts[letter] += 1
        return model.final_norm(x_BTD) @ model.embed[...].T

    logits = jax.jit(lambda model: model(TOKENS_BT, IDS_BT), compiler_options=QUICK)(model)
    want = jax.jit(one_by_one, compiler_options=QUICK)(model)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)


def test_equal_orders_have_equal_configs():
    def of(pattern: str) -> Config:
        return dataclasses.replace(DENSE, pattern=pattern, num_layers=8)

    assert of("M-C*") == of("M-C*M-C*")
    assert of("M-C*M-C").order == "M-C*M-CM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "MX*"}, "has 'X', which is not one of M C"),
        ({"pattern": "M-"}, "has no layer that attends"),
        ({"num_layers": 3}, "num_layers=3 is less than the 4 layers"),
        ({"mamba_groups": 3}, "mamba_heads=16 is not divisible by mamba_groups=3"),
        ({"pattern": "M*E-"}, "num_experts=0 and pattern='M*E-' with E exclude each other"),
        ({"num_experts": 8}, "num_experts=8 and pattern='M-C*' without E"),
        ({"conv_width": 1}, "conv_width=1 must be ≥ 2"),
    ],
)
def test_an_invalid_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(DENSE, **changes)


# ---- documents and caches ------------------------------------------------------------------------


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


def test_a_cache_of_states_does_not_grow_with_the_row():
    """Prompts of 4 and of 16 tokens leave equal shapes, of the numbers that the layers state."""
    model = nnx.eval_shape(lambda: Hybrid(DENSE, rngs=nnx.Rngs(0)))

    def states(length: int):
        tokens = jax.ShapeDtypeStruct((2, length), np.int32)
        lengths = jax.ShapeDtypeStruct((2,), np.int32)
        read = functools.partial(zoo_cache.prefill, slots=24)
        return jax.tree.map(
            lambda x: x.shape, jax.eval_shape(read, model, tokens, lengths)[1].states
        )

    assert states(4) == states(16)
    shapes = jax.tree.leaves(
        states(4), is_leaf=lambda x: isinstance(x, tuple) and x and type(x[0]) is int
    )
    layers = trace_shape(Hybrid, DENSE).layers
    stated = sum(layer.count * layer.recurrence.cached for layer in layers if layer.recurrence)
    assert sum(int(np.prod(shape)) for shape in shapes) == 2 * stated


@pytest.mark.parametrize("mesh", full_except(("1x1", "1x8", "data=2,seq=4"), ["1x1"]))
def test_decoding_is_the_forward_pass(mesh):
    """Left-padded prompts of unequal length; the shortest is shorter than the convolution."""
    config = dataclasses.replace(Config.tiny(), capacity=None)
    check_decoding(Hybrid, config, mesh, TOKENS_BT, random_variables)


def test_a_cache_keeps_layers_of_nested_loops_in_order():
    config = dataclasses.replace(DENSE, pattern=NESTED, num_layers=len(NESTED))
    check_decoding(Hybrid, config, "1x1", TOKENS_BT, random_variables)
