"""Reading metrics.jsonl."""

import json
import pathlib
from typing import Any


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Lines of a metrics.jsonl, without one torn by a kill; [] if there is no file."""
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
