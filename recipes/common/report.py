"""What is where: parameters, bytes per device, and what the compiled step sends between devices."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from recipes.common.mesh import describe
from recipes.common.sharding import Layout, Tree, mesh_axes, paths


def headline(layout: Layout) -> str:
    """One line: mesh, rules, devices."""
    mesh = layout.mesh
    device = mesh.devices.flat[0]
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    kind = "simulated CPU" if device.platform == "cpu" else device.device_kind
    count = f"{mesh.size} {kind} device{'s' if mesh.size > 1 else ''}"
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    idle = "".join(
        f" · axis {axis!r} idle: its {mesh.shape[axis]} devices repeat each other's work"
        for axis in idle_axes(layout)
    )
    return f"mesh {describe(dict(mesh.shape))} ({axes}) · rules {layout.strategy} · {count}{processes}{idle}"


def idle_axes(layout: Layout) -> list[str]:
    """Mesh axes of size above 1 that the table never uses."""
    used = {axis for target in layout.table.values() for axis in mesh_axes(target)}
    return [axis for axis, size in layout.mesh.shape.items() if size > 1 and axis not in used]


def table(layout: Layout, state: Tree) -> str:
    """Every parameter and where it lies, and totals for the whole training state.

    Args:
      state: ShapeDtypeStructs or arrays with shardings, as sharding.abstract_state gives.
    """
    axes = paths(layout.plan.axes)
    rows = [("parameter", "shape", "dtype", "logical axes", "PartitionSpec", "bytes/device")]
    for path, array in paths(state["params"]).items():
        spec = ", ".join(_axis(part) for part in array.sharding.spec)
        shape = "×".join(map(str, array.shape))
        held = size(bytes_per_device(array))
        rows.append((path, shape, str(array.dtype), " ".join(axes[path]), f"({spec})", held))
    count = sum(math.prod(array.shape) for array in jax.tree.leaves(state["params"]))
    params, moments = (size(bytes_per_device(state[part])) for part in ("params", "opt_state"))
    total = (
        f"{count:,} parameters. Per device: parameters {params}, gradients {params}, "
        f"optimizer state {moments}."
    )
    return "\n".join([*_columns(rows), total])


def _axis(part) -> str:
    return "-" if part is None else part if isinstance(part, str) else "+".join(part)


def bytes_per_device(tree: Tree) -> int:
    """Bytes that one device holds of a tree of arrays or ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def step(compiled: jax.stages.Compiled) -> str:
    """What the compiled step needs on each device and what it sends, from the compiler itself."""
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes
    lines = [
        f"Compiled step, per device: {size(kept + memory.temp_size_in_bytes)} = state and batch "
        f"{size(kept)} + temporary {size(memory.temp_size_in_bytes)}."
    ]
    lines.append(f"Collectives a step, per device: {sent(compiled)}.")
    return "\n".join(lines)


def totals(compiled: jax.stages.Compiled) -> dict[str, tuple[int, int]]:
    """Kind of collective → (how many, bytes of their results on a device), in one run."""
    sums: dict[str, tuple[int, int]] = {}
    for found in collectives(compiled.as_text()):
        times, held = sums.get(found.kind, (0, 0))
        sums[found.kind] = (times + found.times, held + found.times * found.bytes)
    return dict(sorted(sums.items()))


def sent(compiled: jax.stages.Compiled) -> str:
    """What one run of it sends between devices, in words."""
    return (
        "; ".join(f"{n} {kind} of {size(b)}" for kind, (n, b) in totals(compiled).items()) or "none"
    )


def reshard(array: jax.Array, target: jax.sharding.Sharding) -> tuple[jax.Array, str]:
    """`array` moved to another layout, and which collectives that took."""
    move = jax.jit(lambda x: x, out_shardings=target).lower(array).compile()
    return move(array), sent(move)


