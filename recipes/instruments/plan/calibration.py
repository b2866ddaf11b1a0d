"""How long operations take, in multiples of what the hardware allows.

TPUs' factors are the TPU compiler's estimates, chosen for the steps in tests/golden/plan_cycles.jsonl, of v6e and tpu7x for one step
each; `python -m tests.by_hand.plan_cycles tests/golden/plan_cycles.jsonl` measures again and prints each
step's. Attention's are those of its kernels' bundles (recipes/instruments/results/tpu.md). No step of v4 was
measured: its other factors are v5p's, for matmuls with as little vector memory as v4 has.

An H100's were measured on one (recipes/instruments/results/gpu.md); an H200 is the same chip with faster memory.
"""

from typing import NamedTuple


class Factors(NamedTuple):
    """What multiplies the least time of each kind of operation."""

    matmul: float  # FLOPs at the peak, of matmuls whose inner dim is longer by `fill`
    attention: float  # FLOPs at the peak, of all blocks that the kernels compute
    elementwise: float  # activations written and read, at the memory's bandwidth
    copy: float  # the same activations
    fill: int = 240  # a matmul of inner dim D takes as long as D + fill at the peak


LOWER_BOUND = Factors(matmul=1.0, attention=1.0, elementwise=0.0, copy=0.0, fill=0)
HOPPER = Factors(matmul=1.22, attention=2.3, elementwise=0.77, copy=0.0, fill=0)
FACTORS = {
    "v4": Factors(matmul=1.13, attention=1.81, elementwise=1.9, copy=0.4),
    "v5e": Factors(matmul=1.03, attention=1.24, elementwise=1.8, copy=0.2),
    "v5p": Factors(matmul=0.97, attention=1.29, elementwise=1.9, copy=0.4),
    "v6e": Factors(matmul=1.36, attention=1.75, elementwise=2.0, copy=0.1),
    "tpu7x": Factors(matmul=1.36, attention=1.75, elementwise=2.0, copy=0.2),
    "h100": HOPPER,
    "h200": HOPPER,
}
