"""Matmuls of layers in int8 or float8. layers.py imports this file if Config.matmul is set.

Weights are rounded at rest, so FSDP gathers bytes. quantization.py has the arithmetic.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .quantization import FORMATS, Product, bits, multiply_rounded, numbers, quantize
from .sharding import constrain, mesh_axes, per_device

ROWS = ("batch", "seq")  # the logical axes of activations' rows


class Rounded(NamedTuple):
    """The rounded input of products."""

    exact: jax.Array  # [B, T, K...]
    x: jax.Array  # copies [R, B, T, K...], one for each part of the gradient; nothing reads them
    copies: tuple[str, ...]  # the logical axes of R
    q: jax.Array  # [B, T, K...]
    scale: jax.Array  # [B, T, 1...]


class Low(NamedTuple):
    """How to multiply by a layer's weight."""

    weight: jax.Array  # at rest
    scale: jax.Array | None  # if the weight is stored rounded
    rest: tuple[str, ...]  # its logical axes
    use: tuple[str, ...]  # those in use
    config: Any

    def multiply(self, x, contract: int, seq: str):
        """layers.multiply in low precision; x: an array or Rounded."""
        inner, outer = self.use[:contract], self.use[contract:]
        x = x if isinstance(x, Rounded) else self.round(x, contract)
        over, split = mesh_axes(inner), mesh_axes(x.copies)
        how, w, rest = self.product(self.use, outer)
        parted = bool(over) and mesh_axes(seq) == over
        equal = tuple(name for name in split if name not in mesh_axes(outer))
        how = how._replace(joined=over, parted=parted, equal=equal)

        def local(x, w, x_q, x_scale, q, scale):
            shapes = q.shape, q.shape[:contract], q.shape[contract:]
            K = math.prod(shapes[1])
            x, x_q = (a.reshape(*x_q.shape[:2], K) for a in (x, x_q))
            x_scale, scale = x_scale.reshape(*x_q.shape[:2], 1), scale.reshape(1, 1, -1)
            arrays = x, w, x_q, x_scale, q.reshape(1, K, -1), scale
            y = jnp.asarray(multiply_rounded(how._replace(shapes=shapes), *arrays))
            return y.reshape(*y.shape[:2], *shapes[2])

        rows, none = ("batch", "seq"), [None] * contract
        axes = [(x.copies, *rows, *inner), rest, (*rows, *inner), (*rows, *none), self.use]
        axes.append((*none, *outer))
        arrays = x.x, w, x.q, x.scale, *self.rounded(*range(contract))
        y = per_device(local, arrays, axes, ("batch", seq if parted else "seq", *outer))
        return checkpoint_name(constrain(y, "batch", seq, *outer), "product")

    def round(self, x, contract: int = 1) -> Rounded:
        """Rounds the input of this weight's product. Positions of x that are split are gathered so.

        Devices that split the weight's columns have parts of x's gradient. Those of several
        products are added on each device, and then over devices, in the transpose of `copy`.
        """
        inner, outer = self.use[:contract], self.use[contract:]
        within, parts = "residual_seq", mesh_axes(outer)
        if not {*mesh_axes(within)} <= {*parts}:
            within, x = "seq", constrain(x, "batch", "seq", *inner)
        between = tuple(name for name in mesh_axes(within) if name not in mesh_axes("seq"))
        dims = tuple(range(-contract, 0))
        form = FORMATS[self.config.matmul][1]
        q, scale = quantize(jax.lax.stop_gradient(x), dims, form)
        q = constrain(bits(constrain(q, "batch", within, *inner)), "batch", "seq", *inner)
        scale = constrain(scale, "batch", "seq", *[None] * contract)
        if between:
            q, scale = (checkpoint_name(a, "gathered") for a in (q, scale))
        q = numbers(q, form)

        def copy(x):
            if between:
                x = jax.lax.all_gather(x, between, axis=1, tiled=True)
            if over := tuple(name for name in parts if name not in between):
                x = jax.lax.pcast(x, over, to="varying")
            return x[None]

        axes = [("batch", within, *inner)], (outer, "batch", "seq", *inner)
        return Rounded(x, per_device(copy, [x], *axes), outer, q, scale)

    def product(self, use, outer) -> tuple[Product, jax.Array, tuple]:
        """(Product, the weight that gets the gradient, its logical axes); use: axes inside of it.

        Where devices have different rows, the gradient is scattered as the weight rests.
        """
        pairs = [(mesh_axes(a), mesh_axes(b)) for a, b in zip(self.rest, use, strict=True)]
        w, axes, rows = self.weight.astype(self.config.dtype), self.rest, mesh_axes(ROWS)
        alone = tuple(rest[len(used) :] for rest, used in pairs)
        apart = {name for names in alone for name in names}
        if any(rest[: len(used)] != used for rest, used in pairs) or not apart <= {*rows}:
            w, axes, alone, apart = constrain(w, *use), use, ((),) * len(use), set()
        summed = tuple(name for name in rows if name not in apart)
        columns, positions = (mesh_axes(dims, manual=True) for dims in (outer, ROWS))
        formats = self.config.matmul, self.config.matmul_backward
        return Product(*formats, columns, positions, alone, summed), w, axes

    def rounded(self, *dims: int) -> tuple[jax.Array, jax.Array]:
        """The rounded weight in use and its scales; `dims`: those that products contract."""
        form = FORMATS[self.config.matmul][0]
        if self.scale is None:
            q, scale = quantize(jax.lax.stop_gradient(self.weight), dims, form)
        else:
            q, scale = self.weight, jnp.expand_dims(self.scale, dims)
        q = numbers(constrain(bits(constrain(q, *self.rest)), *self.use), form)
        names = [None if dim in dims else axis for dim, axis in enumerate(self.use)]
        return q, constrain(scale, *names)


