"""Gemma 4: keys that layers share, embeddings of layers, experts beside an MLP, and generation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.generation.generator import Generator, Sampling, cap_windows
from recipes.common.report.hlo import collectives
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from recipes.common.train.step import gradients
from recipes.instruments.plan.textbook import transfers
from tests.conftest import full_except
from tests.support.decoding import check_decoding
from tests.support.models import (
    built,
    loss_and_gradients,
    packed_batch,
    random_variables,
    worst,
)  # fmt: skip
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.core.sharding import constrain, shards, variable
from zoo.gemma4 import RULES, Config, Gemma4
from zoo.options.cache import ATTENTION, SLIDING
from zoo.options.layer_embeddings import COLUMNS, look_up_in_place
from zoo.options.rope_scaling import Proportional, from_tuple
from zoo.options.shared_keys import READS

pytestmark = [pytest.mark.promise("unlike-layers"), pytest.mark.usefixtures("strict")]

EXPERTS = dataclasses.replace(Config.tiny(), capacity=None, num_layers=2)
SMALL = dataclasses.replace(  # the last layer of a period and the first of the next share keys
    Config.tiny(), num_experts=0, experts_per_token=0, num_layers=6, attention_every=3,
    shared_layers=2, keys_as_values=False, wide_shared_layers=True, layer_embed=8,
)  # fmt: skip
B, T = 8, 24
RANDOM = np.random.default_rng(0)
TOKENS_BT = RANDOM.integers(0, 257, (B, T), np.int32)
IDS_BT = np.cumsum(RANDOM.random((B, T)) < 5 / T, axis=1, dtype=np.int32)


@functools.cache
def build(config) -> Gemma4:
    return built(Gemma4, config)


@pytest.mark.parametrize("layers", full_except([6, 11], [6]))
def test_shared_layers_read_the_last_keys_of_their_kind(layers):
    """One by one: without a loop; with loops over layers that have keys, and over those that read."""
    config = dataclasses.replace(SMALL, num_layers=layers, shared_layers=layers // 2 - 1)
    model = build(config)

    def one_by_one(model):
        inputs = make_inputs(config, jnp.asarray(TOKENS_BT), jnp.asarray(IDS_BT))
        x_BTD, embedded_LBTP = model.begin(model.tables(), jnp.asarray(TOKENS_BT), inputs)[0]
        seen = dict.fromkeys(config.period, 0)
        latest = {}
        for l, stack in enumerate(config.period):
            kind = config.kinds[l % config.attention_every]
            number = seen[stack]
            seen[stack] += 1
            layer = jax.tree.map(lambda x, number=number: x[number], model.layers[stack])
            kv = latest.get({shared: own for own, shared in READS.items()}.get(stack))
            x_BTD, kv, _ = layer(x_BTD, inputs, kind, None, kv, embedded_LBTP[l])
            latest |= {stack: kv} if stack in READS else {}
        return jnp.tanh(model.final_norm(x_BTD) @ model.embed[...].T / 30) * 30

    assert config.period[-1] == (READS[SLIDING] if layers % 3 else READS[ATTENTION])
    logits = jax.jit(lambda model: model(TOKENS_BT, IDS_BT), compiler_options=QUICK)(model)
    want = jax.jit(one_by_one, compiler_options=QUICK)(model)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)


def normed(x, scale=1.0, eps=0.1):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def test_experts_beside_an_mlp_match_their_definition():
    """In float64: the router reads its own norm; weights sum to 1 before each expert's factor."""
    layers = build(EXPERTS).layers[SLIDING]
    layer = jax.tree.map(lambda x: x[0], layers)
    factor_E = 1 + 0.5 * RANDOM.random(8)
    router_scale_D = 1 + 0.5 * RANDOM.random(64)
    layer.experts.factor[...] = jnp.asarray(factor_E, jnp.float32)
    layer.experts.router_scale[...] = jnp.asarray(router_scale_D, jnp.float32)
    x_BTD = RANDOM.normal(size=(B, T, 64))

    def feed_forward(layer, x_BTD):
        return layer.feed_forward(x_BTD, make_inputs(EXPERTS, jnp.asarray(TOKENS_BT)))[0]

    found = jax.jit(feed_forward, compiler_options=QUICK)(layer, jnp.asarray(x_BTD, jnp.float32))
    w = {
        "/".join(map(str, path[:-1] if path[-1] == "value" else path)): np.asarray(x, np.float64)
        for path, x in nnx.to_flat_state(nnx.state(layer)).__iter__()
        for x in [x[...]]
    }

    def geglu(x, gate, up, down):
        h = x @ gate
        gelu = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        return (gelu * (x @ up)) @ down

    mlp = (w[f"mlp/{name}"] for name in ("gate", "up", "down"))
    want = normed(geglu(normed(x_BTD), *mlp))
    scores_BTE = normed(x_BTD, router_scale_D) / 8 @ w["experts/router"]
    share_BTE = np.exp(scores_BTE) / np.exp(scores_BTE).sum(axis=-1, keepdims=True)
    share_BTE[share_BTE < np.sort(share_BTE, axis=-1)[..., -2:-1]] = 0  # two experts a position
    share_BTE = share_BTE / share_BTE.sum(axis=-1, keepdims=True) * factor_E
    experts = (w[f"experts/{name}"] for name in ("gate", "up", "down"))
    outputs = [geglu(normed(x_BTD), *matrices) for matrices in zip(*experts, strict=True)]
    want += normed(np.einsum("BTE,EBTD->BTD", share_BTE, np.stack(outputs)))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_a_fraction_of_a_head_rotates_by_the_wavelengths_of_the_whole_head():
    scaling = Proportional(16, 0.25)
    found = scaling.scale(None, 1e3, 8, 0)
    np.testing.assert_allclose(found[0, 0], [1, 1e3 ** (-2 / 16), 0, 0, 0, 0, 0, 0], rtol=1e-6)
    assert from_tuple(scaling.as_tuple()) == scaling


