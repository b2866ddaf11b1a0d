"""Pictures of a run: which device holds what, losses, and a confusion matrix."""

import io
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from recipes.common.runtime.processes import is_first
from recipes.common.storage import folders, jsonl

Array = tuple[tuple[str, ...], tuple[int, ...], jax.sharding.NamedSharding]


def load_matplotlib() -> tuple[type, type]:
    """Matplotlib's Figure and canvas; not imported before a run needs them: it takes half a second."""
    import matplotlib

    matplotlib.set_loglevel("ERROR")  # "building the font cache"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    return Figure, FigureCanvasAgg


def _figure(columns: int, width: float = 4):
    """A figure with a row of axes, `width` × 4 inches each."""
    Figure, FigureCanvasAgg = load_matplotlib()
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
    _losses(axes, jsonl.read(metrics), f"Loss of {metrics.parent.name}")
    _save(figure, path)


class Curve(NamedTuple):
    """A run's losses, for `compare`."""

    name: str
    unit: str  # what `examples` counts: "tokens"
    loss_unit: str
    steps: list[int]
    examples: list[float]  # seen so far, for each of the steps
    seconds: list[float]  # of training so far
    losses: list[float]
    held_out: list[tuple[int, float, float, float]]  # (step, examples, seconds, held-out loss)


def compare(path: pathlib.Path, curves: Sequence[Curve]) -> None:
    """Draws the losses of several runs over steps, tokens and time, next to each other."""
    figure, all_axes = _figure(3, width=5)
    units = " or ".join(sorted({curve.unit for curve in curves}))
    loss_units = " or ".join(sorted({curve.loss_unit for curve in curves}))
    seen = max(curve.examples[-1] for curve in curves)
    many, million = ("million ", 1e6) if seen >= 1e6 else ("", 1)
    seconds = max(curve.seconds[-1] for curve in curves)
    clock, second = ("hours", 3600) if seconds >= 7200 else ("minutes", 60)
    if seconds < 120:
        clock, second = "seconds", 1
    scales = (
        ("step", 1, lambda curve: curve.steps),
        (many + units, million, lambda curve: curve.examples),
        (f"{clock} of training", second, lambda curve: curve.seconds),
    )
    for place, (axes, (label, scale, of)) in enumerate(zip(all_axes, scales, strict=True)):
        xs = []
        for number, curve in enumerate(curves):
            color = f"C{number}"
            places = [x / scale for x in of(curve)]
            points = [(point[place] / scale, point[-1]) for point in curve.held_out]
            axes.plot(places, curve.losses, color=color, label=curve.name)
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=color, clip_on=False)
            xs += [*places, *(x for x, _ in points)]
        _label(axes, label, loss_units, xs)
    names = f"{len(curves)} runs" if curves[1:] else curves[0].name
    all_axes[0].set_title(f"Loss of {names}; points: held out")
    all_axes[0].legend()
    _save(figure, path)


def _save(figure, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    folders.write(path, picture.getvalue())


def _losses(axes, lines: list[dict[str, Any]], title: str) -> None:
    """Training loss as a line, held-out loss as points, over steps."""
    steps = [line["step"] for line in lines if line.get("loss") is not None]
    for key, style, label in (("loss", "-", "training"), ("held_out_loss", "o", "held-out")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, clip_on=False)
            steps += [step for step, _ in points]
    axes.set(title=title)
    _label(axes, "step", loss_unit(lines), steps)
    if axes.lines:
        axes.legend()


def loss_unit(lines: list[dict[str, Any]]) -> str:
    """The unit of a run's loss, from its lines of metrics.jsonl."""
    names = {name for line in lines for name in line}
    if "tokens_per_second" in names or "held_out_perplexity" in names:
        return "nats per token"
    return "nats per example" if names & {"accuracy", "held_out_accuracy"} else "loss"


def _label(axes, xlabel: str, unit: str, xs: Sequence[float]) -> None:
    """Labels a plot of losses: a logarithmic scale, plain numbers, from the first step on."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    values = [float(y) for line in axes.lines for y in line.get_ydata() if y > 0]
    axes.set(xlabel=xlabel, ylabel=unit if unit == "loss" else f"loss, {unit}")
    plain = FuncFormatter(lambda x, _: f"{x:,.6g}")
    axes.xaxis.set_major_formatter(plain)
    by_step = xlabel == "step"
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10], integer=by_step))
    first = min([*xs, 1]) if by_step else 0
    if xs and first < max(xs):
        axes.set_xlim(first, max(xs))
    if values:
        axes.set_yscale("log")
        # In a range below 10, a scale of powers would have one number, or none.
        wide = max(values) / min(values) > 10
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(plain)


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
    _losses(left, jsonl.read(metrics), f"Loss of {metrics.parent.name}")
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
