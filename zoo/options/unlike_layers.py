"""Layers of unequal shapes: a stack for each of their kinds, in the order of config.period.

A model that has them takes `make_layers` and `run_layers` as methods. Its Config has a `period`, names
of stacks such as ("delta", "attention"), and its Layer is built from (config, name, *, rngs). Layers
of stacks other than cache.WITH_KEYS keep a state in place of keys and values, and get the one in a
cache as `cache_index`.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.stack import stack
from .cache import CachedInputs
from .periods import scan_periods


def make_layers(self, layer, rngs: nnx.Rngs) -> None:
    """`Decoder.make_layers`: `layers` is a dict of stacks."""
    config = self.config
    period = config.period
    names = [period[l % len(period)] for l in range(config.num_layers)]
    self.layers = nnx.Dict(
        {
            name: stack(functools.partial(layer, config, name), names.count(name), rngs)
            for name in dict.fromkeys(names)
        }
    )


def stacks_of(self, inputs) -> dict[str, tuple]:
    """Name of a stack → (its layers, their places in a cache or None)."""
    is_cached = isinstance(inputs, CachedInputs)
    return {
        name: (layers, inputs.of_stack(name, layers) if is_cached else None)
        for name, layers in self.layers.items()
    }


def run_layers(self, x_BTD, inputs):
    """`Decoder.run_layers`; a cache keeps a dict, stack → what its layers keep."""
    config = self.config
    stacks = stacks_of(self, inputs)
    run_layer = functools.partial(self.run_layer, inputs)
    x_BTD, outputs = scan_periods(
        run_layer, x_BTD, stacks, config.kinds, config.remat_policy, config.period
    )
    metrics = [metrics for _, metrics in outputs.values()]
    metrics = jax.tree.map(lambda *x: jnp.concatenate(x), *metrics)
    return x_BTD, {name: kept for name, (kept, _) in outputs.items()}, metrics
