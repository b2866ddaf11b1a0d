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
from typing import Any, NamedTuple

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from recipes.common.plan.hardware import USABLE, Devices
from recipes.common.plan.memory import memory_parts, on_host, weights
from recipes.common.plan.textbook import Transfer, device_tokens, transfers
from recipes.common.report import flops
from recipes.common.runtime import slices
from recipes.common.sharding.layout import Layout
from zoo.pipeline import microbatches

# Remat policy → whether a layer's matmuls run again in the backward pass. "none" repeats nothing,
# and "dots" only attention.
REPEATS = {"none": (False, False), "dots": (False, True)}


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


def estimate(layout: Layout, devices: Devices, accumulate: int = 1, offload: str = "") -> Estimate:
    """Estimates a train step.

    Args:
      layout: with batches, and rows of seq_len positions if it has any, on a mesh of `devices`.
      accumulate: gradient-accumulation steps.
      offload: "optimizer": its state is in the host's memory.
    """
    hardware, sizes = devices.hardware, dict(layout.mesh.shape)
    parts = slices.across(sizes, devices.groups)
    sent = transfers(layout, accumulate, repeats=True)
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
    held, config = weights(layout), layout.config
    layers = getattr(config, "num_layers", getattr(config, "depth", 1))
    waves = accumulate
    seconds["bubble"] = 0.0
    rate = hardware.rate(getattr(config, "matmul", ""))
    seconds["compute"] = ((done - low) / hardware.peak + low / rate) / devices.count
    if layout.stages > 1:
        rows = layout.batch_size // accumulate // layout.batch_shards
        waves *= (count := microbatches(config, rows, layout.stages))
        idle = (layout.stages - 1) / count
        seconds["bubble"] = seconds["compute"] * idle
    repeated, _ = REPEATS.get(getattr(config, "remat", "none"), (True, True))
    passes = 4 if repeated else 3
    read = held.layer * layers / layout.stages * passes * waves
    seconds["memory"] = (read + _activations(layout, passes)) / hardware.bandwidth
    # Gradients, parameters and moments are read; all but the gradients are written.
    seconds["update"] = 7 * held.params / hardware.bandwidth
    host = on_host(layout, accumulate, offload)
    seconds["update"] = max(seconds["update"], host.get("optimizer", 0) / hardware.host)
    seconds["host"] = 2 * accumulate * host.get("saved activations", 0) / hardware.host
    seconds["ends"] = max(seconds["links"], seconds["network"]) / layers
    memory = memory_parts(layout, accumulate, offload=offload)
    return Estimate(
        layout, devices, accumulate, memory, host, sent, links, network, seconds, useful
    )


def _flops(layout: Layout) -> tuple[float, float, float]:
    """(FLOPs of a batch without recomputation, those that devices do, of these those of layers'
    matmuls in Config.matmul's format); causal attention.
    """
    config: Any = layout.config
    if not hasattr(config, "vocab_size"):
        positions = getattr(config, "num_positions", 1)
        useful = flops.encoder(layout, positions) if positions > 1 else flops.dense(layout)
        whole = useful * layout.batch_size
        return whole, whole, whole * _low(config)
    tokens = layout.batch_size * layout.seq_len
    useful = flops.decoder(config, layout.seq_len, layout.batch_size)["causal"]
    table = 6 * config.vocab_size * config.embed * tokens
    attention = useful - 6 * flops.matmul_params(config) * tokens
    matmuls, extra = useful - table - attention, 0.0
    if slots := getattr(config, "experts_per_token", 0):  # slots that stay empty are computed too
        matrices = getattr(config, "mlp_matrices", 3)
        layers = flops.layers_of(config) - getattr(config, "dense_layers", 0)
        experts = 6 * layers * slots * matrices * config.embed * config.mlp * tokens
        extra = experts * ((config.capacity or 1.0) * layout.seq_shards - 1)
    repeats_matmuls, repeats_attention = REPEATS.get(config.remat, (True, True))
    done = useful + extra + table / 3  # logits are computed twice
    again = repeats_matmuls * (matmuls + extra) / 3
    return (
        useful,
        done + again + repeats_attention * attention / 3,
        _low(config, (matmuls + extra, again)),
    )


def _low(config: Any, matmuls: tuple[float, float] = (1, 0)) -> float:
    """How many of these FLOPs of layers' matmuls, and of their repetition, are in low precision."""
    if not getattr(config, "matmul", ""):
        return 0.0
    return matmuls[0] * (1 / 3 if config.matmul_backward else 1) + matmuls[1]


def _activations(layout: Layout, passes: int) -> float:
    """Bytes of activations that a device's layers write and read in a step."""
    config: Any = layout.config
    if not hasattr(config, "vocab_size"):
        return 0.0
    slots = getattr(config, "experts_per_token", 1) * (getattr(config, "capacity", 1.0) or 1.0)
    matrices, sizes = getattr(config, "mlp_matrices", 3), layout.mesh.shape
    both = config.head_dim + getattr(config, "value_dim", config.head_dim)
    inner = both * (config.num_heads + config.num_kv_heads)
    inner += (slots + getattr(config, "shared_experts", 0)) * matrices * config.mlp
    # Devices that do not split rows or positions split heads and hidden widths, and layers.
    split = math.prod(sizes.values()) / layout.batch_shards / layout.seq_shards
    width = 4 if config.dtype == "float32" else 2
    elements = device_tokens(layout) * config.num_layers * (6 * config.embed + inner) / split
    return 2 * passes * elements * width
