"""Products of rounded numbers and their gradients match a plain numpy definition."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.instruments.plan.hardware import HARDWARE
from tests.conftest import full_except
from tests.support.models import built
from tests.support.quick import QUICK
from zoo import llama_relatives as transformer
from zoo import moe
from zoo.core.attention import make_inputs
from zoo.core.layers import multiply
from zoo.core.sharding import param
from zoo.core.strategies import DECODER
from zoo.experts.expert_strategies import EXPERT_DECODER
from zoo.experts.mixture import GatedExperts
from zoo.options import quantization
from zoo.options.lora import Adapter
from zoo.options.low_precision import store
from zoo.options.quantization import Product, has_float8, multiply_rounded

pytestmark = pytest.mark.promise("low-precision")

TYPES = {  # of weights and activations, and of gradients: (numpy's dtype, its largest number)
    "int8": [(np.int8, 127)] * 2,
    "fp8": [(ml_dtypes.float8_e4m3fn, 448), (ml_dtypes.float8_e5m2, 57_344)],
}


def rounded(x: np.ndarray, axis, dtype, most) -> np.ndarray:
    """Returns x as a rounded number times its scale, in float64."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(axis, keepdims=True) / np.float32(most)
    scale = np.where(scale, scale, 1)
    x = x / scale
    x = np.round(x) if dtype == np.int8 else x
    return x.astype(dtype).astype(np.float64) * scale


def reference(matmul: str, backward: str, x, w, grad, whole=None):
    """x[M, K] · w[K, N]: (product, gradient of x, gradient of w).

    A scale along a contracted dim is part of the gradient when that is rounded. The scales' constants,
    such as 127, matter there only to bfloat16.

    Args:
      whole: (x, grad) of all rows that share the scales of the gradient's columns.
    """
    numbers, gradients = TYPES[matmul]
    x_r, w_r = rounded(x, 1, *numbers), rounded(w, 0, *numbers)

    def scale(x, axis):
        largest = np.abs(x).max(axis, keepdims=True)
        return np.where(largest, largest, 1) / np.float32(numbers[1])

    def of_gradient(x, axis):
        x = x.astype(np.float32)
        if backward:
            return x.astype(ml_dtypes.bfloat16).astype(np.float64)
        return rounded(x, axis, *gradients)

    dx = of_gradient(grad * scale(w, 0), 1) @ (w_r / scale(w, 0)).T
    every_x, every_grad = whole or (x, grad)
    rows = of_gradient(every_grad * scale(every_x, 1), 0)
    own = rows if whole is None else rows[[np.flatnonzero((every_x == row).all(1))[0] for row in x]]
    return x_r @ w_r, dx, (x_r / scale(x, 1)).T @ own


class OneWeight(nnx.Module):
    """A weight with the axes of a layer's, and an adapter."""

    def __init__(self, shape, axes, lora: int = 0):
        rngs = nnx.Rngs(0)
        self.w = param(rngs, shape, axes, 1.0)
        self.lora = nnx.Dict()
        if lora:
            config = dataclasses.replace(transformer.Config.tiny(), lora_rank=lora)
            self.lora["w"] = Adapter(self.w, 1, config, rngs=rngs)


def config(matmul: str, backward: str = ""):
    return dataclasses.replace(transformer.Config.tiny(), matmul=matmul, matmul_backward=backward)


def product_and_gradients(module, x, grad, contract, **how):
    """Through layers.multiply, as in a model's layer."""

    @jax.jit
    def run(module, x):
        def product(module, x):
            used = config(**how).use_layer(module, DECODER)
            return multiply(x, used.w, contract)

        y, pull = jax.vjp(product, module, x)
        dmodule, dx = pull(grad)
        return y, dx, dmodule.w[...]

    return [np.asarray(a) for a in run(module, x)]


CASES = [("int8", ""), ("int8", "bfloat16"), ("fp8", ""), ("fp8", "bfloat16")]


ALONE, SPLIT = ("1x1", "dp"), ("2x4", "fsdp_tp")


