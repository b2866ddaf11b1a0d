"""recipes.prove: models of a user's own agree on every mesh, and what breaks is found where it is."""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.common.runtime import UserError
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding import make_layout, paths
from recipes.common.sharding.abstract import UNNAMED
from recipes.common.train.feed import to_devices
from recipes.common.train.optimizer import clip
from recipes.common.train.state import abstract_state
from recipes.common.train.update import apply_gradients
from recipes.instruments import user_model
from recipes.instruments.prove import cases
from recipes.instruments.prove import run as prove_run
from recipes.instruments.prove.cases import in_16_bits, prove
from recipes.instruments.prove.comparison import GRADIENT_TOLERANCE, compare_all, compare_gradients
from recipes.instruments.prove.layouts import layouts, reference_layout
from recipes.instruments.prove.precision import prove_precision
from tests.conftest import ROOT, full_except
from tests.support.quick import QUICK
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("prove")

# ---- planted faults ------------------------------------------------------------------------------

DOWN = 'add_bias(multiply(hidden_BTF, self.down, seq="residual_seq"), self.down_bias)'
# A product of split dims, on each device: `after` is what becomes of its partial sums.
PER_DEVICE = """per_device(
    lambda x, w, b: {},
    (hidden_BTF, self.down[...], self.down_bias[...]),
    (("batch", "seq", "mlp"), ("mlp", "act_embed"), ("norm",)),
    ("batch", "residual_seq", "act_embed"), check_vma=False)"""
BIAS = "a bias added on every shard of a partial sum"
# Fault → (file, text, its replacement, module, phase, part of what is next to it).
FAULTS = {
    "a missing reduction": (
        "core/layers", DOWN, PER_DEVICE.format("x @ w + b[None, None]"),
        "layers/mlp", "forward", "shard_map",
    ),
    BIAS: (
        "core/layers", DOWN, PER_DEVICE.format("jax.lax.psum(x @ w + b[None, None], 'model')"),
        "layers/mlp", "backward", "psum over ('model',)",
    ),
    "a mean over a shard instead of the whole": (
        "core/layers", DOWN,
        f"{DOWN} - per_device(lambda x: x.mean(0, keepdims=True), (hidden_BTF,), "
        "((\"batch\", None, \"mlp\"),), (None, None, \"mlp\"), check_vma=False).mean()",
        "layers/mlp", "forward", "shard_map",
    ),
    "dropout with one key per device": (
        "core/layers", DOWN,
        f"per_device(lambda x: x * jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), "
        f"jax.lax.axis_index('data')), 0.9, x.shape).astype(x.dtype), ({DOWN},), "
        "((\"batch\", None, None),))",
        "layers/mlp", "forward", "axis_index",
    ),
    "a norm over a split dim": (
        "core/layers", "variance = jnp.mean(jnp.square(x32), axis=tuple(range(-self.rank, 0)), keepdims=True)",
        "axes = (\"batch\", None, \"heads\", None) if self.rank == 2 else (\"batch\", None, None)\n"
        "        variance = per_device(lambda x: jnp.mean(jnp.square(x), axis=tuple(range(-self.rank, 0)), "
        "keepdims=True), (x32,), (axes,), (\"batch\",), check_vma=False)",
        "layers/attention/q_norm", "forward", "shard_map",
    ),
    "a constraint on the wrong axis": (
        "options/general_attention", "q_BTNH = inputs.rotate(q_BTNH, kind)",
        "from ..core.layers import rotate\n"
        "        from ..core.sharding import per_device\n"
        "        wrong = (\"batch\", \"seq\", None, \"heads\")\n"
        "        q_BTNH = per_device(lambda q, a: rotate(q, a, kind.magnitude), (q_BTNH, "
        "inputs.angles[kind]), (wrong, (None, \"seq\", \"heads\")), wrong, check_vma=False)",
        "layers/attention", "forward", "shard_map",
    ),
}  # fmt: skip


