"""Layouts: (model, sharding rules, mesh) → the sharding of every array of a training state.

Layouts are checked before anything is allocated. Init, restore, optimizer and report all use them.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from recipes.common.runtime import UserError
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.abstract import AbstractModel, Tree, abstract_model
from recipes.common.sharding.compiler_options import compiler_options, platform
from recipes.common.sharding.host_memory import result
from recipes.common.sharding.rules import Rules, partition_spec
from recipes.common.sharding.shape import Shape, check_length, shape_of, stated_dtype
from zoo.core.sharding import AxisNames, optimizer_axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """A model under one set of sharding rules on one mesh: the sharding of all its arrays."""

    mesh: Any  # Mesh; an AbstractMesh is enough to trace
    strategies: dict[str, Rules]  # all of the model's RULES
    config: Any
    strategy: str  # name of the rules
    rules: Rules  # to compute with
    uneven: Rules  # requested rules that weights at rest don't follow; see rules.fit
    build: Callable[[], nnx.Module]
    model: AbstractModel
    batch_size: int  # 0: no batches
    seq_len: int  # positions of a row; 0: none, or lengths that are padded to suit `seq_shards`
    pictures: int = 1  # slots of a row, for a model that sees

    @functools.cached_property
    def shape(self) -> Shape:
        return shape_of(self.model, self.config)

    @property
    def dtype(self) -> str | None:
        """The dtype of activations, if the model has a config that states it."""
        return stated_dtype(self.config)

    @property
    def names(self) -> AxisNames:
        """The model's logical axes."""
        return self.model.names

    @property
    def rules_at_rest(self) -> Rules:
        """The rules for weights and optimizer state at rest."""
        return self.rules | {axis: None for axis in self.uneven if axis in self.rules}

    def variables(self) -> Tree:
        """The model's variables as ShapeDtypeStructs, each with its NamedSharding."""
        rest = self.rules_at_rest
        return jax.tree.map(
            lambda axes, leaf: jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=NamedSharding(self.mesh, partition_spec(axes, rest)),
            ),
            self.model.axes,
            self.model.shapes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def optimizer_shardings(self) -> Tree:
        """For each trained parameter, the sharding of its arrays in the optimizer's state."""
        rest = self.rules_at_rest
        return jax.tree.map(
            lambda axes: NamedSharding(self.mesh, partition_spec(optimizer_axes(axes, rest), rest)),
            self.model.axes["params"],
            is_leaf=lambda x: isinstance(x, tuple),
        )

    def sharding(self, *axes: str) -> NamedSharding:
        """The sharding of an array whose dims have these logical axes."""
        return NamedSharding(self.mesh, partition_spec(axes, self.rules))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Logical axes of the first dims of a batch's arrays: rows, and positions if it has any.

        A model states the axes of arrays that differ, such as those of pictures.
        """
        return ("batch", *self.names.positions[:1])

    def batch_shardings(self, batch: Tree) -> Tree:
        """The sharding of each array of a batch, given the arrays, ShapeDtypeStructs or one."""
        stated = dict(self.model.batch_axes)

        def sharding(path, x) -> NamedSharding:
            name = str(path[-1].key) if path and "key" in dir(path[-1]) else ""
            axes = stated.get(name, self.batch_axes)
            return self.sharding(*axes[: len(x.shape)])

        return jax.tree_util.tree_map_with_path(sharding, batch)

    def count_shards(self, *axes: str) -> int:
        """Number of parts into which these logical axes are divided."""
        return math.prod(
            sharding_rules.count_shards(self.rules, axis, self.mesh.shape) for axis in axes
        )

    @property
    def batch_shards(self) -> int:
        """Number of parts into which the rows of a batch are divided."""
        return self.count_shards("batch")

    @property
    def seq_shards(self) -> int:
        """Number of parts into which the positions of a row are divided; 1 without positions."""
        return self.count_shards(*self.batch_axes[1:])

    @property
    def stages(self) -> int:
        """Number of parts into which the stacked layers are divided; 1 without a pipeline."""
        return self.count_shards(*self.names.stacks)

    def check_whole(self, what: str) -> None:
        """Raises UserError if layers are in stages, and `what` needs all of them on a device."""
        if self.stages > 1:
            mesh = sharding_rules.describe(self.mesh.shape)
            raise UserError(
                f"{what} needs all layers on every device, and --mesh={mesh} has them in "
                f"{self.stages} stages (rules {self.strategy!r}); use --mesh={self.mesh.size}"
            )

    @property
    def process_rows(self) -> np.ndarray:
        """The rows of a batch that this process's devices hold, and so the rows that it reads.

        Often a contiguous share. On TPUs, where a mesh follows the rings of the chips, the devices of
        a process may lie apart; and each process needs all rows if the mesh splits something else
        between the processes, such as the rows' positions.
        """
        size, rows = self.batch_size, self.sharding("batch")
        parts = rows.addressable_devices_indices_map((size,)).values()  # JAX remembers it
        held = {part[0].indices(size) for part in parts if part is not None}
        return np.concatenate([np.arange(*part) for part in sorted(held)])

    @property
    def idle_axes(self) -> list[str]:
        """Mesh axes of size above 1 that the rules never use."""
        used = sharding_rules.used_axes(self.rules)
        return [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in used]

    def abstract_batch(self, example: Tree) -> Tree:
        """`batch_size` examples stacked, as ShapeDtypeStructs: what the step is compiled for."""
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.batch_size, *x.shape), x.dtype), example
        )
        return jax.tree.map(
            lambda x, sharding: x.update(sharding=sharding), batch, self.batch_shardings(batch)
        )

    @contextlib.contextmanager
    def trace(self):
        """A context to trace in: the model's constraints follow these rules on this mesh.

        jax.jit's cache ignores the rules: trace each function under one layout only.
        """
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            with nnx.logical_axis_rules(tuple(self.rules.items())):
                yield

    def lower(self, function: Callable, *arguments: Tree, **jit_options) -> jax.stages.Lowered:
        """Lowers `function` for this layout and these arguments' shapes and shardings."""
        target = platform(self.mesh.devices.flat[0])
        options = compiler_options(self.mesh, self.dtype) | jit_options.pop("compiler_options", {})
        with self.trace():
            traced = jax.jit(function, compiler_options=options, **jit_options).trace(*arguments)
            # JAX would ask the local GPUs for their platform, but there may be none.
            return traced.lower(lowering_platforms=("cuda",) if target == "cuda" else None)

    def compile(self, function: Callable, *arguments: Tree, **jit_options) -> jax.stages.Compiled:
        """Lowers and compiles `function`."""
        return self.lower(function, *arguments, **jit_options).compile()


