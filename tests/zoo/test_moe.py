"""The mixture of experts matches its definition, on one device and on meshes with an `expert` axis."""

import dataclasses
import functools
import itertools
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from recipes.common import entries
from recipes.common.report import kernel
from recipes.common.report.hlo import collectives
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import abstract_model, paths, variables_of
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import ExpertsShape
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import gradients
from recipes.common.train.training_flags import Training
from recipes.instruments.plan.answer import describe_step
from recipes.instruments.plan.textbook import devices_of_a_row, transfers
from tests.conftest import full_except
from tests.support.models import built, multiplying
from tests.support.quick import QUICK
from zoo.core.attention import make_inputs
from zoo.experts import exchange as expert_exchange
from zoo.experts import matmul as expert_matmul
from zoo.experts.mixture import GatedExperts, feed_forward
from zoo.moe import RULES, Config, MoE
from zoo.sizes import MOE as SIZES

pytestmark = [pytest.mark.promise("definitions"), pytest.mark.usefixtures("strict")]
TINY = dataclasses.replace(Config.tiny(), num_layers=1)
B, T = 4, 24

INITIAL = {}  # structure → values


def model_of(**changes) -> MoE:
    """Returns a new tiny model. Models with the same parameters are initialized once."""
    build = lambda: MoE(dataclasses.replace(TINY, **changes), rngs=nnx.Rngs(0))  # noqa: E731
    graph, shapes = nnx.split(nnx.eval_shape(build))
    if (key := jax.tree.structure(shapes)) not in INITIAL:
        INITIAL[key] = jax.jit(lambda: nnx.split(build())[1], compiler_options=QUICK)()
    return nnx.merge(graph, jax.tree.map(jnp.copy, INITIAL[key]))


def rows(batch=B, length=T, seed=0) -> dict[str, np.ndarray]:
    """Random tokens, a few targets of which do not count."""
    random = np.random.default_rng(seed)
    tokens, targets = random.integers(0, 257, (2, batch, length), np.int32)
    targets[random.random((batch, length)) < 0.1] = -1
    return {"tokens": tokens, "targets": targets}


def loss_and_gradient(model: MoE, batch, mesh=None, rules=None, grouped=False):
    """((objective sum, count, aux), gradient of the sum), on a mesh if there is one.

    Args:
      grouped: see `multiplying`.
    """
    graph, state = nnx.split(model)
    with multiplying(grouped):
        if mesh is None:
            return _step(graph, state, batch, (), grouped)[::-1]
        table = tuple(rules.items())  # jax.jit does not notice that the rules change
        with jax.set_mesh(mesh), nnx.logical_axis_rules(table):
            lies = jax.device_put(state, nnx.get_named_sharding(state, mesh))
            return _step(graph, lies, batch, table, grouped)[::-1]


@functools.partial(jax.jit, static_argnums=(0, 3, 4), compiler_options=QUICK)
def _step(graph, state, batch, table, grouped):
    def objective(state):
        total, count, aux = nnx.merge(graph, state).loss(**batch)
        return total, (total, count, aux)

    return jax.grad(objective, has_aux=True)(state)


def assert_close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


