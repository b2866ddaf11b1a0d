"""From a process's rows of a batch to global arrays."""

import grain
import jax
import numpy as np

from recipes.common.sharding import Layout, Tree


def process_rows(layout: Layout) -> grain.sharding.ShardOptions:
    """Which contiguous part of a batch this process's devices hold, and so which rows it reads.

    ShardByJaxProcess's answer where the processes split the batch; everything where the mesh splits
    something else between them.
    """
    size = layout.batch_size
    slices = layout.batch.addressable_devices_indices_map((size,)).values()
    first = min(part[0].start or 0 for part in slices)
    rows = max(size if part[0].stop is None else part[0].stop for part in slices) - first
    return grain.sharding.ShardOptions(first // rows, size // rows)


def to_devices(rows: Tree, layout: Layout) -> Tree:
    """A process's rows of a batch (a tree of numpy arrays) → global arrays."""

    def put(x: np.ndarray) -> jax.Array:
        whole = (layout.batch_size, *x.shape[1:])
        return jax.make_array_from_process_local_data(layout.batch, x, whole)

    return jax.tree.map(put, rows)
