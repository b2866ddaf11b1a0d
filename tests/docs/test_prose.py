"""Docstrings begin like sentences, not like fragments of the code around them."""

import ast

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.promise("structure")

FOLDERS = ("tests",)
FRAGMENTS = ("Of ", "The same", "As ", "That ", "Those ", "What ")


def test_no_docstring_begins_with_a_fragment():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            docstring = ast.get_docstring(node) if isinstance(node, documented) else None
            if docstring and docstring.startswith(FRAGMENTS):
                found.append(f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}")
    assert not found, "\n".join(found)
