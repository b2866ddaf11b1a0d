"""Prompts in JSON Lines: {"prompt": "…"} or {"messages": [{"role": …, "content": …}, …]}.

Rows may have the columns that go to the chat template too: conversations.CONTEXT.
"""

import json
from typing import Any

from data import DataError, buckets
from data.conversations import checked_messages


def read(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Reads the rows of a file: (place, row). Rows may have other keys.

    Raises DataError, naming the line.
    """
    return [(where, checked(row, where)) for where, row in rows(name)]


def rows(name: str) -> list[tuple[str, Any]]:
    """Reads the rows of a file before they are `checked`: (place, row). Raises DataError."""
    try:
        content = buckets.local(name, f"--prompts={name}").read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"--prompts={name} can't be read ({reason}); use a .jsonl file") from None
    # str.splitlines would also split at U+2028 and U+0085, which JSON texts may contain.
    numbered = enumerate(content.split("\n"), start=1)
    places = ((f"line {number} of {name}", line) for number, line in numbered if line.strip())
    rows = [(where, _parsed(line, where)) for where, line in places]
    if not rows:
        raise DataError(f'--prompts={name} is empty; add a line like {{"prompt": "Hello"}}')
    return rows


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); fix it") from None


def checked(row: Any, where: str) -> dict[str, Any]:
    """A row with a prompt or messages. Raises DataError."""
    if isinstance(row, dict) and row.get("messages"):
        return row | {"messages": checked_messages(row["messages"], "messages", where)}
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        if "messages" in row:
            state = "null" if row["messages"] is None else "empty"
            raise DataError(f"{where} has a prompt, and messages that are {state}; leave these out")
        return row
    raise DataError(
        f'{where} is not a prompt; write {{"prompt": "…"}} or {{"messages": [{{"role": "user", '
        f'"content": "…"}}]}}'
    )
