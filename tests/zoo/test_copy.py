"""A copied entry trains without the zoo; the command that copies it overwrites nothing."""

import dataclasses
import functools
import importlib
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common import entries
from recipes.common.mesh import make_mesh
from recipes.copy import __main__ as copy
from tests.conftest import ROOT, full_except
from tests.support.absent import H100, on
from tests.support.entries import ENTRIES
from tests.support.quick import XLA_FLAGS

pytestmark = pytest.mark.promise("copy")

ZOO = ROOT / "zoo"
SMALLEST = list(ENTRIES)[:1]

# A user's code around a copy, with nothing but jax, flax and numpy: on one device, on JAX's default
# mesh, whose axes are Explicit, and on Auto axes.
TRAIN = """
import sys
import jax
import numpy as np
from flax import nnx
from mine.{entry} import RULES, Config, {model}

jax.config.update("jax_num_cpu_devices", 8)

def train(params, buffers, batch, steps=4):
    def mean(params, buffers, batch):
        model = nnx.merge(graph, params, buffers, copy=True)
        total, count, _ = model.loss(**batch)
        return total / count, nnx.state(model, nnx.Not(nnx.Param))
    step = jax.jit(jax.value_and_grad(mean, has_aux=True))  # a new one for each table
    losses = []
    for _ in range(steps):
        (loss, buffers), grads = step(params, buffers, batch)
        params = jax.tree.map(lambda w, g: w - 0.02 * g, params, grads)
        losses.append(float(loss))
    return losses

graph, *state = nnx.split({model}(Config.tiny(), rngs=nnx.Rngs(0)), nnx.Param, ...)
batch = dict(np.load("batch.npz"))
alone = train(*state, batch)
assert alone[-1] < alone[0] and np.isfinite(alone).all(), alone
for strategy, axes in {cases}.items():
    default = jax.make_mesh((4, 2), axes)
    auto = jax.make_mesh((4, 2), axes, (jax.sharding.AxisType.Auto,) * 2)
    assert auto != default
    for mesh in (default, auto):
        with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(RULES[strategy].items())):
            there = [jax.device_put(s, nnx.get_named_sharding(s, mesh)) for s in state]
            where = jax.NamedSharding(mesh, jax.P(RULES[strategy]["batch"]))
            assert any(not w.sharding.is_fully_replicated for w in jax.tree.leaves(there[0]))
            losses = train(*there, jax.device_put(batch, where))
            np.testing.assert_allclose(losses, alone, rtol=1e-5)

# They may be on the path, after pip install -e, but nothing imports them.
assert not {{"zoo", "recipes", "data"}} & set(sys.modules)
print("trained")
"""
CASES = {"fsdp_tp": ("data", "model")}
EXPERT_CASES = {"fsdp_ep": ("data", "expert")}


@pytest.mark.parametrize("entry", full_except(ENTRIES, SMALLEST))
def test_a_copied_entry_trains_alone(entry, inside, tmp_path):
    """In a folder with nothing but its files, each as it is in the zoo."""
    assert inside("recipes.copy", f"--entry={entry}", f"--target={tmp_path / 'mine'}").code == 0
    mine = tmp_path / "mine"
    for path in mine.rglob("*.py"):
        assert path.read_bytes() == (ZOO / path.relative_to(mine)).read_bytes()
    np.savez(tmp_path / "batch.npz", **ENTRIES[entry].batches[0])
    cases = EXPERT_CASES if "fsdp_ep" in ENTRIES[entry].rules else CASES
    code = TRAIN.format(entry=entry, model=entries.ENTRIES[entry].model, cases=cases)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"XLA_FLAGS": XLA_FLAGS},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_a_folder_with_other_files_takes_a_copy(inside, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    done = inside("recipes.copy", "--entry=mlp", f"--target={tmp_path / 'mine'}")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"Copied to {tmp_path / 'mine'}: core/sharding.py, mlp.py",
        "To use it:",
        "  from mine.mlp import RULES, Config, MLP",
    ]
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names == {"notes.txt", "core", "mlp.py"}
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


# ---- optional files ------------------------------------------------------------------------------


