"""Everything around the step: overhead of the loop, data, checkpoints, startup."""

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
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from data import batches, packing, text, tokenizer
from recipes.common import checkpoint
from recipes.common.checkpoint.run_folder import open_run
from recipes.common.checkpoint.saver import Saver
from recipes.common.entries import ENTRIES
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import Run, flag
from recipes.common.runtime.mesh import make_mesh
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.layout import shardings
from recipes.common.train.feed import device_batches
from recipes.common.train.loop import take_steps
from recipes.common.train.metrics import Log
from recipes.instruments.bench.common import (
    ONE_DEVICE,
    Table,
    Training,
    interleaved,
    machine,
    make_step,
    one_of,
)  # fmt: skip
from zoo.llama_relatives import Config
from zoo.sizes import TRANSFORMER as SIZES

# ---- the loop ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostFlags:
    sizes: str = flag("tiny,small", "Sizes of the Transformer, comma-separated.", group="model")
    steps: int = flag(10, "Steps in a timing.", at_least=1)
    rounds: int = flag(15, "Interleaved timings of each.", at_least=1)


class NoSaver:
    """A Saver that saves nothing."""

    def save(self, step, state):
        pass

    def wait(self):
        pass

    def last_good(self):
        return None


def host(flags: HostFlags) -> None:
    """Times Python's part of the loop, with a step and data that take no time, and the overhead."""
    sizes, mesh = one_of("sizes", flags.sizes, SIZES), make_mesh("1")
    corpus = text.load(seq_len=128)
    table = Table("size", "Python alone, ms per step", "bare step, ms", "in the loop, ms", "overhead",
                  "overhead, by CPU time")  # fmt: skip
    for size in sizes:
        step = make_step(SIZES[size](), ONE_DEVICE, mesh, 16, 128)
        training = Training(step)

        def nothing(state, batch):
            zero = jnp.zeros(())
            return state | {"step": state["step"] + 1}, {"loss": zero, "grad_norm": zero}

        pinned = dict(donate_argnums=0, out_shardings=(shardings(step.abstract), None))
        rows = step.layout.abstract_batch(step.example)
        compiled = step.layout.compile(nothing, step.abstract, rows, **pinned)
        idle = Training(step, compiled=compiled)
        same = itertools.repeat({name: np.zeros(x.shape, x.dtype) for name, x in rows.items()})
        loops = [_loop(idle, same, 20 * flags.steps) for _ in range(flags.rounds)]
        python = min(loops) / (20 * flags.steps)

        def bare(training=training):
            before = None
            for _ in range(flags.steps):
                training.state, metrics = training.compiled(training.state, training.batch)
                jax.device_get(before)  # one step late, as in the loop
                before = metrics
            jax.block_until_ready(before)

        feed = (
            {name: batch[name] for name in rows}  # no segment ids
            for batch in batches.train_batches(corpus, 16, seed=0)
        )
        what = {"bare": bare, "loop": functools.partial(_loop, training, feed, flags.steps)}
        bare_, loop_ = interleaved(what, flags.rounds).values()
        one, both = (statistics.median(times.wall) / flags.steps for times in (bare_, loop_))
        overhead = statistics.median(loop_.cpu) / statistics.median(bare_.cpu) - 1
        table.row(size, f"{python * 1e3:.2f}", f"{one * 1e3:.1f}", f"{both * 1e3:.1f}",
                  f"{both / one - 1:.1%}", f"{overhead:.1%}")  # fmt: skip
    print0("", f"16 × 128 tokens per step, one device; medians of {flags.rounds} interleaved rounds. "
           "The loop feeds batches, dispatches steps, and writes the previous step's metrics to "
           "metrics.jsonl. Python alone: CPU time of its thread with a step and data that take no "
           "time.", machine())  # fmt: skip


