"""Pipelines: a model's layers in stages, on the devices along a mesh axis.

layers.objective uses this file if the rules split the layers, so a model can be copied without it.

Shapes: B batch, T positions, S stages, M microbatches.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from .layers import add_costs, begin, finish, vocabulary_tables
from .sharding import in_use, mesh_axes, per_device, shards

BUBBLE = 0.0  # the input of a waiting stage; no result depends on it


def microbatches(config, rows: int, stages: int) -> int:
    """M: at most config.pipe_microbatches, or 4 per stage if that is 0; divides a device's rows."""
    most = config.pipe_microbatches or min(rows, 4 * stages)
    return next(m for m in range(most, 0, -1) if rows % m == 0)


def in_stages(model, batch, names):
    """`layers.objective` in stages; its forward pass also computes the gradients."""
    weights, tree = jax.tree.flatten(model)
    if hasattr(model, "mtp"):
        raise ValueError("a pipeline has no stage for the layer of mtp_depth=1; use mtp_depth=0")

    @jax.custom_vjp
    def objective(weights, batch):
        return _sharded(jax.tree.unflatten(tree, weights), batch, names, [])[0]

    def forward(weights, batch):
        trained = [i for i, weight in enumerate(weights) if weight.perturbed]
        is_input = lambda x: hasattr(x, "perturbed")  # noqa: E731
        weights, batch = jax.tree.map(lambda x: x.value, (weights, batch), is_leaf=is_input)
        return _sharded(jax.tree.unflatten(tree, weights), batch, names, trained)

    def backward(gradients, cotangents):
        scaled = {i: gradient * cotangents[0] for i, gradient in gradients.items()}
        return [scaled.get(i) for i in range(len(weights))], None

    objective.defvjp(forward, backward, symbolic_zeros=True)
    return objective(weights, batch)


def _sharded(model, batch, names, trained: list[int]):
    """Runs `_stage` on each device. Returns (the result of `in_stages`, leaf → its gradient).

    Weights are gathered once before it, and gradients are summed once after it. The rules still
    govern mesh axes that split neither layers nor rows.
    """
    pipe, rows, S = mesh_axes("layers"), mesh_axes("batch"), shards("layers")
    used = in_use(model, names, model.config.dtype)
    weights, tree = jax.tree.flatten(used)

    def split(axes):  # mesh axes that split each dim of a weight
        axes = (mesh_axes(axis, manual=True) for axis in axes)
        return [tuple(name for name in names if name in (*pipe, *rows)) for names in axes]

    at_rest, inside = ([split(axes) for axes in _axes(m)] for m in (model, used))

    def reduce(i, gradient):
        """The sum over devices; if the weight is split at rest, this device's part of it."""
        left = {*pipe, *rows}.difference(*inside[i])
        for dim, (rest, held) in enumerate(zip(at_rest[i], inside[i], strict=True)):
            if over := tuple(name for name in rest if name not in held):
                # With more than one dim after it, the TPU compiler would all-reduce it instead.
                outer, inner = gradient.shape[: dim + 1], gradient.shape[dim + 1 :]
                flat = gradient.reshape(*outer, *([-1] if inner else []))
                part = jax.lax.psum_scatter(flat, over, scatter_dimension=dim, tiled=True)
                gradient, left = part.reshape(*part.shape[: dim + 1], *inner), left - {*over}
        # Not tuple(left): each process must sum in the same order of axes, or programs differ.
        over = tuple(name for name in (*pipe, *rows) if name in left)
        return jax.lax.psum(gradient, over) if over else gradient

    def on_device(weights, batch):
        model = jax.tree.unflatten(tree, weights)
        sums, figures, gradients = _stage(model, batch, trained, pipe, S)
        sums, figures = jax.lax.psum(sums, (*pipe, *rows)), jax.lax.psum(figures, rows)
        # Per device along other axes too, or XLA would gather gradients over them first.
        for i, gradient in gradients.items():
            of_leaf, axes = functools.partial(reduce, i), _axes(used)[i]
            gradients[i] = per_device(of_leaf, [gradient], [axes], check_vma=False)
        return sums, figures, gradients

    def specs(every):
        return [PartitionSpec(*(names or None for names in dims)) for dims in every]

    outer, gradients = (PartitionSpec(), PartitionSpec(pipe)), specs(at_rest)
    run = jax.shard_map(
        on_device,
        in_specs=(specs(inside), PartitionSpec(rows)),
        out_specs=(*outer, {i: gradients[i] for i in trained}),
        axis_names={*pipe, *rows},
        check_vma=False,  # kernels don't support it
    )
    whole = [jax.typeof(w).sharding.spec for w in jax.tree.leaves(model)]
    run: Any = jax.sharding.auto_axes(run, out_sharding=(*outer, {i: whole[i] for i in trained}))
    (total, count), figures, gradients = run(weights, batch)
    aux = {"loss": (total, count)}
    return (add_costs(model, total, figures), count, aux, figures), gradients


