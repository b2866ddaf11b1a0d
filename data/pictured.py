"""Rows of tokens with pictures, for models that see.

load("digits")      # "Which digit is this?" and "Which is larger?", about the digits in this repository
load("rows.jsonl")  # rows of a JSON Lines or Parquet file, or hf:NAME

Rows (picture_rows.py) are conversations or prompts, with pictures (picture_files.py), which are read
and resized for their batch. Each is a document, with its pictures; a row of a batch has as many whole
documents as fit (packing.py), or one.

Pictures have one size, or grids of squares by their aspect ratio (squares.py).

Shapes: T tokens of a row, M slots of a row, W height and width of a picture, C channels.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from data import DataError, images, picture_files, picture_rows
from data.batches import Dataset, Example, Rows
from data.packing import best_fit
from data.picture_rows import MARK, OF_BYTES, PictureRow, PictureTokens
from data.squares import SquareForm
from data.tokenizer import BYTES, Tokenizer

WHICH, LARGER = "Which digit is this? ", "Which is larger, the first or the second? "


class Pictured(Rows):
    """Examples {"tokens", "targets", "segment_ids": int32 [T], "images": uint8 [M, W, W, C]}.

    Of grids of squares, as SquareForm.arrays. Segment ids are 1, 2, … for the documents of a row, whose
    pictures are in their order. Padding, at its end, has segment id 0 and target -1.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[PictureRow]],
        seq_len: int,
        slots: int,
        form: images.AnyForm,
        dataset: str,
    ):
        """Reads no picture yet.

        Args:
          rows: the documents of each.
        """
        self.rows = rows
        self.seq_len = seq_len
        self.slots = slots
        self.form = form
        self.dataset = dataset

    def __len__(self):
        return len(self.rows)

    def take(self, numbers: np.ndarray) -> Example:
        examples = [self.example(self.rows[int(number)]) for number in np.asarray(numbers)]
        return {name: np.stack([one[name] for one in examples]) for name in examples[0]}

    def example(self, row: Sequence[PictureRow]) -> Example:
        """The documents of a row, with their pictures."""
        tokens_T, targets_T, segments_T = (
            np.full(self.seq_len, fill, np.int32) for fill in (0, -1, 0)
        )
        begin = 0
        for number, document in enumerate(row, start=1):
            end = begin + len(document.tokens)
            tokens_T[begin:end] = document.tokens
            targets_T[begin : end - 1] = np.where(document.is_target, document.tokens, -1)[1:]
            segments_T[begin:end] = number
            begin = end
        pixels = [
            picture_files.pixels_of(picture, self.form, self.dataset, document.where)
            for document in row
            for picture in document.pictures
        ]
        return {
            "tokens": tokens_T, "targets": targets_T, "segment_ids": segments_T,
            **self.form.arrays(pixels, self.slots),
        }  # fmt: skip


def packed(documents: Sequence[PictureRow], seq_len: int) -> list[list[PictureRow]]:
    """Documents in rows of `seq_len` tokens, by best fit, decreasing."""
    row_of = best_fit(np.array([len(one.tokens) for one in documents], np.int64), seq_len)
    rows: list[list[PictureRow]] = [[] for _ in range(int(row_of.max(initial=-1)) + 1)]
    for document, row in zip(documents, row_of.tolist(), strict=True):
        rows[row].append(document)
    return rows


def empty_row(seq_len: int, slots: int, form: images.AnyForm) -> Example:
    """An example that does not count."""
    zeros = np.zeros(seq_len, np.int32)
    pictures = form.arrays((), slots)
    return {"tokens": zeros, "targets": zeros - 1, "segment_ids": zeros, **pictures}


def form_of(
    image_size: int = 8,
    channels: int = 1,
    resample: str = "bilinear",
    patch: int = 1,
    pooling: int = 0,
    picture_tokens: int = OF_BYTES.count,
    tower_layers: int = 1,
) -> images.AnyForm:
    """The form into which pictures are brought, by fields of a model's Config.

    Args:
      patch, pooling: above 0: pictures are grids of squares of patch · pooling pixels.
      picture_tokens: the most of these.
      tower_layers: 0: such grids as Gemma 4 12B's processor resizes them.
    """
    if not pooling:
        return images.Form(image_size, channels, resample)
    return SquareForm(
        side=patch * pooling,
        most=picture_tokens,
        channels=channels,
        resample=resample,
        columns_first=not tower_layers,
    )


