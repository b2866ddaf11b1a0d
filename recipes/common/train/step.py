"""The train step: a pure function of (state, batch), compiled once for its layout."""

import dataclasses

import flax.serialization
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from recipes.common.sharding import AbstractModel, Layout, Tree, shardings
from recipes.common.train.optimizer import LearningRate
from recipes.common.train.state import abstract_state


@dataclasses.dataclass(frozen=True, eq=False)  # jit wants it hashable
class TrainStep:
    """(state, batch) → (state, metrics)."""

    layout: Layout
    optimizer: optax.GradientTransformation
    lr: LearningRate
    microbatches: int = 1  # parts of a batch whose gradients are accumulated
    skip_nonfinite: bool = False  # keep the state where a metric is not finite

    def __call__(self, state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        grads, buffers, metrics = gradients(self.layout.model, state, batch, self.microbatches)
        metrics |= {"grad_norm": optax.tree.norm(grads), "learning_rate": self.lr(state["step"])}
        after = apply_gradients(self.optimizer, state, grads) | buffers
        if self.skip_nonfinite:
            return keep_if_nonfinite(state, after, metrics)
        return after, metrics

    def abstract_state(self) -> Tree:
        """The state's shapes, dtypes and shardings."""
        return abstract_state(self.layout, self.optimizer)

    def lower(self, abstract: Tree, example: Tree) -> jax.stages.Lowered:
        """Traced for this layout.

        Args:
          abstract: `abstract_state()`.
          example: one row of a batch.
        """
        batch = self.layout.abstract_batch(example)
        # The state is donated, its memory reused; pinned shardings return it sharded as it came.
        pinned = (shardings(abstract), None)
        return self.layout.lower(self, abstract, batch, donate_argnums=0, out_shardings=pinned)


def gradients(
    model: AbstractModel, state: Tree, batch: Tree, microbatches: int = 1
) -> tuple[Tree, Tree, dict[str, jax.Array]]:
    """(gradients of the mean objective, new buffers, means of the loss's figures).

    With microbatches > 1 the batch is cut along its first dim and the gradients are added up, one
    microbatch after another: the memory of one, the result of the whole. Each sees the buffers that
    the one before it has left.

    Returns: gradients like state["params"]; {"buffers": …}, or {} where the model has none; name →
      mean, with "loss" among them.
    """

    def objective(params, buffers, batch):
        module = model.merge({"params": params, **base, **buffers})
        total, count, aux = module.loss(**batch)
        return total, (count, aux, model.buffers(module))

    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    params, base = state["params"], {k: state[k] for k in state.keys() & {"base"}}
    buffers = {k: state[k] for k in state.keys() & {"buffers"}}
    if microbatches == 1:
        (_, (count, aux, buffers)), grads = value_and_grad(params, buffers, batch)
    else:
        # Every microbatch takes rows from every device: row b goes to microbatch b % microbatches.
        parts = jax.tree.map(lambda x: _interleaved(x, microbatches), batch)

        def add(carry, part):
            buffers, sums = carry
            (_, (count, aux, buffers)), grads = value_and_grad(params, buffers, part)
            return (buffers, jax.tree.map(jnp.add, sums, (count, aux, grads))), None

        first = jax.tree.map(lambda x: x[0], parts)
        (_, (count, aux, _)), grads = jax.eval_shape(value_and_grad, params, buffers, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (count, aux))
        sums = (*zeros, jax.tree.map(jnp.zeros_like, params))
        (buffers, (count, aux, grads)), _ = jax.lax.scan(add, (buffers, sums), parts)
    means = {name: total / number for name, (total, number) in aux.items()}
    return jax.tree.map(lambda g: g / count, grads), buffers, means


def _interleaved(x: jax.Array, microbatches: int) -> jax.Array:
    """[B, ...] → [microbatches, B / microbatches, ...], the second dim sharded as the first was."""
    kind = jax.typeof(x).sharding
    rows = kind.update(spec=PartitionSpec(*kind.spec[:1]))
    x = jnp.reshape(x, (-1, microbatches, *x.shape[1:]), out_sharding=rows)
    return jnp.moveaxis(x, 1, 0)


def apply_gradients(optimizer: optax.GradientTransformation, state: Tree, grads: Tree) -> Tree:
    """The training state one step on."""
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


def keep_if_nonfinite(
    before: Tree, after: Tree, metrics: dict[str, jax.Array]
) -> tuple[Tree, dict[str, jax.Array]]:
    """(`after`, metrics), but where a metric is not finite nothing changes except `step`.

    The optimizer counts the updates it has done, so after a skipped one its learning rate is one
    step behind the one that a schedule gives for `step`. optax.apply_if_finite would keep its counters
    in the optimizer's state, so that runs with and without it had different checkpoints, and it looks
    at gradients only.
    """
    finite = jnp.all(jnp.isfinite(jnp.stack(jax.tree.leaves(metrics))))
    kept = jax.tree.map(lambda old, new: jnp.where(finite, new, old), before, after)
    return kept | {"step": after["step"]}, metrics | {"skipped": ~finite}
