"""Pipelines: a model's layers in stages, on the devices along a mesh axis.

decoder.py uses this file if the rules split the layers, so a model can be copied without it.

Shapes: B batch, T positions, D embed, S stages, M microbatches.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .sharding import (
    WeightAndSlot, active_rules, has_slot, in_use, mesh_axes, optimizer_axes, per_device,
)  # fmt: skip
from .vocabulary import Batch, Objective

BUBBLE = 0.0  # the input of a waiting stage; no result depends on it


def microbatches(config, rows: int, stages: int) -> int:
    """M: at most config.pipe_microbatches, or 4 per stage if that is 0; divides a device's rows."""
    most = config.pipe_microbatches or min(rows, 4 * stages)
    return next(m for m in range(most, 0, -1) if rows % m == 0)


def objective_in_stages(model, batch: Batch) -> Objective:
    """`Decoder.objective` in stages; its forward pass also computes the gradients.

    Raises ValueError if the model has a head for the second-next token.
    """
    weights, tree = jax.tree.flatten(model, is_leaf=has_slot)
    if model.mtp is not None:
        raise ValueError("a pipeline has no stage for the layer of mtp_depth=1; use mtp_depth=0")

    @jax.custom_vjp
    def objective(weights, batch):
        return _sharded(jax.tree.unflatten(tree, weights), batch, [])[0]

    def forward(weights, batch):
        is_input = lambda x: hasattr(x, "perturbed")  # noqa: E731
        inputs = [jax.tree.leaves(weight, is_leaf=is_input) for weight in weights]
        trained = [i for i, leaves in enumerate(inputs) if any(x.perturbed for x in leaves)]
        weights, batch = jax.tree.map(lambda x: x.value, (weights, batch), is_leaf=is_input)
        return _sharded(jax.tree.unflatten(tree, weights), batch, trained)

    def backward(gradients, cotangents):
        scaled = {i: gradient * cotangents[0] for i, gradient in gradients.items()}
        return [
            WeightAndSlot(None, scaled.get(i)) if has_slot(weight) else scaled.get(i)
            for i, weight in enumerate(weights)
        ], None

    objective.defvjp(forward, backward, symbolic_zeros=True)
    return objective(weights, batch)


def _sharded(model, batch: Batch, trained: list[int]):
    """Runs a Stage on each device. Returns (the Objective, leaf of the model → its gradient).

    Weights are gathered once before it, and gradients are summed once after it. The rules still
    govern mesh axes that split neither layers nor rows.
    """
    pipe = mesh_axes("layers")
    rows = mesh_axes("batch")
    used = in_use(model, model.axes.in_use, model.config.dtype)
    weights, tree = jax.tree.flatten(used)
    at_rest = jax.tree.leaves(model, is_leaf=has_slot)
    gradient_axes = [
        optimizer_axes(axes, active_rules()) if has_slot(weight) else axes
        for weight, axes in zip(at_rest, leaf_axes(model), strict=True)
    ]

    def split(axes):  # mesh axes that split each dim of a weight
        axes = (mesh_axes(axis, manual=True) for axis in axes)
        return [tuple(name for name in names if name in (*pipe, *rows)) for names in axes]

    outside = [split(axes) for axes in gradient_axes]
    inside = [split(axes) for axes in leaf_axes(used)]

    def on_device(weights, batch):
        stage = Stage(jax.tree.unflatten(tree, weights), batch, trained, pipe)
        sums, metrics, gradients = stage.run()
        sums = jax.lax.psum(sums, (*pipe, *rows))
        metrics = jax.lax.psum(metrics, rows)
        # Per device along other axes too, or XLA would gather gradients over them first.
        for i, gradient in gradients.items():
            of_leaf = functools.partial(_sum_gradient, (*pipe, *rows), outside[i], inside[i])
            gradients[i] = per_device(of_leaf, [gradient], [leaf_axes(used)[i]], check_vma=False)
        return sums, metrics, gradients

    def specs(leaves):
        return [PartitionSpec(*(names or None for names in dims)) for dims in leaves]

    outer_specs = (PartitionSpec(), PartitionSpec(pipe))
    gradient_specs = specs(outside)
    run: Any = jax.shard_map(
        on_device,
        in_specs=(specs(inside), PartitionSpec(rows)),
        out_specs=(*outer_specs, {i: gradient_specs[i] for i in trained}),
        axis_names={*pipe, *rows},
        check_vma=False,  # kernels don't support it
    )
    slots = [weight.slot if has_slot(weight) else weight for weight in at_rest]
    slot_specs = [jax.typeof(slot).sharding.spec for slot in slots]
    run = jax.sharding.auto_axes(
        run, out_sharding=(*outer_specs, {i: slot_specs[i] for i in trained})
    )
    (total, count), metrics, gradients = run(weights, batch)
    total_and_costs = model.add_costs(total, metrics)
    return Objective(total_and_costs, count, {"loss": (total, count)}, metrics), gradients


