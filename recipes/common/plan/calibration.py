"""How long operations take, in multiples of what the hardware allows, by the TPU compiler's estimates.

The factors of v5e and v5p are chosen for the steps in tests/golden/plan_cycles.jsonl; measured again
by `python -m tests.by_hand.plan_cycles tests/golden/plan_cycles.jsonl`, which prints each step's.
Attention's are those of its kernels' bundles (recipes/bench/cycles.md) for all kinds. No step of v4,
v6e or tpu7x was measured: their other factors are v5p's, for matmuls by the compiler's own options.
"""

from typing import NamedTuple


class Factors(NamedTuple):
    """What multiplies the least time of each kind of operation."""

    matmul: float  # FLOPs at the peak, of matmuls whose inner dim is longer by FILL
    attention: float  # FLOPs at the peak, of all blocks that the kernels compute
    elementwise: float  # activations written and read, at the memory's bandwidth
    copy: float  # the same activations


FILL = 240  # a matmul of inner dim D takes as long as D + FILL at the peak
LOWER_BOUND = Factors(matmul=1.0, attention=1.0, elementwise=0.0, copy=0.0)  # GPUs, CPUs
FACTORS = {
    "v4": Factors(matmul=1.13, attention=1.45, elementwise=2.4, copy=0.6),
    "v5e": Factors(matmul=1.15, attention=1.24, elementwise=2.0, copy=0.3),
    "v5p": Factors(matmul=1.03, attention=1.29, elementwise=2.4, copy=0.6),
    "v6e": Factors(matmul=1.13, attention=1.84, elementwise=2.4, copy=0.6),
    "tpu7x": Factors(matmul=1.13, attention=1.95, elementwise=2.4, copy=0.6),
}
