"""Devices in groups that are wired together: the slices of TPUs, the nodes of GPUs.

Between groups the network is slow, so the outermost axes of a mesh run across them and the others
stay inside one: only what sharding rules send over the outermost axes crosses.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np

WORDS = {"tpu": "slices", "gpu": "nodes", "cpu": "processes"}  # platform → what the groups are


def groups(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each slice or node, in the order of their numbers.

    Simulated devices are grouped by process, as JAX has all those of a machine in one slice. TPUs of
    a single slice need not have its number.
    """
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        number = 0 if device.platform == "tpu" else device.process_index
        if device.platform != "cpu":
            number = getattr(device, "slice_index", number)
        found.setdefault(number, []).append(device)
    return [found[number] for number in sorted(found)]


def across(axes: dict[str, int], count: int) -> dict[str, int]:
    """Into how many parts each axis is divided between `count` groups, the outermost first.

    >>> across({"data": 8, "model": 4}, 2), across({"data": 2, "fsdp": 2, "model": 8}, 4)
    ({'data': 2, 'model': 1}, {'data': 2, 'fsdp': 2, 'model': 1})
    """
    parts = {}
    for name, size in axes.items():
        parts[name] = math.gcd(size, count)
        count //= parts[name]
    return parts


def cut(axes: dict[str, int], parts: dict[str, int]) -> str:
    """The first axis that is divided, but is neither the outermost nor divided whole; "" if none is.

    >>> cut({"data": 1, "model": 32}, {"data": 1, "model": 2})
    'model'
    """
    whole = True  # whether all axes further out lie across groups, with none of them inside one
    for place, (name, size) in enumerate(axes.items()):
        if parts[name] > 1 and (not whole or (place and parts[name] < size)):
            return name
        whole = whole and parts[name] == size
    return ""


def uncut(axes: dict[str, int], count: int, each: int) -> dict[str, int]:
    """The mesh most like this one that divides the first axis between `count` groups of `each`.

    >>> uncut({"data": 1, "model": 32}, 2, 16), uncut({"data": 3, "model": 2}, 2, 3)
    ({'data': 2, 'model': 16}, {'data': 6, 'model': 1})
    """
    first, *inner = axes
    fits: dict[str, int] = {}
    for name in reversed(inner):  # the innermost keeps as much as it can
        fits = {name: math.gcd(axes[name], each // math.prod(fits.values()))} | fits
    return {first: count * each // math.prod(fits.values())} | fits


def weave(axes: dict[str, int], parts: dict[str, int], blocks: Sequence[np.ndarray]) -> np.ndarray:
    """The devices of a whole mesh from those of its groups, in their order.

    Args:
      parts: as from `across`.
      blocks: for each group its devices, each dim being axes[name] / parts[name] long.
    """
    devices = np.stack(blocks).reshape(*parts.values(), *blocks[0].shape)
    order = [place for i in range(len(axes)) for place in (i, len(axes) + i)]
    return devices.transpose(order).reshape(tuple(axes.values()))
