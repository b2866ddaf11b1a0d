"""House rules that a machine can check."""

import ast
import builtins
import dataclasses
import doctest
import importlib
import io
import itertools
import pathlib
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator

import jax
import pytest
from flax import nnx

from recipes.common import entries, language
from recipes.common.sharding.abstract import abstract_model
from recipes.common.zoo_source import closure
from tests.conftest import ROOT

pytestmark = pytest.mark.promise("structure")

# Package of recipes/common → those of it that it may import; and libraries that it may.
LAYERS = {
    "runtime": set(),
    "sharding": {"runtime"},
    "analysis": {"runtime", "sharding"},
    "hf": {"runtime", "sharding", "entries"},
    "checkpoint": {"runtime", "sharding", "hf", "analysis", "entries"},
    "generation": {"runtime", "sharding"},
    "classification": {"runtime", "sharding", "analysis", "checkpoint", "train"},
    "harness": {"runtime", "sharding", "generation"},
    "int8_weights": {"runtime", "sharding"},
    "language": {
        *{"runtime", "sharding", "analysis", "generation", "checkpoint", "train", "entries"},
    },
    "train": {"runtime", "sharding", "hf", "analysis", "checkpoint", "entries"},
    "entries": set(),
    "mesh": {"runtime"},
    "zoo_source": set(),
}
LIBRARIES = {
    "zoo": {"jax", "flax"},
    "data": {
        *{"PIL", "grain", "numpy", "datasets", "tokenizers", "jinja2", "huggingface_hub"},
        *{"etils", "gcsfs", "fsspec"},
    },
    "recipes": {"jax", "flax", "numpy"},
    "recipes/bench": {"jax", "flax", "numpy", "optax", "torch", "tensorstore"},
    "recipes/common": {"jax", "flax", "numpy"},
    "recipes/common/runtime": {"jax", "numpy", "absl"},
    "recipes/common/sharding": {"jax", "flax", "numpy"},
    "recipes/common/analysis": {"jax", "flax", "numpy", "matplotlib"},
    "recipes/common/harness": {"jax", "numpy", "rich", "lm_eval"},
    "recipes/common/language": {"numpy", "flax"},
    "recipes/common/hf": {"jax", "flax", "numpy", "safetensors", "huggingface_hub"},
    "recipes/common/checkpoint": {"jax", "numpy", "orbax", "etils"},
    "recipes/common/train": {
        *{"jax", "flax", "numpy", "optax", "rich", "tensorboardX", "wandb"},
    },
}
OURS = ("zoo", "data", "recipes", "tests")
FILES = sorted(path.relative_to(ROOT) for folder in OURS for path in (ROOT / folder).rglob("*.py"))
SHIPPED = [path for path in FILES if path.parts[0] != "tests"]
ZOO = [path for path in SHIPPED if path.parent.as_posix() == "zoo" and path.stem != "__init__"]
RECIPES = [path for path in SHIPPED if path.parent.as_posix() == "recipes"]


