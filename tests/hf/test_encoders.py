"""Text encoders without a head or with a classifier, and folders of sentence-transformers."""

import dataclasses
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
from recipes.common.hf.folder import shapes_of
from recipes.common.language.recipe import model_config
from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding import paths
from recipes.common.tasks.text_encoders import sentences_of
from tests.conftest import full_except
from tests.support import folder_keys
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
        ("xlmr_pooler", "AutoModel"),
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


def change(folder, file="config.json", **keys):
    """Changes keys of a JSON file; ... removes one."""
    path = folder / file
    both = (json.loads(path.read_text()) if path.exists() else {}) | keys
    path.write_text(json.dumps({key: value for key, value in both.items() if value is not ...}))


@pytest.mark.parametrize("name", ["bert_mean", "modernbert_mean"])
def test_a_head_that_the_weights_lack_is_no_head(name, tmp_path, capsys):
    """Many embedding folders have the config.json of the model that they were made from."""
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    wanted = hf.Folder(folder).config
    change(folder, architectures=[CASES[name].name.replace("Model", "ForMaskedLM")])
    assert hf.Folder(folder).config == wanted
    assert f"Read as {CASES[name].name}" in capsys.readouterr().out
    (folder / "modules.json").unlink()
    with pytest.raises(UserError, match=rf'set architectures to \["{CASES[name].name}"\]'):
        hf.Folder(folder)


def test_an_export_keeps_what_sentence_transformers_reads(tmp_path, capsys):
    folder, back = tmp_path / "st", tmp_path / "back"
    folder_keys.sentence_transformer(folder)
    settings = {"default_prompt_name": "query", "similarity_fn_name": "dot", "truncate_dim": 7}
    change(folder, "config_sentence_transformers.json", **settings)
    change(folder, "sentence_bert_config.json", do_lower_case=True)
    recipes.hf.export(recipes.hf.Export(source=f"hf:{folder}", target=str(back)))
    assert f'  SentenceTransformer("{back}")' in capsys.readouterr().out
    theirs, ours = hf.Folder(folder), hf.Folder(back)
    assert ours.metadata["sentences"] == theirs.metadata["sentences"]
    assert ours.metadata["sentences"]["max_seq_length"] == 40
    assert ours.metadata["sentences"]["prompts"] == {"query": "ask "}
    (lower,), (upper,) = (folder.tokenizer().encode(["abc"]) for folder in (theirs, ours))
    np.testing.assert_array_equal(ours.tokenizer().encode(["ABC"])[0], lower)
    np.testing.assert_array_equal(upper, lower)


def test_a_run_keeps_the_length_and_prompts_of_its_folder(tmp_path):
    folder_keys.sentence_transformer(folder := tmp_path / "st")
    source = checkpoint.find(f"hf:{folder}")
    assert sentences_of(source).max_seq_length == 40
    change(folder, "sentence_bert_config.json", max_seq_length=...)
    assert sentences_of(checkpoint.find(f"hf:{folder}")).max_seq_length == 48
    change(folder, "tokenizer_config.json", model_max_length=...)
    assert sentences_of(checkpoint.find(f"hf:{folder}")).max_seq_length == 64
    change(folder, "sentence_bert_config.json", max_seq_length=4_096)  # more than it has positions
    assert sentences_of(checkpoint.find(f"hf:{folder}")).max_seq_length == 64


def test_modernbert_with_a_rotary_scaling_is_exported(tmp_path):
    folder = shutil.copytree(GOLDEN / "modernbert", tmp_path / "scaled")
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    change(folder, rope_parameters={"full_attention": linear, "sliding_attention": plain})
    export(f"hf:{folder}", tmp_path / "back")
    theirs, back = hf.Folder(folder).config, hf.Folder(tmp_path / "back").config
    assert theirs == back
    assert [kind.rope_scaling is None for kind in back.layer_kinds[:2]] == [False, True]
    keys = json.loads((tmp_path / "back" / "config.json").read_text())
    assert keys["rope_parameters"] == {"full_attention": linear, "sliding_attention": plain}


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("modernbert", {"num_hidden_layers": 1, "layer_types": ...}, "num_layers=1 must be ≥ 2"),
        (
            "modernbert",
            {"global_rope_theta": 0.5, "rope_parameters": ...},
            "rope_theta=0.5 must be a finite number > 1",
        ),
        ("bert_classes", {"id2label": {"0": "relevant"}}, "is a regression"),
        ("bert_classes", {"id2label": ..., "num_labels": 1}, "is a regression"),
        ("vit", {"id2label": {"0": "age"}}, "is a regression"),
        (
            "vit",
            {"problem_type": "multi_label_classification"},
            "which zoo/vit.py does not implement",
        ),
    ],
)
def test_what_a_config_can_not_be_is_one_line(name, keys, said, tmp_path):
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    change(folder, **keys)
    with pytest.raises(UserError, match=said) as caught:
        hf.Folder(folder)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- adapters ------------------------------------------------------------------------------------


def adapter(folder, base, architecture, **extra):
    """Writes a random adapter of a golden folder, with whole weights along; returns its config."""
    config = dataclasses.replace(hf.Folder(GOLDEN / base).config, lora_rank=2, lora_alpha=4.0)
    shapes, random = paths(shapes_of("bert", config)["params"]), np.random.default_rng(0)
    factors = {
        path: random.normal(size=leaf.shape).astype(np.float32) for path, leaf in shapes.items()
    }
    hf.write_adapter(
        folder, "bert", config, str(GOLDEN / base), factors.get, None, "", architecture
    )
    file = folder / "adapter_model.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | extra, file)
    return json.loads((folder / "adapter_config.json").read_text())


def test_an_adapter_of_an_encoder_names_no_task(tmp_path):
    """PEFT's class for CAUSAL_LM refuses a model that does not generate; its plain one takes all."""
    assert adapter(tmp_path / "a", "bert", "BertForMaskedLM")["task_type"] is None
    assert adapter(tmp_path / "b", "bert_mean", "BertModel")["task_type"] is None


def test_tables_that_peft_saves_along_are_the_base_s_or_refused(tmp_path):
    """save_pretrained(…, save_embedding_layers=True), which PEFT chooses by itself for new tokens."""
    tensors = safetensors.numpy.load_file(GOLDEN / "bert" / "model.safetensors")
    table = tensors["bert.embeddings.word_embeddings.weight"].astype(np.float32)
    name = "base_model.model.bert.embeddings.word_embeddings.weight"
    tied = "base_model.model.cls.predictions.decoder.weight"
    adapter(tmp_path / "same", "bert", "BertForMaskedLM", **{name: table, tied: table})
    adapter(tmp_path / "plain", "bert", "BertForMaskedLM")
    base = f"hf:{GOLDEN / 'bert'}"
    same, plain = (
        checkpoint.find(f"hf:{tmp_path / x}", base=base).shapes() for x in ("same", "plain")
    )
    assert jax.tree.structure(same) == jax.tree.structure(plain)
    adapter(
        tmp_path / "other",
        "bert",
        "BertForMaskedLM",
        **{name: table + np.eye(*table.shape, dtype=np.float32)},
    )
    adapter(
        tmp_path / "longer", "bert", "BertForMaskedLM", **{tied: np.concatenate([table, table])}
    )
    for folder in ("other", "longer"):
        with pytest.raises(UserError, match=r"has its own .*, which differs from its base's"):
            checkpoint.find(f"hf:{tmp_path / folder}", base=base)
