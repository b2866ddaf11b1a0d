"""Memory, bytes sent and time of a train step, estimated by arithmetic alone.

Times come from a roofline model, so they are lower bounds: matmuls run at the peak, collectives at
the links' full rate. These assumptions are the same for every candidate:

- Transfers of weights and gradients overlap with compute, except the first layer's gather and the
  last layer's gradients. Those of activations, of attention and of experts do not overlap.
- Links inside slices or nodes and the network between them work at the same time.
- A pipeline's bubble adds (S - 1) / M of its work. Nothing overlaps with the optimizer's update.
- With --matmul, layers' matmuls run at the peak of int8 or float8. Rounding takes no time.
- Layers' inputs go to the host's memory and back while layers compute. Moments go both ways at once.
- Layers read their weights once per pass and microbatch, and write and read each activation once.
"""

import math
from typing import NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from recipes.common.plan.hardware import USABLE, Devices
from recipes.common.plan.memory import compute_bytes, memory_parts, moments, on_host, weights
from recipes.common.plan.textbook import (
    Transfer,
    device_tokens,
    of_optimizer,
    optimizer_flops,
    transfers,
)
from recipes.common.report import flops
from recipes.common.runtime import slices
from recipes.common.sharding.layout import Layout
from zoo.pipeline import microbatches
from zoo.shape import Shape

# Remat policy → whether a layer's matmuls run again in the backward pass. "none" repeats nothing,
# and "dots" only attention.
REPEATS = {None: (False, False), "none": (False, False), "dots": (False, True)}
OVERLAPPED = ("compute", "memory", "links", "network", "host")  # keys of Estimate.seconds


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
    seconds: dict[str, float]  # cause → seconds
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
    hardware, sizes = devices.hardware, dict(layout.mesh.shape)
    parts = slices.across(sizes, devices.groups)
    sent = transfers(layout, accumulate, repeats=True) + of_optimizer(layout, optimizer, offload)
    links = network = 0.0
    seconds: dict[str, float] = dict.fromkeys(("links", "network", "waiting"), 0.0)
    for transfer in sent:
        inside, outside = transfer.over_links(sizes, parts)
        links, network = links + inside, network + outside
        along = math.prod(sizes[axis] // parts[axis] for axis in transfer.axes)
        inside, outside = inside / devices.send_rate(along), outside / hardware.network
        if transfer.hidden:
            seconds["links"] += inside
            seconds["network"] += outside
        else:
            seconds["waiting"] += inside + outside
    useful, done, low = _flops(layout)
    sizes_of_weights, shape = weights(layout), layout.shape
    waves = accumulate
    seconds["bubble"] = 0.0
    rate = hardware.rate(shape.matmul or "")
    seconds["compute"] = ((done - low) / hardware.peak + low / rate) / devices.count
    if layout.stages > 1:
        rows = layout.batch_size // accumulate // layout.batch_shards
        count = microbatches(layout.config, rows, layout.stages)
        waves *= count
        idle = (layout.stages - 1) / count
        seconds["bubble"] = seconds["compute"] * idle
    repeats_matmuls, _ = REPEATS.get(shape.remat, (True, True))
    passes = 4 if repeats_matmuls else 3
    read = sizes_of_weights.layer * shape.num_layers / layout.stages * passes * waves
    seconds["memory"] = (read + _activations(layout, passes)) / hardware.bandwidth
    # Gradients, parameters and moments are read; all but the gradients are written.
    updated = 3 * sizes_of_weights.state + 2 * moments(sizes_of_weights, optimizer)
    seconds["update"] = updated / hardware.bandwidth
    host = on_host(layout, accumulate, offload, optimizer)
    seconds["update"] = max(seconds["update"], host.get("optimizer", 0) / hardware.host)
    seconds["update"] += optimizer_flops(layout, optimizer, offload) / hardware.peak
    seconds["host"] = 2 * accumulate * host.get("saved activations", 0) / hardware.host
    seconds["ends"] = max(seconds["links"], seconds["network"]) / shape.num_layers
    memory = memory_parts(layout, accumulate, offload=offload, optimizer=optimizer)
    return Estimate(
        layout, devices, accumulate, memory, host, sent, links, network, seconds, useful, optimizer
    )


def _flops(layout: Layout) -> tuple[float, float, float]:
    """(FLOPs of a batch without recomputation, those that devices compute, the part of these in
    low precision); causal attention.
    """
    shape = layout.shape
    if not shape.vocab_size:
        useful = flops.encoder(layout) * layout.batch_size
        return useful, useful, _in_low_precision(shape, useful, 0)
    tokens = layout.batch_size * layout.seq_len
    useful = flops.decoder(layout.config, layout.seq_len, layout.batch_size)["causal"]
    table = 6 * shape.vocab_size * shape.embed * tokens
    attention = useful - 6 * shape.multiplied * tokens
    matmuls = useful - table - attention
    empty_slots = 0.0  # are computed too
    for experts, count in shape.trained_experts:
        of_tokens = 6 * count * experts.per_token * experts.weights * tokens
        empty_slots += of_tokens * ((experts.capacity or 1.0) * layout.seq_shards - 1)
    repeats_matmuls, repeats_attention = REPEATS.get(shape.remat, (True, True))
    again = repeats_matmuls * (matmuls + empty_slots) / 3
    once = useful + empty_slots + table / 3  # logits are computed twice
    computed = once + again + repeats_attention * attention / 3
    return useful, computed, _in_low_precision(shape, matmuls + empty_slots, again)


def _in_low_precision(shape: Shape, matmuls: float, again: float) -> float:
    """The part of these FLOPs of layers' matmuls, and of their repetition, in low precision."""
    if not shape.matmul:
        return 0.0
    return matmuls * (1 / 3 if shape.matmul_backward else 1) + again


def _activations(layout: Layout, passes: int) -> float:
    """Bytes of activations that a device's layers write and read in a step."""
    shape = layout.shape
    if not shape.vocab_size:
        return 0.0
    numbers = 0.0  # per position, of all layers
    for layer in shape.layers:
        hidden = layer.mlp
        inner = 0
        if layer.attention:
            inner += layer.attention.kv_dim * (layer.attention.heads + layer.attention.kv_heads)
        if layer.recurrence:
            inner += layer.recurrence.width
        if layer.experts:
            hidden += layer.experts.slots * layer.experts.width
        numbers += layer.count * (6 * shape.embed + inner + layer.matrices * hidden)
    # Devices that do not split rows or positions split heads and hidden widths, and layers.
    split = layout.mesh.size / layout.batch_shards / layout.seq_shards
    return 2 * passes * device_tokens(layout) * numbers / split * compute_bytes(layout)
