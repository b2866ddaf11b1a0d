"""Pictures of a run, as PNG files: who holds what, how the loss fell, what is taken for what."""

import json
import pathlib

import jax
import numpy as np

from recipes.common.processes import is_first

Array = tuple[tuple[str, ...], tuple[int, ...], jax.sharding.NamedSharding]


def _figure(columns: int):
    """A row of axes in the house's size. Imported here: it takes half a second, at a run's end."""
    import matplotlib

    matplotlib.set_loglevel("error")  # "building the font cache"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * columns, 4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)  # no window, no global state
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def layouts(path: pathlib.Path, arrays: dict[str, Array]) -> None:
    """Draws matrices, each as the parts that devices hold.

    Args:
      arrays: name → (logical axes of its two dims, shape, sharding).
    """
    if not is_first():
        return
    figure, all_axes = _figure(len(arrays))
    for axes, (name, ((down, across), (rows, columns), sharding)) in zip(
        all_axes, arrays.items(), strict=True
    ):
        holders: dict[tuple, list[int]] = {}
        for device, (r, c) in sharding.devices_indices_map((rows, columns)).items():
            part = (r.start or 0, r.stop or rows, c.start or 0, c.stop or columns)
            holders.setdefault(part, []).append(device.id)
        for (top, bottom, left, right), devices in holders.items():
            box = (left, top), right - left, bottom - top
            hue = sorted(holders).index((top, bottom, left, right)) / len(holders)
            axes.add_patch(_rectangle(*box, hue))
            text = "all" if len(devices) == sharding.mesh.size > 1 else ", ".join(map(str, devices))
            axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
        axes.set(xlim=(0, columns), ylim=(rows, 0), title=name, xlabel=f"{across} ({columns})")
        axes.set_ylabel(f"{down} ({rows})")
    figure.savefig(path)


def _rectangle(corner, width, height, hue):
    from matplotlib.colors import hsv_to_rgb
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=hsv_to_rgb((hue, 0.35, 1)), edgecolor="black")


def learning(path: pathlib.Path, metrics: pathlib.Path, confusion_CC: np.ndarray) -> None:
    """Draws the loss curve of metrics.jsonl, and a confusion matrix: row true, column predicted."""
    if not is_first():
        return
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    curve = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    figure, (left, right) = _figure(2)
    left.semilogy(*np.array(curve).T)
    left.set(xlabel="step", ylabel="training loss (nats)", title="Loss")
    share_CC = confusion_CC / np.maximum(confusion_CC.sum(axis=1, keepdims=True), 1)
    right.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(confusion_CC):
        if count:
            dark = "white" if share_CC[row, column] > 0.5 else "black"
            right.text(column, row, int(count), ha="center", va="center", color=dark, fontsize=7)
    ticks = range(len(confusion_CC))
    right.set(xlabel="predicted", ylabel="true", title="Held-out", xticks=ticks, yticks=ticks)
    figure.savefig(path)
