"""Folders that a command reads or writes, on a disk or in a bucket (gs://).

Disk paths are pathlib's; bucket paths are etils.epath's, with the same methods. The functions here
cover what differs. On a disk, a finished folder is renamed into its place. A bucket has no folders,
only object names, and no renames: a folder is finished when it has its mark, an object that is written
last and removed first.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from data import buckets
from recipes.common.runtime.errors import UserError

errors, reason = buckets.errors, buckets.reason


def to_path(name: Any, flag: str = "") -> pathlib.Path:
    """The path of a name. Raises UserError, within seconds, if it is in an unusable bucket.

    Args:
      flag: the flag it was given by, for messages: "--workdir".
    """
    # Without "//" it would silently name a folder on this disk.
    if found := re.match(r"(gs|gcs|s3):(?!//)/*", str(name), re.IGNORECASE):
        fix = f"gs://{str(name)[found.end() :]}"
        raise UserError(f"{f'{flag}=' * bool(flag)}{name} has no ://; use {fix}, or a local path")
    if not buckets.remote(name):
        return pathlib.Path(name).expanduser()
    return buckets.path(str(name), f"{flag}={name}" if flag else str(name))


@contextlib.contextmanager
def user_errors(problem: str, fix: str) -> Iterator[None]:
    """Turns I/O errors inside the block into a UserError: "PROBLEM (reason); FIX"."""
    try:
        yield
    except errors() as error:
        raise UserError(f"{problem} ({reason(error)}); {fix}") from None


def write_errors(target: Any, flag: str = "target"):
    """`user_errors` for writing the folder that a flag names."""
    return user_errors(f"--{flag}={target} can't be written", "use a different folder")


def absolute(path: pathlib.Path) -> pathlib.Path:
    return path if in_bucket(path) else path.absolute()


def in_bucket(path: Any) -> bool:
    return str(path).startswith("gs://")


def nearest(path: pathlib.Path) -> pathlib.Path:
    """The path itself, or its nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def try_to_write(path: pathlib.Path) -> None:
    """Raises one of `errors` if a folder can't be created at `path`, or can't be written."""
    if in_bucket(path):  # an upload that is never continued creates no object
        buckets.post(path / "x", uploadType="resumable", json={})
        return
    with tempfile.TemporaryFile(dir=nearest(path)):  # nameless, so even a kill leaves nothing
        pass


def new_path(target: str, flag: str = "target", appended: bool = False) -> pathlib.Path:
    """The path that a flag names. Raises UserError if it exists or can't be created.

    Args:
      appended: whether it is a file to append to, which a bucket does not support.
    """
    folder = absolute(to_path(target, f"--{flag}"))
    if appended and in_bucket(folder):
        raise UserError(
            f"--{flag}={folder} is in a bucket, where nothing can be appended; use a local file"
        )
    if folder.exists():
        raise UserError(f"--{flag}={folder} already exists; use a new name")
    with write_errors(folder, flag):
        try_to_write(folder)
    return folder


def sizes(folder: pathlib.Path) -> dict[str, int]:
    """Relative path → bytes of all files in a folder, sorted."""
    if in_bucket(folder):
        root = str(folder).removeprefix("gs://") + "/"
        found = buckets.filesystem().find(root, detail=True)
        names = sorted(name for name in found if not name.endswith("/"))  # made by the web console
        return {name.removeprefix(root): found[name]["size"] for name in names}
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a whole file; in a bucket the replacement is atomic."""
    if in_bucket(path):
        buckets.filesystem().pipe_file(str(path), content)
    else:
        path.write_bytes(content)


def make(folder: pathlib.Path) -> None:
    """Creates a folder and its parents, durably, if missing; a bucket needs none."""
    if not in_bucket(folder) and not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync(folder.parent)


def to_disk(folder: pathlib.Path) -> None:
    """Syncs all files and names of a folder to a local disk, before the folder is committed.

    Otherwise a power cut could leave a committed folder with empty files. Buckets need no sync.
    """
    if in_bucket(folder):
        return
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [*folder.rglob("*"), folder]))


def sync(path: pathlib.Path) -> None:
    """Syncs a file's content, or the names in a folder, to a local disk."""
    if in_bucket(path):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def upload(source: pathlib.Path, target: pathlib.Path, mark: str = "") -> None:
    """Copies a local folder to a bucket, with its mark, if any, last."""
    for name in sorted(sizes(source), key=lambda name: name == mark):
        buckets.filesystem().put_file(str(source / name), str(target / name))


def copy(
    source: pathlib.Path, target: pathlib.Path, mark: str, extra: dict[str, bytes] | None = None
) -> None:
    """Copies a folder within a bucket, on the server, with its mark last.

    Args:
      extra: name → content of files to add.
    """
    files, names = buckets.filesystem(), [name for name in sizes(source) if name != mark]
    files.copy([f"{source}/{name}" for name in names], [f"{target}/{name}" for name in names])
    for name, content in (extra or {}).items():
        write(target / name, content)
    files.cp_file(f"{source}/{mark}", f"{target}/{mark}")


def move(source: pathlib.Path, target: pathlib.Path, mark: str = "") -> None:
    """Moves a finished folder to a path where nothing exists."""
    if in_bucket(source):
        copy(source, target, mark)
        remove(source, mark)
        return
    source.rename(target)
    sync(target.parent)


def remove(folder: pathlib.Path, mark: str) -> None:
    """Removes a folder and its content; in a bucket the mark goes first, which uncommits it."""
    if not in_bucket(folder):
        shutil.rmtree(folder)
        return
    names = list(sizes(folder))
    for some in ([mark] if mark in names else [], [name for name in names if name != mark]):
        if some:
            buckets.filesystem().rm([f"{folder}/{name}" for name in some])
