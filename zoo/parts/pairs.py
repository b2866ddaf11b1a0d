"""Losses over all pairs of a batch: every row of one tower's embeddings with every row of the other's.

A row's partner is the row of the same number; all others are what it is not. Devices hold rows, so
each needs the others' embeddings:

  gather  all of y at once: a device has B/n × B scores;
  ring    y visits one device after another: B/n × B/n scores at a time, and as many bytes;
  local   a device's own rows alone: another loss, with fewer negatives on more devices.

Scores, their sums and gradients are float32, whatever the towers compute in.

Shapes: B batch, D joint embedding; on a device b rows, c columns (rows of y).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..kernels.shared import NOT_SEEN
from ..core.layers import dot
from ..core.sharding import mesh_axes, per_device, shards

LOSSES = ("sigmoid", "softmax")
EXCHANGES = ("gather", "ring", "local")


def loss_of_pairs(x_BD, y_BD, counted_B, scale, bias, *, loss: str, exchange: str) -> jax.Array:
    """The sum over rows of the loss of x · y · scale + bias, float32.

    sigmoid (Zhai et al. 2023): each pair is classified alone, whether it is one.
    softmax (Radford et al. 2021, CLIP): each row is to find its partner among all, both ways.

    Args:
      counted_B: bool; other rows only pad the batch and are in no pair.
      loss, exchange: one of LOSSES and of EXCHANGES.
    """
    on_device = functools.partial(_on_device, loss, exchange, mesh_axes("batch"), shards("batch"))
    rows = ("batch", None)
    totals_R = per_device(
        on_device,
        (x_BD.astype(jnp.float32), y_BD.astype(jnp.float32), counted_B, scale, bias),
        (rows, rows, ("batch",), (), ()),
        ("batch",),
        check_vma=False,
    )
    return totals_R.sum()


class Columns(NamedTuple):
    """Rows of y, which travel, and what the rows that they have met make of them."""

    y_cD: jax.Array
    counted_c: jax.Array
    log_sum_c: jax.Array  # logarithm of the sum of exponential scores, of softmax


class Rows(NamedTuple):
    """What a device's rows have collected."""

    total: jax.Array
    log_sum_b: jax.Array


def _on_device(loss, exchange, axes, n, x_bD, y_bD, counted_b, scale, bias):
    """One device's part of the loss, [1]."""
    b = len(x_bD)
    unseen_b = jnp.full(b, NOT_SEEN)
    own = Columns(y_bD, counted_b, unseen_b)
    rows = Rows(jnp.float32(0), unseen_b)

    # Remat: the backward pass computes a block's scores again, and keeps none.
    @jax.checkpoint
    def meet(rows: Rows, columns: Columns, first):
        """Compares all rows with some columns; row i's partner is column first + i."""
        score_bc = dot("bD,cD->bc", x_bD, columns.y_cD) * scale + bias
        c = len(columns.y_cD)
        partner_bc = jnp.arange(b)[:, None] + first == jnp.arange(c)[None]
        pair_bc = counted_b[:, None] & columns.counted_c[None]
        if loss == "sigmoid":
            signed_bc = jnp.where(partner_bc, score_bc, -score_bc)
            nats_bc = jnp.where(pair_bc, -jax.nn.log_sigmoid(signed_bc), 0)
            return Rows(rows.total + nats_bc.sum(), rows.log_sum_b), columns
        score_bc = jnp.where(pair_bc, score_bc, NOT_SEEN)
        partners = jnp.where(partner_bc & pair_bc, score_bc, 0).sum()
        row_sum_b = jnp.logaddexp(rows.log_sum_b, jax.nn.logsumexp(score_bc, axis=1))
        column_sum_c = jnp.logaddexp(columns.log_sum_c, jax.nn.logsumexp(score_bc, axis=0))
        return Rows(rows.total - 2 * partners, row_sum_b), columns._replace(log_sum_c=column_sum_c)

    if exchange == "gather" and n > 1:
        gather = functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True)
        here = jax.lax.axis_index(axes) * b
        rows, every = meet(rows, Columns(*map(gather, own)), here)
        most_c = jax.lax.pmax(jax.lax.stop_gradient(every.log_sum_c), axes)
        log_sum_c = most_c + jnp.log(jax.lax.psum(jnp.exp(every.log_sum_c - most_c), axes))
        column_sum_b = jax.lax.dynamic_slice_in_dim(log_sum_c, here, b)
    else:
        rows, columns = meet(rows, own, 0)
        if exchange == "ring" and n > 1:
            send = [(i, (i + 1) % n) for i in range(n)]
            hop = functools.partial(jax.lax.ppermute, axis_name=axes, perm=send)

            def visit(carry, _):
                rows, columns = carry
                return meet(rows, Columns(*map(hop, columns)), -b), None  # no partner here

            (rows, columns), _ = jax.lax.scan(visit, (rows, columns), length=n - 1)
            columns = columns._replace(log_sum_c=hop(columns.log_sum_c))  # home
        column_sum_b = columns.log_sum_c
    if loss == "sigmoid":
        return rows.total[None]
    both_b = jnp.where(counted_b, rows.log_sum_b + column_sum_b, 0)
    return (rows.total + both_b.sum())[None] / 2
