"""The source code of a zoo entry: the files that it needs, and all of them as one file.

An entry and the files that it imports, directly or through others, are its *closure*. `one_file`
merges a closure. The result reads like an entry: docstring, Config, model and RULES are the entry's,
in its order, and the shared files stand between the model and RULES. Code that runs at import
(decorators, defaults, annotations, constants) comes after the definitions that it needs.
"""

import ast
import builtins
import dataclasses
import functools
import itertools
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator

DEFINITION = (ast.FunctionDef, ast.ClassDef)  # a model has nothing asynchronous
COMPREHENSION = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
WIDTH = 100  # columns

# What a global name stands for: (".layers", "REMAT") of the zoo's layers.py, ("jax", "") is a module.
Meaning = tuple[str, str]


def closure(entry: pathlib.Path) -> list[pathlib.Path]:
    """The files that an entry needs, itself last, each after those that it imports."""
    found: dict[pathlib.Path, None] = {}

    def add(path: pathlib.Path) -> None:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                for stem in [node.module] if node.module else [n.name for n in node.names]:
                    if (other := path.with_name(f"{stem}.py")) not in found:
                        add(other)
        found[path] = None

    add(entry)
    return list(found)


def one_file(files: list[pathlib.Path]) -> tuple[str, dict[str, str]]:
    """A closure as the text of a single file that imports none of the others.

    Two files may define the same name. The entry's own names stay. Any other definition of such a
    name gets the name of its file in front: REMAT in layers.py becomes LAYERS_REMAT.

    Args:
      files: as `closure` returns them.

    Returns: (text, "FILE.NAME" → its new name).
    """
    sources = {path.stem: Source(path) for path in files}
    names = final_names(sources)
    for source in sources.values():
        source.rename(names)
    *shared, entry = sources.values()
    head, tail = entry.around_helpers()
    pieces = [*head, *(piece for one in reversed(shared) for piece in one.pieces), *tail]
    ours = {f"{file[1:]}.{old}": new for (file, old), new in names.items() if file[0] == "."}
    renamed = {old: new for old, new in ours.items() if old.split(".")[1] != new}
    about = f"One file, made of {listed([path.name for path in files])} of the sharded model zoo."
    if renamed:
        changes = ", ".join(f"{old} → {new}" for old, new in renamed.items())
        about += f" Renamed, because two files define the same name: {changes}."
    above = [entry.opening, comment(about), imports([*sources.values()], names)]
    return "\n\n".join(above) + "\n\n\n" + joined(ordered(pieces)) + "\n", renamed


def listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if words[1:] else words[0]


# ---- one file, and what its names mean -----------------------------------------------------------


