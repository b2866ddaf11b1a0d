"""The reference's log-probabilities of all answers, computed once and kept beside prepared data."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from data import cache_dir, corpus
from data.batches import Dataset, Example, Rows, held_out_batches
from recipes.common.preference.objective import Objective
from recipes.common.runtime import print0, processes
from recipes.common.sharding import Layout, Tree
from recipes.common.train.feed import to_devices
from recipes.common.train.frozen import Frozen


class WithReference(Rows):
    """Pairs with the reference's log-probabilities as columns."""

    def __init__(self, pairs: Any, log_probs_N2: np.ndarray):
        self._pairs, self._log_probs_N2 = pairs, log_probs_N2

    def __len__(self):
        return len(self._pairs)

    def take(self, indices: np.ndarray) -> Example:
        chosen_N, rejected_N = self._log_probs_N2[indices].T
        columns = {"reference_chosen": chosen_N, "reference_rejected": rejected_N}
        return self._pairs.take(indices) | columns


def with_reference(
    data: Dataset, objective: Objective, layout: Layout, reference: Frozen
) -> Dataset:
    """Adds the reference's log-probabilities to training and held-out pairs.

    Args:
      layout: the policy's, whose batches are computed at a time.
      reference: read only if no earlier run has kept its log-probabilities.
    """
    about = {**data.facts, "averages": objective.loss.averages, "reference": reference.key}
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    path = cache_dir() / "reference" / f"{key[:32]}.npz"
    if processes.decide(path.exists(), all):
        print0(f"Reference: its log-probabilities are read from {path}.")
        kept = dict(np.load(path))
    else:
        count = len(data.train) + len(data.held_out)
        print0(f"Reference: computes its log-probabilities of {count:,} pairs once.")
        variables = reference.read()
        parts = {"train": data._replace(held_out=data.train), "held_out": data}
        program = layout.compile(
            objective.reference_pair, reference.abstract(), layout.abstract_batch(data.filler),
            out_shardings=layout.replicated,
        )  # fmt: skip
        kept = {}
        for name, part in parts.items():
            log_probs_N2 = np.concatenate([*_batches(program, variables, part, layout)])
            kept[name] = log_probs_N2[: len(part.held_out)]
        _keep(path, kept)
    zero = np.zeros((), np.float32)
    return data._replace(
        train=WithReference(data.train, kept["train"]),
        held_out=WithReference(data.held_out, kept["held_out"]),
        filler=data.filler | {"reference_chosen": zero, "reference_rejected": zero},
    )


def _batches(
    program: jax.stages.Compiled, variables: Tree, data: Dataset, layout: Layout
) -> Iterator[np.ndarray]:
    for rows in held_out_batches(data, layout.batch_size, layout.process_rows):
        yield np.asarray(jax.device_get(program(variables, to_devices(rows, layout))))


def _keep(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a file of the cache, which appears only when it is complete."""
    with corpus.cached():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(temporary, allow_pickle=False, **arrays)
        os.replace(temporary, path)
