"""TPUs' form of products with weights has the gradients that JAX derives."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.prove.compare import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    compare_gradients,
    largest_relative,
)
from tests.conftest import full_except
from tests.support.models import loss_and_gradients
from zoo import layers
from zoo.transformer import Config, Transformer

pytestmark = pytest.mark.promise("meshes-agree")


def train_on(monkeypatch, platform: str, mesh: str, strategy: str):
    """(metrics, gradients, products in TPUs' form) of a step that is compiled as for this platform."""
    products = []

    def recorded(x, w, *settings, **named):
        products.append(w.shape)
        return x_first_tensordot(x, w, *settings, **named)

    x_first_tensordot = layers.x_first_tensordot
    with monkeypatch.context() as patch:
        patch.setattr(layers, "device", lambda: types.SimpleNamespace(platform=platform))
        patch.setattr(layers, "x_first_tensordot", recorded)
        step = loss_and_gradients.__wrapped__  # not the cached one, of another platform
        metrics, grads = step(Transformer, Config.tiny(), mesh, strategy)
    return metrics, grads, products


CASES = [
    ("8", "fsdp"),
    ("4x2", "fsdp_tp_sp"),
    ("data=2,seq=4", "fsdp_cp"),
    ("2x2x2", "hsdp_tp"),
    ("data=4,pipe=2", "fsdp_pp"),
    ("8", "dp"),
    ("8", "zero1"),
]


@pytest.mark.parametrize(("mesh", "strategy"), full_except(CASES, CASES[:2]))
def test_a_step_in_tpus_form_is_that_of_other_devices(mesh, strategy, monkeypatch):
    metrics, grads, products = train_on(monkeypatch, "tpu", mesh, strategy)
    other_metrics, other_grads, none = train_on(monkeypatch, "cpu", mesh, strategy)
    config = Config.tiny()
    assert (config.embed, config.mlp) in products
    assert ((config.mlp, config.embed) in products) == (strategy in ("fsdp_tp_sp", "fsdp_cp"))
    assert not none
    for name, value in metrics.items():
        assert value == pytest.approx(other_metrics[name], rel=LOSS_TOLERANCE), name
    assert largest_relative(compare_gradients(grads, other_grads)) < GRADIENT_TOLERANCE


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "contract", "dims"),
    [
        ((6, 4), (4, 3, 5), 1, "md,dnh->mnh"),
        ((2, 6, 3, 5), (3, 5, 4), 2, "btnh,nhd->btd"),
    ],
)
def test_its_gradients_in_float64(x_shape, w_shape, contract, dims):
    x_dims, w_dims, y_dims = dims.replace("->", ",").split(",")
    with jax.enable_x64():
        random = np.random.default_rng(0)
        x, w = (jnp.asarray(random.normal(size=shape)) for shape in (x_shape, w_shape))
        product = functools.partial(layers.x_first_tensordot, contract=contract, out_sharding=None)
        y, pull = jax.vjp(product, x, w)
        dy = jnp.asarray(random.normal(size=y.shape))
        dx, dw = pull(dy)
        np.testing.assert_allclose(y, np.einsum(dims, x, w), rtol=1e-12)
        np.testing.assert_allclose(dx, np.einsum(f"{y_dims},{w_dims}->{x_dims}", dy, w), rtol=1e-12)
        np.testing.assert_allclose(dw, np.einsum(f"{x_dims},{y_dims}->{w_dims}", x, dy), rtol=1e-12)


@pytest.mark.parametrize("remat", ["full", "dots", "none"])
def test_remat_repeats_as_many_products(remat, monkeypatch):
    """Policies don't see products inside of a custom gradient."""
    config = dataclasses.replace(Config.tiny(), remat=remat)
    graph, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)))
    tokens_BT = np.zeros((2, 16), np.int32)

    def products(platform: str) -> int:
        monkeypatch.setattr(layers, "device", lambda: types.SimpleNamespace(platform=platform))

        def loss(params):
            return nnx.merge(graph, params).loss(tokens_BT, tokens_BT)[0]

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general[")

    assert products("tpu") == products("cpu")
