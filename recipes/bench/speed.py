"""How fast the train step runs: against the machine's own matmul, across meshes, on a GPU."""

import dataclasses
import functools
import gc
import itertools
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from recipes.bench import nanogpt
from recipes.bench.common import SIZES, Table, Training, flops, interleaved, machine, make_step
from recipes.common.cli import flag
from recipes.common.errors import UserError
from recipes.common.mesh import make_mesh, parse
from recipes.common.metrics import say
from zoo.transformer import REMAT, RULES, Config

CONVENTION = (
    "FLOPs: 6·N a token, N being the weights it is multiplied with, and attention: 12·T·(heads · "
    "head dim) a token and layer over the full square, half of it where only the causal part "
    "counts. Recomputation never counts."
)


def gpt2_10m() -> Config:
    """10.7M parameters in GPT-2's proportions, as nanoGPT's laptop example."""
    return Config(256, 384, 6, num_heads=6, num_kv_heads=6, head_dim=64, mlp=1_024)


# ---- one CPU device against its own matmul -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CpuFlags:
    remats: str = flag("none,dots", "policies, with commas between them")
    rounds: int = flag(8, "timings of each, in turn", at_least=1)
    batch_size: int = flag(16, "sequences", at_least=1)
    seq_len: int = flag(256, "tokens of context", at_least=1)
    toy: bool = flag(False, "a model of two narrow layers and a small matmul, to try the command")


def cpu(flags: CpuFlags) -> None:
    mesh, config = make_mesh("1"), Config.tiny() if flags.toy else gpt2_10m()
    size = 256 if flags.toy else 4_096
    square = jnp.ones((size, size))
    matmul = jax.jit(lambda x: x @ x)
    runs = {"matmul": lambda: matmul(square).block_until_ready()}
    for remat in flags.remats.split(","):
        if remat not in REMAT:
            raise UserError(f"--remats has {remat!r}, which is not one of {', '.join(REMAT)}")
        changed = dataclasses.replace(config, remat=remat)
        step = make_step(changed, "dp", mesh, flags.batch_size, flags.seq_len)
        runs[f"remat {remat}"] = Training(step)
    count = flops(config, flags.batch_size, flags.seq_len)
    torch = None if flags.toy else nanogpt.cpu_step(config, flags.batch_size, flags.seq_len)
    if torch:
        runs["PyTorch, nanoGPT's model compiled"] = torch
    used = {name: [] for name in runs}
    timed = {name: functools.partial(_with_cpu_time, function, used[name])
             for name, function in runs.items()}  # fmt: skip
    seconds = {name: min(times) for name, times in interleaved(timed, flags.rounds).items()}
    work = {name: count["causal"] for name in runs} | {"matmul": 2 * size**3}
    rate, busy = ({name: work[name] / value for name, value in column.items()}
                  for column in (seconds, {name: min(times) for name, times in used.items()}))  # fmt: skip
    table = Table("step", "ms", "tokens/s", "GFLOP/s (causal)", "GFLOP/s (full)", "of matmul",
                  "of matmul, by CPU time")  # fmt: skip
    for name in runs:
        if name == "matmul":
            continue
        tokens = flags.batch_size * flags.seq_len / seconds[name]
        table.row(name, f"{seconds[name] * 1e3:.0f}", f"{tokens:,.0f}", f"{rate[name] / 1e9:.0f}",
                  f"{count['full'] / seconds[name] / 1e9:.0f}", f"{rate[name] / rate['matmul']:.0%}",
                  f"{busy[name] / busy['matmul']:.0%}")  # fmt: skip
    say("", f"One {size}³ float32 matmul in the same run: {rate['matmul'] / 1e9:.0f} GFLOP/s. Best "
        f"of {flags.rounds} in turn. CPU time leaves out what other programs took, and counts "
        f"idle cores as free. {CONVENTION}", machine())  # fmt: skip


def _with_cpu_time(function, used: list[float]) -> None:
    before = time.process_time()
    function()
    used.append(time.process_time() - before)


# ---- every table on every mesh -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeshesFlags:
    size: str = flag("small", "of the Transformer", choices=SIZES)
    meshes: str = flag("8x1,4x2,2x4,1x8,2x2x2", "to compare, with commas between them")
    rules: str = flag(",".join(RULES), "strategies, with commas between them")
    batch_size: int = flag(16, "windows a step, over all devices", at_least=1)
    seq_len: int = flag(128, "tokens of context", at_least=1)
    rounds: int = flag(5, "timings of each, in turn", at_least=1)


def meshes(flags: MeshesFlags) -> None:
    names = flags.meshes.split(",")
    largest = max(names, key=_count)
    make_mesh(largest)  # decides how many devices are simulated
    config, runs = SIZES[flags.size](), {}
    pairs = [("dp", "1x1"), *itertools.product(flags.rules.split(","), names)]
    for strategy in flags.rules.split(","):
        if strategy not in RULES:
            raise UserError(f"--rules has {strategy!r}, which is not one of {', '.join(RULES)}")
    for strategy, name in pairs:
        try:
            step = make_step(config, strategy, make_mesh(name), flags.batch_size, flags.seq_len)
        except UserError:
            continue  # what does not fit
        runs[strategy, name] = Training(step, steps=2)
    seconds = interleaved(runs, flags.rounds)
    best = {key: min(times) / 2 for key, times in seconds.items()}
    one = best["dp", "1x1"]
    table = Table("rules", "mesh", "ms a step", "of 1x1", "of the mesh's best")
    for (strategy, name), time_ in best.items():
        peers = min(t for (_, other), t in best.items() if other == name)
        ratios = f"{time_ / one:.2f}", f"{time_ / peers:.2f}"
        table.row(strategy, name, f"{time_ * 1e3:.0f}", *ratios)
    say("", f"{flags.size}, {flags.batch_size} × {flags.seq_len} tokens a step on all meshes, best "
        f"of {flags.rounds} in turn. Simulated devices share the cores.", machine())  # fmt: skip


