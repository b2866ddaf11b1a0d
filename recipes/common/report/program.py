"""Instructions of a compiled module, read from its HLO text."""

import math
import re
from collections.abc import Iterator

# name, result, operation
INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_BITS = {"pred": 8, "token": 0, "opaque": 0}  # else the first number in the type's name
_CONSTANT = r" = [su]32\[\]\S* constant\((-?\d+)\)"


def computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """(computation → lines of its instructions, name of the entry computation)."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if head:
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif re.fullmatch(r"\}( //.*)?", line):
            name = ""
        elif name and INSTRUCTION.match(line.strip()):
            computations[name].append(line.strip())
        elif name and computations[name]:  # attributes of a kernel may have line breaks
            computations[name][-1] += line.strip()
    return computations, entry


def called(line: str) -> Iterator[tuple[str, str]]:
    """(role, name) of each computation that an instruction runs."""
    roles = "condition|body|calls|to_apply|true_computation|false_computation"
    yield from re.findall(rf"({roles})=%?([\w.\-]+)", line)
    for names in re.findall(r"(?:branch|called)_computations=\{([^}]*)\}", line):
        yield from (("branch", name.strip().lstrip("%")) for name in names.split(","))


def trips(line: str, lines: list[str], computations: dict[str, list[str]]) -> int:
    """Iterations of a while loop among `lines`: XLA's own note, or from its counter's constants.

    0 if data decides: slots.further_rounds runs for few loads.
    """
    noted = re.search(r"known_trip_count\W+n\W+(\d+)", line)
    if noted:
        return int(noted[1])
    names = dict(called(line))
    condition, body = (computations.get(names.get(part, ""), []) for part in ("condition", "body"))
    fused = (y for x in condition for _, name in called(x) for y in computations.get(name, []))
    test = "\n".join([*condition, *fused])
    bounds = [int(n) for n in re.findall(_CONSTANT, test)]
    counter = re.search(r"= [su]32\[\]\S* get-tuple-element\(.*index=(\d+)", test)
    initial = operands(made(operands(line)[0], lines))
    results = operands(next((x for x in body if x.startswith("ROOT ")), ""))
    if not bounds and counter:
        return 0
    if not bounds or not counter or int(counter[1]) >= min(len(initial), len(results)):
        return 1
    start = _value(initial[int(counter[1])], lines) or 0
    added = (_value(name, body) for name in operands(made(results[int(counter[1])], body)))
    stride = next(filter(None, added), 1)  # 2 in rings of permutes that XLA unrolls
    distance = (max(bounds) - start) * (1 if stride > 0 else -1)
    distance += re.search(r"direction=[LG]E", test) is not None  # the bound is included
    return max(1, math.ceil(distance / abs(stride)))


def made(name: str, lines: list[str]) -> str:
    """The instruction with this name."""
    return next((x for x in lines if x.removeprefix("ROOT ").startswith(f"%{name} = ")), "")


def operands(line: str) -> list[str]:
    """Names of an instruction's operands, followed by other names in its line."""
    return re.findall(r"%([\w.\-]+)", line.partition(" = ")[2].partition("metadata=")[0])


def _value(name: str, lines: list[str]) -> int | None:
    """The integer constant with this name, or that it copies; None if there is none."""
    line = made(name, lines)
    number = re.search(_CONSTANT, line)
    if number or " copy(" not in line:
        return int(number[1]) if number else None
    return _value(operands(line)[0], lines)


def arrays(text: str) -> list[str]:
    """The arrays in a result's notation, each with its layout."""
    return re.findall(r"\b[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?", text)


def result_of(name: str, lines: list[str]) -> str:
    """The notation of the result of the instruction with this name."""
    match = INSTRUCTION.match(made(name, lines))
    return match[2] if match else ""


def size(result: str) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Bytes and shapes of an array or a tuple of arrays."""
    total, shapes = 0, []
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", result):
        bits = _BITS[dtype] if dtype in _BITS else int(re.findall(r"\d+", dtype)[0])
        if bits:
            shapes.append(tuple(int(d) for d in re.findall(r"\d+", dims)))  # `<=4`: at most
            total += bits * math.prod(shapes[-1]) // 8
    return total, tuple(shapes)
