"""Hybrids: layers in an order without a period, packed rows, and generation with states."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.plan import textbook
from tests.conftest import full_except
from tests.support.decoding import check_decoding
from tests.support.models import built, random_decoder, random_variables
from tests.support.odd_configs import Case, check
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.hybrid import STACKS, Config, Hybrid
from zoo.options import cache as zoo_cache
from zoo.options import stretches
from zoo.sizes import granite4_h_tiny, lfm2_1b, nemotron_nano_9b

pytestmark = [pytest.mark.promise("recurrent-layers"), pytest.mark.usefixtures("strict")]

DENSE = dataclasses.replace(
    Config.tiny(), pattern="M-C*", num_experts=0, experts_per_token=0, shared_mlp=0
)
DELTAS = {
    "delta_heads": 16, "delta_key_heads": 8, "delta_key_dim": 6, "delta_value_dim": 4,
}  # fmt: skip
LATENT = {
    "kv_latent": 24, "head_dim": 10, "shared_key_dim": 4, "value_dim": 6, "num_kv_heads": 16,
    "rope_theta": None,
}  # fmt: skip
# Sublayers of Nemotron-H 8B, and of LFM2.
NEMOTRON = Config.nemotron_h_8b().order
LFM2 = lfm2_1b().order
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
        (nemotron_nano_9b().order, 26),
        (LFM2, 10),
        (granite4_h_tiny().order, 6),
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
        ({"pattern": "MX*"}, "has 'X', which is not one of M P C K D"),
        ({"pattern": "M-"}, "has no layer that attends"),
        ({"mamba_scales": (1.0, 2.0)}, "mamba_scales has 2 factors, not 5 or none"),
        ({"mlp_scales": (1.0, 2.0), "activation": "relu2"}, "need activation='swiglu'"),
        ({"num_layers": 3}, "num_layers=3 is less than the 4 layers"),
        ({"mamba_groups": 3}, "mamba_heads=16 is not divisible by mamba_groups=3"),
        ({"pattern": "M*E-"}, "num_experts=0 and pattern='M*E-' with E exclude each other"),
        ({"num_experts": 8}, "num_experts=8 and pattern='M-C*' without E"),
        ({"conv_width": 1}, "conv_width=1 must be ≥ 2"),
        ({"delta_heads": 3, "delta_key_heads": 2}, "delta_heads=3 is not divisible by"),
        ({"kv_latent": 8}, "kv_latent=8 needs value_dim ≥ 1 and shared_key_dim between 1 and"),
        (LATENT | {"num_kv_heads": 8}, "kv_latent=24 needs num_kv_heads=16 and no P"),
        (LATENT | {"rope_theta": 1e4}, "kv_latent and rope_theta exclude each other"),
    ],
)
def test_an_invalid_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(DENSE, **changes)


# ---- delta rules and latent attention ------------------------------------------------------------

EIGHTS = {"delta_key_dim": 8, "delta_value_dim": 8}
# Kimi Linear's layers and OLMo hybrid's.
KIMI = dataclasses.replace(
    Config.tiny(), pattern="K-KE*E", num_layers=6, dense_mlp=48, sigmoid=True, capacity=None,
    balance_rate=0.0, conv_width=3, **DELTAS | EIGHTS, **LATENT,
)  # fmt: skip
OLMO = dataclasses.replace(
    DENSE, pattern="D-*+", delta_most_write=2.0, attention_norms="after", qk_norm=True,
    joint_qk_norm=True, delta_norm_eps=0.05, **DELTAS,
)  # fmt: skip

CHANNELS = dataclasses.replace(DENSE, pattern="K*", num_layers=2, **DELTAS | EIGHTS)


def test_latent_attention_without_positions_is_its_definition():
    """Keys are a head's own part of a projected latent beside one that all heads share."""
    config = dataclasses.replace(KIMI, q_latent=12)
    model = random_decoder(Hybrid, config)
    layer = jax.tree.map(lambda x: x[0], model.layers[STACKS["*"]])
    x_BTD = RANDOM.standard_normal((B, T, config.embed), np.float32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def attended(mixer, x_BTD):
        inputs = make_inputs(config, jnp.asarray(TOKENS_BT), jnp.asarray(IDS_BT))
        return mixer(x_BTD, inputs, config.attention_kinds[0])[0]

    got_BTD = attended(layer.mixer, x_BTD)
    names = ("q_down", "q_up", "kv_down", "kv_up", "o")
    q_down, q_up, kv_down, kv_up, o = (
        np.asarray(getattr(layer.mixer, name)[...], np.float64) for name in names
    )

    def normed(x, norm):
        scale = np.asarray(norm.scale[...], np.float64)
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    x_BTD = x_BTD.astype(np.float64)
    q_BTNH = np.tensordot(normed(x_BTD @ q_down, layer.mixer.q_norm), q_up, 1)
    latent, shared = np.split(x_BTD @ kv_down, [config.kv_latent], axis=-1)
    kv_BTNH = np.tensordot(normed(latent, layer.mixer.kv_norm), kv_up, 1)
    k_BTNH, v_BTNV = np.split(kv_BTNH, [config.nope_dim], axis=-1)
    shared = np.broadcast_to(shared[:, :, None], (*k_BTNH.shape[:3], shared.shape[-1]))
    k_BTNH = np.concatenate((k_BTNH, shared), axis=-1)
    scores = np.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) / np.sqrt(config.head_dim)
    seen = (IDS_BT[:, :, None] == IDS_BT[:, None]) & np.tri(T, dtype=bool)
    scores = np.exp(np.where(seen[:, None], scores - scores.max(-1, keepdims=True), -np.inf))
    weights = scores / scores.sum(axis=-1, keepdims=True)
    want_BTD = np.einsum("bnts,bsnv,nvd->btd", weights, v_BTNV, o)
    np.testing.assert_allclose(got_BTD, want_BTD, atol=2e-6 * np.abs(want_BTD).max())


