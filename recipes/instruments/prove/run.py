"""Runs a model's train step on a mesh and returns everything that one device must agree with."""

import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from recipes.common.checkpoint import store
from recipes.common.report import report
from recipes.common.sharding import AbstractModel, Layout, Tree, paths, shardings
from recipes.common.sharding.compiler_options import QUICK
from recipes.common.train.feed import to_devices
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.state import abstract_state, initialize
from recipes.common.train.step import gradients
from recipes.common.train.update import apply_gradients

LR = LearningRate(1e-3, warmup=2, steps=10)
OPTIMIZER = adamw(LR, weight_decay=0.1, clip_norm=1.0)
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Training:
    """Some steps of a model, on the host except `state`."""

    initial: Tree  # the state before the first step
    metrics: list[dict[str, float]]  # of each step, means, with "loss" among them
    grads: list[Tree]  # of each step
    state: Tree  # after the last step, on the devices

    @functools.cached_property
    def final(self) -> dict[str, np.ndarray]:
        """Path → array of the state after the last step."""
        return to_host(self.state)


def compile_step(
    layout: Layout, optimizer: optax.GradientTransformation, example: Tree, **options
) -> jax.stages.Compiled:
    """Compiles a train step, (state, batch) → (state, mean metrics, gradients).

    Args:
      example: one row of a batch.
      options: for XLA's compiler.
    """
    abstract = abstract_state(layout, optimizer)

    def train_step(state, batch):
        grads, buffers, means = gradients(layout, state, batch)
        return apply_gradients(optimizer, layout, state, grads) | buffers, means, grads

    where = shardings(abstract)
    outputs = (where, layout.replicated, layout.optimizer_shardings())
    return layout.compile(
        train_step,
        abstract,
        layout.abstract_batch(example),
        out_shardings=outputs,
        compiler_options=options,
    )


def trace_loss(layout: Layout, model: AbstractModel, batch: Tree) -> jax.stages.Traced:
    """Traces (variables, batch) → the loss's three results, for its shapes and its jaxpr."""

    def loss(variables, rows):
        return model.loss(model.merge(variables), **rows)

    rows = layout.abstract_batch(jax.tree.map(lambda x: x[0], batch))
    with layout.trace():
        return jax.jit(loss).trace(layout.variables(), rows)


def initial_state(layout: Layout, optimizer: optax.GradientTransformation, abstract: Tree) -> Tree:
    """The sharded initialization, on the host."""
    state = initialize(layout, optimizer, 0, abstract)
    for array, promised in zip(
        jax.tree.leaves(state), jax.tree.leaves(shardings(abstract)), strict=True
    ):
        assert array.sharding.is_equivalent_to(promised, array.ndim)
    return jax.device_get(state)


def train(
    layout: Layout,
    step: jax.stages.Compiled,
    initial: Tree,
    abstract: Tree,
    batches: Iterable[Tree],
) -> Training:
    """Runs a compiled step on each batch.

    Args:
      initial: the state before the first step, on the host.
      abstract: the state as ShapeDtypeStructs, each with its sharding.
      batches: trees of numpy arrays.
    """
    state = jax.device_put(initial, shardings(abstract))
    metrics, all_grads = [], []
    for batch in batches:
        state, means, grads = step(state, to_devices(batch, layout))
        metrics.append({name: float(mean) for name, mean in means.items()})
        all_grads.append(jax.device_get(grads))
    return Training(initial, metrics, all_grads, state)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a model does on a mesh, and facts of the compiled step."""

    training: Training
    sent: dict[str, tuple[int, int]]  # kind of collective → (count, bytes) of a step on a device
    memory: int  # bytes of a device at the step's peak
    step: jax.stages.Compiled


def measure(layout: Layout, optimizer: optax.GradientTransformation, batch: Tree) -> Measured:
    """Initializes the model, compiles its step and runs it three times on the batch."""
    abstract = abstract_state(layout, optimizer)
    options = QUICK if layout.mesh.devices.flat[0].platform == "cpu" else {}
    step = compile_step(layout, optimizer, jax.tree.map(lambda x: x[0], batch), **options)
    initial = initial_state(layout, optimizer, abstract)
    return Measured(
        training=train(layout, step, initial, abstract, [batch] * STEPS),
        sent=report.totals(step),
        memory=report.peak_memory(step),
        step=step,
    )


def restored(state: Tree, abstract: Tree) -> dict[str, np.ndarray]:
    """Saves a state and reads it with other shardings: path → numbers, on the host.

    Args:
      abstract: the state as ShapeDtypeStructs with these shardings.
    """
    state, abstract = jax.tree.map(_key_data, (state, abstract))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "state"
        store.write(path, state, {})
        arrays = store.Checkpoint(path, {}).read(abstract)
    return to_host(arrays)


def to_host(tree: Tree) -> dict[str, np.ndarray]:
    """Path → array on the host; a random key as the numbers that it consists of."""
    return paths(jax.device_get(jax.tree.map(_key_data, tree)))


def _key_data(x: Any) -> Any:
    """The numbers of a random key, such as nnx.Dropout holds; other arrays as they are."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, x)
        return data.update(sharding=NamedSharding(x.sharding.mesh, PartitionSpec()))
    return jax.random.key_data(x)
