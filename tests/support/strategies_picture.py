"""Draws which device holds what under each strategy, and a weight at rest, in use and after a step."""

import math
from fractions import Fraction

import jax

from recipes.common.sharding import Layout, paths

INK = {  # text, outlines, weights, activations
    "light": ("#1f2328", "#d0d7de", "#0969da", "#e16f24"),
    "dark": ("#e6edf3", "#3d444d", "#4493f8", "#db6d28"),
}
ROWS, POSITIONS = 48, 128  # of a batch
PLACES = {"up": (0, 0), "down": (144, 0), "activations": (0, 80)}  # of arrays in a device's box
LEGEND = (
    "weights: the layers, and up [D, F] and down [F, D] of one of them",
    "activations between sublayers: rows down, positions across",
)
ACROSS = 4  # panels side by side
TEXT = '<text x="{:g}" y="{:g}" text-anchor="{}" font-size="{}" fill="{}">{}</text>'
LAYER = 9  # width and height of a layer's box
BOX = '<rect x="{:g}" y="{:g}" width="{:g}" height="{:g}" fill="{}" stroke="{}"/>'


def strategies(layouts: dict[tuple[str, str], Layout], background: str) -> str:
    """An SVG of an MLP's weights and of activations on a grid of devices, with a panel per layout.

    Each device shows the outline of every array, and fills the part that it holds. The small boxes
    in its corner are the layers.

    Args:
      layouts: (rules, mesh) → layout; all of the same Transformer, with embed 64 and mlp 128.
      background: "light" or "dark".
    """
    ink, faint, *fills = INK[background]
    scale, gap, between, top, parts = 0.5, 8, 32, 66, []
    cell, tall = 208 * scale + 2 * gap, 128 * scale + 20 + gap
    wide, high = 2 * cell + gap, top + 4 * (tall + gap)
    for panel, ((rules, mesh), layout) in enumerate(layouts.items()):
        left, above = gap + panel % ACROSS * (wide + between), panel // ACROSS * (high + gap)
        arrays = _arrays(layout)
        shares = [_share(arrays[name]) for name in ("up", "activations")]
        holds = f"{shares[0]} weights, {shares[1]} activations"
        for y, size, text in ((20, 17, rules), (39, 13, f"--mesh={mesh}"), (57, 13, holds)):
            parts.append(TEXT.format(left + wide / 2, above + y, "middle", size, ink, text))
        for number, device in enumerate(layout.mesh.devices.reshape(-1)):
            x = left + number % 2 * (cell + gap)
            y = above + top + number // 2 * (tall + gap)
            parts.append(BOX.format(x, y, cell, tall, "none", faint))
            parts.append(TEXT.format(x + gap, y + 15, "start", 12, ink, f"device {device.id}"))
            first, end = _layers(arrays["up"], device)
            for layer in range(layers := arrays["up"].shape[0]):
                at_x = x + cell - gap - (layers - layer) * LAYER
                fill = fills[0] if first <= layer < end else "none"
                parts.append(BOX.format(at_x, y + 6, LAYER, LAYER, fill, faint))
            for name, array in arrays.items():
                (rows, columns), (r, c) = array.shape[-2:], _part(array, device)
                at_x, at_y = x + gap + PLACES[name][0] * scale, y + 20 + PLACES[name][1] * scale
                held = at_x + c[0] * scale, at_y + r[0] * scale
                size = (c[1] - c[0]) * scale, (r[1] - r[0]) * scale
                fill = fills[name == "activations"]
                parts.append(BOX.format(*held, *size, fill, fill))
                parts.append(BOX.format(at_x, at_y, columns * scale, rows * scale, "none", faint))
    height = -(-len(layouts) // ACROSS) * (high + gap)
    for place, (text, fill) in enumerate(zip(LEGEND, fills, strict=True)):
        x = gap + 2 * place * (wide + between)
        parts.append(BOX.format(x, height + 4, 12, 12, fill, fill))
        parts.append(TEXT.format(x + 20, height + 15, "start", 14, ink, text))
    width = 2 * gap + ACROSS * (wide + between) - between
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height + 24:g}" '
    return "\n".join([head + 'font-family="system-ui, sans-serif">', *parts, "</svg>\n"])


