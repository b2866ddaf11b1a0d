"""Matmuls of layers in int8 or float8 with scales. layers.py imports this file if Config.matmul is set.

Each row of activations has a scale, and so has each column of a weight: the largest magnitude over
the dims that the product contracts, on all devices. Weights are rounded at rest, so FSDP gathers a
byte each. Gradients are those of the rounded numbers' product, as in qwix: a scale that varies along
a contracted dim is first multiplied into the gradient, which is then rounded too.

Shapes: B batch, T positions, E experts (1 for other weights), M rows, K contracted, N columns.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .sharding import constrain, device, mesh_axes, per_device

# Config.matmul → (dtype, largest number) of activations and weights, and of gradients.
FORMATS: dict[str, tuple] = {
    "int8": ((jnp.int8, 127.0), (jnp.int8, 127.0)),
    "fp8": ((jnp.float8_e4m3fn, 448.0), (jnp.float8_e5m2, 57_344.0)),
}
LEAST = 1e-35  # of a scale, so that rows of zeros divide by no zero

# Kinds of devices, or words in them, that multiply float8 numbers.
FLOAT8_DEVICES = ("H100", "H200", "H20", "B200", "B300", "L40", "L4", "RTX 40", "RTX 50", "TPU7x")


class How(NamedTuple):
    """Static settings of a product on one device. Tuples of names are mesh axes."""

    matmul: str  # a key of FORMATS
    backward: str  # "bfloat16": gradients are only rounded to it; "": as `matmul`
    inner: tuple[str, ...]  # that split K
    outer: tuple[str, ...]  # that split N
    rows: tuple[str, ...]  # that split M
    scattered: tuple[tuple[str, ...], ...]  # that split each dim of the weight at rest alone
    summed: tuple[str, ...]  # along which the weight's gradient is summed, besides those
    reduced: tuple[str, ...] = ()  # along which x's gradient is summed, unless it is gathered
    gathered: tuple[str, ...] = ()  # that split T of x, but not while it is multiplied
    joined: tuple[str, ...] = ()  # along which the product is summed
    parted: bool = False  # whether each of these devices keeps a part of T
    shapes: tuple = ((), (), ())  # of the weight on a device, of its K and of its N


class Low(NamedTuple):
    """How to multiply by a layer's weight."""

    weight: jax.Array  # at rest
    rest: tuple[str, ...]  # its logical axes
    use: tuple[str, ...]  # those in use
    config: Any

    def multiply(self, x, contract: int, seq: str):
        """layers.multiply in low precision; x may split more of T than `seq`, see layers.gather."""
        inner, outer = self.use[:contract], self.use[contract:]
        over, between, within = mesh_axes(inner), mesh_axes("residual_seq"), "seq"
        how, w, rest = self.how(self.use, inner, outer)
        parted = bool(over) and mesh_axes(seq) == over
        how = how._replace(reduced=mesh_axes(outer), joined=over, parted=parted)
        if between != mesh_axes("seq") and {*between} <= {*mesh_axes(outer)}:
            how, within = how._replace(gathered=between), "residual_seq"

        def local(x, w, q, scale):
            shapes = q.shape, q.shape[:contract], q.shape[contract:]
            K = math.prod(shapes[1])
            x, q = x.reshape(*x.shape[:2], K), q.reshape(1, K, -1)
            y = product(how._replace(shapes=shapes), x, w, q, scale.reshape(1, 1, -1))
            return y.reshape(*y.shape[:2], *shapes[2])

        axes = ("batch", within, *inner), rest, self.use, (*[None] * contract, *outer)
        arrays = (x, w, *self.rounded(*range(contract)))
        y = per_device(local, arrays, axes, ("batch", seq if parted else "seq", *outer))
        return checkpoint_name(constrain(y, "batch", seq, *outer), "product")

    def how(self, use, inner, outer) -> tuple[How, jax.Array, tuple]:
        """(How, the weight that gets the gradient, its logical axes); use: axes inside the product.

        Where devices have different rows, the gradient is scattered as the weight rests.
        """
        rows, config = ("batch", "seq"), self.config
        split = (mesh_axes(axes, manual=True) for axes in (inner, outer, rows))
        pairs = [(mesh_axes(a), mesh_axes(b)) for a, b in zip(self.rest, use, strict=True)]
        alone, w, axes = tuple(a[len(b) :] for a, b in pairs), self.weight, self.rest
        over, w = {name for names in alone for name in names}, w.astype(config.dtype)
        if any(a[: len(b)] != b for a, b in pairs) or not over <= {*mesh_axes(rows)}:
            alone, w, axes, over = ((),) * len(use), constrain(w, *use), use, set()
        summed = tuple(name for name in mesh_axes(rows) if name not in over)
        how = How(config.matmul, config.matmul_backward, *split, alone, summed)
        return how, w, axes

    def rounded(self, *dims: int) -> list[jax.Array]:
        """The rounded weight in use and its scales; `dims`: those that products contract."""
        dtype, most = FORMATS[self.config.matmul][0]
        q, scale = quantize(jax.lax.stop_gradient(self.weight), dims, dtype, most)
        bits = jnp.int8 if dtype == jnp.int8 else jnp.uint8  # networks need not know float8
        q = jax.lax.bitcast_convert_type(constrain(q, *self.rest), bits)
        q = jax.lax.bitcast_convert_type(constrain(q, *self.use), dtype)
        names = [None if dim in dims else axis for dim, axis in enumerate(self.use)]
        return [q, constrain(scale, *names)]


