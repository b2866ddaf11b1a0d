"""Documents → tokens in flat files, made once and kept in the cache folder.

A corpus is tokenised in chunks, on up to 16 cores (workers.py). A chunk that is done is a file, so
that a kill costs no more than the chunks in work. The flat files appear in one rename when all chunks
are done: there is no time at which a part of them can be read.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from data import DataError, buckets, cache_dir, conversations, hub, sources, workers
from data.sources import Part, Source
from data.tokenizer import BYTES, Tokenizer

CODE = 3  # raised when the same text would give other files
CHUNK = 2**21  # bytes of text
SMALL = 4  # chunks that are tokenised in this process: others take a while to start
TRAIN, HELD_OUT = SPLITS = ("train", "held_out")
ABOUT = "about.json"
FILES = ("tokens", "starts", "texts")  # of each split
TARGETS = "targets"  # and this, of conversations
PROGRESS = 30.0  # seconds between lines that say how far it is


class Split(NamedTuple):
    """One document after another, each with the tokenizer's ids before and behind it."""

    tokens: np.ndarray  # uint16 or uint32 [tokens], memory-mapped
    starts: np.ndarray  # int64 [documents], memory-mapped: where each begins in `tokens`
    texts: np.ndarray  # int64 [documents], memory-mapped: where it begins in the text, in bytes
    bytes: int  # of text, UTF-8; of conversations, of the text that their targets stand for
    targets: np.ndarray | None = None  # bool [tokens], memory-mapped: those to learn; None: all
    rows: int = 0  # of conversations, which can give several documents each


class Corpus(NamedTuple):
    train: Split
    held_out: Split
    fingerprint: str  # sha256 of the tokens and, unless they show in bytes, of the documents
    folder: pathlib.Path  # where it is kept; what is made of it may be kept there too


def prepare(source: Source, tokenizer: Tokenizer = BYTES) -> Corpus:
    """The tokens of a source, from the cache or made now.

    The cache knows a local source by its content, and a dataset of the Hub by its newest commit, or
    the one used last where the Hub can't be asked; conversations also by what writes them, the chat
    template above all.

    Raises DataError if there is no text, or it can't be read; nothing is left in the cache then.
    Also where the cache can't be written; what is done is kept then.
    """
    with cached():
        return _prepared(source, tokenizer)


def _prepared(source: Source, tokenizer: Tokenizer) -> Corpus:
    remembered, content = _content(source)
    key = [CODE, content, source.column, tokenizer.sha256, *(["whole"] if source.whole else [])]
    folder = _folder(key)
    if not is_whole(folder):
        as_rows = _folder([*key, conversations.key(tokenizer)])
        if is_whole(as_rows) or source.form() != conversations.TEXT:
            folder = as_rows
    if not is_whole(folder):
        with _alone(folder.with_suffix(".partial")) as partial:
            try:
                if not is_whole(folder):  # another process made it meanwhile
                    if source.files:
                        _write_whole(remembered, content)
                    _make(folder, partial, source, tokenizer)
                    if _has_changed(source, remembered, content):
                        shutil.rmtree(folder)
                        raise DataError(
                            f"--dataset={source.name} was changed while it was read; start again"
                        )
                shutil.rmtree(partial)
            except DataError:
                shutil.rmtree(partial, ignore_errors=True)
                if source.files:
                    remembered.unlink(missing_ok=True)
                raise
            except ChildProcessError as died:
                raise DataError(
                    f"a process that tokenised --dataset={source.name} was killed, perhaps for want of "
                    "memory; start again, what is done is kept"
                ) from died
    if remembered and not source.files:
        _write_whole(remembered, content)  # of two commits that are in the cache, the one used last
    return _read(folder)


# ---- what is in the cache ------------------------------------------------------------------------


