"""Training speed on one GPU, next to PyTorch: kernel checks, guesses at the best settings, a sweep.

This process never touches the GPU: row.py measures each row in its own process. The most important
rows come first, because time may run out.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from recipes.common.runtime.errors import Stopped, UserError
from recipes.common.runtime.flags import flag, split
from recipes.common.runtime.terminal import print0
from recipes.instruments.bench import gpu_trace, kernels, pytorch
from recipes.instruments.bench.common import (
    CONVENTION,
    Table,
    machine,
    one_of,
    read_integers,
    version,
)
from recipes.instruments.bench.row import (
    MEASUREMENTS,
    OUT_OF_MEMORY,
    TIMED,
    TOO_SLOW,
    XLA_FLAGS,
    Result,
    Row,
    measure,
    run,
)
from zoo.core.stack import REMAT_POLICIES
from zoo.kernels.choice import KERNELS
from zoo.sizes import TRANSFORMER as SIZES

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
Guesses = tuple[list[dict[str, Any]], list[int]]  # settings of our step, batches of PyTorch's

# Case → settings of our step and batch sizes for PyTorch, the best guess for an H200 (141 GB)
# first. All layers are unrolled, because a scan stacks saved activations, which costs bandwidth and
# memory: compiled for an H200, 124m with 64 sequences peaks at 25 GB, scanned at 51; 1b with 16
# sequences at 63 GB, scanned at 117, and with 32 at 109.
GUESSES: dict[str, Guesses] = {
    "124m:1024": (
        [
            dict(batch=32, remat="none", unroll=12),
            dict(batch=64, remat="none", unroll=12),
            dict(batch=64, remat="dots"),
        ],
        [32, 64, 16],
    ),
    "1b:2048": (
        [
            dict(batch=16, remat="none", unroll=16),
            dict(batch=16, remat="dots"),
            dict(batch=32, remat="dots"),
            dict(batch=32, remat="none", unroll=16),  # not on an H100, which has 80 GB
        ],
        [8, 16, 4],
    ),
}
OTHER_CASES: Guesses = ([dict(batch=8, remat="dots"), dict(batch=8, remat="full")], [8, 4])
TOY_CASE: Guesses = ([dict(batch=2)], [2])


@dataclasses.dataclass(frozen=True)
class GpuFlags:
    cases: str = flag(
        "124m:1024,1b:2048", "Pairs of size:tokens of context, comma-separated.", group="model"
    )
    kernels: str = flag(
        "cudnn,triton,flash,xla",
        "Attention kernels to check and to try, comma-separated.",
        group="model",
    )
    matmuls: str = flag(
        "", "Formats of matmuls to try with the best settings so far, comma-separated: int8, fp8.",
        group="model",
    )  # fmt: skip
    offload: bool = flag(
        False,
        "Also try the best settings with the optimizer's state in the host's memory.",
        "model",
    )
    remats: str = flag("none,dots,full", "Remat policies to try, comma-separated.", group="model")
    batches: str = flag(
        "8,16,32,64,128",
        "Batch sizes to try with the best settings so far, comma-separated.",
        group="data",
    )
    minutes: float = flag(9.0, "Minutes after which no row is started or waited for.", at_least=0.0)
    row_minutes: float = flag(3.0, "Most minutes to wait for one row.", at_least=0.0)
    steps: int = flag(10, "Steps in a timing.", at_least=1)
    rounds: int = flag(3, "Timings of each row; the median counts.", at_least=1)
    xla: str = flag(
        ",".join(XLA_FLAGS), "Sets of XLA flags to try, comma-separated.", group="model"
    )
    torch: bool = flag(True, "Measure PyTorch too, if it is installed.")
    out: str = flag(
        "", "File for the rows as JSON lines; rows in it are not measured again.",
    )  # fmt: skip
    row: str = flag("", "Measure one row of such a file, as JSON, in this process.")
    toy: bool = flag(False, "Size tiny with two sequences, on any device, to try the command.")


# Defaults with --toy.
TOY: dict[str, Any] = dict(
    cases="tiny:64", kernels="xla,flash", batches="2", remats="none", xla="default,cuBLAS only",
    steps=1, rounds=1,
)  # fmt: skip


def gpu(flags: GpuFlags) -> None:
    if flags.toy:
        default = GpuFlags()
        changed = {name for name in TOY if getattr(flags, name) != getattr(default, name)}
        flags = dataclasses.replace(flags, **{k: v for k, v in TOY.items() if k not in changed})
    if flags.row:
        try:
            row = to_row(json.loads(flags.row))
        except (ValueError, TypeError, AttributeError):
            raise UserError(f"--row={flags.row[:80]} is not a line of an --out file") from None
        return print0(json.dumps(measure(row, flags.steps, flags.rounds, flags.toy)))
    sweep = Sweep(flags)  # raises before anything starts
    if not flags.toy and not any(map(version, PLUGINS)):
        raise UserError(
            "JAX has no CUDA plug-in here; install it with pip install 'jax[cuda13]', or use --toy to "
            "try the command without a GPU"
        )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    options = [
        f"--steps={flags.steps}",
        f"--rounds={flags.rounds}",
        f"--{'' if flags.toy else 'no'}toy",
    ]
    if flags.torch and not sweep.torch:
        print0("PyTorch is not installed; pip install torch adds its rows.")
    until, unmeasured = time.monotonic() + 60 * flags.minutes, None
    table = Table("case", "attention", "batch", "matmul", "offload", "settings", "ms per step", "tokens/s",
                  "MFU (causal)", "MFU (full)", "GB", "compile s", "ms by kind")  # fmt: skip
    for row, result in sweep.done.items():
        table.row(*cells(row, result))
    for row in sweep.rows():
        left = until - time.monotonic()
        result = run(row, min(left, 60 * flags.row_minutes), options) if left > 0 else {}
        if not result or ("failed" in result and time.monotonic() >= until):
            unmeasured = row
            break
        sweep.record(row, result)
        table.row(*cells(row, result))
    _end(flags, sweep, unmeasured)


def _end(flags: GpuFlags, sweep: "Sweep", unmeasured: Row | None) -> None:
    devices = {result["device"] for result in sweep.done.values() if "device" in result}
    _print_times(sweep)
    packages = (*PLUGINS, "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
    print0("", "Kernels: the largest error of values and gradients against float32 attention, and the time "
           f"of a forward and a backward pass of {TIMED}. Medians of {flags.rounds} timings of {flags.steps} "
           f"steps with one sync each. {CONVENTION}")  # fmt: skip
    if unmeasured:
        more = (
            "the same command continues" if flags.out else "with --out=FILE it could be continued"
        )
        row = " ".join(cell for cell in cells(unmeasured, {})[:6] if cell != "-")
        print0(f"Time is up after {flags.minutes:g} minutes, before {row}; {more}.")
    print0(f"{machine(', '.join(sorted(devices)) or 'cpu', *packages)} {driver()}")
    wrong = [
        row.attention for row, r in sweep.done.items() if row.what == "check" and "failed" in r
    ]
    if wrong:
        raise Stopped(f"{', '.join(wrong)}: the kernel check failed; see its row", 1)


def _print_times(sweep: "Sweep") -> None:
    """Where the time of the fastest row of each case goes."""
    fastest = [
        sweep.best("step", case, segments) for case in sweep.cases for segments in (True, False)
    ]
    traced = [row for row in fastest if row and sweep.done[row].get("kinds")]
    if not traced:
        return
    print0("")
    table = Table("ms of a step", *(" ".join(cells(row, sweep.done[row])[:3]) for row in traced))
    for kind in gpu_trace.KINDS:
        times = [sweep.done[row]["kinds"].get(kind, 0) for row in traced]
        table.row(kind, *(f"{ms:.1f}" for ms in times))


class Sweep:
    """The rows to measure, and the results so far. Raises UserError for bad flags."""

    def __init__(self, flags: GpuFlags):
        self.cases = split(flags.cases)
        for case in self.cases:
            size, _, length = case.partition(":")
            if size not in SIZES or not length.isdecimal() or not int(length):
                raise UserError(f"--cases has {case!r}; write size:tokens, for example 124m:1024")
        self.kernels = one_of(
            "kernels", flags.kernels, [name for name in KERNELS if name != "auto"]
        )
        # Changes to the best settings so far, the most promising first.
        self.tried: dict[str, list] = {
            "attention": [] if flags.toy else self.kernels,
            "xla": one_of("xla", flags.xla, XLA_FLAGS),
            "batch": read_integers("batches", flags.batches),
            "remat": one_of("remats", flags.remats, REMAT_POLICIES),
            "matmul": one_of("matmuls", flags.matmuls, ["int8", "fp8"]) if flags.matmuls else [],
            "offload": ["optimizer"] if flags.offload else [],
            "unroll": [1],
            "loss_chunk": [256] if flags.toy else [128, 512, 1_024],
        }
        self.torch = flags.torch and bool(version("torch"))
        self.toy = flags.toy
        self.out = pathlib.Path(flags.out) if flags.out else None
        self.done: dict[Row, Result] = self._read(self.out) if self.out else {}

    def rows(self) -> Iterator[Row]:
        """Yields the next row, which depends on `done`: record each result before the next row."""
        for row in itertools.chain(self._checks(), self._guesses(), self._around()):
            if row not in self.done and not self._fails(row):
                yield row

    def _checks(self) -> Iterator[Row]:
        for kernel in self.kernels:
            yield Row("check", attention=kernel)

    def _guesses(self) -> Iterator[Row]:
        """Each case, packed and plain, ours and PyTorch's; then generation; then other guesses."""
        later = []
        for case in self.cases:
            ours, batches = TOY_CASE if self.toy else GUESSES.get(case, OTHER_CASES)
            first, *others = (Row("step", case, segments=True, **guess) for guess in ours)
            torch = [Row("torch", case, batch) for batch in batches if self.torch]
            yield first
            yield from (dataclasses.replace(row, segments=True) for row in torch[:1])
            yield dataclasses.replace(first, segments=False)
            yield from torch[:1]
            later.append([*others, *torch[1:]])
        for batch, case in itertools.product((2,) if self.toy else (32, 1), self.cases):
            yield Row("generate", case, batch)
        for turn in itertools.zip_longest(*later):
            yield from (row for row in turn if row)

    def _around(self) -> Iterator[Row]:
        """The best rows of each case with one setting changed."""
        for name, segments in itertools.product(self.tried, (True, False)):
            for case in self.cases:
                best = self.best("step", case, segments)
                if best is None:
                    continue
                for value in self.tried[name]:
                    if name != "attention" or self._other_kernel(best, value):
                        yield dataclasses.replace(best, **{name: value})
        for case in self.cases:
            best = self.best("torch", case)
            if best and not self.toy:
                for attention in pytorch.ATTENTION:
                    yield dataclasses.replace(best, attention=attention)

    def best(self, what: str, case: str, segments: bool = False) -> Row | None:
        """The fastest row so far; None if there is none."""
        speeds = {row: result.get("tokens_per_s", 0) for row, result in self.done.items()
                 if (row.what, row.case, row.segments) == (what, case, segments)}  # fmt: skip
        fastest = max(speeds, key=lambda row: speeds[row], default=None)
        return fastest if fastest and speeds[fastest] else None

    def _other_kernel(self, best: Row, kernel: str) -> bool:
        shape = kernels.Shape(best.batch, best.length(), 1, 1, 1, best.segments)
        return kernels.takes(kernel, shape) and self.done[best]["kernel"] != kernel

    def _fails(self, row: Row) -> bool:
        """Whether the same row but for the batch failed: compiled too slowly, or for fewer sequences
        ran out of memory.
        """
        return any(
            (failed == TOO_SLOW or (failed == OUT_OF_MEMORY and other.batch <= row.batch))
            and dataclasses.replace(other, batch=row.batch) == row
            for other, result in self.done.items()
            if (failed := result.get("failed"))
        )

    def record(self, row: Row, result: Result) -> None:
        self.done[row] = result
        if self.out:
            line = {**dataclasses.asdict(row), **result, "time": time.strftime("%F %T")}
            with self.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _read(self, out: pathlib.Path) -> dict[Row, Result]:
        """Reads earlier results; the first row creates the file, so mistakes leave none behind."""
        place = out if out.exists() else out.absolute().parent
        if out.is_dir() or not place.exists() or not os.access(place, os.W_OK):
            raise UserError(f"--out={out} can't be written; use a file in a writable folder")
        try:
            text = out.read_text() if out.exists() else ""
            return {to_row(line): line for line in map(json.loads, text.splitlines())}
        except (ValueError, TypeError, AttributeError):
            raise UserError(f"--out={out} has lines that are not rows; use a new file") from None


