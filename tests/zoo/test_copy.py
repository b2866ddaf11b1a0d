"""A copied entry trains without the zoo, as files in a folder and merged into one file."""

import ast
import functools
import importlib.util
import io
import os
import pathlib
import signal
import subprocess
import sys
import tokenize

import jax
import numpy as np
import pytest
from flax import nnx

from recipes.common import entries
from recipes.common.runtime import folders
from recipes.common.zoo_source import closure
from tests.conftest import ROOT, full_except
from tests.support.entries import ENTRIES, FAMILY_CASES
from tests.support.quick import QUICK, XLA_FLAGS

pytestmark = pytest.mark.promise("copy")

ZOO = ROOT / "zoo"

# A user's code around a copy, with nothing but jax, flax and numpy.
TRAIN = """
import jax
import numpy as np
from flax import nnx
from {module} import RULES, Config, {model}

def train(graph, params, rest, batch, steps=5):
    def mean(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)  # a loss may assign to its buffers
        total, count, _ = model.loss(**batch)
        return total / count
    step = jax.jit(jax.value_and_grad(mean))  # a new one for each table
    losses = []
    for _ in range(steps):
        value, grads = step(params, rest, batch)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        losses.append(float(value))
    return losses

split = nnx.split({model}(Config.tiny(), rngs=nnx.Rngs(0)), nnx.Param, ...)
"""
ALONE = """
alone = train(*split, dict(np.load("batch.npz")))
"""

ON_MESHES = """
assert alone[-1] < alone[0] and np.isfinite(alone).all(), alone
graph, params, rest = split
batch = dict(np.load("batch.npz"))

default = jax.make_mesh((4, 2), ("data", "model"))
auto = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
experts = jax.make_mesh((2, 4), ("data", "expert"))
for mesh, strategy in {cases}:
    table = RULES[strategy]
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(table.items())):
        there = [jax.device_put(s, nnx.get_named_sharding(s, mesh)) for s in (params, rest)]
        where = jax.sharding.NamedSharding(mesh, jax.P(table["batch"]))
        losses = train(graph, *there, jax.device_put(batch, where))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        split = [w for w in jax.tree.leaves(there[0]) if not w.sharding.is_fully_replicated]
        assert bool(split) == any(table[axis] for axis in table if axis != "batch"), strategy
assert auto != default
"""
APART = """
import sys
assert not {{"zoo", "recipes", "data"}} & set(sys.modules)
for package in ("zoo", "recipes", "data"):
    try:
        __import__(package)
    except ImportError:
        continue
    raise AssertionError(f"{{package}} can be imported here")
print("trained", *alone)
"""

EVERY = """[(default, "dp"), (default, "fsdp"), (default, "tp"), (default, "fsdp_tp"),
            (auto, "fsdp"), (auto, "fsdp_tp")]"""
SOME = '[(default, "fsdp_tp"), (auto, "fsdp_tp")]'  # of what takes seconds to compile
CASES = {"moe": '[(auto, "fsdp_tp"), (experts, "fsdp_ep")]'}
SMALLEST = list(ENTRIES)[:1]
FIRST = [entry for entry in ENTRIES if entry not in FAMILY_CASES]


def check_training(entry: str, module: str, folder: pathlib.Path, monkeypatch, cases: str) -> None:
    """Trains the copy in this folder in its own process; losses must equal the zoo model's."""
    np.savez(folder / "batch.npz", **ENTRIES[entry].batches[0])
    names = {"model": entries.ENTRIES[entry].model, "cases": cases}
    code = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
    code += (TRAIN + ALONE + ON_MESHES + APART).format(module=module, **names)
    (folder / "use.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=folder, capture_output=True, text=True, timeout=300,
        env=os.environ | {"XLA_FLAGS": XLA_FLAGS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trained, *losses = done.stdout.split()
    assert trained == "trained"
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=QUICK))
    ours = {}
    exec((TRAIN + ALONE).format(module=f"zoo.{entry}", **names), ours)
    np.testing.assert_allclose([float(loss) for loss in losses], ours["alone"], rtol=1e-6)


# ---- the files -----------------------------------------------------------------------------------


