"""Optimizers and learning-rate schedules by name."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest

from recipes.common import entries
from recipes.common.report.hlo import sent_by_kind
from recipes.common.runtime.flags import SCHEDULES
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.train import muon
from recipes.common.train.optimizer import (
    OPTIMIZERS,
    LearningRate,
    decaying,
    hidden_matrices,
    make_optimizer,
)
from recipes.common.train.state import abstract_state
from recipes.instruments.plan.estimate import abstract_mesh
from recipes.instruments.plan.hardware import parse_devices
from recipes.instruments.plan.textbook import optimizer_transfers, shares
from tests.conftest import full_except
from tests.support.entries import ENTRIES, FAMILY_CASES, FAST
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import assert_bit_equal, records, state_of
from zoo.llama_relatives import SIZES, Transformer

pytestmark = pytest.mark.promise("optimizers")

MESHES = ["8", "4x2", "2x4", "2x2x2"]


def layout_and_optimizer(entry: str, name: str, mesh: str, **options):
    layout = ENTRIES[entry].layout(mesh)
    matrices = hidden_matrices(layout)
    given = {"lr": lambda _: 0.01, "weight_decay": 0.1, "clip_norm": 1.0} | options
    return layout, make_optimizer(name, matrices=matrices, **given)


# ---- sharding of the state ----------------------------------------------------------------------


# Of a family, which matrices there are is new, not how an optimizer treats them.
CASES = [
    (e, name) for e in ENTRIES for name in OPTIMIZERS if e not in FAMILY_CASES or name == "muon"
]


@pytest.mark.parametrize(("entry", "name"), CASES)
def test_optimizer_state_is_sharded_like_its_parameter(entry, name):
    """Covers moments and momenta of every optimizer; anything else is replicated and small."""
    for mesh in MESHES:
        layout, optimizer = layout_and_optimizer(entry, name, mesh)
        abstract = abstract_state(layout, optimizer)
        params, found = paths(abstract["params"]), []
        for path, leaf in paths(abstract["opt_state"]).items():
            _, moment, parameter = path.replace("/nu/", "/mu/").replace("/trace/", "/mu/").partition("/mu/")  # fmt: skip
            if moment:
                assert leaf.shape == params[parameter].shape, path
                assert leaf.sharding == params[parameter].sharding, path
                found.append(parameter)
            else:
                assert leaf.sharding.is_fully_replicated, path
                assert leaf.size <= 3, path
        matrices = paths(hidden_matrices(layout))
        kept = {"adamw": [2, 2], "lion": [1, 1], "sgd": [1, 1], "muon": [2, 1]}[name]
        assert {p: found.count(p) for p in params} == {p: kept[p in matrices] for p in params}


@pytest.mark.parametrize("entry", ENTRIES)
def test_muon_updates_the_reviewed_weights(entry, golden):
    """Records which dims are rows and columns of a matrix; "AdamW" updates all other weights."""
    layout = ENTRIES[entry].layout("1x1")
    matrices = paths(hidden_matrices(layout))
    lines = []
    for path, axes in paths(layout.model.axes["params"]).items():
        who = "AdamW"
        if path in matrices:
            rows, columns = (" · ".join(axes[dim] for dim in dims) for dims in matrices[path])
            who = f"{rows} × {columns}"
        lines.append(f"{path} ({', '.join(axes)}): {who}\n")
    golden(f"{entry}_muon.txt", "".join(lines))


# ---- what it does --------------------------------------------------------------------------------


def test_muon_updates_each_layer_like_optax_updates_a_plain_matrix():
    """On 2x2x2, over two steps: q [L, D, N, H] counts as L matrices D × N·H, o as N·H × D."""
    layout, _ = layout_and_optimizer("transformer", "muon", FAST)
    matrices = hidden_matrices(layout)
    here, weights = lambda tree: tree["layers"]["attention"], {"q": 1, "o": 2}  # dims of rows
    matrices, where = (
        {name: here(tree)[name] for name in weights}
        for tree in (matrices, shardings(layout.variables()["params"]))
    )
    optimizer = make_optimizer("muon", lambda _: 0.01, 0.1, 1e9, matrices)
    shapes, rng = here(layout.model.shapes["params"]), np.random.default_rng(0)
    params, *gradients = (
        {name: rng.standard_normal(shapes[name].shape, np.float32) for name in weights}
        for _ in range(3)
    )

    def move(params, kept, grads):
        updates, kept = optimizer.update(grads, kept, params)
        return optax.apply_updates(params, updates), kept

    moved, grads = jax.device_put((params, gradients[0]), (where, where))
    by_shape = {shapes[name].shape: where[name] for name in weights}
    kept = optimizer.init(params)
    pinned = (where, jax.tree.map(lambda x: by_shape.get(x.shape, layout.replicated), kept))
    kept = jax.device_put(kept, pinned[1])
    step = layout.compile(move, moved, kept, grads, out_shardings=pinned, compiler_options=QUICK)
    for grads in gradients:
        moved, kept = step(moved, kept, jax.device_put(grads, where))
    plain = optax.contrib.muon(0.01, weight_decay=0.1, consistent_rms=0.2)
    update = jax.jit(plain.update, compiler_options=QUICK)
    for name, rows in weights.items():
        layer = [tree[name][1] for tree in (params, *gradients)]
        matrix, *grads = (x.reshape(np.prod(x.shape[:rows]), -1) for x in layer)
        alone = plain.init(matrix)
        for grad in grads:
            updates, alone = update(grad, alone, matrix)
            matrix = optax.apply_updates(matrix, updates)
        got = np.asarray(moved[name])[1].reshape(matrix.shape)
        np.testing.assert_allclose(got, matrix, atol=1e-6, err_msg=name)


# Each name is of matrices, or of vectors, in all entries.
MATRICES = {
    "q",
    "k",
    "v",
    "o",
    "q_down",
    "q_up",
    "dense",
    "token_types",
    "words",
    "text_positions",
    "text_head",
    "kv_down",
    "kv_up",
    "gate",
    "up",
    "down",
    "kernel",
}
MATRICES |= {"table", "projection", "out"}  # of embeddings of layers
MATRICES |= {"decay", "write", "q_kernel", "k_kernel", "v_kernel"}  # of gated delta networks
MATRICES |= {"w1", "w2", "router", "embed", "unembed", "positions", "patch", "head", "a", "b"}
MATRICES |= {"x", "c", "step", "x_kernel", "b_kernel", "c_kernel"}  # of Mamba-2
VECTORS = {"scale", "bias", "q_bias", "k_bias", "v_bias", "o_bias", "up_bias", "gate_bias"}
VECTORS |= {"router_scale", "factor"}
VECTORS |= {"log_rate", "decay_bias", "mlp_gate", "step_bias", "skip"}
VECTORS |= {"x_bias", "b_bias", "c_bias"}
VECTORS |= {"down_bias", "router_bias", "patch_bias", "head_bias", "sinks", "class_token"}
VECTORS |= {"unembed_bias", "probe", "text_head_bias", "log_scale", "score_bias"}


DECAY = [*((e, "adamw") for e in ENTRIES), ("gpt_oss", "lion"), ("gpt_oss", "sgd"), ("vit", "sgd")]


@pytest.mark.parametrize(("entry", "name"), DECAY)
def test_matrices_decay_and_vectors_do_not(entry, name):
    """An update without a gradient moves only what decays, stacked or not."""
    layout = ENTRIES[entry].layout("1x1")
    decays = decaying(layout)
    optimizer = make_optimizer(name, lambda _: 1.0, 0.5, 1.0, decays=decays)
    params = jax.tree.map(lambda _: jnp.ones(()), decays)  # one number of each parameter is enough
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    for path, update in paths(updates).items():
        leaf = path.rpartition("/")[2]
        assert leaf in MATRICES | VECTORS, f"{path} is new: is it of matrices or of vectors?"
        np.testing.assert_array_equal(update, -0.5 if leaf in MATRICES else 0.0, err_msg=path)


def test_adapters_decay():
    config = dataclasses.replace(
        ENTRIES["transformer"].config, lora_rank=2, lora_targets=("q", "o")
    )
    layout = make_layout(Transformer, config, make_mesh("1x1"))
    assert {*paths(decaying(layout)).values()} == {True}


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "vector"),
    [("gpt_oss", "layers/attention/sinks"), ("vit", "class_token")],
)
def test_a_recipe_decays_no_vector(recipe, vector, inside, quick, book, tmp_path):
    """With a learning rate of 1e-4 and a huge decay, only decay moves weights visibly."""
    flags = ["--size=tiny", "--mesh=1x1", "--steps=2", "--warmup_steps=0", "--batch_size=8"]
    flags += ["--learning_rate=1e-4", "--weight_decay=1000", f"--workdir={tmp_path}"]
    flags += [] if recipe == "vit" else ["--seq_len=32", "--sample_bytes=0", book]
    assert inside(f"recipes.{recipe}", *flags, "--checkpoint_every=1").code == 0
    before, after = (state_of(tmp_path, step) for step in (1, 2))
    moved = {
        path: abs(after[path] / before[path] - 1).max()
        for path in (f"params/{vector}", "params/layers/attention/q")
    }
    assert moved[f"params/{vector}"] < 0.01
    assert moved["params/layers/attention/q"] > 0.04


@pytest.mark.parametrize("name", full_except(OPTIMIZERS[1:], []))
def test_an_optimizer_learns_and_resumes_bit_equal(name, inside, quick, tmp_path):
    def train(workdir, *flags):
        done = inside(
            "recipes.mlp", f"--optimizer={name}", "--mesh=2x2", "--embed=16", "--hidden=64", *flags,
            "--depth=1", "--batch_size=64", "--learning_rate=0.005", f"--workdir={workdir}",
            "--warmup_steps=2", "--schedule=wsd", "--checkpoint_every=10", "--log_every=1",
        )  # fmt: skip
        assert (done.code, done.err) == (0, "")

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, "--steps=20", "--keep_checkpoints=2")
    (first, *_, last) = records(whole, "loss")
    assert last < first
    parts.mkdir()
    (parts / "checkpoints").mkdir()
    (whole / "checkpoints" / "10").rename(parts / "checkpoints" / "10")
    train(parts, "--steps=20")
    assert_bit_equal(state_of(parts, 20), state_of(whole, 20))


# ---- schedules -----------------------------------------------------------------------------------


def test_schedules_of_the_learning_rate():
    at = jnp.array([0, 5, 10, 50, 80, 90, 100, 200])
    want = {
        "cosine": [0, 0.5, 1, 0.628, 0.205, 0.127, 0.1, 0.1],
        "linear": [0, 0.5, 1, 0.6, 0.3, 0.2, 0.1, 0.1],
        "wsd": [0, 0.5, 1, 1, 1, 0.55, 0.1, 0.1],
        "constant": [0, 0.5, 1, 1, 1, 1, 1, 1],
    }
    assert set(want) == set(SCHEDULES)
    for schedule, rates in want.items():
        found = jax.jit(LearningRate(1.0, 10, 100, schedule))(at)
        np.testing.assert_allclose(found, rates, atol=6e-4, err_msg=schedule)
        odd = [LearningRate(1.0, 9, steps, schedule) for steps in (0, 1, 9)]
        odd += [LearningRate(1.0, 0, 100, schedule)]
        found = jax.jit(lambda step, odd=odd: [rate(step) for rate in odd])(at)
        assert np.isfinite(found).all(), schedule
        assert found[-1][0] == 1, "no warmup"


# ---- what it sends -------------------------------------------------------------------------------

DEALT = [
    ("transformer", "dp", "8"),
    ("transformer", "zero1", "8"),
    ("transformer", "fsdp", "8"),
    ("transformer", "fsdp_tp", "4x2"),
    ("transformer", "hsdp_tp", "2x2x2"),
    ("transformer", "fsdp_pp", "data=2,pipe=2"),
    ("moe", "fsdp_ep", "data=2,expert=4"),
    ("deepseek", "fsdp_ep", "data=2,expert=4"),
]


@pytest.mark.parametrize(
    ("entry", "strategy", "mesh"), full_except(DEALT, [("moe", "fsdp_ep", "data=2,expert=4")])
)
def test_muon_sends_matrices_once_each_way_and_computes_each_once(entry, strategy, mesh):
    """The bytes are the textbook's, and updates equal those of one device."""
    layout = make_layout(
        entries.model(entry), ENTRIES[entry].config, make_mesh(mesh), strategy, batch_size=8
    )
    matrices = paths(hidden_matrices(layout))
    where = {name: paths(layout.optimizer_shardings())[name] for name in matrices}
    rng = np.random.default_rng(0)
    shapes = paths(layout.model.shapes["params"])
    momenta = {name: rng.standard_normal(shapes[name].shape, np.float32) for name in matrices}

    def update(momenta):
        return muon.orthogonalize(momenta, matrices, jnp.array(muon.COEFFICIENTS))

    sharded = jax.device_put(momenta, where)
    step = layout.compile(update, sharded, out_shardings=where, compiler_options=QUICK)
    sent = sent_by_kind(step.as_text(), layout.mesh.size)
    book = collections.Counter()
    for transfer in optimizer_transfers(layout, "muon"):
        book[transfer.kind] += transfer.bytes
    assert {kind: round(count) for kind, count in sent.items()} == {
        kind: round(count) for kind, count in book.items()
    }
    alone = jax.jit(update, compiler_options=QUICK)(momenta)
    for name, got in step(sharded).items():
        # Five iterations amplify rounding of small singular values by up to 3.4445⁵ = 485.
        np.testing.assert_allclose(got, alone[name], rtol=0, atol=485 * 2**-24, err_msg=name)


