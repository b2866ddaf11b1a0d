"""Prompts to answer, from JSON Lines: {"prompt": "…"} or {"messages": [{"role": …, "content": …}, …]}."""

import json
import pathlib
from typing import Any

from data import DataError


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a file, which may hold further keys. Raises DataError, naming the line."""
    try:
        lines = pathlib.Path(name).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise DataError(f"--prompts={name} can't be read ({reason}); use a .jsonl file") from None
    rows = [_row(line, f"line {i} of {name}") for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f'--prompts={name} is empty; add a line like {{"prompt": "Hello"}}')
    return rows


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}); fix it") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    one = isinstance(row, dict) and isinstance(row.get("prompt"), str) and messages is None
    if one or (isinstance(messages, list) and messages and all(map(_said, messages))):
        return row
    raise DataError(
        f'{where} is no prompt; write {{"prompt": "…"}} or {{"messages": [{{"role": "user", '
        '"content": "…"}}]}}'
    )


def _said(message) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(k), str) for k in ("role", "content")
    )
