"""Layers with a state at several lengths of a chunk, for recipes/docs/states.md.

    python -m tests.by_hand.chunk_lengths v5p    # cycles by the TPU compiler; needs the extra tpu-aot
    python -m tests.by_hand.chunk_lengths cpu    # CPU milliseconds

Each figure is of the recurrence's outputs and gradients, from its convolution on, in bfloat16 on TPUs
and float32 on CPUs. CPU times are medians of `ROUNDS` taken in turn.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from recipes.instruments.plan.compilers import topology
from recipes.instruments.plan.hardware import parse_devices
from recipes.instruments.plan.step_cycles import count, read_hlo
from zoo.recurrent import channel_decays, delta, delta_rule, mamba, ssd

LENGTHS = (16, 32, 64, 128, 256)
ROUNDS = 9
WIDTH = 4  # W of the convolutions


@dataclasses.dataclass(frozen=True)
class Case:
    """A recurrence of these heads, on rows [B, T]."""

    name: str
    rule: str  # "ssd", "delta" or "channels"
    heads: int  # N
    groups: int  # G
    key_dim: int  # K
    value_dim: int  # V
    rows: int = 1
    length: int = 1_024

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the arrays up to the convolution's kernels, as Arrays has them."""
        B, T, W = self.rows, self.length, WIDTH
        keys, values = (self.groups, self.key_dim), (self.heads, self.value_dim)
        decays = (B, T, *((self.heads, self.key_dim) if self.rule == "channels" else (self.heads,)))
        first = [values, keys, keys] if self.rule == "ssd" else [keys, keys, values]
        by_position = [decays, (B, T, self.heads)]
        return [*((B, T, *x) for x in first), *by_position, *((W, *x) for x in first)]

    def step(self) -> Callable:
        """(arrays) → gradients of a sum of squares of the outputs."""

        def loss(arrays) -> jax.Array:
            x, y, z, decays, amounts, *kernels = arrays
            decays = -jax.nn.softplus(decays.astype(jnp.float32))
            amounts = jax.nn.sigmoid(amounts.astype(jnp.float32))
            kernels = [kernel.astype(jnp.float32) for kernel in kernels]
            if self.rule == "ssd":
                skip = jnp.ones((self.heads,))
                rest = dict(x_bias=None, b_bias=None, c_bias=None, skip=skip, ids=None)
                (out,) = mamba.on_device(mamba.Arrays(x, y, z, decays, amounts, *kernels, **rest))
            else:
                chunk = channel_decays.chunk if self.rule == "channels" else None
                given = delta.Arrays(x, y, z, decays, amounts, *kernels, ids=None)
                (out,) = delta.on_device(given, chunk=chunk)
            return jnp.square(out).mean()

        return jax.grad(loss)


PUBLISHED = [
    Case("Mamba-2 of nemotron_h_8b", "ssd", 128, 8, 128, 64),
    Case("delta network of 80b_a3b", "delta", 32, 16, 128, 128),
    Case("Kimi's delta attention of kimi_linear_48b", "channels", 32, 32, 128, 128),
]
SMALL = [  # some heads of these
    *(dataclasses.replace(case, heads=8, groups=min(case.groups, 8)) for case in PUBLISHED),
    Case("Mamba-2 of hybrid small", "ssd", 8, 4, 32, 32, rows=16, length=128),
    Case("delta network of qwen3_next small", "delta", 8, 4, 16, 16, rows=16, length=128),
]  # fmt: skip


@contextlib.contextmanager
def chunks_of(length: int) -> Iterator[None]:
    """A context in which recurrences compute chunks of this length."""
    with contextlib.ExitStack() as stack:
        for module, name in ((ssd, "run"), (delta_rule, "chunk"), (channel_decays, "chunk")):
            sized = functools.partial(getattr(module, name), size=length)
            stack.enter_context(mock.patch.object(module, name, sized))
        yield


def cycles(case: Case, length: int, kind: str) -> tuple[float, float]:
    """(millions of cycles, GB of temporaries) on one TPU."""
    chips = topology(kind, {"data": 4}).devices[:1]
    everywhere = NamedSharding(Mesh(chips, ("data",), axis_types=(AxisType.Auto,)), PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=everywhere) for x in case.shapes()]
    with chunks_of(length):
        compiled = jax.jit(case.step()).lower(arrays).compile()
    devices = parse_devices(f"{kind}:4")
    counted = count(read_hlo(compiled.as_text(), devices, {}), devices)
    return counted.total / 1e6, compiled.memory_analysis().temp_size_in_bytes / 1e9


def milliseconds(case: Case) -> list[float]:
    """CPU milliseconds at each of LENGTHS."""
    random = np.random.default_rng(0)
    arrays: Any = [jnp.asarray(random.normal(size=x), jnp.float32) for x in case.shapes()]
    programs = []
    for length in LENGTHS:
        with chunks_of(length):
            programs.append(jax.jit(case.step()).lower(arrays).compile())
    taken: list[list[float]] = [[] for _ in LENGTHS]
    for _ in range(ROUNDS):
        for program, times in zip(programs, taken, strict=True):
            start = time.process_time()
            jax.block_until_ready(program(arrays))
            times.append(time.process_time() - start)
    return [float(np.median(times)) * 1e3 for times in taken]


def main() -> None:
    kind = sys.argv[1]
    print(f"chunks of {LENGTHS}")
    for case in SMALL if kind == "cpu" else PUBLISHED:
        if kind == "cpu":
            figures = [f"{x:,.1f} ms" for x in milliseconds(case)]
        else:
            measured = [cycles(case, length, kind) for length in LENGTHS]
            figures = [f"{x:.2f} M, {memory:.2f} GB" for x, memory in measured]
        print(f"{case.name}:", "; ".join(figures), flush=True)


if __name__ == "__main__":
    main()
