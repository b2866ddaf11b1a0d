"""Folders of Gemma 4 that see: read whole or as texts alone, and written back bit-equal."""

import dataclasses
import functools
import itertools
import json
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import recipes.hf
from recipes.common import checkpoint, hf
from recipes.common.generation.picture_prompts import tokens_of
from recipes.common.hf import gemma4_vision
from recipes.common.hf.folder import family_of
from recipes.common.hf.gemma4_vision import canonical
from recipes.common.mesh import make_mesh
from recipes.common.runtime import UserError
from recipes.common.sharding.abstract import paths
from recipes.hf import Export, Import
from tests.conftest import ROOT, full_except
from tests.support.hf_families import TOLERANCE
from tests.support.quick import QUICK
from tests.support.runs import assert_bit_equal
from zoo.gemma4_vision import SIZES

pytestmark = pytest.mark.promise("hugging-face")

# Of transformers' classes: three rows with two pictures, none and one, of three aspect ratios; by
# tests/by_hand/squares_parity.py. As E2B, 31B and 12B.
GOLDEN = ROOT / "tests" / "golden" / "pictures"
KINDS = ("gemma4", "gemma4_large", "gemma4_unified")
ENTRY = "gemma4_vision"


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden folder, with changed keys of its config.json or of its processor."""

    def copy(kind="gemma4", processor=False, **changes):
        target = tmp_path / "theirs"
        shutil.copytree(GOLDEN / kind, target)
        file = target / ("preprocessor_config.json" if processor else "config.json")
        keys = json.loads(file.read_text())
        for path, value in changes.items():
            inner, _, name = path.rpartition("__")
            (keys[inner] if inner else keys)[name] = value
        file.write_text(json.dumps(keys))
        return target

    return copy


@pytest.mark.parametrize(
    ("kind", "mesh", "rules"),
    full_except(
        [(kind, "1x1", "dp") for kind in KINDS] + [("gemma4_large", "data=2,seq=2", "fsdp_cp")],
        fast=[],
        release=[("gemma4_unified", "1x1", "dp")],
    ),
)
def test_logits_are_those_of_transformers(kind, mesh, rules):
    """Positions of a picture see each other in sliding layers alone, where the config says so."""
    logits = program(kind, mesh, rules)(hf.open_folder(GOLDEN / kind, ENTRY))
    wanted = np.load(GOLDEN / kind / "outputs.npz")["logits"]
    np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)


@functools.cache
def program(kind: str, mesh: str, rules: str):
    """A function from a source of a golden folder's architecture to the logits of its rows."""
    layout = checkpoint.layout_of(hf.open_folder(GOLDEN / kind, ENTRY), make_mesh(mesh), rules)
    stored = np.load(GOLDEN / kind / "outputs.npz")
    rows = [
        np.resize(stored[name], (4, *stored[name].shape[1:]))
        for name in ("tokens", "images", "grids")
    ]

    def run(variables, tokens, images, grids):
        return layout.model.merge(variables)(tokens, None, images, grids)

    compiled = layout.compile(run, layout.variables(), *rows, compiler_options=QUICK)

    def logits(source) -> np.ndarray:
        variables = checkpoint.restore_variables(source, layout)
        return np.asarray(compiled(variables, *rows))[:3]

    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_written_back_bit_equal(kind, tmp_path):
    source = hf.open_folder(GOLDEN / kind, ENTRY)
    variables = source.read(checkpoint.layout_of(source, make_mesh("1x1"), "dp").variables())
    arrays = {path: np.asarray(x) for tree in variables.values() for path, x in paths(tree).items()}
    architecture = source.metadata["architecture"]
    hf.write(
        tmp_path / "back", ENTRY, source.config, 128, arrays.__getitem__, architecture=architecture
    )
    back = hf.open_folder(tmp_path / "back", ENTRY)
    assert back.config == source.config
    assert back.metadata["architecture"] == architecture
    stored = [
        safetensors.numpy.load_file(f / "model.safetensors") for f in (GOLDEN / kind, back.path)
    ]
    theirs, ours = ({canonical(name): x for name, x in tensors.items()} for tensors in stored)
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    assert all(name == canonical(name) for name in stored[1]), "published names"


LORA = GOLDEN / "gemma4_lora"  # made by PEFT, of the decoder's projections, by the same script


def peft_source(entry: str = ENTRY):
    return checkpoint.find(LORA, base=f"hf:{GOLDEN / 'gemma4'}", entry=entry)


@pytest.mark.full
def test_logits_with_an_adapter_are_those_of_peft():
    """Merged; the golden has every eighth position."""
    wanted = np.load(LORA / "logits.npy")
    base = np.load(GOLDEN / "gemma4" / "outputs.npz")["logits"]
    assert np.abs(wanted - base[:, ::8]).max() > 0.1
    logits = program("gemma4", "1x1", "dp")(peft_source())
    np.testing.assert_allclose(logits[:, ::8], wanted, atol=TOLERANCE)


