"""recipes.embed: a vector for each text, whatever the mesh, the batch and the kind of file."""

import json

import jax
import numpy as np
import pyarrow.parquet
import pytest

from data.tokenizer import START
from recipes.common.tasks.text_encoders import for_task
from tests.support.encoders import SMALL, written
from tests.support.quick import quick as quick

pytestmark = pytest.mark.promise("evaluation")

TEXTS = [f"text {i:02d} {'x' * (i % 3) * 5}" for i in range(13)]


def definition(model) -> np.ndarray:
    """Vectors of texts one by one, without padding."""
    vectors, encode = [], jax.jit(model.encode)
    for text in TEXTS:
        x_TD = np.asarray(encode(np.array([[START, *text.encode()]])))[0]
        vectors.append(x_TD.mean(axis=0))
    vectors = np.stack(vectors)
    scale = np.linalg.norm(vectors, axis=1, keepdims=True) if model.config.normalize else 1
    return vectors / scale


def test_vectors_are_those_of_texts_one_by_one_and_in_their_order(inside, quick, tmp_path):
    wanted = definition(written(tmp_path / "m", for_task(SMALL, "embed")))
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


@pytest.mark.full
def test_a_parquet_file_has_the_texts_too_and_a_model_for_masks_gives_means(
    inside, quick, tmp_path
):
    wanted = definition(written(tmp_path / "m"))
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
    written(tmp_path / "m", for_task(SMALL, "embed"))
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
