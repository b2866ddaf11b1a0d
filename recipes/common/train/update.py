"""One update of a training state by an optimizer. See offload.py for moments in the host's memory."""

import flax.serialization
import jax
import jax.numpy as jnp
import optax

from recipes.common.sharding import Tree


def apply_gradients(optimizer: optax.GradientTransformation, state: Tree, grads: Tree) -> Tree:
    """Returns the training state after one optimizer update."""
    params = state["params"]
    opt_state = flax.serialization.from_state_dict(
        jax.eval_shape(optimizer.init, params), state["opt_state"]
    )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return state | {
        "params": optax.apply_updates(params, updates),
        "opt_state": flax.serialization.to_state_dict(opt_state),
        "step": state["step"] + 1,
    }


def all_finite(metrics: Tree) -> jax.Array:
    """Whether an update is good, a bool: all metrics of its step are finite.

    After a skipped update, only `step` has changed. The optimizer counts its own updates, so its
    learning rate is then one step behind the schedule. Not optax.apply_if_finite: its counters in the
    optimizer's state would make checkpoints differ between runs with and without it, and it looks at
    gradients only.
    """
    return jnp.all(jnp.isfinite(jnp.stack(jax.tree.leaves(metrics))))


def choose(finite: jax.Array | None, before: Tree, after: Tree) -> Tree:
    """Returns `after`, or `before` if `finite` is False; None: True."""
    if finite is None:
        return after
    return jax.tree.map(lambda old, new: jnp.where(finite, new, old), before, after)
