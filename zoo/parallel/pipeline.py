"""Pipelines: a model's layers in stages, on the devices along a mesh axis, where rules split `layers`.

Shapes: B batch, T positions, D embed, L layers, S stages, M microbatches, v rounds.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.sharding import (
    WeightAndSlot, active_rules, has_slot, in_use, mesh_axes, optimizer_axes, per_device,
    shards,
)  # fmt: skip
from ..core.vocabulary import Batch, Objective

BUBBLE = 0.0  # the input of a waiting stage; no result depends on it


def microbatches(config, rows: int, stages: int) -> int:
    """M: at most config.pipe_microbatches, or 4 per stage if that is 0; divides a device's rows."""
    most = config.pipe_microbatches or min(rows, 4 * stages)
    return next(m for m in range(most, 0, -1) if rows % m == 0)


def rounds(config) -> int:
    """v: how often a microbatch visits each stage, for one chunk of L / (vS) layers after another."""
    return config.pipe_rounds if config.pipeline == "interleaved" else 1


def place(unit, stages: int, rounds: int):
    """(microbatch, round) of a stage's unit of work; microbatches that don't exist are bubble.

    S microbatches go through the first round, then through the second, …, then the next S. So when
    the first stage begins a round, its input has just left the last stage.
    """
    if rounds == 1:
        return unit, 0
    group, unit = unit // (rounds * stages), unit % (rounds * stages)
    return group * stages + unit % stages, unit // stages


