"""Text encoders without a head or with a classifier, and folders of sentence-transformers."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from data.tokenizer import BYTES
from recipes.bert import NEW
from recipes.common import checkpoint, hf
from recipes.common.language.recipe import model_config
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding import paths
from zoo.bert import Bert, Config

pytestmark = pytest.mark.promise("hugging-face")

SIZES = dict(vocab_size=67, embed=24, num_layers=2, num_heads=6, mlp=40, max_positions=40)
TOKENS_BT = np.random.default_rng(0).integers(2, 67, (4, 9))
SEGMENTS_BT = np.array([[1] * 6 + [0] * 3] + [[1] * 9] * 3)  # a shorter text with padding


def write(folder, architecture="", **options):
    """Writes a random model; returns (model, the tensors in its folder)."""
    model = Bert(Config(**SIZES, **options), rngs=nnx.Rngs(0))
    arrays = paths(nnx.to_pure_dict(nnx.state(model)))
    arrays = {path: np.asarray(array) for path, array in arrays.items()}
    hf.write(folder, "bert", model.config, 40, arrays.get, architecture=architecture)
    return model, safetensors.numpy.load_file(folder / "model.safetensors")


def restored(folder, mesh="2x2"):
    return checkpoint.restore(f"hf:{folder}", make_mesh(mesh))[0]


def test_a_sentence_transformer_keeps_its_pooling_and_normalization(tmp_path):
    model, tensors = write(tmp_path / "st", task="embed", pooling="mean", normalize=True)
    assert "embeddings.word_embeddings.weight" in tensors
    modules = json.loads((tmp_path / "st" / "modules.json").read_text())
    assert [m["type"].split(".")[-1] for m in modules] == ["Transformer", "Pooling", "Normalize"]
    again = hf.open_folder(tmp_path / "st")
    assert again.config == model.config
    x_TD = np.asarray(model.encode(TOKENS_BT[:1, :6]))[0]  # the text without its padding
    wanted_D = x_TD.mean(axis=0) / np.linalg.norm(x_TD.mean(axis=0))
    found_BD = np.asarray(model.pool(TOKENS_BT, SEGMENTS_BT))
    np.testing.assert_allclose(found_BD[0], wanted_D, atol=2e-6)
    sharded_BD = np.asarray(restored(tmp_path / "st").pool(TOKENS_BT, SEGMENTS_BT))
    np.testing.assert_allclose(sharded_BD, found_BD, atol=2e-6)


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
def test_a_classifier_has_their_names_and_definition(tmp_path, name):
    names = {"labels": ("no", "yes", "maybe"), "pooling": "pooler"}
    architecture = f"{name}ForSequenceClassification"
    model, tensors = write(tmp_path / "c", architecture, task="classify", **names)
    assert json.loads((tmp_path / "c" / "config.json").read_text())["id2label"]["2"] == "maybe"
    pooler, out = "bert.pooler.dense", "classifier"
    if name == "Roberta":
        pooler, out = "classifier.dense", "classifier.out_proj"
    x_BD = np.asarray(model.encode(TOKENS_BT))[:, 0]
    x_BD = np.tanh(x_BD @ tensors[f"{pooler}.weight"].T + tensors[f"{pooler}.bias"])
    wanted_BK = x_BD @ tensors[f"{out}.weight"].T + tensors[f"{out}.bias"]
    found_BK = np.asarray(restored(tmp_path / "c").classify(TOKENS_BT))
    np.testing.assert_allclose(found_BK, wanted_BK, atol=2e-6)


def test_a_model_without_a_head_for_masks_is_not_trained_to_fill_them(tmp_path):
    write(tmp_path / "st", task="embed", pooling="cls")
    source = checkpoint.find(f"hf:{tmp_path / 'st'}")
    flags = NEW[2]
    with pytest.raises(UserError, match="has no head that fills masks in"):
        model_config("bert", flags, source, BYTES, jax.devices()[0])


def test_other_modules_are_refused(tmp_path):
    write(tmp_path / "st", task="embed", pooling="cls")
    file = tmp_path / "st" / "modules.json"
    file.write_text(file.read_text().replace("models.Pooling", "models.Dense"))
    with pytest.raises(UserError, match="has the modules Transformer, Dense, which"):
        hf.open_folder(tmp_path / "st")
