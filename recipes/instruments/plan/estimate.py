"""Memory, bytes sent and time of a train step, estimated by arithmetic alone.

Operations take the least time that the hardware allows (FLOPs at the peak, bytes at the memory's
bandwidth), multiplied by the factors of calibration.py; GPUs but Hopper's have none. Collectives
take the links' full rate. These assumptions are the same for every candidate:

- Transfers of weights and gradients overlap with compute, except the first layer's gather and the
  last layer's gradients. Those of activations, of attention and of experts do not overlap.
- Links inside slices or nodes and the network between them work at the same time.
- A pipeline's bubble adds (S - 1) / (v M) of its work, in v rounds. Nothing overlaps with the optimizer's update.
- With --matmul, layers' matmuls run at the peak of int8 or float8. Rounding takes no time.
- Layers' inputs go to the host's memory and back while layers compute. Moments go both ways at once.
- Layers read their weights once per pass and microbatch, and write and read each activation once.
"""

import math
from typing import NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from recipes.common.report import flops
from recipes.common.runtime import slice_groups
from recipes.common.sharding.layout import Layout
from recipes.common.sharding.shape import AttentionShape, Shape
from recipes.common.train.planned import FrozenModel
from recipes.instruments.plan.calibration import FACTORS, LOWER_BOUND
from recipes.instruments.plan.hardware import USABLE, Devices
from recipes.instruments.plan.step_memory import (
    compute_bytes,
    kernel,
    memory_parts,
    moments,
    multiplies_batches,
    on_host,
    partial_gradients,
    position_groups,
    weights,
)
from recipes.instruments.plan.textbook import (
    Transfer,
    device_tokens,
    optimizer_flops,
    optimizer_transfers,
    transfers,
)
from zoo.core.sharding import device
from zoo.core.strategies import RESIDUAL_SEQ
from zoo.experts.slots import CAPACITY
from zoo.kernels.shared import block_of
from zoo.kernels.splash import visited_blocks
from zoo.parallel.pipeline import microbatches, rounds, ticks

# Remat policy → whether a layer's matmuls run again in the backward pass. "none" repeats nothing,
# and "dots" only attention.
REPEATS = {None: (False, False), "none": (False, False), "dots": (False, True)}
LANES = 128  # of a TPU's vectors: heads of 64 take as much memory as those of 128
MATRIX_UNITS = {"TPU v6 lite": 256, "TPU7x": 256}  # width of heads that fill one; others: LANES
LOGITS = 4  # times that float32 logits are written or read, forward and backward
CAUSES = ("links", "network", "waiting", "bubble", "compute", "memory", "update", "host", "ends")
FORWARD = ("weights", "activations", "attention", "states", "exchanges")  # that forward passes send
OVERLAPPED = ("compute", "memory", "links", "network", "host")  # some of CAUSES


class Estimate(NamedTuple):
    """A train step's cost for each device."""

    layout: Layout
    devices: Devices
    accumulate: int
    memory: dict[str, float]  # purpose → bytes
    host: dict[str, float]  # purpose → bytes in the host's memory
    transfers: list[Transfer]
    links: float  # bytes sent to devices of the same slice or node
    network: float  # bytes sent to devices of other slices or nodes
    operations: dict[str, float]  # kind of operation, a field of Factors → seconds of computing
    seconds: dict[str, float]  # one of CAUSES → seconds
    useful: float  # FLOPs of all devices, without recomputation
    optimizer: str

    @property
    def peak(self) -> float:
        return sum(self.memory.values())

    @property
    def offload(self) -> str:
        """The flag --offload."""
        return "optimizer" if "optimizer" in self.host else ""

    @property
    def fits(self) -> bool:
        return self.peak <= USABLE * self.devices.hardware.memory

    @property
    def step(self) -> float:
        """Seconds of a step."""
        s = self.seconds
        layers = max(s[part] for part in OVERLAPPED)
        return layers + s["bubble"] + s["waiting"] + s["ends"] + s["update"]

    @property
    def bound(self) -> str:
        """The key of `seconds` that takes most of the time."""
        s = self.seconds
        overlapped = max(OVERLAPPED, key=lambda part: s[part])
        alone = max(("bubble", "waiting", "update"), key=lambda part: s[part])
        return overlapped if s[overlapped] >= s[alone] else alone

    @property
    def tokens(self) -> int:
        """Positions in a batch; examples for a model without positions."""
        return self.layout.batch_size * max(self.layout.seq_len, 1)

    @property
    def mfu(self) -> float:
        return self.useful / self.step / self.devices.hardware.peak / self.devices.count


