"""The source code of a zoo entry: the files that it needs, or all of them merged into one."""

import ast
import pathlib
import re
import sys
import textwrap

WIDTH = 100  # columns


def closure(entry: pathlib.Path, optional: bool = False) -> list[pathlib.Path]:
    """The entry and all files that it imports, directly or indirectly; each after its imports.

    Args:
      optional: whether to add files that are imported where they are needed, inside a function.
    """
    found: dict[pathlib.Path, None] = {}

    def imported(nodes) -> list[pathlib.Path]:
        files = (node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level)
        return [entry.with_name(f"{name}.py") for name in files]

    def add(path: pathlib.Path) -> None:
        if path in found:
            return
        tree = ast.parse(path.read_text())
        for other in imported(tree.body):
            add(other)
        found[path] = None
        for other in imported(ast.walk(tree)) if optional else ():
            add(other)

    add(entry)
    return list(found)


def one_file(files: list[pathlib.Path]) -> str:
    """Merges a closure into the text of one file: the entry's docstring, all imports, each file.

    No two files of a closure define the same name (a test checks that), so nothing is renamed.

    Args:
      files: the result of `closure`, in its order.
    """
    modules: set[str] = set()  # import MODULE
    members: dict[str, set[str]] = {}  # from MODULE import NAMES
    sections = []
    for path in files:
        tree, lines = ast.parse(path.read_text()), path.read_text().splitlines()
        begins = tree.body[0].end_lineno or 0  # after the docstring, and after the imports
        for node in tree.body:
            if isinstance(node, ast.Import):
                modules |= {ast.unparse(name) for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                members.setdefault(node.module or "", set()).update(map(ast.unparse, node.names))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                begins = node.end_lineno or 0
        heading = f"{f'# ---- {path.name} ':-<{WIDTH}}"
        if path != files[-1]:
            heading += "\n#\n" + comment(ast.get_docstring(tree) or "")
        body = re.sub(r"\n +from \.\w+ import .*\n\n", "\n", "\n".join(lines[begins:]))
        sections.append(heading + "\n\n\n" + body.strip("\n"))
    opening = "\n".join(lines[: tree.body[0].end_lineno])  # the entry's, which is the last
    names = ", ".join(path.name for path in files)
    made_of = comment(textwrap.fill(f"Made of the sharded model zoo's {names}.", WIDTH - 2))
    head = "\n\n".join([opening, made_of, merged(modules, members)])
    return "\n\n".join([head, "\n\n\n".join(sections)]) + "\n"


def comment(text: str) -> str:
    return textwrap.indent(text, "# ", lambda line: True).replace("# \n", "#\n")


def merged(modules: set[str], members: dict[str, set[str]]) -> str:
    """Import statements: the standard library's, then the others."""

    def rank(name: str) -> tuple[int, str]:  # constants, then classes, then functions
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    groups: dict[bool, list[str]] = {True: [], False: []}
    for module in sorted(modules):
        groups[module.split(".")[0].split()[0] in sys.stdlib_module_names].append(
            f"import {module}"
        )
    for module in sorted(members):
        line = f"from {module} import {', '.join(sorted(members[module], key=rank))}"
        groups[module.split(".")[0] in sys.stdlib_module_names].append(line)
    return "\n\n".join("\n".join(lines) for lines in groups.values() if lines)
