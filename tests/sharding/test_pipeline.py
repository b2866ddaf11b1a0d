"""Layers in stages: both schedules train like one device, and send and keep what they promise."""

import dataclasses
import functools
import inspect
import itertools
import re
import types
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx

from recipes.common.checkpoint import find
from recipes.common.entries import model as model_of
from recipes.common.entries import zoo_file
from recipes.common.language import for_another_loss
from recipes.common.language.messages import stages
from recipes.common.report.hlo import collectives
from recipes.common.runtime import UserError
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, elsewhere, make_layout
from recipes.common.train.checks import check_stages
from recipes.common.train.state import abstract_state, initialize
from recipes.common.train.step import gradients
from recipes.instruments.plan.textbook import stage_transfers
from recipes.instruments.prove.comparison import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    compare_gradients,
    largest_relative,
)
from tests.conftest import full_except
from tests.support.entries import OPTIMIZER
from tests.support.models import random_variables
from tests.support.quick import QUICK
from tests.support.runs import saving
from zoo.options import cache as zoo_cache
from zoo.parallel import pipeline

pytestmark = pytest.mark.promise("meshes-agree")

B, T, L = 16, 18, 8  # four stages don't divide T


def batch() -> dict[str, np.ndarray]:
    """Packed rows with some padding; every microbatch has other documents."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 257, (B, T + 1), np.int32)
    targets = np.where(random.random((B, T)) < 0.1, -1, tokens[:, 1:])
    ids = np.cumsum(random.random((B, T)) < 3 / T, axis=1, dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": targets, "segment_ids": ids}


def deep(entry: str, **changes):
    """The tiny model with eight layers."""
    return dataclasses.replace(zoo_file(entry).Config.tiny(), **({"num_layers": L} | changes))


def layout_of(entry: str, config, mesh: str, strategy: str, rows: int = B) -> Layout:
    return make_layout(model_of(entry), config, make_mesh(mesh), strategy, batch_size=rows)


def step(layout: Layout, accumulate: int = 1):
    def run(variables, batch):
        grads, buffers, means = gradients(layout, variables, batch, accumulate)
        return means, grads, buffers

    return run


@functools.lru_cache(maxsize=4)  # compiled steps take many memory maps
def compiled(entry: str, config, mesh: str, strategy: str, accumulate: int = 1, rows: int = B):
    layout = layout_of(entry, config, mesh, strategy, rows)
    example = dict.fromkeys(batch(), jax.ShapeDtypeStruct((T,), np.int32))
    given = layout.variables(), layout.abstract_batch(example)
    return layout.compile(step(layout, accumulate), *given, compiler_options=QUICK)


@functools.cache
def trained(entry: str, config, mesh: str, strategy: str, accumulate: int = 1):
    """(figures, gradients, buffers) of a step."""
    layout = layout_of(entry, config, mesh, strategy)
    given = random_variables(layout), jax.device_put(batch(), layout.batch_shardings(batch()))
    run = compiled(entry, config, mesh, strategy, accumulate)
    means, grads, buffers = jax.device_get(run(*given))
    return means, paths(grads), paths(buffers)


def trained_anew(*given):
    """Compiles again, with what a test has changed."""
    compiled.cache_clear()
    try:
        return trained.__wrapped__(*given)
    finally:
        compiled.cache_clear()


def worst(found: dict, want: dict) -> float:
    """The largest difference between gradients."""
    assert found.keys() == want.keys()
    return largest_relative(compare_gradients(found, want))


GPIPE = {"pipeline": "gpipe"}
INTERLEAVED = {"pipeline": "interleaved"}
UNLIKE = {"layer_kinds": ((5, 1e4, None), (None, 1e4, None))}
CASES = [
    ("transformer", "data=2,pipe=4", "fsdp_pp", {}),
    ("transformer", "data=2,pipe=4", "pp", GPIPE),
    ("transformer", "data=2,pipe=4", "pp", {"pipe_microbatches": 4, "remat": "none"}),
    ("transformer", "data=2,pipe=4", "pp", GPIPE | UNLIKE | {"pipe_microbatches": 2}),
    ("transformer", "data=2,pipe=4", "fsdp_pp", {"lora_rank": 4, "remat": "dots"}),
    ("transformer", "data=2,pipe=4", "fsdp_pp", {"vocab_size": 389, "tie_embeddings": False}),
    ("transformer", "data=1,pipe=8", "pp", {}),
    ("transformer", "data=1,pipe=8", "pp", GPIPE | {"pipe_microbatches": 8}),
    ("transformer", "data=2,pipe=4", "fsdp_pp", INTERLEAVED),
    # Fewer microbatches than stages, layers of several kinds, replicated weights.
    ("transformer", "data=2,pipe=2", "pp", INTERLEAVED | UNLIKE | {"pipe_microbatches": 1}),
    ("transformer", "data=2,pipe=2,model=2", "fsdp_pp_tp", {"sliding_window": 7}),
    ("transformer", "data=2,pipe=2,model=2", "fsdp_pp_tp", GPIPE | {"attention": "flash"}),
    ("moe", "data=2,pipe=2,expert=2", "fsdp_ep_pp", {"balance_rate": 0.01}),
    ("moe", "data=2,pipe=2,expert=2", "fsdp_ep_pp", GPIPE | {"capacity": None}),
    (
        "moe",
        "data=2,pipe=2,expert=2",
        "fsdp_ep_pp",
        INTERLEAVED | {"pipe_rounds": 4, "balance_rate": 0.01},
    ),
    ("moe", "data=1,pipe=2,expert=4", "fsdp_ep_pp", {"capacity": None}),
    ("moe", "data=2,pipe=4", "fsdp_pp", {"capacity": 0.5, "balance_rate": 0.01}),
    ("moe", "data=2,pipe=2,model=2", "fsdp_pp_tp", {}),
]


@pytest.mark.parametrize(("entry", "mesh", "strategy", "changes"), full_except(CASES, CASES[:1]))
def test_it_trains_like_one_device(entry, mesh, strategy, changes):
    config = deep(entry, **changes)
    alone = dataclasses.replace(config, pipe_microbatches=0, pipeline="1f1b", remat="full")
    alone = dataclasses.replace(alone, pipe_rounds=2)
    means, want, buffers = trained(entry, alone, "1x1", "dp")
    figures, found, moved = trained(entry, config, mesh, strategy)
    for name, figure in figures.items():
        assert figure == pytest.approx(means[name], rel=LOSS_TOLERANCE, abs=1e-6), name
    assert worst(found, want) < GRADIENT_TOLERANCE
    for path, x in buffers.items():
        np.testing.assert_array_equal(moved[path], x, err_msg=path)


@pytest.mark.full
def test_rounds_change_no_bit():
    """A weight's gradient is summed over the microbatches in the same order."""
    config = deep("transformer")
    want = trained("transformer", config, "data=2,pipe=4", "fsdp_pp")
    found = trained("transformer", deep("transformer", **INTERLEAVED), "data=2,pipe=4", "fsdp_pp")
    jax.tree.map(np.testing.assert_array_equal, found, want)


