"""What a proof looks like: a line for each case, then what differs, what is wasteful, a verdict."""

import dataclasses
from typing import Any

from recipes.common.report.report import held, size

HEAD = ("strategy", "mesh", "initial", "loss", "metrics", "gradient", "state", "restore", "memory")
NAMES = {
    "initial": "initial {}",
    "loss": "the {}",
    "metrics": "metric {}",
    "gradient": "the gradient of {}",
    "state": "{} after three steps",
    "restore": "restored {}",
}
WIDTHS = (14, 22, 9, 9, 9, 9, 9, 9, 9)


def head() -> str:
    return f"{_columns(HEAD)}  collectives of a step"


def row(case: Any) -> str:
    """One line: the largest relative difference of each kind; memory and bytes are a device's."""
    if case.error:
        return f"{_columns((case.strategy, case.mesh))}  failed: {case.error}"
    largest = [max(x.values(), default=None) for x in case.differences.values()]
    cells = [
        "-" if x is None else "equal" if not x.relative else f"{x.relative:.1e}" for x in largest
    ]
    sent = ", ".join(f"{n} {kind} {held(kind, b)}" for kind, (n, b) in case.sent.items())
    return f"{_columns((case.strategy, case.mesh, *cells, size(case.memory)))}  {sent or 'none'}"


def details(case: Any) -> list[str]:
    """Lines about what differs beyond tolerance, where it begins, and what float64 says."""
    lines = []
    for what, differences in case.beyond.items():
        path, worst = max(differences.items(), key=lambda item: item[1])
        others = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
        lines.append(
            f"  {NAMES[what].format(path)} differs by {worst.relative:.1e} (an element by "
            f"{worst.largest:.1e} of the largest, {worst.ulps:.0f} ulps){others}"
        )
    if case.float64 is not None:
        verdict = "rounding in float32" if case.is_rounding else "not rounding"
        lines.append(f"  in float64 the largest difference is {case.float64:.1e}: {verdict}")
    lines += [f"  {case.note}"] if case.note else []
    if case.place:
        lines.append(f"  {case.place}")
    return lines


def verdict(proof: Any) -> str:
    failed = [case for case in proof.cases if not case.holds]
    if failed:
        return f"{len(failed)} of {len(proof.cases)} differ from one device."
    return f"All {len(proof.cases)} train like one device."


def waste(proof: Any) -> list[str]:
    """Each warning once, with the cases that it is about."""
    cases: dict[Any, list[str]] = {}
    for case in proof.cases:
        for warning in case.waste:
            cases.setdefault(warning, []).append(f"{case.strategy} on {case.mesh}")
    return [f"wasteful: {warning} ({', '.join(pairs)})" for warning, pairs in cases.items()]


def text(proof: Any) -> str:
    """The whole table."""
    lines = [line for case in proof.cases for line in (row(case), *details(case))]
    return "\n".join([head(), *lines, *ending(proof)])


def ending(proof: Any) -> list[str]:
    left_out = [f"left out: {reason}" for reason in proof.left_out]
    return [*left_out, *waste(proof), verdict(proof)]


def as_json(proof: Any) -> dict[str, Any]:
    """All that was measured, with a difference for each array."""
    cases = [
        dataclasses.asdict(case)
        | {"holds": case.holds}
        | {
            "differences": {
                what: {path: x._asdict() for path, x in of_paths.items()}
                for what, of_paths in case.differences.items()
            },
            "sent": {kind: {"count": n, "bytes": b} for kind, (n, b) in case.sent.items()},
            "waste": [warning._asdict() for warning in case.waste],
        }
        for case in proof.cases
    ]
    return {"holds": proof.holds, "cases": cases, "left_out": [*proof.left_out]}


def _columns(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False))
