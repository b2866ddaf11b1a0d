"""Compiler options that make tests compile in a third of the time, to slower code."""

import pytest

from recipes.common.sharding.compiler_options import COMPILER_OPTIONS, QUICK

XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())  # likewise


@pytest.fixture
def quick(monkeypatch):
    """Makes layouts, and so recipes, in this process compile this way.

    Real processes compile other code, whose results differ in their last bits.
    """
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", QUICK)
