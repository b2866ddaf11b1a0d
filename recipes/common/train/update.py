"""One update of a training state by an optimizer: all at once, or layer by layer.

With moments in the host's memory (memory kind "pinned_host"; see state.abstract_state), an update
brings them to the device layer by layer. They are part of the donated state like any other array, so
the step writes them in place.
"""

from collections.abc import Callable
from functools import partial

import flax.serialization
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from recipes.common.sharding import Layout, Tree, paths
from recipes.common.sharding.abstract import nested
from recipes.common.sharding.compiler_options import platform
from zoo.strategies import VOCAB

Space = jax.memory.Space

Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # (params, their state, grads) → (…, …)


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


# ---- moments in the host's memory -----------------------------------------------------------------


def streams(layout: Layout) -> bool:
    """Whether devices have a memory of their own, so that moments should be there layer by layer.

    Simulated devices share the host's. They update all parameters at once, as without offload: in a
    loop, their compiler would round some sums differently.
    """
    return platform(layout.mesh.devices.flat[0]) != "cpu"


def stream_gradients(
    optimizer: optax.GradientTransformationExtraArgs,
    layout: Layout,
    state: Tree,
    sums: Tree,
    count: jax.Array,
    norm: jax.Array,
    finite: jax.Array | None = None,
) -> Tree:
    """Returns what `apply_gradients` does, for a state with moments in the host's memory.

    A loop updates the stacked layers one after another, so the device holds the moments of one. Other
    parameters are updated one by one.

    Args:
      optimizer: treats parameters and layers independently of each other, given `norm`.
      sums, count: gradients are sums / count.
      norm: the gradients' global norm.
      finite: False keeps the old values; None: True.
    """

    def update(params: Tree, kept: Tree, sums: Tree) -> tuple[Tree, Tree]:
        # Divided here: XLA then makes the same arithmetic of it as in `apply_gradients`.
        grads = jax.tree.map(lambda g: g / count, sums)
        shapes = jax.eval_shape(optimizer.init, params)
        opt_state = flax.serialization.from_state_dict(shapes, kept)
        updates, opt_state = optimizer.update(grads, opt_state, params, norm=norm)
        after = optax.apply_updates(params, updates), flax.serialization.to_state_dict(opt_state)
        return choose(finite, (params, kept), after)

    params, kept, sums = map(paths, (state["params"], state["opt_state"], sums))
    new_params, new_kept = dict(params), dict(kept)
    for names, parts in groups(layout):
        some, some_sums = (nested({name: tree[name] for name in names}) for tree in (params, sums))
        shapes = flax.serialization.to_state_dict(jax.eval_shape(optimizer.init, some))
        some, some_kept = _in_parts(update, parts, some, _filled(shapes, kept), some_sums)
        new_params |= paths(some)
        new_kept |= paths(some_kept)
    return state | {
        "params": _filled(state["params"], new_params),
        "opt_state": _filled(state["opt_state"], new_kept),
        "step": state["step"] + 1,
    }


def groups(layout: Layout) -> list[tuple[list[str], int]]:
    """(paths of parameters to update together, parts of their first dim to update one after another)."""
    where = paths(layout.variables()["params"])
    stacks: dict[int, list[str]] = {}
    others: list[tuple[list[str], int]] = []
    for path, axes in paths(layout.model.axes["params"]).items():
        length, *_ = where[path].sharding.shard_shape(where[path].shape)
        if layout.zoo.LOGICAL_AXES[axes[0]] == "stack":
            stacks.setdefault(length, []).append(path)
        elif axes[0] == VOCAB:  # blocks of whole tiles of eight rows, as a TPU keeps them
            others.append(([path], next((n for n in range(32, 1, -1) if length % (8 * n) == 0), 1)))
        else:
            others.append(([path], 1))
    return [*((names, length) for length, names in stacks.items()), *others]


def _in_parts(
    update: Update, parts: int, params: Tree, kept: Tree, sums: Tree
) -> tuple[Tree, Tree]:
    """Updates parameters [N, …] part by part: brings its moments, updates it, sends them back.

    Each device cuts its own share of N into equal parts.
    """

    def step(params: Tree, kept: Tree, sums: Tree) -> tuple[Tree, Tree]:
        params, new = update(params, jax.tree.map(to_device, kept), sums)
        return params, jax.tree.map(to_memory_of, kept, new)

    if parts == 1:
        return step(params, kept, sums)
    hosts = jax.tree.map(_on_host, kept)

    def moments(function: Callable, *trees: Tree) -> Tree:
        """Returns `function` of the moments, and counters from the last tree."""
        return jax.tree.map(
            lambda is_moment, *x: function(*x) if is_moment else x[-1], hosts, *trees
        )

    def part(i, now):
        def cut(x, *_):
            return _join(jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1))

        def put(whole, part):
            return jax.lax.dynamic_update_slice_in_dim(whole, _split(part, 1), i, axis=1)

        params, given = now
        mine = moments(cut, given, kept)  # all parts start with the same counters
        new_params, new = step(jax.tree.map(cut, params), mine, jax.tree.map(cut, sums))
        return jax.tree.map(put, params, new_params), moments(put, given, new)

    split = partial(_split, parts=parts)
    params, sums = jax.tree.map(split, (params, sums))
    params, new = jax.lax.fori_loop(0, parts, part, (params, moments(split, kept)))
    return jax.tree.map(_join, params), moments(_join, new)


def _split(x: jax.Array, parts: int) -> jax.Array:
    """[N, …] → [devices, parts, rows, …], without communication."""
    sharding = jax.typeof(x).sharding
    (first, *rest), (local, *_) = sharding.spec, sharding.shard_shape(x.shape)
    shape = (-1, parts, local // parts, *x.shape[1:])
    return jnp.reshape(x, shape, out_sharding=PartitionSpec(first, None, None, *rest))


def _join(x: jax.Array) -> jax.Array:
    """[devices, parts, rows, …] → [N, …]."""
    first, _, _, *rest = jax.typeof(x).sharding.spec
    return jnp.reshape(x, (-1, *x.shape[3:]), out_sharding=PartitionSpec(first, *rest))


def _filled(tree: Tree, values: dict[str, jax.Array]) -> Tree:
    """A tree with the values of these paths."""
    at = lambda path, _: values["/".join(str(key.key) for key in path)]  # noqa: E731
    return jax.tree_util.tree_map_with_path(at, tree)


def _on_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == Space.Host


def to_device(x: jax.Array) -> jax.Array:
    """Brings an array that is in the host's memory to the device."""
    return jax.device_put(x, Space.Device) if _on_host(x) else x


def to_memory_of(before: jax.Array, x: jax.Array) -> jax.Array:
    """Sends `x` to the host's memory if `before` is there."""
    return jax.device_put(x, Space.Host) if _on_host(before) else x
