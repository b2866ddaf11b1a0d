"""Lines of the user's files from which operations of a traced function come."""

import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from flax import nnx
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]  # JAX 0.12 calls it Jaxpr too
    Jaxpr,
    JaxprEqn,
)

from recipes.common.report.hlo import Frame

KIT = "sharding.py"  # its helpers apply a constraint that their caller states
# Primitives that move data between devices.
COLLECTIVES = ("psum", "psum_invariant", "psum2", "pmax", "pmin", "all_gather", "all_gather_invariant",
               "reduce_scatter", "all_to_all", "ppermute")  # fmt: skip


def folder_of(model: nnx.Module) -> pathlib.Path:
    """The folder of the model's own file."""
    return pathlib.Path(sys.modules[type(model).__module__].__file__ or "").absolute().parent


def source_line(eqn: JaxprEqn, folder: pathlib.Path) -> str:
    """Where in the folder an operation comes from, as "model.py:120"; "" if JAX doesn't know."""
    trace = eqn.source_info.traceback
    return line_of(
        [Frame(x.file_name, x.line_num, x.function_name) for x in trace.frames] if trace else [],
        folder,
    )


def line_of(frames: Iterable[Frame], folder: pathlib.Path) -> str:
    """The innermost of some calls that is in the folder or in a room of it; "" if none is."""
    for frame in frames:
        path = pathlib.Path(frame.file)
        if folder in (path.parent, path.parent.parent) and path.name != KIT:
            return f"{path.name}:{frame.line}"
    return ""


def constraint(eqn: JaxprEqn) -> Any:
    """The sharding that an equation constrains its operand to; None for other equations."""
    parameter = {"reshard": "dst_sharding", "sharding_constraint": "sharding"}
    return eqn.params.get(parameter.get(eqn.primitive.name, ""))


def num_consts(eqn: JaxprEqn) -> int:
    """Number of a scan's operands that are the same in each iteration."""
    return eqn.params["num_consts"] if "num_consts" in eqn.params else _operands(eqn)[0]


def num_carry(eqn: JaxprEqn) -> int:
    """Number of arrays that a scan carries from iteration to iteration."""
    return eqn.params["num_carry"] if "num_carry" in eqn.params else _operands(eqn)[1]


def _operands(eqn: JaxprEqn) -> list[int]:
    """Numbers of a scan's constants, carried arrays and arrays to scan over, on JAX 0.12."""
    return [len(part) for part in eqn.params["ft_in"].unpack()]


def bodies(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs inside an equation, such as a scan's."""
    for value in eqn.params.values():
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def float32_line(jaxpr: Jaxpr, folder: pathlib.Path) -> str:
    """Where a float32 array is computed first; "" if nowhere."""
    for eqn in jaxpr.eqns:
        if inner := next(filter(None, (float32_line(x, folder) for x in bodies(eqn))), ""):
            return inner
        if any(var.aval.str_short().startswith("float32[") for var in eqn.outvars):
            return source_line(eqn, folder) or "an unknown line"
    return ""