# ---- the config ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_sizes_say_how_many_parameters_are_active(size):
    """Excludes the experts that a position does not visit."""
    config = SIZES[size]()
    model = abstract_model(lambda: MoE(config, rngs=nnx.Rngs(0)))
    axes, active = paths(model.axes["params"]), 0
    for path, shape in paths(model.shapes["params"]).items():
        of_experts = "expert" in axes[path]
        active += (
            shape.size * config.experts_per_token // config.num_experts
            if of_experts
            else shape.size
        )
    said = re.match(r"[\d,]+ parameters\. ([\d,]+) of them active", SIZES[size].__doc__)
    assert said[1] == f"{active:,}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 9}, "experts_per_token=9 is more than num_experts=8"),
        ({"capacity": 0.0}, "capacity=0.0 must be > 0, or None for dropless"),
        ({"num_experts": 0}, "num_experts=0 must be ≥ 1"),
    ],
)
def test_a_config_that_makes_no_sense(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize("capacity", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("entry", ["moe", "gpt_oss", "deepseek"])
def test_a_capacity_is_a_number_of_slots_in_every_entry(entry, capacity):
    tiny = entries.zoo_file(entry).Config.tiny()
    said = f"^capacity={capacity} must be (> 0, or None for dropless|a finite number ≥ 0)$"
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(tiny, capacity=capacity)
    for good in (None, 0.5, 1, 100.0):
        assert dataclasses.replace(tiny, capacity=good).capacity == good


# ---- the definition ------------------------------------------------------------------------------


def plainly(x_BTD, experts, config: Config):
    """Position by position, in float64: (output, places, how many choices were dropped)."""
    to = lambda variable: np.asarray(variable[...][0], np.float64)  # noqa: E731, the first layer's
    router, gate, up, down = map(to, (experts.router, experts.gate, experts.up, experts.down))
    J, E = config.experts_per_token, config.num_experts
    slots = np.inf
    if config.capacity is not None:
        slots = np.ceil(config.capacity * x_BTD.shape[1] * J / E)
    out, dropped = np.zeros(x_BTD.shape), 0
    for row, x_TD in enumerate(np.asarray(x_BTD, np.float64)):
        full = np.zeros(E)
        for t, x_D in enumerate(x_TD):
            scores_E = np.exp(x_D @ router)
            scores_E /= scores_E.sum()
            chosen = np.argsort(-scores_E, kind="stable")[:J]
            total = scores_E[chosen].sum() if config.normalize else 1
            for e in chosen:
                full[e] += 1
                if full[e] > slots:
                    dropped += 1
                    continue
                silu = x_D @ gate[e] / (1 + np.exp(-(x_D @ gate[e])))
                out[row, t] += scores_E[e] / total * ((silu * (x_D @ up[e])) @ down[e])
    return out, dropped


@pytest.mark.parametrize(
    ("capacity", "normalize", "grouped"),
    full_except(
        [
            *itertools.product([0.5, 1.25, None], [True, False], [False]),
            *itertools.product([None], [True, False], [True]),
        ],
        fast=[(0.5, True, False), (1.25, False, False), (None, True, False), (None, True, True)],
    ),
)
def test_each_position_goes_through_its_experts(capacity, normalize, grouped):
    model = model_of(capacity=capacity, normalize=normalize)
    config = model.config
    x_BTD = np.random.default_rng(1).standard_normal((2, T, 64), np.float32)
    experts = jax.tree.map(lambda x: x[0], model.layers).experts
    positions = make_inputs(config, jnp.zeros((2, T), jnp.int32))
    compute = jax.jit(lambda x: experts(x, positions), compiler_options=QUICK)
    with multiplying(grouped):
        out_BTD, figures = compute(x_BTD)
    want_BTD, dropped = plainly(x_BTD, model.layers.experts, config)
    np.testing.assert_allclose(out_BTD, want_BTD, atol=2e-6)
    assert float(figures["dropped"]) * config.experts_per_token == pytest.approx(dropped)
    assert dropped > 0 or capacity != 0.5
    assert float(figures["load"].sum()) == pytest.approx(2 * T * config.num_experts)


def test_an_expert_takes_as_many_positions_as_it_has_slots():
    """All positions choose both experts: the first three of each row get an output, and each
    expert's gradient is that of three positions a row.
    """
    config = dataclasses.replace(Config.tiny(), num_experts=2, experts_per_token=2, capacity=0.5)
    slots, rows, T = 3, 2, 6
    layer = built(GatedExperts, config, biased=False, normalize=True)
    graph, weights = nnx.split(layer)
    x_D = np.random.default_rng(0).normal(size=config.embed).astype(np.float32)

    def total(weights, T, rows):
        x_BTD = jnp.broadcast_to(x_D, (rows, T, config.embed))
        positions = make_inputs(config, jnp.zeros((rows, T), jnp.int32))
        out_BTD, _ = nnx.merge(graph, weights)(x_BTD, positions)
        return out_BTD.sum(), out_BTD

    both = jax.jit(jax.grad(total, has_aux=True), static_argnums=(1, 2), compiler_options=QUICK)
    grads, out_BTD = both(weights, T, rows)
    alone, alone_BTD = both(weights, 1, 1)
    assert np.abs(alone_BTD).max() > 0.01
    wanted_BTD = np.broadcast_to(alone_BTD, (rows, slots, config.embed))
    np.testing.assert_allclose(out_BTD[:, :slots], wanted_BTD, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(out_BTD[:, slots:], 0)
    for name in ("gate", "up", "down"):
        found, want = grads[name][...], alone[name][...] * slots * rows
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("grouped", full_except([False, True], [False]))
def test_devices_without_a_capacity_compute_their_own_experts_choices(grouped):
    """Two devices with two experts each give what one device gives, gradients too."""
    config = dataclasses.replace(Config.tiny(), capacity=None, num_experts=4)
    graph, weights = nnx.split(built(GatedExperts, config, biased=False, normalize=True))
    x_BTD = np.random.default_rng(0).normal(size=(2, 6, config.embed)).astype(np.float32)

    def total(weights, x_BTD):
        positions = make_inputs(config, jnp.zeros((2, 6), jnp.int32))
        out_BTD, _ = nnx.merge(graph, weights)(x_BTD, positions)
        return (out_BTD * jnp.cos(x_BTD)).sum(), out_BTD

    step = functools.partial(jax.jit, compiler_options=QUICK)
    grads, out_BTD = step(jax.grad(total, has_aux=True))(weights, x_BTD)
    mesh = make_mesh("data=1,expert=2")
    rules = nnx.logical_axis_rules(tuple(RULES["ep"].items()))
    with multiplying(grouped), jax.set_mesh(mesh), rules:
        on_mesh = jax.device_put(weights, nnx.get_named_sharding(weights, mesh))
        found, found_BTD = step(jax.grad(total, has_aux=True))(on_mesh, x_BTD)
    np.testing.assert_allclose(found_BTD, out_BTD, rtol=1e-4, atol=1e-6)
    for name in ("gate", "up", "down"):
        want = np.asarray(grads[name][...])
        np.testing.assert_allclose(
            found[name][...], want, rtol=1e-4, atol=1e-5 * np.abs(want).max()
        )


@pytest.mark.full
def test_room_for_all_is_dropless():
    """A capacity of E / J gives each expert a slot for every position of a row."""
    batch = rows()
    limited = loss_and_gradient(model_of(capacity=TINY.num_experts / TINY.experts_per_token), batch)
    dropless = loss_and_gradient(model_of(capacity=None), batch)
    (total, count, aux), _ = limited
    assert float(aux["dropped"][0]) == 0
    np.testing.assert_allclose(total / count, dropless[0][0] / dropless[0][1], rtol=1e-6)
    assert_close(limited[1], dropless[1], 1e-5)


def test_nothing_depends_on_what_comes_later():
    """Slots go to positions in order, unlike GShard's, which go by the rank of a choice."""
    model, batch = model_of(capacity=0.5), rows()
    logits = jax.jit(lambda tokens: model(tokens), compiler_options=QUICK)
    changed = batch["tokens"].copy()
    changed[:, T // 2 :] += 1
    np.testing.assert_array_equal(
        logits(batch["tokens"])[:, : T // 2], logits(changed)[:, : T // 2]
    )


@pytest.mark.full
def test_the_loss_of_a_batch_is_the_sum_of_its_rows():
    """Therefore meshes, microbatches and processes agree, however rows are grouped."""
    model, batch = model_of(capacity=0.75), rows()
    (total, count, aux), _ = loss_and_gradient(model, batch)
    assert float(aux["dropped"][0]) > 0
    assert float(aux["balance"][0] / count) > 1
    loss = jax.jit(lambda row: model.loss(**row), compiler_options=QUICK)
    parts = [loss({name: x[row : row + 1] for name, x in batch.items()}) for row in range(B)]
    assert_close((total, count, aux), jax.tree.map(lambda *x: sum(x), *parts), 1e-5)
    objective = aux["loss"][0] + TINY.balance_weight * aux["balance"][0]
    np.testing.assert_allclose(
        total, objective + TINY.router_z_weight * aux["router_z"][0], rtol=1e-6
    )


@pytest.mark.full
def test_rows_of_padding_add_nothing():
    model, batch = model_of(capacity=0.75), rows()
    padding = {"tokens": np.ones((B, T), np.int32), "targets": np.full((B, T), -1, np.int32)}
    both = jax.tree.map(lambda *x: np.concatenate(x), batch, padding)
    alone, gradient = loss_and_gradient(model, batch)
    padded, same = loss_and_gradient(model, both)
    assert_close(padded, alone, 1e-6)
    assert_close(same, gradient, 1e-6)


def test_a_bias_moves_toward_experts_with_less_than_their_share():
    graph, state = nnx.split(model_of(balance_rate=0.01))

    @functools.partial(jax.jit, compiler_options=QUICK)
    def losses(state):
        model = nnx.merge(graph, state)
        _, count, aux = model.loss(**rows())
        loads = jnp.stack([aux[f"load_{e}"][0] / count for e in range(TINY.num_experts)])
        return loads, nnx.state(model)

    loads, state = losses(state)
    (bias_E,) = state["layers"]["experts"]["bias"][...]
    np.testing.assert_allclose(bias_E, 0.01 * np.sign(1 - loads), atol=1e-6)
    assert len(set(np.sign(bias_E).tolist())) > 1
    now, _ = losses(state)
    assert np.ptp(now) < np.ptp(loads)


# ---- the figures ---------------------------------------------------------------------------------


def defined(x_BTD, router_DE, bias_E, counted_BT, J: int, slots: int):
    """The results that zoo.experts.mixture.choose documents, position by position in float64, and gradients.

    Returns: (the choice; name → figure; name of a figure → its gradient with respect to the router).
    """
    (B, T, D), E = x_BTD.shape, router_DE.shape[1]
    experts, weights, places = (np.zeros((B, T, J)) for _ in range(3))
    figures = {"balance": 0.0, "router_z": 0.0, "dropped": 0.0, "load": np.zeros(E)}
    gradients = {"balance": np.zeros((D, E)), "router_z": np.zeros((D, E))}
    for b in range(B):
        x_TD = np.asarray(x_BTD[b], np.float64)
        logits_TE = x_TD @ np.asarray(router_DE, np.float64)
        probs_TE = np.exp(logits_TE) / np.exp(logits_TE).sum(-1, keepdims=True)
        before_E, chosen_E = np.zeros(E), np.zeros(E)  # of all positions; of those that count
        for t in range(T):
            scores_E = probs_TE[t] + np.asarray(bias_E, np.float64)
            experts[b, t] = best = sorted(range(E), key=lambda e: -scores_E[e])[:J]
            weights[b, t], places[b, t] = probs_TE[t, best], before_E[best]
            before_E[best] += 1
            if counted_BT[b, t]:
                normalizer = np.log(np.exp(logits_TE[t]).sum())
                chosen_E[best] += 1
                figures["router_z"] += normalizer**2
                figures["dropped"] += np.mean(places[b, t] >= slots)
                gradients["router_z"] += np.outer(x_TD[t], 2 * normalizer * probs_TE[t])
        counted_T = np.asarray(counted_BT[b])
        if not counted_T.any():
            continue
        figures["load"] += chosen_E / (J / E)
        share_E, mean_E = chosen_E / chosen_E.sum(), probs_TE[counted_T].mean(0)
        figures["balance"] += counted_T.sum() * E * (share_E @ mean_E)  # once for each position
        for t in np.flatnonzero(counted_T):  # the share of choices has no gradient
            along_E = probs_TE[t] * (share_E - share_E @ probs_TE[t])
            gradients["balance"] += np.outer(x_TD[t], E * along_E)
    return (experts, weights, places), figures, gradients


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _routed(graph, slots, state, x_BTD, counted_BT):
    """(results of `route`, name → gradient of `balance` and `router_z` for the router)."""

    def losses(state):
        choice, figures = nnx.merge(graph, state).route(x_BTD, counted_BT, slots)
        return {name: figures[name] for name in ("balance", "router_z")}, (choice, figures)

    gradients, found = jax.jacrev(losses, has_aux=True)(state)
    return found, {name: gradient["router"][...] for name, gradient in gradients.items()}


ROUTERS = [  # B, T, D, E, J, slots, normalize, biases, counted
    (3, 11, 6, 8, 2, 2, True, False, "some"),
    (2, 9, 5, 6, 3, 3, False, True, "a row"),
    (4, 7, 6, 4, 1, 1, True, True, "some"),
    (1, 16, 4, 8, 1, 16, False, False, "all"),  # as dropless has it
    (2, 12, 8, 5, 3, 12, True, False, "some"),
    (3, 8, 6, 3, 3, 8, True, True, "all"),  # each position goes through all experts
    (2, 9, 5, 8, 2, 1, True, True, "none"),
]


@pytest.mark.parametrize(
    ("B", "T", "D", "E", "J", "slots", "normalize", "biases", "counted"),
    full_except(ROUTERS, ROUTERS[:2]),
)
def test_a_router_s_figures_are_their_definitions(B, T, D, E, J, slots, normalize, biases, counted):
    config = dataclasses.replace(
        TINY, embed=D, num_experts=E, experts_per_token=J, normalize=normalize,
        balance_rate=0.1 * biases,
    )  # fmt: skip
    graph, state = nnx.split(
        nnx.eval_shape(
            lambda: GatedExperts(config, biased=biases, normalize=normalize, rngs=nnx.Rngs(0))
        )
    )
    random = np.random.default_rng(B * T)
    draw = lambda leaf: jnp.asarray(random.normal(size=leaf.shape).astype(np.float32))  # noqa: E731
    state, x_BTD = jax.tree.map(draw, state), random.normal(size=(B, T, D)).astype(np.float32)
    counted_BT = {
        "all": np.full((B, T), True),
        "none": np.full((B, T), False),
        "some": random.random((B, T)) < 0.7,
        "a row": np.broadcast_to(np.arange(B)[:, None] > 0, (B, T)),
    }[counted]
    bias_E = 0.1 * state["bias"][...] if biases else np.zeros(E)
    if biases:
        state["bias"][...] = bias_E

    found, gradients = _routed(graph, slots, state, x_BTD, counted_BT)
    (experts, weights, places), figures = found
    choice, wanted, along = defined(x_BTD, state["router"][...], bias_E, counted_BT, J, slots)
    np.testing.assert_array_equal(experts, choice[0])
    np.testing.assert_array_equal(places, choice[2])
    shares = choice[1] / choice[1].sum(-1, keepdims=True) if normalize else choice[1]
    np.testing.assert_allclose(weights, shares, rtol=1e-5)
    assert figures.keys() == wanted.keys()
    for name, figure in wanted.items():
        np.testing.assert_allclose(figures[name], figure, rtol=1e-5, err_msg=name)
    for name, gradient in along.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)
    assert (wanted["dropped"] > 0) == (slots < T and counted != "none"), "the case tests slots"


LOSSES = [
    dict(num_layers=3, experts_per_token=3, capacity=0.75, balance_rate=0.02),
    dict(num_layers=2, experts_per_token=1, capacity=None),
    dict(num_layers=2, experts_per_token=2, capacity=1.0, normalize=False),
    dict(num_layers=2, experts_per_token=2, capacity=None, balance_rate=0.1, num_experts=5),
]


@pytest.mark.parametrize("changes", full_except(LOSSES, LOSSES[:1]))
def test_the_objective_its_figures_and_biases_are_their_definitions(changes, monkeypatch):
    """Computes them from each router's inputs. One row ends in padding, another is all padding."""
    given, route = [], GatedExperts.route

    def recorded(self, x_BTD, counted_BT, slots, load_limit):
        jax.debug.callback(
            lambda *arrays: given.append((*arrays, slots)), x_BTD, counted_BT, ordered=True
        )
        return route(self, x_BTD, counted_BT, slots, load_limit)

    monkeypatch.setattr(GatedExperts, "route", recorded)
    config = dataclasses.replace(TINY, balance_weight=0.3, router_z_weight=0.2, **changes)
    graph, state = nnx.split(nnx.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    # Wide enough for uneven loads.
    draw = lambda leaf: jnp.asarray(np.float32(0.2 * random.normal(size=leaf.shape)))  # noqa: E731
    state, batch = jax.tree.map(draw, state), rows(4, 12)
    batch["targets"][1], batch["targets"][2, 7:], batch["targets"][3, 0] = -1, -1, 0

    @functools.partial(jax.jit, compiler_options=QUICK)
    def losses(state):
        model = nnx.merge(graph, state)
        return model.loss(**batch), nnx.state(model.layers.experts)

    (objective, count, aux), after = jax.block_until_ready(losses(state))
    jax.effects_barrier()
    counted_BT, E, J = (
        np.asarray(batch["targets"]) >= 0,
        config.num_experts,
        config.experts_per_token,
    )
    slots = 12 if config.capacity is None else min(12, math.ceil(config.capacity * 12 * J / E))
    before, layers = state["layers"]["experts"], []
    for layer, (x_BTD, counted, room) in enumerate(given):
        np.testing.assert_array_equal(counted, counted_BT)
        assert room == slots
        bias_E = before["bias"][...][layer] if config.balance_rate else np.zeros(E)
        router_DE = before["router"][...][layer]
        layers.append(defined(x_BTD, router_DE, bias_E, counted_BT, J, slots)[1])
        if config.balance_rate:  # up where an expert has less than its share
            step = np.sign(np.round(1 - layers[-1]["load"] / counted_BT.sum(), 4))
            want_E = bias_E + config.balance_rate * step
            np.testing.assert_allclose(after["bias"][...][layer], want_E, rtol=1e-6, atol=1e-7)
            assert {-1, 1} <= {*step}
    assert len(layers) == config.num_layers
    means = {name: np.mean([layer[name] for layer in layers], axis=0) for name in layers[0]}
    loads = {f"load_{e}": load for e, load in enumerate(means.pop("load"))}
    assert aux.keys() == {"loss", *means, *loads}
    for name, figure in (means | loads).items():
        np.testing.assert_allclose(aux[name][0], figure, rtol=1e-4, atol=1e-6, err_msg=name)
        assert float(aux[name][1]) == float(count) == counted_BT.sum()
    assert (means["dropped"] > 0) == (config.capacity is not None)
    want = float(aux["loss"][0]) + 0.3 * means["balance"] + 0.2 * means["router_z"]
    np.testing.assert_allclose(objective, want, rtol=1e-5)


# ---- on meshes -----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "axes", "kind", "capacity"),
    [  # with a capacity on Explicit axes: test_meshes.py
        ("fsdp_ep_tp", {"data": 2, "expert": 2, "model": 2}, AxisType.Explicit, None),
        ("fsdp_ep_tp", {"data": 2, "expert": 2, "model": 2}, AxisType.Auto, None),
        ("fsdp_ep_tp", {"data": 2, "expert": 2, "model": 2}, AxisType.Auto, 1.25),
        ("hsdp_tp", {"data": 2, "fsdp": 2, "model": 2}, AxisType.Explicit, None),
        ("ep", {"data": 1, "expert": 8}, AxisType.Explicit, None),
        ("ep", {"data": 1, "expert": 8}, AxisType.Auto, 1.25),
    ],
)
def test_a_copied_file_computes_the_same_on_any_mesh(strategy, axes, kind, capacity):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    model, batch = model_of(capacity=capacity), rows(8)
    (total, _, aux), gradient = loss_and_gradient(model, batch)
    (same, _, figures), grads = loss_and_gradient(model, batch, mesh, RULES[strategy])
    np.testing.assert_allclose(same, total, rtol=2e-6)
    assert_close(figures, aux, 2e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(gradient), strict=True):
        assert np.linalg.norm(x - y) < 2e-5 * np.linalg.norm(y)


DENSE = {  # as GLM-4.5: layers without experts before the others
    "num_layers": 4,
    "dense_layers": 2,
    "dense_mlp": 96,
    "shared_mlp": 32,
    "sigmoid": True,
    "groups": 4,
    "top_groups": 2,
    "route_scale": 2.5,
    "balance_rate": 0.01,
    "capacity": None,
}


@pytest.mark.full
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("data=2,pipe=2,expert=2", "fsdp_ep_pp"),
        ("data=2,expert=2,model=2", "fsdp_ep_tp"),
        ("data=2,seq=2,expert=2", "fsdp_ep_cp"),
    ],
)
def test_dense_first_layers_train_alike_on_any_mesh(mesh, strategy, grouped):
    model = model_of(**DENSE)
    assert model.layers.experts.bias[...].shape == (2, 8), "of the layers with experts"
    batch = rows(batch=8)
    (total, _, aux), gradient = loss_and_gradient(model, batch)
    (same, _, metrics), grads = loss_and_gradient(
        model, batch, make_mesh(mesh), RULES[strategy], grouped
    )
    np.testing.assert_allclose(same, total, rtol=2e-6)
    assert_close(metrics, aux, 2e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(gradient), strict=True):
        assert np.linalg.norm(x - y) <= 2e-5 * np.linalg.norm(y)


# ---- rows that travel to the devices of their experts --------------------------------------------

LOADS = {
    "as routed": (2, ()),
    "all rows to one device": (2, (0, 1)),
    "all rows to one expert": (1, (7,)),
    "other devices for each choice": (3, (0, 2, 4)),
    "one device for two of three choices": (3, (2, 6, 7)),
    "more choices than devices": (6, (0, 1, 2, 3)),
}


@functools.cache
def computed(load: str, mesh: str, strategy: str, room: float, grouped: bool = True):
    """(output, gradients) of a mixture of 8 experts, whose choice a bias decides.

    Args:
      grouped: see `multiplying`.
    """
    choices, chosen = LOADS[load]
    config = dataclasses.replace(Config.tiny(), capacity=None, experts_per_token=choices)
    module = built(GatedExperts, config, biased=True, normalize=True)
    module.bias[...] = jnp.zeros(8).at[jnp.array(chosen, int)].set(100.0)
    graph, weights = nnx.split(module)
    x_BTD = np.random.default_rng(0).normal(size=(8, 5, config.embed)).astype(np.float32)

    def total(weights, x_BTD):
        positions = make_inputs(config, jnp.zeros((8, 5), jnp.int32))
        out_BTD, _ = nnx.merge(graph, weights)(x_BTD, positions)
        return (out_BTD * jnp.cos(x_BTD)).sum(), out_BTD

    step = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True, allow_int=True))
    ragged_dot = jax.lax.ragged_dot

    def in_blocks(x_MD, *args, **kwargs):
        assert grouped, "batches need no groups"
        assert len(x_MD) % 4 == 0, "TPUs have a kernel for whole blocks alone"
        return ragged_dot(x_MD, *args, **kwargs)

    with multiplying(grouped), pytest.MonkeyPatch.context() as patch:
        for file in (expert_exchange, expert_matmul):
            patch.setattr(file, "CAPACITY", room)
        patch.setattr(expert_matmul, "ROWS", 4)
        patch.setattr(jax.lax, "ragged_dot", in_blocks)
        if not mesh:
            return jax.device_get(step(weights, x_BTD)[::-1])
        made = make_mesh(mesh)
        with jax.set_mesh(made), nnx.logical_axis_rules(tuple(RULES[strategy].items())):
            on_mesh = jax.device_put(weights, nnx.get_named_sharding(weights, made))
            x_BTD = jax.device_put(x_BTD, jax.NamedSharding(made, jax.P(("data", "expert"))))
            return jax.device_get(step(on_mesh, x_BTD)[::-1])


