"""Sharding by logical axis names: how the arrays of a model find their place on a mesh.

A model names the dims of its arrays by *logical* axes ("batch", "embed", "heads"). Sharding rules map
logical axes to mesh axes, and the functions below apply the rules in force:

    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        x_BD = constrain(x_BD, "batch", "act_embed")

They work on Explicit mesh axes, JAX's default, and on Auto ones. Without a mesh they do nothing, so a
model that calls them also runs on one device.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AxisType, PartitionSpec

# Logical axis → a mesh axis, several of them, or None.
Rules = dict[str, str | tuple[str, ...] | None]


def complete_tables(axes: dict[str, str], tables: dict[str, Rules]) -> dict[str, Rules]:
    """Adds None (replicated) to each table for every logical axis that it leaves out."""
    return {name: dict.fromkeys(axes) | table for name, table in tables.items()}


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shards an array by its logical axes; outside a mesh it does nothing."""
    if (where := explicit(*axes)) is not None:
        return jax.sharding.reshard(x, where)
    if (where := spec(axes)) is not None:
        return jax.lax.with_sharding_constraint(x, where)
    sharding = jax.typeof(x).sharding  # no rules divide the work: every device does all of it
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
    return x


def in_use(weights, names: dict[str, str], dtype=None):
    """Weights as their matmuls want them: cast to `dtype` and sharded by their axes in use.

    Under FSDP this is the all-gather, and on Explicit axes its transpose is the gradient's
    reduce-scatter. Sharding rules alone don't cause it: XLA is then free to gather activations and
    partial sums instead, which takes ten times the bytes.

    Args:
      weights: a module or one variable.
      names: the logical axis of a weight at rest → its name in use. Weights without such an axis, like
        a norm's scale, stay as they are.

    Returns: `weights` with these values; their `out_sharding` names the axes in use.
    """

    def gather(weight):
        w, axes = weight[...], weight.out_sharding
        if names.keys() & set(axes):
            w = w if dtype is None else w.astype(dtype)
            # Inside a scan over layers, the dim of the layers is gone.
            axes = tuple(names.get(axis, axis) for axis in axes[-w.ndim :])
            return weight.replace(constrain(w, *axes), out_sharding=axes)
        return weight if spec(()) is not None else weight.replace(constrain(w))

    return jax.tree.map(gather, weights, is_leaf=lambda x: isinstance(x, nnx.Variable))


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float, kind=None):
    """A normal float32 parameter with logical axis names; `kind` replaces nnx.Param.

    eager_sharding=False keeps the names inert: they wait for rules instead of requiring a mesh.
    """
    value = stddev * jax.random.normal(rngs.params(), shape)
    return (kind or nnx.Param)(value, out_sharding=axes, eager_sharding=False)


def reshape(x: jax.Array, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    """The array with other dims, whose logical axes are `axes`."""
    return constrain(jnp.reshape(x, shape, out_sharding=explicit(*axes)), *axes)


def per_device(function, arrays, axes, check_vma: bool = True):
    """function(*arrays) on each device's own shards, for computations that XLA can't partition.

    Args:
      axes: the logical axes of each array, or None for an array that is None. The result has those of
        the first array.
      check_vma: passed to jax.shard_map; Pallas kernels don't support it.
    """
    pairs = list(zip(arrays, axes, strict=True))
    given = [x if x is None else constrain(x, *names) for x, names in pairs]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # arrays on Explicit axes still know theirs
        mesh = jax.typeof(given[0]).sharding.mesh
    if mesh.empty:
        return function(*given)
    specs = tuple(x if x is None else jax.typeof(x).sharding.spec for x in given)
    if spec(()) is not None:  # types don't show Auto axes
        specs = tuple(spec(names) for names in axes)
    local = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma
    )
    return local(*given)


# ---- the rules and the mesh in force -------------------------------------------------------------


def spec(axes: tuple[str | None, ...]) -> PartitionSpec | None:
    """Logical axes → PartitionSpec by the rules in force; None without rules or without a mesh."""
    rules = dict(get_logical_axis_rules() or ())
    if not rules or jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(rules[axis] if axis else None for axis in axes))


def explicit(*axes: str | None) -> PartitionSpec | None:
    """`out_sharding` for an operation whose result Explicit mesh axes can't infer; else None."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return spec(axes) if AxisType.Explicit in kinds else None


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes over which the rules in force split a logical axis."""
    where = spec((axis,)) or (None,)
    return () if where[0] is None else (where[0],) if isinstance(where[0], str) else where[0]


def shards(axis: str) -> int:
    """The number of parts into which the rules in force split a logical axis."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in mesh_axes(axis))


def device():
    """A device of the mesh in force, abstract where the mesh is; without a mesh the default one."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