@pytest.fixture
def copied(inside, tmp_path, monkeypatch):
    """Returns a function that imports a file of a copy of an entry, with a text replaced."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(entry: str, file: str = "", text: str = "", replacement: str = ""):
        package = f"copy_{len([*tmp_path.iterdir()])}"
        assert (
            inside("recipes.copy", f"--entry={entry}", f"--target={tmp_path / package}").code == 0
        )
        if file:
            path = tmp_path / package / f"{file}.py"
            before = path.read_text()
            assert text in before
            after = before.replace(text, replacement).replace(
                "    param, ", "    param, per_device, "
            )
            path.write_text(after.replace("mesh_axes, ones", "mesh_axes, per_device, ones"))
        return importlib.import_module(f"{package}.{entry}")

    yield load
    for name in [name for name in sys.modules if name.startswith("copy_")]:
        del sys.modules[name]


@pytest.mark.parametrize("fault", full_except(FAULTS, []))
def test_a_planted_fault_is_located_at_its_module(fault, copied):
    file, text, replacement, module, phase, near = FAULTS[fault]
    mine = copied("llama_relatives", file, text, replacement)
    config = dataclasses.replace(
        mine.Config.tiny(), mlp_bias=True, qk_norm=True, joint_qk_norm=True
    )
    proof = prove(
        lambda: mine.Transformer(config, rngs=nnx.Rngs(0)), None, {"tp": mine.RULES["tp"]},
        meshes=["4x2"],
    )  # fmt: skip
    assert not proof.holds
    (case,) = proof.cases
    assert (case.place.module, case.place.phase) == (module, phase), proof
    # The backward pass reaches the last layer first.
    assert case.place.layer == ((0,) if phase == "forward" else (config.num_layers - 1,))
    (line,) = (x for x in case.place.near if near in x)
    assert f" at {pathlib.Path(file).name}.py:" in line


class Mixing(nnx.Module):
    """x + tanh(x · w), of which each device forgets the other rows: a mean over a shard."""

    def __init__(self, is_wrong: bool, rngs: nnx.Rngs):
        self.w = nnx.Param(
            nnx.initializers.normal(0.1)(rngs.params(), (8, 8)), out_sharding=(None, None)
        )
        self.is_wrong = is_wrong

    def __call__(self, x_BD):
        y_BD = jnp.tanh(x_BD @ self.w[...])
        if not self.is_wrong:
            return x_BD + y_BD
        rows = jax.P("data")
        local = jax.shard_map(lambda y: y - y.mean(0, keepdims=True), in_specs=rows, out_specs=rows)
        return x_BD + local(y_BD)


class Three(nnx.Module):
    def __init__(self, wrong: tuple[int, ...], *, rngs: nnx.Rngs):
        self.first = Mixing(0 in wrong, rngs)
        self.second = Mixing(1 in wrong, rngs)
        self.third = Mixing(2 in wrong, rngs)

    def loss(self, x):
        total = jnp.square(self.third(self.second(self.first(x)))).sum()
        return total, jnp.float32(len(x)), {"loss": (total, jnp.float32(len(x)))}


@pytest.mark.parametrize(
    ("wrong", "named"), full_except([((1,), "second"), ((0, 2), "first")], [((1,), "second")])
)
def test_the_first_module_that_differs_is_named(wrong, named):
    """Those after it differ too. A model as small as one that a user starts with."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    build = functools.partial(Three, wrong)
    proof = prove(
        lambda: build(rngs=nnx.Rngs(0)), None, {"dp": {"batch": "data"}}, batch, meshes=["2"]
    )
    assert not proof.holds
    assert (proof.cases[0].place.module, proof.cases[0].place.phase) == (named, "forward"), proof


@pytest.mark.full
def test_a_copied_entry_agrees_and_nothing_is_located(copied):
    mine = copied("mlp")
    rules = {name: mine.RULES[name] for name in ("dp", "fsdp_tp")}
    proof = prove(lambda: mine.MLP(mine.Config.tiny(), rngs=nnx.Rngs(0)), None, rules, digits())
    assert proof.holds, proof
    assert [(case.strategy, case.mesh) for case in proof.cases] == [
        ("dp", "8"), ("fsdp_tp", "4x2"), ("fsdp_tp", "2x4"),
    ]  # fmt: skip
    for case in proof.cases:
        assert all(len(found) > 0 for found in case.differences.values())
        assert case.place is None
        assert ("all-gather" in case.sent) == (case.strategy == "fsdp_tp")
        assert 1e4 < case.memory < 1e6


def digits() -> dict:
    random = np.random.default_rng(0)
    label = np.where(random.random(24) < 0.2, -1, random.integers(0, 10, 24))
    return {"image": random.normal(size=(24, 64)).astype(np.float32), "label": label}


# ---- the page ------------------------------------------------------------------------------------

PAGE = (ROOT / "recipes" / "docs" / "proving.md").read_text()


def block(marker: str) -> str:
    """The code that follows <!-- marker --> on the page."""
    return PAGE.split(f"<!-- {marker} -->\n```", 1)[1].split("\n", 1)[1].split("```", 1)[0]


@pytest.fixture
def project(tmp_path):
    """A folder outside the clone with the page's files; returns a function that runs commands there."""
    for name in ("model.py", "test_model.py"):
        (tmp_path / name).write_text(block(f"python: proving {name}"))
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def command(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )

    return command


@pytest.mark.full
def test_the_page_s_example_proves_a_model_outside_the_clone(project):
    _, *words = block("command: proving").split()
    done = project(*words, "--json")
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["holds"]
    shown = [line.split() for line in block("output: proving").splitlines()]
    assert [(x["strategy"], x["mesh"]) for x in proof["cases"]] == [
        (strategy, mesh) for strategy, mesh, *_ in shown[1:-1]
    ]
    for case in proof["cases"]:
        kernel = case["differences"]["gradient"]["blocks/0/tokens/up/kernel"]
        assert 0 < kernel["relative"] < GRADIENT_TOLERANCE
        assert 0 < kernel["ulps"] < 100
        assert case["sent"].keys() == {"all-reduce"}


