"""Rows of CSV and TSV files, whose first line names the columns.

CSV has quotation marks around cells. TSV has two customs: pandas and spreadsheets quote cells as in CSV,
while GLUE and AllNLI never quote, and a mark is a letter of the text. Read as CSV, their `"Yes,` would
swallow all lines up to the next mark. So the whole file decides how a .tsv is read.
"""

import csv
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from data import DataError, hub

COMMA, TAB = ",", "\t"
MARKS = (COMMA, TAB, ";", "|")  # that divide cells in files of other programs
MOST_LINES = 10_000  # of one cell; a mark without its partner would swallow the rest of the file
_CELL = r'(?:"(?:[^"]|"")*"|[^"\t\n]*)'  # quoted, or without marks
_QUOTED = re.compile(rf"{_CELL}(?:\t{_CELL})*\n?")
_BEGUN = re.compile(
    rf'(?:{_CELL}\t)*"(?:[^"]|"")*'
)  # a row whose last cell goes on in the next line


def rows(path: pathlib.Path, separator: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (place, row). Raises DataError."""
    csv.field_size_limit(2**31 - 1)
    quoting = csv.QUOTE_MINIMAL
    if separator == TAB and not _is_quoted(path, where):
        quoting = csv.QUOTE_NONE
    with hub.text_file(path, "utf-8-sig") as file:
        lines = hub.without_nul(file, where)
        numbered = csv.DictReader(lines, delimiter=separator, quoting=quoting, strict=True)
        for row in _complete(numbered, where):
            if None in row:
                raise DataError(
                    f"{where} line {numbered.line_num} has more cells than the first line; put quotation "
                    "marks around cells that have the separator in them"
                )
            yield f"{where} line {numbered.line_num}", row


def _complete(numbered: csv.DictReader, where: str) -> Iterator[dict[Any, Any]]:
    """Yields the rows. Raises DataError, naming the line, if they are no CSV, or the columns no names."""
    try:
        names = numbered.fieldnames or ()
        if twice := [name for name in names if names.count(name) > 1]:
            raise DataError(f"{where} has two columns {twice[0]!r}; give them different names")
        if len(names) == 1 and (other := [mark for mark in MARKS if mark in names[0]]):
            raise DataError(
                f"{where} has a single column, {names[0]!r}: its cells are divided by {other[0]!r}; write commas "
                "and .csv, or tabs and .tsv"
            )
        yield from numbered
    except csv.Error as error:
        raise DataError(
            f"{where} could not be read as csv: line {numbered.line_num + 1} ({error}); put quotation marks around "
            "the whole cell, and double those in it"
        ) from None


def _is_quoted(path: pathlib.Path, where: str) -> bool:
    """Whether marks quote the cells of a TSV file. Raises DataError if neither custom fits all lines."""
    with hub.text_file(path, "utf-8-sig") as file:
        if not any('"' in line for line in file):
            return True  # both customs give the same rows
    with hub.text_file(path, "utf-8-sig") as file:
        plain, differs = _count_plain(file)
    with hub.text_file(path, "utf-8-sig") as file:
        quoted = _count_quoted(file)
    if quoted is None:
        if differs is None:
            return False
        number, cells, columns = differs
        raise DataError(
            f"{where} line {number} has {cells} cells, and the first line {columns}; its quotation marks "
            "don't quote whole cells in every line, so they can't be taken off: write JSON Lines"
        )
    if differs is None and quoted != plain:
        raise DataError(
            f"{where} has {plain - 1} rows if its quotation marks are letters, and {quoted - 1} if they quote "
            "cells; write JSON Lines"
        )
    return True


def _count_plain(lines: Iterable[str]) -> tuple[int, tuple[int, int, int] | None]:
    """(rows, (first line with another number of cells, its cells, those of the first line) or None)."""
    columns = count = 0
    for number, line in enumerate(lines, start=1):
        cells = 1 + line.count(TAB)
        columns = columns or cells
        if line != "\n" and cells != columns:
            return count, (number, cells, columns)
        count += line != "\n"
    return count, None


def _count_quoted(lines: Iterable[str]) -> int | None:
    """Rows, if every mark belongs to the quotation of a whole cell and all rows have as many cells."""
    columns = count = marks = 0
    row: list[str] = []
    for line in lines:
        row.append(line)
        marks += line.count('"')
        if marks % 2:
            if len(row) > MOST_LINES or ('"' in line and not _BEGUN.fullmatch("".join(row))):
                return None
            continue
        if row != ["\n"]:
            text = "".join(row)
            if not _QUOTED.fullmatch(text):
                return None
            cells = 1 + re.sub('"[^"]*"', "", text).count(TAB)
            columns = columns or cells
            if cells != columns:
                return None
            count += 1
        row = []
    return None if row else count
