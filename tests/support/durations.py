"""Keeps what each test costs: `pytest --durations-file=FILE`; `python -m tests.support.durations FILE` adds it up.

A line of the file is one test as JSON: its promise and tier, its CPU seconds and those of processes
that it started and waited for, and the programs that it compiled (name, CPU seconds) or read from the
cache. CPU seconds compare runs on a busy machine, which wall seconds don't. Fixtures of a session or
module count towards the first test that uses them.
"""

import collections
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable

import jax
import pytest

COMPILING = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
NAME = "durations"  # of the property by which workers send them


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


# ---- reading such a file -------------------------------------------------------------------------


def table(rows: list[dict], key) -> Iterable[str]:
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
    yield f"{'CPU s':>8} {'compile':>8} {'programs':>8} {'hits':>6} {'tests':>6}"
    for cpu, compiling, programs, hits, tests, name in sorted(sums, reverse=True):
        yield f"{cpu:8.1f} {compiling:8.1f} {programs:8} {hits:6} {tests:6}  {name}"


def main(path: str, by: str = "file", most: str = "40"):
    """Prints the dearest files, functions, promises, tiers or tests."""
    rows = [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]
    keys = {
        "file": lambda row: row["test"].partition("::")[0],
        "function": lambda row: row["test"].partition("[")[0],
        "promise": lambda row: row["promise"],
        "tier": lambda row: row["tier"],
        "test": lambda row: row["test"],
    }
    print("\n".join(list(table(rows, keys[by]))[: int(most) + 1]))
    print(f"{sum(row['cpu'] for row in rows):8.1f} in all, {len(rows)} tests")


if __name__ == "__main__":
    main(*sys.argv[1:])
