"""One update of a training state by an optimizer. See offload.py for moments in the host's memory."""

import flax.serialization
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from recipes.common.sharding import Layout, Tree, shardings


def apply_gradients(
    optimizer: optax.GradientTransformation, layout: Layout, state: Tree, grads: Tree
) -> Tree:
    """Returns the training state after one optimizer update.

    Each device updates the parts of parameters for which it has the optimizer's state (ZeRO-1):
    gradients are scattered to them, and updated parts are gathered.
    """
    at_rest = shardings(layout.variables()["params"])
    of_optimizer = layout.optimizer_shardings()
    params = reshard(state["params"], at_rest, of_optimizer)
    grads = reshard(grads, at_rest, of_optimizer)
    opt_state = flax.serialization.from_state_dict(
        jax.eval_shape(optimizer.init, params), state["opt_state"]
    )
    updates, new_opt_state = optimizer.update(grads, opt_state, params)
    # Parameters in 16 bits have moments in 16 bits, which their gradients' means would widen.
    new_opt_state = jax.tree.map(lambda old, new: new.astype(old.dtype), opt_state, new_opt_state)
    params = optax.apply_updates(params, updates)
    return state | {
        "params": reshard(params, of_optimizer, at_rest),
        "opt_state": flax.serialization.to_state_dict(new_opt_state),
        "step": state["step"] + 1,
    }


def reshard(tree: Tree, before: Tree, after: Tree) -> Tree:
    """Reshards arrays; leaves those alone whose layout stays. `before`, `after`: NamedShardings."""

    def one(x: jax.Array, old: NamedSharding, new: NamedSharding) -> jax.Array:
        if old == new:
            return x
        if not jax.sharding.get_abstract_mesh().explicit_axes:
            return jax.lax.with_sharding_constraint(x, new)
        return jax.sharding.reshard(x, new)

    return jax.tree.map(one, tree, before, after)


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
