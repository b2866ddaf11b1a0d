"""Measures one row of `python -m recipes.bench gpu` in its own process.

The row then has the whole GPU memory and its own XLA flags, and a crash ends only this row.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from recipes.common.generation.generator import Generator, Sampling
from recipes.common.report import flops
from recipes.common.report.kernel import attention_kernel
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import arrange
from recipes.common.sharding import shardings
from recipes.common.sharding.abstract import variables_of
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.bench import gpu_trace, kernels, pytorch
from recipes.instruments.bench.common import ONE_DEVICE, Training, make_step, random_rows
from zoo.llama_relatives import Transformer
from zoo.sizes import TRANSFORMER as SIZES

XLA_FLAGS = {
    "default": "",
    "cuBLAS only": "--xla_gpu_enable_triton_gemm=false",
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "slices fused": "--xla_gpu_enable_dynamic_slice_fusion=true",
    "cuBLASLt": "--xla_gpu_enable_cublaslt=true",
}
MEMORY = "0.92"  # share of the GPU's memory for JAX; cuBLAS, cuDNN and the driver use the rest
OUT_OF_MEMORY = "out of memory"
MOST_COMPILING = 60.0  # seconds that one program may take
TOO_SLOW = f"compiles for more than {MOST_COMPILING:.0f} s"
TOLERANCE = 1e-2  # for a bfloat16 kernel; correct ones have errors of 2e-3 to 4e-3
TIMED = kernels.Shape(8, 2_048, 32, 8, 64)  # 1b's heads
TRACED = 2  # steps in a trace
PROMPT, WRITTEN = 128, 128  # tokens of a row that is generated
WARM_UP = 3  # untimed steps, for compilers, autotuning and allocators


@dataclasses.dataclass(frozen=True)
class Row:
    """A measurement: a "check" of a kernel, a "step" in JAX, a step in "torch", or to "generate"."""

    what: str
    case: str = ""  # size:tokens of context
    batch: int = 0  # sequences
    attention: str = "auto"  # Config.attention, or an item of pytorch.ATTENTION
    segments: bool = False
    remat: str = "none"
    unroll: int = 1
    loss_chunk: int = 256
    xla: str = "default"  # a key of XLA_FLAGS
    matmul: str = ""  # Config.matmul
    offload: str = ""  # "optimizer": its state is in the host's memory

    def size(self) -> str:
        return self.case.partition(":")[0]

    def length(self) -> int:
        return int(self.case.partition(":")[2])


Result = dict[str, Any]  # {"failed": reason}, or figures by name


def measure(row: Row, steps: int, rounds: int, toy: bool) -> Result:
    """Measures a row in this process. Raises UserError if there is no GPU, unless `toy` is set."""
    if row.what != "torch" and jax.devices()[0].platform != "gpu" and not toy:
        raise UserError("JAX finds no GPU here; use --toy to try the command without one")
    try:
        return MEASUREMENTS[row.what](row, steps, rounds, toy)
    except UserError:
        raise
    except Exception as error:  # any failure is the row's result
        traceback.print_exc()
        return {"failed": reason(f"{type(error).__name__}: {error}")}


def reason(error: str) -> str:
    """Shortens an error to fit into a table."""
    if OUT_OF_MEMORY in error.lower():
        return OUT_OF_MEMORY
    words = " ".join(error.split()).replace("|", "/").removeprefix("AssertionError: ")
    return words if len(words) <= 100 else f"{words[:99]}…"


@contextlib.contextmanager
def compiling(limit: float = MOST_COMPILING) -> Iterator[None]:
    """Ends a row's process, with TOO_SLOW as its result, if the body compiles for more than `limit` s.

    Compilers can't be interrupted, so another thread ends the process, and those that it started.
    """

    def give_up() -> None:
        print(json.dumps({"failed": TOO_SLOW}), flush=True)
        if os.getsid(0) == os.getpid():  # as `run` starts it
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    timer = threading.Timer(limit, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check(row: Row, steps: int, rounds: int, toy: bool) -> Result:
    kernel = row.attention
    if toy:
        shapes = [shape for shape in kernels.SMALL if kernels.takes(kernel, shape)]
        return {"error": kernels.check(kernel, shapes[:1], "float32", 2e-5, compiling)}
    worst = kernels.check(kernel, kernels.SHAPES, "bfloat16", TOLERANCE, compiling)
    shapes = [TIMED, TIMED._replace(segments=True)]
    times = {
        f"ms{', segments' * shape.segments}": kernels.seconds(kernel, shape, "bfloat16", steps)
        * 1e3
        for shape in shapes
        if kernels.takes(kernel, shape)
    }
    return {"error": worst, **times, "device": jax.devices()[0].device_kind}


def _step(row: Row, steps: int, rounds: int, toy: bool) -> Result:
    device = jax.devices()[0]
    config = dataclasses.replace(
        SIZES[row.size()](), dtype="bfloat16", attention=row.attention, remat=row.remat,
        unroll=row.unroll, loss_chunk=row.loss_chunk, matmul=row.matmul,
    )  # fmt: skip
    mesh = arrange({"data": 1}, [device])
    form = mesh, row.batch, row.length(), row.segments
    step = make_step(config, ONE_DEVICE, *form, offload=row.offload)
    with step.layout.trace():
        attention: Any = step.layout.shape.attention
        kernel = attention_kernel(config, attention, row.length(), row.segments).kernel
    start = time.perf_counter()
    with compiling():
        compiled = step.compile()
    compile_s = time.perf_counter() - start
    training = Training(step, compiled=compiled)
    seconds = timed(training.dispatch, lambda: jax.block_until_ready(training.state), steps, rounds)
    loss = float(training.metrics["loss"])
    if not loss < float("inf"):
        return {"failed": f"the loss is {loss}"}
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return rates(row, seconds, device.device_kind, peak) | {
        "kernel": kernel, "compile_s": compile_s, "loss": loss, "kinds": _kinds(training)
    }  # fmt: skip


def _kinds(training: Training) -> dict[str, float]:
    """Milliseconds of a step by kind of kernel, from a trace; empty if there is no GPU."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it slows the steps down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(TRACED):
                training.dispatch()
            jax.block_until_ready(training.state)
        return gpu_trace.kinds(gpu_trace.events(pathlib.Path(folder)), TRACED)


