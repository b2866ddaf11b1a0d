"""Sharding by logical axis names: maps the dims of a model's arrays to the axes of a mesh.

A model names the dims of its arrays by *logical* axes ("batch", "embed", "heads"). Sharding rules
map logical axes to mesh axes, and the functions below apply the active rules:

    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        x_BD = constrain(x_BD, "batch", "act_embed")

They work on Explicit mesh axes, JAX's default, and on Auto ones. Without a mesh they do nothing, so
a model that calls them also runs on one device.
"""

import dataclasses
import difflib
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AxisType, PartitionSpec

# Logical axis → a mesh axis, several of them, or None.
Rules = dict[str, str | tuple[str, ...] | None]

# The logical axis of a dim; a tuple: the dim is split over the mesh axes of each; None: replicated.
Axis = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisNames:
    """The logical axes of a model, and what rules may do with them."""

    # Logical axis → whether activations, weights or both have it. A "stack" is scanned layer by
    # layer; only a pipeline splits it.
    logical_axes: dict[str, str]
    in_use: dict[str, str]  # a weight's axis at rest → its name in use, so that the two can differ
    # Axes of `in_use` along which a layer gathers weights itself, so that it gets them as at rest.
    gathered_by_layers: tuple[str, ...] = ()
    # Dims that need not be divisible by their mesh axes, and what happens then: "padded" or
    # "replicated". Others are an error.
    uneven: dict[str, str] = dataclasses.field(default_factory=dict)
    # An axis that some activations have in place of another → that other one.
    substitutes: dict[str, str] = dataclasses.field(default_factory=dict)
    # The axes of a row's positions T: of the second dim of a batch's arrays, of the residual stream.
    positions: tuple[str, ...] = ()
    # An axis → the one whose mesh axes have to include its own.
    within: dict[str, str] = dataclasses.field(default_factory=dict)

    def while_used(self, axis: str) -> str:
        """The name in use of a weight's axis at rest."""
        return self.in_use.get(axis, axis)

    @property
    def in_use_by_layers(self) -> dict[str, str]:
        """`in_use` for the weights of a layer."""
        return self.in_use | {axis: axis for axis in self.gathered_by_layers}

    @property
    def stream(self) -> str:
        """The axis in use of the residual stream's D, which comes first in `in_use`."""
        return next(iter(self.in_use.values()), "")

    @property
    def stacks(self) -> set[str]:
        """The axes along which layers are stacked."""
        return {axis for axis, on in self.logical_axes.items() if on == "stack"}


def complete_tables(axes: dict[str, str], tables: dict[str, dict]) -> dict[str, Rules]:
    """Completes sharding rules: axes that a strategy leaves out map to None (replicated).

    Raises ValueError if a strategy names an axis that is not among `axes`.
    """
    for table in tables.values():
        check_names(table, axes)
    return {name: dict.fromkeys(axes) | table for name, table in tables.items()}


def check_rules(axes: dict[str, str]) -> None:
    """Raises ValueError if the active rules name other logical axes than these, or lack one.

    A model calls this first: JAX would ignore a misspelled axis and replicate the weight.
    """
    if rules := active_rules():
        check_names(rules, axes)
        if missing := [axis for axis in axes if axis not in rules]:
            raise ValueError(
                f"the sharding rules lack logical axis {missing[0]!r}; complete(...), at the end of "
                "the model's file, adds it as replicated"
            )


def check_names(rules: Rules, axes: dict[str, str]) -> None:
    """Raises ValueError if rules name a logical axis that is not among `axes`."""
    optimizer_axes = {optimizer_axis(axis) for axis, on in axes.items() if on != "activations"}
    for axis in rules:
        if axis not in axes and axis not in optimizer_axes:
            near = difflib.get_close_matches(axis, {*axes, *optimizer_axes}, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(axes)}"
            raise ValueError(f"the model has no logical axis {axis!r}; {hint}")


def optimizer_axis(axis: str) -> str:
    """The name that a weight's logical axis has in the optimizer's state.

    Rules that leave it out split the state as they split the weight.
    """
    return f"optimizer_{axis}"


def optimizer_axes(axes: tuple[str, ...], rules: Rules) -> tuple[str, ...]:
    """The logical axes of a weight's optimizer state: those that rules name, else the weight's."""
    pairs = ((axis, optimizer_axis(axis)) for axis in axes)
    return tuple(own if own in rules else axis for axis, own in pairs)


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """Shards an array by its logical axes; does nothing without a mesh."""
    if (explicit_spec := explicit(*axes)) is not None:
        return jax.sharding.reshard(x, explicit_spec)
    if (auto_spec := spec(axes)) is not None:
        return jax.lax.with_sharding_constraint(x, auto_spec)
    sharding = jax.typeof(x).sharding  # without rules, every device does all of the work
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))
    return x


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class WeightAndSlot:
    """A weight at rest, and zeros in the layout of its optimizer state: a slot for its gradient.

    The gradient accumulates in the slot's layout. JAX lays out a gradient like its primal, so a
    replicated weight's would be all-reduced in full, in every iteration of a loop over layers.
    """

    weight: Any
    slot: Any

    def in_use(self, dtype) -> jax.Array:
        """The weight in `dtype`; its gradient is scattered in `dtype` too."""
        slot_spec = jax.typeof(self.slot).sharding.spec

        @jax.custom_vjp
        def use(weight, slot):
            return weight

        def backward(_, gradient):
            return None, jax.sharding.reshard(gradient, slot_spec).astype(self.slot.dtype)

        use.defvjp(lambda weight, slot: (weight, None), backward)
        return use(self.weight.astype(dtype), self.slot)


def has_slot(weight) -> bool:
    """Whether this is a WeightAndSlot."""
    return isinstance(weight, WeightAndSlot)


