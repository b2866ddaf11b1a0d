"""Text as bytes: tokenised once to flat files, then windows of them by random access, with Grain.

The default corpus is the Python standard library's own source, which every machine has. Others:

    corpus("stdlib")             # *.py of this Python, split into train and held-out by file
    corpus("notes.txt")          # a text file, or a folder of them: a document each
    corpus("docs.jsonl")         # JSON Lines, or Parquet: the column `text` of each row
    corpus("hf:org/name")        # a dataset of the Hub, or hf:org/name:config for one configuration

A token is a byte, 0 to 255; 256 precedes each document. Windows overlap by one token, so that every
token but the first is a target once an epoch.
"""

import hashlib
import json
import os
import pathlib
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import grain
import numpy as np

from data import DataError, cache_dir, hub
from data.batches import Dataset, Example

START = 256  # the token in front of each document
VOCAB_SIZE = 384  # 257 tokens, padded to a multiple of 128 so that the dim can be sharded
HELD_OUT = 0.01  # of the documents, where the dataset has no split of its own


class Corpus(NamedTuple):
    name: str  # as --dataset gave it
    train: np.ndarray  # uint16 [tokens], memory-mapped
    held_out: np.ndarray
    fingerprint: str  # sha256 of both


def encode(text: str | bytes) -> np.ndarray:
    """Text → uint16 tokens, without the START in front."""
    raw = text.encode() if isinstance(text, str) else text
    return np.frombuffer(raw, np.uint8).astype(np.uint16)


def decode(tokens) -> str:
    """Tokens → text; START and padding are dropped, bytes that are not UTF-8 become U+FFFD."""
    return bytes(int(t) for t in tokens if 0 <= t < START).decode(errors="replace")


# ---- examples --------------------------------------------------------------------------------


def load(
    dataset: str = "stdlib", text_column: str = "text", seq_len: int = 128, tokenizer=None
) -> Dataset:
    """A corpus as examples of `seq_len` tokens; arguments as `corpus` takes them.

    Raises DataError if there is no such text, or less of it than one example.
    """
    found = corpus(dataset, text_column)
    for part, tokens in (("training", found.train), ("held-out", found.held_out)):
        if len(tokens) <= seq_len:
            raise DataError(
                f"--dataset={dataset} has {len(tokens)} {part} tokens, fewer than one window of "
                f"--seq_len={seq_len} and its target; use more text or a shorter --seq_len"
            )
    return Dataset(
        train=_Windows(found.train, seq_len),
        held_out=_Windows(found.held_out, seq_len),
        filler=example(np.full(seq_len + 1, -1, np.int32)),
        unit="tokens",
        units=seq_len,
        config={},
        facts={"dataset": dataset, "seq_len": seq_len, "fingerprint": found.fingerprint},
    )


def example(window: np.ndarray) -> Example:
    """The loss's arguments, [..., T], for windows of T + 1 tokens; -1 is padding.

    Segment ids count documents: a position attends only within its own.
    """
    tokens = np.maximum(window[..., :-1], 0)
    segment_ids = np.cumsum(tokens == START, axis=-1, dtype=np.int32)
    return {"tokens": tokens, "targets": window[..., 1:], "segment_ids": segment_ids}


