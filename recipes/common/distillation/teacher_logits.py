"""A teacher's logits of its likeliest tokens, computed once and kept in a folder.

    FOLDER/about.json                         what they depend on: teacher, tokenizer, data, --top_k
    FOLDER/{train,held_out}.{logits,ids}.npy  [rows, T, K], float32 and int32

A folder appears only when it is complete. Grain reads the rows that a batch needs.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from data.batches import Dataset, Example, Rows, held_out_batches
from recipes.common.distillation.student_loss import Distilling
from recipes.common.report.report import size
from recipes.common.runtime import UserError, print0, processes
from recipes.common.sharding import Layout, Tree
from recipes.common.storage import folders
from recipes.common.train.feed import to_devices
from recipes.common.train.frozen import Frozen

ABOUT = "about.json"
NAMES = {"logits": np.float32, "ids": np.int32}
OTHER = {  # key of about.json → what a folder has if it differs
    "teacher": "another teacher", "tokenizer": "another tokenizer", "data": "other data",
    "top_k": "another --top_k",
}  # fmt: skip


class WithTeacher(Rows):
    """Rows of text with the teacher's logits as columns."""

    def __init__(self, rows: Any, logits_NTK: np.ndarray, ids_NTK: np.ndarray):
        self._rows, self._logits_NTK, self._ids_NTK = rows, logits_NTK, ids_NTK

    def __len__(self):
        return len(self._rows)

    def take(self, indices: np.ndarray) -> Example:
        columns = {
            "teacher_logits": self._logits_NTK[indices],
            "teacher_ids": self._ids_NTK[indices],
        }
        return self._rows.take(indices) | columns


def with_teacher(data: Dataset, distilling: Distilling, layout: Layout, teacher: Frozen) -> Dataset:
    """Adds the logits in the folder --teacher_logits, which is written first if it doesn't exist.

    Args:
      layout: the student's, whose batches the teacher reads.

    Raises UserError if the folder has other logits.
    """
    flags = distilling.flags
    name = flags.teacher_logits
    path = folders.absolute(folders.to_path(name, "--teacher_logits"))
    if not folders.at(path).appends:
        raise UserError(f"--teacher_logits={name} is in a bucket; use a local folder")
    facts = dict(data.facts)
    about = {"teacher": teacher.key, "tokenizer": facts.pop("tokenizer", "bytes")}
    about |= {"data": facts, "top_k": flags.top_k}
    parts = {"train": data.train, "held_out": data.held_out}
    shape = (layout.seq_len, flags.top_k)
    if not processes.decide(path.exists(), all):
        count = sum(map(len, parts.values()))
        held = size(8 * count * shape[0] * shape[1])
        print0(
            f"Teacher: writes its top {flags.top_k} logits of {count:,} rows, {held}, to {path}."
        )
        with folders.write_errors(name, "teacher_logits"):
            _write(path, about, parts, shape, _batches(data, distilling, layout, teacher))
    check(path, name, about)
    print0(f"Teacher: its top {flags.top_k} logits are read from {path}.")
    read = {
        part: WithTeacher(rows, *(np.load(path / f"{part}.{x}.npy", mmap_mode="r") for x in NAMES))
        for part, rows in parts.items()
    }
    filler = {f"teacher_{x}": np.zeros(shape, dtype) for x, dtype in NAMES.items()}
    return data._replace(**read, filler=data.filler | filler)


def check(path: pathlib.Path, name: str, about: dict[str, Any]) -> None:
    """Raises UserError if a folder has other logits than `about` says, or none."""
    if not (path / ABOUT).is_file():
        raise UserError(f"--teacher_logits={name} has no teacher's logits; use a new folder")
    kept = json.loads((path / ABOUT).read_text())
    wanted = json.loads(json.dumps(about))
    for key, other in OTHER.items():
        if kept.get(key) != wanted[key]:
            raise UserError(f"--teacher_logits={name} is of {other}; use a new folder")


def _batches(
    data: Dataset, distilling: Distilling, layout: Layout, teacher: Frozen
) -> Iterator[tuple[str, int, tuple[np.ndarray, np.ndarray]]]:
    """(part, number of its first row, its logits and ids [B, T, K]) of each batch."""
    variables = teacher.read()
    program = layout.compile(
        distilling.top_logits, teacher.abstract(), layout.abstract_batch(data.filler),
        out_shardings=layout.replicated,
    )  # fmt: skip
    for part, rows in {"train": data.train, "held_out": data.held_out}.items():
        batches = held_out_batches(
            data._replace(held_out=rows), layout.batch_size, layout.process_rows
        )
        for number, batch in enumerate(batches):
            arrays: Tree = jax.device_get(program(variables, to_devices(batch, layout)))
            yield part, number * layout.batch_size, arrays


def _write(
    path: pathlib.Path,
    about: dict[str, Any],
    parts: dict[str, Any],
    shape: tuple,
    batches: Iterator,
) -> None:
    """Writes a folder beside its place, on process 0, and renames it when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    files = {}
    try:
        if processes.is_first():
            temporary.mkdir(parents=True)
            for part, rows in parts.items():
                for x, dtype in NAMES.items():
                    files[part, x] = np.lib.format.open_memmap(
                        temporary / f"{part}.{x}.npy", "w+", dtype, (len(rows), *shape)
                    )
        for part, first, arrays in batches:
            for x, rows_BTK in zip(NAMES, arrays, strict=True):
                if files:
                    file = files[part, x]
                    file[first : first + len(rows_BTK)] = rows_BTK[: len(file) - first]
        for file in files.values():
            file.flush()
        if files:
            (temporary / ABOUT).write_text(json.dumps(about))
        processes.broadcast_from_first(lambda: temporary.rename(path) and None)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
