"""Sums in bfloat16: nothing but matmuls, residual streams and collectives adds up in 16 bits."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Jaxpr

from recipes.common import entries
from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from recipes.common.train.state import abstract_state
from recipes.common.train.step import gradients
from recipes.instruments.prove.comparison import difference
from recipes.instruments.prove.source import bodies
from recipes.instruments.prove.sums import Sum, low_precision_sums
from tests.conftest import ROOT, full_except
from tests.support.entries import ENTRIES, OPTIMIZER
from tests.support.models import multiplying
from zoo.core import layers, vocabulary
from zoo.core.strategies import DECODER
from zoo.llama_relatives import RULES, Config
from zoo.options import cache as zoo_cache
from zoo.options import log_probs as zoo_log_probs

pytestmark = pytest.mark.promise("precision")

# ---- the lines of a traced program ---------------------------------------------------------------

# At these sizes, every sum over rows, positions, chunks or heads has more than FEW terms.
ROWS, SEQ_LEN, CHUNK = 64, 512, 16
FEW = 4
MESHES = {"fsdp": "8", "fsdp_tp_sp": "4x2", "fsdp_cp": "data=2,seq=4"}
MESHES |= {"fsdp_ep": "data=2,expert=4", "fsdp_pp": "data=4,pipe=2"}
# Entry → the strategies to trace besides one device.
SHARDED = {
    "transformer": ("fsdp", "fsdp_tp_sp", "fsdp_cp", "fsdp_pp"),
    "moe": ("fsdp_ep", "fsdp_pp"),
    "gpt2": ("fsdp_pp",),
    "deepseek": ("fsdp_ep",),
    "qwen3_next": ("fsdp_cp",),
    "hybrid": ("fsdp_cp",),
}
# Entry, strategy, fields of its Config.
OPTIONS = [
    ("transformer", "", "matmul=int8"),
    ("transformer", "", "lora_rank=4"),
    ("transformer", "", "remat=none"),
    ("transformer", "fsdp_pp", "pipeline=gpipe"),
    ("transformer", "fsdp_pp", "pipeline=interleaved,num_layers=4"),
    ("moe", "", "matmul=fp8,matmul_backward=bfloat16"),
    ("moe", "", "capacity=1.5"),
    ("moe", "fsdp_ep", "capacity=none"),  # rows travel, in turns
    ("gemma4", "", "num_layers=24,shared_layers=16,layer_embed=8"),
    ("gpt_oss", "", "matmul=int8"),
    ("deepseek", "", "mtp_depth=1"),
    ("vit", "", "matmul=int8"),
    ("siglip", "", "clip=true,loss=softmax"),
]


def tracing_cases():
    for name, entry in ENTRIES.items():
        if "dtype" in vars(entry.config):  # others are float32 alone
            yield name, "1x1", ""
            yield from ((name, MESHES[x], x) for x in SHARDED.get(name, ()))
    for name, strategy, options in OPTIONS:
        yield name, MESHES.get(strategy, "1x1"), f"{strategy}:{options}"


def read_capacity(text: str) -> float | None:
    return None if text == "none" else float(text)


def traced(name: str, mesh: str, strategy: str, microbatches: int = 1, of=gradients) -> Jaxpr:
    """The program of an entry's gradient; strategy: its name, then options of its Config.

    Args:
      of: (layout, state, batch, microbatches) → what is computed in place of the gradient.
    """
    entry = ENTRIES[name]
    strategy, _, text = strategy.partition(":")
    sizes = {"loss_chunk": CHUNK, "max_positions": SEQ_LEN}
    sizes = {field: size for field, size in sizes.items() if field in vars(entry.config)}
    options = dict(option.split("=") for option in text.split(",") if option)
    kinds = {field: type(getattr(entry.config, field)) for field in options}
    options = {
        field: read_capacity(value) if field == "capacity" else kinds[field](value)
        for field, value in options.items()
    }
    config = dataclasses.replace(entry.config, dtype="bfloat16", **sizes, **options)
    model = entries.model(name)
    layout = make_layout(model, config, make_mesh(mesh), strategy, batch_size=ROWS)
    example = jax.tree.map(lambda x: x[0], entry.batches[0])
    if "tokens" in example:
        names = ("tokens", "targets", "segment_ids") if "targets" in example else ("tokens",)
        tokens = {key: np.zeros(SEQ_LEN, np.int32) for key in names}
        example = tokens if "targets" in example else example | tokens
    step = functools.partial(of, layout, microbatches=microbatches)
    state = abstract_state(layout, OPTIMIZER)
    with layout.trace():
        program = jax.jit(lambda state, batch: step(state, batch)).trace(
            state, layout.abstract_batch(example)
        )
    return program.jaxpr.jaxpr


def traced_sums(name: str, mesh: str, strategy: str, **options) -> list[Sum]:
    """The sums in 16 bits of an entry's gradient; arguments as of `traced`."""
    found = low_precision_sums(traced(name, mesh, strategy, **options), ROOT / "zoo", FEW)
    # Gradients of one array from a few places, such as q, k and v, are added one by one.
    return [x for x in found if x.what != "add_any" or x.most_terms > 16]


