"""The reward of the bare command: 1 for an answer with which a prompt is Python that parses, else 0.

The text is only parsed, never run. What follows the last line break is cut off by the limit and doesn't
count. The rest must add a statement that does something, with no empty and no repeated line: `pass`,
comments and lone names or constants, such as docstrings, are none.
"""

import ast
from typing import Any


def reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
    answer, line_break, _ = completion.rpartition("\n")
    lines = [line.strip() for line in answer.split("\n")]
    if not line_break or "" in lines or len({*lines}) < len(lines):
        return 0.0
    try:
        before = statements(prompt + "pass\n")
        return float(bool(statements(f"{prompt}{answer}\n") - before))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0


def statements(text: str) -> set[str]:
    """The different statements of a text, inside others too, that do something."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        is_idle = isinstance(node, ast.Pass | ast.FunctionDef | ast.ClassDef) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Name)
        )
        if isinstance(node, ast.stmt) and not is_idle:
            found.add(ast.dump(node))
    return found
