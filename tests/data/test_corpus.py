"""data/corpus.py, data/chunks.py: a corpus is tokenized once and completely, whatever happens meanwhile."""

import dataclasses
import errno
import functools
import gzip
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types

import numpy as np
import pytest

from data import DataError, chunks, corpus, hub, sources, text
from data.tokenizer import BYTES, Tokenizer
from tests.conftest import ROOT
from tests.support.small_tokenizers import small

pytestmark = pytest.mark.promise("corpus")

FIRST = ("License", "the Work", "漢", "é", "", " or")
DOCUMENTS = [
    f"{FIRST[i % 6]} of {i}: naïve, 漢字 🙂\n" * (i % 7 > 0) + "lorem ipsum\n" * (i % 20)
    for i in range(300)
]


@pytest.fixture
def path(tmp_path, monkeypatch) -> pathlib.Path:
    """A file of DOCUMENTS, and a cache of its own."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "HELD_OUT", 0.1)
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in DOCUMENTS))
    return file


def prepare(path, tokenizer=BYTES) -> corpus.Corpus:
    return corpus.prepare(*sources.find(str(path)), tokenizer)


def documents(split: corpus.Split) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(split.tokens), split.starts[1:])]


def with_bounds(tokenizer: Tokenizer, texts: list) -> list[list[int]]:
    """The expected documents: start token, tokens, first end token."""
    return [[*tokenizer.start, *ids, *tokenizer.end[:1]] for ids in tokenizer.encode(texts)]


def by_split(texts: list[str]) -> list[list[str]]:
    """Documents to train on, and held-out documents."""
    return [
        [t for t in texts if sources._is_held_out(t.encode()) == held] for held in (False, True)
    ]


@pytest.mark.parametrize("start", [True, False])
def test_documents_keep_their_bounds_and_their_size(path, start):
    tokenizer = small(start)
    found = prepare(path, tokenizer)
    for split, texts in zip(found[:2], by_split(DOCUMENTS), strict=True):
        assert documents(split) == with_bounds(tokenizer, texts)
        sizes = np.diff(np.append(split.texts, split.bytes))
        assert sizes.tolist() == [len(one.encode()) for one in texts]
    assert found.train.tokens.dtype == np.uint16


def test_every_token_of_a_large_vocabulary_has_room():
    sizes = {257: np.uint16, 65_536: np.uint16, 65_537: np.uint32, 151_669: np.uint32}
    for size, kind in sizes.items():
        assert dataclasses.replace(BYTES, size=size).dtype == kind


@pytest.mark.parametrize(("cores", "count"), [(2, 2), (3, 3), (64, 8)])
def test_threads_make_the_same_files_as_one(path, monkeypatch, cores, count):
    """At most eight threads: memory does not grow with the number of cores."""
    monkeypatch.setattr(corpus, "cores", lambda: 1)
    one = prepare(path, small())
    monkeypatch.setenv("ZOO_CACHE", str(path.parent / "other"))
    monkeypatch.setattr(corpus, "CHUNK", 5_000)
    monkeypatch.setattr(corpus, "cores", lambda: cores)
    write, used = chunks.write, set()
    everyone = threading.Barrier(count)

    def watched(*arguments):
        if (me := threading.get_ident()) not in used:
            used.add(me)
            everyone.wait(60)
        write(*arguments)

    monkeypatch.setattr(chunks, "write", watched)
    several = prepare(path, small())
    assert len(used) == count
    assert several.folder != one.folder
    for file in one.folder.iterdir():
        assert file.read_bytes() == (several.folder / file.name).read_bytes(), file.name
    assert {p.name for p in (path.parent / "other" / "text").iterdir()} == {
        several.folder.name, corpus._content(*sources.find(str(path)))[0].name,
    }, "chunks are removed"  # fmt: skip


def test_an_error_or_ctrl_c_drops_the_chunks_in_work(path, tmp_path, monkeypatch):
    """Finished chunks are kept, and the process ends without finishing the rest."""
    monkeypatch.setattr(corpus, "cores", lambda: 2)
    monkeypatch.setattr(corpus, "CHUNK", 1_000)
    write, first, kept = chunks.write, set(), []

    def interrupted(todo, name):
        for number, one in enumerate(todo):
            if number == 6:
                kept.extend(tmp_path.glob("cache/text/*/*.npz"))
                raise KeyboardInterrupt
            yield one

    def slowly(target, parts, tokenizer, stop):
        number = int(target.name[:8])  # two threads may begin out of order
        if number > 2:
            assert stop.wait(60), "nobody says that it should stop"
        else:
            first.add(target)
        write(target, parts, tokenizer, stop)

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "_with_progress", interrupted)
        patched.setattr(chunks, "write", slowly)
        with pytest.raises(KeyboardInterrupt):
            prepare(path, small())
    left = set(tmp_path.glob("cache/text/*/*.npz"))
    assert len(first) == 3
    assert set(kept) <= left == first
    assert documents(prepare(path, small()).held_out)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_full_disk_is_reported_and_finished_work_is_kept(path, monkeypatch, cores):
    monkeypatch.setattr(corpus, "CHUNK", 5_000)
    monkeypatch.setattr(corpus, "cores", lambda: cores)
    content = corpus._content(*sources.find(str(path)))[1]
    key = json.dumps([corpus.CODE, content, "text", small().sha256]).encode()
    partial = path.parent / "cache/text" / (hashlib.sha256(key).hexdigest()[:16] + ".partial")
    (partial / "x").mkdir(parents=True)
    names = []
    parts = chunks.groups(sources.find(str(path))[0].parts(), corpus.CHUNK)
    list(corpus._not_done(parts, partial, names))
    (partial / names[2]).mkdir()  # in the place of a file
    with pytest.raises(
        DataError, match=r"cache can't be written \(Is a directory\); make room, or"
    ):
        prepare(path, small())
    assert any((partial / name).is_file() for name in names[:2])
    (partial / names[2]).rmdir()
    assert documents(prepare(path, small()).held_out)


@pytest.mark.promise("user-errors")
@pytest.mark.parametrize("call", ["is_file", "open", "read_bytes"])
def test_an_unreadable_source_is_reported(path, monkeypatch, call):
    """Errors from listing, hashing and tokenizing name the source, not the cache."""

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    path.with_suffix(".py").write_text("pass\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(path.parent)})
    monkeypatch.setattr(pathlib.Path, call, refused)
    name = "stdlib" if call == "read_bytes" else str(path)
    with pytest.raises(
        DataError, match=rf"{name} can't be read \(Permission denied\); use another"
    ):
        prepare(name)
    assert not (path.parent / "cache").exists()


@pytest.mark.parametrize("harm", ["cut", "lost", "unfinished"])
def test_an_incomplete_cache_is_never_read(path, harm):
    first = prepare(path)
    want = documents(first.train)
    file = first.folder / {"cut": "train.tokens", "lost": "held_out.texts"}.get(harm, "about.json")
    if harm == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    again = prepare(path)
    assert (again.fingerprint, documents(again.train)) == (first.fingerprint, want)


@pytest.mark.parametrize("more", [True, False])
def test_a_file_that_changes_while_it_is_read_is_refused(path, monkeypatch, more):
    make = corpus._make

    def slowly(*arguments):
        make(*arguments)
        path.write_text(path.read_text() + '{"text": "more"}\n') if more else path.unlink()

    monkeypatch.setattr(corpus, "_make", slowly)
    with pytest.raises(DataError, match="was changed while it was read; start again"):
        prepare(path)
    assert not list((path.parent / "cache").rglob("*"))


def test_the_cache_key_has_content_and_tokenizer(path, tmp_path):
    (tmp_path / "copy").mkdir()
    copy = tmp_path / "copy" / path.name
    copy.write_bytes(path.read_bytes())
    bytes_, tokens = prepare(path), prepare(path, small())
    assert prepare(copy).folder == bytes_.folder, "the same content"
    assert bytes_.folder != tokens.folder != prepare(path, small(start=False)).folder


def test_the_cache_key_of_a_hub_dataset_has_its_commit(path, monkeypatch):
    """A changed dataset is tokenized again; the last version is used if the Hub is unreachable."""
    library, answers = hub.library(), iter(())
    load = functools.partial(library.load_dataset, "json", data_files={"train": str(path)})
    there = types.SimpleNamespace(load_dataset=lambda name, config, streaming: load(streaming=True))
    monkeypatch.setattr(hub, "library", lambda: there)

    def repo_info(*_, **__):
        if (answer := next(answers)) is None:
            raise ConnectionError("no network")
        return types.SimpleNamespace(sha=answer)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", repo_info)

    def prepared(*said) -> corpus.Corpus:
        nonlocal answers
        answers = iter(said)
        made = prepare("hf:some/texts")
        assert not [*answers], "asked less often"
        return made

    first = prepared(*["one"] * 4)  # the key; what its rows are, and they; whether it is still so
    path.write_text(json.dumps({"text": "other"}) + "\n" + path.read_text())
    assert prepared("one").folder == first.folder, "it is not read again"
    second = prepared(*["two"] * 4)
    assert second.fingerprint != first.fingerprint
    assert prepared(None).folder == second.folder
    assert prepared("one").folder == prepared(None).folder == first.folder
    with pytest.raises(DataError, match="was changed while it was read; start again"):
        prepared("three", "three", "three", "four")
    assert prepared(None).folder == first.folder


@pytest.mark.parametrize("suffix", ["jsonl.gz", "JSONL.GZ", "txt", "txt.gz", "TXT.GZ"])
def test_compressed_files_patterns_and_long_documents(path, tmp_path, monkeypatch, suffix):
    """A long text is read and tokenized in parts; its line endings are normalized."""
    monkeypatch.setattr(sources, "LONGEST", 100)
    whole = "\r\n".join(DOCUMENTS) + "x" * 300 + "漢" * 300
    rows = suffix.lower() == "jsonl.gz"
    content = path.read_bytes() if rows else whole.encode()
    opened = gzip.open if suffix.lower().endswith(".gz") else open
    with opened(tmp_path / f"a.{suffix}", "wb") as file:
        file.write(content)
    found = prepare(tmp_path / f"?.{suffix}")
    texts = DOCUMENTS if rows else [whole.replace("\r\n", "\n")]
    both = np.concatenate([np.asarray(split.tokens) for split in found[:2]]).tolist()
    if len(texts) > 1:
        texts = [*by_split(texts)[0], *by_split(texts)[1]]
    assert both == [token for one in texts for token in (256, *one.encode())]


@pytest.mark.parametrize("start", [True, False])
def test_parts_of_a_long_document_are_one_text(start, path, tmp_path, monkeypatch):
    """Parts after the first get no leading space."""
    monkeypatch.setattr(sources, "LONGEST", 100)
    tokenizer, whole = small(start), "\n\n".join(DOCUMENTS[:40]) + "License" * 50
    (tmp_path / "a.txt").write_text(whole)
    found = prepare(tmp_path / "a.txt", tokenizer)
    assert tokenizer.decode(np.concatenate([split.tokens for split in found[:2]])) == whole


@pytest.mark.parametrize("text", ["漢" * 300_000, "7" * 900_000], ids=["no ASCII", "no space"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_parts_given_to_the_library_are_short(kind, text, tmp_path):
    """The library keeps up to 418 times as much; documents without line breaks are cut, too."""
    file = tmp_path / f"a.{kind}"
    file.write_text(text if kind == "txt" else json.dumps({"text": text}, ensure_ascii=False))
    parts = list(sources.find(str(file))[0].parts())
    assert b"".join(part.text for part in parts).decode() == text
    assert len(parts) == -(-900_000 // sources.LONGEST), "and no more often than that"
    groups = chunks.groups(parts, chunks.AT_ONCE)
    assert max(sum(len(part.text) for part in group) for group in groups) <= sources.LONGEST


def test_rows_of_jsonl_and_parquet_are_cut_like_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "LONGEST", 64)
    parts = list(sources._cut(("é" * 50 + "\n" + "ab" * 60).encode(), False))
    assert max(len(part.text) for part in parts) <= 64
    assert [(part.begins, part.ends) for part in parts] == [
        (True, False), *[(False, False)] * (len(parts) - 2), (False, True),
    ]  # fmt: skip
    assert b"".join(part.text for part in parts).decode() == "é" * 50 + "\n" + "ab" * 60
    for part in parts:
        part.text.decode()


def test_held_out_bytes(path):
    """Compares the bytes behind the held-out targets with a sum computed by hand."""
    held = [one.encode() for one in by_split(DOCUMENTS)[1]]
    size = sum(map(len, held))
    windows = text.load(str(path), seq_len=32)
    assert windows.held_out_bytes == 32 * len(windows.held_out), "bytes: targets, as ever"
    assert text.load(str(path), seq_len=32, pack="true").held_out_bytes == size
    assert text.load(str(path), seq_len=32, tokenizer=small()).held_out_bytes == size
    bare = small(start=False)
    begins = [bare.decode(ids[:1]) for ids in bare.encode(held)]
    firsts = [len(one.rstrip("\ufffd").encode()) for one in begins]
    assert sum(firsts) > len(held), "a first token is more than a byte"
    packed = text.load(str(path), seq_len=32, tokenizer=bare)
    assert packed.held_out_bytes == size - sum(firsts)
    cut = text.load(str(path), seq_len=32, tokenizer=bare, pack="false")
    covered = np.concatenate(with_bounds(bare, held))[: 32 * len(cut.held_out) + 1]
    want = len(bare.decode(covered).rstrip("\ufffd").encode()) - firsts[0]
    assert cut.held_out_bytes == want < size


def test_the_end_of_one_document_is_held_out_with_its_bytes(tmp_path):
    content = "漢字かな" * 2000
    (tmp_path / "a.txt").write_text(content)
    tokenizer = small(start=False)
    found = prepare(tmp_path / "a.txt", tokenizer)
    train, held = (tokenizer.decode(split.tokens) for split in found[:2])
    assert found.train.bytes == len(train.rstrip("\ufffd").encode())
    assert found.train.bytes + found.held_out.bytes == len(content.encode())
    assert len(found.held_out.tokens) == sum(len(s.tokens) for s in found[:2]) // 20
    assert [split.starts.tolist() for split in found[:2]] == [[0], [0]]
    assert content.startswith(train.rstrip("\ufffd"))
    assert content.endswith(held.lstrip("\ufffd"))


KILLED = """
import sys
from data import corpus, sources
from data.tokenizer import find
sources.HELD_OUT, corpus.CHUNK = 0.1, 5_000
print(corpus.prepare(*sources.find(sys.argv[1]), find(sys.argv[2])).fingerprint)
"""


def conversation(said: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": role, "content": said or "nothing"} for role in roles]}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "conversations"])
def test_a_kill_while_tokenizing_costs_a_chunk(kind, path, tmp_path, monkeypatch):
    """After five kills, finished chunks are kept, no process stays, and the result is the same."""
    tokens = small(start=kind == "text")
    if kind == "conversations":
        path.write_text("".join(json.dumps(conversation(one)) + "\n" for one in DOCUMENTS))
    path.write_text(path.read_text() * 4)
    want = prepare(path, tokens).fingerprint
    (tmp_path / "tokenizer").mkdir()
    for name, content in tokens.files.items():
        (tmp_path / "tokenizer" / name).write_bytes(content)
    cache = tmp_path / "second"
    command = [sys.executable, "-c", KILLED, str(path), str(tmp_path / "tokenizer")]
    options = dict(cwd=ROOT, env=os.environ | {"ZOO_CACHE": str(cache)}, text=True)
    done: dict[pathlib.Path, int] = {}
    for _ in range(5):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
        while len(now := files(cache)) < len(done) + 3:
            assert process.poll() is None, "it is done before it was killed"
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)  # it would end meanwhile
        assert not children(process.pid), "they could outlive it"
        process.kill()
        process.communicate()
        now = files(cache)
        assert done.items() <= now.items(), "a chunk was made again"
        done = now
        assert not list(cache.rglob("about.json"))
    assert subprocess.run(command, stdout=subprocess.PIPE, **options).stdout.strip() == want
    assert len(list((cache / "text").iterdir())) == 2, "the corpus, and its content's digest"


def files(cache: pathlib.Path) -> dict[pathlib.Path, int]:
    return {chunk: chunk.stat().st_ino for chunk in cache.glob("text/*.partial/*.npz")}


def children(parent: int) -> str:
    command = ["ps", "-o", "pid=,args=", "--ppid", str(parent)]
    return subprocess.run(command, capture_output=True, text=True).stdout
