"""Grain pipelines whose batch k is a pure function of (seed, k)."""

import os
import pathlib


class DataError(ValueError):
    """The data can't be used; the message is one line with the fix."""


def cache_dir() -> pathlib.Path:
    """Where prepared data and compiled programs are kept between runs; set ZOO_CACHE to move it."""
    default = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "sharded-model-zoo"
    return pathlib.Path(os.environ.get("ZOO_CACHE", default)).expanduser()
