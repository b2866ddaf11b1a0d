"""Finds the files that --dataset names, and reads their documents.

    stdlib                        # *.py of this Python, split into train and held-out by file
    notes.txt, folder, 'a/*.txt'  # text files: a document each; hidden ones are skipped
    docs.jsonl, docs.parquet      # JSON Lines, Parquet, CSV or TSV: the column `text`, or
                                  # conversations (conversations.py), by the first row's columns
    hf:org/name                   # a Hub dataset, or hf:org/name:config
    gs://bucket/docs.jsonl        # any such file in a bucket; it is copied into the cache
    a.parquet@0.7,b.jsonl@0.3     # several, with their shares of the training rows

Files may be compressed: .gz or, with the package zstandard, .zst.
"""

import codecs
import contextlib
import functools
import glob
import hashlib
import json
import os
import pathlib
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from data import DataError, buckets, conversations, delimited, hub
from data.conversations import COLUMNS, TEXT

HELD_OUT = 0.01  # share of the documents, if the dataset has no split for it
LONGEST = 2**17  # bytes of a document that are tokenized at once; see AT_ONCE in chunks.py
JSON = (".jsonl", ".ndjson", ".json", ".jsonlines", ".jl", ".ldjson", ".geojsonl")
TABLES = {
    ".csv": delimited.COMMA,
    ".tsv": delimited.TAB,
}  # suffix → what divides the cells of a row
KINDS = dict.fromkeys(JSON, "json") | dict.fromkeys(TABLES, "csv")
KINDS |= {".parquet": "parquet", ".txt": "text"}
# Data, not text: their braces and keys would be learned.
UNREAD = (
    ".json5",
    ".jsonc",
    ".hjson",
    ".geojson",
    ".arrow",
    ".feather",
    ".avro",
    ".orc",
    ".xlsx",
    ".xls",
    *(".npy", ".npz", ".pt", ".pkl", ".h5", ".hdf5", ".safetensors", ".tfrecord"),  # arrays
    *(".pdf", ".docx", ".zip", ".tar"),
)
COMPRESSED = (".gz", ".zst")
# Files beside data that describe it or mark it as complete: README.md, and _SUCCESS of Spark.
DESCRIBES = re.compile(
    r"(readme|license|licence|notice|citation|changelog|manifest|(md5|sha\d+)sums?)\b.*"
    r"|_.*|.*\.(crc|md5|sha\d+)",
    re.IGNORECASE,
)
DESCRIBES_JSON = (
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    *("croissant.json", "dataset-metadata.json"),
)
LOGS = ("_delta_log", "_spark_metadata")  # folders of files about others

Rows = Iterator[tuple[str, dict[str, Any]]]  # (place, row); the place is for messages


class Part(NamedTuple):
    """A document, or a part of one that is too long to be kept in memory and tokenized at once."""

    text: bytes  # UTF-8; a row of conversations has JSON from `conversations.checked`
    held_out: bool
    begins: bool  # whether a document begins here
    ends: bool  # whether it ends here
    row: str = ""  # place of a row of conversations, for messages


class Source(NamedTuple):
    """One of the datasets that --dataset names."""

    name: str
    weight: float
    files: list[pathlib.Path]  # to read; empty for a Hub dataset
    column: str
    train_only: bool  # whether nothing is held out
    form: Callable[[], str]  # form of its rows: TEXT, MESSAGES or PAIRS
    parts: Callable[[], Iterator[Part]]  # yields all documents, in order
    unused: Callable[[], list[str]]  # columns of its first row that nothing reads


def find(dataset: str, column: str = "text", train_only: bool = False) -> list[Source]:
    """Finds the sources that --dataset names.

    Args:
      column: the column with the text, in JSON Lines, Parquet and Hub datasets.
      train_only: holds out nothing, and drops a held-out split that the dataset has.

    Raises DataError if something named does not exist, or a weight is invalid.
    """
    if not dataset:
        raise DataError("--dataset= is empty; use stdlib, a path, or hf:NAME")
    if exists(dataset):  # even if its name has a comma or an @
        return [_source(dataset, 1.0, column, train_only)]
    names = [name.strip() for name in dataset.split(",")]
    return [_source(*_weighted(name, dataset), column, train_only) for name in names]