@pytest.mark.full
@pytest.mark.promise("restore")
def test_a_run_changes_its_schedule_at_every_checkpoint(tmp_path):
    """Weights restore bit by bit, and four steps follow those of one schedule."""
    deep_in_rounds = deep("transformer", **INTERLEAVED, pipe_rounds=4)
    schedules = [
        (deep("transformer"), "data=2,pipe=4"),
        (deep("transformer", **INTERLEAVED), "data=2,pipe=4"),
        (deep("transformer", **GPIPE), "data=2,pipe=4"),
        (deep_in_rounds, "data=2,pipe=2"),
    ]

    def train(config, mesh, variables):
        """A step of gradient descent: (its loss, the variables after it)."""
        layout = layout_of("transformer", config, mesh, "fsdp_pp")
        run = compiled("transformer", config, mesh, "fsdp_pp")
        rows = jax.device_put(batch(), layout.batch_shardings(batch()))
        means, grads, _ = run(variables, rows)
        params = jax.tree.map(lambda w, grad: w - 0.1 * grad, variables["params"], grads)
        return float(means["loss"]), variables | {"params": params}

    first = random_variables(layout_of("transformer", *schedules[0], "fsdp_pp"))
    wanted, variables = [], first
    for _ in schedules:
        loss, variables = train(*schedules[0], variables)
        wanted.append((loss, jax.device_get(variables)))
    saved = first
    with saving(tmp_path, keep=4) as saver:
        for number, (schedule, (loss, after)) in enumerate(zip(schedules, wanted, strict=True)):
            saver.save(number, saved)
            saver.wait()
            target = layout_of("transformer", *schedule, "fsdp_pp").variables()
            restored = find(tmp_path).read(target)
            jax.tree.map(np.testing.assert_array_equal, restored, saved)
            found, saved = train(*schedule, restored)
            assert found == pytest.approx(loss, rel=LOSS_TOLERANCE)
            assert worst(paths(saved), paths(after)) < GRADIENT_TOLERANCE
    assert wanted[0][0] > wanted[-1][0] + 0.01, "it trains"


