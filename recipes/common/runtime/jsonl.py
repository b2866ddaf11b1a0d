"""metrics.jsonl, as runs leave it."""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Its lines, without one that a kill has torn; [] where there is no file."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            if isinstance(line["step"], int):
                lines.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return lines