def check_column(column: str, *datasets: str) -> None:
    """Raises DataError if --text_column names a column, and no dataset has rows of text with columns.

    Args:
      datasets: values of --dataset and --eval_dataset; empty ones are skipped.
    """
    if column in ("text", "messages"):
        return
    chosen = [one for dataset in datasets if dataset for one in find(dataset, column)]
    if any(_has_columns(one) for one in chosen):
        return
    raise DataError(
        f"--text_column={column} is for rows of text with columns, and {chosen[0].name} has "
        f"{'conversations' if chosen[0].form() != TEXT else 'none'}; leave it out"
    )


def _has_columns(source: Source) -> bool:
    is_text = not source.name.startswith("hf:") and all(kind(x) == "text" for x in source.files)
    return not is_text and source.form() == TEXT


def _weighted(one: str, dataset: str) -> tuple[str, float]:
    """Parses NAME@WEIGHT into (name, weight)."""
    name, at, text = one.rpartition("@")
    if not at or exists(one):
        name, text = one, "1"
    try:
        weight = float(text)
    except ValueError:
        raise DataError(
            f"--dataset={dataset} gives {name} the weight {text!r}, which is not a number; write "
            f"{name}@0.5"
        ) from None
    if not 1e-6 <= weight <= 1e6:  # also rejects NaN
        raise DataError(
            f"--dataset={dataset} gives {name} the weight {text}; use one from 0.000001 to 1000000"
        )
    if not name:
        raise DataError(f"--dataset={dataset} has an empty name; use NAME@WEIGHT,NAME@WEIGHT")
    return name, weight


def exists(name: str) -> bool:
    """Whether a file or folder exists; False without permission to look."""
    return os.path.exists(os.path.expanduser(name))


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns an OSError into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"--dataset={name[:200]} can't be read ({buckets.reason(error)}); use another"
        ) from error


def _source(name: str, weight: float, column: str, train_only: bool) -> Source:
    columns = lambda: []  # noqa: E731
    form = lambda: TEXT  # noqa: E731
    if name == "stdlib":
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        files = walk(root, {"site-packages"}.__contains__, is_python)
        read = functools.partial(_by_file, files, root)
    elif name.startswith("hf:"):
        folder = pathlib.Path(os.path.expanduser(name.removeprefix("hf:")))
        with reading(name):
            files = _inside(folder) if folder.is_dir() else []
        columns = functools.cache(lambda: _hub_columns(name))
        form = functools.cache(lambda: conversations.form(columns(), column))
        read = functools.partial(_from_hub, name, column, train_only, form)
    else:
        remote = buckets.remote(name)
        with reading(name):
            paths = buckets.files(name, f"--dataset={name}") if remote else _files(name)
        files = _checked(name, paths)
        columns = functools.cache(lambda: _columns(files[0]))
        form = functools.cache(lambda: conversations.form(columns(), column))
        read = functools.partial(_from_files, name, files, column, train_only, form)

    def parts() -> Iterator[Part]:
        with reading(name):
            for part in read():
                yield part._replace(held_out=False) if train_only else part

    def unused() -> list[str]:
        used = {column} if form() == TEXT else {*COLUMNS[form()], *conversations.CONTEXT}
        return sorted({*columns()} - used)

    return Source(name, weight, files, column, train_only, form, parts, unused)


# ---- files ---------------------------------------------------------------------------------------


def _files(name: str) -> list[pathlib.Path]:
    path = pathlib.Path(os.path.expanduser(name))
    if path.is_file():
        return [path]
    if path.is_dir():
        os.listdir(path)  # raises without permission; walk would just find nothing
        paths, empty = _inside(path), "is an empty folder; add text files to it"
    elif glob.has_magic(name):
        paths = map(pathlib.Path, glob.iglob(str(path), recursive=True))
        empty = "matches no file; check the pattern, and quote it in a shell"
    else:
        raise DataError(f"--dataset={name} does not exist; use a file, a folder, or hf:NAME")
    files = sorted(p for p in paths if p.is_file() and not p.name.startswith("."))
    if not files:
        raise DataError(f"--dataset={name} {empty}")
    return files


