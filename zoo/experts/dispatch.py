"""How positions reach their experts and come back, with or without a capacity.

These functions run on one device, inside jax.shard_map.

Shapes: B batch, T positions, D embed, E experts, J experts per position, U slots per row in an
expert, M slots or choices, N rows of a device.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .exchange import exchange, exchanges
from .matmul import LocalExperts, run_experts
from .slots import count_devices, scatter_rows, combine, varying, varying_axes, weighted


class Choice(NamedTuple):
    """The experts of each position, best first."""

    expert_BTJ: jax.Array
    weight_BTJ: jax.Array
    place_BTJ: jax.Array  # how many earlier positions of the row chose the same expert


def by_capacity(experts: LocalExperts, slots: int, x_BTD, choice: Choice) -> jax.Array:
    """Experts with a capacity: each takes the first `slots` positions of a row that chose it.

    Runs on one device: sends its rows to the devices of their experts and back, and applies its own
    experts to the rows it receives. Returns [B, T, D].
    """
    expert_BTJ, weight_BTJ, place_BTJ = choice
    split = experts.split
    B, T, J = expert_BTJ.shape
    U = min(slots, T)
    E = experts.number
    x_BTD, weight_BTJ = varying(split["mlp"], x_BTD, weight_BTJ)
    if split["seq"]:  # other devices have other positions of the row: these have slots of their own
        taken_BTE = jax.nn.one_hot(expert_BTJ, E, dtype=jnp.int32).sum(axis=2)
        before_BTE = jnp.cumsum(taken_BTE, axis=1) - taken_BTE
        kept_BTJ = place_BTJ < slots
        place_BTJ = jnp.where(kept_BTJ, jnp.take_along_axis(before_BTE, expert_BTJ, axis=2), U)
        expert_BTJ = jnp.where(kept_BTJ, expert_BTJ, E)
    slot_BTJ = jnp.where(place_BTJ < U, expert_BTJ * U + place_BTJ, -1)
    choice_BM = choices_in_slots(expert_BTJ, E, U)
    token_BM = choice_BM // J

    def send(y_BMD):  # [B, E · U, D] → [E here, M, D], with M slots of all rows that arrive here
        y_EBUD = y_BMD.reshape(B, E, U, -1).swapaxes(0, 1)
        if split["expert"]:
            y_EBUD = jax.lax.all_to_all(y_EBUD, split["expert"], 0, 1, tiled=True)
        return checkpoint_name(y_EBUD.reshape(len(y_EBUD), -1, y_EBUD.shape[-1]), "dispatched")

    x_EMD = send(scatter_rows(x_BTD, token_BM, slot_BTJ))
    weight_BM1 = weight_BTJ.reshape(B, T * J, 1)
    # Weights travel too, so that their gradient does not need the outputs that come back.
    weight_EM1 = send(scatter_rows(weight_BM1, choice_BM, slot_BTJ.reshape(B, T * J, 1)))
    out_EMD = weighted(experts(x_EMD), weight_EM1)
    out_EBUD = out_EMD.reshape(len(out_EMD), -1, U, out_EMD.shape[-1])
    if split["expert"]:
        out_EBUD = jax.lax.all_to_all(out_EBUD, split["expert"], 1, 0, tiled=True)
    out_BMD = out_EBUD.swapaxes(0, 1).reshape(B, E * U, -1)
    # Summed after `combine`, J times fewer bytes than before.
    return sum_shards(combine(out_BMD, slot_BTJ, token_BM), split)


def choices_in_slots(expert_BTJ, E: int, U: int) -> jax.Array:
    """Which of a row's T · J choices has each slot, -1 if none: [B, E · U]."""
    B, T, J = expert_BTJ.shape
    choices_BM = expert_BTJ.reshape(B, T * J)
    order_BM = jnp.argsort(choices_BM, axis=1, stable=True)
    count_BE = (choices_BM[..., None] == jnp.arange(E)[None, None]).sum(axis=1)
    first_BE1 = (jnp.cumsum(count_BE, axis=1) - count_BE)[..., None]
    slots_11U = jnp.arange(U)[None, None]
    sorted_BM = jnp.minimum(first_BE1 + slots_11U, T * J - 1).reshape(B, E * U)
    used_BM = (slots_11U < count_BE[..., None]).reshape(B, E * U)
    return jnp.where(used_BM, jnp.take_along_axis(order_BM, sorted_BM, axis=1), -1)


def dropless(experts: LocalExperts, x_BTD, choice: Choice, load_limit: float = 0.0) -> jax.Array:
    """Dropless experts (Gale et al. 2022): each takes all positions that chose it, after a sort.

    Runs on one device, whose experts compute rows of all devices along the axes that split experts:
    it gathers all rows, or gets those that chose its experts. Returns [B, T, D].

    Args:
      load_limit: see Config.load_limit; `over_limit` says what it drops.
    """
    expert_BTJ, weight_BTJ, _ = choice
    split = experts.split
    axes = split["expert"]
    x_BTD, weight_BTJ = varying(split["mlp"], x_BTD, weight_BTJ)
    B, T, J = expert_BTJ.shape
    x_ND = x_BTD.reshape(B * T, -1)
    expert_NJ = expert_BTJ.reshape(B * T, J)
    weight_NJ = weight_BTJ.reshape(B * T, J)
    if exchanges(count_devices(axes), J, load_limit):
        if not experts.sums_gradients:  # they are summed once, over all rounds
            weights = varying(varying_axes(x_ND), *experts.weights)
            experts = dataclasses.replace(experts, weights=tuple(weights))
        out_ND = exchange(experts, x_ND, expert_NJ, weight_NJ, load_limit)
        return sum_shards(out_ND.reshape(B, T, -1), split)
    if axes:
        gather = functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True)
        x_ND, weight_NJ, expert_NJ = gather(x_ND), gather(weight_NJ), gather(expert_NJ)
        expert_NJ -= jax.lax.axis_index(axes) * experts.here
    x_ND = checkpoint_name(x_ND, "dispatched")
    weight_NJ = checkpoint_name(weight_NJ, "dispatched")
    even = expert_NJ.size * experts.here / experts.number
    out_ND = run_experts(experts, x_ND, expert_NJ, weight_NJ, even, slots=expert_NJ.size)
    out_BTD = sum_shards(out_ND.reshape(-1, T, out_ND.shape[-1]), split)
    return jax.lax.psum_scatter(out_BTD, axes, tiled=True) if axes else out_BTD


def sum_shards(out_BTD, split):
    """Sums over the shards of `mlp`; each keeps its part of T if the residual stream is split."""
    if split["mlp"] and split["mlp"] == split["residual_seq"]:
        return jax.lax.psum_scatter(out_BTD, split["mlp"], scatter_dimension=1, tiled=True)
    return jax.lax.psum(out_BTD, split["mlp"]) if split["mlp"] else out_BTD