def lowered(weights, used, names: dict[str, str], config):
    """A layer in use whose products are in config.matmul.

    Args:
      weights: a module with weights at rest; used: the same in use.
      names: logical axis of a weight at rest → its name in use. Weights without such an axis, and
        adapters, are multiplied as before.
    """

    def low(weight, used):
        w = weight[...]
        rest, use = (x.out_sharding[-w.ndim :] for x in (weight, used))
        if isinstance(weight, nnx.LoRAParam) or not {*names, *names.values()} & {*rest}:
            return used
        return used.replace(low=Low(w, rest, use, config))

    return jax.tree.map(low, weights, used, is_leaf=lambda x: isinstance(x, nnx.Variable))


def of_experts(expert, split, capacity, weights, axes):
    """(a function like `expert` that multiplies in low precision, arrays for it, their axes).

    Args:
      expert, capacity: see experts.mix; split: logical axis → mesh axes; axes: of each weight.
    """
    hows, arrays, found = [], [], []
    for weight, use in zip(weights, axes, strict=True):
        low, how = getattr(weight, "low", None), None
        if low is None:
            arrays, found = [*arrays, weight[...]], [*found, use]
        else:
            how, w, rest = low.how(use, use[1], use[2])
            rows, summed = (
                tuple(name for name in names if name not in split["expert"])
                for names in (how.rows, how.summed)
            )
            # With a capacity, devices along `expert` have rows of other experts.
            how = how._replace(rows=how.rows if capacity is None else rows, summed=summed)
            arrays = [*arrays, w, *low.rounded(1)]
            found = [*found, rest, use, (use[0], None, use[2])]
        hows.append(how)

    def run(dot, x, *arrays):
        left = iter(arrays)

        def multiply(x, operand):
            if not isinstance(operand, tuple):
                return dot(x, operand)
            how, w, q, scale = operand
            how = how._replace(shapes=(q.shape, q.shape[1:2], q.shape[2:]))
            return product(how, x, w, q, scale, getattr(dot, "keywords", {}).get("group_sizes"))

        operands = ((how, *[next(left) for _ in range(3)]) if how else next(left) for how in hows)
        return expert(multiply, x, *operands)

    return run, arrays, found


