"""data/whole_texts.py, labelled.py and similar.py: whole texts for encoders, with labels or in pairs."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from data import DataError, labelled, similar
from data.batches import held_out_batches, train_batches
from data.tokenizer import START, from_files
from tests.support.small_tokenizers import files

pytestmark = pytest.mark.promise("batches")


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(labels, count=40):
    return [{"text": f"text {i}", "label": labels[i % len(labels)]} for i in range(count)]


def bert_like():
    """A tokenizer of words with [CLS] in front of a text and [SEP] behind it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "text", *map(str, range(40))]
    made = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return from_files(files(json.loads(made.to_str()), {}, {}))


def test_a_row_is_a_whole_text_with_its_label_and_control_tokens(tmp_path):
    file = write(tmp_path / "a.jsonl", rows(["yes", "no"]))
    data = labelled.load(file, seq_len=6, tokenizer=bert_like())
    assert data.config == {"labels": ("no", "yes")}
    assert len(data.train) + len(data.held_out) == 40
    assert len(data.held_out) == 2, "a twentieth of the texts"
    seen = set()
    for source in (data.train, data.held_out):
        batch = source.take(np.arange(len(source)))
        for tokens, segments, label in zip(*batch.values(), strict=True):
            np.testing.assert_array_equal(tokens[[0, 1, 3]], [2, 4, 3])
            np.testing.assert_array_equal(tokens[4:], 0)
            np.testing.assert_array_equal(segments, [1, 1, 1, 1, 0, 0])
            number = tokens[2] - 5
            assert ("no", "yes")[label] == ["yes", "no"][number % 2]
            seen.add(int(number))
    assert seen == {*range(40)}


def test_long_texts_are_cut_before_the_last_control_token(tmp_path):
    file = write(tmp_path / "a.jsonl", rows(["yes", "no"]))
    data = labelled.load(file, seq_len=3, tokenizer=bert_like())
    np.testing.assert_array_equal(data.train.take(np.array([0]))["tokens"], [[2, 4, 3]])
    assert "are cut at --seq_len=3; --seq_len=4 keeps all." in data.notes[1]
    with pytest.raises(DataError, match="--seq_len=2 has no room for a text between the 2 control"):
        labelled.load(file, seq_len=2, tokenizer=bert_like())


@pytest.mark.parametrize(
    ("found", "given", "names"),
    [
        (["b", "a"], (), ("a", "b")),
        ([10, 9, 1.0], (), ("1", "9", "10")),
        ([True, False], (), ("False", "True")),
        ([1, 0], ("NEGATIVE", "POSITIVE"), ("NEGATIVE", "POSITIVE")),
        (["a", "c"], ("c", "b", "a"), ("c", "b", "a")),
        (["a", "d"], ("c", "b", "a"), ("a", "d")),
    ],
)
def test_classes_are_the_model_s_where_it_has_them_or_labels_in_order(
    found, given, names, tmp_path
):
    data = labelled.load(write(tmp_path / "a.jsonl", rows(found)), labels=given)
    assert data.config["labels"] == names
    taken = data.train.take(np.arange(len(data.train)))
    text = [bytes(x[(x > 0) & (x < START)].tolist()).decode() for x in taken["tokens"]]
    for one, label in zip(text, taken["label"], strict=True):
        wanted = found[int(one.split()[1]) % len(found)]
        assert names[label] == str(wanted) or wanted == label or int(names[label]) == wanted


def test_mistakes_in_labelled_texts_name_the_row(tmp_path):
    good = rows(["yes", "no"])
    for row, wrong in [
        (
            {"text": "a", "class": "x"},
            r"line 41 has no column 'label'; it has 'text', 'class': set",
        ),
        ({"text": "a", "label": None}, "line 41 has null in the column 'label'; fill it"),
        ({"text": "a", "label": 0.5}, "line 41 has 0.5 in the column 'label'; a label is a name"),
        ({"text": "a", "label": []}, r"line 41 has \[\] in the column 'label'; a label is"),
        ({"text": " ", "label": "no"}, "line 41 has an empty text in the column 'text'"),
        ({"text": 3, "label": "no"}, "line 41 has int in the column 'text'; write a text"),
        ({"label": "no"}, "line 41 has no column 'text'; it has 'label': set --text_column"),
    ]:
        with pytest.raises(DataError, match=wrong):
            labelled.load(write(tmp_path / "a.jsonl", [*good, row]))
    file = write(tmp_path / "a.jsonl", good)
    other = write(tmp_path / "b.jsonl", [{"text": "a", "label": "maybe"}])
    with pytest.raises(DataError, match=r"b.jsonl line 1 has the label 'maybe', which no training"):
        labelled.load(file, eval_dataset=other)
    with pytest.raises(DataError, match="has a single class, 'yes'; add texts of another one"):
        labelled.load(write(tmp_path / "c.jsonl", rows(["yes"])))
    with pytest.raises(DataError, match="line 1 has no column 'body'; it has 'text', 'label': set"):
        labelled.load(file, text_column="body")
    with pytest.raises(DataError, match="has 1 different texts, and one is held out"):
        labelled.load(write(tmp_path / "d.jsonl", good[:1]))


def test_pairs_have_both_texts_in_one_row(tmp_path):
    pairs = [{"q": f"text {i}", "a": f"{i} text {i}"} for i in range(30)]
    file = write(tmp_path / "a.jsonl", pairs)
    data = similar.load(file, "q", "a", seq_len=8, tokenizer=bert_like())
    batch = next(iter(train_batches(data, 8, seed=0)))
    assert batch["counted"].all()
    np.testing.assert_array_equal(batch["tokens"][:, 2], batch["other_tokens"][:, 1])
    np.testing.assert_array_equal(batch["tokens"][:, 2], batch["other_tokens"][:, 3])
    np.testing.assert_array_equal(batch["other_segment_ids"].sum(axis=1), 5)
    (last,) = held_out_batches(data, 4)
    assert last["counted"].tolist() == [True, False, False, False]
    with pytest.raises(DataError, match="line 1 has no column 'positive'; it has 'q', 'a': set"):
        similar.load(file, "q")
    with pytest.raises(DataError, match="has no column 'x'; it has 'q', 'a': set --anchor_column"):
        similar.load(file, "x", "a")


def test_the_default_texts_need_no_network():
    data, pairs = labelled.load(), similar.load()
    assert data.config == {"labels": ("code", "comment", "docstring")}
    counts = np.bincount(data.train.label_N)
    assert counts.min() > 500
    assert counts.max() < 1.1 * counts.min()
    assert len(pairs.train) > 500
