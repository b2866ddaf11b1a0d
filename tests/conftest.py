"""Eight simulated devices in one process; strict JAX; caches that leave the user's alone."""

import gc
import os
import pathlib
import runpy
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
os.environ["NPROC"] = "32"  # see recipes/common/mesh.py: room for two programs in flight
os.environ["HF_HUB_OFFLINE"] = "1"

import jax  # noqa: E402
import pytest  # noqa: E402

from recipes.common import preemption  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")


@pytest.fixture
def strict():
    """No dtype and no rank is promoted in silence. Our models hold to it; optax does not."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A cache folder of this session's own; compiled programs are shared with subprocesses."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["ZOO_CACHE"] = str(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


class Finished:
    """What a command did."""

    def __init__(self, process: subprocess.CompletedProcess):
        self.code, self.out, self.err = process.returncode, process.stdout, process.stderr


@pytest.fixture
def run(tmp_path):
    """A function of a module and flags: `python -m` in the clone, as a user would."""

    def command(module: str, *flags: str, cwd=ROOT, timeout: float = 300, **env: str) -> Finished:
        return Finished(
            subprocess.run(
                [sys.executable, "-m", module, *flags],
                cwd=cwd, timeout=timeout, capture_output=True, text=True, env=os.environ | env,
            )
        )  # fmt: skip

    return command


@pytest.fixture
def inside(monkeypatch, capfd):
    """As `run`, but in this process, with its eight devices: a second instead of five."""

    def command(module: str, *flags: str) -> Finished:
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        monkeypatch.setattr(sys, "argv", [module, *flags])
        monkeypatch.setattr(preemption, "_asked", "")
        monkeypatch.setattr(os, "_exit", sys.exit)  # a mistake ends the command, not pytest
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
        capfd.readouterr()
        gc.freeze()  # what is there before the command is not looked through after it
        code = 0
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            gc.collect()  # a failed run's files are closed, and its lock is gone
            gc.unfreeze()
        out, err = capfd.readouterr()
        return Finished(subprocess.CompletedProcess([], code, out, err))

    return command


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    """A small text, so that evaluation is short: the longest file of this repository's zoo."""
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text((ROOT / "zoo" / "transformer.py").read_text())
    return f"--dataset={path}"


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=3, help="how often test_crashes.py kills a run")
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


@pytest.fixture
def golden(request):
    """A function of a name and a text: compares with a reviewed file under tests/golden."""

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        reviewed = path.read_text() if path.exists() else ""
        assert text == reviewed, (
            f"tests/golden/{name} is not what the code says now. If the change is meant, run the "
            "test again with --update-golden and review the file's diff line by line."
        )

    return compare
