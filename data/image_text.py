"""Pairs of a picture and its captions from files.

find("photos")          # a folder: 17.jpg with 17.txt, or a table whose rows name their files
find("'web/*.parquet'") # rows with an encoded picture and captions
find("shards")          # tar files, as WebDataset has them: 17.jpg with 17.txt or 17.json

An encoded picture is a range of bytes in a file, so pictures are decoded in any order, when they are
needed. Those of Parquet files and of the Hub are first copied into one file of the cache.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import pathlib
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from data import DataError, buckets, cache_dir, hub, sources
from data.images import SUFFIXES, TEST, check_columns

CAPTION = ("caption", "text", "captions")  # columns that are looked for, in this order
FILE = "file_name"  # column of a picture's path, relative to its table
MOST_HELD_OUT = 1_000  # pairs that are held out of a dataset without a part for it


class Place(NamedTuple):
    """Where an encoded picture is."""

    file: pathlib.Path
    first: int
    size: int

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.first)
            return file.read(self.size)


class Pair(NamedTuple):
    name: str  # the picture's in the dataset: decides whether it is held out, and is in messages
    place: Place
    captions: tuple[str, ...]
    unused: tuple[str, ...] = ()  # columns of its row that nothing reads


Pairs = tuple[list[Pair], list[Pair]]  # to train on, held out


def find(dataset: str, image: str = "image", caption: str = "") -> Pairs | None:
    """The pairs of a dataset; None if it has no captions, but perhaps classes.

    Args:
      dataset: a folder, a file, a pattern of files, or hf:NAME if `caption` is given.
      image, caption: columns of tables; without `caption`, the first of CAPTION.

    Raises DataError if a picture has no caption, or a caption no picture.
    """
    if dataset.startswith("hf:"):
        return _from_hub(dataset, image, caption) if caption else None
    root, files = _files(dataset)
    tars = [file for file in files if file.suffix.lower() == ".tar"]
    if tars:
        check_columns(dataset, {"image_column": image})
        return _split(
            [*itertools.chain(*(_in_tar(dataset, file, root, caption) for file in tars))], dataset
        )
    pictures = {file.with_suffix("") for file in files if file.suffix.lower() in SUFFIXES}
    beside = [file for file in files if file.with_suffix("") in pictures]
    tables = [file for file in files if file not in beside and sources.kind(file) != "text"]
    columns = {file: _caption_column(dataset, file, caption) for file in tables}
    if tables := [file for file in tables if columns[file]]:
        rows = (_in_table(dataset, file, root, image, columns[file]) for file in tables)
        return _split([*itertools.chain(*rows)], dataset)
    if {".txt", *sources.JSON}.isdisjoint(file.suffix.lower() for file in beside):
        if any(file.parent == root for file in beside):
            raise DataError(
                f"--dataset={dataset} has pictures without captions; add {beside[0].stem}.txt beside "
                f"{beside[0].name}, a metadata.jsonl with {FILE} and {CAPTION[0]}, or a subfolder for "
                "each class"
            )
        return None
    check_columns(dataset, {"image_column": image})
    listed = (
        (file.relative_to(root).as_posix(), Place(file, 0, file.stat().st_size)) for file in files
    )
    return _split([*_joined(dataset, "", listed, caption)], dataset)


def _files(dataset: str) -> tuple[pathlib.Path, list[pathlib.Path]]:
    """(the folder of a dataset, the files in it that count)."""
    path = buckets.local(dataset, f"--dataset={dataset}")
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        return path, [file for file in inside if not buckets.is_hidden(file.relative_to(path))]
    paths = sorted(map(pathlib.Path, glob.glob(str(path), recursive=True)))
    files = [file for file in paths if file.is_file()]
    return pathlib.Path(os.path.commonpath([file.parent for file in files] or ["."])), files


def _split(pairs: list[Pair], dataset: str) -> Pairs:
    """Holds out the parts named like test, or a tenth of the pairs, always the same ones."""
    held_out = {pair.name for pair in pairs if _is_test(pair.name)}
    if len(held_out) in (0, len(pairs)):
        if len(pairs) < 2:
            raise DataError(
                f"--dataset={dataset} has {len(pairs)} pairs of a picture and a caption, and one is "
                "held out; add pairs"
            )
        names = sorted((pair.name for pair in pairs), key=_at_random)
        held_out = {*names[: max(1, min(len(names) // 10, MOST_HELD_OUT))]}
    return (
        [pair for pair in pairs if pair.name not in held_out],
        [pair for pair in pairs if pair.name in held_out],
    )


def _is_test(name: str) -> bool:
    """Whether a pair's folder, table or shard is named like test or validation."""
    around = re.split(r"/| row ", name.lower())[:-1]
    return any(re.split(r"[._-]", part)[0] in TEST for part in around)


