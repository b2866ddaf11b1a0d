"""The activations and caches of a model, as traced, by their logical axes."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from recipes.common import entries
from recipes.common.sharding.abstract import AbstractModel
from recipes.common.sharding.shape import Shape
from recipes.instruments.plan import step_memory, textbook
from zoo.core.sharding import AxisNames
from zoo.options import cache as zoo_cache

ROWS, LENGTH = 3, 16  # of the batch that `activations` traces
Array = tuple[tuple[str | None, ...], tuple[int, ...]]  # (logical axes, shape)


def activations(abstract: AbstractModel, batch: dict[str, Any]) -> list[Array]:
    """The activations that the loss shards, as traced: those with a name for each dim.

    A dim of 0 stands for the batch's rows, and one of -1 for a row's positions.
    """
    names = abstract.names
    inside, *between = names.positions or ("",)
    tied = {axis: (axis, inside) for axis in between}  # a shard_map needs all axes of T

    def loss(variables, batch):
        return abstract.merge(variables).loss(**batch)[0]

    with _axes_as_mesh(names, AxisType.Auto, {}, tied):
        traced = jax.make_jaxpr(loss)(abstract.shapes, batch)
    rows = dict.fromkeys(names.positions, -1) | {"batch": 0}
    arrays = [
        _named(spec, shape, rows)
        for spec, shape in _constraints(traced.jaxpr)
        if len(spec) == len(shape) and shape[:1] == (ROWS,) and None not in spec
    ]
    return [*dict.fromkeys(array for array in arrays if array[0][0] == "batch")]


def cache(abstract: AbstractModel) -> list[Array]:
    """The keys and values that generation keeps; a dim of 0 or -1 as in `activations`."""
    names = abstract.names
    known, positions = names.logical_axes, names.positions
    elsewhere = {a for a, on in known.items() if on in ("weights", "both", "stack")}
    (slots,) = known.keys() - elsewhere - {"batch", *positions, *names.in_use.values()}
    rules = {axis: None for axis, on in known.items() if on in ("weights", "stack")}
    # Explicit axes must agree: an array's heads are queries' or keys', its T positions or slots.
    rules |= dict.fromkeys(positions) | {textbook.HEADS: step_memory.KV_HEADS}

    def prefill(variables, tokens, lengths):
        return zoo_cache.prefill(abstract.merge(variables), tokens, lengths, LENGTH)[1]

    tokens, lengths = (jax.ShapeDtypeStruct(dims, np.int32) for dims in ((ROWS, LENGTH), (ROWS,)))
    with _axes_as_mesh(names, AxisType.Explicit, {slots: 2}, rules):
        kept = jax.eval_shape(prefill, abstract.shapes, tokens, lengths)
    arrays = jax.tree.leaves((kept.k, kept.v))  # of each stack, if layers are unlike
    return [_named(x.sharding.spec, x.shape, {"batch": 0, slots: -1}) for x in arrays]


def _named(spec: Any, shape: tuple[int, ...], stand_ins: dict[str, int]) -> Array:
    axes = tuple(axis[0] if isinstance(axis, tuple) else axis for axis in spec)
    return axes, tuple(stand_ins.get(axis, n) for axis, n in zip(axes, shape, strict=True))


def loss_batch(entry: str, config: Any, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """The arguments of a model's loss."""
    row = jax.ShapeDtypeStruct((LENGTH,), np.int32)
    example = (
        {"tokens": row, "targets": row} if shape.vocab_size else entries.example(entry, config)
    )
    return {name: jax.ShapeDtypeStruct((ROWS, *x.shape), x.dtype) for name, x in example.items()}


def _constraints(jaxpr: Any) -> Iterator[tuple[tuple, tuple[int, ...]]]:
    """(spec, shape) of every array that a program constrains."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            yield tuple(equation.params["sharding"].spec), equation.outvars[0].aval.shape
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _constraints(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


@contextlib.contextmanager
def _axes_as_mesh(
    names: AxisNames, kind: AxisType, sizes: Mapping[str, int], rules: dict[str, Any]
):
    """A context to trace in, whose mesh axes are the logical axes: specs name these.

    Args:
      sizes: of the axes that have more than one device.
      rules: of the axes that are not mapped to themselves alone.
    """
    axes = tuple(names.logical_axes)
    mesh = AbstractMesh(
        tuple(sizes.get(name, 1) for name in axes), axes, axis_types=(kind,) * len(axes),
        abstract_device=AbstractDevice("cpu", None, "cpu"),
    )  # fmt: skip
    rules = {axis: axis for axis in axes} | rules
    for axis, other in names.within.items():
        rules[other] = (other, axis)
    with jax.sharding.use_abstract_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        yield