# ---- attention and Mamba-2 side by side ----------------------------------------------------------

SCALES = {
    "mamba_scales": (0.9, 1.1, 0.8, 1.2, 0.7), "mamba_out_scale": 0.6, "attention_out_scale": 1.3,
    "key_scale": 1.5, "mlp_scales": (1.4, 0.5),
}  # fmt: skip
BESIDE = dataclasses.replace(DENSE, pattern="P-", num_layers=4)
PLAIN_EXPERTS = dataclasses.replace(
    Config.tiny(), pattern="EP", num_layers=2, activation="relu2", sigmoid=True, route_scale=2.5
)
LATENT_EXPERTS = dataclasses.replace(PLAIN_EXPERTS, pattern="E*", expert_latent=24)


def test_mixers_side_by_side_read_one_input_and_are_added_up():
    x_BTD = RANDOM.standard_normal((B, T, BESIDE.embed), np.float32)
    kind = BESIDE.kinds[0]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(model, x_BTD):
        inputs = make_inputs(BESIDE, jnp.asarray(TOKENS_BT), jnp.asarray(IDS_BT))
        layer = jax.tree.map(lambda x: x[0], model.layers[STACKS["P"]])
        normed_BTD = layer.norm(x_BTD)
        attended_BTD, _ = layer.mixer.attention(normed_BTD, inputs, kind)
        mixed_BTD, _ = layer.mixer.mamba(normed_BTD, inputs, kind)
        return layer(x_BTD, inputs, kind)[0], x_BTD + attended_BTD + mixed_BTD

    np.testing.assert_allclose(*both(build(BESIDE), x_BTD), atol=1e-5)


def test_factors_are_those_of_weights():
    """A model with Falcon-H1's factors is one without, whose weights are multiplied by them."""
    scaled = build(dataclasses.replace(BESIDE, **SCALES))
    plain = built(Hybrid, BESIDE)  # of the same seed, and of this test alone
    both = plain.layers[STACKS["P"]].mixer
    mlp = plain.layers[STACKS["-"]].mlp
    weights = both.mamba.gate, both.mamba.x, both.mamba.b, both.mamba.c, both.mamba.step
    pairs = [*zip(weights, SCALES["mamba_scales"], strict=True)]
    pairs += zip((mlp.gate, mlp.down), SCALES["mlp_scales"], strict=True)
    pairs += [(both.mamba.o, 0.6), (both.attention.o, 1.3), (both.attention.k, 1.5)]
    for weight, factor in pairs:
        weight[...] *= factor
    logits = jax.jit(lambda model: model(TOKENS_BT, IDS_BT), compiler_options=QUICK)
    np.testing.assert_allclose(logits(scaled), logits(plain), rtol=1e-5, atol=1e-5)


