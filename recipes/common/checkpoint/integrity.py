"""hashes.json: the size and SHA-256 of every file of a checkpoint, to tell whether it is damaged.

Orbax and TensorStore read flipped bits of an array without noticing.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

from data import cache_dir, cached_files
from recipes.common.runtime import print0, processes
from recipes.common.storage import folders
from recipes.common.storage.folders import COMMITTED

HASHES = "hashes.json"
HASHED = "hashed"  # in the metadata of a checkpoint with hashes.json; early versions wrote neither
PROBE = "probe.json"  # in published checkpoints: probe.py
CARD = "README.md"  # in published checkpoints: card.py
_CARD_ROW = re.compile(r"^\| `(.+)` \| [\d,]+ \| `([0-9a-f]{64})` \|$", re.MULTILINE)
_ITEMS = ("state", "data", "metadata", "tokenizer")
_NEEDED = [f"{item}{COMMITTED}" for item in ("", "state/", "metadata/")]
_NEEDED += ["state/_METADATA", "metadata/metadata"]


def verify(folder: str | pathlib.Path, hash_files: bool = True) -> str:
    """Describes the first damaged or missing file of a checkpoint; "" if it is intact.

    Prints a line if it has no hashes.json because an early version wrote it.

    Args:
      hash_files: whether to hash every file, which is slow for a huge checkpoint; otherwise only sizes
        are compared.
    """
    path = folders.to_path(folder)
    return check_files(path) or (_check_hashes(path) if hash_files else "")


def check_hashes_on_all(folder: pathlib.Path) -> str:
    """`verify` for the content of files, of which each process hashes a share; each must call it."""
    bad = _check_hashes(folder, processes.index(), processes.count())
    return processes.decide(bad, lambda answers: max(answers), processes.PUBLISH_SECONDS)


def check_files(folder: pathlib.Path) -> str:
    """Describes the first file that is missing, has a wrong size or is not the JSON that it was."""
    name = str(folder)
    metadata, hashes = {}, {}
    try:
        sizes = folders.at(folder).sizes()
        for name in _NEEDED:
            if name not in sizes:
                return f"{name} is missing"
        for name in (HASHES, "data/metadata", "metadata/metadata"):
            if name in sizes:
                content = dict(json.loads((folder / name).read_bytes()))
                if name == HASHES:
                    hashes = {file: (size, digest) for file, (size, digest) in content.items()}
                metadata = content if name == "metadata/metadata" else metadata
        if missing := {"entry", "config", "step", "flags", "data"} - metadata.keys():
            return f"metadata/metadata has no {min(missing)!r}"
        if HASHED in metadata and HASHES not in sizes:
            return f"{HASHES} is missing"
        if HASHES in sizes:
            for name in sorted(sizes.keys() - hashes.keys()):
                item, _, file = name.partition("/")
                if item in _ITEMS and not file.startswith("."):
                    return f"{name} is missing in {HASHES}"
        for name in (HASHES, CARD, PROBE) if "published" in metadata else ():
            if name not in sizes or (name != HASHES and name not in hashes):
                return f"{name} is missing" + (f" in {HASHES}" if name in sizes else "")
        for name, (size, _) in hashes.items():
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != size:
                return f"{name} has {sizes[name]:,} bytes instead of {size:,}"
        if "published" in metadata:
            name = CARD
            listed = card_digests((folder / name).read_bytes().decode(errors="replace"))
            for other, (_, digest) in hashes.items():
                if other != name and listed.get(other) != digest:
                    return f"{name} and {HASHES} disagree on the SHA-256 of {other}"
    except (ValueError, TypeError, AttributeError):
        return f"{name} is not the JSON that was saved"
    except folders.errors() as error:
        return _unreadable(error, name)
    return ""


def _check_hashes(folder: pathlib.Path, process: int = 0, count: int = 1) -> str:
    """Describes the first file whose content differs, among those of one of `count` processes."""
    try:
        if not (folder / HASHES).exists():
            print0(
                f"{folder} has no {HASHES}, like checkpoints of early versions: its files were not "
                "checked for damage."
            )
            return ""
        hashes = json.loads((folder / HASHES).read_bytes())
        for name, digest in sha256(folder, list(hashes)[process::count]).items():
            if digest != hashes[name][1]:
                return f"{name} differs from what was saved (its SHA-256 does not match)"
    except folders.errors() as error:
        return _unreadable(error, HASHES)
    return ""


def _unreadable(error: Exception, name: str) -> str:
    return f"{getattr(error, 'filename', None) or name} can't be read ({folders.reason(error)})"


# ---- writing -------------------------------------------------------------------------------------


def hash_before_commit(folder: pathlib.Path, digests: Mapping[str, str] | None = None) -> None:
    """Writes hashes.json of a checkpoint that is about to be committed.

    Args:
      digests: file name → SHA-256 of files that other processes wrote and hashed.
    """
    # Orbax rewrites the first two when it commits.
    sizes = folders.at(folder).sizes()
    for later in (COMMITTED, "_CHECKPOINT_METADATA", HASHES):
        sizes.pop(later, None)
    write_hashes(folder, hashes_of(folder, sizes, digests))


def write_hashes(folder: pathlib.Path, hashes: dict[str, list]) -> None:
    (folder / HASHES).write_text(json.dumps(hashes, indent=0))


def hashes_of(
    folder: pathlib.Path, sizes: Mapping[str, int], digests: Mapping[str, str] | None = None
) -> dict[str, list]:
    """File name → [bytes, SHA-256], sorted by name, of the files in `sizes`.

    Args:
      digests: file name → SHA-256 of files that need not be read.
    """
    digests = dict(digests or {})
    digests |= sha256(folder, sorted(sizes.keys() - digests.keys()))
    return {name: [sizes[name], digests[name]] for name in sorted(sizes)}


def card_digests(text: str) -> dict[str, str]:
    """File → SHA-256, parsed from a card."""
    return dict(_CARD_ROW.findall(text))


def card_rows(hashes: dict[str, list]) -> list[str]:
    """Lines of a card's table of files, as `check_files` reads it."""
    rows = [f"| `{name}` | {size:,} | `{digest}` |" for name, (size, digest) in hashes.items()]
    return ["| File | Bytes | SHA-256 |", "| --- | ---: | --- |", *rows]


