"""Golden probes: a fixed batch, and a published checkpoint's loss on it.

A restored model with the same loss was restored correctly, whatever its sharding. probe.json is
{"loss": …, "batch": {name: nested lists}}.
"""

import json
from typing import Any

import jax
import numpy as np

from data import batches, labelled, pairs, questions, text
from data.tokenizer import Tokenizer
from recipes.common import entries
from recipes.common.runtime import UserError, describe
from recipes.common.sharding import Layout, Tree

ROWS = 8  # batch size, divisible by eight devices
TOKENS = 64  # longest context, except for conversations
PAIRS = "dpo"  # the recipe that trains on preference pairs
ANSWERS = "grpo"  # the recipe that trains on the model's own answers to prompts
LABELLED = "kto"  # its loss of single answers with a label


def batch(metadata: dict[str, Any], tokenizer: Tokenizer | None = None) -> dict[str, np.ndarray]:
    """The first held-out examples of the data that a checkpoint was trained on.

    Args:
      tokenizer: the checkpoint's.

    Raises DataError if the data is missing, and UserError if the model itself has no such loss.
    """
    # The config overrides flags: 0 means the config's default.
    flags = metadata["flags"] | metadata["config"] | {"tokenizer": tokenizer}
    if metadata.get("recipe") == PAIRS:  # chosen answers
        names = ("dataset", "seq_len", "tokenizer", "eval_dataset", "as_chat")
        of_answers = flags["loss"] == LABELLED
        rows = pairs.load(**{name: flags[name] for name in names}, labelled=of_answers)
        batch = next(batches.held_out_batches(rows, ROWS))
        return {name: batch[name] for name in ("tokens", "targets")}
    if metadata.get("recipe") == ANSWERS:  # the prompts themselves, as texts
        names = ("dataset", "tokenizer", "eval_dataset", "as_chat")
        longest = flags["seq_len"] - flags["max_new_tokens"] + 1
        asked = questions.load(**{name: flags[name] for name in names}, longest=longest).held_out
        return rows_of([question.tokens for question in asked[:ROWS]])
    task = metadata["config"].get("task")  # a text encoder's
    if task == "classify":
        names = ("dataset", "text_column", "label_column", "tokenizer", "eval_dataset", "labels")
        length = min(TOKENS, flags["seq_len"])
        rows = labelled.load(**{name: flags[name] for name in names}, seq_len=length)
        return next(batches.held_out_batches(rows, ROWS))
    if task == "embed":
        raise UserError(
            "a model of vectors of texts has no loss of its own to be published with; use python -m "
            "recipes.hf export"
        )
    # Conversations are not cut: only answers are targets, and they may start late.
    if "seq_len" in flags and "template" not in metadata["data"]:
        flags["seq_len"] = min(TOKENS, flags["seq_len"])
    return next(batches.held_out_batches(entries.dataset(metadata["entry"], flags), ROWS))


def rows_of(texts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Tokenized texts as rows of TOKENS positions; longer ones are cut, and missing ones are padding."""
    batch = {
        "tokens": np.zeros((ROWS, TOKENS), np.int32),
        "targets": np.full((ROWS, TOKENS), -1, np.int32),
    }
    for row, text_tokens in enumerate(texts):
        part = text_tokens[: TOKENS + 1]
        batch["tokens"][row, : len(part) - 1] = part[:-1]
        batch["targets"][row, : len(part) - 1] = part[1:]
    return batch


def loss(layout: Layout, variables: Tree, batch: dict[str, np.ndarray]) -> float:
    """The mean loss of a batch, on the layout's mesh.

    Raises UserError if the mesh does not divide the batch, whose size no flag changes.
    """
    for name, x in batch.items():
        for dim, count in zip(x.shape, (layout.batch_shards, layout.seq_shards), strict=False):
            if dim % count:
                raise UserError(
                    f"a published checkpoint's probe has {name} {list(x.shape)}, and {dim} is not "
                    f"divisible by {count} (--mesh={describe(layout.mesh.shape)}); use --mesh=1"
                )
    batch = jax.device_put(batch, layout.batch_shardings(batch))

    def run(variables, batch):
        total, count = layout.model.merge(variables).loss(**batch)[2]["loss"]
        return total / count

    with jax.default_matmul_precision("highest"):  # a GPU's default keeps 10 bits
        return float(layout.compile(run, variables, batch)(variables, batch))


def dumps(loss: float, batch: dict[str, np.ndarray]) -> str:
    """Formats probe.json; every float32 keeps its exact value."""
    return json.dumps({"loss": loss, "batch": {k: v.tolist() for k, v in batch.items()}}) + "\n"


def loads(content: str) -> tuple[float, dict[str, np.ndarray]]:
    """Parses probe.json into (loss, batch)."""
    probe = json.loads(content)
    arrays = {name: np.asarray(values) for name, values in probe["batch"].items()}
    batch = {
        name: array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
        for name, array in arrays.items()
    }
    if "window" in batch:  # text in the format of old checkpoints
        batch = text.example(batch["window"])
    return probe["loss"], batch