def weight_in_a_step(layouts: dict[tuple[str, str], Layout], background: str) -> str:
    """An SVG of a weight at rest, in use and of its gradient on each device, with a row per layout.

    Args:
      layouts: (rules, mesh) → layout of a Transformer on eight devices.
      background: "light" or "dark".
    """
    ink, faint, fill, sums = INK[background]
    side, gap, arrow, label, high = 34, 14, 170, 110, 112
    group = 4 * (side + gap)
    columns = [label + place * (group + arrow) for place in range(3)]
    parts = [
        TEXT.format(x + group / 2, 18, "middle", 15, ink, title)
        for x, title in zip(columns, ("at rest", "in use", "gradient"), strict=True)
    ]
    for row, ((rules, mesh), layout) in enumerate(layouts.items()):
        top = 36 + row * high
        parts.append(TEXT.format(gap, top + 32, "start", 16, ink, rules))
        parts.append(TEXT.format(gap, top + 50, "start", 12, ink, f"--mesh={mesh}"))
        at_rest = paths(layout.variables()["params"])["layers/mlp/up"]
        in_use = layout.sharding(
            "layers", *(layout.names.in_use.get(a, a) for a in ("embed", "mlp"))
        )
        used = jax.ShapeDtypeStruct(at_rest.shape, at_rest.dtype, sharding=in_use)
        for x, array, color in zip(
            columns, (at_rest, used, at_rest), (fill, fill, sums), strict=True
        ):
            for number, device in enumerate(layout.mesh.devices.reshape(-1)):
                left = x + number % 4 * (side + gap)
                above = top + number // 4 * (side + gap)
                (first, last), (start, stop) = _part(array, device)
                rows, width = (side / size for size in array.shape[-2:])
                held = (stop - start) * width, (last - first) * rows
                parts.append(
                    BOX.format(left + start * width, above + first * rows, *held, color, color)
                )
                parts.append(BOX.format(left, above, side, side, "none", faint))
        for x, text in zip(columns, _sent(layout, at_rest, used), strict=False):
            middle = x + group + (arrow - gap) / 2
            parts.append(TEXT.format(middle, top + side, "middle", 13, ink, text))
            parts.append(TEXT.format(middle, top + side + 22, "middle", 20, ink, "→"))
    width, height = columns[-1] + group + gap, 36 + len(layouts) * high
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
    return "\n".join([head + 'font-family="system-ui, sans-serif">', *parts, "</svg>\n"])


def _sent(layout: Layout, at_rest: jax.ShapeDtypeStruct, used: jax.ShapeDtypeStruct) -> list[str]:
    """The collectives that bring a weight into use, and its gradient home."""
    rest, use, batch = (
        {axis for axis in layout.mesh.axis_names if axis in str(sharding.spec)}
        for sharding in (at_rest.sharding, used.sharding, layout.sharding("batch"))
    )
    gathers = ", ".join(sorted(rest - use))
    gradient = {"reduce-scatter": batch & (rest - use), "all-reduce": batch - rest}
    sums = [f"{kind} over {', '.join(sorted(axes))}" for kind, axes in gradient.items() if axes]
    return [f"all-gather over {gathers}" if gathers else "", "; ".join(sums)]


def _arrays(layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """Name → array with its sharding; a weight's first dim is that of the layers."""
    found, where = paths(layout.variables()["params"]), layout.sharding("batch", "residual_seq")
    arrays = {name: found[f"layers/mlp/{name}"] for name in ("up", "down")}
    batch = jax.ShapeDtypeStruct((ROWS, POSITIONS), "int32", sharding=where)
    return arrays | {"activations": batch}


def _part(array: jax.ShapeDtypeStruct, device: jax.Device) -> list[tuple[int, int]]:
    """(start, stop) of the part of the last two dims that a device holds."""
    index = array.sharding.devices_indices_map(array.shape)[device]
    return [s.indices(n)[:2] for s, n in zip(index[-2:], array.shape[-2:], strict=True)]


def _layers(array: jax.ShapeDtypeStruct, device: jax.Device) -> tuple[int, int]:
    """(first, end) of the layers of a stacked weight that a device holds."""
    first, end, _ = array.sharding.devices_indices_map(array.shape)[device][0].indices(
        array.shape[0]
    )
    return first, end


def _share(array: jax.ShapeDtypeStruct) -> str:
    """The share of an array that one device holds."""
    share = Fraction(math.prod(array.sharding.shard_shape(array.shape)), array.size)
    return "all" if share == 1 else f"{share} of"
