"""Batches of a random-access dataset, with Grain: batch k is a pure function of (seed, k)."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

Example = dict[str, np.ndarray]  # argument of the model's loss → one row of it

_EPOCHS = 1_000_000  # "forever": Grain counts elements in 63 bits


class Rows(grain.sources.RandomAccessDataSource):
    """A source that reads many examples at once."""

    def take(self, numbers: np.ndarray) -> Example:
        """Examples [N] in any order, stacked."""
        raise NotImplementedError

    def __getitem__(self, i):
        return {name: values[0] for name, values in self.take(np.array([i])).items()}


class Dataset(NamedTuple):
    """Training and held-out examples, and facts about them. Each data module's `load` makes one."""

    train: grain.sources.RandomAccessDataSource
    held_out: grain.sources.RandomAccessDataSource
    filler: Example  # pads the last held-out batch; adds nothing to the loss
    unit: str  # what throughput counts, such as "tokens"
    units: int  # units in an example
    config: dict[str, Any]  # fields of the model's Config that the data decides
    facts: dict[str, Any]  # dataset, fingerprint, …: equal if and only if the examples are
    # Sources that `train` concatenates: (number of examples, share of a batch); () means one.
    parts: tuple[tuple[int, float], ...] = ()
    held_out_bytes: int | None = None  # UTF-8 bytes of text that the held-out targets stand for
    notes: tuple[str, ...] = ()  # lines to print
    has_answers: bool = False  # whether rows are prompts with answers, which alone are targets
    # Whether examples differ between epochs: train[n + e · len(train)] is example n in epoch e.
    by_epoch: bool = False


def train_batches(
    data: Dataset, batch_size: int, seed: int, first: int = 0, rows: np.ndarray | None = None
) -> grain.IterDataset:
    """Shuffled batches, forever, from batch `first` on: examples stacked [rows, ...].

    Batch k depends only on (seed, k).

    Args:
      rows: the rows of a batch that this process reads, ascending; by default its contiguous share.
    """
    # Grain shuffles only the examples' numbers; a batch is then read in one call. Passing an example
    # through Grain costs ten times as much as reading it.
    first_of_part, orders = 0, []
    for number, (count, _) in enumerate(data.parts or ((len(data.train), 1.0),)):
        part = grain.MapDataset.range(first_of_part, first_of_part + count)
        orders.append(part.seed((seed + number) % 2**31).shuffle().repeat(_EPOCHS))
        first_of_part += count
    order = orders[0]
    if len(orders) > 1:
        order = grain.MapDataset.mix(orders, [weight for _, weight in data.parts])
    if data.by_epoch:
        epoch = len(data.train)
        order = order.map_with_index(lambda i, number: number + i // epoch * epoch)
    size, numbers_of_chunks = _chunks(batch_size, _share(batch_size) if rows is None else rows)
    chunks = order.batch(size)  # chunk i of batch k is number k · (batch_size // size) + i
    # One thread keeps ahead of every recipe's step; more would only compete for Python's lock.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)
    per_batch = batch_size // size
    parts = [chunks.slice(slice(first * per_batch + i, None, per_batch)) for i in numbers_of_chunks]
    numbers = parts[0]
    if len(parts) > 1:
        joined = grain.MapDataset.range(len(parts[-1]))
        numbers = joined.map(lambda k: np.concatenate([np.asarray(part[k]) for part in parts]))
    return numbers.map(lambda batch: _read(data.train, batch)).to_iter_dataset(options)


def _share(batch_size: int) -> np.ndarray:
    """Rows of this process if each process has a contiguous part of a batch."""
    shard = grain.sharding.ShardByJaxProcess()
    return np.split(np.arange(batch_size), shard.shard_count)[shard.shard_index]


def _chunks(batch_size: int, rows: np.ndarray) -> tuple[int, list[int]]:
    """Cuts a batch into the largest equal chunks that these rows consist of: (size, which chunks).

    >>> _chunks(16, np.array([2, 3, 4, 5])), _chunks(16, np.array([8, 9, 10, 11]))
    ((2, [1, 2]), (4, [2]))
    """
    ends = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [int(bound) for run in np.split(rows, ends) for bound in (run[0], run[-1] + 1)]
    size = math.gcd(batch_size, *bounds)
    return size, (rows[::size] // size).tolist()


def _read(source: Any, numbers: np.ndarray) -> Example:
    """Examples [N] of a random-access source, stacked; uses its `take` if it has one."""
    if hasattr(source, "take"):
        return source.take(numbers)
    examples = [source[int(number)] for number in numbers]
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def held_out_batches(
    data: Dataset, batch_size: int, rows: np.ndarray | None = None
) -> Iterator[Example]:
    """Yields every held-out example once, in order; pads the last batch with `filler`.

    Args:
      rows: see train_batches.
    """
    rows, source = _share(batch_size) if rows is None else rows, data.held_out
    for first in range(0, len(source), batch_size):
        batch = {name: np.stack([value] * len(rows)) for name, value in data.filler.items()}
        indices = first + rows[first + rows < len(source)]
        if len(indices):
            for name, values in _read(source, indices).items():
                batch[name][: len(indices)] = values
        yield batch
