"""Text encoders without a head or with a classifier, and folders of sentence-transformers."""

import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import recipes.hf
from data.tokenizer import BYTES
from recipes.bert import NEW
from recipes.common import checkpoint, hf
from recipes.common.language.recipe import model_config
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding import paths
from tests.conftest import full_except
from tests.support.encoder_cases import CASES, GOLDENS, MESHES, OUTPUTS, largest_error, ours
from tests.support.golden_folders import GOLDEN
from tests.support.hf_families import TOLERANCE
from tests.support.hf_models import export
from tests.support.models import built
from tests.support.quick import quick as quick
from zoo.bert import Bert, Config

pytestmark = pytest.mark.promise("hugging-face")

SIZES = dict(vocab_size=67, embed=24, num_layers=2, num_heads=6, mlp=40, max_positions=40)
TOKENS_BT = np.random.default_rng(0).integers(2, 67, (4, 9))
SEGMENTS_BT = np.array([[1] * 6 + [0] * 3] + [[1] * 9] * 3)  # a shorter text with padding


def write(folder, architecture="", **options):
    """Writes a random model; returns (model, the tensors in its folder)."""
    model = built(Bert, Config(**SIZES, **options))
    arrays = paths(nnx.to_pure_dict(nnx.state(model)))
    arrays = {path: np.asarray(array) for path, array in arrays.items()}
    hf.write(folder, "bert", model.config, 40, arrays.get, architecture=architecture)
    return model, safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", full_except(GOLDENS, ("bert_mean", "modernbert_classes")))
def test_representations_vectors_and_classes_match_transformers(name, strict, quick):
    with np.load(GOLDEN / name / OUTPUTS) as file:
        wanted = dict(file)
    assert {*wanted} == {"hidden", "logits" if "classes" in name else "vector"}
    assert all(np.abs(array).max() > 0.3 for array in wanted.values())
    mesh = MESHES[GOLDENS.index(name) % 3]  # tests.by_hand.encoder_parity has all three
    assert largest_error(ours(f"hf:{GOLDEN / name}", mesh), wanted) < TOLERANCE


@pytest.mark.parametrize("name", GOLDENS)
def test_an_export_has_the_same_tensors_and_modules(name, tmp_path):
    export(f"hf:{GOLDEN / name}", tmp_path / name)
    theirs, back = (hf.Folder(folder / name) for folder in (GOLDEN, tmp_path))
    assert back.config == theirs.config
    keys = json.loads((tmp_path / name / "config.json").read_text())
    assert keys["architectures"] == [CASES[name].name]
    stored, written = (
        safetensors.numpy.load_file(folder.path / "model.safetensors") for folder in (theirs, back)
    )
    unused = {x for x in stored if "pooler" in x and CASES[name].modules}
    assert written.keys() == stored.keys() - unused
    for tensor, array in written.items():
        # Two rows in front of RoBERTa's positions are for padding; ours are zeros.
        first = 2 if "oberta" in CASES[name].name and "position_embeddings" in tensor else 0
        wanted = stored[tensor].astype(np.float32)[first:]
        np.testing.assert_array_equal(array[first:], wanted, err_msg=tensor)


def restored(folder, mesh="2x2"):
    return checkpoint.restore(f"hf:{folder}", make_mesh(mesh))[0]


@pytest.mark.full
def test_a_sentence_transformer_keeps_its_pooling_and_normalization(tmp_path):
    model, tensors = write(tmp_path / "st", task="embed", pooling="mean", normalize=True)
    assert "embeddings.word_embeddings.weight" in tensors
    modules = json.loads((tmp_path / "st" / "modules.json").read_text())
    assert [m["type"].split(".")[-1] for m in modules] == ["Transformer", "Pooling", "Normalize"]
    again = hf.open_folder(tmp_path / "st")
    assert again.config == model.config
    x_TD = np.asarray(jax.jit(model.encode)(TOKENS_BT[:1, :6]))[0]  # the text without its padding
    wanted_D = x_TD.mean(axis=0) / np.linalg.norm(x_TD.mean(axis=0))
    found_BD = np.asarray(jax.jit(model.pool)(TOKENS_BT, SEGMENTS_BT))
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
    x_BD = np.asarray(jax.jit(model.encode)(TOKENS_BT))[:, 0]
    x_BD = np.tanh(x_BD @ tensors[f"{pooler}.weight"].T + tensors[f"{pooler}.bias"])
    wanted_BK = x_BD @ tensors[f"{out}.weight"].T + tensors[f"{out}.bias"]
    found_BK = np.asarray(restored(tmp_path / "c").classify(TOKENS_BT))
    np.testing.assert_allclose(found_BK, wanted_BK, atol=2e-6)


def test_distilbert_has_their_names_and_no_classifier(tmp_path):
    """Vectors are a golden's; tests.by_hand.hf_parity has its logits of masked tokens."""
    model, tensors = write(tmp_path / "d", "DistilBertForMaskedLM", token_types=0)
    assert {x for x in tensors if not x.startswith("distilbert.transformer.layer.")} == {
        *(f"vocab_{x}.{y}" for x in ("transform", "layer_norm") for y in ("weight", "bias")),
        *(f"distilbert.embeddings.{x}_embeddings.weight" for x in ("word", "position")),
        *(f"distilbert.embeddings.LayerNorm.{x}" for x in ("weight", "bias")),
        "vocab_projector.bias",
    }
    assert hf.Folder(tmp_path / "d").config == model.config
    file = tmp_path / "d" / "config.json"
    keys = json.loads(file.read_text())
    assert (keys["n_layers"], keys["n_heads"], keys["dim"], keys["hidden_dim"]) == (2, 6, 24, 40)
    file.write_text(json.dumps(keys | {"n_heads": 5}))
    with pytest.raises(UserError, match="n_heads"):
        hf.Folder(tmp_path / "d")
    file.write_text(json.dumps(keys | {"architectures": ["DistilBertForSequenceClassification"]}))
    with pytest.raises(UserError, match="the nearest is DistilBert"):
        hf.Folder(tmp_path / "d")


@pytest.mark.parametrize(("name", "positions"), [("bert_mean", 64), ("modernbert_mean", 64)])
def test_a_model_without_learned_positions_has_the_context_of_its_folder(name, positions):
    assert checkpoint.context(hf.Folder(GOLDEN / name)) == positions


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


@pytest.mark.parametrize(
    ("name", "loader"),
    [
        ("bert", "AutoModelForMaskedLM"),
        ("xlmr_classes", "AutoModelForSequenceClassification"),
        ("bert_mean", "AutoModel"),
    ],
)
def test_an_export_says_which_class_loads_it(name, loader, tmp_path, capsys):
    target = tmp_path / "exported"
    recipes.hf.export(recipes.hf.Export(source=f"hf:{GOLDEN / name}", target=str(target)))
    assert f'  {loader}.from_pretrained("{target}")' in capsys.readouterr().out


def test_modules_beside_a_model_with_a_head_are_left_out_with_a_line(tmp_path, capsys):
    for name in ("bert", "bert_classes", "modernbert", "bert_mean"):
        folder = shutil.copytree(GOLDEN / name, tmp_path / name)
        shutil.copy(GOLDEN / "bert_mean" / "modules.json", folder)
        config = hf.Folder(folder).config
        said = capsys.readouterr().out
        assert ("Left out modules.json, which makes vectors" in said) == (config.task != "embed")
