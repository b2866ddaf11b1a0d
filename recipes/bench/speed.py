"""How fast the train step runs: against the machine's own matmul, across meshes, on a GPU."""

import dataclasses
import gc
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.bench import pytorch
from recipes.bench.common import (
    ONE_DEVICE,
    Table,
    Training,
    interleaved,
    machine,
    make_step,
    numbers,
    one_of,
)  # fmt: skip
from recipes.common.analysis import flops, report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.mesh import arrange, make_mesh, parse
from recipes.common.runtime.terminal import print0
from zoo.transformer import REMAT, RULES, SIZES, Config, Layer, attend, rope_angles

CONVENTION = (
    "FLOPs: 6·N per token, where N counts the weights that a token is multiplied with, plus "
    "12·T·(heads · head dim) per token and layer for attention over the full T × T square, or half "
    "of that if only the causal part counts. Recomputation is never counted."
)


def gpt2_10m() -> Config:
    """10.7M parameters in GPT-2's proportions, like nanoGPT's laptop example."""
    return Config(256, 384, 6, num_heads=6, num_kv_heads=6, head_dim=64, mlp=1_024)


# ---- one CPU device against its own matmul -------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CpuFlags:
    remats: str = flag("none,dots", "Remat policies, comma-separated.", group="model")
    unrolls: str = flag("1,6", "Layers per iteration of the scan, comma-separated.", group="model")
    batch_size: int = flag(16, "Sequences per step.", group="data", at_least=1)
    seq_len: int = flag(256, "Tokens of context.", group="data", at_least=1)
    rounds: int = flag(8, "Interleaved timings of each.", at_least=1)
    toy: bool = flag(False, "Two narrow layers and a small matmul, to try the command.")


def cpu(flags: CpuFlags) -> None:
    remats, unrolls = one_of("remats", flags.remats, REMAT), numbers("unrolls", flags.unrolls)
    mesh, config = make_mesh("1"), Config.tiny() if flags.toy else gpt2_10m()
    B, T = flags.batch_size, flags.seq_len
    size = 256 if flags.toy else 4_096
    square = jnp.ones((size, size))
    matmul = jax.jit(lambda x: x @ x)
    runs = {"matmul": lambda: matmul(square).block_until_ready()}
    work = {"matmul": 2.0 * size**3}
    count = flops.decoder(config, T, B)
    steps, parts = [], _parts(config, B, T)
    for remat, unroll in itertools.product(remats, unrolls):
        changed = dataclasses.replace(config, remat=remat, unroll=unroll)
        steps.append(f"remat {remat}, unroll {unroll}")
        runs[steps[-1]] = Training(make_step(changed, ONE_DEVICE, mesh, B, T))
    if torch := None if flags.toy else pytorch.cpu_step(config, B, T):
        steps.append("PyTorch, nanoGPT's model compiled")
        runs[steps[-1]] = torch
    work |= dict.fromkeys(steps, count["causal"]) | {name: n for name, (_, n) in parts.items()}
    runs |= {name: function for name, (function, _) in parts.items()}
    times = interleaved(runs, flags.rounds)
    seconds = {name: min(times[name].wall) for name in runs}
    rate = {name: work[name] / seconds[name] for name in runs}
    busy = {name: work[name] / min(times[name].cpu) for name in runs}

    def against_matmul(name: str) -> tuple[str, str]:
        return f"{rate[name] / rate['matmul']:.0%}", f"{busy[name] / busy['matmul']:.0%}"

    table = Table("step", "ms", "tokens/s", "GFLOP/s (causal)", "GFLOP/s (full)", "of matmul",
                  "of matmul, by CPU time")  # fmt: skip
    for name in steps:
        table.row(name, f"{seconds[name] * 1e3:.0f}", f"{B * T / seconds[name]:,.0f}",
                  f"{rate[name] / 1e9:.0f}", f"{count['full'] / seconds[name] / 1e9:.0f}",
                  *against_matmul(name))  # fmt: skip
    print0("")
    layers = f"ms for {config.num_layers} layers"
    table = Table("part, forward and backward", layers, "GFLOP/s (causal)", "of matmul",
                  "of matmul, by CPU time")  # fmt: skip
    for name in parts:
        table.row(name, f"{seconds[name] * config.num_layers * 1e3:.0f}", f"{rate[name] / 1e9:.0f}",
                  *against_matmul(name))  # fmt: skip
    print0("", f"One {size}³ float32 matmul in the same run: {rate['matmul'] / 1e9:.0f} GFLOP/s. Best "
           f"of {flags.rounds} interleaved rounds. CPU time excludes other programs and counts idle "
           f"cores as free. {CONVENTION}", machine())  # fmt: skip


