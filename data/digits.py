"""Images of digits with their labels, through `datasets`.

load("digits")             # 1,797 handwritten digits in this repository: data/README.md
load("hf:ylecun/mnist")    # a Hub dataset, or hf:NAME:CONFIG for one of its configurations
load("folder")             # a folder with a train and a test file, Parquet or JSON Lines
"""

import hashlib
import os
import pathlib
from typing import Any

import grain
import numpy as np

from data import DataError, buckets, hub
from data.batches import Dataset

DIGITS = pathlib.Path(__file__).parent / "digits"


class Images(grain.sources.RandomAccessDataSource):
    """In-memory examples {"image": float32 [I], "label": int32}."""

    def __init__(self, image_NI: np.ndarray, label_N: np.ndarray):
        self.image_NI, self.label_N = image_NI, label_N

    def __len__(self):
        return len(self.label_N)

    def __getitem__(self, i):
        return {"image": self.image_NI[i], "label": self.label_N[i]}


def filler(inputs: int) -> dict[str, np.ndarray]:
    """An example that does not count."""
    return {"image": np.zeros(inputs, np.float32), "label": np.array(-1, np.int32)}


def load(
    dataset: str = "digits", image_column: str = "image", label_column: str = "label"
) -> Dataset:
    """Loads images, flattened and scaled to mean 0 and standard deviation 1 over all pixels.

    Args:
      dataset: "digits", a path, or "hf:NAME"; see the module's docstring.
      image_column: holds nested lists or pictures.
      label_column: holds whole numbers.

    Raises DataError if there is no such dataset, or it has no such columns.
    """
    name = str(DIGITS) if dataset == "digits" else dataset.removeprefix("hf:")
    if not dataset.startswith("hf:"):
        name = str(buckets.local(name, f"--dataset={dataset}"))
        if not os.path.isdir(name):
            raise DataError(
                f"--dataset={dataset} is not a folder; use digits, a folder with train and test "
                "files, or hf:NAME"
            )
    train, test = hub.load(name, dataset)
    if test is None:
        raise DataError(f"--dataset={dataset} has no held-out split; name one test or validation")
    (train_image, train_label), (test_image, test_label) = (
        _arrays(rows, image_column, label_column, dataset) for rows in (train, test)
    )
    if train_image.shape[1:] != test_image.shape[1:]:
        raise DataError(
            f"--dataset={dataset} has training images of {train_image.shape[1]} pixels and held-out "
            f"images of {test_image.shape[1]}; use images of one size"
        )
    digest = hashlib.sha256()
    for array in (train_image, train_label, test_image, test_label):
        digest.update(array.tobytes())
    mean, deviation = train_image.mean(), max(train_image.std(), 1e-6)
    inputs, classes = train_image.shape[1], int(max(train_label.max(), test_label.max())) + 1
    return Dataset(
        train=Images((train_image - mean) / deviation, train_label),
        held_out=Images((test_image - mean) / deviation, test_label),
        filler=filler(inputs),
        unit="images",
        units=1,
        config={"inputs": inputs, "classes": classes},
        facts={"dataset": dataset, "fingerprint": digest.hexdigest()},
    )


def _arrays(rows, image: str, label: str, dataset: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the rows of a split: (images float32 [N, I], labels int32 [N])."""
    images, labels = [], []
    for row in hub.read_errors(rows, dataset):
        check_row(row, image, label, dataset)
        pixels = np.asarray(row[image], np.float32).reshape(-1)
        if images and pixels.shape != images[0].shape:
            raise DataError(
                f"--dataset={dataset} has images of {images[0].size} and of {pixels.size} pixels; "
                "use images of one size"
            )
        images.append(pixels)
        labels.append(row[label])
    if not images:
        raise DataError(f"--dataset={dataset} has an empty split; add images to it")
    return np.stack(images), np.asarray(labels, np.int32)


def check_row(row: dict[str, Any], image: str, label: str, dataset: str) -> None:
    """Raises DataError if a row lacks a column, or its label is not a class's number."""
    for flag, column in (("image_column", image), ("label_column", label)):
        if column not in row:
            columns = ", ".join(map(repr, row))
            raise DataError(
                f"--dataset={dataset} has no column {column!r}; set --{flag} to one of {columns}"
            )
    if not isinstance(row[label], int) or row[label] < 0:
        raise DataError(
            f"--dataset={dataset} has the label {row[label]!r}; use whole numbers from 0"
        )