def imports(path) -> set[str]:
    """Full names of all that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or path in ZOO, f"{path}: relative import"
            base = f"zoo.{node.module or ''}".rstrip(".") if node.level else node.module
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def libraries(path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - {*OURS}


# ---- who imports whom ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_imports_flow_one_way(path):
    folder, names = path.parent.as_posix(), imports(path)
    ours = {name for name in names if name.split(".")[0] in OURS}
    assert libraries(path) <= LIBRARIES[folder]
    if folder in ("zoo", "data"):
        assert all(name.split(".")[0] == folder for name in ours), "they stand alone"
        if folder == "zoo":  # a copy has another name
            assert "import zoo" not in (text := (ROOT / path).read_text())
            assert "from zoo" not in text
            used = {name.split(".")[1] for name in ours}
            assert used.isdisjoint(entries.ENTRIES), "an entry needs no other entry"
        return
    among = {name.removeprefix("recipes.") for name in ours if name.startswith("recipes.")}
    if folder == "recipes":
        assert all(name.startswith("common.") for name in among), "recipes never import one another"
    elif folder == "recipes/bench":
        assert all(name.startswith(("common.", "bench")) for name in among)
    elif path.stem != "__init__" or folder != "recipes/common":
        layer = path.parts[2].removesuffix(".py")
        wanted = {name.split(".")[1] for name in among if name != "STARTED"} - {layer}
        assert wanted <= LAYERS[layer], f"{layer} is below"
        if layer != "hf":  # whose families are an entry each
            of_zoo = {name.split(".")[1] for name in ours if name.startswith("zoo.")}
            assert of_zoo.isdisjoint(entries.ENTRIES), "entries.py looks them up"


@pytest.mark.parametrize("layer", ["sharding", "analysis", "checkpoint", "train"])
def test_only_zoo_files_know_strategies_and_logical_axes_by_name(layer):
    files = [entries.zoo_file(name) for name in entries.ENTRIES]
    names = {name for zoo in files for name in (*zoo.RULES, *zoo.LOGICAL_AXES)}
    names -= {"batch", *entries.ENTRIES}  # an entry may be called as an axis is
    for path in (ROOT / "recipes" / "common" / layer).glob("*.py"):
        tree = ast.parse(path.read_text())
        found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not names & {value for value in found if isinstance(value, str)}, path


def test_one_file_reads_hlo():
    """Other files in recipes/ pass a program's text on without parsing it."""
    for path in SHIPPED:
        text = (ROOT / path).read_text()
        readers = re.findall(r"(\w+)\(\w+\.as_text\(\)", text)
        assert text.count("as_text") == len(readers), path
        assert {f"recipes.common.analysis.hlo.{name}" for name in readers} <= imports(path), path


@pytest.mark.parametrize(
    "path", [path for path in SHIPPED if ">>> " in (ROOT / path).read_text()], ids=str
)
def test_examples_in_docstrings_are_true(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    assert doctest.testmod(module).failed == 0


# ---- zoo files -----------------------------------------------------------------------------------

SHARED_FILES = [path for path in ZOO if path.stem not in entries.ENTRIES]
# Files that shared files import only where something needs them, inside functions, so that a model can be
# copied without them: file → its importers. Such a file may import another one at its top.
OPTIONAL = {
    "pipeline": {"layers"},
    "context": {"attention", "layers"},
    "cache": {"attention", "deepseek"},
    "splash": {"attention"},
    "low_precision": {"experts", "layers"},
    "quantization": {"low_precision"},
    "lora": {"layers"},
    "dropless": {"experts"},
    "mtp": {"deepseek", "layers"},
}
LAYER = {"Layer", "Block"}  # an entry's layers stand between its Config and its model
# The definitions that a reader of a file should meet first.
MAIN = {
    "sharding": ["complete_tables", "constrain"],
    "strategies": [],  # tables alone
    "layers": ["multiply"],
    "attention": ["Attention"],
    "feedforward": ["GeluMLP"],
    "experts": ["mix"],
    "pipeline": ["microbatches", "in_stages"],
    "low_precision": ["lowered"],
    "quantization": ["multiply_rounded"],
    "context": ["way_to_attend", "on_devices"],
    "cache": ["prefill", "decode"],
    "splash": ["splash", "splash_gradients"],
    "lora": ["Adapter"],
    "dropless": ["dropless"],
    "mtp": ["Further", "objective_with_mtp"],
} | {name: [entry.model] for name, entry in entries.ENTRIES.items()}


def tree_of(path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def definitions(tree: ast.Module) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """The classes and functions of a file, in its order."""
    return {n.name: n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))}


def methods(node: ast.ClassDef) -> set[str]:
    return {part.name for part in node.body if isinstance(part, ast.FunctionDef)}