def quantize(x, dims, dtype, most: float, over: tuple[str, ...] = ()):
    """(x / scale rounded to dtype, scale in float32); the scale has size 1 along `dims`.

    `over`: mesh axes that split these dims, if this runs per device.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=dims, keepdims=True)
    if over:
        largest = jax.lax.pmax(largest, over)
    scale = jnp.maximum(largest / most, LEAST)  # NaN stays NaN
    x = x / scale
    return (jnp.round(x) if dtype == jnp.int8 else x).astype(dtype), scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(how: How, x, w, q, scale, sizes=None):
    """x[B, T, K] or [E, M, K] times q[E, K, N] and the scales, [B, T, N] or [E, M, N].

    Sums of several devices are rounded to x's dtype before the scales are applied, where they are
    scattered: TPUs then scatter them while they multiply.

    Args:
      w: gets the gradient; q, scale [E, 1, N]: the rounded weight in use.
      sizes: rows of each expert, if x is [M, K]; see jax.lax.ragged_dot.
    """
    return _forward(how, x, w, q, scale, sizes)[0]


def _forward(how: How, x, w, q, scale, sizes):
    x_q, x_scale = quantize(x, -1, *FORMATS[how.matmul][0], how.inner)
    if how.gathered:
        gather = functools.partial(jax.lax.all_gather, axis_name=how.gathered, axis=1, tiled=True)
        x_q, x_scale = (checkpoint_name(gather(a), "gathered") for a in (x_q, x_scale))
    y = _dot("EMK,EKN->EMN", x_q, q, sizes, x.dtype if how.parted else jnp.float32)
    y, row = y.reshape(*x_q.shape[:-1], y.shape[-1]), x_scale
    if how.parted:
        y, row = _scatter(y, how.joined, 1), _part(row, how.joined, 1)
    y = (y * row * _by_row(scale, x_q, sizes)).astype(x.dtype)
    y = jax.lax.psum(y, how.joined) if how.joined and not how.parted else y
    return y, (x_q, x_scale, q, scale, sizes)


def _backward(how: How, saved, grad):
    x_q, x_scale, q, scale, sizes = saved
    dtype, y = grad.dtype, grad
    if how.parted:
        y = jax.lax.all_gather(y, how.joined, axis=1, tiled=True)

    def rounded(y, dim, over):
        if how.backward:
            ones = jnp.ones([1 if n == dim % y.ndim else size for n, size in enumerate(y.shape)])
            return y.astype(how.backward), ones
        return quantize(y, dim, *FORMATS[how.matmul][1], over)

    g, row = rounded(y * _by_row(scale, x_q, sizes), -1, how.outer)
    dx = _dot("EMN,EKN->EMK", g, q, sizes, dtype if how.gathered else jnp.float32)
    dx = dx.reshape(x_q.shape)
    if how.gathered:
        dx, row = _scatter(dx, how.gathered, 1), _part(row, how.gathered, 1)
    dx = (dx * row).astype(dtype)
    dx = jax.lax.psum(dx, how.reduced) if how.reduced and not how.gathered else dx
    g, column = rounded(_rows(y * x_scale, q, sizes), -2, how.rows)
    whole, K, N = how.shapes
    dw = _dot_rows(x_q, g, sizes, K, N).astype(dtype).reshape(whole)
    first = [-1] * (len(whole) - len(K + N))
    column = column.reshape(*first, *[1] * len(K), *N)
    for dim, over in enumerate(how.scattered):
        if over:
            dw, column = _scatter(dw, over, dim), _part(column, over, dim)
    dw = jax.lax.psum(dw, how.summed) if how.summed else dw
    return dx, (dw * column).astype(dtype), None, None, None


product.defvjp(_forward, _backward)


def _scatter(x, over: tuple[str, ...], dim: int):
    return jax.lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)


def _part(x, over: tuple[str, ...], dim: int):
    """The part of x that `_scatter` leaves to this device; all of it if its size is 1."""
    size = x.shape[dim] // jax.lax.axis_size(over)
    if x.shape[dim] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(over) * size, size, dim)


def _by_row(scale, x, sizes):
    """[E, 1, N] → a scale for each row of x."""
    if sizes is None:
        return scale
    expert_M = (jnp.arange(len(x))[:, None] >= jnp.cumsum(sizes)[None]).sum(1)
    return scale[jnp.minimum(expert_M, len(scale) - 1), 0]


def _rows(x, q, sizes):
    """[B, T, K] → [1, M, K]; other rows are in one dim already."""
    return x.reshape(len(q), -1, x.shape[-1]) if sizes is None else x


def _dot(dims: str, a, b, sizes, dtype):
    """Rows a[..., M, K] times b[E, K, N]."""
    a, b, sums = _operands(a, b)
    if sizes is None:
        # It has the batch dim E even if E is 1: remat's "dots" then saves no sums of 4 bytes.
        y = jnp.einsum(dims, a.reshape(len(b), -1, a.shape[-1]), b, **sums)
    else:
        b = b if dims == "EMK,EKN->EMN" else b.swapaxes(1, 2)
        y = jax.lax.ragged_dot(a, b, sizes, **sums)
    return y.astype(dtype)


def _dot_rows(a, b, sizes, K: tuple, N: tuple):
    """The gradient of a weight [E, K..., N...]: a[..., M, K] times b[..., M, N] over M.

    Its dims are the weight's own, and it has the sums' type: TPUs scatter a product that is only
    rounded while they compute it.
    """
    a, b, sums = _operands(a, b)
    if sizes is not None:
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return jax.lax.ragged_dot_general(a, b, sizes, numbers, **sums)
    a, b = a.reshape(len(b), -1, *K), b.reshape(*b.shape[:2], *N)
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((0,), (0,))), **sums)


def _operands(a, b):
    """Operands that the devices can multiply, and the type of their sums."""
    if not native(a.dtype) or not native(b.dtype):
        wide = jnp.float32 if device().platform == "cpu" else jnp.bfloat16  # both are exact
        a, b = a.astype(wide), b.astype(wide)
    sums = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    return a, b, {"preferred_element_type": sums}


def native(dtype) -> bool:
    """Whether the active mesh's devices multiply numbers of this type."""
    here = device()
    return here.platform != "cpu" if dtype == jnp.int8 else has_float8(here.device_kind)


def has_float8(kind: str) -> bool:
    """Whether devices of this kind multiply float8 numbers."""
    return any(word in kind for word in FLOAT8_DEVICES)
