"""Changes the code at random places and counts which changes no test notices.

    python -m tests.by_hand.mutants --seed=1 --count=100
    python -m tests.by_hand.mutants --seed=1 --count=100 --tier=--full --list

A mutant is one small wrong change in zoo/, data/ or recipes/common/: a comparison turned, a bound off by
one, a term or factor dropped, arguments swapped, an `if` always or never taken, a default changed. Each
line of code is as likely as any other; messages and what only types read are left out. A mutant runs in
a clone of the last commit, against the test files that import its file, nearest first and then cheapest,
then against all others, until one test fails. A survivor is printed with its change: it is equivalent, or
a kind of test is missing.

--costs=FILE, of `pytest --durations-file`, says which test files are cheap.
"""

import argparse
import ast
import collections
import copy
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
MUTATED = ("zoo", "data", "recipes/common")
STYLE = "tests/docs/test_style.py"  # a mutant is not formatted
TURNED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip

COMMUTES = ("max", "min", "maximum", "minimum", "gcd", "lcm", "logical_and", "logical_or")


class Mutant(NamedTuple):
    file: str
    line: int
    start: int  # bytes of the file that the change replaces
    stop: int
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.before} → {self.after}"


# ---- changes -------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """(kind, expression, what replaces it) of a node."""
    match node:
        case ast.Compare(ops=[op]):
            turned = copy.copy(node)
            turned.ops = [TURNED[type(op)]()]
            yield "comparison turned", node, turned
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            yield "term dropped", node, node.left
        case ast.BinOp(op=ast.Mult() | ast.Div() | ast.FloorDiv() | ast.MatMult()):
            yield "factor dropped", node, node.left
        case ast.Call(func=function, args=[first, second, *others]):
            commutes = ast.unparse(function).rpartition(".")[2] in COMMUTES
            if not commutes and not {type(first), type(second)} & {ast.Starred}:
                swapped = copy.copy(node)
                swapped.args = [second, first, *others]
                yield "arguments swapped", node, swapped
        case ast.If() | ast.IfExp():
            yield "always taken", node.test, ast.Constant(True)
            yield "never taken", node.test, ast.Constant(False)
        case ast.Subscript(slice=index):
            for bound in ast.walk(index):
                if isinstance(bound, ast.Constant) and type(bound.value) is int:
                    yield "bound off by one", bound, ast.Constant(bound.value + 1)
        case ast.FunctionDef(args=arguments):
            for default in [*arguments.defaults, *filter(None, arguments.kw_defaults)]:
                yield from changed_default(default)
        case ast.ClassDef(body=body):
            for field in body:
                if isinstance(field, ast.AnnAssign) and field.value:
                    yield from changed_default(field.value)


def changed_default(default: ast.expr) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    match default:
        case ast.Constant(value=bool(value)):
            yield "default changed", default, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "default changed", default, ast.Constant(value * 2 or 1)


def expressions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of messages and annotations."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "exc", "msg", "cause"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from expressions(child)


def mutants_of(path: pathlib.Path) -> list[Mutant]:
    source = path.read_bytes()
    starts = [0]  # of each line
    for line in source.splitlines(True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in expressions(ast.parse(source)):
        for kind, old, new in changes(node):
            start = starts[old.lineno - 1] + old.col_offset
            stop = starts[old.end_lineno - 1] + old.end_col_offset
            before, after = ast.unparse(old), ast.unparse(new)
            if before != after:  # as two equal arguments, swapped
                name = path.relative_to(ROOT).as_posix()
                found.append(Mutant(name, old.lineno, start, stop, kind, before, f"({after})"))
    return found


def draw(seed: int, count: int) -> list[Mutant]:
    """Lines with equal chances, then one of a line's changes."""
    by_line = collections.defaultdict(list)
    for folder in MUTATED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for mutant in mutants_of(path):
                by_line[mutant.file, mutant.line].append(mutant)
    chance = random.Random(seed)
    lines = chance.sample(sorted(by_line), min(count, len(by_line)))
    return [chance.choice(by_line[line]) for line in lines]


# ---- the tests that may notice -------------------------------------------------------------------


def imports(path: pathlib.Path) -> set[str]:
    """Files of this project that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parent.parts
            package = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*package, *filter(None, [node.module])))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for name in names:
            place = ROOT.joinpath(*name.split("."))
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file():
                    found.add(file.relative_to(ROOT).as_posix())
    return found


def test_files(costs: dict[str, float]) -> dict[str, list[str]]:
    """Mutated file → all test files: those that import it first, nearest first, then the cheapest.

    Others may load it by its name, as recipes and entries are.
    """
    graph = {}
    for folder in ("zoo", "data", "recipes", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            graph[path.relative_to(ROOT).as_posix()] = imports(path)
    every = [name for name in graph if "/test_" in name and name != STYLE]
    distances = collections.defaultdict(lambda: dict.fromkeys(every, len(graph)))
    for test in every:
        reached, edge, distance = {test}, {test}, 0
        while edge:
            distance += 1
            edge = {file for name in edge for file in graph.get(name, ())} - reached
            reached |= edge
            for file in edge:
                distances[file][test] = distance
    return {
        file: sorted(every, key=lambda test: (distances[file][test], costs.get(test, 0.0), test))
        for file in graph
    }


def survives(mutant: Mutant, clone: pathlib.Path, tests: list[str], tier: list[str]) -> str:
    """Empty if a test fails; else what was run."""
    path = clone / mutant.file
    source = path.read_bytes()
    path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
    try:
        # As many files at a time as a failure is likely to be among; starting takes seconds.
        for first, last in ((0, 3), (3, 12), (12, len(tests))):
            if chosen := tests[first:last]:
                command = [sys.executable, "-m", "pytest", "-x", *tier, *chosen]
                done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
                if done.returncode not in (0, 5):  # 5: no test of this tier
                    return ""
        return f"{len(tests)} files of tests"
    finally:
        path.write_bytes(source)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--tier", action="append", default=[], help="--full, say")
    parser.add_argument("--costs", help="a file of pytest --durations-file")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args()
    mutants = draw(options.seed, options.count)
    if options.list:
        print(*mutants, sep="\n")
        return
    costs = collections.Counter()
    for line in pathlib.Path(options.costs).read_text().splitlines() if options.costs else ():
        row = json.loads(line)
        costs[row["test"].partition("::")[0]] += row["cpu"]
    tests = test_files(costs)
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        clone = pathlib.Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        # A test that fails anyway would kill every mutant.
        subprocess.run([sys.executable, "-m", "pytest", "-q", *options.tier], cwd=clone, check=True)
        for number, mutant in enumerate(mutants, 1):
            begun = time.perf_counter()
            survivor = survives(mutant, clone, tests[mutant.file], options.tier)
            killed += not survivor
            outcome = f"SURVIVES {survivor}" if survivor else "killed"
            seconds = time.perf_counter() - begun
            print(f"{number:3} {outcome} in {seconds:.0f} s  {mutant}", flush=True)
    print(f"{killed} of {len(mutants)} killed")


if __name__ == "__main__":
    main()
