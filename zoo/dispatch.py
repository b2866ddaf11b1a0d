"""How positions reach their experts and come back, with or without a capacity.

These functions run on one device, inside jax.shard_map.

Shapes: B batch, T positions, D embed, E experts, J experts per position, U slots per row in an
expert, M slots or chosen experts, N rows before `spread`, P devices that share out the experts, C rows
that a device receives.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

from .sharding import device


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
        if not experts.sums_gradients:  # they are summed once, over all turns
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
        rows = min(len(x_ND), max(ROWS, math.ceil(ROOM * even / E)))  # of few, a turn has all
        turns = on_all_devices(-(-sizes_E.max() // rows))
        chosen = Chosen(here_M, order_M, slot_M, sizes_E, turns)
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
    x_MD = spread(x_ND[None], token_1M, slot_1NJ)[0]
    weight_M1 = spread(weight_NJ.reshape(1, -1, 1), choice_M[None], slot_M.reshape(1, -1, 1))[0]
    if sizes_E is None:
        x_MD = x_MD.reshape(experts.here, -1, x_MD.shape[-1])
    out_MD = experts(x_MD, sizes_E).reshape(len(weight_M1), -1)
    return unite(weighted(out_MD, weight_M1)[None], slot_1NJ, token_1M)[0]


class Chosen(NamedTuple):
    """Choices of this device's experts; E for those of other devices."""

    expert_M: jax.Array
    order_M: jax.Array  # the choices, sorted by expert
    place_M: jax.Array  # of each choice in that order
    sizes_E: jax.Array  # choices of each expert
    turns: jax.Array  # the number of turns, the same on all devices


def multiplies_groups() -> bool:
    """Whether ragged_dot multiplies rows by their own expert's weight. GPUs multiply by all, and mask."""
    return device().platform != "gpu"


def in_batches(experts: LocalExperts, rows: int, chosen: Chosen, x_ND, weight_NJ) -> jax.Array:
    """`run_experts` by batched products: in a turn, each expert computes `rows` of its rows.

    Mostly one turn is enough.
    """
    weights = experts.weights
    if not experts.sums_gradients:  # they are summed once, over all turns
        weights = tuple(varying(varying_axes(x_ND), *weights))
    run_turn = functools.partial(one_batch, experts, rows)
    first_ND = run_turn(jnp.int32(0), chosen, x_ND, weight_NJ, weights)
    if rows == len(x_ND):
        return first_ND
    return first_ND + further_turns(run_turn, chosen, x_ND, weight_NJ, weights)


