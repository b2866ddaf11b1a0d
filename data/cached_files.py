"""Files of the cache, named by what they were made from."""

import hashlib
import json
import os
import pathlib


def stamp(files: list[pathlib.Path]) -> str:
    """A hash of the files' names, sizes and times, under which a digest of their content is cached."""
    stats = [(str(path.absolute()), path.stat()) for path in files]
    listing = [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16]


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file of the cache, which appears only when it is complete."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