def test_matrices_of_layers_in_turn_are_dealt_out_layer_by_layer():
    """124m has 12 layers. In turn, the three of a layer keep three of 16 devices busy."""
    devices = parse_devices("v5p:16")
    mesh = abstract_mesh({"data": 16}, devices)
    layout = make_layout(Transformer, SIZES["124m"](), mesh, "fsdp", batch_size=16)
    q_k_v, o, gate_up_down = 3 * 12, 12, 3 * 12
    assert [*shares(layout).values()] == [-(-n // 16) for n in (q_k_v, o, gate_up_down)]
    assert [*shares(layout, "optimizer").values()] == [12, 12, 12]


@pytest.mark.parametrize(
    "spec", [jax.P(*axes) for axes in ((None,) * 3, (None, "data", None), (None, None, "data"))]
)
def test_devices_share_out_muon_s_matrices(spec):
    """Three matrices on two devices, which hold copies, rows or columns of them."""
    momenta = {"w": np.random.default_rng(0).standard_normal((3, 8, 4), np.float32)}
    coefficients = jnp.array(muon.COEFFICIENTS)

    def orthogonalize(momenta):
        return muon.orthogonalize(momenta, {"w": ((1,), (2,))}, coefficients)

    step = jax.jit(orthogonalize, compiler_options=QUICK)
    wanted = np.asarray(step(momenta)["w"])
    singular = np.linalg.svd(wanted, compute_uv=False) / (0.2 * np.sqrt(8))
    assert (np.abs(singular - 1) < 0.4).all(), "nearly orthogonal, with an RMS of 0.2"
    mesh = make_mesh("2")
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(momenta, jax.NamedSharding(mesh, spec))
        found = step(on_mesh)["w"]
    assert found.sharding.spec == spec
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_muon_equals_that_of_optax():
    """On one device: the same state and updates, over three steps, up to amplified rounding."""
    layout = ENTRIES["transformer"].layout("1x1")
    matrices = hidden_matrices(layout)
    params = jax.tree.map(
        lambda leaf: np.random.default_rng(0).standard_normal(leaf.shape, np.float32),
        layout.model.shapes["params"],
    )
    ours = muon.muon(lambda _: 0.01, 0.1, matrices)
    theirs = optax.contrib.muon(
        lambda _: 0.01, weight_decay=0.1, adam_b2=0.95, consistent_rms=0.2,
        muon_weight_dimension_numbers=matrices,
    )  # fmt: skip
    states = ours.init(params), theirs.init(params)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    rules = [jax.jit(rule.update, compiler_options=QUICK) for rule in (ours, theirs)]
    for _ in range(3):
        params = jax.tree.map(lambda leaf: np.roll(leaf, 1), params)
        results = [rule(params, state, params) for rule, state in zip(rules, states, strict=True)]
        states = [state for _, state in results]
        jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-6, atol=1e-7), *results)
