"""Batches of a random-access source, with Grain: batch k is a pure function of (seed, k)."""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

Example = Any  # an array, or a dict of arrays

_EPOCHS = 1_000_000  # "forever": Grain counts elements in 63 bits


def train_batches(
    source: grain.sources.RandomAccessDataSource,
    batch_size: int,
    seed: int,
    first: int = 0,
    shard: grain.sharding.ShardOptions | None = None,
) -> grain.IterDataset:
    """Shuffled batches, forever, from batch `first` on: examples stacked [batch_size / shards, ...].

    Batch k depends on (seed, k) alone. `shard` picks this process's rows of it, a contiguous part
    (by default its share by ShardByJaxProcess); only those are read.
    """
    shard = shard or grain.sharding.ShardByJaxProcess()
    shards, mine = shard.shard_count, shard.shard_index
    examples = grain.MapDataset.source(source).seed(seed).shuffle().repeat(_EPOCHS)
    parts = examples.batch(batch_size // shards)  # part k·shards + i is process i's of batch k
    # One thread reads 30 million tokens a second; more threads only fight over Python's lock.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    return parts.slice(slice(first * shards + mine, None, shards)).to_iter_dataset(options)


def held_out_batches(
    source: grain.sources.RandomAccessDataSource,
    batch_size: int,
    filler: Example,
    shard: grain.sharding.ShardOptions | None = None,
) -> Iterator[Example]:
    """Every example once, in order; the last batch is filled up with `filler`, which counts nothing."""
    shard = shard or grain.sharding.ShardByJaxProcess()
    rows = batch_size // shard.shard_count
    for first in range(0, len(source), batch_size):
        start = first + shard.shard_index * rows
        mine = [source[i] if i < len(source) else filler for i in range(start, start + rows)]
        if isinstance(filler, dict):
            yield {name: np.stack([example[name] for example in mine]) for name in filler}
        else:
            yield np.stack(mine)
