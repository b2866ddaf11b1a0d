"""data/whole_texts.py, labelled.py and similar.py: whole texts for encoders, with labels or in pairs."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from data import DataError, labelled, similar, whole_texts
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
        ({"text": "a", "label": float("nan")}, "line 41 has no label in the column 'label'; fill"),
        ({"text": "a", "label": "NaN"}, "line 41 has no label in the column 'label'; fill it, or"),
        ({"text": "a", "label": ""}, "line 41 has no label in the column 'label'; fill it, or"),
        ({"text": "a", "label": float("inf")}, "line 41 has inf in the column 'label'; a label is"),
        ({"text": "a", "label": -1}, "line 41 has the label -1 .* which stands for no label"),
        ({"text": "a", "label": -1.0}, "line 41 has the label -1 .* which stands for no label"),
        ({"text": "a", "label": "-1"}, "line 41 has the label -1 .* which stands for no label"),
        ({"text": "a", "label": "-1.0"}, "line 41 has the label -1 .* which stands for no label"),
        ({"text": "a", "label": "1.5"}, "line 41 has 1.5 in the column 'label'; a label is a name"),
        ({"text": "a", "label": "<NA>"}, "line 41 has no label in the column 'label'; fill it, or"),
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


def test_a_word_among_numbers_is_a_gap(tmp_path):
    for gap in ("NA", "None"):
        numbered = [*rows(["1", "0"]), {"text": "a", "label": gap}]
        with pytest.raises(
            DataError, match=f"line 41 has '{gap}' in the column 'label', where oth"
        ):
            labelled.load(write(tmp_path / "a.jsonl", numbered))
        named = labelled.load(write(tmp_path / "b.jsonl", rows(["joy", gap])))
        assert gap in named.config["labels"]
    decimals = labelled.load(write(tmp_path / "c.jsonl", rows(["1.0", "0.0"])))
    assert decimals.config["labels"] == ("0", "1")


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


def sentences(first: str, second: str, count=40):
    return [
        {first: f"text {i}", second: f"{i} text {i}", "label": i % 3, "idx": i}
        for i in range(count)
    ]


@pytest.mark.parametrize("columns", [labelled.TWO_TEXTS[0], *labelled.TWO_TEXTS[1:3], ("a", "b")])
def test_two_texts_of_a_row_have_the_tokenizer_s_tokens_and_types(columns, tmp_path):
    """As the library puts them around a pair."""
    first, second = columns
    tokenizer = bert_like()
    file = write(tmp_path / "a.jsonl", sentences(first, second))
    flags = {"text_column": "a", "pair_column": "b"} if first == "a" else {}
    data = labelled.load(file, seq_len=12, tokenizer=tokenizer, types=True, **flags)
    assert any(repr(first) in note and repr(second) in note for note in data.notes)
    assert any("not used: 1 ('idx')" in note for note in data.notes)
    batch = data.train.take(np.arange(len(data.train)))
    for row in range(len(data.train)):
        i = int(batch["tokens"][row, 2]) - 5
        pair = tokenizer._library.encode(f"text {i}", f"{i} text {i}")
        length = len(pair.ids)
        np.testing.assert_array_equal(batch["tokens"][row, :length], pair.ids)
        np.testing.assert_array_equal(batch["types"][row, :length], pair.type_ids)
        assert {*pair.type_ids} == {0, 1}
        assert batch["segment_ids"][row].sum() == length
        assert batch["label"][row] == i % 3
    assert data.filler.keys() == batch.keys()
    without = labelled.load(file, seq_len=12, tokenizer=tokenizer, **flags)
    assert "types" not in without.filler
    assert without.facts["fingerprint"] != data.facts["fingerprint"]


def test_one_text_of_two_is_no_pair(tmp_path):
    rows_of_two = sentences("premise", "hypothesis")
    file = write(tmp_path / "a.jsonl", rows_of_two)
    data = labelled.load(file, text_column="hypothesis", types=True)
    assert "types" not in data.filler
    assert any("not used: 2 ('idx', 'premise')" in note for note in data.notes)
    both = [row | {"sentence1": "a", "sentence2": "b"} for row in rows_of_two]
    with pytest.raises(DataError, match="no column 'text'; it has 'premise', 'hypothesis', 'sent"):
        labelled.load(write(tmp_path / "b.jsonl", both))


@pytest.mark.parametrize("length", range(5, 16))
def test_the_longer_of_two_texts_is_cut_like_the_library_does(length):
    tokenizer = bert_like()
    library = bert_like()._library
    library.enable_truncation(length, strategy="longest_first")
    texts = [("text " * a, "1 " * b) for a in range(1, 9) for b in range(1, 9)]
    cut = whole_texts.encode_pairs(*zip(*texts, strict=True), tokenizer, length, types=True)
    batch = cut.take(np.arange(len(texts)))
    for n, pair in enumerate(texts):
        one = library.encode(*pair)
        np.testing.assert_array_equal(batch["tokens"][n, : len(one.ids)], one.ids)
        np.testing.assert_array_equal(batch["types"][n, : len(one.ids)], one.type_ids)
        assert batch["segment_ids"][n].sum() == len(one.ids)
    assert cut.longest == 19
    with pytest.raises(DataError, match=r"--seq_len=4 has no room .* 3 control .* --seq_len=5"):
        whole_texts.encode_pairs(*zip(*texts, strict=True), tokenizer, 4, types=True)


def test_two_texts_in_bytes_are_divided(tmp_path):
    file = write(tmp_path / "a.jsonl", sentences("text", "text_pair"))
    batch = labelled.load(file, seq_len=32, types=True).train.take(np.array([0]))
    (begins,) = np.nonzero(batch["tokens"][0] == START)
    assert begins.tolist() == [0, begins[1]]
    np.testing.assert_array_equal(np.nonzero(np.diff(batch["types"][0]) == 1)[0], [begins[1] - 1])


def test_a_tokenizer_that_divides_no_texts_is_refused(tmp_path):
    from tests.support.small_tokenizers import byte_level

    file = write(tmp_path / "a.jsonl", sentences("text", "text_pair"))
    with pytest.raises(DataError, match="puts no token between two texts"):
        labelled.load(file, tokenizer=from_files(byte_level()))


def test_control_tokens_that_texts_spell_are_counted(tmp_path):
    spelled = [row | {"text": f"[CLS] {row['text']} [SEP]"} for row in rows(["yes", "no"])]
    data = labelled.load(write(tmp_path / "a.jsonl", spelled), tokenizer=bert_like())
    assert any("warning: 40 of 40 texts spell control tokens" in note for note in data.notes)
    few = [*rows(["yes", "no"]), *spelled[:4]]
    data = labelled.load(write(tmp_path / "a.jsonl", few), tokenizer=bert_like())
    assert not any("spell" in note for note in data.notes), "4 of 44 may be about tokens"


def test_negatives_are_a_third_text(tmp_path):
    triples = [
        {"anchor": f"text {i}", "positive": f"{i}", "negative": f"{i} {i}", "n": i}
        for i in range(30)
    ]
    data = similar.load(write(tmp_path / "a.jsonl", triples), seq_len=8, tokenizer=bert_like())
    batch = data.train.take(np.arange(len(data.train)))
    np.testing.assert_array_equal(batch["tokens"][:, 2], batch["negative_tokens"][:, 1])
    np.testing.assert_array_equal(batch["negative_segment_ids"].sum(axis=1), 4)
    assert data.filler.keys() == batch.keys()
    assert not data.filler["counted"]
    assert any("not used: 1 ('n')" in note for note in data.notes)
    others = [
        {"negative_2" if k == "negative" else k: v for k, v in row.items()} for row in triples
    ]
    with pytest.raises(
        DataError, match=r"negatives that the loss does not use: 1 \('negative_2'\)"
    ):
        similar.load(write(tmp_path / "b.jsonl", others))
    named = similar.load(write(tmp_path / "b.jsonl", others), negative_column="negative_2")
    assert "negative_tokens" in named.filler
    with pytest.raises(
        DataError, match=r"^--negative_column=other is in no row .* it has 'anchor'"
    ):
        similar.load(write(tmp_path / "c.jsonl", rows_of_pairs()), negative_column="other")
    with pytest.raises(DataError, match="line 1 has no column 'negative'"):
        similar.load(write(tmp_path / "d.jsonl", [*rows_of_pairs(), *triples]))


def rows_of_pairs():
    return [{"anchor": f"text {i}", "positive": f"{i}"} for i in range(30)]


def test_the_default_texts_need_no_network():
    data, pairs = labelled.load(), similar.load()
    assert data.config == {"labels": ("code", "comment", "docstring")}
    counts = np.bincount(data.train.label_N)
    assert counts.min() > 500
    assert counts.max() < 1.1 * counts.min()
    assert len(pairs.train) > 500
    with pytest.raises(DataError, match="has no column 'q'"):
        similar.load(anchor_column="q")
