"""recipes.common.checkpoint.restore: the Python way back to a model, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common import checkpoint, sharding
from recipes.common.cli import Run, UserError
from recipes.common.mesh import make_mesh
from recipes.common.optimizer import adamw, schedule
from recipes.common.sharding import paths
from recipes.common.workdir import Workdir
from zoo.transformer import RULES, Config, Transformer


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run's workdir with one checkpoint, of step 3, saved from 4x2."""
    run = Run(workdir=str(tmp_path_factory.mktemp("runs") / "a"))
    config = Config.tiny()
    layout = sharding.lay_out(
        lambda: Transformer(config, rngs=nnx.Rngs(7)), RULES, "fsdp_tp", make_mesh("4x2")
    )
    optimizer = adamw(schedule(1e-3, 1, 10), 0.1, 1.0)
    abstract = sharding.abstract_state(layout, optimizer)
    work = Workdir(run, "transformer")
    work.check_data({"fingerprint": "x"})
    work.begin(2, checkpoint.metadata("transformer", config, layout, {"steps": 3}))
    work.save(3, sharding.initialize(layout, optimizer, 7, abstract))
    work.close()
    return work.path


MINE = RULES["dp"] | {"mlp": "model", "embed": "data"}


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [("1x8", "tp"), ("8", None), ("2x2x2", "hsdp_tp"), ("1x1", "dp"), ("2x4", MINE)],
)
def test_restore_gives_a_model_that_lies_as_the_rules_say(workdir, mesh, rules):
    mesh = make_mesh(mesh)
    model, metadata = checkpoint.restore(workdir, mesh, rules)
    assert isinstance(model, Transformer)
    assert metadata["step"] == 3
    assert metadata["mesh"] == {"data": 4, "model": 2}
    table = rules if isinstance(rules, dict) else RULES[rules or "fsdp"]
    want = jax.jit(
        lambda: nnx.to_pure_dict(nnx.state(Transformer(Config.tiny(), rngs=nnx.Rngs(7))))
    )()
    got = nnx.to_pure_dict(nnx.state(model))
    for path, axes in metadata["logical_axes"].items():
        array = paths(got)[path]
        assert array.sharding.spec == sharding.partition_spec(tuple(axes), table), path
        np.testing.assert_array_equal(array, paths(want)[path], err_msg=path)
    assert len(paths(got)) == len(metadata["logical_axes"])
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(table.items())):
        logits = jax.jit(lambda m, t: m(t))(model, jnp.zeros((8, 16), jnp.int32))
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
    ("mesh", "rules", "sentence"),
    [
        ("8", "tp", "rules 'tp' need mesh axis 'model'"),
        ("4x2", "ftp", "--rules=ftp is not a strategy"),
        ("4x2", {"embed": "data"}, "rules '(yours)' forget logical axis 'act_embed'"),
        ("4x2", RULES["dp"] | {"mpl": None}, "rules '(yours)' name logical axis 'mpl'"),
    ],
)
def test_rules_are_checked_before_anything_is_read(workdir, mesh, rules, sentence, monkeypatch):
    monkeypatch.setattr(checkpoint, "restore_tree", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match=r".") as caught:
        checkpoint.restore(workdir, make_mesh(mesh), rules)
    assert str(caught.value).startswith(sentence)


def test_a_save_is_of_the_moment_it_was_called(workdir, tmp_path):
    """Donating the state to the next step at once does not change what is written."""
    work = Workdir(Run(workdir=str(tmp_path)), "transformer")
    work.check_data({})
    work.begin(1, {"entry": "transformer", "config": {}, "flags": {}, "versions": {}})
    mesh = make_mesh("8")
    where = jax.sharding.NamedSharding(mesh, jax.P("data"))
    state = {"x": jax.device_put(jnp.zeros((8, 1_000_000)), where)}
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    work.save(1, state)
    for _ in range(5):
        state = add(state)
    work.close()
    abstract = {"x": jax.ShapeDtypeStruct((8, 1_000_000), jnp.float32, sharding=where)}
    saved = checkpoint.restore_tree(checkpoint.find(tmp_path), abstract)
    assert float(saved["x"].max()) == 0.0
    assert float(state["x"].min()) == 5.0