def abstract_mesh(axes: dict[str, int], devices: Devices) -> AbstractMesh:
    """A mesh of devices that need not exist, enough to choose kernels and count bytes."""
    hardware = devices.hardware
    device = AbstractDevice(hardware.name, None, hardware.platform)
    kinds = (AxisType.Explicit,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds, abstract_device=device)


def estimate(
    layout: Layout,
    devices: Devices,
    accumulate: int = 1,
    offload: str = "",
    optimizer: str = "adamw",
) -> Estimate:
    """Estimates a train step.

    Args:
      layout: with batches, and rows of seq_len positions if it has any, on a mesh of `devices`.
      accumulate: gradient-accumulation steps.
      offload: "optimizer": its state is in the host's memory.
      optimizer: one of OPTIMIZERS.
    """
    hardware = devices.hardware
    sent = transfers(layout, accumulate, repeats=True) + optimizer_transfers(
        layout, optimizer, offload
    )
    links, network, seconds = _sending(layout, devices, sent)
    work, shape, sizes = _work(layout, accumulate), layout.shape, weights(layout)
    repeats_matmuls, _ = REPEATS.get(shape.remat, (True, True))
    passes = 4 if repeats_matmuls else 3
    activations = _activations(layout, passes) / hardware.bandwidth
    operations = _operations(layout, devices, work, activations)
    seconds["compute"] = sum(operations.values())
    waves = accumulate
    if layout.stages > 1:
        rows = layout.batch_size // accumulate // layout.batch_shards
        count = microbatches(layout.config, rows, layout.stages)
        waves *= count
        v = rounds(layout.config)
        idle = ticks(count, layout.stages, v) / (v * count) - 1
        seconds["bubble"] = seconds["compute"] * idle
    read = sizes.layer * shape.num_layers / layout.stages * passes * waves
    seconds["memory"] = read / hardware.bandwidth + activations
    host = on_host(layout, accumulate, offload, optimizer)
    seconds["host"] = 2 * accumulate * host.get("saved activations", 0) / hardware.host
    # Gradients, parameters and moments are read; all but the gradients are written.
    updated = 3 * sizes.state + 2 * moments(sizes, optimizer)
    seconds["update"] = max(updated / hardware.bandwidth, host.get("optimizer", 0) / hardware.host)
    seconds["update"] += optimizer_flops(layout, optimizer, offload) / hardware.peak
    seconds["ends"] = max(seconds["links"], seconds["network"]) / shape.num_layers
    memory = memory_parts(layout, accumulate, offload=offload, optimizer=optimizer, sizes=sizes)
    return Estimate(
        layout,
        devices,
        accumulate,
        memory,
        host,
        sent,
        links,
        network,
        operations,
        seconds,
        work.useful,
        optimizer,
    )


def with_frozen(own: Estimate, frozen: FrozenModel) -> Estimate:
    """Adds a frozen model to a step: its weights at rest, and its forward pass.

    The forward pass has a third of the FLOPs of a step, and gathers weights once where a step gathers
    them twice. The larger of both models' working sets counts. Weights in the host's memory are all on
    the device during the forward pass.
    """
    other = estimate(frozen.layout, own.devices, own.accumulate)
    forward = [x._replace(bytes=x.bytes / 2) for x in other.transfers if x.purpose in FORWARD]
    links, network, sending = _sending(frozen.layout, own.devices, forward)
    seconds = dict(own.seconds)
    for cause, more in sending.items():
        seconds[cause] += more
    repeats_matmuls, _ = REPEATS.get(frozen.layout.shape.remat, (True, True))
    passes = 4 if repeats_matmuls else 3
    operations = {kind: s + other.operations[kind] / passes for kind, s in own.operations.items()}
    seconds["compute"] = sum(operations.values())
    seconds["memory"] += other.seconds["memory"] / passes
    working = "live working set"
    held = {"frozen model": frozen.bytes_per_device} if frozen.bytes_per_device else {}
    there = held if frozen.on_host else {}
    larger = max(own.memory[working], other.memory[working] + sum(there.values()))
    seconds["host"] += sum(there.values()) / own.devices.hardware.host
    return own._replace(
        memory=own.memory | {working: larger} | ({} if frozen.on_host else held),
        host=own.host | there,
        transfers=own.transfers + forward,
        links=own.links + links,
        network=own.network + network,
        operations=operations,
        seconds=seconds,
        useful=own.useful + other.useful / 3,
    )