def _axes(model) -> list[tuple]:
    """The logical axes of each leaf."""
    variables = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [variable.out_sharding for variable in variables]


def _stage(model, batch, trained: list[int], pipe: tuple[str, ...], S: int):
    """One device's work: runs its layers on one microbatch after another, and back.

    In tick t, stage s runs microbatch t - s forward and hands it to the next stage. The output of
    the last stage is split along T, so that all stages share the loss; its gradient is gathered.
    `kept` holds what layers save for their backward pass: of 2S - 1 microbatches with 1F1B
    (Narayanan et al. 2021), of all M with GPipe (Huang et al. 2019).

    Returns: ((total, count), figures, leaf → gradient), summed over this device's work.
    """
    config, s, (B, T) = model.config, jax.lax.axis_index(pipe), batch[0].shape
    weights, tree = jax.tree.flatten(model)
    stacked = [axes[0] == "layers" for axes in _axes(model)]
    own, common = ({i: weights[i] for i in trained if stacked[i] is kind} for kind in (True, False))
    M, is_1f1b = microbatches(config, B, S), config.pipeline == "1f1b"
    slots = 2 * S - 1 if is_1f1b else M + 1  # the last slot is for the bubble

    def filled(values):
        return jax.tree.unflatten(tree, [values.get(i, w) for i, w in enumerate(weights)])

    def rows(m):
        return jax.tree.map(lambda x: x.reshape(M, B // M, T)[jnp.clip(m, 0, M - 1)], batch)

    def start(common, m):
        model = filled(common)
        return begin(model, vocabulary_tables(model), rows(m))

    def run(own, x, m):
        return filled(own).run(x, *rows(m))

    def loss(common, x, m):  # x: this device's part of T
        model, cut, size = filled(common), jax.lax.dynamic_slice_in_dim, x.shape[1]
        targets = cut(padded(rows(m)[1], -1), s * size, size, axis=1)
        return finish(model, vocabulary_tables(model), x, targets)

    def padded(x, value):
        return jnp.pad(x, ((0, 0), (0, -T % S), *[(0, 0)] * (x.ndim - 2)), constant_values=value)

    def add(sums, new, valid=True):
        return jax.tree.map(lambda a, b: a + jnp.where(valid, b, 0), sums, new)

    def send(x, hop):  # to the next stage, or with -1 to the one before
        pairs = [(i, i + hop) for i in range(S) if 0 <= i + hop < S]
        return jax.lax.ppermute(x, pipe, pairs)

    def forward(t, now, exits=True):
        m = t - s
        valid = (m >= 0) & (m < M)
        x = jnp.where(valid, jnp.where(s == 0, start({}, m), now["x"]), BUBBLE)
        if trained:
            (x, figures), pull = jax.vjp(functools.partial(run, m=m), own, x)
            new, slot = jax.tree.leaves(pull), jnp.minimum(m, M) % slots
            now["kept"] = {i: old.at[slot].set(new[i]) for i, old in now["kept"].items()}
        else:
            x, figures = run({}, x, m)
        now["figures"] = add(now["figures"], figures, valid)
        if exits:
            out = padded(jnp.where(s == S - 1, x, 0), 0)
            out = jax.lax.psum_scatter(out, pipe, scatter_dimension=1, tiled=True)
            now["out"] = now["out"].at[(t - S + 1) % len(now["out"])].set(out)
        return now | {"x": send(x, 1)}

    def backward(t, now, enters=True):
        m, grad = t - (S - 1 - s), now["grad"]
        valid = (m >= 0) & (m < M)
        if enters:
            out = now["out"][t % len(now["out"])]
            total, pull, count = jax.vjp(functools.partial(loss, m=t), common, out, has_aux=True)
            new, part = pull(jnp.ones_like(total))
            now["sums"], now["common"] = add(now["sums"], (total, count)), add(now["common"], new)
            whole = jax.lax.all_gather(part, pipe, axis=1, tiled=True)[:, :T]
            grad = jnp.where(s == S - 1, whole, grad)
        grad = jnp.where(valid, grad, BUBBLE)
        (_, figures), pull = jax.vjp(functools.partial(run, m=m), own, jnp.full_like(grad, BUBBLE))
        leaves, how = jax.tree.flatten(pull)  # `kept` has those that depend on inputs
        for i, waiting in now["kept"].items():
            leaves[i] = waiting[m % slots]
        cost = {k: jnp.full_like(v, model.costs.get(k, 0) / len(v) / S) for k, v in figures.items()}
        new, grad = jax.tree.unflatten(how, leaves)((grad, cost))
        now["own"] = add(now["own"], new, valid)
        (new,) = jax.vjp(functools.partial(start, m=m), common)[1](
            jnp.where(valid & (s == 0), grad, 0)
        )
        return now | {"common": add(now["common"], new, valid), "grad": send(grad, -1)}

    def evaluate(t, now):
        return now | {"sums": add(now["sums"], loss({}, now["out"][0], t))}

    def ticks(now, first, count, *steps):
        def tick(now, t):
            for step in steps:
                now = step(t, now)
            return now, None

        return jax.lax.scan(tick, now, jnp.arange(first, first + count))[0]

    def zeros(tree, *first, dtype=None):
        return jax.tree.map(lambda x: jnp.zeros((*first, *x.shape), dtype or x.dtype), tree)

    x, late = zeros(jax.eval_shape(functools.partial(start, m=0), {})), S - 1
    part = padded(x, 0)[:, : -(-T // S)]
    shapes = jax.eval_shape(lambda: (run({}, x, 0)[1], loss({}, part, 0)))
    now = dict(zip(("figures", "sums"), zeros(shapes), strict=True)) | {"x": x}
    now["out"] = zeros(part, M if trained and not is_1f1b else 1)
    if trained:
        made = jax.make_jaxpr(
            lambda x: jax.tree.leaves(jax.vjp(functools.partial(run, m=0), own, x)[1])
        )(x)
        now["kept"] = {i: zeros(made.out_avals[i], slots) for i in _made_of_inputs(made.jaxpr)}
        now |= {"grad": x, "own": zeros(own, dtype="float32")}
        now |= {"common": zeros(common, dtype="float32")}
    now = ticks(now, 0, late, functools.partial(forward, exits=False))
    if not trained:
        now = ticks(now, late, M, forward, lambda t, now: evaluate(t - late, now))
        return now["sums"], now["figures"], {}
    if is_1f1b:
        now = ticks(now, late, M, forward, lambda t, now: backward(t - late, now))
    else:
        now = ticks(ticks(now, late, M, forward), 0, M, backward)
    now = ticks(now, M, late, functools.partial(backward, enters=False))
    return now["sums"], now["figures"], now["own"] | now["common"]


def _made_of_inputs(jaxpr) -> list[int]:
    """The outputs of a jaxpr that depend on its inputs."""
    made = {id(v) for v in jaxpr.invars}
    for equation in jaxpr.eqns:
        if made & {id(v) for v in equation.invars}:
            made |= {id(v) for v in equation.outvars}
    return [i for i, v in enumerate(jaxpr.outvars) if id(v) in made]
