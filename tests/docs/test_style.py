"""Ruff and pyright find nothing."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.promise("structure")


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        pytest.param(
            ["basedpyright", "--pythonpath", sys.executable],  # about 20 s of CPU time
            marks=pytest.mark.full,
        ),
    ],
    ids=["check", "format", "pyright"],
)
def test_tools_find_nothing(command):
    """They read their settings in pyproject.toml; pyright looks at zoo, recipes and data."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