def to_row(line: dict[str, Any]) -> Row:
    """Reads the Row of a line. Raises ValueError, TypeError or AttributeError if it has none."""
    names = {field.name for field in dataclasses.fields(Row)}
    row = Row(**{name: value for name, value in line.items() if name in names})
    if row.what not in MEASUREMENTS:
        raise ValueError(row.what)
    if row.what != "check" and (row.size() not in SIZES or row.length() < 1):
        raise ValueError(row.case)
    return row


def cells(row: Row, result: Result) -> list[str]:
    """The cells of a row's line in the table."""

    def figure(name: str, form: str) -> str:
        return format(result[name], form) if name in result else "-"

    settings = f"remat {row.remat}, unroll {row.unroll}, chunks of {row.loss_chunk}"
    if row.what == "torch":
        settings = "PyTorch"
    elif row.what == "check":
        settings = f"within {result['error']:.1e}" if "error" in result else "check"
    elif row.what == "generate":
        settings = "writes tokens"
        if "written" in result:
            settings = f"writes {result['written']} tokens, after {result['ms, prompts']:.1f} ms for prompts of {result['prompt']}"
    elif row.xla != "default":
        settings += f", {row.xla}"
    attention = f"{result.get('kernel', row.attention)}{', segments' * row.segments}"
    ms = result.get("failed") or figure("ms", ".2f" if row.what == "check" else ".1f")
    if "ms, segments" in result:
        ms = f"{ms}; with segments {result['ms, segments']:.2f}"
    kinds = result.get("kinds", {}).items()
    by_kind = ", ".join(f"{kind} {spent:.1f}" for kind, spent in kinds if spent >= 0.05)
    return [row.case or "kernel", attention, str(row.batch or "-"), row.matmul or "-",
            row.offload or "-", settings, ms, figure("tokens_per_s", ",.0f"),
            figure("mfu_causal", ".1%"), figure("mfu_full", ".1%"), figure("gb", ".1f"),
            figure("compile_s", ".0f"), by_kind or "-"]  # fmt: skip


def driver() -> str:
    """NVIDIA's driver and GPU, without touching the GPU."""
    command = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total",
        "--format=csv,noheader",
    ]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        output = ""
    return f"nvidia-smi: {output.splitlines()[0]}." if output else "No nvidia-smi."


def _stop(number: int, _frame) -> None:
    raise Stopped(f"stopped by {signal.Signals(number).name}; the rows above are complete", 130)
