"""What is around the step: the loop's own cost, data, checkpoints, the start of a run."""

import contextlib
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from data import text
from recipes.bench.common import (
    SIZES,
    Table,
    Training,
    interleaved,
    machine,
    make_step,
    one_of,
)
from recipes.common import checkpoint, loop, report, sharding
from recipes.common.cli import Run, flag
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh
from recipes.common.metrics import Log, say
from recipes.common.workdir import Workdir


class NoWork:
    """A Workdir that keeps nothing."""

    def save(self, step, state):
        pass

    def wait(self):
        pass

    def last_good(self):
        return None


# ---- the loop --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostFlags:
    steps: int = flag(10, "in a timing", at_least=1)
    rounds: int = flag(15, "timings, in turn", at_least=1)
    sizes: str = flag("tiny,small", "of the Transformer, with commas between them")


def host(flags: HostFlags) -> None:
    """The loop with a step and data that take no time is Python's part; with real ones, overhead."""
    sizes, corpus, mesh = one_of("sizes", flags.sizes, SIZES), text.corpus(), make_mesh("1")
    table = Table("size", "Python alone, ms a step", "bare step, ms", "in the loop, ms", "overhead",
                  "overhead, by CPU time")  # fmt: skip
    for size in sizes:
        step = make_step(SIZES[size](), "dp", mesh, 16, 128)
        training = Training(step)

        def nothing(state, window_BT):
            zero = jnp.zeros(())
            return state | {"step": state["step"] + 1}, {"loss": zero, "grad_norm": zero}

        pinned = dict(donate_argnums=0, out_shardings=(sharding.shardings(step.abstract), None))
        compiled = step.layout.compile(nothing, step.abstract, step.window, **pinned)
        idle = Training(step, compiled=compiled)
        same = itertools.repeat(np.zeros(step.window.shape, np.int32))
        loops = [_loop(idle, same, 20 * flags.steps) for _ in range(flags.rounds)]
        python = min(loops) / (20 * flags.steps)

        def bare(training=training):
            before = None
            for _ in range(flags.steps):
                training.state, metrics = training.compiled(training.state, training.batch)
                jax.device_get(before)  # one step late, as the loop does
                before = metrics
            jax.block_until_ready(before)

        feed = iter(text.train_batches(corpus, 128, 16, seed=0))
        what = {"bare": bare, "loop": functools.partial(_loop, training, feed, flags.steps)}
        bare_, loop_ = interleaved(what, flags.rounds).values()
        one, both = (statistics.median(times.wall) / flags.steps for times in (bare_, loop_))
        overhead = statistics.median(loop_.cpu) / statistics.median(bare_.cpu) - 1
        table.row(size, f"{python * 1e3:.2f}", f"{one * 1e3:.1f}", f"{both * 1e3:.1f}",
                  f"{both / one - 1:.1%}", f"{overhead:.1%}")  # fmt: skip
    say("", f"16 × 128 tokens a step, one device; medians of {flags.rounds} in turn. The loop: feed, "
        "dispatch, metrics of the step before, metrics.jsonl. Python alone: its thread's CPU time, "
        "where step and data take none.", machine())  # fmt: skip


def _loop(training: Training, batches, steps: int) -> float:
    """recipes.common.loop.fit, as the Transformer's recipe calls it, but for checkpoints.

    Returns the CPU seconds of this thread.
    """
    step, start = training.step, int(training.state["step"])
    run = Run(steps=start + steps, batch_size=16)
    # Progress lines are part of the loop's work, and no part of the table.
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        log = Log(pathlib.Path(folder) / "metrics.jsonl", start, run, "tokens", 16 * 128)
        before = time.thread_time()
        training.state = loop.fit(
            training.compiled, training.state, batches, step.layout, run, log, NoWork()
        )
        used = time.thread_time() - before
        log.close()
    jax.block_until_ready(training.state)
    return used


