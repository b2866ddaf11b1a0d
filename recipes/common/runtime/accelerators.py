"""Accelerators that this machine has and JAX can't use: a training run must not ignore them."""

import importlib.metadata
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from recipes.common.runtime.errors import UserError

GOOGLE = "0x1ae0"  # the PCI vendor of TPUs
NO_GPUS = ("", "-1", "none", "NoDevFiles", "void")  # values of variables that hide all GPUs

_must_use = False  # whether this command may not ignore an accelerator


class Idle(NamedTuple):
    """An accelerator that JAX does not use."""

    what: str
    sign: str  # the path that shows it
    plugins: tuple[str, ...]  # packages with which JAX can use it
    install: str
    known_problem: str  # what to check if one of them is installed


GPU = Idle(
    "an NVIDIA GPU", "", ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    'pip install -U "jax[cuda13]" (with a driver older than 580: "jax[cuda12]")',
    "check the driver with nvidia-smi: CUDA 13 needs 580 or newer, CUDA 12 525",
)  # fmt: skip
TPU = Idle(
    "a TPU", "", ("libtpu",), 'pip install -U "jax[tpu]"',
    "check that no other process holds it, and that jax and libtpu are of one installation",
)  # fmt: skip


def choose(platform: str) -> None:
    """Applies --platform, before JAX creates its devices.

    Args:
      platform: "cpu": simulated devices, whatever else there is; "": accelerators, and CPU devices
        only where there are none.

    Raises UserError for other platforms.
    """
    if platform not in ("", "cpu"):
        raise UserError(
            f"--platform={platform} is not cpu; leave it out: accelerators are used if there are any"
        )
    global _must_use
    _must_use = True
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        os.environ["JAX_PLATFORMS"] = "cpu"  # cluster.py then looks for no other TPU hosts


def check(used: str) -> None:
    """Raises UserError if JAX uses CPUs, unasked, on a machine with an accelerator.

    Args:
      used: the platform of JAX's devices.
    """
    asked = (jax.config.jax_platforms or "").split(",")[0] == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
    if _must_use and used == "cpu" and not asked and (problem := unused()):
        raise UserError(problem)


def unused(
    root: pathlib.Path = pathlib.Path("/"),
    environment: Mapping[str, str] = os.environ,
    installed: Callable[[str], bool] | None = None,
) -> str:
    """Describes an accelerator of this machine that JAX does not use; "" if there is none.

    Args:
      root, environment, installed: of this machine, unless a test gives others.
    """
    idle = find(root, environment)
    if idle is None:
        return ""
    plugins = [name for name in idle.plugins if (installed or _installed)(name)]
    fix = f"run {idle.install}"
    if plugins:
        fix = f"{plugins[0]} is installed, so {idle.known_problem}"
    return (
        f"this machine has {idle.what} ({idle.sign}) that JAX can't use; {fix}; or add "
        "--platform=cpu to use simulated CPU devices"
    )


def find(root: pathlib.Path, environment: Mapping[str, str]) -> Idle | None:
    """The accelerator that a machine's files show, unless its environment hides it."""
    hidden = any(environment.get(name, "0") in NO_GPUS for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))  # fmt: skip
    gpus = ["dev/nvidiactl", "dev/nvidia0", "proc/driver/nvidia/version", "usr/lib/wsl/lib/libcuda.so.1"]  # fmt: skip
    for sign in [] if hidden else gpus:
        if (root / sign).exists():
            return GPU._replace(sign=f"/{sign}")
    for sign in sorted(root.glob("dev/accel[0-9]*")):
        return TPU._replace(sign=f"/{sign.relative_to(root)}")
    # Other devices are given to programs by vfio too: these are a TPU's if Google made one.
    vendors = (_read(path) for path in root.glob("sys/bus/pci/devices/*/vendor"))
    chips = sorted(root.glob("dev/vfio/[0-9]*"))
    if chips and GOOGLE in vendors:
        return TPU._replace(sign=f"/{chips[0].relative_to(root)}")
    return None


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False