def one_batch(experts: LocalExperts, rows: int, turn, chosen: Chosen, x_ND, weight_NJ, weights):
    """The part of `in_batches` that experts compute in a turn, [N, D]."""
    E = experts.here
    first_E = before(chosen.sizes_E)
    number_1U = turn * rows + jnp.arange(rows)[None]
    place_EU = jnp.minimum(first_E[:, None] + number_1U, len(chosen.order_M) - 1)
    choice_EU = jnp.where(number_1U < chosen.sizes_E[:, None], chosen.order_M[place_EU], -1)
    number_M = chosen.place_M - first_E[jnp.minimum(chosen.expert_M, E - 1)]
    slot_M = chosen.expert_M * rows + number_M - turn * rows
    slot_M = jnp.where((chosen.expert_M < E) & (number_M // rows == turn), slot_M, -1)
    experts = dataclasses.replace(experts, weights=weights)
    return run_slots(experts, x_ND, weight_NJ, choice_EU.reshape(-1), slot_M)


def on_all_devices(turns) -> jax.Array:
    """The largest number of turns, because devices have to send in as many."""
    axes = tuple(sorted(jax.sharding.get_abstract_mesh().manual_axes))
    (turns,) = varying(axes, turns)
    return jax.lax.pmax(turns, axes) if axes else turns


# ---- rows travel to the devices of their experts -------------------------------------------------

ROOM = 1.5  # choices that a device, or an expert, computes in a turn, as a multiple of an even load


class Route(NamedTuple):
    """Where a device's rows go. A device gets a row once, whatever number of its experts it chose."""

    expert_NJ: jax.Array
    device_NJ: jax.Array  # of the expert
    turn_NJ: jax.Array  # in which the row goes there; -1: with an earlier choice of the row
    turns: jax.Array  # the number of turns, the same on all devices


def exchanges(devices: int, choices: int, load_limit: float = 0.0) -> bool:
    """Whether dropless rows travel to the devices of their experts, or all devices gather all rows.

    No device gets a row twice, so an exchange never sends more than a gather. Over more than two
    devices a random choice sends fewer bytes: of 8 experts over 8 devices, 0.66 of a gather's. And a
    device holds ROOM times an even load, instead of `devices` times. Two devices get nearly all rows
    anyway; then a gather is simpler. A limit is one of the exchange.
    """
    return devices > 2 or choices < devices or (load_limit > 0 and devices > 1)


def take_turns(expert_NJ, here: int, axes: tuple[str, ...], load_limit: float):
    """The turn in which each choice is computed, on the device of its expert.

    Devices take choices in the order of source devices and rows. Those of a row on one device have
    the same turn.

    Args:
      here: experts of a device.

    Returns: (device_NJ, turn_NJ, counts of choices [P, P] by source and target, choices of a turn).
    """
    N, J = expert_NJ.shape
    P = count_devices(axes)
    room = min(math.ceil((load_limit or ROOM) * N * J), P * N * J)
    device_NJ = expert_NJ // here
    taken_NP = (device_NJ[..., None] == jnp.arange(P)[None, None]).sum(axis=1)
    taken_PP = jax.lax.all_gather(taken_NP.sum(axis=0), axes)
    first_NP = before(taken_PP)[jax.lax.axis_index(axes)][None] + before(taken_NP)
    turn_NJ = jnp.take_along_axis(first_NP // room, device_NJ, axis=1)
    return device_NJ, turn_NJ, taken_PP, room


def over_limit(expert_BTJ, number: int, axes: tuple[str, ...], load_limit: float) -> jax.Array:
    """Whether `dropless` drops a choice, because a device computes a single turn: [B, T, J].

    Runs on one device. No output depends on later positions of its row; a batch's last rows are
    dropped first.

    Args:
      number: E, of all devices.
    """
    if not exchanges(count_devices(axes), expert_BTJ.shape[-1], load_limit):
        return jnp.zeros(expert_BTJ.shape, bool)
    expert_NJ = expert_BTJ.reshape(-1, expert_BTJ.shape[-1])
    turn_NJ = take_turns(expert_NJ, number // count_devices(axes), axes, load_limit)[1]
    return (turn_NJ > 0).reshape(expert_BTJ.shape)


def exchange(experts: LocalExperts, x_ND, expert_NJ, weight_NJ, load_limit: float) -> jax.Array:
    """Each row's weighted sum of its experts' outputs, which other devices compute, [N, D].

    A device computes the choices of its experts in turns, so its memory does not depend on the load.
    Mostly one turn is enough; with a limit there is one.
    """
    J = expert_NJ.shape[1]
    axes = experts.split["expert"]
    device_NJ, turn_NJ, taken_PP, room = take_turns(expert_NJ, experts.here, axes, load_limit)
    same_NJJ = device_NJ[:, :, None] == device_NJ[:, None]
    is_first_NJ = ~(same_NJJ & jnp.tri(J, k=-1, dtype=bool)[None]).any(axis=-1)
    turns = on_all_devices(-(-taken_PP.sum(axis=0).max() // room))
    route = Route(expert_NJ, device_NJ, jnp.where(is_first_NJ, turn_NJ, -1), turns)
    run_turn = functools.partial(one_turn, experts, room)
    first_ND = run_turn(jnp.int32(0), route, x_ND, weight_NJ, experts.weights)
    if load_limit:
        return first_ND
    return first_ND + further_turns(run_turn, route, x_ND, weight_NJ, experts.weights)


def one_turn(experts: LocalExperts, room: int, turn, route: Route, x_ND, weight_NJ, weights):
    """The part of `exchange` that devices compute in a turn, [N, D]."""
    experts = dataclasses.replace(experts, weights=weights)
    axes = experts.split["expert"]
    N, J = weight_NJ.shape
    P = count_devices(axes)
    leaving = N * min(J, P)  # no device gets a row twice
    arriving = min(room, N * P)
    sent_NJ = route.turn_NJ == turn
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
        y_M = spread(y_N[None], row_M[None], place_NJ[None])[0]
        return checkpoint_name(move(y_M, counts_PP, axes, (leaving, arriving), N), "dispatched")

    x_CD = send(x_ND)
    me = jax.lax.axis_index(axes)
    # As floats, which have all numbers of experts, so that one transfer has both.
    both_CJ = send(jnp.concatenate((route.expert_NJ.astype(weight_NJ.dtype), weight_NJ), axis=1))
    is_row_C1 = (jnp.arange(arriving) < counts_PP[:, me].sum())[:, None]
    expert_CJ = jnp.where(is_row_C1, both_CJ[:, :J].astype(jnp.int32) - me * experts.here, -1)
    # The choices of the turn's last row may go beyond the room.
    out_CD = run_experts(experts, x_CD, expert_CJ, both_CJ[:, J:], N * J, slots=room + J - 1)
    out_MD = jnp.asarray(move(out_CD, counts_PP.T, axes, (arriving, leaving), N))
    return unite(out_MD[None], place_NJ[None], row_M[None])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def further_turns(run_turn, route: Route | Chosen, x_ND, weight_NJ, weights) -> Any:
    """The sum of all turns but the first, added in float32; saves no more than its inputs."""

    def add_turn(carry):
        turn, sum_ND = carry
        out_ND = run_turn(turn, route, x_ND, weight_NJ, weights)
        return turn + 1, sum_ND + out_ND.astype(jnp.float32)

    (zero_ND,) = varying(varying_axes(x_ND), jnp.zeros(x_ND.shape))
    sums = jax.lax.while_loop(lambda carry: carry[0] < route.turns, add_turn, (1, zero_ND))
    return sums[1].astype(x_ND.dtype)


def _turns_backward(run_turn, saved, grad_ND):
    route = saved[0]
    inputs, tree = jax.tree.flatten(saved[1:])
    # Rounded weights, of a byte for each number, get no gradients.
    trained = [i for i, x in enumerate(inputs) if x.dtype.itemsize > 1]

    def run(turn, *values):
        leaves = inputs.copy()
        for i, value in zip(trained, values, strict=True):
            leaves[i] = value
        return run_turn(turn, route, *jax.tree.unflatten(tree, leaves))

    def add_turn(carry):
        turn, sums = carry
        _, pull = jax.vjp(functools.partial(run, turn), *(inputs[i] for i in trained))
        return turn + 1, [total + new for total, new in zip(sums, pull(grad_ND), strict=True)]

    def zeros(x):  # the gradients of all turns are added in float32
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        return varying(varying_axes(x), jnp.zeros(x.shape, dtype))[0]

    start = (jnp.int32(1), [zeros(inputs[i]) for i in trained])
    _, sums = jax.lax.while_loop(lambda carry: carry[0] < route.turns, add_turn, start)
    grads: list[Any] = [None] * len(inputs)
    for i, total in zip(trained, sums, strict=True):
        grads[i] = total.astype(inputs[i].dtype)
    return None, *jax.tree.unflatten(tree, grads)


further_turns.defvjp(
    lambda run_turn, *inputs: (further_turns(run_turn, *inputs), inputs), _turns_backward
)


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
    blocks_PK = _take(x_M[None], from_PK.reshape(1, -1))[0].reshape(-1, most, x_M.shape[1])
    blocks_PK = jax.lax.all_to_all(blocks_PK, axes, 0, 0, tiled=True)
    row_C = jnp.arange(sizes[1])
    source_C = (row_C[:, None] >= jnp.cumsum(received_P)[None]).sum(axis=1)
    from_C = source_C * most + row_C - before(received_P)[source_C]
    from_C = jnp.where(row_C < received_P.sum(), from_C, -1)
    x_C = _take(blocks_PK.reshape(1, -1, x_M.shape[1]), from_C[None])[0]
    return jnp.where(from_C[:, None] < 0, jnp.nan, x_C)  # so that reading what is undefined shows


move.defvjp(
    lambda x, counts, *at: (move(x, counts, *at), counts),
    lambda axes, sizes, most, counts, grad: (move(grad, counts.T, axes, sizes[::-1], most), None),
)


def before(x):
    """The sum of the earlier elements along the first dim."""
    return jnp.cumsum(x, axis=0) - x


def count_devices(axes: tuple[str, ...]) -> int:
    return math.prod(jax.lax.axis_size(axis) for axis in axes)


def weighted(out, weight):
    """Out · weight [..., 1]. In float32, so that the weight's gradient is summed over D in float32."""
    return (out.astype(jnp.float32) * weight.astype(jnp.float32)).astype(out.dtype)


def sum_shards(out_BTD, split):
    """Sums over the shards of `mlp`; each keeps its part of T if the residual stream is split."""
    if split["mlp"] and split["mlp"] == split["residual_seq"]:
        return jax.lax.psum_scatter(out_BTD, split["mlp"], scatter_dimension=1, tiled=True)
    return jax.lax.psum(out_BTD, split["mlp"]) if split["mlp"] else out_BTD


def varying(axes: Iterable[str], *arrays):
    """Marks arrays as varying along mesh axes, so that their partial gradients are summed here."""
    missing = [tuple(sorted({*axes} - varying_axes(x))) for x in arrays]
    pairs = zip(arrays, missing, strict=True)
    return [jax.lax.pcast(x, names, to="varying") if names else x for x, names in pairs]


def varying_axes(x) -> frozenset[str]:
    """The mesh axes along which an array varies; none if JAX doesn't check that."""
    return jax.typeof(x).mat.varying


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