def assigned(node: ast.stmt) -> list[str]:
    """Names that a top-level statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def test_every_zoo_file_is_an_entry_or_shared():
    assert {path.stem for path in ZOO} == set(MAIN)
    closures = [closure(ROOT / "zoo" / f"{name}.py") for name in entries.ENTRIES]
    for path in SHARED_FILES:
        if path.stem in OPTIONAL:
            continue
        users = sum(ROOT / path in files for files in closures)
        assert users >= 2, f"{path} has {users} users; move it into its entry"


@pytest.mark.parametrize(("name", "importers"), OPTIONAL.items())
def test_an_optional_file_needs_no_file_that_models_lack(name, importers):
    files = closure(ROOT / "zoo" / f"{name}.py")
    optional = {ROOT / "zoo" / f"{name}.py" for name in OPTIONAL}
    needs_it = ROOT / "zoo" / ("moe.py" if name == "dropless" else "transformer.py")
    assert {*files[:-1]} <= {*closure(needs_it)} | optional
    assert len(files[-1].read_text().splitlines()) <= 250
    nested = {
        path.stem
        for path in ZOO
        for node in tree_of(path).body
        for part in ast.walk(node)
        if isinstance(part, ast.ImportFrom) and part.level and part.module == name
        if part is not node or path.stem in OPTIONAL
    }
    assert nested == importers


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_an_entry_and_what_it_imports_are_short(name):
    files = closure(ROOT / "zoo" / f"{name}.py")
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert len(lines) <= 6, lines
    assert sum(lines.values()) <= 1_900, lines
    model = definitions(tree_of(f"zoo/{name}.py"))[entries.ENTRIES[name].model]
    if "decode" in methods(model):
        assert model.end_lineno - model.lineno + 1 <= 90, "language models share functions"


@pytest.mark.promise("copy")
@pytest.mark.parametrize("name", entries.ENTRIES)
def test_files_of_a_closure_can_be_merged(name):
    """recipes.copy concatenates them: no name may have two meanings or be a file's name."""
    meanings: dict[str, set[str]] = {}
    for path in closure(ROOT / "zoo" / f"{name}.py", optional=True):
        tree = tree_of(path)
        inner = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        for node in inner:
            for alias in node.names:
                if isinstance(node, ast.ImportFrom) and node.module in OPTIONAL:
                    continue
                if isinstance(node, ast.ImportFrom) and node.level:
                    assert node in tree.body, f"{path.name}:{node.lineno}: at the top of the file"
                    assert node.module, f"{path.name}:{node.lineno}: from .x import a"
                    assert alias.asname is None, f"{path.name}:{node.lineno}: as it is defined"
                elif node in tree.body:
                    means = f"{getattr(node, 'module', '')} {alias.name}"
                    meanings.setdefault(alias.asname or alias.name, set()).add(means)
        defined = {*definitions(tree), *(n for node in tree.body for n in assigned(node))}
        for found in defined:
            meanings.setdefault(found, set()).add(f"{path.name} {found}")
    assert not {found for found, means in meanings.items() if len(means) > 1}


@pytest.mark.parametrize("path", SHARED_FILES, ids=str)
def test_a_shared_file_holds_functions_and_leaf_modules(path):
    tree = tree_of(path)
    for name, node in definitions(tree).items():
        assert name not in {"Config", *LAYER}, "it stands in an entry's own file"
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            assert bases <= {"nnx.Module", "nnx.Variable", "NamedTuple"}
            assert methods(node).isdisjoint({"loss", "prefill", "decode"}), f"{name} is a model"
    assert "RULES" not in {name for node in tree.body for name in assigned(node)}


@pytest.mark.parametrize("path", SHARED_FILES, ids=str)
def test_a_shared_file_names_no_logical_axis_that_an_entry_lacks(path):
    known = {name: {*entries.zoo_file(name).LOGICAL_AXES} for name in entries.ENTRIES}
    named = {node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)}
    named = {value for value in named if isinstance(value, str)} & set().union(*known.values())
    for name, axes in known.items():
        if ROOT / path in closure(ROOT / "zoo" / f"{name}.py"):
            assert named <= axes, f"{name} lacks {named - axes}"


@pytest.mark.parametrize("path", ZOO, ids=str)
def test_nothing_in_the_zoo_is_registered(path):
    """No registry is filled at import, so readers can see what a model computes."""
    tree = tree_of(path)
    ours = {*definitions(tree), *(name for node in tree.body for name in assigned(node))}
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), node.lineno
        for decorator in getattr(node, "decorator_list", []):
            root = ast.unparse(decorator).split(".")[0].split("(")[0]
            assert root not in ours, f"line {node.lineno}: @{root} is the zoo's own"
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            assert ast.unparse(node.value) not in ours, node.lineno
    for node in tree.body[1:]:
        if isinstance(node, ast.Expr):
            assert ast.unparse(node).split("(")[0].endswith(".defvjp"), node.lineno


EQUAL = 6  # lines in a row


