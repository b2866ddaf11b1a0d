"""Rows with pictures as tokens: what they learn, and prompts to answer.

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}
    {"prompt": "<image>What is it?", "completion": "A cat.", "image": "cat.png"}
    {"conversations": [{"from": "human", "value": "<image>What is it?"}, {"from": "gpt", "value": "A cat."}],
     "image": "cat.png"}

Pictures (picture_files.py) are in the column `image` or `images`, or in the part of a message. Part by
part, or by <image> in a text, they take their places in order. In tokens, a picture is a token that
begins it, placeholders and one that ends it; none of these is a target. Each answer of a dialogue is one,
and pictures may be in any turn.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from data import DataError, conversations, sources
from data.conversations import MESSAGES, PAIRS
from data.picture_files import reference, tokens_of
from data.squares import SquareForm
from data.tokenizer import Tokenizer

TAG = "<image>"  # where a picture is in a text
MARK = "\ufffc"  # where it is until it becomes tokens: the character for an object in a text
BORDER = "\ufdd0"  # between two parts of a message until it is rendered: a character of no text
SINGLE, SEVERAL, LLAVA = "image", "images", "conversations"  # columns
PARTS = ("image", "image_url")  # types of parts of a message that are pictures


class PictureTokens(NamedTuple):
    """How a picture becomes tokens: fields of a Config."""

    begin: int
    placeholder: int
    end: int
    count: int  # K, the most of a picture
    margin: str = ""  # text before and after them
    squares: SquareForm | None = None  # where pictures have fewer by their sizes

    def around(self, count: int = 0) -> list[int]:
        """The tokens of a picture with so many placeholders; 0: K."""
        return [self.begin, *[self.placeholder] * (count or self.count), self.end]

    def counts(self, pictures: Sequence[Any], where: str) -> list[int]:
        """The placeholders of each picture. Raises DataError if one can't be read."""
        if self.squares is None:
            return [self.count] * len(pictures)
        return [tokens_of(one, self.squares, where) for one in pictures]


OF_BYTES = PictureTokens(begin=381, placeholder=383, end=382, count=4)  # of our byte models


class PictureRow(NamedTuple):
    """A row before its pictures are read."""

    tokens: np.ndarray  # int32
    is_target: np.ndarray  # bool per token
    pictures: tuple[Any, ...]  # in order: a path, bytes, or pixels
    where: str  # file and line, for errors
    target_bytes: int = 0  # of the text that its targets stand for


