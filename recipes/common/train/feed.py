"""Moves batches to the devices: a process's rows → global arrays."""

import time
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from recipes.common.runtime import UserError
from recipes.common.sharding import Layout, Tree


def device_batches(batches: Iterable[Tree], layout: Layout) -> Iterator[tuple[Tree, float]]:
    """Yields each global batch and the seconds spent waiting for its rows.

    Args:
      batches: rows of this process, as `to_devices` takes them.
    """
    rows = iter(batches)
    while True:
        start = time.perf_counter()
        process_rows = next(rows)
        waited = time.perf_counter() - start
        yield to_devices(process_rows, layout), waited


def to_devices(rows: Tree, layout: Layout) -> Tree:
    """Global arrays of a batch.

    Args:
      rows: tree of numpy arrays with this process's rows, whole, in the order of
        layout.process_rows. Each device gets only its part of their positions.

    Raises UserError if the model has no such tokens: JAX would read the ids as others.
    """
    if layout.config is not None:
        check_ids(rows, layout.shape.vocab_size)
    if layout.replicated.is_fully_addressable:
        return jax.device_put(rows, layout.batch_shardings(rows))
    place = {row: i for i, row in enumerate(layout.process_rows.tolist())}

    def put(x: np.ndarray, sharding) -> jax.Array:
        def part(index) -> np.ndarray:
            first, last, _ = index[0].indices(layout.batch_size)
            return x[place[first] : place[first] + last - first, *index[1:]]

        shape = (layout.batch_size, *x.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(put, rows, layout.batch_shardings(rows))


def check_ids(rows: Tree, vocab_size: int) -> None:
    """Raises UserError if a batch has tokens or targets that a vocabulary lacks.

    Args:
      vocab_size: 0: the model has none.
    """
    ids = [name for name in rows if name.rpartition("_")[2] in ("tokens", "targets")]
    for name in ids if vocab_size else ():  # also "rejected_tokens" and others
        if (largest := int(np.max(rows[name], initial=-1))) >= vocab_size:
            raise UserError(
                f"{name} of a batch have the id {largest}, and the model's vocabulary has {vocab_size} "
                "ids, from 0 on; use the model's own tokenizer, or a larger vocabulary"
            )
