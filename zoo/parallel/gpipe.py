"""Layers in stages as a function of their input, which JAX differentiates (GPipe, Huang et al. 2019).

pipeline.py's forward pass also computes the gradients, of a sum over targets. Logits, and losses that
first compare answers, need the layers alone.

Shapes: B batch, T positions, D embed, S stages, M microbatches.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .pipeline import check_periods, leaf_axes, microbatches
from ..core.sharding import in_use, mesh_axes
from ..core.vocabulary import Batch


def run_in_stages(model, x_BTD, batch: Batch):
    """`Decoder.run_layers` in training, in stages: (x_BTD on all stages, metrics of the layers).

    In tick t, stage s runs microbatch t - s and hands it to the next stage; a stage that waits runs
    any input. The backward pass goes through the ticks in reverse, so what layers save is kept for
    all microbatches. Raises ValueError if a stage cuts a period.
    """
    check_periods(model, rounds=1)
    pipe, rows = mesh_axes("layers"), mesh_axes("batch")
    used = in_use(model, model.axes.in_use, model.config.dtype)
    leaves, tree = jax.tree.flatten(used)
    axes = leaf_axes(used)
    # Cast back in each tick, so that gradients add up in float32, over ticks and over devices.
    stacked = {i: w.astype(jnp.float32) for i, w in enumerate(leaves) if axes[i][0] == "layers"}

    def on_device(stacked, x_BTD, batch):
        index, S = jax.lax.axis_index(pipe), jax.lax.axis_size(pipe)
        M = microbatches(model.config, len(x_BTD), S)
        first, parts = jax.tree.map(lambda x: x.reshape(M, -1, *x.shape[1:]), (x_BTD, batch))
        any_input = jnp.broadcast_to(jax.lax.stop_gradient(first[:1]), (S - 1, *first.shape[1:]))
        hops = [(stage, stage + 1) for stage in range(S - 1)]

        def tick(x, t_and_first):
            t, first = t_and_first
            m = t - index
            valid = (m >= 0) & (m < M)
            part = jax.tree.map(lambda x: x[jnp.clip(m, 0, M - 1)], parts)
            used = {i: weight.astype(leaves[i].dtype) for i, weight in stacked.items()}
            model = jax.tree.unflatten(tree, [used.get(i) for i in range(len(axes))])
            x = jnp.where(valid & (index > 0), x, first)
            x, _, metrics = model.run_layers(x, model.inputs_of(part))
            metrics = jax.tree.map(lambda metric: jnp.where(valid, metric, 0), metrics)
            return jax.lax.ppermute(x, pipe, hops), (x, metrics)

        inputs = jnp.arange(M + S - 1), jnp.concatenate([first, any_input])
        _, (outputs, metrics) = jax.lax.scan(tick, first[0], inputs)
        of_last = jnp.where(index == S - 1, outputs[S - 1 :], 0).reshape(x_BTD.shape)
        metrics = jax.tree.map(lambda metric: jax.lax.psum(metric.sum(axis=0), rows), metrics)
        return jax.lax.psum(of_last, pipe), metrics

    at = PartitionSpec(rows)
    specs = {i: PartitionSpec(*(_split(axis, (*pipe, *rows)) for axis in axes[i])) for i in stacked}
    out_specs = (at, PartitionSpec(pipe))
    run: Any = jax.shard_map(
        on_device,
        in_specs=(specs, at, at),
        out_specs=out_specs,
        axis_names={*pipe, *rows},
        check_vma=False,  # kernels don't support it
    )
    run = jax.sharding.auto_axes(run, out_sharding=out_specs)
    return run(stacked, x_BTD, batch)


def _split(axis, manual: tuple[str, ...]):
    """Those of the manual mesh axes that split a dim of a weight in use."""
    return tuple(name for name in mesh_axes(axis, manual=True) if name in manual) or None
