"""Memory of a train step on a device by purpose, computed analytically."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from recipes.common.report.kernel import attention_kernel
from recipes.common.sharding.layout import Layout
from recipes.common.sharding.matrices import matrix_sides
from recipes.common.sharding.rules import count_shards
from recipes.common.sharding.shape import (
    AttentionShape,
    ExpertsShape,
    LayerShape,
    RecurrenceShape,
)
from recipes.instruments.plan.tower import with_tower
from zoo.core.sharding import optimizer_axes
from zoo.core.strategies import HEADS, KV_HEADS, LAYERS, MLP, RESIDUAL_SEQ, VOCAB
from zoo.core.vocabulary import positions_at_once
from zoo.experts.exchange import exchanges
from zoo.experts.expert_strategies import EXPERT
from zoo.experts.matmul import multiplies_groups
from zoo.experts.slots import CAPACITY
from zoo.kernels.flash import TILE
from zoo.kernels.splash import count_partial_gradients
from zoo.parallel.context import choose_exchange
from zoo.parallel.pipeline import microbatches, rounds, ticks

IN_FLIGHT = 5  # layers' inputs on the device, on their way to the host's memory or back


class Weights(NamedTuple):
    """Bytes of a model's weights on a device."""

    params: float  # at rest, float32
    state: float  # as the optimizer's state is split, float32
    hidden: float  # those of `state` that are Muon's hidden matrices
    stacked: float  # those of the stacked layers, as their gradients are split
    layer: float  # matrices of one layer in use, in the compute dtype; the mean of unlike layers
    ends: float  # matrices outside of the layers in use, in the compute dtype
    frozen: float  # at rest, without gradients or moments: LoRA's base, and buffers


class Activations(NamedTuple):
    """Numbers per position of a microbatch that a device computes in a layer."""

    queries: int
    kv: int  # keys and values
    latents: int
    recurrence: int
    chunks: int  # float32, of the positions at work at once, spread over all
    mlp: int  # one matrix's output, in the MLP
    hidden: float  # one matrix's output, in the MLP and the experts
    dispatched: float  # what experts compute: rows in slots
    received: float  # rows that a device receives for its experts
    turns: float  # of dropless experts to which rows travel, see `_in_turns`
    attention: int  # inputs of attention's derivative
    partials: int  # dQ of each block of keys, in a fused backward kernel
    scores: int  # bytes of a microbatch's attention scores in float32, not per position


def weights(layout: Layout) -> Weights:
    """Sums over the abstract parameters; nothing is traced."""
    rest = layout.rules_at_rest
    width, sizes = compute_bytes(layout), layout.mesh.shape
    stacked_layers = layout.shape.stacked_layers
    params = state = hidden = stacked = layer = ends = frozen = 0.0
    for kind, variables in layout.model.variables.items():
        for path, (leaf, axes) in variables.items():
            in_total = leaf.size * leaf.dtype.itemsize
            at_rest = in_total / math.prod(count_shards(rest, axis, sizes) for axis in axes)
            if kind == "params" and not path.startswith(layout.model.frozen):
                split = [count_shards(rest, axis, sizes) for axis in optimizer_axes(axes, rest)]
                params += at_rest
                state += in_total / math.prod(split)
                if matrix_sides(axes, layout.names.in_use):
                    hidden += in_total / math.prod(split)
                stacked += in_total / math.prod(split) * (LAYERS in axes)
            else:
                frozen += at_rest
            use = [layout.names.while_used(axis) for axis in axes]
            if set(use) & {*layout.names.in_use.values()}:
                over = layout.count_shards(*(axis for axis in use if axis != LAYERS))
                used = leaf.size / over * width
                layer += used / stacked_layers if LAYERS in axes else 0
                ends += 0 if LAYERS in axes else used
    return Weights(params, state, hidden, stacked, layer, ends, frozen)


def moments(sizes: Weights, optimizer: str) -> float:
    """Bytes of an optimizer's state."""
    if optimizer == "muon":
        return 2 * sizes.state - sizes.hidden
    return {"adamw": 2, "lion": 1, "sgd": 1}[optimizer] * sizes.state


