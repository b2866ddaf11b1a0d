"""A plan as a self-contained page: memory and bytes as bars, and which device holds what."""

import html
import math

from recipes.common.analysis.answer import (
    HEAD,
    cells,
    command,
    group,
    mesh_of,
    notes,
    why_first,
    why_others_lose,
)  # fmt: skip
from recipes.common.analysis.estimate import Estimate
from recipes.common.analysis.report import size
from recipes.common.analysis.search import Plan, usable
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.rules import mesh_axes

SHOWN = 64  # devices in the grid
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #59636e; --page: #fff; --line: #d1d9e0;
  --a: #3b6fb6; --b: #c2571a; --c: #2f8052; --d: #8250b0; --e: #a3790a; --cell: #eef3fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #9198a1; --page: #0d1117;
  --line: #3d444d; --a: #6ea1e8; --b: #e58a4e; --c: #5dbb84; --d: #b58ae0; --e: #d3ab45;
  --cell: #1b2533; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; } small, .key { color: var(--dim); }
.row { display: grid; grid-template-columns: 15rem 1fr 7rem; gap: .8rem; align-items: center;
  font-size: 13px; margin: .2rem 0; } .track { position: relative; display: flex; height: 1.1rem; }
.limit { position: absolute; top: -2px; bottom: -2px; border-left: 2px dashed var(--ink); }
.key .limit { position: static; margin: 0 .3rem 0 .9rem; }
.a { background: var(--a); } .b { background: var(--b); } .c { background: var(--c); }
.d { background: var(--d); } .e { background: var(--e); }
.key i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .9rem; }
.grid { display: grid; gap: 4px; font-size: 11px; } .grid div { background: var(--cell);
  padding: .3rem; border-radius: 4px; } pre { background: var(--cell); padding: .7rem;
  white-space: pre-wrap; }
"""


def page(plan: Plan, shown: list[Estimate], entry: str, size_name: str) -> str:
    """The whole page."""
    best, where = plan.best or shown[0], group(plan.devices)
    title = html.escape(f"{entry} {size_name} on {plan.devices}")
    text = why_first(plan) if plan.best else "Nothing fits."
    run = f"<pre>{html.escape(command(entry, size_name, best))}</pre>" if plan.best else ""
    purposes = list(best.memory)
    sent: list[dict[str, float]] = [{"inside": x.links, "between": x.network} for x in shown]
    body = [
        f"<h1>{title}</h1>",
        f"<p>{html.escape(text)}</p>{run}",
        _table(shown),
        *(f"<p><small>{html.escape(note)}</small></p>" for note in notes(plan)),
        f"<h2>Memory of a device</h2>{_key(purposes, f'usable: {size(usable(plan.devices))}')}",
        *_bars(shown, [x.memory for x in shown], usable(plan.devices)),
        f"<h2>Bytes that a device sends in a step</h2>{_key([f'{x} {where}s' for x in sent[0]])}",
        *_bars(shown, sent, 0.0),
        f"<h2>Which device holds what</h2>{_grid(best)}",
        "<h2>Why others lose</h2><ul>",
        *(f"<li>{html.escape(x.removeprefix('- '))}</li>" for x in why_others_lose(plan)),
        "</ul>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>'
        + "\n".join(body)
        + "</body></html>\n"
    )


def _table(shown: list[Estimate]) -> str:
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    rows = ("".join(f"<td>{html.escape(x)}</td>" for x in cells(candidate)) for candidate in shown)
    lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>\n{lines}</table></div>'


def _key(names: list[str], limit: str = "") -> str:
    """The meaning of the colors and of the dashed line."""
    each = [f'<i class="{c}"></i>{name}' for c, name in zip("abcde", names, strict=False)]
    if limit:
        each.append(f'<span class="limit"></span>{limit}')
    return f'<p class="key">{"".join(each)}</p>'


def _bars(shown: list[Estimate], parts: list[dict[str, float]], limit: float) -> list[str]:
    """A stacked bar for each candidate, with a line at `limit` bytes unless that is 0."""
    most = max(limit, *(sum(x.values()) for x in parts)) or 1.0
    line = f'<span class="limit" style="left:{limit / most:.2%}"></span>' if limit else ""
    lines = []
    for candidate, found in zip(shown, parts, strict=True):
        bars = "".join(
            f'<span class="{color}" style="width:{count / most:.2%}" '
            f'title="{name}: {size(count)}"></span>'
            for color, (name, count) in zip("abcde", found.items(), strict=False)
        )
        name = html.escape(f"{candidate.layout.strategy} on {mesh_of(candidate)}")
        total = size(sum(found.values()))
        lines.append(f'<div class="row"><span>{name}</span><div class="track">{bars}{line}</div>'
                     f"<span>{total}</span></div>")  # fmt: skip
    return lines


def _grid(best: Estimate) -> str:
    """For each device, which part of the largest weight and of an activation it holds."""
    layout, mesh = best.layout, dict(best.layout.mesh.shape)
    shapes, axes = (paths(x["params"]) for x in (layout.model.shapes, layout.model.axes))
    path = max(shapes, key=lambda name: shapes[name].size)
    rest = layout.rules | dict.fromkeys(layout.uneven)
    inner = tuple(mesh.values())[-1] if len(mesh) > 1 else 8
    columns = max(min(inner, 8), 4)
    lines = [
        f"<p>The weight <code>{path}</code> {list(shapes[path].shape)} at rest, and the rows of a batch"
        f"{' and their positions' if layout.seq_len else ''}; "
        f"{min(SHOWN, math.prod(mesh.values()))} of {math.prod(mesh.values())} devices.</p>",
        f'<div class="grid" style="grid-template-columns:repeat({columns},1fr)">',
    ]
    for device in range(min(SHOWN, math.prod(mesh.values()))):
        place, left = {}, device
        for axis in reversed(mesh):
            left, place[axis] = divmod(left, mesh[axis])

        def part(axis, rules, place=place):
            index, count = 0, 1
            for name in mesh_axes(rules[axis]):
                index, count = index * mesh[name] + place[name], count * mesh[name]
            return f"{index + 1}/{count}" if count > 1 else "all"

        weight = " · ".join(f"{axis} {part(axis, rest)}" for axis in axes[path])
        batch = " · ".join(f"{axis} {part(axis, layout.rules)}" for axis in layout.batch_axes)
        lines.append(f"<div><b>{device}</b><br>{weight}<br><small>{batch}</small></div>")
    return "\n".join([*lines, "</div>"])
