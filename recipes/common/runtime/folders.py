"""Folders that a command is going to write, tried before any work is done."""

import pathlib
import tempfile

from recipes.common.runtime.errors import UserError


def nearest(path: pathlib.Path) -> pathlib.Path:
    """The path itself, or the first of its parents that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def try_to_write(path: pathlib.Path) -> None:
    """Raises OSError if no folder can be made at `path`, or an existing one can't be written."""
    with tempfile.TemporaryFile(dir=nearest(path)):  # no name: nothing is left, whatever happens
        pass


def new(target: str, flag: str = "target") -> pathlib.Path:
    """What a flag names, where nothing exists yet and something can be made. Raises UserError."""
    folder = pathlib.Path(target).expanduser().absolute()
    if folder.exists():
        raise UserError(f"--{flag}={folder} already exists; use a new name")
    try:
        try_to_write(folder)
    except OSError as error:
        raise UserError(
            f"--{flag}={folder} can't be written ({error.strerror}); use a different folder"
        ) from None
    return folder
