"""Products of rounded numbers, int8 or float8, with scales, and their gradients, on one device.

A row of activations has a scale, and so has a column of a weight: the largest magnitude over the
dims that the product contracts, on all devices. Gradients are those of the rounded numbers' product,
as in qwix: a scale that varies along a contracted dim is multiplied into the gradient before that
is rounded too.

Shapes: B batch, T positions, E experts (1 for other weights), M rows, K contracted, N columns.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.sharding import device

INT8, E4M3, E5M2 = (jnp.int8, 127.0), (jnp.float8_e4m3fn, 448.0), (jnp.float8_e5m2, 57_344.0)
# Config.matmul → (dtype, its largest number) of weights, activations, gradients; None: as they are.
FORMATS: dict[str, tuple] = {
    "int8": (INT8, INT8, INT8),
    "fp8": (E4M3, E4M3, E5M2),
    "int8_weights": (INT8, None, None),
}
# Words in the kinds of devices that multiply float8 numbers.
FLOAT8_DEVICES = ("H100", "H200", "H20", "B200", "B300", "L40", "L4", "RTX 40", "RTX 50", "TPU7x")


class Product(NamedTuple):
    """Static settings of a product on one device. Tuples of names are mesh axes."""

    matmul: str  # a key of FORMATS
    backward: str  # "bfloat16": gradients are rounded to it; "": as FORMATS says
    outer: tuple[str, ...]  # that split N
    rows: tuple[str, ...]  # that split M
    scattered: tuple[tuple[str, ...], ...]  # that split each dim of the weight at rest alone
    summed: tuple[str, ...]  # along which the weight's gradient is summed, besides those
    inner: tuple[str, ...] = ()  # that split K, so that the product is summed along them
    scatters: bool = False  # whether that sum leaves each device a part of T, not all of it
    equal: tuple[str, ...] = ()  # along which x's gradients are equal, and only one counts
    shapes: tuple = ((), (), ())  # of the weight on a device, of its K and of its N


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply_rounded(product: Product, x, w, x_q, x_scale, q, scale, sizes=None):
    """x_q[B, T, K] or [E, M, K] times q[E, K, N] and the scales: [B, T, N] or [E, M, N].

    Args:
      x, w: get the gradients; x is in the compute dtype.
      x_q, x_scale, q, scale [E, 1, N]: x and the weight in use, rounded.
      sizes: rows of each expert, if x is [M, K]; see jax.lax.ragged_dot.
    """
    return _forward(product, x, w, x_q, x_scale, q, scale, sizes)[0]


def _forward(product: Product, x, w, x_q, x_scale, q, scale, sizes):
    y, row = _dot("EMK,EKN->EMN", x_q, q, sizes), x_scale
    y = y.reshape(*x_q.shape[:-1], y.shape[-1])
    if product.scatters:
        y, row = _scatter(y.astype(x.dtype), row, product.inner, 1)
    y = (y * row * _by_row(scale, x_q, sizes)).astype(x.dtype)
    y = jax.lax.psum(y, product.inner) if product.inner and not product.scatters else y
    return y, (bits(x_q), x_scale, bits(q), scale, sizes)


def _backward(product: Product, saved, y):
    x_q, x_scale, q, scale, sizes = saved
    dtype = y.dtype
    shape, K, N = product.shapes
    of_weights, of_rows, gradients = FORMATS[product.matmul]
    gradients = (product.backward, None) if product.backward else gradients
    x_q, q = numbers(x_q, of_rows), numbers(q, of_weights)
    if product.scatters:
        y = jax.lax.all_gather(y, product.inner, axis=1, tiled=True)
    g, row = quantize(y * _by_row(scale, x_q, sizes), (-1,), gradients, product.outer)
    dx = (_dot("EMN,EKN->EMK", g, q, sizes).reshape(x_q.shape) * row).astype(dtype)
    if product.equal:
        dx = jnp.where(jax.lax.axis_index(product.equal) == 0, dx, 0)
    y = y * x_scale
    y = y.reshape(len(q), -1, y.shape[-1]) if sizes is None else y
    g, column = quantize(y, (-2,), gradients, product.rows)
    dw = _dot("EMK,EMN->EKN", x_q, g, sizes, K, N).astype(dtype).reshape(shape)
    column = column.reshape(*[-1] * (len(shape) - len(K + N)), *[1] * len(K), *N)
    for dim, over in enumerate(product.scattered):
        dw, column = _scatter(dw, column, over, dim) if over else (dw, column)
    dw = jax.lax.psum(dw, product.summed) if product.summed else dw
    return dx, (dw * column).astype(dtype), *[None] * 5


multiply_rounded.defvjp(_forward, _backward)


def quantize(x, dims, form, over: tuple[str, ...] = ()):
    """(x / scale rounded, scale in float32), the scale with size 1 along `dims`.

    Args:
      form: (dtype, its largest number, or None: x is only cast); None: x as it is.
      over: mesh axes that split these dims, if this runs per device.
    """
    dtype, most = form or (x.dtype, None)
    if most is None:
        sizes = enumerate(x.shape, start=-x.ndim)
        return x.astype(dtype), jnp.ones([1 if dim in dims else size for dim, size in sizes])
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=dims, keepdims=True)
    largest = jax.lax.pmax(largest, over) if over else largest
    scale = jnp.maximum(largest / most, 1e-35)  # zeros divide by no zero, and NaN stays NaN
    x = x / scale
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype), scale


def bits(q):
    """Rounded numbers as integers of one byte; others unchanged.

    Networks need not know float8, and XLA's CPU backend loses float8 numbers above 240 that a loop
    saves, because it keeps them in float16.
    """
    if q.dtype.itemsize > 1 or q.dtype == jnp.int8:
        return q
    return jax.lax.bitcast_convert_type(q, jnp.uint8)


def numbers(x, form):
    """The inverse of `bits`; form: see `quantize`."""
    return jax.lax.bitcast_convert_type(x, form[0]) if x.dtype == jnp.uint8 else x


def _scatter(x, scale, over: tuple[str, ...], dim: int):
    """Sums x over devices and leaves each a part of `dim`, of its scales too: (x, scale).

    TPUs overlap it with the product if only rounding comes between.
    """
    x = jax.lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)
    if scale.shape[dim] == 1:
        return x, scale
    first = jax.lax.axis_index(over) * x.shape[dim]
    return x, jax.lax.dynamic_slice_in_dim(scale, first, x.shape[dim], dim)


def _by_row(scale, x, sizes):
    """[E, 1, N] → a scale for each row of x."""
    if sizes is None:
        return scale
    expert_M = (jnp.arange(len(x))[:, None] >= jnp.cumsum(sizes)[None]).sum(1)
    return scale[jnp.minimum(expert_M, len(scale) - 1), 0]


def _dot(dims: str, a, b, sizes, K=(), N=()):
    """Multiplies arrays of `dims`; a weight's gradient, EMK,EMN->EKN, has its dims K and N.

    Sums are int32 or float32. E is a batch dim even if it is 1, so that remat's "dots" saves no sums.
    """
    if not a.dtype.itemsize == b.dtype.itemsize == 1 or not native(a.dtype):
        wide = jnp.float32 if device().platform == "cpu" else jnp.bfloat16  # both are exact
        a, b = a.astype(wide), b.astype(wide)
    kind = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    sums: dict[str, Any] = {"preferred_element_type": kind}
    by_rows = dims == "EMK,EMN->EKN"
    if sizes is not None:
        if by_rows:
            numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
            return jax.lax.ragged_dot_general(a, b, sizes, numbers, **sums)
        b = b if dims == "EMK,EKN->EMN" else b.swapaxes(1, 2)
        return jax.lax.ragged_dot(a, b, sizes, **sums)
    a = a.reshape(len(b), -1, a.shape[-1])
    if by_rows:
        a, b = a.reshape(*a.shape[:2], *K), b.reshape(*b.shape[:2], *N)
        return jax.lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,))), **sums)
    return jnp.einsum(dims, a, b, **sums)


def native(dtype) -> bool:
    """Whether the active mesh's devices multiply numbers of this type."""
    here = device()
    return here.platform != "cpu" if dtype == jnp.int8 else has_float8(here.device_kind)


def has_float8(kind: str) -> bool:
    """Whether devices of this kind multiply float8 numbers."""
    return any(word in kind for word in FLOAT8_DEVICES)