class _Windows(grain.sources.RandomAccessDataSource):
    """Example i of a flat token file: its tokens from i · length on."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens, self._length = tokens, length

    def __len__(self):
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, i):
        start = int(i) * self._length
        return example(self._tokens[start : start + self._length + 1].astype(np.int32))


# ---- from a dataset to flat files ------------------------------------------------------------


def corpus(dataset: str = "stdlib", column: str = "text") -> Corpus:
    """Tokenised files of a dataset, made on first use and kept in the cache folder.

    Args:
      dataset: "stdlib", a path, or "hf:NAME"; see the module's docstring.
      column: where JSON Lines, Parquet and the Hub's datasets keep their text.

    Raises DataError, before anything is written, if there is no such text.
    """
    if dataset == "stdlib":
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
        key = [sysconfig.get_python_version(), *_listing(files, root)]
        documents = lambda: _by_file(files, root)  # noqa: E731
    elif dataset.startswith("hf:"):
        key = [dataset, column]
        documents = lambda: _from_hub(dataset, column)  # noqa: E731
    else:
        files, root = _files(dataset)
        key = [column, *_listing(files, root)]
        documents = lambda: _from_files(dataset, files, column)  # noqa: E731
    digest = hashlib.sha256(json.dumps(["v1", *key]).encode()).hexdigest()[:16]
    folder = cache_dir() / "text" / digest
    if not (folder / "fingerprint").exists():
        _write(folder, documents(), dataset)
    return Corpus(
        name=dataset,
        train=np.memmap(folder / "train.bin", np.uint16, "r"),
        held_out=np.memmap(folder / "held_out.bin", np.uint16, "r"),
        fingerprint=(folder / "fingerprint").read_text(),
    )


def _listing(files: list[pathlib.Path], root: pathlib.Path) -> list:
    stats = [(path, path.stat()) for path in files]
    return [[str(p.relative_to(root)), s.st_size, s.st_mtime_ns] for p, s in stats]


def _held_out(name: bytes) -> bool:
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "big") < HELD_OUT * 2**32


def _by_file(files: list[pathlib.Path], root: pathlib.Path) -> Iterator[tuple[bool, bytes]]:
    for path in files:
        yield _held_out(path.relative_to(root).as_posix().encode()), path.read_bytes()


def _files(dataset: str) -> tuple[list[pathlib.Path], pathlib.Path]:
    if not dataset:
        raise DataError("--dataset= is empty; use stdlib, a path, or hf:NAME")
    path = pathlib.Path(dataset).expanduser()
    if not path.exists():
        raise DataError(f"--dataset={dataset} does not exist; use a file, a folder, or hf:NAME")
    if path.is_file():
        return [path], path.parent
    files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    if not files:
        raise DataError(f"--dataset={dataset} is an empty folder; add text files to it")
    return files, path


def _from_files(dataset: str, files: list[pathlib.Path], column: str):
    """(held out?, document) of local text, JSON Lines and Parquet, through `datasets`."""
    datasets = hub.library()
    for path in files:
        kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(path.suffix, "text")
        options = {"sample_by": "document"} if kind == "text" else {}
        try:
            rows = datasets.load_dataset(
                kind, data_files=str(path), split="train", streaming=True, **options
            )
            for row in rows:
                document = _text(row, column if kind != "text" else "text", dataset)
                yield _held_out(document), document
        except DataError:
            raise
        except Exception as error:  # datasets wraps the reader's own error
            raise DataError(_diagnose(dataset, path, kind, error)) from error


def _from_hub(dataset: str, column: str):
    """(held out?, document) of a dataset on the Hub, or a local folder laid out like one."""
    train, held = hub.train_and_held_out(hub.load(dataset.removeprefix("hf:"), dataset))
    for row in hub.told(train, dataset):
        document = _text(row, column, dataset)
        yield held is None and _held_out(document), document
    for row in hub.told(held or (), dataset):
        yield True, _text(row, column, dataset)


def _text(row: dict, column: str, dataset: str) -> bytes:
    if column not in row:
        columns = ", ".join(map(repr, row))
        raise DataError(
            f"--dataset={dataset} has no column {column!r}; set --text_column to one of {columns}"
        )
    if not isinstance(row[column], str):
        kind = type(row[column]).__name__
        raise DataError(
            f"--dataset={dataset} column {column!r} holds {kind}, not text; set --text_column"
        )
    return row[column].encode()


def _diagnose(dataset: str, path: pathlib.Path, kind: str, error: Exception) -> str:
    """Why a local file could not be read, in one line."""
    if not path.stat().st_size:
        return f"--dataset={dataset}: {path.name} is empty; use a file with text in it"
    if kind != "parquet":
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            where = f"--dataset={dataset}: {path.name} line {number}"
            try:
                text = line.decode()
                if kind == "json" and text.strip():
                    json.loads(text)
            except UnicodeDecodeError:
                return f"{where} is not UTF-8; convert the file"
            except json.JSONDecodeError as broken:
                return f"{where} is not JSON ({broken.msg}); fix it"
    return f"--dataset={dataset}: {path.name} could not be read as {kind} ({hub.reason(error)})"


def _write(folder: pathlib.Path, documents: Iterable[tuple[bool, bytes]], dataset: str) -> None:
    """Writes the flat files to a temporary folder, document by document, and renames it in place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name))
    train, held = beside / "train.bin", beside / "held_out.bin"
    try:
        with train.open("wb") as train_file, held.open("wb") as held_file:
            for held_out, document in documents:
                tokens = np.concatenate([np.array([START], np.uint16), encode(document)])
                tokens.tofile(held_file if held_out else train_file)
        if train.stat().st_size == 0 or held.stat().st_size == 0:
            _split_tail(train, held, dataset)
        digest = hashlib.sha256()
        for path in (train, held):
            with path.open("rb") as file:
                while chunk := file.read(2**20):
                    digest.update(chunk)
        (beside / "fingerprint").write_text(digest.hexdigest())
        os.replace(beside, folder)
    except BaseException as error:
        shutil.rmtree(beside)
        if (folder / "fingerprint").exists():  # another process wrote the same bytes first
            return
        for empty in (folder.parent, cache_dir()):  # a user error leaves nothing behind
            if not any(empty.iterdir()):
                empty.rmdir()
        raise error


def _split_tail(train: pathlib.Path, held: pathlib.Path, dataset: str) -> None:
    """Too few documents to split by document: holds out the last twentieth of the text."""
    tokens = np.concatenate([np.fromfile(path, np.uint16) for path in (train, held)])
    if len(tokens) <= 1:
        raise DataError(f"--dataset={dataset} is empty; use a file with text in it")
    head, tail = np.split(tokens, [len(tokens) - max(1, len(tokens) // 20)])
    head.tofile(train)
    tail.tofile(held)