@pytest.mark.full
def test_the_page_s_test_passes_and_fails_when_the_model_breaks(project, tmp_path):
    assert project("-m", "pytest", "-q", "test_model.py").returncode == 0
    file = tmp_path / "model.py"
    broken = """
        def drop(x):  # a key for each device
            key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)

        rows = jax.P("data")
        dropped = jax.shard_map(drop, in_specs=rows, out_specs=rows)
        return dropped(self.down(jax.nn.gelu(self.up(x))))
"""
    text = file.read_text()
    file.write_text(text.replace("        return self.down(jax.nn.gelu(self.up(x)))\n", broken))
    done = project("-m", "pytest", "-q", "test_model.py")
    assert done.returncode == 1
    assert "forward: blocks/0/tokens differs first" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
def test_random_keys_of_a_model_are_part_of_its_state(project, tmp_path):
    file = tmp_path / "model.py"
    text = file.read_text().replace(
        "        self.head =",
        "        self.dropout = nnx.Dropout(0.1, rngs=rngs)\n        self.head =",
    )
    file.write_text(text.replace("self.head(self.norm(x_BPD)", "self.head(self.dropout(x_BPD)"))
    _, *words = block("command: proving").split()
    done = project(*words, "--meshes=4x2", "--json")
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["cases"]
    (counts,) = (
        x
        for path, x in case["differences"]["state"].items()
        if path.startswith("buffers/") and path.endswith("count")
    )
    assert counts["relative"] == 0


# ---- what is wasteful ----------------------------------------------------------------------------


class Wasteful(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.1)
        self.up = nnx.Param(normal(rngs.params(), (32, 64)), out_sharding=("embed", None))
        self.mix = nnx.Param(normal(rngs.params(), (64, 64)))  # whole
        self.down = nnx.Param(normal(rngs.params(), (64, 32)), out_sharding=(None, "embed"))

    def loss(self, x):
        def layer(x, _):
            up = jax.sharding.reshard(self.up[...], jax.P())  # constant
            return x + jnp.tanh(x @ up @ self.mix[...]) @ down, None

        down = jax.sharding.reshard(self.down[...], jax.P())
        x, _ = jax.lax.scan(layer, x, None, length=2)
        total = jnp.square(x - jax.sharding.reshard(x, jax.P()).mean(0)[None]).sum()  # gathered
        return total, jnp.float32(len(x)), {"loss": (total, jnp.float32(len(x)))}


def flat_momentum() -> optax.GradientTransformation:
    """Momentum whose state is one vector for each weight, which no rule splits."""

    def update(grads, state, params=None):
        new = jax.tree.map(lambda m, g: 0.9 * m - 1e-4 * _flat(g), state, grads)
        return jax.tree.map(lambda m, g: _like(m.reshape(g.shape), g), new, grads), new

    return optax.GradientTransformation(lambda params: jax.tree.map(_flat, params), update)


def _flat(x):
    is_on_mesh = not jax.typeof(x).sharding.mesh.empty
    return (jax.sharding.reshard(x, jax.P()) if is_on_mesh else x).reshape(-1)


def _like(x, g):
    return jax.sharding.reshard(x, jax.typeof(g).sharding.spec)


def test_waste_is_reported_with_its_line(named_lines):
    batch = {"x": np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)}
    rules = {"fsdp": {"batch": "data", "embed": "data"}}
    proof = prove(lambda: Wasteful(rngs=nnx.Rngs(0)), None, rules, batch, optimizer=flat_momentum())
    (case,) = proof.cases
    assert case.holds, proof
    lines = pathlib.Path(__file__).read_text().splitlines()
    found: dict[str, list[str]] = {"whole": [], "constant": [], "gathered": [], "": []}
    for warning in case.waste:
        line = lines[int(warning.line.partition(":")[2]) - 1] if warning.line else ""
        found[line.partition("  # ")[2]].append(warning.what)
    if jax.__version_info__ >= (0, 11):  # its compiler doesn't say what a gather of its own is for
        found["gathered"] = [found[""].pop()]
    (whole,), (constant,), (gathered,), others = found.values()
    assert "mix [64, 64], 50%" in whole
    assert "reshard of float32[32@data,64]" in constant
    assert "activations [16, 32]" in gathered
    assert {x.split()[2] for x in others} == {"up", "down"}


def test_ids_beyond_a_vocabulary_are_refused():
    """In training and evaluation by the same check, where a batch goes to the devices."""
    tokens = np.full((8, 4), 383, np.int32)

    def build():
        return Transformer(Config.tiny(), rngs=nnx.Rngs(0))

    layout = make_layout(Transformer, Config.tiny(), make_mesh("8"), "dp", batch_size=8)
    to_devices({"tokens": tokens, "targets": tokens}, layout)
    for name in ("tokens", "targets"):
        batch = {"tokens": tokens, "targets": tokens} | {name: tokens + 1}
        message = f"{name} of a batch have the id 384, and the model's vocabulary has 384 ids"
        with pytest.raises(UserError, match=message):
            prove(build, None, {"dp": {"batch": "data"}}, batch, meshes=["8"])
        with pytest.raises(UserError, match=message):
            to_devices(batch, layout)


