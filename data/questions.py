"""Prompts to answer, for reinforcement learning: a row has a prompt, and columns that its reward reads.

    {"prompt": "What is 3 + 4?", "answer": "7"}
    {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "answer": "7"}

Texts are taken as they are, or, with `as_chat`, as a user's message; messages are rendered by the
model's chat template. The default prompts are the first lines of functions in the standard library.
"""

import hashlib
import json
import re
from typing import Any, NamedTuple

import numpy as np

from data import DataError, conversations, pairs, sources, whole_texts
from data.tokenizer import BYTES, Tokenizer
from data.whole_texts import Row

# The first line of a function and the indentation of its second one; of a file, so many at most.
HEADER = re.compile(r"^def \w+\([^\n]*\):\n    (?=\S)", re.MULTILINE)
HEADER_BYTES, OF_A_FILE = 48, 4


class Question(NamedTuple):
    tokens: np.ndarray  # int32, the prompt
    prompt: Any  # the row's text or messages
    row: dict[str, Any]  # all columns
    where: str  # its place, for messages


class Questions(NamedTuple):
    train: list[Question]
    held_out: list[Question]
    facts: dict[str, Any]  # equal if and only if the prompts are
    notes: tuple[str, ...]  # lines to print


def load(
    dataset: str,
    longest: int,
    tokenizer: Tokenizer = BYTES,
    eval_dataset: str = "",
    as_chat: bool = False,
) -> Questions:
    """Loads prompts of at most `longest` tokens; longer ones are left out and counted.

    Args:
      dataset: stdlib, or JSON Lines, Parquet, CSV or hf: datasets as in `sources.find`.
      eval_dataset: prompts to hold out; without it, a twentieth of them.

    Raises DataError if there are no such prompts, or a row has another form.
    """
    rows, held_out_rows = whole_texts.read(
        dataset, eval_dataset, _headers() if dataset == "stdlib" else []
    )
    chat = as_chat and dataset != "stdlib"
    train = [_question(row, where, tokenizer, chat) for where, row in rows]
    if held_out_rows is None:
        train, held_out = pairs.split_by_prompt(train, lambda x: x.tokens.tobytes(), dataset)
    else:
        held_out = [_question(row, where, tokenizer, chat) for where, row in held_out_rows]
    notes, parts = [], {"Training data": train, "Held out": held_out}
    digest = hashlib.sha256()
    for what, questions in parts.items():
        kept = [q for q in questions if len(q.tokens) <= longest]
        most = max((len(q.tokens) for q in questions), default=0)
        if not kept:
            raise DataError(
                f"--dataset={dataset} has no {what.lower()} prompt of at most {longest} tokens, of "
                f"{len(questions):,}; the longest has {most}, so raise --seq_len by {max(most - longest, 1)}"
            )
        notes.append(f"{what}: {len(kept):,} prompts.")
        if len(kept) < len(questions):
            notes.append(
                f"warning: {len(questions) - len(kept):,} of {len(questions):,} prompts have more than "
                f"{longest} tokens and are left out; the longest has {most}."
            )
        questions[:] = kept
        for question in kept:
            digest.update(json.dumps(question.row, sort_keys=True, default=str).encode() + b"\n")
            digest.update(question.tokens.tobytes())
    facts = {"dataset": dataset, "fingerprint": digest.hexdigest()}
    facts |= {"eval_dataset": eval_dataset} if eval_dataset else {}
    facts |= {"tokenizer": tokenizer.sha256} if tokenizer.files else {}
    return Questions(train, held_out, facts, tuple(notes))


def _question(row: Any, where: str, tokenizer: Tokenizer, chat: bool) -> Question:
    """Tokenizes a row's prompt. Raises DataError, naming the row, if it has none."""
    columns = list(row) if isinstance(row, dict) else []
    name = next((name for name in ("messages", "prompt") if row and row.get(name)), "")
    if not name:
        raise DataError(
            f"{where} has no prompt; a row has 'prompt', a text or messages, or 'messages', and this one "
            f"has {', '.join(map(repr, columns)) or 'none'}"
        )
    prompt = row[name]
    if isinstance(prompt, str) and chat:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        return Question(tokenizer.prompt(prompt), row[name], row, where)
    messages = conversations.checked_messages(prompt, name, where)
    try:
        tokens = tokenizer.ask(messages, conversations.context(row, where))
    except DataError as error:
        raise error if str(error).startswith(where) else DataError(f"{where}: {error}") from None
    return Question(tokens, row[name], row, where)


def _headers() -> list[Row]:
    """First lines of functions of the standard library, each once."""
    (source,) = sources.find("stdlib")
    texts: dict[str, None] = {}
    for part in source.parts():
        headers = HEADER.findall(part.text.decode(errors="ignore"))
        short = [text for text in headers if len(text) <= HEADER_BYTES and text.isascii()]
        texts |= dict.fromkeys(short[:OF_A_FILE])
    return [("a function of the standard library", {"prompt": text}) for text in texts]
