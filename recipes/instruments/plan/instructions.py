"""What an instruction of a compiled program executes, and the memory that it reads and writes."""

import math
import re

from recipes.common.report import program


def executed(line: str, computations: dict[str, list[str]]) -> list[tuple[re.Match, list[str]]]:
    """An instruction and all those that it calls, each with the lines of its computation."""
    match = program.INSTRUCTION.match(line)
    instructions = [(match, [line])] if match else []
    for _, name in program.called(line):
        lines = computations.get(name, [])
        for inner in lines:
            nested = executed(inner, computations)
            instructions += [(nested[0][0], lines), *nested[1:]] if nested else []
    return instructions


def source(line: str) -> str:
    """The operation that an instruction comes from, as JAX names it."""
    named = re.search(r'op_name="([^"]*)"', line)
    return named[1] if named else ""


def traffic(match: re.Match, results: dict[str, str], computations: dict[str, list[str]]) -> float:
    """Bytes that an instruction reads and writes in the device's memory (not in its caches).

    Args:
      results: name of each instruction of its computation → its result's notation.
    """
    fused = computations.get(dict(program.called(match.string)).get("calls", ""), [])
    total = 0.0
    operands = match.string[match.end() :].partition(")")[0]
    for position, name in enumerate(re.findall(r"%([\w.\-]+)", operands)):
        if name in results:
            parameter = next((x for x in fused if f" parameter({position})" in x), "")
            inner = program.INSTRUCTION.match(parameter)
            touched = _touched(inner[1], fused, computations) if inner else math.inf
            total += min(_in_memory(results[name]), touched)
    root = next((x for x in fused if x.startswith("ROOT ")), "")
    result = match[2]
    if match[3].endswith("-start") and result.startswith("(("):  # (operands), results, context
        result = result.partition("), ")[2]
    return total + _written(result, root, fused)


def _in_memory(notation: str) -> float:
    """Bytes of the arrays of a result that are not in a cache."""
    return sum(program.size(x)[0] for x in program.arrays(notation) if "S(1)" not in x)


def _touched(name: str, fused: list[str], computations: dict[str, list[str]]) -> float:
    """Bytes of an array that a fusion touches: slices of it, or all of it (infinity)."""
    total = 0.0
    for line in fused:
        names = program.operands(line)
        if name not in names:
            continue
        user = program.INSTRUCTION.match(line)
        assert user
        if user[3] in ("dynamic-slice", "slice"):
            total += program.size(user[2])[0]
        elif user[3] == "dynamic-update-slice" and names[0] == name:
            continue  # it stays where it is
        elif user[3] == "bitcast":
            total += _touched(user[1], fused, computations)
        elif user[3] == "fusion":
            nested = computations.get(dict(program.called(line)).get("calls", ""), [])
            parameter = next(x for x in nested if f" parameter({names.index(name)})" in x)
            inner = program.INSTRUCTION.match(parameter)
            assert inner
            total += _touched(inner[1], nested, computations)
        else:
            return math.inf
    return total


def _written(result: str, root: str, fused: list[str]) -> float:
    """Bytes that an instruction writes: its results, or the slices that a fusion updates in place."""
    parts = program.operands(root) if " tuple(" in root else []
    every = program.arrays(result)
    lines = [program.made(name, fused) for name in parts] if len(parts) == len(every) else [root]
    notations = every if len(lines) == len(every) else [result]
    pairs = zip(notations, lines, strict=True)
    return sum(min(_in_memory(notation), _updated(line, fused)) for notation, line in pairs)


def _updated(line: str, lines: list[str]) -> float:
    """Bytes that an instruction writes of its result: an update in place, or all of it (infinity)."""
    match = program.INSTRUCTION.match(line)
    if match and match[3] == "bitcast":
        return _updated(program.made(program.operands(line)[0], lines), lines)
    if match and match[3] == "dynamic-update-slice":
        return program.size(program.result_of(program.operands(line)[1], lines))[0]
    return math.inf
