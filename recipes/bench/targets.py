"""Compiles for accelerators that need not exist: slices of TPUs, nodes of NVIDIA GPUs.

TPUs need libtpu (the extra `tpu-aot`), GPUs the CUDA plug-in (`gpu-aot`); cpu, for trials, needs
neither. Nothing is allocated and nothing runs.
"""

import dataclasses
import itertools
import math
import os
import re
import time
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from recipes.bench.common import Step, progress, version
from recipes.common.analysis import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import flag
from recipes.common.runtime.mesh import arrange, describe, make_mesh
from recipes.common.sharding.rules import used_axes
from zoo import transformer

# Kind → number of chips → topology.
TPUS = {
    "v4": {16: "2x2x4", 256: "4x8x8"},
    "v5e": {16: "4x4", 256: "16x16"},
    "v5p": {16: "2x2x4", 256: "4x8x8"},
    "v6e": {16: "4x4", 256: "16x16"},
}


class GPU(NamedTuple):
    name: str  # JAX's device_kind
    memory: int  # bytes
    bandwidth: int  # of the memory, bytes per second


# SXM modules; NVLink connects all GPUs of a node. Figures are from the compiler's own descriptions.
GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", 84_942_979_072, 3_352_320_000_000),
    "h200": GPU("NVIDIA H200", 151_397_597_184, 4_800_000_000_000),
}
NODE = 8  # GPUs
# Share of a GPU's memory that a program may use; CUDA, cuDNN and NCCL need the rest. JAX uses 0.75
# unless XLA_CLIENT_MEM_FRACTION says otherwise.
USABLE = 0.92
HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  device_memory_size: {gpu.memory}
  memory_bandwidth: {gpu.bandwidth}
  clock_rate_ghz: 1.98
  core_count: 132
  fpus_per_core: 128
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""

KINDS = [*TPUS, *GPUS, "cpu"]
KINDS_HELP = "TPUs, NVIDIA GPUs, or cpu: simulated devices"


def check_targets(kinds: list[str], counts: list[int]) -> None:
    """Raises UserError if programs can't be compiled for these chips, before a table begins."""
    for kind, chips in itertools.product(kinds, counts):
        if kind == "cpu":
            continue
        gpu = kind in GPUS
        if not version("jax-cuda13-plugin" if gpu else "libtpu"):
            whose, extra = ("NVIDIA GPU", "gpu") if gpu else ("TPU", "tpu")
            raise UserError(
                f"kind {kind} needs the {whose} compiler, which runs on any Linux machine; install "
                f"it with pip install -e '.[{extra}-aot]', or use kind cpu"
            )
        if not (chips <= NODE or chips % NODE == 0 if gpu else chips in TPUS[kind]):
            known = "1 to 8, or nodes of 8" if gpu else " or ".join(map(str, TPUS[kind]))
            raise UserError(f"--chips has {chips}, but {kind} needs {known}; use one of these")


