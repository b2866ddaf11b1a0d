"""Accelerators: peak FLOP/s, memory and networks of a device, and the slices and nodes they form.

Bandwidths are bytes per second that a device sends, in one direction, over all its links.
"""

import difflib
import math
import re
from typing import NamedTuple

from recipes.common.report import flops
from recipes.common.runtime.errors import UserError

# Share of the memory that a program may use; on GPUs, CUDA, cuDNN and NCCL need the rest. JAX uses
# 0.75 there unless XLA_CLIENT_MEM_FRACTION says otherwise.
USABLE = 0.92
NODE = 8  # GPUs, joined by NVLink


class Hardware(NamedTuple):
    name: str  # JAX's device_kind
    float8: float  # peak FLOP/s; 0: no faster than bfloat16, whose peak is in flops.PEAK
    memory: float  # bytes
    bandwidth: float  # the memory's
    links: float  # to the devices of the slice or node: ICI, NVLink
    network: float  # to other slices or nodes
    torus: int  # dims of the torus that the links form; 0: a switch
    most: int  # devices of a slice or node
    host: float  # to the host's memory, and as much back at the same time: PCIe

    @property
    def peak(self) -> float:
        """FLOP/s in dense bfloat16 with float32 sums."""
        return flops.chip(self.name) or 1e11  # a CPU core or two

    def rate(self, matmul: str) -> float:
        """FLOP/s of matmuls in Config.matmul's format.

        By the sources below and in flops.py, int8 is twice as fast as bfloat16, except on v4. They have
        no figure for tpu7x.
        """
        if matmul == "int8":
            return self.peak * (1 if self.name in ("TPU v4", "TPU7x", "cpu") else 2)
        return (matmul == "fp8" and self.float8) or self.peak

    @property
    def platform(self) -> str:
        return "gpu" if "NVIDIA" in self.name else "tpu" if "TPU" in self.name else "cpu"


# Memory of h100 and h200: the compiler's own description of them (openxla/xla,
# xla/backends/gpu/target_config/specs). "docs" is docs.cloud.google.com/tpu/docs, whose ICI figures
# count both directions. To the host: data sheets of the GPUs, whose PCIe figures count both directions;
# of TPUs jax-ml.github.io/scaling-book/tpus ("typically", and v6e's; tpu7x is assumed to have v6e's).
HARDWARE = {
    # docs/v4: 32 GiB, 1,200 GB/s, 2,400 Gbit/s of ICI; network: as v5p
    "v4": Hardware("TPU v4", 0, 2**35, 1.2e12, 300e9, 6.25e9, 3, 4_096, 1.5e10),
    # docs/v6e, its column v5e: 16 GB, 800 GB/s, 1,600 Gbit/s of ICI, 2 × 100 Gbit/s for 8 chips
    "v5e": Hardware("TPU v5 lite", 0, 2**34, 8e11, 200e9, 3.125e9, 2, 256, 1.5e10),
    # docs/v5p-training: 95 GiB, 2,765 GB/s, 1,200 GB/s of ICI, 50 Gbit/s a chip; jobs of 6,144
    "v5p": Hardware("TPU v5", 0, 95 * 2**30, 2.765e12, 600e9, 6.25e9, 3, 6_144, 1.5e10),
    # docs/v6e: 32 GB, 1,600 GB/s, 3,200 Gbit/s of ICI, 4 × 200 Gbit/s for 8 chips
    "v6e": Hardware("TPU v6 lite", 0, 2**35, 1.6e12, 400e9, 12.5e9, 2, 256, 3.2e10),
    # docs/tpu7x: a device is half a chip of 192 GiB, 7,380 GB/s, 1,200 GB/s of ICI, 100 Gbit/s
    "tpu7x": Hardware("TPU7x", 2307e12, 96 * 2**30, 3.69e12, 300e9, 6.25e9, 3, 18_432, 3.2e10),
    # NVIDIA A100 80 GB SXM data sheet: NVLink 600 GB/s both ways; DGX A100: 200 Gbit/s a GPU
    "a100": Hardware("NVIDIA A100-SXM4-80GB", 0, 80e9, 2.039e12, 300e9, 25e9, 0, NODE, 3.2e10),
    # NVIDIA H100 SXM data sheet: NVLink 900 GB/s both ways; DGX H100: 400 Gbit/s a GPU
    "h100": Hardware(
        "NVIDIA H100 80GB HBM3", 1979e12, 84_942_979_072, 3.35232e12, 450e9, 50e9, 0, NODE, 6.4e10
    ),
    # NVIDIA H200 SXM data sheet: as H100, 4.8 TB/s
    "h200": Hardware("NVIDIA H200", 1979e12, 151_397_597_184, 4.8e12, 450e9, 50e9, 0, NODE, 6.4e10),
    # NVIDIA DGX B200 data sheet: 1,440 GB and 64 TB/s of 8 GPUs, NVLink 14.4 TB/s, 400 Gbit/s a GPU
    "b200": Hardware("NVIDIA B200", 4500e12, 180e9, 8e12, 900e9, 50e9, 0, NODE, 6.4e10),
    # Invented figures, so that plans for simulated devices have an order.
    "cpu": Hardware("cpu", 0, 2**33, 1e10, 1e9, 1e8, 0, 1_024, 1e9),
}