def make_layout(
    model: type,
    config,
    mesh: Mesh | AbstractMesh,
    rules: str | Rules | None = None,
    *,
    seed: int = 0,
    batch_size: int = 0,
    microbatches: int = 1,
    seq_len: int = 0,
) -> Layout:
    """Checks that model, rules and mesh fit each other; allocates nothing. Raises UserError.

    Args:
      model: an entry's class, which declares its `axes`; its file also has RULES.
      rules: a key of RULES, a .json file, or a dict of your own; empty: the default for the mesh.
      seed: seed of the parameters.
      batch_size: examples per step, over all devices; 0: no batches.
      microbatches: gradient-accumulation steps per batch.
      seq_len: positions of each row; 0: none, or lengths that the caller pads.
    """
    strategies = sys.modules[model.__module__].RULES

    def build() -> nnx.Module:
        return model(config, rngs=nnx.Rngs(seed))

    if len({*mesh.axis_types}) > 1:
        kinds = (
            f"{a!r} {kind.name}" for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        )
        raise UserError(
            f"the mesh has axes of two kinds ({', '.join(kinds)}); make all Explicit, JAX's "
            "default, or all Auto"
        )
    abstract = abstract_model(build, mesh)
    name, requested = sharding_rules.select(strategies, abstract.names, rules, mesh)
    fitting, uneven = sharding_rules.fit(name, requested, abstract, mesh)
    if batch_size:
        sharding_rules.check_used(strategies, name, fitting, mesh)
    sharding_rules.check_batch(name, fitting, mesh, batch_size, microbatches)
    layout = Layout(
        mesh, strategies, config, name, fitting, uneven, build, abstract, batch_size, seq_len
    )
    check_periods(layout)
    check_heads(layout)
    check_length(layout.shape, seq_len)
    trains = batch_size > 0
    sharding_rules.check_positions(abstract.names, name, fitting, mesh, seq_len, trains=trains)
    return layout


def elsewhere(layout: Layout, rules: str, mesh: Mesh | AbstractMesh | None = None) -> Layout | None:
    """The layout of the model under other rules or on another mesh; None if they do not fit."""
    target = mesh or layout.mesh
    try:
        name, requested = sharding_rules.select(layout.strategies, layout.names, rules, target)
        fitting, uneven = sharding_rules.fit(name, requested, layout.model, target)
        sharding_rules.check_positions(layout.names, name, fitting, target, layout.seq_len)
        other = dataclasses.replace(
            layout, mesh=target, strategy=name, rules=fitting, uneven=uneven
        )
        check_periods(other)
        check_heads(other)
    except UserError:
        return None
    return other


def check_periods(layout: Layout) -> None:
    """Raises UserError if a pipeline's stages, or the chunks of its rounds, cut a period of layers.

    A stage counts its layers from the first kind of a period, so they would run as other kinds.
    """
    parts, period, v = layout.stages, layout.shape.period, layout.shape.pipe_rounds
    if parts == 1:
        return
    layers = layout.shape.stacked_layers
    own_layers = layers // parts
    if own_layers % period:
        fits = [n for n in range(1, parts) if layers % (n * period) == 0] or [1]
        raise UserError(
            f"--mesh={sharding_rules.describe(layout.mesh.shape)} gives each of {parts} stages "
            f"{own_layers} layers, and a stage boundary would cut their period of {period}; use pipe={fits[-1]}"
        )
    periods = own_layers // period
    if periods % v:
        fits = max(n for n in range(1, v) if periods % n == 0)
        use = f"--pipe_rounds={fits}" if fits > 1 else "--pipeline=1f1b"
        raise UserError(
            f"--pipe_rounds={v} does not divide the {own_layers} layers of each of {parts} "
            f"stages{f' into periods of {period}' if period > 1 else ''}; use {use}"
        )


def check_heads(layout: Layout) -> None:
    """Raises UserError if --context=all-to-all has more shards than heads."""
    attention = layout.shape.attention
    if attention is None or layout.shape.context != "all-to-all" or layout.seq_shards == 1:
        return
    heads = attention.heads
    parts = layout.count_shards("heads") * layout.seq_shards
    if heads % parts:
        raise UserError(
            f"--context=all-to-all shares out {heads} heads over {parts} devices (rules "
            f"{layout.strategy!r} on --mesh={sharding_rules.describe(layout.mesh.shape)}); use "
            "--context=ring"
        )


def shardings(tree: Tree) -> Tree:
    """The shardings of a tree of arrays or ShapeDtypeStructs, for jit's out_shardings."""
    return jax.tree.map(lambda x: result(x.sharding), tree)
