"""Prompts in JSON Lines: {"prompt": "…"} or {"messages": [{"role": …, "content": …}, …]}."""

import json
from typing import Any

from data import DataError, buckets
from data.conversations import checked_messages


def read(name: str) -> list[dict[str, Any]]:
    """Reads the rows of a file; they may have other keys. Raises DataError, naming the line."""
    try:
        lines = buckets.local(name, f"--prompts={name}").read_text().splitlines()
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
    if isinstance(row, dict) and row.get("messages"):
        return row | {"messages": checked_messages(row["messages"], "messages", where)}
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return row
    raise DataError(
        f'{where} is not a prompt; write {{"prompt": "…"}} or {{"messages": [{{"role": "user", '
        f'"content": "…"}}]}}'
    )