@dataclasses.dataclass(frozen=True)
class MeshFlags:
    """Chips along each mesh axis but data, which has the rest."""

    model: int = flag(
        0, "Chips along model; 0: the largest of 8, 4 and 2 that divides the kv heads and fits beside "
        "pipe or seq, or 1 if the rules have replica groups.", at_least=0,
    )  # fmt: skip
    group: int = flag(16, "Chips along fsdp, if the rules use it.", at_least=1)
    pipe: int = flag(4, "Chips along pipe, if the rules use it.", at_least=1)
    seq: int = flag(4, "Chips along seq, if the rules use it.", at_least=1)

    def axes(self, size: str, chips: int, strategy: str, zoo: Any = transformer) -> dict[str, int]:
        """Mesh axis → chips along it. Raises UserError if the number of chips does not allow it.

        Args:
          zoo: the model's zoo file.
        """
        used, inner, stated = used_axes(zoo.RULES[strategy]), {}, []
        groups = "fsdp" in used
        along = {axis: getattr(self, axis) for axis in ("pipe", "seq") if axis in used}
        heads = zoo.SIZES[size]().num_kv_heads
        model = self.model or (
            1 if groups else math.gcd(8, heads, max(chips // math.prod(along.values()), 1))
        )
        if groups:  # replica groups: each has one copy of the weights
            inner["fsdp"] = min(self.group, max(chips // model, 1))
            stated.append(f"--group={inner['fsdp']}")
        for axis, size in along.items():
            inner[axis] = size
            stated.append(f"--{axis}={size}")
        if "model" in used:
            inner["model"] = model
            stated.append(f"--model={model}")
        data, over = divmod(chips, math.prod(inner.values()))
        if over:
            wrong = "--model" if chips % model else stated[0].partition("=")[0]
            raise UserError(
                f"--chips={chips} is not divisible by {' times '.join(stated)} (rules {strategy!r}); "
                f"use a different {wrong}"
            )
        return {"data": data} | inner


def mesh_name(axes: dict[str, int]) -> str:
    """A mesh's sizes, with the names of its axes if `pipe` or `seq` is one.

    >>> mesh_name({"data": 4, "model": 2}), mesh_name({"data": 2, "seq": 4})
    ('4x2', 'data=2,seq=4')
    """
    return describe(axes) if {"pipe", "seq"} & {*axes} else "x".join(map(str, axes.values()))


def topology(kind: str, axes: dict[str, int], slices: int = 1) -> Mesh:
    """A mesh over accelerators that need not exist; see check_targets.

    Args:
      slices: number of TPU slices, which the outermost axes span.
    """
    if kind == "cpu":
        return make_mesh(",".join(f"{axis}={n}" for axis, n in axes.items()))
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    chips = math.prod(axes.values())
    if kind in GPUS:
        described = topologies.get_topology_desc(**_nodes(kind, chips))
    else:
        several: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
        described = topologies.get_topology_desc(**_slice(kind, chips // slices), **several)
    return arrange(axes, described.devices)


def _slice(kind: str, chips: int) -> dict:
    """Arguments of get_topology_desc for a TPU slice."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to query
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # or to share
    name = f"{kind}:{TPUS[kind][chips]}"
    config: dict[str, Any] = {"platform": "tpu", "topology_name": name}
    if kind == "v4":  # makes the two cores of a chip one device, the default of newer kinds
        config["chip_config_name"] = "megacore"
    if name.count("x") == 2 and chips >= 64:
        config["wrap"] = [True] * 3  # slices of whole 4x4x4 cubes are tori
    return config


def _nodes(kind: str, gpus: int) -> dict:
    """Arguments of get_topology_desc for GPUs of one node or of several whole ones."""
    each = min(gpus, NODE)
    wired = (
        f"{gpus // each}x1x{each}"  # groups joined by NVLink x hosts of a group x GPUs of a host
    )
    target = HOPPER.format(gpu=GPUS[kind])
    return {"platform": "cuda", "topology": wired, "target_config": target}


def caveats(kinds: list[str]) -> list[str]:
    """Limits of compiling without the hardware: at most one line, for the end of a table."""
    if not any(kind in GPUS for kind in kinds):
        return []
    return [
        f"GPU programs by jax-cuda13-plugin {version('jax-cuda13-plugin')} with no GPU there: not "
        "autotuned, without cuDNN's and cuBLAS's workspace, to read and not to run. A step is said to "
        f"fit if its peak is at most {USABLE:.0%} of the memory."
    ]


DOES_NOT_FIT = "does not fit"


class TooLarge(NamedTuple):
    """The compiler's result for a program that does not fit its chip."""

    text: str
    bytes: float  # that it needs


def compile_step(step: Step, kind: str, what: str) -> jax.stages.Compiled | TooLarge:
    """Compiles a step and prints how long that took; returns TooLarge if it does not fit its chip.

    Args:
      kind: the kind of chip in the step's mesh, one of KINDS.
      what: name of the step, to print.
    """
    start = time.perf_counter()
    try:
        compiled = step.compile()
    except jax.errors.JaxRuntimeError as error:
        compiled = too_large(str(error), report.bytes_per_device(step.abstract))
        if compiled is None:
            raise
    if kind in GPUS and not isinstance(compiled, TooLarge):  # their compiler accepts any size
        peak = report.memory(compiled).peak_memory_in_bytes
        if peak > USABLE * GPUS[kind].memory:
            compiled = TooLarge(_misfit(peak, USABLE * GPUS[kind].memory), peak)
    progress(f"{what}: compiled in {time.perf_counter() - start:.0f} s")
    return compiled


def too_large(error: str, arguments: float) -> TooLarge | None:
    """Parses the TPU compiler's error about memory, in units of 1,024; None for other errors.

    Args:
      error: its text, which states what the program needs in total, or only its temporaries.
      arguments: bytes of the step's state on a device.
    """
    number = r"([\d.]+)([KMGT])"
    whole = re.search(rf"Used {number} of {number} hbm", error)
    found = whole or re.search(
        rf"temporaries \({number}\) exceeds available HBM \({number}\)", error
    )
    if not found:
        return None
    needed, there = (float(found[i]) * 1024 ** " KMGT".index(found[i + 1]) for i in (1, 3))
    needed += 0 if whole else arguments
    return TooLarge(_misfit(needed, there), needed)


def _misfit(needed: float, there: float) -> str:
    return f"{DOES_NOT_FIT}: {report.size(needed)} of {report.size(there)}"