def copied(entry: str, folder: pathlib.Path) -> str:
    """Copies with `cp` like README.md; the folder is a package without an __init__.py."""
    (folder / "mine").mkdir()
    subprocess.run(["cp", *closure(ZOO / f"{entry}.py"), folder / "mine"], check=True)
    return f"mine.{entry}"


@pytest.mark.parametrize("entry", full_except(FIRST, SMALLEST))
def test_a_copied_entry_trains_alone(entry, tmp_path, monkeypatch):
    cases = EVERY if entry in SMALLEST else CASES.get(entry, SOME)
    check_training(entry, copied(entry, tmp_path), tmp_path, monkeypatch, cases)


# A family shares the other entries' files; the proof has it on Explicit axes and without a mesh.
ON_AUTO_AXES = """
graph, params, rest = split
mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(RULES["fsdp_tp"].items())):
    there = [jax.device_put(s, nnx.get_named_sharding(s, mesh)) for s in (params, rest)]
    batch = jax.device_put(dict(np.load("batch.npz")), jax.NamedSharding(mesh, jax.P("data")))
    alone = train(graph, *there, batch)
assert alone[-1] < alone[0] and np.isfinite(alone).all(), alone
"""


@pytest.mark.full
@pytest.mark.parametrize("entry", FAMILY_CASES)
def test_a_copied_family_trains_alone(entry, tmp_path):
    np.savez(tmp_path / "batch.npz", **ENTRIES[entry].batches[0])
    names = {"module": copied(entry, tmp_path), "model": entries.ENTRIES[entry].model}
    code = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
    code += (TRAIN + ON_AUTO_AXES + APART).format(**names)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"XLA_FLAGS": XLA_FLAGS},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained ")