def _loop(training: Training, rows, steps: int) -> float:
    """Runs the recipes' loop without checkpoints. Returns this thread's CPU seconds."""
    step, start = training.step, int(training.state["step"])
    run = Run(steps=start + steps, batch_size=16)
    # Printing progress is part of the loop's work, but must not disturb the table.
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        log = Log(pathlib.Path(folder) / "metrics.jsonl", start, run, "tokens", 16 * 128)
        before = time.thread_time()
        training.state = take_steps(
            training.compiled, training.state, device_batches(rows, step.layout), run, log,
            NoSaver(),
        )  # fmt: skip
        used = time.thread_time() - before
        log.close()
    jax.block_until_ready(training.state)
    return used


# ---- data ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DataFlags:
    dataset: str = flag("stdlib", "Text, as in the Transformer's recipe.", group="data")
    tokenizer: str = flag("bytes", "Tokenizer, as in the recipe.", group="data")
    size: str = flag(
        "small", "Size of the Transformer to compare with, at 16 × 128 tokens per step.",
        group="model", choices=SIZES,
    )  # fmt: skip
    seq_len: int = flag(1_024, "Tokens in a row.", group="data", at_least=1)
    batch_size: int = flag(32, "Rows in a batch.", group="data", at_least=1)
    batches: int = flag(300, "Batches in a timing.", at_least=1)
    rounds: int = flag(5, "Interleaved timings of each.", at_least=1)
    cores: int = flag(0, "Cores that tokenizing assumes; 0: those of this machine.",
                      at_least=0)  # fmt: skip


# Tokenizes in a new process with an empty cache, and prints tokens, bytes of text, seconds, and the
# growth in bytes of its memory and its child processes'; shared memory counts once.
TOKENIZE = """
import os, re, sys, threading, time
from data import corpus, sources, tokenizer

def resident(pid):
    try:
        with open(f"/proc/{pid}/smaps_rollup") as about:
            own = int(re.search(r"Pss: +(\\d+)", about.read())[1]) * 1024
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return own + sum(map(resident, children.read().split()))
    except (OSError, TypeError):  # the process has ended
        return 0

def watch():
    while True:
        seen.append(resident(os.getpid()))
        time.sleep(0.05)

if cores := int(sys.argv[3]):
    corpus.cores = lambda: cores
source, tokens = sources.find(sys.argv[1])[0], tokenizer.find(sys.argv[2])
tokens.encode(["a"]), __import__("datasets")
seen = [resident(os.getpid())]
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
made = corpus.prepare(source, tokens)
seconds = time.perf_counter() - start
print(sum(len(split.tokens) for split in made[:2]), made.train.bytes + made.held_out.bytes, seconds,
      max(seen) - seen[0])
"""
STEP = "the default run's step"


def data(flags: DataFlags) -> None:
    step = make_step(SIZES[flags.size](), ONE_DEVICE, make_mesh("1"), 16, 128)
    training = Training(step, steps=5)
    tokens = tokenizer.find(flags.tokenizer)
    loaded = {
        pack: text.load(flags.dataset, "text", flags.seq_len, tokens, pack)
        for pack in ("true", "false")
    }
    packed, long, short = (
        iter(batches.train_batches(examples, rows, seed=0))
        for examples, rows in (
            (loaded["true"], flags.batch_size),
            (loaded["false"], flags.batch_size),
            (text.load(), 16),
        )
    )
    what = {  # name → (tokens, function)
        f"pipeline, rows of {flags.seq_len} packed with documents": _batches(flags, packed),
        f"pipeline, windows of {flags.seq_len}": _batches(flags, long),
        "pipeline, the default run's windows of 128": (
            flags.batches * 16 * 128, lambda: [next(short) for _ in range(flags.batches)]
        ),
        STEP: (5 * 16 * 128, training),
    }  # fmt: skip
    times = interleaved({name: function for name, (_, function) in what.items()}, flags.rounds)
    rates = {k: count / statistics.median(times[k].wall) for k, (count, _) in what.items()}
    table = Table("what", "tokens/s", "of what the step consumes")
    for key, rate in rates.items():
        table.row(key, f"{rate:,.0f}", f"{rate / rates[STEP]:.0f}×")
    print0("", f"Medians of {flags.rounds} interleaved rounds, one Grain thread.", "")
    _tokenizing(flags, packing.padding(cast(packing.Packed, loaded["true"].train)))
    print0("", machine())