def load(
    dataset: str = "digits",
    seq_len: int = 64,
    image_size: int = 8,
    channels: int = 1,
    resample: str = "bilinear",
    tokenizer: Tokenizer = BYTES,
    picture: PictureTokens = OF_BYTES,
    seed: int = 0,
    part: str = "held_out",
    pack: bool = True,
    patch: int = 1,
    pooling: int = 0,
    picture_tokens: int = OF_BYTES.count,
    tower_layers: int = 1,
) -> Dataset:
    """Loads rows with pictures of image_size × image_size pixels, or of squares.

    Args:
      seq_len: T; every row has to fit.
      resample: filter to resize with, one of images.FILTERS.
      picture: the tokens of a picture, a model's own.
      part: "held_out": a tenth of the rows, or a test split, is held out; "all": every row is, to
        evaluate on.
      pack: rows of as many whole documents as fit; False: a row for each.
      patch, pooling, picture_tokens, tower_layers: see form_of.

    Raises DataError if there is no such dataset, a row has another form, its number of pictures is
      another than that of their places, or a picture can't be read.
    """
    form = form_of(image_size, channels, resample, patch, pooling, picture_tokens, tower_layers)
    if isinstance(form, SquareForm):
        picture = picture._replace(count=picture_tokens, squares=form)
        image_size = form.grid(1, 1)[1] * form.side  # of the digits, which are square
    if dataset == "digits":
        size = images.Form(image_size, channels, resample)
        rows, held_out = _digits(size, tokenizer, picture, seed, shifted=part != "all")
    else:
        rows, held_out = picture_rows.read(dataset, tokenizer, picture)
    if part == "all":
        held_out = [*rows, *(held_out or ())]
    elif held_out is None:
        rows, held_out = picture_rows.split(rows, dataset)
    every = held_out if part == "all" else [*rows, *held_out]
    if not held_out:
        raise DataError(f"--dataset={dataset} has no rows; add some")
    for row in every:
        if len(row.tokens) > seq_len:
            raise DataError(
                f"{row.where} has {len(row.tokens)} tokens with its pictures, and --seq_len={seq_len}; "
                f"use --seq_len={len(row.tokens)}, or a shorter row"
            )
    # Before any step.
    picture_files.check(((one, row.where) for row in every for one in row.pictures), form, dataset)
    digest = hashlib.sha256()
    for row in every:
        digest.update(row.tokens.tobytes() + row.is_target.tobytes())
        digest.update(b"".join(map(picture_files.identity, row.pictures)))
    parts = [packed(x, seq_len) if pack else [[one] for one in x] for x in (rows, held_out)]
    counts = [[sum(len(one.pictures) for one in row) for row in part] for part in parts]
    slots = max(1, *(count for part in counts for count in part))
    train, evaluated = (Pictured(part, seq_len, slots, form, dataset) for part in parts)
    return Dataset(
        train=train,
        held_out=evaluated,
        filler=empty_row(seq_len, slots, form),
        unit="tokens",
        units=seq_len,
        config={},
        facts={
            "dataset": dataset,
            "fingerprint": digest.hexdigest(),
            "tokenizer": tokenizer.sha256,
        }
        | ({"pack": True} if pack else {}),
        held_out_bytes=sum(row.target_bytes for row in held_out),
        has_answers=True,
        notes=(_note(train),) if part != "all" else (),
    )


def _note(train: Pictured) -> str:
    """A line to print: how full rows are of tokens and pictures."""
    documents = [one for row in train.rows for one in row]
    rows = max(len(train.rows), 1)
    padding = 1 - sum(len(one.tokens) for one in documents) / (rows * train.seq_len)
    pictures = sum(len(one.pictures) for one in documents)
    return (
        f"Training data: {len(documents):,} documents in {rows:,} rows, {padding:.1%} padding; "
        f"{pictures / rows:.2f} pictures a row, in slots for {train.slots}."
    )


# ---- the digits ----------------------------------------------------------------------------------


def _digits(
    form: images.Form, tokenizer: Tokenizer, picture: PictureTokens, seed: int, shifted: bool
) -> tuple[list[PictureRow], list[PictureRow]]:
    """Each digit with the question which one it is, and with another digit, which is larger.

    Args:
      shifted: of pictures to train on there are also copies, shifted by a pixel up, down, left and right.
    """
    digits = images.load("digits", form.size, form.channels, resample=form.resample)
    tokens = picture_rows.for_pictures(tokenizer, picture)
    encode = functools.partial(_question, tokenizer=tokens, picture=picture)
    parts = []
    for number, source in enumerate((digits.train, digits.held_out)):
        part: Any = source
        random = np.random.default_rng((seed, number))
        pixels, labels = np.asarray(part.pixels), part.label_N
        rows = []
        if shifted and source is digits.train:
            shifts = [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)]
            pixels = np.concatenate([_shifted(pixels, *shift) for shift in shifts])
            labels = np.tile(labels, len(shifts))
        for i, label in enumerate(labels.tolist()):
            rows.append(encode(MARK + WHICH, str(label), [pixels[i]]))
        for i, j in enumerate(random.permutation(len(labels)).tolist()):
            if labels[i] != labels[j]:
                larger = "first" if labels[i] > labels[j] else "second"
                rows.append(encode(MARK + MARK + LARGER, larger, [pixels[i], pixels[j]]))
        parts.append(rows)
    train, held_out = parts
    return train, held_out


def _question(
    prompt: str,
    answer: str,
    pictures: Sequence[Any],
    tokenizer: picture_rows.PictureTokenizer,
    picture: PictureTokens,
) -> PictureRow:
    row = {"prompt": prompt, "completion": answer + "\n"}
    (made,) = picture_rows.encoded(row, pictures, "digits", tokenizer, picture)
    return made


def _shifted(pixels_NWWC: np.ndarray, down: int, right: int) -> np.ndarray:
    """Pictures moved by so many pixels; edges are repeated."""
    wide = np.pad(pixels_NWWC, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    W = pixels_NWWC.shape[1]
    return wide[:, 1 - down : 1 - down + W, 1 - right : 1 - right + W]
