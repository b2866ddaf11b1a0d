"""Checkpoints of earlier versions and of both library sets stay readable."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest

from recipes.common import checkpoint, entries
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.train.state import abstract_state
from tests.conftest import ROOT
from tests.support.golden_checkpoints import layout_on, optimizer, sums, write
from zoo.core.layers import AttentionType, Llama3
from zoo.llama_relatives import Config
from zoo.options.rope_scaling import Linear, Yarn

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


def test_a_damaged_one_without_hashes_is_named_in_one_line(tmp_path):
    path = shutil.copytree(OLD[0], tmp_path / "early")
    (path / "hashes.json").unlink()
    assert "hashed" not in json.loads((path / "metadata/metadata").read_text()), "of no version"
    message = f"checkpoint {path}: its arrays can't be read"
    # What TensorStore raises without state/d; its threads would raise more, after the test.
    with pytest.raises(UserError, match=rf"{message} \(NOT_FOUND: step\); use an intact one"):
        with checkpoint.find(path)._reading():
            raise ValueError("NOT_FOUND: step [tensorstore_spec='{}']\nand more")
    (path / "state" / "_METADATA").write_text("{")
    with pytest.raises(UserError, match=message) as caught:
        checkpoint.restore(path, make_mesh("2"))
    assert "\n" not in str(caught.value)


# ---- configs, as commit d691596 stored them: rotary scalings and kinds of layers are lists ----------

CONFIGS = [json.loads(line) for line in (FOLDER / "configs.jsonl").read_text().splitlines()]


def loaded(entry: str, stored: dict):
    found = types.SimpleNamespace(path="old", metadata={"config": stored})
    return checkpoint.config_from(entries.zoo_file(entry).Config, found)


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case["entry"])
def test_an_old_config_loads_and_is_stored_as_before(case):
    config = loaded(case["entry"], case["config"])
    again = json.loads(json.dumps(entries.config_json(config)))
    fields = type(config).__dataclass_fields__
    newer = {name: fields[name].default for name in again.keys() - case["config"].keys()}
    wanted = case["config"] | newer
    assert again == wanted
    assert json.dumps(again, sort_keys=True) == json.dumps(wanted, sort_keys=True)
    assert loaded(case["entry"], again) == config
    assert hash(config) == hash(dataclasses.replace(config)), "jitted functions are cached by it"


def test_lists_in_old_configs_become_the_right_classes():
    """Every form, alone and in kinds of layers; one is told from another by its first item."""
    tiny, llama, linear, yarn, mixed, other = (
        loaded("transformer", case["config"]) for case in CONFIGS if case["entry"] == "transformer"
    )
    scaled = Yarn(
        factor=4.0, beta_fast=3.0, beta_slow=1.0, original_length=16, truncate=True, magnitude=1.2
    )  # fmt: skip
    assert (tiny.rope_scaling, tiny.kinds) == (None, (AttentionType(None, 1e4, None),))
    assert llama.rope_scaling == Llama3(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8_192
    )
    assert linear.rope_scaling == Linear(factor=3.0)
    assert linear.lora_targets == ("q", "down")
    assert yarn.rope_scaling == scaled
    assert yarn.kinds == (AttentionType(7, 1e4, scaled),)
    assert mixed.layer_kinds == (
        AttentionType(window=5, rope_theta=1e4),
        AttentionType(window=None, rope_theta=1e6, rope_scaling=Linear(2.0)),
        AttentionType(window=9, rope_theta=1e5, rope_scaling=scaled),
    )
    assert other.kinds == (
        AttentionType(None, None),
        AttentionType(4, 5e5, Llama3(8.0, 1.0, 4.0, 8_192)),
    )
    assert all(type(kind) is AttentionType for kind in (*mixed.kinds, *other.kinds))


@pytest.mark.parametrize("stored", [["linear"], ["yarn", 4.0], [8.0, 1.0], ["ntk", 2.0], "yarn", 3])
def test_a_rotary_scaling_that_no_version_has_stored_is_refused(stored):
    """In a checkpoint, one line; never a guess."""
    first = CONFIGS[0]["config"]
    for wrong in ({"rope_scaling": stored}, {"layer_kinds": [[None, 1e4, stored]]}):
        with pytest.raises(
            UserError, match=r"has an invalid model config.*is not a Linear, Llama3"
        ):
            loaded("transformer", first | wrong)


@pytest.mark.full
def test_the_script_writes_what_it_says(tmp_path):
    path = write(tmp_path)
    assert checkpoint.verify(path) == ""
    assert path.name.endswith(jax.__version__)
