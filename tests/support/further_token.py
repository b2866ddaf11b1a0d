"""The logits of a layer that predicts the token after the next one, by its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from zoo.core.attention import make_inputs
from zoo.core.layers import AttentionType
from zoo.core.vocabulary import Batch
from zoo.qwen3_next import Qwen3Next


def further_logits(model, tokens_BT, ids_BT=None) -> jax.Array:
    """[B, T, V]: position t predicts token t + 2; the last position is not to be used.

    The layer is the model's own part, and its experts are dropless.
    """
    config = model.config
    center = 1.0 if isinstance(model, Qwen3Next) else 0.0

    def normed(x_BTD, norm):
        mean_BT1 = jnp.mean(x_BTD**2, axis=-1, keepdims=True)
        return x_BTD / jnp.sqrt(mean_BT1 + config.norm_eps) * (center + norm.scale[...])[None, None]

    x_BTD, _ = model.run_batch(model.tables(), Batch(tokens_BT, None, ids_BT))
    x_BTD = model.final_norm(x_BTD)
    after_B1 = np.zeros((len(tokens_BT), 1), np.int32)
    next_BTD = model.embed[...][np.concatenate([tokens_BT[:, 1:], after_B1], axis=1)]
    pair = normed(next_BTD, model.mtp.token_norm), normed(x_BTD, model.mtp.hidden_norm)
    joined_BTD = jnp.concatenate(pair, axis=-1) @ model.mtp.join[...]
    positions = make_inputs(config, jnp.asarray(tokens_BT), ids_BT)
    positions = dataclasses.replace(positions, generates=True)  # so that experts drop nothing
    kind = AttentionType(config.sliding_window, config.rope_theta, config.rope_scaling)
    y_BTD, _, _ = model.mtp.layer(joined_BTD, positions, kind)
    table = model.embed if config.tie_embeddings else model.unembed
    return normed(y_BTD, model.mtp.final_norm) @ table[...].T
