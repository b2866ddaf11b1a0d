"""SiglipModel folders: our embeddings and scores against the published definition, in float64."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import safetensors.numpy

import recipes.siglip
from data import DataError
from data.captions import Texts
from recipes.common import checkpoint, hf
from recipes.common.mesh import make_mesh
from recipes.common.pictures import CaptionedPictures
from recipes.common.runtime import Run
from recipes.common.runtime.errors import UserError
from recipes.common.train.flags import Training
from tests.by_hand.hf_parity import TOLERANCE, export, params_of
from tests.support.siglip_definition import embeddings
from tests.support.small_tokenizers import metaspace, small
from zoo.siglip import Config

pytestmark = pytest.mark.promise("hugging-face")

# No mesh axis divides these sizes but the width of MLPs, which tensor parallelism needs to split.
TOWER = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5}
TOWER |= {"intermediate_size": 40, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5}
TEXT = TOWER | {"vocab_size": 37, "max_position_embeddings": 7}
IMAGE = TOWER | {"image_size": 9, "patch_size": 3, "num_channels": 3}
KEYS = {"architectures": ["SiglipModel"], "model_type": "siglip"}
KEYS |= {"text_config": TEXT, "vision_config": IMAGE}
PREPROCESSOR = {"size": {"height": 9, "width": 9}, "resample": 3, "image_mean": [0.4, 0.5, 0.6]}
PREPROCESSOR |= {"image_std": [0.2, 0.3, 0.4], "rescale_factor": 1 / 255}


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of such a folder, as `transformers` names them."""
    D, F, P, C = (
        IMAGE[key] for key in ("hidden_size", "intermediate_size", "patch_size", "num_channels")
    )
    every = {"logit_scale": (1,), "logit_bias": (1,)}

    def linear(name: str, outputs: int, inputs: int):
        every[f"{name}.weight"] = outputs, inputs
        every[f"{name}.bias"] = (outputs,)

    def norm(name: str):
        every[f"{name}.weight"] = every[f"{name}.bias"] = (D,)

    for side in ("text_model", "vision_model"):
        for layer in range(TOWER["num_hidden_layers"]):
            prefix = f"{side}.encoder.layers.{layer}"
            for part in "qkv":
                linear(f"{prefix}.self_attn.{part}_proj", D, D)
            linear(f"{prefix}.self_attn.out_proj", D, D)
            linear(f"{prefix}.mlp.fc1", F, D)
            linear(f"{prefix}.mlp.fc2", D, F)
            norm(f"{prefix}.layer_norm1")
            norm(f"{prefix}.layer_norm2")
    every["text_model.embeddings.token_embedding.weight"] = TEXT["vocab_size"], D
    every["text_model.embeddings.position_embedding.weight"] = TEXT["max_position_embeddings"], D
    norm("text_model.final_layer_norm")
    linear("text_model.head", D, D)
    every["vision_model.embeddings.patch_embedding.weight"] = D, C, P, P
    every["vision_model.embeddings.patch_embedding.bias"] = (D,)
    every["vision_model.embeddings.position_embedding.weight"] = (IMAGE["image_size"] // P) ** 2, D
    norm("vision_model.post_layernorm")
    every["vision_model.head.probe"] = 1, 1, D
    every["vision_model.head.attention.in_proj_weight"] = 3 * D, D
    every["vision_model.head.attention.in_proj_bias"] = (3 * D,)
    linear("vision_model.head.attention.out_proj", D, D)
    norm("vision_model.head.layernorm")
    linear("vision_model.head.mlp.fc1", F, D)
    linear("vision_model.head.mlp.fc2", D, F)
    return every


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """(a folder with random tensors, the tensors)."""
    path = tmp_path_factory.mktemp("siglip")
    random = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes().items():
        is_scale = "norm" in name and name.endswith("weight")
        tensors[name] = (random.normal(0, 0.25, shape) + is_scale).astype(np.float32)
    tensors["logit_scale"] = np.full(1, math.log(9.0), np.float32)
    tensors["logit_bias"] = np.full(1, -4.0, np.float32)
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(KEYS))
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return path, tensors