@dataclasses.dataclass(frozen=True)
class PictureTokenizer(Tokenizer):
    """A tokenizer of texts with MARK, which divides a text as a control token does.

    Rendered conversations get the margins after rendering: templates strip white space where a message
    begins.
    """

    picture: PictureTokens = OF_BYTES

    @functools.cached_property
    def written(self) -> str:
        """How the chat template writes a part that is a picture; "" if it reads texts alone."""
        around = [self._library.id_to_token(token) or "" for token in self.picture.around(1)]
        parts = [{"type": "image"}, {"type": "text", "text": "a"}]
        try:
            text = super().render([{"role": "user", "content": parts}])
        except DataError:
            return ""
        names = ("".join(around), *around[:2])
        return next((name for name in names if name and text.count(name) == 1), "")

    def render(self, messages: list[dict[str, Any]], *args, **kwargs) -> str:
        """`Tokenizer.render`; the template gets texts with MARK as parts, if it reads parts."""
        written = self.written if self.template else ""
        shown = []
        for message in messages:
            content = message.get("content") or ""
            if MARK in content or BORDER in content:
                content = parts_of(content) if written else content.replace(BORDER, "")
                message = message | {"content": content}
            shown.append(message)
        text = super().render(shown, *args, **kwargs)
        return self.with_margins(text.replace(written, MARK) if written else text)

    def with_margins(self, text: str) -> str:
        """A text with a margin around each MARK."""
        margin = self.picture.margin
        return text.replace(MARK, margin + MARK + margin)

    @functools.cached_property
    def mark(self) -> np.ndarray:
        """The ids that stand for a picture."""
        return super().encode([MARK])[0]

    def encode(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [
            self._parts(text, lambda part: super(PictureTokenizer, self).encode([part])[0])
            for text in texts
        ]

    def encode_rendered(self, text: str) -> np.ndarray:
        return self._parts(text, super().encode_rendered)

    def _parts(self, text: str | bytes, encode: Callable[[Any], np.ndarray]) -> np.ndarray:
        if not isinstance(text, str) or MARK not in text:
            return encode(text)
        first, *others = (
            encode(part) if part else np.zeros(0, np.int32) for part in text.split(MARK)
        )
        return np.concatenate([first, *(ids for part in others for ids in (self.mark, part))])


def for_pictures(tokenizer: Tokenizer, picture: PictureTokens) -> PictureTokenizer:
    """The tokenizer of texts with pictures."""
    fields = {field.name: vars(tokenizer)[field.name] for field in dataclasses.fields(Tokenizer)}
    return PictureTokenizer(**fields, picture=picture)


def parts_of(content: str) -> list[dict[str, str]]:
    """The parts of a message's text with MARK and BORDER, as templates read them."""
    parts = filter(None, re.split(f"({MARK})|{BORDER}", content))
    return [{"type": "image"} if x == MARK else {"type": "text", "text": x} for x in parts]


# ---- rows to learn -------------------------------------------------------------------------------


def encoded(
    row: dict[str, Any],
    pictures: Sequence[Any],
    where: str,
    tokenizer: PictureTokenizer,
    picture: PictureTokens,
) -> Iterator[PictureRow]:
    """Tokenizes a row of messages, or of a prompt and a completion, with MARK for its pictures.

    Raises DataError if it has another number of pictures than of marks, or nothing to learn.
    """
    kind = MESSAGES if "messages" in row else PAIRS
    checked = conversations.checked(row, kind, where)
    before, learned, *context = json.loads(checked)
    check_places(_marks([before, learned]), len(pictures), where)
    places = [len(pictures)]
    if isinstance(before, str):
        texts = map(tokenizer.with_margins, (before, learned))
        checked = json.dumps([*texts, *context], ensure_ascii=False).encode(errors="replace")
    else:  # up to each turn: a document has all of them, or is one turn with what is before it
        turns = conversations.learned_turns(before, learned)
        places = [_marks([*before, *learned][: turn + 1]) for turn in turns]
    counts = picture.counts(pictures, where)
    documents = conversations.documents(checked, tokenizer, where)
    for document, wanted in zip(documents, places[-len(documents) :], strict=True):
        tokens, is_target, rendered = expanded(document, tokenizer.mark, picture, counts)
        check_rendered(rendered, wanted, where)
        size = conversations.target_bytes(document, tokenizer)
        yield PictureRow(tokens, is_target, tuple(pictures[:rendered]), where, size)


def check_places(places: int, pictures: int, where: str) -> None:
    """Raises DataError if a row has another number of pictures than of their places."""
    if places != pictures:
        raise DataError(
            f"{where} has {pictures} pictures and {places} places for them ({TAG}, or parts of type "
            "image); give it as many of both"
        )


def _marks(cells: Any) -> int:
    return json.dumps(cells, ensure_ascii=False, default=str).count(MARK)


def check_rendered(rendered: int, places: int, where: str) -> None:
    """Raises DataError if a template rendered another number of places than a row has."""
    if rendered != places:
        raise DataError(
            f"{where}: the chat template renders {rendered} places for {places} pictures; use another "
            "template, and texts without its control tokens"
        )


def expanded(
    document: conversations.Document,
    mark: np.ndarray,
    picture: PictureTokens,
    counts: Sequence[int],
) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens and targets of a document with pictures for their marks, the number of pictures).

    Args:
      counts: the placeholders of the pictures; of more marks than these, K.
    """
    tokens, is_target = [], []
    count = position = 0
    while position < len(document.tokens):
        if np.array_equal(document.tokens[position : position + len(mark)], mark):
            around = picture.around(counts[count] if count < len(counts) else 0)
            tokens += around
            is_target += [False] * len(around)
            position += len(mark)
            count += 1
        else:
            tokens.append(document.tokens[position])
            is_target.append(document.targets[position])
            position += 1
    return np.array(tokens, np.int32), np.array(is_target, bool), count


# ---- prompts to answer ---------------------------------------------------------------------------


class Prompt(NamedTuple):
    """A prompt with pictures."""

    tokens: np.ndarray  # int32
    pictures: tuple[Any, ...]  # in order: a path or bytes


def asked(
    row: dict[str, Any],
    pictures: Sequence[Any],
    where: str,
    tokenizer: PictureTokenizer,
    picture: PictureTokens,
) -> Prompt:
    """Tokenizes a row's `prompt` to continue or its `messages` to answer, from `with_marks`.

    Raises DataError if it has another number of pictures than of marks.
    """
    messages = row.get("messages")
    check_places(_marks(messages or row["prompt"]), len(pictures), where)
    if messages:
        context = conversations.context(row, where)
        tokens = tokenizer.ask(messages, context)
    else:
        tokens = tokenizer.prompt(tokenizer.with_margins(row["prompt"]))
    document = conversations.Document(tokens, np.zeros(len(tokens), bool))
    counts = picture.counts(pictures, where)
    tokens, _, rendered = expanded(document, tokenizer.mark, picture, counts)
    check_rendered(rendered, len(pictures), where)
    return Prompt(tokens, tuple(pictures))


# ---- forms of rows -------------------------------------------------------------------------------


def names_pictures(row: Any) -> bool:
    """Whether a row names pictures, in a column or in parts of its messages."""
    if not isinstance(row, dict):
        return False
    cells = [row.get(name) for name in ("messages", "prompt")]
    messages = [one for cell in cells if isinstance(cell, list) for one in cell]
    contents = [one.get("content") for one in messages if isinstance(one, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    in_parts = any(isinstance(part, dict) and part.get("type") in PARTS for part in parts)
    is_text = not {"messages", "prompt", LLAVA} & row.keys()
    return in_parts or (not is_text and any(row.get(name) for name in (SINGLE, SEVERAL)))


def with_marks(row: Any, folder: pathlib.Path, where: str) -> tuple[dict[str, Any], list[Any]]:
    """A row in which MARK stands for each picture, and its pictures. Raises DataError."""
    if not isinstance(row, dict):
        raise DataError(f"{where} is not an object with columns; write one JSON object a line")
    column = row.get(SEVERAL)
    column = row.get(SINGLE) if column is None else column
    listed = [one for one in (column if isinstance(column, list) else [column]) if one is not None]
    if LLAVA in row and "messages" not in row:
        row = row | {"messages": _messages_of(row[LLAVA], where)}
    kept = {name: cell for name, cell in row.items() if name not in (SINGLE, SEVERAL, LLAVA)}
    in_parts: list[Any] = []
    for name in ("messages", "prompt", "completion"):
        if name in kept:
            cell = conversations.messages_of_text(kept[name], name, where)
            kept[name] = _marked(cell, in_parts, where)
    if in_parts and listed:
        raise DataError(
            f"{where} has pictures in its messages and in a column; keep them in one of the two"
        )
    return kept, [reference(one, folder, where) for one in in_parts or listed]


def _messages_of(turns: Any, where: str) -> list[dict[str, Any]]:
    """Messages of LLaVA's conversations, or of those that have roles."""
    turns = conversations.messages_of_text(turns, LLAVA, where)
    is_list = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    if is_list and all({"role", "content"} <= {*turn} for turn in turns):
        return turns
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
            texts = [_text_of_part(part, in_parts, where) for part in content]
            content = BORDER.join(filter(None, texts))
        elif isinstance(content, str):
            content = content.replace(TAG, MARK)
        made.append(message | {"content": content} if isinstance(message, dict) else message)
    return made


