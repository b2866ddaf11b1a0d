"""Pictures with captions in words, for two towers.

load("digits")    # 1,797 handwritten digits, "a photo of three"
load("photos")    # pictures with captions of their own: image_text.py
load("pets")      # any dataset of images.py; the names of classes are in its captions

An example has one of its captions, drawn by (seed, example, epoch); for classes, one of TEMPLATES.
"""

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image

from data import DataError, image_text, images, whole_texts
from data.batches import Dataset, Example, Rows
from data.tokenizer import BYTES, START, Tokenizer

TEMPLATES = ("{}", "a {}", "the digit {}", "the number {}", "a photo of {}")
OF_ANYTHING = ("{}", "a {}", "a photo of {}")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PADDING = 0  # behind a caption of bytes


def captions(name: str, templates: Sequence[str] = ()) -> list[str]:
    """All captions of a class, in which it stands for {}; without templates, the built-in ones."""
    if templates:
        return [template.replace("{}", name.replace("_", " ")) for template in templates]
    if name in map(str, range(10)):
        return [template.format(DIGITS[int(name)]) for template in TEMPLATES]
    return [template.format(name.replace("_", " ")) for template in OF_ANYTHING]


class Texts:
    """Makes rows of tokens from texts.

    A tokenizer's own tokens start and end a text. Bytes have neither, or `end` after the text.
    """

    def __init__(self, max_positions: int, tokenizer: Tokenizer = BYTES, end: bool = False):
        self._length, self._tokenizer = max_positions, tokenizer
        self._start, self._end, self._padding = tokenizer.start, tokenizer.end[:1], PADDING
        self._unit = "tokens" if tokenizer.files else "bytes"
        if tokenizer.files:
            named = tokenizer.control("pad")
            self._padding = named[0] if named else next(iter(self._end), PADDING)
        else:
            self._start, self._end = (), (START,) if end else ()

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        around = len(self._start) + len(self._end)
        return [len(tokens) + around for tokens in self._tokenizer.encode(texts)]

    def cut(self, texts: Sequence[str]) -> str:
        """A line that says how many of these texts are longer than a row; "" if none is."""
        lengths = self.lengths(texts)
        longer = sum(length > self._length for length in lengths)
        return (
            f"Captions: {longer:,} of the first {len(texts):,} are longer than {self._length} "
            f"{self._unit} and are cut; --set=max_positions={max(lengths)} keeps all whole."
            if longer
            else ""
        )

    def check(self, texts: Sequence[str]) -> None:
        """Raises DataError if a text is longer than a row."""
        for text, length in zip(texts, self.lengths(texts), strict=True):
            if length > self._length:
                raise DataError(
                    f"the caption {text!r} has {length} {self._unit}, and the model reads {self._length}; use "
                    f"--set=max_positions={length}, or shorter names of classes"
                )

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Rows of tokens, int32 [N, T], padded. Longer texts are cut."""
        rows = np.full((len(texts), self._length), self._padding, np.int32)
        most = self._length - len(self._start) - len(self._end)
        for row, tokens in zip(rows, self._tokenizer.encode(texts), strict=True):
            around = [*self._start, *tokens[:most], *self._end]
            row[: len(around)] = around
        return rows


def class_tokens(
    names: Sequence[str], texts: Texts, templates: Sequence[str] = ()
) -> list[np.ndarray]:
    """The captions of each class, int32 [number of captions, T]. Raises DataError."""
    by_class = [captions(name, templates) for name in names]
    for of_class in by_class:
        texts.check(of_class)
    return [texts.encode(of_class) for of_class in by_class]


class Captioned(Rows):
    """Examples {"image", "tokens", "label"} of a source of {"image", "label"}."""

    def __init__(
        self, source: Any, choices: Sequence[Sequence[str]], texts: Texts, key: tuple[int, ...]
    ):
        """`key` and an example's number decide which of `choices`, its captions, it has."""
        self._source = source
        self._choices = choices
        self._texts = texts
        self._key = key

    def __len__(self):
        return len(self._source)

    def take(self, numbers: np.ndarray) -> Example:
        drawn = []
        for number in np.asarray(numbers).tolist():
            choices = self._choices[number % len(self)]
            random = np.random.default_rng((*self._key, number))
            drawn.append(choices[int(random.integers(len(choices)))])
        return self._source.take(np.asarray(numbers)) | {"tokens": self._texts.encode(drawn)}


