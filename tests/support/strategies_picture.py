"""Draws the README's picture of which device holds what under each strategy."""

from fractions import Fraction

from recipes.common.analysis.report import bytes_per_device
from recipes.common.sharding import Layout, paths

INK = {"light": ("#1f2328", "#d0d7de", "#0969da"), "dark": ("#e6edf3", "#3d444d", "#4493f8")}


def strategies(layouts: dict[str, Layout], background: str) -> str:
    """An SVG of a model's weights on a grid of devices, with a panel for each layout.

    Each device shows the outline of every weight, and fills the part that it holds.

    Args:
      layouts: title → layout; all of the same model, whose weights are all matrices.
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
