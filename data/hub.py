"""The Hugging Face Hub and the library `datasets`: imported late, quiet, with one-line errors."""

import gzip
import io
import itertools
import logging
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from data import DataError
from data.buckets import reason

Rows = Iterable[dict[str, Any]]
MODEL_NAME = r"(?!\.{1,2}/)[\w.-]+/[\w.-]+"  # ORG/NAME, not ./NAME
DATASET_NAME = rf"{MODEL_NAME}|\w[\w.-]*"  # old datasets have no ORG
SECONDS = 5  # limit for the Hub's response


def library():
    """Imports `datasets` only when needed: it takes 0.7 s, and a prepared corpus needs none of it."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors come back as exceptions
    datasets.disable_progress_bars()
    return datasets


def load(name: str, dataset: str) -> tuple[Rows, Rows | None]:
    """Loads the rows to train on and those to evaluate on, or None; they are read when needed.

    Args:
      name: NAME or NAME:CONFIG on the Hub, or a local folder laid out like a Hub dataset.
      dataset: --dataset's value, for messages.

    Raises DataError if there is no such dataset, or the Hub can't be reached.
    """
    name, _, config = name.partition(":")
    if not name:
        raise DataError(f"--dataset={dataset} names no dataset; use hf:NAME")
    name = os.path.expanduser(name)
    if not os.path.exists(name):
        if not re.fullmatch(DATASET_NAME, name):
            raise DataError(
                f"--dataset={dataset} does not exist; use a local folder, or hf:ORG/NAME of the Hub"
            )
        answer = _ask(name, "dataset", f"--dataset={dataset}")
        if isinstance(answer, DataError):
            raise answer
    try:
        splits: Any = library().load_dataset(name, config or None, streaming=True)
    except Exception as error:
        if _is_offline() and not os.path.exists(name):
            raise DataError(offline(f"--dataset={dataset}", "dataset")) from None
        raise DataError(
            f"--dataset={dataset} could not be loaded ({reason(error)}); check its name"
        ) from error
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    held_out = next((splits[name] for name in ("validation", "test") if name in splits), None)
    return train, None if held_out is train else held_out


def commit(name: str, dataset: str) -> str:
    """The newest commit of a Hub dataset; "" if the Hub can't be reached.

    Takes the arguments of `load`. Raises DataError if there is no such dataset.
    """
    name = name.partition(":")[0]
    if not name or os.path.exists(os.path.expanduser(name)):
        return ""
    answer = _ask(name, "dataset", f"--dataset={dataset}")
    return answer if isinstance(answer, str) else ""


def parquet_rows(path: pathlib.Path, columns: list[str], optional: Sequence[str] = ()) -> Rows:
    """Yields columns of a local file's rows; without one of `columns`, only the first row, whole.

    That row lacks columns of other kinds than text that it has no value for.

    Args:
      optional: columns that a file may have, too.
    """
    library()
    # With pyarrow directly: streaming with `datasets` holds a whole row group in memory.
    from datasets.packaged_modules.parquet import parquet

    with parquet.pq.ParquetFile(path, buffer_size=2**16) as file:
        names = file.schema_arrow.names
        if not {*columns} <= {*names}:
            texts = _text_columns(file.schema_arrow)
            for batch in itertools.islice(file.iter_batches(1, use_threads=False), 1):
                for row in batch.to_pylist():
                    yield {k: cell for k, cell in row.items() if cell is not None or k in texts}
            return
        columns = [*columns, *(name for name in optional if name in names)]
        for batch in file.iter_batches(64, columns=columns, use_threads=False):
            yield from batch.to_pylist()


def parquet_columns(path: pathlib.Path) -> list[str]:
    library()
    from datasets.packaged_modules.parquet import parquet

    with parquet.pq.ParquetFile(path) as file:
        return file.schema_arrow.names


def _text_columns(schema) -> set[str]:
    kinds = ("string", "large_string", "string_view")  # also as the values of a dictionary
    return {
        field.name
        for field in schema
        if str(field.type).removeprefix("dictionary<values=").partition(",")[0] in kinds
    }


def without_nul(blocks: Iterable[str], where: str) -> Iterator[str]:
    """Passes blocks of a text file on. Raises DataError at a NUL, which no text has."""
    for block in blocks:
        if "\0" in block:
            raise DataError(
                f"{where} is not a text file: it has NUL bytes, as UTF-16 and token ids do; convert it to "
                "UTF-8, or name the files to read with a pattern, as in 'FOLDER/*.txt'"
            )
        yield block


def text_file(path: pathlib.Path, encoding: str = "utf-8") -> TextIO:
    """Opens a text file for reading; it is compressed if its name ends in .gz or .zst."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(path, "rt", encoding=encoding)
    if suffix == ".zst":
        library()
        from datasets.utils.file_utils import xopen

        file: Any = xopen(f"zstd://{path.stem}::{path}", "rb")
        return io.TextIOWrapper(file, encoding=encoding)
    return path.open(encoding=encoding)


def snapshot(name: str, wanted: list[str], what: str) -> pathlib.Path:
    """Downloads files of a Hub model with the Hub's client, into its cache; returns their folder.

    Args:
      name: ORG/NAME.
      wanted: file names or patterns; a model need not have all.
      what: the user's name for it, for messages.

    Raises DataError if there is no such model, or the Hub can't be reached and the cache lacks it.
    """
    import huggingface_hub  # takes a third of a second
    from huggingface_hub import constants, errors

    answer = _ask(name, "model", what)
    unreachable = answer if isinstance(answer, DataError) else None
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=wanted, local_files_only=bool(unreachable)
        )
        return pathlib.Path(folder)
    except Exception as error:  # the client's exceptions have no common base
        if constants.HF_HUB_OFFLINE and isinstance(error, errors.LocalEntryNotFoundError):
            raise DataError(offline(what, "model")) from None
        raise unreachable or DataError(
            f"{what} can't be downloaded from the Hub ({reason(error)}); use a local folder, or "
            "ORG/NAME of a model that you can download"
        ) from None


def offline(what: str, kind: str) -> str:
    """What to say of a name that is not local, if the Hub must not be asked."""
    return (
        f"{what} is no local folder, and HF_HUB_OFFLINE forbids to ask the Hub for a {kind} of this name; fix "
        "the path, or download it first"
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _ask(name: str, kind: str, what: str) -> str | DataError:
    """Asks the Hub for the newest commit of a model or dataset, without retries.

    The libraries' own requests would retry for half a minute.

    Returns a DataError, not raised, if the Hub can't be reached, and "" in offline mode. Raises
    DataError if the Hub has no such model or dataset.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    huggingface_hub.logging.set_verbosity(logging.CRITICAL)  # no warnings about retries
    if constants.HF_HUB_OFFLINE:  # the libraries use only their caches then
        return ""
    try:
        return huggingface_hub.HfApi().repo_info(name, repo_type=kind, timeout=SECONDS).sha or ""
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise DataError(
            f"{what} is neither local nor on the Hub, or you may not read it; check the name, use a "
            f"local folder, or log in (hf auth login)"
        ) from None
    except Exception as error:
        return DataError(
            f"{what} is not local, and the Hub can't be reached ({reason(error)}); check the "
            "network, or use a local folder"
        )


def read_errors(rows: Rows, dataset: str) -> Rows:
    """Passes rows on; turns an error of reading them into a DataError."""
    try:
        yield from rows
    except Exception as error:
        raise DataError(f"--dataset={dataset} could not be read ({reason(error)})") from error
