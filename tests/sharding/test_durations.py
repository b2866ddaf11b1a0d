"""The fast tier leaves out what was measured slow, but never all tests of a promise."""

import ast

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
    goldens = (durations.SLOW, durations.OF_RELEASE, durations.ALONE)
    named = {name.partition("[")[0] for golden in goldens for name in durations.listed(golden)}
    assert named <= functions, "run python -m tests.support.durations FILE tiers"


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


def test_a_function_has_a_budget_in_the_fast_tier():
    few = durations.BUDGET // (durations.MOST * 0.9)
    rows = [row(f"x.py::f[{i}]", durations.MOST * 0.9 + i / 1e6) for i in range(9)]
    assert len(durations.choose_slow(rows)) == 9 - few
    assert "x.py::f[0]" not in durations.choose_slow(rows)


def test_a_function_has_a_budget_in_the_full_tier():
    """Its cheapest cases, and whatever it costs: what the fast tier runs, and the cheapest of a promise."""
    half = durations.FULL_BUDGET / 2
    rows = [row("x.py::f[b]", half + 1, tier="full"), row("x.py::f[a]", half, tier="full")]
    rows += [row("x.py::f[slow]", 2e3), row("x.py::dear", 1e3, tier="full")]
    rows += [row("x.py::g[fast]", 1e3), row("x.py::g[full]", half + 1, tier="full")]
    rows += [row("y.py::alone", 1e3, tier="full"), row("y.py::never", 0.1, tier="release")]
    rows += [row(f"{durations.FIRST}[a]", 1e3), row(f"{durations.FIRST}[b]", 1e3)]
    left_out = {"x.py::f[b]", "x.py::f[slow]", "x.py::dear", "x.py::g[full]"}
    assert {*durations.choose_for_release(rows, ["x.py::f[slow]"])} == left_out


def test_what_was_not_measured_again_stays(tmp_path, monkeypatch):
    slow, of_release = tmp_path / "slow.txt", tmp_path / "release.txt"
    slow.write_text("3.0 a.py::gone[x y]\n2.0 a.py::quick\n")
    monkeypatch.setattr(durations, "SLOW", slow)
    monkeypatch.setattr(durations, "OF_RELEASE", of_release)
    dear = row("a.py::new[dear]", 99.0, tier="full")
    durations.rewrite_tiers([row("a.py::quick", 0.1), row("a.py::new[x]", 4.0), dear])
    assert slow.read_text() == "3.0 a.py::gone[x y]\n4.0 a.py::new[x]\n"
    assert durations.listed(slow) == {"a.py::new[x]": 4.0, "a.py::gone[x y]": 3.0}
    assert of_release.read_text() == "99.0 a.py::new[dear]\n"
