"""Images of digits with their labels, through `datasets`.

load("digits")             # 1,797 handwritten digits that travel with this file: data/README.md
load("hf:ylecun/mnist")    # the Hub's, or with hf:NAME:CONFIG one configuration of it
load("folder")             # a folder with a train and a test file, of Parquet or JSON Lines
"""

import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from data import DataError, batches, hub

DIGITS = pathlib.Path(__file__).parent / "digits"


class Images(grain.sources.RandomAccessDataSource):
    """Examples {"image": float32 [I], "label": int32}, in memory."""

    def __init__(self, image_NI: np.ndarray, label_N: np.ndarray):
        self.image_NI, self.label_N = image_NI, label_N

    def __len__(self):
        return len(self.label_N)

    def __getitem__(self, i):
        return {"image": self.image_NI[i], "label": self.label_N[i]}


class Digits(NamedTuple):
    name: str  # as --dataset gave it
    train: Images
    held_out: Images
    inputs: int  # I, pixels of an image
    classes: int
    fingerprint: str  # sha256 of all images and labels


def load(dataset: str = "digits", image: str = "image", label: str = "label") -> Digits:
    """A data set of images, flattened, each pixel scaled to mean 0 and deviation 1 over all.

    Args:
      dataset: "digits", a path, or "hf:NAME"; see the module's docstring.
      image, label: its columns. An image is a nested list or a picture; a label is a whole number.

    Raises DataError if there is no such data set, or no such columns in it.
    """
    local = not dataset.startswith("hf:") and dataset != "digits"
    if local and not pathlib.Path(dataset).expanduser().is_dir():
        raise DataError(
            f"--dataset={dataset} is not a folder; give digits, a folder with train and test "
            "files, or hf:NAME"
        )
    name = str(DIGITS) if dataset == "digits" else dataset.removeprefix("hf:")
    train, test = hub.train_and_held_out(hub.load(name, dataset))
    if test is None:
        raise DataError(f"--dataset={dataset} has no split to test on; name one test or validation")
    (train_image, train_label), (test_image, test_label) = (
        _arrays(rows, image, label, dataset) for rows in (train, test)
    )
    if train_image.shape[1:] != test_image.shape[1:]:
        raise DataError(
            f"--dataset={dataset} has images of {train_image.shape[1]} numbers to train on and of "
            f"{test_image.shape[1]} held out; make them alike"
        )
    digest = hashlib.sha256()
    for array in (train_image, train_label, test_image, test_label):
        digest.update(array.tobytes())
    mean, deviation = train_image.mean(), max(train_image.std(), 1e-6)
    return Digits(
        name=dataset,
        train=Images((train_image - mean) / deviation, train_label),
        held_out=Images((test_image - mean) / deviation, test_label),
        inputs=train_image.shape[1],
        classes=int(max(train_label.max(), test_label.max())) + 1,
        fingerprint=digest.hexdigest(),
    )


def _arrays(rows, image: str, label: str, dataset: str) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [N, I], int32 [N]) of the rows of one split."""
    images, labels = [], []
    for row in hub.told(rows, dataset):
        _check(row, image, label, dataset)
        pixels = np.asarray(row[image], np.float32).reshape(-1)
        if images and pixels.shape != images[0].shape:
            raise DataError(
                f"--dataset={dataset} has images of {images[0].size} and of {pixels.size} numbers; "
                "make them alike"
            )
        images.append(pixels)
        labels.append(row[label])
    if not images:
        raise DataError(f"--dataset={dataset} has an empty split; give one with images")
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
            f"--dataset={dataset} has a label {row[label]!r}, which is no class; labels are whole "
            "numbers from 0"
        )


def held_out_batches(
    images: Images, batch_size: int, shard: grain.sharding.ShardOptions | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Every image once; those that fill up the last batch have label -1."""
    filler = {"image": np.zeros_like(images.image_NI[0]), "label": np.int32(-1)}
    return batches.held_out_batches(images, batch_size, filler, shard)
