"""Tokenizes documents into flat files, once, and keeps these in the cache folder.

A corpus is tokenized in chunks (chunks.py). Each finished chunk is a file, so a kill loses only the
unfinished ones. When all chunks are done, one rename publishes the flat files: a partial corpus is
never readable.
"""

import contextlib
import fcntl
import hashlib
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

from data import DataError, buckets, cache_dir, chunks, conversations, hub, sources
from data.cached_files import replace, stamp
from data.sources import Part, Source
from data.tokenizer import BYTES, Tokenizer

CODE = 6  # increase it when the same text would give different files
CHUNK = 2**21  # bytes of text
TRAIN, HELD_OUT = SPLITS = ("train", "held_out")
ABOUT = "about.json"
FILES = ("tokens", "starts", "texts")  # each split has these
TARGETS = "targets"  # each split of conversations has this too
PROGRESS = 30.0  # seconds between progress lines


class Split(NamedTuple):
    """One document after another, each with the tokenizer's ids before and after it."""

    tokens: np.ndarray  # uint16 or uint32 [tokens], memory-mapped
    starts: np.ndarray  # int64 [documents], memory-mapped: where each begins in `tokens`
    texts: np.ndarray  # int64 [documents], memory-mapped: where each begins in the text, in bytes
    bytes: int  # UTF-8 bytes of text; for conversations, of the text that their targets stand for
    targets: np.ndarray | None = None  # bool [tokens], memory-mapped; None: all tokens are targets
    rows: int = 0  # rows of conversations; each can become several documents
    ignored: int = 0  # rows whose tools the chat template ignores
    spells: int = 0  # documents or rows whose text spells a control token
    source: str = ""  # the dataset's name
    path: pathlib.Path = pathlib.Path()  # prefix of files that are derived from this split

    def bytes_before(self, position: int, tokenizer: Tokenizer) -> int:
        """Bytes of text that the first `position` tokens stand for.

        Exact where a token ends a character. A character that `position` cuts counts as no bytes.
        In a document that it cuts, a normalizing tokenizer (Unicode NFC) counts the normal form.
        """
        if position >= len(self.tokens):
            return self.bytes
        # The last document that begins here or before; an empty one may precede it.
        document = np.searchsorted(self.starts, position, side="right") - 1
        first = self.starts[document]
        return int(self.texts[document]) + tokenizer.text_bytes(self.tokens[first:position])


class Corpus(NamedTuple):
    train: Split
    held_out: Split
    fingerprint: str  # sha256 of tokens, of starts unless in bytes, and of any targets
    folder: pathlib.Path  # in the cache
    weight: float = 1.0  # share of training rows, relative to other corpora
    unused: tuple[str, ...] = ()  # columns that nothing reads


def load(
    dataset: str, column: str, tokenizer: Tokenizer, train_only: bool = False, flag: str = "dataset"
) -> list[Corpus]:
    """The tokens of all sources that --dataset names. Raises DataError as `prepare` does.

    Args:
      dataset, column, train_only: see `sources.find`.
      flag: names `dataset` in errors.
    """
    try:
        return [prepare(source, tokenizer) for source in sources.find(dataset, column, train_only)]
    except DataError as error:
        raise DataError(str(error).replace("--dataset=", f"--{flag}=")) from error


def prepare(source: Source, tokenizer: Tokenizer = BYTES) -> Corpus:
    """The tokens of a source, from the cache if it has them.

    The cache identifies a local source by its content, and a Hub dataset by its newest commit, or
    by the last one used if the Hub can't be reached. Conversations also depend on the chat template.

    Raises DataError if there is no text or it can't be read; then nothing is left in the cache.
    Also raises DataError if the cache can't be written; finished chunks are kept then.
    """
    with cached():
        return _read(_prepared(source, tokenizer), source)


