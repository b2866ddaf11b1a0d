"""metrics.jsonl, as runs leave it."""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Its lines, without one that a kill has torn; [] where there is no file."""
    lines = []
    found = path.read_bytes() if path.exists() else b""
    for text in found.decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
            if isinstance(line["step"], int):
                lines.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return lines