def _sum_gradient(over_all: tuple[str, ...], outside: list, inside: list, gradient):
    """A gradient's sum over devices; if the gradient is split, this device's part of it.

    Args:
      over_all: the mesh axes of stages and rows.
      outside, inside: those of them that split each dim of the gradient, and of the weight in use.
    """
    left = {*over_all}.difference(*inside)
    for dim, (split_axes, used_axes) in enumerate(zip(outside, inside, strict=True)):
        if over := tuple(name for name in split_axes if name not in used_axes):
            # With more than one dim after it, the TPU compiler would all-reduce it instead.
            outer, inner = gradient.shape[: dim + 1], gradient.shape[dim + 1 :]
            flat = gradient.reshape(*outer, *([-1] if inner else []))
            part = jax.lax.psum_scatter(flat, over, scatter_dimension=dim, tiled=True)
            gradient = part.reshape(*part.shape[: dim + 1], *inner)
            left = left - {*over}
    # Not tuple(left): each process must sum in the same order of axes, or programs differ.
    over = tuple(name for name in over_all if name in left)
    return jax.lax.psum(gradient, over) if over else gradient


def leaf_axes(model) -> list[tuple]:
    """The logical axes of each leaf."""
    variables = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [variable.out_sharding for variable in variables]


class Carry(NamedTuple):
    """A stage's state between ticks; without training, it has no gradients and residuals."""

    shared_gradients: dict  # leaf → its sum so far, of weights outside of the stacked layers
    metrics: dict  # of this stage's layers, sums so far
    gradient: Any  # [B/M, T, D]: of this stage's output, from the next stage
    residuals: dict  # number → [slots, ...]: what layers save for their backward pass
    outputs: jax.Array  # [slots, B/M, T/S, D]: this device's part of the last stage's outputs
    own_gradients: dict  # leaf → its sum so far, of this stage's layers
    sums: tuple  # (cross entropy, number of targets) so far
    x: jax.Array  # [B/M, T, D]: this stage's input, from the stage before


