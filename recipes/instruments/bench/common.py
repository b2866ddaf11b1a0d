"""Shared parts of the benchmarks: a train step, interleaved timings, Markdown tables."""

import importlib.metadata
import os
import pathlib
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import choose, split
from recipes.common.runtime.terminal import print0
from recipes.common.sharding.abstract import Tree
from recipes.common.sharding.layout import Layout, make_layout
from recipes.common.sharding.rules import Rules
from recipes.common.train.offload import check_remat
from recipes.common.train.optimizer import LearningRate, hidden_matrices, make_optimizer
from recipes.common.train.state import initialize
from recipes.common.train.step import TrainStep
from zoo.llama_relatives import Transformer

ONE_DEVICE: Rules = {}  # sharding rules for one device: nothing is split
CPU_INFO = pathlib.Path("/proc/cpuinfo")  # on Linux
# A processor's flag in CPU_INFO → the instructions that it stands for, the widest first.
INSTRUCTIONS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
CONVENTION = (
    "FLOPs: 6·N per token, where N counts the weights that a token is multiplied with, plus "
    "12·T·(heads · head dim) per token and layer for attention over the full T × T square, or half "
    "of that if only the causal part counts. Recomputation is never counted."
)


class Step(NamedTuple):
    """A train step of an entry, ready to compile and run."""

    config: Any
    layout: Layout
    function: TrainStep
    abstract: Tree  # of the training state
    example: dict[str, jax.ShapeDtypeStruct]  # one row of a batch

    @property
    def seq_len(self) -> int:
        return self.example["tokens"].shape[0]

    def lower(self) -> jax.stages.Lowered:
        return self.function.lower(self.abstract, self.example)

    def compile(self) -> jax.stages.Compiled:
        return self.lower().compile()

    def new_state(self) -> Tree:
        return initialize(self.layout, self.function.optimizer, 0, self.abstract)

    def batch(self) -> dict[str, jax.Array]:
        """Random tokens, sharded as the step wants them."""
        every = random_rows(self.config.vocab_size, self.layout.batch_size, self.seq_len)
        rows = {name: every[name] for name in self.example}
        return jax.device_put(rows, self.layout.batch_shardings(rows))


def random_rows(vocab_size: int, batch_size: int, seq_len: int) -> dict[str, np.ndarray]:
    """Random tokens, targets and segment_ids, int32 [B, T]; documents have 512 tokens on average.

    The frequency of token k is proportional to 1 / (k + 1), about as in text. It affects how long a
    GPU takes to sum the gradients of embeddings.
    """
    random, shape = np.random.default_rng(0), (batch_size, seq_len + 1)
    window_BT = (vocab_size ** random.random(shape)).astype(np.int32) - 1
    starts_BT = random.random(shape) < 1 / 512
    segment_ids_BT = 1 + np.cumsum(starts_BT[:, :-1], axis=1, dtype=np.int32)
    rows = {"tokens": window_BT[:, :-1], "targets": window_BT[:, 1:]}
    return rows | {"segment_ids": segment_ids_BT}


def make_step(
    config: Any,
    rules: str | Rules,
    mesh: Mesh | AbstractMesh,
    batch_size: int,
    seq_len: int,
    segments: bool = False,
    model: type[nnx.Module] = Transformer,
    offload: str = "",
    optimizer: str = "adamw",
    example: Any = None,
) -> Step:
    """Makes a train step. Raises UserError if the arguments do not fit each other.

    Args:
      config: the model's Config.
      seq_len: positions of a row; 0 for a model of images.
      example: a row of a batch; None: of tokens.
      segments: whether batches have segment ids, like the recipe's batches of packed documents.
      offload, optimizer: as the recipes' flags.
    """
    layout = make_layout(model, config, mesh, rules, batch_size=batch_size, seq_len=seq_len)
    check_remat(layout)
    lr = LearningRate(1e-3, 10, 100)
    rule = make_optimizer(optimizer, lr, 0.1, 1.0, matrices=hidden_matrices(layout))
    function = TrainStep(layout, rule, lr, offload=offload)
    example = example or one_row(seq_len, segments)
    return Step(config, layout, function, function.abstract_state(), example)


