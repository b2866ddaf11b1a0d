"""Where a GPU's time goes: a trace of JAX's profiler, by kind of kernel."""

import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

# Kind → a pattern of its kernels' names; the first match counts. XLA runs matmuls by cuBLAS, whose
# kernels for Hopper are called nvjet or xmma, or by Triton; its own kernels it names after the
# operations in them.
NAMES = {
    "attention": r"cudnn|sdpa|flash|mha|attention",
    "matmuls of float32": r"f32f32|tf32|sgemm",
    "matmuls": r"nvjet|gemm|xmma|cutlass|cublas|dot",
    "slices of stacks": r"dynamic_update_slice|dynamic_slice",  # a scan's weights and activations
    "copies": r"memcpy|memset|copy|transpose",
    "other kernels": "",
}
KINDS = (*NAMES, "no kernel")


class Event(NamedTuple):
    """A kernel's execution, in nanoseconds."""

    name: str
    start: float
    end: float


def events(folder: pathlib.Path) -> list[Event]:
    """The kernels of the first GPU in a trace; empty without a GPU."""
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    lines = (line for plane in planes if plane.name == "/device:GPU:0" for line in plane.lines)
    return [Event(e.name, e.start_ns, e.end_ns) for line in lines for e in line.events]


def kinds(kernels: Iterable[Event], steps: int) -> dict[str, float]:
    """Milliseconds of one of `steps` steps by kind, an item of KINDS.

    Kernels that run at the same time share it: what an earlier one covers does not count again.
    """
    times: dict[str, float] = {}
    until = None
    for kernel in sorted(kernels, key=lambda x: x.start):
        until = kernel.start if until is None else until
        idle = max(0, kernel.start - until)
        busy = max(0, kernel.end - max(kernel.start, until))
        for name, time in ((kind(kernel.name), busy), ("no kernel", idle)):
            times[name] = times.get(name, 0) + time / steps / 1e6
        until = max(until, kernel.end)
    return times


def kind(name: str) -> str:
    """The kind of a kernel of this name, a key of NAMES."""
    return next(kind for kind, words in NAMES.items() if re.search(words, name.lower()))
