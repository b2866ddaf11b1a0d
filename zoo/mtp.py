"""Multi-token prediction: a second loss in training, of a layer after the last one.

layers.objective uses this file if a model has `mtp`, so a model without it can be copied alone.

Shapes: B batch, T positions, D embed.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import kinds, positions
from .layers import (
    REMAT_POLICIES, RMSNorm, add_costs, begin, cross_entropy, gather, layer_in_use, look_up, multiply,
    stripe, vocabulary_tables,
)  # fmt: skip
from .sharding import auto, constrain, param


class Further(nnx.Module):
    """One more layer, which predicts the token after the next one (DeepSeek-AI 2024, DeepSeek-V3).

    It reads the model's output at a position and the embedding of the next token. The model's
    tables embed that token and unembed the prediction.

    Args:
      layer: a decoder layer, as in the model.
    """

    def __init__(self, config, layer: Any, *, rngs: nnx.Rngs):
        D, eps = config.embed, config.norm_eps
        self.token_norm, self.hidden_norm = RMSNorm(D, eps), RMSNorm(D, eps)
        self.join = param(rngs, (2 * D, D), ("embed", "latent"), (2 * D) ** -0.5)
        self.layer, self.final_norm = layer, RMSNorm(D, eps)

    def __call__(self, x_BTD, next_BTD, at, kind, *how):
        """Returns its output, normed, [B, T, D], and the figures of its layer."""
        pair = (self.token_norm(next_BTD), self.hidden_norm(x_BTD))
        joined = gather(jnp.concatenate(pair, axis=-1))
        x_BTD = multiply(joined, self.join, seq="residual_seq")
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        x_BTD, _, figures = self.layer(x_BTD, at, kind, None, *how)
        return self.final_norm(x_BTD), figures


def objective_with_mtp(model, batch: tuple, names: dict[str, str]):
    """`layers.objective` plus the mean cross entropy at the tokens after the next ones, times
    config.mtp_weight; `aux` has it as "mtp", and the figures of the layer come last.
    """
    config, (tokens_BT, targets_BT, segments_BT) = model.config, batch
    further = following(tokens_BT, 0), following(targets_BT, -1)
    if segments_BT is not None:  # not into another document
        same_BT = following(segments_BT, -1) == segments_BT
        further = further[0], jnp.where(same_BT, further[1], -1)
    ordered = [stripe(config, x) for x in (*batch, *further)]
    batch, (next_BT, further_BT) = tuple(ordered[:3]), ordered[3:]
    tables = vocabulary_tables(model)
    x_BTD, figures = model.run(begin(model, tables, batch), *batch)
    x_BTD = model.final_norm(x_BTD)
    total, count = cross_entropy(x_BTD, tables[-1], batch[1], config)

    def layer(weights, x_BTD, next_BTD):
        weights = layer_in_use(weights, names, config)  # inside remat, which gathers again
        at, (kind,) = positions(config, batch[0], batch[2]), kinds(config)
        counted_BT = constrain(further_BT, "batch", "seq") >= 0
        return weights(x_BTD, next_BTD, at, kind, counted_BT, config.capacity)

    layer = jax.checkpoint(layer, policy=REMAT_POLICIES.get(config.remat))
    x_BTD, more = layer(model.mtp, x_BTD, look_up(tables[0], next_BT))
    extra = cross_entropy(x_BTD, tables[-1], further_BT, config)
    figures = {name: jnp.concatenate([x, more[name][None]]) for name, x in figures.items()}
    objective = add_costs(model, total, figures) + config.mtp_weight * extra[0]
    return objective, count, {"loss": (total, count), "mtp": extra}, figures


def following(x_BT, end: int) -> jax.Array:
    """The next position's value, `end` at the last one."""
    shift = auto(lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=end), "batch", "seq")
    return shift(constrain(x_BT, "batch", "seq"))
