"""Meshes from --mesh ("4x2"), with simulated devices if there is no accelerator.

One size is the axis `data`; two are `data` and `model`; three are `data`, `fsdp` and `model`. Any
other set of axes is written by name, "data=2,model=4". Axes are sorted by ORDER, however they are
written; only `pipe` comes first if it is written first, so that stages lie on different slices.
"""

import contextlib
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from recipes.common.runtime import accelerators, processes, slice_groups
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import split

AXES = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}
ORDER = ("data", "fsdp", "pipe", "seq", "expert", "model")  # outermost first; other axes follow
MOST_SIMULATED = 1024  # devices; each is a thread or more of this process


def parse(text: str) -> dict[str, int]:
    """Axis name → size, outermost first. Raises UserError if `text` is not a mesh.

    >>> parse("4x2"), parse("model=4, data=2")
    ({'data': 4, 'model': 2}, {'data': 2, 'model': 4})
    """
    hint = "write sizes (8, 4x2, 2x2x2) or names (data=2,model=4)"
    if len(text) > 100:
        raise UserError(f"--mesh={text[:50]}… is not a mesh; {hint}")
    if "=" in text:
        axes: dict[str, int] = {}
        for part in split(text):
            match = re.fullmatch(r"([a-z_][a-z0-9_]*)=([0-9]+)", part)
            if not match:
                raise UserError(f"--mesh={text}: {part!r} is not name=size; {hint}")
            if match[1] in axes:
                raise UserError(f"--mesh={text} names axis {match[1]!r} twice; name each once")
            axes[match[1]] = int(match[2])
        order = [axis for axis in ORDER if axis in axes]
        if next(iter(axes)) == "pipe":
            order = ["pipe", *(axis for axis in order if axis != "pipe")]
        axes = {axis: axes[axis] for axis in order + [a for a in axes if a not in order]}
    else:
        if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
            raise UserError(f"--mesh={text} is not a mesh; {hint}")
        sizes = [int(size) for size in text.split("x")]
        if len(sizes) not in AXES:
            raise UserError(
                f"--mesh={text} has {len(sizes)} sizes, but only 3 axes have default names; {hint}"
            )
        axes = dict(zip(AXES[len(sizes)], sizes, strict=True))
    if 0 in axes.values():
        raise UserError(f"--mesh={text} has an axis of size 0; give an unused axis size 1")
    return axes


def make_mesh(text: str = "") -> Mesh:
    """Makes a mesh over the run's devices; "" puts all of them on `data`.

    Without an accelerator, CPU devices are simulated, split evenly between processes, unless JAX
    has created its devices already. With accelerators the mesh must use all devices. Raises
    UserError if it can't, and in a recipe if there is an accelerator that JAX can't use.
    """
    axes = parse(text) if text else {}
    wanted = math.prod(axes.values())
    if wanted > MOST_SIMULATED and _only_cpu():
        raise UserError(
            f"--mesh={text} needs {wanted} devices, but at most {MOST_SIMULATED} can be simulated; "
            "try --mesh=4x2"
        )
    if axes and wanted % (several := processes.count()):
        existing = (8 * several, several)
        if not _only_cpu():
            existing = (len(jax.devices()), len(slice_groups.groups(jax.devices())))
        raise UserError(
            f"--mesh={text} has {wanted} devices, not divisible by {several} processes; try --mesh="
            f"{suggest(existing[0], len(axes), existing[1])}"
        )
    per_process = wanted // processes.count()
    if axes and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # A collective blocks one thread of XLA's pool per device, and a device may be in two at once:
        # of two programs, or of one, such as a tower's beside a decoder's. By default the pool has one
        # thread per device or core, and gemma4_vision deadlocks.
        os.environ.setdefault("NPROC", str(2 * per_process + (os.cpu_count() or 1)))
        with contextlib.suppress(RuntimeError):  # JAX has already created its devices: use those
            configured = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_num_cpu_devices", max(per_process, configured))
    devices = jax.devices()
    accelerators.check(devices[0].platform)
    axes = axes or {"data": len(devices)}
    wanted = math.prod(axes.values())
    must_use_all = devices[0].platform != "cpu" or processes.count() > 1
    if wanted > len(devices) or (must_use_all and wanted != len(devices)):
        raise UserError(
            f"--mesh={text} needs {wanted} devices, found {len(devices)}; "
            f"try --mesh={suggest(len(devices), len(axes), len(slice_groups.groups(devices)))}"
        )
    return arrange(axes, devices[:wanted])


def arrange(axes: dict[str, int], devices: Sequence[Any]) -> Mesh:
    """Makes a mesh of Explicit axes, JAX's default, over these devices.

    The outermost axes run across slices or nodes (slice_groups.py); on a TPU slice each axis runs along
    whole rings. Raises UserError if an inner axis would have to cross slices.
    """
    groups = slice_groups.groups(devices)
    what, sizes = (
        slice_groups.WORDS.get(devices[0].platform, "nodes"),
        {len(group) for group in groups},
    )
    if len(sizes) > 1:
        sizes = " and ".join(map(str, sorted(sizes)))
        raise UserError(f"{what} of {sizes} devices can't be one mesh; use {what} of one size")
    parts, each = slice_groups.across(axes, len(groups)), len(groups[0])
    if name := slice_groups.cut(axes, parts):
        raise UserError(
            f"--mesh={describe(axes)} would divide axis {name!r} between {len(groups)} {what} of "
            f"{each} devices, but only the outermost may be; try "
            f"--mesh={describe(slice_groups.uncut(axes, len(groups), each))}"
        )
    inside = tuple(size // parts[name] for name, size in axes.items())
    together = slice_groups.weave(axes, parts, [_on_rings(inside, group) for group in groups])
    return Mesh(together, tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


def _on_rings(sizes: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """Arranges a group's devices; axes share rings only if needed (16x16 on chips wired 4x8x8)."""
    names = tuple(f"axis{i}" for i in range(len(sizes)))
    try:
        return jax.make_mesh(sizes, names, devices=devices).devices
    except NotImplementedError:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def suggest(devices: int, axes: int, groups: int = 1) -> str:
    """A --mesh with this many axes over the devices of `groups` slices or nodes.

    Inner axes get size 2 if it divides.
    """
    sizes, left = [], devices // groups
    for _ in range(min(axes, 3) - 1):
        sizes.append(2 if left % 2 == 0 else 1)
        left //= sizes[-1]
    return "x".join(str(size) for size in [left * groups, *sizes])


def describe(axes: dict[str, int]) -> str:
    """Formats a mesh for --mesh, in the short form if there is one.

    >>> describe({"data": 4, "model": 2}), describe({"data": 2, "fsdp": 4})
    ('4x2', 'data=2,fsdp=4')
    """
    if AXES.get(len(axes)) == tuple(axes):
        return "x".join(str(size) for size in axes.values())
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _only_cpu() -> bool:
    platforms = jax.config.jax_platforms or ""  # pyright: ignore[reportAttributeAccessIssue]
    return platforms.split(",")[0] == "cpu" or jax.default_backend() == "cpu"
