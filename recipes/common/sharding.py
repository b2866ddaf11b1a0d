"""From (module, table, mesh) to where every array of the training state lies.

Checked before anything is allocated; one answer for init, restore, optimizer and report.
"""

import contextlib
import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from recipes.common.errors import UserError
from recipes.common.mesh import describe

Table = dict[str, str | tuple[str, ...] | None]
Tree = Any  # nested dicts with the same kind of leaf

# Platform → options of its compiler for whatever a Layout compiles, and what each bought.
COMPILER_OPTIONS = {
    "tpu": {
        # FSDP's gradients are scattered as they are summed. Without it, over more than 32 chips,
        # each chip sums them whole and cuts: 8b sends 63 GB a step on 256 v5e, with it 48.
        "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
        # Small weights are gathered too, not summed with zeros: 124m sends 1.1 GB a step on 256
        # v5e, with it 0.7.
        "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    },
}


class Blueprint(NamedTuple):
    """A module without its arrays."""

    graph: nnx.GraphDef
    state: nnx.State  # of ShapeDtypeStruct
    shapes: Tree  # nested dict of ShapeDtypeStruct, as in a checkpoint's `params`
    axes: Tree  # nested dict of tuples of logical axis names, one for each dim

    def bind(self, params: Tree) -> Any:
        """The module with these parameters: a nested dict of arrays or tracers."""
        structure = jax.tree.structure(self.state)  # keys sorted, as a dict's are
        return nnx.merge(self.graph, jax.tree.unflatten(structure, jax.tree.leaves(params)))


def blueprint(build: Callable[[], nnx.Module]) -> Blueprint:
    """`build` traced without allocating anything."""
    graph, state = nnx.split(nnx.eval_shape(build))
    variables = nnx.to_flat_state(state)
    axes = {path: variable.out_sharding for path, variable in variables}
    return Blueprint(graph, state, nnx.to_pure_dict(state), nnx.traversals.unflatten_mapping(axes))


def paths(tree: Tree) -> dict[str, Any]:
    """{"layers/attention/q": leaf}: a parameter's path, as in messages, reports and goldens."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))
    return {"/".join(str(key.key) for key in path): leaf for path, leaf in flat}


def partition_spec(axes: tuple[str, ...], table: Table) -> PartitionSpec:
    """Logical axes → mesh axes."""
    return PartitionSpec(*(table[axis] for axis in axes))


def choose(rules: dict[str, Table], strategy: str, mesh: Mesh | AbstractMesh) -> str:
    """The strategy asked for, or where that is empty what suits the mesh's axes.

    Raises UserError if there is no such strategy.
    """
    if not strategy:
        axes = set(mesh.axis_names)
        suits = {"hsdp_tp": {"data", "fsdp", "model"}, "fsdp_tp": {"data", "model"}}
        fits = [name for name, needs in suits.items() if needs <= axes and name in rules]
        return fits[0] if fits else "fsdp" if "data" in axes else "dp"
    if strategy not in rules:
        near = difflib.get_close_matches(strategy, rules, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(rules)}"
        raise UserError(f"--rules={strategy} is not a strategy of this entry; {hint}")
    return strategy


def check(
    rules: dict[str, Table],
    strategy: str,
    plan: Blueprint,
    mesh: Mesh | AbstractMesh,
    dims: dict[str, tuple[str, int]] | None = None,
) -> None:
    """Raises UserError if the table does not fit the module or the mesh. Allocates nothing.

    Args:
      rules: tables by name; the first is the entry's own and has every logical axis of the module.
      strategy: the name of the table in question.
      dims: logical axis → (flag, size) of what is not a parameter, the batch for instance.
    """
    table, known = rules[strategy], set(next(iter(rules.values())))
    sizes = dict(mesh.shape)
    for axis in table.keys() - known:
        near = difflib.get_close_matches(axis, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}"
        raise UserError(
            f"rules {strategy!r} name logical axis {axis!r}, which the model lacks; {hint}"
        )
    for axis in sorted(known - table.keys()):
        users = [path for path, axes in paths(plan.axes).items() if axis in axes]
        where = f"of {users[0]} " if users else ""
        raise UserError(
            f"rules {strategy!r} forget logical axis {axis!r} {where}({len(table)} of "
            f"{len(known)} are there); add {axis!r}: None to replicate it"
        )
    for axis, target in table.items():
        for mesh_axis in mesh_axes(target):
            if mesh_axis not in sizes:
                one = " and ".join(repr(name) for name in sizes)
                raise UserError(
                    f"rules {strategy!r} need mesh axis {mesh_axis!r} (for {axis!r}), and "
                    f"--mesh={describe(sizes)} has {one}; try --mesh={_with_axis(sizes, mesh_axis)}"
                )
    fits = functools.partial(_meshes_that_fit, table, plan, sizes)
    for path, axes in paths(plan.axes).items():
        shape = paths(plan.shapes)[path].shape
        _check_once(strategy, table, path, axes)
        in_use = tuple("act_embed" if axis == "embed" else axis for axis in axes)
        _check_once(strategy, table, f"{path} in use", in_use)
        for dim, axis in zip(shape, axes, strict=True):
            _check_divides(strategy, table, sizes, f"{path} {list(shape)}", axis, dim, fits)
    for axis in sorted(known - {"batch", "seq", "embed", "norm", "layers"}):
        activation = tuple(a for a in ("batch", "seq", axis) if a in known)
        _check_once(strategy, table, "an activation", activation)
    for axis, (flag, size) in (dims or {}).items():
        shards = math.prod(sizes[a] for a in mesh_axes(table[axis]))
        if size % shards:
            # A flag's value is easy to change: name the nearest that works.
            works = max(round(size / shards), 1) * shards
            raise UserError(
                f"{flag}={size} does not divide over the {shards} shards of {axis!r} "
                f"(rules {strategy!r} on --mesh={describe(sizes)}); try {flag}={works}"
            )


def mesh_axes(target: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """A table's value as a tuple of mesh axes."""
    return () if target is None else (target,) if isinstance(target, str) else tuple(target)


def _with_axis(sizes: dict[str, int], axis: str) -> str:
    """A mesh with as many devices and one more axis, of size 2 where that fits."""
    devices = math.prod(sizes.values())
    inner = 2 if devices % 2 == 0 else 1
    if axis == "model":
        return describe({"data": devices // inner, "model": inner})
    if axis == "fsdp":
        rest = devices // inner
        model = 2 if rest % 2 == 0 else 1
        return describe({"data": rest // model, "fsdp": inner, "model": model})
    return ",".join(f"{a}={s}" for a, s in (sizes | {axis: 1}).items())


def _check_once(strategy, table, path, axes):
    """No mesh axis twice in one array."""
    first: dict[str, str] = {}
    for axis in axes:
        for mesh_axis in mesh_axes(table[axis]):
            if mesh_axis in first:
                raise UserError(
                    f"rules {strategy!r} put mesh axis {mesh_axis!r} twice on {path}, for "
                    f"{first[mesh_axis]!r} and {axis!r}; map one of the two to None"
                )
            first[mesh_axis] = axis


def _check_divides(strategy, table, sizes, what, axis, dim, fits):
    names = mesh_axes(table[axis])
    shards = math.prod(sizes[name] for name in names)
    if dim % shards:
        over = " and ".join(repr(name) for name in names)
        raise UserError(
            f"rules {strategy!r} split dim {axis!r} of {what} over {shards} devices (mesh axis {over} "
            f"of --mesh={describe(sizes)}), and {dim} does not divide by {shards}; {fits()}"
        )


def _meshes_that_fit(table: Table, plan: Blueprint, sizes: dict[str, int]) -> str:
    """Advice: the largest meshes with these axes, none of them longer, that every dim divides by."""
    shapes, axes = paths(plan.shapes), paths(plan.axes)
    dims = {(n, a) for path in axes for n, a in zip(shapes[path].shape, axes[path], strict=True)}

    def fits(candidate):
        shards = {a: math.prod(candidate[m] for m in mesh_axes(table[a])) for _, a in dims}
        return all(n % shards[a] == 0 for n, a in dims)

    every = [
        dict(zip(sizes, c, strict=True))
        for c in itertools.product(*(range(1, size + 1) for size in sizes.values()))
    ]
    found = sorted(filter(fits, every), key=lambda c: -math.prod(c.values()))[:3]
    return "meshes that fit: " + ", ".join(f"--mesh={describe(c)}" for c in found)


# ---- the one answer ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything lies: a module's arrays under one table on one mesh."""

    mesh: Mesh
    rules: dict[str, Table]
    strategy: str  # the table in force
    build: Callable[[], nnx.Module]
    plan: Blueprint

    @property
    def table(self) -> Table:
        return self.rules[self.strategy]

    def params(self) -> Tree:
        """A NamedSharding for each parameter."""
        return jax.tree.map(
            lambda axes: NamedSharding(self.mesh, partition_spec(axes, self.table)),
            self.plan.axes,
            is_leaf=lambda x: isinstance(x, tuple),
        )

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """For arrays whose first dim is the batch."""
        return NamedSharding(self.mesh, PartitionSpec(self.table["batch"]))

    def activation(self, *axes: str) -> NamedSharding:
        """For an activation whose dims have these logical axes."""
        return NamedSharding(self.mesh, partition_spec(axes, self.table))

    def abstract_batch(self, example: Tree, size: int) -> Tree:
        """`size` examples stacked, as ShapeDtypeStructs: what the step is compiled for."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype, sharding=self.batch), example
        )

    @property
    def batch_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in mesh_axes(self.table["batch"]))

    @contextlib.contextmanager
    def trace(self):
        """Context to trace in: the module's constraints mean this table on this mesh.

        jax.jit's cache does not see the table: trace each function under one layout only.
        """
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            with nnx.logical_axis_rules(tuple(self.table.items())):
                yield

    def lower(self, function: Callable, *arguments: Tree, **jit_options) -> jax.stages.Lowered:
        """`function` traced for this layout and these arguments' shapes and shardings."""
        options = COMPILER_OPTIONS.get(self.mesh.devices.flat[0].platform, {})
        options = options | jit_options.pop("compiler_options", {})
        with self.trace():
            return jax.jit(function, compiler_options=options, **jit_options).lower(*arguments)

    def compile(self, function: Callable, *arguments: Tree, **jit_options) -> jax.stages.Compiled:
        """`lower`, and the compiler's work on it."""
        return self.lower(function, *arguments, **jit_options).compile()


def lay_out(
    build: Callable[[], nnx.Module],
    rules: dict[str, Table],
    strategy: str,
    mesh: Mesh,
    dims: dict[str, tuple[str, int]] | None = None,
) -> Layout:
    """Module, table and mesh together, checked; nothing is allocated. Raises UserError.

    Args:
      rules: the entry's RULES.
      strategy: a key of it; empty: what suits the mesh.
      dims: logical axis → (flag, size) of what is no parameter: {"batch": ("--batch_size", 16)}.
    """
    strategy = choose(rules, strategy, mesh)
    plan = blueprint(build)
    check(rules, strategy, plan, mesh, dims)
    return Layout(mesh, rules, strategy, build, plan)


def elsewhere(layout: Layout, strategy: str) -> Layout | None:
    """The same module on the same mesh under another table; None where that does not fit."""
    try:
        check(layout.rules, strategy, layout.plan, layout.mesh)
    except UserError:
        return None
    return dataclasses.replace(layout, strategy=strategy)


# ---- the training state ------------------------------------------------------------------------
#
# {"params": …, "opt_state": …, "step": …, "rngs": …}: nested dicts with arrays for leaves, which
# is what a checkpoint holds and what Orbax reads without any code of ours.


def new_state(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, params=None
) -> Tree:
    """The training state before the first step, to be traced. `params` None: the module's own."""
    if params is None:
        params = nnx.to_pure_dict(nnx.state(layout.build(), nnx.Param))
    return {
        "params": params,
        "opt_state": flax.serialization.to_state_dict(optimizer.init(params)),
        "step": jnp.zeros((), jnp.int32),
        "rngs": {"default": jax.random.key_data(jax.random.key(seed))},
    }


def abstract_state(layout: Layout, optimizer: optax.GradientTransformation) -> Tree:
    """The training state as ShapeDtypeStructs, each with the NamedSharding where it will lie.

    What the optimizer keeps for a parameter (its moments) lies as that parameter.
    """
    shapes = jax.eval_shape(lambda: new_state(layout, optimizer, seed=0))
    where = jax.tree.map(lambda _: layout.replicated, shapes)
    where["params"] = layout.params()
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes["params"]),
        where["params"],
        transform_non_params=lambda _: layout.replicated,
    )
    where["opt_state"] = flax.serialization.to_state_dict(opt_state)
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, where
    )


def initialize(
    layout: Layout, optimizer: optax.GradientTransformation, seed: int, abstract: Tree
) -> Tree:
    """The new training state, each shard made on its own device."""
    options = {}
    if layout.mesh.devices.flat[0].platform == "cpu":
        # Above 1, LLVM makes vectors where a shard's shape allows, which may differ in the last bit.
        options["xla_backend_optimization_level"] = 1
    make = layout.compile(
        lambda: new_state(layout, optimizer, seed),
        out_shardings=shardings(abstract),
        compiler_options=options,
    )
    return make()


def shardings(tree: Tree) -> Tree:
    """The shardings of a tree of arrays or ShapeDtypeStructs, for jit's out_shardings."""
    return jax.tree.map(lambda x: x.sharding, tree)