def _sending(
    layout: Layout, devices: Devices, sent: list[Transfer]
) -> tuple[float, float, dict[str, float]]:
    """(bytes over links, bytes over the network, cause → seconds) of a step's transfers."""
    sizes = dict(layout.mesh.shape)
    parts = slice_groups.across(sizes, devices.groups)
    links = network = 0.0
    seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    for transfer in sent:
        inside, outside = transfer.over_links(sizes, parts)
        links, network = links + inside, network + outside
        along = math.prod(sizes[axis] // parts[axis] for axis in transfer.axes)
        inside, outside = inside / devices.send_rate(along), outside / devices.hardware.network
        if transfer.hidden:
            seconds["links"] += inside
            seconds["network"] += outside
        else:
            seconds["waiting"] += inside + outside
    return links, network, seconds


class Work(NamedTuple):
    """FLOPs of a batch on all devices."""

    useful: float  # without recomputation
    matmuls: float  # besides attention's and those in low precision
    low: float  # in low precision
    attention: float


def _operations(
    layout: Layout, devices: Devices, work: Work, activations: float
) -> dict[str, float]:
    """Kind of operation → seconds of computing.

    Args:
      activations: seconds to write and read them all.
    """
    factors, hardware = FACTORS.get(devices.kind, LOWER_BOUND), devices.hardware
    lengthened = 1 + factors.fill / layout.shape.embed
    matmuls = work.matmuls / hardware.peak + work.low / hardware.rate(layout.shape.matmul or "")
    return {
        "matmul": factors.matmul * lengthened * matmuls / devices.count,
        "attention": factors.attention * work.attention / hardware.peak / devices.count,
        "elementwise": factors.elementwise * activations,
        "copy": factors.copy * activations,
    }


def _work(layout: Layout, accumulate: int = 1) -> Work:
    """What devices compute, with what remat repeats; causal attention."""
    shape = layout.shape
    repeats_matmuls, repeats_attention = REPEATS.get(shape.remat, (True, True))
    if not shape.vocab_size:
        useful = flops.encoder(layout) * layout.batch_size
        # A loss over all pairs embeds microbatches twice.
        twice = accumulate > 1 and layout.model.phases is not None
        again = useful / 3 * (repeats_matmuls + twice)
        low = _in_low_precision(shape, useful, again)
        return Work(useful=useful, matmuls=useful + again - low, low=low, attention=0.0)
    tokens = layout.batch_size * layout.seq_len
    useful = flops.decoder(shape, layout.seq_len, layout.batch_size)["causal"]
    # FLOPs per weight and position. Frozen weights have no gradients.
    each = 4 if shape.adapters else 6
    logits = 1 + shape.mtp_layers  # times that a position has them
    table = each * logits * shape.logits * shape.embed * tokens
    recurrence = sum(
        6 * count * layer.recurrence.work * tokens
        for layer, count in shape.trained_layers
        if layer.recurrence
    )
    attention = useful - each * shape.multiplied * tokens - recurrence
    matmuls = useful - table - attention - recurrence
    if shape.tower:  # its attention counts as a matmul
        of_tower = shape.tower.flops(layout.pictures * layout.batch_size)
        useful += of_tower
        matmuls += of_tower
    for experts, count in shape.trained_experts:
        of_tokens = each * count * experts.per_token * experts.weights * tokens
        if experts.capacity:  # empty slots are computed too, as many for each part of a row
            matmuls += of_tokens * (experts.capacity * layout.seq_shards - 1)
        elif multiplies_batches(layout, experts):
            matmuls += of_tokens * (CAPACITY - 1)
    again = repeats_matmuls * matmuls * 2 / each
    low = _in_low_precision(shape, matmuls, again)
    in_groups = any(  # whose backward pass computes each group once more
        layer.recurrence and position_groups(layout, layer.recurrence) > 1
        for layer, _ in shape.trained_layers
    )
    recurrence *= 1 + (repeats_attention + in_groups) / 3
    # Logits are computed twice.
    done = matmuls + again + table * (1 + 2 / each) + recurrence
    attention *= 1 + repeats_attention / 3
    if kernel(layout) == "splash":
        attention = _kernels(layout, forward=1 + repeats_attention)
    elif kernel(layout) == "cudnn" and shape.attention:  # heads of 64 take as long as those of 128
        attention *= _head_dim(shape.attention, LANES) / _head_dim(shape.attention, 1)
    return Work(useful=useful, matmuls=done - low, low=low, attention=attention)


def _kernels(layout: Layout, forward: int) -> float:
    """FLOPs of TPU kernels for attention: of whole blocks, and of heads that fill matrix units.

    Args:
      forward: how often the forward kernel runs. It has two matmuls; the backward kernel five, or
        two kernels seven.
    """
    with layout.trace():
        lanes = MATRIX_UNITS.get(device().device_kind, LANES)
    total = 0.0
    for layer, count in layout.shape.trained_layers:
        if layer.attention:
            block = block_of(layout.seq_len, layer.attention.window)
            tiles = layout.seq_len // block
            visited = visited_blocks(layout.seq_len, layer.attention.window, layer.attention.causal)
            computed = visited * tiles - visited * (visited - 1) / 2  # fewer keys before the first
            width = layer.attention.heads * _head_dim(layer.attention, lanes)
            matmul = 2 * computed * block**2 * width
            backward = 5 if partial_gradients(layout, layer.attention) else 7
            total += count * (2 * forward + backward) * matmul
    return total * layout.batch_size


def _in_low_precision(shape: Shape, matmuls: float, again: float) -> float:
    """The part of these FLOPs of layers' matmuls, and of their repetition, in low precision."""
    if not shape.matmul:
        return 0.0
    return matmuls * (1 / 3 if shape.matmul_backward else 1) + again


def _head_dim(attention: AttentionShape, lanes: int) -> float:
    """The mean dim of keys and values, both padded to multiples of `lanes`."""
    dims = (attention.key_dim, attention.value_dim)
    return sum(math.ceil(dim / lanes) * lanes for dim in dims) / 2


def _activations(layout: Layout, passes: int) -> float:
    """Bytes of activations that a device writes and reads in a step: its layers', and logits.

    Args:
      passes: forward passes of a layer, with what remat repeats; a backward pass counts as two.
    """
    shape = layout.shape
    if not shape.vocab_size:
        return 0.0
    with layout.trace():
        lanes = LANES if device().platform == "tpu" else 1
    residual = inner = 0.0  # numbers per position, of all layers
    for layer, count in shape.trained_layers:
        hidden = layer.mlp
        if layer.attention:
            heads = layer.attention.heads + layer.attention.kv_heads
            inner += count * heads * 2 * _head_dim(layer.attention, lanes)
        if layer.recurrence:
            inner += count * layer.recurrence.width
        if layer.experts:
            hidden += layer.experts.slots * layer.experts.width
        residual += count * 6 * shape.embed
        inner += count * layer.matrices * hidden
    # Devices that do not split rows or positions split heads and hidden widths, and layers.
    split = layout.mesh.size / layout.batch_shards / layout.seq_shards
    between = layout.count_shards(RESIDUAL_SEQ) / layout.seq_shards  # between sublayers
    tokens = device_tokens(layout)
    of_layers = tokens * (residual / between / layout.stages + inner / split)
    logits = (1 + shape.mtp_layers) * tokens * shape.logits / split
    return 2 * passes * of_layers * compute_bytes(layout) + LOGITS * logits * 4
