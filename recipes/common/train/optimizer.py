"""Optimizers with gradient clipping, and learning-rate schedules."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from recipes.common.sharding import Layout, Tree
from recipes.common.sharding.matrices import matrix_sides
from recipes.common.train.muon import muon
from zoo.core.strategies import HEAD_DIM
from zoo.experts.expert_strategies import EXPERT, ROUTER

OPTIMIZERS = ("adamw", "lion", "sgd", "muon")


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Step → learning rate: a warmup from 0 to `peak`, then a schedule.

    cosine and linear fall to peak / 10 at `steps`; wsd (warmup, stable, decay) stays at the peak and
    falls linearly to peak / 10 in the last fifth of the steps; constant stays at the peak.
    """

    peak: float
    warmup: int
    steps: int
    schedule: str = "cosine"  # one of flags.SCHEDULES

    def __call__(self, step):
        warmup = min(self.warmup, max(self.steps - 1, 0))
        last, end = max(self.steps, 1), self.peak / 10
        if self.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(0.0, self.peak, warmup, last, end)(step)
        stable = max(warmup, last - max(1, last // 5))
        corners = {  # step → learning rate, with straight lines between
            "linear": {warmup: self.peak, last: end},
            "wsd": {warmup: self.peak, stable: self.peak, last: end},
            "constant": {warmup: self.peak},
        }[self.schedule]
        corners = {0: 0.0} | corners  # a warmup of 0 begins at the peak
        steps, values = (jnp.array([*x], jnp.float32) for x in (corners.keys(), corners.values()))
        return jnp.interp(jnp.asarray(step, jnp.float32), steps, values)


def adamw(
    lr: optax.Schedule, weight_decay: float, clip_norm: float, decays: Tree = None
) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019) after clipping by the global norm."""
    return make_optimizer("adamw", lr, weight_decay, clip_norm, decays=decays)


def make_optimizer(
    name: str,
    lr: optax.Schedule,
    weight_decay: float,
    clip_norm: float,
    matrices: Tree = None,
    decays: Tree = None,
    trained: Tree = None,
) -> optax.GradientTransformationExtraArgs:
    """Clips by the global norm, then applies one of OPTIMIZERS.

    Args:
      name: adamw; lion (Chen et al. 2023), which wants a 3 to 10 times smaller learning rate; sgd with
        momentum 0.9; muon (Jordan 2024) for hidden matrices, scaled to suit AdamW's learning rate,
        with Adam for all other weights.
      matrices: `hidden_matrices`, for muon.
      decays: `decaying`, for the others; None: all but those named as biases or scales, for a program
        that only has to be like a run's.
      trained: which parameters are updated, a tree of bools; the others have gradients of zero, and get
        no moments. None: all.
    """

    def mask(params: Tree) -> Tree:
        if decays is not None:
            return _part(decays, params)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not path[-1].key.endswith(("scale", "bias")), params
        )

    if name == "adamw":
        rule = optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=mask)
    elif name == "lion":
        rule = optax.lion(lr, weight_decay=weight_decay, mask=mask)
    elif name == "sgd":
        decay = optax.add_decayed_weights(weight_decay, mask)
        rule = optax.chain(optax.trace(0.9), decay, optax.scale_by_learning_rate(lr))
    else:
        rule = muon(lr, weight_decay, matrices)
    if trained is not None:
        rule = optax.masked(rule, lambda params: _part(trained, params))
    return optax.chain(clip(clip_norm), rule)


def _part(tree: Tree, keys: Tree) -> Tree:
    """The part of nested dicts that has these keys."""
    return {k: _part(tree[k], keys[k]) for k in keys} if isinstance(tree, dict) else tree


def clip(most: float) -> optax.GradientTransformationExtraArgs:
    """optax.clip_by_global_norm, which can also clip a part of the gradients.

    Its update takes the global norm of all gradients as `norm`; None: that of those it gets.
    """

    def update(updates, state, params=None, *, norm=None, **_):
        norm = optax.tree.norm(updates) if norm is None else norm
        small = norm < most

        def clipped(gradient: jax.Array) -> jax.Array:
            scaled = gradient / norm * most  # float32, also of gradients in 16 bits
            return jax.lax.select(small, gradient, scaled.astype(gradient.dtype))

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def decaying(
    layout: Layout,
    copies: Sequence[str] = (EXPERT, ROUTER),
    parts: Sequence[str] = (HEAD_DIM,),
) -> Tree:
    """Which parameters have weight decay: matrices, and no vectors.

    A vector has one dim besides those of stacked layers: a norm's scale [L, D], a bias for each
    expert [L, E, F], attention's sinks [L, N]. A bias of heads [L, N, H] is one vector too.

    Args:
      copies: logical axes that count as stacked where they come first, as in a bias of each expert
        [E, D]. In a router's matrix [D, E] the axis comes last, and counts.
      parts: logical axes that belong to the one before them, which they divide.

    Returns: a tree like the parameters, of bools.
    """
    stacks = layout.names.stacks

    def one(axes: tuple[str, ...]) -> bool:
        dims = [axis for axis in axes if axis not in stacks]
        while dims and dims[0] in copies:
            dims = dims[1:]
        return sum(place == 0 or axis not in parts for place, axis in enumerate(dims)) > 1

    return jax.tree.map(one, layout.model.axes["params"], is_leaf=lambda x: isinstance(x, tuple))


def hidden_matrices(layout: Layout) -> Tree:
    """Tells muon which dims of each parameter are rows and columns; None if it is no hidden matrix.

    Returns: a tree like the parameters, of optax.contrib.MuonDimensionNumbers and None.
    """

    def one(axes: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
        sides = matrix_sides(axes, layout.names.in_use)
        return optax.contrib.MuonDimensionNumbers(*sides) if sides else None

    return jax.tree.map(one, layout.model.axes["params"], is_leaf=lambda x: isinstance(x, tuple))
