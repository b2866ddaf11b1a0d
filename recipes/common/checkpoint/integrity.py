"""hashes.json: the size and SHA-256 of every file of a checkpoint, to tell whether it is damaged.

Orbax and TensorStore read flipped bits of an array without noticing.
"""

import json
import pathlib

from recipes.common.checkpoint import card, parallel_hashing
from recipes.common.runtime import folders, print0

COMMITTED = "commit_success.txt"  # Orbax's mark of a finished folder
HASHES = "hashes.json"
HASHED = (
    "hashed"  # in the metadata of a checkpoint that has hashes.json; those of early versions don't
)
PROBE = "probe.json"  # in published checkpoints: probe.py
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
    folder, name = folders.to_path(folder), str(folder)
    metadata, hashes = {}, {}
    try:
        found = folders.sizes(folder)
        for name in _NEEDED:
            if name not in found:
                return f"{name} is missing"
        for name in (HASHES, "data/metadata", "metadata/metadata"):
            if name in found:
                content = dict(json.loads((folder / name).read_bytes()))
                if name == HASHES:
                    hashes = {file: (size, digest) for file, (size, digest) in content.items()}
                metadata = content if name == "metadata/metadata" else metadata
        if missing := {"entry", "config", "step", "flags", "data"} - metadata.keys():
            return f"metadata/metadata has no {min(missing)!r}"
        if HASHED in metadata and HASHES not in found:
            return f"{HASHES} is missing"
        if HASHES in found:
            for name in sorted(found.keys() - hashes.keys()):
                item, _, file = name.partition("/")
                if item in _ITEMS and not file.startswith("."):
                    return f"{name} is missing in {HASHES}"
        for name in (HASHES, card.FILE, PROBE) if "published" in metadata else ():
            if name not in found or (name != HASHES and name not in hashes):
                return f"{name} is missing" + (f" in {HASHES}" if name in found else "")
        for name, (size, _) in hashes.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]:,} bytes instead of {size:,}"
        if "published" in metadata:
            name = card.FILE
            listed = card.digests((folder / name).read_bytes().decode(errors="replace"))
            for other, (_, digest) in hashes.items():
                if other != name and listed.get(other) != digest:
                    return f"{name} and {HASHES} disagree on the SHA-256 of {other}"
        digests = parallel_hashing.sha256(folder, list(hashes) if hash_files else [])
        for name, digest in digests.items():
            if digest != hashes[name][1]:
                return f"{name} differs from what was saved (its SHA-256 does not match)"
    except (ValueError, TypeError, AttributeError):
        return f"{name} is not the JSON that was saved"
    except folders.errors() as error:
        where = getattr(error, "filename", None) or name
        return f"{where} can't be read ({folders.reason(error)})"
    if hash_files and HASHES not in found:
        print0(
            f"{folder} has no {HASHES}, like checkpoints of early versions: its files were not checked "
            "for damage."
        )
    return ""


def hash_before_commit(folder: pathlib.Path) -> None:
    """Writes hashes.json of a checkpoint that is about to be committed."""
    # Orbax rewrites the first two when it commits.
    later = {COMMITTED, "_CHECKPOINT_METADATA", HASHES}
    sizes = folders.sizes(folder)
    write_hashes(folder, hashes_of(folder, {k: sizes[k] for k in sizes.keys() - later}))


def write_hashes(folder: pathlib.Path, hashes: dict[str, list]) -> None:
    (folder / HASHES).write_text(json.dumps(hashes, indent=0))


def hashes_of(folder: pathlib.Path, sizes: dict[str, int]) -> dict[str, list]:
    """File name → [bytes, SHA-256], sorted by name, of the files in `sizes`."""
    digests = parallel_hashing.sha256(folder, sorted(sizes))
    return {name: [sizes[name], digest] for name, digest in digests.items()}
