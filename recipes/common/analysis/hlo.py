"""Collectives in a compiled module's HLO text, and what they send. All reading of HLO is here."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

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
    """Every transfer between devices in one execution of a compiled module.

    A loop's body counts as often as it runs. A transfer that the compiler has split into several
    steps on one channel counts once; but the permutes of a ring, on one channel too, each count.
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
    """How often a while loop runs: XLA's own note, or its bound divided by its counter's increment."""
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
    """The increment of a loop's counter: 2 in rings of permutes, which XLA unrolls."""
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


def sent_by_kind(hlo: str, devices: int) -> dict[str, float]:
    """Kind of collective → bytes that a device sends in a step, over a ring of each group.

    Args:
      devices: how many the module is compiled for.
    """
    sums: dict[str, float] = {}
    for found in collectives(hlo):
        n = group_size(found.groups, devices)
        factor = {
            "all-gather": (n - 1) / n,  # of the result, which is the whole
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": n - 1,  # of the result, which is a part
            "all-to-all": (n - 1) / n,
            "ragged-all-to-all": (n - 1) / n,
            "collective-permute": 1,  # a ring written out: what a device sends its neighbour
        }[found.kind]
        sums[found.kind] = sums.get(found.kind, 0) + factor * found.times * found.bytes
    return sums


def group_size(groups: str, devices: int) -> int:
    """How many devices take part in one exchange, from any of the compiler's notations.

    >>> group_size("{{0,1,2},{3,4,5}}", 6), group_size("[4,8]<=[32]", 32)
    (3, 8)
    >>> group_size("mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", 16), group_size("", 16)
    (8, 16)
    """
    if named := re.match(r"mesh\[(.*?)\] \{(.*?)\}", groups):
        sizes = {name: int(n) for name, n in re.findall(r"('[\w.]+')=(\d+)", named[1])}
        return math.prod(sizes[name] for name in re.findall(r"'[\w.]+'", named[2]))
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota[1])
    if listed := re.match(r"\{\{([\d,]+)\}", groups):
        return len(listed[1].split(","))
    return devices