@pytest.mark.parametrize(
    ("entry", "mesh", "strategy"),
    full_except(tracing_cases(), [("transformer", "1x1", ""), ("gpt2", "1x1", "")]),
)
def test_no_line_of_an_entry_adds_up_in_16_bits(entry, mesh, strategy):
    assert traced_sums(entry, mesh, strategy) == []


@pytest.mark.full
def test_products_of_groups_add_up_in_float32():
    with multiplying(grouped=True):
        assert traced_sums("moe", MESHES["fsdp_ep"], "fsdp_ep:capacity=none") == []


def gradient_of_log_probs(layout, state, batch, microbatches):
    def total(params):
        return zoo_log_probs.log_probs(layout.model.merge({"params": params}), **batch).sum()

    return jax.grad(total)(state["params"])


def next_logits(layout, state, batch, microbatches):
    """Logits of the second token that a model generates."""
    model = layout.model.merge({kind: state[kind] for kind in layout.model.shapes})
    tokens_BT = batch["tokens"]
    B, T = tokens_BT.shape
    _, cache = zoo_cache.prefill(model, tokens_BT, jnp.full(B, T), slots=2 * T)
    return zoo_cache.decode(model, tokens_BT[:, 0], cache)[0]


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    full_except([("1x1", ""), ("8", "fsdp"), ("data=4,pipe=2", "fsdp_pp")], [("1x1", "")]),
)
def test_log_probs_add_up_in_float32(mesh, strategy):
    assert traced_sums("transformer", mesh, strategy, of=gradient_of_log_probs) == []


@pytest.mark.parametrize(
    "entry",
    full_except(["transformer", "gemma3", "gpt_oss", "deepseek", "qwen3_next"], ["transformer"]),
)
def test_generation_adds_up_in_float32(entry):
    assert traced_sums(entry, "1x1", "", of=next_logits) == []


@pytest.mark.full
def test_microbatches_add_up_in_float32():
    assert traced_sums("transformer", "8", "fsdp", microbatches=4) == []


BF16 = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)


def scatter(x):
    return jnp.zeros((8, 512), x.dtype).at[jnp.zeros(64, jnp.int32)].add(x)


def loop(x):
    return jax.lax.scan(lambda total, row: (total + jnp.tanh(row), None), x[0], x)[0]


def loop_whose_end_depends_on_data(x):
    def body(carry):
        n, total = carry
        return n + 1, total + jnp.tanh(x[n])

    end = (x > 0).sum()
    return jax.lax.while_loop(lambda carry: carry[0] < end, body, (0, x[0]))[1]


def decayed_loop(x):
    def body(total, row):
        return jax.jit(lambda a, b: a * jnp.exp(b) + b)(total, row), None

    return jax.lax.scan(body, x[0], x)[0]


def reduction(x):
    return jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None)


def weight_of_a_loop(x):
    """A scan sums the gradient of what it closes over."""
    total = lambda w: jax.lax.scan(lambda y, row: (y * w + row, None), x[0], x)[0].sum()  # noqa: E731
    return jax.grad(total)(x[1])


def many_uses(x):
    return jax.grad(lambda w: sum((w * row).astype(jnp.float32).sum() for row in x))(x[0])


def residual_stream(x):
    return jax.lax.scan(lambda x, _: (x + jnp.tanh(x), None), x, None, length=64)[0]


