"""Which line of the zoo causes a sharding."""

import ast
import functools
import importlib
import io
import itertools
import pathlib
import tokenize
import types
from collections.abc import Iterator
from typing import Any

from zoo.core.sharding import AxisNames, optimizer_axis

ROOT = pathlib.Path(__file__).parents[3]


class SourceFile:
    """A zoo file's syntax tree and comments."""

    def __init__(self, module: types.ModuleType):
        self.module, self.path = module, pathlib.Path(str(module.__file__))
        text = self.path.read_text()
        self.tree, lines = ast.parse(text), text.splitlines()
        self.comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
        }
        self.alone = {n for n in self.comments if lines[n - 1].lstrip().startswith("#")}

    def beside(self, line: int) -> str:
        """The comment at the end of a line, and its continuation on the next ones."""
        own = self.comments.get(line, "")
        return " ".join([own, *self._run(line, 1)]) if own else ""

    def above(self, line: int) -> str:
        return " ".join(reversed(self._run(line, -1)))

    def _run(self, line: int, step: int) -> list[str]:
        lines = itertools.takewhile(self.alone.__contains__, itertools.count(line + step, step))
        return [self.comments[each] for each in lines]

    def imported(self) -> Iterator["SourceFile"]:
        """The zoo files that this one needs, and those that they need."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.level:
                name = "." * node.level + (node.module or "")
                other = read(importlib.import_module(name, self.module.__package__))
                yield from (other, *other.imported())

    def tables(self) -> Iterator[tuple[dict[str, Any], str, str, list[ast.Constant]]]:
        """Dicts that the file defines: (value, name, the comment above, the keys that stand here)."""
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            value = getattr(self.module, target.id, None) if isinstance(target, ast.Name) else None
            if isinstance(target, ast.Name) and isinstance(value, dict):
                dicts = [each for each in ast.walk(node) if isinstance(each, ast.Dict)]
                keys = [key for each in dicts for key in each.keys if isinstance(key, ast.Constant)]
                yield value, target.id, self.above(node.lineno), keys


@functools.cache
def read(module: types.ModuleType) -> SourceFile:
    return SourceFile(module)


def causes(zoo: types.ModuleType, names: AxisNames) -> dict[str, Any]:
    """Where each rule of each strategy stands: {"rows": …, "strategies": name → axis → its row}.

    A strategy is a union of the tables whose rules it all has. An axis that is in none of them, such
    as the experts' D, is split as another one is: its row is that of the other.
    """
    known = names.logical_axes | {optimizer_axis(axis): "optimizer" for axis in names.logical_axes}
    tables_of_rows: dict[tuple, dict[str, Any]] = {}  # row → the table that it is in
    own = read(zoo)
    for source in (own, *own.imported()):
        file = source.path.relative_to(ROOT).as_posix()
        for table, name, about, keys in source.tables():
            for key in keys:
                row = (key.value, name, about, file, key.lineno, source.beside(key.lineno))
                if key.value in known and key.value in table:
                    tables_of_rows.setdefault(row, table)
    strategies: dict[str, dict[str, int]] = {}
    for strategy, rules in zoo.RULES.items():
        rows = [
            (row, i)
            for i, (row, table) in enumerate(tables_of_rows.items())
            if table.items() <= rules.items()
        ]
        split = strategies[strategy] = {}
        for axis in (axis for axis, target in rules.items() if target):
            alike = [
                (row[0] != axis, i)
                for row, i in rows
                if known[row[0]] == known[axis] and rules[row[0]] == rules[axis]
            ]
            if alike:
                split[axis] = min(alike)[1]
    return {"rows": [row[1:] for row in tables_of_rows], "strategies": strategies}
