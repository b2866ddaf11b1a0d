"""A plan as a self-contained page: memory and bytes as bars, and which device holds what.

It is no view of the explorer, because it shows any plan, of a user's model too, where the explorer
(711 lines of Python, 599 of its page) has figures of the zoo's entries, computed beforehand. A view
would take a plan's figures as data and draw them in JavaScript: of the lines here, the style alone
would go.
"""

import html
import math
import re
from typing import NamedTuple

from recipes.common.report.report import size
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.rules import target_axes
from recipes.instruments.plan.answer import (
    HEAD,
    cells,
    command,
    distinct,
    duration,
    group,
    mesh_of,
    notes,
    tie_note,
    why_first,
    why_others_lose,
)  # fmt: skip
from recipes.instruments.plan.estimate import Estimate
from recipes.instruments.plan.search import TIE, Plan, usable

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
.row { display: grid; grid-template-columns: 18rem 1fr 5rem; gap: .8rem; align-items: center;
  font-size: 13px; margin: .2rem 0; } .track { position: relative; display: flex; height: 1.1rem; }
.limit { position: absolute; top: -2px; bottom: -2px; border-left: 2px dashed var(--ink); }
.key .limit { position: static; margin: 0 .3rem 0 .9rem; }
.a { background: var(--a); } .b { background: var(--b); } .c { background: var(--c); }
.d { background: var(--d); } .e { background: var(--e); }
.key i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .9rem; }
.grid { display: grid; gap: 4px; font-size: 11px; } .grid div { background: var(--cell);
  padding: .3rem; border-radius: 4px; } pre { background: var(--cell); padding: .7rem;
  white-space: pre-wrap; } pre span { white-space: nowrap; } svg { display: block; }