class Stage:
    """One device's work: runs its layers on one microbatch after another, and back.

    In tick t, stage s runs microbatch t - s forward and hands it to the next stage. The output of
    the last stage is split along T, so that all stages share the loss; its gradient is gathered.
    Residuals are those of 2S - 1 microbatches with 1F1B (Narayanan et al. 2021), of all M with
    GPipe (Huang et al. 2019).

    Args:
      model: with this stage's part of the stacked layers, in use.
      batch: this device's rows.
      trained: the leaves of the model that get gradients.
      pipe: the mesh axes of the stages.
    """

    def __init__(self, model, batch: Batch, trained: list[int], pipe: tuple[str, ...]):
        self.weights, self.tree = jax.tree.flatten(model)
        stacked = [axes[0] == "layers" for axes in leaf_axes(model)]
        self.own = {i: self.weights[i] for i in trained if stacked[i]}
        self.shared = {i: self.weights[i] for i in trained if not stacked[i]}
        self.trains = bool(trained)
        self.costs = model.costs
        self.batch = batch
        self.pipe = pipe
        self.index = jax.lax.axis_index(pipe)
        self.stages = jax.lax.axis_size(pipe)
        rows, self.seq_len = batch.tokens.shape
        self.microbatches = microbatches(model.config, rows, self.stages)
        self.is_1f1b = model.config.pipeline == "1f1b"
        # The last slot is for the bubble.
        self.slots = 2 * self.stages - 1 if self.is_1f1b else self.microbatches + 1

    def run(self):
        """Returns ((total, count), metrics, leaf → gradient), summed over this device's work."""
        carry = self.start_carry()
        M, late = self.microbatches, self.stages - 1
        fill = functools.partial(self.forward, exits=False)
        carry = self.ticks(carry, 0, late, fill)
        if not self.trains:
            carry = self.ticks(
                carry, late, M, self.forward, lambda t, carry: self.evaluate(t - late, carry)
            )
            return carry.sums, carry.metrics, {}
        if self.is_1f1b:
            carry = self.ticks(
                carry, late, M, self.forward, lambda t, carry: self.backward(t - late, carry)
            )
        else:
            carry = self.ticks(carry, late, M, self.forward)
            carry = self.ticks(carry, 0, M, self.backward)
        drain = functools.partial(self.backward, enters=False)
        carry = self.ticks(carry, M, late, drain)
        return carry.sums, carry.metrics, carry.own_gradients | carry.shared_gradients

    # ---- the parts of the model that a stage runs, as functions of the weights that are trained

    def model_with(self, values: dict):
        """The model with other values of some leaves."""
        weights = [values.get(i, w) for i, w in enumerate(self.weights)]
        return jax.tree.unflatten(self.tree, weights)

    def rows(self, m) -> Batch:
        """Microbatch m."""
        M = self.microbatches
        shape = (M, self.batch.tokens.shape[0] // M, self.seq_len)
        return jax.tree.map(lambda x: x.reshape(shape)[jnp.clip(m, 0, M - 1)], self.batch)

    def begin(self, shared, m):
        """The first stage's input."""
        model = self.model_with(shared)
        batch = self.rows(m)
        return model.begin(model.tables(), batch.tokens, model.positions_of(batch))[0]

    def layers(self, own, x, m):
        """Runs the stage's own layers: (x, metrics)."""
        model = self.model_with(own)
        x, _, metrics = model.run_layers(x, model.positions_of(self.rows(m)))
        return x, metrics

    def loss(self, shared, x, m):
        """The cross entropy of this device's part of T."""
        model = self.model_with(shared)
        size = x.shape[1]
        targets = jax.lax.dynamic_slice_in_dim(
            self.padded(self.rows(m).targets, -1), self.index * size, size, axis=1
        )
        return model.finish(model.tables(), x, targets)

    def padded(self, x, value):
        """[B/M, T, ...] with T padded to a multiple of the stages."""
        padding = ((0, 0), (0, -self.seq_len % self.stages), *[(0, 0)] * (x.ndim - 2))
        return jnp.pad(x, padding, constant_values=value)

    def send(self, x, hop: int):
        """To the next stage, or with -1 to the one before."""
        stages = range(self.stages)
        return jax.lax.ppermute(x, self.pipe, [(i, i + hop) for i in stages if i + hop in stages])

    # ---- what it does in a tick

    def forward(self, t, carry: Carry, exits: bool = True) -> Carry:
        """Runs the layers forward; exits: whether a microbatch leaves the last stage."""
        m = t - self.index
        valid = (m >= 0) & (m < self.microbatches)
        x = jnp.where(valid, jnp.where(self.index == 0, self.begin({}, m), carry.x), BUBBLE)
        if self.trains:
            (x, metrics), pull = jax.vjp(functools.partial(self.layers, m=m), self.own, x)
            new = jax.tree.leaves(pull)
            slot = jnp.minimum(m, self.microbatches) % self.slots
            residuals = {i: old.at[slot].set(new[i]) for i, old in carry.residuals.items()}
            carry = carry._replace(residuals=residuals)
        else:
            x, metrics = self.layers({}, x, m)
        carry = carry._replace(metrics=add(carry.metrics, metrics, valid))
        if exits:
            out = self.padded(jnp.where(self.index == self.stages - 1, x, 0), 0)
            out = jax.lax.psum_scatter(out, self.pipe, scatter_dimension=1, tiled=True)
            slot = (t - self.stages + 1) % len(carry.outputs)
            carry = carry._replace(outputs=carry.outputs.at[slot].set(out))
        return carry._replace(x=self.send(x, 1))

    def backward(self, t, carry: Carry, enters: bool = True) -> Carry:
        """Runs the layers backward; enters: whether a microbatch enters the last stage."""
        m = t - (self.stages - 1 - self.index)
        valid = (m >= 0) & (m < self.microbatches)
        gradient = carry.gradient
        if enters:
            out = carry.outputs[t % len(carry.outputs)]
            total, pull, count = jax.vjp(
                functools.partial(self.loss, m=t), self.shared, out, has_aux=True
            )
            new, part = pull(jnp.ones_like(total))
            carry = carry._replace(
                sums=add(carry.sums, (total, count)),
                shared_gradients=add(carry.shared_gradients, new),
            )
            gathered = jax.lax.all_gather(part, self.pipe, axis=1, tiled=True)
            gradient = jnp.where(
                self.index == self.stages - 1, gathered[:, : self.seq_len], gradient
            )
        gradient = jnp.where(valid, gradient, BUBBLE)
        # The residuals that don't depend on inputs are computed again, the others are kept.
        (_, metrics), pull = jax.vjp(
            functools.partial(self.layers, m=m), self.own, jnp.full_like(gradient, BUBBLE)
        )
        leaves, pull_tree = jax.tree.flatten(pull)
        for i, saved in carry.residuals.items():
            leaves[i] = saved[m % self.slots]
        cost = {
            name: jnp.full_like(value, self.costs.get(name, 0) / len(value) / self.stages)
            for name, value in metrics.items()
        }
        new, gradient = jax.tree.unflatten(pull_tree, leaves)((gradient, cost))
        carry = carry._replace(own_gradients=add(carry.own_gradients, new, valid))
        (new,) = jax.vjp(functools.partial(self.begin, m=m), self.shared)[1](
            jnp.where(valid & (self.index == 0), gradient, 0)
        )
        return carry._replace(
            shared_gradients=add(carry.shared_gradients, new, valid),
            gradient=self.send(gradient, -1),
        )

    def evaluate(self, t, carry: Carry) -> Carry:
        return carry._replace(sums=add(carry.sums, self.loss({}, carry.outputs[0], t)))

    # ---- ticks

    def ticks(self, carry: Carry, first: int, count: int, *steps) -> Carry:
        """Runs steps (t, carry) → carry in `count` ticks from `first` on."""

        def tick(carry, t):
            for step in steps:
                carry = step(t, carry)
            return carry, None

        return jax.lax.scan(tick, carry, jnp.arange(first, first + count))[0]

    def start_carry(self) -> Carry:
        """Zeros of the shapes that the ticks need."""
        x = zeros(jax.eval_shape(functools.partial(self.begin, m=0), {}))
        part = self.padded(x, 0)[:, : -(-self.seq_len // self.stages)]
        metrics, sums = zeros(
            jax.eval_shape(lambda: (self.layers({}, x, 0)[1], self.loss({}, part, 0)))
        )
        waiting = self.microbatches if self.trains and not self.is_1f1b else 1
        carry = Carry(
            shared_gradients={},
            metrics=metrics,
            gradient=(),
            residuals={},
            outputs=zeros(part, waiting),
            own_gradients={},
            sums=sums,
            x=x,
        )
        if not self.trains:
            return carry
        layers = functools.partial(self.layers, m=0)
        made = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(layers, self.own, x)[1]))(x)
        return carry._replace(
            shared_gradients=zeros(self.shared, dtype="float32"),
            gradient=x,
            residuals={
                i: zeros(made.out_avals[i], self.slots) for i in _made_of_inputs(made.jaxpr)
            },
            own_gradients=zeros(self.own, dtype="float32"),
        )


def add(sums, new, valid=True):
    """Adds trees, if `valid`."""
    return jax.tree.map(lambda a, b: a + jnp.where(valid, b, 0), sums, new)


def zeros(tree, *first: int, dtype=None):
    """Zeros like the arrays of a tree, with more dims in front."""
    return jax.tree.map(lambda x: jnp.zeros((*first, *x.shape), dtype or x.dtype), tree)


def _made_of_inputs(jaxpr) -> list[int]:
    """The outputs of a jaxpr that depend on its inputs."""
    made = {id(v) for v in jaxpr.invars}
    for equation in jaxpr.eqns:
        if made & {id(v) for v in equation.invars}:
            made |= {id(v) for v in equation.outvars}
    return [i for i, v in enumerate(jaxpr.outvars) if id(v) in made]