@pytest.mark.parametrize(
    ("matmul", "backward", "contract", "mesh", "strategy"),
    full_except(
        [(*case, contract, *on) for case in CASES for contract in (1, 2) for on in (ALONE, SPLIT)],
        [
            ("int8", "", 1, *ALONE),
            ("fp8", "", 1, *ALONE),
            ("fp8", "bfloat16", 2, *ALONE),
            ("int8", "", 1, *SPLIT),
            ("fp8", "", 2, *SPLIT),
        ],
    ),
)
def test_values_and_gradients_are_those_of_a_plain_definition(
    matmul, backward, contract, mesh, strategy
):
    """Scales are the same on any mesh: each device's largest numbers are all devices'."""
    shape, axes = {
        1: ((24, 4, 6), ("embed", "heads", "head_dim")),
        2: ((4, 6, 24), ("heads", "head_dim", "embed")),
    }[contract]
    module, random = OneWeight(shape, axes), np.random.default_rng(0)
    inner, outer = shape[:contract], shape[contract:]
    x = random.standard_normal((2, 5, *inner)).astype(np.float32)
    x *= np.exp(2 * random.standard_normal((2, 5, *[1] * contract)))  # rows of unlike size
    x[1, 3] = 0  # divides by no zero
    grad = (1e-4 * random.standard_normal((2, 5, *outer))).astype(np.float32)
    rules = tuple(transformer.RULES[strategy].items())
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(rules):
        found = product_and_gradients(module, x, grad, contract, matmul=matmul, backward=backward)
    K, N = np.prod(inner), np.prod(outer)
    w = np.asarray(module.w[...]).reshape(K, N)
    wanted = reference(matmul, backward, x.reshape(10, K), w, grad.reshape(10, N))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            got.reshape(want.shape), want, rtol=0, atol=2e-6 * abs(want).max()
        )
    exact = x.reshape(10, K) @ w  # and the rounding is there
    error = np.linalg.norm(found[0].reshape(10, N) - exact) / np.linalg.norm(exact)
    assert {"int8": 0.005, "fp8": 0.02}[matmul] < error < {"int8": 0.02, "fp8": 0.06}[matmul]


@pytest.mark.parametrize(
    ("matmul", "dropless"),
    full_except(itertools.product(["int8", "fp8"], [False, True]), [("int8", False)]),
)
def test_experts_are_multiplied_alike(matmul, dropless):
    """Dropless, all experts share the scales of a column of the gradient."""
    E, M, K, N = 3, 5, 16, 8
    random = np.random.default_rng(1)
    x, w, grad = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((E, M, K), (E, K, N), (E, M, N))
    )
    how = Product(matmul, "", (), (), ((),) * 3, (), shapes=(w.shape, (K,), (N,)))
    sizes = jnp.full(E, M, jnp.int32) if dropless else None
    shape = (lambda a: (E * M, a.shape[-1])) if dropless else np.shape
    rows = jnp.reshape(x, shape(x))
    of_weights, of_rows, _ = quantization.FORMATS[matmul]
    q, q_scale = quantization.quantize(jnp.asarray(w), (1,), of_weights)
    x_q, x_scale = quantization.quantize(rows, (-1,), of_rows)

    def run(rows, w):
        return multiply_rounded(how, rows, w, x_q, x_scale, q, q_scale, sizes)

    @jax.jit
    def with_gradients(rows, w, grad):
        y, pull = jax.vjp(run, rows, w)
        return y, *pull(grad)

    found = with_gradients(rows, w, jnp.reshape(grad, shape(grad)))
    whole = (x.reshape(-1, K), grad.reshape(-1, N)) if dropless else None
    for e in range(E):
        wanted = reference(matmul, "", x[e], w[e], grad[e], whole)
        for got, want in zip(found, wanted, strict=True):
            got = np.reshape(got, (E, *want.shape))[e]
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * abs(want).max())


def unlike(*shape: int) -> np.ndarray:
    """Random numbers whose size differs from place to place along each dim but the last."""
    random = np.random.default_rng(0)
    sizes = [
        np.exp(2 * random.standard_normal([n if i == dim else 1 for i in range(len(shape))]))
        for dim, n in enumerate(shape)
    ]
    return (random.standard_normal(shape) * math.prod(sizes)).astype(np.float32)