def _at_random(name: str) -> bytes:
    return hashlib.sha256(os.fsencode(name)).digest()


def _texts(value: Any, where: str, column: str) -> tuple[str, ...]:
    """A row's captions. Raises DataError if there is none."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"{where} has no caption in {column}; add one, or remove the pair")
    return tuple(text.strip() for text in texts)


# ---- a picture and its caption side by side, in a folder or in a tar file ------------------------


def _in_tar(dataset: str, file: pathlib.Path, root: pathlib.Path, caption: str) -> Iterator[Pair]:
    """Pairs of a shard, by the names of its members up to their first dot."""
    name = file.relative_to(root).as_posix()
    try:
        with tarfile.open(file, "r:") as tar:
            members = [x for x in tar if x.isfile() and not buckets.is_hidden(x.name)]
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(
            f"--dataset={dataset}: {name} is not a complete, uncompressed tar file "
            f"({buckets.reason(error)}); write it again"
        ) from None
    listed = ((x.name, Place(file, x.offset_data, x.size)) for x in members)
    return _joined(dataset, f"{name}/", listed, caption)


def _joined(
    dataset: str, prefix: str, listed: Iterable[tuple[str, Place]], caption: str
) -> Iterator[Pair]:
    """Joins files by their names: a picture, and a .txt or .json with its caption."""
    samples: dict[str, dict[str, tuple[str, Place]]] = {}
    for name, place in listed:
        folder, _, last = name.rpartition("/")
        # Other members of a shard's sample have two suffixes: 17.mask.png.
        stem, _, suffix = last.partition(".") if prefix else last.rpartition(".")
        suffix = f".{suffix.lower()}"
        kind = "picture" if suffix in SUFFIXES else suffix
        if kind in ("picture", ".txt", ".json"):
            samples.setdefault(f"{folder}/{stem}", {})[kind] = name, place
    for sample in samples.values():
        name, place = sample.get("picture") or next(iter(sample.values()))
        where = f"--dataset={dataset}: {prefix}{name}"
        text = sample.get(".txt") or sample.get(".json")
        if text is None:
            stem = name.rpartition(".")[0]
            raise DataError(f"{where} has no caption; add {stem}.txt or {stem}.json, or remove it")
        if "picture" not in sample:
            raise DataError(f"{where} has no picture ({', '.join(SUFFIXES)}); add it, or remove it")
        captions, unused = _caption_of(text, f"--dataset={dataset}: {prefix}", caption)
        yield Pair(prefix + name, place, captions, unused)


def _caption_of(
    text: tuple[str, Place], where: str, caption: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The captions in a .txt or .json file, and the columns of the latter that nothing reads."""
    name, place = text
    try:
        content = place.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{where}{name} is not UTF-8; convert the file") from None
    (content,) = hub.without_nul([content], f"{where}{name}")
    if name.lower().endswith(".txt"):
        return _texts(content, where + name, "it"), ()
    try:
        row = json.loads(content)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}{name} is not JSON ({error.msg}); fix it") from None
    row = row if isinstance(row, dict) else {}
    column = caption or next((x for x in CAPTION if x in row), CAPTION[0])
    return _texts(row.get(column), where + name, repr(column)), _others(row, column)


# ---- rows ----------------------------------------------------------------------------------------


