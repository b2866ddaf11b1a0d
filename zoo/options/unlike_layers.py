"""Layers of unequal shapes: a stack for each of their kinds, in the order of config.period.

decoder.py uses this file if a Config has a `period`, so other models can be copied without it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.stack import numbers, stack

ATTENTION = "attention"  # the stack whose layers have keys and values


def make_stacks(layer, config, rngs: nnx.Rngs) -> dict:
    """A stack for each name in config.period, of the layers (config, name, *, rngs)."""
    period = config.period
    names = [period[l % len(period)] for l in range(config.num_layers)]
    return {
        name: stack(functools.partial(layer, config, name), names.count(name), rngs)
        for name in dict.fromkeys(names)
    }


def run_unlike(model, x_BTD, positions) -> tuple[jax.Array, dict, Any]:
    """`Decoder.run_layers` of such layers."""
    pasts = dict.fromkeys(model.layers)
    if positions.cache is not None:
        pasts = {ATTENTION: numbers(model.layers[ATTENTION])} | positions.cache.states
    layers = {name: (model.layers[name], pasts[name]) for name in model.layers}
    x_BTD, outputs = model.scan(layers, x_BTD, positions, model.config.kinds)
    metrics = [metrics for _, metrics in outputs.values()]
    metrics = jax.tree.map(lambda *x: jnp.concatenate(x), *metrics)
    return x_BTD, {name: kept for name, (kept, _) in outputs.items()}, metrics


def keys_and_states(kept: dict) -> tuple[Any, dict]:
    """What layers keep in generation: (keys and values, the states of those that have others)."""
    return kept[ATTENTION], {name: kept[name] for name in kept if name != ATTENTION}
