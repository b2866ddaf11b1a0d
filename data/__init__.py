"""Grain pipelines whose batch k is a pure function of (seed, k)."""

import os
import pathlib


class DataError(ValueError):
    """The data can't be used; the message is one line with the fix."""


def cache_dir() -> pathlib.Path:
    """Where prepared data and compiled programs are kept between runs; set ZOO_CACHE to move it.

    A bucket there, gs://…, takes compiled programs alone: data is memory-mapped, so on a local disk.
    """
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "sharded-model-zoo"
    given = os.environ.get("ZOO_CACHE") or default
    return pathlib.Path(default if "://" in str(given) else given).expanduser()
