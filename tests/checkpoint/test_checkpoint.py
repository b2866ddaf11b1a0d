"""recipes.common.checkpoint.restore: the Python way back to a model, on any mesh."""

import ast
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recipes.common import checkpoint, entries
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.rules import partition_spec
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.state import abstract_state, initialize
from tests.conftest import ROOT, full_except
from tests.support.entries import QUICK
from tests.support.runs import assert_bit_equal, saving, state_of
from zoo.llama_relatives import RULES, Config, Transformer

pytestmark = pytest.mark.promise("restore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with one checkpoint, of step 3 on 4x2, and its parameters."""
    layout = make_layout(Transformer, Config.tiny(), make_mesh("4x2"), "fsdp_tp", seed=7)
    optimizer = adamw(LearningRate(1e-3, 1, 10), weight_decay=0.1, clip_norm=1.0)
    metadata = checkpoint.metadata("transformer", layout, {"steps": 3})
    folder = tmp_path_factory.mktemp("runs") / "a"
    state = initialize(layout, optimizer, 7, abstract_state(layout, optimizer))
    with saving(folder, "transformer", metadata, {"fingerprint": "x"}) as saver:
        saver.save(3, state)
    return folder, jax.device_get(state["params"])


@pytest.fixture
def workdir(saved):
    return saved[0]


def test_a_save_compiles_nothing(tmp_path, caplog):
    """Training waits while a save starts, so small replicated arrays are not sliced first."""
    whole = NamedSharding(make_mesh("8"), P())
    state = {"params": {str(n): jax.device_put(np.ones((8, n)), whole) for n in (123, 456)}}
    with saving(tmp_path / "a") as saver, jax.log_compiles():
        saver.save(1, state)
    assert "XLA compilation" not in caplog.text
    assert_bit_equal(state_of(tmp_path / "a", 1), paths(state))


MINE = RULES["dp"] | {"mlp": "model", "embed": "data"}
PARTIAL = {"batch": "data", "mlp": "model"}
RESTORED = [
    ("1x8", "tp"),
    ("2x2x2", "hsdp_tp"),
    ("1x1", "dp"),
    ("2x4", MINE),
    ("8", None),
    ("4x2", PARTIAL),
]


@pytest.mark.parametrize(("mesh", "rules"), RESTORED)
def test_restore_gives_a_model_sharded_by_the_rules(saved, mesh, rules):
    (workdir, want), mesh = saved, make_mesh(mesh)
    model, metadata = checkpoint.restore(workdir, mesh, rules)
    assert isinstance(model, Transformer)
    assert metadata["step"] == 3
    assert metadata["mesh"] == {"data": 4, "model": 2}
    table = RULES["dp"] | rules if isinstance(rules, dict) else RULES[rules or "fsdp"]
    got = nnx.to_pure_dict(nnx.state(model))
    for path, axes in metadata["logical_axes"].items():
        array = paths(got)[path]
        assert array.sharding.spec == partition_spec(tuple(axes), table), path
        np.testing.assert_array_equal(array, paths(want)[path], err_msg=path)
    assert len(paths(got)) == len(metadata["logical_axes"])
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(table.items())):
        call = jax.jit(lambda m, t: m(t), compiler_options=QUICK)
        logits = call(model, jnp.zeros((8, 16), jnp.int32))
    assert jnp.isfinite(logits).all()


def test_a_step_folder_and_a_workdir_are_both_paths(workdir):
    for path in (workdir, workdir / "checkpoints", workdir / "checkpoints" / "3", str(workdir)):
        assert checkpoint.find(path).path == workdir / "checkpoints" / "3"


def test_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        checkpoint.restore(tmp_path / "no", make_mesh("8"))
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.restore(tmp_path, make_mesh("8"))