def memory_parts(
    layout: Layout,
    accumulate: int = 1,
    segments: bool = True,
    offload: str = "",
    optimizer: str = "adamw",
    sizes: Weights | None = None,
) -> dict[str, float]:
    """Bytes on a device at the step's peak by purpose.

    Arrays in the host's memory (`on_host`) are not counted. The update then has fewer moments on
    the device than the layers have activations, so the peak stays where it was.

    Args:
      accumulate: gradient-accumulation steps, which need one more array for each gradient.
      segments: whether batches have segment ids.
      offload: "optimizer": its state is in the host's memory.
      optimizer: one of OPTIMIZERS.
      sizes: `weights(layout)`, if it is known: it is the same for all batches.
    """
    sizes = sizes or weights(layout)
    on_device = 0.0 if offload else moments(sizes, optimizer)
    state = {"parameters": sizes.params + sizes.frozen, "optimizer": on_device}
    if layout.shape.tower:
        parts = _token_bytes(layout, accumulate, segments, sizes)
        return state | with_tower(parts, layout, layout.shape.tower, accumulate)
    if layout.shape.vocab_size:
        return state | _token_bytes(layout, accumulate, segments, sizes)
    return state | _example_bytes(layout, accumulate, sizes)


def _token_bytes(
    layout: Layout, accumulate: int, segments: bool, sizes: Weights
) -> dict[str, float]:
    """Memory besides the state, of a model whose inputs are rows of tokens.

    Saved activations are each layer's input and whatever its remat policy saves. The peak is in one
    of two places. In the loss: the unembedding table in use, its gradient, one chunk's logits and
    their gradient. Or in the layers' backward pass: gradients are those of all layers at rest and
    that of the table, whole, as the loss summed it; the live working set is the weights in use of two
    layers (one is being gathered), the recomputed activations of one layer, including float32
    attention scores unless a kernel keeps them on chip and a recurrence's chunks, and all layers'
    weights in the compute dtype, because the compiler casts them before the loop. Experts compute `capacity` times the positions
    that choose them; dropless ones to which rows travel, see `_in_turns`.

    In stages, a device has its layers' weights whole in the compute dtype and their gradients whole
    in float32 for the whole step, besides those of one microbatch, and keeps what 2S - 1
    microbatches save (all M with GPipe). In v rounds, it keeps what 2vS - 1 chunks save, a copy of a
    chunk's weights and its gradients of one microbatch. First layers without experts, which all belong to the first
    stage, count as if they were divided too.
    """
    shape, config, stages = layout.shape, layout.config, layout.stages
    width = compute_bytes(layout)
    rows = layout.batch_size // layout.batch_shards // accumulate
    count = microbatches(config, rows, stages) if stages > 1 else 1
    rows //= count
    length = layout.seq_len // layout.seq_shards
    saved, recomputed, scores = _layer_bytes(layout, rows, segments, sizes)
    with layout.trace():
        chunk = positions_at_once(config.loss_chunk, rows, length)
    logits = rows * chunk * shape.logits // layout.count_shards(VOCAB) * (4 + width)
    table = shape.vocab_size // layout.count_shards(VOCAB) * shape.embed * width
    cast = sizes.stacked * width // 4 if width < 4 and shape.remat != "none" else 0  # or saved
    # The loss sums the table's gradients in float32. One of a single chunk needs no sum besides the
    # logits.
    of_table = 4 // width * table if chunk < length else table
    in_loss = of_table * (chunk < length), table + logits
    if not shape.logits:
        in_loss = 0.0, 0.0
    if shape.reduce_dtype and width < 4 and stages == 1:  # rounded, then in float32 again
        in_loss = in_loss[0] + table, in_loss[1]
    # While a layer computes, the next one is gathered; of experts with a capacity, one matrix at a
    # time. Of dropless experts, grouped products leave whole gradients instead.
    trained = [experts for experts, _ in shape.trained_experts]
    gathered = 1 if any(x.capacity or _has_turns(layout, x) for x in trained) else 2
    in_layers = sizes.stacked + of_table, cast + gathered * sizes.layer + recomputed + scores
    if stages > 1:
        stage = shape.num_layers / stages * sizes.layer
        v = rounds(config)
        units = ticks(count, stages, v) - stages + 1
        slots = units + 1 if config.pipeline == "gpipe" else min(2 * v * stages - 1, units + 1)
        saved *= slots / v
        weights_used = 2 * stage if v == 1 else stage + 2 * stage / v
        in_loss = (stage + sizes.ends) * 4 / width, weights_used + sizes.ends + table + logits
        in_layers = in_loss[0], weights_used + sizes.ends + recomputed + scores
    gradients, live = max(in_loss, in_layers, key=sum)
    if accumulate > 1:
        gradients += sizes.state
    return {"gradients": gradients, "saved activations": saved, "live working set": live}


