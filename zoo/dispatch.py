"""How positions reach their experts and come back, with or without a capacity.

These functions run on one device, inside jax.shard_map.

Shapes: B batch, T positions, D embed, E experts, J experts per position, U slots per row in an
expert, M slots or chosen experts, N rows before `spread`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True)
class ExpertMatmul:
    """Multiplies rows by their expert's part of a weight [E, K, N]."""

    sizes_E: jax.Array | None = None  # rows of each expert, if they are not equally many

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x: [E, M, K], or [M, K] sorted by expert."""
        if self.sizes_E is None:
            return jnp.matmul(x, weight)
        return jax.lax.ragged_dot(x, weight, group_sizes=self.sizes_E)


class Choice(NamedTuple):
    """The experts of each position, best first."""

    expert_BTJ: jax.Array
    weight_BTJ: jax.Array
    place_BTJ: jax.Array  # how many earlier positions of the row chose the same expert


@dataclasses.dataclass(frozen=True)
class LocalExperts:
    """The experts on a device."""

    compute: Callable  # see `expert` of experts.mix
    weights: tuple  # [E here, ...]
    number: int  # E
    split: dict[str, tuple[str, ...]]  # logical axis → the mesh axes that split it

    def __call__(self, x, sizes_E: jax.Array | None = None) -> jax.Array:
        """Outputs for rows x, see ExpertMatmul."""
        return self.compute(ExpertMatmul(sizes_E), x, *self.weights)


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

    x_EMD = send(spread(x_BTD, token_BM, slot_BTJ))
    weight_BM1 = weight_BTJ.reshape(B, T * J, 1)
    # Weights travel too, so that their gradient does not need the outputs that come back.
    weight_EM1 = send(spread(weight_BM1, choice_BM, slot_BTJ.reshape(B, T * J, 1)))
    out_EMD = weighted(experts(x_EMD), weight_EM1)
    out_EBUD = out_EMD.reshape(len(out_EMD), -1, U, out_EMD.shape[-1])
    if split["expert"]:
        out_EBUD = jax.lax.all_to_all(out_EBUD, split["expert"], 1, 0, tiled=True)
    out_BMD = out_EBUD.swapaxes(0, 1).reshape(B, E * U, -1)
    # Summed after `unite`, J times fewer bytes than before.
    return sum_shards(unite(out_BMD, slot_BTJ, token_BM), split)


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


def dropless(experts: LocalExperts, x_BTD, choice: Choice) -> jax.Array:
    """Dropless experts (Gale et al. 2022): each takes all positions that chose it, after a sort.

    Runs on one device: gathers the rows of all devices along the axes that split experts, and
    applies its own experts to them. Returns [B, T, D].
    """
    expert_BTJ, weight_BTJ, _ = choice  # nothing is dropped
    split = experts.split
    x_BTD, weight_BTJ = varying(split["mlp"], x_BTD, weight_BTJ)
    if split["expert"]:
        gather = functools.partial(jax.lax.all_gather, axis_name=split["expert"], tiled=True)
        x_BTD, weight_BTJ, expert_BTJ = gather(x_BTD), gather(weight_BTJ), gather(expert_BTJ)
    x_BTD = checkpoint_name(x_BTD, "dispatched")
    weight_BTJ = checkpoint_name(weight_BTJ, "dispatched")
    B, T, J = expert_BTJ.shape
    E = len(experts.weights[0])
    first = jax.lax.axis_index(split["expert"]) * E if split["expert"] else 0
    here_M = expert_BTJ.reshape(-1) - first
    here_M = jnp.where((here_M >= 0) & (here_M < E), here_M, E)  # other devices' choices go last
    order_M = jnp.argsort(here_M)
    slot_M = jnp.argsort(order_M)
    sizes_E = (here_M[:, None] == jnp.arange(E)[None]).sum(axis=0).astype(jnp.int32)
    # Mask those choices: ragged_dot's output outside of all groups is undefined.
    slot_M = jnp.where(here_M < E, slot_M, -1)
    order_M = jnp.where(jnp.arange(len(order_M)) < sizes_E.sum(), order_M, -1)
    token_1M = order_M[None] // J
    slot_1NJ = slot_M.reshape(1, B * T, J)
    x_MD = spread(x_BTD.reshape(1, B * T, -1), token_1M, slot_1NJ)[0]
    weight_M1 = spread(weight_BTJ.reshape(1, -1, 1), order_M[None], slot_M.reshape(1, -1, 1))[0]
    out_MD = weighted(experts(x_MD, sizes_E), weight_M1)
    out_BTD = sum_shards(unite(out_MD[None], slot_1NJ, token_1M).reshape(B, T, -1), split)
    if split["expert"]:
        return jax.lax.psum_scatter(out_BTD, split["expert"], tiled=True)
    return out_BTD


def weighted(out, weight):
    """Out · weight [..., 1]. In float32, so that the weight's gradient is summed over D in float32."""
    return (out.astype(jnp.float32) * weight.astype(jnp.float32)).astype(out.dtype)


def sum_shards(out_BTD, split):
    """Sums over the shards of `mlp`; each keeps its part of T if the residual stream is split."""
    if split["mlp"] and split["mlp"] == split["residual_seq"]:
        return jax.lax.psum_scatter(out_BTD, split["mlp"], scatter_dimension=1, tiled=True)
    return jax.lax.psum(out_BTD, split["mlp"]) if split["mlp"] else out_BTD


def varying(axes: tuple[str, ...], *arrays):
    """Marks arrays as varying along mesh axes, so that their partial gradients are summed here."""
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x in arrays]


def _take(x_BND, index_BM):
    """Rows of each x_ND by index, [B, M, D]; zeros where the index is negative."""
    get = jax.vmap(lambda x_ND, index_M: x_ND.at[index_M].get(mode="promise_in_bounds"))
    return jnp.where(index_BM[..., None] < 0, 0, get(x_BND, jnp.maximum(index_BM, 0)))


@jax.custom_vjp
def spread(x_BND, source_BM, target_BNJ):
    """Returns [B, M, D]: row m is row source[m] of x, or 0. `target` says where x's rows go.

    `spread` and `unite` are each other's transposes, so their gradients are gathers. XLA's would be
    scatters, which took five times as long to compile for TPUs.
    """
    return _take(x_BND, source_BM)


@jax.custom_vjp
def unite(y_BMD, target_BNJ, source_BM):
    """Returns [B, N, D]: row n is the sum of the rows target[n, :] of y, without negative ones."""
    return jnp.asarray(sum(_take(y_BMD, target_BNJ[..., j]) for j in range(target_BNJ.shape[-1])))


spread.defvjp(
    lambda x, *at: (spread(x, *at), at), lambda at, grad: (unite(grad, *at[::-1]), None, None)
)
unite.defvjp(
    lambda y, *at: (unite(y, *at), at), lambda at, grad: (spread(grad, *at[::-1]), None, None)
)
