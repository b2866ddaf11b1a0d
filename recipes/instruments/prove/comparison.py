"""How much arrays on a mesh differ from the same arrays on one device."""

from typing import NamedTuple

import jax
import numpy as np

# Float32 sums over a mesh are taken in another order, so their last bits differ. These bounds are at
# least 1.25 times as wide as the differences measured for the zoo (tests/PROOF.md).
LOSS_TOLERANCE = 2e-6  # relative
GRADIENT_TOLERANCE = 2e-6  # |difference| / |gradient|, of each array
# Adam divides a gradient by its size, so an element that is nearly zero moves by its rounding error.
STATE_TOLERANCE = 2e-5  # |difference| / |array|, of each array after three steps
# In float64 the same differences are 2^29 times as small; this leaves a factor of 50.
FLOAT64_TOLERANCE = 1e-13
# A gradient below this share of the whole gradient is zero but for rounding.
ZERO_SHARE = 1e-6


class Difference(NamedTuple):
    """The difference of an array from one device's."""

    relative: float  # |a - b| / |b| in the Euclidean norm
    largest: float  # max |a - b| / max |b|
    ulps: float  # max |a - b| in units of the last place of max |b|


EQUAL = Difference(0.0, 0.0, 0.0)
DIFFERENT = Difference(np.inf, np.inf, np.inf)


def difference(a, b) -> float:
    """Returns |a - b| / |b|, the relative difference in the Euclidean norm."""
    return norm(a - b) / max(norm(b), 1e-30)


def norm(x) -> float:
    return float(np.linalg.norm(np.ravel(np.asarray(x, np.float64))))  # float32 squares overflow


def compare(
    a: jax.Array | np.ndarray, b: jax.Array | np.ndarray, *, is_copy: bool = False
) -> Difference:
    """The difference of `a` from `b`, one device's; infinite if shapes or non-finite values differ.

    NaN equals NaN only if `a` is a copy of b, not if it was computed.
    """
    if a.shape != b.shape:
        return DIFFERENT
    if np.array_equal(a, b, equal_nan=is_copy and np.issubdtype(b.dtype, np.inexact)):
        return EQUAL
    dtype = np.float32 if b.dtype.itemsize < 4 else np.promote_types(b.dtype, np.float32)
    x, y = np.asarray(a, dtype), np.asarray(b, dtype)
    distance, scale = float(np.abs(x - y).max()), float(np.abs(y).max())
    if not np.isfinite(distance):
        return DIFFERENT
    ulp = float(np.spacing(np.asarray(scale, dtype)))
    return Difference(difference(x, y), distance / max(scale, 1e-30), distance / ulp)


def compare_finite(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, Difference]:
    """Path → difference of each array; infinite where one device's isn't finite."""
    return {
        path: compare(a[path], x) if np.isfinite(x).all() else DIFFERENT for path, x in b.items()
    }


def compare_all(
    a: dict[str, np.ndarray], b: dict[str, np.ndarray], *, is_copy: bool = False
) -> dict[str, Difference]:
    """Path → difference of each array; see `compare`."""
    return {path: compare(a[path], x, is_copy=is_copy) for path, x in b.items()}


def compare_gradients(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, Difference]:
    """Path → difference of each gradient.

    Where the gradient is zero but for rounding, the difference is relative to all gradients together.
    """
    of_all = norm([norm(x) for x in b.values()])
    small = {path: norm(a[path] - b[path]) / of_all for path in zeros(b)}
    return {
        path: x._replace(relative=small.get(path, x.relative))
        for path, x in compare_finite(a, b).items()
    }


def largest_relative(differences: dict[str, Difference]) -> float:
    """The largest relative difference of all arrays."""
    return max(x.relative for x in differences.values())


def zeros(grads: dict[str, np.ndarray]) -> set[str]:
    """Paths of gradients that are zero but for rounding.

    A bias of all keys of an attention without rotary embeddings is an example: it adds the same
    number to all scores of a query, which softmax ignores.
    """
    norms = {path: norm(x) for path, x in grads.items()}
    of_all = norm([*norms.values()])
    return {path for path, size in norms.items() if size < ZERO_SHARE * of_all}