def test_a_program_does_not_grow_with_depth():
    """Each layer of a period is traced once, with keys and without."""

    def operations(layers: int) -> int:
        config = dataclasses.replace(SMALL, num_layers=layers, shared_layers=layers // 2)
        model = nnx.eval_shape(lambda: Gemma4(config, rngs=nnx.Rngs(0)))
        program = jax.make_jaxpr(lambda model: model.loss(TOKENS_BT, TOKENS_BT, IDS_BT)[0])(model)
        return str(program).count(" = ")

    assert operations(48) == operations(12)


def test_keys_that_layers_share_are_kept_once():
    """For the backward pass: not those that the scan carries past each layer."""
    config = dataclasses.replace(SMALL, num_layers=24, shared_layers=12)
    model = nnx.eval_shape(lambda: Gemma4(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def residuals(state):
        total = lambda state: nnx.merge(graph, state).loss(TOKENS_BT, TOKENS_BT)[0]  # noqa: E731
        return jax.tree.leaves(jax.vjp(total, state)[1])

    shapes = [x.shape for x in jax.eval_shape(residuals, state)]
    for stack in (SLIDING, ATTENTION):
        kv_shape = (B, T, *config.kv_shape(stack))
        assert [s for s in shapes if s[-4:] == kv_shape and len(s) > 4] == []
        assert len([s for s in shapes if s == kv_shape]) >= 2, "keys and values"


def test_a_packed_document_has_the_logits_it_has_alone():
    model = build(SMALL)
    logits = jax.jit(lambda model, *x: model(*x), compiler_options=QUICK)
    packed = logits(model, TOKENS_BT[:1], IDS_BT[:1])
    for segment in np.unique(IDS_BT[0]):
        (places,) = np.nonzero(IDS_BT[0] == segment)
        tokens = np.zeros((1, T), np.int32)
        tokens[0, : len(places)] = TOKENS_BT[0, places]
        alone = logits(model, tokens, np.zeros((1, T), np.int32))
        np.testing.assert_allclose(packed[0, places], alone[0, : len(places)], atol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    full_except([("4x2", "fsdp_tp_sp"), ("data=2,seq=2,model=2", "fsdp_cp_tp")], []),
)
def test_meshes_train_a_model_that_shares_keys_alike(mesh, strategy):
    means, grads = loss_and_gradients(Gemma4, SMALL, mesh, strategy)
    wanted_means, wanted = loss_and_gradients(Gemma4, SMALL, "1x1", "dp")
    assert means == pytest.approx(wanted_means, rel=2e-6)
    assert worst(grads, wanted) < 2e-5


# `odd` splits columns over devices that have the same rows of the batch; `model` doesn't divide 131.
IN_PLACE = [
    ("8", "fsdp", 132),
    ("4x2", "fsdp_tp", 132),
    ("data=2,seq=2,model=2", "fsdp_cp_tp", 132),
]
IN_PLACE += [("data=2,fsdp=2,model=2", "hsdp_tp", 132), ("data=2,expert=4", "fsdp_ep", 132)]
IN_PLACE += [("4x2", "odd", 132), ("4x2", "fsdp_tp", 131)]
ODD = RULES["fsdp"] | {COLUMNS: ("data", "model")}


@pytest.mark.parametrize(("mesh", "strategy", "vocab"), full_except(IN_PLACE, IN_PLACE[1:3]))
def test_the_table_of_layer_embeddings_stays_in_place(mesh, strategy, vocab):
    """Rows are the table's to the bit, gradients are sums over all devices, and no device receives
    more than the rows of its own tokens.
    """
    is_even = vocab % 2 == 0
    columns = 16
    table_VC = RANDOM.normal(size=(vocab, columns)).astype(np.float32)
    weights_BTC = RANDOM.normal(size=(B, T, columns)).astype(np.float32)
    tokens_BT = RANDOM.integers(0, vocab, (B, T), np.int32)

    names = ("vocab", COLUMNS)

    def total(table_VC, tokens_BT, weights_BTC):
        table = variable(constrain(table_VC, "vocab" if is_even else None, COLUMNS), names)
        x_BTC = look_up_in_place(table, tokens_BT, "float32")
        return (x_BTC * constrain(weights_BTC, "batch", "seq", None)).sum(), x_BTC

    rules = ODD if strategy == "odd" else RULES[strategy]
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(tuple(rules.items())):
        step = jax.jit(jax.grad(total, has_aux=True), compiler_options=QUICK)
        compiled = step.lower(table_VC, tokens_BT, weights_BTC).compile()
        grad_VC, x_BTC = compiled(table_VC, tokens_BT, weights_BTC)
        own = B * T // shards(("batch", "seq"))
        shards_of_columns = shards(COLUMNS)
    np.testing.assert_array_equal(x_BTC, table_VC[tokens_BT])
    wanted_VC = np.zeros_like(table_VC)
    np.add.at(wanted_VC, tokens_BT, weights_BTC)
    np.testing.assert_allclose(grad_VC, wanted_VC, atol=3e-6)
    received = {"all-to-all": 0, "all-gather": 0}
    for one in collectives(compiled.as_text()):
        if one.kind in received:  # an all-reduce of the gradients is left, over other axes
            received[one.kind] += one.times * one.bytes
    assert received["all-to-all"] == 2 * 4 * own * columns, "rows, and their gradients"
    if is_even:
        assert received["all-gather"] <= 4 * own * shards_of_columns, "numbers of tokens"


@pytest.mark.full
def test_a_step_exchanges_rows_of_the_table_as_the_textbook_says():
    rows = packed_batch()
    layout = make_layout(Gemma4, SMALL, make_mesh("8"), "fsdp", batch_size=8, seq_len=24)
    (exchange,) = (x for x in transfers(layout) if x.purpose == "exchanges")
    step = functools.partial(gradients, layout)
    variables = layout.variables()
    batch = jax.tree.map(jax.typeof, jax.device_put(rows, layout.batch_shardings(rows)))
    compiled = layout.compile(step, variables, batch, compiler_options=QUICK)
    sent = [one for one in collectives(compiled.as_text()) if one.kind == exchange.kind]
    assert sum(one.times * one.bytes for one in sent) * 7 / 8 == exchange.bytes


def test_a_pipeline_has_no_stage_for_what_layers_share():
    config = dataclasses.replace(SMALL, num_layers=12, shared_layers=6)
    with pytest.raises(UserError, match="stage boundary would cut their period of 12; use pipe=1"):
        make_layout(Gemma4, config, make_mesh("data=4,pipe=2"), "pp", batch_size=B)


@pytest.mark.full
def test_a_cache_has_no_keys_of_shared_layers():
    """Two rows of three bytes after a padded prompt of 16."""
    layout = make_layout(Gemma4, SMALL, make_mesh("1x1"), batch_size=2)
    generator = Generator(layout, random_variables(layout), Sampling(), (), 257)
    prompts = [TOKENS_BT[0, :5], TOKENS_BT[1, :3]]
    assert len(list(generator(prompts, 3))) == 3
    numbers = 3 * 2 * 8 * 8 + 2 * 8 * 16  # three sliding layers and a global one: K · H of k and v
    assert generator.cache_bytes == 2 * 4 * numbers * (16 + 3)
    assert numbers == sum(layer.count * layer.attention.cached for layer in layout.shape.layers)


def test_a_sample_s_windows_are_capped_in_all_layers():
    assert [kind.window for kind in cap_windows(EXPERTS, 32).kinds] == [7, 32]
    assert [kind.window for kind in cap_windows(EXPERTS, 5).kinds] == [5, 5]


CASES = [("small", "1x1"), ("experts", "1x1"), ("small", "4x2"), ("experts", "data=2,expert=4")]
CASES += [("small", "data=2,seq=4")]


@pytest.mark.parametrize(("kind", "mesh"), full_except(CASES, [CASES[0]]))
def test_decoding_is_the_forward_pass(kind, mesh):
    """Left-padded prompts of unequal length; the longest goes beyond the window."""
    config = {"small": SMALL, "experts": EXPERTS}[kind]
    check_decoding(Gemma4, config, mesh, TOKENS_BT, random_variables)
