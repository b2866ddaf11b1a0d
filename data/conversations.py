"""Rows in which only some tokens are targets: conversations, and prompts with completions.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    {"prompt": "The capital of France is", "completion": " Paris."}
    {"prompt": [{"role": "user", …}], "completion": [{"role": "assistant", …}]}

Rendering shows which tokens are the assistant's. The chat template renders the messages before a
turn with the beginning of an answer, then the messages including the turn; the whole conversation
must begin with both, token by token. A turn's targets are all tokens after the first rendering, up
to the last token that ends a text (Tokenizer.end), else to the turn's last control token, else to
its end. A newline after <|im_end|> is therefore not a target.

Some templates render a turn differently once others follow: they drop the thinking of earlier
answers, for example. Then each assistant turn becomes a document of its own, with the context that
the model would see.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from data import DataError, chat
from data.tokenizer import Tokenizer

TEXT, MESSAGES, PAIRS = "text", "messages", "pairs"  # forms of a dataset's rows
COLUMNS = {MESSAGES: ["messages"], PAIRS: ["prompt", "completion"]}
ROLES = ("system", "developer", "user", "assistant", "tool")


class Document(NamedTuple):
    tokens: np.ndarray  # int32
    targets: np.ndarray  # bool per token; never the first, which nothing predicts


def form(columns, column: str) -> str:
    """The form of rows with these columns: TEXT, MESSAGES or PAIRS.

    Args:
      column: --text_column. Rows that have it are TEXT, unless it is `messages`.
    """
    if column in columns and column != "messages":
        return TEXT
    if "messages" in columns:
        return MESSAGES
    return PAIRS if {*COLUMNS[PAIRS]} <= {*columns} else TEXT


# ---- checking rows -------------------------------------------------------------------------------


def checked(row: Any, kind: str, where: str) -> bytes:
    """Checks a row, and returns JSON for `documents`: [messages before, messages or text to learn].

    Args:
      kind: MESSAGES or PAIRS.
      where: the row's file and line, for errors.

    Raises DataError if the row has another form, or nothing to learn.
    """
    names = COLUMNS[kind]
    for name in names:
        if not isinstance(row, dict) or row.get(name) is None:
            raise DataError(
                f"{where} has no {name!r}, which the first row has; give all rows the same columns"
            )
    before, learned = ([], row["messages"]) if kind == MESSAGES else (row[n] for n in names)
    if kind == PAIRS and isinstance(before, str) and isinstance(learned, str):
        if not learned:
            raise DataError(f"{where} has an empty completion, so nothing to learn; remove it")
    else:
        if kind == PAIRS and isinstance(before, str) != isinstance(learned, str):
            raise DataError(
                f"{where} mixes a text and a list in prompt and completion; use two texts, or two "
                "lists of messages"
            )
        before = [] if kind == MESSAGES else checked_messages(before, "prompt", where)
        learned = checked_messages(learned, names[-1], where)
        if not any(map(_says_something, learned)):
            raise DataError(
                f"{where} has no message in which the assistant says something, so nothing to learn; "
                "remove it"
            )
    return json.dumps([before, learned], ensure_ascii=False, default=str).encode(errors="replace")


def checked_messages(found: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Checks and returns a row's messages. Raises DataError, naming the row."""
    if not isinstance(found, (list, tuple)):
        raise DataError(
            f"{where}: {name!r} is {_kind(found)}, not a list of messages; write "
            '[{"role": "user", "content": "…"}, …]'
        )
    made = []
    for number, one in enumerate(found, start=1):
        if not isinstance(one, dict):
            raise DataError(
                f"{where}: message {number} is {_kind(one)}; write "
                '{"role": "user", "content": "…"}'
            )
        role = one.get("role")
        if role not in ROLES:
            raise DataError(
                f"{where}: message {number} has the role {json.dumps(role, default=str)[:50]}; use one of "
                f"{', '.join(ROLES)}"
            )
        if not isinstance(one.get("content"), str):
            raise DataError(
                f"{where}: the content of message {number} is {_kind(one.get('content'))}, not a "
                "string; write it as text"
            )
        # Parquet has a null for each key that only other messages have.
        made.append({name: value for name, value in one.items() if value is not None})
    return made


def _says_something(message: dict[str, Any]) -> bool:
    said = message["content"].strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(said)


