"""What the benchmarks share: a train step of a given shape, FLOPs, timings side by side, tables."""

import dataclasses
import functools
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from recipes.common import sharding
from recipes.common.errors import UserError
from recipes.common.metrics import say
from recipes.common.optimizer import adamw, apply, gradients, schedule
from zoo.transformer import RULES, Config, Transformer

SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "medium": Config.medium,
    "124m": Config.gpt2_124m,
    "1b": Config.llama_1b,
    "8b": Config.llama_8b,
    "70b": Config.llama_70b,
}


class Step(NamedTuple):
    """A train step of the Transformer, as recipes/transformer.py makes it, not yet compiled."""

    config: Config
    layout: sharding.Layout
    optimizer: optax.GradientTransformation
    abstract: sharding.Tree  # the state
    window: jax.ShapeDtypeStruct  # the batch, [B, T + 1]
    function: Callable

    def lower(self) -> jax.stages.Lowered:
        pinned = dict(donate_argnums=0, out_shardings=(sharding.shardings(self.abstract), None))
        return self.layout.lower(self.function, self.abstract, self.window, **pinned)

    def compile(self) -> jax.stages.Compiled:
        return self.lower().compile()

    def new_state(self) -> sharding.Tree:
        return sharding.initialize(self.layout, self.optimizer, 0, self.abstract)

    def batch(self) -> jax.Array:
        """Random tokens, laid out as the step wants them."""
        tokens = np.random.default_rng(0).integers(0, 256, self.window.shape, np.int32)
        return jax.device_put(tokens, self.layout.batch)

    def flops(self) -> dict[str, float]:
        return flops(self.config, self.window.shape[0], self.window.shape[1] - 1)


def make_step(config: Config, strategy: str, mesh: Mesh, batch_size: int, seq_len: int) -> Step:
    """Raises UserError if they do not fit each other."""
    dims = {"batch": ("--batch_size", batch_size)}
    layout = sharding.lay_out(functools.partial(_model, config), RULES, strategy, mesh, dims)
    optimizer = adamw(schedule(1e-3, 10, 100), weight_decay=0.1, clip_norm=1.0)
    window = layout.abstract_batch(jnp.zeros(seq_len + 1, jnp.int32), batch_size)

    def loss(params, window_BT):
        return layout.plan.bind(params).loss(window_BT[:, :-1], window_BT[:, 1:])

    def train_step(state, window_BT):
        mean_loss, grads = gradients(loss, state["params"], window_BT)
        metrics = {"loss": mean_loss, "grad_norm": optax.tree.norm(grads)}
        return apply(optimizer, state, grads), metrics

    abstract = sharding.abstract_state(layout, optimizer)
    return Step(config, layout, optimizer, abstract, window, train_step)


def _model(config: Config) -> Transformer:
    return Transformer(config, rngs=nnx.Rngs(0))


# ---- FLOPs ---------------------------------------------------------------------------------------


def matmul_params(config: Config) -> int:
    """N: every weight that a token is multiplied with. The table counts once, as what unembeds."""
    D, H = config.embed, config.head_dim
    attention = 2 * D * H * (config.num_heads + config.num_kv_heads)
    return config.num_layers * (attention + 3 * D * config.mlp) + config.vocab_size * D


def flops(config: Config, batch_size: int, seq_len: int) -> dict[str, float]:
    """Of one train step, forward and backward, by two conventions; recomputation never counts.

    6·N a token, and attention: for each layer 12·T·(heads · head dim) a token over the full square
    of positions, half of it where only what causality lets be seen counts.
    """
    tokens = batch_size * seq_len
    weights = 6 * matmul_params(config) * tokens
    square = 12 * config.num_layers * seq_len * config.num_heads * config.head_dim * tokens
    return {"causal": weights + square / 2, "full": weights + square}


# ---- time ----------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of each counted call: on the clock, and of CPU time that the process spent."""

    wall: list[float]
    cpu: list[float]


def interleaved(what: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, Times]:
    """What each function took, in turn, `rounds` times: other work on the machine hits all.

    Each function waits for its own result. It runs twice in each turn and the second time counts:
    the first finds the memory and caches as another function left them, a training loop does not.
    """
    times = {name: Times([], []) for name in what}
    for _ in range(rounds):
        for name, function in what.items():
            function()
            start, used = time.perf_counter(), time.process_time()
            function()
            times[name].wall.append(time.perf_counter() - start)
            times[name].cpu.append(time.process_time() - used)
    return times


class Training:
    """A compiled step (the Step's own, if none is given) with its state: call it for `steps` steps."""

    def __init__(self, step: Step, steps: int = 1, compiled: jax.stages.Compiled | None = None):
        self.step, self.steps = step, steps
        self.compiled = compiled or step.compile()
        self.state, self.batch = step.new_state(), step.batch()

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.state, metrics = self.compiled(self.state, self.batch)
            jax.block_until_ready(metrics)  # simulated devices: few programs in flight


# ---- print ---------------------------------------------------------------------------------------


def machine() -> str:
    """Hardware, versions and load, in a line to stand under a table."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else _cpu()
    names = ("jax", "jaxlib", "flax", "libtpu")
    versions = ", ".join(f"{n} {v}" for n in names if (v := version(n)))
    python = platform.python_version()
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    return f"{kind}; Python {python}, {versions}; {load}."


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            found = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
            name = found[0] if found else name
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"


class Table:
    """A Markdown table, printed row by row, as each may take minutes."""

    def __init__(self, *columns: str):
        say(f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|")

    def row(self, *cells: object) -> None:
        say(f"| {' | '.join(map(str, cells))} |")


def numbers(flag: str, text: str) -> list[int]:
    """A flag's whole numbers, with commas between them. Raises UserError."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--{flag}={text} is not of whole numbers above 0; write --{flag}=1,2")
    return [int(word) for word in words]


def one_of(flag: str, text: str, choices: Iterable[str]) -> list[str]:
    """A flag's words, with commas between them. Raises UserError."""
    for word in text.split(","):
        if word not in choices:
            raise UserError(f"--{flag} has {word!r}, which is not one of {', '.join(choices)}")
    return text.split(",")


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def replace(config: Config, **changes) -> Config:
    return dataclasses.replace(config, **changes)