def _inside(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files in a folder and its subfolders, without hidden ones, such as those in .git."""
    return walk(folder, buckets.is_hidden, lambda name: not buckets.is_hidden(name))


def walk(
    folder: pathlib.Path, skips: Callable[[str], bool], wanted: Callable[[str], bool]
) -> list[pathlib.Path]:
    """Files in a folder and its subfolders, sorted.

    Args:
      skips: name of a subfolder → whether to leave it out, unread.
      wanted: name of a file → whether to take it.
    """
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not skips(name)]
        files += [pathlib.Path(parent, name) for name in names if wanted(name)]
    return sorted(path for path in files if path.is_file())


def is_python(name: str) -> bool:
    return name.endswith(".py")


def rows(name: str) -> tuple[Rows, Rows | None]:
    """All rows of a dataset, with all columns: (to train on, held out or None if it has no split).

    Raises DataError, now or while they are read.
    """
    if name.startswith("hf:"):
        train, held_out = hub.load(name.removeprefix("hf:"), name)
        of_split = None if held_out is None else _numbered(name, "held-out row", held_out)
        return _numbered(name, "row", train), of_split
    with reading(name):
        remote = buckets.remote(name)
        paths = buckets.files(name, f"--dataset={name}") if remote else _files(name)
    files = _checked(name, paths)
    if text := [path for path in files if kind(path) == "text"]:
        raise DataError(
            f"--dataset={name}: {text[0].name} is text without columns; use .jsonl, .parquet or .csv files"
        )

    def every() -> Rows:
        for path in files:
            yield from rows_of_file(name, path)

    return every(), None


def rows_of_file(name: str, path: pathlib.Path) -> Rows:
    """Yields the rows of a local file, with all columns. Raises DataError."""
    with _explained(name, path):
        columns = hub.parquet_columns(path) if kind(path) == "parquet" else []
        yield from _rows(name, path, columns)


def _checked(name: str, files: list[pathlib.Path]) -> list[pathlib.Path]:
    """The files to read, without those that only describe them. Raises DataError if they aren't alike."""
    data = [file for file in files if not _describes(file)]
    if any(kind(file) != "text" for file in data):
        files = data
    if unread := [file for file in files if _suffix(file) in UNREAD]:
        raise DataError(
            f"--dataset={name}: {unread[0].name} is data of a kind that isn't read; convert it to JSON "
            "Lines, with the text in a column, or name the files to read with a pattern, as in "
            "'FOLDER/*.txt'"
        )
    # A page next to .jsonl files is not a document; a folder of source code is all text.
    other = [file for file in files if _suffix(file) not in KINDS]
    if other and any(kind(file) != "text" for file in files):
        raise DataError(
            f"--dataset={name} has {other[0].name} among .jsonl or .parquet files; name the files to "
            "read with a pattern, as in 'FOLDER/*.jsonl'"
        )
    return files


def _describes(path: pathlib.Path) -> bool:
    """Whether a file's name says that it describes the data in its folder."""
    if kind(path) == "text":
        return bool(DESCRIBES.fullmatch(path.name))
    return path.name in DESCRIBES_JSON or path.parent.name in LOGS


def _suffix(path: pathlib.Path) -> str:
    """The file's suffix in lower case, ignoring the compression's suffix."""
    name = pathlib.Path(path.name.lower())
    return pathlib.Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def kind(path: pathlib.Path) -> str:
    """Kind of file: json, csv, parquet or text."""
    return KINDS.get(_suffix(path), "text")


# ---- content -------------------------------------------------------------------------------------


def _by_file(files: list[pathlib.Path], root: pathlib.Path) -> Iterator[Part]:
    for path in files:
        held_out = _is_held_out(path.relative_to(root).as_posix().encode())
        yield from _cut(path.read_bytes(), held_out)


def _from_files(
    name: str, files: list[pathlib.Path], column: str, train_only: bool, form: Callable[[], str]
) -> Iterator[Part]:
    if form() != TEXT:
        rows = functools.partial(_rows_of_conversations, name, files, form())
        yield from _conversations(name, rows, form(), train_only)
        return
    for path in files:
        with _explained(name, path):
            if kind(path) == "text":
                yield from _text_file(path, f"--dataset={name}: {path.name}")
                continue
            for number, (where, row) in enumerate(_rows(name, path, [column]), start=1):
                if not isinstance(row, dict):
                    raise DataError(f"{where} is not a JSON object; fix it")
                if number == 1 and conversations.form(row, column) != TEXT:
                    raise DataError(
                        f"--dataset={name}: {path.name} has conversations, but not as JSON Lines, a row a "
                        f"line, or not like {files[0].name}; convert it, or name files of one kind"
                    )
                first = functools.partial(_first_without_text, row, column, name, files, path)
                yield from _document(_text(row, column, where, number, first))


def _from_hub(name: str, column: str, train_only: bool, form: Callable[[], str]) -> Iterator[Part]:
    """Reads a Hub dataset, or a local folder laid out like one."""
    train, held_out = hub.load(name.removeprefix("hf:"), name)
    if form() != TEXT:
        numbered = functools.partial(_numbered, name)
        has_split = train_only or held_out is not None
        yield from _conversations(name, lambda: numbered("row", train), form(), has_split)
        for where, row in numbered("held-out row", held_out or ()):
            yield Part(conversations.checked(row, form(), where), True, True, True, where)
        return
    for number, (where, row) in enumerate(_numbered(name, "row", train), start=1):
        first = functools.partial(_first_without_text, row, column, name)
        text = _text(row, column, where, number, first)
        yield from _document(text) if held_out is None else _cut(text, False)
    for number, (where, row) in enumerate(_numbered(name, "held-out row", held_out or ()), start=1):
        first = functools.partial(_first_without_text, row, column, name)
        yield from _cut(_text(row, column, where, number, first), True)


def _text(
    row: dict, column: str, where: str, number: int, of_first: Callable[[], DataError]
) -> bytes:
    """The text of row `number`. Raises DataError: `of_first` for the first row, which may have others."""
    text = row.get(column)
    if isinstance(text, str):
        if number == 1 and conversations.messages_of_text(text, column, where) != text:
            raise DataError(
                f"{where} has messages in the column {column!r}, whose JSON would be learned as text; name the "
                'column \'messages\', with messages like {"role": "user", "content": "…"}'
            )
        return text.encode(errors="replace")
    if column in row and text is None:
        raise DataError(
            f"{where} has null in the column {column!r}, not text; fill it, or remove the row"
        )
    if number > 1:
        raise DataError(
            f"{where} has no text in column {column!r}, which the rows before it have; give all rows "
            "the same columns"
        )
    raise of_first()


def _first_without_text(
    row: dict,
    column: str,
    name: str,
    files: Sequence[pathlib.Path] = (),
    path: pathlib.Path = pathlib.Path(),
) -> DataError:
    """The error for a first row without text in `column`: what to write that suits all files."""
    prefix = f"--dataset={name}: {path.name}" if len(files) > 1 else f"--dataset={name}"
    problem = f"{prefix} has no column {column!r}"
    if column in row:
        problem = f"{prefix} column {column!r} holds {type(row[column]).__name__}, not text"
    if files and path != files[0]:
        columns = ", ".join(map(repr, row)) or "none"
        return DataError(
            f"{problem}, which {files[0].name} has; it has {columns}: give all files the same columns, "
            "or name those that have it, as in 'FOLDER/*.jsonl'"
        )
    if chats := [key for key, value in row.items() if conversations.is_chat(value)]:
        return DataError(
            f"{problem}, but messages in {chats[0]!r}; name that column 'messages', with messages like "
            '{"role": "user", "content": "…"}'
        )
    texts = [key for key, value in row.items() if isinstance(value, str | None) and key != column]
    others = [columns for file in files if file != path and (columns := _columns(file))]
    shared = [key for key in texts if all(key in columns for columns in others)]
    if shared:
        return DataError(f"{problem}; set --text_column to one of {', '.join(map(repr, shared))}")
    if texts:
        return DataError(
            f"{problem}, and none of its columns is in all {len(files)} files; give all files the same "
            "columns"
        )
    columns = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in row.items())
    return DataError(
        f"{problem}, nor another one with text ({columns or 'none at all'}); write a row a line, like "
        '{"text": "…"}'
    )


