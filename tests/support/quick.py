"""Compiler options that make tests compile in a third of the time, to slower code."""

import os

import pytest

from recipes.common.sharding.compiler_options import COMPILER_OPTIONS, QUICK

# The same for whole processes: pytest's own and those that a test starts with it.
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())


def environment() -> dict[str, str]:
    """Variables for a command that a test starts: as many threads as it has where people start it."""
    return {name: value for name, value in os.environ.items() if name != "NPROC"}


@pytest.fixture
def quick(monkeypatch):
    """Makes initializations, which set a level of their own, compile this way too.

    Real processes compile other code, whose results differ in their last bits.
    """
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", QUICK)