class Devices(NamedTuple):
    kind: str  # a key of HARDWARE
    each: int  # devices of a slice or node
    groups: int = 1  # slices or nodes

    @property
    def count(self) -> int:
        return self.each * self.groups

    @property
    def hardware(self) -> Hardware:
        return HARDWARE[self.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        """Chips of a slice along each dim of the torus; GPUs of a node."""
        return topology_shape(self.kind, self.each)

    @property
    def closed(self) -> bool:
        """Whether the links of a slice close to rings: in whole cubes of 4x4x4, and in 16x16."""
        dims = self.shape
        return (
            not self.hardware.torus
            or (len(dims) == 3 and all(n % 4 == 0 for n in dims))
            or dims == (16, 16)
        )

    def send_rate(self, along: int) -> float:
        """Bytes per second that a device sends to a group of `along` devices of its slice or node.

        On a torus, a group of n of N devices has its share log n / log N of the links, at least
        those of one dim; half of that where rings are open.
        """
        dims, links = self.hardware.torus, self.hardware.links
        if not dims or along < 2:
            return links
        share = max(1 / dims, math.log(along) / math.log(max(self.each, 2)))
        return links * min(share, 1.0) * (1 if self.closed else 0.5)

    def __str__(self) -> str:
        if self.hardware.platform == "gpu":
            return f"{self.kind}:{self.count}"
        return f"{self.kind}:{self.each}" + (f"x{self.groups}" if self.groups > 1 else "")


def parse_devices(text: str) -> Devices:
    """Parses --devices: v5p:64; v5e:256x2, two slices; h100:16, two nodes. Raises UserError.

    >>> parse_devices("v5e:256x2"), parse_devices("h100:16")
    (Devices(kind='v5e', each=256, groups=2), Devices(kind='h100', each=8, groups=2))
    """
    text = text.lower()
    match = re.fullmatch(r"(\w+):([1-9]\d{0,6})(?:x([1-9]\d{0,3}))?", text)
    kind = match[1] if match else text.partition(":")[0]
    if kind not in HARDWARE:
        near = difflib.get_close_matches(kind, HARDWARE, n=len(HARDWARE), cutoff=0)
        raise UserError(f"--devices={text[:50]} has kind {kind[:20]!r}; use {', '.join(near)}")
    if not match:
        raise UserError(
            f"--devices={text[:50]} is not a kind and a number; write {kind}:8, or {kind}:8x2 for two "
            "slices"
        )
    each, groups = int(match[2]), int(match[3] or 1)
    if HARDWARE[kind].platform == "gpu" and each > NODE:
        if each % NODE or groups > 1:
            raise UserError(
                f"--devices={text} can't be formed of nodes of {NODE} GPUs; use "
                f"{kind}:{-(-each * groups // NODE) * NODE}"
            )
        each, groups = NODE, each // NODE
    topology_shape(kind, each)
    return Devices(kind, each, groups)


def topology_shape(kind: str, each: int) -> tuple[int, ...]:
    """The dims of a slice of `each` devices, or (each,). Raises UserError if there is none."""
    hardware, cores = HARDWARE[kind], 2 if kind == "tpu7x" else 1
    if not hardware.torus:
        if each > hardware.most:
            raise UserError(f"--devices={kind}:{each} is more than {hardware.most} devices")
        return (each,)
    chips = each // cores
    every = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    if hardware.torus == 3:
        every = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
        every += [_cuboid(chips // 64)] if chips and chips % 64 == 0 else []
    shapes = {math.prod(dims): dims for dims in every}
    if each % cores or each > hardware.most or chips not in shapes:
        known = [n * cores for n in shapes if n * cores <= hardware.most]
        known += [64 * cores * n for n in (1, 2, 4, 8, 16, 32, 64, 96)] * (hardware.torus == 3)
        fits = sorted({n for n in known if n <= hardware.most}, key=lambda n: abs(n - each))
        least = " and ".join(f"{kind}:{n}" for n in sorted(fits[:2]))
        raise UserError(
            f"--devices={kind}:{each} is not a slice that exists; the nearest are {least}"
        )
    return shapes[chips]


def _cuboid(cubes: int) -> tuple[int, ...]:
    """The dims, in chips, of the most compact cuboid of 4x4x4 cubes.

    >>> _cuboid(1), _cuboid(4), _cuboid(96)
    ((4, 4, 4), (4, 8, 8), (16, 16, 24))
    """
    every = (
        (a, b, cubes // a // b)
        for a in range(1, cubes + 1)
        for b in range(a, cubes // a + 1)
        if a * a * a <= cubes and cubes % (a * b) == 0 and b <= cubes // a // b
    )
    return tuple(4 * n for n in min(every, key=lambda dims: dims[2] - dims[0]))
