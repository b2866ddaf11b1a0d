"""SiglipModel and CLIPModel folders: what is read of them, refused and written.

tests/hf/test_hf.py compares embeddings and scores with those that `transformers` computes.
"""

import dataclasses
import json
import shutil

import numpy as np
import PIL.Image
import pytest
import safetensors.numpy

import recipes.siglip
from data import DataError, images
from data.captions import Texts
from recipes.common import hf
from recipes.common.flags.pictures import CaptionedPictures
from recipes.common.runtime import Run
from recipes.common.runtime.errors import UserError
from recipes.common.train.training_flags import Training
from tests.support.golden_folders import GOLDEN, keys_of
from tests.support.hf_models import export
from tests.support.small_tokenizers import metaspace, small
from zoo.siglip import Config
from zoo.sizes import clip_b32

pytestmark = pytest.mark.promise("hugging-face")

SIGLIP, CLIP = GOLDEN / "siglip", GOLDEN / "clip"


@pytest.mark.parametrize("folder", [SIGLIP, CLIP], ids=lambda folder: folder.name)
def test_an_export_is_the_folder_again(folder, tmp_path):
    """Every tensor but none other, bit for bit, and how pictures become inputs."""
    export(f"hf:{folder}", tmp_path / "back")
    tensors, written = (
        safetensors.numpy.load_file(path / "model.safetensors")
        for path in (folder, tmp_path / "back")
    )
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    a, b = hf.Folder(folder), hf.Folder(tmp_path / "back")
    assert a.metadata == b.metadata
    assert (a.config.mean, a.config.std) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert (a.config.resample, a.config.max_positions, a.config.norm_eps) == ("bicubic", 7, 1e-5)
    assert a.config.center_crop == (folder == CLIP)
    theirs, ours = (
        json.loads((path / "preprocessor_config.json").read_text())
        for path in (folder, tmp_path / "back")
    )
    assert {key: theirs[key] for key in ours} == ours


def test_the_two_towers_of_clip_and_the_end_of_a_text(tmp_path):
    config = hf.Folder(CLIP).config
    assert (config.clip, config.loss, config.activation) == (True, "softmax", "quick")
    assert (config.embed, config.joint, config.text_tower) == (12, 14, (20, 3, 5, 40))
    assert config.end_token == 40
    keys = keys_of("clip")
    keys["text_config"]["eos_token_id"] = 2  # of older files: the largest number ends a text
    older = hf.siglip.clip_config_from(keys, tmp_path / "config.json")
    assert older == hf.siglip.clip_config_from(
        hf.siglip.config_json(older, 7), tmp_path / "config.json"
    )
    assert older.end_token == 0


def test_clip_s_pictures_are_cut_to_a_square_as_transformers_does():
    """The expected pixels are those of its CLIPImageProcessor with Pillow."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 14, 3), np.uint8)
    picture = PIL.Image.fromarray(pixels)
    whole = np.asarray(picture.resize((6, 4), PIL.Image.Resampling.BICUBIC))
    form = images.Form(4, 3, "bicubic", center_crop=True)
    np.testing.assert_array_equal(images.resized(picture, form), whole[:, 1:5])
    tall = PIL.Image.fromarray(pixels.swapaxes(0, 1))
    found = images.resized(tall, form).swapaxes(0, 1).astype(int)
    np.testing.assert_allclose(found, whole[:, 1:5], atol=1)  # axes in another order


@pytest.mark.parametrize(
    ("side", "changes", "named"),
    [
        ("vision_config", {"hidden_size": 40}, "projection_size 20"),
        ("vision_config", {"layer_norm_eps": 1e-3}, "layer_norm_eps 0.001"),
        ("vision_config", {"patch_size": 2}, "patch_size 2"),
        ("vision_config", {"vision_use_head": False}, "vision_use_head false"),
        ("text_config", {"projection_size": 8}, "projection_size 8"),
        ("text_config", {"hidden_act": "relu"}, 'hidden_act "relu"'),
        ("text_config", {"hidden_act": "gelu"}, 'hidden_act "gelu_pytorch_tanh"'),
        ("text_config", {"num_attention_heads": 3}, "num_attention_heads 3"),
    ],
)
def test_what_our_towers_lack_is_refused_by_its_key(side, changes, named, tmp_path):
    keys = keys_of("siglip")
    keys[side] |= changes
    with pytest.raises(UserError, match=f"has {named}, which zoo/siglip.py does not implement"):
        hf.siglip.config_from(keys, tmp_path / "config.json")


def test_absent_keys_mean_the_first_published_models(tmp_path):
    config = hf.siglip.config_from({"architectures": ["SiglipModel"]}, tmp_path / "config.json")
    assert config == Config.b16()
    clip = hf.siglip.clip_config_from({"architectures": ["CLIPModel"]}, tmp_path / "config.json")
    assert clip == dataclasses.replace(clip_b32(), end_token=49_407)


def test_a_run_reads_captions_by_its_folder_s_tokenizer(tmp_path):
    """Which starts and ends each text and pads it, and must not have more tokens than the model."""
    copy = tmp_path / "with_tokenizer"
    shutil.copytree(SIGLIP, copy)
    for name, content in metaspace().items():
        (copy / name).write_bytes(content)
    run = dataclasses.replace(Run(), restore_from=f"hf:{copy}", mesh="1", workdir="")
    with pytest.raises(UserError, match="vocab_size=41 is less than the 459 tokens of the"):
        recipes.siglip.main(run, recipes.siglip.MODEL, CaptionedPictures(), Training())
    tokens = small()
    long, short = "a photo of the license and more", "a"
    rows = Texts(9, tokens).encode([long, short])
    ids, id_of_a = (tokens.encode([text])[0].tolist() for text in (long, short))
    assert rows[0].tolist() == [*tokens.start, *ids[:7], *tokens.end], "cut before its end"
    padding = [tokens.end[0]] * (7 - len(id_of_a))  # without a token of its own for padding
    assert rows[1].tolist() == [*tokens.start, *id_of_a, *tokens.end, *padding]
    with pytest.raises(DataError, match=rf"has {len(ids) + 2} tokens, and the model reads 9"):
        Texts(9, tokens).check([long])
