"""Grain pipelines whose batch k is a pure function of (seed, k)."""

import os
import pathlib
import pkgutil

# A folder `data` of one's own that is no package keeps its modules, though this one is installed.
__path__ = pkgutil.extend_path(__path__, __name__)


class UserError(ValueError):
    """A mistake that only the user can fix; the message is one line with the value and the fix."""


class DataError(UserError):
    """The data can't be used."""


def cache_dir() -> pathlib.Path:
    """Folder of prepared data and compiled programs; ZOO_CACHE moves it.

    If ZOO_CACHE is a bucket (gs://…), only compiled programs go there: data is memory-mapped, so it
    stays on a local disk.
    """
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "sharded-model-zoo"
    chosen = os.environ.get("ZOO_CACHE") or default
    return pathlib.Path(default if "://" in str(chosen) else chosen).expanduser()
