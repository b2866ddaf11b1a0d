"""The house rules that a machine can check."""

import ast
import builtins
import dataclasses
import doctest
import importlib
import itertools
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterator

import jax
import pytest
from flax import nnx

from recipes.common import entries, language
from recipes.common.sharding.abstract import abstract_model
from tests.conftest import ROOT

# Package of recipes/common → those of it that it may import; and libraries that it may.
LAYERS = {
    "runtime": set(),
    "sharding": {"runtime"},
    "analysis": {"runtime", "sharding"},
    "hf": {"runtime", "sharding", "entries"},
    "checkpoint": {"runtime", "sharding", "hf", "analysis", "entries"},
    "generation": {"runtime", "sharding"},
    "harness": {"runtime", "sharding", "generation"},
    "language": {
        *{"runtime", "sharding", "analysis", "generation", "checkpoint", "train", "entries"},
    },
    "train": {"runtime", "sharding", "hf", "analysis", "checkpoint", "entries"},
    "entries": set(),
    "mesh": {"runtime"},
}
ZOO_NAMES = {"language": {"zoo.attention.attention_kernels"}}  # in shared files, not an entry's
LIBRARIES = {
    "zoo": {"jax", "flax"},
    "data": {
        *{"grain", "numpy", "datasets", "tokenizers", "jinja2", "huggingface_hub"},
        *{"etils", "gcsfs", "fsspec"},
    },
    "recipes": {"jax", "flax", "numpy"},
    "recipes/bench": {"jax", "flax", "numpy", "optax", "torch", "tensorstore"},
    "recipes/common": {"jax", "flax", "numpy"},
    "recipes/common/runtime": {"jax", "numpy", "absl"},
    "recipes/common/sharding": {"jax", "flax"},
    "recipes/common/analysis": {"jax", "numpy", "matplotlib"},
    "recipes/common/harness": {"jax", "numpy", "rich", "lm_eval"},
    "recipes/common/language": {"numpy", "flax"},
    "recipes/common/hf": {"jax", "flax", "numpy", "safetensors", "huggingface_hub"},
    "recipes/common/checkpoint": {"jax", "numpy", "orbax", "etils"},
    "recipes/common/train": {"jax", "flax", "numpy", "optax", "grain", "rich", "tensorboardX"},
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
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
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
        assert all(name.split(".")[0] == "data" == folder for name in ours), "they stand alone"
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
        if layer != "hf":  # whose families are a zoo file each
            zoo = {name for name in ours if name.startswith("zoo.")}
            assert zoo <= ZOO_NAMES.get(layer, set()), "entries.py looks entries up"


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
    """Others in recipes/ hand a program's text to its functions without a look."""
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

KIT = re.compile(r"^# ---- kit: .*?^# ---- end of the kit -+$", re.DOTALL | re.MULTILINE)


def test_every_zoo_file_is_an_entry():
    assert {path.stem for path in ZOO} == set(entries.ENTRIES)


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_zoo_file_has_its_parts_in_order(name):
    """As zoo/README.md lists them; nothing to inherit but nnx.Module, or nnx.Variable for a buffer."""
    text = (ROOT / "zoo" / f"{name}.py").read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base) for node in classes for base in node.bases}
    assert "nnx.Module" in bases <= {"nnx.Module", "nnx.Variable"}
    places = {node.name: node.lineno for node in classes}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            places[ast.unparse(target)] = node.lineno
    kit = KIT.search(text)
    places["kit"] = text[: kit.start()].count("\n") + 1
    model = entries.ENTRIES[name].model
    wanted = ["Config", "SIZES", "LOGICAL_AXES", "IN_USE", "kit", model, "RULES"]
    assert sorted(wanted, key=places.get) == wanted
    assert (classes[0].name, classes[-1].name) == ("Config", model)
    assert all(node.lineno > places["kit"] for node in classes[1:]), "modules follow the kit"
    assert tree.body[-1].lineno == places["RULES"]
    methods = [node.name for node in classes[-1].body if isinstance(node, ast.FunctionDef)]
    assert {"__init__", "__call__", "loss"} <= {*methods}


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_the_kit_is_the_same_in_every_zoo_file(name):
    texts = [(ROOT / "zoo" / f"{entry}.py").read_text() for entry in (name, *entries.ENTRIES)]
    kits = [KIT.findall(text) for text in texts]
    assert len(kits[0]) == 1
    assert kits[0] == kits[1], f"{name}'s kit differs from {next(iter(entries.ENTRIES))}'s"


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_tables_are_complete_and_state_only_what_they_shard(name):
    zoo = entries.zoo_file(name)
    for strategy, table in zoo.RULES.items():
        assert list(table) == list(zoo.LOGICAL_AXES), strategy
    text = (ROOT / "zoo" / f"{name}.py").read_text()
    call = ast.parse(text).body[-1].value
    assert ast.unparse(call.func) == "complete"
    stated = ast.literal_eval(call.args[0])
    assert list(stated) == list(zoo.RULES)
    for strategy, table in stated.items():
        assert None not in table.values(), strategy
    assert set(zoo.LOGICAL_AXES.values()) <= {"activations", "weights", "both", "stack"}
    assert {*zoo.IN_USE, *zoo.IN_USE.values()} <= set(zoo.LOGICAL_AXES)


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_sizes_say_how_many_parameters_they_have(name):
    zoo, model = entries.zoo_file(name), entries.model(name)
    assert "tiny" in zoo.SIZES
    for size, config in zoo.SIZES.items():
        shapes = abstract_model(lambda c=config: model(c(), rngs=nnx.Rngs(0))).shapes["params"]
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert config.__doc__.startswith(f"{count:,} parameters."), size


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
    """Longer ones have flags of their own, which take about five lines each, and what they do."""
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
    """The longest list that is in both, in this order, whatever stands between its items."""
    best = [[[] for _ in range(len(b) + 1)] for _ in range(len(a) + 1)]
    for i, one in enumerate(a):
        for j, other in enumerate(b):
            either = max(best[i][j + 1], best[i + 1][j], key=len)
            best[i + 1][j + 1] = [*best[i][j], one] if one == other else either
    return best[-1][-1]


