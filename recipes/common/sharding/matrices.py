"""The hidden matrices among a model's parameters, and how Muon deals them out over a mesh."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from zoo.core.strategies import LAYERS
from zoo.experts.expert_strategies import EXPERT
from zoo.options.dense_first import DENSE_STACK

# Logical axes of a model's inputs and outputs: Muon skips matrices with these.
MODEL_ENDS = ("vocab", "positions", "token_types", "inputs", "channels", "classes")
MODEL_ENDS += ("words", "text_positions")
MATRIX_STACKS = (LAYERS, DENSE_STACK, EXPERT)  # dims along which matrices are stacked
RANKS = ("lora",)  # of adapters: one side of their matrices

ITERATIONS = 5  # of Newton-Schulz, each of three products


def matrix_sides(axes: tuple[str, ...], in_use: dict[str, str]) -> list[list[int]]:
    """The dims of a hidden matrix's rows and columns; [] for other parameters.

    One side of a hidden matrix is the dim of the residual stream (an axis in `in_use`) or an adapter's
    rank; the other dims are the other side: q [D, N, H] is a D × N·H matrix, o [N, H, D] N·H × D.

    Args:
      axes: the parameter's logical axes.
      in_use: of the model's AxisNames.
    """
    dims = [dim for dim, axis in enumerate(axes) if axis not in MATRIX_STACKS]
    sides = {*RANKS} & {*axes} or {*in_use}
    stream = [dim for dim in dims if axes[dim] in sides]
    others = [dim for dim in dims if dim not in stream]
    if len(stream) != 1 or not others or {*MODEL_ENDS} & {*axes}:
        return []
    return sorted([stream, others])


class Dim(NamedTuple):
    """A dim of a matrix's side."""

    size: int  # on a device
    axes: tuple[str, ...]  # of the mesh, that split it


class Form(NamedTuple):
    """Shape and layout of a parameter's matrices. Those of one form are dealt out together."""

    rows: tuple[Dim, ...]  # the shorter side
    columns: tuple[Dim, ...]
    stack_axes: tuple[str, ...]  # of the mesh, that split the stack

    @property
    def dims(self) -> tuple[Dim, ...]:
        return self.rows + self.columns

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that split the matrices."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    def replicas(self, mesh) -> tuple[str, ...]:
        """The mesh axes along which devices hold the same."""
        return tuple(axis for axis in mesh.axis_names if axis not in (*self.axes, *self.stack_axes))

    def share(self, count: int, mesh) -> int:
        """How many matrices a device gets, of `count` that it has parts of."""
        return -(-count // devices(mesh, (*self.axes, *self.replicas(mesh))))

    def side(self, dims: tuple[Dim, ...], mesh) -> int:
        """The size of a side, over all devices."""
        return math.prod(dim.size * devices(mesh, dim.axes) for dim in dims)


def devices(mesh, axes: Sequence[str]) -> int:
    """Devices along these mesh axes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def form_of(
    shape: tuple[int, ...], spec: Sequence, sides: Sequence[Sequence[int]], mesh
) -> tuple[Form, tuple[int, ...]]:
    """(the form of a parameter's matrices, the order of its dims: stack, rows, columns).

    Args:
      spec: its PartitionSpec.
      sides: of `matrix_sides`.
    """
    axes = [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]
    every = [Dim(n // devices(mesh, over), over) for n, over in zip(shape, axes, strict=True)]
    rows, columns = (tuple(dims) for dims in sides)
    if math.prod(shape[i] for i in rows) > math.prod(shape[i] for i in columns):
        rows, columns = columns, rows
    stack = tuple(i for i in range(len(shape)) if i not in (*rows, *columns))
    form = Form(
        rows=tuple(every[i] for i in rows),
        columns=tuple(every[i] for i in columns),
        stack_axes=tuple(axis for i in stack for axis in axes[i]),
    )
    return form, (*stack, *rows, *columns)