# ---- float64 -------------------------------------------------------------------------------------


def test_a_gradient_that_is_zero_but_for_rounding_is_compared_with_all_of_them():
    one = {"q": np.array([3.0, 4.0]), "k_bias": np.array([1e-9, 0.0])}
    for k_bias, relative in ((-1e-9, 2e-9 / 5), (0.5, 0.1)):
        on_mesh = one | {"k_bias": np.array([k_bias, 0.0])}
        compared = compare_gradients(on_mesh, one)
        assert compared["q"].relative == 0
        assert compared["k_bias"].relative == pytest.approx(relative)


class Scaled(nnx.Module):
    """Squares of x · w, whose sum is multiplied by `factor`, and its gradient by `slope` too."""

    def __init__(self, factor: float, slope: float = 1.0, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((16, 8)), out_sharding=(None, None))
        self.factor = factor
        self.slope = slope

    def loss(self, x):
        total = jnp.square(x @ scale_gradient(self.w[...], self.slope)).sum() * self.factor
        return total, jnp.float32(8), {"loss": (total, jnp.float32(8))}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale_gradient(x, slope):
    return x


scale_gradient.defvjp(lambda x, slope: (x, None), lambda slope, _, grad: (grad * slope,))


@pytest.mark.parametrize(
    ("factor", "slope", "words"),
    [
        (np.nan, 1.0, "the metric 'loss' is not finite at step 1"),
        (np.inf, 1.0, "the metric 'loss' is not finite at step 1"),
        (1.0, np.nan, "the gradient of w is not finite at step 1"),
        (1.0, 0.0, "all gradients are zero, so nothing is compared"),
    ],
)
def test_what_compares_nothing_proves_nothing(factor, slope, words):
    batch = {"x": np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)}
    model = functools.partial(Scaled, factor, slope, rngs=nnx.Rngs(0))
    proof = prove(model, None, {"dp": {"batch": "data"}}, batch, meshes=["8"])
    assert not proof.holds
    assert words in str(proof)


def test_a_small_gradient_is_compared_with_itself():
    """Only below a millionth of all gradients is one taken for zero but for rounding."""
    one = {"q": np.array([1.0]), "w": np.array([2e-6]), "b": np.array([5e-7])}
    on_mesh = one | {"w": np.array([3e-6]), "b": np.array([6e-7])}
    found = compare_gradients(on_mesh, one)
    assert found["w"].relative == pytest.approx(0.5)
    assert found["b"].relative == pytest.approx(1e-7)


def test_tolerances_are_those_of_float32():
    assert cases.TOLERANCES == {
        "initial": 0, "loss": 2e-6, "metrics": 2e-6, "gradient": 2e-6, "state": 2e-5, "restore": 0,
    }  # fmt: skip


def test_devices_get_unequal_numbers_of_targets():
    """Else a mean of each device's mean would be the mean of all."""
    model = nnx.eval_shape(lambda: Transformer(Config.tiny(), rngs=nnx.Rngs(0)))
    counts_B = (user_model.text_batch(model, model.loss)["targets"] >= 0).sum(axis=1)
    for devices in (2, 4, 8):
        assert len({*counts_B.reshape(devices, -1).sum(axis=1)}) > devices / 2


# ---- faults in a model of a user's size ----------------------------------------------------------

VOCAB, WIDTH, HIDDEN = 2048, 256, 512
SMALL = 1e-5  # scale of a branch's output, and so of the gradients of its weights
LOCAL_MEAN = "a mean of local means"
NO_SUM = "a missing psum"
LOST = "a gradient without the part of a device"
LOST_SMALL = "such a gradient, which is a few millionths of all"


