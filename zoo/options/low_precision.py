"""Matmuls of layers in int8 or float8, with config.matmul.

Weights are rounded at rest, so FSDP gathers bytes. quantization.py has the arithmetic.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..core.layers import WeightInUse, gather_positions
from .quantization import FORMATS, Product, bits, multiply_rounded, numbers, quantize
from ..core.sharding import constrain, mesh_axes, per_device

ROWS = ("batch", "seq")  # the logical axes of activations' rows


class RoundedInput(NamedTuple):
    """The input of products, rounded once for all weights that multiply it."""

    exact: jax.Array  # [B, T, K...]
    x: jax.Array  # copies [R, B, T, K...], one for each part of the gradient; nothing reads them
    copies: tuple[str, ...]  # the logical axes of R
    q: jax.Array  # [B, T, K...]
    scale: jax.Array  # [B, T, 1...]


class RoundedWeight(WeightInUse):
    """A weight in use whose products are rounded."""

    at_rest: jax.Array
    scale: jax.Array | None  # if the weight is stored rounded
    rest_axes: tuple[str, ...]  # its logical axes at rest
    use_axes: tuple[str, ...]  # those in use
    config: Any

    def multiply(self, x, contract: int, seq: str) -> jax.Array:
        """layers.multiply in low precision; x: an array or RoundedInput."""
        inner = self.use_axes[:contract]
        outer = self.use_axes[contract:]
        x = x if isinstance(x, RoundedInput) else self.round_input(x, contract)
        summed = mesh_axes(inner)
        scatters = bool(summed) and mesh_axes(seq) == summed
        product, w, rest_axes = self.rounded_product(self.use_axes, outer)
        product = product._replace(
            inner=summed,
            scatters=scatters,
            equal=tuple(name for name in mesh_axes(x.copies) if name not in mesh_axes(outer)),
        )

        def local(x, w, x_q, x_scale, q, scale):
            K = math.prod(q.shape[:contract])
            y = multiply_rounded(
                product._replace(shapes=(q.shape, q.shape[:contract], q.shape[contract:])),
                x.reshape(*x_q.shape[:2], K),
                w,
                x_q.reshape(*x_q.shape[:2], K),
                x_scale.reshape(*x_q.shape[:2], 1),
                q.reshape(1, K, -1),
                scale.reshape(1, 1, -1),
            )
            y = jnp.asarray(y)
            return y.reshape(*y.shape[:2], *q.shape[contract:])

        q, scale = self.rounded(*range(contract))
        rows = ("batch", "seq")
        replicated = [None] * contract
        y = per_device(
            local,
            (x.x, w, x.q, x.scale, q, scale),
            [
                (x.copies, *rows, *inner),
                rest_axes,
                (*rows, *inner),
                (*rows, *replicated),
                self.use_axes,
                (*replicated, *outer),
            ],
            ("batch", seq if scatters else "seq", *outer),
        )
        return checkpoint_name(constrain(y, "batch", seq, *outer), "product")

    def prepare(self, x_BTD: jax.Array) -> RoundedInput:
        return self.round_input(x_BTD, 1)

    def round_input(self, x: jax.Array, contract: int) -> RoundedInput:
        """Rounds the input of this weight's product, and then gathers its positions if they are split.

        Devices that split the weight's columns each compute a part of x's gradient. The parts of
        several products add up on each device; the transpose of `copy` sums them over devices.
        """
        inner = self.use_axes[:contract]
        outer = self.use_axes[contract:]
        columns = mesh_axes(outer)
        seq = "residual_seq"  # x's positions
        if not {*mesh_axes(seq)} <= {*columns}:
            seq = "seq"
            x = constrain(x, "batch", "seq", *inner)
        gathered = tuple(name for name in mesh_axes(seq) if name not in mesh_axes("seq"))
        dims = tuple(range(-contract, 0))
        form = FORMATS[self.config.matmul][1]
        q, scale = quantize(jax.lax.stop_gradient(x), dims, form)
        q = constrain(bits(constrain(q, "batch", seq, *inner)), "batch", "seq", *inner)
        scale = constrain(scale, "batch", "seq", *[None] * contract)
        if gathered:
            q, scale = (checkpoint_name(a, "gathered") for a in (q, scale))
        q = numbers(q, form)

        def copy(x):
            if gathered:
                x = jax.lax.all_gather(x, gathered, axis=1, tiled=True)
            if replicated := tuple(name for name in columns if name not in gathered):
                x = jax.lax.pcast(x, replicated, to="varying")
            return x[None]

        copies = per_device(copy, [x], [("batch", seq, *inner)], (outer, "batch", "seq", *inner))
        return RoundedInput(exact=x, x=copies, copies=outer, q=q, scale=scale)

    def exact_input(self, x) -> jax.Array:
        return gather_positions(x.exact) if isinstance(x, RoundedInput) else x

    def dense(self) -> jax.Array:
        """The weight in use, in float32 if it is stored in int8."""
        if self.scale is None:
            return self[...]
        return self[...].astype(jnp.float32) * self.scale[None]

    def rounded_product(self, use_axes, outer) -> tuple[Product, jax.Array, tuple]:
        """(Product, the weight that gets the gradient, its logical axes); outer: axes of columns.

        Where devices have different rows, the gradient is scattered as the weight rests.
        """
        pairs = [
            (mesh_axes(a), mesh_axes(b)) for a, b in zip(self.rest_axes, use_axes, strict=True)
        ]
        w = self.at_rest.astype(self.config.dtype)
        axes = self.rest_axes
        rows = mesh_axes(ROWS)
        scattered = tuple(rest[len(used) :] for rest, used in pairs)
        scattered_axes = {name for names in scattered for name in names}
        nested = all(rest[: len(used)] == used for rest, used in pairs)
        if not nested or not scattered_axes <= {*rows}:
            w = constrain(w, *use_axes)
            axes = use_axes
            scattered = ((),) * len(use_axes)
            scattered_axes = set()
        product = Product(
            matmul=self.config.matmul,
            backward=self.config.matmul_backward,
            outer=mesh_axes(outer, manual=True),
            rows=mesh_axes(ROWS, manual=True),
            scattered=scattered,
            summed=tuple(name for name in rows if name not in scattered_axes),
        )
        return product, w, axes

    def rounded(self, *dims: int) -> tuple[jax.Array, jax.Array]:
        """The rounded weight in use and its scales; `dims`: those that products contract."""
        form = FORMATS[self.config.matmul][0]
        if self.scale is None:
            q, scale = quantize(jax.lax.stop_gradient(self.at_rest), dims, form)
        else:
            q, scale = self.at_rest, jnp.expand_dims(self.scale, dims)
        q = numbers(constrain(bits(constrain(q, *self.rest_axes)), *self.use_axes), form)
        names = [None if dim in dims else axis for dim, axis in enumerate(self.use_axes)]
        return q, constrain(scale, *names)


def lowered(layer, used, names: dict[str, str], config):
    """Makes a layer in use multiply in config.matmul. Returns it.

    Args:
      layer: the layer with its weights at rest; used: the same in use.
      names: logical axis of a weight at rest → its name in use. Weights without such an axis, and
        adapters, are multiplied as before.
    """
    pairs = zip(nnx.iter_graph(layer), nnx.iter_graph(used), strict=True)
    for (_, at_rest), (_, module) in [*pairs]:
        for name, weight in matrices(at_rest, {*names, *names.values()}):
            in_use = getattr(module, name)
            w = weight[...]
            scale = getattr(at_rest, f"{name}_scale", None)
            rounded = RoundedWeight(
                in_use[...],
                at_rest=w,
                scale=None if scale is None else scale[...],
                rest_axes=weight.out_sharding[-w.ndim :],
                use_axes=in_use.out_sharding[-w.ndim :],
                config=config,
                out_sharding=in_use.out_sharding,
                eager_sharding=False,
            )
            setattr(module, name, rounded)
    return used


def matrices(module, names: set[str]) -> list:
    """(name, variable) of a module's own weights that have one of these logical axes."""
    return [
        (name, weight)
        for name, weight in (vars(module).items() if isinstance(module, nnx.Module) else ())
        if isinstance(weight, nnx.Param) and not isinstance(weight, nnx.LoRAParam)
        if names & {*weight.out_sharding} and not name.endswith("_scale")
    ]