def _prepared(source: Source, tokenizer: Tokenizer) -> pathlib.Path:
    """The folder of a source's flat files; makes them if they are missing."""
    remembered, content = _content(source)
    key = [CODE, content, source.column, tokenizer.sha256, *tokenizer.added]
    key += ["whole"] if source.train_only else []
    folder = _folder(key)
    if not is_whole(folder):
        of_conversations = _folder([*key, tokenizer.chat_key])
        if is_whole(of_conversations) or source.form() != conversations.TEXT:
            folder = of_conversations
    if not is_whole(folder):
        with _locked(folder.with_suffix(".partial")) as partial:
            try:
                if not is_whole(folder):  # otherwise another process has made it meanwhile
                    if remembered and source.files:
                        replace(remembered, content)
                    _make(folder, partial, source, tokenizer)
                    if _has_changed(source, remembered, content):
                        shutil.rmtree(folder)
                        raise DataError(
                            f"--dataset={source.name} was changed while it was read; start again"
                        )
                shutil.rmtree(partial)
            except DataError:
                shutil.rmtree(partial, ignore_errors=True)
                if remembered and source.files:
                    remembered.unlink(missing_ok=True)
                raise
    if remembered and not source.files:
        replace(remembered, content)  # the cache may hold several commits: this was used last
    return folder


# ---- the cache -----------------------------------------------------------------------------------


@contextlib.contextmanager
def cached() -> Iterator[None]:
    """Turns an OSError into a DataError about the cache: sources raise only DataErrors."""
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
    """Returns (file that remembers the digest, sha256 of the files' names and content).

    Reads every byte once, then remembers the digest by the files' sizes and times. A Hub dataset
    has its name and commit in place of a digest.
    """
    if not source.files:
        where = hashlib.sha256(source.name.encode()).hexdigest()[:16]
        remembered = cache_dir() / "text" / f"{where}.content"
        if commit := hub.commit(source.name.removeprefix("hf:"), source.name):
            return remembered, f"{source.name}@{commit}"
        return (remembered, remembered.read_text()) if remembered.exists() else (None, source.name)
    with sources.reading(source.name):
        remembered = cache_dir() / "text" / f"{stamp(source.files)}.content"
    if remembered.exists():
        return remembered, remembered.read_text()
    digest, root = hashlib.sha256(), os.path.commonpath([str(p.parent) for p in source.files])
    with sources.reading(source.name):
        for path in source.files:
            size = path.stat().st_size
            digest.update(os.fsencode(path.relative_to(root).as_posix()))  # may not be UTF-8
            digest.update(f"\n{size}\n".encode())
            _hash(path, digest)
    return remembered, digest.hexdigest()


def _hash(path: pathlib.Path, digest) -> None:
    """Adds a file's content to a digest."""
    with path.open("rb") as file:
        hashlib.file_digest(file, lambda: digest)


def _has_changed(source: Source, remembered: pathlib.Path | None, content: str) -> bool:
    """Whether the source has changed since `_content` returned this."""
    if source.files:
        try:
            return _content(source)[0] != remembered
        except DataError:  # a file is gone
            return True
    commit = hub.commit(source.name.removeprefix("hf:"), source.name)
    return bool(commit) and content != f"{source.name}@{commit}"