def size(count: float) -> str:
    """Bytes for people: 1.2 MB is 1.2e6 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Left-aligned columns, the last one right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i == len(widths) - 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


# ---- collectives, counted in a compiled module's text ------------------------------------------

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}  # else the digits in the type's name


class Collective(NamedTuple):
    kind: str  # "all-reduce", …
    bytes: int  # of its result, on one device
    times: int  # a step, loop trips counted
    shapes: tuple[tuple[int, ...], ...]  # of its results
    groups: str  # which devices take part, as the compiler writes it
    source: str  # the operation it comes from, as JAX names it


def collectives(hlo: str) -> list[Collective]:
    """Every transfer between devices in one run of a compiled module.

    A loop's body counts as often as it runs, and a transfer that the compiler has split into
    several steps of one channel counts once; the permutes of a ring each count, on one channel.
    """
    computations, entry = _computations(hlo)
    found, channels = [], set()

    def walk(name: str, times: int):
        for line in computations.get(name, ()):
            match = re.match(r"(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(", line)
            if not match:
                continue
            kind = re.fullmatch(rf"({_KINDS})(-start)?", match[2])
            if kind:
                channel = re.search(r"channel_id=(\d+)", line)
                ring = kind[1] == "collective-permute"
                if ring or channel is None or channel[1] not in channels:
                    channels.add(channel and channel[1])
                    found.append(_collective(kind[1], bool(kind[2]), match[1], times, line))
            else:
                trips = _trips(line, computations) if match[2] == "while" else 1
                for inner in _called(line):
                    walk(inner, times * trips)

    walk(entry, 1)
    return found


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """Computation name → its instructions' lines; the entry computation's name."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if head:
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif " = " in line and name:
            computations[name].append(line.strip())
    return computations, entry


def _called(line: str) -> Iterator[str]:
    yield from re.findall(r"(?:body|calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)", line)
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", line):
        yield from (branch.strip().lstrip("%") for branch in branches.split(","))


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """How often a while loop runs: XLA's own note, else its bound over the step of its counter."""
    noted = re.search(r"known_trip_count\W+n\W+(\d+)", line)
    if noted:
        return int(noted[1])
    names = [re.search(rf"{part}=%?([\w.\-]+)", line) for part in ("condition", "body")]
    condition, body = (computations.get(name[1], []) if name else [] for name in names)
    bodies = [condition, *(computations.get(c, []) for x in condition for c in _called(x))]
    bound = max((n for lines in bodies for n in _constants(lines).values()), default=1)
    return max(1, bound // _stride(condition, body))


def _constants(lines: list[str]) -> dict[str, int]:
    """Name → value of the integer constants among these instructions."""
    found = (re.match(r"(?:ROOT )?%?(\S+) = [su]32\[\]\S* constant\((\d+)\)", x) for x in lines)
    return {match[1]: int(match[2]) for match in found if match}


def _stride(condition: list[str], body: list[str]) -> int:
    """What a loop's counter grows by: rings of permutes are unrolled, and count in twos."""
    counter = re.search(r"get-tuple-element\(.*index=(\d+)", "\n".join(condition))
    root = next((x for x in body if x.startswith("ROOT ") and " tuple(" in x), "")
    results = re.findall(r"%([\w.\-]+)", root.partition(" tuple(")[2])
    if not counter or int(counter[1]) >= len(results):
        return 1
    made = next((x for x in body if x.startswith(f"%{results[int(counter[1])]} = ")), "")
    terms = re.findall(r"%([\w.\-]+)", made.partition(" add(")[2])
    return max([n for name, n in _constants(body).items() if name in terms], default=1) or 1


def _collective(kind: str, started: bool, result: str, times: int, line: str) -> Collective:
    arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
    arrays = [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in arrays]
    if started and kind != "all-reduce":  # (operands, results, context…)
        arrays = [a for a in arrays if a != ("u32", ()) and a != ("s32", ())]
        arrays = arrays[len(arrays) // 2 :]
    bits = (_BITS.get(d) or int(re.sub(r"\D", "", d)) for d, _ in arrays)
    total = sum(b * math.prod(dims) // 8 for b, (_, dims) in zip(bits, arrays, strict=True))
    groups = re.search(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)", line)
    source = re.search(r'op_name="([^"]*)"', line)
    shapes = tuple(dims for _, dims in arrays)
    return Collective(
        kind, total, times, shapes, groups[1] if groups else "", source[1] if source else ""
    )
