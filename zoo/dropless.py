"""Experts without a capacity, as in generation and in imported models.

experts.mix uses this file if the capacity is None, so a model can be copied without it.

Shapes: B batch, T positions, D embed, E experts, J experts per position, M chosen experts, N rows
before `spread`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .experts import spread, sum_shards, unite, varying


def dropless(expert, split, x_BTD, expert_BTJ, weight_BTJ, place_BTJ, *weights):
    """Dropless experts (Gale et al. 2022): each takes all positions that chose it, after a sort.

    Runs on one device: gathers the rows of all devices along the axes that split experts, and
    applies its own experts to them. Returns [B, T, D].
    """
    del place_BTJ  # nothing is dropped
    given = varying(split["mlp"], x_BTD, weight_BTJ)
    if split["expert"]:
        given = [jax.lax.all_gather(x, split["expert"], tiled=True) for x in given]
        expert_BTJ = jax.lax.all_gather(expert_BTJ, split["expert"], tiled=True)
    x_BTD, weight_BTJ = (checkpoint_name(x, "dispatched") for x in given)
    (B, T, J), E = expert_BTJ.shape, len(weights[0])
    first = jax.lax.axis_index(split["expert"]) * E if split["expert"] else 0
    here_M = expert_BTJ.reshape(-1) - first
    here_M = jnp.where((here_M >= 0) & (here_M < E), here_M, E)  # other devices' choices go last
    order_M = jnp.argsort(here_M)
    slot_M = jnp.argsort(order_M)
    sizes_E = (here_M[:, None] == jnp.arange(E)[None]).sum(axis=0).astype(jnp.int32)
    # Mask those choices: ragged_dot's output outside of all groups is undefined.
    slot_M = jnp.where(here_M < E, slot_M, -1)
    order_M = jnp.where(jnp.arange(len(order_M)) < sizes_E.sum(), order_M, -1)
    token_1M, slot_1NJ = order_M[None] // J, slot_M.reshape(1, B * T, J)
    x_MD = spread(x_BTD.reshape(1, B * T, -1), token_1M, slot_1NJ)[0]
    weight_M1 = spread(weight_BTJ.reshape(1, -1, 1), order_M[None], slot_M.reshape(1, -1, 1))[0]
    grouped = functools.partial(jax.lax.ragged_dot, group_sizes=sizes_E)
    out_MD = expert(grouped, x_MD, *weights) * weight_M1.astype(x_MD.dtype)
    out_BTD = sum_shards(unite(out_MD[None], slot_1NJ, token_1M).reshape(B, T, -1), split)
    own = split["expert"]
    return jax.lax.psum_scatter(out_BTD, own, tiled=True) if own else out_BTD