def _parts(config: Config, batch_size: int, seq_len: int) -> dict[str, tuple[Callable, float]]:
    """A layer and its parts, each on its own: name → (forward and backward pass, causal FLOPs)."""
    layer = Layer(config, rngs=nnx.Rngs(0))
    angles = rope_angles(config, jnp.arange(seq_len)[None])
    key, tokens = jax.random.key(0), batch_size * seq_len
    x_BTD = jax.random.normal(key, (batch_size, seq_len, config.embed))
    q_BTNH = jax.random.normal(key, (batch_size, seq_len, config.num_heads, config.head_dim))
    k_BSKH = q_BTNH[:, :, : config.num_kv_heads]
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    kernel = 6 * seq_len * heads * tokens
    attention = kernel + 6 * tokens * config.embed * 2 * (heads + kv_heads)
    mlp = 6 * tokens * 3 * config.embed * config.mlp

    def alone(call, module, x):
        graph, weights = nnx.split(module)

        @jax.jit
        def there_and_back(weights, x):
            y, back = jax.vjp(lambda w, x: call(nnx.merge(graph, w), x), weights, x)
            return back(y)

        return lambda: jax.block_until_ready(there_and_back(weights, x))

    scores = alone(
        lambda _, qkv: attend(*qkv, None, config), layer.mlp_norm, (q_BTNH, k_BSKH, k_BSKH)
    )
    whole = lambda m, x: m(x, None, angles)[0]  # noqa: E731
    return {
        "layer": (alone(whole, layer, x_BTD), mlp + attention),
        "its MLP": (alone(lambda m, x: m(x), layer.mlp, x_BTD), mlp),
        "its attention": (alone(whole, layer.attention, x_BTD), attention),
        "of which scores, softmax, values": (scores, kernel),
    }


# ---- every strategy on every mesh ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeshesFlags:
    size: str = flag("small", "Size of the Transformer.", group="model", choices=SIZES)
    meshes: str = flag("8x1,4x2,2x4,1x8,2x2x2", "Meshes, comma-separated.")
    rules: str = flag(",".join(RULES), "Strategies, comma-separated.")
    batch_size: int = flag(16, "Sequences per step, over all devices.", group="data", at_least=1)
    seq_len: int = flag(128, "Tokens of context.", group="data", at_least=1)
    rounds: int = flag(5, "Interleaved timings of each.", at_least=1)


def meshes(flags: MeshesFlags) -> None:
    names = flags.meshes.split(",")
    largest = max(names, key=lambda name: math.prod(parse(name).values()))
    make_mesh(largest)  # decides how many devices are simulated
    config, runs, copies = SIZES[flags.size](), {}, {}
    pairs = [
        (next(iter(RULES)), "1x1"),
        *itertools.product(one_of("rules", flags.rules, RULES), names),
    ]
    for strategy, name in pairs:
        try:
            step = make_step(config, strategy, make_mesh(name), flags.batch_size, flags.seq_len)
        except UserError:
            continue  # these rules do not fit this mesh
        runs[strategy, name] = Training(step, steps=2)
        idle = report.idle_axes(step.layout)
        copies[strategy, name] = math.prod(step.layout.mesh.shape[axis] for axis in idle)
    best = {key: min(t.wall) / 2 for key, t in interleaved(runs, flags.rounds).items()}
    one = best[pairs[0]]
    table = Table("rules", "mesh", "ms per step", "of 1x1", "of the mesh's best",
                  "copies of the work")  # fmt: skip
    for (strategy, name), time_ in best.items():
        peers = min(t for (_, other), t in best.items() if other == name)
        ratios = f"{time_ / one:.2f}", f"{time_ / peers:.2f}", copies[strategy, name]
        table.row(strategy, name, f"{time_ * 1e3:.0f}", *ratios)
    print0("", f"{flags.size}, {flags.batch_size} × {flags.seq_len} tokens per step on every mesh, "
           f"best of {flags.rounds} interleaved rounds. Simulated devices share the cores: those "
           "along a mesh axis that the rules do not use all do the same work, so the step takes that "
           "many times longer, minus skipped communication.", machine())  # fmt: skip


