"""Groups of devices with a fast network inside: TPU slices, GPU nodes.

The network between groups is slow, so only the outermost axes of a mesh cross it; inner axes stay
inside a group. One may be divided in part: the outermost, or `seq`, since a long row may need the
devices of several groups.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

WORDS = {"tpu": "slices", "gpu": "nodes", "cpu": "processes"}  # platform → name of its groups


def groups(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each slice or node, sorted by its number.

    Simulated devices are grouped by process, because JAX puts a whole machine's into one slice. TPUs
    of a single slice may lack its number.
    """
    by_group: dict[int, list[Any]] = {}
    for device in devices:
        number = 0 if device.platform == "tpu" else device.process_index
        if device.platform != "cpu":
            number = getattr(device, "slice_index", number)
        by_group.setdefault(number, []).append(device)
    return [by_group[number] for number in sorted(by_group)]


def across(axes: dict[str, int], count: int) -> dict[str, int]:
    """Number of parts of each axis when a mesh is divided between `count` groups, outermost first.

    >>> across({"data": 8, "model": 4}, 2), across({"data": 2, "fsdp": 2, "model": 8}, 4)
    ({'data': 2, 'model': 1}, {'data': 2, 'fsdp': 2, 'model': 1})
    """
    parts = {}
    for name, size in axes.items():
        parts[name] = math.gcd(size, count)
        count //= parts[name]
    return parts


def cut(axes: dict[str, int], parts: dict[str, int]) -> str:
    """The first axis that is divided between groups but may not be; "" if there is none.

    The outermost axis may be divided in part, and so may `seq` after all outer ones; another one
    only entirely, after all outer ones.

    >>> cut({"data": 1, "model": 32}, {"data": 1, "model": 2})
    'model'
    >>> cut({"data": 1, "seq": 32}, {"data": 1, "seq": 2})
    ''
    """
    outer_is_split = True  # whether all axes further out lie entirely across groups
    for place, (name, size) in enumerate(axes.items()):
        in_part = not place or name == "seq"
        if parts[name] > 1 and (not outer_is_split or (parts[name] < size and not in_part)):
            return name
        outer_is_split = outer_is_split and parts[name] == size
    return ""


def uncut(axes: dict[str, int], count: int, each: int) -> dict[str, int]:
    """The most similar mesh that divides only the first axis, between `count` groups of `each`.

    >>> uncut({"data": 1, "model": 32}, 2, 16), uncut({"data": 3, "model": 2}, 2, 3)
    ({'data': 2, 'model': 16}, {'data': 6, 'model': 1})
    """
    first, *inner = axes
    fits: dict[str, int] = {}
    for name in reversed(inner):  # the innermost keeps as much as it can
        fits = {name: math.gcd(axes[name], each // math.prod(fits.values()))} | fits
    return {first: count * each // math.prod(fits.values())} | fits


def weave(axes: dict[str, int], parts: dict[str, int], blocks: Sequence[np.ndarray]) -> np.ndarray:
    """Joins the groups' devices into one mesh, keeping the order of groups.

    Args:
      parts: the result of `across`.
      blocks: the devices of each group, shaped axes[name] / parts[name] in each dim.
    """
    devices = np.stack(blocks).reshape(*parts.values(), *blocks[0].shape)
    order = [place for i in range(len(axes)) for place in (i, len(axes) + i)]
    return devices.transpose(order).reshape(tuple(axes.values()))
