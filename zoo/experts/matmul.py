"""What a device's experts compute: products of rows, each with the weights of its own expert.

These functions run on one device, inside jax.shard_map.

Shapes: D embed, E experts, J experts per row, U slots of an expert, M slots or choices, N rows before
`scatter_rows`; of products: K and N, a weight's sides.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from ..core.sharding import device
from .slots import (
    CAPACITY, before, count_devices, further_rounds, on_all_devices, scatter_rows, combine, varying, varying_axes,
    weighted,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ExpertMatmul:
    """Multiplies rows by their expert's part of a weight [E, K, N]."""

    sizes_E: jax.Array | None = None  # rows of each expert, if they are not equally many

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x: [E, M, K], or [M, K] sorted by expert."""
        if self.sizes_E is None:
            return jnp.matmul(x, weight)
        if device().platform != "tpu" or len(x) % ROWS:
            return jax.lax.ragged_dot(x, weight, group_sizes=self.sizes_E)
        axes = varying_axes(x) | varying_axes(weight)
        return product_in_blocks(*varying(axes, x, weight, self.sizes_E))


@dataclasses.dataclass(frozen=True)
class LocalExperts:
    """The experts on a device."""

    compute: Callable  # see `expert` of mixture.mix
    weights: tuple  # [E here, ...]
    number: int  # E
    split: dict[str, tuple[str, ...]]  # logical axis → the mesh axes that split it
    sums_gradients: bool = False  # whether `compute` sums its weights' gradients over devices

    @property
    def here(self) -> int:
        return len(self.weights[0])

    def __call__(self, x, sizes_E: jax.Array | None = None) -> jax.Array:
        """Outputs for rows x, see ExpertMatmul."""
        return self.compute(ExpertMatmul(sizes_E), x, *self.weights)


# Rows of a block. TPUs multiply other numbers of rows by the weights of all experts, then mask.
ROWS = 256


@jax.custom_vjp
def product_in_blocks(x_MK, w_EKN, sizes_E) -> Any:
    """jax.lax.ragged_dot in blocks that we choose. TPUs' own take three times as long for gradients."""
    with blocks_of(w_EKN, K=4_096, N=512):
        return jax.lax.ragged_dot(x_MK, w_EKN, group_sizes=sizes_E)


def _product_backward(saved, grad_MN):
    x_MK, w_EKN, sizes_E = saved
    x_grad_MK = product_in_blocks(grad_MN, w_EKN.swapaxes(1, 2), sizes_E)
    rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    with blocks_of(w_EKN, K=2_048, N=768):
        w_grad_EKN = jax.lax.ragged_dot_general(x_MK, grad_MN, sizes_E, rows)
    return x_grad_MK, w_grad_EKN, None


product_in_blocks.defvjp(lambda *args: (product_in_blocks(*args), args), _product_backward)