@pytest.mark.parametrize(
    ("mesh", "rules", "message"),
    [
        ("8", "tp", "rules 'tp' need mesh axis 'model'"),
        ("4x2", "ftp", "--rules=ftp is not a strategy"),
        ("4x2", {"embed": "data", "mpl": None}, "rules '(yours)' name logical axis 'mpl'"),
        ("4x2", "no/such.json", "--rules=no/such.json can't be read"),
    ],
)
def test_rules_are_checked_before_anything_is_read(workdir, mesh, rules, message, monkeypatch):
    monkeypatch.setattr(checkpoint.Checkpoint, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match=r".") as caught:
        checkpoint.restore(workdir, make_mesh(mesh), rules)
    assert str(caught.value).startswith(message)


ALONE = """
import sys, numpy
specs, arrays = {}, {}
for kind, state in (("params", params), ("buffers", buffers)):
    for keys, variable in nnx.to_flat_state(state):
        path = "/".join((kind, *keys))
        specs[path] = str(variable[...].sharding.spec)
        arrays[path] = variable[...]
assert all(x.sharding.mesh.axis_sizes == (2, 4) for x in jax.tree.leaves(nnx.state(model)))
assert not {"zoo", "recipes", "data"} & set(sys.modules)
numpy.savez("found.npz", **arrays)
print(specs)
"""


@pytest.mark.parametrize("entry", full_except(["transformer", "deepseek"], ["transformer"]))
def test_orbax_alone_restores_a_run_s_checkpoint_beside_a_copy_as_shown(entry, saved, tmp_path):
    """On another mesh, sharded by the rules, in a process that imports nothing of this project."""
    workdir, params = saved
    want, model = {"params": params}, entries.model(entry)
    layout = make_layout(model, entries.zoo_file(entry).Config.tiny(), make_mesh("4x2"), "fsdp_tp")
    if entry != "transformer":
        workdir = tmp_path / "run"
        optimizer = adamw(LearningRate(1e-3, 1, 10), weight_decay=0.1, clip_norm=1.0)
        state = initialize(layout, optimizer, 7, abstract_state(layout, optimizer))
        want = {kind: jax.device_get(state[kind]) for kind in ("params", "buffers")}
        with saving(workdir, entry, checkpoint.metadata(entry, layout, {})) as saver:
            saver.save(3, state)
    shutil.copytree(ROOT / "zoo", tmp_path / "mine", ignore=shutil.ignore_patterns("checkpoints"))
    page = (ROOT / "recipes" / "docs" / "checkpoints.md").read_text()
    block = re.search(r"<!-- python: orbax alone -->\n```python\n(.*?)```", page, re.DOTALL)[1]
    for shown, here in (
        ("mine.transformer", f"mine.{entry}"),
        ("Transformer", model.__name__),
        ("Config.small()", "Config.tiny()"),
        ("runs/a/checkpoints/500", str(workdir / "checkpoints" / "3")),
    ):
        assert shown in block
        block = block.replace(shown, here)
    (tmp_path / "use.py").write_text(block + ALONE)
    done = subprocess.run(
        [sys.executable, "-W", "error", "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, table = np.load(tmp_path / "found.npz"), entries.zoo_file(entry).RULES["fsdp_tp"]
    assert_bit_equal(dict(found), paths(want))
    assert ast.literal_eval(done.stdout) == {
        path: str(partition_spec(axes, table)) for path, axes in paths(layout.model.axes).items()
    }


def test_a_save_holds_the_state_at_its_call(tmp_path):
    """Donating the state to the next step at once does not change what is written."""
    where = jax.sharding.NamedSharding(make_mesh("8"), jax.P("data"))
    state = {"x": jax.device_put(jnp.zeros((8, 1_000_000)), where)}
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with saving(tmp_path) as saver:
        saver.save(1, state)
        for _ in range(5):
            state = add(state)
    abstract = {"x": jax.ShapeDtypeStruct((8, 1_000_000), jnp.float32, sharding=where)}
    saved = checkpoint.find(tmp_path).read(abstract)
    assert float(saved["x"].max()) == 0.0
    assert float(state["x"].min()) == 5.0