TRAVELS = [
    ("all rows to one device", "data=2,expert=4", "ep", 1.5),  # three turns
    ("as routed", "data=1,expert=4", "ep", 8.0),
    ("as routed", "data=1,expert=4", "ep", 0.3),
    ("all rows to one expert", "data=1,expert=8", "ep", 1.5),
    ("other devices for each choice", "data=1,expert=4,model=2", "fsdp_ep_tp", 1.5),
    ("one device for two of three choices", "data=2,expert=4", "fsdp_ep", 0.7),
    ("more choices than devices", "data=2,expert=4", "fsdp_ep", 0.7),
]


@pytest.mark.parametrize(("load", "mesh", "strategy", "room"), full_except(TRAVELS, TRAVELS[:1]))
def test_rows_travel_to_the_devices_of_their_experts(load, mesh, strategy, room):
    """Whatever the load, nothing is dropped: outputs and gradients are those of one device."""
    assert_computes(computed(load, mesh, strategy, room), computed(load, "", "", 1.5))


def assert_computes(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-6)
    for x, want in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        if want.dtype == np.float32:
            np.testing.assert_allclose(x, want, rtol=1e-4, atol=2e-6 * max(1, np.abs(want).max()))


BATCHES = [
    ("all rows to one device", "", "", 1.5),  # three turns of two experts
    ("as routed", "data=1,expert=4", "ep", 0.3),  # turns of devices, each with turns of experts
    ("one device for two of three choices", "data=2,expert=2", "fsdp_ep", 1.5),  # all rows gathered
    ("more choices than devices", "data=1,expert=4", "ep", 8.0),  # one turn
]


