"""What users rely on in the files themselves: who imports whom, which parts a zoo file has."""

import ast
import dataclasses
import doctest
import functools
import graphlib
import importlib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import jax
import pytest
from flax import nnx

from recipes.common import entries
from recipes.common.report import kernel as kernel_report
from recipes.common.sharding.abstract import AbstractModel, abstract_model, paths
from recipes.common.sharding.shape import LayerShape, shape_of
from recipes.copy import __main__ as copy
from tests.conftest import ROOT
from tests.support.absent import H100, on
from zoo.core import decoder
from zoo.core.sharding import optimizer_axis
from zoo.options import cache as zoo_cache
from zoo.options.compute_options import ComputeOptions

pytestmark = pytest.mark.promise("structure")

OURS = ("zoo", "data", "recipes", "tests")
FILES = sorted(path.relative_to(ROOT) for folder in OURS for path in (ROOT / folder).rglob("*.py"))
SHIPPED = [path for path in FILES if path.parts[0] != "tests"]
ZOO = [path for path in SHIPPED if path.parts[0] == "zoo" and path.stem != "__init__"]
# The rooms of the zoo, each of which may import those after it. "" has the models.
ROOMS = ("", "parts", "experts", "recurrent", "options", "parallel", "kernels", "core")
# A file → the entry whose Config it extends: llama_relatives.py by options, models that see by a tower.
EXTENDS = {"llama_relatives": {"transformer"}, "gemma3_vision": {"gemma3"}}
EXTENDS |= {"gemma4_vision": {"gemma4"}}
# core/ and the table from a device to its kernels import each other.
TABLE = "zoo.kernels.choice"


@functools.cache
def imports(path, nested: bool = True) -> set[str]:
    """Full names of all that a file imports; `nested`: inside functions too."""
    names = set()
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level or path in ZOO, f"{path}: relative import"
            package = ".".join(path.parts[: len(path.parts) - node.level]) if node.level else ""
            base = ".".join(filter(None, (package, node.module)))
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def libraries(path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - {*OURS}


def room(module: str) -> str:
    """A file of the zoo or data, a recipe, or a package of recipes.common or recipes.instruments."""
    parts = module.removesuffix(".__init__").split(".")
    if parts[0] == "zoo" and parts[1:2] and parts[1] in ROOMS:
        return ".".join(parts[:3])
    deep = parts[1:2] in (["common"], ["instruments"])
    return ".".join(parts[: 3 if deep else 2])


# ---- names ---------------------------------------------------------------------------------------


def test_no_file_hides_a_module_of_python():
    """A script's folder is first on sys.path, and so is a notebook's."""
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in FILES}
    assert names.isdisjoint(sys.stdlib_module_names)


def test_recipes_run_from_their_own_folder(tmp_path):
    (tmp_path / "evaluate.py").write_text("")  # the library that lm-eval imports
    notebook = (
        "import copy, sys, recipes.common, evaluate; print(copy.deepcopy([]), evaluate.__file__)"
    )
    commands = {
        "transformer.py --help": "Trains the decoder-only Transformer",
        "-m recipes.copy --help": "Copies the files of the zoo",
        f"-c {notebook}": f"[] {tmp_path / 'evaluate.py'}",
    }
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for command, printed in commands.items():
        flag, _, rest = command.partition(" ")
        words = [flag, rest] if flag == "-c" else command.split()
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT / "recipes", env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, ""), command
        assert done.stdout.startswith(printed), command


# ---- who imports whom ----------------------------------------------------------------------------


