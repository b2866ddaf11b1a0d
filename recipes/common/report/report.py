"""Reports: parameters, bytes per device, and what a compiled step sends between devices."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from recipes.common.report.hlo import collectives, host_copies
from recipes.common.runtime import describe
from recipes.common.sharding import Layout, Tree, paths
from recipes.common.sharding.host_memory import is_on_host
from recipes.common.sharding.rules import count_shards, target_axes
from zoo.core.sharding import optimizer_axes


def headline(layout: Layout) -> str:
    """One line about mesh, rules and devices."""
    return headline_of(layout.mesh, layout.strategy, layout.idle_axes)


def headline_of(mesh: Mesh, name: str, idle_axes: list[str]) -> str:
    device = mesh.devices.flat[0]
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    kind = "simulated CPU" if device.platform == "cpu" else device.device_kind
    count = f"{mesh.size} {kind} device{'s' if mesh.size > 1 else ''}"
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    idle = "".join(
        f" · axis {axis!r} unused: its {mesh.shape[axis]} devices duplicate each other's work"
        for axis in idle_axes
    )
    return f"mesh {describe(dict(mesh.shape))} ({axes}) · rules {name} · {count}{processes}{idle}"


HEAD: tuple[str, ...] = (
    "parameter",
    "shape",
    "dtype",
    "logical axes",
    "PartitionSpec",
    "bytes/device",
)


def table(layout: Layout, state: Tree, frozen: Tree | None = None) -> str:
    """A table of parameters and buffers with their sharding, and totals of the training state.

    Args:
      state: ShapeDtypeStructs or arrays with shardings, as abstract_state returns.
      frozen: variables of a second model beside it.
    """
    rows = [HEAD]
    for kind, tree in layout.model.axes.items():
        arrays = paths(state[kind])
        rows += [row(path, arrays[path], axes) for path, axes in paths(tree).items()]
    return "\n".join(
        [
            *columns(rows),
            total(layout, state, frozen),
            *offloaded(layout, state),
            *uneven(layout, state),
        ]
    )


def total(layout: Layout, state: Tree, frozen: Tree | None = None) -> str:
    """One line: the number of parameters, how many are trained, and their bytes per device."""
    parts = {part: state[part] for part in ("params", "base", "opt_state") if part in state}
    held = {part: size(bytes_per_device(tree)) for part, tree in parts.items()}
    count = {part: sum(math.prod(x.shape) for x in jax.tree.leaves(parts[part])) for part in parts}
    own = paths(state["params"])
    trained = {path: x for path, x in own.items() if not path.startswith(layout.model.frozen)}
    what, where = f"{count['params']:,} parameters", f"parameters {held['params']}"
    if len(trained) < len(own):
        number = sum(math.prod(x.shape) for x in trained.values())
        what = f"Trains {number:,} of {count['params']:,} parameters"
    if "base" in parts:
        what = f"Trains {count['params']:,} of {count['params'] + count['base']:,} parameters"
        where = f"parameters {held['base']} (base) + {held['params']} (trained)"
    moments = held["opt_state"]
    moments += " (in the host's memory)" if on_host(state) else ""
    second = f", frozen model {size(bytes_per_device(frozen))}" if frozen else ""
    if frozen and any(map(is_on_host, jax.tree.leaves(frozen))):
        second += " (in the host's memory)"
    gradients = size(bytes_per_device(trained))
    return f"{what}. Per device: {where}, gradients {gradients}, optimizer state {moments}{second}."


def on_host(state: Tree) -> bool:
    """Whether a state's moments are in the host's memory."""
    return any(map(is_on_host, jax.tree.leaves(state["opt_state"])))


def offloaded(layout: Layout, state: Tree) -> list[str]:
    """A line that says that simulated devices offload nothing, if offloading was requested."""
    what = ["moments"] if on_host(state) else []
    what += ["layers' inputs"] if layout.shape.remat == "offload" else []
    if not what or layout.mesh.devices.flat[0].platform != "cpu":
        return []
    return [
        f"Offload: simulated devices have only the host's memory, so {' and '.join(what)} do not move."
    ]


def uneven(layout: Layout, state: Tree) -> list[str]:
    """One line about the dims that a mesh axis does not divide, if there are any.

    Args:
      state: as in `table`, or only the model's variables.
    """
    notes, extra, axes = {}, dict.fromkeys(state, 0.0), paths(layout.model.axes)
    counts = {axis: count_shards(layout.uneven, axis, layout.mesh.shape) for axis in layout.uneven}
    for path, leaf in paths(state).items():
        kind, *keys = path.split("/")
        # The optimizer's arrays for a parameter have paths that end with the parameter's path.
        names = [path, *("/".join(["params", *keys[i:]]) for i in range(len(keys)))]
        dims = next((axes[name] for name in names if name in axes), ())
        dims = optimizer_axes(dims, layout.uneven) if kind == "opt_state" else dims
        parts = 1  # into which the leaf would be split further
        for dim, axis in zip(leaf.shape, dims, strict=False):
            if axis in counts:
                n = counts[axis]
                parts *= n
                even = f"padded to {-(-dim // n) * n} in the step, replicated at rest"
                done = even if layout.rules.get(axis) else f"replicated, computed {n} times"
                done = done if axis in layout.rules else "split as the weights are"
                over = "·".join(target_axes(layout.uneven[axis]))
                notes[axis] = f"{axis} {dim} by {over} {n} ({done})"
        extra[kind] += bytes_per_device(leaf) * (1 - 1 / parts)
    cost = f"{size(extra['params'] + extra.get('base', 0))} for parameters"
    if "opt_state" in state:  # gradients are sharded like trained parameters
        rest = size(extra["params"] + extra["opt_state"])
        cost += f", and {rest} for gradients and optimizer state"
    return (
        [f"Not divisible: {'; '.join(notes.values())}. This costs each device {cost}."]
        if notes
        else []
    )


def row(path: str, array: Any, axes: tuple[str | None, ...]) -> tuple[str, ...]:
    """The columns of HEAD for an array or a ShapeDtypeStruct with a NamedSharding."""
    spec = ", ".join(show_axis(part) for part in array.sharding.spec)
    shape = "×".join(map(str, array.shape))
    held = size(bytes_per_device(array))
    return path, shape, str(array.dtype), " ".join(str(a or "-") for a in axes), f"({spec})", held


def show_axis(part) -> str:
    return "-" if part is None else part if isinstance(part, str) else "+".join(part)


def bytes_per_device(tree: Tree) -> int:
    """Bytes that one device holds of a tree of arrays or ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def step(compiled: jax.stages.Compiled) -> str:
    """Memory and collectives of a compiled step, per device, from the compiler itself."""
    stats = memory(compiled)
    kept = stats.argument_size_in_bytes
    lines = [
        f"Compiled step, per device: {size(kept + stats.temp_size_in_bytes)} = state and batch "
        f"{size(kept)} + temporary {size(stats.temp_size_in_bytes)}."
    ]
    if host := stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes:
        copied = host_copies(compiled.as_text())
        moves = " and ".join(f"{size(count)} {where}" for where, count in copied.items())
        lines.append(f"In the host's memory: {size(host)}. A step copies {moves}.")
    lines.append(f"Collectives a step, per device: {sent(compiled)}.")
    return "\n".join(lines)