def its_gradient(x):
    return jax.grad(lambda x: residual_stream(x).astype(jnp.float32).sum())(x)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (scatter, "scatter-add"),
        (loop, "loop"),
        (decayed_loop, "loop"),
        (loop_whose_end_depends_on_data, "loop"),
        (reduction, "reduce_sum"),
        (weight_of_a_loop, "loop"),
        (many_uses, "add_any"),
        (lambda x: jnp.cumsum(x, axis=0), "cumsum"),
        (residual_stream, ""),
        (its_gradient, ""),
        (lambda x: x.T @ x, ""),
        (lambda x: x.sum(axis=0), ""),  # jnp's sum is in float32
        (lambda x: scatter(x.astype(jnp.float32)), ""),
        (lambda x: loop(x.astype(jnp.float32)), ""),
        (lambda x: loop_whose_end_depends_on_data(x.astype(jnp.float32)), ""),
    ],
)
def test_the_tracer_finds_each_kind_of_sum(function, what):
    found = low_precision_sums(jax.make_jaxpr(function)(BF16).jaxpr, ROOT / "tests" / "zoo")
    terms = None if function is loop_whose_end_depends_on_data else 64
    assert [(x.what, x.terms) for x in found] == ([(what, terms)] if what else [])
    assert all(x.line.startswith("test_precision.py:") for x in found)


# ---- what the sums lose --------------------------------------------------------------------------

EXACT = 2.0**-8  # the rounding of one number to bfloat16


def rounded(x) -> jax.Array:
    return jnp.asarray(x, jnp.float32).astype(jnp.bfloat16)


@pytest.mark.parametrize("size", [8, 2**15 + 8])  # fewer rows of a table than tokens, and more
def test_a_token_may_occur_thousands_of_times(size):
    tokens_BT = np.arange(2**15).reshape(64, 512) % 7 * (np.arange(512) % 4 > 0)
    table_RVD = rounded(np.ones((1, size, 16)))
    grad_BTD = rounded(np.random.default_rng(0).normal(1, 1, (64, 512, 16)))
    _, pull = jax.vjp(lambda table: vocabulary.look_up(table, jnp.asarray(tokens_BT)), table_RVD)
    exact_VD = np.zeros((size, 16))
    np.add.at(exact_VD, tokens_BT, np.asarray(grad_BTD, np.float64))
    assert difference(np.asarray(pull(grad_BTD)[0], np.float64)[0], exact_VD) < EXACT


def test_a_bias_is_added_thousands_of_times():
    bias = layers.zeros((16,), ("norm",))
    grad_BTD = rounded(np.random.default_rng(0).normal(1, 1, (64, 512, 16)))
    _, pull = jax.vjp(
        lambda b: layers.add_bias(jnp.zeros_like(grad_BTD), bias.replace(b)), bias[...]
    )
    exact_D = np.asarray(grad_BTD, np.float64).sum(axis=(0, 1))
    assert difference(np.asarray(pull(grad_BTD)[0], np.float64), exact_D) < 1e-5


def loss_error(positions: int, chunk: int) -> float:
    """The relative error of the gradient of a table that unembeds rows of bfloat16."""
    config = dataclasses.replace(Config.tiny(), vocab_size=384, loss_chunk=chunk)
    random = np.random.default_rng(0)
    share = 1 / (1 + np.arange(384))  # Zipf's law
    targets_BT = jnp.asarray(random.choice(384, (1, positions), p=share / share.sum()))
    x_BTD = rounded(random.normal(size=(1, positions, 64)))
    table_RVD = rounded(random.normal(0, 1 / 8, (1, 384, 64)))

    @jax.jit
    def gradient(x_BTD, table_RVD):
        mean = lambda table: vocabulary.cross_entropy(x_BTD, table, targets_BT, config)[0]  # noqa: E731
        return jax.grad(mean)(table_RVD)

    found = gradient(x_BTD, table_RVD).astype(jnp.float32)
    exact = gradient(x_BTD.astype(jnp.float32), table_RVD.astype(jnp.float32))
    return difference(np.asarray(found), np.asarray(exact))


