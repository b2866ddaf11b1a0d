"""Pictures that rows name: found, checked by their headers, and read when a batch needs them.

A picture is a path relative to the rows' file, bytes, {"path": …, "bytes": …}, as `datasets` has it, or a
"data:image/png;base64,…" URI, as chat services have it (RFC 2397).
"""

import base64
import io
import json
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
import PIL.Image

from data import DataError, images
from data.squares import SquareForm

# How files of a kind end; one that doesn't is decoded before any step, as it may have been cut off.
ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
TAIL = 64  # bytes at the end of a file in which that is
LONGEST = 4096  # characters of a path; a longer text is none


def reference(picture: Any, folder: pathlib.Path, where: str) -> Any:
    """The path or the bytes of a row's picture. Raises DataError."""
    if isinstance(picture, dict):
        picture = picture.get("bytes") or picture.get("path")
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, PIL.Image.Image):
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return buffer.getvalue()
    if isinstance(picture, str) and picture.startswith("data:"):
        return _from_uri(picture, where)
    if isinstance(picture, str) and "://" not in picture and len(picture) <= LONGEST:
        return folder / picture
    raise _not_a_picture(picture, where)


def _from_uri(uri: str, where: str) -> bytes:
    """The bytes in a URI of the scheme data. Raises DataError."""
    header, _, encoded = uri.partition(",")
    if not header.endswith(";base64"):
        raise _not_a_picture(uri, where)
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        raise _not_a_picture(uri, where) from None


def _not_a_picture(picture: Any, where: str) -> DataError:
    return DataError(
        f"{where}: a picture is {json.dumps(str(picture)[:60])}; use a path relative to the file, bytes, "
        "or data:image/png;base64,…"
    )


def check(pictures: Iterable[tuple[Any, str]], form: images.AnyForm, dataset: str) -> None:
    """Checks pictures by their headers and sizes; only one that seems to be cut off is decoded.

    Args:
      pictures: (path, bytes or pixels; where it is).

    Raises DataError, which names the row, if one is missing, empty, broken or too large.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
        for picture, where in pictures:
            if not isinstance(picture, np.ndarray):
                _check(picture, form, dataset, where)


def _check(picture: Any, form: images.AnyForm, dataset: str, where: str) -> None:
    file = _file(picture, where)
    try:
        with PIL.Image.open(file) as opened:
            kind = opened.format
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning):
        raise _too_large(picture, where) from None
    except (OSError, SyntaxError, ValueError):  # Pillow raises these for broken files
        raise unreadable(picture, where) from None
    if kind in ENDS and ENDS[kind] not in _tail(picture):
        pixels_of(picture, form, dataset, where)


def pixels_of(picture: Any, form: images.AnyForm, dataset: str, where: str) -> np.ndarray:
    """Pixels uint8, as the form has them, of a path, bytes or pixels. Raises DataError, which names the row."""
    if isinstance(picture, np.ndarray):
        return picture
    file = _file(picture, where)
    try:
        return images.decode(file, form, dataset, _name(picture))
    except (DataError, PIL.Image.DecompressionBombError, MemoryError):
        raise unreadable(picture, where) from None


def tokens_of(picture: Any, form: SquareForm, where: str) -> int:
    """The tokens of a picture by its header. Raises DataError, which names the row."""
    if isinstance(picture, np.ndarray):
        height, width, _ = picture.shape
        return height * width // form.side**2
    file = _file(picture, where)
    try:
        with warnings.catch_warnings(), PIL.Image.open(file) as opened:
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            width, height = opened.size
    except PIL.Image.DecompressionBombError:
        raise _too_large(picture, where) from None
    except (OSError, SyntaxError, ValueError):
        raise unreadable(picture, where) from None
    return form.tokens(width, height)  # as many as of a picture on its side


def _too_large(picture: Any, where: str) -> DataError:
    return DataError(
        f"{where}: {_name(picture)} has more than {PIL.Image.MAX_IMAGE_PIXELS:,} pixels, which "
        "are not read; make it smaller, or leave it out"
    )


def unreadable(picture: Any, where: str) -> DataError:
    """The DataError for a picture that can't be decoded."""
    return DataError(f"{where}: {_name(picture)} can't be read; replace it, or leave it out")


def identity(picture: Any) -> bytes:
    """What a fingerprint has of a picture: of a file, its name and size."""
    if isinstance(picture, pathlib.Path):
        return f"{picture} {picture.stat().st_size}".encode()
    return picture.tobytes() if isinstance(picture, np.ndarray) else picture


def _name(picture: Any) -> str:
    return f"the picture {picture}" if isinstance(picture, pathlib.Path) else "a picture"


def _file(picture: Any, where: str) -> pathlib.Path | BinaryIO:
    """What to open. Raises DataError if there is no such file."""
    if not isinstance(picture, pathlib.Path):
        return io.BytesIO(picture)
    try:
        exists = picture.is_file()
    except OSError:  # a name that the disk can't hold, before Python 3.12
        exists = False
    if not exists:
        raise DataError(f"{where}: {_name(picture)} does not exist; fix the path, or leave it out")
    return picture


def _tail(picture: Any) -> bytes:
    """The last bytes of a picture's file."""
    if isinstance(picture, bytes):
        return picture[-TAIL:]
    with picture.open("rb") as file:
        file.seek(max(picture.stat().st_size - TAIL, 0))
        return file.read()