class Encoded(Sequence):
    """Pictures in files, decoded when they are read."""

    def __init__(self, pairs: list[image_text.Pair], dataset: str, form: images.Form):
        self.pairs, self.dataset, self.form = pairs, dataset, form

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        pair = self.pairs[i]
        return images.decode(io.BytesIO(pair.place.read()), self.form, self.dataset, pair.name)


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
    caption_column: str = "",
    seed: int = 0,
    center_crop: bool = False,
    texts: Texts | None = None,
) -> Dataset:
    """Loads pictures as `data.images.load` does, with captions of at most max_positions tokens.

    Args:
      caption_column: see `image_text.find`.
      texts: makes their tokens; None: bytes.

    Raises DataError if there is no such dataset, or its pictures, captions or names can't be used.
    """
    texts = texts or Texts(max_positions)
    splits = None if dataset == "digits" else image_text.find(dataset, image_column, caption_column)
    if splits is None:
        images.check_columns(dataset, {"caption_column": caption_column})
        data = images.load(
            dataset, image_size, channels, labels, mean, std, resample, crop, flip, image_column,
            label_column, seed, center_crop,
        )  # fmt: skip
        names = data.config["labels"]
        by_class = [captions(name) for name in names]
        class_tokens(names, texts)
        parts: list[Any] = [data.train, data.held_out]
        choices = [[by_class[i] for i in part.label_N] for part in parts]
        notes = data.notes
    else:
        images.check_columns(dataset, {"label_column": label_column})
        channels = channels or _channels(splits[0], dataset)
        form = images.Form(image_size, channels, resample, center_crop)
        keep = images.fits_in_memory(sum(map(len, splits)), form)
        loaded = []
        for pairs in splits:
            pixels: Any = Encoded(pairs, dataset, form)
            pixels = images.taken(pixels, range(len(pairs))) if keep else pixels
            loaded.append(images.Part(pixels, np.zeros(len(pairs), np.int32)))
        train, test = loaded
        augment = images.Augment(crop, flip, seed)
        data = images.normalized(train, test, form, mean, std, augment)
        data.config["labels"] = ()
        data.facts.update(dataset=dataset, fingerprint=_fingerprint(splits, form))
        choices = [[pair.captions for pair in pairs] for pairs in splits]
        notes = _notes(splits, texts)
    return data._replace(
        train=Captioned(data.train, choices[0], texts, key=(seed, 1)),
        held_out=Captioned(data.held_out, choices[1], texts, key=(0, 0)),
        filler=data.filler | {"tokens": np.zeros(max_positions, np.int32)},
        config={name: value for name, value in data.config.items() if name != "classes"},
        unit="pairs",
        by_epoch=True,
        notes=notes,
    )


def _channels(pairs: list[image_text.Pair], dataset: str) -> int:
    """3 if any of the first pictures is colored, or else 1."""
    channels = set()
    for pair in pairs[: images.SAMPLE]:
        try:
            with PIL.Image.open(io.BytesIO(pair.place.read())) as picture:
                channels.add(images.channels_of(picture))
        except (OSError, SyntaxError, ValueError):
            raise images.broken(dataset, pair.name) from None
    return max(channels)


def _fingerprint(splits: image_text.Pairs, form: images.Form) -> str:
    """SHA-256 of the form, names and sizes of pictures, and captions."""
    digest = hashlib.sha256(repr(form.key).encode())
    for pairs in splits:
        for pair in pairs:
            digest.update(repr((pair.name, pair.place.size, pair.captions)).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _notes(splits: image_text.Pairs, texts: Texts) -> tuple[str, ...]:
    """Lines that say how many pairs there are, and which captions are cut."""
    train, held_out = splits
    lines = [f"Pairs: {len(train):,} to train on, {len(held_out):,} held out."]
    sample = [caption for pair in train[: images.SAMPLE] for caption in pair.captions]
    if cut := texts.cut(sample):
        lines.append(cut)
    if unused := {name for pair in train + held_out for name in pair.unused}:
        lines.append(whole_texts.unused_note(sorted(unused)))
    return tuple(lines)
