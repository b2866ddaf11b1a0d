"""Sharding by logical axis names: maps the dims of a model's arrays to the axes of a mesh.

A model names the dims of its arrays by *logical* axes ("batch", "embed", "heads"). Sharding rules
map logical axes to mesh axes, and the functions below apply the active rules:

    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        x_BD = constrain(x_BD, "batch", "act_embed")

They work on Explicit mesh axes, JAX's default, and on Auto ones. Without a mesh they do nothing, so
a model that calls them also runs on one device.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AxisType, PartitionSpec

# Logical axis → a mesh axis, several of them, or None.
Rules = dict[str, str | tuple[str, ...] | None]


def complete_tables(axes: dict[str, str], tables: dict[str, dict]) -> dict[str, Rules]:
    """Completes sharding rules: axes that a strategy leaves out map to None (replicated)."""
    return {name: dict.fromkeys(axes) | table for name, table in tables.items()}


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shards an array by its logical axes; does nothing without a mesh."""
    if (where := explicit(*axes)) is not None:
        return jax.sharding.reshard(x, where)
    if (where := spec(axes)) is not None:
        return jax.lax.with_sharding_constraint(x, where)
    sharding = jax.typeof(x).sharding  # without rules, every device does all of the work
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
    return x


def in_use(weights, names: dict[str, str], dtype=None):
    """Prepares weights for matmuls: casts them to `dtype` and reshards them to their axes in use.

    Under FSDP this is the all-gather, and on Explicit axes its transpose is the gradient's
    reduce-scatter. Without it, XLA is free to gather activations and partial sums instead, which
    sends ten times the bytes.

    Args:
      weights: a module or one variable.
      names: logical axis of a weight at rest → its name in use. Weights without such an axis, such
        as a norm's scale, are neither cast nor split.

    Returns: `weights` with the new values; their `out_sharding` holds the axes in use.
    """

    def gather(weight):
        w, axes = weight[...], weight.out_sharding
        if names.keys() & set(axes):
            w = w if dtype is None else w.astype(dtype)
            # Inside a scan over layers, weights have no layer dim.
            axes = tuple(names.get(axis, axis) for axis in axes[-w.ndim :])
            return weight.replace(constrain(w, *axes), out_sharding=axes)
        return weight if spec(()) is not None else weight.replace(constrain(w))

    return jax.tree.map(gather, weights, is_leaf=lambda x: isinstance(x, nnx.Variable))


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float, kind=None):
    """A float32 parameter with normally distributed values and logical axis names.

    eager_sharding=False keeps the names inert, so that building a model needs no mesh.

    Args:
      kind: the variable's class; None: nnx.Param.
    """
    value = stddev * jax.random.normal(rngs.params(), shape)
    return (kind or nnx.Param)(value, out_sharding=axes, eager_sharding=False)


def reshape(x: jax.Array, shape: tuple[int, ...], *axes: str | None) -> jax.Array:
    """Reshapes an array; `axes` are the logical axes of its new dims."""
    return constrain(jnp.reshape(x, shape, out_sharding=explicit(*axes)), *axes)


def per_device(function, arrays, axes, check_vma: bool = True):
    """Runs function(*arrays) on each device's own shards, for code that XLA can't partition.

    Args:
      axes: the logical axes of each array; None for an array that is None. The result has the axes
        of the first array.
      check_vma: passed to jax.shard_map; Pallas kernels don't support it.
    """
    pairs = list(zip(arrays, axes, strict=True))
    given = [x if x is None else constrain(x, *names) for x, names in pairs]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # an array on Explicit axes carries its mesh
        mesh = jax.typeof(given[0]).sharding.mesh
    if mesh.empty:
        return function(*given)
    specs = tuple(x if x is None else jax.typeof(x).sharding.spec for x in given)
    if spec(()) is not None:  # array types don't show Auto axes
        specs = tuple(spec(names) for names in axes)
    local = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma
    )
    return local(*given)


# ---- the active rules and mesh -------------------------------------------------------------------


def spec(axes: tuple[str | None, ...]) -> PartitionSpec | None:
    """The PartitionSpec of these logical axes by the active rules; None without rules or a mesh."""
    rules = dict(get_logical_axis_rules() or ())
    if not rules or jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(rules[axis] if axis else None for axis in axes))


def explicit(*axes: str | None) -> PartitionSpec | None:
    """`out_sharding` for an operation whose sharding JAX can't infer; None on Auto axes."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return spec(axes) if AxisType.Explicit in kinds else None


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes over which the active rules split a logical axis."""
    where = spec((axis,)) or (None,)
    return () if where[0] is None else (where[0],) if isinstance(where[0], str) else where[0]


def shards(axis: str) -> int:
    """The number of parts into which the active rules split a logical axis."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in mesh_axes(axis))


def device():
    """A device of the active mesh (abstract if the mesh is); the default device without a mesh."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
