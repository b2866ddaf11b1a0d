"""Rows of tokens with pictures, for models that see.

load("digits")      # "Which digit is this?" and "Which is larger?", about the digits in this repository
load("rows.jsonl")  # rows of a JSON Lines or Parquet file, or hf:NAME

Rows are conversations or prompts, as in conversations.py, with pictures:

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}
    {"prompt": "<image>What is it?", "completion": "A cat.", "image": "cat.png"}
    {"conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}],
     "image": "cat.png"}

A picture is a path relative to the file, bytes, or {"path": …, "bytes": …}, as `datasets` has it; it is
in the column `image` or `images`, or in the part of a message. Part by part, or by <image> in a text,
pictures take their places in order. In tokens, a picture is a token that begins it, K placeholders and
one that ends it; none of these is a target. Each row of a batch is one document, padded.

Shapes: B rows, T tokens, M slots of a row, W height and width of a picture, C channels.
"""

import functools
import hashlib
import io
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from data import DataError, conversations, images, sources
from data.batches import Dataset, Example, Rows
from data.conversations import MESSAGES, PAIRS
from data.tokenizer import BYTES, Tokenizer

TAG = "<image>"  # where a picture is in a text
MARK = "\ufffc"  # where it is until it becomes tokens: the character for an object in a text
SINGLE, SEVERAL, LLAVA = "image", "images", "conversations"  # columns
WHICH, LARGER = "Which digit is this? ", "Which is larger, the first or the second? "


class PictureTokens(NamedTuple):
    """How a picture becomes tokens: fields of a Config."""

    begin: int
    placeholder: int
    end: int
    count: int  # K

    def around(self) -> list[int]:
        """The tokens of a picture."""
        return [self.begin, *[self.placeholder] * self.count, self.end]


OF_BYTES = PictureTokens(begin=381, placeholder=383, end=382, count=4)  # of our byte models


class PictureRow(NamedTuple):
    """A row before its pictures are read."""

    tokens: np.ndarray  # int32
    is_target: np.ndarray  # bool per token
    pictures: tuple[Any, ...]  # in order: a path, bytes, or pixels
    where: str  # file and line, for errors


class Pictured(Rows):
    """Examples {"tokens", "targets", "segment_ids": int32 [T], "images": uint8 [M, W, W, C]}."""

    def __init__(
        self, rows: Sequence[PictureRow], seq_len: int, slots: int, form: images.Form, dataset: str
    ):
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

    def example(self, row: PictureRow) -> Example:
        """A row with its pictures; what follows the document is a segment of its own."""
        T, W, C = self.seq_len, self.form.size, self.form.channels
        length = len(row.tokens)
        tokens_T = np.zeros(T, np.int32)
        tokens_T[:length] = row.tokens
        targets_T = np.full(T, -1, np.int32)
        targets_T[: length - 1] = np.where(row.is_target[1:], row.tokens[1:], -1)
        images_MWWC = np.zeros((self.slots, W, W, C), np.uint8)
        for slot, picture in enumerate(row.pictures):
            images_MWWC[slot] = pixels_of(picture, self.form, self.dataset, row.where)
        segments_T = (np.arange(T) >= length).astype(np.int32)
        return {
            "tokens": tokens_T, "targets": targets_T, "segment_ids": segments_T,
            "images": images_MWWC,
        }  # fmt: skip


def empty_row(seq_len: int, slots: int, image_size: int, channels: int) -> Example:
    """An example that does not count."""
    zeros = np.zeros(seq_len, np.int32)
    empty = np.zeros((slots, image_size, image_size, channels), np.uint8)
    return {"tokens": zeros, "targets": zeros - 1, "segment_ids": zeros, "images": empty}


def load(
    dataset: str = "digits",
    seq_len: int = 64,
    image_size: int = 8,
    channels: int = 1,
    resample: str = "bilinear",
    tokenizer: Tokenizer = BYTES,
    picture: PictureTokens = OF_BYTES,
    seed: int = 0,
) -> Dataset:
    """Loads rows with pictures of image_size × image_size pixels.

    Args:
      seq_len: T; every row has to fit.
      resample: filter to resize with, one of images.FILTERS.
      picture: the tokens of a picture, a model's own.

    Raises DataError if there is no such dataset, a row has another form, its number of pictures is
      another than that of their places, or a picture can't be read.
    """
    form = images.Form(image_size, channels, resample)
    if dataset == "digits":
        parts = _digits(form, tokenizer, picture, seed)
    else:
        parts = _of_file(dataset, tokenizer, picture)
    for row in (row for part in parts for row in part):
        if len(row.tokens) > seq_len:
            raise DataError(
                f"{row.where} has {len(row.tokens)} tokens with its pictures, and --seq_len={seq_len}; "
                f"use --seq_len={len(row.tokens)}, or a shorter row"
            )
        for one in row.pictures:
            pixels_of(one, form, dataset, row.where)  # before any step
    slots = max(len(row.pictures) for part in parts for row in part)
    train, held_out = (Pictured(part, seq_len, max(slots, 1), form, dataset) for part in parts)
    digest = hashlib.sha256()
    for row in (*parts[0], *parts[1]):
        digest.update(row.tokens.tobytes() + row.is_target.tobytes())
        digest.update(b"".join(map(_identity, row.pictures)))
    return Dataset(
        train=train,
        held_out=held_out,
        filler=empty_row(seq_len, max(slots, 1), image_size, channels),
        unit="tokens",
        units=seq_len,
        config={},
        facts={
            "dataset": dataset,
            "fingerprint": digest.hexdigest(),
            "tokenizer": tokenizer.sha256,
        },
    )


