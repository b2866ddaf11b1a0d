"""Folders on a disk or in a bucket (gs://), with one interface: only this package asks which it is.

Paths on a disk are pathlib's; those in a bucket are etils.epath's, with the same methods. What differs
is how a folder is finished. On a disk, it is renamed into its place. A bucket has no folders, only
object names, and no renames: a folder is finished when it has its mark, an object that is written last
and removed first.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from data import UserError, buckets

COMMITTED = "commit_success.txt"  # Orbax's mark of a finished checkpoint
REMOVED = ".removed"  # suffix of a checkpoint whose files are being deleted
LINKING = ".linking"  # suffix of a linked checkpoint until it is complete
UNFINISHED = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|removed|linking)")

errors, reason = buckets.errors, buckets.reason


@dataclasses.dataclass(frozen=True)
class Folder:
    """A folder on a disk, which may not exist yet. All methods raise `errors`."""

    path: pathlib.Path
    mark: str = COMMITTED  # its file that, in a bucket, is written last and removed first
    appends = True  # whether files can be appended to
    is_shared = False  # whether every host surely sees the same folder under this name

    def check_writable(self) -> None:
        """Raises an error if the folder can't be created or written."""
        with tempfile.TemporaryFile(dir=nearest(self.path)):  # nameless: even a kill leaves nothing
            pass

    def make(self) -> None:
        """Creates the folder and its parents, durably."""
        if not self.path.is_dir():
            Folder(self.path.parent).make()
            self.path.mkdir(exist_ok=True)
            sync(self.path.parent)

    def sizes(self) -> dict[str, int]:
        """Relative path → bytes of all files, sorted."""
        files = (path for path in sorted(self.path.rglob("*")) if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def sync(self) -> None:
        """Makes all files, and the folder's own name, survive a power cut."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(sync, [*self.path.rglob("*"), self.path, self.path.parent]))

    def is_finished(self) -> bool:
        """Whether the folder, a checkpoint, is complete."""
        return self.path.is_dir()

    def unfinished(self) -> list["Folder"]:
        """Leftovers of killed or failed saves and removals here; never a user's own files."""
        return [Folder(path) for path in self.path.glob("*") if UNFINISHED.fullmatch(path.name)]

    def add(self, source: pathlib.Path) -> None:
        """Copies the content of a folder on a disk into this one."""
        shutil.copytree(source, self.path, dirs_exist_ok=True)

    @contextlib.contextmanager
    def filled(self) -> Iterator[pathlib.Path]:
        """Yields an empty folder on a disk, which becomes this new folder unless there is an error."""
        temporary = Folder(self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp"))
        temporary.make()
        try:
            yield temporary.path
            temporary.sync()
            temporary.move_to(self.path)
        finally:
            shutil.rmtree(temporary.path, ignore_errors=True)

    def copy_to(self, target: pathlib.Path, files: Mapping[str, bytes]) -> None:
        """Makes a finished copy, which replaces `target`, and has more files: name → content.

        The files of the copy are hard links, where the disk has them.
        """
        copy = Folder(target.with_name(target.name + LINKING))
        try:
            shutil.copytree(self.path, copy.path, copy_function=_link_or_copy)
            for name, content in files.items():
                (copy.path / name).write_bytes(content)
            copy.sync()
            if target.exists():
                Folder(target).remove()
            copy.move_to(target)
        finally:
            shutil.rmtree(copy.path, ignore_errors=True)

    def move_to(self, target: pathlib.Path) -> None:
        """Moves the folder to a path where nothing exists."""
        Folder(target.parent).make()
        self.path.rename(target)
        sync(target.parent)

    def remove(self) -> None:
        """Removes the folder; a checkpoint is first uncommitted in one operation."""
        path = self.path
        if path.name.isdigit():
            path = path.rename(path.with_suffix(REMOVED))
        shutil.rmtree(path)


class BucketFolder(Folder):
    """A Folder in a bucket."""

    appends = False
    is_shared = True

    def check_writable(self) -> None:
        # An upload that is never continued creates no object.
        buckets.post(self.path / "x", uploadType="resumable", json={})

    def make(self) -> None:
        pass

    def sizes(self) -> dict[str, int]:
        root = str(self.path).removeprefix("gs://") + "/"
        objects = buckets.filesystem().find(root, detail=True)
        names = sorted(
            name for name in objects if not name.endswith("/")
        )  # made by the web console
        return {name.removeprefix(root): objects[name]["size"] for name in names}

    def sync(self) -> None:
        pass

    def is_finished(self) -> bool:
        return (self.path / self.mark).exists()

    def unfinished(self) -> list[Folder]:
        folders = [at(path) for path in numbered(self.path)]
        return [folder for folder in folders if not folder.is_finished()]

    def add(self, source: pathlib.Path) -> None:
        for name in sorted(Folder(source).sizes(), key=lambda name: name == self.mark):
            buckets.filesystem().put_file(str(source / name), str(self.path / name))

    @contextlib.contextmanager
    def filled(self) -> Iterator[pathlib.Path]:
        with tempfile.TemporaryDirectory() as temporary:
            yield pathlib.Path(temporary)
            try:
                self.add(pathlib.Path(temporary))
            except errors():
                with contextlib.suppress(*errors()):  # or the same command would find it
                    self.remove()
                raise

    def copy_to(self, target: pathlib.Path, files: Mapping[str, bytes]) -> None:
        if (target / self.mark).exists():
            BucketFolder(target, self.mark).remove()
        names = [name for name in self.sizes() if name != self.mark]
        buckets.filesystem().copy(
            [f"{self.path}/{name}" for name in names], [f"{target}/{name}" for name in names]
        )
        for name, content in files.items():
            write(target / name, content)
        buckets.filesystem().cp_file(f"{self.path}/{self.mark}", f"{target}/{self.mark}")

    def move_to(self, target: pathlib.Path) -> None:
        self.copy_to(target, {})
        self.remove()

    def remove(self) -> None:
        names = list(self.sizes())
        for group in ([n for n in names if n == self.mark], [n for n in names if n != self.mark]):
            if group:
                buckets.filesystem().rm([f"{self.path}/{name}" for name in group])


def at(path: pathlib.Path, mark: str = COMMITTED) -> Folder:
    """The folder at a path, on a disk or in a bucket."""
    return (BucketFolder if _in_bucket(path) else Folder)(path, mark)


def _in_bucket(path: Any) -> bool:
    return str(path).startswith("gs://")


def steps_in(folder: pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first. Raises `errors`."""
    return sorted(int(path.name) for path in numbered(folder) if at(path).is_finished())


def numbered(folder: pathlib.Path) -> list[pathlib.Path]:
    """Entries of a folder that are named by a step; [] if there is no such folder.

    Raises `errors` if a bucket can't be listed: its checkpoints must not seem missing.
    """
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def nearest(path: pathlib.Path) -> pathlib.Path:
    """The path itself, or its nearest parent that exists."""
    return next(place for place in (path, *path.parents) if place.exists())


def sync(path: pathlib.Path) -> None:
    """Syncs a file's content, or the names in a folder, to a local disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link_or_copy(source: str, target: str) -> None:
    """Makes a hard link, which takes no space; a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# ---- names given by users ------------------------------------------------------------------------


def to_path(name: Any, flag: str = "") -> pathlib.Path:
    """The path of a name. Raises UserError, within seconds, if it is in an unusable bucket.

    Args:
      flag: the flag it was given by, for messages: "--workdir".
    """
    # Without "//" it would silently name a folder on this disk.
    if scheme := re.match(r"(gs|gcs|s3):(?!//)/*", str(name), re.IGNORECASE):
        fix = f"gs://{str(name)[scheme.end() :]}"
        raise UserError(f"{f'{flag}=' * bool(flag)}{name} has no ://; use {fix}, or a local path")
    if not buckets.remote(name):
        return pathlib.Path(name).expanduser()
    return buckets.path(str(name), f"{flag}={name}" if flag else str(name))


def absolute(path: pathlib.Path) -> pathlib.Path:
    return path if _in_bucket(path) else path.absolute()


def new_path(target: str, flag: str = "target", appended: bool = False) -> pathlib.Path:
    """The path that a flag names. Raises UserError if it exists or can't be created.

    Args:
      appended: whether it is a file to append to, which a bucket does not support.
    """
    path = absolute(to_path(target, f"--{flag}"))
    if appended and not at(path).appends:
        raise UserError(
            f"--{flag}={path} is in a bucket, where nothing can be appended; use a local file"
        )
    if path.exists():
        raise UserError(f"--{flag}={path} already exists; use a new name")
    with write_errors(path, flag):
        at(path).check_writable()
    return path


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


def write(path: pathlib.Path, content: bytes) -> None:
    """Writes a whole file; in a bucket the replacement is atomic."""
    if _in_bucket(path):
        buckets.filesystem().pipe_file(str(path), content)
    else:
        path.write_bytes(content)