MESHES = [
    (BESIDE, "data=2,seq=2,model=2", "fsdp_cp_tp", SCALES),
    (BESIDE, "data=1,model=4", "tp_sp", {"mamba_groups": 2, "mamba_heads": 8}),
    (BESIDE, "data=2,seq=4", "cp", {"mamba_norm": False}),
    (PLAIN_EXPERTS, "data=2,expert=4", "fsdp_ep", {"capacity": None}),
    (PLAIN_EXPERTS, "data=2,expert=2,model=2", "fsdp_ep_tp", {"balance_rate": 0.0}),
    (dataclasses.replace(BESIDE, num_layers=8), "data=4,pipe=2", "fsdp_pp", {}),
    (KIMI, "data=2,seq=2,model=2", "fsdp_cp_tp", {}),
    (KIMI, "data=2,expert=4", "fsdp_ep", {"q_latent": 16}),
    (KIMI, "data=2,model=4", "fsdp_tp_sp", {"delta_heads": 8}),
    (dataclasses.replace(KIMI, num_layers=12), "data=2,pipe=2,expert=2", "fsdp_ep_pp", {}),
    (OLMO, "data=2,seq=4", "cp", {}),
    (OLMO, "data=2,model=4", "tp_sp", {"delta_key_heads": 2}),
    (LATENT_EXPERTS, "data=2,expert=2,model=2", "fsdp_ep_tp", {"mlp_bias": True}),
    (LATENT_EXPERTS, "data=1,expert=4,seq=2", "fsdp_ep_cp", {"capacity": None}),
    (LATENT_EXPERTS, "data=2,model=4", "fsdp_tp_sp", {}),
    # Kimi's delta attention, which `tiny` lacks, in the full tier; KIMI's cases are a release's.
    (CHANNELS, "data=2,seq=2,model=2", "fsdp_cp_tp", {}),
    (CHANNELS, "data=4,pipe=2", "fsdp_pp", {"num_layers": 4}),
]


@pytest.mark.parametrize(("config", "mesh", "strategy", "changes"), MESHES)
@pytest.mark.full
def test_meshes_train_and_decode_like_one_device(config, mesh, strategy, changes):
    """With experts without a gate, chosen by sigmoids, too."""
    case = Case(
        "hybrid", dataclasses.replace(config, **changes), strategy, mesh, rows=8, seq_len=16
    )
    assert check(case) == "equal"


