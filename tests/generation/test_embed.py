"""recipes.embed: a vector for each text, whatever the mesh, the batch and the kind of file."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet
import pytest
from flax import nnx

from data.tokenizer import BYTES, START
from recipes.common import checkpoint
from recipes.common.encoders import for_task
from recipes.common.mesh import make_mesh
from recipes.common.sharding import make_layout
from recipes.common.sharding.abstract import variables_of
from tests.support.quick import quick as quick
from zoo.bert import Bert, Config

pytestmark = pytest.mark.promise("evaluation")

SMALL = dataclasses.replace(Config.tiny(), num_layers=1, mlp=64)
TEXTS = [f"text {i:02d} {'x' * (i % 3) * 5}" for i in range(13)]


def written(folder, task):
    """Writes a random encoder; returns the model."""
    config = for_task(SMALL, task)
    model = Bert(config, rngs=nnx.Rngs(7))
    layout = make_layout(Bert, config, make_mesh("1"))
    facts = checkpoint.metadata("bert", layout, {}) | {"step": 0, "context": 128}
    facts["tokenizer"] = BYTES.sha256
    checkpoint.write(folder, variables_of(model), facts, tokenizer=BYTES)
    return model


def definition(model) -> np.ndarray:
    """Vectors of texts one by one, without padding."""
    vectors = []
    for text in TEXTS:
        x_TD = np.asarray(model.encode(np.array([[START, *text.encode()]])))[0]
        vectors.append(x_TD.mean(axis=0))
    vectors = np.stack(vectors)
    scale = np.linalg.norm(vectors, axis=1, keepdims=True) if model.config.normalize else 1
    return vectors / scale


def test_vectors_are_those_of_texts_one_by_one_and_in_their_order(inside, quick, tmp_path):
    wanted = definition(written(tmp_path / "m", "embed"))
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    out = tmp_path / "v.npy"
    flags = (f"--restore_from={tmp_path / 'm'}", "--mesh=4x2", "--batch_size=6", f"--out={out}")
    done = inside("recipes.embed", *flags, f"--dataset={tmp_path / 'a.txt'}")
    assert done.code == 0, done.err
    assert "13 vectors of 64 numbers (mean, of length 1) in " in done.out
    found = np.load(out)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    again = inside("recipes.embed", *flags, f"--dataset={tmp_path / 'a.txt'}")
    assert (again.code, again.err) == (
        2,
        f"error: --out={out} already exists; use a new name\n",
    )


def test_a_parquet_file_has_the_texts_too_and_a_model_for_masks_gives_means(
    inside, quick, tmp_path
):
    wanted = definition(written(tmp_path / "m", "fill"))
    rows = [json.dumps({"body": text, "n": 1}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    done = inside(
        "recipes.embed", f"--restore_from={tmp_path / 'm'}", "--mesh=1", "--text_column=body",
        f"--dataset={tmp_path / 'a.jsonl'}", f"--out={tmp_path / 'v.parquet'}",
    )  # fmt: skip
    assert done.code == 0, done.err
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet")
    assert table["text"].to_pylist() == TEXTS
    np.testing.assert_allclose(np.array(table["vector"].to_pylist()), wanted, atol=2e-6)


def test_mistakes_are_one_line(inside, tmp_path):
    written(tmp_path / "m", "embed")
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    model, data = f"--restore_from={tmp_path / 'm'}", f"--dataset={tmp_path / 'a.txt'}"
    out = f"--out={tmp_path / 'v.npy'}"
    for flags, said in [
        ((model, data), "--out is missing; use --out=…"),
        (
            (model, data, f"--out={tmp_path / 'v.csv'}"),
            "is of no kind that is written; use .npy or",
        ),
        ((model, data, out), "a.txt line 2 has an empty text in the column 'text'; write a text"),
        ((model, out, f"--dataset={tmp_path / 'no.txt'}"), "no.txt does not exist; use a file"),
        (
            ("--restore_from=transformer.stdlib_3m", data, out),
            "is a 'transformer' model, which makes",
        ),
    ]:
        done = inside("recipes.embed", *flags)
        assert done.code == 2
        assert done.err.startswith("error: ")
        assert said in done.err
        assert done.err.count("\n") == 1
    assert not (tmp_path / "v.npy").exists()
