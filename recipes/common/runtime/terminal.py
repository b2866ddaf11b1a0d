"""What a run prints."""

from recipes.common.runtime import processes


def print0(*lines: str) -> None:
    """Prints on process 0 only."""
    if processes.is_first():
        print(*lines, sep="\n", flush=True)


def quote(text: str, most: int = 24) -> list[str]:
    """Lines to print of untrusted text: no control characters, and not too many."""
    clean = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}"
        for c in text.expandtabs()
    )
    lines = ["  | " + line for line in clean.split("\n")]
    return lines[:most] + (["  | …"] if len(lines) > most else [])
