"""Log-probabilities of targets, chunk by chunk: for preference tuning. And what other losses start from.

Shapes: B batch, T positions, D embed, V vocab, R shards of B and T, M positions of one shard, C
chunks, W bytes of V bits.
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
def log_probs_and_metrics(
    model, tokens, targets, segment_ids=None, temperature: float = 1.0, kept=None
):
    """`log_probs`, and the metrics of the layers: name → [L, ...], sums over positions.

    Args:
      temperature: of the softmax, which divides the logits.
      kept: uint8 [B, T, W], the tokens among which each target was chosen, as jnp.packbits packs V
        bits; the softmax is over these alone. None: all tokens.
    """
    batch = model.on_devices(Batch(tokens, targets, segment_ids))
    if kept is not None:
        kept = constrain(kept, "batch", "seq", None)
        kept = model.config.row_layout(tokens.shape[1]).reorder(kept, None)
    tables = model.tables()
    if segment_ids is None:
        x_BTD, metrics = model.run_batch(tables, batch)
    else:
        inputs = model.inputs_of(batch, positions_BT=_places(model, segment_ids))
        x_BTD, _ = model.begin(tables, batch.tokens, inputs)
        x_BTD, metrics = model.config.run_layers(model, x_BTD, inputs, batch)
    x_BTD, bias_RV = model.final_norm(x_BTD), model.bias_copies()
    log_probs_BT = target_log_probs(
        x_BTD, tables[-1], batch.targets, model.config, bias_RV, temperature, kept
    )
    return model.in_order(log_probs_BT), metrics


def _places(model, segment_ids_BT):
    """Each token's place in its document, in the order of positions on the devices.

    Attention depends on distances alone, but in 16 bits a rotated key is rounded by its place. So
    documents round as in rows of their own, and as in generation.
    """
    from .rope_scaling import places_in_documents

    place_BT, _ = places_in_documents(segment_ids_BT)
    return model.config.row_layout(segment_ids_BT.shape[1]).reorder(place_BT)


def target_log_probs(
    x_BTD, table_RVD, targets_BT, config, bias_RV=None, temperature: float = 1.0, kept_BTW=None
):
    """Log-probabilities of the targets, float32 [B, T]; 0 for targets below 0.

    In chunks, like `cross_entropy`. Their cotangents may differ, so the backward pass computes each
    chunk's logits again.
    """
    targets_BT = constrain(targets_BT, "batch", "seq")
    x_CRMD = in_chunks(gather_positions(x_BTD), config, "act_embed")
    targets_CRM = in_chunks(targets_BT, config)
    kept_CRMW = None if kept_BTW is None else in_chunks(kept_BTW, config, None)
    settings = config, temperature
    log_probs_CRM: Any = _log_probs(settings, x_CRMD, table_RVD, bias_RV, (targets_CRM, kept_CRMW))
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


def _nats(settings, product_RMV, targets):
    """Cross entropies of one chunk at a temperature, [R, M]; 0 for padding.

    Args:
      targets: (targets_RM, kept_RMW or None).
    """
    config, temperature = settings
    targets_RM, kept_RMW = targets
    if temperature == 1 and kept_RMW is None:
        return cross_entropies(config, product_RMV, targets_RM)
    logits_RMV = logits_of(product_RMV, config) / temperature  # after a soft cap
    if kept_RMW is not None:
        # All tokens of padding are kept: a softmax over none has no gradient.
        is_kept_RMV = _unpacked(kept_RMW, logits_RMV.shape[-1]) | (targets_RM < 0)[..., None]
        logits_RMV = jnp.where(is_kept_RMV, logits_RMV, -jnp.inf)
    nats_RM = choice.cross_entropies(logits_RMV, targets_RM)
    return jnp.where(targets_RM < 0, 0, nats_RM)


def _unpacked(bits_RMW, length: int):
    """The first `length` bits of packed ones, bool [R, M, V], split like logits; beyond them, False."""
    R, M, W = bits_RMW.shape
    bits_RMW8 = bits_RMW[..., None] >> jnp.arange(7, -1, -1, dtype=jnp.uint8)[None, None, None]
    bits_RMV = reshape(bits_RMW8 & 1, (R, M, 8 * W), SHARDS, None, None)
    bits_RMV = jnp.pad(bits_RMV, ((0, 0), (0, 0), (0, max(length - 8 * W, 0))))
    return constrain(bits_RMV[..., :length] == 1, SHARDS, None, "vocab")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probs(settings, x_CRMD, table_RVD, bias_RV, targets):
    """Log-probabilities of the targets, float32 [C, R, M].

    Args:
      settings: (config, temperature).
      targets: (targets_CRM, kept_CRMW or None).
    """

    def chunk(_, x_and_targets):
        x_RMD, targets = x_and_targets
        product_RMV = table_product(x_RMD, table_RVD, bias_RV)
        return None, -_nats(settings, product_RMV, targets)

    return jax.lax.scan(chunk, None, (x_CRMD, targets))[1]


def _log_probs_backward(settings, saved, grad_CRM):
    x_CRMD, table_RVD, bias_RV, targets = saved

    def chunk(sums, chunk):
        table_grad_RVD, bias_grad_RV = sums
        x_RMD, targets, grad_RM = chunk
        nats = functools.partial(_nats, settings, targets=targets)
        _, pull = jax.vjp(nats, table_product(x_RMD, table_RVD, bias_RV))
        (grad_RMV,) = pull(-grad_RM)
        if bias_RV is not None:
            bias_grad_RV = bias_grad_RV + grad_RMV.sum(axis=1)
        x_grad_RMD, grad_RVD = product_gradients(grad_RMV, x_RMD, table_RVD)
        return (table_grad_RVD + grad_RVD, bias_grad_RV), x_grad_RMD

    bias_zeros = None if bias_RV is None else jnp.zeros_like(bias_RV)
    zeros = jnp.zeros_like(table_RVD, dtype=jnp.float32), bias_zeros
    sums, x_grad_CRMD = jax.lax.scan(chunk, zeros, (x_CRMD, targets, grad_CRM))
    table_grad_RVD, bias_grad_RV = sums
    return x_grad_CRMD, table_grad_RVD.astype(table_RVD.dtype), bias_grad_RV, None


_log_probs.defvjp(
    lambda settings, *saved: (_log_probs(settings, *saved), saved), _log_probs_backward
)
