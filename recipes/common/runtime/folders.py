"""Folders that a command reads or writes, on a disk or in a bucket (gs://).

Here a name becomes a path: pathlib's, or for a bucket etils.epath's with the same methods. And here is
what the two do differently. A disk renames a finished folder into its place. A bucket renames nothing,
and knows no folders, only names: there a folder is finished when it has its mark, one object that is
written last and removed first.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from data import DataError, buckets
from recipes.common.runtime.errors import UserError

errors, reason = buckets.errors, buckets.reason  # of reading and writing


def at(name: Any, flag: str = "") -> pathlib.Path:
    """The path of this name. Raises UserError, within seconds, if it is in a bucket that can't be used.

    Args:
      flag: with which the user gave it: "--workdir".
    """
    # It would be a folder of this disk.
    if found := re.match(r"(gs|gcs|s3):(?!//)/*", str(name), re.IGNORECASE):
        fix = f"gs://{str(name)[found.end() :]}"
        raise UserError(f"{f'{flag}=' * bool(flag)}{name} has no ://; use {fix}, or a local path")
    if not buckets.remote(name):
        return pathlib.Path(name).expanduser()
    try:
        return buckets.path(str(name), f"{flag}={name}" if flag else str(name))
    except DataError as error:
        raise UserError(str(error)) from None


@contextlib.contextmanager
def telling(problem: str, fix: str) -> Iterator[None]:
    """Inside, an error of reading or writing is a UserError: "PROBLEM (reason); FIX"."""
    try:
        yield
    except errors() as error:
        raise UserError(f"{problem} ({reason(error)}); {fix}") from None


def writing(target: Any, flag: str = "target"):
    """`telling` that what a flag names can't be written."""
    return telling(f"--{flag}={target} can't be written", "use a different folder")


def absolute(path: pathlib.Path) -> pathlib.Path:
    return path if in_bucket(path) else path.absolute()


def in_bucket(path: Any) -> bool:
    return str(path).startswith("gs://")


def nearest(path: pathlib.Path) -> pathlib.Path:
    """The path itself, or the first of its parents that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def try_to_write(path: pathlib.Path) -> None:
    """Raises an error if no folder can be made at `path`, or an existing one can't be written."""
    if in_bucket(path):  # an upload that is begun and never goes on: nothing is there for it
        buckets.begin_upload(path / "x")
        return
    with tempfile.TemporaryFile(dir=nearest(path)):  # no name: nothing is left, whatever happens
        pass


def new(target: str, flag: str = "target", appended: bool = False) -> pathlib.Path:
    """What a flag names, where nothing exists yet and something can be made. Raises UserError.

    Args:
      appended: whether it is a file that grows, which a bucket has none of.
    """
    folder = absolute(at(target, f"--{flag}"))
    if appended and in_bucket(folder):
        raise UserError(
            f"--{flag}={folder} is in a bucket, where nothing can be appended; use a local file"
        )
    if folder.exists():
        raise UserError(f"--{flag}={folder} already exists; use a new name")
    with writing(folder, flag):
        try_to_write(folder)
    return folder


def sizes(folder: pathlib.Path) -> dict[str, int]:
    """Path below the folder → bytes, of all files, in order."""
    if in_bucket(folder):
        root = str(folder).removeprefix("gs://") + "/"
        found = buckets.filesystem().find(root, detail=True)
        names = sorted(name for name in found if not name.endswith("/"))  # a console makes such
        return {name.removeprefix(root): found[name]["size"] for name in names}
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def write(path: pathlib.Path, content: bytes) -> None:
    """A whole file, which in a bucket is replaced at once."""
    if in_bucket(path):
        buckets.filesystem().pipe_file(str(path), content)
    else:
        path.write_bytes(content)


def make(folder: pathlib.Path) -> None:
    """Makes a folder, and those above it, where there is none."""
    if not in_bucket(folder) and not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def to_disk(folder: pathlib.Path) -> None:
    """Waits until a local disk has all files of a folder that is about to be committed, and their names.

    Else a power cut could leave a committed folder with empty files. What a bucket has taken it has.
    """
    if in_bucket(folder):
        return
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [*folder.rglob("*"), folder]))


def sync(path: pathlib.Path) -> None:
    """Waits until a local disk has a file's content, or the names in a folder."""
    if in_bucket(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def upload(source: pathlib.Path, target: pathlib.Path, mark: str = "") -> None:
    """Copies a folder of this machine to one in a bucket, its mark last, if it has one."""
    for name in sorted(sizes(source), key=lambda name: name == mark):
        buckets.filesystem().put_file(str(source / name), str(target / name))


def copy(
    source: pathlib.Path,
    target: pathlib.Path,
    mark: str,
    before_mark: Callable[[], None] | None = None,
) -> None:
    """Copies a folder inside a bucket; its content does not pass through this machine.

    Args:
      before_mark: called before the copy is finished.
    """
    files, names = buckets.filesystem(), [name for name in sizes(source) if name != mark]
    files.copy([f"{source}/{name}" for name in names], [f"{target}/{name}" for name in names])
    if before_mark:
        before_mark()
    files.cp_file(f"{source}/{mark}", f"{target}/{mark}")


def move(source: pathlib.Path, target: pathlib.Path, mark: str = "") -> None:
    """Moves a finished folder to a place where nothing is."""
    if in_bucket(source):
        copy(source, target, mark)
        remove(source, mark)
        return
    source.rename(target)
    sync(target.parent)


def remove(folder: pathlib.Path, mark: str) -> None:
    """Removes a folder and all in it; in a bucket its mark first, so that it is no more at once."""
    if not in_bucket(folder):
        shutil.rmtree(folder)
        return
    names = list(sizes(folder))
    for some in ([mark] if mark in names else [], [name for name in names if name != mark]):
        if some:
            buckets.filesystem().rm([f"{folder}/{name}" for name in some])