def _kind(found: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "missing" if found is None else names.get(type(found), "a number")


# ---- tokens and targets --------------------------------------------------------------------------


def documents(row: bytes, tokenizer: Tokenizer, where: str) -> list[Document]:
    """Tokenizes a row into one or more documents, each up to its last target.

    Args:
      row: the result of `checked`.

    Raises DataError if the template can't render it, or does not render what the assistant says.
    """
    before, learned = json.loads(row)
    if isinstance(learned, str):
        return [_completion(before, learned, tokenizer, where)]
    if not tokenizer.template:
        raise DataError(
            f"{where} has messages, but the tokenizer {tokenizer.name} has no chat template; use a "
            "chat model's, or rows of text"
        )
    messages = [*before, *learned]
    turns = [n for n in range(len(before), len(messages)) if _says_something(messages[n])]
    try:
        whole = _whole(messages[: turns[-1] + 1], turns, tokenizer)
        return [whole] if whole else [_turn(messages[: n + 1], tokenizer) for n in turns]
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _completion(prompt: str, completion: str, tokenizer: Tokenizer, where: str) -> Document:
    """Wraps plain text, without control tokens, in the tokens that start and end a document."""
    first, both = tokenizer.encode([prompt, prompt + completion])
    first = first if prompt else first[:0]  # some tokenizers put a space in front of empty text
    if not _begins(both, first):
        raise DataError(
            f"{where}: the tokenizer joins the end of the prompt to the completion; begin the "
            "completion with the white space, or the word, that the prompt ends in"
        )
    tokens = np.concatenate([tokenizer.start, both, tokenizer.end[:1]]).astype(np.int32)
    targets = np.arange(len(tokens)) >= max(len(tokenizer.start) + len(first), 1)
    if not targets.any():
        raise DataError(f"{where} is a single token, which nothing predicts; remove it")
    return Document(tokens, targets)


def _whole(messages: list, turns: list[int], tokenizer: Tokenizer) -> Document | None:
    """One document; None if the template renders a turn differently once others follow."""
    ends = [_ids(messages[: n + 1], False, tokenizer) for n in turns]
    tokens = ends[-1]
    targets = np.zeros(len(tokens), bool)
    for number, end in zip(turns, ends, strict=True):
        begin = _ids(messages[:number], True, tokenizer)
        if not (_begins(tokens, end) and _begins(end, begin)):
            return None
        targets[len(begin) : _last(end, len(begin), tokenizer)] = True
    targets[:1] = False
    if not targets.any():
        raise DataError("the chat template does not render what the assistant says; use another")
    end = int(np.flatnonzero(targets)[-1]) + 1
    return Document(tokens[:end], targets[:end])


def _turn(messages: list, tokenizer: Tokenizer) -> Document:
    """A document whose targets are only in the last message."""
    document = _whole(messages, [len(messages) - 1], tokenizer)
    if document is None:
        raise DataError(
            f"the chat template of {tokenizer.name} renders message {len(messages)} differently from the "
            "beginning of an answer, so where the answer begins is unknown; remove white space from "
            "its beginning, or use another template"
        )
    return document


def _ids(messages: list, answer_follows: bool, tokenizer: Tokenizer) -> np.ndarray:
    rendered = tokenizer.render(messages, answer_follows, today=chat.TRAINING_DAY)
    return tokenizer.encode_rendered(rendered)


def _begins(whole: np.ndarray, part: np.ndarray) -> bool:
    return len(part) <= len(whole) and bool((whole[: len(part)] == part).all())


def _last(tokens: np.ndarray, begin: int, tokenizer: Tokenizer) -> int:
    """The end of the targets of a turn that begins at `begin`."""
    for ending in (tokenizer.end, tokenizer.special):
        found = np.flatnonzero(np.isin(tokens[begin:], list(ending)))
        if len(found):
            return begin + int(found[-1]) + 1
    return len(tokens)


def target_bytes(document: Document, tokenizer: Tokenizer) -> int:
    """Bytes of text that a document's targets stand for."""
    edges = np.flatnonzero(np.diff(document.targets)) + 1
    runs = np.split(document.tokens, edges)[1::2]  # the first token is never a target
    return sum(map(tokenizer.text_bytes, runs))
