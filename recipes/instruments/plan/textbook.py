"""Bytes that a train step must send if each matmul runs where the sharding rules put it.

Weights and activations are in the compute dtype, and gradients too, except those of pipeline
stages and with reduce_dtype, which are in float32. In low precision, a layer's weights have a byte for each number; their
scales, a thousandth of that, are not counted, nor is what `_sp` rules save. Over a ring of n
devices, an all-gather or a reduce-scatter sends (n - 1) / n of the whole array, and an all-reduce
twice that. Transfers that remat repeats are not counted, except gathers of weights, attention's
exchanges, and those of experts.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout
from recipes.common.sharding.matrices import ITERATIONS, Form, form_of, matrix_sides
from recipes.common.sharding.rules import target_axes
from recipes.common.sharding.shape import ExpertsShape
from recipes.instruments.plan.step_memory import compute_bytes
from zoo.core.sharding import device, optimizer_axes, shards
from zoo.core.strategies import HEADS, LAYERS, RESIDUAL_SEQ, SEQ
from zoo.experts.exchange import exchanges
from zoo.experts.expert_strategies import EXPERT
from zoo.options.layer_embeddings import COLUMNS
from zoo.options.mtp import HEAD_PATH
from zoo.parallel.context import choose_exchange
from zoo.parallel.pipeline import microbatches, rounds, routes, ticks


class AllReduceCounts(NamedTuple):
    """Half all-reduces of activations that a layer's tensor parallelism sends; the textbook has 8."""

    all_reduces: int  # of activations that are whole between sublayers
    gathers: int  # all-gathers, and reduce-scatters, of sequence-sharded ones
    scatters: int


# Remat policy → what it sends, counted in compiled steps. Remat repeats attention's all-reduce, and
# sequence-sharded inputs are gathered again.
ALL_REDUCES = {
    "none": AllReduceCounts(8, 4, 4),
    "dots": AllReduceCounts(8, 6, 4),
    "sublayers": AllReduceCounts(8, 6, 4),
    "gathered": AllReduceCounts(10, 6, 4),
    "full": AllReduceCounts(10, 6, 5),
}


TILE_ROWS, TILE_COLUMNS = 8, 128  # of a matrix, which a TPU keeps together


class Transfer(NamedTuple):
    """Bytes that a device sends in a step for one purpose, between the devices along some mesh axes."""

    purpose: str  # "weights", "gradients", "updates", "activations", "attention", "states",
    # "exchanges", "stages"
    kind: str  # of collective
    axes: frozenset[str]  # of the mesh
    bytes: float

    @property
    def hidden(self) -> bool:
        """Whether it overlaps with compute: weights and gradients do, since no layer waits for
        those of another. A layer waits for its activations.
        """
        return self.purpose in ("weights", "gradients")

    def over_links(self, mesh: Mapping[str, int], parts: Mapping[str, int]) -> tuple[float, float]:
        """(bytes sent inside a slice or node, bytes sent to others).

        A collective over both runs in two stages, so that a device exchanges with other slices
        only its part of what its own slice has.

        Args:
          parts: mesh axis → parts into which slices divide it.
        """
        n, p = (math.prod(sizes.get(axis, 1) for axis in self.axes) for sizes in (mesh, parts))
        m = n // p
        if p == 1:
            return self.bytes, 0.0
        if self.kind == "collective-permute":  # the slowest device sends all of it to another slice
            return (self.bytes if m > 1 else 0.0), self.bytes
        array_bytes = self.bytes / ring(n)
        if self.kind == "all-to-all":
            return array_bytes * (m - 1) / n, array_bytes * ring(p)
        return array_bytes * ring(m), array_bytes * ring(p) / m


def textbook(
    layout: Layout, accumulate: int = 1, optimizer: str = "adamw", offload: str = ""
) -> float:
    """Bytes that a device must send per step; see `transfers` and `optimizer_transfers`."""
    sent = [*transfers(layout, accumulate), *optimizer_transfers(layout, optimizer, offload)]
    return sum(x.bytes for x in sent)


