"""Optimizers by name, each behind a clip of the global norm, and the learning rate's schedules."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from recipes.common.sharding import Layout, Tree

OPTIMIZERS = ("adamw", "lion", "sgd", "muon")


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Step → learning rate: from 0 to `peak` in `warmup` steps, then as the schedule says.

    cosine and linear fall to peak / 10 at `steps`; wsd (warmup, stable, decay) stays at the peak and
    falls linearly to peak / 10 in the last fifth of the steps; constant stays.
    """

    peak: float
    warmup: int
    steps: int
    schedule: str = "cosine"  # of flags.SCHEDULES

    def __call__(self, step):
        warmup = min(self.warmup, max(self.steps - 1, 0))
        last, end = max(self.steps, 1), self.peak / 10
        if self.schedule == "cosine":
            return optax.warmup_cosine_decay_schedule(0.0, self.peak, warmup, last, end)(step)
        stable = max(warmup, last - max(1, last // 5))
        corners = {  # step → learning rate, and straight lines between them
            "linear": {warmup: self.peak, last: end},
            "wsd": {warmup: self.peak, stable: self.peak, last: end},
            "constant": {warmup: self.peak},
        }[self.schedule]
        corners = {0: 0.0} | corners  # a warmup of 0 begins at the peak
        at, rates = (jnp.array(x, jnp.float32) for x in (list(corners), list(corners.values())))
        return jnp.interp(jnp.asarray(step, jnp.float32), at, rates)


def adamw(
    lr: optax.Schedule, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019), behind a clip of the global norm."""
    return make_optimizer("adamw", lr, weight_decay, clip_norm)


def make_optimizer(
    name: str,
    lr: optax.Schedule,
    weight_decay: float,
    clip_norm: float,
    matrices: Tree = None,
) -> optax.GradientTransformation:
    """Clips by global norm, then one of OPTIMIZERS. Matrices decay, vectors don't.

    Args:
      name: adamw; lion (Chen et al. 2023), whose learning rate is 3 to 10 times smaller; sgd, with
        momentum 0.9; muon (Jordan 2024) for hidden matrices, scaled so that AdamW's learning rate
        suits it, and Adam for all other weights.
      matrices: of muon, `hidden_matrices`.
    """

    def decays(params: Tree) -> Tree:
        # By name, not rank: stacked layers give a vector a second dim.
        vectors = ("scale", "bias")
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not path[-1].key.endswith(vectors), params
        )

    if name == "adamw":
        rule = optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=decays)
    elif name == "lion":
        rule = optax.lion(lr, weight_decay=weight_decay, mask=decays)
    elif name == "sgd":
        decay = optax.add_decayed_weights(weight_decay, decays)
        rule = optax.chain(optax.trace(0.9), decay, optax.scale_by_learning_rate(lr))
    else:
        rule = _across_shards(
            optax.contrib.muon(
                lr, weight_decay=weight_decay, adam_b2=0.95, consistent_rms=0.2,
                muon_weight_dimension_numbers=matrices,
            )
        )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(clip_norm), rule)


def hidden_matrices(
    layout: Layout, ends: Sequence[str], stacks: Sequence[str] = (), ranks: Sequence[str] = ()
) -> Tree:
    """Which of its dims are a parameter's rows and columns, to muon; None: it is no hidden matrix.

    One dim of a hidden matrix is the residual stream's, an axis in IN_USE, or an adapter's rank; all
    others are its other side: q [D, N, H] is a matrix D × N·H, and o [N, H, D] one of N·H × D.

    Args:
      ends: logical axes of what goes into the model or comes out, such as a vocabulary.
      stacks: logical axes along which matrices are stacked.
      ranks: logical axes of the ranks of adapters.

    Returns: a tree like the parameters, of optax.contrib.MuonDimensionNumbers and None.
    """

    def one(axes: tuple[str, ...]) -> optax.contrib.MuonDimensionNumbers | None:
        dims = [dim for dim, axis in enumerate(axes) if axis not in stacks]
        sides = {*ranks} & {*axes} or layout.zoo.IN_USE.keys()
        stream = [dim for dim in dims if axes[dim] in sides]
        others = [dim for dim in dims if dim not in stream]
        if len(stream) != 1 or not others or {*ends} & {*axes}:
            return None
        return optax.contrib.MuonDimensionNumbers(*sorted((stream, others)))

    return jax.tree.map(one, layout.model.axes["params"], is_leaf=lambda x: isinstance(x, tuple))


def _across_shards(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """A rule that multiplies whole matrices: on Explicit mesh axes it leaves their parts to XLA."""

    def update(grads, state, params):
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return rule.update(grads, state, params)
        where = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (grads, state))
        return jax.sharding.auto_axes(rule.update, out_sharding=where)(grads, state, params)

    return optax.GradientTransformation(rule.init, update)