def one_row(seq_len: int, segments: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """A row of tokens."""
    row = jax.ShapeDtypeStruct((seq_len,), np.int32)
    return {"tokens": row, "targets": row} | ({"segment_ids": row} if segments else {})


# ---- time ----------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds of each timed call: elapsed time, and CPU time of this process."""

    wall: list[float]
    cpu: list[float]


def interleaved(what: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, Times]:
    """Times functions in turn, round by round, so that other load affects all of them alike.

    Functions must wait for their own results. A round calls each function twice and times the
    second call: the first one finds memory and caches as another function left them, which does
    not happen in a training loop.
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
    """A compiled step and its state; a call runs `steps` steps. Compiles `step` by default."""

    def __init__(self, step: Step, steps: int = 1, compiled: jax.stages.Compiled | None = None):
        self.step, self.steps = step, steps
        self.compiled = compiled or step.compile()
        self.state, self.batch = step.new_state(), step.batch()

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.dispatch()
            jax.block_until_ready(self.metrics)  # simulated devices: few programs in flight

    def dispatch(self) -> None:
        """Starts a step without waiting for it."""
        self.state, self.metrics = self.compiled(self.state, self.batch)


# ---- print ---------------------------------------------------------------------------------------


def machine(kind: str = "", *others: str) -> str:
    """One line about hardware, versions and load, for the end of a table.

    Args:
      kind: JAX's device_kind; empty: that of JAX's first device.
      others: more packages whose versions to include.
    """
    kind = kind or jax.devices()[0].device_kind
    kind = cpu_kind(CPU_INFO.read_text() if CPU_INFO.exists() else "") if kind == "cpu" else kind
    names = ("jax", "jaxlib", "flax", "libtpu", *others)
    versions = ", ".join(f"{n} {v}" for n in names if (v := version(n)))
    python = platform.python_version()
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    return f"{kind}; Python {python}, {versions}; {load}."


def version(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_kind(cpu_info: str) -> str:
    """The processor's name, cores and widest instructions, and a limit on those in XLA_FLAGS.

    Args:
      cpu_info: what Linux says in CPU_INFO; empty on other systems.
    """
    fields = (line.partition(":") for line in reversed(cpu_info.splitlines()))
    facts = {name.strip(): value.strip() for name, _, value in fields}  # of the first core
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    widest = [kind for flag, kind in INSTRUCTIONS.items() if flag in flags][:1]
    limit = re.findall(r"--xla_cpu_max_isa=(\w+)", os.environ.get("XLA_FLAGS", ""))[-1:]
    return ", ".join(
        [name, f"{os.cpu_count()} cores", *widest, *(f"limited to {x}" for x in limit)]
    )


class Table:
    """A Markdown table, printed row by row, since rows may take minutes; first its head."""

    def __init__(self, *columns: str):
        self._head = [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|"]

    def row(self, *cells: object) -> None:
        print0(*self._head, f"| {' | '.join(map(str, cells))} |")
        self._head = []


def read_integers(flag: str, text: str, least: int = 1) -> list[int]:
    """Parses a flag of comma-separated integers ≥ `least`. Raises UserError."""
    words = split(text)
    if not all(word.isdecimal() and int(word) >= least for word in words):
        some = f"{least},{2 * least}"
        raise UserError(f"--{flag}={text} must be whole numbers ≥ {least}; try --{flag}={some}")
    return [int(word) for word in words]


def one_of(flag: str, text: str, choices: Iterable[str]) -> list[str]:
    """Parses a flag of comma-separated choices. Raises UserError."""
    words, choices = split(text), [*choices]
    return [choose(flag, x, choices, subject=f"--{flag} has {x!r}, which") for x in words]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
