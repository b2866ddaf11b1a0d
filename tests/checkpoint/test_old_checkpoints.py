"""Checkpoints of earlier versions and of both library sets stay readable."""

import json

import jax
import numpy as np
import pytest

from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from recipes.common.train.state import abstract_state
from tests.by_hand.old_checkpoints import layout_on, optimizer, sums
from tests.conftest import ROOT
from zoo.transformer import Config

pytestmark = pytest.mark.promise("old-checkpoints")

FOLDER = ROOT / "tests" / "golden" / "checkpoints"
OLD = sorted(path for path in FOLDER.iterdir() if path.is_dir())


def test_both_library_sets_have_written_one():
    written = {json.loads((p / "metadata/metadata").read_text())["versions"]["jax"] for p in OLD}
    assert {"0.10.2", "0.12.0.1"} <= written


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.name)
def test_an_old_checkpoint_is_whole_and_holds_what_was_saved(path):
    assert checkpoint.verify(path) == ""
    found = checkpoint.find(path)
    want = json.loads((path.parent / f"{path.name}.json").read_text())
    layout = layout_on("1x2", checkpoint.config_from(Config, found))
    state = found.read(abstract_state(layout, optimizer()))
    got = sums(state)
    assert set(got) == set(want)
    for name, (shape, dtype, *numbers) in want.items():
        assert got[name][:2] == [shape, dtype], name
        np.testing.assert_allclose(got[name][2:], numbers, rtol=1e-12, err_msg=name)
    assert int(state["step"]) == found.step == 3


@pytest.mark.parametrize("path", OLD, ids=lambda path: path.name)
def test_an_old_checkpoint_becomes_a_model(path):
    model, metadata = checkpoint.restore(path, make_mesh("2x2x2"))
    assert metadata["entry"] == "transformer"
    logits = model(jax.numpy.zeros((2, 3), "int32"))
    assert np.isfinite(logits).all()


def test_the_script_writes_what_it_says(tmp_path):
    from tests.by_hand.old_checkpoints import write

    path = write(tmp_path)
    assert checkpoint.verify(path) == ""
    assert path.name.endswith(jax.__version__)
