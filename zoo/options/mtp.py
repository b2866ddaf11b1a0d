"""Multi-token prediction: a head that predicts the token after the next one, for training.

A model that may have the head makes it in `mtp` and takes `objective_with_mtp` as its `objective`.

Shapes: B batch, T positions, D embed.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.decoder import Decoder
from ..core.layers import RMSNorm, gather_positions, multiply
from ..core.sharding import auto, constrain, param, shards
from ..core.vocabulary import Batch, Objective, cross_entropy, look_up


HEAD_PATH = "mtp/"  # how paths of the head's weights begin


class MTPHead(nnx.Module):
    """One more layer, which predicts the token after the next one (DeepSeek-AI 2024, DeepSeek-V3).

    It reads the model's output at a position and the embedding of the next token. The model's
    tables embed that token and unembed the prediction.

    Args:
      layer: makes a decoder layer, as the model's last one, from (config, *, rngs). It has no
        adapters.
      norm: makes a norm as the model's final one, from D.
    """

    def __init__(
        self,
        config,
        layer: Callable[..., nnx.Module],
        norm: Callable[[int], RMSNorm],
        *,
        rngs: nnx.Rngs,
    ):
        D = config.embed
        self.layer = layer(dataclasses.replace(config, lora_rank=0), rngs=rngs)
        self.token_norm = norm(D)
        self.hidden_norm = norm(D)
        self.join = param(rngs, (2 * D, D), ("embed", "norm"), (2 * D) ** -0.5)
        self.final_norm = norm(D)

    def __call__(self, x_BTD, next_BTD, inputs, kind):
        """Returns its output before `final_norm`, [B, T, D], and the metrics of its layer."""
        pair = (self.token_norm(next_BTD), self.hidden_norm(x_BTD))
        joined = gather_positions(jnp.concatenate(pair, axis=-1))
        x_BTD = multiply(joined, self.join, seq="residual_seq")
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        x_BTD, _, metrics = self.layer(x_BTD, inputs, kind)
        return x_BTD, metrics


def objective_with_mtp(self, batch: Batch) -> Objective:
    """`Decoder.objective`, with a head plus the cross entropy at the second-next tokens times
    config.mtp_weight.

    `aux` has it as "mtp", and the metrics of the head's layer come last. Raises ValueError if the
    rules split the layers.
    """
    if self.mtp is None:
        return Decoder.objective(self, batch)
    if shards("layers") > 1:
        raise ValueError("a pipeline has no stage for the layer of mtp_depth=1; use mtp_depth=0")
    config = self.config
    next_BT = following(batch.tokens, 0)
    second_BT = following(batch.targets, -1)
    if batch.segment_ids is not None:  # not into another document
        same_BT = following(batch.segment_ids, -1) == batch.segment_ids
        second_BT = jnp.where(same_BT, second_BT, -1)
    layout = config.row_layout(batch.tokens.shape[1])
    batch = self.on_devices(batch)
    next_BT = layout.reorder(next_BT)
    second_BT = layout.reorder(second_BT)
    tables = self.tables()
    x_BTD, metrics = self.run_batch(tables, batch)
    x_BTD = self.final_norm(x_BTD)
    total, count = cross_entropy(x_BTD, tables[-1], batch.targets, config)

    def run_head(head, x_BTD, next_BTD):
        head = config.use_layer(head, self.axes)  # inside remat, which gathers again
        inputs = self.inputs_of(batch._replace(targets=second_BT))
        kind = config.kinds[-1]  # of a period, whose last layer attends
        return head(x_BTD, next_BTD, inputs, kind)

    run_head = jax.checkpoint(run_head, policy=config.remat_policy)
    x_BTD, head_metrics = run_head(self.mtp, x_BTD, look_up(tables[0], next_BT))
    x_BTD = self.mtp.final_norm(x_BTD)  # outside of remat, which would repeat the layer for it
    mtp_total, mtp_count = cross_entropy(x_BTD, tables[-1], second_BT, config)
    metrics = {
        name: jnp.concatenate([metric, head_metrics[name][None]])
        for name, metric in metrics.items()
    }
    return Objective(
        total=self.add_costs(total, metrics) + config.mtp_weight * mtp_total,
        count=count,
        aux={"loss": (total, count), "mtp": (mtp_total, mtp_count)},
        metrics=metrics,
    )


def following(x_BT, end: int) -> jax.Array:
    """The next position's value, `end` at the last one."""
    shift = auto(lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=end), "batch", "seq")
    return shift(constrain(x_BT, "batch", "seq"))
