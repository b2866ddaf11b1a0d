"""What recipes.generate answers: a prompt, the rows of a file, or a dialogue's turns."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from data import DataError, conversations, picture_rows, prompts
from data.picture_rows import names_pictures
from data.tokenizer import Tokenizer
from recipes.common import checkpoint
from recipes.common.generation import picture_prompts
from recipes.common.runtime import UserError
from recipes.common.runtime.flags import refuse_unused


@dataclasses.dataclass(frozen=True)
class Question:
    row: dict[str, Any]  # of --prompts
    tokens: np.ndarray
    begins: str = ""  # the text to continue
    where: str = ""  # the row's place in --prompts, for messages
    # Its pictures as arrays of a batch, [pictures, ...], if the model sees.
    pictures: dict[str, np.ndarray] | None = None

    @property
    def after(self) -> np.ndarray:
        """The tokens that an answer continues; none in a chat, where its text starts fresh."""
        return self.tokens if self.begins else self.tokens[:0]


def rows_to_answer(flags: Any) -> list[tuple[str, Any]]:
    """(place, row) of --prompts, or of --prompt; [] for a dialogue.

    Args:
      flags: those of recipes.generate.

    Raises UserError, DataError.
    """
    if flags.prompts and flags.prompt:
        raise UserError(f"--prompt and --prompts={flags.prompts} are both given; leave one out")
    if flags.out and not flags.prompts:
        raise UserError(f"--out={flags.out} is for the answers to --prompts; add it")
    if flags.prompts:
        refuse_unused(flags, ("image",), "--prompt; a row names its pictures in its column image")
        rows = prompts.rows(flags.prompts)
        if not any(isinstance(row, dict) and "prompt" in row for _, row in rows):
            refuse_unused(flags, ("chat",), f"prompts, and --prompts={flags.prompts} has messages")
        return rows
    refuse_unused(flags, ("batch_size",), "--prompts, and there are none")
    if flags.chat and not flags.prompt:
        refuse_unused(flags, ("image",), "--prompt, and there is none")
        return []
    if flags.image:
        pictures = picture_prompts.names(flags.image)
        prompt = picture_prompts.marked(flags.prompt, pictures)
        return [("", {"prompt": prompt, "images": pictures})]
    return [("", {"prompt": flags.prompt})]


def questions(
    flags: Any,
    rows: list[tuple[str, Any]],
    tokenizer: Tokenizer,
    source: checkpoint.WeightSource,
) -> list[Question]:
    """Questions from `rows_to_answer`; [] for a dialogue. Raises UserError, DataError."""
    entry = source.metadata["entry"]
    if not rows:
        tokenizer.ask([{"role": "user", "content": ""}])  # raises if there is no chat template
    if picture_prompts.sees(entry):
        reader = picture_prompts.reader(checkpoint.config_of(source), tokenizer)
        return [question_with_pictures(flags, row, where, reader) for where, row in rows]
    for where, row in rows:
        if names_pictures(row):
            what = where or f"--image={flags.image}"
            raise picture_prompts.refuse(flags.restore_from, entry, what)
    return [
        question(prompts.checked(row, where), flags.chat, tokenizer, where) for where, row in rows
    ]


def question(row: dict[str, Any], chat: bool, tokenizer: Tokenizer, where: str = "") -> Question:
    """The question of a row at `where` in --prompts. Raises DataError if it can't be rendered."""
    row_to_ask = in_chat(row) if chat else row
    messages = row_to_ask.get("messages")
    if not messages:
        return Question(row, tokenizer.prompt(row["prompt"]), row["prompt"], where)
    try:
        tokens = tokenizer.ask(messages, conversations.context(row, where))
    except DataError as error:
        raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from None
    return Question(row, tokens, where=where)


def in_chat(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose prompt is a user's message."""
    return row | (
        {"messages": [{"role": "user", "content": row["prompt"]}]} if "prompt" in row else {}
    )


def question_with_pictures(
    flags: Any, row: Any, where: str, reader: picture_prompts.PromptReader
) -> Question:
    """Likewise for a model that sees. Raises DataError, also for a picture that can't be read."""
    folder = pathlib.Path(flags.prompts).parent if flags.prompts else pathlib.Path()
    place = where or (f"--image={flags.image}" if flags.image else "--prompt")
    marked, pictures = picture_rows.with_marks(row, folder, place)
    to_ask = prompts.checked(marked, place)
    to_ask = in_chat(to_ask) if flags.chat else to_ask
    prompt = reader.asked(to_ask, pictures, place)
    begins = "" if "messages" in to_ask else flags.prompt or row["prompt"]
    return Question(row, prompt.tokens, begins, where, reader.pictures(prompt, place))


def pictures_of(group: list[Question]) -> list[dict[str, np.ndarray]] | None:
    """The pictures of each question; None if the model sees none."""
    shown = [question.pictures for question in group if question.pictures is not None]
    return shown or None
