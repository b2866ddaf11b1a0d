"""describe: the recipes' report for modules that are not from the zoo."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recipes.common.mesh import make_mesh
from recipes.common.report import report
from recipes.common.report.describe import describe
from recipes.common.runtime import UserError
from recipes.common.sharding import make_layout
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.state import abstract_state
from zoo.llama_relatives import RULES, Config, Transformer

pytestmark = pytest.mark.promise("own-rules")

EMBED, HIDDEN = 16, 32
OWN_RULES = {"embed": "data", "hidden": "model"}


class Own(nnx.Module):
    """Two products, a bias without logical axes, a buffer, and dropout with its random state."""

    def __init__(self, *, rngs: nnx.Rngs):
        def weight(*shape: int, axes: tuple[str, str]) -> nnx.Param:
            value = jnp.full(shape, 0.1)
            return nnx.Param(value, out_sharding=axes, eager_sharding=False)

        self.up = weight(EMBED, HIDDEN, axes=("embed", "hidden"))
        self.down = weight(HIDDEN, EMBED, axes=("hidden", "embed"))
        self.bias = nnx.Param(jnp.zeros(EMBED))
        self.seen = nnx.BatchStat(jnp.zeros(EMBED))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        return jax.nn.relu(x_BD @ self.up[...]) @ self.down[...] + self.bias[...]


def build() -> Own:
    return Own(rngs=nnx.Rngs(0))


def table_of(text: str) -> dict[str, list[str]]:
    """The rows of a report's table: variable → the other columns."""
    rows = [line.split("  ") for line in text.splitlines() if line.endswith("B") and "×" in line]
    return {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}


def test_a_module_of_ones_own_is_described_as_it_would_be_sharded():
    mesh = make_mesh("4x2")
    text = describe(nnx.eval_shape(build), OWN_RULES, mesh)
    assert text.splitlines()[0].startswith("mesh 4x2 (data 4 × model 2) · rules (yours) · 8 sim")
    size = f"{EMBED * HIDDEN * 4 // 8} B"
    assert table_of(text) == {
        "up": [f"{EMBED}×{HIDDEN}", "float32", "embed hidden", "(data, model)", size],
        "down": [f"{HIDDEN}×{EMBED}", "float32", "hidden embed", "(model, data)", size],
    }
    held = report.size((2 * EMBED * HIDDEN // 8 + EMBED) * 4)
    *_, total = text.splitlines()
    assert total == (
        f"{2 * EMBED * HIDDEN + EMBED:,} parameters. Per device: parameters {held}, gradients {held}, "
        f"other variables {EMBED * 4} B."
    )
    pairs = tuple(OWN_RULES.items())  # as nnx.logical_axis_rules takes them
    assert describe(nnx.state(nnx.eval_shape(build)), pairs, mesh) == text


def test_a_compiled_step_of_ones_own_is_described(quick_options):
    """Data parallelism of a mean loss sends one sum of all gradients, and the loss."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    graph, params, rest = nnx.split(build(), nnx.Param, ...)
    params = jax.device_put(params, whole)
    rest = jax.device_put(rest, whole)
    x_BD = jax.device_put(jnp.ones((16, EMBED)), rows)

    def gradients(params, x_BD):
        return jax.grad(lambda p: (nnx.merge(graph, p, rest)(x_BD) ** 2).mean())(params)

    compiled = jax.jit(gradients, compiler_options=quick_options).lower(params, x_BD).compile()
    text = describe(params, {}, mesh, compiled)
    count = 2 * EMBED * HIDDEN + EMBED
    ((kind, (_, sent)),) = report.totals(compiled).items()
    assert kind == "all-reduce"
    assert sent == count * 4
    assert text.splitlines()[-1].endswith(f"all-reduce of {report.size(count * 4)}.")
    assert "unused" not in text, "the batch uses the axis, though no rule does"
    assert "No rule names these logical axes, so each device holds all of them: " in text
    assert (
        "embed (of down), hidden (of down)" in text or "hidden (of down), embed (of down)" in text
    )


@pytest.fixture
def quick_options():
    return {"xla_backend_optimization_level": 0}


def test_an_array_that_lies_otherwise_is_named():
    mesh = make_mesh("4x2")
    state = jax.device_put(nnx.state(build(), nnx.Param), NamedSharding(mesh, P()))
    text = describe(state, OWN_RULES, mesh)
    assert table_of(text)["up"][-1] == f"{EMBED * HIDDEN * 4 / 1000:.1f} kB", "as it lies: whole"
    line = "Not as the rules say: up lies as (), and its axes (embed, hidden) make (data, model)."
    assert line in text.splitlines()
    specs = {"up": P("data", "model"), "down": P("model", "data"), "bias": P()}
    moved = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, NamedSharding(mesh, specs[path[0].key])), state
    )
    assert "Not as the rules say" not in describe(moved, OWN_RULES, mesh)


def test_an_entry_has_the_rows_that_a_recipe_prints():
    layout = make_layout(Transformer, Config.tiny(), make_mesh("4x2"), "fsdp_tp", batch_size=16)
    state = abstract_state(layout, adamw(LearningRate(1e-3, 1, 10), 0.1, 1.0))
    own = describe(nnx.eval_shape(layout.build), RULES["fsdp_tp"], layout.mesh)
    assert table_of(own) == table_of(report.table(layout, state)) != {}


@pytest.mark.parametrize(
    ("rules", "shape", "message"),
    [
        (OWN_RULES | {"hidden": "modl"}, (4, 2), "the rules split 'hidden' of down over mesh axis 'modl', and the mesh has 'data', 'model'; use one of these, or None"),
        ({"embed": "data", "hidden": "data"}, (4, 2), "the rules split two dims of down (hidden, embed) over mesh axis 'data'; give one of them another mesh axis, or None"),
        ({"hidden": ("data", "model")}, (3, 1), "the rules split dim 'hidden' of down [32, 16] over 3 devices, and 32 is not divisible by 3; change the mesh or the dim"),
    ],
    ids=["no such mesh axis", "twice", "not divisible"],
)  # fmt: skip
def test_rules_that_do_not_fit_are_one_sentence(rules, shape, message):
    devices = jax.devices()[: math.prod(shape)]
    mesh = jax.make_mesh(shape, ("data", "model"), devices=devices)
    with pytest.raises(UserError) as error:
        describe(nnx.eval_shape(build), rules, mesh)
    assert str(error.value) == message