# ---- pictures ------------------------------------------------------------------------------------


def pixels_of(picture: Any, form: images.Form, dataset: str, where: str) -> np.ndarray:
    """Pixels uint8 [W, W, C] of a path, bytes or pixels. Raises DataError, which names the row."""
    if isinstance(picture, np.ndarray):
        return picture
    is_path = isinstance(picture, pathlib.Path)
    name = f"the picture {picture}" if is_path else "a picture"
    if is_path and not picture.is_file():
        raise DataError(f"{where}: {name} does not exist; fix the path, or remove the row")
    try:
        file = picture if is_path else io.BytesIO(picture)
        return images.decode(file, form, dataset, name)
    except (DataError, PIL.Image.DecompressionBombError, MemoryError):
        raise DataError(f"{where}: {name} can't be read; replace it, or remove the row") from None


def _identity(picture: Any) -> bytes:
    """What a fingerprint has of a picture: of a file, its name and size."""
    if isinstance(picture, pathlib.Path):
        return f"{picture} {picture.stat().st_size}".encode()
    return picture.tobytes() if isinstance(picture, np.ndarray) else picture


# ---- rows ----------------------------------------------------------------------------------------


def encoded(
    row: dict[str, Any], pictures: Sequence[Any], where: str, tokenizer: Tokenizer, picture: PictureTokens
) -> Iterator[PictureRow]:  # fmt: skip
    """Tokenizes a row of messages, or of a prompt and a completion, with MARK for its pictures.

    Raises DataError if it has another number of pictures than of marks, or nothing to learn.
    """
    kind = MESSAGES if "messages" in row else PAIRS
    checked = conversations.checked(row, kind, where)
    marks = json.loads(checked)
    count = json.dumps(marks[:2], ensure_ascii=False).count(MARK)
    if count != len(pictures):
        raise DataError(
            f"{where} has {len(pictures)} pictures and {count} places for them ({TAG}, or parts of type "
            "image); give it as many of both"
        )
    (mark,) = tokenizer.encode([MARK])
    for document in conversations.documents(checked, tokenizer, where):
        tokens, is_target, found = expanded(document, mark, picture)
        if found > count or (found < count and kind == PAIRS):
            raise DataError(
                f"{where}: the tokenizer {tokenizer.name} does not keep the place of a picture; put a "
                "line break before and after it"
            )
        yield PictureRow(tokens, is_target, tuple(pictures[:found]), where)


def expanded(
    document: conversations.Document, mark: np.ndarray, picture: PictureTokens
) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens and targets of a document with pictures for their marks, the number of pictures)."""
    tokens, is_target = [], []
    found = position = 0
    while position < len(document.tokens):
        if np.array_equal(document.tokens[position : position + len(mark)], mark):
            around = picture.around()
            tokens += around
            is_target += [False] * len(around)
            position += len(mark)
            found += 1
        else:
            tokens.append(document.tokens[position])
            is_target.append(document.targets[position])
            position += 1
    return np.array(tokens, np.int32), np.array(is_target, bool), found


def with_marks(row: Any, folder: pathlib.Path, where: str) -> tuple[dict[str, Any], list[Any]]:
    """A row in which MARK stands for each picture, and its pictures. Raises DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where} is not an object with columns; write one JSON object a line")
    given = row.get(SEVERAL)
    given = [row.get(SINGLE)] if given is None else given
    listed = [one for one in (given if isinstance(given, list) else [given]) if one is not None]
    if LLAVA in row and "messages" not in row:
        row = {"messages": _messages_of(row[LLAVA], where)}
    kept = {name: cell for name, cell in row.items() if name not in (SINGLE, SEVERAL, LLAVA)}
    in_parts: list[Any] = []
    for name in ("messages", "prompt", "completion"):
        if name in kept:
            kept[name] = _marked(kept[name], in_parts, where)
    if in_parts and listed:
        raise DataError(
            f"{where} has pictures in its messages and in a column; keep them in one of the two"
        )
    return kept, [_reference(one, folder, where) for one in in_parts or listed]


