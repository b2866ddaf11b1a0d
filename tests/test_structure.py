"""The house rules that a machine can check."""

import ast
import sys

import pytest

from tests.conftest import ROOT

ALLOWED = {  # folder → packages that its files may import, besides the standard library
    "zoo": {"jax", "flax"},
    "data": {"data", "grain", "numpy", "datasets"},
    "recipes/common": {
        *("recipes", "zoo", "data", "jax", "flax", "optax", "orbax", "etils", "grain", "numpy"),
        *("absl", "rich", "matplotlib", "safetensors", "huggingface_hub"),
    },
    "recipes/bench": {  # torch and Orbax's tensorstore: what others take for the same
        *("recipes", "zoo", "data", "jax", "flax", "optax", "numpy", "torch", "tensorstore"),
    },
    "recipes": {
        *("recipes", "zoo", "data", "jax", "flax", "optax", "numpy", "grain", "rich", "absl"),
    },
}
FILES = [p.relative_to(ROOT) for f in ("zoo", "data", "recipes") for p in (ROOT / f).rglob("*.py")]


def imports(path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_flow_one_way(path):
    roots = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names
    assert roots <= ALLOWED[path.parent.as_posix()], path
    if path.parent.as_posix() == "recipes/common":
        assert not any(n.startswith("recipes.") and "common" not in n and n != "recipes.STARTED"
                       for n in imports(path))  # fmt: skip
    if path.parent.as_posix() == "recipes/bench":
        assert all(n.startswith(("recipes.bench", "recipes.common"))
                   for n in imports(path) if n.startswith("recipes."))  # fmt: skip
    if path.parent.as_posix() == "recipes":
        assert not any(n.startswith("recipes.") and "common" not in n for n in imports(path)), (
            "recipes never import one another"
        )


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "zoo"], ids=str)
def test_zoo_file_has_its_parts_in_order(path):
    """Docstring, Config, modules, RULES; nothing to inherit but nnx.Module."""
    tree = ast.parse((ROOT / path).read_text())
    if not tree.body:
        return  # __init__.py
    assert ast.get_docstring(tree)
    names = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
    assert names[0] == "Config"
    last = tree.body[-1]
    assert isinstance(last, ast.AnnAssign)
    assert last.target.id == "RULES"
    bases = {ast.unparse(b) for n in tree.body if isinstance(n, ast.ClassDef) for b in n.bases}
    assert bases == {"nnx.Module"}


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "zoo"], ids=str)
def test_every_table_lists_every_logical_axis(path):
    tree = ast.parse((ROOT / path).read_text())
    if not tree.body:
        return
    rules = ast.literal_eval(tree.body[-1].value)
    assert {"dp", "fsdp", "tp", "fsdp_tp", "hsdp_tp"} <= set(rules)
    for strategy, table in rules.items():
        assert list(table) == list(rules["dp"]), f"{strategy}: other axes, or another order"


def test_nothing_is_installed_but_dependencies():
    """A wheel must not put `data` or `tests` into anyone's site-packages."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"] == {"packages": [], "py-modules": []}
