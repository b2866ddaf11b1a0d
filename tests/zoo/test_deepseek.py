"""DeepSeek's latent attention, choice of experts and cache match their definitions."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from tests.conftest import full_except
from tests.support.models import loss_and_gradients, packed_batch, random_decoder, worst
from tests.support.quick import QUICK
from zoo import deepseek
from zoo.core import attention
from zoo.core.attention import make_inputs
from zoo.core.decoder import Decoder
from zoo.deepseek import RULES, Config, DeepSeek
from zoo.experts.mixture import Routing, in_best_groups
from zoo.options import cache as zoo_cache
from zoo.options import low_precision
from zoo.options.rope_scaling import Yarn

pytestmark = [pytest.mark.promise("definitions"), pytest.mark.usefixtures("strict")]
TINY = Config.tiny()
YARN = {"rope_scaling": Yarn(4.0, 2.0, 1.0, 16, True, 1.2), "mscale": 0.7, "rope_theta": 30.0}
B, T = 2, 16


def random_model(**changes) -> Decoder:
    return random_decoder(DeepSeek, dataclasses.replace(TINY, **changes))


def in_float64(module) -> dict[str, np.ndarray]:
    """The first layer's parameters of a module, by path."""
    found = paths(nnx.to_pure_dict(nnx.state(module)))
    return {path: np.asarray(x[0], np.float64) for path, x in found.items()}


# ---- latent attention ----------------------------------------------------------------------------