def test_nobody_imports_in_circles():
    """Neither at the top of a file nor inside functions."""
    graph: dict[str, set[str]] = {}
    for path in SHIPPED:
        here = room(".".join(path.with_suffix("").parts))
        names = {name for name in imports(path) if name.split(".")[0] in OURS}
        graph.setdefault(here, set()).update({room(name) for name in names} - {here})
    assert "zoo.core.layers" in graph["zoo.core.decoder"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def wrong_imports(path) -> Iterator[str]:
    """What a file may not import."""
    names, folder = imports(path), path.parts[0]
    ours = {name for name in names if name.split(".")[0] in OURS}
    of_zoo = {name.split(".")[1] for name in ours if name.startswith("zoo.")}
    match folder:
        case "zoo":  # a copy has another name
            yield from (name for name in ours if not name.startswith("zoo."))
            yield from re.findall("^ *(?:import|from) zoo.*", (ROOT / path).read_text(), re.M)
            yield from libraries(path) - {"jax", "flax"}
            # An entry needs no other, but for those that extend one.
            extended = EXTENDS.get(path.stem, set())
            yield from () if path.stem == LAST else of_zoo - extended - {*ROOMS}
        case "data":
            yield from (name for name in ours if not f"{name}.".startswith("data."))
            yield from libraries(path) & {"jax", "flax"}
        case "recipes":  # which never import one another
            below = ["zoo", "data", "recipes.common.", "recipes.STARTED"]
            if path.parts[1] != "common":
                below.append("recipes.instruments.")
            yield from (name for name in ours if not name.startswith(tuple(below)))
            if (
                path.parts[1] == "common" and path.parts[2] != "hf"
            ):  # whose families are an entry each
                yield from of_zoo & {*entries.ENTRIES}  # entries.py looks them up


def test_imports_flow_one_way():
    wrong = {path.as_posix(): names for path in SHIPPED if (names := [*wrong_imports(path)])}
    assert not wrong


def test_the_rooms_of_the_zoo_know_only_those_below():
    """The core names no option: options import the core. Inside functions too."""
    arrows = set()
    for path in ZOO:
        here = path.parts[1] if len(path.parts) > 2 else ""
        for name in (name for name in imports(path) if name.startswith("zoo.")):
            there = name.split(".")[1] if name.split(".")[1] in ROOMS else ""
            if ROOMS.index(there) < ROOMS.index(here) and not name.startswith(TABLE):
                arrows.add((path.as_posix(), name))
    assert not arrows


def test_a_run_loads_what_it_needs():
    """The MLP's recipe loads no family of Hugging Face models, no instrument and no text."""
    loaded, waiting = set(), ["recipes.mlp"]
    while waiting:
        module = pathlib.Path(*waiting.pop().split("."))
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if (ROOT / file).is_file() and file not in loaded:
                loaded.add(file)
                names = imports(file, nested=False)
                parents = {name.rpartition(".")[0] for name in names}
                waiting += [x for x in names | parents if x.startswith(("recipes.", "data."))]
    rooms = {room(".".join(file.with_suffix("").parts)) for file in loaded}
    assert {"recipes.common.checkpoint", "data.digits"} <= rooms
    assert rooms.isdisjoint({"recipes.common.hf", "recipes.common.language", "data.text"})
    assert not any(name.startswith("recipes.instruments") for name in rooms)


def test_no_test_imports_a_script_that_is_run_by_hand():
    scripts = ROOT / "tests" / "by_hand"
    for path in FILES:
        if path.parts[0] == "tests" and not (ROOT / path).is_relative_to(scripts):
            by_hand = [name for name in imports(path) if name.startswith("tests.by_hand")]
            assert not by_hand, f"{path}: what it shares with a script belongs in tests/support"


def test_examples_in_docstrings_are_true():
    examples = [path for path in SHIPPED if ">>> " in (ROOT / path).read_text()]
    modules = [importlib.import_module(".".join(p.with_suffix("").parts)) for p in examples]
    assert modules
    assert not [module for module in modules if doctest.testmod(module).failed]


# ---- zoo files -----------------------------------------------------------------------------------

LAST = "sizes"  # it imports two entries, and no file imports it


@functools.cache
def tree_of(path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def imported_files(file: str, nested: bool = True) -> set[str]:
    """The zoo's files that a file imports, relative to the zoo; `nested`: inside functions too."""
    tree = tree_of(f"zoo/{file}")
    folder = (ROOT / "zoo" / file).parent
    names = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            place = [folder, *folder.parents][node.level - 1].joinpath(
                *(node.module or "").split(".")
            )
            modules = [place] if place.with_suffix(".py").exists() else []
            modules = modules or [place / alias.name for alias in node.names]
            names |= {x.with_suffix(".py").relative_to(ROOT / "zoo").as_posix() for x in modules}
    return names


@pytest.mark.promise("copy")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", copy.MODELS)
def test_a_copy_has_all_that_it_imports(name, nested):
    files = copy.imported(name, nested)
    assert len(files) == len({*files})
    assert set().union(*(imported_files(file, nested) for file in files)) <= {*files}
    users = {*files[:-1]} - set().union(*map(imported_files, files))
    assert not users, f"{name} needs no {users}"


def test_a_class_of_the_zoo_has_one_base_and_nothing_inherits_a_model():
    """So a model is read in its own file and decoder.py, and a Config in its own and config.py."""
    models = {entries.model(name) for name in entries.ENTRIES}
    models |= {entries.zoo_file(name).Config for name in entries.ENTRIES}
    wrong = set()
    for module in (".".join(path.with_suffix("").parts) for path in ZOO):
        members = vars(importlib.import_module(module)).values()
        for cls in (x for x in members if isinstance(x, type) and x.__module__ == module):
            mixed = len(cls.__bases__) != 1 and not issubclass(cls, ComputeOptions)
            extended = {f"zoo.{name}" for name in EXTENDS.get(module.removeprefix("zoo."), ())}
            inherits = {x for x in models & {*cls.__mro__[1:]} if x.__module__ not in extended}
            deep = issubclass(cls, nnx.Module) and cls.__base__ not in (nnx.Module, decoder.Decoder)
            if mixed or inherits or deep:
                wrong.add(cls)
    assert not wrong


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_an_entry_has_its_parts(name):
    """What recipes and copies use: zoo/README.md explains them."""
    zoo = entries.zoo_file(name)
    model = entries.model(name)
    assert zoo.__doc__
    assert model.__doc__
    assert callable(model.loss)
    assert dataclasses.is_dataclass(zoo.Config)
    assert zoo.Config.__dataclass_params__.frozen
    kinds = {"activations", "weights", "both", "stack"}
    axes = model.axes
    assert {*axes.logical_axes.values()} <= kinds
    for strategy, rules in zoo.RULES.items():
        of_optimizer = {optimizer_axis(axis) for axis in axes.logical_axes}
        named = [axis for axis in rules if axis not in of_optimizer]
        assert named == list(axes.logical_axes), strategy
    for named in (axes.in_use, axes.substitutes, axes.within):
        assert {*named, *named.values()} <= {*axes.logical_axes}
    assert {*axes.uneven, *axes.positions} <= {*axes.logical_axes}


# Weights outside of the layers.
OUTSIDE = ("embed", "unembed", "positions", "patch", "class_token", "stem", "head", "mtp/join")
OUTSIDE += ("layer_embeddings", "token_types", "words", "text_positions", "text_head", "pooling")


def with_all_experts(layer: LayerShape) -> LayerShape:
    """A layer whose positions are multiplied with all experts."""
    if layer.experts is None:
        return layer
    experts = dataclasses.replace(layer.experts, per_token=layer.experts.number)
    return dataclasses.replace(layer, experts=experts)


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_a_shape_has_the_weights_and_the_cache_of_its_model(name):
    zoo, model = entries.zoo_file(name), entries.model(name)
    fields = {field.name for field in dataclasses.fields(zoo.Config)}
    changes = [{}, {"mtp_depth": 1}, {"q_latent": 0}, {"num_layers": 3}]
    if name == "hybrid":
        changes[-1] = {"num_layers": 3, "pattern": "M*E"}
    changes.insert(0, {"shared_mlp": 24, "shared_gate": True, "rotary_dims": 4, "norms": "both"})
    for config in [dataclasses.replace(zoo.Config.tiny(), **c) for c in changes if {*c} <= fields]:
        abstract = abstract_model(lambda c=config: model(c, rngs=nnx.Rngs(0)))
        shape = shape_of(abstract, config)
        weights = {
            path: leaf
            for path, leaf in paths(abstract.shapes["params"]).items()
            if not path.startswith((*OUTSIDE, "vision/"))  # a tower, which shapes leave out
            and not path.endswith(
                ("bias", "scale", "sinks", "mlp_gate", "log_rate", "factor", "skip")
            )
        }
        layers = tuple(map(with_all_experts, shape.layers))
        in_layers = dataclasses.replace(shape, layers=layers, logits=0).multiplied
        in_layers -= shape.mtp_layers * 2 * shape.embed**2  # mtp/join
        assert in_layers == sum(leaf.size for leaf in weights.values())
    towers = 2 if name == "siglip" else 1
    assert shape.num_layers == 3 * towers or "num_layers" not in fields
    if shape.vocab_size and shape.attention.causal:
        tokens, lengths = jax.ShapeDtypeStruct((1, 4), "int32"), jax.ShapeDtypeStruct((1,), "int32")
        _, cache = jax.eval_shape(
            lambda v, *prompts: zoo_cache.prefill(abstract.merge(v), *prompts, 6),
            abstract.shapes,
            tokens,
            lengths,
        )
        cached = sum(x.count * x.attention.cached for x in shape.layers if x.attention)
        assert sum(x.size for x in jax.tree.leaves((cache.k, cache.v))) == 6 * cached
        states = sum(x.count * x.recurrence.cached for x in shape.layers if x.recurrence)
        assert sum(x.size for x in jax.tree.leaves(cache.states)) == states


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_every_variable_names_the_logical_axes_of_its_dims(name):
    """With every option that adds variables."""
    zoo = entries.zoo_file(name)
    options = {"lora_rank": 2, "qkv_bias": True, "qk_norm": True, "tie_embeddings": False}
    options |= {"balance_rate": 1e-3, "mtp_depth": 1}
    tiny = zoo.Config.tiny()
    fields = {field.name for field in dataclasses.fields(zoo.Config)}
    configs = [tiny] + [
        dataclasses.replace(tiny, **{option: value})
        for option, value in options.items()
        if option in fields
    ]
    for config in configs:
        model = nnx.eval_shape(lambda c=config: entries.model(name)(c, rngs=nnx.Rngs(0)))
        for path, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState):
                axes = variable.out_sharding
                assert len(axes) == len(variable.shape), path
                assert {*axes} <= {*entries.model(name).axes.logical_axes}, path


@functools.cache
def abstract_size(name: str, size: str) -> AbstractModel:
    config = entries.sizes(name)[size]()
    return abstract_model(lambda: entries.model(name)(config, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_sizes_say_how_many_parameters_they_have(name):
    assert "tiny" in entries.zoo_file(name).SIZES
    for size, config in entries.sizes(name).items():
        shapes = abstract_size(name, size).shapes["params"]
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert config.__doc__.startswith(f"{count:,} parameters."), size


@pytest.mark.promise("attention")
def test_the_table_of_gpu_kernels_is_what_is_chosen(monkeypatch):
    """Every named size of the models with these kernels, in bfloat16, with rows of 4,096."""
    configs = [
        (name, size, dataclasses.replace(make(), dtype="bfloat16"))
        for name in entries.ENTRIES
        for size, make in entries.sizes(name).items()
        if isinstance(make(), ComputeOptions)
    ]
    # Not under the rules of another model, which lack axes.
    shapes = [shape_of(abstract_size(name, size), config) for name, size, config in configs]
    sizes_by_kernels: dict[tuple[str, ...], dict[str, list[str]]] = {}
    with on(*H100).trace():
        for (name, size, config), shape in zip(configs, shapes, strict=True):
            attention = shape.attention
            assert attention is not None
            cells = []
            for capability, packed in itertools.product((8.0, 9.0), (False, True)):
                monkeypatch.setattr(
                    "zoo.kernels.choice.compute_capability", lambda _, x=capability: x
                )
                choice = kernel_report.attention_kernel(config, attention, 4096, packed)
                cells.append(f"`{choice.kernel}`{choice.obstacle and f': {choice.obstacle}'}")
            sizes_by_kernels.setdefault(tuple(cells), {}).setdefault(name, []).append(size)
    *rare, _ = sorted(sizes_by_kernels.items(), key=lambda row: sum(map(len, row[1].values())))
    wanted = {
        "; ".join(f"{name} {', '.join(listed)}" for name, listed in named.items()): cells
        for cells, named in rare
    } | {"all others": ("`cudnn`",) * 4}
    page = (ROOT / "recipes" / "docs" / "language_models.md").read_text()
    table = page.split("<!-- kernels on GPUs -->\n")[1].split("\n\n")[0].splitlines()[2:]
    rows = (line.strip("| ").split(" | ") for line in table)
    assert {named: tuple(cells) for named, *cells in rows} == wanted


@pytest.mark.parametrize("name", entries.ENTRIES)
def test_no_variable_is_weakly_typed(name):
    """Optimizers return strong types, so jax.jit would compile the second step again."""
    zoo, model = entries.zoo_file(name), entries.model(name)
    shapes = abstract_model(lambda: model(zoo.Config.tiny(), rngs=nnx.Rngs(0))).shapes
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(shapes))


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
    "sentence_transformers": "sentence-transformers",
    "yaml": "pyyaml",
    "xdist": "pytest-xdist",
}
TOOLS = {"basedpyright", "ipykernel", "ruff", "sharded-model-zoo"}  # run, not imported; its extras
PLUGINS = {"mkdocs-material", "mkdocstrings", "mkdocs-jupyter"}  # named by mkdocs.yml


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
    assert base == ours - extras["hf"] - extras["eval"] - extras["docs"] - small
    by_hand = extras["hf"] | extras["eval"]
    by_hand |= {"trl"}  # in an environment of its own
    assert extras["test"] == tests - base - by_hand | TOOLS | small
    assert extras["eval"] == {"lm-eval"} <= ours
    assert extras["tensorboard"] == {"tensorboardX"} <= ours
    assert extras["wandb"] == {"wandb"} <= ours
    assert extras["gcs"] == {"gcsfs", "fsspec"} <= ours
    assert extras["docs"] == {"mkdocs", "pygments"} | PLUGINS
    assert extras["hf"] <= ours | tests
    assert extras["tpu-aot"] == extras["gpu-aot"] == {"jax"}, "its compilers alone"