@pytest.mark.full
def test_microbatches_of_the_pipeline_are_inside_an_accumulation_step():
    _, want, _ = trained("transformer", deep("transformer"), "1x1", "dp")
    given = ("transformer", deep("transformer"), "data=2,pipe=4", "fsdp_pp", 2)
    assert worst(trained(*given)[1], want) < GRADIENT_TOLERANCE


@pytest.mark.full
@pytest.mark.promise("restore")
def test_a_deep_model_starts_and_restores_alike(tmp_path):
    """Eight stages of a layer, four of two, also interleaved, and no stages: layers are saved in
    their natural order.
    """

    def abstract(mesh: str, strategy: str, **schedule):
        layout = layout_of("transformer", deep("transformer", **schedule), mesh, strategy)
        return layout, abstract_state(layout, OPTIMIZER)

    cases = [("1x1", "dp"), ("data=1,pipe=8", "pp"), ("data=2,pipe=4", "fsdp_pp"), ("8", "fsdp")]
    targets = [abstract(*case) for case in cases]
    _, interleaved = abstract(*cases[2], **INTERLEAVED)
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, interleaved, targets[2][1]))
    states = [initialize(layout, OPTIMIZER, 0, target) for layout, target in targets]
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, state, states[0])
    for source in states[1:]:
        folder = tmp_path / str(id(source))
        with saving(folder) as saver:
            saver.save(0, source)
        for _, target in targets:
            found = find(folder).read(target)
            jax.tree.map(np.testing.assert_array_equal, found, states[0])
            jax.tree.map(lambda x, wanted: assert_equal(x.sharding, wanted.sharding), found, target)


def assert_equal(found, wanted):
    assert found == wanted


def test_gradients_are_scattered_in_float32():
    """Also in bfloat16, where weights are gathered in bfloat16 before the first tick."""
    layout = layout_of(
        "transformer", deep("transformer", dtype="bfloat16"), "data=2,pipe=4", "fsdp_pp"
    )
    example = dict.fromkeys(batch(), jax.ShapeDtypeStruct((T,), np.int32))
    text = layout.lower(step(layout), layout.variables(), layout.abstract_batch(example)).as_text()
    pattern = r"reduce_scatter.*?scatter_dimension = (\d).*?-> tensor<(\S+)x(\w+)>"
    found = [
        (int(dim), shape.split("x"), dtype)
        for dim, shape, dtype in re.findall(pattern, text, re.DOTALL)
        if shape.startswith(f"{L // 4}x")
    ]
    assert len(found) == 7, "q, k, v, o, gate, up and down of a stage"
    assert all(dtype == "f32" for *_, dtype in found)
    # The TPU compiler would all-reduce an array with more than one dim after the scattered one.
    assert all(len(shape) <= dim + 2 for dim, shape, _ in found)


def test_evaluation_runs_in_stages_too():
    layout = layout_of("transformer", deep("transformer"), "data=2,pipe=4", "fsdp_pp")
    variables = random_variables(layout)
    given = jax.device_put(batch(), layout.batch_shardings(batch()))

    def run(variables, batch):
        return layout.model.merge(variables).loss(**batch)[2]["loss"]

    total, count = layout.compile(run, variables, given, compiler_options=QUICK)(variables, given)
    means, *_ = trained("transformer", deep("transformer"), "1x1", "dp")
    assert int(count) == (batch()["targets"] >= 0).sum()
    assert float(total / count) == pytest.approx(means["loss"], rel=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "gpipe"])