@contextlib.contextmanager
def cached() -> Iterator[None]:
    """An OSError is the cache's, and becomes a DataError: those of sources are DataErrors already."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{cache_dir()} can't be written ({buckets.reason(error)}); make room, or set ZOO_CACHE to "
            "another folder"
        ) from error


def _folder(key: list) -> pathlib.Path:
    return cache_dir() / "text" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _content(source: Source) -> tuple[pathlib.Path | None, str]:
    """(where that is remembered, sha256 of the files' names and content).

    Every byte is read, once: the digest is remembered by the files' sizes and times. Of a dataset on
    the Hub it is its name and commit.
    """
    if not source.files:
        where = hashlib.sha256(source.name.encode()).hexdigest()[:16]
        remembered = cache_dir() / "text" / f"{where}.content"
        if commit := hub.commit(source.name.removeprefix("hf:"), source.name):
            return remembered, f"{source.name}@{commit}"
        return (remembered, remembered.read_text()) if remembered.exists() else (None, source.name)
    with sources.reading(source.name):
        stats = [(str(path.absolute()), path.stat()) for path in source.files]
    listing = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats]
    where = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]
    remembered = cache_dir() / "text" / f"{where}.content"
    if remembered.exists():
        return remembered, remembered.read_text()
    digest, root = hashlib.sha256(), os.path.commonpath([str(p.parent) for p in source.files])
    for path, (_, stat) in zip(source.files, stats, strict=True):
        digest.update(f"{path.relative_to(root).as_posix()}\n{stat.st_size}\n".encode())
        with sources.reading(source.name), path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return remembered, digest.hexdigest()


def _has_changed(source: Source, remembered: pathlib.Path | None, content: str) -> bool:
    """Whether `_content` would say something else by now."""
    if source.files:
        try:
            return _content(source)[0] != remembered
        except DataError:  # a file is gone
            return True
    commit = hub.commit(source.name.removeprefix("hf:"), source.name)
    return bool(commit) and content != f"{source.name}@{commit}"


def is_whole(folder: pathlib.Path) -> bool:
    """Whether all files are there that its ABOUT lists, to their last byte."""
    try:
        sizes = json.loads((folder / ABOUT).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _read(folder: pathlib.Path) -> Corpus:
    about = json.loads((folder / ABOUT).read_text())
    kinds = zip(FILES, (about["dtype"], np.int64, np.int64), strict=True)
    kinds = dict(kinds) | ({TARGETS: bool} if "rows" in about else {})

    def split(name: str) -> Split:
        files = {what: _mapped(folder / f"{name}.{what}", kind) for what, kind in kinds.items()}
        rows = about.get("rows", {}).get(name, 0)
        return Split(**files, bytes=about["bytes"][name], rows=rows)

    return Corpus(*map(split, SPLITS), about["fingerprint"], folder)


def _mapped(path: pathlib.Path, kind) -> np.ndarray:
    """A flat file; an empty one can't be mapped."""
    return np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """`folder`, made, and locked until this process leaves it or dies.

    What is empty when it is left is removed, with the cache folder itself.
    """
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("a") as lock:
                with contextlib.suppress(OSError):  # a disk that has no locks: all do the same work
                    fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    mine = os.path.samestat(os.stat(folder / "lock"), os.fstat(lock.fileno()))
                except FileNotFoundError:  # the one before has finished, or given up
                    mine = False
                if mine:
                    yield folder
                    return
    finally:
        for empty in (folder.parent, folder.parent.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()


def write_about(folder: pathlib.Path, about: dict[str, Any]) -> None:
    """The last file of a folder: what is said of it, and what else is in it."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / ABOUT).write_text(json.dumps(about | {"files": files}, indent=1))


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder, which becomes `folder` when it is left without an error."""
    beside = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        yield beside
        try:
            os.replace(beside, folder)
        except OSError:  # another process was first, with the same content
            if not is_whole(folder):
                shutil.rmtree(folder)
                os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_whole(path: pathlib.Path, text: str) -> None:
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


# ---- chunks --------------------------------------------------------------------------------------


def _make(
    folder: pathlib.Path, partial: pathlib.Path, source: Source, tokenizer: Tokenizer
) -> None:
    """Tokenises what `partial` has not yet, and makes the flat files of it."""
    for torn in partial.glob("*.tmp"):
        torn.unlink()
    names: list[str] = []
    new = _not_done(_chunks(source.parts()), partial, names)
    few = list(itertools.islice(new, SMALL)) if tokenizer.files else []
    if len(few) < SMALL:
        for path, parts in itertools.chain(few, new):
            workers.write(path, parts, tokenizer)
    else:
        with workers.Pool(tokenizer, cores()) as pool:
            for path, parts in _told(itertools.chain(few, new), source.name):
                pool.write(path, parts)
            pool.wait()
    with new_folder(folder) as made:
        _flatten([partial / name for name in names], made, source, tokenizer)


def _chunks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    chunk, size = [], 0
    for part in parts:
        chunk.append(part)
        size += len(part.text) + 100  # documents without text take room as well
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _not_done(
    chunks: Iterable[list[Part]], partial: pathlib.Path, names: list[str]
) -> Iterator[tuple[pathlib.Path, list[Part]]]:
    """The chunks that have no file yet, and the file; `names` gets the names of all."""
    for number, parts in enumerate(chunks):
        digest = hashlib.sha256()
        for part in parts:
            digest.update(f"{len(part.text)} {part[1:]}\n".encode())
            digest.update(part.text)
        names.append(f"{number:08}-{digest.hexdigest()[:16]}.npz")
        path = partial / names[-1]
        if not zipfile.is_zipfile(path):
            yield path, parts


def _told(chunks: Iterable, name: str) -> Iterator:
    """`chunks`; says on stderr from time to time how much text has passed, where it takes long."""
    start = said = time.monotonic()
    size = 0
    for path, parts in chunks:
        yield path, parts
        size += sum(len(part.text) for part in parts)
        if time.monotonic() > said + PROGRESS:
            said = time.monotonic()
            print(f"tokenising --dataset={name}: {size / 1e6:,.0f} MB of text in {said - start:.0f} s",
                  file=sys.stderr, flush=True)  # fmt: skip


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- flat files ----------------------------------------------------------------------------------


def _flatten(
    chunks: list[pathlib.Path], folder: pathlib.Path, source: Source, tokenizer: Tokenizer
) -> None:
    """Writes the tokens of all chunks, in order, and where documents begin; what is in them last."""
    kept = {split: [0, 0] for split in SPLITS}  # tokens and bytes of text so far
    as_rows = source.form() != conversations.TEXT
    rows = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        files = {
            (split, what): stack.enter_context((folder / f"{split}.{what}").open("wb"))
            for split in SPLITS
            for what in (*FILES, *([TARGETS] if as_rows else []))
        }
        for path in chunks:
            with np.load(path) as chunk:
                tokens, held_out, begins = (chunk[k] for k in ("tokens", "held_out", "begins"))
                sizes = np.stack([chunk["lengths"], chunk["sizes"]], axis=1)
                targets, firsts = (chunk[k] if as_rows else None for k in (TARGETS, "firsts"))
            for split, mine in ((TRAIN, ~held_out), (HELD_OUT, held_out)):
                before = np.cumsum(sizes[mine], axis=0) - sizes[mine] + kept[split]
                for what, column in zip(("starts", "texts"), before[begins[mine]].T, strict=True):
                    column.tofile(files[split, what])
                of_tokens = np.repeat(mine, sizes[:, 0])
                tokens[of_tokens].tofile(files[split, "tokens"])
                if as_rows:
                    targets[of_tokens].tofile(files[split, TARGETS])
                    rows[split] += int(firsts[mine].sum())
                kept[split] = [
                    a + int(b) for a, b in zip(kept[split], sizes[mine].sum(0), strict=True)
                ]
    if kept[TRAIN][1] + kept[HELD_OUT][1] == 0:
        raise DataError(f"--dataset={source.name} is empty; use a file with text in it")
    if not source.whole and not (kept[TRAIN][0] and kept[HELD_OUT][0]):
        _hold_out_the_end(folder, kept, tokenizer)
    digest = hashlib.sha256()
    told = ["tokens", *(["starts"] if tokenizer.files else []), *([TARGETS] if as_rows else [])]
    for what in told:
        for split in SPLITS:
            with (folder / f"{split}.{what}").open("rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
    about = {
        "fingerprint": digest.hexdigest(),
        "dtype": workers.dtype(tokenizer).name,
        "bytes": {split: kept[split][1] for split in SPLITS},
        **({"rows": rows} if as_rows else {}),
    }
    write_about(folder, about)


def _hold_out_the_end(folder: pathlib.Path, kept: dict[str, list[int]], tokenizer: Tokenizer):
    """Too few documents to split by document: holds out the last twentieth of the tokens.

    Of a document that this cuts, the second part is a document of its own.
    """
    whole = max(SPLITS, key=lambda split: kept[split][0])
    if whole == HELD_OUT:
        for what in FILES:
            os.replace(folder / f"{HELD_OUT}.{what}", folder / f"{TRAIN}.{what}")
    total, size = kept[whole]
    tokens = np.memmap(folder / f"{TRAIN}.tokens", workers.dtype(tokenizer), "r")
    starts, texts = (np.fromfile(folder / f"{TRAIN}.{what}", np.int64) for what in FILES[1:])
    cut = total - max(1, total // 20)
    before = bytes_before(Split(tokens, starts, texts, size), cut, tokenizer)
    tokens[cut:].tofile(folder / f"{HELD_OUT}.tokens")
    os.truncate(folder / f"{TRAIN}.tokens", cut * workers.dtype(tokenizer).itemsize)
    within = [] if cut in starts else [0]
    for what, column, at in (("starts", starts, cut), ("texts", texts, before)):
        later = np.concatenate([np.array(within, np.int64), column[starts >= cut] - at])
        later.tofile(folder / f"{HELD_OUT}.{what}")
        column[starts < cut].tofile(folder / f"{TRAIN}.{what}")
    kept[TRAIN], kept[HELD_OUT] = [cut, before], [total - cut, size - before]


# ---- bytes behind tokens -------------------------------------------------------------------------


def bytes_before(split: Split, position: int, tokenizer: Tokenizer) -> int:
    """Bytes of text that the first `position` tokens stand for.

    Exact where a token ends a character. Of a character that the position cuts no byte counts, and
    where a document is cut that the tokenizer normalises (Unicode's NFC), its normal form counts.
    """
    if position >= len(split.tokens):
        return split.bytes
    # The last document that begins there or before: one that is empty may precede it.
    document = np.searchsorted(split.starts, position, side="right") - 1
    first = split.starts[document]
    return int(split.texts[document]) + tokenizer.text_bytes(split.tokens[first:position])
