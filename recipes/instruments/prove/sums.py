"""Finds sums in 16 bits: where a traced program adds up many numbers in a format of 16 bits.

A sum in bfloat16 no longer changes once it is 256 times as large as the next term. Matmuls accumulate
in float32 on all platforms. Everything else that adds up does so in the dtype that the program states:
scatters, loops that add to what they carry, reductions, gradients of what is used many times.
"""

import math
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from recipes.instruments.prove.source import bodies, num_carry, num_consts, source_line

FEW = 16  # terms, whose sum loses little
ADD = ("add", "add_any")
# Primitives through which a loop may pass the sum that it carries.
PASS = ("convert_element_type", "reshard", "sharding_constraint", "mul", "select_n", "copy", "reshape",
        "transpose", "broadcast_in_dim", "squeeze", "optimization_barrier")  # fmt: skip
LOOP = "loop"


class Sum(NamedTuple):
    """A sum that a program accumulates in 16 bits."""

    what: str  # the primitive that adds, or LOOP
    array: str  # dtype and shape of the sums, such as "bfloat16[384,64]"
    terms: int | None  # numbers that one element may be the sum of; None: data decide
    line: str  # where the program says so, as "model.py:120"; "" if JAX doesn't know

    def __str__(self) -> str:
        verb = "a loop adds" if self.what == LOOP else f"{self.what} adds"
        terms = "an unknown number of" if self.terms is None else f"up to {self.terms:,}"
        return f"{self.line or 'an unknown line'}: {verb} {terms} terms in {self.array}"

    @property
    def most_terms(self) -> float:
        return math.inf if self.terms is None else self.terms


def low_precision_sums(jaxpr: Jaxpr, folder: pathlib.Path, few: int = FEW) -> list[Sum]:
    """The sums of more than `few` terms that a traced program accumulates in 16 bits.

    Residual streams are left out: a layer reads what it adds to, so its input has the format of its
    output. So are sums over devices, which have a term for each. Kernels (Pallas) are not searched,
    nor arrays of which a loop updates parts in place.

    Args:
      folder: of the files whose lines are named.
    """
    long = (x for x in _sums(jaxpr, folder, "") if x.most_terms > few)
    return [*dict.fromkeys(long)]


def _sums(jaxpr: Jaxpr, folder: pathlib.Path, outer_line: str) -> Iterator[Sum]:
    """outer_line: of the equation with this body, whose own equations may have no line."""
    gradients: dict[Any, Sum] = {}  # that are added one by one
    uses: Counter[Any] = Counter(x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, Var))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        line = source_line(eqn, folder) or outer_line
        if eqn.outvars and _is_short(eqn.outvars[0]):
            out = eqn.outvars[0]
            array = out.aval.str_short()
            if terms := _terms(eqn):
                yield Sum(name, array, terms, line)
            elif name == "add_any":
                # A gradient that something else reads too belongs to a residual stream.
                parts = [gradients.pop(x) for x in eqn.invars if x in gradients and uses[x] == 1]
                added = sum((x.terms or 1) - 1 for x in parts)
                gradients[out] = Sum(name, array, 2 + added, line)
        if name in ("scan", "while"):
            yield from _carried_sums(eqn, folder, line)
        if name != "pallas_call":
            for body in bodies(eqn):
                yield from _sums(body, folder, line)
    yield from gradients.values()


def _is_short(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def _terms(eqn: JaxprEqn) -> int:
    """Number of terms of each element that an equation computes; 0 if it adds nothing up."""
    params = eqn.params
    match eqn.primitive.name.replace("_", "-"):
        case "scatter-add":
            batched = params["dimension_numbers"].scatter_indices_batching_dims
            indices: Any = eqn.invars[1].aval
            rows = (n for dim, n in enumerate(indices.shape[:-1]) if dim not in batched)
            return 1 if params["unique_indices"] else math.prod(rows)
        case "reduce-sum":
            return math.prod(_local_size(eqn.invars[0].aval, axis) for axis in params["axes"])
        case "cumsum":
            return _local_size(eqn.invars[0].aval, params["axis"])
        case "reduce-window-sum" | "select-and-scatter-add":
            return math.prod(params["window_dimensions"])
    return 0


def _local_size(array: Any, axis: int) -> int:
    """The size of a dim on one device: the sum over devices is a collective."""
    spec = [*array.sharding.spec, *[None] * array.ndim]
    names = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
    return array.shape[axis] // math.prod(array.sharding.mesh.shape[n] for n in names if n)


def _carried_sums(loop: JaxprEqn, folder: pathlib.Path, outer_line: str) -> Iterator[Sum]:
    """Arrays in 16 bits to which each iteration of a loop adds."""
    if loop.primitive.name == "while":
        _, body = bodies(loop)  # after its condition
        first = loop.params["body_nconsts"]
        number = len(body.outvars)
        terms = None
    else:
        body = next(bodies(loop))
        first = num_consts(loop)
        number = num_carry(loop)
        terms = loop.params["length"]
    carried = zip(body.invars[first : first + number], body.outvars[:number], strict=True)
    for before, after in carried:
        if _is_short(before) and (adding := _added_to(body, before, after)):
            line = source_line(adding, folder) or outer_line
            array: Any = before.aval
            yield Sum(LOOP, array.str_short(), terms, line)


def _added_to(body: Jaxpr, before: Any, after: Any) -> JaxprEqn | None:
    """The equation that adds to `before` to give `after`; None if something else reads it too."""
    chain: dict[Any, JaxprEqn | None] = {before: None}  # variable → what has added to it
    for eqn in body.eqns:
        places = [i for i, x in enumerate(eqn.invars) if isinstance(x, Var) and x in chain]
        if not places:
            continue
        inner = [*bodies(eqn)]
        if eqn.primitive.name in ADD and len(places) == 1:
            chain[eqn.outvars[0]] = eqn
        elif eqn.primitive.name in PASS and len(places) == 1:
            chain[eqn.outvars[0]] = chain[eqn.invars[places[0]]]
        elif len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
            for out, inner_out in zip(eqn.outvars, inner[0].outvars, strict=True):
                if adding := _added_to(inner[0], inner[0].invars[places[0]], inner_out):
                    chain[out] = adding
        else:
            return None
    return None if isinstance(after, Literal) else chain.get(after)
