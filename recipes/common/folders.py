"""Folders that a command is to write, tried before any work is done."""

import pathlib
import tempfile

from recipes.common.errors import UserError


def nearest(path: pathlib.Path) -> pathlib.Path:
    """What there is of a path: itself, or the first of its parents that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def try_to_write(path: pathlib.Path) -> None:
    """Raises OSError if a folder can't be made at `path`, or written where there is one."""
    with tempfile.TemporaryFile(dir=nearest(path)):  # no name: nothing is left, whatever happens
        pass


def new(target: str) -> pathlib.Path:
    """--target, where nothing is yet and a folder can be made. Raises UserError."""
    folder = pathlib.Path(target).expanduser().absolute()
    if folder.exists():
        raise UserError(f"--target={folder} exists; give a new folder")
    try:
        try_to_write(folder)
    except OSError as error:
        raise UserError(
            f"--target={folder} can't be written ({error.strerror}); give another"
        ) from None
    return folder
