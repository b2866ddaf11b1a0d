"""data/text.py: exact order, exact content, on any number of processes."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import pathlib
import sys

import grain
import jax
import numpy as np
import pytest

from data import DataError, batches, buckets, hub, sources, text
from data import corpus as corpora
from data.batches import held_out_batches, train_batches
from recipes.common.mesh import make_mesh
from recipes.common.report.hlo import collectives
from recipes.common.runtime import print0
from recipes.common.runtime.start import start
from recipes.common.sharding import make_layout
from recipes.common.train.feed import to_devices
from recipes.common.train.step import _interleaved
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("batches")


def prepare(dataset: str) -> corpora.Corpus:
    return corpora.prepare(*sources.find(dataset))


@pytest.fixture(scope="module")
def corpus():
    return prepare("stdlib")


@pytest.fixture(scope="module")
def stdlib():
    return text.load("stdlib", seq_len=64)


def take(data: batches.Dataset, count=4, batch_size=8, seed=3, **options) -> list[batches.Example]:
    feed = iter(train_batches(data, batch_size, seed, **options))
    return [next(feed) for _ in range(count)]


def together(parts) -> batches.Example:
    """Joins the rows of several processes into one batch."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_equal(got: batches.Example, want: batches.Example) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def windows(batch: batches.Example) -> np.ndarray:
    """Returns the windows of a batch: the first token and all targets of each."""
    return np.concatenate([batch["tokens"][:, :1], batch["targets"]], axis=1)


def test_a_batch_has_the_arguments_of_the_loss():
    window = np.array([[256, 7, 8, 256, 9], [5, 6, 256, -1, -1]], np.int32)
    made = text.example(window)
    assert {name: value.dtype for name, value in made.items()} == dict.fromkeys(
        ("tokens", "targets", "segment_ids"), np.dtype(np.int32)
    )
    assert made["tokens"].tolist() == [[256, 7, 8, 256], [5, 6, 256, 0]]
    assert made["targets"].tolist() == [[7, 8, 256, 9], [6, 256, -1, -1]], "-1 does not count"
    assert made["segment_ids"].tolist() == [[1, 1, 1, 2], [0, 0, 1, 1]], "documents are counted"


def test_batch_k_is_a_function_of_seed_and_k(stdlib):
    whole = take(stdlib, 6)
    for first in range(4):
        for got, want in zip(take(stdlib, 2, first=first), whole[first:], strict=False):
            assert_equal(got, want)
    assert (take(stdlib, 1, seed=4)[0]["tokens"] != whole[0]["tokens"]).any()


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_processes_together_see_the_same_batches_in_the_same_order(stdlib, shards):
    want = take(stdlib, 3)
    parts = [take(stdlib, 3, rows=rows) for rows in np.split(np.arange(8), shards)]
    for k in range(3):
        assert_equal(together([part[k] for part in parts]), want[k])


@pytest.mark.promise("slices")
def test_a_process_reads_rows_that_lie_apart(stdlib):
    """The devices of a process lie apart on the rings of a TPU."""
    whole = take(stdlib, 3, first=2)
    for rows in ([0, 1, 6, 7], [2, 3, 4, 5], [3], [0, 1, 2, 5, 7]):
        for mine, batch in zip(take(stdlib, 3, first=2, rows=np.array(rows)), whole, strict=True):
            assert_equal(mine, {name: value[rows] for name, value in batch.items()})
        held_out = zip(
            held_out_batches(stdlib, 8, np.array(rows)), held_out_batches(stdlib, 8), strict=True
        )
        for mine, batch in itertools.islice(held_out, 2):
            assert_equal(mine, {name: value[rows] for name, value in batch.items()})


class Noting:
    """A data source that notes the numbers of the examples that are read."""

    def __init__(self, source):
        self.source, self.read = source, []

    def __len__(self):
        return len(self.source)

    def take(self, indices):
        self.read.extend(indices.tolist())
        return self.source.take(indices)


