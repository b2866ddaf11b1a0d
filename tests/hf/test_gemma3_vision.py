"""Folders of Gemma 3 that see: read whole or as texts alone, and written back bit-equal."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from recipes.common import checkpoint, hf
from recipes.common.hf.gemma3_vision import HEAD, canonical
from recipes.common.mesh import make_mesh
from recipes.common.runtime import UserError
from recipes.common.sharding.abstract import paths
from tests.conftest import ROOT, full_except
from tests.support.hf_families import TOLERANCE
from tests.support.quick import QUICK
from zoo.gemma3_vision import SIZES

pytestmark = pytest.mark.promise("hugging-face")

# Of transformers' Gemma3ForConditionalGeneration: three rows with two pictures, one and none.
GOLDEN = ROOT / "tests" / "golden" / "pictures" / "gemma3"
ENTRY = "gemma3_vision"


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden folder, with changed keys of its config.json."""

    def copy(**changes):
        target = tmp_path / "theirs"
        shutil.copytree(GOLDEN, target)
        keys = json.loads((target / "config.json").read_text())
        for path, value in changes.items():
            inner, _, name = path.rpartition("__")
            (keys[inner] if inner else keys)[name] = value
        (target / "config.json").write_text(json.dumps(keys))
        return target

    return copy


@pytest.mark.parametrize(
    ("mesh", "rules"),
    full_except([("1x1", "dp"), ("data=2,seq=2", "fsdp_cp")], fast=[("1x1", "dp")]),
)
def test_logits_are_those_of_transformers(mesh, rules):
    """A picture's positions see each other; the windows of local layers hold."""
    source = hf.open_folder(GOLDEN, ENTRY)
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    variables = checkpoint.restore_variables(source, layout)
    wanted = np.load(GOLDEN / "outputs.npz")
    rows = [np.resize(wanted[name], (4, *wanted[name].shape[1:])) for name in ("tokens", "images")]

    def run(variables, tokens, images):
        return layout.model.merge(variables)(tokens, None, images)

    logits = layout.compile(run, variables, *rows, compiler_options=QUICK)(variables, *rows)
    np.testing.assert_allclose(np.asarray(logits)[:3], wanted["logits"], atol=TOLERANCE)


def test_a_folder_is_written_back_bit_equal(tmp_path):
    source = hf.open_folder(GOLDEN, ENTRY)
    variables = source.read(checkpoint.layout_of(source, make_mesh("1x1"), "dp").variables())
    arrays = {path: np.asarray(x) for path, x in paths(variables["params"]).items()}
    architecture = source.metadata["architecture"]
    hf.write(
        tmp_path / "back", ENTRY, source.config, 128, arrays.__getitem__, architecture=architecture
    )
    back = hf.open_folder(tmp_path / "back", ENTRY)
    assert back.config == source.config
    assert back.metadata == source.metadata
    stored = [safetensors.numpy.load_file(f / "model.safetensors") for f in (GOLDEN, back.path)]
    theirs, ours = ({canonical(name): x for name, x in tensors.items()} for tensors in stored)
    read = {name for name in theirs if not name.startswith(HEAD)}
    assert read == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in read)
    assert all(name == canonical(name) for name in stored[1]), "published names"


def test_the_entry_decides_what_is_read():
    texts, whole = hf.open_folder(GOLDEN), hf.open_folder(GOLDEN, ENTRY)
    assert texts.metadata["entry"] == "gemma3"
    assert whole.metadata["entry"] == ENTRY
    assert {path for path in paths(whole.shapes()["params"]) if "vision/" not in path} == {
        *paths(texts.shapes()["params"])
    }
    for wanted in (ENTRY, "data.pictured"):  # the entry, or the module of its data
        assert checkpoint.find(f"hf:{GOLDEN}", entry=wanted).metadata["entry"] == ENTRY


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_config__hidden_act": "gelu"}, 'has hidden_act "gelu", which'),
        ({"vision_config__model_type": "clip_vision_model"}, 'has model_type "clip_vision_model"'),
        ({"vision_config__patch_size": 9}, "has patch_size 9, which"),
        ({"mm_tokens_per_image": 5}, "picture_tokens=5 must be the square"),
        ({"image_token_index": 64}, "image_token=64 must be below vocab_size=64"),
    ],
)
def test_a_tower_that_we_lack_is_refused(folder, changes, said):
    with pytest.raises(UserError, match=said):
        hf.open_folder(folder(**changes), ENTRY)


def test_pan_and_scan_is_refused(folder):
    theirs = folder()
    (theirs / "preprocessor_config.json").write_text(json.dumps({"do_pan_and_scan": True}))
    with pytest.raises(UserError, match="has do_pan_and_scan true, which"):
        hf.open_folder(theirs, ENTRY)


def test_published_sizes_are_those_of_published_folders():
    from recipes.common.hf import gemma3_vision

    for size in ("4b", "12b", "27b"):
        config = SIZES[size]()
        keys = gemma3_vision.config_json(config, 131_072)
        file = GOLDEN / "config.json"
        assert gemma3_vision.config_from(gemma3_vision.whole_keys(keys, file), file) == config
        assert (config.image_size // config.patch) ** 2 == 4_096
        assert config.picture_tokens == 256