def lowered(weights, used, names: dict[str, str], config):
    """Makes a layer in use multiply in config.matmul. Returns it.

    Args:
      weights: the layer with its weights at rest; used: the same in use.
      names: logical axis of a weight at rest → its name in use. Weights without such an axis, and
        adapters, are multiplied as before.
    """
    pairs = zip(nnx.iter_graph(weights), nnx.iter_graph(used), strict=True)
    for (_, at_rest), (_, module) in [*pairs]:
        for name, weight in matrices(at_rest, {*names, *names.values()}):
            variable, w = getattr(module, name), weight[...]
            rest, use = (x.out_sharding[-w.ndim :] for x in (weight, variable))
            scale = getattr(at_rest, f"{name}_scale", None)
            low = Low(w, None if scale is None else scale[...], rest, use, config)
            setattr(module, name, variable.replace(low=low))
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
    stacks = model.layers, getattr(model, "dense", None)
    for _, module in [pair for stack in stacks if stack for pair in nnx.iter_graph(stack)]:
        for name, weight in matrices(module, {*names}):
            axes = weight.out_sharding
            first = sum(axis in ("layers", "dense_stack", "expert") for axis in axes)
            # D comes first, and is contracted, or last.
            dims = (first,) if axes[first] in names else tuple(range(first, len(axes) - 1))
            q, scale = quantize(weight[...], dims, FORMATS["int8_weights"][0])
            axes = tuple(axis for dim, axis in enumerate(axes) if dim not in dims)
            scale = nnx.Param(jnp.squeeze(scale, dims), out_sharding=axes, eager_sharding=False)
            setattr(module, name, weight.replace(q))
            setattr(module, f"{name}_scale", scale)
    return model


def of_experts(expert, split, capacity, weights, axes):
    """(a function like `expert` that multiplies in low precision, arrays for it, their axes).

    Args:
      expert, capacity: see experts.mix; split: logical axis → mesh axes; axes: of each weight.
    """
    hows, arrays, found = [], [], []
    for weight, use in zip(weights, axes, strict=True):
        low, how, given, names = getattr(weight, "low", None), None, [weight[...]], [use]
        if low:
            how, w, rest = low.product(use, use[2])
            rows, summed = (
                tuple(name for name in names if name not in split["expert"])
                for names in (how.rows, how.summed)
            )
            # With a capacity, devices along `expert` have rows of other experts.
            how = how._replace(rows=how.rows if capacity is None else rows, summed=summed)
            how = how, mesh_axes(use[1], manual=True)
            given, names = [w, *low.rounded(1)], [rest, use, (use[0], None, use[2])]
        hows, arrays, found = [*hows, how], arrays + given, found + names

    def run(dot, x, *arrays):
        left = iter(arrays)

        def multiply(x, operand):
            if not isinstance(operand, tuple):
                return dot(x, operand)
            (how, inner), w, q, scale = operand
            how = how._replace(shapes=(q.shape, q.shape[1:2], q.shape[2:]))
            form = FORMATS[how.matmul][1]
            rounded = quantize(jax.lax.stop_gradient(x), (-1,), form, inner)
            sizes = getattr(dot, "keywords", {}).get("group_sizes")
            return multiply_rounded(how, x, w, *rounded, q, scale, sizes)

        operands = ((how, *(next(left) for _ in range(3))) if how else next(left) for how in hows)
        return expert(multiply, x, *operands)

    return run, arrays, found
