"""Compiles for accelerators that need not exist: slices of TPUs, nodes of NVIDIA GPUs.

TPUs need libtpu (the extra `tpu-aot`), GPUs the CUDA plug-in (`gpu-aot`); cpu, for trials, needs
neither. Nothing is allocated and nothing runs.
"""

import importlib.metadata
import math
import os
import re
import sys
import time
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh

from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import arrange, make_mesh
from recipes.instruments.plan.hardware import HARDWARE, NODE, USABLE, topology_shape

HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  device_memory_size: {gpu.memory:.0f}
  memory_bandwidth: {gpu.bandwidth:.0f}
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

# Kind → the package with its compiler, and the extra that installs it. HOPPER describes h100, h200.
COMPILERS: dict[str, tuple[str, str]] = dict.fromkeys(
    ("v4", "v5e", "v5p", "v6e", "tpu7x"), ("libtpu", "tpu-aot")
)
COMPILERS |= dict.fromkeys(("h100", "h200"), ("jax-cuda13-plugin", "gpu-aot"))


def missing_compiler(kind: str) -> str:
    """A phrase about what is missing to compile for this kind of device; "" if nothing is."""
    if kind == "cpu":
        return ""
    if kind not in COMPILERS:
        return f"there is no description of {kind} to compile for"
    package, extra = COMPILERS[kind]
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed: pip install -e '.[{extra}]'"
    return ""


class Step(Protocol):
    """A train step to compile."""

    @property
    def abstract(self) -> Any: ...  # its state: ShapeDtypeStructs with shardings
    def compile(self) -> jax.stages.Compiled: ...


def topology(kind: str, axes: dict[str, int], slices: int = 1) -> Mesh:
    """A mesh over accelerators that need not exist; see missing_compiler.

    Args:
      slices: number of TPU slices, which the outermost axes span.

    Raises UserError if the GPU compiler does not start.
    """
    if kind == "cpu":
        return make_mesh(",".join(f"{axis}={n}" for axis, n in axes.items()))
    jax.config.update("jax_platforms", "cpu")
    from jax.experimental import topologies

    chips = math.prod(axes.values())
    if HARDWARE[kind].platform == "gpu":
        try:
            described = topologies.get_topology_desc(**_nodes(kind, chips))
        except NotImplementedError:  # JAX looked for GPUs before, and has logged what it missed
            package, _ = COMPILERS[kind]
            raise UserError(
                f"{package} does not start without a GPU; run the command again with JAX_PLATFORMS=cpu"
            ) from None
    else:
        several: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
        described = topologies.get_topology_desc(**_slice(kind, chips // slices), **several)
    return arrange(axes, described.devices)


def _slice(kind: str, chips: int) -> dict:
    """Arguments of get_topology_desc for a TPU slice."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to query
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # or to share
    # The library would look for these two, and complain. The compiler reads neither.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    dims = topology_shape(kind, chips)
    name = f"{kind}:{'x'.join(map(str, dims))}"
    config: dict[str, Any] = {"platform": "tpu", "topology_name": name}
    if kind == "v4":  # makes the two cores of a chip one device, the default of newer kinds
        config["chip_config_name"] = "megacore"
    if len(dims) == 3 and chips >= 64:
        config["wrap"] = [True] * 3  # slices of whole 4x4x4 cubes are tori
    return config


def _nodes(kind: str, gpus: int) -> dict:
    """Arguments of get_topology_desc for GPUs of one node or of several whole ones."""
    each = min(gpus, NODE)
    wired = (
        f"{gpus // each}x1x{each}"  # groups joined by NVLink x hosts of a group x GPUs of a host
    )
    target = HOPPER.format(gpu=HARDWARE[kind])
    return {"platform": "cuda", "topology": wired, "target_config": target}


DOES_NOT_FIT = "does not fit"


class TooLarge(NamedTuple):
    """The compiler's result for a program that does not fit its chip."""

    text: str
    bytes: float  # that it needs


def compile_step(step: Step, kind: str, what: str) -> jax.stages.Compiled | TooLarge:
    """Compiles a step and prints how long that took; returns TooLarge if it does not fit its chip.

    Args:
      kind: the kind of chip in the step's mesh, a key of HARDWARE.
      what: name of the step, to print.
    """
    start = time.perf_counter()
    try:
        compiled = step.compile()
    except jax.errors.JaxRuntimeError as error:
        compiled = too_large(str(error), report.bytes_per_device(step.abstract))
        if compiled is None:
            raise
    gpu = HARDWARE[kind]
    if gpu.platform == "gpu" and not isinstance(
        compiled, TooLarge
    ):  # their compiler accepts any size
        peak = report.peak_memory(compiled)
        if peak > USABLE * gpu.memory:
            compiled = TooLarge(_misfit(peak, USABLE * gpu.memory), peak)
    took = f"{what}: compiled in {time.perf_counter() - start:.0f} s"
    print(took, file=sys.stderr, flush=True)
    return compiled


def too_large(error: str, arguments: float) -> TooLarge | None:
    """Parses the TPU compiler's error about memory, in units of 1,024; None for other errors.

    Args:
      error: its text, which states what the program needs in total, or only its temporaries.
      arguments: bytes of the step's state on a device.
    """
    number = r"([\d.]+)([KMGT])"
    total = re.search(rf"Used {number} of {number} hbm", error)
    match = total or re.search(
        rf"temporaries \({number}\) exceeds available HBM \({number}\)", error
    )
    if not match:
        return None
    needed, there = (float(match[i]) * 1024 ** " KMGT".index(match[i + 1]) for i in (1, 3))
    needed += 0 if total else arguments
    return TooLarge(_misfit(needed, there), needed)


def _misfit(needed: float, there: float) -> str:
    return f"{DOES_NOT_FIT}: {report.size(needed)} of {report.size(there)}"
