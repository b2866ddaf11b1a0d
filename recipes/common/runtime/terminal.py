"""Printing on process 0, warnings, and escaping untrusted text."""

import sys
import unicodedata

from recipes.common.runtime import processes

# Categories of Unicode that can manipulate a terminal or a line: control characters, lone surrogates,
# line and paragraph separators.
UNSAFE = ("Cc", "Cs", "Zl", "Zp")
# These reorder the text around them, so that it reads differently from what it is.
REORDERING = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def print0(*lines: str) -> None:
    """Prints lines on process 0; prints nothing without any."""
    if lines and processes.is_first():
        print(*lines, sep="\n", flush=True)


def warn(message: str) -> None:
    """Prints a warning to stderr, on any process."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Prints a piece of untrusted text on process 0, without a newline."""
    if processes.is_first():
        print(_clean(text), end="", flush=True)


def ask(prompt: str) -> str | None:
    """Reads a line from the user, on all processes; None at the end of the input."""

    def line() -> str | None:
        try:
            return input(prompt)
        except EOFError:
            print(flush=True)
            return None

    return processes.broadcast_from_first(line)


def quote(text: str, most: int = 24) -> list[str]:
    """Formats untrusted text as quoted lines to print, at most `most` of them."""
    lines = ["  | " + line for line in _clean(text).split("\n")]
    return lines[:most] + (["  | …"] if len(lines) > most else [])


def _clean(text: str) -> str:
    """Replaces characters that could manipulate the terminal.

    Spaces and joiners of other scripts stay, as in emoji, Persian, French and Japanese.
    """
    return "".join(c if _harmless(c) else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs())


def _harmless(c: str) -> bool:
    if c.isprintable() or c == "\n":
        return True
    return unicodedata.category(c) not in UNSAFE and unicodedata.bidirectional(c) not in REORDERING
