"""Choices of experts that are given, in place of the router's: those of a sampler, replayed in training.

Rounding lets a router choose otherwise in training than in generation, which moves a token's
log-probability further than any rounding of sums does. Replayed, a position is computed by the experts
that computed it while it was sampled (R3, Ma et al. 2025). Their weights are those that training's
router gives them, renormalized over them where the model normalizes, so that the router gets gradients.

Shapes: B batch, T positions, L layers with experts, J experts per position.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.sharding import constrain
from ..core.stack import fit_rules


class Given(nnx.Variable):
    """Experts of positions: int32 [B, T, J], in stacked layers [L, B, T, J]."""


class Routes(nnx.Module):
    """Part of a mixture of experts: the choices that it is given, if any."""

    def __init__(self):
        self.given: Any = nnx.data(None)

    def experts_BTJ(self) -> jax.Array | None:
        """The experts of each position; None: the router chooses."""
        return None if self.given is None else self.given[...]


@contextlib.contextmanager
def replaying(model, experts_BTLJ) -> Iterator[None]:
    """A context in which a model's experts are those of `experts_BTLJ`; None: its routers'.

    Args:
      model: a decoder that was made in the same trace.
      experts_BTLJ: any int dtype, distinct at each position, with L as the metric "chosen" of
        cache.decode_and_measure has it.

    Raises ValueError if the model has other layers with experts.
    """
    stacks = [] if experts_BTLJ is None else _given(model, experts_BTLJ)
    for routes, given in stacks:
        routes.given = given
    try:
        yield
    finally:
        for routes, _ in stacks:
            routes.given = None


@fit_rules
def _given(model, experts_BTLJ) -> list[tuple[Routes, Given]]:
    layout = model.config.row_layout(experts_BTLJ.shape[1])
    experts_BTLJ = constrain(experts_BTLJ.astype(jnp.int32), "batch", "seq", None, None)
    experts_LBTJ = jnp.moveaxis(layout.reorder(experts_BTLJ, None, None), 2, 0)
    stacks = model.layers.values() if isinstance(model.layers, nnx.Dict) else [model.layers]
    given_routes, first = [], 0
    for stack in stacks:
        for _, module in nnx.iter_modules(stack):
            if isinstance(module, Routes):
                count = len(jax.tree.leaves(stack)[0])
                given = experts_LBTJ[first : first + count]
                axes = ("layers", "batch", "seq", "chosen")
                given_routes.append((module, Given(given, out_sharding=axes, eager_sharding=False)))
                first += count
    if first != len(experts_LBTJ):
        raise ValueError(f"{len(experts_LBTJ)} layers' choices for {first} layers with experts")
    return given_routes
