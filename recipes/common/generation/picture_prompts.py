"""Prompts with pictures, for models that see."""

import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np

from data import images, picture_files, picture_rows, pictured, sources
from data.picture_rows import MARK, TAG, PictureTokenizer, PictureTokens, Prompt
from data.squares import SquareForm
from data.tokenizer import Tokenizer
from recipes.common import entries
from recipes.common.runtime import UserError
from recipes.common.runtime.flags import split

# Where --restore_from is a folder that several entries read, one with such data is chosen.
SEEING = pictured.__name__


FIRST = 100  # rows of a dataset in which pictures are looked for


def sees(entry: str) -> bool:
    """Whether an entry's models read rows with pictures."""
    return entry in entries.ENTRIES and entries.ENTRIES[entry].data == SEEING


def seeing() -> list[str]:
    """The entries that do."""
    return [name for name in entries.ENTRIES if sees(name)]


def names(image: str) -> list[str]:
    """Splits --image at commas, unless it is a file with a comma in its name."""
    return [image] if image and pathlib.Path(image).expanduser().is_file() else split(image)


@dataclasses.dataclass(frozen=True)
class PromptReader:
    """Makes tokens and pixels of prompts, as a model's Config says."""

    tokenizer: PictureTokenizer
    tokens: PictureTokens
    form: images.AnyForm

    def asked(self, row: dict[str, Any], pictures: list[Any], where: str) -> Prompt:
        """A row from `picture_rows.with_marks`, checked. Raises DataError."""
        prompt = picture_rows.asked(row, pictures, where, self.tokenizer, self.tokens)
        picture_files.check(((one, where) for one in prompt.pictures), self.form, where)
        return prompt

    def pictures(self, prompt: Prompt, where: str) -> dict[str, np.ndarray]:
        """A prompt's pictures as arrays of a batch, [pictures, ...]. Raises DataError."""
        shown = [picture_files.pixels_of(one, self.form, where, where) for one in prompt.pictures]
        return self.form.arrays(shown, len(shown))


def reader(config: Any, tokenizer: Tokenizer) -> PromptReader:
    """The reader for a model that sees."""
    tokens = tokens_of(config)
    return PromptReader(picture_rows.for_pictures(tokenizer, tokens), tokens, form_of(config))


def form_of(config: Any) -> images.AnyForm:
    """The form into which a model's pictures are brought."""
    return entries.with_options(pictured.form_of, vars(config))


def tokens_of(config: Any) -> PictureTokens:
    """How a picture becomes tokens of a model."""
    form = form_of(config)
    return PictureTokens(
        begin=config.picture_begin,
        placeholder=config.image_token,
        end=config.picture_end,
        count=config.picture_tokens,
        margin=config.picture_margin,
        squares=form if isinstance(form, SquareForm) else None,
    )


def marked(prompt: str, pictures: list[str]) -> str:
    """A prompt with a mark for each picture: at <image>, else all in front of it."""
    text = prompt.replace(TAG, MARK)
    return text if MARK in text else MARK * len(pictures) + text


def any_pictures(datasets: list[str]) -> bool:
    """Whether the first rows of any of these name pictures. Raises DataError if they can't be read."""
    for name in datasets:
        path = pathlib.Path(name).expanduser()
        if name.startswith("hf:"):
            rows, _ = sources.rows(name)
        elif path.is_file() and sources.kind(path) != "text":
            rows = sources.rows_of_file(name, path)
        else:
            continue
        if any(picture_rows.names_pictures(row) for _, row in itertools.islice(rows, FIRST)):
            return True
    return False


def refuse(restore_from: str, entry: str, what: str) -> UserError:
    """The error for pictures given to a model that sees none."""
    return UserError(
        f"{what} has pictures, and --restore_from={restore_from} is a {entry!r} model, which sees none; "
        f"leave them out, or use a model of {' or '.join(seeing())}"
    )