def test_nothing_depends_on_the_bubble(schedule, monkeypatch):
    """Stages that wait compute with NaN here, and no figure or gradient has one."""
    config = deep("transformer", pipeline=schedule)
    want = trained("transformer", config, "data=2,pipe=4", "fsdp_pp")
    monkeypatch.setattr(pipeline, "BUBBLE", float("nan"))
    found = trained_anew("transformer", config, "data=2,pipe=4", "fsdp_pp")
    jax.tree.map(np.testing.assert_array_equal, found, want)


# ---- the order of work ---------------------------------------------------------------------------


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_every_input_arrives_in_time_and_nothing_is_overwritten(v):
    """Both ways, by following each unit of work, and the residuals that the 1F1B schedules keep."""
    for S, M in itertools.product((1, 2, 3, 4), (1, 2, 5, 6, 8)):
        place = functools.partial(pipeline.place, stages=S, rounds=v)
        each_way, late = pipeline.ticks(M, S, v), v * S - 1
        forward, backward = {}, {}  # (microbatch, chunk) → its tick
        for t, s in itertools.product(range(each_way), range(S)):
            m, r = place(t - s)
            if 0 <= m < M:
                forward[m, r * S + s] = t
            m, r = place(t - (S - 1 - s))
            if 0 <= m < M:
                backward[m, (v - 1 - r) * S + s] = late + t
        wanted = {(m, k) for m in range(M) for k in range(v * S)}
        assert wanted == forward.keys() == backward.keys()
        assert max(forward.values()) == each_way - 1, "no tick is for nothing"
        for m, k in wanted:
            if k:  # what arrives is what was sent in the tick before
                assert forward[m, k] == forward[m, k - 1] + 1
                assert backward[m, k] == backward[m, k - 1] - 1
        assert forward[0, v * S - 1] == backward[0, v * S - 1], "backward as soon as it can"
        assert all(backward[x] - forward[x] < 2 * v * S - 1 for x in wanted), "slots"


def test_chunks_move_by_permutations():
    for S, v in itertools.product((2, 3, 4, 6, 8), (1, 2, 3, 4, 6)):
        for moves in pipeline.routes(S, v):
            assert sorted(device for device, *_ in moves) == [*range(S)]
            assert sorted(stage for _, _, stage, _ in moves) == [*range(S)]
        moved = {
            device * v + position: round * S + stage
            for moves in pipeline.routes(S, v)
            for device, position, stage, round in moves
        }
        assert moved == {k: k for k in range(v * S)}


# ---- mutations: what the tests above must notice -------------------------------------------------