def transfers(layout: Layout, accumulate: int = 1, repeats: bool = False) -> list[Transfer]:
    """Everything that a device must send per step.

    Args:
      layout: with batches, and rows of seq_len positions if it has any.
      accumulate: gradient-accumulation steps. Each one gathers weights and sums gradients.
      repeats: whether to count what compilers send beyond the textbook: activations that remat
        sends again (ALL_REDUCES), and gradients that TPUs sum over groups of replicas too.
    """
    every = [
        *weight_transfers(layout, accumulate, repeats),
        *(transfer for _, transfer in module_transfers(layout, accumulate, repeats)),
        *row_transfers(layout, accumulate),
    ]
    return [transfer for transfer in every if transfer.bytes]


def row_transfers(layout: Layout, accumulate: int = 1) -> Iterator[Transfer]:
    """Transfers of what pairs, positions, experts and stages exchange."""
    yield from _pair_transfers(layout)
    if layout.seq_len:
        yield from _attention_transfers(layout)
        yield from _state_transfers(layout)
        yield from _expert_transfers(layout, accumulate)
        yield from _look_up_transfers(layout)
        yield from stage_transfers(layout, accumulate)


def _pair_transfers(layout: Layout) -> Iterator[Transfer]:
    """Embeddings of texts in float32 to all devices that split the batch, and their gradients back."""
    shape = layout.shape
    axes = frozenset(_split_by(layout, layout.batch_axes))
    if shape.joint and shape.pairs != "local":
        sent = 4 * ring(_devices(layout, axes)) * layout.batch_size * shape.joint
        there, back = "all-gather", "reduce-scatter"
        if shape.pairs == "ring":
            there = back = "collective-permute"
        yield Transfer("exchanges", there, axes, sent)
        yield Transfer("exchanges", back, axes, sent)


def _look_up_transfers(layout: Layout) -> Iterator[Transfer]:
    """Rows of tables that stay in place, to the devices of their tokens, and their gradients back."""
    for array, axes in layout.model.variables["params"].values():
        if COLUMNS in axes:
            split = frozenset(_split_by(layout, [COLUMNS]))
            sent = ring(_devices(layout, split)) * device_tokens(layout) * array.shape[-1]
            yield Transfer("exchanges", "all-to-all", split, 2 * compute_bytes(layout) * sent)


def device_tokens(layout: Layout, path: str = "") -> float:
    """Positions of a batch on one device, or rows without positions.

    Args:
      path: of the module that computes them; a model with two towers has different ones.
    """
    positions = layout.batch_size * (layout.seq_len or layout.shape.positions_of(path))
    return positions / (layout.batch_shards * layout.seq_shards)


def weight_transfers(
    layout: Layout, accumulate: int = 1, repeats: bool = False
) -> Iterator[Transfer]:
    """Transfers of weights and their gradients, of all weights together; see `single_weight_transfers`."""
    sums: dict[tuple[str, str, frozenset[str]], float] = {}
    for _, (purpose, kind, axes, count) in single_weight_transfers(layout, accumulate, repeats):
        sums[purpose, kind, axes] = sums.get((purpose, kind, axes), 0.0) + count
    yield from (Transfer(*key, count) for key, count in sums.items())