class Sized(nnx.Module):
    """A language model of residual branches; the last one is scaled down, as by LayerScale."""

    def __init__(self, fault: str, *, rngs: nnx.Rngs):
        def matrix(*shape, axes):
            values = jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5
            return nnx.Param(values, out_sharding=axes)

        self.fault = fault
        self.config = types.SimpleNamespace(vocab_size=VOCAB)
        self.embed = matrix(VOCAB, WIDTH, axes=(None, None))
        self.up = matrix(4, WIDTH, HIDDEN, axes=(None, None, "hidden"))
        self.down = matrix(4, HIDDEN, WIDTH, axes=(None, "hidden", None))
        self.small = matrix(WIDTH, WIDTH, axes=(None, None))
        self.head = matrix(WIDTH, VOCAB, axes=(None, None))

    def loss(self, tokens, targets):
        rows = jax.P("data")
        per_device = functools.partial(jax.shard_map, check_vma=False)
        project = per_device(
            self.project, in_specs=(jax.P("data", None, "model"), jax.P("model")), out_specs=rows
        )
        x_BTD = self.embed[...][tokens]
        for layer in range(4):
            past_BTD = x_BTD.cumsum(axis=1) / jnp.arange(1, x_BTD.shape[1] + 1)[None, :, None]
            x_BTD += project(jax.nn.gelu(past_BTD @ self.up[layer]), self.down[layer])
        branch = per_device(self.branch, in_specs=(rows, jax.P()), out_specs=rows)
        x_BTD += SMALL * branch(x_BTD, self.small[...])
        logs_BTV = jax.nn.log_softmax(x_BTD @ self.head[...])
        nats_BT = -(logs_BTV * jax.nn.one_hot(targets, VOCAB)).sum(axis=-1)
        mean = per_device(self.mean, in_specs=(rows, rows), out_specs=jax.P())
        return mean(nats_BT, targets)

    def project(self, hidden_BTF, down_FD):
        y_BTD = hidden_BTF @ lose_last(down_FD, self.fault == LOST)
        return y_BTD if self.fault == NO_SUM else jax.lax.psum(y_BTD, "model")

    def branch(self, x_BTD, small_DD):
        return jnp.tanh(x_BTD @ lose_last(small_DD, self.fault == LOST_SMALL))

    def mean(self, nats_BT, targets_BT):
        total, count = nats_BT.sum(), (targets_BT >= 0).sum()
        if self.fault == LOCAL_MEAN:
            return jax.lax.pmean(total / count, "data")
        return jax.lax.psum(total, "data") / jax.lax.psum(count, "data")


def lose_last(w, is_lost: bool):
    """A weight without the gradient from the last of four devices along `data`."""
    is_last = jax.lax.axis_index("data") == 3
    return jnp.where(is_last, jax.lax.stop_gradient(w), w) if is_lost else w


@pytest.fixture(scope="module")
def sized():
    """Returns a function of a fault: the case of the model on 4x2; one device is right in all."""
    rules = {"tp": {"batch": "data", "hidden": "model"}}

    def faulty_model(fault: str):
        return user_model.make_user_model(
            lambda: Sized(fault, rngs=nnx.Rngs(0)), None, rules, None, prove_run.OPTIMIZER
        )

    def layout(fault: str):
        return layouts(faulty_model(fault), [make_mesh("4x2")], auto=True)[0]["tp", "4x2"]

    reference = cases.Reference(reference_layout([layout("")]), faulty_model(""))

    def prove_fault(fault: str) -> cases.Case:
        batch = reference.user_model.batch
        on_mesh = layout(fault)
        abstract = abstract_state(on_mesh, reference.optimizer)
        row = {name: x[0] for name, x in batch.items()}
        step = prove_run.compile_step(on_mesh, reference.optimizer, row, **QUICK)
        initial = reference.training.initial
        training = prove_run.train(on_mesh, step, initial, abstract, [batch] * prove_run.STEPS)
        return cases.Case("tp", "4x2", cases.compare_runs(training, reference.training))

    return prove_fault


@pytest.mark.full
def test_a_model_of_a_user_s_size_holds(sized):
    case = sized("")
    assert case.holds, case.beyond
    assert {x.relative > 0 for x in case.differences["gradient"].values()} == {True}


WRONG = {LOCAL_MEAN: "down", NO_SUM: "down", LOST: "down", LOST_SMALL: "small"}


@pytest.mark.parametrize("fault", full_except(WRONG, [LOST_SMALL]))
def test_a_fault_in_a_model_of_a_user_s_size_is_caught(fault, sized):
    case = sized(fault)
    assert not case.holds
    assert case.beyond["gradient"][WRONG[fault]].relative > 0.05
    if fault == LOST_SMALL:
        assert case.beyond["gradient"].keys() == {"small"}
        assert case.differences["loss"]["loss"].relative < 2e-6, "no loss tells"


def test_no_cases_prove_nothing():
    assert not cases.Proof((), ()).holds


def test_computed_numbers_that_are_not_finite_differ():
    nan = {"w": np.array([1.0, np.nan], np.float32)}
    assert compare_all(nan, nan)["w"].relative == np.inf, "computed twice"
    assert compare_all(nan, nan, is_copy=True)["w"].relative == 0, "restored"
    infinite = {"w": np.array([1.0, np.inf], np.float32)}
    assert compare_gradients(infinite, infinite)["w"].relative == np.inf
    large = {"w": np.full(4, 1e30, np.float32)}
    assert compare_all({"w": large["w"] * 2}, large)["w"].relative == pytest.approx(1)