# ---- one GPU -------------------------------------------------------------------------------------

XLA_FLAGS = {
    "default": "",
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true "
    "--xla_gpu_enable_triton_gemm=false",
}


@dataclasses.dataclass(frozen=True)
class GpuFlags:
    cases: str = flag(
        "124m:1024,1b:2048", "Pairs of size:tokens of context, comma-separated.", group="model"
    )
    remats: str = flag("none,dots,full", "Remat policies, comma-separated.", group="model")
    batches: str = flag("8,16,32", "Batch sizes, comma-separated.", group="data")
    steps: int = flag(10, "Steps in a timing.", at_least=1)
    rounds: int = flag(3, "Timings of each.", at_least=1)
    flags: str = flag("default", "XLA flags of this process.", choices=XLA_FLAGS)
    sweep_flags: bool = flag(True, "Repeat the best of each case with the other XLA flags.")
    toy: bool = flag(False, "Size tiny with two sequences, on any device, to try the command.")


def gpu(flags: GpuFlags) -> None:
    if flags.toy:
        flags = dataclasses.replace(flags, cases="tiny:64", batches="2", remats="none,full",
                                    steps=1, rounds=1, sweep_flags=False)  # fmt: skip
    cases = flags.cases.split(",")
    for case in cases:
        _case(case)  # raises before the table begins
    remats, batches = one_of("remats", flags.remats, REMAT), numbers("batches", flags.batches)
    if XLA_FLAGS[flags.flags]:  # read when JAX makes its devices
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS[flags.flags]}"
    device = jax.devices()[0]
    if device.platform != "gpu" and not flags.toy:
        raise UserError("JAX finds no GPU here; use --toy to try the command without one")
    mesh, peak = arrange({"data": 1}, [device]), flops.chip(device.device_kind)
    table = Table("case", "batch", "remat", "XLA flags", "ms per step", "tokens/s", "MFU (causal)",
                  "MFU (full)")  # fmt: skip
    for case in cases:
        best = (float("inf"), "", 0)
        for remat in remats:
            for batch in batches:
                time_ = _gpu_case(table, flags, case, batch, remat, mesh, peak)
                best = min(best, (time_ / batch, remat, batch))
        if not best[2]:
            continue  # none fits
        for name in XLA_FLAGS if flags.sweep_flags else ():
            if name != flags.flags:
                _again(table, case, name, best)
        _torch_row(table, flags, case, best[2], peak)
    print0("", CONVENTION, machine())


def _gpu_case(table, flags, case, batch, remat, mesh, peak) -> float:
    """Seconds per step; infinite if it does not fit."""
    size, length = _case(case)
    config = dataclasses.replace(SIZES[size](), dtype="bfloat16", remat=remat)
    gc.collect()  # the state of the case before
    try:
        training = Training(make_step(config, ONE_DEVICE, mesh, batch, length), flags.steps)
        time_ = min(interleaved({"": training}, flags.rounds)[""].wall) / flags.steps
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        table.row(case, batch, remat, flags.flags, "out of memory", "-", "-", "-")
        return float("inf")
    cells = rates(flops.decoder(config, length, batch), batch * length, time_, peak)
    table.row(case, batch, remat, flags.flags, f"{time_ * 1e3:.1f}", *cells)
    return time_


def rates(count: dict[str, float], tokens: int, seconds: float, peak: float | None):
    """tokens/s, and MFU by both conventions."""
    mfu = (f"{count[kind] / seconds / peak:.1%}" if peak else "-" for kind in ("causal", "full"))
    return f"{tokens / seconds:,.0f}", *mfu


def _again(table: Table, case: str, name: str, best) -> None:
    """The best batch and policy with other XLA flags, which need a process of their own."""
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
            print0(row)


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
    cells = rates(flops.decoder(config, length, batch), batch * length, time_, peak)
    table.row(case, batch, "-", "PyTorch", f"{time_ * 1e3:.1f}", *cells)


def _case(text: str) -> tuple[str, int]:
    size, _, length = text.partition(":")
    if size not in SIZES or not length.isdigit():
        raise UserError(f"--cases has {text!r}; write size:tokens, for example 124m:1024")
    return size, int(length)
