"""House style that a machine can check: docstrings, Ruff, pyright."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.promise("structure")

FILES = [
    path
    for folder in ("zoo", "recipes", "data", "tests")
    for path in ROOT.glob(f"{folder}/**/*.py")
]
# A docstring is a noun phrase or begins with a verb: "The loss of a batch", "Returns the loss".
FRAGMENTS = ("Of ", "The same", "As ", "That ", "Those ", "What ")


def fragments(text: str) -> Iterator[tuple[int, str]]:
    """(line, first line) of each docstring that begins with a fragment."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found = ast.get_docstring(node) or ""
            if found.startswith(FRAGMENTS):
                yield node.body[0].lineno, found.splitlines()[0]


def test_no_docstring_begins_with_a_fragment():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {first}"
        for path in sorted(FILES)
        for line, first in fragments(path.read_text())
    ]
    assert not found, "\n".join(["say what it is, or what it does:", *found])


@pytest.mark.parametrize("first", ["Of a batch.", "What is kept.", "The same, sorted."])
def test_fragments_are_found(first):
    assert list(fragments(f'def f():\n    """{first}"""\n')) == [(2, first)]


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        ["basedpyright", "--pythonpath", sys.executable],  # about 20 s of CPU time
    ],
    ids=["check", "format", "pyright"],
)
def test_tools_find_nothing(command):
    """They read their settings in pyproject.toml; pyright looks at zoo, recipes and data."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