def is_whole(folder: pathlib.Path) -> bool:
    """Whether all files that ABOUT lists are there, with their full sizes."""
    try:
        sizes = json.loads((folder / ABOUT).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _read(folder: pathlib.Path, source: Source) -> Corpus:
    about = json.loads((folder / ABOUT).read_text())
    kinds = zip(FILES, (about["dtype"], np.int64, np.int64), strict=True)
    kinds = dict(kinds) | ({TARGETS: bool} if "rows" in about else {})

    def split(name: str) -> Split:
        files = {what: _mapped(folder / f"{name}.{what}", kind) for what, kind in kinds.items()}
        counts = {what: about.get(what, {}).get(name, 0) for what in ("rows", "ignored", "spells")}
        return Split(
            **files, **counts, bytes=about["bytes"][name], source=source.name, path=folder / name
        )

    return Corpus(
        split(TRAIN), split(HELD_OUT), about["fingerprint"], folder, source.weight,
        tuple(about.get("unused", ())),
    )  # fmt: skip


def _mapped(path: pathlib.Path, kind) -> np.ndarray:
    """A flat file as an array; an empty file can't be mapped."""
    return np.memmap(path, kind, "r") if path.stat().st_size else np.empty(0, kind)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes `folder` and holds its lock until the block ends or this process dies.

    At the end, removes empty folders, up to the cache folder itself.
    """
    try:
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("a") as lock:
                with contextlib.suppress(OSError):  # without locks, all do the same work
                    fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    is_current = os.path.samestat(os.stat(folder / "lock"), os.fstat(lock.fileno()))
                except FileNotFoundError:  # its previous owner has finished or given up
                    is_current = False
                if is_current:
                    yield folder
                    return
    finally:
        for empty in (folder.parent, folder.parent.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()


def write_about(folder: pathlib.Path, about: dict[str, Any]) -> None:
    """Writes a folder's last file: facts about it, and the sizes of its other files."""
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / ABOUT).write_text(json.dumps(about | {"files": files}, indent=1))


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder, which is renamed to `folder` at the end unless there is an error."""
    temporary = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        yield temporary
        try:
            os.replace(temporary, folder)
        except OSError:  # another process was first, with the same content
            if not is_whole(folder):
                shutil.rmtree(folder)
                os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ---- chunks --------------------------------------------------------------------------------------


def _make(
    folder: pathlib.Path, partial: pathlib.Path, source: Source, tokenizer: Tokenizer
) -> None:
    """Tokenizes the chunks that `partial` lacks, and makes the flat files from all chunks."""
    for torn in partial.glob("*.tmp"):
        torn.unlink()
    names: list[str] = []
    todo = _not_done(chunks.groups(source.parts(), CHUNK), partial, names)
    chunks.write_all(_with_progress(todo, source.name), tokenizer, cores())
    with new_folder(folder) as made:
        _flatten([partial / name for name in names], made, source, tokenizer)


def _not_done(
    parts_of_chunks: Iterable[list[Part]], partial: pathlib.Path, names: list[str]
) -> Iterator[tuple[pathlib.Path, list[Part]]]:
    """(file to write, parts) of each chunk that has no file yet; appends all chunks' `names`."""
    for number, parts in enumerate(parts_of_chunks):
        digest = hashlib.sha256()
        for part in parts:
            digest.update(f"{len(part.text)} {part[1:]}\n".encode())
            digest.update(part.text)
        names.append(f"{number:08}-{digest.hexdigest()[:16]}.npz")
        path = partial / names[-1]
        if not zipfile.is_zipfile(path):
            yield path, parts


def _with_progress(todo: Iterable, name: str) -> Iterator:
    """Passes chunks on; prints to stderr every PROGRESS seconds how much text has passed."""
    start = printed = time.monotonic()
    size = 0
    for path, parts in todo:
        yield path, parts
        size += sum(len(part.text) for part in parts)
        if time.monotonic() > printed + PROGRESS:
            printed = time.monotonic()
            print(f"tokenizing --dataset={name}: {size / 1e6:,.0f} MB of text in {printed - start:.0f} s",
                  file=sys.stderr, flush=True)  # fmt: skip


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- flat files ----------------------------------------------------------------------------------


