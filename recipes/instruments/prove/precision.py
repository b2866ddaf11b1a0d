"""Compares a model's gradients in a 16-bit format with its float32 ones, and names what loses digits."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from recipes.common.runtime import UserError
from recipes.common.sharding import Layout, Tree, paths, shardings
from recipes.common.sharding.compiler_options import QUICK
from recipes.common.train.feed import to_devices
from recipes.common.train.state import abstract_state
from recipes.common.train.step import gradients
from recipes.instruments.prove import comparison
from recipes.instruments.prove.layouts import check_loss, layouts, make_meshes, reference_layout
from recipes.instruments.prove.run import initial_state
from recipes.instruments.prove.source import folder_of
from recipes.instruments.prove.sums import Sum, low_precision_sums
from recipes.instruments.user_model import UserModel, make_user_model, reason

FORMATS = ("bfloat16", "float16")
BOUND = 0.05  # |g - g32| / |g32| of a parameter; rounding alone gives 0.01 to 0.02
ONE = "one device"


@dataclasses.dataclass(frozen=True)
class Precision:
    """Relative errors of gradients, and the sums that a program accumulates in 16 bits."""

    dtype: str
    errors: dict[str, dict[str, float]]  # ONE or "strategy on mesh" → path → relative error
    sums: tuple[Sum, ...]  # at the planned size
    failed: dict[str, str]  # "strategy on mesh" → why it could not run
    culprits: dict[str, Sum]  # path of a gradient beyond the bound → the sum that it comes from

    @property
    def holds(self) -> bool:
        every = (error for by_path in self.errors.values() for error in by_path.values())
        return not self.failed and all(error <= BOUND for error in every)

    def lines(self) -> list[str]:
        """What recipes.prove prints."""
        lines = []
        for where, by_path in self.errors.items():
            worst = max(by_path, key=lambda path: by_path[path])
            lines.append(f"{where}: largest error {by_path[worst]:.1%}, of {worst}")
        lines += [f"{where}: failed: {why}" for where, why in self.failed.items()]
        for path, where, error in self.beyond():
            culprit = self.culprits.get(path)
            line = f"; {culprit}" if culprit else "; no sum in 16 bits explains it"
            lines.append(f"  {path}: {error:.1%} on {where}{line}")
        lines += [f"in 16 bits: {line}" for line in self.sums]
        good = f"All gradients in {self.dtype} are within {BOUND:.0%} of float32's."
        bad = f"Gradients in {self.dtype} differ from float32's by more than {BOUND:.0%}."
        return [*lines, good if self.holds else bad]

    def beyond(self) -> list[tuple[str, str, float]]:
        """(path, where, error) of each gradient beyond the bound, where its error is largest."""
        largest: dict[str, tuple[str, float]] = {}
        for where, by_path in self.errors.items():
            for path, error in by_path.items():
                if not error <= max(BOUND, largest.get(path, ("", 0.0))[1]):
                    largest[path] = where, error
        return [(path, *at) for path, at in largest.items()]

    def as_json(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "dtype": self.dtype,
            "errors": self.errors,
            "failed": self.failed,
            "sums": [x._asdict() for x in self.sums],
        }


def prove_precision(
    build: Callable[[], nnx.Module],
    loss: Callable[..., Any] | None,
    rules: dict,
    batch: dict[str, Any] | None = None,
    meshes: Iterable[str | Mesh] = (),
    *,
    dtype: str = "bfloat16",
    batch_size: int = 0,
    seq_len: int = 0,
    auto: bool = False,
) -> Precision:
    """Compares gradients of the first batch in `dtype` with one device's in float32.

    Args:
      build, loss, rules, batch, meshes, auto: as in cases.prove.
      batch_size, seq_len: of the training that is planned, at which the sums' terms are counted; 0: the
        batch's.

    Raises UserError if these don't fit each other.
    """
    if dtype not in FORMATS:
        raise UserError(f"--dtype={dtype} is not one of {', '.join(FORMATS)}")
    made = make_meshes(meshes)
    # Both start from numbers that parameters in 16 bits can hold, if the model has such.
    exact = make_user_model(
        lambda: in_float32(in_dtype(build(), dtype)), loss, rules, batch, _optimizer()
    )
    short = make_user_model(
        lambda: in_dtype(build(), dtype), loss, rules, exact.batch, _optimizer()
    )
    pairs, _ = layouts(short, made, auto)
    exact_pairs, _ = layouts(exact, made, auto)
    one = reference_layout(pairs.values())
    exact_one = reference_layout(exact_pairs.values())
    check_loss(exact_one, exact.batch)
    check_loss(one, exact.batch)
    initial = initial_state(exact_one, exact.optimizer, abstract_state(exact_one, exact.optimizer))
    reference = _gradients(exact_one, exact, initial)
    errors, failed = {}, {}
    targets = {ONE: one} | {f"{strategy} on {mesh}": x for (strategy, mesh), x in pairs.items()}
    for where, layout in targets.items():
        try:
            in_16_bits = _gradients(layout, short, initial)
        except Exception as error:  # whatever the user's code raises
            failed[where] = reason(error)
            continue
        differences = comparison.compare_gradients(in_16_bits, reference)
        errors[where] = {path: x.relative for path, x in differences.items()}
    folder = folder_of(nnx.eval_shape(short.build))
    here = _sums(one, short, short.batch, folder, few=1)
    planned = _sums(one, short, _resized(short.batch, batch_size, seq_len), folder)
    shapes = {path: x.shape for path, x in reference.items()}
    culprits = {path: culprit for path in shapes if (culprit := _culprit(shapes[path], here))}
    return Precision(dtype, errors, tuple(planned), failed, culprits)


def in_dtype(model: nnx.Module, dtype: str) -> nnx.Module:
    """Makes a model compute in `dtype`: the field `dtype` of configs and of Flax's modules. Returns it.

    Where nothing has that field, parameters are cast, because JAX computes in their dtype.
    """
    has_field = False
    node: Any
    for _, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Module):
            continue
        config: Any = vars(node).get("config")
        if dataclasses.is_dataclass(config) and "dtype" in dir(config):  # it may have slots
            vars(node)["config"] = dataclasses.replace(config, dtype=dtype)  # type: ignore
            has_field = True
        if "dtype" in vars(node):
            vars(node)["dtype"] = jnp.dtype(dtype)
            has_field = True
    return model if has_field else cast_params(model, dtype)


def in_float32(model: nnx.Module) -> nnx.Module:
    """Makes a model compute in float32, from parameters in float32. Returns it."""
    return cast_params(in_dtype(model, "float32"), "float32")


def cast_params(model: nnx.Module, dtype: str) -> nnx.Module:
    """Casts a model's floating-point parameters. Returns it."""
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param) and jnp.issubdtype(variable.dtype, jnp.floating):
            variable.set_value(variable[...].astype(dtype))
    return model