@pytest.mark.parametrize(("mesh", "strategy"), [("1x1", "dp"), ("2x4", "fsdp_tp_sp")])
@pytest.mark.parametrize("contract", [1, 2])
def test_a_row_and_a_column_have_scales_of_their_own(contract, mesh, strategy):
    """Each the largest number along what a product contracts, and no more, on all devices."""
    shape, axes = {
        1: ((24, 4, 6), ("embed", "heads", "head_dim")),
        2: ((4, 6, 24), ("heads", "head_dim", "embed")),
    }[contract]
    x, w = unlike(4, 8, *shape[:contract]), unlike(*shape)
    module = OneWeight(shape, axes)
    module.w[...] = jnp.asarray(w)

    @jax.jit
    def scales(module, x):
        weight = config("int8").use_layer(module, DECODER).w
        rounded = weight.round_input(x, contract)
        q, scale = weight.rounded(*range(contract))
        return (rounded.q, rounded.scale), (q, scale)

    rules = tuple(transformer.RULES[strategy].items())
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(rules):
        found = jax.device_get(scales(module, x))
    contracted = (tuple(range(2, 2 + contract)), tuple(range(contract)))
    for (q, scale), exact, dims in zip(found, (x, w), contracted, strict=True):
        wanted = np.abs(exact).max(axis=dims, keepdims=True) / np.float32(127)
        assert scale.shape == wanted.shape
        np.testing.assert_allclose(scale, wanted, rtol=1e-6)
        assert (np.abs(q.astype(int)).max(axis=dims) == 127).all()


@pytest.mark.parametrize(
    ("mesh", "strategy", "capacity"),
    full_except(
        [
            *(("1x1", "dp", capacity) for capacity in (4.0, None)),
            *(("data=1,expert=2", "ep", capacity) for capacity in (4.0, None)),
            *(("data=2,expert=2", "fsdp_ep", capacity) for capacity in (4.0, None)),
        ],
        [("data=1,expert=2", "ep", 4.0), ("data=1,expert=2", "ep", None)],
    ),
)
def test_an_expert_s_gradients_are_rounded_by_its_own_rows(mesh, strategy, capacity):
    """In slots and batches: experts whose gradients are 1e-4 of another's, on the next device, keep theirs.

    With a scale of all devices' rows, these would all be rounded to zero.
    """
    E, D, F = 2, 16, 8
    tiny = moe.Config.tiny()
    exact, rounded = (
        dataclasses.replace(
            tiny, embed=D, mlp=F, num_experts=E, experts_per_token=2, capacity=capacity,
            normalize=False, matmul=matmul,
        )
        for matmul in ("", "int8")
    )  # fmt: skip
    experts = built(GatedExperts, exact, biased=False, normalize=False)
    random = np.random.default_rng(0)
    x_BTD, grad_BTD = (random.standard_normal((4, 8, D)).astype(np.float32) for _ in range(2))
    # The first input makes a softmax of (1, 1e-4) of all logits.
    x_BTD[..., 0] = 1
    experts.router[...] = jnp.zeros((D, E)).at[0].set(jnp.log(jnp.array([1.0, 1e-4])))
    graph, state = nnx.split(experts)

    def gradients(config):
        @functools.partial(jax.jit, compiler_options=QUICK)
        def run(state, x_BTD):
            def output(state):
                module = nnx.merge(graph, state)
                module.config = config
                module = config.use_layer(module, EXPERT_DECODER)
                positions = make_inputs(config, jnp.zeros((4, 8), jnp.int32))
                return module(x_BTD, positions)[0]

            (found,) = jax.vjp(output, state)[1](grad_BTD)
            return {name: found[name][...] for name in ("gate", "up", "down")}

        return jax.device_get(run(state, x_BTD))

    wanted = gradients(exact)
    rules = tuple(moe.RULES[strategy].items())
    with jax.set_mesh(make_mesh(mesh)), nnx.logical_axis_rules(rules):
        found = gradients(rounded)
    for name, gradient in wanted.items():
        for e in range(E):
            error = np.linalg.norm(found[name][e] - gradient[e]) / np.linalg.norm(gradient[e])
            assert 1e-3 < error < 0.05, (name, e, error)


def test_what_is_not_a_number_stays_none():
    """A run stops on such a loss, so rounding must not hide it."""
    module = OneWeight((8, 4), ("embed", "mlp"))
    x = np.ones((1, 3, 8), np.float32)
    x[0, 1, 2] = np.nan
    y, _, _ = product_and_gradients(module, x, np.ones((1, 3, 4), np.float32), 1, matmul="int8")
    assert np.isnan(y[0, 1]).all()
    assert np.isfinite(y[0, [0, 2]]).all()