def content_sha256(folder: pathlib.Path, files: Sequence[pathlib.Path] = ()) -> str:
    """A digest of a checkpoint's hashes.json, or of the files of another model.

    Every process of a run must call this; they share the hashing, which reads every byte. The digest
    of files is cached under their sizes and times.

    Args:
      files: in `folder`, on a disk; empty: it is a checkpoint.
    """
    if not files and (folder / HASHES).exists():
        return hashlib.sha256((folder / HASHES).read_bytes()).hexdigest()
    cached = cache_dir() / "models" / f"{cached_files.stamp([*files])}.sha256"
    if files and (
        digest := processes.broadcast_from_first(lambda: cached.exists() and cached.read_text())
    ):
        return digest
    sizes = {file.name: file.stat().st_size for file in files} or folders.at(folder).sizes()
    part = sha256(folder, sorted(sizes)[processes.index() :: processes.count()])

    def join(parts: list[dict[str, str]]) -> str:
        digests = {name: digest for part in parts for name, digest in part.items()}
        hashes = hashes_of(folder, sizes, digests)
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    digest = processes.decide(part, join, processes.PUBLISH_SECONDS)
    with contextlib.suppress(OSError):  # without a cache the next run hashes again
        if files:
            cached.parent.mkdir(parents=True, exist_ok=True)
            cached_files.replace(cached, digest)
    return digest


def sha256(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    """File name → SHA-256. Raises `folders.errors` if a file can't be read."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # hashing releases Python's lock
        return dict(zip(names, pool.map(digest, names), strict=True))
