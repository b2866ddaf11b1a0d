"""From a process's rows of a batch to global arrays."""

import jax
import numpy as np

from recipes.common.sharding import Layout, Tree


def process_rows(layout: Layout) -> np.ndarray:
    """Which rows of a batch this process's devices hold: what it reads.

    Often a contiguous part, the process's share. But on TPUs, where a mesh follows the rings of the
    chips, the devices of a process may lie apart; and all of them need all rows where the mesh splits
    something else between the processes.
    """
    size = layout.batch_size
    parts = layout.batch.addressable_devices_indices_map((size,)).values()  # JAX remembers it
    held = {part[0].indices(size) for part in parts}
    return np.concatenate([np.arange(*part) for part in sorted(held)])


def to_devices(rows: Tree, layout: Layout) -> Tree:
    """A process's rows of a batch (a tree of numpy arrays, in the order of process_rows) → global arrays."""
    if layout.batch.is_fully_addressable:
        return jax.device_put(rows, layout.batch)
    place = {row: i for i, row in enumerate(process_rows(layout).tolist())}

    def put(x: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(layout.batch_size)
            return x[place[first] : place[first] + last - first]

        whole = (layout.batch_size, *x.shape[1:])
        return jax.make_array_from_callback(whole, layout.batch, part)

    return jax.tree.map(put, rows)
