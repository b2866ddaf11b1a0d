"""data/text.py: exact order, exact content, on any number of processes."""

import json
import pathlib

import grain
import numpy as np
import pytest

from data import DataError, text


@pytest.fixture(scope="module")
def corpus():
    return text.corpus("stdlib")


def batches(corpus, count=4, **options):
    settings = dict(seq_len=64, batch_size=8, seed=3) | options
    feed = iter(text.train_batches(corpus, **settings))
    return [next(feed) for _ in range(count)]


def test_batch_k_is_a_function_of_seed_and_k(corpus):
    whole = batches(corpus, 6)
    for first in range(4):
        for got, want in zip(batches(corpus, 2, first=first), whole[first:], strict=False):
            np.testing.assert_array_equal(got, want)
    assert (batches(corpus, 1, seed=4)[0] != whole[0]).any()


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_processes_together_see_the_same_batches_in_the_same_order(corpus, shards):
    want = batches(corpus, 3)
    parts = [
        batches(corpus, 3, shard=grain.sharding.ShardOptions(i, shards)) for i in range(shards)
    ]
    for k in range(3):
        np.testing.assert_array_equal(np.concatenate([part[k] for part in parts]), want[k])


def test_each_process_reads_only_its_rows(corpus, monkeypatch):
    read = []
    original = text._Windows.__getitem__
    monkeypatch.setattr(text._Windows, "__getitem__", lambda s, i: read.append(i) or original(s, i))
    dataset = text.train_batches(corpus, 64, 8, 3, shard=grain.sharding.ShardOptions(1, 4))
    feed = iter(dataset)
    next(feed)
    # Grain reads ahead by 16 batches at most; two rows of each.
    assert 2 <= len(read) <= 2 * 18


def test_default_shard_is_this_process(corpus):
    assert grain.sharding.ShardByJaxProcess().shard_count == 1
    assert batches(corpus, 1)[0].shape == (8, 65)


def test_an_epoch_has_every_window_once_and_the_next_another_order(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(2000)))
    corpus = text.corpus(str(tmp_path / "a.txt"))
    windows = (len(corpus.train) - 1) // 16
    feed = iter(text.train_batches(corpus, 16, 1, 0))
    epochs = [[next(feed)[0].tobytes() for _ in range(windows)] for _ in range(2)]
    tokens = np.asarray(corpus.train, np.int32)
    want = sorted(tokens[i * 16 : i * 16 + 17].tobytes() for i in range(windows))
    assert sorted(epochs[0]) == sorted(epochs[1]) == want
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("shards", [1, 4])
def test_evaluation_covers_every_window_exactly_once(corpus, shards):
    parts = [
        list(text.held_out_batches(corpus, 64, 8, grain.sharding.ShardOptions(i, shards)))
        for i in range(shards)
    ]
    rows = np.concatenate([np.concatenate(rows) for rows in zip(*parts, strict=True)])
    real = rows[(rows >= 0).any(axis=1)]
    count = (len(corpus.held_out) - 1) // 64
    assert len(real) == count
    held = np.asarray(corpus.held_out, np.int32)
    np.testing.assert_array_equal(real, [held[i * 64 : i * 64 + 65] for i in range(count)])
    assert (rows[count:] == -1).all()


def test_stdlib_is_split_by_file_and_disjoint(corpus):
    assert 20e6 < len(corpus.train) < 60e6
    assert 0.003 < len(corpus.held_out) / len(corpus.train) < 0.03
    documents = [
        {part.tobytes() for part in np.split(tokens, np.flatnonzero(tokens == text.START))[1:]}
        for tokens in (np.asarray(corpus.train), np.asarray(corpus.held_out))
    ]
    long = [{d for d in part if len(d) > 400} for part in documents]
    assert long[1], "held-out files"
    assert not long[0] & long[1], "a held-out file is in the training text"


def test_encode_and_decode_are_inverse():
    assert text.decode(text.encode("naïve — ok\n")) == "naïve — ok\n"
    assert text.decode([text.START, 104, 105, 300]) == "hi"


def test_second_use_reads_the_cache_and_a_changed_file_does_not(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one " * 100)
    first = text.corpus(str(path))
    monkeypatch.setattr(text, "_write", lambda *_: pytest.fail("tokenised twice"))
    assert text.corpus(str(path)).fingerprint == first.fingerprint
    monkeypatch.undo()
    path.write_text("two " * 101)
    assert text.corpus(str(path)).fingerprint != first.fingerprint


DOCUMENTS = [f"document {i}: " + "lorem ipsum " * 20 for i in range(300)]


def write(folder: pathlib.Path, kind: str) -> str:
    """The same documents in each format; returns what --dataset is."""
    if kind == "folder":
        for i, document in enumerate(DOCUMENTS):
            (folder / f"{i:03}.txt").write_text(document)
        return str(folder)
    if kind == "jsonl":
        lines = (json.dumps({"text": document, "n": 1}) + "\n" for document in DOCUMENTS)
        (folder / "d.jsonl").write_text("".join(lines))
        return str(folder / "d.jsonl")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), folder / "train.parquet")
    return str(folder / "train.parquet") if kind == "parquet" else f"hf:{folder}"


@pytest.mark.parametrize("kind", ["folder", "jsonl", "parquet", "hub"])
def test_every_format_gives_the_same_tokens(kind, tmp_path):
    corpus = text.corpus(write(tmp_path, kind))
    want = {False: [], True: []}
    for document in DOCUMENTS:
        want[text._held_out(document.encode())] += [256, *document.encode()]
    np.testing.assert_array_equal(corpus.train, want[False])
    np.testing.assert_array_equal(corpus.held_out, want[True])
    assert len(want[True]) > 0


def test_a_datasets_own_held_out_split_is_used(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for split, letter in (("train", "a"), ("test", "b")):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": [letter * 50] * 3}), tmp_path / f"{split}.parquet"
        )
    corpus = text.corpus(f"hf:{tmp_path}")
    assert set(corpus.train) == {256, ord("a")}
    assert set(corpus.held_out) == {256, ord("b")}


def test_one_document_is_split_at_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1999)
    corpus = text.corpus(str(tmp_path / "a.txt"))
    assert (len(corpus.train), len(corpus.held_out)) == (1900, 100)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("gone.txt", None, "does not exist"),
        ("empty.txt", b"", "is empty"),
        ("latin.txt", "caf\xe9\n".encode("latin1"), "latin.txt line 1 is not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "broken.jsonl line 2 is not JSON"),
        ("other.jsonl", b'{"body": "a"}\n', "no column 'text'; set --text_column to one of 'body'"),
        ("number.jsonl", b'{"text": 3}\n', "column 'text' holds int, not text"),
        ("not.parquet", b"PAR?", "could not be read as parquet"),
    ],
)
def test_bad_data_is_one_sentence_and_leaves_nothing(
    name, content, sentence, tmp_path, monkeypatch
):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        text.corpus(str(tmp_path / name))
    assert sentence in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*")), "something was left behind"


def test_too_short_for_one_window(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(
        DataError, match="has 5 held-out tokens, fewer than one window of --seq_len=64"
    ):
        text.check(text.corpus(str(tmp_path / "a.txt")), 64)
