"""The rewards of the bare command: four questions about an answer, each worth at most 1.

    parses           with its prompt, is it Python that parses, and does it do something?
    uses_parameter   does the function read one of its parameters, if it has any?
    names_known      of the names that it reads, how many are parameters, assigned in the text, or built in?
    two_kinds        are there statements of two kinds, such as an assignment and a return?

The text is only parsed, never run. What follows the last line break is cut off by the limit and doesn't
count. The rest must add a statement that does something, with no empty and no repeated line: `pass`,
comments and lone names or constants, such as docstrings, are none. An answer that fails here gets nothing
from the others either.
"""

import ast
import builtins
from collections.abc import Iterator
from typing import Any

BINDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parses(prompt: str, completion: str, row: dict[str, Any]) -> float:
    return float(bool(_answer(prompt, completion)[1]))


def uses_parameter(prompt: str, completion: str, row: dict[str, Any]) -> float:
    tree, added = _answer(prompt, completion)
    if not added:
        return 0.0
    function = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if function is None:
        return 1.0
    parameters = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    read = {name.id for statement in function.body for name in _names(statement, ast.Load)}
    return float(not parameters or bool(parameters & read))


def names_known(prompt: str, completion: str, row: dict[str, Any]) -> float:
    tree, added = _answer(prompt, completion)
    if not added:
        return 0.0
    known = {*dir(builtins)} | {name.id for name in _names(tree, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, BINDS):
            known.add(node.name)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler):
            known.add(node.name or "")
    first = prompt.count("\n") + 1  # line of the answer
    read = [name.id for name in _names(tree, ast.Load) if name.lineno >= first]
    return sum(name in known for name in read) / max(len(read), 1)


def two_kinds(prompt: str, completion: str, row: dict[str, Any]) -> float:
    _, added = _answer(prompt, completion)
    return float(len({*added.values()}) > 1)


def _names(tree: ast.AST, context: type) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            yield node


def _answer(prompt: str, completion: str) -> tuple[ast.Module, dict[str, type]]:
    """(the text, the statements that the answer adds as `statements` finds them; none if it earns nothing)."""
    nothing = ast.Module([], []), {}
    answer, line_break, _ = completion.rpartition("\n")
    lines = [line.strip() for line in answer.split("\n")]
    if not line_break or "" in lines or len({*lines}) < len(lines):
        return nothing
    try:
        before = statements(ast.parse(prompt + "pass\n"))
        tree = ast.parse(f"{prompt}{answer}\n")
        after = statements(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return nothing
    return tree, {text: kind for text, kind in after.items() if text not in before}


def statements(tree: ast.AST) -> dict[str, type]:
    """The different statements of a text, inside others too, that do something; and their kinds."""
    kinds = {}
    for node in ast.walk(tree):
        is_idle = isinstance(node, ast.Pass | ast.FunctionDef | ast.ClassDef) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Name)
        )
        if isinstance(node, ast.stmt) and not is_idle:
            kinds[ast.dump(node)] = type(node)
    return kinds
