"""How rows travel to the devices of their experts and back: without a capacity, over several devices.

These functions run on one device, inside jax.shard_map.

Shapes: B batch, T positions, D embed, J experts per position, M slots, N rows of a device, P devices
that share out the experts, C rows that a device receives, K rows that it receives from another.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .matmul import LocalExperts, run_experts
from ..core.sharding import device
from .slots import (
    CAPACITY, before, count_devices, further_rounds, on_all_devices, scatter_rows, take_rows, combine, varying,
    varying_axes,
)  # fmt: skip


class Route(NamedTuple):
    """Where a device's rows go. A device gets a row once, whatever number of its experts it chose."""

    expert_NJ: jax.Array
    device_NJ: jax.Array  # of the expert
    round_NJ: jax.Array  # in which the row goes there; -1: with an earlier choice of the row
    rounds: jax.Array  # the number of rounds, the same on all devices


def exchanges(devices: int, choices: int, load_limit: float = 0.0) -> bool:
    """Whether dropless rows travel to the devices of their experts, or all devices gather all rows.

    No device gets a row twice, so an exchange never sends more than a gather. Over more than two
    devices a random choice sends fewer bytes: of 8 experts over 8 devices, 0.66 of a gather's. And a
    device holds CAPACITY times an even load, instead of `devices` times. Two devices get nearly all rows
    anyway; then a gather is simpler. A limit is one of the exchange.
    """
    return devices > 2 or choices < devices or (load_limit > 0 and devices > 1)