@pytest.mark.parametrize("latent", [0, 24])
def test_experts_without_a_gate_match_a_loop(latent):
    """down(relu(up(x))²) of the experts with the best sigmoids plus biases, weighed by the sigmoids.
    Between projections to and from a latent, the sigmoids are still those of x.
    """
    config = dataclasses.replace(PLAIN_EXPERTS, shared_mlp=0, capacity=None)
    config = dataclasses.replace(config, expert_latent=latent, mlp_bias=latent > 0)
    layer = jax.tree.map(lambda x: x[0], random_decoder(Hybrid, config).layers[STACKS["E"]])
    x_BTD = RANDOM.standard_normal((B, T, config.embed), np.float32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def mixed(experts, x_BTD):
        inputs = make_inputs(config, jnp.asarray(TOKENS_BT), jnp.asarray(IDS_BT))
        return experts(x_BTD, inputs)[0]

    got_BTD = mixed(layer.experts, x_BTD)

    def values(module, *names):
        return (np.asarray(getattr(module, name)[...], np.float64) for name in names)

    mixture = layer.experts.mixture if latent else layer.experts
    router, bias, up, down = values(mixture, "router", "bias", "up", "down")
    into, into_bias, out, out_bias = np.eye(config.embed), 0.0, np.eye(config.embed), 0.0
    if latent:
        into, into_bias = values(layer.experts, "latent_down", "latent_down_bias")
        out, out_bias = values(layer.experts, "latent_up", "latent_up_bias")
    want_BTD = np.zeros(x_BTD.shape)
    for place in np.ndindex(B, T):
        x_D = x_BTD[place].astype(np.float64)
        scores_E = 1 / (1 + np.exp(-x_D @ router))
        chosen = np.argsort(-(scores_E + bias))[: config.experts_per_token]
        read_C = x_D @ into + into_bias
        sum_C = np.zeros(read_C.shape)
        for e in chosen:
            weight = config.route_scale * scores_E[e] / scores_E[chosen].sum()
            sum_C += weight * np.maximum(read_C @ up[e], 0) ** 2 @ down[e]
        want_BTD[place] = sum_C @ out + out_bias
    np.testing.assert_allclose(got_BTD, want_BTD, rtol=1e-4, atol=1e-5 * np.abs(want_BTD).max())


def test_a_plan_counts_the_rows_of_a_latent():
    """In place of rows of D: experts' weights, the projections, and what travels to experts."""
    D, C, F = LATENT_EXPERTS.embed, LATENT_EXPERTS.expert_latent, LATENT_EXPERTS.mlp
    J, mesh = LATENT_EXPERTS.experts_per_token, make_mesh("data=2,expert=4")
    sent, multiplied = [], []
    for latent in (0, C):
        config = dataclasses.replace(LATENT_EXPERTS, expert_latent=latent)
        layout = make_layout(Hybrid, config, mesh, "ep", batch_size=B, seq_len=T)
        multiplied.append(layout.shape.multiplied)
        every = textbook.transfers(layout)
        sent.append(sum(each.bytes for each in every if each.purpose == "exchanges"))
    assert multiplied[1] - multiplied[0] == J * 2 * (C - D) * F + 2 * D * C
    assert sent[1] / sent[0] == C / D


def test_a_step_moves_the_biases_of_sigmoids():
    config = dataclasses.replace(PLAIN_EXPERTS, balance_rate=0.5)
    model = build(config)
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def moved(state):
        model = nnx.merge(graph, state)
        model.loss(TOKENS_BT, TOKENS_BT, IDS_BT)
        return model.layers[STACKS["E"]].experts.bias[...]

    bias_LE = np.asarray(moved(state))
    assert {*np.abs(bias_LE).ravel()} <= {0.0, 0.5}
    assert (bias_LE > 0).any()
    assert (bias_LE < 0).any()


@pytest.mark.parametrize("letter", "MDK")
def test_a_gpu_s_program_loops_over_chunks_and_not_over_positions(letter):
    """Of rows of 4,096: groups of 512, and in each of them chunks of 64 or more."""
    length = 4_096
    config = dataclasses.replace(DENSE, pattern=f"{letter}*", num_layers=2, **DELTAS)
    graph, state = nnx.split(nnx.eval_shape(lambda: Hybrid(config, rngs=nnx.Rngs(0))))

    def loss(state, tokens_BT):
        return nnx.merge(graph, state).loss(tokens_BT, tokens_BT, tokens_BT)[0]

    row = jax.ShapeDtypeStruct((1, length), np.int32)
    lowered = jax.jit(jax.grad(loss)).trace(state, row).lower(lowering_platforms=("cuda",))
    loops = re.findall(r"cond \{\n +%\S+ = stablehlo.constant dense<(\d+)>", lowered.as_text())
    assert len(loops) == lowered.as_text().count("stablehlo.while(")
    assert max(map(int, loops)) <= length // 64


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


OTHERS = {"beside": BESIDE, "experts": PLAIN_EXPERTS, "kimi": KIMI, "olmo": OLMO}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_decoding_beside_attention_is_the_forward_pass(config):
    config = dataclasses.replace(config, capacity=None)
    check_decoding(Hybrid, config, "1x1", TOKENS_BT, random_variables)


def test_a_cache_keeps_layers_of_nested_loops_in_order():
    config = dataclasses.replace(DENSE, pattern=NESTED, num_layers=len(NESTED))
    check_decoding(Hybrid, config, "1x1", TOKENS_BT, random_variables)
