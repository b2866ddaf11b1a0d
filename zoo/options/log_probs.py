"""Log-probabilities of targets, chunk by chunk: for preference tuning. And what other losses start from.

Shapes: B batch, T positions, D embed, V vocab, R shards of B and T, M positions of one shard, C
chunks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..core.layers import gather_positions
from ..core.sharding import constrain, reshape, shards
from ..core.stack import fit_rules
from ..core.vocabulary import (
    SHARDS, Batch, cross_entropies, from_shards, in_chunks, logits_of, product_gradients,
    table_product,
)  # fmt: skip
from ..kernels import choice


@fit_rules
def log_probs(model, tokens, targets, segment_ids=None) -> jax.Array:
    """The log-probability of each target, float32 [B, T]; 0 for padding. Arguments as in Decoder.loss."""
    return log_probs_and_metrics(model, tokens, targets, segment_ids)[0]


@fit_rules
def log_probs_and_metrics(model, tokens, targets, segment_ids=None, temperature: float = 1.0):
    """`log_probs`, and the metrics of the layers: name → [L, ...], sums over positions.

    Args:
      temperature: of the softmax, which divides the logits.
    """
    batch = model.on_devices(Batch(tokens, targets, segment_ids))
    tables = model.tables()
    x_BTD, metrics = model.run_batch(tables, batch)
    x_BTD, bias_RV = model.final_norm(x_BTD), model.bias_copies()
    log_probs_BT = target_log_probs(
        x_BTD, tables[-1], batch.targets, model.config, bias_RV, temperature
    )
    return model.in_order(log_probs_BT), metrics


def target_log_probs(x_BTD, table_RVD, targets_BT, config, bias_RV=None, temperature: float = 1.0):
    """Log-probabilities of the targets, float32 [B, T]; 0 for targets below 0.

    In chunks, like `cross_entropy`. Their cotangents may differ, so the backward pass computes each
    chunk's logits again.
    """
    targets_BT = constrain(targets_BT, "batch", "seq")
    x_CRMD = in_chunks(gather_positions(x_BTD), config, "act_embed")
    targets_CRM = in_chunks(targets_BT, config)
    log_probs_CRM: Any = _log_probs((config, temperature), x_CRMD, table_RVD, bias_RV, targets_CRM)
    B, T = targets_BT.shape
    return from_chunks(log_probs_CRM, (B, T))


@fit_rules
def outputs(model, tokens, targets, segment_ids=None):
    """Runs a decoder's layers as in training, for a loss of one's own. Arguments as in Decoder.loss.

    Returns: their output, normed, [B, T, D]; the table to unembed it, [R, V, D]; their metrics.
    """
    batch = model.on_devices(Batch(tokens, targets, segment_ids))
    tables = model.tables()
    x_BTD, metrics = model.run_batch(tables, batch)
    x_BTD = gather_positions(model.final_norm(x_BTD))
    return model.in_order(x_BTD, "act_embed"), tables[-1], metrics


def from_chunks(x_CRM, shape: tuple[int, ...], *axes):
    """The inverse of `in_chunks`; shape: (B, T), axes: of the dims after M."""
    C, R, M, *rest = x_CRM.shape
    rows = shape[0] // shards("batch")
    x = reshape(x_CRM, (C, R, rows, M // rows, *rest), None, SHARDS, None, None, *axes)
    x = reshape(jnp.moveaxis(x, 0, 2), (R, C * M, *rest), SHARDS, None, *axes)
    return from_shards(x, shape, *axes)


def _nats(settings, product_RMV, targets_RM):
    """Cross entropies of one chunk at a temperature, [R, M]; 0 for padding."""
    config, temperature = settings
    if temperature == 1:
        return cross_entropies(config, product_RMV, targets_RM)
    logits_RMV = logits_of(product_RMV, config) / temperature  # after a soft cap
    nats_RM = choice.cross_entropies(logits_RMV, targets_RM)
    return jnp.where(targets_RM < 0, 0, nats_RM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(settings, x_CRMD, table_RVD, bias_RV, targets_CRM):
    """Log-probabilities of the targets, float32 [C, R, M]; settings: (config, temperature)."""

    def chunk(_, x_and_targets):
        x_RMD, targets_RM = x_and_targets
        product_RMV = table_product(x_RMD, table_RVD, bias_RV)
        return None, -_nats(settings, product_RMV, targets_RM)

    return jax.lax.scan(chunk, None, (x_CRMD, targets_CRM))[1]


def _log_probs_backward(settings, saved, grad_CRM):
    x_CRMD, table_RVD, bias_RV, targets_CRM = saved

    def chunk(sums, chunk):
        table_grad_RVD, bias_grad_RV = sums
        x_RMD, targets_RM, grad_RM = chunk
        nats = functools.partial(_nats, settings, targets_RM=targets_RM)
        _, pull = jax.vjp(nats, table_product(x_RMD, table_RVD, bias_RV))
        (grad_RMV,) = pull(-grad_RM)
        if bias_RV is not None:
            bias_grad_RV = bias_grad_RV + grad_RMV.sum(axis=1)
        x_grad_RMD, grad_RVD = product_gradients(grad_RMV, x_RMD, table_RVD)
        return (table_grad_RVD + grad_RVD, bias_grad_RV), x_grad_RMD

    bias_zeros = None if bias_RV is None else jnp.zeros_like(bias_RV)
    zeros = jnp.zeros_like(table_RVD, dtype=jnp.float32), bias_zeros
    sums, x_grad_CRMD = jax.lax.scan(chunk, zeros, (x_CRMD, targets_CRM, grad_CRM))
    table_grad_RVD, bias_grad_RV = sums
    return x_grad_CRMD, table_grad_RVD.astype(table_RVD.dtype), bias_grad_RV, None


_log_probs.defvjp(
    lambda settings, *saved: (_log_probs(settings, *saved), saved), _log_probs_backward
)
