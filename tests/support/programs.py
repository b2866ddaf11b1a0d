"""Programs that earlier runs of the tests compiled: a cache that JAX reads and writes.

A program is found again if nothing differs that it was compiled from: the lowered module with all its
names, the compiler's options and flags, the versions of JAX and jaxlib, the processor. So a program that
is read is the one that would be compiled. What only a compilation shows isn't in it; tests that look for
that take the fixture `compiles` of conftest.py.

JAX's own cache writes files in place, so that a killed process leaves half of one, which JAX reports as
a warning; with its limit of size, it reads the times of all files before it writes one.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import time

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

DAYS = 14  # that a program is kept after its last use
DIGEST = hashlib.sha256().digest_size


class ProgramCache(CacheInterface):
    """Files that are written whole or not at all, and read only if they are what was written.

    Where they can't be written, programs are compiled as if there were no cache.
    """

    def __init__(self, folder: str):
        self._path = pathlib.Path(folder)
        with contextlib.suppress(OSError):
            self._path.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        path = self._path / key
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, program = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(program).digest() != digest:  # a disk that lost power
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return program

    def put(self, key: str, value: bytes) -> None:
        # Of a name that no other process has; a killed one leaves it to `clear_old`.
        unfinished = self._path / f"{os.getpid()}-{time.monotonic_ns()}.unfinished"
        with contextlib.suppress(OSError):
            unfinished.write_bytes(hashlib.sha256(value).digest() + value)
            unfinished.replace(self._path / key)


def install() -> None:
    """Makes this process read and write programs of earlier runs on this kind of processor."""
    compilation_cache.get_file_cache = lambda folder: (ProgramCache(folder), folder)
    jax.config.update("jax_compilation_cache_dir", str(root() / processor_and_versions()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # Else a program would keep the names of operations, and of lines, from before an edit.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def root() -> pathlib.Path:
    """A folder of the user's. ZOO_CACHE, which runs of the tests set for themselves, doesn't move it."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache / "sharded-model-zoo" / "test-programs"


def processor_and_versions() -> str:
    """A folder's name. Code for another processor may crash: it has instructions that this one lacks."""
    facts = [platform.machine(), platform.processor()]
    cpuinfo = pathlib.Path("/proc/cpuinfo")  # on Linux
    if cpuinfo.exists():
        first = cpuinfo.read_text().partition("\n\n")[0].splitlines()
        names = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
        facts += [line for line in first if line.partition("\t")[0].strip() in names]
    features = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return f"jax{jax.__version__}-{features}"


def clear_old() -> None:
    """Deletes what no run has used for DAYS days, of all versions and processors."""
    oldest = time.time() - DAYS * 24 * 3600
    for path in root().glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another run clears too
            if path.stat().st_mtime < oldest:
                path.unlink()
