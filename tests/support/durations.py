"""What each test costs, and which tests the fast tier leaves out for it.

    pytest --release --durations-file=FILE      # measures
    python -m tests.support.durations FILE      # adds up by file, function, promise or test
    python -m tests.support.durations FILE tiers # rewrites tests/golden/slow_tests.txt, release_tests.txt

A line of the file is one test as JSON: its promise and tier, its CPU seconds and those of processes
that it started and waited for, and the programs that it compiled (name, CPU seconds) or read from the
cache. CPU seconds compare runs on a busy machine, which wall seconds don't. Fixtures of a session or
module count towards the first test that uses them.

The fast tier runs tests of up to MOST CPU seconds, and of each promise the cheapest test in each file,
whatever it takes, and those that alone run a part of the code: tests/golden/alone_tests.txt, which
`tests.by_hand.unrun` helps to find. A function of tests has a budget in the fast and in the full tier, which its cheapest cases
are taken from; those in CHOSEN have none in the full tier. A release runs all. Budgets are kept by numbers
measured once, not by a clock in each run: a busy machine fails nobody.
"""

import collections
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable

import jax
import pytest

COMPILING = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
NAME = "durations"  # of the property by which workers send them
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SLOW = GOLDEN / "slow_tests.txt"
OF_RELEASE = GOLDEN / "release_tests.txt"
ALONE = (
    GOLDEN / "alone_tests.txt"
)  # that the fast tier runs because no cheaper test runs their code
MOST = 0.4  # CPU seconds of a test of the fast tier
BUDGET = 1.0  # CPU seconds of all cases of a function in the fast tier
FULL_MOST = 15.0  # CPU seconds of a test of the full tier
FULL_BUDGET = 6.0  # CPU seconds of all cases of a function in the full tier
# The first promise's own test: of the entry that most people read, and of axes of size 1.
FIRST = "tests/sharding/test_meshes.py::test_same_start_losses_and_gradients"
KEPT = (f"{FIRST}[transformer-", f"{FIRST}[dot_relu_dot-")
# Their cases are chosen by what they prove: every pair of parallelisms, option, family, entry.
COLLECTIVES = "tests/sharding/test_collectives.py::test_a"
CHOSEN = (
    FIRST,
    "tests/sharding/test_meshes.py::test_restore_is_bit_equal_from_any_mesh_to_any_other",
    f"{COLLECTIVES}_step_sends_what_its_strategy_promises",
    f"{COLLECTIVES}_traced_step_gathers_weights_and_scatters_gradients",
    "tests/zoo/test_options.py::test_an_option_changes_what_is_computed",
    "tests/hf/test_hf.py::test_logits_match_transformers",
    "tests/zoo/test_structure.py::test_sizes_say_how_many_parameters_they_have",
)


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Recorder:
    """In a process that runs tests: measures each phase of a test."""

    def __init__(self):
        self.cpu = cpu_seconds()
        self.wall = time.perf_counter()
        self.programs: list[dict] = []
        self.begun = 0.0
        self.is_hit = False
        jax.monitoring.register_scalar_listener(self._on_begin)
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_end)

    def _on_begin(self, event: str, _: float, **__):
        if event == COMPILING:
            self.begun = time.process_time()
            self.is_hit = False

    def _on_event(self, event: str, **_):
        self.is_hit |= event == HIT

    def _on_end(self, event: str, _: float, fun_name: str = "", **__):
        if event == COMPILING:
            seconds = round(time.process_time() - self.begun, 3)
            self.programs.append({"name": fun_name, "seconds": seconds, "hit": self.is_hit})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        cpu, wall = cpu_seconds(), time.perf_counter()
        promise = item.get_closest_marker("promise")
        measured = {
            "promise": promise.args[0] if promise else "",
            "tier": next((t for t in ("release", "full") if item.get_closest_marker(t)), "fast"),
            "cpu": cpu - self.cpu,
            "wall": wall - self.wall,
            "programs": self.programs,
        }
        report.user_properties.append((NAME, measured))
        self.cpu, self.wall, self.programs = cpu, wall, []
        return report


class Writer:
    """In the process that all reports reach: writes the file."""

    def __init__(self, path: str):
        self.path = pathlib.Path(path)
        self.tests: dict[str, dict] = {}

    def pytest_runtest_logreport(self, report):
        measured = dict(report.user_properties).get(NAME)
        if not measured:
            return
        test = self.tests.setdefault(
            report.nodeid, measured | {"cpu": 0.0, "wall": 0.0, "programs": []}
        )
        for what in ("cpu", "wall", "programs"):
            test[what] += measured[what]

    def pytest_sessionfinish(self):
        rows = [{"test": name, **measured} for name, measured in self.tests.items()]
        for row in rows:
            row |= {what: round(row[what], 3) for what in ("cpu", "wall")}
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def pytest_terminal_summary(self, terminalreporter):
        rows = [{"test": name, **measured} for name, measured in self.tests.items()]
        terminalreporter.write_line("\n".join(list(table(rows, lambda row: row["test"]))[:11]))
        terminalreporter.write_line(next(table(rows, lambda row: "all tests", header=False), ""))


