"""Three tiers, one worker per core, eight simulated devices each, strict JAX, private caches."""

import fcntl
import functools
import gc
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterable

gc.disable()  # until all tests are imported: measured, 20 CPU seconds instead of 25
ROOT = pathlib.Path(__file__).parent.parent
os.environ["NPROC"] = "32"  # see recipes/common/runtime/mesh.py: room for two programs in flight
os.environ["HF_HUB_OFFLINE"] = "1"
# Programs would carry the calls that led to each instruction: 5% of the time to compile them.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from xdist.scheduler import LoadScopeScheduling  # noqa: E402

from recipes.common.entries import ENTRIES  # noqa: E402
from recipes.common.runtime import preemption  # noqa: E402
from tests.support import durations, programs  # noqa: E402
from tests.support.quick import XLA_FLAGS, environment  # noqa: E402

# Two NaN aren't equal: a test that compares nothing must fail.
np.testing.assert_allclose = functools.partial(np.testing.assert_allclose, equal_nan=False)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")


# ---- three tiers ---------------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run every test, not one case each")
    parser.addoption(
        "--release",
        action="store_true",
        help="also every strategy on every mesh: what PROOF.md shows",
    )
    parser.addoption("--kills", type=int, default=3, help="how often test_crashes.py kills a run")
    parser.addoption(
        "--run", default="transformer --mesh=4x2", help="the recipe that it kills, and its flags"
    )
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
    parser.addoption("--promise", metavar="NAME", help="run the tests of one promise of README.md")
    parser.addoption("--promises", action="store_true", help="list the promises and their tests")
    parser.addoption("--durations-file", metavar="FILE", help="write what each test costs")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if config.getoption("--promises"):
        from tests.support import promises

        print(promises.listing())
        return 0


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "promise(name): the promise of tests/README.md that it keeps"
    )
    config.addinivalue_line("markers", "full: only with pytest --full")
    config.addinivalue_line("markers", "release: only with pytest --release")
    programs.install()
    if not hasattr(config, "workerinput"):
        programs.clear_old()
    if config.getoption("--update-golden"):
        os.environ["UPDATE_GOLDEN"] = "1"  # for what is read from goldens before tests run
    if path := config.getoption("--durations-file"):
        config.pluginmanager.register(durations.Recorder())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(durations.Writer(path))
    # XLA reads its flags once. Compiling takes longer here than running what is compiled.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", XLA_FLAGS)
        jax.devices()


def full_except(cases: Iterable, fast: Iterable, release: Iterable = ()) -> list:
    """Returns cases for parametrize; those not in `fast` are marked full, some of them release."""
    fast, release = list(fast), list(release)
    params = []
    for case in cases:
        slow = pytest.mark.release if case in release else pytest.mark.full
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=() if case in fast else slow))
    return params


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000, 10, 10)  # by default, 7% of the time, for little that traces leave


def pytest_sessionfinish(session):
    """Rewrites tests/PROOF.md once all workers have measured."""
    gc.collect()
    gc.freeze()  # pytest then collects five times, which would take seconds
    config = session.config
    if config.getoption("--update-golden") and not hasattr(config, "workerinput"):
        from tests.support import proof

        proof.PAGE.write_text(proof.page())


def pytest_collection_modifyitems(config, items):
    release = config.getoption("--release") or _by_name(config)
    full = release or config.getoption("--full")
    promise = config.getoption("--promise")
    slow, of_release, alone = map(
        durations.listed, (durations.SLOW, durations.OF_RELEASE, durations.ALONE)
    )

    def chosen(item) -> bool:
        marker = item.get_closest_marker("promise")
        if promise and (marker is None or marker.args != (promise,)):
            return False
        is_full = item.get_closest_marker("full") or item.nodeid in slow
        is_of_release = item.get_closest_marker("release") or item.nodeid in of_release
        is_full = is_full and item.nodeid not in alone
        return release or (not is_of_release and (full or not is_full))

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = in_order_of_programs([item for item in items if chosen(item)])


def in_order_of_programs(items: list) -> list:
    """Puts the tests of one compiled step next to each other: it is traced once and then let go."""
    from tests.support.entries import CASES, case_of  # which imports this file

    places = {case: place for place, case in enumerate(CASES)}
    sharing = [i for i, item in enumerate(items) if item.path.name in SHARE_STEPS]
    cases = {i: case_of(vars(items[i]).get("callspec", NO_ARGUMENTS).params) for i in sharing}
    order = sorted(sharing, key=lambda i: places.get(cases[i], len(places)))
    moved = dict(zip(sharing, order, strict=True))
    return [items[moved.get(i, i)] for i in range(len(items))]


def _by_name(config) -> bool:
    """Whether single tests are named; these run in this process, whatever their tier."""
    return any("::" in argument for argument in config.args)


# ---- a worker per core ---------------------------------------------------------------------------


