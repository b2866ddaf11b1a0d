"""The train step: a pure function of (state, batch), compiled once for its layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from recipes.common.runtime import Run
from recipes.common.sharding import Layout, Tree, shardings
from recipes.common.sharding.abstract import Phases
from recipes.common.train.offload import Gradients, apply_offloaded
from recipes.common.train.optimizer import LearningRate, decaying, hidden_matrices, make_optimizer
from recipes.common.train.state import abstract_state
from recipes.common.train.training_flags import Optimization
from recipes.common.train.update import all_finite, apply_gradients, choose
from zoo.core.sharding import WeightAndSlot


@dataclasses.dataclass(frozen=True, eq=False)  # jit wants it hashable
class TrainStep:
    """(state, batch) → (state, metrics)."""

    layout: Layout
    optimizer: optax.GradientTransformationExtraArgs
    lr: LearningRate
    microbatches: int = 1  # gradient accumulation: parts of a batch, one after another
    skip_nonfinite: bool = False  # keep the state where a metric is not finite
    offload: str = ""  # "optimizer": its moments are in the host's memory

    def __call__(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        sums, count, buffers, metrics = gradient_sums(self.layout, state, batch, self.microbatches)
        grads = jax.tree.map(lambda g: g / count, sums)
        metrics |= {"grad_norm": optax.tree.norm(grads), "learning_rate": self.lr(state["step"])}
        finite = all_finite(metrics) if self.skip_nonfinite else None
        if self.offload:
            scaled = Gradients(sums, count, metrics["grad_norm"])
            after = apply_offloaded(self.optimizer, self.layout, state, scaled, finite)
            after |= choose(finite, {kind: state[kind] for kind in buffers}, buffers)
        else:
            after = apply_gradients(self.optimizer, self.layout, state, grads) | buffers
            after = choose(finite, state, after) | {"step": after["step"]}
        return after, metrics if finite is None else metrics | {"skipped": ~finite}

    def abstract_state(self) -> Tree:
        """The state's shapes, dtypes and shardings."""
        return abstract_state(self.layout, self.optimizer, self.offload)

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


def make_step(layout: Layout, run: Run, training: Optimization) -> TrainStep:
    """The train step that the flags of a run describe."""
    lr = LearningRate(run.learning_rate, training.warmup_steps, run.steps, run.schedule)
    optimizer = make_optimizer(
        training.optimizer, lr, training.weight_decay, training.clip_norm,
        matrices=hidden_matrices(layout), decays=decaying(layout),
        trained=layout.model.is_trained() if layout.model.frozen else None,
    )  # fmt: skip
    return TrainStep(
        layout, optimizer, lr,
        microbatches=training.accumulate, skip_nonfinite=run.skip_nonfinite > 0,
        offload=training.offload,
    )  # fmt: skip


def gradients(
    layout: Layout, state: Tree, batch: Tree, microbatches: int = 1
) -> tuple[Tree, Tree, Tree]:
    """Returns (gradients of the mean objective, new buffers, means of the loss's metrics).

    With microbatches > 1, gradients are summed over parts of the batch, one after another: the result
    of the whole batch with the memory of one part. Each part sees the buffers that the last one left.

    Returns: gradients like state["params"]; {"buffers": …}, or {} if the model has none; name → mean,
      with "loss" among them.
    """
    sums, count, buffers, means = gradient_sums(layout, state, batch, microbatches)
    return jax.tree.map(lambda g: g / count, sums), buffers, means