def ticks(count: int, stages: int, rounds: int) -> int:
    """Ticks in which all stages run `count` microbatches one way, each a chunk in each tick.

    S microbatches at a time go through all rounds, (v - 1) · S ticks more than one round takes, also
    if there are fewer of them.
    """
    return (rounds - 1) * stages * -(-count // stages) + count + stages - 1


def routes(stages: int, rounds: int) -> list[list[tuple[int, int, int, int]]]:
    """How chunks of layers move from their order at rest to their stages, in v permutations.

    At rest, chunk k of vS is on device k // v; round k // S of stage k % S runs it. Returns for each
    permutation the moves (device, its place there, stage, round), one from and to each device.
    """
    permutations = [[] for _ in range(rounds)]
    for k in range(rounds * stages):
        # A device's chunks differ in k % v. A stage's differ in it, or else in the other term.
        number = (k + k // math.lcm(rounds, stages)) % rounds
        permutations[number].append((k // rounds, k % rounds, k % stages, k // stages))
    return permutations


def check_periods(model, rounds: int) -> None:
    """Raises ValueError if a chunk of layers is no whole number of periods.

    Each chunk counts its layers from the first kind of a period, so they would run as other kinds.
    """
    # Without first layers of another kind.
    is_unlike = isinstance(model.layers, nnx.Dict)  # unlike_layers.py
    stacks = [*model.layers.values()] if is_unlike else [model.layers]
    depth = sum(len(jax.tree.leaves(stack)[0]) for stack in stacks)
    period = len(model.config.period if is_unlike else model.config.kinds)
    chunks = rounds * shards("layers")
    if depth % (chunks * period):
        raise ValueError(
            f"{depth} layers in {chunks} chunks are no whole number of periods of {period} kinds of "
            "layers; use fewer stages or rounds"
        )


def objective_in_stages(model, batch: Batch) -> Objective:
    """`Decoder.objective` in stages; its forward pass also computes the gradients.

    Raises ValueError if a chunk cuts a period of layers.
    """
    check_periods(model, rounds(model.config))
    weights, tree = jax.tree.flatten(model, is_leaf=has_slot)

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
    v = rounds(model.config)
    at_rest = jax.tree.leaves(model, is_leaf=has_slot)
    stacked = [axes[0] == "layers" for axes in leaf_axes(model)]
    used = in_use(_in_rounds(model, pipe, v), model.axes.in_use, model.config.dtype)
    weights, tree = jax.tree.flatten(used)
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
        metrics = jax.tree.map(lambda x: _move_chunks(x, pipe, v, to_rest=True), metrics)
        for i, gradient in gradients.items():

            def of_leaf(gradient, i=i):
                gradient = _sum_gradient((*pipe, *rows), outside[i], inside[i], gradient)
                return _move_chunks(gradient, pipe, v, to_rest=True) if stacked[i] else gradient

            # Per device along other axes too, or XLA would gather gradients over them first.
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


def _in_rounds(model, pipe: tuple[str, ...], v: int):
    """The model with stacked layers on the devices of their stages, v chunks on each.

    They move before they are gathered, in the compute dtype; their gradients move after they are
    scattered. So layers keep their natural order at rest, whatever the schedule is.
    """
    if v == 1:
        return model
    leaves, tree = jax.tree.flatten(model, is_leaf=has_slot)

    def move(leaf, axes):
        if axes[0] != "layers":
            return leaf
        weight = leaf.weight if has_slot(leaf) else leaf
        cast = model.axes.in_use.keys() & {*axes}
        weight = weight.astype(model.config.dtype) if cast else weight
        weight = per_device(
            functools.partial(_move_chunks, pipe=pipe, v=v), [weight], [axes], check_vma=False
        )
        return dataclasses.replace(leaf, weight=weight) if has_slot(leaf) else weight

    moved = [move(leaf, axes) for leaf, axes in zip(leaves, leaf_axes(model), strict=True)]
    return jax.tree.unflatten(tree, moved)


def _move_chunks(x, pipe: tuple[str, ...], v: int, to_rest: bool = False):
    """A device's layers [L/S, ...] of those at rest → those that it runs, or back."""
    if v == 1:
        return x
    chunks = moved = x.reshape(v, -1, *x.shape[1:])
    index = jax.lax.axis_index(pipe)
    for moves in routes(jax.lax.axis_size(pipe), v):
        if to_rest:
            moves = [(stage, round, device, where) for device, where, stage, round in moves]
        sources = {device: where for device, where, _, _ in moves}
        targets = {device: where for _, _, device, where in moves}
        chunk = chunks[jnp.array([sources[device] for device in sorted(sources)])[index]]
        pairs = [(device, stage) for device, _, stage, _ in moves]
        if any(device != stage for device, stage in pairs):
            chunk = jax.lax.ppermute(chunk, pipe, pairs)
        target = jnp.array([targets[device] for device in sorted(targets)])[index]
        moved = moved.at[target].set(chunk)
    return moved.reshape(x.shape)


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

    In tick t, stage s does its unit of work t - s forward, a chunk of its layers on a microbatch, and
    hands the output to the next stage, the last stage to the first. Units follow `place`. The output
    of the last chunk is split along T, so that all stages share the loss; its gradient is gathered.

    The backward pass starts as soon as it can with 1F1B, also interleaved (Narayanan et al. 2021), and
    so residuals are those of 2vS - 1 units; with GPipe (Huang et al. 2019) it is after all others.

    Args:
      model: with this stage's part of the stacked layers, in use.
      batch: this device's rows.
      trained: the leaves of the model that get gradients.
      pipe: the mesh axes of the stages.
    """

    def __init__(self, model, batch: Batch, trained: list[int], pipe: tuple[str, ...]):
        self.weights, self.tree = jax.tree.flatten(model)
        self.rounds = rounds(model.config)
        self.stacked = {  # in chunks: [v, L/(vS), ...]
            i: self.weights[i].reshape(self.rounds, -1, *self.weights[i].shape[1:])
            for i, axes in enumerate(leaf_axes(model))
            if axes[0] == "layers"
        }
        self.own = {i: self.stacked[i] for i in trained if i in self.stacked}
        self.shared = {i: self.weights[i] for i in trained if i not in self.stacked}
        self.trains = bool(trained)
        self.costs = model.costs
        self.batch = batch
        self.pipe = pipe
        self.index = jax.lax.axis_index(pipe)
        self.stages = jax.lax.axis_size(pipe)
        rows, self.seq_len = batch.tokens.shape
        self.microbatches = microbatches(model.config, rows, self.stages)
        self.place = functools.partial(place, stages=self.stages, rounds=self.rounds)
        self.ticks_each_way = ticks(self.microbatches, self.stages, self.rounds)
        self.units = self.ticks_each_way - self.stages + 1
        self.is_1f1b = model.config.pipeline != "gpipe"
        # The last slot is for the bubble.
        self.slots = 2 * self.rounds * self.stages - 1 if self.is_1f1b else self.units + 1

    def run(self):
        """Returns ((total, count), metrics, leaf → gradient), summed over this device's work."""
        carry = self.start_carry()
        late = self.rounds * self.stages - 1  # ticks before the first microbatch leaves
        busy = self.ticks_each_way - late  # from then until the last one leaves
        fill = functools.partial(self.forward, exits=False)
        carry = self.ticks(carry, 0, late, fill)
        if not self.trains:
            carry = self.ticks(
                carry, late, busy, self.forward, lambda t, carry: self.evaluate(t - late, carry)
            )
            return carry.sums, of_all_rounds(carry.metrics), {}
        if self.is_1f1b:
            carry = self.ticks(
                carry, late, busy, self.forward, lambda t, carry: self.backward(t - late, carry)
            )
        else:
            carry = self.ticks(carry, late, busy, self.forward)
            carry = self.ticks(carry, 0, busy, self.backward)
        drain = functools.partial(self.backward, enters=False)
        carry = self.ticks(carry, busy, late, drain)
        own_gradients = of_all_rounds(carry.own_gradients)
        return carry.sums, of_all_rounds(carry.metrics), own_gradients | carry.shared_gradients

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
        return model.begin(model.tables(), batch.tokens, model.inputs_of(batch))[0]

    def chunk(self, leaves: dict, r):
        """A round's layers."""
        return {i: leaf[r] for i, leaf in leaves.items()}

    def layers(self, own, x, m, r):
        """Runs the stage's own layers of round r: (x, metrics)."""
        model = self.model_with(self.chunk(self.stacked, r) | own)
        x, _, metrics = model.run_layers(x, model.inputs_of(self.rows(m)))
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
        """To the next stage, or with -1 to the one before; with rounds, around."""
        S = self.stages
        pairs = [(i, (i + hop) % S) for i in range(S) if self.rounds > 1 or 0 <= i + hop < S]
        return jax.lax.ppermute(x, self.pipe, pairs)

    # ---- what it does in a tick

    def in_round(self, unit, round: int, function, x):
        """function(x) if a unit of work is in this round, else x; `unit` is alike on all devices."""
        if self.rounds == 1:
            return function(x)
        return jax.lax.cond(self.place(unit)[1] == round, function, lambda x: x, x)

    def forward(self, t, carry: Carry, exits: bool = True) -> Carry:
        """Runs a chunk forward; exits: whether a microbatch may leave the last stage."""
        unit = t - self.index
        m, r = self.place(unit)
        valid = (m >= 0) & (m < self.microbatches)
        x = self.in_round(t, 0, lambda x: jnp.where(self.index == 0, self.begin({}, m), x), carry.x)
        x = jnp.where(valid, x, BUBBLE)
        if self.trains:
            layers = functools.partial(self.layers, m=m, r=r)
            (x, metrics), pull = jax.vjp(layers, self.chunk(self.own, r), x)
            new = jax.tree.leaves(pull)
            slot = jnp.minimum(unit, self.units) % self.slots
            residuals = {i: old.at[slot].set(new[i]) for i, old in carry.residuals.items()}
            carry = carry._replace(residuals=residuals)
        else:
            x, metrics = self.layers({}, x, m, r)
        carry = carry._replace(metrics=add_to_round(carry.metrics, metrics, r, valid))
        if exits:
            unit = t - self.stages + 1  # of the last stage

            def leave(outputs):
                out = self.padded(jnp.where(self.index == self.stages - 1, x, 0), 0)
                out = jax.lax.psum_scatter(out, self.pipe, scatter_dimension=1, tiled=True)
                return outputs.at[self.place(unit)[0] % len(outputs)].set(out)

            outputs = self.in_round(unit, self.rounds - 1, leave, carry.outputs)
            carry = carry._replace(outputs=outputs)
        return carry._replace(x=self.send(x, 1))

    def backward(self, t, carry: Carry, enters: bool = True) -> Carry:
        """Runs a chunk backward; enters: whether a microbatch may enter the last stage."""
        last = self.rounds - 1
        m, back = self.place(t - (self.stages - 1 - self.index))
        r = last - back
        valid = (m >= 0) & (m < self.microbatches)
        gradient = carry.gradient
        if enters:
            sums = carry.sums, carry.shared_gradients, gradient
            enter = functools.partial(self.enter, self.place(t)[0], carry.outputs)
            sums, shared_gradients, gradient = self.in_round(t, 0, enter, sums)
            carry = carry._replace(sums=sums, shared_gradients=shared_gradients)
        gradient = jnp.where(valid, gradient, BUBBLE)
        # The residuals that don't depend on inputs are computed again, the others are kept.
        (_, metrics), pull = jax.vjp(
            functools.partial(self.layers, m=m, r=r),
            self.chunk(self.own, r),
            jnp.full_like(gradient, BUBBLE),
        )
        leaves, pull_tree = jax.tree.flatten(pull)
        unit = m + (m // self.stages * last + r) * self.stages  # of this chunk's forward pass
        for i, saved in carry.residuals.items():
            leaves[i] = saved[unit % self.slots]
        cost = {
            name: jnp.full_like(
                value, self.costs.get(name, 0) / (len(value) * self.stages * self.rounds)
            )
            for name, value in metrics.items()
        }
        new, gradient = jax.tree.unflatten(pull_tree, leaves)((gradient, cost))
        carry = carry._replace(own_gradients=add_to_round(carry.own_gradients, new, r, valid))

        def leave(shared_gradients):
            (new,) = jax.vjp(functools.partial(self.begin, m=m), self.shared)[1](
                jnp.where(valid & (self.index == 0), gradient, 0)
            )
            return add(shared_gradients, new, valid)

        first = t - self.stages + 1  # the first stage's unit
        return carry._replace(
            shared_gradients=self.in_round(first, last, leave, carry.shared_gradients),
            gradient=self.send(gradient, -1),
        )

    def enter(self, m, outputs, sums_and_gradient):
        """Microbatch m's loss, and its gradient on the last stage."""
        sums, shared_gradients, gradient = sums_and_gradient
        total, pull, count = jax.vjp(
            functools.partial(self.loss, m=m), self.shared, outputs[m % len(outputs)], has_aux=True
        )
        new, part = pull(jnp.ones_like(total))
        gathered = jax.lax.all_gather(part, self.pipe, axis=1, tiled=True)
        last = self.index == self.stages - 1
        gradient = jnp.where(last, gathered[:, : self.seq_len], gradient)
        return add(sums, (total, count)), add(shared_gradients, new), gradient

    def evaluate(self, t, carry: Carry) -> Carry:
        """Adds to the loss; t: as in `backward`."""
        loss = functools.partial(self.loss, {}, carry.outputs[0], self.place(t)[0])
        return carry._replace(sums=self.in_round(t, 0, lambda sums: add(sums, loss()), carry.sums))

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
            jax.eval_shape(lambda: (self.layers({}, x, 0, 0)[1], self.loss({}, part, 0)))
        )
        waiting = self.microbatches if self.trains and not self.is_1f1b else 1
        carry = Carry(
            shared_gradients={},
            metrics=jax.tree.map(lambda x: zeros(x, self.rounds), metrics),
            gradient=(),
            residuals={},
            outputs=zeros(part, waiting),
            own_gradients={},
            sums=sums,
            x=x,
        )
        if not self.trains:
            return carry
        layers = functools.partial(self.layers, m=0, r=0)
        own = self.chunk(self.own, 0)
        made = jax.make_jaxpr(lambda x: jax.tree.leaves(jax.vjp(layers, own, x)[1]))(x)
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


def add_to_round(sums, new, r, valid):
    """Adds to trees' round r of [v, ...], if `valid`."""

    def add_to(a, b):
        if len(a) == 1:  # XLA would copy the sum
            return a + jnp.where(valid, b, 0)[None]
        return jax.lax.dynamic_update_index_in_dim(a, a[r] + jnp.where(valid, b, 0), r, axis=0)

    return jax.tree.map(add_to, sums, new)


def of_all_rounds(tree):
    """[v, L/(vS), ...] → [L/S, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


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