def test_a_closure_is_what_an_entry_imports():
    """Compares the closure with the modules that Python loads."""
    code = f"""
import importlib, sys
for entry in {[*ENTRIES]}:
    for name in [name for name in sys.modules if name.startswith("zoo.")]:
        del sys.modules[name]
    importlib.import_module(f"zoo.{{entry}}")
    print(*(name.removeprefix("zoo.") for name in sys.modules if name.startswith("zoo.")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for entry, loaded in zip(ENTRIES, done.stdout.splitlines(), strict=True):
        files = closure(ZOO / f"{entry}.py")
        assert {path.stem for path in files} == {*loaded.split()}
        assert files[-1] == ZOO / f"{entry}.py"


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_command_copies_what_cp_copies(entry, inside, tmp_path):
    target = tmp_path / "mine"
    for around in ("new", "with other files"):
        done = inside("recipes.copy", f"--entry={entry}", f"--target={target}")
        assert (done.code, done.err) == (0, ""), around
        files = closure(ZOO / f"{entry}.py", optional=True)
        assert all((target / path.name).read_bytes() == path.read_bytes() for path in files)
        assert f"{entry}.py to {target}." in done.out
        assert (
            f"  from mine.{entry} import RULES, Config, {entries.ENTRIES[entry].model}" in done.out
        )
        (target / "notes.txt").write_text("mine")
        for path in files:
            (target / path.name).unlink()
    assert [path.name for path in target.iterdir()] == ["notes.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


# ---- one file ------------------------------------------------------------------------------------


@pytest.fixture
def merged(tmp_path, inside):
    """Returns a function of an entry: the file that the command writes for it."""

    def write(entry: str) -> pathlib.Path:
        path = tmp_path / f"my_{entry}.py"
        done = inside("recipes.copy", f"--entry={entry}", f"--one_file={path}")
        assert (done.code, done.err) == (0, "")
        imported = f"from my_{entry} import RULES, Config, {entries.ENTRIES[entry].model}"
        assert done.out.endswith(f"  {imported}\n")
        return path

    return write


@pytest.mark.parametrize("entry", full_except(FIRST, SMALLEST))
def test_one_file_trains_alone(entry, merged, monkeypatch):
    case = '[(experts, "fsdp_ep")]' if entry == "moe" else '[(default, "fsdp_tp")]'
    check_training(entry, f"my_{entry}", merged(entry).parent, monkeypatch, case)


@pytest.mark.parametrize("entry", full_except(ENTRIES, FIRST))
def test_one_file_computes_what_the_zoo_computes(entry, merged):
    """Its gradients on a mesh lower to the same program text."""
    spec = importlib.util.spec_from_file_location(f"my_{entry}", merged(entry))
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    zoo, name = entries.zoo_file(entry), entries.ENTRIES[entry].model
    assert copied.RULES == zoo.RULES
    for given in ("LOGICAL_AXES", "IN_USE", "UNEVEN", "WITHIN"):
        assert getattr(copied, given, None) == getattr(zoo, given, None)
    for size in zoo.SIZES:
        assert vars(copied.SIZES[size]()) == vars(zoo.SIZES[size]())
    mesh, rules = jax.make_mesh((4, 2), ("data", "model")), zoo.RULES["fsdp_tp"]
    texts = []
    for module in (zoo, copied):

        def build(module=module):
            return getattr(module, name)(module.Config.tiny(), rngs=nnx.Rngs(0))

        with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
            graph, state = nnx.get_abstract_model(build, mesh)
            params, rest = nnx.split_state(state, nnx.Param, ...)

            def mean(params, rest, batch, graph=graph):
                total, count, _ = nnx.merge(graph, params, rest, copy=True).loss(**batch)
                return total / count

            step = jax.jit(jax.value_and_grad(mean))
            texts.append(step.lower(params, rest, ENTRIES[entry].batches[0]).as_text())
    assert texts[0] == texts[1]
    assert "sdy.sharding" in texts[0] or "mhlo.sharding" in texts[0]


@pytest.mark.parametrize("entry", full_except(ENTRIES, FIRST))
def test_one_file_has_all_code_comments_and_docstrings(entry, merged):
    path = merged(entry)
    text = path.read_text()
    for command in (["check"], ["format", "--check", "--quiet"]):
        settings = ("--no-cache", f"--config={ROOT / 'pyproject.toml'}")
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings, path],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout

    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    assert not any(node.level for node in nodes if isinstance(node, ast.ImportFrom))
    files = closure(ZOO / f"{entry}.py", optional=True)
    top = [ast.parse(file.read_text()) for file in files]
    # Docstring first and RULES last, as in the entry.
    assert ast.get_docstring(tree) == ast.get_docstring(top[-1])
    assert ast.unparse(tree.body[-1]) == ast.unparse(top[-1].body[-1])
    ours = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    # Nothing is lost, and nothing is there twice.
    defined = [
        n for part in top for n in part.body if isinstance(n, (ast.ClassDef, ast.FunctionDef))
    ]
    assert ours == [node.name for node in defined]
    words = " ".join(_words(text))
    for file in files:
        for comment in _comments(file.read_text()):
            assert comment in text, (file.name, comment)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                assert " ".join(_words(ast.get_docstring(node) or "")) in words


def _comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def _words(text: str) -> list[str]:
    return text.replace("\n# ", "\n").replace("\n#\n", "\n").split()


# ---- mistakes, and disks that fail ---------------------------------------------------------------

MISTAKES = [
    ([], "--target is missing; use --target=FOLDER, or --one_file=FILE.py"),
    (["--target=mine", "--one_file=my.py"], "--target=mine and --one_file=my.py exclude each other; use one of them"),
    (["--entry=transfomer", "--target=mine"], "--entry=transfomer is not in the zoo; did you mean transformer?"),
    (["--entry=bert", "--target=mine"], "--entry=bert is not in the zoo; it has dot_relu_dot, mlp, transformer, moe"),
    (["--entry=", "--target=mine"], "--entry= is not in the zoo; it has dot_relu_dot, "),
    (["--target=full"], "--target=full already has layers.py; use a new name"),
    (["--target=linked"], "--target=linked already has sharding.py; use a new name"),
    (["--target=file.py"], "--target=file.py is a file; use a folder"),
    (["--target=no/mine"], "--target=no/mine: the folder {here}/no doesn't exist; make it first"),
    (["--target=my-models"], "--target=my-models can't be imported; use a name like my_models"),
    (["--target=copy"], "--target=copy can't be imported; use a name like my_copy"),
    (["--target=gs://b/mine"], "--target=gs://b/mine is in a bucket; use a local path"),
    (["--one_file=file.py"], "--one_file=file.py already exists; use a new name"),
    (["--one_file=full"], "--one_file=full is a folder; use a name that ends with .py"),
    (["--one_file=no/my.py"], "--one_file=no/my.py: the folder {here}/no doesn't exist; make it first"),
    (["--one_file=file.py/my.py"], "--one_file=file.py/my.py: the folder {here}/file.py doesn't exist; make it first"),
    (["--one_file=my"], "--one_file=my can't be imported; use a name like my.py"),
    (["--one_file=7 b.py"], "--one_file=7 b.py can't be imported; use a name like my_7_b.py"),
    (["--one_file=class.py"], "--one_file=class.py can't be imported; use a name like my_class.py"),
    (["--one_file=jax.py"], "--one_file=jax.py can't be imported; use a name like my_jax.py"),
]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("full", "linked"):
        (tmp_path / folder).mkdir()
    (tmp_path / "full" / "layers.py").write_text("mine")
    (tmp_path / "file.py").write_text("mine")
    (tmp_path / "linked" / "sharding.py").symlink_to("nowhere")
    return tmp_path


def content(folder: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(("flags", "message"), MISTAKES, ids=lambda row: " ".join(row)[:40])
def test_a_user_error_is_one_line_and_nothing_is_written(flags, message, here, inside):
    before = content(here)
    done = inside("recipes.copy", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message.format(here=here)}")
    assert done.err.count("\n") == 1
    assert content(here) == before


def test_a_real_command_refuses_to_overwrite(run, tmp_path):
    path = tmp_path / "my.py"
    path.write_text("mine")
    done = run("recipes.copy", "--entry=mlp", f"--one_file={path}")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("given", ["--target=mine", "--target=full", "--one_file=my.py"])
@pytest.mark.parametrize("step", ["write_bytes", "to_disk", "move"])
def test_a_disk_that_fails_leaves_nothing(given, step, here, inside, monkeypatch):
    (here / "full" / "layers.py").rename(here / "full" / "own.py")
    before, calls = content(here), []

    def fail(*args):
        calls.append(args)
        if len(calls) >= 3 or step == "to_disk" or "my.py" in given or "mine" in given:
            raise OSError(28, "No space left on device")
        return works(*args)

    if step == "move":
        owner, name = (folders, "move") if given == "--target=mine" else (os, "link")
        monkeypatch.setattr(pathlib.Path, "rename", fail)  # where a disk has no hard links
        works = getattr(owner, name)
    else:
        owner, name = {"write_bytes": pathlib.Path, "to_disk": folders}[step], step
        works = getattr(owner, name)
    monkeypatch.setattr(owner, name, fail)
    done = inside("recipes.copy", given)
    problem = f"{given} can't be written (No space left on device); use a different folder"
    assert (done.code, done.out, done.err) == (2, "", f"error: {problem}\n")
    assert content(here) == before


def test_a_disk_without_hard_links_takes_a_copy(here, inside, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert inside("recipes.copy", "--one_file=my.py").code == 0
    assert (here / "my.py").read_text().startswith('"""Transformer')


def test_a_file_that_comes_meanwhile_is_kept(here, inside, monkeypatch):
    def sync(folder):
        (here / "my.py").write_text("another's")

    monkeypatch.setattr(folders, "to_disk", sync)
    done = inside("recipes.copy", "--one_file=my.py")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "(File exists)" in done.err
    assert (here / "my.py").read_text() == "another's"


def test_a_signal_waits_until_all_is_written(here, inside, monkeypatch):
    works = folders.to_disk

    def interrupted(folder):
        signal.raise_signal(signal.SIGTERM)
        works(folder)

    monkeypatch.setattr(folders, "to_disk", interrupted)
    assert inside("recipes.copy", "--target=mine").code == 0
    assert {path.name for path in (here / "mine").iterdir()} == {
        path.name for path in closure(ZOO / "transformer.py", optional=True)
    }
