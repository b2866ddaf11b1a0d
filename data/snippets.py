"""Pieces of the standard library's source, which every machine has: functions with their docstrings,
and comments. They make the default data of encoders that classify texts or compare them.
"""

import ast
import functools
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from data import sources

FILES = 150  # that are read
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings")
LEAST, MOST = 40, 1_000  # characters of a piece


class Function(NamedTuple):
    docstring: str  # its first paragraph, in one line
    code: str  # without the docstring


@functools.cache
def functions() -> tuple[Function, ...]:
    """Documented functions, in an order that depends on the files alone."""
    by_docstring = {}
    for text in _texts():
        lines = text.splitlines()
        for node in ast.walk(_parsed(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if len(docstring) < LEAST // 2 or len(node.body) < 2:
                continue
            begin, end = node.body[0].lineno - 1, node.body[0].end_lineno
            code = [*lines[node.lineno - 1 : begin], *lines[end : node.end_lineno]]
            joined = "\n".join(code).strip()
            if len(joined) >= LEAST:
                by_docstring[docstring] = Function(docstring, joined[:MOST])
    return tuple(by_docstring.values())


@functools.cache
def comments() -> tuple[str, ...]:
    """Comments of one line or several, without their marks."""
    texts, lines = {}, []
    for text in _texts():
        for line in (*text.splitlines(), ""):
            stripped = line.strip()
            if stripped.startswith("#"):
                lines.append(stripped.lstrip("#! "))
                continue
            joined = " ".join(" ".join(lines).split())[:MOST]
            if len(joined) >= LEAST // 2:
                texts[joined] = None
            lines = []
    return tuple(texts)


@functools.cache
def _texts() -> tuple[str, ...]:
    return tuple(_read())


def _read() -> Iterator[str]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in sources.walk(root, {*LEFT_OUT}.__contains__, sources.is_python)
        if 2_000 < file.stat().st_size < 100_000
    ]
    names = {file.relative_to(root).as_posix(): file for file in files}
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:FILES]:
        text = names[name].read_text(errors="ignore")
        if text.isascii():  # a token is a byte
            yield text


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])