def _optimizer() -> Any:
    """Of no effect: only gradients are compared."""
    import optax

    return optax.sgd(0.0)


def _gradients(layout: Layout, user_model: UserModel, initial: Tree) -> dict[str, np.ndarray]:
    abstract = abstract_state(layout, user_model.optimizer)
    example = layout.abstract_batch(jax.tree.map(lambda x: x[0], user_model.batch))
    options = QUICK if layout.mesh.devices.flat[0].platform == "cpu" else {}
    step = layout.compile(
        lambda state, batch: gradients(layout, state, batch)[0],
        abstract,
        example,
        compiler_options=options,
    )
    state = jax.device_put(jax.tree.map(_cast, initial, abstract), shardings(abstract))
    grads = jax.device_get(step(state, to_devices(user_model.batch, layout)))
    return {path: np.asarray(x, np.float32) for path, x in paths(grads).items()}


def _cast(x: Any, like: Any) -> Any:
    """A random key's dtype has no `astype`."""
    return x if x.dtype == like.dtype else x.astype(like.dtype)


def _sums(
    layout: Layout, user_model: UserModel, batch: Tree, folder: pathlib.Path, few: int = 16
) -> list[Sum]:
    """The sums in 16 bits of a gradient on one device, those of most terms first."""
    rows = len(jax.tree.leaves(batch)[0])
    layout = dataclasses.replace(layout, batch_size=rows)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    with layout.trace():
        traced = jax.jit(lambda state, rows: gradients(layout, state, rows)[0]).trace(
            abstract_state(layout, user_model.optimizer), layout.abstract_batch(example)
        )
    sums = low_precision_sums(traced.jaxpr.jaxpr, folder, few)
    most = sorted(sums, key=lambda x: -x.most_terms)
    return [*{(x.line, x.what, x.array): x for x in reversed(most)}.values()][::-1]


def _resized(batch: Tree, batch_size: int, seq_len: int) -> Tree:
    """The batch's shapes with other numbers of rows, and of positions in arrays of integers [B, T]."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        rows, *inner = x.shape
        if seq_len and len(inner) == 1 and np.issubdtype(x.dtype, np.integer):
            inner = [seq_len]
        return jax.ShapeDtypeStruct((batch_size or rows, *inner), x.dtype)

    return jax.tree.map(one, batch)


def _culprit(shape: tuple[int, ...], sums: list[Sum]) -> Sum | None:
    """The sum of most terms that has a gradient's shape, or else that of one of its stacked layers."""
    wanted = [n for n in shape if n > 1]
    for dims in (wanted, wanted[1:]):
        for sum_ in sums:
            sizes = re.findall(r"\d+", sum_.array.partition("[")[2])
            if dims and [int(n) for n in sizes if n != "1"] == dims:
                return sum_
    return None
