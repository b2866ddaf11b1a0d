"""Pictures of a run: which device holds what, losses, and a confusion matrix."""

import io
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from recipes.common.runtime import folders, jsonl
from recipes.common.runtime.processes import is_first

Array = tuple[tuple[str, ...], tuple[int, ...], jax.sharding.NamedSharding]


def _figure(columns: int, width: float = 4):
    """A figure with a row of axes, `width` × 4 inches each.

    matplotlib is imported here, at the end of a run, because that takes half a second.
    """
    import matplotlib

    matplotlib.set_loglevel("ERROR")  # "building the font cache"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = "constrained" if columns > 1 else None  # takes as long as everything else
    figure = Figure(figsize=(width * columns, 4), layout=layout, dpi=120)
    FigureCanvasAgg(figure)  # no window, no global state
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def layouts(path: pathlib.Path, arrays: dict[str, Array]) -> None:
    """Draws matrices, split into the parts that devices hold.

    Args:
      arrays: name → (logical axes of its two dims, shape, sharding).
    """
    if not is_first():
        return
    figure, all_axes = _figure(len(arrays))
    from matplotlib.colors import hsv_to_rgb
    from matplotlib.patches import Rectangle

    for axes, (name, ((down, across), (rows, columns), sharding)) in zip(
        all_axes, arrays.items(), strict=True
    ):
        holders: dict[tuple, dict[int, int]] = {}  # part → id of a device → its place on the mesh
        places = enumerate(sharding.devices_indices_map((rows, columns)).items())
        for place, (device, (r, c)) in places:
            part = (r.start or 0, r.stop or rows, c.start or 0, c.stop or columns)
            holders.setdefault(part, {})[device.id] = place
        for (top, bottom, left, right), devices in holders.items():
            color = hsv_to_rgb((min(devices.values()) / sharding.mesh.size, 0.35, 1))
            box = (left, top), right - left, bottom - top
            axes.add_patch(Rectangle(*box, facecolor=color, edgecolor="black"))
            text = "all" if len(devices) == sharding.mesh.size > 1 else ", ".join(map(str, devices))
            axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
        axes.set(xlim=(0, columns), ylim=(rows, 0), title=name, xlabel=f"{across} ({columns})")
        axes.set_ylabel(f"{down} ({rows})")
    _save(figure, path)


def loss(path: pathlib.Path, metrics: pathlib.Path) -> None:
    """Draws the losses of a whole run from metrics.jsonl."""
    if not is_first():
        return
    figure, (axes,) = _figure(1, width=6)
    _curve(axes, jsonl.read(metrics))
    _save(figure, path)


def _save(figure, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    folders.write(path, picture.getvalue())


def _curve(axes, lines: list[dict[str, Any]]) -> None:
    """Training loss as a line, held-out loss as points, over steps."""
    from matplotlib.ticker import LogFormatter

    for key, style, label in (("loss", "-", "training"), ("held_out_loss", "o", "held-out")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.semilogy(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel="loss", title="Loss")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(LogFormatter())  # 3 and 0.03, not powers of ten
    if axes.lines:
        axes.legend()


MOST = 20  # classes whose counts and names a confusion matrix has room for


def learning(
    path: pathlib.Path, metrics: pathlib.Path, confusion_CC: np.ndarray, names: Sequence[str] = ()
) -> None:
    """Draws the losses of metrics.jsonl and a confusion matrix: rows true, columns predicted.

    Args:
      names: names of the classes; empty: their numbers.
    """
    if not is_first():
        return
    figure, (left, right) = _figure(2)
    _curve(left, jsonl.read(metrics))
    share_CC = confusion_CC / np.maximum(confusion_CC.sum(axis=1, keepdims=True), 1)
    right.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    C = len(confusion_CC)
    for (row, column), count in np.ndenumerate(confusion_CC):
        if count and C <= MOST:
            dark = "white" if share_CC[row, column] > 0.5 else "black"
            right.text(column, row, int(count), ha="center", va="center", color=dark, fontsize=7)
    ticks = range(0, C, -(-C // MOST))
    right.set(xlabel="predicted", ylabel="true", title="Held-out", xticks=ticks, yticks=ticks)
    if names:
        shown = [names[i][:16] for i in ticks]
        long = max(map(len, shown)) > 2
        right.set_xticklabels(shown, rotation=90 if long else 0, fontsize=7 if long else None)
        right.set_yticklabels(shown, fontsize=7 if long else None)
    _save(figure, path)