def _torch(row: Row, steps: int, rounds: int, toy: bool) -> Result:
    import torch

    if not torch.cuda.is_available() and not toy:
        return {"failed": "PyTorch finds no GPU"}
    device = "cpu" if toy else "cuda"
    asked = "" if row.attention == "auto" else row.attention
    start = time.perf_counter()
    form = SIZES[row.size()](), row.batch, row.length(), device, asked
    step = pytorch.Step(*form, compiled=not toy, segments=row.segments)
    with compiling():
        step()
        step.wait()
    compile_s = time.perf_counter() - start
    seconds = timed(step, step.wait, steps, rounds)
    kind = device if toy else torch.cuda.get_device_name()
    peak = None if toy else torch.cuda.max_memory_allocated()
    kernel = "flex" if row.segments else row.attention
    return rates(row, seconds, kind, peak) | {"kernel": kernel, "compile_s": compile_s}


def _generate(row: Row, steps: int, rounds: int, toy: bool) -> Result:
    """Writes the likeliest tokens after random prompts, as `python -m recipes.generate` does."""
    device = jax.devices()[0]
    config = dataclasses.replace(SIZES[row.size()](), dtype="bfloat16")
    prompt, written = (8, 4) if toy else (PROMPT, WRITTEN)
    layout = make_layout(Transformer, config, arrange({"data": 1}, [device]), ONE_DEVICE)
    where = shardings(layout.variables())
    with compiling():
        variables = layout.compile(lambda: variables_of(layout.build()), out_shardings=where)()
    generator = Generator(layout, variables, Sampling(), (), config.vocab_size)
    prompts = list(random_rows(config.vocab_size, row.batch, prompt)["tokens"])
    start = time.perf_counter()
    with compiling():
        for _ in generator(prompts, written):
            pass
    first = time.perf_counter() - start
    reading, writing = [], []
    for _ in range(rounds):
        generator.seconds = [0.0, 0.0]
        for _ in generator(prompts, written):
            pass
        reading.append(generator.seconds[0])
        writing.append(generator.seconds[1])
    seconds = statistics.median(writing)
    weights, cache = generator.bytes_a_token()
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "ms": seconds / written * 1e3, "tokens_per_s": row.batch * written / seconds,
        "ms, prompts": statistics.median(reading) * 1e3, "prompt": prompt, "written": written,
        "kernel": "-", "read_gb": (weights + cache) / 1e9, "compile_s": max(0.0, first - seconds), "device": device.device_kind,
    } | ({"gb": peak / 1e9} if peak else {})  # fmt: skip


MEASUREMENTS = {"check": _check, "step": _step, "torch": _torch, "generate": _generate}


def timed(run: Callable, wait: Callable, steps: int, rounds: int) -> float:
    """Median seconds per step over `rounds` timings of `steps` steps, with one sync at the end."""
    for _ in range(WARM_UP):
        run()
        wait()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            run()
        wait()
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times)


def rates(row: Row, seconds: float, kind: str, memory: int | None) -> Result:
    """The figures of a step; MFU by both conventions if the device's peak is known."""
    count = flops.decoder(trace_shape(Transformer, SIZES[row.size()]()), row.length(), row.batch)
    result = {"ms": seconds * 1e3, "tokens_per_s": row.batch * row.length() / seconds}
    if peak := flops.chip(kind):
        result |= {f"mfu_{name}": number / seconds / peak for name, number in count.items()}
    return result | {"device": kind} | ({"gb": memory / 1e9} if memory else {})


# ---- the process ---------------------------------------------------------------------------------


def run(row: Row, limit: float, options: Iterable[str]) -> Result:
    """Runs `measure` in a new process, and kills its process group after `limit` seconds.

    Args:
      options: more flags for the process.

    Raises UserError if the process does.
    """
    asked = json.dumps(dataclasses.asdict(row))
    command = [sys.executable, "-m", "recipes.bench", "gpu", f"--row={asked}", *options]
    start = time.monotonic()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environment(row), start_new_session=True,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result in {limit:.0f} s", "seconds": limit}
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # torch.compile starts child processes
            child.communicate()
    last = (err.strip().splitlines() or [""])[-1]
    seconds = time.monotonic() - start
    if child.returncode == 2:
        raise UserError(last.removeprefix("error: "))
    try:
        result = json.loads(out.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        end = child.returncode
        ending = f"ended by {signal.Signals(-end).name}" if end < 0 else f"exit code {end}"
        result = {"failed": reason(f"{ending}: {last}" if last else ending)}
    return result | {"seconds": seconds} | ({"log": err[-4_000:]} if "failed" in result else {})


def environment(row: Row) -> dict[str, str]:
    """The environment of a row's process."""
    variables = os.environ | {"XLA_CLIENT_MEM_FRACTION": MEMORY}
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        variables["JAX_PLATFORMS"] = f"{platforms},cpu"  # a kernel's check needs the host's CPU
    if row.what == "torch":
        variables["JAX_PLATFORMS"] = "cpu"  # leaves the GPU to PyTorch
    if more := XLA_FLAGS[row.xla]:
        variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()
    return variables
