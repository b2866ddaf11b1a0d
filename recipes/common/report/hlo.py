"""Collectives in a compiled module's HLO text."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from recipes.common.report import program

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
KINDS += "|collective-broadcast"
_HOST = "S(5)"  # in the layout of an array in the host's memory


class Collective(NamedTuple):
    kind: str  # "all-reduce", …
    bytes: int  # size of its result on one device
    times: int  # executions per step, including loop iterations
    shapes: tuple[tuple[int, ...], ...]  # shapes of its results
    groups: str  # which devices take part, as the compiler writes it
    source: str  # the operation it comes from, as JAX names it
    frame: str = ""  # number of its line of Python, a key of `source_frames`


def collectives(hlo: str | None) -> list[Collective]:
    """Every transfer between devices in one execution of a compiled module.

    Each instruction counts once per iteration of its loop. Channels, names and source lines can't
    identify transfers: all transfers inside jax.shard_map share a channel, and those of a Python
    loop share the rest. An asynchronous transfer consists of several instructions and counts where
    it starts: as `-start`, or see `_continues`.

    Three figures are bounds. A ragged-all-to-all counts its whole buffer, which may be partly
    filled at run time. A conditional counts its branch with most bytes. A loop whose end depends on
    data counts no iteration.
    """
    return _transfers(hlo, performed)


def crossing(hlo: str | None) -> list[Collective]:
    """Every transfer between slices in one execution of a module compiled for several slices.

    The TPU compiler splits a collective over all slices into collectives inside each slice, which
    `collectives` finds, and transfers over the network between slices, which this finds.
    """
    return _transfers(hlo, _between_slices)


def host_copies(hlo: str | None) -> dict[str, int]:
    """Bytes that one execution copies between the device's memory and the host's, by direction.

    The compilers write these copies in four ways: whole arrays, slices of them, both also as fusions or
    as asynchronous pairs. The host's memory is memory space 5 of a layout.
    """
    sums = {"to the device": 0, "to the host": 0}
    for copy in _transfers(hlo, _across_memories):
        sums[copy.kind] += copy.times * copy.bytes
    return sums


def _transfers(
    hlo: str | None, transfer: Callable[[re.Match, list[str]], Collective | None]
) -> list[Collective]:
    """All results of `transfer` on the instructions of one execution, including loop iterations."""
    assert hlo is not None, "this backend has no HLO text"
    computations, entry = program.computations(hlo)

    def inside(name: str) -> list[Collective]:
        transfers, lines = [], computations.get(name, [])
        for line in lines:
            match = program.INSTRUCTION.match(line)
            if not match or match[3].endswith(("-done", "-update")):
                continue  # counted where it started
            if found_here := transfer(match, lines):
                transfers.append(found_here)
            elif not re.fullmatch(rf"({KINDS})(-start)?", match[3]):
                transfers += of_called(line, lines, match[2], match[3])
        return transfers

    def of_called(line: str, lines: list[str], result: str, operation: str) -> list[Collective]:
        trips = program.trips(line, lines, computations) if operation == "while" else 1
        parts = []
        for role, name in program.called(line):
            times = trips + (role == "condition")  # a condition is also evaluated when it is false
            parts.append([x._replace(times=x.times * times) for x in inside(name)])
        if operation == "conditional":
            return max(parts, key=lambda part: sum(x.times * x.bytes for x in part))
        transfers = [x for part in parts for x in part]
        if "calls=%all-reduce-scatter" in line:  # TPU: an all-reduce fused with a slice
            size, shapes = program.size(result)
            return [x._replace(kind="reduce-scatter", bytes=size, shapes=shapes) for x in transfers]
        return transfers

    return inside(entry)


def performed(match: re.Match, lines: list[str]) -> Collective | None:
    """The collective that an instruction (name, result, operation) performs or starts, if any."""
    kind, line = re.fullmatch(rf"({KINDS})(-start)?", match[3]), match.string
    if not kind or _continues(match[1], line, lines):
        return None
    return _collective(kind[1], bool(kind[2]), match[2], line)


def _between_slices(match: re.Match, lines: list[str]) -> Collective | None:
    """The transfer that an instruction hands to the runtime between slices, if any."""
    line = match.string
    if match[3] != "send" or "xla_megascale_runtime" not in line:
        return None
    facts = dict(re.findall(r'_xla_megascale_(transfer_type|target)="([^"]*)"', line))
    kind = facts.get("transfer_type", "send").lower().replace("_", "-")
    array = match[2].partition("]")[0] + "]"  # the array in (array, context, token)
    return _collective(kind, False, array, line)._replace(groups=facts.get("target", ""))


def _across_memories(match: re.Match, lines: list[str]) -> Collective | None:
    """The copy between the device's memory and the host's that an instruction performs or starts."""
    _, result, operation = match.groups()
    kind = re.fullmatch(r"(copy|dynamic-slice|dynamic-update-slice|fusion)(-start)?", operation)
    if not kind or (kind[1] == "fusion" and _HOST not in match.string):
        return None
    if kind[0] == "copy-start":  # (result, operand, context)
        results, inputs = program.arrays(result)[:1], program.arrays(result)[1:2]
    elif kind[2]:  # ((operands), result, context)
        operands, _, rest = result.removeprefix("((").partition("), ")
        results, inputs = program.arrays(rest)[:1], program.arrays(operands)
    else:
        results = program.arrays(result)
        inputs = [
            x
            for name in program.operands(match.string)
            for x in program.arrays(program.result_of(name, lines))
        ]
    inner = [x for x in inputs if "[]" not in x]  # without indices
    hosts = [_HOST in x for x in results], [_HOST in x for x in inner]
    if all(hosts[0]) and not all(hosts[1]):
        moved, where = [x for x in inner if _HOST not in x], "to the host"
    elif not any(hosts[0]) and any(hosts[1]):
        moved, where = results, "to the device"
    else:
        return None
    size = sum(program.size(x)[0] for x in moved)
    return _collective(where, False, "", match.string)._replace(bytes=size)


def _continues(name: str, line: str, lines: list[str]) -> bool:
    """Whether this instruction continues a transfer that is counted where it starts.

    On TPUs, one gather may overlap with several matmuls. It then appears, each time in full, in a
    fusion that starts it, in the fusion of each matmul, and in one that waits for it. Only the
    first passes it to the custom call AsyncCollectiveStart.
    """
    starts = rf"[(, ]%{re.escape(name)}[,)].*AsyncCollectiveStart"
    return "async_collective_fusion_config" in line and not any(re.search(starts, x) for x in lines)


def _collective(kind: str, started: bool, result: str, line: str) -> Collective:
    # (operands, results, context…), but an all-reduce usually has only its results.
    if started and (kind != "all-reduce" or result.startswith("((")):
        flat = re.sub(r"\{.*?\}", "", result)  # without layouts
        match = re.match(r"\((?:\(.*?\)|\S+), (\(.*?\)|\S+\])", flat)
        assert match, f"unknown notation: {result}"
        result = match[1]
    size, shapes = program.size(result)
    groups = re.search(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)", line)
    source = re.search(r'op_name="([^"]*)"', line)
    frame = re.search(r"stack_frame_id=(\d+)", line)
    return Collective(
        kind=kind,
        bytes=size,
        times=1,
        shapes=shapes,
        groups=groups[1] if groups else "",
        source=source[1] if source else "",
        frame=frame[1] if frame else "",
    )


class Frame(NamedTuple):
    """A call in Python."""

    file: str
    line: int
    function: str  # its qualified name


def source_frames(hlo: str | None) -> dict[str, list[Frame]]:
    """`Collective.frame` → the calls that led to it, the innermost first."""
    assert hlo is not None, "this backend has no HLO text"
    head = hlo.partition("StackFrames\n")
    names, _, rest = head[0].partition("FunctionNames")
    files, functions = (
        dict(re.findall(r'^(\d+) "(.*)"$', table, re.MULTILINE)) for table in (names, rest)
    )
    locations = {
        number: Frame(files[file], int(line), functions[function])
        for number, file, function, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)", rest, re.MULTILINE
        )
    }
    table = head[2].partition("\n\n")[0]
    calls = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", table, re.MULTILINE
    )
    frames: dict[str, list[Frame]] = {}
    for number, location, parent in calls:  # `parent` is the number of the caller, plus one
        outer = frames.get(str(int(parent or 1) - 1), [])
        frames[number] = [locations[location], *outer]
    return frames


def sent_by_kind(hlo: str | None, devices: int) -> dict[str, float]:
    """Kind of collective → bytes that a device sends per step, with a ring in each group.

    Args:
      devices: number of devices that the module is compiled for.
    """
    sums: dict[str, float] = {}
    for collective in collectives(hlo):
        sums[collective.kind] = sums.get(collective.kind, 0) + sent(collective, devices)
    return sums


def sent(collective: Collective, devices: int) -> float:
    """Bytes that a device sends per step for one collective, with a ring in its group."""
    n = group_size(collective.groups, devices)
    factor = {
        "all-gather": (n - 1) / n,  # the result is the whole
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": n - 1,  # the result is a part
        "all-to-all": (n - 1) / n,
        "ragged-all-to-all": (n - 1) / n,  # at most
        "collective-broadcast": 1,
        "collective-permute": 1,  # an explicit ring: what a device sends to its neighbour
    }[collective.kind]
    return factor * collective.times * collective.bytes


def group_size(groups: str, devices: int) -> int:
    """Number of devices in a group, from any of the compiler's notations.

    >>> group_size("{{0,1,2},{3,4,5}}", 6), group_size("[4,8]<=[32]", 32)
    (3, 8)
    >>> group_size("mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", 16), group_size("", 16)
    (8, 16)
    >>> group_size("mesh['a'=4,'b'=2] {'a':(1)2,'b'}", 8)  # the outer half of `a`
    4
    """
    if named := re.match(r"mesh\[(.*?)\] \{(.*?)\}", groups):
        sizes = {name: int(n) for name, n in re.findall(r"('[\w.]+')=(\d+)", named[1])}
        axes = re.findall(r"('[\w.]+')(?::\(\d+\)(\d+))?", named[2])  # 'a', or a part of it
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota[1])
    if listed := re.match(r"\{\{([\d,]+)\}", groups):
        return len(listed[1].split(","))
    return devices
