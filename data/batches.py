"""Batches of a random-access dataset, with Grain: batch k is a pure function of (seed, k)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

Example = dict[str, np.ndarray]  # argument of the model's loss → one row of it

_EPOCHS = 1_000_000  # "forever": Grain counts elements in 63 bits


class Dataset(NamedTuple):
    """What a data module's `load` returns."""

    train: grain.sources.RandomAccessDataSource  # of examples
    held_out: grain.sources.RandomAccessDataSource
    filler: Example  # fills up the last held-out batch and counts nothing
    unit: str  # what throughput counts, "tokens"
    units: int  # of them in an example
    config: dict[str, Any]  # fields of the model's Config that the data decides
    facts: dict[str, Any]  # dataset, fingerprint, …: equal where the examples are equal
    held_out_bytes: int | None = None  # UTF-8 bytes of text that the held-out targets stand for


def train_batches(
    data: Dataset,
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
    examples = grain.MapDataset.source(data.train).seed(seed).shuffle().repeat(_EPOCHS)
    parts = examples.batch(batch_size // shards)  # part k·shards + i is process i's of batch k
    # One thread is faster than any recipe's step; more would only compete for Python's lock.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    return parts.slice(slice(first * shards + mine, None, shards)).to_iter_dataset(options)


def held_out_batches(
    data: Dataset, batch_size: int, shard: grain.sharding.ShardOptions | None = None
) -> Iterator[Example]:
    """Every held-out example once, in order; the last batch is filled up with `filler`."""
    shard = shard or grain.sharding.ShardByJaxProcess()
    rows, source = batch_size // shard.shard_count, data.held_out
    for first in range(0, len(source), batch_size):
        start = first + shard.shard_index * rows
        mine = [source[i] if i < len(source) else data.filler for i in range(start, start + rows)]
        yield {name: np.stack([example[name] for example in mine]) for name in data.filler}
