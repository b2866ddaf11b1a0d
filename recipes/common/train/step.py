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
    microbatches: int = 1  # gradient accumulation: parts of a batch, one after another
    skip_nonfinite: bool = False  # keep the state where a metric is not finite

    def __call__(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        grads, buffers, metrics = gradients(self.layout.model, state, batch, self.microbatches)
        metrics |= {"grad_norm": optax.tree.norm(grads), "learning_rate": self.lr(state["step"])}
        after = apply_gradients(self.optimizer, state, grads) | buffers
        if self.skip_nonfinite:
            return skip_if_nonfinite(state, after, metrics)
        return after, metrics

    def abstract_state(self) -> Tree:
        """The state's shapes, dtypes and shardings."""
        return abstract_state(self.layout, self.optimizer)

    def lower(self, abstract: Tree, example: Tree) -> jax.stages.Lowered:
        """Traces the step for this layout.

        Args:
          abstract: `abstract_state()`.
          example: one row of a batch.
        """
        batch = self.layout.abstract_batch(example)
        # The step reuses the memory of the donated state, and returns it sharded as it came.
        pinned = (shardings(abstract), None)
        return self.layout.lower(self, abstract, batch, donate_argnums=0, out_shardings=pinned)


def gradients(
    model: AbstractModel, state: Tree, batch: Tree, microbatches: int = 1
) -> tuple[Tree, Tree, Tree]:
    """Returns (gradients of the mean objective, new buffers, means of the loss's figures).

    With microbatches > 1, gradients are summed over parts of the batch, one after another: the result
    of the whole batch with the memory of one part. Each part sees the buffers that the last one left.

    Returns: gradients like state["params"]; {"buffers": …}, or {} if the model has none; name → mean,
      with "loss" among them.
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
    """[B, ...] → [microbatches, B / microbatches, ...], sharded as before."""
    kind = jax.typeof(x).sharding
    parts = kind.update(spec=PartitionSpec(*kind.spec[:1], None, *kind.spec[1:]))
    x = jnp.reshape(x, (-1, microbatches, *x.shape[1:]), out_sharding=parts)
    return jnp.moveaxis(x, 1, 0)


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


def skip_if_nonfinite(before: Tree, after: Tree, metrics: Tree) -> tuple[Tree, Tree]:
    """Returns (`after`, metrics). If a metric is not finite, only `step` changes.

    The optimizer counts its own updates, so after a skipped one its learning rate is one step behind
    the schedule. Not optax.apply_if_finite: its counters in the optimizer's state would make
    checkpoints differ between runs with and without it, and it looks at gradients only.
    """
    finite = jnp.all(jnp.isfinite(jnp.stack(jax.tree.leaves(metrics))))
    kept = jax.tree.map(lambda old, new: jnp.where(finite, new, old), before, after)
    return kept | {"step": after["step"]}, metrics | {"skipped": ~finite}
