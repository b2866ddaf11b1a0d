"""A golden probe: a fixed batch, and the loss that a published checkpoint gives on it.

A restored model that gives this loss was restored right, whatever its sharding. probe.json is
{"loss": …, "batch": {name: nested lists}}.
"""

import json
from typing import Any

import jax
import numpy as np

from data import batches, text
from data.tokenizer import Tokenizer
from recipes.common import entries
from recipes.common.sharding import Layout, Tree

ROWS = 8  # of the batch: divisible by eight devices
TOKENS = 64  # of context, at most, but for conversations


def batch(metadata: dict[str, Any], tokenizer: Tokenizer | None = None) -> dict[str, np.ndarray]:
    """The first held-out examples of the data that a checkpoint was trained on.

    Args:
      tokenizer: the checkpoint's.

    Raises DataError if the data is not here.
    """
    # A flag of 0 leaves it to the config.
    known = metadata["flags"] | metadata["config"] | {"tokenizer": tokenizer}
    # In conversations only answers are targets, which may begin late.
    if "seq_len" in known and "template" not in metadata["data"]:
        known = known | {"seq_len": min(TOKENS, known["seq_len"])}
    return next(batches.held_out_batches(entries.dataset(metadata["entry"], known), ROWS))


def loss(layout: Layout, variables: Tree, batch: dict[str, np.ndarray]) -> float:
    """The mean loss of a batch, on the layout's mesh."""
    batch = jax.device_put(batch, layout.batch)

    def run(variables, batch):
        total, count = layout.model.merge(variables).loss(**batch)[2]["loss"]
        return total / count

    with jax.default_matmul_precision("highest"):  # a GPU's own default keeps 10 bits
        return float(layout.compile(run, variables, batch)(variables, batch))


def dumps(loss: float, batch: dict[str, np.ndarray]) -> str:
    """The text of probe.json; every float32 has its exact value."""
    return json.dumps({"loss": loss, "batch": {k: v.tolist() for k, v in batch.items()}}) + "\n"


def loads(content: str) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, batch) of probe.json."""
    probe = json.loads(content)
    arrays = {name: np.asarray(values) for name, values in probe["batch"].items()}
    found = {
        name: array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
        for name, array in arrays.items()
    }
    if "window" in found:  # of text, as it was before batches had the names of the loss's arguments
        found = text.example(found["window"])
    return probe["loss"], found
