"""The promises of tests/README.md and, from their `promise` markers, the tests that keep them."""

import ast
import functools
import re
from typing import NamedTuple

from tests.conftest import ROOT

FOLDER = ROOT / "tests"


class Promise(NamedTuple):
    """A row of the table in tests/README.md."""

    name: str
    files: list[str]  # linked, relative to tests/
    full: bool
    line: str


class MarkedTest(NamedTuple):
    """A test function that names a promise, or whose file does."""

    promise: str
    file: str  # relative to tests/
    name: str
    full: bool  # runs only with --full


def documented() -> list[Promise]:
    """Reads the table, in its order."""
    rows = re.findall(
        r"^(\| `([\w-]+)` \| .+ \| (\[[^|]+) \| (full )?\|)$",
        (FOLDER / "README.md").read_text(),
        re.M,
    )
    return [
        Promise(name, re.findall(r"\]\(([^)]+)\)", links), bool(full), line)
        for line, name, links, full in rows
    ]


@functools.cache
def marked_tests() -> list[MarkedTest]:
    """Parses all test files; nothing is imported."""
    found = []
    for path in sorted(FOLDER.glob("*/test_*.py")):
        body = ast.parse(path.read_text()).body
        whole_file = _marks(
            node.value
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        )
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = whole_file | _marks(node.decorator_list)
                if "promise" in marks:
                    file = path.relative_to(FOLDER).as_posix()
                    found.append(MarkedTest(marks["promise"], file, node.name, "full" in marks))
    return found


def _marks(expressions) -> dict[str, str]:
    """Marker → its first argument, a string; the markers of single parameters don't count."""
    parts = [x.elts if isinstance(x, ast.List) else [x] for x in expressions]
    written = [ast.unparse(x) for part in parts for x in part]
    found = (re.match(r"pytest\.mark\.(\w+)(?:\('([^']*)')?", text) for text in written)
    return {match[1]: match[2] for match in found if match}


def listing() -> str:
    """Each promise with its tests, for `pytest --promises`."""
    tests = marked_tests()
    lines = []
    for promise in documented():
        lines.append(f"{promise.name}")
        lines += [
            f"    tests/{test.file}::{test.name}{'  (full)' * test.full}"
            for test in tests
            if test.promise == promise.name
        ]
    return "\n".join(lines)