def check_equal_runs(files: dict[str, list[str]]) -> None:
    """Asserts that no two files share EQUAL lines in a row."""
    seen: dict[tuple[str, ...], str] = {}
    for name, lines in files.items():
        for first in range(len(lines) - EQUAL + 1):
            run = tuple(lines[first : first + EQUAL])
            other = seen.setdefault(run, name)
            assert other == name, f"{name} and {other} share:\n" + "\n".join(run)


def lines_of(path, code_alone: bool) -> list[str]:
    """The lines of a file, stripped, without imports and empty ones.

    Args:
      code_alone: also without comments, docstrings, fields of Config, and tables of dicts.
    """
    text, dropped = (ROOT / path).read_text(), []
    tree, lines = ast.parse(text), text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            dropped.append(node)
        elif code_alone and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            dropped += node.body[:1] if ast.get_docstring(node) else []
            if isinstance(node, ast.ClassDef) and node.name == "Config":
                dropped += [part for part in node.body if isinstance(part, ast.AnnAssign)]
    if code_alone:
        tables = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        dropped += [n for n in tables if any(isinstance(part, ast.Dict) for part in ast.walk(n))]
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
    numbers = {n for node in dropped for n in range(node.lineno, node.end_lineno + 1)}
    kept = [line.strip() for n, line in enumerate(lines, 1) if n not in numbers]
    return [line for line in kept if line]


@pytest.mark.parametrize("code_alone", [False, True], ids=["text", "code"])
def test_no_two_zoo_files_share_six_lines(code_alone):
    check_equal_runs({path.name: lines_of(path, code_alone) for path in ZOO})


@pytest.mark.parametrize("path", ZOO, ids=str)
def test_a_main_definition_comes_before_its_helpers(path):
    """Exceptions: types that its annotations name, and an entry's layers."""
    found = definitions(tree_of(path))
    for main in MAIN[path.stem]:
        reached, todo = set(), {main}
        while todo:
            nodes = [node for name in todo for node in ast.walk(found[name])]
            reached |= todo
            todo = {node.id for node in nodes if isinstance(node, ast.Name)} & {*found} - reached
        before = {name for name in reached if found[name].lineno < found[main].lineno}
        types = {
            name
            for name in before
            if isinstance(found[name], ast.ClassDef)
            and [ast.unparse(base) for base in found[name].bases] == ["NamedTuple"]
        }
        assert before - types <= {"Config", *LAYER, *MAIN[path.stem]}, main


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_an_entry_has_its_parts_in_order(name):
    """The order is zoo/README.md's; classes inherit nnx.Module, or nnx.Variable for a buffer."""
    tree, model = tree_of(f"zoo/{name}.py"), entries.ENTRIES[name].model
    assert ast.get_docstring(tree)
    found = definitions(tree)
    classes = {n: node for n, node in found.items() if isinstance(node, ast.ClassDef)}
    bases = {ast.unparse(base) for node in classes.values() for base in node.bases}
    assert "nnx.Module" in bases <= {"nnx.Module", "nnx.Variable"}
    places = {n: (node.lineno, 0) for n, node in found.items()}
    places |= {n: (node.lineno, i) for node in tree.body for i, n in enumerate(assigned(node))}
    layers = [n for n in found if n in LAYER]
    parts = ["Config", "SIZES", "LOGICAL_AXES", "IN_USE", *layers, model]
    helpers = [n for n in found if n not in parts]
    wanted = [*parts, *helpers, "RULES"]
    assert sorted(wanted, key=places.get) == wanted
    assert assigned(tree.body[-1]) == ["RULES"]
    shared = {n for node in found[model].body for n in assigned(node)}  # functions of shared files
    assert {"__init__", "__call__", "loss"} <= methods(found[model]) | shared


