"""Compiler options that make tests compile in a third of the time, to slower code."""

import pytest

from recipes.common.sharding.compiler_options import COMPILER_OPTIONS, QUICK

# The same for whole processes: pytest's own and those that a test starts with it.
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())


@pytest.fixture
def quick(monkeypatch):
    """Makes initializations, which set a level of their own, compile this way too.

    Real processes compile other code, whose results differ in their last bits.
    """
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", QUICK)