class Source:
    """A file of the zoo. Raises ValueError for imports that can't be merged."""

    def __init__(self, path: pathlib.Path):
        self.name = f".{path.stem}"
        self.meanings: dict[str, Meaning] = {}  # its globals, but for those that are files
        self.files: dict[str, str] = {}  # a global that is a file of the zoo → ".its_name"
        self.imported: dict[str, Meaning] = {}  # what comes from outside the zoo
        self._set(path.read_text())
        for node in self.tree.body:
            if isinstance(node, ast.Import):
                self.imported |= {n.asname or n.name: (n.name, "") for n in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self.imported |= {n.asname or n.name: (node.module, n.name) for n in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found = {n.asname or n.name: (f".{node.module}", n.name) for n in node.names}
                self.meanings |= found
            elif isinstance(node, ast.ImportFrom):
                self.files |= {n.asname or n.name: f".{n.name}" for n in node.names}
            else:
                self.meanings |= {name: (self.name, name) for name in bound([node])}
        self.meanings |= self.imported
        inside = [n for n in ast.walk(self.tree) if isinstance(n, ast.ImportFrom) and n.level]
        if {*inside} - {*self.tree.body} or any("*" in n or "." in n for n in self.meanings):
            raise ValueError(f"{path}: write imports as `from .x import a` at the top of the file")

    def _set(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self.scopes = Scopes(self.tree)

    @property
    def opening(self) -> str:
        """Its docstring, as it is written."""
        return "\n".join(self.text.splitlines()[: self.tree.body[0].end_lineno])

    def uses(self) -> Iterator[tuple[ast.expr, Meaning]]:
        """Each expression that stands for a global of any file."""
        parents = {n.value: n for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        for name in self.scopes.globals:
            if name.id in self.files:
                if name not in parents:
                    where = f"{self.name[1:]}.py:{name.lineno}"
                    raise ValueError(f"{where}: use what is in {name.id}, not {name.id} itself")
                yield parents[name], (self.files[name.id], parents[name].attr)
            elif name.id in self.meanings:
                yield name, self.meanings[name.id]
            elif hasattr(builtins, name.id):
                yield name, ("builtins", name.id)

    def rename(self, names: dict[Meaning, str]) -> None:
        """Gives every global its final name. Everything stays in its line."""
        lines = self.text.splitlines(keepends=True)
        edits = {}  # (line, first column, column after the last one) → new text
        for node, meaning in self.uses():
            edits[span(node, lines)] = (ast.unparse(node), names[meaning])
        for node in self.tree.body:
            if isinstance(node, DEFINITION):
                line = lines[node.lineno - 1]
                first = re.match(r"(def|class)\s+", line).end()
                place = (node.lineno, first, first + len(node.name))
                edits[place] = (node.name, names[self.name, node.name])
        for node in self.scopes.quoted:  # "Config", as an annotation
            number, first, last = span(node, lines)
            old = lines[number - 1][first:last]
            renamed = {name: names[meaning] for name, meaning in self.meanings.items()}
            new = re.sub(r"\w+", lambda found, to=renamed: to.get(found[0], found[0]), old)
            edits[number, first, last] = (old, new)
        for (number, first, last), (old, new) in sorted(edits.items(), reverse=True):
            line = lines[number - 1]
            if line[first:last] != old:  # before Python 3.12, names in f-strings have no place
                raise ValueError(f"{self.name[1:]}.py:{number}: {old} can't be renamed here")
            lines[number - 1] = line[:first] + new + line[last:]
        self._set("".join(lines))

    # -- in pieces

    @functools.cached_property
    def pieces(self) -> list["Piece"]:
        """All but docstring and imports, after it is renamed. A shared file's docstring is a comment."""
        lines = ["", *self.text.splitlines()]
        heading = f"{f'# ---- {self.name[1:]}.py ':-<{WIDTH}}\n#\n"
        found = [Piece(self, 0, 0, heading + comment(ast.get_docstring(self.tree)))]
        after = self.tree.body[0].end_lineno + 1
        for node in self.tree.body[1:]:
            first = min([node.lineno, *(n.lineno for n in getattr(node, "decorator_list", []))])
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                above = first
                while above > after and lines[above - 1].startswith("#"):
                    above -= 1
                found += self._comments(lines, after, above)
                text = "\n".join(lines[above : node.end_lineno + 1])
                found.append(Piece(self, above, node.end_lineno, text, node))
            after = node.end_lineno + 1
        return [*found, *self._comments(lines, after, len(lines))]

    def _comments(self, lines: list[str], start: int, stop: int) -> Iterator["Piece"]:
        """Comments that blank lines set apart from every statement."""
        first = None
        for number in range(start, stop + 1):
            if number < stop and lines[number]:
                first = first or number
            elif first:
                yield Piece(self, first, number - 1, "\n".join(lines[first:number]))
                first = None

    def around_helpers(self) -> tuple[list["Piece"], list["Piece"]]:
        """An entry's pieces: all up to its helpers, and the rules at its end."""
        pieces, tables = self.pieces[1:], (ast.Assign, ast.AnnAssign, type(None))
        split = len(pieces)
        while split and isinstance(pieces[split - 1].node, tables):
            split -= 1
        return pieces[:split], pieces[split:]


def final_names(sources: dict[str, Source]) -> dict[Meaning, str]:
    """What each global is called in the one file."""
    wanted: dict[Meaning, str] = {}
    captured: set[Meaning] = set()  # where a function has a variable of this name
    for source in sources.values():
        wanted |= {m: name for name, m in source.meanings.items() if m[0] == source.name}
        wanted |= {m: name for name, m in source.imported.items()}
    for source in sources.values():
        for node, meaning in source.uses():
            if meaning[0] == "builtins":
                wanted[meaning] = meaning[1]
            elif ast.unparse(node) != wanted[meaning] and wanted[meaning] in source.scopes.bound:
                captured.add(meaning)
    meanings: dict[str, list[Meaning]] = {}
    for meaning, name in wanted.items():
        meanings.setdefault(name, []).append(meaning)
    *_, entry = sources.values()
    taken = {word for source in sources.values() for word in re.findall(r"\w+", source.text)}
    names = {}
    for meaning, name in wanted.items():
        keeps = next((m for m in meanings[name] if m[0] == "builtins"), (entry.name, name))
        alone = meanings[name] == [meaning]
        if meaning != keeps and (not alone or meaning in captured):
            name = with_file(meaning[0].rpartition(".")[2], name)
            while name in taken:
                name += "_"
            taken.add(name)
        names[meaning] = name
    return names


def with_file(file: str, name: str) -> str:
    """LAYERS_REMAT, LayersNorm, layers_norm or _layers_norm."""
    plain = name.lstrip("_")
    if plain.isupper():
        new = f"{file.upper()}_{plain}"
    elif plain[:1].isupper():
        new = file.title().replace("_", "") + plain
    else:
        new = f"{file}_{plain}"
    return "_" * (len(name) - len(plain)) + new


def span(node: ast.expr, lines: list[str]) -> tuple[int, int, int]:
    """(line, first column, column after the last one) in characters; Python counts bytes."""
    line = lines[node.lineno - 1].encode()
    first, last = (len(line[:n].decode()) for n in (node.col_offset, node.end_col_offset))
    return node.lineno, first, last


# ---- scopes --------------------------------------------------------------------------------------


class Scopes(ast.NodeVisitor):
    """Which names in a file are its globals.

    Attributes:
      globals: the ast.Names that stand for globals.
      quoted: annotations, or parts of them, that are strings.
      bound: names that any function, class or comprehension binds.
    """

    def __init__(self, tree: ast.Module):
        self.globals: list[ast.Name] = []
        self.quoted: list[ast.Constant] = []
        self.bound: set[str] = set()
        self._function: set[str] = set()  # names of the functions around, seen from inside them
        self._class: set[str] = set()  # names of the class right around, hidden from its methods
        self._set_by_class: set[str] = set()  # those that the statement of a class binds
        self.visit(tree)

    def _inside(self, nodes, function=frozenset(), class_=frozenset(), set_by_class=frozenset()):
        before = self._function, self._class, self._set_by_class
        self._function, self._class = self._function | function, class_
        self._set_by_class = set_by_class
        self.bound |= function | set_by_class
        for node in nodes:
            self.visit(node)
        self._function, self._class, self._set_by_class = before

    def visit(self, node):
        if isinstance(node, COMPREHENSION):
            self._comprehension(node)
        else:
            super().visit(node)

    def visit_Name(self, node):
        names = self._class if isinstance(node.ctx, ast.Load) else self._class | self._set_by_class
        if node.id not in self._function | names:
            self.globals.append(node)

    def visit_FunctionDef(self, node):
        for outer in (*node.decorator_list, *defaults(node.args)):
            self.visit(outer)
        for annotation in annotations(node):
            self._annotation(annotation)
        self._inside(node.body, arguments(node.args) | bound(node.body))

    def visit_Lambda(self, node):
        for outer in defaults(node.args):
            self.visit(outer)
        self._inside([node.body], arguments(node.args) | bound([node.body]))

    def visit_ClassDef(self, node):
        for outer in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(outer)
        earlier = set()
        for statement in node.body:  # SIZE = SIZE + 1 reads the global, and the next line doesn't
            now = bound([statement])
            self._inside([statement], class_=earlier, set_by_class=now)
            earlier = earlier | now

    def visit_AnnAssign(self, node):
        self._annotation(node.annotation)
        for part in filter(None, (node.target, node.value)):
            self.visit(part)

    def _annotation(self, node):
        self.visit(node)
        strings = (n for n in ast.walk(node) if isinstance(n, ast.Constant))
        self.quoted += [n for n in strings if isinstance(n.value, str)]

    def _comprehension(self, node):
        first, *others = node.generators
        self.visit(first.iter)  # outside of it
        names = bound([g.target for g in node.generators])
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        parts += [first.target, *first.ifs, *others]
        self._inside(parts, names)


def bound(nodes: list[ast.AST]) -> set[str]:
    """Names that these statements bind in their own scope."""
    names, elsewhere, todo = set(), set(), list(nodes)
    while todo:
        node = todo.pop()
        if isinstance(node, DEFINITION):
            names.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.comprehension):  # its target is bound inside of it
            todo += [node.iter, *node.ifs]
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(n.asname or n.name).split(".")[0] for n in node.names}
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere |= {*node.names}
        todo += ast.iter_child_nodes(node)
    return names - elsewhere


def arguments(args: ast.arguments) -> set[str]:
    return {node.arg for node in ast.walk(args) if isinstance(node, ast.arg)}


def defaults(args: ast.arguments) -> list[ast.expr]:
    return [node for node in (*args.defaults, *args.kw_defaults) if node]


def annotations(node: ast.FunctionDef) -> list[ast.expr]:
    every = [n.annotation for n in ast.walk(node.args) if isinstance(n, ast.arg)]
    return [annotation for annotation in (*every, node.returns) if annotation]


# ---- the order -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """A statement with the comments right above it, or comments that stand alone."""

    source: Source
    first: int  # its lines
    last: int
    text: str
    node: ast.stmt | None = None


class AtImport(ast.NodeVisitor):
    """Names that a statement needs when it runs: all of them but those in functions' bodies."""

    def __init__(self, node: ast.stmt):
        self.names: set[str] = set()
        self.called: set[str] = set()
        self.visit(node)

    def visit_Name(self, node):
        if isinstance(node.ctx, ast.Load):
            self.names.add(node.id)

    def visit_FunctionDef(self, node):
        for outer in (*node.decorator_list, *defaults(node.args), *annotations(node)):
            self.visit(outer)
        self._call(*node.decorator_list)

    def visit_Lambda(self, node):
        for outer in defaults(node.args):
            self.visit(outer)

    def visit_ClassDef(self, node):
        self.generic_visit(node)
        self._call(*node.decorator_list)

    def visit_Call(self, node):
        self.generic_visit(node)
        self._call(node.func)

    def _call(self, *functions):
        for function in functions:
            while isinstance(function, (ast.Attribute, ast.Call)):
                function = function.func if isinstance(function, ast.Call) else function.value
            if isinstance(function, ast.Name):
                self.called.add(function.id)


def ordered(pieces: list[Piece]) -> list[Piece]:
    """The pieces, each after those that it needs when it runs; otherwise their order stays."""
    owners = {name: piece for piece in pieces if piece.node for name in bound([piece.node])}
    done: dict[Piece, None] = {}

    def needs(piece: Piece) -> set[str]:
        found = AtImport(piece.node)
        run, todo = set(), found.called & owners.keys()
        while todo:  # the body of what is called runs as well
            run |= todo
            nodes = [node for name in todo for node in ast.walk(owners[name].node)]
            todo = {node.id for node in nodes if isinstance(node, ast.Name)} & owners.keys() - run
        return found.names | run

    def add(piece: Piece, before: tuple = ()) -> None:
        if piece not in done and piece not in before:
            names = needs(piece) if piece.node else set()
            for other in [p for p in pieces if p.node and bound([p.node]) & names]:
                add(other, (*before, piece))
            done[piece] = None

    for piece in pieces:
        add(piece)
    return list(done)


def joined(pieces: list[Piece]) -> str:
    """The text of these pieces. A section's heading is left out if nothing of the section follows."""
    headings = [piece for piece in pieces if piece.first and piece.text.startswith("# ----")]
    kept = {a for a, b in itertools.pairwise(pieces) if b.node and a.source is b.source}
    pieces = [piece for piece in pieces if piece in kept or piece not in headings]
    text = pieces[0].text
    for before, piece in itertools.pairwise(pieces):
        neighbors = before.first and (before, piece) in itertools.pairwise(piece.source.pieces)
        text += "\n" * (piece.first - before.last if neighbors else 3) + piece.text
    return text


# ---- what stands above ---------------------------------------------------------------------------


def comment(text: str) -> str:
    """The text as comments. Paragraphs that are too wide are filled again."""
    blocks = []
    for block in text.strip().split("\n\n"):
        if any(len(line) > WIDTH - 2 for line in block.splitlines()):
            block = textwrap.fill(block, WIDTH - 2, break_long_words=False)
        blocks.append(textwrap.indent(block, "# "))
    return "\n#\n".join(blocks)


def imports(sources: list[Source], names: dict[Meaning, str]) -> str:
    """The imports of all files, merged and sorted: the standard library's, then others."""
    modules: dict[str, str] = {}
    members: dict[str, set[str]] = {}
    for module, name in {m for source in sources for m in source.imported.values()}:
        new = names[module, name]
        if not name:
            modules[module] = f"import {module}" + f" as {new}" * (new != module)
        else:
            members.setdefault(module, set()).add(name + f" as {new}" * (new != name))
    for module, parts in members.items():
        parts = sorted(parts, key=_rank)
        line = f"from {module} import {', '.join(parts)}"
        if len(line) > WIDTH:
            line = f"from {module} import (\n" + "".join(f"    {part},\n" for part in parts) + ")"
        members[module] = line
    blocks = []
    for standard in (True, False):
        lines = [
            found[module]
            for found in (modules, members)
            for module in sorted(found)
            if (module.split(".")[0] in sys.stdlib_module_names) == standard
        ]
        blocks += ["\n".join(lines)] if lines else []
    return "\n\n".join(blocks)


def _rank(part: str) -> tuple[int, str]:
    """Constants, then classes, then functions."""
    kind = 0 if part.split()[0].isupper() else 1 if part[0].isupper() else 2
    return kind, part
