"""The fast tier leaves out what was measured slow, but never all tests of a promise."""

import ast
import pathlib

import pytest

from tests.conftest import ROOT
from tests.support import durations

pytestmark = pytest.mark.promise("readmes")


def test_slow_tests_are_tests():
    """A renamed one would be in the fast tier again."""
    functions = {
        f"{path.relative_to(ROOT).as_posix()}::{node.name}"
        for path in (ROOT / "tests").glob("*/test_*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef)
    }
    slow = {name.partition("[")[0] for name in durations.slow_tests()}
    assert slow <= functions, "run python -m tests.support.durations FILE slow"


def row(test: str, cpu: float, promise: str = "a", tier: str = "fast") -> dict:
    return {"test": test, "cpu": cpu, "promise": promise, "tier": tier}


def test_the_cheapest_of_a_promise_and_file_is_never_left_out():
    rows = [row("x.py::dear", 9.0), row("x.py::dearer", 10.0), row("x.py::full", 1.0, tier="full")]
    rows += [row("x.py::other", 5.0, "b"), row("y.py::alone", 7.0), row("z.py::cheap", 0.1)]
    rows += [row("z.py::slow", 2.0), row(f"{durations.FIRST}[transformer-x]", 20.0)]
    rows += [row(f"{durations.FIRST}[bert-x]", 20.0)]
    assert durations.choose_slow(rows) == {
        "x.py::dearer": 10.0, "z.py::slow": 2.0, f"{durations.FIRST}[bert-x]": 20.0,
    }  # fmt: skip


def test_what_was_not_measured_again_stays(tmp_path, monkeypatch):
    golden = tmp_path / "slow.txt"
    golden.write_text("3.0 a.py::gone[x y]\n2.0 a.py::quick\n")
    monkeypatch.setattr(durations, "SLOW", pathlib.Path(golden))
    durations.rewrite_slow([row("a.py::quick", 0.1), row("a.py::new", 4.0)])
    assert golden.read_text() == "3.0 a.py::gone[x y]\n4.0 a.py::new\n"
    assert durations.slow_tests() == {"a.py::new", "a.py::gone[x y]"}