def _caption_column(dataset: str, file: pathlib.Path, caption: str) -> str:
    """The column of a table that has captions; "" if none has. Raises DataError."""
    _, row = next(sources.rows_of_file(dataset, file), ("", {}))
    if caption and caption not in row:
        columns = ", ".join(
            repr(name) for name, value in row.items() if isinstance(value, str | list)
        )
        raise DataError(
            f"--dataset={dataset}: {file.name} has no column {caption!r}; set --caption_column to one "
            f"of {columns}"
        )
    return caption or next((column for column in CAPTION if column in row), "")


def _in_table(
    dataset: str, file: pathlib.Path, root: pathlib.Path, image: str, caption: str
) -> Iterator[Pair]:
    """Pairs of a file's rows, whose pictures are encoded in them or named by them."""
    name, facts = file.relative_to(root).as_posix(), file.stat()
    with _cached(f"{file.absolute()} {facts.st_size} {facts.st_mtime_ns} {image}") as keep:
        for number, (where, row) in enumerate(sources.rows_of_file(dataset, file), start=1):
            captions = _texts(row.get(caption), where, repr(caption))
            picture = row.get(FILE) or row.get(image)
            unused = _others(row, FILE, image, caption)
            if isinstance(picture, dict):  # as `datasets` writes them
                picture = picture.get("bytes") or picture.get("path")
            if isinstance(picture, bytes):
                yield Pair(f"{name} row {number}", keep(picture), captions, unused)
                continue
            if not isinstance(picture, str):
                columns = ", ".join(map(repr, row))
                raise DataError(
                    f"{where} has no picture in {FILE!r} or {image!r}; set --image_column to one of "
                    f"{columns}"
                )
            path = file.parent / picture
            if not path.is_file():
                raise DataError(f"{where} names {path}, which does not exist; add it")
            place = Place(path, 0, path.stat().st_size)
            yield Pair(f"{name} row {number}", place, captions, unused)


def _others(row: dict[str, Any], *used: str) -> tuple[str, ...]:
    return tuple(sorted({*row} - {*used}))


def _from_hub(dataset: str, image: str, caption: str) -> Pairs:
    """Pairs of a dataset of the Hub."""
    splits, parts = hub.load(dataset.removeprefix("hf:"), dataset), []
    for name, split in zip(("train", "test"), splits, strict=True):
        if split is None:
            continue
        encoded: Any = split
        encoded = encoded.cast_column(image, hub.library().Image(decode=False))
        pairs = []
        with _cached(f"{dataset} {name} {image}", again=True) as keep:
            for number, row in enumerate(hub.read_errors(encoded, dataset), start=1):
                where = f"--dataset={dataset}: row {number}"
                if caption not in row:
                    columns = ", ".join(map(repr, row))
                    raise DataError(
                        f"{where} has no column {caption!r}; set --caption_column to one of {columns}"
                    )
                content = row[image]["bytes"] or pathlib.Path(row[image]["path"]).read_bytes()
                captions = _texts(row[caption], where, repr(caption))
                unused = _others(row, image, caption)
                pairs.append(Pair(f"{name} row {number}", keep(content), captions, unused))
        parts.append(pairs)
    return (parts[0], parts[1]) if len(parts) == 2 else _split(parts[0], dataset)


@contextlib.contextmanager
def _cached(key: str, again: bool = False) -> Iterator[Callable[[bytes], Place]]:
    """Yields a function that appends bytes to a file of the cache, and returns their place.

    Args:
      key: says what the bytes will be; they are not written if the file of this key exists.
      again: write it even then.
    """
    path = cache_dir() / "pictures" / hashlib.sha256(key.encode()).hexdigest()[:32]
    mine, first = path.with_suffix(f".{os.getpid()}"), 0
    is_new = again or not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with mine.open("wb") if is_new else contextlib.nullcontext() as file:

        def keep(content: bytes) -> Place:
            nonlocal first
            if file is not None:
                file.write(content)
            first += len(content)
            return Place(path, first - len(content), len(content))

        try:
            yield keep
        except BaseException:
            mine.unlink(missing_ok=True)
            raise
    if is_new and first:
        mine.rename(path)
    elif is_new:
        mine.unlink()
