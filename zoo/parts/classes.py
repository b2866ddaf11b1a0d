"""One vector for each row of a batch, heads on it, and the loss of a row's class.

Shapes: B batch, T positions, D and E dims of vectors, K classes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.layers import dot
from ..core.sharding import AxisNames, constrain, explicit


def dense(x_BD, weight: nnx.Param, bias: nnx.Param, axes: AxisNames, config) -> jax.Array:
    """X · weight + bias, [B, E], float32. Each device has whole rows."""
    used_DE = config.use_weights(weight, axes)[...].astype(config.dtype)
    y_BE = dot("BD,DE->BE", x_BD.astype(config.dtype), used_DE, explicit("batch", None))
    return constrain(y_BE + constrain(bias[...], None)[None], "batch", None)


def pool(x_BTD, segment_ids_BT, mean: bool) -> jax.Array:
    """The first position's vector or the mean of those in its segment, [B, D], float32."""
    x_BTD = constrain(x_BTD, "batch", None, "act_embed")
    if not mean:
        return constrain(x_BTD[:, 0].astype(jnp.float32), "batch", None)
    ids_BT = jnp.zeros(x_BTD.shape[:2], jnp.int32) if segment_ids_BT is None else segment_ids_BT
    ids_BT = constrain(ids_BT, "batch", None)
    text_BT = (ids_BT == ids_BT[:, :1]).astype(jnp.float32)
    sum_BD = (x_BTD.astype(jnp.float32) * text_BT[:, :, None]).sum(axis=1)
    return constrain(sum_BD, "batch", None) / text_BT.sum(axis=1, keepdims=True)


def unit(x_BD: jax.Array) -> jax.Array:
    """Rows of length 1: x / |x|, float32."""
    x_BD = x_BD.astype(jnp.float32)
    return x_BD * jax.lax.rsqrt(jnp.square(x_BD).sum(axis=1, keepdims=True) + 1e-12)


def class_loss(logits_BK, label_B):
    """Cross entropy of a batch, in nats.

    Args:
      label_B: int; rows with a label below 0 only pad the batch and don't count.

    Returns: (sum over rows, number of rows, aux), float32 scalars; aux maps a name to (sum, count):
      loss: the cross entropy; accuracy: labels that are the most likely class.
    """
    wanted_BK = jax.nn.one_hot(label_B, logits_BK.shape[1])  # padding: a row of zeros
    total = -(jax.nn.log_softmax(logits_BK, axis=1) * wanted_BK).sum()
    count = (label_B >= 0).sum().astype(jnp.float32)
    right = (logits_BK.argmax(axis=1) == label_B).sum().astype(jnp.float32)
    return total, count, {"loss": (total, count), "accuracy": (right, count)}