def optional(entry: str) -> dict[str, str]:
    """The files that only some calls of an entry need: name → path."""
    return {pathlib.Path(path).stem: path for path in copy.optional_files(entry)}


def test_every_optional_file_has_its_purpose():
    assert set().union(*map(optional, copy.MODELS)) == {*copy.OPTIONAL}


def use(name: str, entry) -> None:
    """Traces a call that needs an optional file.

    Args:
      entry: the module of a copied entry that has the optional file.
    """
    changes = {
        "low_precision": {"matmul": "int8"},
        "float32_sums": {"reduce_dtype": "float32"},
        "lora": {"lora_rank": 2},
        "splash": {"attention": "splash"},
        "triton": {"attention": "triton"},
        "gpu_loss": {"attention": "xla"},
        "cudnn": {"attention": "cudnn"},
        "flash": {"attention": "flash"},
        "rope_scaling": {"rope_scaling": ("linear", 2.0)},
    }
    config = dataclasses.replace(entry.Config.tiny(), **changes.get(name, {}))
    model = getattr(entry, copy.MODELS[entry.__name__.rpartition(".")[2]])
    along_seq, in_stages = ("cp", "data=1,seq=8"), ("pp", "data=4,pipe=2")
    rules, axes = {
        "context": along_seq, "state_context": along_seq, "pipeline": in_stages, "gpipe": in_stages
    }.get(name, ("fsdp", "8"))  # fmt: skip
    tokens_BT = jnp.zeros((8, 128), jnp.int32)

    def call():
        built = model(config, rngs=nnx.Rngs(0))
        if name == "gpipe":
            return built(tokens_BT)
        return built.loss(tokens_BT, tokens_BT)

    use_mesh = functools.partial(jax.set_mesh, make_mesh(axes))
    if name == "gpu_loss":
        use_mesh = functools.partial(jax.sharding.use_abstract_mesh, on(*H100).mesh)
    with use_mesh(), nnx.logical_axis_rules(tuple(entry.RULES[rules].items())):
        jax.eval_shape(call)


ELSEWHERE = {"quantization", "maps"}  # these come with low_precision and state_context


