"""--offload: the flag, its checks, and an update that brings moments to the device layer by layer.

With --offload=optimizer, moments are in the host's memory (memory kind "pinned_host"; see
state.abstract_state). They are part of the donated state like any other array, so the step writes
them in place.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from recipes.common.runtime import UserError, describe, flag
from recipes.common.sharding import Layout, Tree, paths, shardings
from recipes.common.sharding.abstract import nested
from recipes.common.sharding.compiler_options import platform
from recipes.common.sharding.host_memory import KIND, has_host_memory
from recipes.common.train.update import apply_gradients, choose, reshard
from zoo.core.strategies import VOCAB

Space = jax.memory.Space

Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]  # (params, their state, grads) → (…, …)


@dataclasses.dataclass(frozen=True)
class Offload:
    """The flag of commands that compile or plan a train step."""

    offload: str = flag(
        "", "What to keep in the host's memory: the optimizer's state, which a step brings to the "
        "device layer by layer; empty: nothing.", "optimizer", choices=["", "optimizer"],
        may_change=True,
    )  # fmt: skip


def check_offload(layout: Layout, offload: str) -> None:
    """Raises UserError if offloading was requested that this layout doesn't support.

    Args:
      offload: the flag.
    """
    device, remat = layout.mesh.devices.flat[0], layout.shape.remat
    check_remat(layout)
    asked = {"offload": offload} if offload else {}
    asked |= {"remat": remat} if remat == "offload" else {}
    for name, value in asked.items():
        fix = "leave it out" if name == "offload" else "use --remat=full"
        check_host_memory(name, value, device, fix)


def check_host_memory(name: str, value: str, device: jax.Device, fix: str) -> None:
    """Raises UserError if a flag needs the host's memory and a device can't copy from there."""
    if not has_host_memory(device):
        kinds = " and ".join(memory.kind for memory in device.addressable_memories())
        raise UserError(
            f"--{name}={value} needs devices with the memory kind {KIND!r}, and "
            f"{device.device_kind} has {kinds or 'none'}; {fix}"
        )


def check_remat(layout: Layout) -> None:
    """Raises UserError if layers in stages are to keep their inputs in the host's memory.

    A stage keeps what JAX's derivative of its layers returns in buffers of its own, on the device.
    """
    if layout.shape.remat == "offload" and layout.stages > 1:
        raise UserError(
            f"--remat=offload is not for a pipeline, and rules {layout.strategy!r} on "
            f"--mesh={describe(layout.mesh.shape)} have {layout.stages} stages; use --remat=full"
        )


# ---- the update ----------------------------------------------------------------------------------


def streams(layout: Layout) -> bool:
    """Whether devices have a memory of their own, so that moments should be there layer by layer.

    Simulated devices share the host's. They update all parameters at once, as without offload: in a
    loop, their compiler would round some sums differently.
    """
    return platform(layout.mesh.devices.flat[0]) != "cpu"


class Gradients(NamedTuple):
    """The gradients of a step: sums / count."""

    sums: Tree
    count: jax.Array
    norm: jax.Array  # the global norm of sums / count


def apply_offloaded(
    optimizer: optax.GradientTransformationExtraArgs,
    layout: Layout,
    state: Tree,
    gradients: Gradients,
    finite: jax.Array | None = None,
) -> Tree:
    """`apply_gradients` for a state with moments in the host's memory.

    Args:
      optimizer: treats parameters and layers independently of each other, given the norm.
      finite: False keeps the old values; None: True.
    """
    if streams(layout):
        return stream_gradients(optimizer, layout, state, gradients, finite)
    grads = jax.tree.map(lambda g: g / gradients.count, gradients.sums)
    before = state | {"opt_state": jax.tree.map(to_device, state["opt_state"])}
    after = apply_gradients(optimizer, layout, before, grads)
    after = choose(finite, before, after) | {"step": after["step"]}
    moments = jax.tree.map(to_memory_of, state["opt_state"], after["opt_state"])
    return after | {"opt_state": moments}


def stream_gradients(
    optimizer: optax.GradientTransformationExtraArgs,
    layout: Layout,
    state: Tree,
    gradients: Gradients,
    finite: jax.Array | None = None,
) -> Tree:
    """Updates layer by layer; see `apply_offloaded`.

    A loop updates the stacked layers one after another, so the device holds the moments of one. Other
    parameters are updated one by one.
    """

    def update(params: Tree, kept: Tree, sums: Tree) -> tuple[Tree, Tree]:
        # Divided here: XLA then makes the same arithmetic of it as in `apply_gradients`.
        grads = jax.tree.map(lambda g: g / gradients.count, sums)
        shapes = jax.eval_shape(optimizer.init, params)
        opt_state = flax.serialization.from_state_dict(shapes, kept)
        updates, opt_state = optimizer.update(grads, opt_state, params, norm=gradients.norm)
        after = optax.apply_updates(params, updates), flax.serialization.to_state_dict(opt_state)
        return choose(finite, (params, kept), after)

    at_rest, of_optimizer = shardings(layout.variables()["params"]), layout.optimizer_shardings()
    params = paths(reshard(state["params"], at_rest, of_optimizer))
    sums = paths(reshard(gradients.sums, at_rest, of_optimizer))
    kept = paths(state["opt_state"])
    new_params, new_kept = dict(params), dict(kept)
    for names, parts in groups(layout):
        some, some_sums = (nested({name: tree[name] for name in names}) for tree in (params, sums))
        shapes = flax.serialization.to_state_dict(jax.eval_shape(optimizer.init, some))
        some, some_kept = _in_parts(update, parts, some, _filled(shapes, kept), some_sums)
        new_params |= paths(some)
        new_kept |= paths(some_kept)
    return state | {
        "params": reshard(_filled(state["params"], new_params), of_optimizer, at_rest),
        "opt_state": _filled(state["opt_state"], new_kept),
        "step": state["step"] + 1,
    }


def groups(layout: Layout) -> list[tuple[list[str], int]]:
    """(paths of parameters to update together, parts of their first dim to update one after another)."""
    shapes, where = paths(layout.model.shapes["params"]), paths(layout.optimizer_shardings())
    stacks: dict[int, list[str]] = {}
    others: list[tuple[list[str], int]] = []
    for path, axes in paths(layout.model.axes["params"]).items():
        length, *_ = where[path].shard_shape(shapes[path].shape)
        if axes[0] in layout.names.stacks:
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

    def part(i, carry):
        def cut(x, *_):
            return _join(jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1))

        def put(parts, part):
            return jax.lax.dynamic_update_slice_in_dim(parts, _split(part, 1), i, axis=1)

        params, old = carry
        part_kept = moments(cut, old, kept)  # all parts start with the same counters
        new_params, new = step(jax.tree.map(cut, params), part_kept, jax.tree.map(cut, sums))
        return jax.tree.map(put, params, new_params), moments(put, old, new)

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
