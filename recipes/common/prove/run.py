"""Runs a model's train step on a mesh and returns everything that one device must agree with."""

import dataclasses
from collections.abc import Iterable

import jax
import optax

from recipes.common.sharding import Layout, Tree, shardings
from recipes.common.train.feed import to_devices
from recipes.common.train.state import abstract_state, initialize
from recipes.common.train.step import gradients
from recipes.common.train.update import apply_gradients


@dataclasses.dataclass(frozen=True)
class Training:
    """Some steps of a model, on the host except `state`."""

    metrics: list[dict[str, float]]  # of each step, means, with "loss" among them
    grads: list[Tree]  # of each step
    state: Tree  # after the last step, on the devices


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
        grads, buffers, means = gradients(layout.model, state, batch)
        return apply_gradients(optimizer, state, grads) | buffers, means, grads

    where = shardings(abstract)
    outputs = (where, layout.replicated, where["params"])
    return layout.compile(
        train_step,
        abstract,
        layout.abstract_batch(example),
        out_shardings=outputs,
        compiler_options=options,
    )


def initial_state(layout: Layout, optimizer: optax.GradientTransformation, abstract: Tree) -> Tree:
    """The sharded initialization, on the host."""
    state = initialize(layout, optimizer, 0, abstract)
    for array, promised in zip(
        jax.tree.leaves(state), jax.tree.leaves(shardings(abstract)), strict=True
    ):
        assert array.sharding.is_equivalent_to(promised, array.ndim)
    return jax.device_get(state)


def train(
    layout: Layout, step: jax.stages.Compiled, state: Tree, batches: Iterable[Tree]
) -> Training:
    """Runs a compiled step on each batch.

    Args:
      state: on the devices.
      batches: trees of numpy arrays.
    """
    metrics, all_grads = [], []
    for batch in batches:
        state, means, grads = step(state, to_devices(batch, layout))
        metrics.append({name: float(mean) for name, mean in means.items()})
        all_grads.append(jax.device_get(grads))
    return Training(metrics, all_grads, state)
