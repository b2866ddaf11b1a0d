"""Recipes: one runnable file per zoo entry, `python -m recipes.<entry>`."""

import itertools
import os
import pathlib
import pkgutil
import sys
import time
from importlib import util

STARTED = time.perf_counter()  # as good as the command's start: nothing heavy is imported yet

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