def pytest_xdist_auto_num_workers(config) -> int:
    """Uses no workers where tests write to the terminal (-s) or are named one by one."""
    if config.getoption("capture") == "no" or _by_name(config):
        return 0
    return min(os.cpu_count() or 1, 8)


SHARE_STEPS = ("test_meshes.py", "test_collectives.py")
NO_ARGUMENTS = types.SimpleNamespace(params={})


def group(test: str) -> str:
    """Tests of one group run on one worker and share fixtures and compiled programs."""
    path, _, case = test.partition("::")
    file = path.rpartition("/")[2]
    if file == "test_processes.py":
        return test  # nothing is shared
    if file in (*SHARE_STEPS, "test_published.py"):
        entry = next((name for name in ENTRIES if f"[{name}" in case), "")
        return f"{file}-{entry}" if file == "test_published.py" else entry
    return file


class ByGroup(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config, log):
    return ByGroup(config, log)


# ---- what tests are given ------------------------------------------------------------------------


@pytest.fixture
def strict():
    """Turns implicit dtype and rank promotion into errors. Our models pass; optax doesn't."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def no_mesh():
    """A mesh that a test leaves in force would be that of the next tests."""
    yield
    assert jax.sharding.get_abstract_mesh().empty


@pytest.fixture
def named_lines():
    """Programs name the lines of their instructions, as outside of tests."""
    jax.config.update("jax_traceback_in_locations_limit", 100)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A cache folder for each worker and its subprocesses, empty at first."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["ZOO_CACHE"] = str(folder)
    return folder


class Finished:
    """Exit code and output of a command."""

    def __init__(self, process: subprocess.CompletedProcess):
        self.code, self.out, self.err = process.returncode, process.stdout, process.stderr


@pytest.fixture
def run(tmp_path):
    """Returns a function of a module and flags that runs `python -m` in the clone."""

    def command(module: str, *flags: str, cwd=ROOT, timeout: float = 300, **env: str) -> Finished:
        return Finished(
            subprocess.run(
                [sys.executable, "-m", module, *flags],
                cwd=cwd, timeout=timeout, capture_output=True, text=True, env=environment() | env,
            )
        )  # fmt: skip

    return command


def pytest_runtest_teardown(item, nextitem):
    """Frees programs between files: a process may have 65,530 memory maps, and programs take many."""
    maps = pathlib.Path("/proc/self/maps")  # on Linux
    ends = nextitem is None or nextitem.path != item.path
    if ends and maps.exists() and maps.read_text().count("\n") > 20_000:
        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture
def inside(monkeypatch, capfd):
    """Like `run`, but in this process, with its eight devices; takes a second instead of five."""

    def command(module: str, *flags: str) -> Finished:
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr(sys, "argv", [module, *flags])
        for imported in (module, f"{module}.__main__"):  # a test file may have imported it
            monkeypatch.delitem(sys.modules, imported, raising=False)
        monkeypatch.setattr(preemption, "_asked", "")
        monkeypatch.setattr(os, "_exit", sys.exit)  # a mistake ends the command, not pytest
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
        capfd.readouterr()
        gc.collect()
        gc.freeze()  # what is there before the command is not looked through again
        code = 0
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            gc.collect()  # a failed run's files are closed, and its lock is gone
        out, err = capfd.readouterr()
        return Finished(subprocess.CompletedProcess([], code, out, err))

    return command


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """A small text that keeps evaluation short: the Transformer's file and its longest parts."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    chapters = ("transformer", "core/attention", "core/layers")
    path.write_text("".join((ROOT / "zoo" / f"{name}.py").read_text() for name in chapters))
    return f"--dataset={path}"


class Golden:
    """Reviewed files under tests/golden; --update-golden rewrites them."""

    def __init__(self, update: bool):
        self.update = update

    def __call__(self, name: str, text: str, part: str = "") -> None:
        """Compares `text` with a file, or with the file's lines that begin with `part`."""

        def with_it(before: str) -> str:
            lines, first = before.splitlines(True), f"{part} " if part else ""
            place = next((i for i, x in enumerate(lines) if x.startswith(first)), len(lines))
            kept = [line for line in lines if not line.startswith(first)]
            return "".join([*kept[:place], text, *kept[place:]])

        reviewed = self.rewrite(name, with_it)
        if part:
            lines = reviewed.splitlines(True)
            reviewed = "".join(line for line in lines if line.startswith(f"{part} "))
        assert text == reviewed, (
            f"tests/golden/{name} is not what the code says now. If the change is meant, run the "
            "test again with --update-golden and review the file's diff line by line."
        )

    def rewrite(self, name: str, change: Callable[[str], str]) -> str:
        """Returns the file's text; with --update-golden, changes it first, one worker at a time."""
        path = ROOT / "tests" / "golden" / name
        if not self.update:
            return path.read_text() if path.exists() else ""
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = change(file.read())
            file.truncate(0)
            file.write(text)
        return text


@pytest.fixture
def golden(request) -> Golden:
    return Golden(request.config.getoption("--update-golden"))