@pytest.mark.parametrize("entry", [ENTRY, "gemma4"])
def test_an_adapter_of_peft_is_written_back_bit_equal(entry, tmp_path):
    """PEFT then adapts the same modules: not those of the tower that have the same names. Also if the
    entry is the text model's, because `transformers` loads the folder whole.
    """
    source = peft_source(entry)
    assert source.metadata["entry"] == entry
    adapter, architecture = source.adapter, source.metadata["architecture"]
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: x.update(sharding=one), adapter.shapes())
    factors = {path: np.asarray(x) for path, x in paths(adapter.read(shapes)["params"]).items()}
    back = tmp_path / "back"
    read = factors.__getitem__
    hf.write_adapter(back, entry, adapter.config, "org/name", read, architecture=architecture)
    theirs, ours = (
        safetensors.numpy.load_file(folder / "adapter_model.safetensors") for folder in (LORA, back)
    )
    assert_bit_equal(ours, theirs)
    modules = {
        module
        for name in safetensors.numpy.load_file(GOLDEN / "gemma4" / "model.safetensors")
        for module in itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
    }
    targets = json.loads((back / "adapter_config.json").read_text())["target_modules"]
    chosen = {module for module in modules if any(f".{module}".endswith(f".{x}") for x in targets)}
    start = "base_model.model."
    assert chosen == {name.removeprefix(start).partition(".lora_")[0] for name in theirs}


def test_an_adapter_on_a_checkpoint_of_the_text_model_has_a_text_model_s_names(tmp_path):
    """PEFT can load it onto an export of that checkpoint, a Gemma4ForCausalLM."""
    source = peft_source("gemma4")
    config, architecture = source.adapter.config, source.metadata["architecture"]
    assert architecture == "Gemma4ForConditionalGeneration"

    def zeros(path: str) -> np.ndarray:
        return np.zeros(paths(source.adapter.shapes()["params"])[path].shape, np.float32)

    back = tmp_path / "back"
    hf.write_adapter(back, "gemma4", config, None, zeros, architecture=architecture)
    names = safetensors.numpy.load_file(back / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    targets = json.loads((back / "adapter_config.json").read_text())["target_modules"]
    assert "q_proj" in targets, "no tower has one"


@pytest.mark.parametrize("entry", full_except(["", ENTRY], fast=[], release=[ENTRY]))
def test_a_merged_adapter_of_peft_is_exported_as_the_entry_says(entry, tmp_path):
    back = tmp_path / "back"
    recipes.hf.export(Export(str(LORA), str(back), f"hf:{GOLDEN / 'gemma4'}", entry=entry))
    (architecture,) = json.loads((back / "config.json").read_text())["architectures"]
    assert architecture == f"Gemma4For{'ConditionalGeneration' if entry else 'CausalLM'}"
    stored = safetensors.numpy.load_file(back / "model.safetensors")
    assert any("vision_tower" in name for name in stored) == bool(entry)


@pytest.mark.parametrize("command", [Import, Export])
def test_an_entry_that_does_not_read_the_folder_is_refused(command, tmp_path):
    folder = str(GOLDEN / "gemma4")
    said = f"--entry=gemma3_vision does not read --source=hf:{folder}, a 'gemma4' model; leave --entry out"
    run = {Import: recipes.hf.import_, Export: recipes.hf.export}[command]
    with pytest.raises(UserError, match=re.escape(said)):
        run(command(f"hf:{folder}", str(tmp_path / "x"), entry="gemma3_vision"))
    assert not (tmp_path / "x").exists()


def test_the_entry_decides_what_is_read():
    texts, whole = hf.open_folder(GOLDEN / "gemma4"), hf.open_folder(GOLDEN / "gemma4", ENTRY)
    assert texts.metadata["entry"] == "gemma4"
    assert whole.metadata["entry"] == ENTRY
    assert {path for path in paths(whole.shapes()["params"]) if "vision/" not in path} == {
        *paths(texts.shapes()["params"])
    }
    for wanted in (ENTRY, "data.pictured"):  # the entry, or the module of its data
        found = checkpoint.find(f"hf:{GOLDEN / 'gemma4'}", entry=wanted)
        assert found.metadata["entry"] == ENTRY


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_pictures_of_the_folder_s_processor(kind):
    squares = tokens_of(hf.open_folder(GOLDEN / kind, ENTRY).config).squares
    assert squares is not None
    assert squares.columns_first is (kind == "gemma4_unified")


def test_the_part_that_hears_is_left_out(folder, capfd):
    theirs = folder()
    file = theirs / "model.safetensors"
    heard = {"model.embed_audio.embedding_projection.weight": np.ones((2, 3), np.float32)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | heard, file)
    assert hf.open_folder(theirs, ENTRY).config == hf.open_folder(GOLDEN / "gemma4", ENTRY).config
    assert "The parts for audio were left out; the zoo has none." in capfd.readouterr().out


@pytest.mark.parametrize(
    ("kind", "value", "sees"),
    [
        ("gemma4", "vision", True), ("gemma4", None, False), ("gemma4", "absent", False),
        ("gemma4_unified", None, False), ("gemma4_unified", "absent", True),
    ],
)  # fmt: skip
def test_an_absent_key_has_the_value_of_its_class(folder, kind, value, sees):
    theirs = folder(kind, text_config__use_bidirectional_attention=value)
    if value == "absent":
        file = theirs / "config.json"
        keys = json.loads(file.read_text())
        del keys["text_config"]["use_bidirectional_attention"]
        file.write_text(json.dumps(keys))
    assert hf.open_folder(theirs, ENTRY).config.both_ways == sees


VISION = "vision_config"


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gemma4", {VISION: None}, "has vision_config null, which zoo/gemma4_vision.py does not"),
        ("gemma4", {f"{VISION}__hidden_activation": "gelu"}, 'has hidden_activation "gelu", which'),
        ("gemma4", {f"{VISION}__model_type": "siglip"}, 'has model_type "siglip", which'),
        ("gemma4", {f"{VISION}__num_key_value_heads": 1}, "has num_key_value_heads 1, which"),
        ("gemma4", {f"{VISION}__head_dim": 10}, "has head_dim 10, which"),
        ("gemma4", {f"{VISION}__attention_bias": True}, "has attention_bias true, which"),
        ("gemma4", {f"{VISION}__rope_parameters": {"rope_type": "yarn"}}, 'has rope_type "yarn"'),
        ("gemma4", {f"{VISION}__standardize": 3}, "has standardize 3, which"),
        ("gemma4", {f"{VISION}__position_embedding_size": 139},
         "picture_tokens=70 in a line have 140 places, and the table has places=139"),
        ("gemma4", {"image_token_id": 64}, "image_token=64 must be below vocab_size=64"),
        ("gemma4", {"text_config__pad_token_id": 64}, "has pad_token_id 64, which"),
        ("gemma4_unified", {f"{VISION}__output_proj_dims": 32}, "has output_proj_dims 32, which"),
        ("gemma4_unified", {f"{VISION}__model_patch_size": 5}, "has model_patch_size 5, which"),
    ],
)  # fmt: skip
def test_a_tower_that_we_lack_is_refused(folder, kind, changes, said):
    with pytest.raises(UserError, match=said):
        hf.open_folder(folder(kind, **changes), ENTRY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_soft_tokens": 69}, "has max_soft_tokens 69, which"),
        ({"patch_size": 3}, "has patch_size 3, which"),
        ({"do_normalize": True}, "has do_normalize true, which"),
        ({"do_resize": False}, "has do_resize false, which"),
        ({"rescale_factor": 0.5}, "has rescale_factor 0.5, which"),
        ({"image_processor_type": "ViTImageProcessor"}, "has image_processor_type"),
        ({"resample": 9}, "has resample 9, which"),
    ],
)
def test_a_processor_that_we_lack_is_refused(folder, changes, said):
    with pytest.raises(UserError, match=said):
        hf.open_folder(folder(processor=True, **changes), ENTRY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"channels": 1}, "can't have channels=1"),
        ({"picture_tokens": 69}, "can't have picture_tokens=69"),
        ({"clipped": False, "tower_layers": 0}, "can't have"),  # a unified model has no embeddings of layers
    ],
)  # fmt: skip
def test_a_model_that_no_folder_says_is_refused(changes, said):
    config = dataclasses.replace(hf.open_folder(GOLDEN / "gemma4", ENTRY).config, **changes)
    with pytest.raises(UserError, match=said):
        family_of(ENTRY, config)