def turned(x, position: int, config: Config) -> np.ndarray:
    """Rotary embeddings of the last dim, by YaRN's definition (Peng et al. 2023)."""
    P, theta = config.rope_dim, config.rope_theta
    frequency, magnitude = theta ** -(np.arange(0, P, 2) / P), 1.0
    if config.rope_scaling:
        factor, fast, slow, original, _, magnitude = dataclasses.astuple(config.rope_scaling)
        ends = (
            P * math.log(original / (n * 2 * math.pi)) / 2 / math.log(theta) for n in (fast, slow)
        )
        first, last = (
            round_(end) for round_, end in zip((math.floor, math.ceil), ends, strict=True)
        )
        first, last = max(first, 0), min(last, P - 1)
        ramp = np.clip((np.arange(P // 2) - first) / max(last - first, 0.001), 0, 1)
        frequency = frequency * (1 - ramp + ramp / factor)
    turn = magnitude * np.exp(1j * position * frequency)
    whole = (x[..., : P // 2] + 1j * x[..., P // 2 :]) * turn
    return np.concatenate([whole.real, whole.imag], axis=-1)


def attention_plainly(x_TD, w: dict[str, np.ndarray], config: Config) -> np.ndarray:
    """Head by head and position by position, of one document."""

    def normed(x, scale):
        return x / np.sqrt(np.mean(x**2) + 1e-6) * scale

    nope, out_TD, seen = config.nope_dim, np.zeros(x_TD.shape), []
    scale = (config.nope_dim + config.rope_dim) ** -0.5
    if config.rope_scaling:
        scale *= (0.1 * config.mscale * math.log(config.rope_scaling.factor) + 1) ** 2
    for t, x_D in enumerate(x_TD):
        down = x_D @ w["kv_down"]
        latent = normed(down[: config.kv_latent], w["kv_norm/scale"])
        seen.append((latent, turned(down[config.kv_latent :], t, config)))
        if config.q_latent:
            low = normed(x_D @ w["q_down"], w["q_norm/scale"])
            q_NH = np.einsum("r,rnh->nh", low, w["q_up"])
        else:
            q_NH = np.einsum("d,dnh->nh", x_D, w["q"])
        for n, q_H in enumerate(q_NH):
            q_rope = turned(q_H[nope:], t, config)
            kv = [latent @ w["kv_up"][:, n] for latent, _ in seen]
            scores = [
                k[:nope] @ q_H[:nope] + key @ q_rope for k, (_, key) in zip(kv, seen, strict=True)
            ]
            weights = np.exp(scale * np.array(scores))
            value = sum(a * k[nope:] for a, k in zip(weights / weights.sum(), kv, strict=True))
            out_TD[t] += value @ w["o"][n]
    return out_TD


@pytest.mark.parametrize(
    ("changes", "mesh", "rules", "kernel"),
    full_except(
        [
            (YARN, "1x1", "dp", "xla"),
            ({"q_latent": 0}, "1x1", "dp", "flash"),
            (YARN, "4x2", "tp_sp", "xla"),
            (YARN, "1x8", "tp", "flash"),
            ({}, "1x1", "dp", "splash"),
            ({"nope_dim": 7, "rope_dim": 6}, "1x1", "dp", "xla"),  # only the rotary part is even
            ({"nope_dim": 7, "rope_dim": 6}, "4x2", "tp_sp", "flash"),
        ],
        fast=[(YARN, "1x1", "dp", "xla"), ({"nope_dim": 7, "rope_dim": 6}, "1x1", "dp", "xla")],
    ),
)
def test_latent_attention_is_its_definition(changes, mesh, rules, kernel):
    """Values have another head dim than keys, in each kernel; two documents in a row."""
    length = 128 if kernel == "splash" else T
    model = random_model(**changes, attention=kernel)
    x_BTD = np.random.default_rng(1).normal(size=(4, length, 64)).astype(np.float32)
    ids_BT = np.repeat([[0] * 5 + [1] * (length - 5)], 4, axis=0)
    graph, state = nnx.split(jax.tree.map(lambda x: x[0], model.layers).attention)
    (kind,) = model.config.kinds
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(tuple(RULES[rules].items())):

        def compute(state, x_BTD):
            # Places in the row: rotary embeddings depend on differences alone.
            tokens_BT = jnp.zeros((4, length), jnp.int32)
            positions = make_inputs(model.config, tokens_BT, jnp.asarray(ids_BT))
            return nnx.merge(graph, state)(x_BTD, positions, kind)[0]

        found_BTD = np.asarray(jax.jit(compute, compiler_options=QUICK)(state, x_BTD))
    w = in_float64(model.layers.attention)
    for b, end in ((0, 5), (1, 12)):
        start = 0 if end == 5 else 5
        wanted_TD = attention_plainly(x_BTD[b, start:end].astype(np.float64), w, model.config)
        np.testing.assert_allclose(found_BTD[b, start:end], wanted_TD, rtol=1e-4, atol=2e-5)


# ---- gradients of what heads share ----------------------------------------------------------------


SHARED = (
    "attention/kv_down",
    "attention/kv_norm/scale",
    "attention/q_down",
    "attention/q_norm/scale",
)


@pytest.mark.full
def test_gradients_of_latents_and_of_the_rotary_key_are_summed_over_the_heads(monkeypatch):
    """Every device computes what all heads share, so the heads' gradients of it must be added.

    A sum that is missing (torchtitan#1373) shows: here the rotary key's is divided by the devices.
    """
    one = dataclasses.replace(TINY, num_layers=1, dense_layers=0)
    _, wanted = loss_and_gradients(DeepSeek, one, "1x1", "dp")
    shared = [path for path in wanted if path.endswith(SHARED)]
    assert len(shared) == 4
    _, found = loss_and_gradients(DeepSeek, one, "1x8", "tp")
    assert worst(found, wanted) < 3e-6
    rotate = attention.rotate

    def without_sum(x_BTNP, *turn):
        x_BTNP = rotate(x_BTNP, *turn)
        own = x_BTNP.shape[2] == 1
        return x_BTNP / 8 + jax.lax.stop_gradient(x_BTNP * 7 / 8) if own else x_BTNP

    monkeypatch.setattr(attention, "rotate", without_sum)
    _, wrong = loss_and_gradients.__wrapped__(DeepSeek, one, "1x8", "tp")
    assert worst(wrong, {path: wanted[path] for path in shared}) > 1e-2


# ---- the choice of experts ------------------------------------------------------------------------


@pytest.mark.parametrize("sigmoid", full_except([True, False], [True]))
def test_experts_are_chosen_from_the_best_groups(sigmoid):
    scores_BTE = np.random.default_rng(0).normal(size=(B, T, 12)).astype(np.float32)
    routing = Routing(groups=4, top_groups=2, sigmoid=sigmoid)
    keep = functools.partial(in_best_groups, routing=routing)
    keep = jax.jit(keep, compiler_options=QUICK)
    found_BTE = np.asarray(keep(scores_BTE))
    for at in np.ndindex(B, T):
        groups = scores_BTE[at].reshape(4, 3)
        value = [sum(sorted(group)[-2:]) if sigmoid else max(group) for group in groups]
        kept = np.isin(np.arange(4), np.argsort(value)[-2:])
        wanted = np.where(kept[:, None], groups, -np.inf).reshape(-1)
        np.testing.assert_array_equal(found_BTE[at], wanted)


@pytest.mark.parametrize(
    "changes",
    full_except(
        [{}, {"sigmoid": False, "normalize": False, "groups": 1, "top_groups": 1}], fast=[{}]
    ),
)
def test_experts_and_their_figures_are_their_definition(changes):
    """V3's router: sigmoids, biases that change the choice alone, a scale. V2's: a softmax."""
    model = random_model(**changes, capacity=None)
    config, E, J = model.config, TINY.num_experts, TINY.experts_per_token
    layer = jax.tree.map(lambda x: x[0], model.layers)
    x_BTD = np.random.default_rng(1).normal(size=(B, T, 64)).astype(np.float32)
    positions = make_inputs(config, jnp.zeros((B, T), jnp.int32))
    run = jax.jit(lambda x: layer.experts(x, positions), compiler_options=QUICK)
    found_BTD, figures = run(x_BTD)

    w, wanted_BTD, load, balance = in_float64(model.layers.experts), np.zeros((B, T, 64)), 0, 0.0
    for b in range(B):
        shares, taken = np.zeros(E), np.zeros(E)
        for t in range(T):
            x_D = x_BTD[b, t].astype(np.float64)
            logits_E = x_D @ w["router"]
            scores_E = 1 / (1 + np.exp(-logits_E)) if config.sigmoid else np.exp(logits_E)
            scores_E = scores_E if config.sigmoid else scores_E / scores_E.sum()
            biased_E = scores_E + (w["bias"] if config.sigmoid else 0)
            if config.groups > 1:
                pairs = biased_E.reshape(config.groups, -1)
                best = np.argsort(-pairs.sum(axis=1))[: config.top_groups]
                kept = np.isin(np.arange(config.groups), best).repeat(E // config.groups)
                biased_E = np.where(kept, biased_E, -np.inf)
            chosen = np.argsort(-biased_E)[:J]
            weights = scores_E[chosen]
            weights = weights / weights.sum() if config.normalize else weights
            for e, weight in zip(chosen, config.route_scale * weights, strict=True):
                gate, up = x_D @ w["gate"][e], x_D @ w["up"][e]
                wanted_BTD[b, t] += weight * ((gate / (1 + np.exp(-gate)) * up) @ w["down"][e])
            shares, taken = (
                shares + scores_E / scores_E.sum(),
                taken + np.isin(np.arange(E), chosen),
            )
        balance += E / J * (taken / T * shares).sum()
        load = load + taken * E / J
    np.testing.assert_allclose(found_BTD, wanted_BTD, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(figures["load"], load, rtol=1e-5)
    np.testing.assert_allclose(figures["balance"], balance, rtol=1e-5)


@pytest.mark.full
def test_a_loss_moves_the_biases_toward_even_loads(monkeypatch):
    """All layers with experts have biases, the further one included."""
    model, loads = random_model(balance_rate=0.25, mtp_depth=1), {}
    computed = DeepSeek.objective

    def spy(self, batch):
        objective = computed(self, batch)
        loads["count"] = objective.count
        loads["load_LE"] = objective.metrics["load"]
        return objective

    monkeypatch.setattr(DeepSeek, "objective", spy)

    def biases(model):
        return model.layers.experts.bias[...], model.mtp.layer.experts.bias[...]

    def run(model):
        before = biases(model)
        model.loss(**packed_batch())
        return loads, [new - old for new, old in zip(biases(model), before, strict=True)]

    found, (bias_LE, last_E) = jax.jit(run, compiler_options=QUICK)(model)
    count, load_LE = found["count"], found["load_LE"]
    moves = 0.25 * np.sign(count - load_LE)
    assert load_LE.shape == (3, 8)
    np.testing.assert_allclose(bias_LE, moves[:2], atol=1e-6)
    np.testing.assert_allclose(last_E, moves[2], atol=1e-6)


# ---- the cache -------------------------------------------------------------------------------------


def decoded(model: Decoder, tokens_BT, prompt: int) -> np.ndarray:
    """Logits of each position from prompt - 1 on, by prefill and decode."""
    decode = jax.jit(lambda m, t, c: zoo_cache.decode(m, t, c), compiler_options=QUICK)
    whole = tokens_BT.shape[1]
    read = jax.jit(
        lambda m, t: zoo_cache.prefill(m, t, jnp.full(len(t), prompt), whole),
        compiler_options=QUICK,
    )
    logits_BV, cache = read(model, tokens_BT[:, :prompt])
    found = [logits_BV]
    for t in range(prompt, whole):
        logits_BV, cache = decode(model, tokens_BT[:, t], cache)
        found.append(logits_BV)
    return np.stack([np.asarray(x) for x in found], axis=1)


@pytest.mark.parametrize(
    ("changes", "mesh", "rules"),
    full_except(
        [
            (YARN | {"num_layers": 2, "lora_rank": 2}, "1x1", "dp"),
            ({"dense_layers": 0, "num_layers": 1}, "1x1", "dp"),
            ({"q_latent": 0, "lora_rank": 2, "mtp_depth": 1}, "1x1", "dp"),
            ({"nope_dim": 7, "rope_dim": 6}, "1x1", "dp"),
            (YARN, "data=2,seq=4", "fsdp_cp"),
        ],
        fast=[(YARN | {"num_layers": 2, "lora_rank": 2}, "1x1", "dp")],  # one of them is dense
    ),
)
def test_absorbed_decoding_gives_the_logits_without_a_cache(changes, mesh, rules):
    """Also where devices share out the slots, and with adapters of all projections.

    Where they split heads and experts: tests/generation/test_generation.py.
    """
    model = random_model(**changes, capacity=None)
    tokens_BT = np.random.default_rng(0).integers(0, 257, (4, T))
    whole_BTV = jax.jit(lambda m, t: m(t), compiler_options=QUICK)(model, tokens_BT)
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(tuple(RULES[rules].items())):
        found_BTV = decoded(model, tokens_BT, prompt=8)
    np.testing.assert_allclose(found_BTV, whole_BTV[:, 7:], rtol=1e-4, atol=5e-4)


def test_the_head_s_costs_leave_out_padding():
    """Those of MTP too: tokens at padded positions change nothing of an objective."""
    model = random_model(
        capacity=None, mtp_depth=1, num_layers=2, balance_weight=0.7, balance_rate=0.0
    )
    random = np.random.default_rng(0)
    tokens_BT, other_BT = random.integers(0, 257, (2, 2, 12))
    is_text_BT = np.arange(12)[None] < np.array([[8], [5]])
    batch = {
        "targets": np.where(is_text_BT, tokens_BT, -1),
        "segment_ids": is_text_BT.astype(np.int32),
    }
    loss = jax.jit(lambda m, tokens: m.loss(tokens, **batch)[0], compiler_options=QUICK)
    totals = [loss(model, np.where(is_text_BT, tokens_BT, x)) for x in (tokens_BT, other_BT)]
    assert float(totals[0]) == pytest.approx(float(totals[1]), rel=1e-6)


@pytest.mark.full
def test_int8_weights_are_absorbed_as_they_are_multiplied():
    model = random_model(capacity=None, matmul="int8_weights", num_layers=2)
    model = low_precision.store(model, deepseek.AXES.in_use)
    stored = [x[...].dtype for _, x in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert stored.count(jnp.int8) == 2 * (5 + 3) + 3, "attention and an MLP twice, experts once"
    tokens_BT = np.random.default_rng(0).integers(0, 257, (4, T))
    whole_BTV = jax.jit(lambda m, t: m(t), compiler_options=QUICK)(model, tokens_BT)
    found_BTV = decoded(model, tokens_BT, prompt=8)
    np.testing.assert_allclose(found_BTV, whole_BTV[:, 7:], rtol=1e-4, atol=5e-4)


def test_a_cache_holds_latents_and_rotary_keys_alone():
    """16 + 4 numbers a token and layer, where 8 heads' keys of 12 and values of 6 would be 144."""
    model = nnx.eval_shape(lambda: DeepSeek(TINY, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((B, T), np.int32)
    lengths = jax.ShapeDtypeStruct((B,), np.int32)
    _, cache = jax.eval_shape(
        lambda m, t, n: zoo_cache.prefill(m, t, n, 32), model, tokens, lengths
    )
    assert (cache.k.shape, cache.v.shape) == ((3, B, 32, 1, 16), (3, B, 32, 1, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dense_layers": 3}, "dense_layers=3 must be less than num_layers=3"),
        ({"dense_mlp": 0}, "dense_layers=1 need dense_mlp ≥ 1"),
        ({"rope_dim": 3}, "^rope_dim=3 must be even: rotary embeddings rotate pairs of dims$"),
        ({"mscale": 1.0}, "mscale needs a rope_scaling"),
        ({"groups": 3}, "groups=3 must divide num_experts=8 into groups of ≥ 2"),
        ({"groups": 8, "top_groups": 1}, "groups=8 must divide num_experts=8 into groups of ≥ 2"),
        ({"top_groups": 5}, "top_groups=5 is more than groups=4"),
        ({"experts_per_token": 5}, "experts_per_token=5 is more than the 4 of num_experts=8"),
        ({"capacity": -1.0}, "capacity=-1.0 must be a finite number ≥ 0"),
        ({"capacity": 0.0}, "capacity=0.0 must be > 0, or None for dropless"),
        ({"shared_experts": 0}, "shared_experts=0 must be ≥ 1"),
        ({"lora_targets": ("gate",)}, "lora_targets has 'gate', which is not one of q, q_down"),
    ],
)
def test_a_config_that_makes_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)
