"""Speed of the train step: relative to the machine's own matmul, and across meshes."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from recipes.common.report import flops
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag, split
from recipes.common.runtime.mesh import make_mesh, parse
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.bench import pytorch
from recipes.instruments.bench.common import (
    CONVENTION,
    ONE_DEVICE,
    Table,
    Training,
    interleaved,
    machine,
    make_step,
    one_of,
    read_integers,
)  # fmt: skip
from zoo.core.attention import attend, make_inputs
from zoo.core.stack import REMAT_POLICIES
from zoo.llama_relatives import RULES, Config, Layer, Transformer
from zoo.sizes import TRANSFORMER as SIZES


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
    remats, unrolls = (
        one_of("remats", flags.remats, REMAT_POLICIES),
        read_integers("unrolls", flags.unrolls),
    )
    mesh, config = make_mesh("1"), Config.tiny() if flags.toy else gpt2_10m()
    B, T = flags.batch_size, flags.seq_len
    size = 256 if flags.toy else 4_096
    square = jnp.ones((size, size))
    matmul = jax.jit(lambda x: x @ x)
    runs = {"matmul": lambda: matmul(square).block_until_ready()}
    work = {"matmul": 2.0 * size**3}
    count = flops.decoder(trace_shape(Transformer, config), T, B)
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
    """A layer and its parts, run alone: name → (forward and backward pass, causal FLOPs)."""
    layer = Layer(config, rngs=nnx.Rngs(0))
    positions = make_inputs(config, jnp.zeros((1, seq_len), jnp.int32))
    (kind,) = config.kinds
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
        def forward_and_backward(weights, x):
            y, back = jax.vjp(lambda w, x: call(nnx.merge(graph, w), x), weights, x)
            return back(y)

        return lambda: jax.block_until_ready(forward_and_backward(weights, x))

    scores = alone(
        lambda _, qkv: attend(*qkv, segment_ids_BT=None, window=kind.window),
        layer.mlp_norm,
        (q_BTNH, k_BSKH, k_BSKH),
    )
    run = lambda m, x: m(x, positions, kind)[0]  # noqa: E731
    return {
        "layer": (alone(run, layer, x_BTD), mlp + attention),
        "its MLP": (alone(lambda m, x: m(x), layer.mlp, x_BTD), mlp),
        "its attention": (alone(run, layer.attention, x_BTD), attention),
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
    names = split(flags.meshes)
    largest = max(names, key=lambda name: math.prod(parse(name).values()))
    make_mesh(largest)  # determines how many devices are simulated
    config, runs, copies = SIZES[flags.size](), {}, {}
    pairs = [
        (next(iter(RULES)), "1x1"),
        *itertools.product(one_of("rules", flags.rules, RULES), names),
    ]
    for strategy, name in pairs:
        try:
            step = make_step(config, strategy, make_mesh(name), flags.batch_size, flags.seq_len)
        except UserError:
            continue  # the rules do not fit the mesh
        runs[strategy, name] = Training(step, steps=2)
        idle = step.layout.idle_axes
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
