"""Dropless experts on CPUs by groups and by batches, for a table of recipes/instruments/results.

    python -m tests.by_hand.expert_batches

Prints the CPU time of a gradient, the median of `ROUNDS` taken in turn, and of compiling it.
"""

import dataclasses
import functools
import time

import jax
import numpy as np

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import Layout, make_layout
from recipes.common.train.step import gradients
from tests.support.models import multiplying, random_variables
from zoo.moe import Config, MoE

ROUNDS = 8
SMALL = dataclasses.replace(Config.small(), capacity=None)
MANY = dataclasses.replace(SMALL, num_layers=1, num_experts=128, experts_per_token=8, mlp=64)
CASES = [
    ("small", SMALL, "1x1", "dp", (16, 128)),
    ("small", SMALL, "data=2,expert=4", "fsdp_ep", (16, 128)),
    ("a layer with 128 experts", MANY, "1x1", "dp", (4, 512)),
    ("a layer with 128 experts", MANY, "data=1,expert=8", "fsdp_ep", (16, 256)),
    ("tiny", dataclasses.replace(Config.tiny(), capacity=None), "1x1", "dp", (4, 24)),
]


def tokens(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    tokens_BT = np.random.default_rng(0).integers(0, 257, shape, np.int32)
    return {"tokens": tokens_BT, "targets": tokens_BT}


def compile_gradient(layout: Layout, batch, grouped: bool):
    """(the compiled gradient, CPU seconds)."""
    start = time.process_time()
    with multiplying(grouped):
        gradient = functools.partial(gradients, layout)
        program = layout.compile(gradient, layout.variables(), layout.abstract_batch(batch))
    return program, time.process_time() - start


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    for name, config, mesh, strategy, shape in CASES:
        layout = make_layout(
            MoE, config, make_mesh(mesh), strategy, batch_size=shape[0], seq_len=shape[1]
        )
        batch = tokens(shape)
        example = jax.tree.map(lambda x_BT: x_BT[0], batch)
        programs, compiling = zip(
            *(compile_gradient(layout, example, grouped) for grouped in (True, False)), strict=True
        )
        inputs = random_variables(layout), jax.device_put(batch, layout.batch_shardings(batch))
        seconds = [[], []]
        for _ in range(ROUNDS):
            for program, taken in zip(programs, seconds, strict=True):
                start = time.process_time()
                jax.block_until_ready(program(*inputs))
                taken.append(time.process_time() - start)
        groups, batches = (np.median(taken) for taken in seconds)
        memory = [x.memory_analysis().temp_size_in_bytes / 1e6 for x in programs]
        print(
            f"{name} on {mesh}: {groups * 1e3:,.0f} -> {batches * 1e3:,.0f} ms, "
            f"compiling {compiling[0]:.1f} -> {compiling[1]:.1f} s, "
            f"temporaries {memory[0]:,.0f} -> {memory[1]:,.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