def gradient_sums(
    layout: Layout, state: Tree, batch: Tree, microbatches: int = 1
) -> tuple[Tree, jax.Array, Tree, Tree]:
    """`gradients` before their division: (gradients of the objective's sum, its count, …)."""
    params, model = state["params"], layout.model
    at_rest = shardings(layout.variables()["params"])
    summed = gradient_shardings(layout)

    def merge(trained, buffers):
        weights = jax.tree.map(
            lambda w, leaf, rest, own: leaf if rest == own else WeightAndSlot(w, leaf),
            params, trained, at_rest, summed,
        )  # fmt: skip
        return model.merge({"params": weights, **base, **buffers})

    def objective(trained, buffers, batch):
        module = merge(trained, buffers)
        total, count, aux = model.loss(module, **batch, **frozen)
        return total, (count, aux, model.buffers(module))

    value_and_grad = jax.value_and_grad(objective, has_aux=True)
    trained = jax.tree.map(
        lambda w, rest, own: w if rest == own else jnp.zeros(w.shape, w.dtype, out_sharding=own),
        params, at_rest, summed,
    )  # fmt: skip
    base = {k: state[k] for k in state.keys() & {"base"}}
    frozen = {k: state[k] for k in state.keys() & {"frozen"}}
    buffers = {k: state[k] for k in state.keys() & {"buffers"}}
    if microbatches > 1 and model.phases:
        merge_trained = functools.partial(merge, buffers=buffers)
        count, aux, grads = _all_pairs_gradients(
            model.phases, merge_trained, trained, batch, microbatches
        )
    elif microbatches == 1:
        (_, (count, aux, buffers)), grads = value_and_grad(trained, buffers, batch)
    else:
        # Every microbatch takes rows from every device: row b goes to microbatch b % microbatches.
        parts = jax.tree.map(lambda x: _interleaved(x, microbatches), batch)

        def add(carry, part):
            buffers, sums = carry
            (_, (count, aux, buffers)), grads = value_and_grad(trained, buffers, part)
            return (buffers, jax.tree.map(jnp.add, sums, (count, aux, grads))), None

        first = jax.tree.map(lambda x: x[0], parts)
        (_, (count, aux, _)), grads = jax.eval_shape(value_and_grad, trained, buffers, first)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (count, aux))
        sums = (*zeros, jax.tree.map(jnp.zeros_like, trained))
        (buffers, (count, aux, grads)), _ = jax.lax.scan(add, (buffers, sums), parts)
    means = {name: total / number for name, (total, number) in aux.items()}
    return grads, count, buffers, means


def _all_pairs_gradients(phases: Phases, merge, trained: Tree, batch: Tree, microbatches: int):
    """(count, aux, gradients) of a loss over all pairs of a batch, embedded in microbatches.

    Two passes (Gao et al. 2021, GradCache): the first embeds all microbatches and keeps their
    embeddings alone; the second embeds each again, and sends the loss's gradient back through it.
    """
    parts = jax.tree.map(lambda x: _interleaved(x, microbatches), batch)

    def embed(trained, part):
        return phases.embed(merge(trained), **part)

    def compare(trained, embedded):
        total, count, aux = phases.compare(merge(trained), *embedded)
        return total, (count, aux)

    _, embedded = jax.lax.scan(lambda _, part: (None, embed(trained, part)), None, parts)
    *vectors, counted = jax.tree.map(_joined, embedded)
    of_both = jax.value_and_grad(
        lambda trained, vectors: compare(trained, (*vectors, counted)), (0, 1), has_aux=True
    )
    (_, (count, aux)), (grads, cotangents) = of_both(trained, vectors)
    cotangents = jax.tree.map(lambda x: _interleaved(x, microbatches), cotangents)

    def add(sums, part_and_cotangents):
        part, cotangents = part_and_cotangents
        _, pull = jax.vjp(lambda trained: embed(trained, part)[:-1], trained)
        return jax.tree.map(jnp.add, sums, pull(tuple(cotangents))[0]), None

    grads, _ = jax.lax.scan(add, grads, (parts, cotangents))
    return count, aux, grads


def gradient_shardings(layout: Layout) -> Tree:
    """The shardings in which gradients are summed: those of the weights, or of the optimizer's state.

    The latter are those of stacked layers, and of everything in stages, through
    zoo.core.sharding.WeightAndSlot. Other gradients are resharded once, by `apply_gradients`; those of
    matmuls in low precision too, which sum them by themselves.
    """
    at_rest = shardings(layout.variables()["params"])
    if layout.config is None or layout.shape.matmul or not layout.mesh.explicit_axes:
        return at_rest  # without a Config, the model needn't be the zoo's, whose kit knows slots
    stacks = layout.names.stacks

    def one(axes: tuple[str, ...], weight: NamedSharding, state: NamedSharding) -> NamedSharding:
        in_use = layout.names.in_use.keys() & {*axes}
        return state if in_use and (layout.stages > 1 or axes[0] in stacks) else weight

    return jax.tree.map(
        one, layout.model.axes["params"], at_rest, layout.optimizer_shardings(),
        is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip


def _interleaved(x: jax.Array, microbatches: int) -> jax.Array:
    """[B, ...] → [microbatches, B / microbatches, ...], sharded as before."""
    kind = jax.typeof(x).sharding
    parts = kind.update(spec=PartitionSpec(*kind.spec[:1], None, *kind.spec[1:]))
    x = jnp.reshape(x, (-1, microbatches, *x.shape[1:]), out_sharding=parts)
    return jnp.moveaxis(x, 1, 0)


def _joined(x: jax.Array) -> jax.Array:
    """The inverse of `_interleaved`."""
    kind = jax.typeof(x).sharding
    sharding = kind.update(spec=PartitionSpec(kind.spec[1], *kind.spec[2:]))
    x = jnp.moveaxis(x, 0, 1)
    return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=sharding)