def test_the_state_of_every_weight_is_compared():
    """One whose gradient is zero too, as no optimizer moves it."""
    grads = {"bias": np.zeros(2), "up_bias": np.ones(2)}
    state = {"params": {name: np.ones(2) for name in grads}}

    def ran(up_bias: float) -> prove_run.Training:
        changed = {"params": state["params"] | {"up_bias": np.full(2, up_bias)}}
        return prove_run.Training(state, [{"loss": 1.0}], [grads], changed)

    found = cases.compare_runs(ran(2.0), ran(1.0))["state"]
    relative = {path: x.relative for path, x in found.items()}
    assert relative == {"params/bias": 0.0, "params/up_bias": 1.0}


class Normed(nnx.Module):
    """Two products; BatchNorm subtracts what the first one's bias adds, whose gradient is zero."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(12, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 4, rngs=rngs)

    def loss(self, x, y):
        return jnp.square(self.down(jax.nn.relu(self.norm(self.up(x)))) - y).mean()


def test_a_gradient_that_is_zero_moves_nothing():
    """The running mean follows the bias, which Adam would move by a step of rounding's sign."""
    random = np.random.default_rng(0)
    batch = {
        name: random.normal(size=(16, n)).astype(np.float32)
        for name, n in {"x": 12, "y": 4}.items()
    }
    build = lambda: Normed(rngs=nnx.Rngs(0))  # noqa: E731
    proof = prove(build, None, {"batch": "data"}, batch, ["8"], auto=True)
    assert proof.holds, proof
    (case,) = proof.cases
    state = case.differences["state"]
    assert state["params/up/bias"].relative == 0, "compared, and not moved"
    assert state["buffers/norm/mean"].relative < 1e-6
    assert 0 < state["params/up/kernel"].relative < 1e-6


@pytest.mark.full
def test_float64_tells_rounding_from_error(copied, monkeypatch):
    """With a tolerance below rounding, all models differ; float64 tells which of them are wrong."""
    monkeypatch.setitem(cases.TOLERANCES, "gradient", 1e-9)

    def proven(mine) -> cases.Case:
        config = dataclasses.replace(mine.Config.tiny(), mlp_bias=True)
        rules = {"tp": mine.RULES["tp"]}
        build = functools.partial(mine.Transformer, config)
        (case,) = prove(
            lambda: build(rngs=nnx.Rngs(0)), None, rules, meshes=["4x2"], x64=True
        ).cases
        assert case.beyond
        return case

    right, wrong = (
        proven(copied("llama_relatives")),
        proven(copied("llama_relatives", *FAULTS[BIAS][:3])),
    )
    assert right.is_rounding
    assert right.holds
    assert wrong.float64 > 1e-3
    assert not wrong.holds
    fixed = "x32 = x.astype(jnp.float32)"
    narrow = proven(copied("llama_relatives", "core/layers", fixed, 'x32 = x.astype("float32")'))
    assert narrow.float64 is None
    assert "computes in float32 at layers.py:" in narrow.note


# ---- mistakes ------------------------------------------------------------------------------------

