"""LlamaOptions: generation and gradients with all switches of Llama's relatives on."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.conftest import full_except
from tests.sharding.test_context import loss_and_gradients
from tests.support.models import built
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.core.layers import AttentionType, rope_angles
from zoo.llama_relatives import Config, Transformer
from zoo.moe import Config as MoEConfig
from zoo.moe import MoE
from zoo.options import cache as zoo_cache
from zoo.options.rope_scaling import Dynamic, LongRope, Yarn

pytestmark = pytest.mark.promise("definitions")

SWITCHES = {
    "norms": "both", "qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True,
    "joint_qk_norm": True, "rotary_dims": 4, "embed_scale": 3.0, "residual_scale": 0.5,
    "attention_scale": 0.3, "logits_divisor": 0.5, "query_growth": 0.4,
    "rope_scaling": Yarn(4.0, 2.0, 1.0, 5, True, 1.1), "rope_theta": 30.0,
}  # fmt: skip
ALL = {
    "transformer": (Transformer, dataclasses.replace(Config.tiny(), **SWITCHES)),
    "moe": (
        MoE,
        dataclasses.replace(
            MoEConfig.tiny(),
            **SWITCHES,
            sigmoid=True,
            shared_mlp=24,
            shared_gate=True,
            capacity=None,
        ),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("entry", ALL)
def test_generation_is_the_whole_row_with_all_switches(entry):
    model_class, config = ALL[entry]
    graph, state = nnx.split(built(model_class, config))
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape).astype(x.dtype), state)
    model = nnx.merge(graph, state)
    tokens_BT = jnp.asarray(random.integers(0, config.vocab_size, (2, 12)))
    compiled = lambda f: jax.jit(f, compiler_options=QUICK)  # noqa: E731
    wanted = compiled(lambda m, t: m(t))(model, tokens_BT)
    read = compiled(lambda m, t: zoo_cache.prefill(m, t, jnp.array([9, 7]), 12))
    padded_BT = tokens_BT[:, :9].at[1].set(jnp.roll(tokens_BT[1, :9], 2))  # 7 tokens, left-padded
    logits_BV, cache = read(model, padded_BT)
    step = compiled(lambda m, t, c: zoo_cache.decode(m, t, c))
    for t in range(3):
        np.testing.assert_allclose(logits_BV[0], wanted[0, 8 + t], atol=1e-4)
        np.testing.assert_allclose(logits_BV[1], wanted[1, 6 + t], atol=1e-4)
        next_B = jnp.array([tokens_BT[0, 9 + t], tokens_BT[1, 7 + t]])
        logits_BV, cache = step(model, next_B, cache)


@pytest.mark.full
@pytest.mark.parametrize("entry", ["transformer", "moe"])
def test_losses_and_gradients_are_equal_on_meshes_with_all_switches(entry):
    config = ALL[entry][1]
    wanted_loss, wanted = loss_and_gradients(entry, config, "1x1", "dp")
    loss, gradients = loss_and_gradients(entry, config, "4x2", "fsdp_tp")
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[path], rtol=1e-3, atol=1e-5, err_msg=path)


def test_scalings_depend_on_the_length_as_in_transformers():
    """Dynamic raises theta beyond the original length, longrope changes its factors there."""
    dynamic = AttentionType(None, 100.0, Dynamic(3.0, 16))
    long = AttentionType(None, 100.0, LongRope((1.0, 2.0), (4.0, 8.0), 16, 1.1))
    one = np.ones((1, 1), np.int32)
    plain = np.array([1.0, 0.1])
    np.testing.assert_allclose(rope_angles(dynamic, 4, one, 16)[0, 0], plain, rtol=1e-6)
    theta = 100.0 * (3 * 32 / 16 - 2) ** 2  # dim / (dim - 2) = 2
    found = rope_angles(dynamic, 4, one, 32)[0, 0]
    np.testing.assert_allclose(found, [1.0, theta**-0.5], rtol=1e-6)
    np.testing.assert_allclose(rope_angles(long, 4, one, 16)[0, 0], plain / [1, 2], rtol=1e-6)
    np.testing.assert_allclose(rope_angles(long, 4, one, 17)[0, 0], plain / [4, 8], rtol=1e-6)


LENGTHS = (7, 3, 14, 8)  # of packed documents, on both sides of the original length
BY_LENGTH = {
    "longrope": {"rope_scaling": LongRope((1.0, 1.5, 2.0, 3.0), (2.0, 9.0, 5.0, 30.0), 8, 1.2)},
    "dynamic": {"rope_scaling": Dynamic(4.0, 6)},
    "growth": {"rope_scaling": Yarn(4.0, 2.0, 1.0, 5, True, 1.1), "query_growth": 0.4},
}


@pytest.mark.parametrize("scaling", full_except(BY_LENGTH, ["longrope", "growth"]))
def test_a_packed_document_is_scaled_like_one_in_a_row_of_its_own(scaling):
    config = dataclasses.replace(Config.tiny(), num_layers=1, **BY_LENGTH[scaling])
    graph, state = nnx.split(built(Transformer, config))
    state["layers"]["attention"]["q"][...] *= 30  # positions matter
    model = nnx.merge(graph, state)
    read = jax.jit(lambda tokens_BT, ids_BT: model(tokens_BT, ids_BT), compiler_options=QUICK)
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (1, sum(LENGTHS)))
    ids_BT = np.repeat(range(len(LENGTHS)), LENGTHS)[None]
    packed_BTV = read(tokens_BT, ids_BT)
    for document, length in enumerate(LENGTHS):
        first = sum(LENGTHS[:document])
        alone_BT = tokens_BT[:, first : first + length]
        np.testing.assert_allclose(
            packed_BTV[:, first : first + length], read(alone_BT, None), atol=2e-5
        )


def test_documents_are_measured_only_for_a_scaling_that_depends_on_them():
    def primitives(**changes) -> str:
        config = dataclasses.replace(Config.tiny(), **changes)
        row = jnp.zeros((1, 8), jnp.int32)
        return str(jax.make_jaxpr(lambda: make_inputs(config, row, row).angles)())

    assert "cummax" in primitives(**BY_LENGTH["longrope"])
    assert "cummax" not in primitives(rope_scaling=Yarn(4.0, 2.0, 1.0, 5, True, 1.1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norms": "between"}, "norms='between' is not one of before, after, both"),
        ({"joint_qk_norm": True}, "joint_qk_norm needs qk_norm"),
        ({"rotary_dims": 10}, "rotary_dims=10 is more than head_dim=8"),
        ({"rotary_dims": 3}, "rotary_dims=3 must be even"),
        ({"embed_scale": 0.0}, r"embed_scale=0.0 must be from 1e-06 to 1e\+06"),
        ({"logits_divisor": 1e-30}, r"logits_divisor=1e-30 must be from 1e-06 to 1e\+06"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be a finite number ≥ 0"),
        ({"rope_theta": 0}, "rope_theta=0 must be a finite number > 1"),
        ({"layer_kinds": ((None, math.nan),)}, "rope_theta=nan must be a finite number > 1"),
        ({"rope_scaling": ("linear", -4.0)}, "rope_scaling has factor=-4.0, which must be > 0"),
        (
            {"rope_scaling": ("yarn", 4.0, 32.0, 1.0, 0, True, 1.0)},
            "rope_scaling has original_length=0",
        ),
        (
            {"rope_scaling": ("longrope", [1.0] * 4, [0.0] * 4, 16, 1.0)},
            "rope_scaling has long=0.0",
        ),
        ({"query_growth": 0.1}, "query_growth needs rotary embeddings scaled by Yarn"),
    ],
)
def test_invalid_switches_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Config.tiny(), **changes)
