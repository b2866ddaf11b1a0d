"""recipes.evaluate of text encoders: pseudo-perplexity, and accuracy by classes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from data.masked import MASK
from data.tokenizer import START
from recipes.common.tasks.text_encoders import for_task
from tests.support.encoders import SMALL, written
from tests.support.quick import quick as quick

pytestmark = pytest.mark.promise("evaluation")


def evaluated(inside, folder, *flags):
    done = inside(
        "recipes.evaluate", f"--restore_from={folder / 'm'}", f"--out={folder / 'out.json'}", *flags
    )
    assert done.code == 0, done.err
    return done.out, json.loads((folder / "out.json").read_text())["datasets"]


def test_a_pseudo_perplexity_masks_each_token_alone(inside, quick, tmp_path):
    model, text = written(tmp_path / "m"), b"Each byte, once."
    file = tmp_path / "a.txt"
    file.write_bytes(text)
    flags = ("--mesh=4x2", "--seq_len=24", "--batch_size=8", f"--dataset={file}")
    out, found = evaluated(inside, tmp_path, *flags)
    tokens_T = np.array([START, *text], np.int32)
    tokens_BT = np.where(np.eye(len(tokens_T), dtype=bool), MASK, tokens_T)[1:]
    log_probs_BTV = np.asarray(jax.nn.log_softmax(jax.jit(model)(tokens_BT), axis=-1))
    n = np.arange(len(text))
    nats = -log_probs_BTV[n, n + 1, tokens_T[1:]]
    right = (log_probs_BTV[n, n + 1].argmax(axis=-1) == tokens_T[1:]).mean()
    facts = found[str(file)]
    assert facts["loss"] == pytest.approx(nats.mean(), rel=2e-6)
    assert facts["pseudo_perplexity"] == pytest.approx(np.exp(nats.mean()), rel=1e-5)
    assert facts["accuracy"] == pytest.approx(right)
    assert f"pseudo-perplexity {facts['pseudo_perplexity']:.2f}, loss" in out
    assert f"over {len(text)} tokens; all" in out


@pytest.mark.full
def test_a_classifier_s_accuracy_is_counted_by_classes(inside, quick, tmp_path):
    config = dataclasses.replace(for_task(SMALL, "classify"), labels=("no", "yes", "maybe"))
    model = written(tmp_path / "m", config)
    rows = [{"text": f"text {i:02d}", "label": ("yes", "no")[i % 2]} for i in range(13)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--mesh=4x2", "--seq_len=16", "--batch_size=8", f"--dataset={file}")
    out, found = evaluated(inside, tmp_path, *flags)
    tokens_BT = np.array([[START, *row["text"].encode()] for row in rows], np.int32)
    guess_B = np.asarray(jax.jit(model.classify)(tokens_BT)).argmax(axis=1)
    counts = np.zeros((3, 3))
    np.add.at(counts, (np.array([1, 0])[np.arange(13) % 2], guess_B), 1)
    facts = found[str(file)]
    assert facts["confusion"] == counts.tolist()
    assert facts["labels"] == ["no", "yes", "maybe"]
    assert facts["accuracy"] == pytest.approx(np.trace(counts) / 13)
    assert f"{np.trace(counts) / 13:.2%} right, loss " in out
    file.write_text("".join(json.dumps(row | {"label": "x"}) + "\n" for row in rows))
    done = inside("recipes.evaluate", f"--restore_from={tmp_path / 'm'}", *flags)
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_what_an_encoder_can_t_do_is_one_line(inside, tmp_path):
    written(tmp_path / "m", for_task(SMALL, "embed"))
    done = inside("recipes.evaluate", f"--restore_from={tmp_path / 'm'}", "--dataset=LICENSE")
    assert done.code == 2
    assert done.err == (
        f"error: --restore_from={tmp_path / 'm'} makes vectors of texts; python -m recipes.embed writes "
        "them\n"
    )