def peak_memory(compiled: jax.stages.Compiled) -> int:
    """Bytes of the device's memory at the step's peak.

    The compilers' number has all arguments, also those in the host's memory, and of both memories'
    temporary arrays the larger sum.
    """
    stats = memory(compiled)
    peak = stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
    if stats.host_temp_size_in_bytes:
        peak = min(peak, stats.argument_size_in_bytes + stats.temp_size_in_bytes)
    return peak


def memory(compiled: jax.stages.Compiled) -> Any:
    """The compiler's numbers, in bytes; JAX's type allows None, for backends without any."""
    return compiled.memory_analysis()


def totals(compiled: jax.stages.Compiled) -> dict[str, tuple[int, int]]:
    """Kind of collective → (count, bytes of results on a device), in one execution."""
    sums: dict[str, tuple[int, int]] = {}
    for collective in collectives(compiled.as_text()):
        times, held = sums.get(collective.kind, (0, 0))
        sums[collective.kind] = (
            times + collective.times,
            held + collective.times * collective.bytes,
        )
    return dict(sorted(sums.items()))


def sent(compiled: jax.stages.Compiled) -> str:
    """A sentence about the collectives of one execution."""
    return (
        "; ".join(f"{n} {kind} of {held(kind, b)}" for kind, (n, b) in totals(compiled).items())
        or "none"
    )


def held(kind: str, count: float) -> str:
    """Formats the bytes of a kind of collective; the buffer of a ragged one need not be full."""
    return f"{'at most ' if kind == 'ragged-all-to-all' else ''}{size(count)}"


def reshard(array: jax.Array, target: jax.sharding.Sharding) -> tuple[jax.Array, str]:
    """Moves an array to another sharding. Returns it with a sentence about the collectives."""
    move = jax.jit(lambda x: x, out_shardings=target).lower(array).compile()
    return move(array), sent(move)


def size(count: float) -> str:
    """Formats bytes: 1.2 MB is 1.2e6 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligns columns to the left, and the last one to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i == len(widths) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