FILE = """
import numpy as np
from flax import nnx
from model import *

TYPO = {"batch": "data", "hiden": "model"}
NUMBERS = {"dp": {"batch": 4}}

def short():
    return batch() | {"label": np.zeros(3, int)}

def renamed():
    return {"pictures": batch()["patches"]}

def narrow():
    return batch() | {"patches": np.zeros((16, 16, 5), np.float32)}

def odd():
    return {name: x[:15] for name, x in batch().items()}

def pair(model, patches, label):
    return loss(model, patches, label), {}

def named(model, patches, label):
    return {"loss": loss(model, patches, label)}

def nothing(model, patches, label):
    loss(model, patches, label)

def missing():
    raise FileNotFoundError("no pictures here")

class Plain:
    def __init__(self, *, rngs):
        pass

class Empty(nnx.Module):
    def __init__(self, *, rngs):
        pass

class Broken(Mixer):
    def __init__(self, *, rngs):
        raise ValueError("no width")
"""
MODEL = "--model=model.py:Mixer --loss=model.py:loss --auto "
PAIR = "--model=model.py:Mixer --batch=model.py:batch --auto "
MISTAKES = {
    "": "no model is named",
    "--model=model.py": "is not FILE.py:NAME",
    "--model=none.py:Mixer": "there is no file none.py",
    "--model=model.py:mixer": "model.py has no 'mixer'; it has Mixer",
    "--model=model.py:Nope": "model.py has no 'Nope'; it has ",
    "--model=file.py:Empty --rules=model.py:RULES": "Empty has no variables, so there is nothing to train",
    "--model=model.py:Mixer --dtype=bfloat16 --x64": "--x64 with float64; leave one of them out",
    "--model=model.py:Mixer --batch_size=4": "--batch_size=4 is for --dtype, and there is none",
    "--model=model.py:Mixer --seq_len=4": "--seq_len=4 is for --dtype, and there is none",
    "--model=model.py:Mixer --auto": "has no method loss",
    "--model=model.py:Mixer --config=tiny": "has no class Config",
    MODEL: "only a batch of tokens and targets can be made",
    MODEL + "--batch=file.py:short": "different numbers of rows (patches [16, 16, 12], label [3])",
    MODEL + "--batch=file.py:renamed": "name the arrays like its parameters",
    MODEL + "--batch=file.py:narrow": "one device can't compute the loss of the batch",
    MODEL + "--batch=file.py:missing": "--batch=file.py:missing failed (no pictures here); fix",
    MODEL + "--batch=file.py:TYPO": "--batch=file.py:TYPO is of type dict; name a function",
    "--model=model.py:RULES": "--model=model.py:RULES is of type dict; name a function or a class",
    "--model=model.py:Mixer --batch=model.py:batch --loss=model.py:RULES": "--loss=model.py:RULES is",
    "--model=file.py:Plain --rules=model.py:RULES": "the model is of type Plain; use an nnx.Module",
    "--model=file.py:Broken --rules=model.py:RULES": "the model can't be built (no width); fix it",
    MODEL
    + "--batch=file.py:odd": "a batch of 15 is not divisible by the 8 shards of 'batch' (rules 'dp' "
    "on --meshes=8); try a batch of 16",
    PAIR
    + "--loss=file.py:pair": "the loss returns a tuple (array, dict); return a mean, or a sum, a count",
    PAIR + "--loss=file.py:named": "the loss returns a dict; return a mean, or a sum, a count",
    PAIR
    + "--loss=file.py:nothing": "the loss returns a NoneType; return a mean, or a sum, a count",
    MODEL
    + "--batch=model.py:batch --rules=file.py:TYPO": "'hiden', which rules name; did you mean 'hidden'?",
    MODEL + "--batch=model.py:batch --rules=file.py:NUMBERS": "map 'batch' to 4",
    MODEL + "--batch=model.py:batch --meshes=2x2x2": "no mesh has just the axes",
    MODEL + "--batch=model.py:batch --meshes=4by2": "is not a mesh",
    MODEL + "--batch=model.py:batch --meshes=1": "--meshes=1 has one device, with which others are",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line(command, inside, project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "file.py").write_text(FILE)
    for name in ("file", "model"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported is forgotten
        monkeypatch.delitem(sys.modules, name)
    done = inside("recipes.prove", *command.split())
    assert done.code == 2, done.out + done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert MISTAKES[command] in done.err
    assert done.out == ""


# ---- 16 bits -------------------------------------------------------------------------------------


class Tied(nnx.Module):
    """A language model of Flax's own modules, whose table embeds and unembeds."""

    def __init__(self, exact: bool):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(256, 32, dtype=jnp.bfloat16, rngs=rngs)
        self.layer = nnx.Linear(32, 32, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.exact = exact

    def loss(self, tokens, targets):
        table_VD = self.embed.embedding[...]
        if self.exact:  # one-hot rows: a matmul adds them up
            dtype = self.embed.dtype
            x_BTD = jax.nn.one_hot(tokens, 256, dtype=dtype) @ table_VD.astype(dtype)
        else:
            x_BTD = self.embed(tokens)  # the planted line
        logits_BTV = self.embed.attend(x_BTD + self.layer(x_BTD)).astype(jnp.float32)
        picked_BTV = jax.nn.one_hot(targets, 256) * jax.nn.log_softmax(logits_BTV)
        return -picked_BTV.sum(axis=-1).mean()


def test_a_line_that_adds_up_in_16_bits_is_named():
    share = 1 / (1 + np.arange(256))  # words of a text
    window = np.random.default_rng(0).choice(256, (32, 513), p=share / share.sum())
    batch = {"tokens": window[:, :-1].astype(np.int32), "targets": window[:, 1:].astype(np.int32)}

    def proven(exact: bool):
        return prove_precision(
            lambda: Tied(exact), None, {"batch": "data"}, batch, ["8"], auto=True, batch_size=64
        )

    wrong, right = proven(exact=False), proven(exact=True)
    lines = pathlib.Path(__file__).read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if text.endswith("# the planted line"))
    (found,) = wrong.sums
    assert not wrong.holds
    assert found[0::2] == ("scatter-add", 64 * 512)
    assert found.line == f"test_prove.py:{line}"
    ((path, where, error),) = wrong.beyond()
    assert (path, where) == ("embed/embedding", "one device")
    assert f"{path}: {error:.1%} on one device; test_prove.py:{line}: scatter-add" in str(
        wrong.lines()
    )
    assert right.holds, right.lines()
    assert right.sums == ()


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    dtype: str = "float32"


class Table(nnx.Module):
    """States its dtype in a config, or not at all: then that of its parameters counts."""

    def __init__(self, config: Format | None):
        self.config = config
        self.rows = nnx.Param(jax.random.normal(jax.random.key(0), (4, 32)))

    def loss(self, tokens):
        dtype = self.config.dtype if self.config else self.rows.dtype
        x_BTD = self.rows[...].astype(dtype)[tokens]
        return jnp.square(x_BTD.astype(jnp.float32)).mean()


@pytest.mark.parametrize("config", full_except([None, Format()], [None]))
def test_a_model_computes_in_the_dtype_of_its_config_or_parameters(config):
    batch = {"tokens": np.zeros((8, 1024), np.int32)}
    precision = prove_precision(
        lambda: Table(config), None, {"batch": "data"}, batch, ["8"], auto=True
    )
    (found,) = precision.sums
    assert (found.what, found.terms) == ("scatter-add", 8 * 1024)
    assert precision.errors["one device"]["rows"] > 0.5
    assert len(precision.errors) == 2


# ---- models of another make ----------------------------------------------------------------------


class Half(nnx.Module):
    """A layer with parameters in 16 bits."""

    def __init__(self, *, rngs: nnx.Rngs):
        names = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(8, 16, param_dtype=jnp.bfloat16, kernel_init=names, rngs=rngs)

    def loss(self, x, y):
        return jnp.mean((self.up(x).astype(jnp.float32) - y) ** 2)


class OwnStack(nnx.Module):
    """Layers stacked by Flax's own transforms, with a bias that has no names."""

    def __init__(self, *, rngs: nnx.Rngs):
        class Layer(nnx.Module):
            def __init__(self, *, rngs: nnx.Rngs):
                names = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
                self.linear = nnx.Linear(16, 16, kernel_init=names, rngs=rngs)

        stacked = {nnx.PARTITION_NAME: "layers"}
        make = nnx.vmap(lambda rngs: Layer(rngs=rngs), transform_metadata=stacked)
        self.layers = make(rngs.split(3))

    def loss(self, x, y):
        run = nnx.scan(
            lambda layer, x: jnp.tanh(layer.linear(x)),
            in_axes=(0, nnx.Carry), out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )  # fmt: skip
        return jnp.mean((run(self.layers, x) - y) ** 2)


OWN_RULES = {"batch": "data", "mlp": "model"}


def rows(width: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(8, width)).astype(np.float32),
        "y": np.ones((8, 16), np.float32),
    }


def test_a_step_keeps_the_dtypes_of_a_state():
    own = user_model.make_user_model(lambda: Half(rngs=nnx.Rngs(0)), None, OWN_RULES, rows(8))
    pairs, _ = layouts(own, [make_mesh("4x2")], auto=True)
    layout = reference_layout(pairs.values())
    before = abstract_state(layout, prove_run.OPTIMIZER)
    grads = jax.tree.map(lambda x: x.update(dtype=jnp.float32), before["params"])
    assert {x.dtype for x in jax.tree.leaves(before["params"])} == {jnp.dtype(jnp.bfloat16)}
    with layout.trace():
        after = jax.eval_shape(
            lambda state, grads: apply_gradients(prove_run.OPTIMIZER, layout, state, grads),
            before, grads,
        )  # fmt: skip
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, before)