def cast(weight, dtype=None) -> jax.Array:
    """A weight in `dtype`, or in its own if that is None; the gradient of one with a slot is the slot's."""
    if has_slot(weight):
        return weight.in_use(dtype or weight.weight.dtype)
    return weight.astype(dtype or weight.dtype)


def in_use(weights, names: dict[str, str], dtype=None):
    """Casts a module's or variable's weights to `dtype` and reshards them to their axes in use.

    Under FSDP this is the all-gather, and on Explicit axes its transpose is the gradient's
    reduce-scatter. Without it, XLA is free to gather activations and partial sums instead, which
    sends ten times the bytes. Returns `weights` with the new values and axes in `out_sharding`.

    Args:
      names: logical axis of a weight at rest → its name in use. Weights without such an axis, such
        as a norm's scale, are neither cast nor split.
    """

    def gather(weight):
        w, axes = weight.get_value(), weight.out_sharding
        if names.keys() & set(axes):
            w = cast(w, dtype)
            # Inside a scan over layers, weights have no layer dim.
            axes = tuple(names.get(axis, axis) for axis in axes[-w.ndim :])
            w = constrain(w, *axes)
            return weight.replace(w, out_sharding=axes)
        return weight if active_rules() else weight.replace(constrain(w))

    return jax.tree.map(gather, weights, is_leaf=lambda x: isinstance(x, nnx.Variable))


def auto(function, *axes: Axis) -> Any:
    """A function for whose result JAX can't infer the sharding: these are its logical axes."""
    out_spec = explicit(*axes)
    return function if out_spec is None else jax.sharding.auto_axes(function, out_sharding=out_spec)


def param(rngs: nnx.Rngs, shape: tuple, axes: tuple[str, ...], stddev: float, kind=nnx.Param):
    """A float32 variable of class `kind` with normally distributed values and logical axis names."""
    return variable(stddev * jax.random.normal(rngs.params(), shape), axes, kind)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...], kind: Any = nnx.Param):
    """A float32 variable of class `kind` of zeros, such as a bias, with logical axis names."""
    return variable(jnp.zeros(shape), axes, kind)


def ones(shape: tuple[int, ...], axes: tuple[str, ...], kind: Any = nnx.Param):
    """A float32 variable of class `kind` of ones, such as a norm's scale, with logical axis names."""
    return variable(jnp.ones(shape), axes, kind)


def variable(value: jax.Array, axes: tuple[str, ...], kind: Any = nnx.Param):
    """A variable of class `kind` with logical axis names."""
    # Names stay inert, so that building a model needs no mesh.
    return kind(value, out_sharding=axes, eager_sharding=False)


def reshape(x: jax.Array, shape: tuple[int, ...], *axes: Axis) -> jax.Array:
    """Reshapes an array; `axes` are the logical axes of its new dims."""
    return constrain(jnp.reshape(x, shape, out_sharding=explicit(*axes)), *axes)


def per_device(function, arrays, axes, out_axes=None, check_vma: bool = True):
    """Runs function(*arrays) on each device's own shards, for code that XLA can't partition.

    `axes`: the logical axes of each array, which may be None. out_axes: of the result, or a list of
    those of several results; None: as the first array's. check_vma: passed to jax.shard_map; Pallas
    kernels don't support it.
    """
    pairs = list(zip(arrays, axes, strict=True))
    operands = [x if x is None else constrain(x, *names) for x, names in pairs]
    specs = tuple(x if x is None else spec(names) or PartitionSpec() for x, names in pairs)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # an array on Explicit axes carries its mesh
        mesh = jax.typeof(operands[0]).sharding.mesh
    if mesh.empty:
        return function(*operands)
    if isinstance(out_axes, list):
        out_spec = [spec(names) or PartitionSpec() for names in out_axes]
    else:
        out_spec = specs[0] if out_axes is None else spec(out_axes) or PartitionSpec()
    auto_axes = {*mesh.axis_names} - {*mesh.manual_axes}  # a pipeline is per device along some axes
    if not auto_axes:
        return function(*operands)
    local = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=specs,
        out_specs=out_spec,
        axis_names=auto_axes,
        check_vma=check_vma,
    )
    return local(*operands)


# ---- the active rules and mesh -------------------------------------------------------------------


def active_rules() -> Rules:
    """The sharding rules in force; {} without rules or a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(get_logical_axis_rules() or ())


def spec(axes: tuple[Axis, ...]) -> PartitionSpec | None:
    """The PartitionSpec of these logical axes by the active rules; None without rules or a mesh."""
    return PartitionSpec(*map(mesh_axes, axes)) if active_rules() else None


def explicit(*axes: Axis) -> PartitionSpec | None:
    """`out_sharding` for an operation whose sharding JAX can't infer; None on Auto axes."""
    axis_types = jax.sharding.get_abstract_mesh().axis_types
    return spec(axes) if AxisType.Explicit in axis_types else None


def mesh_axes(axis: Axis, manual: bool = False) -> tuple[str, ...]:
    """The mesh axes over which the active rules split a logical axis.

    Args:
      manual: whether to name those along which this code already runs per device, in a pipeline.
    """
    rules = active_rules()
    if not rules:
        return ()
    hidden = () if manual else jax.sharding.get_abstract_mesh().manual_axes
    names = axis if isinstance(axis, tuple) else (axis,)
    targets = [rules[name] or () for name in names if name]
    every = (n for target in targets for n in ((target,) if isinstance(target, str) else target))
    return tuple(name for name in every if name not in hidden)


def shards(axis: Axis) -> int:
    """The number of parts into which the active rules split a logical axis."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in mesh_axes(axis))


def device():
    """A device of the active mesh (abstract if the mesh is); the default device without a mesh."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
