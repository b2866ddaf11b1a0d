"""Values of a model's variables for tests that compute with them, without compiling an initialization."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, Tree, make_layout, shardings
from recipes.common.train.step import gradients
from tests.support.quick import QUICK
from zoo.core.decoder import Decoder
from zoo.experts import matmul as expert_matmul
from zoo.options.compute_options import ComputeOptions


def random_values(shapes: Tree, seed: int = 0) -> Tree:
    """Normal values of standard deviation 1/16 as numpy arrays; the scales of norms are around 1.

    Values are about as small as those that models start with. With 1/8, activations grow from layer
    to layer, and so do the rounding errors in which meshes differ.
    """
    rng = np.random.default_rng(seed)

    def value(path, leaf) -> np.ndarray:
        normal = rng.standard_normal(leaf.shape, np.float32) / 16
        return normal + ("norm" in jax.tree_util.keystr(path))

    return jax.tree_util.tree_map_with_path(value, shapes)


def random_variables(layout: Layout) -> Tree:
    """Random values of a model, the same on any mesh, sharded by the layout."""
    variables = layout.variables()
    return jax.device_put(random_values(variables), shardings(variables))


def built(module: type[nnx.Module], config: Any, seed: int = 0, **options) -> Any:
    """A new module, by one program; eagerly, JAX would compile one for each operation and shape."""
    return jax.jit(lambda: module(config, rngs=nnx.Rngs(seed), **options))()


def random_decoder(model: type[Decoder], config: ComputeOptions) -> Decoder:
    """A model with wide random parameters, norms and biases of the choice of experts included."""
    graph, state = nnx.split(nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.3 * random.normal(size=leaf.shape), jnp.float32)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(draw, state))


@contextlib.contextmanager
def multiplying(grouped: bool) -> Iterator[None]:
    """A context in which dropless experts multiply groups of rows, as on TPUs, or else batches.

    jax.jit does not notice the change.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_matmul, "multiplies_groups", lambda: grouped)
        yield


def packed_batch(rows: int = 8, length: int = 24) -> dict[str, np.ndarray]:
    """Rows of two documents each, with some padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 257, (rows, length + 1), np.int32)
    targets = np.where(random.random((rows, length)) < 0.1, -1, tokens[:, 1:])
    ids = np.tile(np.arange(length) >= 11, (rows, 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": targets, "segment_ids": ids}


@functools.cache
def loss_and_gradients(model: type[Decoder], config: ComputeOptions, mesh: str, strategy: str):
    """(mean figures, gradients by path)."""
    rows, random = packed_batch(), np.random.default_rng(1)
    layout = make_layout(model, config, make_mesh(mesh), strategy, batch_size=8, seq_len=24)

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return (mean + 0.1 * random.normal(size=leaf.shape)).astype(np.float32)

    def both(variables, batch):
        grads, buffers, means = gradients(layout, variables, batch)
        return means, grads, buffers

    variables = jax.tree_util.tree_map_with_path(draw, layout.model.shapes)
    given = (
        jax.device_put(variables, shardings(layout.variables())),
        jax.device_put(rows, layout.batch_shardings(rows)),
    )
    means, grads, buffers = layout.compile(both, *given, compiler_options=QUICK)(*given)
    means = {name: float(x) for name, x in means.items()}
    return means, {path: np.asarray(x) for path, x in paths(grads | buffers).items()}


def worst(found, wanted) -> float:
    """Largest difference, relative to each array's largest number; NaN if one is."""
    return np.max([np.abs(found[p] - w).max() / np.abs(w).max() for p, w in wanted.items()])