def _batches(flags: DataFlags, feed):
    count = flags.batches * flags.batch_size * flags.seq_len
    return count, lambda: [next(feed) for _ in range(flags.batches)]


def _tokenizing(flags: DataFlags, padding: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-c", TOKENIZE, flags.dataset, flags.tokenizer,
                     str(flags.cores)]  # fmt: skip
        environment = os.environ | {"ZOO_CACHE": folder}
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"--dataset={flags.dataset} could not be tokenized: {done.stderr[-300:]}")
    tokens, size, seconds, memory = map(float, done.stdout.split())
    table = Table("tokenizing", "tokens/s", "MB of text/s", "memory", "padding of packed rows")
    table.row(f"{size / 1e6:,.0f} MB", f"{tokens / seconds:,.0f}", f"{size / seconds / 1e6:.1f}",
              f"{memory / 1e6:,.0f} MB", f"{padding:.3%}")  # fmt: skip
    print0("", f"Tokenizer {flags.tokenizer}, empty cache. Memory: growth of the process and its child "
           "processes.")  # fmt: skip


# ---- checkpoints ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CheckpointFlags:
    megabytes: int = flag(500, "Size of the saved state, in MB.", at_least=1)
    steps: int = flag(40, "Fewest training steps during a save.", at_least=1)
    rounds: int = flag(3, "Saves and restores.", at_least=1)
    folder: str = flag("", "Folder on the disk to measure; empty: a temporary one.")


def checkpoints(flags: CheckpointFlags) -> None:
    mesh = make_mesh("1")
    training = Training(make_step(SIZES["small"](), ONE_DEVICE, mesh, 16, 128))
    big = make_step(_config_of_bytes(flags.megabytes * 10**6), ONE_DEVICE, mesh, 1, 8)
    state = jax.tree.map(_noise, big.new_state())
    folder = pathlib.Path(tempfile.mkdtemp(dir=flags.folder or None))
    lost, blocked, saved, read, unpacked, restored = [], [], [], [], [], []
    held = 0
    try:
        run = open_run("transformer", Run(workdir=str(folder / "run"), steps=100), flags)
        metadata = checkpoint.metadata(run.entry, big.layout, run.flags)
        saver = Saver(run, keep=1, metadata=metadata, data={"seed": 0})
        training()
        for k in range(1, flags.rounds + 1):
            quiet = _seconds(lambda: [training() for _ in range(flags.steps)]) / flags.steps
            start, steps = time.perf_counter(), 0
            saver.save(k, state)
            at, done = time.perf_counter() - start, 0
            blocked.append(at)
            while steps < flags.steps or saver.in_flight():
                training()
                steps += 1
                if saver.in_flight():
                    done, at = steps, time.perf_counter() - start
            saver.wait()
            saved.append(at)
            lost.append(max(0.0, at - done * quiet))
            here = saver.last_good()
            assert here, "the save above is complete"
            held = sum(path.stat().st_size for path in _files(here))
            source = checkpoint.open_checkpoint(here)
            abstract = {kind: big.abstract[kind] for kind in ("params", "opt_state")}
            for seconds, function in (
                (read, functools.partial(_read, here)),
                (restored, lambda s=source, a=abstract: jax.block_until_ready(s.read(a))),
                (unpacked, functools.partial(_unpack, here / "state")),
            ):
                _forget(here)
                seconds.append(_seconds(function))
        saver.close()
        run.close()
    finally:
        shutil.rmtree(folder)
    size = report.size(report.bytes_per_device(big.abstract))
    median = statistics.median
    table = Table("what", "seconds", "ratio")
    table.row("the loop waits for a save to start", f"{median(blocked):.2f}", "")
    table.row("a save takes, in the background", f"{median(saved):.2f}", "")
    table.row("training time lost to a save", f"{median(lost):.2f}",
              f"{median(lost) / 60:.1%} of a minute")  # fmt: skip
    table.row("reading the files", f"{median(read):.2f}", "")
    for what, seconds in (
        ("restoring", restored),
        ("reading into memory by TensorStore", unpacked),
    ):
        ratio = f"{median(seconds) / median(read):.2f}× the time to read the files"
        table.row(what, f"{median(seconds):.2f}", ratio)
    print0("", f"A state of {size}, {report.size(held)} in files; medians of {flags.rounds}. The files "
           "are dropped from the system's page cache before each read.", machine())  # fmt: skip