def test_what_two_recipes_need_stands_in_neither():
    """Beyond imports and flags, and however it is worded: see the next test."""
    calls = {path.name: calls_in((ROOT / path).read_text()) for path in RECIPES}
    for a, b in itertools.combinations(calls, 2):
        found = in_common(calls[a], calls[b])
        assert len(found) <= SHARED, f"{a} and {b} both have:\n" + "\n".join(found)


class Reworded(ast.NodeTransformer):
    """Renames all that a file names and imports, changes its strings, and adds statements."""

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
TOOLS = {"ruff"}  # run, not imported


def declared(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9._-]+", requirement)[0] for requirement in requirements}


def imported(files) -> set[str]:
    names = {name for path in files for name in libraries(path)}
    return {DISTRIBUTIONS.get(name, name) for name in names}


def test_declared_dependencies_are_exactly_the_imported_ones():
    extras = {k: declared(v) for k, v in PROJECT["project"]["optional-dependencies"].items()}
    base = declared(PROJECT["project"]["dependencies"])
    ours, tests = imported(SHIPPED), imported(set(FILES) - set(SHIPPED))
    small = extras["tensorboard"] | extras["gcs"]
    assert base == ours - extras["hf"] - extras["eval"] - small
    by_hand = extras["hf"] | extras["eval"]
    assert extras["test"] == tests - base - by_hand | TOOLS | small
    assert extras["eval"] == {"lm-eval"} <= ours
    assert extras["tensorboard"] == {"tensorboardX"} <= ours
    assert extras["gcs"] == {"gcsfs", "fsspec"} <= ours
    assert extras["hf"] <= ours | tests
    assert extras["tpu-aot"] == extras["gpu-aot"] == {"jax"}, "its compilers alone"


def test_nothing_is_installed_but_dependencies():
    """A wheel must not put `data` or `tests` into anyone's site-packages."""
    assert PROJECT["tool"]["setuptools"] == {"packages": [], "py-modules": []}
