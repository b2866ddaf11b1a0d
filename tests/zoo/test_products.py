"""TPUs' form of products with weights has the gradients that JAX derives."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.prove.compare import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    compare_gradients,
    largest_relative,
)
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support.models import random_variables
from tests.support.quick import QUICK
from zoo import layers
from zoo.transformer import Config, Transformer

pytestmark = pytest.mark.promise("meshes-agree")

ROWS, T = 8, 16


def train_on(monkeypatch, platform: str, mesh: str, strategy: str):
    """(metrics, gradients, products in TPUs' form) of a step that is compiled as for this platform."""
    products = []

    def multiply_rows(x, w, out_sharding):
        products.append(w.shape)
        return layers_multiply_rows(x, w, out_sharding)

    layers_multiply_rows = layers.multiply_rows
    random = np.random.default_rng(0)
    batch = {
        "tokens": random.integers(0, 257, (ROWS, T), np.int32),
        "targets": random.integers(-1, 257, (ROWS, T), np.int32),
    }
    layout = make_layout(Transformer, Config.tiny(), make_mesh(mesh), strategy, batch_size=ROWS)

    def run(variables, batch):
        grads, _, metrics = gradients(layout, variables, batch, 1)
        return metrics, grads

    with monkeypatch.context() as patch:
        patch.setattr(layers, "device", lambda: types.SimpleNamespace(platform=platform))
        patch.setattr(layers, "multiply_rows", multiply_rows)
        example = dict.fromkeys(batch, jax.ShapeDtypeStruct((T,), np.int32))
        arguments = layout.variables(), layout.abstract_batch(example)
        step = layout.compile(run, *arguments, compiler_options=QUICK)
    placed = jax.device_put(batch, layout.batch_shardings(batch))
    metrics, grads = jax.device_get(step(random_variables(layout), placed))
    return metrics, paths(grads), products


CASES = [
    ("8", "fsdp"),
    ("2x2x2", "hsdp_tp"),
    ("data=4,pipe=2", "fsdp_pp"),
    ("8", "dp"),
    ("8", "zero1"),
]


@pytest.mark.parametrize(("mesh", "strategy"), full_except(CASES, CASES[:1]))
def test_a_step_in_tpus_form_is_that_of_other_devices(mesh, strategy, monkeypatch):
    metrics, grads, products = train_on(monkeypatch, "tpu", mesh, strategy)
    other_metrics, other_grads, none = train_on(monkeypatch, "cpu", mesh, strategy)
    config = Config.tiny()
    assert {(config.embed, config.mlp), (config.embed, config.num_heads, config.head_dim)} <= {
        *products
    }
    assert not none
    for name, value in metrics.items():
        assert value == pytest.approx(other_metrics[name], rel=LOSS_TOLERANCE), name
    assert largest_relative(compare_gradients(grads, other_grads)) < GRADIENT_TOLERANCE


def test_its_gradients_in_float64():
    with jax.enable_x64():
        random = np.random.default_rng(0)
        x, w, dy = (jnp.asarray(random.normal(size=s)) for s in ((6, 4), (4, 3, 5), (6, 3, 5)))
        y, pull = jax.vjp(lambda x, w: layers.multiply_rows(x, w, None), x, w)
        np.testing.assert_allclose(y, np.einsum("md,dnh->mnh", x, w), rtol=1e-13)
        dx, dw = pull(dy)
        np.testing.assert_allclose(dx, np.einsum("mnh,dnh->md", dy, w), rtol=1e-13)
        np.testing.assert_allclose(dw, np.einsum("md,mnh->dnh", x, dy), rtol=1e-13)