PUBLISHED = {  # what vision_config of published folders says besides the defaults of `transformers`
    "e2b": ("gemma4", None, {"use_clipped_linears": True}),
    "e4b": ("gemma4", None, {"use_clipped_linears": True}),
    "12b": ("gemma4_unified", "vision", {}),
    "26b_a4b": ("gemma4", "vision", None),
    "31b": ("gemma4", "vision", None),
}
LARGE = {
    "hidden_size": 1_152, "intermediate_size": 4_304, "num_hidden_layers": 27, "head_dim": 72,
    "num_attention_heads": 16, "num_key_value_heads": 16, "standardize": True,
}  # fmt: skip


def test_published_sizes_are_those_of_published_folders(tmp_path):
    published = json.loads((ROOT / "tests" / "golden" / "published_configs.json").read_text())
    for size, (kind, sees, vision) in PUBLISHED.items():
        config = SIZES[size]()
        (keys,) = (x for name, x in published.items() if name.split() == ["gemma4", size])
        text = keys["text_config"] | {"use_bidirectional_attention": sees}
        seen = {"model_type": f"{kind}_vision"} | (LARGE if vision is None else vision)
        whole = keys | {"text_config": text, "vision_config": seen}
        file = tmp_path / "config.json"
        read = gemma4_vision.config_from(kind, gemma4_vision.whole_keys(kind, whole, file), file)
        differs = {n: x for n, x in vars(read).items() if getattr(config, n) != x}
        assert differs.keys() <= {"remat", "capacity"}, differs
        written = gemma4_vision.config_json(kind, config, 131_072)
        again = gemma4_vision.config_from(kind, gemma4_vision.whole_keys(kind, written, file), file)
        assert again == read
        assert not gemma4_vision.lost(kind, config)