def blocks_of(w_EKN, K: int, N: int):
    """A context in which TPUs multiply rows by such a weight in blocks of M, K and N.

    Args:
      K: most bytes of a block along it; N: most columns. Kernels have 16 MB for their blocks.
    """

    def length(size: int, most: int) -> int:  # little is wasted at the end, and blocks aren't short
        return min(range(128, most + 1, 128), key=lambda n: -(-size // n) * (n + 64))

    blocks = ROWS, length(w_EKN.shape[1], K // w_EKN.dtype.itemsize), length(w_EKN.shape[2], N)
    return set_xla_metadata(ragged_dot_tiling=",".join(map(str, blocks)))


def gather_experts(weights, axes, split: dict[str, tuple[str, ...]]) -> tuple[jax.Array, ...]:
    """Gathers the D of experts' weights. Their gradients are scattered, then summed over other rows.

    Here and not before jax.shard_map, whose transpose sums whole gradients: TPUs make that an
    all-reduce if D isn't the last dim.

    Args:
      axes: the logical axes of each weight; split: logical axis → mesh axes.
    """
    over = split["expert_embed"]
    gathered = []
    for weight, names in zip(weights, axes, strict=True):
        if count_devices(over) > 1 and "expert_embed" in names:
            (weight,) = varying((*split["batch"], *split["seq"]), weight)
            dim = names.index("expert_embed")
            weight = jax.lax.all_gather(weight, over, axis=dim, tiled=True)
        gathered.append(weight)
    return tuple(gathered)


def run_experts(experts: LocalExperts, x_ND, expert_NJ, weight_NJ, even: float, slots: int):
    """Weighted sums of the outputs of this device's experts, [N, D].

    Args:
      expert_NJ: the experts of each row; those of this device are 0 to E - 1, others are skipped.
      even: the number of choices of this device's experts at an even load.
      slots: at least their number.
    """
    E = experts.here
    here_M = expert_NJ.reshape(-1)
    here_M = jnp.where((here_M >= 0) & (here_M < E), here_M, E)  # other devices' choices go last
    order_M = jnp.argsort(here_M)
    slot_M = jnp.argsort(order_M)
    sizes_E = (here_M[:, None] == jnp.arange(E)[None]).sum(axis=0).astype(jnp.int32)
    if not multiplies_groups():
        rows = min(len(x_ND), max(ROWS, math.ceil(CAPACITY * even / E)))  # of few, a round has all
        rounds = on_all_devices(-(-sizes_E.max() // rows))
        chosen = Chosen(here_M, order_M, slot_M, sizes_E, rounds)
        return in_batches(experts, rows, chosen, x_ND, weight_NJ)
    # Mask those choices: ragged_dot's output outside of all groups is undefined.
    slot_M = jnp.where(here_M < E, slot_M, -1)
    order_M = order_M[:slots]
    if slots > ROWS:  # whole blocks
        order_M = jnp.pad(order_M, (0, -len(order_M) % ROWS))
    order_M = jnp.where(jnp.arange(len(order_M)) < sizes_E.sum(), order_M, -1)
    return run_slots(experts, x_ND, weight_NJ, order_M, slot_M, sizes_E)


def run_slots(experts: LocalExperts, x_ND, weight_NJ, choice_M, slot_M, sizes_E=None) -> Any:
    """`run_experts` for given slots.

    Args:
      choice_M: which of the N · J choices is in each slot, -1 if none.
      slot_M: where each choice is, -1 if nowhere.
      sizes_E: see ExpertMatmul; None: all experts have as many slots.
    """
    N, J = weight_NJ.shape
    token_1M = choice_M[None] // J
    slot_1NJ = slot_M.reshape(1, N, J)
    x_MD = scatter_rows(x_ND[None], token_1M, slot_1NJ)[0]
    weight_M1 = scatter_rows(weight_NJ.reshape(1, -1, 1), choice_M[None], slot_M.reshape(1, -1, 1))[
        0
    ]
    if sizes_E is None:
        x_MD = x_MD.reshape(experts.here, -1, x_MD.shape[-1])
    out_MD = experts(x_MD, sizes_E).reshape(len(weight_M1), -1)
    return combine(weighted(out_MD, weight_M1)[None], slot_1NJ, token_1M)[0]


class Chosen(NamedTuple):
    """Choices of this device's experts; E for those of other devices."""

    expert_M: jax.Array
    order_M: jax.Array  # the choices, sorted by expert
    place_M: jax.Array  # of each choice in that order
    sizes_E: jax.Array  # choices of each expert
    rounds: jax.Array  # the number of rounds, the same on all devices


def multiplies_groups() -> bool:
    """Whether ragged_dot multiplies rows by their own expert's weight alone.

    CPUs and GPUs multiply all rows by all weights, and mask.
    """
    return device().platform == "tpu"


def in_batches(experts: LocalExperts, rows: int, chosen: Chosen, x_ND, weight_NJ) -> jax.Array:
    """`run_experts` by batched products: in a round, each expert computes `rows` of its rows.

    Mostly one round is enough.
    """
    weights = experts.weights
    if not experts.sums_gradients:  # they are summed once, over all rounds
        weights = tuple(varying(varying_axes(x_ND), *weights))
    run_round = functools.partial(one_batch, experts, rows)
    first_ND = run_round(jnp.int32(0), chosen, x_ND, weight_NJ, weights)
    if rows == len(x_ND):
        return first_ND
    return first_ND + further_rounds(run_round, chosen, x_ND, weight_NJ, weights)


def one_batch(experts: LocalExperts, rows: int, round, chosen: Chosen, x_ND, weight_NJ, weights):
    """The part of `in_batches` that experts compute in a round, [N, D]."""
    E = experts.here
    first_E = before(chosen.sizes_E)
    number_1U = round * rows + jnp.arange(rows)[None]
    place_EU = jnp.minimum(first_E[:, None] + number_1U, len(chosen.order_M) - 1)
    choice_EU = jnp.where(number_1U < chosen.sizes_E[:, None], chosen.order_M[place_EU], -1)
    number_M = chosen.place_M - first_E[jnp.minimum(chosen.expert_M, E - 1)]
    slot_M = chosen.expert_M * rows + number_M - round * rows
    slot_M = jnp.where((chosen.expert_M < E) & (number_M // rows == round), slot_M, -1)
    experts = dataclasses.replace(experts, weights=weights)
    return run_slots(experts, x_ND, weight_NJ, choice_EU.reshape(-1), slot_M)
