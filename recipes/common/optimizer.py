"""AdamW with warm-up, cosine decay and gradient clipping; gradients in parts; bad steps skipped."""

from collections.abc import Callable

import flax.serialization
import jax
import jax.numpy as jnp
import optax

from recipes.common.cli import Run
from recipes.common.sharding import Tree


def schedule(peak: float, warmup: int, steps: int) -> optax.Schedule:
    """0 → peak in `warmup` steps, then by a cosine to peak / 10 at `steps`. Step → learning rate."""
    warmup = min(warmup, max(steps - 1, 0))
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, 1), peak / 10)


def change_of_steps(before: int | None, run: Run, warmup: int, step: int) -> list[str]:
    """What another --steps than `before` does to a run that goes on at `step`, in a sentence."""
    if before is None:
        return []
    was, now = (schedule(run.learning_rate, warmup, steps)(step) for steps in (before, run.steps))
    return [
        f"--steps was {before} and is {run.steps}: the learning rate now decays until step "
        f"{run.steps}, and at step {step} it is {now:.2e} instead of {was:.2e}."
    ]


def adamw(
    rate: optax.Schedule, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clips by global norm, then AdamW (Loshchilov & Hutter 2019). Matrices decay, vectors don't."""

    def decays(params: Tree) -> Tree:
        # By name, not rank: stacked layers give a vector a second dim.
        vectors = ("scale", "bias")
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not path[-1].key.endswith(vectors), params
        )

    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=decays),
    )


def gradients(loss: Callable, params: Tree, batch: Tree, parts: int = 1) -> tuple[jax.Array, Tree]:
    """(mean loss, its gradients) of `loss(params, batch) -> (sum, count)`.

    With parts > 1 the batch is cut along its first dim and the parts' gradients are added up in
    turn: the memory of one part, the result of the whole.
    """
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if parts == 1:
        (total, count), grads = value_and_grad(params, batch)
    else:
        # Every part takes rows from every device: row b goes to part b % parts.
        cut = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)

        def add(sums, part):
            return jax.tree.map(jnp.add, sums, value_and_grad(params, part)), None

        zero = jnp.zeros(())
        sums = ((zero, zero), jax.tree.map(jnp.zeros_like, params))
        ((total, count), grads), _ = jax.lax.scan(add, sums, cut)
    return total / count, jax.tree.map(lambda g: g / count, grads)


def apply(optimizer: optax.GradientTransformation, state: Tree, grads: Tree) -> Tree:
    """The training state one step on."""
    params = state["params"]
    opt_state = flax.serialization.from_state_dict(
        jax.eval_shape(optimizer.init, params), state["opt_state"]
    )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return {
        "params": optax.apply_updates(params, updates),
        "opt_state": flax.serialization.to_state_dict(opt_state),
        "step": state["step"] + 1,
        "rngs": state["rngs"],
    }


def skipping(train_step: Callable, most: int) -> Callable:
    """`train_step`, but where a metric is not finite nothing changes except `step`.

    `most` 0: `train_step` itself. The optimizer counts the updates it has done, so after a skipped
    one its learning rate is one step behind the one that a schedule gives for `step`.
    """
    if not most:
        return train_step

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        after, metrics = train_step(state, batch)
        finite = jnp.all(jnp.isfinite(jnp.stack(jax.tree.leaves(metrics))))
        kept = jax.tree.map(lambda old, new: jnp.where(finite, new, old), state, after)
        return kept | {"step": after["step"]}, metrics | {"skipped": ~finite}

    return step
