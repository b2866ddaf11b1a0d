"""Pictures: who holds what, as SVG and PNG; how the loss fell, and which classes are confused."""

import io
import pathlib
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from recipes.common.analysis.report import bytes_per_device
from recipes.common.runtime import folders, jsonl
from recipes.common.runtime.processes import is_first
from recipes.common.sharding import Layout, paths

Array = tuple[tuple[str, ...], tuple[int, ...], jax.sharding.NamedSharding]

INK = {"light": ("#1f2328", "#d0d7de", "#0969da"), "dark": ("#e6edf3", "#3d444d", "#4493f8")}


def strategies(layouts: dict[str, Layout], background: str) -> str:
    """An SVG of a model's weights on the device grid, a panel for each layout.

    Each device shows every weight in outline, and filled the part that it holds.

    Args:
      layouts: title → where the weights lie; all of one model with matrices only.
      background: "light" or "dark".
    """
    ink, faint, fill = INK[background]
    scale, gap, pad, parts = 0.55, 10, 14, []
    text = '<text x="{:g}" y="{:g}" text-anchor="{}" font-size="{}" fill="{}">{}</text>'
    box = '<rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" fill="{}" stroke="{}"/>'
    left = pad
    for title, layout in layouts.items():
        arrays = paths(layout.variables()["params"])
        devices = layout.mesh.devices.reshape(-1)
        columns = 2
        cell = sum(a.shape[1] * scale + gap for a in arrays.values()) + gap
        tall = max(a.shape[0] for a in arrays.values()) * scale + 2 * gap + 14
        width = columns * cell + (columns - 1) * gap
        whole = sum(array.size * array.dtype.itemsize for array in arrays.values())
        share = Fraction(bytes_per_device(arrays), whole)
        holds = f"each device holds {share} of {' and '.join(arrays)}".replace("1 of", "all of")
        parts.append(text.format(left + width / 2, 22, "middle", 17, ink, title))
        parts.append(text.format(left + width / 2, 42, "middle", 13, ink, holds))
        for number, device in enumerate(devices):
            row, column = divmod(number, columns)
            x, y = left + column * (cell + gap), 54 + row * (tall + gap)
            parts.append(box.format(x, y, cell, tall, "none", faint))
            parts.append(text.format(x + gap, y + 17, "start", 12, ink, f"device {device.id}"))
            at = x + gap
            for array in arrays.values():
                (r, c), (high, wide) = (
                    array.sharding.devices_indices_map(array.shape)[device],
                    array.shape,
                )
                (top, bottom, _), (begin, end, _) = r.indices(high), c.indices(wide)
                held = (at + begin * scale, y + 24 + top * scale)
                size = ((end - begin) * scale, (bottom - top) * scale)
                parts.append(box.format(*held, *size, fill, fill))
                parts.append(box.format(at, y + 24, wide * scale, high * scale, "none", faint))
                at += wide * scale + gap
        left += width + 3 * pad
    height = 54 + -(-len(devices) // columns) * (tall + gap) + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left - 2 * pad:g} {height:g}" '
    return "\n".join([head + 'font-family="system-ui, sans-serif">', *parts, "</svg>\n"])


def _figure(columns: int, width: float = 4):
    """A row of axes in the house's size, in inches. Imported here: it takes half a second, at a run's end."""
    import matplotlib

    matplotlib.set_loglevel("error")  # "building the font cache"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = "constrained" if columns > 1 else None  # which takes as long as all the rest
    figure = Figure(figsize=(width * columns, 4), layout=layout, dpi=120)
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
            axes.add_patch(_rectangle(*box, hue=min(devices) / sharding.mesh.size))
            text = "all" if len(devices) == sharding.mesh.size > 1 else ", ".join(map(str, devices))
            axes.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
        axes.set(xlim=(0, columns), ylim=(rows, 0), title=name, xlabel=f"{across} ({columns})")
        axes.set_ylabel(f"{down} ({rows})")
    _save(figure, path)


def _rectangle(corner, width, height, hue):
    from matplotlib.colors import hsv_to_rgb
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=hsv_to_rgb((hue, 0.35, 1)), edgecolor="black")


def loss(path: pathlib.Path, metrics: pathlib.Path) -> None:
    """Draws the losses of metrics.jsonl, of the whole run, resumed or not."""
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


def learning(path: pathlib.Path, metrics: pathlib.Path, confusion_CC: np.ndarray) -> None:
    """Draws the losses of metrics.jsonl, and a confusion matrix: row true, column predicted."""
    if not is_first():
        return
    figure, (left, right) = _figure(2)
    _curve(left, jsonl.read(metrics))
    share_CC = confusion_CC / np.maximum(confusion_CC.sum(axis=1, keepdims=True), 1)
    right.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(confusion_CC):
        if count:
            dark = "white" if share_CC[row, column] > 0.5 else "black"
            right.text(column, row, int(count), ha="center", va="center", color=dark, fontsize=7)
    ticks = range(len(confusion_CC))
    right.set(xlabel="predicted", ylabel="true", title="Held-out", xticks=ticks, yticks=ticks)
    _save(figure, path)
