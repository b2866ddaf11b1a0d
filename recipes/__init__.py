"""Recipes: one runnable file per zoo entry, `python -m recipes.<entry>`."""

import contextlib
import itertools
import math
import os
import pathlib
import pkgutil
import re
import sys
import time
from collections.abc import Mapping
from importlib import util

STARTED = time.perf_counter()  # as good as the command's start: nothing heavy is imported yet

# Commands that simulate several devices without --mesh, for which huge pages cost time.
SEVERAL = ("bench", "explore", "meshes", "plan", "prove")


def huge_pages(argv: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which glibc asks Linux for huge pages; {}: it would not help this command.

    The memory of a step's temporaries returns to the system after each step. In pages of 4 kB, a step of
    a small model on one CPU device takes them back with 21,000 faults, in huge pages with 400 to 1,000,
    which saves half of its system time.

    Args:
      argv: Python's, as in sys.orig_argv.
    """
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    taken = ("GLIBC_TUNABLES", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
    accelerators = ("nvidia*", "accel*", "vfio/*", "kfd")
    if (
        sys.platform != "linux"
        or any(name in environment for name in taken)
        or any(any(pathlib.Path("/dev").glob(pattern)) for pattern in accelerators)
        or not setting.exists()
        or "[madvise]" not in setting.read_text()
        or not _on_one_device(argv)
    ):
        return {}
    libc, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 35):
        return {}
    return {**environment, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def _on_one_device(argv: list[str]) -> bool:
    """Whether a command line is a recipe's whose mesh has one device, if it is of CPUs."""
    if "-m" not in argv[:-1]:
        return False
    _, command, *flags = argv[argv.index("-m") :]
    package, _, name = command.partition(".")
    if package != "recipes" or (name in SEVERAL and [name, *flags[:1]] != ["bench", "cpu"]):
        return False
    sizes = [re.findall("[0-9]+", flag) for flag in flags if flag.startswith("--mesh")]
    return all(math.prod(map(int, size)) == 1 and size for size in sizes)


# glibc reads the variable when a process starts, so this one starts again, before it has imported JAX.
if sys.argv[:1] == ["-m"] and (_environment := huge_pages(sys.orig_argv, os.environ)):
    with contextlib.suppress(OSError):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _environment)

# XLA's and TensorStore's C++ notices go to stderr before Python can filter them. This runs before
# the first import of jax; set the variable to 0 to see them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# A folder `recipes` of one's own that is no package keeps its modules, though this one is installed.
__path__ = pkgutil.extend_path(__path__, __name__)

# Recipes import `zoo` and `data`, which are common names. `python -m recipes.NAME` puts this clone first,
# so it works in any folder. Other programs may have such packages themselves: a sentence says which one
# is in the way.
FOLDER = pathlib.Path(__file__).parent
CLONE = FOLDER.parent
# A script or notebook in this folder has it first on sys.path; lm-eval would take evaluate.py for the
# library of that name.
sys.path.sort(key=lambda folder: pathlib.Path(folder).resolve() == FOLDER.resolve())
for _flag, _module in itertools.pairwise(sys.orig_argv):
    if _flag == "-m" and _module.startswith("recipes."):
        sys.path.insert(0, str(CLONE))
for _name, _file in (("zoo", "transformer.py"), ("data", "batches.py")):
    _found = util.find_spec(_name)
    _folders = (_found and _found.submodule_search_locations) or []
    if not any(pathlib.Path(_folder, _file).exists() for _folder in _folders):
        raise ImportError(
            f"recipes need the package {_name!r} of {CLONE}, and Python finds "
            f"{(_found and _found.origin) or 'none'}; rename that, or put {CLONE} before it on sys.path"
        )
