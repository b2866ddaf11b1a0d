"""Cross entropies on GPUs, from reading the logits once.

Shapes: R shards of B and T, M positions of one shard, V vocab.
"""

import jax
import jax.numpy as jnp

from .shared import is_target


@jax.custom_vjp
def nats_in_one_pass(logits_RMV, targets_RM):
    """Cross entropies [R, M], from reading the logits once.

    XLA reads them three times, for the maximum, the sum and the target's: 6.4 ms instead of 2.8 on an
    H100, of a step of 71 ms. GPUs reduce several arrays at once; other platforms are slow at it.
    """
    return _nats_forward(logits_RMV, targets_RM)[0]


def _nats_forward(logits_RMV, targets_RM):
    def join(a, b):
        (max_a, sum_a, picked_a), (max_b, sum_b, picked_b) = a, b
        top = jnp.maximum(max_a, max_b)
        total = sum_a * jnp.exp(max_a - top) + sum_b * jnp.exp(max_b - top)
        return top, total, picked_a + picked_b

    picked_RMV = jnp.where(is_target(logits_RMV, targets_RM), logits_RMV, 0)
    arrays = logits_RMV, jnp.ones_like(logits_RMV), picked_RMV
    lowest = jnp.finfo(jnp.float32).min  # with -inf, an array of only -inf would have no sum
    zero = jnp.float32(0)
    top, total, picked = jax.lax.reduce(arrays, (lowest, zero, zero), join, (2,))
    log_sum_RM = top + jnp.log(total)
    return log_sum_RM - picked, (logits_RMV, targets_RM, log_sum_RM)


def _nats_backward(saved, grad_RM):
    logits_RMV, targets_RM, log_sum_RM = saved
    weights_RMV = jnp.exp(logits_RMV - log_sum_RM[..., None])
    picked_RMV = is_target(logits_RMV, targets_RM).astype(jnp.float32)
    return grad_RM[..., None] * (weights_RMV - picked_RMV), None


nats_in_one_pass.defvjp(_nats_forward, _nats_backward)
