"""Rows in which only some words are to be learned: conversations, and prompts with completions.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    {"prompt": "The capital of France is", "completion": " Paris."}
    {"prompt": [{"role": "user", …}], "completion": [{"role": "assistant", …}]}

Which tokens of a conversation are the assistant's is found by rendering: its chat template writes the
messages before a turn with the beginning of an answer, then the messages with the turn, and both must
be, token by token, how the whole conversation begins. A turn's targets are all tokens behind the
first up to the last one that ends a text (Tokenizer.end); where a turn has none, to its last control
token, and where it has none of these either, to its end. So a newline behind <|im_end|> is no target.

A template may write a turn otherwise once others follow, as those do that drop the thinking of earlier
answers. Then each of the assistant's turns becomes a document of its own, as the model meets it.
"""

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

from data import DataError, chat
from data.tokenizer import Tokenizer

CODE = 1  # raised when the same rows would give other tokens or targets
TEXT, MESSAGES, PAIRS = "text", "messages", "pairs"  # what a dataset's rows have
COLUMNS = {MESSAGES: ["messages"], PAIRS: ["prompt", "completion"]}
ROLES = ("system", "developer", "user", "assistant", "tool")


class Document(NamedTuple):
    tokens: np.ndarray  # int32
    targets: np.ndarray  # bool, of each token; never of the first, which nothing predicts


def form(columns, column: str) -> str:
    """What rows with these columns are: TEXT, MESSAGES or PAIRS.

    Args:
      column: --text_column. Where it is there, it is what is learned, as long as it is no `messages`.
    """
    if column in columns and column != "messages":
        return TEXT
    if "messages" in columns:
        return MESSAGES
    return PAIRS if {*COLUMNS[PAIRS]} <= {*columns} else TEXT


def key(tokenizer: Tokenizer) -> str:
    """Of all that makes tokens and targets of a row, except for tokenizer.json."""
    about = [CODE, tokenizer.template, tokenizer.control_tokens, tokenizer.start, tokenizer.end]
    about.append(chat.TRAINING_DAY.isoformat())
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def dated(tokenizer: Tokenizer) -> bool:
    """Whether the template asks what day it is."""
    return "strftime_now" in tokenizer.template


# ---- rows, checked -------------------------------------------------------------------------------


def checked(row: Any, kind: str, where: str) -> bytes:
    """The row as JSON that `documents` takes: [messages before, messages or texts to learn].

    Args:
      kind: MESSAGES or PAIRS.
      where: the row's file and line, for messages.

    Raises DataError if it is no such row, or there is nothing to learn in it.
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
                f"{where} has a text and a list as prompt and completion; use two texts, or two "
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
    """A row's messages, checked. Raises DataError, naming the row."""
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
        # Parquet has a null for what other messages have.
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
    """The documents that a row gives, without what follows the last target.

    Args:
      row: of `checked`.

    Raises DataError if the template can't render it, or it does not show what the assistant says.
    """
    before, learned = json.loads(row)
    if isinstance(learned, str):
        return [_completion(before, learned, tokenizer, where)]
    if not tokenizer.template:
        raise DataError(
            f"{where} has messages, and the tokenizer {tokenizer.name} has no chat template; use a "
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
    """Plain text between the tokens that start and end one; control tokens in it stay text."""
    first, both = tokenizer.encode([prompt, prompt + completion])
    first = first if prompt else first[:0]  # some tokenizers write a space before nothing
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
    """The conversation as one document; None where the template writes a turn otherwise later."""
    ends = [_ids(messages[: n + 1], False, tokenizer) for n in turns]
    tokens = ends[-1]
    targets = np.zeros(len(tokens), bool)
    for number, end in zip(turns, ends, strict=True):
        begin = _ids(messages[:number], True, tokenizer)
        if not (_begins(tokens, end) and _begins(end, begin)):
            return None
        targets[len(begin) : _last(end, len(begin), tokenizer)] = True
    return _trimmed(tokens, targets)


def _turn(messages: list, tokenizer: Tokenizer) -> Document:
    """What is learned of the last message alone, behind all the others."""
    begin, tokens = (_ids(messages[:-1], True, tokenizer), _ids(messages, False, tokenizer))
    if not _begins(tokens, begin):
        raise DataError(
            f"the chat template of {tokenizer.name} writes message {len(messages)} otherwise than it "
            "begins an answer, so that nobody knows where the answer begins; take white space from "
            "its beginning, or use another template"
        )
    targets = np.zeros(len(tokens), bool)
    targets[len(begin) : _last(tokens, len(begin), tokenizer)] = True
    return _trimmed(tokens, targets)


def _trimmed(tokens: np.ndarray, targets: np.ndarray) -> Document:
    targets[:1] = False
    if not targets.any():
        raise DataError("the chat template writes nothing of what the assistant says; use another")
    end = int(np.flatnonzero(targets)[-1]) + 1
    return Document(tokens[:end], targets[:end])


def _ids(messages: list, answer_follows: bool, tokenizer: Tokenizer) -> np.ndarray:
    shown = tokenizer.render(messages, answer_follows, today=chat.TRAINING_DAY)
    return tokenizer.encode_rendered(shown)


def _begins(whole: np.ndarray, part: np.ndarray) -> bool:
    return len(part) <= len(whole) and bool((whole[: len(part)] == part).all())


def _last(tokens: np.ndarray, begin: int, tokenizer: Tokenizer) -> int:
    """Where the targets of a turn end that begins at `begin`."""
    for ending in (tokenizer.end, tokenizer.special):
        found = np.flatnonzero(np.isin(tokens[begin:], list(ending)))
        if len(found):
            return begin + int(found[-1]) + 1
    return len(tokens)


def size(document: Document, tokenizer: Tokenizer) -> int:
    """Bytes of the text that the targets stand for."""
    edges = np.flatnonzero(np.diff(document.targets)) + 1
    runs = np.split(document.tokens, edges)[1::2]  # the first token is no target
    return sum(map(tokenizer.text_bytes, runs))
