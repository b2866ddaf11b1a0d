"""metrics.jsonl: one JSON object per line."""

import json
import math
import os
import pathlib
from typing import Any

from recipes.common.runtime import folders


def encode(line: dict[str, Any]) -> str:
    """The line as JSON. A number that is not finite is null."""
    known = {k: v if v is not None and math.isfinite(v) else None for k, v in line.items()}
    return json.dumps(known) + "\n"


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The file's lines, without one torn by a kill; [] if there is no file."""
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


def rewind(path: pathlib.Path, step: int, evaluates_again: bool) -> list[dict[str, Any]]:
    """Drops the lines that a run resuming at `step` writes again. Returns the others.

    Args:
      evaluates_again: whether the run first repeats the evaluation of `step`.
    """
    kept = []
    for line in read(path):
        again = evaluates_again and line["step"] == step and "step_seconds" not in line
        if line["step"] <= step and not again:
            kept.append(line)
    if not folders.in_bucket(path):  # in a bucket, the next line replaces the whole object
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(map(encode, kept)))
        folders.sync(beside)
        os.replace(beside, path)
        folders.sync(path.parent)  # the new name
    return kept
