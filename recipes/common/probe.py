"""A golden probe: a fixed batch, and the loss that a published checkpoint gives on it.

A restored model that gives the loss was restored right, whatever lies where. probe.json is
{"loss": …, "batch": {name: nested lists}}.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from data import digits, synthetic, text
from recipes.common.sharding import Layout, Tree

ROWS = 8  # of the batch, so that it divides over eight devices
TOKENS = 64  # of context
UNITS = {
    "dot_relu_dot": "mean squared error",
    "mlp": "nats an image",
    "transformer": "nats a token",
}


def batch(metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """The first held-out examples of the data that a checkpoint was trained on.

    Raises DataError if the data is not here.
    """
    entry, flags, config = metadata["entry"], metadata["flags"], metadata["config"]
    if entry == "dot_relu_dot":
        source = synthetic.held_out(config["embed"], config["hidden"], flags["seed"])
        batches = synthetic.held_out_batches(source, ROWS)
        return {name: value for name, value in next(batches).items() if name != "weight"}
    if entry == "mlp":
        images = digits.load(flags["dataset"], flags["image_column"], flags["label_column"])
        return next(digits.held_out_batches(images.held_out, ROWS))
    corpus = text.corpus(flags["dataset"], flags["text_column"])
    length = min(TOKENS, flags["seq_len"])
    return {"window": next(text.held_out_batches(corpus, length, ROWS))}


def mean_loss(entry: str, model: nnx.Module, batch: Tree) -> jax.Array:
    """The loss that `entry` is trained on, as UNITS has it."""
    if entry == "dot_relu_dot":
        return jnp.square(model(batch["x"]) - batch["y"]).mean()
    if entry == "mlp":  # -1 fills up a batch
        logits_BC, label_B = model(batch["image"]), batch["label"]
        nats_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, label_B.clip(0))
        return nats_B.mean(where=label_B >= 0)
    tokens_BT, targets_BT = batch["window"][:, :-1].clip(0), batch["window"][:, 1:]
    nats, count = model.loss(tokens_BT, targets_BT, jnp.cumsum(tokens_BT == text.START, axis=1))
    return nats / count


def loss(entry: str, layout: Layout, params: Tree, batch: dict[str, np.ndarray]) -> float:
    """The loss of `params` on a batch, on the layout's mesh."""
    batch = jax.device_put(batch, layout.batch)

    def run(params, batch):
        return mean_loss(entry, layout.plan.bind(params), batch)

    with jax.default_matmul_precision("highest"):  # a GPU's own default keeps 10 bits
        return float(layout.compile(run, params, batch)(params, batch))


def dumps(loss: float, batch: dict[str, np.ndarray]) -> str:
    """What stands in probe.json; every float32 has its exact value."""
    return json.dumps({"loss": loss, "batch": {k: v.tolist() for k, v in batch.items()}}) + "\n"


def loads(content: str) -> tuple[float, dict[str, np.ndarray]]:
    """(loss, batch) of probe.json."""
    probe = json.loads(content)
    arrays = {name: np.asarray(values) for name, values in probe["batch"].items()}
    return probe["loss"], {
        name: array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
        for name, array in arrays.items()
    }
