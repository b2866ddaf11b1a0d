"""From (model, sharding rules, mesh) to where every array of the training state lies.

Checked before anything is allocated; one answer for init, restore, optimizer and report.
"""

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from recipes.common.runtime import UserError
from recipes.common.sharding import rules as sharding_rules
from recipes.common.sharding.abstract import AbstractModel, Tree, abstract_model
from recipes.common.sharding.rules import Table, partition_spec


def _pipelined(kind: str) -> dict[str, bool | str]:
    """The option that moves collectives of a kind across trips of a loop."""
    if NEW_OPTIONS:
        return {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON"}
    return {f"xla_gpu_enable_pipelined_{kind}": True}


NEW_OPTIONS = jax.__version_info__ >= (0, 11, 1)  # of NVIDIA's compiler; it refuses unknown ones


# Platform → options of its compiler for whatever a Layout compiles, and what each bought.
COMPILER_OPTIONS = {
    "tpu": {
        # FSDP's gradients are scattered as they are summed. Without it, over more than 32 chips,
        # each chip sums whole gradients and slices: 8b sends 63 GB a step on 256 v5e, with it 48.
        "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
        # Small weights are gathered too, not summed with zeros: 124m sends 1.1 GB a step on 256
        # v5e, with it 0.7.
        "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    },
    # NVIDIA. Of 8b with 4 layers, fsdp on 8 H200, jax 0.11.2: 5.6 GB are gathered, and 2.8 GB of that
    # beside matmuls; scatters 101 of 481 MB; peak 6.9 GB. With all of these 3.8 GB, 186 MB, 6.7 GB.
    "cuda": {
        # A layer's gathers and scatters may run beside the layer before or after it. These two alone
        # put 232 MB of the scatters beside matmuls; the peak is 6.4 GB.
        **_pipelined("all_gather"),
        **_pipelined("reduce_scatter"),
        # Two layers in a trip of the loop: with those, 3.5 GB of the gathers are beside matmuls, and
        # what trips hand on is not copied: 1.6 GB of copies, without it 3.4 GB.
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
        # Fewer, larger transfers: 34 gathers instead of 50, 6 scatters instead of 10.
        "xla_gpu_all_gather_combine_threshold_bytes": 2**27,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**27,
        # Replica groups: gradients are scattered within a group and summed between groups, not summed
        # over all GPUs and sliced. 124m with 2 layers, hsdp_tp on 2x8x1: all-reduces send 13 MB and
        # scatters 92, without it 63 and 68.
        **({"xla_gpu_all_reduce_splitter_ignore_profitability_check": True} if NEW_OPTIONS else {}),
    },
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies: a model's arrays under one table of sharding rules on one mesh."""

    mesh: Mesh
    zoo: types.ModuleType  # the model's zoo file
    config: Any
    strategy: str  # the name of the table
    table: Table  # to compute by
    uneven: Table  # what of the table asked for does not hold for weights at rest: see rules.fit
    build: Callable[[], nnx.Module]
    model: AbstractModel
    batch_size: int  # 0: of no run

    def variables(self) -> Tree:
        """The model's variables as ShapeDtypeStructs, each with its NamedSharding."""
        rest = self.table | dict.fromkeys(self.uneven)
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

    def sharding(self, *axes: str) -> NamedSharding:
        """Of an array whose dims have these logical axes."""
        return NamedSharding(self.mesh, partition_spec(axes, self.table))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of arrays whose first dim is the batch."""
        return self.sharding("batch")

    @property
    def batch_shards(self) -> int:
        return sharding_rules.shards(self.table, "batch", self.mesh.shape)

    @property
    def process_rows(self) -> np.ndarray:
        """The rows of a batch that this process's devices hold, and so the rows that it reads.

        Often a contiguous share. On TPUs, where a mesh follows the rings of the chips, the devices of
        a process may lie apart; and each process needs all rows if the mesh splits something else
        between the processes.
        """
        size = self.batch_size
        parts = self.batch.addressable_devices_indices_map((size,)).values()  # JAX remembers it
        held = {part[0].indices(size) for part in parts}
        return np.concatenate([np.arange(*part) for part in sorted(held)])

    @property
    def uneven_shards(self) -> dict[str, int]:
        """Logical axis in `uneven` → how many parts it would be cut into."""
        return {
            axis: sharding_rules.shards(self.uneven, axis, self.mesh.shape) for axis in self.uneven
        }

    @property
    def idle_axes(self) -> list[str]:
        """Mesh axes of size above 1 that the rules never use."""
        used = sharding_rules.used_axes(self.table)
        return [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in used]

    def with_room_for(self, rows: int) -> "Layout":
        """For batches of at least so many rows, whose number the mesh divides."""
        whole = -(-rows // self.batch_shards) * self.batch_shards
        return dataclasses.replace(self, batch_size=whole)

    def abstract_batch(self, example: Tree) -> Tree:
        """`batch_size` examples stacked, as ShapeDtypeStructs: what the step is compiled for."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.batch_size, *x.shape), x.dtype, sharding=self.batch
            ),
            example,
        )

    @contextlib.contextmanager
    def trace(self):
        """Context to trace in: the model's constraints mean this table on this mesh.

        jax.jit's cache does not see the table: trace each function under one layout only.
        """
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            with nnx.logical_axis_rules(tuple(self.table.items())):
                yield

    def lower(self, function: Callable, *arguments: Tree, **jit_options) -> jax.stages.Lowered:
        """`function` traced for this layout and these arguments' shapes and shardings."""
        target = platform(self.mesh.devices.flat[0])
        options = COMPILER_OPTIONS.get(target, {})
        if target == "cuda" and self.mesh.size == 1:
            options = {}  # nothing is sent, and loops unrolled for it would only compile longer
        options = options | jit_options.pop("compiler_options", {})
        with self.trace():
            traced = jax.jit(function, compiler_options=options, **jit_options).trace(*arguments)
            # JAX asks the GPUs that are there whose they are; here none may be.
            return traced.lower(lowering_platforms=("cuda",) if target == "cuda" else None)

    def compile(self, function: Callable, *arguments: Tree, **jit_options) -> jax.stages.Compiled:
        """`lower`, and the compiler's work on it."""
        return self.lower(function, *arguments, **jit_options).compile()


def make_layout(
    model: type[nnx.Module],
    config,
    mesh: Mesh | AbstractMesh,
    rules: str | Table | None = None,
    *,
    seed: int = 0,
    batch_size: int = 0,
    microbatches: int = 1,
) -> Layout:
    """Model, sharding rules and mesh together, checked; nothing is allocated. Raises UserError.

    Args:
      model: an entry's class; RULES, LOGICAL_AXES and IN_USE are those of the file it stands in.
      rules: a key of RULES, a .json file, or a table of your own; empty: what suits the mesh.
      seed: of the parameters.
      batch_size: examples a step, over all devices; 0 where none are fed.
      microbatches: parts of a batch that are computed one after another.
    """
    zoo = inspect.getmodule(model)

    def build() -> nnx.Module:
        return model(config, rngs=nnx.Rngs(seed))

    if len({*mesh.axis_types}) > 1:
        kinds = (
            f"{a!r} {kind.name}" for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        )
        raise UserError(
            f"the mesh has axes of two kinds ({', '.join(kinds)}); make all Explicit, JAX's default, or "
            "all Auto"
        )
    name, table = sharding_rules.select(zoo, rules, mesh)
    abstract = abstract_model(build)
    table, uneven = sharding_rules.fit(zoo, name, table, abstract, mesh)
    if batch_size:
        sharding_rules.check_used(zoo, name, table, mesh)
    sharding_rules.check_batch(name, table, mesh, batch_size, microbatches)
    return Layout(mesh, zoo, config, name, table, uneven, build, abstract, batch_size)


def platform(device: jax.Device) -> str:
    """Whose compiler a device needs: "cpu", "tpu", "cuda" for NVIDIA's GPUs, "gpu" for others."""
    capability = getattr(device, "compute_capability", "")  # NVIDIA's "9.0", AMD's "gfx942"
    nvidia = device.platform == "gpu" and capability[:1].isdecimal()
    return "cuda" if nvidia else device.platform


def elsewhere(layout: Layout, rules: str, mesh: Mesh | AbstractMesh | None = None) -> Layout | None:
    """The same model under other rules or on another mesh; None where these do not fit."""
    mesh = mesh or layout.mesh
    try:
        name, table = sharding_rules.select(layout.zoo, rules, mesh)
        table, uneven = sharding_rules.fit(layout.zoo, name, table, layout.model, mesh)
    except UserError:
        return None
    return dataclasses.replace(layout, mesh=mesh, strategy=name, table=table, uneven=uneven)


def shardings(tree: Tree) -> Tree:
    """The shardings of a tree of arrays or ShapeDtypeStructs, for jit's out_shardings."""
    return jax.tree.map(lambda x: x.sharding, tree)
