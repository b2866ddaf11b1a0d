"""Rows in which only some tokens are targets: conversations, and prompts with completions.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    {"prompt": "The capital of France is", "completion": " Paris."}
    {"prompt": [{"role": "user", …}], "completion": [{"role": "assistant", …}]}

A row's `tools`, `chat_template_kwargs` and other VARIABLES go to the template too. An assistant's
message of `weight` 0 is context only; so is one of `loss` or `train` 0 or false.

Rendering shows which tokens are the assistant's. The chat template renders the messages before a
turn with the beginning of an answer, then the messages including the turn; the whole conversation
must begin with both, token by token. A turn's targets are all tokens after the first rendering, up
to the last token that ends a text (Tokenizer.end), else to the turn's last control token, else to
its end. A newline after <|im_end|> is therefore not a target.

Some templates render a turn differently once others follow: they drop the thinking of earlier
answers, for example. Then each assistant turn becomes a document of its own, with the context that
the model would see.
"""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from data import DataError, chat
from data.tokenizer import Tokenizer

TEXT, MESSAGES, PAIRS = "text", "messages", "pairs"  # forms of a dataset's rows
COLUMNS = {MESSAGES: ["messages"], PAIRS: ["prompt", "completion"]}
# Variables of well-known templates, which a row may have as columns. Others go into chat_template_kwargs.
VARIABLES = [
    "documents", "enable_thinking", "reasoning_effort", "thinking_budget", "model_identity",
    "builtin_tools", "custom_tools", "tools_in_user_message", "xml_tools", "python_tools", "date_string",
]  # fmt: skip
CONTEXT = [
    "tools",
    "chat_template_kwargs",
    *VARIABLES,
]  # columns that rows of messages may have too
WEIGHTS = ("weight", "loss", "train")  # names of one field of messages: whether to learn it
# A list of messages as Python and pandas write it.
MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:\s*['"]""")
SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system"}  # of {"from": …, "value": …}
ROLES = ("system", "developer", "user", "assistant", "tool")


class Document(NamedTuple):
    tokens: np.ndarray  # int32
    targets: np.ndarray  # bool per token; never the first, which nothing predicts
    # Bytes per token that belong to its text, but that decoding the targets alone drops: the space
    # with which an answer begins, if the tokenizer puts one in front of every text.
    dropped: np.ndarray | None = None


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
    """Checks a row, and returns JSON for `documents`: [messages before, messages or text to learn],
    and the template's `context` if the row has any.

    Args:
      kind: MESSAGES or PAIRS.
      where: the row's file and line, for errors.

    Raises DataError if the row has another form, or nothing to learn.
    """
    names = COLUMNS[kind]
    for name in names:
        if not isinstance(row, dict) or name not in row:
            raise DataError(
                f"{where} has no {name!r}, which the first row has; give all rows the same columns"
            )
        if row[name] is None:
            raise DataError(f"{where} has null in the column {name!r}; fill it, or remove the row")
    variables = {}
    cells = [messages_of_text(row[name], name, where) for name in names]
    before, learned = ([], *cells) if kind == MESSAGES else cells
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
        variables = context(row, where)
        _check_weights(learned, where)
        if not any(map(_says_something, learned)):
            raise DataError(
                f"{where} has no message in which the assistant says something, so nothing to learn; "
                "remove it"
            )
        if not any(map(_is_learned, learned)):
            raise DataError(
                f"{where} has nothing to learn: all of the assistant's messages have weight 0; remove "
                "it, or give one weight 1"
            )
    checked_row = [before, learned, variables] if variables else [before, learned]
    return json.dumps(checked_row, ensure_ascii=False, default=str).encode(errors="replace")


def context(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The variables of a row for the chat template: its tools, and any of its own.

    Both may be JSON texts, as in Parquet files of rows whose tools have different keys.

    Raises DataError, naming the row, if they have another form.
    """
    tools = _parsed(row.get("tools")) or []
    variables = _parsed(row.get("chat_template_kwargs")) or {}
    if not isinstance(tools, (list, tuple)):
        raise DataError(
            f"{where}: 'tools' is {_kind(tools)}, not a list of objects; write "
            '[{"type": "function", "function": {"name": "…", …}}, …]'
        )
    tools = [_parsed(tool) for tool in tools]
    for number, tool in enumerate(tools, start=1):
        if not isinstance(tool, dict):
            raise DataError(
                f"{where}: tool {number} is {_kind(tool)}, not an object; write "
                '{"type": "function", "function": {"name": "…", …}}'
            )
    if not isinstance(variables, dict):
        raise DataError(
            f"{where}: 'chat_template_kwargs' is {_kind(variables)}, not an object; write, for "
            'example, {"enable_thinking": false}'
        )
    named = {name: _parsed(row[name]) for name in VARIABLES if row.get(name) is not None}
    return named | variables | ({"tools": tools} if tools else {})


def _parsed(value: Any) -> Any:
    """The value of a JSON text; other values, and other texts, as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def messages_of_text(value: Any, name: str, where: str) -> Any:
    """The messages that a text holds as JSON, as in CSV files; other values, and other texts, as they are.

    Raises DataError, naming the row, for lists of messages in another language, such as Python's.
    """
    parsed = (
        _parsed(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value
    )
    if isinstance(parsed, dict) and isinstance(parsed.get("messages"), list):
        messages = parsed["messages"]
    else:
        messages = parsed if isinstance(parsed, list) else [parsed]
    if messages and all(map(_is_message, messages)):
        return parsed
    if isinstance(value, str) and isinstance(parsed, str) and MESSAGES_AS_TEXT.match(value):
        raise DataError(
            f"{where} has messages in {name!r} as text that is not JSON; write them by json.dumps, or rows as "
            "JSON Lines"
        )
    return value


def is_chat(value: Any) -> bool:
    """Whether a row's value is a list of messages, also as JSON text."""
    try:
        messages = messages_of_text(value, "", "")
    except DataError:
        return True
    return isinstance(messages, list) and bool(messages) and all(map(_is_message, messages))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return (value.get("role") in ROLES and {"content", "tool_calls"} & {*value} != set()) or (
        value.get("from") in (*ROLES, *SPEAKERS) and "value" in value
    )


def without_nulls(cell: Any) -> Any:
    """A value of an Arrow table without the keys that it has only because other rows have them."""
    if isinstance(cell, dict):
        return {key: without_nulls(value) for key, value in cell.items() if value is not None}
    return [without_nulls(one) for one in cell] if isinstance(cell, list) else cell


def checked_messages(messages: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Checks and returns a row's messages. Raises DataError, naming the row."""
    if not isinstance(messages, (list, tuple)):
        raise DataError(
            f"{where}: {name!r} is {_kind(messages)}, not a list of messages; write "
            '[{"role": "user", "content": "…"}, …]'
        )
    made = []
    for number, one in enumerate(messages, start=1):
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
        content = one.get("content")
        only_calls = content is None and role == "assistant" and one.get("tool_calls")
        if not isinstance(content, str) and not only_calls:
            raise DataError(
                f"{where}: the content of message {number} is {_kind(content)}, not a "
                "string; write it as text"
            )
        # Parquet has a null for each key that only other messages have.
        kept = {name: value for name, value in one.items() if value is not None}
        made.append(kept | {"content": content})
    return made


def _check_weights(messages: list[dict[str, Any]], where: str) -> None:
    for number, message in enumerate(messages, start=1):
        weights = {name: message[name] for name in WEIGHTS if name in message}
        if message["role"] != "assistant":
            continue
        for name, weight in weights.items():
            if weight not in (0, 1):
                raise DataError(
                    f"{where}: message {number} has the {name} {json.dumps(weight, default=str)[:50]}; "
                    "use 0 for context only, or 1"
                )
        if len({*weights.values()}) > 1:
            raise DataError(
                f"{where}: message {number} has {' and '.join(weights)}, which contradict each other; "
                "keep one of them"
            )


def _says_something(message: dict[str, Any]) -> bool:
    says = (message["content"] or "").strip() or message.get("tool_calls")
    return message["role"] == "assistant" and bool(says)


def _is_learned(message: dict[str, Any]) -> bool:
    return _says_something(message) and all(message.get(name, 1) for name in WEIGHTS)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "missing" if value is None else names.get(type(value), "a number")


# ---- tokens and targets --------------------------------------------------------------------------


def documents(row: bytes, tokenizer: Tokenizer, where: str) -> list[Document]:
    """Tokenizes a row into one or more documents, each up to its last target.

    Args:
      row: the result of `checked`.

    Raises DataError if the template can't render it, or does not render what the assistant says.
    """
    before, learned, *contexts = json.loads(row)
    if isinstance(learned, str):
        return [_completion(before, learned, tokenizer, where)]
    if not tokenizer.template:
        raise DataError(
            f"{where} has messages, but the tokenizer {tokenizer.name} has no chat template; use a "
            "chat model's, or rows of text"
        )
    turns = learned_turns(before, learned)
    messages = [*before, *learned]
    for message in messages:
        for name in WEIGHTS:  # what to learn is not a part of the conversation
            message.pop(name, None)
    context = contexts[0] if contexts else {}
    render = functools.partial(_rendered, tokenizer=tokenizer, context=context)
    try:
        if document := _whole(messages[: turns[-1] + 1], turns, tokenizer, render):
            return [document]
        return [_turn(messages[: n + 1], tokenizer, render) for n in turns]
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def learned_turns(before: list[dict[str, Any]], learned: list[dict[str, Any]]) -> list[int]:
    """The numbers of the messages of [*before, *learned] that are learned."""
    return [len(before) + n for n, message in enumerate(learned) if _is_learned(message)]


def ignores_tools(row: bytes, tokenizer: Tokenizer) -> bool:
    """Whether a row has tools that the chat template does not render."""
    before, learned, *contexts = json.loads(row)
    if not contexts or "tools" not in contexts[0]:
        return False
    messages, context = [*before, *learned], contexts[0]
    without = {name: value for name, value in context.items() if name != "tools"}
    return _rendered(messages, False, tokenizer, context) == _rendered(
        messages, False, tokenizer, without
    )


def spells_control(row: bytes, tokenizer: Tokenizer) -> bool:
    """Whether a row of plain texts spells a control token, which is learned as letters."""
    before, learned, *_ = json.loads(row)
    return isinstance(learned, str) and tokenizer.spells_control(before + learned)


def _completion(prompt: str, completion: str, tokenizer: Tokenizer, where: str) -> Document:
    """Wraps plain text, without control tokens, in the tokens that start and end a document."""
    prompt, (completion,) = at_border(prompt, [completion], tokenizer)
    first, both = _prompt_and_whole(prompt, completion, tokenizer)
    if not _begins(both, first):
        raise DataError(
            f"{where}: the tokenizer joins the end of the prompt to the completion; begin the "
            "completion with the white space, or the word, that the prompt ends in"
        )
    tokens = np.concatenate([tokenizer.start, both, tokenizer.end[:1]]).astype(np.int32)
    begin = max(len(tokenizer.start) + len(first), 1)
    targets = np.arange(len(tokens)) >= begin
    if not targets.any():
        raise DataError(f"{where} is a single token, which nothing predicts; remove it")
    dropped = np.zeros(len(tokens), np.uint8)
    dropped[begin] = _dropped(tokens[begin:], completion, tokenizer)
    return Document(tokens, targets, dropped)


def ends_at_border(prompt: str, completions: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends where a token ends, whichever completion follows."""
    return all(_begins(*_prompt_and_whole(prompt, x, tokenizer)[::-1]) for x in completions)


def at_border(
    prompt: str, completions: Sequence[str], tokenizer: Tokenizer
) -> tuple[str, Sequence[str]]:
    """Moves white space from a prompt's end to its completions, if a token would join them.

    Most tokenizers put the space in front of a word into the word's token.
    """
    for end in range(len(prompt), len(prompt.rstrip()) - 1, -1):
        moved = [prompt[end:] + completion for completion in completions]
        if ends_at_border(prompt[:end], moved, tokenizer):
            return prompt[:end], moved
    return prompt, completions


def _prompt_and_whole(
    prompt: str, completion: str, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the prompt, and of prompt and completion."""
    first, both = tokenizer.encode([prompt, prompt + completion])
    return first if prompt else first[:0], both  # some put a space in front of empty text


def _whole(
    messages: list, turns: list[int], tokenizer: Tokenizer, render: Callable
) -> Document | None:
    """One document; None if the template renders a turn differently once others follow."""
    ends = [tokenizer.encode_rendered(render(messages[: n + 1], False)) for n in turns]
    tokens = ends[-1]
    targets = np.zeros(len(tokens), bool)
    dropped = np.zeros(len(tokens), np.uint8)
    for number, end in zip(turns, ends, strict=True):
        begin = tokenizer.encode_rendered(render(messages[:number], True))
        if not (_begins(tokens, end) and _begins(end, begin)):
            return None
        _check_tool_calls(messages[: number + 1], tokenizer, render)
        last = _last(end, len(begin), tokenizer)
        targets[len(begin) : last] = True
        text = messages[number]["content"] or ""
        dropped[len(begin) : len(begin) + 1] = _dropped(tokens[len(begin) : last], text, tokenizer)
    targets[:1] = False
    if not targets.any():
        raise DataError("the chat template does not render what the assistant says; use another")
    end = int(np.flatnonzero(targets)[-1]) + 1
    return Document(tokens[:end], targets[:end], dropped[:end])


def _check_tool_calls(messages: list, tokenizer: Tokenizer, render: Callable) -> None:
    """Raises DataError if the last message has nothing but tool calls, and they are not rendered."""
    *before, last = messages
    if (last["content"] or "").strip() or "tool_calls" not in last:
        return
    silent = {name: value for name, value in last.items() if name != "tool_calls"}
    try:
        without = render([*before, silent], False)
    except DataError:  # a template may refuse a message that says nothing
        return
    if without == render(messages, False):
        raise DataError(
            f"the chat template of {tokenizer.name} does not render the tool calls of message "
            f"{len(messages)}, which has no text; use a template that does, or remove the row"
        )


def _turn(messages: list, tokenizer: Tokenizer, render: Callable) -> Document:
    """A document whose targets are only in the last message."""
    document = _whole(messages, [len(messages) - 1], tokenizer, render)
    if document is None:
        raise DataError(
            f"the chat template of {tokenizer.name} renders message {len(messages)} differently from the "
            "beginning of an answer, so where the answer begins is unknown; remove white space from "
            "its beginning, or use another template"
        )
    return document


def _rendered(
    messages: list, answer_follows: bool, tokenizer: Tokenizer, context: dict[str, Any]
) -> str:
    return tokenizer.render(messages, answer_follows, today=chat.TRAINING_DAY, context=context)


def _begins(tokens: np.ndarray, part: np.ndarray) -> bool:
    return len(part) <= len(tokens) and bool((tokens[: len(part)] == part).all())


def _last(tokens: np.ndarray, begin: int, tokenizer: Tokenizer) -> int:
    """The end of the targets of a turn that begins at `begin`."""
    for ending in (tokenizer.end, tokenizer.special):
        positions = np.flatnonzero(np.isin(tokens[begin:], list(ending)))
        if len(positions):
            return begin + int(positions[-1]) + 1
    return len(tokens)


def _dropped(answer: np.ndarray, text: str, tokenizer: Tokenizer) -> int:
    """Bytes of white space that begin an answer, but that decoding its tokens alone drops.

    Args:
      text: its text. A space that only the template puts in front of it does not count.
    """
    if not text.startswith(" "):
        return 0
    alone = tokenizer.decode(answer)
    after = tokenizer.decode(answer, after=tokenizer.a_text)
    if not after.endswith(alone) or _spaces(text) <= _spaces(alone):
        return 0
    return len(after) - len(alone)


def _spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def target_bytes(document: Document, tokenizer: Tokenizer) -> int:
    """Bytes of text that a document's targets stand for."""
    edges = np.flatnonzero(np.diff(document.targets)) + 1
    runs = np.split(document.tokens, edges)[1::2]  # the first token is never a target
    dropped = 0 if document.dropped is None else int(document.dropped[document.targets].sum())
    return sum(map(tokenizer.text_bytes, runs)) + dropped