def given() -> tuple[np.ndarray, np.ndarray]:
    """(images [B, W, W, C], tokens [B, T])."""
    random = np.random.default_rng(1)
    image_BWWC = random.normal(size=(8, 9, 9, 3)).astype(np.float32)
    return image_BWWC, random.integers(0, TEXT["vocab_size"], (8, 7)).astype(np.int32)


@pytest.mark.parametrize(("mesh", "rules"), [("1", "dp"), ("4x2", "fsdp_tp"), ("1x8", "tp")])
def test_embeddings_and_scores_match_the_published_definition(folder, mesh, rules, strict):
    path, tensors = folder
    heads, eps = TOWER["num_attention_heads"], TOWER["layer_norm_eps"]
    image_BD, text_BD = embeddings(tensors, *given(), heads=heads, eps=eps)
    source = checkpoint.find(f"hf:{path}")
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    variables = checkpoint.restore_variables(source, layout)

    def run(variables, image_BWWC, tokens_BT):
        model = layout.model.merge(variables)
        image_BD, text_BD = model.embed_images(image_BWWC), model.embed_texts(tokens_BT)
        return image_BD, text_BD, model.log_scale[...], model.score_bias[...]

    found = layout.compile(run, variables, *given())(variables, *given())
    ours_BD, ours_text_BD, log_scale, bias = (np.asarray(x) for x in found)
    assert np.abs(image_BD).max() > 0.3, "embeddings of length 1"
    np.testing.assert_allclose(ours_BD, image_BD, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(ours_text_BD, text_BD, rtol=0, atol=TOLERANCE)
    scores_BB = image_BD @ text_BD.T * 9.0 - 4.0
    ours_BB = ours_BD @ ours_text_BD.T * np.exp(log_scale) + bias
    assert np.ptp(scores_BB) > 1
    np.testing.assert_allclose(ours_BB, scores_BB, rtol=0, atol=TOLERANCE)


def test_an_export_is_the_folder_again(folder, tmp_path):
    """Every tensor but none other, bit for bit, and the same Config with the inputs' statistics."""
    path, tensors = folder
    export(f"hf:{path}", tmp_path / "back")
    written = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    a, b = hf.Folder(path), hf.Folder(tmp_path / "back")
    assert a.metadata == b.metadata
    assert (a.config.mean, a.config.std) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    assert (a.config.resample, a.config.max_positions, a.config.norm_eps) == ("bicubic", 7, 1e-5)
    processor = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert processor["image_processor_type"] == "SiglipImageProcessor"
    assert params_of(f"hf:{path}")["log_scale"] == tensors["logit_scale"]


@pytest.mark.parametrize(
    ("side", "changes", "named"),
    [
        ("vision_config", {"hidden_size": 40}, "hidden_size 40"),
        ("vision_config", {"layer_norm_eps": 1e-3}, "layer_norm_eps 0.001"),
        ("vision_config", {"patch_size": 2}, "patch_size 2"),
        ("vision_config", {"vision_use_head": False}, "vision_use_head false"),
        ("text_config", {"projection_size": 8}, "projection_size 8"),
        ("text_config", {"hidden_act": "quick_gelu"}, 'hidden_act "quick_gelu"'),
    ],
)
def test_what_our_towers_lack_is_refused_by_its_key(side, changes, named, tmp_path):
    keys = KEYS | {side: KEYS[side] | changes}
    with pytest.raises(UserError, match=f"has {named}, which zoo/siglip.py does not implement"):
        hf.siglip.config_from(keys, tmp_path / "config.json")


def test_absent_keys_mean_siglip_b16(tmp_path):
    config = hf.siglip.config_from({"architectures": ["SiglipModel"]}, tmp_path / "config.json")
    assert config == Config.b16()


def test_a_run_reads_captions_by_its_folder_s_tokenizer(folder, tmp_path):
    """Which starts and ends each text and pads it, and must not have more tokens than the model."""
    path, _ = folder
    copy = tmp_path / "with_tokenizer"
    shutil.copytree(path, copy)
    for name, content in metaspace().items():
        (copy / name).write_bytes(content)
    run = dataclasses.replace(Run(), restore_from=f"hf:{copy}", mesh="1", workdir="")
    with pytest.raises(
        UserError, match="the model has 37 tokens, and its tokenizer 459; use files"
    ):
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