def test_names_that_flax_s_own_transforms_put_on_are_taken_off_again():
    """Names of ours on unnamed dims made Flax refuse the scan."""
    own = user_model.make_user_model(lambda: OwnStack(rngs=nnx.Rngs(0)), None, OWN_RULES, rows(16))
    pairs, _ = layouts(own, [make_mesh("4x2")], auto=True)
    layout = reference_layout(pairs.values())
    axes = {x.split("/")[-1]: names for x, names in paths(layout.model.axes["params"]).items()}
    assert axes == {"kernel": ("layers", "embed", "mlp"), "bias": (UNNAMED, UNNAMED)}
    prove_run.trace_loss(layout, layout.model, own.batch)


@pytest.mark.full
@pytest.mark.parametrize(("model", "width"), [(Half, 8), (OwnStack, 16)])
def test_models_of_another_make_agree_on_every_mesh(model, width):
    build, mesh = lambda: model(rngs=nnx.Rngs(0)), make_mesh("4x2")
    assert prove(build, None, OWN_RULES, rows(width), [mesh], auto=True).holds


def test_gradients_in_16_bits_are_clipped_in_16_bits():
    """A loss whose count is a whole number leaves them so."""
    grads = {"w": jnp.full(8, 4.0, jnp.bfloat16), "v": jnp.full(8, 3.0)}
    after, _ = clip(1.0).update(grads, clip(1.0).init(grads))
    assert [after[name].dtype for name in grads] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(optax.tree.norm(after), 1.0, rtol=2**-8)


def test_parameters_in_16_bits_are_named_beside_a_difference():
    own = user_model.make_user_model(lambda: Half(rngs=nnx.Rngs(0)), None, OWN_RULES, rows(8))
    pairs, _ = layouts(own, [make_mesh("4x2")], auto=True)
    assert in_16_bits(next(iter(pairs.values()))).startswith(
        "parameters in 16 bits (up/bias and 1 more)"
    )


def test_what_only_auto_axes_take_is_said():
    with pytest.raises(
        UserError, match=r"one device can't compute the loss .* use auto axes \(--auto\)"
    ):
        prove(lambda: OwnStack(rngs=nnx.Rngs(0)), None, OWN_RULES, rows(16), ["4x2"])