@pytest.fixture
def bare(inside, tmp_path, monkeypatch):
    """Returns a function that copies a model without any optional file, and returns the folder."""

    def make(entry: str) -> pathlib.Path:
        target = tmp_path / f"bare_{entry}"
        without = f"--without={','.join(optional(entry))}"
        done = inside("recipes.copy", f"--entry={entry}", f"--target={target}", without)
        assert (done.code, done.err) == (0, "")
        assert "  left out  kernels/flash.py: attention on any platform" in done.out
        return target

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in [name for name in sys.modules if name.startswith("bare_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "name", full_except(sorted({*copy.OPTIONAL} - ELSEWHERE), ["splash", "lora"])
)
def test_using_what_was_left_out_says_which_file_to_copy(name, bare):
    copied = {"state_context": "qwen3_next"}.get(name, "llama_relatives")
    package = bare(copied)
    entry = importlib.import_module(f"{package.name}.{copied}")
    use("", entry)  # all else works
    needs = {
        "context": ["flash"],
        "state_context": ["context", "flash", "maps"],
        "splash": ["flash"],
    }
    needs |= {"gpipe": ["pipeline"], "triton": ["flash", "splash"]}
    paths = optional(copied)
    for other in needs.get(name, []):  # on the way to it
        shutil.copy(ZOO / paths[other], package / paths[other])
    with pytest.raises(ImportError) as error:
        use(name, entry)
    needed = f"for {copy.OPTIONAL[name]}, copy zoo/{paths[name]} over this file"
    assert str(error.value) == f"{paths[name]} was left out; {needed}"
    shutil.copy(ZOO / paths[name], package / paths[name])
    if name == "low_precision":
        with pytest.raises(ImportError, match=r"copy zoo/options/quantization\.py over this file"):
            use(name, entry)
        shutil.copy(ZOO / paths["quantization"], package / paths["quantization"])
    use(name, entry)


def test_some_files_are_left_out(inside, tmp_path):
    """What only they import goes with them."""
    target = tmp_path / "mine"
    entry = "--entry=llama_relatives"
    command = ("recipes.copy", entry, f"--target={target}", "--without=pipeline, low_precision")
    done = inside(*command)
    assert done.code == 0
    for name, path in optional("llama_relatives").items():
        left_out = name in ("pipeline", "low_precision", "quantization")
        word = "left out" if left_out else "added   "
        assert f"  {word}  {path}: {copy.OPTIONAL[name]}\n" in done.out
        assert ("was left out" in (target / path).read_text()) == left_out


# ---- mistakes, and disks that fail ---------------------------------------------------------------

MISTAKES = [
    ([], "--target= is no local folder; use --target=FOLDER"),
    (["--entry=bart", "--target=mine"], "--entry=bart is not in the zoo; it has dot_relu_dot, mlp, transformer, moe"),
    (["--entry=mlp", "--target=mine", "--without=cache"], "--without=cache: mlp has no optional 'cache'; it needs all its files"),
    (["--target=mine", "--without=flash,layers"], "--without=flash,layers: transformer has no optional 'layers'; use cudnn, flash, "),
    (["--target=full"], "--target=full: {here}/full/core/layers.py already exists; use a new name"),
    (["--target=linked"], "--target=linked: {here}/linked/core/sharding.py already exists; use a new name"),
    (["--target=linked", "--without=flash"], "--target=linked: {here}/linked/core/sharding.py already exists; use a new name"),
    (["--target=nowhere"], "--target=nowhere: {here}/nowhere already exists; use a new name"),
    (["--target=file"], "--target=file: {here}/file already exists; use a new name"),
    (["--target=no/mine"], "--target=no/mine can't be written (No such file or directory); use a different folder"),
    (["--target=file/mine"], "--target=file/mine can't be written (Not a directory); use a different folder"),
    (["--target=my-models"], "--target=my-models can't be imported; use a name like my_models"),
    (["--target=class"], "--target=class can't be imported; use a name like my_models"),
    (["--target=copy"], "--target=copy can't be imported; use a name like my_models"),
    (["--target=jax"], f"--target=jax can't be imported, as Python finds {jax.__file__} first; use a name like"),
    (["--target=no/numpy"], f"--target=no/numpy can't be imported, as Python finds {np.__file__} first; use a name"),
    (["--target=zoo"], f"--target=zoo can't be imported, as Python finds {ZOO / '__init__.py'} first; use a name"),
    (["--target=gs://b/mine"], "--target=gs://b/mine is no local folder; use --target=FOLDER"),
]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("full", "linked"):
        (tmp_path / folder / "core").mkdir(parents=True)
    (tmp_path / "full" / "core" / "layers.py").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "linked" / "core" / "sharding.py").symlink_to(tmp_path / "new.py")
    (tmp_path / "nowhere").symlink_to(tmp_path / "new")
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


@pytest.mark.parametrize("target", ["mine", "full"])
def test_a_disk_that_fails_leaves_nothing(target, here, monkeypatch):
    (here / "full" / "core" / "layers.py").rename(here / "full" / "own.py")
    before = content(here)
    opened = []

    def fail(path, mode):
        opened.append(path)
        if len(opened) > 3:
            raise OSError(28, "No space left on device")
        return open(path, mode)

    monkeypatch.setattr(copy, "open", fail, raising=False)
    with pytest.raises(copy.UserError, match=f"--target={target} can't be written .No space left"):
        copy.main(copy.Flags(target=target))
    assert len(opened) == 4
    assert content(here) == before


def test_a_file_that_comes_meanwhile_is_kept(here, monkeypatch):
    (here / "full" / "core" / "layers.py").rename(here / "full" / "own.py")

    def race(path, mode):
        if path.name == "layers.py":
            path.write_text("another's")
        return open(path, mode)

    monkeypatch.setattr(copy, "open", race, raising=False)
    with pytest.raises(copy.UserError, match="File exists"):
        copy.main(copy.Flags(target="full"))
    assert content(here / "full") == {"own.py": "mine", "core": "", "core/layers.py": "another's"}
