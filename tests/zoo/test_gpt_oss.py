"""GPT-OSS' sinks, windows, biases and clamped experts match their definitions in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from tests.support.models import built
from tests.support.quick import QUICK
from zoo import gpt_oss
from zoo.core.attention import make_inputs
from zoo.core.layers import AttentionType
from zoo.gpt_oss import RULES, Config, GptOss
from zoo.options import cache as zoo_cache

pytestmark = [pytest.mark.promise("definitions"), pytest.mark.usefixtures("strict")]
TINY = dataclasses.replace(Config.tiny(), num_layers=1)
B, T = 2, 16


def random_model(**changes) -> GptOss:
    """A tiny model with wide random parameters, biases and sinks included."""
    config = dataclasses.replace(TINY, **changes)
    graph, state = nnx.split(nnx.eval_shape(lambda: GptOss(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.3 * random.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(draw, state))


def in_float64(module) -> dict[str, np.ndarray]:
    """The first layer's parameters of a module."""
    state = nnx.to_pure_dict(nnx.state(module))
    return {name: np.asarray(x[0], np.float64) for name, x in state.items() if hasattr(x, "shape")}


def experts_plainly(x_BTD, experts, config: Config) -> np.ndarray:
    """Position by position; without a capacity."""
    w, out_BTD = in_float64(experts), np.zeros(x_BTD.shape)
    limit, alpha = config.swiglu_limit, config.swiglu_alpha
    for at in np.ndindex(x_BTD.shape[:2]):
        x_D = np.asarray(x_BTD[at], np.float64)
        logits_E = x_D @ w["router"] + w["router_bias"]
        chosen = np.argsort(-logits_E)[: config.experts_per_token]
        weights = np.exp(logits_E[chosen]) / np.exp(logits_E[chosen]).sum()
        for e, weight in zip(chosen, weights, strict=True):
            gate_F = np.minimum(x_D @ w["gate"][e] + w["gate_bias"][e], limit)
            up_F = np.clip(x_D @ w["up"][e] + w["up_bias"][e], -limit, limit)
            hidden_F = (up_F + 1) * gate_F / (1 + np.exp(-alpha * gate_F))
            out_BTD[at] += weight * (hidden_F @ w["down"][e] + w["down_bias"][e])
    return out_BTD


@pytest.mark.parametrize(
    ("capacity", "mesh", "rules"),
    [(None, "1x1", "dp"), (4.0, "1x1", "dp"), (None, "4x2", "tp_sp")],  # E / J = 4: room for all
)
def test_experts_are_their_definition(capacity, mesh, rules):
    """On 4x2 too, where devices share out F, and down's bias is added once."""
    model = random_model(swiglu_limit=1.0, capacity=capacity)
    x_BTD = np.random.default_rng(1).normal(size=(8, T, 64)).astype(np.float32)
    graph, state = nnx.split(jax.tree.map(lambda x: x[0], model.layers).experts)
    table = tuple(RULES[rules].items())
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(table):

        def compute(state, x_BTD):
            positions = make_inputs(model.config, jnp.zeros((8, T), jnp.int32))
            return nnx.merge(graph, state)(x_BTD, positions)[0]

        found_BTD = jax.jit(compute, compiler_options=QUICK)(state, x_BTD)
    wanted_BTD = experts_plainly(x_BTD, model.layers.experts, model.config)
    assert np.abs(wanted_BTD).max() > 1
    np.testing.assert_allclose(found_BTD, wanted_BTD, rtol=1e-4, atol=2e-5)


def test_a_dropped_position_gets_nothing_of_down_s_bias():
    """All positions choose the same experts, which take the first two of them."""
    config = dataclasses.replace(TINY, capacity=1.0)
    experts = built(gpt_oss.Experts, config)
    experts.down.set_value(jnp.zeros_like(experts.down[...]))
    experts.down_bias.set_value(jnp.ones_like(experts.down_bias[...]))
    T = 2 * config.num_experts // config.experts_per_token
    x_BTD = jnp.ones((1, T, config.embed))
    positions = make_inputs(config, jnp.zeros((1, T), jnp.int32))
    run = jax.jit(lambda x_BTD: experts(x_BTD, positions), compiler_options=QUICK)
    out_BTD, metrics = run(x_BTD)
    np.testing.assert_allclose(out_BTD[0, :, 0], [1.0] * 2 + [0.0] * (T - 2), rtol=1e-6)
    assert float(metrics["dropped"]) == T - 2


@pytest.mark.parametrize("window", [None, 3])
def test_a_sink_takes_its_share_of_the_softmax(window):
    model, kind = random_model(), AttentionType(window, None)
    config = dataclasses.replace(model.config, layer_kinds=(kind,))
    x_BTD = np.random.default_rng(1).normal(size=(B, T, 64)).astype(np.float32)
    attention = jax.tree.map(lambda x: x[0], model.layers).attention
    positions = make_inputs(config, jnp.zeros((B, T), jnp.int32))
    found_BTD, _ = jax.jit(lambda x: attention(x, positions, kind), compiler_options=QUICK)(x_BTD)

    w = in_float64(model.layers.attention)
    q, k, v = (
        np.einsum("btd,dnh->btnh", x_BTD, w[name]) + w[f"{name}_bias"] for name in ("q", "k", "v")
    )
    times = config.num_heads // config.num_kv_heads
    k, v = (np.repeat(x, times, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(config.head_dim)
    age = np.arange(T)[:, None] - np.arange(T)[None]
    seen = (age >= 0) & (age < (window or T))
    weights = np.where(seen, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True) + np.exp(w["sinks"])[None, :, None, None]
    out = np.einsum("bnts,bsnh->btnh", weights, v)
    wanted_BTD = np.einsum("btnh,nhd->btd", out, w["o"]) + w["o_bias"]
    np.testing.assert_allclose(found_BTD, wanted_BTD, rtol=1e-4, atol=2e-5)


def test_sinks_take_their_share_of_a_cache_too():
    """Logits by prefill and decode are those of whole rows, with sinks large enough to matter."""
    model = random_model(capacity=None)
    tokens_BT = np.random.default_rng(0).integers(0, 257, (B, T))
    logits = jax.jit(lambda m, t: m(t), compiler_options=QUICK)
    read = jax.jit(
        lambda m, t: zoo_cache.prefill(m, t, jnp.full(B, T - 3), T), compiler_options=QUICK
    )
    decode = jax.jit(lambda m, t, c: zoo_cache.decode(m, t, c), compiler_options=QUICK)
    logits_BV, cache = read(model, tokens_BT[:, : T - 3])
    found = [logits_BV]
    for t in range(T - 3, T):
        logits_BV, cache = decode(model, tokens_BT[:, t], cache)
        found.append(logits_BV)
    whole_BTV = logits(model, tokens_BT)
    np.testing.assert_allclose(np.stack(found, 1), whole_BTV[:, -4:], rtol=1e-4, atol=2e-4)
    model.layers.attention.sinks[...] -= 5
    assert np.abs(logits(model, tokens_BT) - whole_BTV)[:, -4:].max() > 0.05


def test_a_config_that_makes_no_sense():
    with pytest.raises(ValueError, match="experts_per_token=9 is more than num_experts=8"):
        dataclasses.replace(TINY, experts_per_token=9)
    with pytest.raises(ValueError, match="must be > 0, or None for dropless"):
        dataclasses.replace(TINY, capacity=0.0)