# ---- data ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DataFlags:
    seq_len: int = flag(1_024, "tokens in a window", at_least=1)
    batch_size: int = flag(32, "windows in a batch", at_least=1)
    batches: int = flag(300, "in a timing", at_least=1)
    rounds: int = flag(5, "timings, in turn", at_least=1)
    size: str = flag(
        "small", "the Transformer that consumes, 16 × 128 tokens a step", choices=SIZES
    )


def data(flags: DataFlags) -> None:
    corpus = text.corpus()
    training = Training(make_step(SIZES[flags.size](), "dp", make_mesh("1"), 16, 128), steps=5)
    long = iter(text.train_batches(corpus, flags.seq_len, flags.batch_size, seed=0))
    short = iter(text.train_batches(corpus, 128, 16, seed=0))
    windows, default, step = (
        f"pipeline, windows of {flags.seq_len}",
        "pipeline, the default run's windows of 128",
        "the default run's step",
    )
    tokens = {
        windows: flags.batches * flags.batch_size * flags.seq_len,
        default: flags.batches * 16 * 128,
        step: 5 * 16 * 128,
    }
    what = {
        windows: lambda: [next(long) for _ in range(flags.batches)],
        default: lambda: [next(short) for _ in range(flags.batches)],
        step: training,
    }
    times = interleaved(what, flags.rounds)
    rates = {key: count / statistics.median(times[key].wall) for key, count in tokens.items()}
    table = Table("what", "tokens/s", "of what the step consumes")
    for key, rate in rates.items():
        table.row(key, f"{rate:,.0f}", f"{rate / rates[step]:.0f}×")
    say("", f"Median of {flags.rounds} in turn, one Grain thread, text of the standard library.",
        machine())  # fmt: skip


# ---- checkpoints -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CheckpointFlags:
    megabytes: int = flag(500, "of the state that is saved", at_least=1)
    steps: int = flag(40, "of training meanwhile, at least until it is saved", at_least=1)
    rounds: int = flag(3, "saves, and restores", at_least=1)
    folder: str = flag("", "on the disk in question; empty: a temporary one")


def checkpoints(flags: CheckpointFlags) -> None:
    mesh = make_mesh("1")
    training = Training(make_step(SIZES["small"](), "dp", mesh, 16, 128))
    config = _of_bytes(flags.megabytes * 10**6)
    big = make_step(config, "dp", mesh, 1, 8)
    state = jax.tree.map(_noise, big.new_state())
    folder = pathlib.Path(tempfile.mkdtemp(dir=flags.folder or None))
    stolen, blocked, saved, read, unpacked, restored = [], [], [], [], [], []
    try:
        work = Workdir(Run(workdir=str(folder / "run"), steps=100), "transformer")
        work.check_data({"seed": 0})
        work.begin(1, checkpoint.metadata("transformer", config, big.layout, {}))
        training()
        for k in range(1, flags.rounds + 1):
            quiet = _seconds(lambda: [training() for _ in range(flags.steps)]) / flags.steps
            start, steps = time.perf_counter(), 0
            work.save(k, state)
            at, done = time.perf_counter() - start, 0
            blocked.append(at)
            while steps < flags.steps or work._saving.is_alive():
                training()
                steps += 1
                if work._saving.is_alive():
                    done, at = steps, time.perf_counter() - start
            work.wait()
            saved.append(at)
            stolen.append(max(0.0, at - done * quiet))
            here = work.last_good()
            held = sum(path.stat().st_size for path in _files(here))
            _forget(here)
            read.append(_seconds(lambda here=here: _read(here)))
            _forget(here)
            abstract = {"params": big.abstract["params"], "opt_state": big.abstract["opt_state"]}
            source = checkpoint.find(here)
            restored.append(_seconds(lambda s=source, a=abstract: jax.block_until_ready(
                checkpoint.restore_tree(s, a))))  # fmt: skip
            _forget(here)
            unpacked.append(_seconds(lambda here=here: _unpack(here / "state")))
        work.close()
    finally:
        shutil.rmtree(folder)
    size = report.size(report.bytes_per_device(big.abstract))
    median = statistics.median
    table = Table("what", "seconds", "ratio")
    table.row("the loop waits for a save to begin", f"{median(blocked):.2f}", "")
    table.row("a save is done after", f"{median(saved):.2f}", "")
    table.row("training time that a save takes", f"{median(stolen):.2f}",
              f"{median(stolen) / 60:.1%} of a minute")  # fmt: skip
    table.row("reading the files", f"{median(read):.2f}", "")
    for what, seconds in (("restoring", restored), ("TensorStore alone, into memory", unpacked)):
        table.row(
            what, f"{median(seconds):.2f}", f"{median(seconds) / median(read):.2f}× of reading"
        )
    say("", f"A state of {size}, {report.size(held)} in files; median of {flags.rounds}; the files' pages are dropped from the "
        "system's cache before each read.", machine())  # fmt: skip


