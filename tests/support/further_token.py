"""The logits of a layer that predicts the token after the next one, by its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from zoo.attention import make_positions


def further_logits(model, tokens_BT, ids_BT=None) -> jax.Array:
    """[B, T, V]: position t predicts token t + 2; the last position is not to be used.

    The norms, the product and the layer are the model's own parts, and its experts are dropless.
    """
    x_BTD, *_ = model.trunk(tokens_BT, ids_BT)
    after_B1 = np.zeros((len(tokens_BT), 1), np.int32)
    next_BTD = model.embed[...][np.concatenate([tokens_BT[:, 1:], after_B1], axis=1)]
    pair = model.mtp.token_norm(next_BTD), model.mtp.hidden_norm(x_BTD)
    joined_BTD = jnp.concatenate(pair, axis=-1) @ model.mtp.join[...]
    positions = make_positions(model.config, jnp.asarray(tokens_BT), ids_BT)
    positions = dataclasses.replace(positions, generates=True)  # so that experts drop nothing
    (kind,) = model.config.kinds
    y_BTD, _, _ = model.mtp.layer(joined_BTD, positions, kind)
    table = model.embed if model.config.tie_embeddings else model.unembed
    return model.mtp.final_norm(y_BTD) @ table[...].T
