"""Each attention kernel against the plain reference: values and gradients.

The reference is zoo/transformer.py's XLA attention in float32 at the highest matmul precision, on the
same inputs. On a CPU, the kernels that Pallas can interpret are interpreted.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zoo.attention import attend


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


# 124m's heads; 1b's, plain, with each feature and with both; no multiple of any block; 8b's head dim.
SHAPES = (
    Shape(2, 512, 4, 4, 64, segments=True),
    Shape(2, 512, 8, 2, 64),
    Shape(2, 512, 8, 2, 64, window=100),
    Shape(2, 512, 8, 2, 64, segments=True, window=100),
    Shape(2, 1_000, 8, 2, 64, segments=True),
    Shape(2, 1_000, 8, 2, 128),
    Shape(2, 1_024, 8, 2, 128, segments=True),
)
# Two blocks of the smallest kernel each, for a CPU, where the kernels are interpreted.
SMALL = (
    Shape(1, 256, 2, 1, 16, segments=True),
    Shape(1, 256, 2, 2, 16, window=100),
    Shape(2, 200, 4, 2, 16),
)


def takes(kernel: str, shape: Shape) -> bool:
    """Whether a kernel is for such rows; `attend` raises where it is not."""
    if kernel == "triton":
        return shape.window is None
    if kernel == "cudnn":
        return not shape.segments
    return kernel != "splash" or shape.T % 128 == 0


def check(kernel: str, shapes: Sequence[Shape], dtype: str, tolerance: float) -> float:
    """The largest error of a kernel over those of `shapes` that it takes, as `errors` has them.

    Raises AssertionError that names each shape where one is above the tolerance or not a number, or
    where the kernel raises.
    """
    taken, worst, wrong = [shape for shape in shapes if takes(kernel, shape)], 0.0, []
    if not taken:
        raise AssertionError("takes none of the shapes")
    for seed, shape in enumerate(taken):
        try:
            found = errors(kernel, shape, dtype, seed)
        except Exception as error:  # another shape may tell more
            wrong.append(f"{shape}: {type(error).__name__} {error}")
            continue
        wrong += [
            f"{shape}: {name} off by {error:.1e}"
            for name, error in found.items()
            if not error <= tolerance
        ]
        worst = max(worst, *found.values())
    if wrong:
        raise AssertionError("; ".join(wrong))
    return worst


def errors(kernel: str, shape: Shape, dtype: str, seed: int = 0) -> dict[str, float]:
    """‖kernel's - reference's‖ / ‖reference's‖ of the output and the gradients of q, k and v."""
    arguments = inputs(shape, dtype, seed)
    exact = [x.astype(jnp.float32) for x in arguments[:-1]]
    found = there_and_back(kernel, shape, dtype)(*arguments)
    with jax.default_matmul_precision("highest"):
        wanted = there_and_back("xla", shape, "float32")(*exact, arguments[-1])
    return {
        name: float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
        for name, a, b in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True)
    }


def inputs(shape: Shape, dtype: str, seed: int = 0):
    """q, k, v, the gradient of the output, and segment ids of four documents a row, or None."""
    B, T, N, K, H = shape[:5]
    keys = jax.random.split(jax.random.key(seed), 5)
    dims = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    arrays = [jax.random.normal(k, d).astype(dtype) for k, d in zip(keys, dims, strict=False)]
    starts_BT = jax.random.uniform(keys[4], (B, T)) < 4 / T
    return *arrays, jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32) if shape.segments else None


def there_and_back(kernel: str, shape: Shape, dtype: str):
    """A jitted function of `inputs`: the output and the gradients of q, k and v."""

    @jax.jit
    def call(q, k, v, grad, ids):
        out, back = jax.vjp(lambda q, k, v: attend(q, k, v, ids, shape.window, kernel), q, k, v)
        return out, *back(grad)

    return call


def seconds(kernel: str, shape: Shape, dtype: str, times: int) -> float:
    """Of one forward and backward pass, the mean of so many after a warm-up."""
    call, arguments = there_and_back(kernel, shape, dtype), inputs(shape, dtype)
    jax.block_until_ready(call(*arguments))
    start = time.perf_counter()
    for _ in range(times):
        result = call(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / times
