"""Multi-token prediction: a head that predicts the token after the next one, for training.

decoder.py uses this file if a model has the head, so a model without it can be copied alone.

Shapes: B batch, T positions, D embed.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.attention import make_positions, stripe
from ..core.layers import RMSNorm, gather, multiply
from ..core.sharding import auto, constrain, param
from ..core.stack import layer_in_use
from ..core.vocabulary import Batch, Objective, cross_entropy, look_up


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

    def __call__(self, x_BTD, next_BTD, positions, kind):
        """Returns its output before `final_norm`, [B, T, D], and the metrics of its layer."""
        pair = (self.token_norm(next_BTD), self.hidden_norm(x_BTD))
        joined = gather(jnp.concatenate(pair, axis=-1))
        x_BTD = multiply(joined, self.join, seq="residual_seq")
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        x_BTD, _, metrics = self.layer(x_BTD, positions, kind)
        return x_BTD, metrics


def objective_with_mtp(model, batch: Batch) -> Objective:
    """`Decoder.objective` plus the cross entropy at the second-next tokens times config.mtp_weight.

    `aux` has it as "mtp", and the metrics of the head's layer come last.
    """
    config = model.config
    next_BT = following(batch.tokens, 0)
    second_BT = following(batch.targets, -1)
    if batch.segment_ids is not None:  # not into another document
        same_BT = following(batch.segment_ids, -1) == batch.segment_ids
        second_BT = jnp.where(same_BT, second_BT, -1)
    batch = Batch(*(stripe(config, x) for x in batch))
    next_BT = stripe(config, next_BT)
    second_BT = stripe(config, second_BT)
    tables = model.tables()
    x_BTD, metrics = model.run_batch(tables, batch)
    x_BTD = model.final_norm(x_BTD)
    total, count = cross_entropy(x_BTD, tables[-1], batch.targets, config)

    def run_head(head, x_BTD, next_BTD):
        head = layer_in_use(head, model.axes.in_use, config)  # inside remat, which gathers again
        positions = make_positions(config, batch.tokens, batch.segment_ids, second_BT)
        kind = config.kinds[-1]  # of a period, whose last layer attends
        return head(x_BTD, next_BTD, positions, kind)

    run_head = jax.checkpoint(run_head, policy=config.REMAT[config.remat])
    x_BTD, head_metrics = run_head(model.mtp, x_BTD, look_up(tables[0], next_BT))
    x_BTD = model.mtp.final_norm(x_BTD)  # outside of remat, which would repeat the layer for it
    mtp_total, mtp_count = cross_entropy(x_BTD, tables[-1], second_BT, config)
    metrics = {
        name: jnp.concatenate([metric, head_metrics[name][None]])
        for name, metric in metrics.items()
    }
    return Objective(
        total=model.add_costs(total, metrics) + config.mtp_weight * mtp_total,
        count=count,
        aux={"loss": (total, count), "mtp": (mtp_total, mtp_count)},
        metrics=metrics,
    )


def following(x_BT, end: int) -> jax.Array:
    """The next position's value, `end` at the last one."""
    shift = auto(lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=end), "batch", "seq")
    return shift(constrain(x_BT, "batch", "seq"))