MUTATIONS = {
    "a tick late": ("unit = t - self.index\n", "unit = t - self.index + 1\n"),
    "segments of the first microbatch": (
        "x, model.inputs_of(self.rows(m))",
        "x, model.inputs_of(self.rows(0))",
    ),
    "a stage's gradient counted on all": ("difference(*inside)", "union()"),
    "the last stage's loss on all": ("self.index * size, size", "0 * size, size"),
    "what another microbatch kept": ("saved[unit % self.slots]", "saved[(unit + 1) % self.slots]"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_shows(name, monkeypatch):
    config, source = deep("transformer"), inspect.getsource(pipeline)
    right, wrong = MUTATIONS[name]
    assert source.count(right) == 1
    mutant = types.ModuleType(pipeline.__name__)
    mutant.__package__ = pipeline.__package__
    exec(source.replace(right, wrong), vars(mutant))
    monkeypatch.setattr(pipeline, "objective_in_stages", mutant.objective_in_stages)
    means, want, _ = trained("transformer", config, "1x1", "dp")
    figures, found, _ = trained_anew("transformer", config, "data=2,pipe=4", "fsdp_pp")
    assert worst(found, want) > 1e-4 or abs(figures["loss"] - means["loss"]) > 1e-4


# ---- what a step sends and keeps -----------------------------------------------------------------


@pytest.mark.parametrize("schedule", full_except(["1f1b", "interleaved", "gpipe"], fast=["1f1b"]))
def test_activations_travel_and_gradients_are_reduced_once(schedule):
    M, S, D, width = 8, 4, 2, 64
    v = 2 if schedule == "interleaved" else 1
    rows, config = B // D // M, deep("transformer", pipeline=schedule)
    layout = layout_of("transformer", config, "data=2,pipe=4", "fsdp_pp")
    sent, text = Counter(), compiled("transformer", config, "data=2,pipe=4", "fsdp_pp").as_text()
    for found in collectives(text):
        sent[found.kind, found.bytes] += found.times
    activation = 4 * rows * T * width
    assert sent["collective-permute", activation] == 2 * (v * M + S - 1)
    # Interleaved, also halves of each stage's layers and of their gradients.
    permuted = {size: times for (kind, size), times in sent.items() if kind == "collective-permute"}
    assert (len(permuted) == 1) == (v == 1)
    textbook = {x.kind: x.bytes for x in stage_transfers(dataclasses.replace(layout, seq_len=T))}
    found = sum(size * times for size, times in permuted.items())
    assert textbook["collective-permute"] == found
    # The outputs are cut for the loss, its gradients put together: 20 of 18 positions in 4 parts.
    # A tick that does it is one of v; collectives in a conditional count in all.
    assert sent["all-gather", 4 * rows * 20 * width] == v * (M - S) + S
    # Every weight is gathered once and its gradient reduced once, outside of the ticks.
    whole = L // S * 64 * 128 * 4
    assert sent["all-gather", whole] == 5, "q, o, gate, up and down"
    assert all(
        found.times == 1
        for found in collectives(text)
        if found.kind in ("all-reduce", "reduce-scatter") and found.bytes > activation
    )
    assert f"[{L},64,128]" not in text, "no device has all layers"


@pytest.mark.full
def test_gradients_stay_split_over_other_axes():
    """Each device scatters its half of up's columns; XLA would gather the other half first."""
    case = (
        "transformer",
        deep("transformer", sliding_window=7),
        "data=2,pipe=2,model=2",
        "fsdp_pp_tp",
    )
    sent = collectives(compiled(*case).as_text())
    found = [x for x in sent if x.kind == "reduce-scatter"]
    shapes = {shape for x in found for shape in x.shapes}
    assert (L // 2, 64 // 2, 128 // 2) in shapes
    assert (L // 2, 64 // 2, 128) not in shapes


@pytest.mark.full
def test_1f1b_keeps_no_more_for_more_microbatches():
    def grows(schedule: str) -> int:
        sizes = []
        for M in (8, 32):
            config = deep("transformer", pipeline=schedule, pipe_microbatches=M)
            run = compiled("transformer", config, "data=2,pipe=4", "fsdp_pp", rows=2 * M)
            sizes.append(run.memory_analysis().temp_size_in_bytes)
        return sizes[1] - sizes[0]

    assert grows("gpipe") > 24 * (L // 4) * 4 * T * 64, "the inputs of all layers"
    assert abs(grows("1f1b")) < 0.02 * grows("gpipe")


# ---- what users see ----------------------------------------------------------------------------


def test_the_report_says_the_bubble():
    layout = layout_of("transformer", deep("transformer"), "data=2,pipe=4", "")
    assert layout.strategy == "fsdp_pp"
    assert stages(layout, 1) == ["pipeline: 1f1b, 4 stages, 8 microbatches, bubble 27.3%"]
    layout = layout_of("transformer", deep("transformer", **INTERLEAVED), "data=2,pipe=4", "")
    said = "pipeline: interleaved in 2 rounds, 4 stages, 8 microbatches, bubble 15.8%"
    assert stages(layout, 1) == [said]
    assert stages(layout_of("transformer", deep("transformer"), "8", ""), 1) == []


def test_a_stage_boundary_that_cuts_a_period():
    config = deep("transformer", layer_kinds=((5, 1e4, None),) * 3 + ((None, 1e4, None),))
    with pytest.raises(UserError) as caught:
        layout_of("transformer", config, "data=2,pipe=4", "pp")
    assert str(caught.value) == (
        "--mesh=data=2,pipe=4 gives each of 4 stages 2 layers, and a stage boundary would cut their "
        "period of 4; use pipe=2"
    )
    fits = layout_of("transformer", config, "data=4,pipe=2", "pp")
    assert elsewhere(fits, "pp", make_mesh("data=2,pipe=4")) is None


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe", "interleaved"])
def test_a_model_alone_refuses_stages_that_cut_a_period(pipeline):
    """As in a copy of the zoo, without recipes: the layers would run as other kinds."""
    config = deep("transformer", layer_kinds=((5, 1e4, None), (None, 1e4, None)), num_layers=8)
    config = dataclasses.replace(config, pipeline=pipeline, pipe_rounds=4)
    stages = 2 if pipeline == "interleaved" else 8
    rules = zoo_file("transformer").RULES["pp"]
    mesh = jax.sharding.AbstractMesh((1, stages), ("data", "pipe"))
    tokens_BT = jax.ShapeDtypeStruct((4, T), np.int32)

    def output(tokens_BT):
        model = model_of("transformer")(config, rngs=nnx.Rngs(0))
        return model(tokens_BT) if pipeline == "gpipe" else model.loss(tokens_BT, tokens_BT)

    with jax.sharding.use_abstract_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        with pytest.raises(ValueError, match="period"):
            jax.eval_shape(output, tokens_BT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            INTERLEAVED | {"pipe_rounds": 4, "num_layers": 24},
            "--pipe_rounds=4 does not divide the 6 layers of each of 4 stages; use --pipe_rounds=3",
        ),
        (
            INTERLEAVED | UNLIKE,
            "--pipe_rounds=2 does not divide the 2 layers of each of 4 stages into periods of 2; "
            "use --pipeline=1f1b",
        ),
        (
            {"pipe_rounds": 4},
            "--pipe_rounds=4 is for --pipeline=interleaved, and not for 1f1b; leave it out, or use "
            "--pipeline=interleaved",
        ),
    ],
)
def test_rounds_that_do_not_fit(changes, message):
    def check():
        layout = layout_of("transformer", deep("transformer", **changes), "data=2,pipe=4", "pp")
        check_stages(layout, accumulate=1)

    with pytest.raises(UserError) as caught:
        check()
    assert str(caught.value) == message


def test_a_loss_that_compares_outputs_has_no_rounds():
    config = for_another_loss(deep("transformer", **INTERLEAVED, pipe_rounds=4))
    layout = layout_of("transformer", config, "data=2,pipe=4", "pp")
    check_stages(layout, accumulate=1)
    assert stages(layout, 1) == ["pipeline: gpipe, 4 stages, 8 microbatches, bubble 27.3%"]


def test_logits_in_stages():
    """As on one device, of packed rows too."""

    def logits(mesh: str, strategy: str):
        layout = layout_of("transformer", deep("transformer"), mesh, strategy)
        variables = random_variables(layout)
        rows = jax.device_put(batch(), layout.batch_shardings(batch()))

        def run(variables, tokens, segment_ids):
            return layout.model.merge(variables)(tokens, segment_ids)

        given = (variables, rows["tokens"], rows["segment_ids"])
        return np.asarray(layout.compile(run, *given, compiler_options=QUICK)(*given))

    want = logits("1x1", "dp")
    np.testing.assert_allclose(
        logits("data=2,pipe=4", "fsdp_pp"), want, atol=2e-5 * np.abs(want).max()
    )


def test_generation_needs_all_layers():
    layout = layout_of("transformer", deep("transformer"), "data=2,pipe=4", "pp")

    def call(variables, tokens):
        return zoo_cache.prefill(layout.model.merge(variables), tokens, np.ones(B, np.int32), T)

    tokens = layout.abstract_batch(jax.ShapeDtypeStruct((T,), np.int32))
    with pytest.raises(ValueError, match="which can't generate"):
        layout.lower(call, layout.variables(), tokens)
    with pytest.raises(UserError) as caught:
        layout.check_whole("generation")
    assert str(caught.value) == (
        "generation needs all layers on every device, and --mesh=data=2,pipe=4 has them in 4 stages "
        "(rules 'pp'); use --mesh=8"
    )
