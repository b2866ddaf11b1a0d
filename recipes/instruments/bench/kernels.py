"""Compares each attention kernel with a reference: values and gradients.

The reference is the XLA attention of zoo/core/attention.py in float32 at the highest matmul precision,
on the host's CPU and the same inputs. On CPUs, Pallas interprets the kernels if it can.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zoo.core.attention import attend


class Shape(NamedTuple):
    B: int  # rows
    T: int  # positions
    N: int  # query heads
    K: int  # kv heads
    H: int  # head dim
    segments: bool = False
    window: int | None = None

    def __str__(self) -> str:
        more = f"{', segments' * self.segments}{f', window {self.window}' if self.window else ''}"
        return f"{self.B}×{self.T}, {self.N}/{self.K} heads of {self.H}{more}"


# Heads of 124m; of 1b, plain, with each feature and with both; lengths that no block divides; 8b's
# head dim.
SHAPES = (
    Shape(2, 512, 4, 4, 64, segments=True),
    Shape(2, 512, 8, 2, 64),
    Shape(2, 512, 8, 2, 64, window=100),
    Shape(2, 512, 8, 2, 64, segments=True, window=100),
    Shape(2, 1_000, 8, 2, 64, segments=True),
    Shape(2, 1_000, 8, 2, 128),
    Shape(2, 1_024, 8, 2, 128, segments=True),
)
# For CPUs, where kernels are interpreted: two blocks of the smallest kernel.
SMALL = (
    Shape(1, 256, 2, 1, 16, segments=True),
    Shape(1, 256, 2, 2, 16, window=100),
    Shape(2, 200, 4, 2, 16),
)


def takes(kernel: str, shape: Shape) -> bool:
    """Whether a kernel supports a shape; otherwise `attend` raises."""
    return kernel != "splash" or shape.T % 128 == 0


def check(
    kernel: str,
    shapes: Sequence[Shape],
    dtype: str,
    tolerance: float,
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> float:
    """The largest error of a kernel over the shapes that it supports.

    Args:
      around: a context for each shape's check, which compiles two programs.

    Raises AssertionError with the names of all shapes whose error is above the tolerance or NaN, or
    for which the kernel raises.
    """
    taken, worst, wrong = [shape for shape in shapes if takes(kernel, shape)], 0.0, []
    if not taken:
        raise AssertionError("supports none of the shapes")
    for seed, shape in enumerate(taken):
        try:
            with around():
                measured = errors(kernel, shape, dtype, seed)
        except Exception as error:  # other shapes may fail too
            wrong.append(f"{shape}: {type(error).__name__} {error}")
            continue
        wrong += [
            f"{shape}: {name} off by {error:.1e}"
            for name, error in measured.items()
            if not error <= tolerance
        ]
        worst = max(worst, *measured.values())
    if wrong:
        raise AssertionError("; ".join(wrong))
    return worst


def errors(kernel: str, shape: Shape, dtype: str, seed: int = 0) -> dict[str, float]:
    """‖kernel - reference‖ / ‖reference‖ for the output and the gradients of q, k and v."""
    arguments = inputs(shape, dtype, seed)
    q, k, v, grad, ids = arguments
    results = forward_and_backward(kernel, shape, dtype)(q, k, v, grad, ids)
    # On the CPU, because XLA is slow to choose a GPU's kernels for exact float32.
    *arrays, ids = jax.device_put(arguments, jax.local_devices(backend="cpu")[0])
    q, k, v, grad = (x.astype(jnp.float32) for x in arrays)
    with jax.default_matmul_precision("highest"):
        wanted = forward_and_backward("xla", shape, "float32")(q, k, v, grad, ids)
    return {
        name: float(np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b)) / np.linalg.norm(b))
        for name, a, b in zip(("output", "dq", "dk", "dv"), results, wanted, strict=True)
    }


def inputs(shape: Shape, dtype: str, seed: int = 0):
    """q, k, v, the gradient of the output, and segment ids (about four documents a row) or None."""
    B, T, N, K, H = shape[:5]
    keys = jax.random.split(jax.random.key(seed), 5)
    dims = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    arrays = [jax.random.normal(k, d).astype(dtype) for k, d in zip(keys, dims, strict=False)]
    starts_BT = jax.random.uniform(keys[4], (B, T)) < 4 / T
    return *arrays, jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32) if shape.segments else None


def forward_and_backward(kernel: str, shape: Shape, dtype: str):
    """A jitted function from `inputs` to the output and the gradients of q, k and v."""

    @jax.jit
    def call(q, k, v, grad, ids):
        out, back = jax.vjp(
            lambda q, k, v: attend(q, k, v, ids, window=shape.window, kernel=kernel), q, k, v
        )
        return out, *back(grad)

    return call


def seconds(kernel: str, shape: Shape, dtype: str, times: int) -> float:
    """Mean seconds of a forward and backward pass, over `times` passes after a warm-up."""
    call = forward_and_backward(kernel, shape, dtype)
    q, k, v, grad, ids = inputs(shape, dtype)
    jax.block_until_ready(call(q, k, v, grad, ids))
    start = time.perf_counter()
    for _ in range(times):
        result = call(q, k, v, grad, ids)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / times
