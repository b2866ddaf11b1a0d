"""Whole or damaged: hashes.json, the size and SHA-256 of every file of a checkpoint.

Orbax and TensorStore read flipped bits of an array without noticing.
"""

import concurrent.futures
import hashlib
import json
import pathlib

from recipes.common.checkpoint import card, helpers
from recipes.common.runtime import folders

COMMITTED = "commit_success.txt"  # Orbax's mark of a finished folder
HASHES = "hashes.json"
PROBE = "probe.json"  # of a published one: probe.py
_NEEDED = [f"{item}{COMMITTED}" for item in ("", "state/", "metadata/")]
_NEEDED += ["state/_METADATA", "metadata/metadata"]


def verify(folder: str | pathlib.Path, whole: bool = True) -> str:
    """What is wrong with a checkpoint's folder, naming the first bad file; "" if it is whole.

    Args:
      whole: whether to hash every file, which takes long with a huge checkpoint; else only sizes
        are compared.
    """
    folder, name = folders.at(folder), str(folder)
    hashes: dict[str, list] = {}
    try:
        found = folders.sizes(folder)
        for name in _NEEDED:
            if name not in found:
                return f"{name} is missing"
        for name in (HASHES, "data/metadata", "metadata/metadata"):
            if name in found:
                content = json.loads((folder / name).read_bytes())
                hashes = content if name == HASHES else hashes
        if missing := {"entry", "config", "step", "flags", "data"} - content.keys():
            return f"metadata/metadata has no {min(missing)!r}"
        for name in (HASHES, card.FILE, PROBE) if "published" in content else ():
            if name not in found or (name != HASHES and name not in hashes):
                return f"{name} is missing" + (f" in {HASHES}" if name in found else "")
        for name, (size, _) in hashes.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]:,} bytes instead of {size:,}"
        if "published" in content:
            name, said = (
                card.FILE,
                card.digests((folder / card.FILE).read_bytes().decode(errors="replace")),
            )
            for other, (_, digest) in hashes.items():
                if other != card.FILE and said.get(other) != digest:
                    return f"{name} and {HASHES} disagree on the SHA-256 of {other}"
        for name, digest in _digests(folder, list(hashes) if whole else []).items():
            if digest != hashes[name][1]:
                return f"{name} differs from what was saved (its SHA-256 does not match)"
    except (ValueError, TypeError, AttributeError):
        return f"{name} is not the JSON that was saved"
    except folders.errors() as error:
        where = getattr(error, "filename", None) or name
        return f"{where} can't be read ({folders.reason(error)})"
    return ""


def hash_before_commit(folder: pathlib.Path) -> None:
    """Writes hashes.json of a checkpoint that is about to be committed."""
    # Orbax writes the first two again as it commits.
    later = {COMMITTED, "_CHECKPOINT_METADATA", HASHES}
    sizes = folders.sizes(folder)
    write_hashes(folder, hashes_of(folder, {k: sizes[k] for k in sizes.keys() - later}))


def write_hashes(folder: pathlib.Path, hashes: dict[str, list]) -> None:
    (folder / HASHES).write_text(json.dumps(hashes, indent=0))


def hashes_of(folder: pathlib.Path, sizes: dict[str, int]) -> dict[str, list]:
    """Name → [bytes, SHA-256], in the order of names, of files of these sizes."""
    digests = _digests(folder, sorted(sizes))
    return {name: [sizes[name], digest] for name, digest in digests.items()}


def _digests(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    return helpers.digests(folder, names, sha256_of)


def sha256_of(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    """Name → SHA-256, in the order of names; by this process."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # hashing releases Python's lock
        return dict(zip(names, pool.map(digest, names), strict=True))