def _text_of_part(part: Any, in_parts: list[Any], where: str) -> str:
    """A part of a message's content as text. Raises DataError if it is neither picture nor text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in PARTS:
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


def read(
    dataset: str, tokenizer: Tokenizer, picture: PictureTokens
) -> tuple[list[PictureRow], list[PictureRow] | None]:
    """(rows of a file or of hf:NAME, those of its test split or None). Raises DataError."""
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

    tokens = for_pictures(tokenizer, picture)

    def every(rows: Iterable[tuple[str, Any]]) -> list[PictureRow]:
        made = []
        for where, row in rows:
            kept, pictures = with_marks(row, folder, where)
            made += encoded(kept, pictures, where, tokens, picture)
        return made

    return every(rows), None if test is None else every(test)


def split(rows: list[PictureRow], dataset: str) -> tuple[list[PictureRow], list[PictureRow]]:
    """(rows to train on, held-out rows): a tenth, chosen by their content. Raises DataError."""
    if len(rows) < 2:
        raise DataError(f"--dataset={dataset} has {len(rows)} rows, and one is held out; add rows")
    order = sorted(
        range(len(rows)), key=lambda i: hashlib.sha256(rows[i].tokens.tobytes()).digest()
    )
    out = {*order[: max(1, len(rows) // 10)]}
    return (
        [row for i, row in enumerate(rows) if i not in out],
        [row for i, row in enumerate(rows) if i in out],
    )