def take_rounds(expert_NJ, here: int, axes: tuple[str, ...], load_limit: float):
    """The round in which each choice is computed, on the device of its expert.

    Devices take choices in the order of source devices and rows. Those of a row on one device have
    the same round.

    Args:
      here: experts of a device.

    Returns: (device_NJ, round_NJ, counts of choices [P, P] by source and target, choices of a round).
    """
    N, J = expert_NJ.shape
    P = count_devices(axes)
    capacity = min(math.ceil((load_limit or CAPACITY) * N * J), P * N * J)
    device_NJ = expert_NJ // here
    taken_NP = (device_NJ[..., None] == jnp.arange(P)[None, None]).sum(axis=1)
    taken_PP = jax.lax.all_gather(taken_NP.sum(axis=0), axes)
    first_NP = before(taken_PP)[jax.lax.axis_index(axes)][None] + before(taken_NP)
    round_NJ = jnp.take_along_axis(first_NP // capacity, device_NJ, axis=1)
    return device_NJ, round_NJ, taken_PP, capacity


def over_limit(expert_BTJ, number: int, axes: tuple[str, ...], load_limit: float) -> jax.Array:
    """Whether `dropless` drops a choice, because a device computes a single round: [B, T, J].

    Runs on one device. No output depends on later positions of its row; a batch's last rows are
    dropped first.

    Args:
      number: E, of all devices.
    """
    if not exchanges(count_devices(axes), expert_BTJ.shape[-1], load_limit):
        return jnp.zeros(expert_BTJ.shape, bool)
    expert_NJ = expert_BTJ.reshape(-1, expert_BTJ.shape[-1])
    round_NJ = take_rounds(expert_NJ, number // count_devices(axes), axes, load_limit)[1]
    return (round_NJ > 0).reshape(expert_BTJ.shape)


def exchange(experts: LocalExperts, x_ND, expert_NJ, weight_NJ, load_limit: float) -> jax.Array:
    """Each row's weighted sum of its experts' outputs, which other devices compute, [N, D].

    A device computes the choices of its experts in rounds, so its memory does not depend on the load.
    Mostly one round is enough; with a limit there is one.
    """
    J = expert_NJ.shape[1]
    axes = experts.split["expert"]
    device_NJ, round_NJ, taken_PP, capacity = take_rounds(expert_NJ, experts.here, axes, load_limit)
    same_NJJ = device_NJ[:, :, None] == device_NJ[:, None]
    is_first_NJ = ~(same_NJJ & jnp.tri(J, k=-1, dtype=bool)[None]).any(axis=-1)
    rounds = on_all_devices(-(-taken_PP.sum(axis=0).max() // capacity))
    route = Route(expert_NJ, device_NJ, jnp.where(is_first_NJ, round_NJ, -1), rounds)
    run_round = functools.partial(one_round, experts, capacity)
    first_ND = run_round(jnp.int32(0), route, x_ND, weight_NJ, experts.weights)
    if load_limit:
        return first_ND
    return first_ND + further_rounds(run_round, route, x_ND, weight_NJ, experts.weights)


def one_round(experts: LocalExperts, capacity: int, round, route: Route, x_ND, weight_NJ, weights):
    """The part of `exchange` that devices compute in a round, [N, D]."""
    experts = dataclasses.replace(experts, weights=weights)
    axes = experts.split["expert"]
    N, J = weight_NJ.shape
    P = count_devices(axes)
    leaving = N * min(J, P)  # no device gets a row twice
    arriving = min(capacity, N * P)
    sent_NJ = route.round_NJ == round
    devices_11P = jnp.arange(P)[None, None]
    sent_NP = (sent_NJ[..., None] & (route.device_NJ[..., None] == devices_11P)).sum(axis=1)
    counts_PP = jax.lax.all_gather(sent_NP.sum(axis=0), axes)  # rows, by source and target
    # Rows leave in the order of their targets, and arrive in that of their sources.
    place_NP = before(sent_NP.sum(axis=0))[None] + before(sent_NP)
    place_NJ = jnp.take_along_axis(place_NP, route.device_NJ, axis=1)
    place_NJ = jnp.where(sent_NJ, place_NJ, -1)
    order_M = jnp.argsort(jnp.where(sent_NJ, place_NJ, N * J).reshape(-1))[:leaving]
    row_M = jnp.where(jnp.arange(leaving) < sent_NP.sum(), order_M // J, -1)

    def send(y_N):  # [N, ...] → [C, ...], the rows that arrive here
        y_M = scatter_rows(y_N[None], row_M[None], place_NJ[None])[0]
        return checkpoint_name(move(y_M, counts_PP, axes, (leaving, arriving), N), "dispatched")

    x_CD = send(x_ND)
    me = jax.lax.axis_index(axes)
    # As floats, which have all numbers of experts, so that one transfer has both.
    both_CJ = send(jnp.concatenate((route.expert_NJ.astype(weight_NJ.dtype), weight_NJ), axis=1))
    is_row_C1 = (jnp.arange(arriving) < counts_PP[:, me].sum())[:, None]
    expert_CJ = jnp.where(is_row_C1, both_CJ[:, :J].astype(jnp.int32) - me * experts.here, -1)
    # The choices of the round's last row may go beyond the capacity.
    out_CD = run_experts(experts, x_CD, expert_CJ, both_CJ[:, J:], N * J, slots=capacity + J - 1)
    out_MD = jnp.asarray(move(out_CD, counts_PP.T, axes, (arriving, leaving), N))
    return combine(out_MD[None], place_NJ[None], row_M[None])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def move(x_M, counts_PP, axes: tuple[str, ...], sizes: tuple[int, int], most: int) -> Any:
    """Sends rows of x to other devices. Returns [sizes[1], D], undefined after the last row.

    Args:
      x_M: [sizes[0], D], rows in the order of their targets.
      counts_PP: rows from each device to each.
      most: no count is larger.
    """
    me = jax.lax.axis_index(axes)
    sent_P, received_P = counts_PP[me], counts_PP[:, me]
    if device().platform != "cpu":
        # Zeros would cost a tenth of a step of mixtral_8x7b on TPUs.
        (empty_C,) = varying(varying_axes(x_M), jax.lax.empty((sizes[1], x_M.shape[1]), x_M.dtype))
        places_P = before(counts_PP)[me]
        return jax.lax.ragged_all_to_all(
            x_M, empty_C, before(sent_P), sent_P, places_P, received_P, axis_name=axes
        )
    # XLA has none for CPUs: as many rows go to each device.
    number_1K = jnp.arange(most)[None]
    from_PK = jnp.where(number_1K < sent_P[:, None], before(sent_P)[:, None] + number_1K, -1)
    blocks_PK = take_rows(x_M[None], from_PK.reshape(1, -1))[0].reshape(-1, most, x_M.shape[1])
    blocks_PK = jax.lax.all_to_all(blocks_PK, axes, 0, 0, tiled=True)
    row_C = jnp.arange(sizes[1])
    source_C = (row_C[:, None] >= jnp.cumsum(received_P)[None]).sum(axis=1)
    from_C = source_C * most + row_C - before(received_P)[source_C]
    from_C = jnp.where(row_C < received_P.sum(), from_C, -1)
    x_C = take_rows(blocks_PK.reshape(1, -1, x_M.shape[1]), from_C[None])[0]
    return jnp.where(from_C[:, None] < 0, jnp.nan, x_C)  # so that reading what is undefined shows


move.defvjp(
    lambda x, counts, *at: (move(x, counts, *at), counts),
    lambda axes, sizes, most, counts, grad: (move(grad, counts.T, axes, sizes[::-1], most), None),
)