@pytest.mark.full
def test_adapters_stay_exact():
    module = OneWeight((16, 8), ("embed", "mlp"), lora=2)
    module.w[...] = jnp.zeros((16, 8))
    module.lora["w"].b[...] = jnp.ones((2, 8))
    x = np.random.default_rng(0).standard_normal((1, 3, 16)).astype(np.float32)

    def run(matmul):
        with_adapters = dataclasses.replace(config(matmul), lora_rank=2)
        return multiply(x, with_adapters.use_layer(module, DECODER).w)

    np.testing.assert_array_equal(run("int8"), run(""))
    assert abs(run("")).max() > 0


@pytest.mark.full
def test_stored_weights_give_the_rounded_weights_product():
    model = built(transformer.Transformer, transformer.Config.tiny())
    exact = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    rounded_too = nnx.clone(model)
    stored = store(model, DECODER.in_use)
    stored.config = config("int8_weights")
    found = paths(nnx.to_pure_dict(nnx.state(stored)))
    for name, contracted in {"attention/q": (1,), "attention/o": (1, 2), "mlp/down": (1,)}.items():
        w = found[f"layers/{name}"]
        assert w.dtype == np.int8
        module, leaf = name.split("/")
        kept = rounded(exact["layers"][module][leaf], contracted, np.int8, 127)
        scale = np.expand_dims(found[f"layers/{name}_scale"], contracted)
        np.testing.assert_allclose(w * scale, kept, rtol=1e-6)
    assert found["embed"].dtype == found["layers/mlp_norm/scale"].dtype == np.float32
    whole = nnx.to_pure_dict(nnx.state(rounded_too))
    for path, w in found.items():
        if f"{path}_scale" in found:
            *modules, leaf = path.split("/")
            inside = functools.reduce(lambda tree, key: tree[key], modules, whole)
            kept = tuple(range(1, 3 if leaf == "o" else 2))
            inside[leaf] = w * np.expand_dims(found[f"{path}_scale"], kept)
    state = nnx.state(rounded_too)
    nnx.replace_by_pure_dict(state, whole)
    nnx.update(rounded_too, state)
    tokens = np.random.default_rng(0).integers(0, 257, (2, 9))
    np.testing.assert_allclose(stored(tokens), rounded_too(tokens), atol=2e-5)


def test_devices_with_float8_are_those_with_a_rate():
    for hardware in HARDWARE.values():
        assert has_float8(hardware.name) == (hardware.float8 > 0), hardware.name
    assert not any(map(has_float8, ("NVIDIA A10", "NVIDIA A30", "TPU v4", "AMD Instinct MI300X")))
    assert all(map(has_float8, ("NVIDIA L4", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090")))


# ---- a library that rounds likewise ---------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("matmul", ["int8", "fp8"])
def test_products_and_gradients_are_those_of_qwix(matmul, monkeypatch):
    """Bit for bit, if int8's largest number is qwix's 127.5 instead of 127."""
    from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

    monkeypatch.setitem(quantization.FORMATS, "int8", ((jnp.int8, 127.5),) * 3)
    weights, rows, gradients = quantization.FORMATS[matmul]
    kinds = {"lhs_qtype": rows[0], "rhs_qtype": weights[0]}
    kinds |= {"dlhs_grad_qtype": gradients[0], "drhs_grad_qtype": gradients[0]}

    def theirs(x, w):
        return dot_general_qt(x, w, (((2,), (0,)), ((), ())), DotGeneralQtConfig(**kinds))

    def ours(x, w):
        q, scale = quantization.quantize(jax.lax.stop_gradient(w)[None], (1,), weights)
        rounded = quantization.quantize(jax.lax.stop_gradient(x), (-1,), rows)
        how = Product(matmul, "", (), (), ((),) * 2, (), shapes=(w.shape, w.shape[:1], w.shape[1:]))
        return multiply_rounded(how, x, w, *rounded, q, scale)

    random, (B, T, K, N) = np.random.default_rng(0), (2, 16, 128, 96)
    x_BTK, w_KN, grad_BTN = (
        jnp.asarray(random.standard_normal(shape, np.float32))
        for shape in ((B, T, K), (K, N), (B, T, N))
    )
    x_BTK *= np.exp(random.standard_normal((B, T, 1), np.float32))  # rows of unlike size
    results = []
    for function in (theirs, ours):
        y, pull = jax.vjp(function, x_BTK, w_KN)
        results.append((y, *pull(grad_BTN)))
    jax.tree.map(np.testing.assert_array_equal, *results)
