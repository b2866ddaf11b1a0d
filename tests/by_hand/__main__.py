"""Lists the commands that are run by hand, with the first line of what each says of itself.

python -m tests.by_hand
"""

import ast
import pathlib


def main() -> None:
    for path in sorted(pathlib.Path(__file__).parent.glob("[!_]*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        print(f"{path.stem:<20} {docstring.partition(chr(10))[0]}")


if __name__ == "__main__":
    main()