def _messages_of(turns: Any, where: str) -> list[dict[str, Any]]:
    """Messages of LLaVA's conversations."""
    is_list = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    if not is_list or not all({"from", "value"} <= {*turn} for turn in turns):
        raise DataError(f'{where}: {LLAVA!r} is not a list of {{"from": …, "value": …}}; write one')
    roles = conversations.SPEAKERS
    return [{"role": roles.get(t["from"], t["from"]), "content": t["value"]} for t in turns]


def _marked(cell: Any, in_parts: list[Any], where: str) -> Any:
    """A text or messages with marks for pictures; adds pictures of parts to `in_parts`."""
    if isinstance(cell, str):
        return cell.replace(TAG, MARK)
    if not isinstance(cell, list):
        return cell
    made = []
    for message in cell:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            content = "".join(_text_of_part(part, in_parts, where) for part in content)
        elif isinstance(content, str):
            content = content.replace(TAG, MARK)
        made.append(message | {"content": content} if isinstance(message, dict) else message)
    return made


def _text_of_part(part: Any, in_parts: list[Any], where: str) -> str:
    """A part of a message's content as text. Raises DataError if it is neither picture nor text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in ("image", "image_url"):
        own = next(
            (part[key] for key in ("image", "path", "url", "image_url") if part.get(key)), None
        )
        own = own.get("url") if kind == "image_url" and isinstance(own, dict) else own
        if own is not None:
            in_parts.append(own)
        return MARK
    raise DataError(
        f"{where}: a part of a message has the type {json.dumps(kind)}; the model reads text and image"
    )


def _reference(picture: Any, folder: pathlib.Path, where: str) -> Any:
    """A path or bytes. Raises DataError."""
    if isinstance(picture, dict):
        picture = picture.get("bytes") or picture.get("path")
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, PIL.Image.Image):
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(picture, str) and "://" not in picture:
        return folder / picture
    raise DataError(
        f"{where}: a picture is {json.dumps(str(picture))[:60]}; use a path relative to the file, or bytes"
    )


def _of_file(
    dataset: str, tokenizer: Tokenizer, picture: PictureTokens
) -> tuple[list[PictureRow], list[PictureRow]]:
    """(rows to train on, held-out rows): a tenth of a file's, chosen by their content."""
    path = pathlib.Path(dataset).expanduser()
    if dataset.startswith("hf:"):
        rows, test = sources.rows(dataset)
        folder = pathlib.Path()
    elif path.is_file():
        rows, test = sources.rows_of_file(dataset, path), None
        folder = path.parent
    else:
        raise DataError(
            f"--dataset={dataset} does not exist; use digits, a JSON Lines or Parquet file, or hf:NAME"
        )

    def read(rows: Iterable[tuple[str, Any]]) -> list[PictureRow]:
        made = []
        for where, row in rows:
            kept, pictures = with_marks(row, folder, where)
            made += encoded(kept, pictures, where, tokenizer, picture)
        return made

    every = read(rows)
    if test is not None:
        return every, read(test)
    if len(every) < 2:
        raise DataError(f"--dataset={dataset} has {len(every)} rows, and one is held out; add rows")
    order = sorted(
        range(len(every)), key=lambda i: hashlib.sha256(every[i].tokens.tobytes()).digest()
    )
    out = {*order[: max(1, len(every) // 10)]}
    return (
        [row for i, row in enumerate(every) if i not in out],
        [row for i, row in enumerate(every) if i in out],
    )


# ---- the digits ----------------------------------------------------------------------------------


def _digits(
    form: images.Form, tokenizer: Tokenizer, picture: PictureTokens, seed: int
) -> tuple[list[PictureRow], list[PictureRow]]:
    """Each digit with the question which one it is, and with another digit, which is larger.

    Of pictures to train on there are also copies, shifted by a pixel up, down, left and right.
    """
    digits = images.load("digits", form.size, form.channels, resample=form.resample)
    encode = functools.partial(_question, tokenizer=tokenizer, picture=picture)
    parts = []
    for number, source in enumerate((digits.train, digits.held_out)):
        part: Any = source
        random = np.random.default_rng((seed, number))
        pixels, labels = np.asarray(part.pixels), part.label_N
        rows = []
        if source is digits.train:
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
    prompt: str, answer: str, pictures: Sequence[Any], tokenizer: Tokenizer, picture: PictureTokens
) -> PictureRow:
    row = {"prompt": prompt, "completion": answer + "\n"}
    (made,) = encoded(row, pictures, "digits", tokenizer, picture)
    return made


def _shifted(pixels_NWWC: np.ndarray, down: int, right: int) -> np.ndarray:
    """Pictures moved by so many pixels; edges are repeated."""
    wide = np.pad(pixels_NWWC, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    W = pixels_NWWC.shape[1]
    return wide[:, 1 - down : 1 - down + W, 1 - right : 1 - right + W]