def single_weight_transfers(
    layout: Layout, accumulate: int = 1, repeats: bool = False
) -> Iterator[tuple[str, Transfer]]:
    """(path, transfer) of each weight and its gradient.

    A weight whose parts at rest are smaller than in use needs a reduce-scatter of the gradient and
    two all-gathers, for the forward and the backward pass; one if remat is "none" or the model has no
    remat, since the weight in use is then kept. Gradients are also all-reduced over the mesh axes
    that split the batch, its rows or positions, but not the weight at rest. In stages, weights are
    gathered once, and those that all stages share have a gradient on each.

    Mesh axes that split only the optimizer's state (ZeRO-1) also scatter the gradient. Once per step,
    the updated parts of the weight are gathered over them in float32.

    Compilers (`repeats`) gather weights outside of the layers and of the MTP head once, and the
    TPU's all-reduces gradients that would be reduce-scattered over some axes and all-reduced over
    others, except those of experts, and those of a table of which a device would get neither whole
    tiles of V nor of D.
    """
    stacked = _split_by(layout, [LAYERS])
    dtype = compute_bytes(layout)
    keeps_weights = layout.shape.remat in (None, "none")
    gathers = 1 if stacked or keeps_weights else 2
    width = 4 if stacked or layout.shape.reduce_dtype else dtype
    once = repeats and not stacked
    with layout.trace():
        tpu = repeats and device().platform == "tpu"
    batch = _split_by(layout, layout.batch_axes) | stacked
    for path, (array, axes) in layout.model.variables["params"].items():
        rest, use = _split_by(layout, axes), _split_by(layout, _in_use(layout, axes))
        elements_in_use = array.size / _devices(layout, use)
        state = _split_by(layout, optimizer_axes(axes, layout.rules))
        table = not layout.names.stacks & {*axes}
        split = frozenset(rest - use)
        outside = table and not path.startswith(HEAD_PATH)
        gathered = (
            (1 if outside and once else gathers) * ring(_devices(layout, split)) * elements_in_use
        )
        rounded = layout.shape.matmul and not table and layout.names.in_use.keys() & {*axes}
        gathered *= 1 if rounded else dtype
        yield path, Transfer("weights", "all-gather", split, accumulate * gathered)
        over, reduced = frozenset(state - use), frozenset(batch - state)
        also_reduced = once and EXPERT not in axes and _devices(layout, reduced) > 1
        cuts = table and _cuts_tiles(layout, elements_in_use, _devices(layout, over))
        for kind, axes_sent, elements in _gradient_transfers(
            layout, elements_in_use, over, reduced, together=tpu and (also_reduced or cuts)
        ):
            yield path, Transfer("gradients", kind, axes_sent, accumulate * (width * elements))
        updated = frozenset(state - rest)
        at_rest = array.size / _devices(layout, rest)
        sent = 4 * ring(_devices(layout, updated)) * at_rest
        yield path, Transfer("updates", "all-gather", updated, sent)


def _gradient_transfers(
    layout: Layout,
    elements: float,
    over: frozenset[str],
    reduced: frozenset[str],
    *,
    together: bool,
) -> Iterator[tuple[str, frozenset[str], float]]:
    """(kind, mesh axes, elements) of a gradient's collectives.

    Args:
      elements: elements of the weight in use.
      over: mesh axes that scatter the gradient.
      reduced: those that only sum it.
      together: whether one all-reduce does both.
    """
    n = _devices(layout, over)
    if together and n > 1:
        yield "all-reduce", over | reduced, 2 * ring(_devices(layout, over | reduced)) * elements
    else:
        yield "reduce-scatter", over, ring(n) * elements
        yield "all-reduce", reduced, 2 * ring(_devices(layout, reduced)) * elements / n


def _cuts_tiles(layout: Layout, elements: float, devices: int) -> bool:
    """Whether a device would get neither whole tiles of V nor of D of a table."""
    columns = layout.shape.embed / devices
    rows = elements / layout.shape.embed / devices
    return rows % TILE_ROWS != 0 and columns % TILE_COLUMNS != 0


def optimizer_transfers(layout: Layout, optimizer: str, offload: str = "") -> list[Transfer]:
    """Transfers of an optimizer's update: of Muon's matrices, to their devices and back.

    Momenta are float32. The number of matrices is padded to a multiple of the devices.

    Args:
      offload: "optimizer": its state is in the host's memory.
    """
    if optimizer != "muon" or layout.mesh.size == 1:
        return []
    mesh = layout.mesh
    sent = []
    for form, share in shares(layout, offload).items():
        owners, replicas = form.axes, form.replicas(mesh)
        moved = 4 * share * _devices(layout, owners) * math.prod(dim.size for dim in form.dims)
        both_ways = 2 * moved * ring(_devices(layout, owners))
        gathered = moved * _devices(layout, replicas) * ring(_devices(layout, replicas))
        sent.append(Transfer("updates", "all-to-all", frozenset(owners), both_ways))
        sent.append(Transfer("updates", "all-gather", frozenset(replicas), gathered))
    return [transfer for transfer in sent if transfer.bytes]