class LayerBytes(NamedTuple):
    """Bytes of a microbatch in the layers, on a device."""

    saved: float  # by all layers, for the backward pass
    recomputed: float  # of the layer that has most
    scores: int  # attention scores in float32, of the layer that has most


def _layer_bytes(layout: Layout, rows: int, segments: bool, sizes: Weights) -> LayerBytes:
    """Activations of `rows` rows in a stage's layers."""
    shape, width = layout.shape, compute_bytes(layout)
    remat = shape.remat
    saved = recomputed = 0.0
    scores = 0
    for layer, layers in shape.trained_layers:
        D = layer.embed
        length = positions(layout, layer) // layout.seq_shards
        between = positions(layout, layer) // layout.count_shards(RESIDUAL_SEQ)  # sublayers
        numbers = _activations(layout, layer, rows, segments)
        layers /= layout.stages
        outside, inside = _saved_numbers(layout, layer, numbers)
        saved += layers * rows * (between * outside + length * inside) * width
        if remat == "none":  # also weights in use
            saved += layers * sizes.layer
            if shape.kernel is None:  # scores before and after the softmax
                saved += layers * numbers.scores * (4 + width) // 4
            elif kernel(layout, segments, positions(layout, layer)) == "xla":
                # The softmax's exponentials, and outputs before they are divided, both in float32.
                saved += layers * (numbers.scores + rows * length * numbers.queries * 4)
        products = layer.matrices * numbers.hidden + 2 * numbers.dispatched
        if numbers.turns:
            products = layer.matrices * numbers.mlp + numbers.turns
        # The MLP's products are gone when the backward pass of attention or a recurrence begins.
        working = max(products, numbers.partials, numbers.chunks * 4 // width)
        # Of a recurrence, gradients too.
        inner = 2 * numbers.queries + numbers.kv + 2 * numbers.recurrence + working + 2 * D
        inner = rows * length * inner * width
        if layer.experts and _has_turns(layout, layer.experts):
            inner += _summed_gradients(layout, layer.experts)
        recomputed = max(recomputed, inner)
        scores = max(scores, numbers.scores)
        if remat == "offload":
            saved = IN_FLIGHT * rows * between * D * width
    return LayerBytes(saved, recomputed, scores)


def _activations(layout: Layout, layer: LayerShape, rows: int, segments: bool) -> Activations:
    """What a layer computes of `rows` rows on a device."""
    queries = kv = latents = recurrence = chunks = attention = partials = scores = 0
    if layer.attention:
        heads = layer.attention.heads // layout.count_shards(HEADS)
        queries = layer.attention.heads * layer.attention.key_dim // layout.count_shards(HEADS)
        kv = layer.attention.kv_heads * layer.attention.kv_dim // layout.count_shards(KV_HEADS)
        latents = layer.attention.latents
        length = positions(layout, layer)
        chosen = kernel(layout, segments, length)
        if chosen == "xla":
            # Keys and values count once per block of queries, as in the model.
            seen, pairs = _in_blocks(layer.attention, length)
            attention = 2 * queries + kv * seen // length
            scores = rows * heads * pairs * 4 // layout.seq_shards
        else:  # the output counts twice: the kernel and the projection lay it out differently
            if chosen == "flash":  # weights and their gradients, of a pair of tiles
                scores = 2 * rows * heads * min(TILE, length) ** 2 * 4
            attention = 3 * queries + kv + heads * 4 // compute_bytes(layout)
        if chosen == "splash":
            partials = queries * partial_gradients(layout, layer.attention)
    if layer.recurrence:
        recurrence = layer.recurrence.width // layout.count_shards(HEADS)
        chunks = layer.recurrence.chunks // layout.count_shards(HEADS)
        chunks //= position_groups(layout, layer.recurrence)
    mlp = layer.mlp // layout.count_shards(MLP)
    hidden, dispatched, received, turns = float(mlp), 0.0, 0.0, 0.0
    if layer.experts:
        slots = expert_slots(layout, layer.experts)
        hidden += slots * (layer.experts.width // layout.count_shards(MLP))
        dispatched = slots * layer.experts.embed
        received = _received(layout, layer.experts) * layer.experts.embed
        if layer.experts.latents:  # what experts read and write
            latents += 2 * layer.experts.embed
        if travels(layout, layer.experts):
            turns = _in_turns(layout, layer, layer.experts)
    return Activations(
        queries=queries,
        kv=kv,
        latents=latents,
        recurrence=recurrence,
        chunks=chunks,
        mlp=mlp,
        hidden=hidden,
        dispatched=dispatched,
        received=received,
        turns=turns,
        attention=attention,
        partials=partials,
        scores=scores,
    )


def travels(layout: Layout, experts: ExpertsShape) -> bool:
    """Whether rows of dropless experts travel to their devices."""
    devices = layout.count_shards(EXPERT)
    return not experts.capacity and exchanges(devices, experts.per_token, experts.load_limit)


def multiplies_batches(layout: Layout, experts: ExpertsShape) -> bool:
    """Whether dropless experts multiply batches, each of as many rows."""
    with layout.trace():
        return not experts.capacity and not multiplies_groups()


def expert_slots(layout: Layout, experts: ExpertsShape) -> float:
    """Slots on a device for each of its positions. Dropless ones need not be full."""
    if experts.capacity:
        return experts.slots
    times = layout.count_shards(EXPERT)
    if travels(layout, experts):
        times = experts.load_limit or CAPACITY
    elif multiplies_batches(layout, experts):
        times = CAPACITY
    return times * experts.per_token


def _received(layout: Layout, experts: ExpertsShape) -> float:
    """Rows that a device receives for its experts, for each of its positions."""
    if experts.capacity:
        return experts.slots
    devices = layout.count_shards(EXPERT)  # no device gets a row twice
    return min(expert_slots(layout, experts), devices) if travels(layout, experts) else devices


def _in_turns(layout: Layout, layer: LayerShape, experts: ExpertsShape) -> float:
    """Numbers per position of the backward pass of experts to which rows travel.

    What the first turn keeps: rows on arrival, in slots, the experts' outputs and their hidden
    products. Then one of two places of a further turn: each hidden product and its gradient, or the
    gradient of rows on arrival, for which J rows are gathered at once and then added up.
    """
    rows = expert_slots(layout, experts) * experts.embed
    arriving = _received(layout, experts) * experts.embed
    hidden = expert_slots(layout, experts) * (experts.width // layout.count_shards(MLP))
    hidden *= layer.matrices
    sums = 4 // compute_bytes(layout) * experts.embed  # of the gradients of rows, in float32
    kept = 0.0 if experts.load_limit else arriving + 2 * rows + hidden + sums
    return kept + max(3 * rows + 2 * hidden, experts.per_token * arriving + 4 * rows + hidden)


def _has_turns(layout: Layout, experts: ExpertsShape) -> bool:
    """Whether there is a loop over further turns."""
    return multiplies_batches(layout, experts) or (
        travels(layout, experts) and not experts.load_limit
    )


def _summed_gradients(layout: Layout, experts: ExpertsShape) -> float:
    """Bytes of the float32 sums of experts' gradients over all turns, in a layer."""
    return 4 * experts.number * experts.weights / layout.count_shards(EXPERT, MLP)


def position_groups(layout: Layout, recurrence: RecurrenceShape) -> int:
    """Number of groups of a device's positions; a recurrence computes one group at a time."""
    return math.ceil(layout.seq_len // layout.seq_shards / recurrence.group)


def partial_gradients(layout: Layout, attention: AttentionShape) -> int:
    """Number of dQ that "splash" keeps of a layer; 0 if its backward pass is not one kernel."""
    with layout.trace():
        exchange = choose_exchange(layout.config.context, attention.heads)
    keys = layout.seq_len // (layout.seq_shards if exchange == "ring" else 1)
    return count_partial_gradients(keys, attention.window, attention.causal)


def _in_blocks(attention: AttentionShape, length: int) -> tuple[int, int]:
    """(keys that all blocks of queries see, pairs of a query and a key) in a row, with "xla"."""
    block = max(128, -(-length // 8))
    back = length if attention.window is None else attention.window - 1
    keys = pairs = 0
    for start in range(0, length, block):
        stop = min(start + block, length)
        seen = stop - max(0, start - back) if attention.causal else length
        keys += seen
        pairs += (stop - start) * seen
    return keys, pairs


def _saved_numbers(layout: Layout, layer: LayerShape, numbers: Activations) -> tuple[float, float]:
    """Activations of a layer that remat saves, per position: (between sublayers, inside them)."""
    D = layer.embed
    match layout.shape.remat:
        case "full":
            return D, 0
        case "gathered":
            return D, 2 * D
        case "sublayers":
            return 2 * D, 0
        case "dots":
            products = numbers.queries + numbers.kv + numbers.latents + numbers.recurrence
            return 2 * D, products + (layer.matrices - 1) * numbers.mlp
        case "dispatched":
            return D, numbers.received
        case "offload":
            return 0, 0
        case _:  # none: all inputs of derivatives; q, k and v share theirs, and so do gate and up
            products = 2 * layer.matrices * numbers.hidden + numbers.dispatched
            inner = numbers.attention + 2 * numbers.latents + numbers.recurrence
            # Without gradients. Those of several groups are recomputed.
            if layer.recurrence and position_groups(layout, layer.recurrence) == 1:
                inner += numbers.chunks // 2 * 4 // compute_bytes(layout)
            return 6 * D * 4 // compute_bytes(layout), 2 * D + products + inner


def on_host(
    layout: Layout, accumulate: int = 1, offload: str = "", optimizer: str = "adamw"
) -> dict[str, float]:
    """Bytes of a device's arrays in the host's memory. A step copies each to the device and back.

    Args:
      accumulate, offload, optimizer: as in `memory_parts`.
    """
    sizes, shape = {}, layout.shape
    if offload:
        sizes["optimizer"] = moments(weights(layout), optimizer)
    if shape.remat == "offload":
        rows = layout.batch_size // layout.batch_shards // accumulate
        inputs = sum(x.count * positions(layout, x) * x.embed for x in shape.layers)
        inputs *= rows * compute_bytes(layout) / layout.count_shards(RESIDUAL_SEQ)
        sizes["saved activations"] = inputs / layout.stages
    return sizes


def _example_bytes(layout: Layout, accumulate: int, sizes: Weights) -> dict[str, float]:
    """Memory besides the state, of a model without tokens.

    The backward pass has each weight's output and, of layers with remat, what that saves and one
    layer recomputed. Both towers of a model that has two count: the loss needs both.
    """
    shape, width = layout.shape, compute_bytes(layout)
    rows = layout.batch_size // layout.batch_shards // accumulate
    outputs = 0.0
    for path, (array, axes) in layout.model.variables["params"].items():
        dims = array.shape
        if len(axes) > 1 and not (shape.remat and LAYERS in axes):
            use = layout.names.while_used(axes[-1])
            layers = dims[0] if LAYERS in axes else 1
            outputs += shape.positions_of(path) * layers * dims[-1] / layout.count_shards(use)
        if "channels" in axes:  # pixels in float32, and as patches
            outputs += shape.positions_of(path) * math.prod(dims[:-1]) * (4 + width) / width
    of_layers = LayerBytes(0.0, 0.0, 0)
    cast = 0.0
    if shape.remat:
        of_layers = _layer_bytes(layout, rows, segments=False, sizes=sizes)
        cast = sizes.stacked * width // 4 if width < 4 and shape.remat != "none" else 0.0
    return {
        "gradients": sizes.params * (1 + (accumulate > 1)),
        "saved activations": rows * outputs * width + of_layers.saved,
        "live working set": cast + 2 * sizes.layer + of_layers.recomputed + of_layers.scores,
    }


def positions(layout: Layout, layer: LayerShape) -> int:
    """Positions of a row in a layer, on all devices that share it."""
    return layout.seq_len or layer.positions or layout.shape.positions


def kernel(layout: Layout, segments: bool = True, length: int = 0) -> str:
    """The kernel of a step's attention.

    Args:
      length: positions of a row; 0: those of the layout.
    """
    attention = layout.shape.attention
    if attention is None:
        return "none"
    if layout.shape.kernel is None:
        return "xla"
    with layout.trace():
        length = length or layout.seq_len
        spans = layout.shape.spans
        return attention_kernel(layout.config, attention, length, segments, spans).kernel


def compute_bytes(layout: Layout) -> int:
    """Bytes of a number in the compute dtype."""
    return jnp.dtype(layout.shape.dtype or "float32").itemsize