def _noise(x: jax.Array) -> jax.Array:
    """Random numbers like `x`: initial moments are zeros, which are easier to save."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    values = np.random.default_rng(0).standard_normal(x.shape, np.float32)
    return jax.device_put(values, x.sharding)


def _config_of_bytes(size: int) -> Config:
    """A Transformer whose training state has about this many bytes."""
    layers = max(1, round(size / 12 / 3_408_896))  # 3 × 4 bytes per parameter
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
    """Reads all arrays into memory with TensorStore alone, the library that Orbax uses."""
    stored = {"driver": "ocdbt", "base": f"file://{state}/"}
    keys = tensorstore.KvStore.open(stored).result().list().result()
    names = [key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")]
    specs = [{"driver": "zarr", "kvstore": stored | {"path": f"{name}/"}} for name in names]
    arrays = [opened.result() for opened in [tensorstore.open(spec, open=True) for spec in specs]]
    for reading in [array.read() for array in arrays]:
        reading.result()


def _forget(folder: pathlib.Path) -> None:
    """Asks the system to drop files from its page cache, so that the next read is from disk."""
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- startup -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StartFlags:
    recipe: str = flag("transformer", "Recipe to start.", choices=ENTRIES)
    rounds: int = flag(3, "Warm starts.", at_least=1)
    extra: str = flag("", "Further flags of the recipe, separated by spaces.")


def start(flags: StartFlags) -> None:
    """Times new processes. Cold: the cache has neither compiled programs nor data."""
    with tempfile.TemporaryDirectory() as folder:
        here = pathlib.Path(folder)
        few = ["--steps=1", f"--workdir={here / 'run'}", *flags.extra.split()]
        if flags.recipe == "transformer":
            few.append("--sample_bytes=0")
        cold = _first_step(here, flags.recipe, few)
        warm = [_first_step(here, flags.recipe, few) for _ in range(flags.rounds)]
        mistake, imports = (
            min(_seconds(lambda word=word: _python(here, flags.recipe, [word])) for _ in range(3))
            for word in ("--mesh=none", "--help")
        )
    table = Table("from the command to", "seconds")
    table.row("the first step, cold cache", f"{cold:.1f}")
    table.row("the first step, warm cache", f"{min(warm):.1f}")
    table.row("the end of --help, imports only", f"{imports:.1f}")
    table.row("the error message for a bad flag", f"{mistake:.1f}")
    print0("", f"python -m recipes.{flags.recipe}; best of {flags.rounds} warm starts, and one cold "
           "start.", machine())  # fmt: skip


def _python(here: pathlib.Path, recipe: str, arguments: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"ZOO_CACHE": str(here / "cache")}
    command = [sys.executable, "-m", f"recipes.{recipe}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def _first_step(here: pathlib.Path, recipe: str, arguments: list[str]) -> float:
    """Seconds until the first step was done, which a run prints at its end."""
    shutil.rmtree(here / "run", ignore_errors=True)
    done = _python(here, recipe, arguments)
    match = re.search(r"([\d.]+) s to the first step", done.stdout)
    if not match:
        raise UserError(f"recipes.{recipe} {' '.join(arguments)} failed: {done.stderr[-300:]}")
    return float(match[1])