def shares(layout: Layout, offload: str = "") -> dict[Form, int]:
    """Form → how many of its matrices a device orthogonalizes, for all of a model's.

    An accelerator with an offloaded optimizer state deals out the matrices of each layer by itself.
    """
    with layout.trace():
        in_turn = bool(offload) and device().platform != "cpu"
    stacks = layout.names.stacks
    shardings = paths(layout.optimizer_shardings())
    counts: dict[tuple[Form, int], int] = {}  # form and number of layers in turn → matrices
    for name, (array, axes) in layout.model.variables["params"].items():
        sides = matrix_sides(axes, layout.names.in_use)
        if not sides:
            continue
        form, _ = form_of(array.shape, shardings[name].spec, sides, layout.mesh)
        shard = shardings[name].shard_shape(array.shape)
        layers = shard[0] if in_turn and axes[0] in stacks else 1
        matrices = math.prod(shard) // math.prod(dim.size for dim in form.dims)
        counts[form, layers] = counts.get((form, layers), 0) + matrices
    totals: dict[Form, int] = {}
    for (form, layers), count in counts.items():
        share = layers * form.share(count // layers, layout.mesh)
        totals[form] = totals.get(form, 0) + share
    return totals


def optimizer_flops(layout: Layout, optimizer: str, offload: str = "") -> float:
    """FLOPs of a device in Muon's iterations, each of three products."""
    if optimizer != "muon":
        return 0.0
    flops = 0.0
    for form, share in shares(layout, offload).items():
        rows, columns = (form.side(side, layout.mesh) for side in (form.rows, form.columns))
        flops += share * ITERATIONS * (4 * rows**2 * columns + 2 * rows**3)
    return flops


def module_transfers(
    layout: Layout, accumulate: int = 1, repeats: bool = False
) -> Iterator[tuple[str, Transfer]]:
    """(path of a module, transfer) of activations between the devices that share a matmul.

    Consider weights in use with an axis of the residual stream, one that `in_use` maps to. If their
    other axes are split, each device has a partial sum: each module with such weights (not counting
    its submodules) costs one all-reduce of the residual stream forward and one backward, for each
    of its stacked layers. Weights that read a latent instead, `in_use`'s other axis, cost one of the
    latent backward; latent attention has one more, of the rotary key that its heads share.
    """
    names, attention = layout.names, layout.shape.attention
    shared_key = attention.shared_key if attention else 0
    stream = names.stream
    latents = {*names.in_use.values()} - {stream}
    widths: dict[str, float] = {}  # module → elements per token
    split: dict[str, set[str]] = {}  # module → mesh axes
    of_latents: dict[str, float] = {}  # module → elements per token
    reads: set[str] = set()  # modules with split weights that read the residual stream
    for path, (array, at_rest) in layout.model.variables["params"].items():
        module, axes = path.rpartition("/")[0], _in_use(layout, at_rest)
        residual = set(axes) & {stream, *latents}
        stacked = {axis for axis in axes if names.logical_axes[axis] in ("weights", "stack")}
        mesh_axes = _split_by(layout, set(axes) - residual - stacked)
        dims = zip(axes, array.shape, strict=True)
        width = math.prod(n for axis, n in dims if axis in residual | stacked - {EXPERT})
        if residual and stream not in axes:
            layers = width / array.shape[axes.index(next(iter(residual)))]
            key = 0 if module in of_latents else layers * shared_key
            of_latents[module] = of_latents.get(module, 0) + width + key
        elif residual:
            widths[module] = width
            split.setdefault(module, set()).update(mesh_axes)
            if mesh_axes and axes[-1] != stream:
                reads.add(module)
    busy_share = busy(layout, accumulate)
    for module, axes in split.items():
        halves = 1 if module in of_latents and module not in reads else 2
        each = halves * widths[module] + of_latents.get(module, 0)
        elements = 2 * ring(_devices(layout, axes)) * each * device_tokens(layout, module)
        layers = module.startswith(LAYERS)
        for kind, share in (_kinds(layout) if repeats and layers else {"all-reduce": 1.0}).items():
            sent = elements * compute_bytes(layout) * share * (busy_share if layers else 1)
            yield module, Transfer("activations", kind, frozenset(axes), sent)


def busy(layout: Layout, accumulate: int) -> float:
    """The share of all layers that a device runs: those of its stage, also while it waits."""
    if layout.stages == 1:
        return 1.0
    parts = _microbatches(layout, accumulate)
    return (parts + layout.stages - 1) / parts / layout.stages


def _kinds(layout: Layout) -> dict[str, float]:
    """Kind of collective → how many times a layer's textbook it sends of activations, under remat."""
    if layout.shape.remat is None:
        return {"all-reduce": 1.0}
    halves = ALL_REDUCES.get(layout.shape.remat, ALL_REDUCES["full"])
    if layout.count_shards(RESIDUAL_SEQ) > layout.count_shards(SEQ):
        return {"all-gather": halves.gathers / 8, "reduce-scatter": halves.scatters / 8}
    return {"all-reduce": halves.all_reduces / 8}


def stage_transfers(layout: Layout, accumulate: int = 1) -> Iterator[Transfer]:
    """Transfers between stages: activations, and their parts for the loss.

    A microbatch's activations and their gradients go to the next stage in every tick, also in the
    bubble. The last stage's output is scattered over all stages, and its gradient gathered. In
    rounds, layers move to their stages, and their gradients back.
    """
    stages = layout.stages
    if stages == 1:
        return
    parts, axes = _microbatches(layout, accumulate), frozenset(_split_by(layout, [LAYERS]))
    v = rounds(layout.config)
    each = device_tokens(layout) / parts * layout.shape.embed * compute_bytes(layout)
    sent = 2 * ticks(parts, stages, v) * each + _moved_chunk_bytes(layout, v) * accumulate
    yield Transfer("stages", "collective-permute", axes, sent)
    for kind in ("reduce-scatter", "all-gather"):
        yield Transfer("stages", kind, axes, parts * ring(stages) * each)


def _moved_chunk_bytes(layout: Layout, v: int) -> float:
    """Bytes of layers that move between their devices at rest and their stages in v rounds.

    Weights move as they lie at rest, in the compute dtype, and gradients as the optimizer's state,
    in float32.
    """
    moves = sum(any(x[0] != x[2] for x in moves) for moves in routes(layout.stages, v))
    if v == 1 or not moves:
        return 0.0
    sent = 0.0
    for kind, variables in layout.model.variables.items():
        for array, axes in variables.values():
            if LAYERS not in axes:
                continue
            cast = layout.names.in_use.keys() & {*axes}
            width = compute_bytes(layout) if cast else array.dtype.itemsize
            sent += width * array.size / _devices(layout, _split_by(layout, axes))
            if kind == "params":
                split = _split_by(layout, optimizer_axes(axes, layout.rules))
                sent += 4 * array.size / _devices(layout, split)
    return sent * moves / v


def _microbatches(layout: Layout, accumulate: int) -> int:
    """M of the pipeline."""
    rows = layout.batch_size // accumulate // layout.batch_shards
    return microbatches(layout.config, rows, layout.stages)


def _attention_transfers(layout: Layout) -> Iterator[Transfer]:
    """Transfers so that positions attend to those on other devices.

    Each layer does it forward, again unless remat keeps everything, and backward. An all-to-all
    exchanges queries, keys, values and outputs; a ring passes on keys and values, and backward
    their gradients too.
    """
    n, attention = layout.seq_shards, layout.shape.attention
    if n == 1 or attention is None:
        return
    axes = frozenset(_split_by(layout, layout.batch_axes[1:]))
    with layout.trace():
        split = shards(HEADS)
        exchange = choose_exchange(layout.config.context, attention.heads)
    all_to_all = exchange == "all-to-all"
    kv_split = split * n if all_to_all else split
    elements = 0.0  # per token
    for layer, count in layout.shape.trained_layers:
        if layer.attention:
            queries = layer.attention.heads // split if all_to_all else 0
            kv = math.lcm(layer.attention.kv_heads, kv_split) // split
            elements += count * (queries + kv) * layer.attention.kv_dim
    sent = elements * device_tokens(layout) * compute_bytes(layout)
    forward = 1 if layout.shape.remat == "none" else 2
    if all_to_all:
        yield Transfer("attention", "all-to-all", axes, (forward + 1) * sent * ring(n))
    else:
        yield Transfer("attention", "collective-permute", axes, (forward + 2) * sent * (n - 1))


def _state_transfers(layout: Layout) -> Iterator[Transfer]:
    """Transfers so that a recurrence's state travels along positions on n devices.

    Devices compose what each does to a state, a matrix and an offset, in log2(n - 1) steps; the last
    step and the final hop send offsets alone. A layer does it forward, again unless remat keeps
    everything, and backward. These numbers are in float32 and don't grow with T.
    """
    n = layout.seq_shards
    if n == 1:
        return
    steps = math.ceil(math.log2(n - 1)) if n > 2 else 0
    split = layout.count_shards(HEADS)
    sent = 0.0  # bytes per row
    for layer, count in layout.shape.trained_layers:
        if layer.recurrence:
            maps = (steps + 1) * layer.recurrence.state
            maps += max(steps - 1, 0) * layer.recurrence.erase
            sent += count * (4 * maps + compute_bytes(layout) * layer.recurrence.halo) / split
    axes = frozenset(_split_by(layout, layout.batch_axes[1:]))
    times = 2 if layout.shape.remat == "none" else 3
    sent *= times * layout.batch_size / layout.batch_shards
    yield Transfer("states", "collective-permute", axes, sent)


def _expert_transfers(layout: Layout, accumulate: int) -> Iterator[Transfer]:
    """Transfers to the devices of other experts and back.

    Rows of D numbers, or of a latent's, go there and their sums come back, and so do their gradients:
    four times (n - 1) / n of them, where n devices share the experts; five times if remat sends them again. With a
    capacity they are slots. Dropless rows go once to each device of their experts, or all devices
    gather all rows, see expert_exchange.exchanges.
    """
    axes = frozenset(_split_by(layout, [EXPERT]))
    devices = _devices(layout, axes)
    times = 4 if layout.shape.remat in ("none", "dispatched") else 5
    busy_share = busy(layout, accumulate)
    for experts, count in layout.shape.trained_experts if devices > 1 else ():
        each = experts.embed * compute_bytes(layout) * busy_share
        rows = count * device_tokens(layout)
        if experts.capacity:
            # A device that has a part of each row has as many slots as if it had the whole row.
            slots = rows * layout.seq_shards * experts.slots
            yield Transfer("exchanges", "all-to-all", axes, times * ring(devices) * slots * each)
        elif exchanges(devices, experts.per_token, experts.load_limit):
            copies = rows * devices_of_a_row(experts, devices)
            yield Transfer("exchanges", "all-to-all", axes, times * ring(devices) * copies * each)
        else:
            gathered = ring(devices) * devices * rows * each
            yield Transfer("exchanges", "all-gather", axes, (times - 2) * gathered)
            yield Transfer("exchanges", "reduce-scatter", axes, 2 * gathered)


def devices_of_a_row(experts: ExpertsShape, devices: int) -> float:
    """The mean number of devices with experts of a row, if it chooses them at random."""
    share = experts.top_groups / experts.groups if devices % experts.groups == 0 else 1
    number, devices = round(experts.number * share), round(devices * share)
    others = number - number // devices
    none = math.comb(others, experts.per_token) / math.comb(number, experts.per_token)
    return devices * (1 - none)


def _in_use(layout: Layout, axes: Iterable[str]) -> list[str]:
    """A weight's logical axes while it is multiplied."""
    return [layout.names.while_used(axis) for axis in axes]


def _split_by(layout: Layout, axes: Iterable[str]) -> set[str]:
    """The mesh axes that split these logical axes."""
    return {name for axis in axes for name in target_axes(layout.rules.get(axis))}


def _devices(layout: Layout, axes: Iterable[str]) -> int:
    """Devices along these mesh axes."""
    return math.prod(layout.mesh.shape[axis] for axis in axes)


def ring(devices: int) -> float:
    """The fraction of an array that each device sends in an all-gather over a ring."""
    return (devices - 1) / devices