def _noise(x: jax.Array) -> jax.Array:
    """Moments are zeros before the first step, and zeros take no room in a compressed file."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    values = np.random.default_rng(0).standard_normal(x.shape, np.float32)
    return jax.device_put(values, x.sharding)


def _of_bytes(size: int):
    """A Transformer whose training state has about so many bytes."""
    layers = max(1, round(size / 12 / 3_408_896))  # 3 × 4 bytes a parameter
    return dataclasses.replace(
        SIZES["small"](), embed=512, num_layers=layers, mlp=1_536, head_dim=64
    )


def _seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _read(folder: pathlib.Path) -> None:
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.read(2**22):
                pass


def _unpack(state: pathlib.Path) -> None:
    """All arrays into memory by the library that Orbax reads with, and no more."""
    stored = {"driver": "ocdbt", "base": f"file://{state}/"}
    keys = tensorstore.KvStore.open(stored).result().list().result()
    names = [key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")]
    specs = [{"driver": "zarr", "kvstore": stored | {"path": f"{name}/"}} for name in names]
    arrays = [opened.result() for opened in [tensorstore.open(spec, open=True) for spec in specs]]
    for reading in [array.read() for array in arrays]:
        reading.result()


def _forget(folder: pathlib.Path) -> None:
    """Asks the system to drop these files' pages, so that the disk is read."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- start -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StartFlags:
    recipe: str = flag("transformer", "whose start", choices=["transformer", "mlp", "dot_relu_dot"])
    rounds: int = flag(3, "warm starts", at_least=1)
    extra: str = flag("", "further flags of the recipe, with blanks between them")


def start(flags: StartFlags) -> None:
    """A fresh process each time; cold: nothing is in the cache, neither programs nor data."""
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        few = ["--steps=1", f"--workdir={here / 'run'}", *flags.extra.split()]
        if flags.recipe == "transformer":
            few.append("--sample_bytes=0")
        cold = _first_step(here, flags.recipe, few)
        warm = [_first_step(here, flags.recipe, few) for _ in range(flags.rounds)]
        mistake = min(
            _seconds(lambda: _python(here, flags.recipe, ["--mesh=none"])) for _ in range(3)
        )
        imports = min(_seconds(lambda: _python(here, flags.recipe, ["--help"])) for _ in range(3))
    table = Table("from the command to", "seconds")
    table.row("the first step, cold cache", f"{cold:.1f}")
    table.row("the first step, warm cache", f"{min(warm):.1f}")
    table.row("--help: imports and no more", f"{imports:.1f}")
    table.row("the message for a mistaken flag", f"{mistake:.1f}")
    say(
        "",
        f"python -m recipes.{flags.recipe}; best of {flags.rounds}, but one cold start.",
        machine(),
    )


def _python(here: pathlib.Path, recipe: str, arguments: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"ZOO_CACHE": str(here / "cache")}
    command = [sys.executable, "-m", f"recipes.{recipe}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def _first_step(here: pathlib.Path, recipe: str, arguments: list[str]) -> float:
    """Seconds until the first step was done, as the run itself says at its end."""
    shutil.rmtree(here / "run", ignore_errors=True)
    done = _python(here, recipe, arguments)
    found = re.search(r"([\d.]+) s of it before the first step", done.stdout)
    if not found:
        raise UserError(f"recipes.{recipe} {' '.join(arguments)} failed: {done.stderr[-300:]}")
    return float(found[1])