@pytest.mark.parametrize("positions", full_except([8_192, 131_072], [8_192]))
def test_the_loss_of_many_chunks_is_as_exact_as_that_of_one(positions):
    errors = [loss_error(positions, chunk=positions // chunks) for chunks in (1, 32, 512)]
    assert max(errors) < EXACT, errors
    assert max(errors) < 1.25 * errors[0], errors


# ---- sums over devices ---------------------------------------------------------------------------


def splits(array: Any, dims: Iterable[int], axis: str) -> bool:
    """Whether a mesh axis splits one of these dims of an array."""
    names = [array.sharding.spec[dim] for dim in dims]
    return any(axis in (name if isinstance(name, tuple) else (name,)) for name in names)


def dtypes_added(jaxpr: Jaxpr, axis: str) -> set[str]:
    """The dtypes in which devices along a mesh axis add up: products and sums over dims that it
    splits, and collectives.
    """
    found = set()
    for eqn in jaxpr.eqns:
        params = eqn.params
        match eqn.primitive.name:
            case "psum" | "psum_invariant":
                adds = axis in params["axes"]
            case "dot_general":
                adds = splits(eqn.invars[0].aval, params["dimension_numbers"][0][0], axis)
            case "reduce_sum":
                adds = splits(eqn.invars[0].aval, params["axes"], axis)
            case _:
                adds = False
        if adds:
            out: Any = eqn.outvars[0].aval
            found.add(str(out.dtype))
        found = found.union(*(dtypes_added(body, axis) for body in bodies(eqn)))
    return found


@pytest.mark.parametrize(
    ("entry", "strategy"),
    full_except(
        [
            *((name, "fsdp") for name in ("transformer", "gpt2", "vit", "siglip", "bert")),
            *((name, "fsdp_ep") for name in ("moe", "deepseek")),
        ],
        [("transformer", "fsdp")],
    ),
)
def test_reduce_dtype_is_that_of_all_sums_over_devices(entry, strategy):
    mesh = MESHES[strategy]
    assert dtypes_added(traced(entry, mesh, strategy), "data") >= {"bfloat16"}
    exact = traced(entry, mesh, f"{strategy}:reduce_dtype=float32")
    assert dtypes_added(exact, "data") == {"float32", "int32"}


class OneWeight(nnx.Module):
    def __init__(self):
        self.w = layers.param(nnx.Rngs(0), (64, 32), ("embed", "mlp"), 1.0)


def product_and_gradient(reduce_dtype: str):
    """(product, gradient of the weight, its definition in float64) on eight devices in bfloat16."""
    config = dataclasses.replace(Config.tiny(), dtype="bfloat16", reduce_dtype=reduce_dtype)
    random = np.random.default_rng(0)
    x_BTD = rounded(random.normal(size=(64, 16, 64)))
    grad_BTF = rounded(random.normal(size=(64, 16, 32)))

    @jax.jit
    def run(module, x_BTD, grad_BTF):
        def product(module):
            used = config.use_layer(module, DECODER)
            return layers.multiply(x_BTD, used.w)

        y_BTF, pull = jax.vjp(product, module)
        return y_BTF, pull(grad_BTF)[0].w[...]

    with (
        jax.set_mesh(make_mesh("8")),
        nnx.logical_axis_rules(tuple(RULES["fsdp"].items())),
    ):
        rows = jax.NamedSharding(make_mesh("8"), jax.P("data"))
        x_BTD, grad_BTF = jax.device_put((x_BTD, grad_BTF), rows)
        y_BTF, found = jax.device_get(run(OneWeight(), x_BTD, grad_BTF))
    exact = np.einsum("BTD,BTF->DF", *(np.asarray(x, np.float64) for x in (x_BTD, grad_BTF)))
    return y_BTF, found.astype(float), exact


def test_reduce_dtype_changes_the_gradient_alone():
    short, found, exact = product_and_gradient("")
    assert difference(found, exact) > EXACT / 4
    wide, found, exact = product_and_gradient("float32")
    assert difference(found, exact) < 1e-6
    np.testing.assert_array_equal(short, wide)


def test_the_docs_say_what_a_ring_in_bfloat16_loses():
    """Each device of a ring adds its term to the sum that it receives, and passes it on in bfloat16."""
    random = np.random.default_rng(0)
    cells = []
    for devices in (8, 64, 256):
        terms = random.normal(size=(devices, 10_000)).astype(jnp.bfloat16)
        total = functools.reduce(np.add, terms)  # numpy rounds each sum
        cells.append(f"{difference(total.astype(float), terms.astype(float).sum(axis=0)):.1%}")
    page = (ROOT / "recipes" / "docs" / "precision.md").read_text()
    assert f"| a ring's sum in bfloat16 | {' | '.join(cells)} |" in page