@pytest.mark.parametrize(("load", "mesh", "strategy", "room"), full_except(BATCHES, BATCHES[:1]))
def test_experts_multiply_batches_of_their_rows_where_groups_cost_more(load, mesh, strategy, room):
    """On CPUs and GPUs. Whatever the load, nothing is dropped, and no product is masked."""
    found = computed(load, mesh, strategy, room, grouped=False)
    assert_computes(found, computed(load, "", "", 1.5))


def test_rows_beyond_a_limit_of_the_load_are_dropped_and_counted():
    """By definition: a device takes the choices of its experts, row by row, until it has enough."""
    config = dataclasses.replace(Config.tiny(), capacity=None, load_limit=0.8)
    module = built(GatedExperts, config, biased=True, normalize=True)
    module.bias[...] = jnp.zeros(8).at[3].set(100.0)  # all rows choose it, and a further expert
    graph, weights = nnx.split(module)
    x_BTD = np.random.default_rng(0).normal(size=(8, 5, config.embed)).astype(np.float32)
    positions = make_inputs(config, jnp.zeros((8, 5), jnp.int32))
    route = jax.jit(lambda x_BTD: module.route(x_BTD, positions.counted_BT, 5)[0])
    expert_BTJ, weight_BTJ, _ = jax.device_get(route(x_BTD))
    gate_EDF, up_EDF, down_EFD = (np.asarray(w[...]) for w in (module.gate, module.up, module.down))
    wanted_BTD, taken_P, dropped = np.zeros_like(x_BTD), np.zeros(4, int), 0
    for b, t in np.ndindex(8, 5):
        x_D, had_P = x_BTD[b, t], taken_P.copy()
        for e, weight in zip(expert_BTJ[b, t], weight_BTJ[b, t], strict=True):
            taken_P[e // 2] += 1
            if had_P[e // 2] >= 0.8 * 8 * 5 * 2 / 4:
                dropped += 1
                continue
            gate_F = x_D @ gate_EDF[e]
            hidden_F = gate_F / (1 + np.exp(-gate_F)) * (x_D @ up_EDF[e])
            wanted_BTD[b, t] += weight * (hidden_F @ down_EFD[e])

    @jax.jit
    def run(weights, x_BTD):
        out_BTD, metrics = nnx.merge(graph, weights)(x_BTD, positions)
        return out_BTD, metrics["dropped"]

    mesh = make_mesh("data=1,expert=4")
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(RULES["ep"].items())):
        on_mesh = jax.device_put(weights, nnx.get_named_sharding(weights, mesh))
        x_BTD = jax.device_put(x_BTD, jax.NamedSharding(mesh, jax.P(("data", "expert"))))
        found_BTD, found = run(on_mesh, x_BTD)
    assert dropped > 24
    assert float(found) == pytest.approx(dropped / 2)
    np.testing.assert_allclose(found_BTD, wanted_BTD, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("remat", "times"), [("dispatched", 4), ("full", 5)])
@pytest.mark.full
def test_rows_travel_once_forward_once_backward_and_once_for_remat(remat, times):
    """To experts and back; remat repeats the way there. Further turns, which data decides, don't count."""
    config = dataclasses.replace(Config.tiny(), capacity=None, remat=remat, num_layers=1)
    layout = make_layout(MoE, config, make_mesh("data=1,expert=4"), "ep", batch_size=4, seq_len=16)
    batch = layout.abstract_batch({"tokens": ROW_OF_IDS, "targets": ROW_OF_IDS})
    step = layout.compile(
        functools.partial(gradients, layout), layout.variables(), batch, compiler_options=QUICK
    )
    sent = [x for x in collectives(step.as_text()) if x.kind == "all-to-all"]
    of_rows = sum(x.times for x in sent if x.shapes[0][-1] == config.embed)
    assert of_rows == times


ROW_OF_IDS = jax.ShapeDtypeStruct((16,), np.int32)


def test_tpus_multiply_whole_blocks_of_rows(monkeypatch):
    """Forward and both gradients, in blocks that we name; by default TPUs mask a dense product."""
    for file in (expert_exchange, expert_matmul):
        monkeypatch.setattr(file, "device", lambda: types.SimpleNamespace(platform="tpu"))
    config = dataclasses.replace(Config.tiny(), capacity=None, num_layers=1, embed=256, mlp=640)
    layout = make_layout(MoE, config, make_mesh("data=1,expert=4"), "ep", batch_size=4, seq_len=150)
    batch = layout.abstract_batch(
        dict.fromkeys(("tokens", "targets"), ROW_OF_IDS.update(shape=(150,)))
    )
    with layout.trace():
        traced = jax.jit(functools.partial(gradients, layout)).trace(layout.variables(), batch)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    rows = -(-math.ceil(1.5 * 150 * 2 + 1) // 256) * 256
    found = set()
    for line in (line for line in text.splitlines() if '"chlo.ragged_dot"' in line):
        blocks = re.search(r'ragged_dot_tiling = "256,(\d+),(\d+)"', line)
        shapes = re.findall(r"tensor<([\dx]+)xf32>", line)
        assert blocks, line
        found.add((*shapes, *blocks.groups()))
    assert found == {
        (f"{rows}x256", "2x256x640", f"{rows}x640", "256", "384"),  # gate and up
        (f"{rows}x640", "2x640x256", f"{rows}x256", "640", "256"),  # down, and a gradient
        (f"{rows}x256", f"{rows}x640", "2x256x640", "256", "640"),
        (f"{rows}x640", f"{rows}x256", "2x640x256", "384", "256"),
    }


@pytest.mark.parametrize(("platform", "lowering"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_batches_multiply_a_row_by_its_own_expert_alone(platform, lowering, monkeypatch):
    """Of 1.5 times an even load. CPUs' and GPUs' ragged_dot multiplies all rows by all experts."""
    on_platform = types.SimpleNamespace(platform=platform)
    monkeypatch.setattr(expert_matmul, "device", lambda: on_platform)
    config = dataclasses.replace(Config.tiny(), capacity=None, num_layers=1, embed=32, mlp=48)
    module, x_BTD = built(GatedExperts, config, biased=False), jnp.zeros((2, 1_024, 32))
    positions = make_inputs(config, jnp.zeros((2, 1_024), jnp.int32))
    graph, weights = nnx.split(module)

    def total(weights, x_BTD):
        return nnx.merge(graph, weights)(x_BTD, positions)[0].sum()

    traced = jax.jit(jax.grad(total, argnums=(0, 1))).trace(weights, x_BTD)
    text = traced.lower(lowering_platforms=(lowering,)).as_text()
    assert "ragged_dot" not in text
    rows = 3 * 2 * 1_024 * 2 // 2 // 8
    shapes = re.findall(r"stablehlo.dot_general.*?\(tensor<8x(\w+)xf32>, tensor<8x(\w+)xf32>", text)
    assert set(shapes) == {
        (f"{rows}x32", "32x48"),  # gate and up
        (f"{rows}x48", "48x32"),  # down
        (f"{rows}x48", "32x48"),  # gradients of rows
        (f"{rows}x32", "48x32"),
        (f"{rows}x48", f"{rows}x32"),  # of weights
        (f"{rows}x32", f"{rows}x48"),
    }


def test_products_in_blocks_have_the_gradients_of_ragged_dot():
    random = np.random.default_rng(0)
    x_MK, w_EKN, weight_MN = (
        random.normal(size=shape).astype(np.float32) for shape in ((256, 8), (3, 8, 6), (256, 6))
    )
    sizes_E = jnp.array([100, 0, 130])
    inside_M1 = (np.arange(256) < 230)[:, None]

    def gradient(product):
        def total(x_MK, w_EKN):
            out_MN = product(x_MK, w_EKN, sizes_E)
            return jnp.where(inside_M1, jnp.sin(out_MN) * weight_MN, 0).sum()

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(x_MK, w_EKN)

    pair = gradient(expert_matmul.product_in_blocks), gradient(jax.lax.ragged_dot)
    jax.tree.map(np.testing.assert_array_equal, *pair)


@pytest.mark.parametrize(
    ("experts", "devices", "wanted"),
    [
        ({"number": 8, "per_token": 2}, 4, 4 * (1 - 15 / 28)),
        ({"number": 4, "per_token": 1}, 4, 1),
        # Four groups of two experts, of which a position chooses two: on two devices of four.
        ({"number": 8, "per_token": 3, "groups": 4, "top_groups": 2}, 4, 2),
    ],
)
def test_a_row_goes_to_fewer_devices_than_it_has_experts(experts, devices, wanted):
    shape = ExpertsShape(**experts, embed=1, width=1, weights=1, capacity=None)
    assert devices_of_a_row(shape, devices) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("mesh", "choices", "limit", "line", "kinds"),
    [
        ("data=1,expert=4", 2, 0.0, "rows travel to at most 2 of 4 devices along expert", {"all-to-all"}),
        ("data=1,expert=4", 6, 0.0, "rows travel to at most 4 of 4 devices along expert", {"all-to-all"}),
        ("data=2,expert=2", 2, 0.0, "2 devices along expert gather all rows", {"all-gather", "reduce-scatter"}),
        ("data=1,expert=4", 2, 1.5, "rows travel to at most 2 of 4 devices along expert, which drop what exceeds 1.5 times an even load", {"all-to-all"}),
    ],
)  # fmt: skip
def test_how_rows_reach_dropless_experts_is_decided_by_bytes(mesh, choices, limit, line, kinds):
    config = dataclasses.replace(
        Config.tiny(), experts_per_token=choices, capacity=None, remat="none", load_limit=limit
    )
    layout = make_layout(MoE, config, make_mesh(mesh), "ep", batch_size=8, seq_len=16)
    assert kernel.experts(layout) == [f"experts: dropless, {line}"]
    assert f"experts: dropless, {line}" in describe_step(PlannedStep(layout, Training()))
    sent = [x for x in transfers(layout) if x.purpose == "exchanges"]
    assert {x.kind for x in sent} == kinds
    rows = 8 * 16 / layout.batch_shards * config.embed * 4 * config.num_layers
    n = layout.count_shards("expert")
    unchosen = math.comb(6, choices) / math.comb(8, choices)  # a device has two of eight experts
    each = 4 * (1 - unchosen) * (n - 1) / n if n == 4 else n - 1
    assert sum(x.bytes for x in sent) == pytest.approx(
        4 * rows * each
    )  # there and back, forward and backward


@pytest.mark.full
def test_dropless_reads_nothing_of_rows_without_a_group(monkeypatch):
    """ragged_dot may return anything for rows of other devices' experts."""
    clean = jax.lax.ragged_dot

    def grouped(x_MD, sizes_E, other):
        return jnp.where(jnp.arange(len(x_MD))[:, None] < sizes_E.sum(), x_MD, other)

    @jax.custom_vjp
    def dirty(x_MD, w_EDF, group_sizes):
        out_MF = clean(grouped(x_MD, group_sizes, 0), w_EDF, group_sizes)
        return grouped(out_MF, group_sizes, jnp.nan)

    def backward(saved, grad_MF):
        x_MD, w_EDF, sizes_E = saved
        args = (grouped(x_MD, sizes_E, 0), w_EDF)
        _, transpose = jax.vjp(lambda x, w: clean(x, w, sizes_E), *args)
        x_grad, w_grad = transpose(grouped(grad_MF, sizes_E, 0))
        return grouped(x_grad, sizes_E, jnp.nan), w_grad, None

    dirty.defvjp(lambda *args: (dirty(*args), args), backward)
    mesh = jax.make_mesh((1, 4), ("data", "expert"))
    batch = rows(8, 16)
    (want, *_), gradient = loss_and_gradient(model_of(capacity=None), batch)
    monkeypatch.setattr(jax.lax, "ragged_dot", dirty)
    (total, *_), grads = loss_and_gradient(
        model_of(capacity=None), batch, mesh, RULES["ep"], grouped=True
    )
    np.testing.assert_allclose(total, want, rtol=2e-6)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(gradient), strict=True):
        assert np.linalg.norm(x - y) < 2e-5 * np.linalg.norm(y)


def test_rules_that_split_experts_and_not_the_batch_over_an_axis():
    mesh = jax.make_mesh((2, 4), ("data", "expert"))
    with pytest.raises(ValueError, match="the rules split experts over expert, but not the batch"):
        loss_and_gradient(model_of(), rows(8), mesh, RULES["ep"] | {"batch": "data"})


def test_such_rules_are_a_mistake_of_one_sentence():
    table = RULES["ep"] | {"batch": "data"}
    with pytest.raises(UserError, match="split 'expert' over mesh axis 'expert', but not 'batch'"):
        make_layout(MoE, TINY, make_mesh("data=2,expert=4"), table, batch_size=8)


@pytest.mark.full
def test_four_microbatches_give_the_gradient_of_one():
    layout = make_layout(MoE, TINY, make_mesh("1x1"), batch_size=8)
    params = variables_of(model_of())
    compute = functools.partial(gradients, layout, params, rows(8))
    (whole, _, figures), (parts, _, means) = (
        jax.jit(functools.partial(compute, n), compiler_options=QUICK)() for n in (1, 4)
    )
    assert_close(means, figures, 2e-6)
    for x, y in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert np.linalg.norm(x - y) < 2e-6 * np.linalg.norm(y)


def test_a_gate_scales_what_all_positions_share():
    """The MLP beside the experts is multiplied by sigmoid(x · gate), the experts' output is not."""
    x_BTD, gate_D = np.random.default_rng(0).standard_normal((3, 5, 8)), np.linspace(-1, 1, 8)
    layer = types.SimpleNamespace(
        mlp=lambda x: 2 * x, mlp_gate=nnx.Param(jnp.asarray(gate_D, jnp.float32)),
        experts=lambda x, positions: (3 * x, {"load": positions}),
    )  # fmt: skip
    out_BTD, metrics = feed_forward(layer, jnp.asarray(x_BTD, jnp.float32), "positions")
    share_BT1 = 1 / (1 + np.exp(-(x_BTD @ gate_D)))[..., None]
    np.testing.assert_allclose(out_BTD, 2 * x_BTD * share_BT1 + 3 * x_BTD, rtol=1e-5)
    assert metrics == {"load": "positions"}
