"""What a run prints."""

from recipes.common.runtime import processes


def print0(*lines: str) -> None:
    """Prints on process 0 only; without lines nothing."""
    if lines and processes.is_first():
        print(*lines, sep="\n", flush=True)


def show(text: str) -> None:
    """Prints a piece of untrusted text, as it is, on process 0."""
    if processes.is_first():
        print(_clean(text), end="", flush=True)


def ask(prompt: str) -> str | None:
    """A line that the user types, the same on all processes; None at the end of the input."""

    def line() -> str | None:
        try:
            return input(prompt)
        except EOFError:
            print(flush=True)
            return None

    return processes.broadcast_from_first(line)


def quote(text: str, most: int = 24) -> list[str]:
    """Lines to print of untrusted text, not too many."""
    lines = ["  | " + line for line in _clean(text).split("\n")]
    return lines[:most] + (["  | …"] if len(lines) > most else [])


def _clean(text: str) -> str:
    """Without control characters, which could do anything to a terminal."""
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}"
        for c in text.expandtabs()
    )