def _count(name: str) -> int:
    return functools.reduce(lambda a, b: a * b, parse(name).values())


# ---- one GPU -------------------------------------------------------------------------------------

# Of one chip, dense bfloat16, without sparsity.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L4": 121e12}

XLA_FLAGS = {
    "default": "",
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true "
    "--xla_gpu_enable_triton_gemm=false",
}


@dataclasses.dataclass(frozen=True)
class GpuFlags:
    cases: str = flag("124m:1024,1b:2048", "size:tokens of context, with commas between them")
    batches: str = flag("8,16,32", "sequences a step, to try, with commas between them")
    remats: str = flag("none,dots,full", "policies to try, with commas between them")
    steps: int = flag(10, "steps in a timing", at_least=1)
    rounds: int = flag(3, "timings", at_least=1)
    flags: str = flag("default", "XLA flags in this process", choices=XLA_FLAGS)
    sweep_flags: bool = flag(True, "runs the best of each case again under the other XLA flags")
    toy: bool = flag(False, "tiny:64 with two sequences on whatever device there is")


def gpu(flags: GpuFlags) -> None:
    if flags.toy:
        flags = dataclasses.replace(flags, cases="tiny:64", batches="2", remats="none,full",
                                    steps=1, rounds=1, sweep_flags=False)  # fmt: skip
    if XLA_FLAGS[flags.flags]:  # read when JAX makes its devices
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS[flags.flags]}"
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    if mesh.devices.flat[0].platform != "gpu" and not flags.toy:
        raise UserError("there is no GPU that JAX can use here; --toy tries the command without")
    peak = _peak(mesh.devices.flat[0].device_kind)
    table = Table("case", "batch", "remat", "XLA flags", "ms a step", "tokens/s", "MFU (causal)",
                  "MFU (full)")  # fmt: skip
    for case in flags.cases.split(","):
        best = (float("inf"), "", 0)
        for remat in flags.remats.split(","):
            for batch in map(int, flags.batches.split(",")):
                time_ = _gpu_case(table, flags, case, batch, remat, mesh, peak)
                best = min(best, (time_ / batch, remat, batch))
        if flags.sweep_flags:
            for name in XLA_FLAGS:
                if name != flags.flags:
                    _again(table, case, name, best)
        _torch_row(table, flags, case, best[2], peak)
    say("", CONVENTION, machine())


def _gpu_case(table, flags, case, batch, remat, mesh, peak) -> float:
    """Seconds a step; infinite where it does not fit."""
    size, length = _case(case)
    config = dataclasses.replace(SIZES[size](), dtype="bfloat16", remat=remat)
    gc.collect()  # the state of the case before
    try:
        training = Training(make_step(config, "dp", mesh, batch, length), flags.steps)
        time_ = min(interleaved({"": training}, flags.rounds)[""]) / flags.steps
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        table.row(case, batch, remat, flags.flags, "out of memory", "-", "-", "-")
        return float("inf")
    cells = rates(flops(config, batch, length), batch * length, time_, peak)
    table.row(case, batch, remat, flags.flags, f"{time_ * 1e3:.1f}", *cells)
    return time_


def rates(count: dict[str, float], tokens: int, seconds: float, peak: float | None):
    """tokens/s, and MFU by both conventions."""
    mfu = (f"{count[kind] / seconds / peak:.1%}" if peak else "-" for kind in ("causal", "full"))
    return f"{tokens / seconds:,.0f}", *mfu


def _again(table: Table, case: str, name: str, best) -> None:
    """The best batch and policy under other XLA flags, which need a process of their own."""
    command = [sys.executable, "-m", "recipes.bench", "gpu", f"--cases={case}",
               f"--batches={best[2]}", f"--remats={best[1]}", f"--flags={name}",
               "--nosweep_flags"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {case}")]
    if not rows:
        table.row(case, best[2], best[1], name, "failed", "-", "-", "-")
        print(done.stderr[-2000:], file=sys.stderr)
    for row in rows:
        if "PyTorch" not in row:
            say(row)


def _torch_row(table: Table, flags: GpuFlags, case: str, batch: int, peak: float | None) -> None:
    size, length = _case(case)
    config = SIZES[size]()
    step = nanogpt.gpu_step(config, batch, length)
    if step is None:
        return
    step()
    start = time.perf_counter()
    for _ in range(flags.steps):
        step()
    step.wait()
    time_ = (time.perf_counter() - start) / flags.steps
    cells = rates(flops(config, batch, length), batch * length, time_, peak)
    table.row(case, batch, "-", "PyTorch", f"{time_ * 1e3:.1f}", *cells)


def _case(text: str) -> tuple[str, int]:
    size, _, length = text.partition(":")
    if size not in SIZES or not length.isdigit():
        raise UserError(f"--cases has {text!r}; write size:tokens, 124m:1024")
    return size, int(length)


def _peak(kind: str) -> float | None:
    return next((peak for name, peak in PEAK_FLOPS.items() if name in kind), None)