def _flatten(
    paths: list[pathlib.Path], folder: pathlib.Path, source: Source, tokenizer: Tokenizer
) -> None:
    """Writes the tokens of all chunks, in order, and where documents begin; ABOUT comes last."""
    kept: dict[str, list[int]] = {split: [0, 0] for split in SPLITS}  # tokens and bytes so far
    has_rows = source.form() != conversations.TEXT
    rows: dict[str, int] = dict.fromkeys(SPLITS, 0)
    ignored: dict[str, int] = dict.fromkeys(SPLITS, 0)
    spells: dict[str, int] = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        files = {
            (split, what): stack.enter_context((folder / f"{split}.{what}").open("wb"))
            for split in SPLITS
            for what in (*FILES, *([TARGETS] if has_rows else []))
        }
        for path in paths:
            with np.load(path) as chunk:
                tokens, held_out, begins = (chunk[k] for k in ("tokens", "held_out", "begins"))
                do_spell = chunk["spells"]
                sizes = np.stack([chunk["lengths"], chunk["sizes"]], axis=1)
                of_rows = [chunk[k] for k in (TARGETS, "firsts", "ignored")] if has_rows else []
            for split, chosen in ((TRAIN, ~held_out), (HELD_OUT, held_out)):
                before = np.cumsum(sizes[chosen], axis=0) - sizes[chosen] + kept[split]
                for what, column in zip(("starts", "texts"), before[begins[chosen]].T, strict=True):
                    column.tofile(files[split, what])
                spells[split] += int(do_spell[chosen].sum())
                of_tokens = np.repeat(chosen, sizes[:, 0])
                tokens[of_tokens].tofile(files[split, "tokens"])
                if of_rows:
                    targets, firsts, have_ignored = of_rows
                    targets[of_tokens].tofile(files[split, TARGETS])
                    rows[split] += int(firsts[chosen].sum())
                    ignored[split] += int(have_ignored[chosen].sum())
                kept[split] = [
                    a + int(b) for a, b in zip(kept[split], sizes[chosen].sum(0), strict=True)
                ]
    if kept[TRAIN][1] + kept[HELD_OUT][1] == 0:
        raise DataError(f"--dataset={source.name} is empty; use a file with text in it")
    if not source.train_only and not (kept[TRAIN][0] and kept[HELD_OUT][0]):
        _hold_out_the_end(folder, kept, tokenizer)
    digest = hashlib.sha256()
    hashed = ["tokens", *(["starts"] if tokenizer.files else []), *([TARGETS] if has_rows else [])]
    for what in hashed:
        for split in SPLITS:
            _hash(folder / f"{split}.{what}", digest)
    about = {
        "fingerprint": digest.hexdigest(),
        "dtype": tokenizer.dtype.name,
        "bytes": {split: kept[split][1] for split in SPLITS},
        "spells": spells,
        "unused": source.unused(),
        **({"rows": rows, "ignored": ignored} if has_rows else {}),
    }
    write_about(folder, about)


def _hold_out_the_end(folder: pathlib.Path, kept: dict[str, list[int]], tokenizer: Tokenizer):
    """Holds out the last twentieth of the tokens, for a source with too few documents to split.

    The part of a document after the cut becomes a document of its own.
    """
    source_split = max(SPLITS, key=lambda split: kept[split][0])
    if source_split == HELD_OUT:
        for what in FILES:
            os.replace(folder / f"{HELD_OUT}.{what}", folder / f"{TRAIN}.{what}")
    total, size = kept[source_split]
    tokens = np.memmap(folder / f"{TRAIN}.tokens", tokenizer.dtype, "r")
    starts, texts = (np.fromfile(folder / f"{TRAIN}.{what}", np.int64) for what in FILES[1:])
    cut = total - max(1, total // 20)
    before = Split(tokens, starts, texts, size).bytes_before(cut, tokenizer)
    tokens[cut:].tofile(folder / f"{HELD_OUT}.tokens")
    os.truncate(folder / f"{TRAIN}.tokens", cut * tokenizer.dtype.itemsize)
    within = [] if cut in starts else [0]
    for what, column, at in (("starts", starts, cut), ("texts", texts, before)):
        later = np.concatenate([np.array(within, np.int64), column[starts >= cut] - at])
        later.tofile(folder / f"{HELD_OUT}.{what}")
        column[starts < cut].tofile(folder / f"{TRAIN}.{what}")
    kept[TRAIN], kept[HELD_OUT] = [cut, before], [total - cut, size - before]