svg .whole { fill: var(--page); stroke: var(--dim); }
"""
# Between a number and its unit, a space where no line may break.
UNIT = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|s|ms|µs|ns)\b)")
NO_BREAK = "\u00a0"
EMPTY = {"-", "0 B"}  # cells of a column that is left out if it has no others
BOUNDS = {name: f"{name}{NO_BREAK}{sign}" for name, sign in zip(HEAD[-3:], "≥≤≤", strict=True)}


def page(plan: Plan, shown: list[Estimate], entry: str, size_name: str) -> str:
    """The whole page.

    Args:
      shown: the first candidates of the plan; rows that equal others are replaced by further ones.
    """
    best, where = plan.best or shown[0], group(plan.devices)
    shown, ties = _ordered(distinct(plan.ranked)[: len(shown)])
    left_out = [x for x in plan.per_strategy().values() if x not in distinct(plan.ranked)]
    title = html.escape(f"{entry} {size_name} on {plan.devices}")
    text = why_first(plan) if plan.best else "Nothing fits."
    flags = "".join(
        f"<span>{html.escape(word)}</span> " for word in command(entry, size_name, best).split()
    )
    run = f"<pre>{flags.rstrip()}</pre>" if plan.best and not plan.job.rules else ""
    sent: list[dict[str, float]] = [
        {f"inside {where}s": x.links, f"between {where}s": x.network} for x in shown
    ]
    losers = [
        html.escape(line.removeprefix("- "))
        for line in why_others_lose(plan)
        if not any(line.startswith(f"- {x.layout.strategy},") for x in left_out)
    ]
    body = [
        f"<h1>{title}</h1>",
        f"<p>{html.escape(text)}</p>{run}",
        *_table(shown, ties),
        *(
            f"<p><small>{html.escape(note)}</small></p>"
            for note in notes(plan)
            if note != tie_note(plan)
        ),
        f"<h2>Memory of a device</h2>{_key([x.memory for x in shown], usable(plan.devices))}",
        *_bars(shown, [x.memory for x in shown], usable(plan.devices)),
        f"<h2>Bytes that a device sends in a step</h2>{_key(sent)}",
        *_bars(shown, sent, 0.0),
        f"<h2>Which device holds what</h2>{_grid(best)}",
        *(
            ["<h2>Why others lose</h2><ul>", *(f"<li>{x}</li>" for x in losers), "</ul>"]
            * bool(losers)
        ),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>'
        + UNIT.sub(NO_BREAK, "\n".join(body))
        + "</body></html>\n"
    )


def _ordered(candidates: list[Estimate]) -> tuple[list[Estimate], int]:
    """(candidates, by the time of a step; how many at the start are ties, the simplest first)."""
    fastest = min((x.step for x in candidates if x.fits), default=0.0)
    ties = [x for x in candidates if x.fits and x.step <= TIE * fastest]
    slower = sorted((x for x in candidates if x.fits and x not in ties), key=lambda x: x.step)
    return [*ties, *slower, *(x for x in candidates if not x.fits)], len(ties)


def _table(shown: list[Estimate], ties: int) -> list[str]:
    """The candidates, without columns that are empty in all of them, and what their order means."""
    rows = [cells(candidate) for candidate in shown]
    step = HEAD.index("step")
    if ties > 1:
        for row in rows[:ties]:
            row[step] = f"≈{NO_BREAK}{row[step]}"
    kept = [i for i in range(len(HEAD)) if not {row[i] for row in rows} <= EMPTY]
    head = "".join(f"<th>{BOUNDS.get(HEAD[i], HEAD[i])}</th>" for i in kept)
    lines = "\n".join(
        f"<tr>{''.join(f'<td>{html.escape(row[i])}</td>' for i in kept)}</tr>" for row in rows
    )
    return [
        f'<div class="wide"><table><tr>{head}</tr>\n{lines}</table></div>',
        f'<p class="order">{html.escape(_order(shown, ties))}</p>',
    ]


def _order(shown: list[Estimate], ties: int) -> str:
    """Sentences below the table."""
    if not ties:
        return "Ordered by memory, as none fits."
    order = "Ordered by the time of a step."
    if ties > 1:
        fastest = duration(min(x.step for x in shown[:ties]))
        order = (
            "Ordered by the time of a step, except that those with ≈ count as equal: they are within "
            f"{TIE - 1:.0%} of the fastest, {fastest}, less than the estimate's error. Of these the "
            "simplest comes first: fewest mesh axes, then the order of RULES."
        )
    if not all(x.fits for x in shown):
        order += " Those that do not fit come last, by memory."
    if any(x.layout.shape.matmul for x in shown):
        order += " MFU is in multiples of the bfloat16 peak."
    return order


def _key(parts: list[dict[str, float]], limit: float = 0.0) -> str:
    """The meaning of the colors, of those parts that any candidate has, and of the dashed line."""
    each = [
        f'<i class="{color}"></i>{name}'
        for color, name in zip("abcde", parts[0], strict=False)
        if any(part[name] for part in parts)
    ]
    if limit:
        each.append(f'<span class="limit"></span>usable: {size(limit)}')
    return f'<p class="key">{"".join(each)}</p>'


def _bars(shown: list[Estimate], parts: list[dict[str, float]], limit: float) -> list[str]:
    """A stacked bar for each candidate, with a line at `limit` bytes unless that is 0."""
    most = max(limit, *(sum(x.values()) for x in parts)) or 1.0
    line = f'<span class="limit" style="left:{limit / most:.2%}"></span>' if limit else ""
    lines = []
    for candidate, memory in zip(shown, parts, strict=True):
        bars = "".join(
            f'<span class="{color}" style="width:{count / most:.2%}" '
            f'title="{name}: {size(count)}"></span>'
            for color, (name, count) in zip("abcde", memory.items(), strict=False)
        )
        name = html.escape(f"{candidate.layout.strategy} on {mesh_of(candidate)}")
        total = size(sum(memory.values()))
        lines.append(f'<div class="row"><span>{name}</span><div class="track">{bars}{line}</div>'
                     f"<span>{total}</span></div>")  # fmt: skip
    return lines


class Part(NamedTuple):
    """The part of a dim that a device holds."""

    axis: str  # the dim's logical axis
    index: int
    count: int  # parts of the dim; 1: the device holds all of it

    def __str__(self) -> str:
        return f"{self.axis} {self.index + 1}/{self.count}"


def _grid(best: Estimate) -> str:
    """Draws for each device which part of the largest weight and of a batch it holds."""
    layout, mesh = best.layout, dict(best.layout.mesh.shape)
    shapes, axes = (paths(x["params"]) for x in (layout.model.shapes, layout.model.axes))
    path = max(shapes, key=lambda name: shapes[name].size)
    rest = layout.rules | dict.fromkeys(layout.uneven)
    inner = tuple(mesh.values())[-1] if len(mesh) > 1 else 8
    columns = max(min(inner, 8), 4)
    count = math.prod(mesh.values())
    batch_axes = layout.batch_axes
    lines = [
        f"<p>Left, the weight <code>{path}</code> {list(shapes[path].shape)} at rest "
        f"({' × '.join(axes[path])}); right, a batch ({' × '.join(batch_axes)}). Down and across are the dims "
        "that are split, with a bar next to them for a third. The colored part is what "
        f"the device holds; equal colors are equal parts. {min(SHOWN, count)} of {count} devices.</p>",
        f'<div class="grid" style="grid-template-columns:repeat({columns},1fr)">',
    ]
    for device in range(min(SHOWN, count)):
        place, left = {}, device
        for axis in reversed(mesh):
            left, place[axis] = divmod(left, mesh[axis])

        def part(axis, rules, place=place) -> Part:
            index, parts = 0, 1
            for name in target_axes(rules[axis]):
                index, parts = index * mesh[name] + place[name], parts * mesh[name]
            return Part(axis, index, parts)

        weight = [part(axis, rest) for axis in axes[path]]
        batch = [part(axis, layout.rules) for axis in batch_axes]
        picture = _box(weight, 0) + _box(batch, 74)
        words = [" · ".join(str(x) for x in held if x.count > 1) for held in (weight, batch)]
        what = (
            "<br>".join(f"<small>{line}</small>" for line in words if line) or "<small>all</small>"
        )
        lines.append(
            f'<div><b>{device}</b><svg viewBox="0 0 140 44" role="img">{picture}</svg>{what}</div>'
        )
    return "\n".join([*lines, "</div>"])


def _box(parts: list[Part], left: int) -> str:
    """SVG of an array, 64 × 40, with the part that a device holds in color.

    The last two dims that are split are down and across; each earlier one is a bar next to the box.
    """
    unsplit = Part("", 0, 1)
    split = [part for part in parts if part.count > 1]
    *earlier, down, across = [unsplit, unsplit, *split]
    if len(split) == 1 and split[0] is not parts[-1]:
        down, across = split[0], unsplit
    color, every = 0, 1
    for part in parts:
        color, every = color * part.count + part.index, every * part.count
    fill = f"hsl({360 * color // every} 70% 55%)" if every > 1 else "hsl(0 0% 60%)"
    drawn = []
    for bar in (part for part in earlier if part.count > 1):
        drawn.append((left, 5, unsplit, bar))
        left += 9
    drawn.append((left, 64 - 9 * len(drawn), across, down))
    rectangles = ""
    for x, wide, horizontal, vertical in drawn:
        # At least 3 units, so that a 64th can be seen.
        width, height = max(wide / horizontal.count, 3), max(40 / vertical.count, 3)
        from_left = min(wide * horizontal.index / horizontal.count, wide - width)
        from_top = min(40 * vertical.index / vertical.count, 40 - height)
        rectangles += (
            f'<rect class="whole" x="{x + 1}" y="2" width="{wide}" height="40"/>'
            f'<rect x="{x + 1 + from_left:.2f}" y="{2 + from_top:.2f}" width="{width:.2f}" '
            f'height="{height:.2f}" fill="{fill}"/>'
        )
    return rectangles