# ---- tiers ---------------------------------------------------------------------------------------


def listed(path: pathlib.Path) -> dict[str, float]:
    """Test → CPU seconds, of the tests that a golden leaves to a longer tier."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: float(cpu) for cpu, _, name in (line.partition(" ") for line in lines)}


def left_out(
    rows: list[dict], most: float, budget: float, kept: Callable[[dict], bool]
) -> dict[str, float]:
    """Test → CPU seconds, of the tests that take too long, or that their function's budget has no room for.

    Args:
      kept: whether a tier runs a test whatever it costs.
    """
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["promise"], row["test"].partition("::")[0]].append(row)
    cheapest = {min(group, key=lambda row: row["cpu"])["test"] for group in groups.values()}

    def must_run(row: dict) -> bool:
        return kept(row) or row["test"] in cheapest

    functions = collections.defaultdict(list)
    for row in rows:
        functions[row["test"].partition("[")[0]].append(row)
    chosen = {}
    for cases in functions.values():
        spent = 0.0
        for row in sorted(cases, key=lambda row: (not must_run(row), row["cpu"])):
            fits = row["cpu"] <= most and (not spent or spent + row["cpu"] <= budget)
            if fits or must_run(row):
                spent += row["cpu"]
            else:
                chosen[row["test"]] = row["cpu"]
    return chosen


def choose_slow(rows: list[dict]) -> dict[str, float]:
    """Test → CPU seconds, of those that the fast tier leaves out."""
    rows, alone = [row for row in rows if row["tier"] == "fast"], listed(ALONE)

    def kept(row: dict) -> bool:
        return row["test"].startswith(KEPT) or row["test"] in alone

    return left_out(rows, MOST, BUDGET, kept)


def choose_for_release(rows: list[dict], slow: Iterable[str]) -> dict[str, float]:
    """Test → CPU seconds, of those that the full tier leaves out: none that the fast tier runs."""

    def kept(row: dict) -> bool:
        is_fast = row["tier"] == "fast" and row["test"] not in slow
        return is_fast or row["test"].startswith(CHOSEN)

    rows = [row for row in rows if row["tier"] != "release"]
    return left_out(rows, FULL_MOST, FULL_BUDGET, kept)


def rewrite_tiers(rows: list[dict]) -> None:
    """Writes both goldens. Tests that the rows lack stay as they were."""
    measured = {row["test"] for row in rows}

    def rewrite(path: pathlib.Path, chosen: dict[str, float]) -> None:
        others = {name: cpu for name, cpu in listed(path).items() if name not in measured}
        lines = sorted((others | chosen).items())
        path.write_text("".join(f"{cpu:.1f} {name}\n" for name, cpu in lines))

    rewrite(SLOW, choose_slow(rows))
    rewrite(OF_RELEASE, choose_for_release(rows, listed(SLOW)))


# ---- reading such a file -------------------------------------------------------------------------


def table(rows: list[dict], key, header: bool = True) -> Iterable[str]:
    """Lines of the groups that cost most: CPU seconds, of them compiling, programs, hits, tests."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = []
    for name, members in groups.items():
        programs = [program for row in members for program in row["programs"]]
        compiling = sum(program["seconds"] for program in programs)
        hits = sum(program["hit"] for program in programs)
        cpu = sum(row["cpu"] for row in members)
        sums.append((cpu, compiling, len(programs) - hits, hits, len(members), name))
    if header:
        yield f"{'CPU s':>8} {'compile':>8} {'programs':>8} {'hits':>6} {'tests':>6}"
    for cpu, compiling, programs, hits, tests, name in sorted(sums, reverse=True):
        yield f"{cpu:8.1f} {compiling:8.1f} {programs:8} {hits:6} {tests:6}  {name}"


def main(path: str, by: str = "file", most: str = "40"):
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    if by == "tiers":
        rewrite_tiers(rows)
        return
    keys = {
        "file": lambda row: row["test"].partition("::")[0],
        "function": lambda row: row["test"].partition("[")[0],
        "promise": lambda row: row["promise"],
        "tier": lambda row: row["tier"],
        "test": lambda row: row["test"],
    }
    print("\n".join(list(table(rows, keys[by]))[: int(most) + 1]))
    print(*table(rows, lambda row: "all tests", header=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
