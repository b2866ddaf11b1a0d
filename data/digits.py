"""Images of digits with their labels, through `datasets`.

load("digits")             # 1,797 handwritten digits that come with this file: data/README.md
load("hf:ylecun/mnist")    # the Hub's, or with hf:NAME:CONFIG one configuration of it
load("folder")             # a folder with a train and a test file, of Parquet or JSON Lines
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
    """Examples {"image": float32 [I], "label": int32}, in memory."""

    def __init__(self, image_NI: np.ndarray, label_N: np.ndarray):
        self.image_NI, self.label_N = image_NI, label_N

    def __len__(self):
        return len(self.label_N)

    def __getitem__(self, i):
        return {"image": self.image_NI[i], "label": self.label_N[i]}


def load(
    dataset: str = "digits", image_column: str = "image", label_column: str = "label"
) -> Dataset:
    """A dataset of images, flattened, scaled to mean 0 and standard deviation 1 over all pixels.

    Args:
      dataset: "digits", a path, or "hf:NAME"; see the module's docstring.
      image_column, label_column: An image is a nested list or a picture; a label a whole number.

    Raises DataError if there is no such dataset, or no such columns in it.
    """
    image, label = image_column, label_column
    local = not dataset.startswith("hf:") and dataset != "digits"
    remote = buckets.remote(dataset)
    folder = buckets.local(dataset, f"--dataset={dataset}") if remote else pathlib.Path(dataset)
    if local and not os.path.isdir(os.path.expanduser(folder)):
        raise DataError(
            f"--dataset={dataset} is not a folder; use digits, a folder with train and test "
            "files, or hf:NAME"
        )
    name = (
        str(DIGITS)
        if dataset == "digits"
        else str(folder)
        if remote
        else dataset.removeprefix("hf:")
    )
    train, test = hub.train_and_held_out(hub.load(name, dataset))
    if test is None:
        raise DataError(f"--dataset={dataset} has no held-out split; name one test or validation")
    (train_image, train_label), (test_image, test_label) = (
        _arrays(rows, image, label, dataset) for rows in (train, test)
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
        filler={"image": np.zeros(inputs, np.float32), "label": np.int32(-1)},
        unit="images",
        units=1,
        config={"inputs": inputs, "classes": classes},
        facts={"dataset": dataset, "fingerprint": digest.hexdigest()},
    )


def _arrays(rows, image: str, label: str, dataset: str) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [N, I], int32 [N]) of the rows of one split."""
    images, labels = [], []
    for row in hub.told(rows, dataset):
        _check(row, image, label, dataset)
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


def _check(row: dict[str, Any], image: str, label: str, dataset: str) -> None:
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