def test_each_process_reads_only_its_rows(stdlib):
    noting = Noting(stdlib.train)
    take(stdlib._replace(train=noting), 3, rows=np.array([2, 3]))
    read = list(noting.read)  # Grain has read ahead, and its thread may still be at it
    order = grain.MapDataset.range(len(stdlib.train)).seed(3).shuffle()
    rows = [int(order[8 * (i // 2) + 2 + i % 2]) for i in range(len(read))]
    assert len(read) >= 6
    assert read == rows


def test_default_shard_is_this_process(stdlib):
    assert grain.sharding.ShardByJaxProcess().shard_count == 1
    assert {name: rows.shape for name, rows in take(stdlib, 1)[0].items()} == dict.fromkeys(
        stdlib.filler, (8, 64)
    )


def test_an_epoch_has_every_window_once_and_the_next_one_another_order(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(2000)))
    data, train = (
        text.load(str(tmp_path / "a.txt"), seq_len=16),
        np.asarray(prepare(str(tmp_path / "a.txt")).train.tokens, np.int32),
    )
    count = (len(train) - 1) // 16
    assert len(data.train) == count
    feed = iter(train_batches(data, 1, 0))
    epochs = [[windows(next(feed)).tobytes() for _ in range(count)] for _ in range(2)]
    want = sorted(train[i * 16 : i * 16 + 17].tobytes() for i in range(count))
    assert sorted(epochs[0]) == sorted(epochs[1]) == want
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("shards", [1, 4])
def test_evaluation_covers_every_window_exactly_once(stdlib, corpus, shards):
    parts = [held_out_batches(stdlib, 8, rows) for rows in np.split(np.arange(8), shards)]
    whole = together([together(rows) for rows in zip(*parts, strict=True)])
    held = np.asarray(corpus.held_out.tokens, np.int32)
    count = (len(held) - 1) // 64
    want = text.example(np.stack([held[i * 64 : i * 64 + 65] for i in range(count)]))
    assert_equal({name: rows[:count] for name, rows in whole.items()}, want)
    assert len(whole["targets"]) % 8 == 0
    assert (whole["targets"][count:] == -1).all(), "the last batch is filled up with padding"


def test_facts_that_a_run_records_of_its_text(stdlib, corpus):
    facts = {"dataset": "stdlib", "seq_len": 64, "fingerprint": corpus.fingerprint}
    assert (stdlib.facts, stdlib.unit, stdlib.units, stdlib.config) == (facts, "tokens", 64, {})


def test_stdlib_is_split_by_file_and_disjoint(corpus):
    sizes = [len(split.tokens) for split in (corpus.train, corpus.held_out)]
    assert 20e6 < sizes[0] < 60e6
    assert 0.003 < sizes[1] / sizes[0] < 0.03
    documents = [
        {part.tobytes() for part in np.split(np.asarray(split.tokens), split.starts)[1:]}
        for split in (corpus.train, corpus.held_out)
    ]
    long = [{d for d in part if len(d) > 400} for part in documents]
    assert long[1], "held-out files"
    assert not long[0] & long[1], "a held-out file is in the training text"


def test_a_second_use_reads_the_cache_and_a_changed_file_is_tokenized_again(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one " * 100)
    first = prepare(str(path))
    times = path.stat()
    monkeypatch.setattr(corpora, "_make", lambda *_: pytest.fail("tokenized twice"))
    assert prepare(str(path)).fingerprint == first.fingerprint
    monkeypatch.undo()
    path.write_text("two " * 100)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert prepare(str(path)).fingerprint != first.fingerprint, "the same size and time"


DOCUMENTS = [f"document {i}: " + "lorem ipsum " * 20 for i in range(300)]


def write(folder: pathlib.Path, kind: str) -> str:
    """Writes the same documents in one of the formats; returns the value for --dataset."""
    if kind == "folder":
        for i, document in enumerate(DOCUMENTS):
            (folder / f"{i:03}.txt").write_text(document)
        return str(folder)
    if kind in sources.TABLES:
        with (folder / f"d{kind}").open("w", newline="") as file:
            table = csv.writer(file, delimiter=sources.TABLES[kind])
            table.writerows([["n", "text"], *(["1, 2", document] for document in DOCUMENTS)])
        return str(folder / f"d{kind}")
    if f".{kind.lower()}" in sources.JSON:
        lines = (json.dumps({"text": document, "n": 1}) + "\n" for document in DOCUMENTS)
        (folder / f"d.{kind}").write_text("".join(lines))
        return str(folder / f"d.{kind}")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), folder / "train.parquet")
    return str(folder / "train.parquet") if kind == "parquet" else f"hf:~/{folder.name}"


KINDS = ["folder", "JSONL", "parquet", "hub", *sources.TABLES]


@pytest.mark.parametrize("kind", [*KINDS, *(suffix[1:] for suffix in sources.JSON)])
def test_every_format_gives_the_same_tokens(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setenv("ZOO_CACHE", f"{tmp_path}-cache")  # else the same Parquet is not read twice
    monkeypatch.setattr(hub, "_ask", lambda *_: pytest.fail("the Hub is asked for a local folder"))
    corpus = prepare(write(tmp_path, kind))
    want = {False: [], True: []}
    for document in DOCUMENTS:
        want[sources._is_held_out(document.encode())] += [256, *document.encode()]
    np.testing.assert_array_equal(corpus.train.tokens, want[False])
    np.testing.assert_array_equal(corpus.held_out.tokens, want[True])
    assert len(want[True]) > 0


def test_the_held_out_split_of_a_dataset_is_used(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for split, letter in (("train", "a"), ("test", "b")):
        pyarrow.parquet.write_table(
            pyarrow.table({"text": [letter * 50] * 3}), tmp_path / f"{split}.parquet"
        )
    corpus = prepare(f"hf:{tmp_path}")
    assert set(corpus.train.tokens) == {256, ord("a")}
    assert set(corpus.held_out.tokens) == {256, ord("b")}


@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_a_dataset_with_a_held_out_split_trains_on_all_other_rows(kind, tmp_path, monkeypatch):
    """No row is held out by its hash as well; nor with --eval_dataset, which drops the split."""
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(sources, "HELD_OUT", 0.5)
    rows = {split: [f"{split} {i}" for i in range(40)] for split in ("train", "test")}
    for split, texts in rows.items():
        columns: dict = {"text": texts}
        if kind == "conversations":
            columns = {"prompt": [">"] * 40, "completion": texts}
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{split}.parquet")

    def texts_of(split: corpora.Split) -> list[str]:
        parts = np.split(np.asarray(split.tokens), split.starts[1:])
        return [
            bytes(part[1:].astype(np.uint8)).decode().removeprefix(">")
            for part in parts
            if len(part)
        ]

    found = prepare(f"hf:{tmp_path}")
    assert texts_of(found.train) == rows["train"]
    assert texts_of(found.held_out) == rows["test"]
    whole = corpora.prepare(*sources.find(f"hf:{tmp_path}", train_only=True))
    assert texts_of(whole.train)[:40] == rows["train"]
    alone = corpora.prepare(*sources.find(str(tmp_path / "train.parquet")))
    assert len(texts_of(alone.train)) + len(texts_of(alone.held_out)) == 40
    assert 10 < len(texts_of(alone.held_out)) < 30, "a file without a split is split by hash"


def test_hidden_files_and_folders_are_skipped(tmp_path):
    (tmp_path / "inner").mkdir()
    for name in ("a.txt", "inner/b.txt"):
        (tmp_path / name).write_text("some text " * 20)
    want = prepare(str(tmp_path)).fingerprint
    for name in (".hidden.txt", ".git/objects/c.txt", "inner/.ipynb_checkpoints/b-checkpoint.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("hidden")
    assert prepare(str(tmp_path)).fingerprint == want
    assert prepare(str(tmp_path / "**" / "*.txt")).fingerprint == want
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "d.txt").write_text("some text " * 20)
    assert bytes(prepare(str(tmp_path / ".cache")).train.tokens[1:5].astype(np.uint8)) == b"some"
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    (tmp_path / "empty" / ".git" / "c.txt").write_text("hidden")
    with pytest.raises(DataError, match="is an empty folder"):
        prepare(str(tmp_path / "empty"))


def test_hidden_objects_of_a_bucket_are_skipped(monkeypatch):
    names = ["a.txt", ".a.txt", ".git/b.txt", "inner/c.txt", "inner/.ipynb_checkpoints/c.txt"]
    listed = ["bucket/d", {name: {} for name in names}]
    copied = []
    monkeypatch.setattr(buckets, "_listing", lambda *_: listed)
    monkeypatch.setattr(
        buckets, "_copied", lambda root, found, what: copied.append([*found]) or path
    )
    path = pathlib.Path("copy")
    assert buckets.files("gs://bucket/d", "it") == [path / "a.txt", path / "inner" / "c.txt"]
    assert copied == [["a.txt", "inner/c.txt"]], "the others are not even fetched"
    listed[1] = {".git/b.txt": {}}
    with pytest.raises(
        DataError, match=r"it has only hidden files, such as \.git/b\.txt; use others"
    ):
        buckets.files("gs://bucket/d", "it")
    listed[1] = {".b.txt": {}}
    assert buckets.files("gs://bucket/d/.b.txt", "it") == [path / ".b.txt"], "named by itself"


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems take only UTF-8")
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_file_name_may_be_latin_1(kind, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9." + kind.encode())
    other = tmp_path / f"cafe.{kind}"
    for i, file in enumerate((name, other)):
        content = f"document {i} " * 30
        pathlib.Path(file).write_text(content if kind == "txt" else json.dumps({"text": content}))
    found = prepare(str(tmp_path))
    size = sum(len(split.tokens) for split in found[:2])
    assert size == 2 * (1 + len("document 0 " * 30))
    assert prepare(name).fingerprint != prepare(str(other)).fingerprint


def test_names_that_are_not_utf_8_can_be_printed(monkeypatch):
    """Strict, as Python's standard output is in most locales."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["it"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8", errors="strict"))
    start(lambda: print0("caf\udce9 é"))
    assert written.getvalue() == "caf\\udce9 é\n".encode()


def test_one_document_is_split_at_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1999)
    corpus = prepare(str(tmp_path / "a.txt"))
    assert (len(corpus.train.tokens), len(corpus.held_out.tokens)) == (1900, 100)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "does not exist"),
        ("empty.txt", b"", "is empty"),
        ("latin.txt", "caf\xe9\n".encode("latin1"), "latin.txt line 1 is not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "broken.jsonl line 2 is not JSON"),
        ("other.jsonl", b'{"body": "a"}\n', "no column 'text'; set --text_column to one of 'body'"),
        ("chat.csv", b'text\n"[{""role"": ""user"", ""content"": ""Hi""}]"\n', "chat.csv line 2 has messages in the column 'text', whose JSON would be learned"),
        ("shared.jsonl", b'{"text": "[{\'from\': \'human\', \'value\': \'Hi\'}]"}\n', "shared.jsonl line 1 has messages in 'text' as text that is not JSON"),
        ("number.jsonl", b'{"text": 3}\n', "column 'text' holds int, not text, nor another one with text ('text': int)"),
        ("nested.json", b'{"data": [{"text": "a"}]}\n', "no column 'text', nor another one with text ('data': list); write a row a line"),
        ("object.json", b'\n{\n "data": [\n ]}\n', "object.json is one JSON object of several lines, not JSON Lines"),
        ("picture.txt", b"\x89PNG\r\n\x1a\n\x00\x00", "picture.txt is not a text file; name the files"),
        ("wide.txt", "caf\xe9\n".encode("utf-16"), "wide.txt line 1 is not UTF-8; convert the file"),
        ("list.jsonl", b'["text"]\n', "list.jsonl is not a JSON object"),
        ("not.parquet", b"PAR?", "could not be read as parquet"),
        ("null.jsonl", b'{"text": "a"}\n\n{"text": null}\n', "null.jsonl line 3 has null in the column 'text', not text; fill it, or remove the row"),
        ("first.jsonl", b'{"text": null}\n', "first.jsonl line 1 has null in the column 'text', not text"),
        ("later.jsonl", b'{"text": "a"}\n{"n": 1}\n', "later.jsonl line 2 has no text in column 'text', which the rows before it have"),
        ("array.json", b'\n[{"text": "a"},\n {"text" "b"}]\n', "array.json line 3 is not JSON (Expecting ':' delimiter)"),
        ("a.json5", b"{text: 'a'}\n", "a.json5 is data of a kind that isn't read; convert it to JSON Lines"),
        ("a.csv", b"n,body\n1,a\n", "no column 'text'; set --text_column to one of 'n', 'body'"),
        ("wide.csv", b'n,text\n1,a\n2,b,c\n', "wide.csv line 3 has more cells than the first line; put"),
        ("short.csv", b'n,text\n1,a\n2\n', "short.csv line 3 has null in the column 'text', not text"),
        ("semicolons.csv", b"text;n\na;1\n", "semicolons.csv has a single column, 'text;n': its cells are divided by ';'"),
        ("commas.tsv", b"text,n\na,1\n", "commas.tsv has a single column, 'text,n': its cells are divided by ','"),
        ("twice.csv", b"text,text\na,b\n", "twice.csv has two columns 'text'; give them different names"),
        ("chats.jsonl", b'{"conversations": [{"from": "human", "value": "a"}]}\n', "but messages in 'conversations'; name that column 'messages'"),
        ("chats.csv", b'chat\n"[{""role"": ""user"", ""content"": ""a""}]"\n', "but messages in 'chat'; name that column 'messages'"),
        ("quote.csv", b'n,text\n1,a\n1,"a"b\n', "quote.csv could not be read as csv: line 3 ("),
        ("quote.csv", b'n,text\n1,"a"b\n', "quote.csv could not be read as csv"),
        ("later.jsonl", b'{"text": "a"}\n["b"]\n', "later.jsonl line 2 is not a JSON object"),
    ],
)  # fmt: skip
def test_bad_data_is_one_line_and_leaves_nothing(name, content, message, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(str(tmp_path / name))
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*")), "something was left behind"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        # The column that both have; the first file has others too.
        ({"a.jsonl": {"id": "1", "body": "a"}, "b.jsonl": {"body": "a"}},
         "{here}: a.jsonl has no column 'text'; set --text_column to one of 'body'"),
        ({"a.jsonl": {"body": "a"}, "b.jsonl": {"text": "a"}},
         "{here}: a.jsonl has no column 'text', and none of its columns is in all 2 files; give all files the same"),
        ({"a.jsonl": {"text": "a"}, "b.jsonl": {"body": "a"}},
         "{here}: b.jsonl has no column 'text', which a.jsonl has; it has 'body': give all files the same columns"),
        ({"a.txt": "a", "pic.png": ""}, "{here}: pic.png is not a text file; name the files to read with a pattern"),
    ],
)  # fmt: skip
def test_files_that_differ_are_named_with_what_suits_all(files, message, tmp_path):
    for name, row in files.items():
        content = json.dumps(row).encode() if row else b"\x89PNG\r\n\x1a\n\x00\x00"
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(str(tmp_path))
    assert str(caught.value).startswith(f"--dataset={message.format(here=tmp_path)}")


@pytest.mark.parametrize("where", ["parquet", "hub", "held out"])
def test_a_null_in_parquet_is_named_by_row_and_column(where, tmp_path):
    import pyarrow
    import pyarrow.parquet

    for split, hole in (("train", where != "held out"), ("test", where == "held out")):
        texts = ["a", None, "b"] if hole else ["a", "b"]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / f"{split}.parquet")
    name = f"{tmp_path / 'train.parquet'}" if where == "parquet" else f"hf:{tmp_path}"
    place = {"parquet": "train.parquet row 2", "hub": "row 2", "held out": "held-out row 2"}[where]
    with pytest.raises(DataError) as caught:
        prepare(name)
    assert str(caught.value) == (
        f"--dataset={name}: {place} has null in the column 'text', not text; fill it, or remove the row"
    )


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    """Not of a table's first column either, and cells may have line breaks in them."""
    words = "first words\n" * 40
    (tmp_path / "plain.txt").write_text(words)
    (tmp_path / "marked.txt").write_text(words, encoding="utf-8-sig")
    plain, marked = (prepare(str(tmp_path / name)) for name in ("plain.txt", "marked.txt"))
    assert marked.fingerprint == plain.fingerprint
    rows = [f'"a\n""{i}"", b"\n' for i in range(3)]
    (tmp_path / "a.csv").write_text("text\n" + "".join(rows), encoding="utf-8-sig")
    parts = sources.find(str(tmp_path / "a.csv"))[0].parts()
    assert [part.text.decode() for part in parts] == [f'a\n"{i}", b' for i in range(3)]


def test_pairs_in_a_table_are_learned(tmp_path):
    rows = "".join(f"{i} and,two\n" for i in range(30))
    (tmp_path / "a.csv").write_text("prompt,completion\n" + rows)
    train = prepare(str(tmp_path / "a.csv")).train
    assert bytes(train.tokens[train.targets].astype(np.uint8)).startswith(b"twotwo")


@pytest.mark.parametrize("before", ["\ufeff", "\n \n", "\ufeff\r\n", ""])
@pytest.mark.parametrize("array", [True, False])
def test_a_byte_order_mark_and_empty_lines_are_no_part_of_the_rows(before, array, tmp_path):
    rows = [{"text": f"Document {i}\u2028\x85 " * 9} for i in range(30)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    content = f" [{','.join(lines)}]" if array else "\n\n".join(lines)
    (tmp_path / "b.jsonl").write_text(before + content, encoding="utf-8", newline="")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    names = ("a.jsonl", "b.jsonl", "b.jsonl.gz")
    plain, *others = (prepare(str(tmp_path / name)) for name in names)
    assert {other.fingerprint for other in others} == {plain.fingerprint}
    text_ = bytes(plain.train.tokens[plain.train.tokens < 256].astype(np.uint8)).decode()
    assert text_.startswith("Document 0\u2028\x85 Document 0")
    if not array:
        chat = [{"prompt": "a", "completion": f"{i}"} for i in range(30)]
        (tmp_path / "c.jsonl").write_text(before + "\n".join(map(json.dumps, chat)), newline="")
        assert prepare(str(tmp_path / "c.jsonl")).train.targets is not None, "its columns are seen"


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_of_rows_is_read_like_lines(indent, tmp_path):
    rows = [{"text": f"Document {i}\n" * i} for i in range(300)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=indent))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    array, lines = (prepare(str(tmp_path / name)) for name in ("a.json", "b.jsonl"))
    assert array.fingerprint == lines.fingerprint


def test_too_short_for_one_window(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(
        DataError, match="has 5 held-out tokens, fewer than one window of --seq_len=64"
    ):
        text.load(str(tmp_path / "a.txt"), seq_len=64)


# ---- on the devices of a mesh --------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["data=2,seq=4", "data=1,seq=8", "data=2,seq=2,model=2"])
def test_a_device_gets_only_its_part_of_a_row(stdlib, mesh):
    rules = {"batch": "data", "seq": "seq"}
    layout = make_layout(
        Transformer, Config.tiny(), make_mesh(mesh), rules, batch_size=8, seq_len=64
    )
    assert layout.process_rows.tolist() == list(range(8))
    (want,) = take(stdlib, 1)
    batch = to_devices(want, layout)
    assert_equal(batch, want)
    part = (8 // layout.mesh.shape["data"], 64 // layout.mesh.shape["seq"])
    for name, x in batch.items():
        assert [held.data.shape for held in x.addressable_shards] == [part] * 8
        for held in x.addressable_shards:
            np.testing.assert_array_equal(held.data, want[name][held.index])


def test_microbatches_keep_positions_where_they_are(stdlib):
    layout = make_layout(
        Transformer, Config.tiny(), make_mesh("data=2,seq=4"), {"batch": "data", "seq": "seq"},
        batch_size=8, microbatches=2, seq_len=64,
    )  # fmt: skip
    (want,) = take(stdlib, 1)
    batch = to_devices(want, layout)
    split = layout.compile(lambda batch: jax.tree.map(lambda x: _interleaved(x, 2), batch), batch)
    assert collectives(split.as_text()) == []
    for name, x in split(batch).items():
        assert x.sharding.spec == jax.P(None, "data", "seq")
        np.testing.assert_array_equal(x, want[name].reshape(4, 2, 64).swapaxes(0, 1))


# ---- rows of tables ------------------------------------------------------------------------------

BARE = [
    '"Yes," he said.', 'A 5" pipe, or 6"', '"', 'He said "no"', "it's", '"quoted"', '"begins', 'ends"',
]  # fmt: skip


def read(name) -> list[dict]:
    return [row for _, row in sources.rows(str(name))[0]]


def test_marks_of_a_tsv_are_letters_unless_they_quote_all_cells_that_have_any(tmp_path):
    """GLUE never quotes, pandas does; each row is read as it was written."""
    texts = [f"{BARE[n % len(BARE)]} {n}" for n in range(40)]
    texts[::9] = ['"whole"' for _ in texts[::9]]
    lines = ["text\tlabel", *(f"{text}\t{n % 2}" for n, text in enumerate(texts))]
    (tmp_path / "glue.tsv").write_text("\n".join(lines) + "\n")
    rows = read(tmp_path / "glue.tsv")
    assert [row["text"] for row in rows] == texts
    assert [row["label"] for row in rows] == [str(n % 2) for n in range(40)]

    texts = [*texts, "two\nlines", "a\ttab", 'a "\t" \n"', ""]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        with (tmp_path / "pandas.tsv").open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t", quoting=quoting, lineterminator="\n")
            writer.writerows([("text", "label"), *((text, "x") for text in texts)])
        assert [row["text"] for row in read(tmp_path / "pandas.tsv")] == texts


@pytest.mark.parametrize(
    ("lines", "number", "counts"),
    [
        (["text\tlabel", 'a "b\t1', '"c\td"\t0'], "line 3", ("3 cells", "line 2")),
        (["text\tlabel", '"a\t1', 'b"\t0', "c\t1"], "", ("3 rows", "2 if they quote")),
    ],
)
def test_a_tsv_that_no_custom_fits_is_refused(lines, number, counts, tmp_path):
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.tsv")
    assert number in str(caught.value)
    assert counts[0] in str(caught.value)
    assert "JSON Lines" in str(caught.value)


def test_a_mark_without_its_partner_keeps_little_in_memory():
    from data import delimited

    lines = (f'"{n}\t1\n' if n == 0 else "a line\t1\n" for n in itertools.count())
    assert delimited._count_quoted(lines) is None  # of an endless file


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_that_describe_data_are_no_data(kind, tmp_path):
    rows = [{"text": f"row {n}"} for n in range(30)]
    if kind == "parquet":
        hub.library().Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    else:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = prepare(str(tmp_path))
    names = ["_SUCCESS", "README.md", "LICENSE", "_metadata", "_committed_123", "a.parquet.crc"]
    for name in (*names, "SHA256SUMS", "a.md5", "CHANGELOG.md"):
        (tmp_path / name).write_text("about\n")
    (tmp_path / "_delta_log").mkdir()
    for name in ("dataset_infos.json", "croissant.json", "_delta_log/00.json"):
        (tmp_path / name).write_text("{}")
    assert prepare(str(tmp_path)).fingerprint == alone.fingerprint
    assert read(tmp_path) == rows
    (tmp_path / "notes.md").write_text("about\n")
    with pytest.raises(DataError, match=r"has notes\.md among"):
        prepare(str(tmp_path))


def test_a_readme_among_texts_is_a_text(tmp_path):
    (tmp_path / "README.md").write_text("read me\n" * 100)
    (tmp_path / "_notes.txt").write_text("note\n" * 100)
    assert prepare(str(tmp_path)).train.bytes + prepare(str(tmp_path)).held_out.bytes == 1300


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.bin", np.arange(100, dtype=np.uint16).tobytes()),
        ("wide.txt", "a text\n".encode("utf-16-le")),
        ("wide.csv", "text\na\n".encode("utf-16-le")),
        ("late.txt", b"a" * 2**18 + b"\0"),
    ],
)
def test_nul_bytes_are_no_text(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is not a text file: it has NUL bytes"):
        prepare(str(tmp_path / name))


def test_columns_of_parquet_are_proposed_if_they_hold_text(tmp_path):
    rows = [
        {"id": 1, "body": "a", "score": None, "tags": ["x"]},
        {"id": 2, "body": "b", "score": 0.5, "tags": []},
    ]
    hub.library().Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"set --text_column to one of 'body'$"):
        prepare(str(tmp_path / "a.parquet"))
    hub.library().Dataset.from_list([{"id": 1}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(DataError, match="nor another one with text"):
        prepare(str(tmp_path / "b.parquet"))


def test_columns_that_nothing_reads_are_named_once(tmp_path):
    rows = [{"text": f"row {n} " * 9, "url": "x", "id": n} for n in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # also from the cache
        data = text.load(str(tmp_path / "a.jsonl"), seq_len=8)
        (note,) = (note for note in data.notes if "not used" in note)
        assert "2 ('id', 'url')" in note


@pytest.mark.parametrize(
    ("names", "is_read"),
    [
        (["a.txt"], False),
        (["stdlib"], False),
        (["chat.jsonl"], False),
        (["", "a.txt"], False),
        (["rows.jsonl"], True),
        (["a.txt", "rows.jsonl"], True),
        (["a.txt,rows.jsonl"], True),
    ],
)
def test_a_column_of_text_needs_rows_with_columns(names, is_read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "rows.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    sources.check_column("text", *names)
    with (
        contextlib.nullcontext()
        if is_read
        else pytest.raises(DataError, match=r"^--text_column=body is")
    ):
        sources.check_column("body", *names)