def store(model, names: dict[str, str]):
    """Rounds the matrices of a model's layers to int8, for inference. Returns the model.

    It then needs config.matmul="int8_weights". The scales of a weight `q` are a parameter `q_scale`.
    """
    stacks = model.axes.stacks
    for _, module in [*nnx.iter_graph(model)]:
        for name, weight in matrices(module, {*names}):
            axes = weight.out_sharding
            if axes[0] not in stacks:
                continue
            first = sum(axis in (*stacks, "expert") for axis in axes)
            # D comes first, and is contracted, or last.
            dims = (first,) if axes[first] in names else tuple(range(first, len(axes) - 1))
            q, scale = quantize(weight[...], dims, FORMATS["int8_weights"][0])
            axes = tuple(axis for dim, axis in enumerate(axes) if dim not in dims)
            scale = nnx.Param(jnp.squeeze(scale, dims), out_sharding=axes, eager_sharding=False)
            setattr(module, name, weight.replace(q))
            setattr(module, f"{name}_scale", scale)
    return model


def of_experts(expert, split, weights, axes, dtype):
    """(a function like `expert` that multiplies in low precision, arrays for it, their axes).

    Args:
      expert: see mixture.mix; split: logical axis → mesh axes; axes: of each weight; dtype: of
        rows, and of weights that are not rounded.
    """

    def others(names):
        return tuple(name for name in names if name not in split["expert"])

    products: list[tuple[Product, tuple[str, ...]] | None] = []  # and the mesh axes of K
    arrays, array_axes = [], []
    for weight, use_axes in zip(weights, axes, strict=True):
        if not isinstance(weight, RoundedWeight):
            products.append(None)
            arrays.append(weight[...].astype(dtype))
            array_axes.append(use_axes)
            continue
        product, w, rest_axes = weight.rounded_product(use_axes, use_axes[2])
        product = product._replace(summed=others(product.summed))
        products.append((product, mesh_axes(use_axes[1], manual=True)))
        arrays += [w, *weight.rounded(1)]
        array_axes += [rest_axes, use_axes, (use_axes[0], None, use_axes[2])]

    def run(dot, x, *arrays):
        remaining = iter(arrays)

        def multiply(x, operand):
            if not isinstance(operand, tuple):
                return dot(x, operand)
            (product, inner), w, q, scale = operand
            # Each expert's rows have scales of their own, but groups of rows have them in common.
            rows = others(product.rows) if dot.sizes_E is None else product.rows
            product = product._replace(rows=rows, shapes=(q.shape, q.shape[1:2], q.shape[2:]))
            form = FORMATS[product.matmul][1]
            x_q, x_scale = quantize(jax.lax.stop_gradient(x), (-1,), form, inner)
            return multiply_rounded(product, x, w, x_q, x_scale, q, scale, dot.sizes_E)

        operands = (
            (product, *(next(remaining) for _ in range(3))) if product else next(remaining)
            for product in products
        )
        return expert(multiply, x, *operands)

    return run, arrays, array_axes
