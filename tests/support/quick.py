"""Compiler options that make tests compile in a third of the time, to slower code."""

import jax
import pytest

from recipes.common.sharding.compiler_options import COMPILER_OPTIONS

# Sharding and collectives are decided before code is generated, which takes most of the time: least
# where LLVM does not optimize it, and where the older generator of loops makes it.
QUICK = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # newer ones have no other generator
    QUICK["xla_cpu_use_fusion_emitters"] = False
XLA_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())  # likewise


@pytest.fixture
def quick(monkeypatch):
    """Makes layouts, and so recipes, in this process compile this way.

    Real processes compile other code, whose results differ in their last bits.
    """
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", QUICK)