def parallelisms(node: ast.expr) -> list[ast.expr]:
    """A | B | C → [A, B, C]."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return parallelisms(node.left) + parallelisms(node.right)
    return [node]


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_tables_are_complete_and_state_only_what_they_shard(name):
    zoo = entries.zoo_file(name)
    for strategy, table in zoo.RULES.items():
        assert list(table) == list(zoo.LOGICAL_AXES), strategy
    call = tree_of(f"zoo/{name}.py").body[-1].value
    assert ast.unparse(call.func) == "complete"
    stated = call.args[0]
    assert [ast.literal_eval(key) for key in stated.keys] == list(zoo.RULES)
    repeated = set()
    for strategy, union in zip(zoo.RULES, stated.values, strict=True):
        table = eval(ast.unparse(union), vars(zoo))
        assert None not in table.values(), strategy
        shards = {axis: where for axis, where in zoo.RULES[strategy].items() if where is not None}
        assert table == shards, strategy
        # A strategy is a union of named parallelisms, each of which is written down once.
        for part in parallelisms(union):
            if not isinstance(part, ast.Name):
                assert isinstance(part, ast.Dict), ast.unparse(part)
                assert len(part.keys) == 1, f"{strategy}: give {ast.unparse(part)} a name"
                assert ast.unparse(part) not in repeated, f"give {ast.unparse(part)} a name"
                repeated.add(ast.unparse(part))
    kinds = {
        "activations",
        "weights",
        "both",
        "stack",
        *(f"instead of {a}" for a in zoo.LOGICAL_AXES),
    }
    assert set(zoo.LOGICAL_AXES.values()) <= kinds
    assert {*zoo.IN_USE, *zoo.IN_USE.values()} <= set(zoo.LOGICAL_AXES)


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_sizes_say_how_many_parameters_they_have(name):
    zoo, model = entries.zoo_file(name), entries.model(name)
    assert "tiny" in zoo.SIZES
    for size, config in zoo.SIZES.items():
        shapes = abstract_model(lambda c=config: model(c(), rngs=nnx.Rngs(0))).shapes["params"]
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert config.__doc__.startswith(f"{count:,} parameters."), size


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_no_variable_is_weakly_typed(name):
    """Optimizers return strong types, so jax.jit would compile the second step again."""
    zoo, model = entries.zoo_file(name), entries.model(name)
    shapes = abstract_model(lambda: model(zoo.Config.tiny(), rngs=nnx.Rngs(0))).shapes
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(shapes))


# ---- recipes -------------------------------------------------------------------------------------

LANGUAGE = pathlib.Path("recipes/common/language/recipe.py")  # has the main of language models


@pytest.mark.parametrize("path", [*RECIPES, LANGUAGE], ids=str)
def test_a_recipe_is_read_in_one_sitting(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 60, node.name


def own_flags(entry: str) -> set[str]:
    recipe = importlib.import_module(f"recipes.{entry}")
    every, shared = map(dataclasses.fields, (recipe.Flags, language.Flags))
    return {field.name for field in every} - {field.name for field in shared}


@pytest.mark.parametrize(
    "entry", [name for name, entry in entries.ENTRIES.items() if entry.data == "data.text"]
)
def test_a_recipe_of_a_language_model_is_short(entry):
    """Longer recipes have more flags, at about five lines each, and the code for them."""
    text = (ROOT / "recipes" / f"{entry}.py").read_text()
    assert len(text.splitlines()) <= 40 + 15 * len(own_flags(entry))
    recipe = importlib.import_module(f"recipes.{entry}")
    assert recipe.main.func is language.main


SHARED = 8  # statements; what the recipes of all entries do alike takes 5


def calls_in(text: str) -> list[str]:
    """The statements of a file that call something, as they are after any rewording.

    Without comments, strings, annotations, classes of flags and imports. What a file names itself is
    `_`; what it imports has its own name, wherever it is imported from and as what.
    """
    tree, imported = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                imported[alias.asname or alias.name.split(".")[0]] = alias.name.split(".")[-1]

    def shape(node: ast.AST) -> str:
        match node:
            case ast.Name():
                known = hasattr(builtins, node.id)
                return imported.get(node.id, node.id if known else "_")
            case ast.Attribute(value=ast.Name(id=name)) if name in imported:
                return node.attr  # of a module: as if it were imported from there
            case ast.Attribute():
                return f"{shape(node.value)}.{node.attr}"
            case ast.Constant(value=str()) | ast.JoinedStr():
                return "text"
            case ast.Constant():
                return repr(node.value)
            case ast.Call():
                keywords = sorted(f"{word.arg}={shape(word.value)}" for word in node.keywords)
                given = ", ".join([*map(shape, node.args), *keywords])
                return f"{shape(node.func)}({given})"
        inner = [
            shape(child)
            for name, value in ast.iter_fields(node)
            if name not in ("body", "orelse", "finalbody", "handlers", "annotation", "ctx")
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        ]
        return f"{type(node).__name__}[{' '.join(inner)}]"

    def visit(block: list[ast.stmt]) -> Iterator[str]:
        for node in block:
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)):
                continue
            if not isinstance(node, ast.FunctionDef) and "(" in (found := shape(node)):
                yield found
            for name in ("body", "orelse", "finalbody", "handlers"):
                yield from visit(getattr(node, name, []))

    return list(visit(tree.body))


def in_common(a: list[str], b: list[str]) -> list[str]:
    """Longest common subsequence of two lists."""
    best = [[[] for _ in range(len(b) + 1)] for _ in range(len(a) + 1)]
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            either = max(best[i][j + 1], best[i + 1][j], key=len)
            best[i + 1][j + 1] = [*best[i][j], one] if one == other else either
    return best[-1][-1]


def test_no_two_recipes_contain_the_same_code():
    """Ignores imports and flags, and finds reworded code; see the next test."""
    calls = {path.name: calls_in((ROOT / path).read_text()) for path in RECIPES}
    for a, b in itertools.combinations(calls, 2):
        found = in_common(calls[a], calls[b])
        assert len(found) <= SHARED, f"{a} and {b} both have:\n" + "\n".join(found)


class Reworded(ast.NodeTransformer):
    """Renames all that a file defines and imports, changes its strings, and adds statements."""

    def __init__(self, tree: ast.AST):
        bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.names = {name: f"other_{name}" for name in bound if not hasattr(builtins, name)}

    def visit_Name(self, node):
        return ast.Name(self.names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(f"other_{node.arg}", node.annotation and self.visit(node.annotation))

    def visit_alias(self, node):
        return ast.alias(node.name, f"other_{node.asname or node.name}".replace(".", "_"))

    def visit_Constant(self, node):
        return ast.Constant("in other words") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node):
        return ast.Constant("in other words")

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        note = ast.parse("note = 0").body
        node.name, node.body = f"other_{node.name}", [x for one in node.body for x in (*note, one)]
        return node


def test_rewording_hides_nothing():
    """A recipe with other names, comments and messages, and more lines, still counts as a copy."""
    for path in RECIPES:
        text = (ROOT / path).read_text()
        tree = ast.parse(text)
        reworded = ast.unparse(ast.fix_missing_locations(Reworded(tree).visit(tree)))
        assert in_common(calls_in(text), calls_in(reworded)) == calls_in(text)


# ---- what is installed ---------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DISTRIBUTIONS = {  # where the name to import is another
    "absl": "absl-py",
    "gcp_storage_emulator": "gcp-storage-emulator",
    "huggingface_hub": "huggingface-hub",
    "lm_eval": "lm-eval",
    "ml_dtypes": "ml-dtypes",
    "orbax": "orbax-checkpoint",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "xdist": "pytest-xdist",
}
TOOLS = {"basedpyright", "ipykernel", "ruff"}  # run, not imported


def declared(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9._-]+", requirement)[0] for requirement in requirements}


def imported(files) -> set[str]:
    names = {name for path in files for name in libraries(path)}
    return {DISTRIBUTIONS.get(name, name) for name in names}


def test_declared_dependencies_are_exactly_the_imported_ones():
    extras = {k: declared(v) for k, v in PROJECT["project"]["optional-dependencies"].items()}
    base = declared(PROJECT["project"]["dependencies"])
    ours, tests = imported(SHIPPED), imported(set(FILES) - set(SHIPPED))
    small = extras["tensorboard"] | extras["wandb"] | extras["gcs"]
    assert base == ours - extras["hf"] - extras["eval"] - small
    by_hand = extras["hf"] | extras["eval"]
    assert extras["test"] == tests - base - by_hand | TOOLS | small
    assert extras["eval"] == {"lm-eval"} <= ours
    assert extras["tensorboard"] == {"tensorboardX"} <= ours
    assert extras["wandb"] == {"wandb"} <= ours
    assert extras["gcs"] == {"gcsfs", "fsspec"} <= ours
    assert extras["hf"] <= ours | tests
    assert extras["tpu-aot"] == extras["gpu-aot"] == {"jax"}, "its compilers alone"


def test_nothing_is_installed_but_dependencies():
    """A wheel must not put `data` or `tests` into anyone's site-packages."""
    assert PROJECT["tool"]["setuptools"] == {"packages": [], "py-modules": []}
