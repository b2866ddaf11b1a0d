"""Batches of a random-access dataset, with Grain: batch k is a pure function of (seed, k)."""

import math
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
    # Sources that `train` has one after another: the examples of each, and its share of a batch's.
    parts: tuple[tuple[int, float], ...] = ()  # (): one
    held_out_bytes: int | None = None  # UTF-8 bytes of text that the held-out targets stand for
    notes: tuple[str, ...] = ()  # lines to tell the user


def train_batches(
    data: Dataset, batch_size: int, seed: int, first: int = 0, rows: np.ndarray | None = None
) -> grain.IterDataset:
    """Shuffled batches, forever, from batch `first` on: examples stacked [rows, ...].

    Batch k depends on (seed, k) alone. `rows` are those of it that this process reads, rising (by
    default its share by ShardByJaxProcess); no others are read.
    """
    # Numbers of examples go through Grain, and a batch is read in one go: an example alone costs
    # ten times as much to pass on as to read.
    first_of_part, orders = 0, []
    for number, (count, _) in enumerate(data.parts or ((len(data.train), 1.0),)):
        part = grain.MapDataset.range(first_of_part, first_of_part + count)
        orders.append(part.seed((seed + number) % 2**31).shuffle().repeat(_EPOCHS))
        first_of_part += count
    order = orders[0]
    if len(orders) > 1:
        order = grain.MapDataset.mix(orders, [weight for _, weight in data.parts])
    size, mine = _chunks(batch_size, _share(batch_size) if rows is None else rows)
    chunks = order.batch(size)  # chunk k · (batch_size // size) + i is the i-th of batch k
    # One thread is faster than any recipe's step; more would only compete for Python's lock.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    a_batch = batch_size // size
    parts = [chunks.slice(slice(first * a_batch + i, None, a_batch)) for i in mine]
    numbers = parts[0]
    if len(parts) > 1:
        joined = grain.MapDataset.range(len(parts[-1]))
        numbers = joined.map(lambda k: np.concatenate([part[k] for part in parts]))
    return numbers.map(lambda some: _read(data.train, some)).to_iter_dataset(options)


def _share(batch_size: int) -> np.ndarray:
    """The rows of this process where each has a contiguous part."""
    shard = grain.sharding.ShardByJaxProcess()
    return np.split(np.arange(batch_size), shard.shard_count)[shard.shard_index]


def _chunks(batch_size: int, rows: np.ndarray) -> tuple[int, list[int]]:
    """The largest equal parts of a batch of which these rows are some: their size, and which.

    >>> _chunks(16, np.array([2, 3, 4, 5])), _chunks(16, np.array([8, 9, 10, 11]))
    ((2, [1, 2]), (4, [2]))
    """
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [int(bound) for run in np.split(rows, ends) for bound in (run[0], run[-1] + 1)]
    size = math.gcd(batch_size, *bounds)
    return size, (rows[::size] // size).tolist()


def _read(source: grain.sources.RandomAccessDataSource, numbers: np.ndarray) -> Example:
    """Examples [N], stacked; by the source's own `take` if it has one."""
    if hasattr(source, "take"):
        return source.take(numbers)
    examples = [source[int(number)] for number in numbers]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def held_out_batches(
    data: Dataset, batch_size: int, rows: np.ndarray | None = None
) -> Iterator[Example]:
    """Every held-out example once, in order; the last batch is filled up with `filler`.

    Args:
      rows: as for train_batches.
    """
    rows, source = _share(batch_size) if rows is None else rows, data.held_out
    for first in range(0, len(source), batch_size):
        batch = {name: np.stack([value] * len(rows)) for name, value in data.filler.items()}
        mine = first + rows[first + rows < len(source)]
        if len(mine):
            for name, values in _read(source, mine).items():
                batch[name][: len(mine)] = values
        yield batch