def _rows(name: str, path: pathlib.Path, columns: list[str]) -> Rows:
    """Yields the rows of a JSON, CSV or Parquet file, the last with at least these columns."""
    where = f"--dataset={name}: {path.name}"
    if kind(path) == "json":
        yield from _json_rows(path, where)
        return
    if kind(path) == "csv":
        yield from delimited.rows(path, TABLES[_suffix(path)], where)
        return
    for number, row in enumerate(hub.parquet_rows(path, columns, conversations.CONTEXT), start=1):
        yield f"{where} row {number}", _from_arrow(row)


def _from_arrow(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the keys, inside its columns, that Arrow has added for other rows."""
    return {column: conversations.without_nulls(value) for column, value in row.items()}


def _json_rows(path: pathlib.Path, where: str) -> Rows:
    """Yields the rows of JSON Lines, or of a file with one JSON array."""
    begun = False
    with hub.text_file(path, "utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            is_first = not begun
            is_array = is_first and line.lstrip().startswith("[")
            begun = True
            try:
                if is_array:
                    for row in json.loads(line + file.read()):
                        yield where, row
                else:
                    yield f"{where} line {number}", json.loads(line)
            except json.JSONDecodeError as broken:
                number += broken.lineno - 1 if is_array else 0
                if is_first and line.lstrip().startswith("{") and _is_json(line + file.read()):
                    raise DataError(
                        f"{where} is one JSON object of several lines, not JSON Lines; write a row a "
                        "line, or a JSON array of rows"
                    ) from None
                raise DataError(
                    f"{where} line {number} is not JSON ({broken.msg}); fix it"
                ) from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


# ---- conversations -------------------------------------------------------------------------------


def _columns(path: pathlib.Path) -> list[str]:
    """Columns of a local file's first row; [] if broken: its reader will report the error."""
    try:
        if kind(path) == "json":
            with hub.text_file(path, "utf-8-sig") as file:
                row = json.loads(next(line for line in file if line.strip()))
                return list(row) if isinstance(row, dict) else []
        if kind(path) == "csv":
            _, row = next(delimited.rows(path, TABLES[_suffix(path)], ""))
            return list(row)
        return hub.parquet_columns(path) if kind(path) == "parquet" else []
    except Exception:
        return []


def _hub_columns(name: str) -> list[str]:
    train, _ = hub.load(name.removeprefix("hf:"), name)
    return list(next(iter(hub.read_errors(train, name)), ()))


def _rows_of_conversations(name: str, files: list[pathlib.Path], form: str) -> Rows:
    for path in files:
        if kind(path) == "text":
            raise DataError(
                f"--dataset={name}: {path.name} is text, but {files[0].name} has conversations; name the "
                "files to read with a pattern, as in 'FOLDER/*.jsonl', or give both: "
                "a.jsonl@0.7,b.txt@0.3"
            )
        with _explained(name, path):
            yield from _rows(name, path, COLUMNS[form])


def _numbered(name: str, what: str, rows: hub.Rows) -> Rows:
    for number, row in enumerate(hub.read_errors(rows, name), start=1):
        yield f"--dataset={name}: {what} {number}", _from_arrow(row)


def _conversations(
    name: str, rows: Callable[[], Rows], form: str, has_split: bool
) -> Iterator[Part]:
    """Yields a part for each row. Rows are held out like documents, but never in pieces.

    If this would hold out none or all of the rows, as it may if there are few, the last twentieth is
    held out instead, at least one row.

    Args:
      has_split: whether the dataset has a held-out split or needs none; then no row is held out.
    """
    first, kinds, count = None, set(), 0
    if not has_split:
        for where, row in rows():  # until one of each kind is found
            count += 1
            kinds.add(_is_held_out(conversations.checked(row, form, where)))
            if len(kinds) == 2:
                break
        else:
            first = count - max(1, count // 20)
        if count == 1:
            raise DataError(
                f"--dataset={name} has a single row, and one is held out to evaluate on; add rows, or "
                "use --eval_dataset=FILE for those to evaluate on, which may be the same file"
            )
    for number, (where, row) in enumerate(rows()):
        text = conversations.checked(row, form, where)
        held_out = not has_split and (_is_held_out(text) if first is None else number >= first)
        yield Part(text, held_out, True, True, where)


# ---- documents -----------------------------------------------------------------------------------


def _is_held_out(name: bytes) -> bool:
    return _small(hashlib.sha256(name))


def _small(digest) -> bool:
    return int.from_bytes(digest.digest()[:4], "big") < HELD_OUT * 2**32


def _document(text: bytes) -> Iterator[Part]:
    return _cut(text, _is_held_out(text))


def _cut(text: bytes, held_out: bool) -> Iterator[Part]:
    """Cuts a document after line breaks into parts of at most LONGEST bytes."""
    first = 0
    while True:
        end = _end(text, first)
        yield Part(text[first:end], held_out, first == 0, end == len(text))
        if end == len(text):
            return
        first = end


def _end(text: bytes, first: int = 0) -> int:
    """The end of the part that begins at `first`."""
    if len(text) - first <= LONGEST:
        return len(text)
    end = text.rfind(b"\n", first, first + LONGEST) + 1
    if not end:  # no line break: cut between two characters
        end = first + LONGEST
        while text[end] & 0xC0 == 0x80:
            end -= 1
    return end


def _text_file(path: pathlib.Path, where: str) -> Iterator[Part]:
    """Reads a document of any length in bounded memory: once for its hash, once for its parts."""
    digest, count = hashlib.sha256(), 0
    for block in _blocks(path, where):
        digest.update(block)
        count += 1
    held_out = _small(digest)
    for number, block in enumerate(_blocks(path, where), start=1):
        yield Part(block, held_out, begins=number == 1, ends=number == count)


def _blocks(path: pathlib.Path, where: str) -> Iterator[bytes]:
    """Yields a text file as UTF-8 with Unix line ends, cut like `_cut`; b"" if it is empty."""
    with hub.text_file(path, "utf-8-sig") as file:  # a byte order mark is no text
        buffered = b""
        for block in hub.without_nul(iter(lambda: file.read(LONGEST), ""), where):
            buffered += block.encode()
            while len(buffered) > LONGEST:
                end = _end(buffered)
                yield buffered[:end]
                buffered = buffered[end:]
        yield buffered


@contextlib.contextmanager
def _explained(name: str, path: pathlib.Path) -> Iterator[None]:
    """Turns an error of reading a local file into a DataError that explains it in one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the readers raise exceptions of their own
        raise DataError(f"--dataset={name}: {path.name} {_diagnosis(path, error)}") from error


def _diagnosis(path: pathlib.Path, error: Exception) -> str:
    if not path.stat().st_size:
        return "is empty; use a file with text in it"
    if path.suffix.lower() == ".zst" and isinstance(error, (ImportError, ValueError)):
        return f"can't be decompressed ({buckets.reason(error)}); pip install zstandard"
    if isinstance(error, UnicodeDecodeError) and path.suffix.lower() not in COMPRESSED:
        with path.open("rb") as file:
            start = file.read(2**16)
            if b"\0" in start and not start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                return "is not a text file; name the files to read with a pattern, as in 'FOLDER/*.txt'"
            file.seek(0)
            for number, line in enumerate(file, start=1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return f"line {number} is not UTF-8; convert the file"
    return f"could not be read as {kind(path)} ({buckets.reason(error)}); fix it"
