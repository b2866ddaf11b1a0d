"""Pictures with captions in words, made from the names of their classes: for two towers.

load("digits")    # 1,797 handwritten digits, "a photo of three"
load("pets")      # any dataset of data/images.py; the names of classes are in its captions

A caption is one of TEMPLATES, drawn by (seed, example, epoch); its tokens are its bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from data import DataError, images
from data.batches import Dataset, Example, Rows

TEMPLATES = ("{}", "a {}", "the digit {}", "the number {}", "a photo of {}")
OF_ANYTHING = ("{}", "a {}", "a photo of {}")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PADDING = 0  # behind a caption


def captions(name: str) -> list[str]:
    """All captions of a class."""
    if name in map(str, range(10)):
        return [template.format(DIGITS[int(name)]) for template in TEMPLATES]
    return [template.format(name.replace("_", " ")) for template in OF_ANYTHING]


def encode(text: str, max_positions: int) -> np.ndarray:
    """A caption's bytes, int32 [T], padded. Raises DataError if it is longer."""
    tokens = np.frombuffer(text.encode(), np.uint8)
    if len(tokens) > max_positions:
        raise DataError(
            f"the caption {text!r} has {len(tokens)} bytes, and the model reads {max_positions}; use "
            f"--set=max_positions={len(tokens)}, or shorter names of classes"
        )
    return np.pad(tokens.astype(np.int32), (0, max_positions - len(tokens)))


def class_tokens(names: Sequence[str], max_positions: int) -> list[np.ndarray]:
    """The captions of each class, int32 [number of captions, T]."""
    return [np.stack([encode(text, max_positions) for text in captions(name)]) for name in names]


class Captioned(Rows):
    """Examples {"image", "tokens", "label"} of a source of {"image", "label"}."""

    def __init__(self, source: Any, classes: list[np.ndarray], key: tuple[int, ...]):
        """`key` and an example's number decide which of its class's captions it has."""
        self._source = source
        self._classes = classes
        self._key = key

    def __len__(self):
        return len(self._source)

    def take(self, numbers: np.ndarray) -> Example:
        batch = self._source.take(np.asarray(numbers))
        tokens = []
        for number, label in zip(numbers, batch["label"], strict=True):
            choices = self._classes[label]
            random = np.random.default_rng((*self._key, int(number)))
            tokens.append(choices[random.integers(len(choices))])
        return batch | {"tokens": np.stack(tokens)}


def filler(image_size: int, channels: int, max_positions: int) -> Example:
    """An example that does not count."""
    return images.filler(image_size, channels) | {"tokens": np.zeros(max_positions, np.int32)}


def load(
    dataset: str = "digits",
    image_size: int = 8,
    channels: int = 0,
    max_positions: int = 16,
    labels: Sequence[str] = (),
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    resample: str = "bilinear",
    crop: bool = False,
    flip: bool = False,
    image_column: str = "image",
    label_column: str = "label",
    seed: int = 0,
) -> Dataset:
    """Loads pictures as `data.images.load` does, with captions of at most max_positions bytes.

    Raises DataError if there is no such dataset, or its pictures or names can't be used.
    """
    data = images.load(
        dataset, image_size, channels, labels, mean, std, resample, crop, flip, image_column,
        label_column, seed,
    )  # fmt: skip
    classes = class_tokens(data.config["labels"], max_positions)
    return data._replace(
        train=Captioned(data.train, classes, key=(seed, 1)),
        held_out=Captioned(data.held_out, classes, key=(0, 0)),
        filler=data.filler | {"tokens": np.zeros(max_positions, np.int32)},
        config={name: value for name, value in data.config.items() if name != "classes"},
        unit="pairs",
        by_epoch=True,
    )
