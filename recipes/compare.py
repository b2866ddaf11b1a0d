"""Compares training runs: a table, and a picture of their losses over steps, tokens and time.

    python -m recipes.compare runs/transformer runs/muon
    python -m recipes.compare runs/a runs/b gs://BUCKET/c --out=abc.svg

Reads each run's config.json and metrics.jsonl, also while it still trains. Losses of runs with
different data or tokenizers are of different text; bits per byte compare tokenizers.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

from recipes.common.report import picture
from recipes.common.runtime import UserError, flag, print0
from recipes.common.runtime.start import start
from recipes.common.storage import folders, jsonl
from recipes.common.train.sinks import clock

LAST = 10  # lines of metrics.jsonl over which the training loss at the end is averaged
# Flags that say where a run is or how it is watched, not what it learns.
ASIDE = ("workdir", "plan", "log_every", "tensorboard", "wandb", "profile", "keep_checkpoints",
         "checkpoint_every", "verify", "num_processes", "process_id", "coordinator")  # fmt: skip
TEXT = (
    "dataset",
    "eval_dataset",
    "tokenizer",
    "text_column",
    "pack",
    "seq_len",
)  # what is held out
FORMATS = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class Flags:
    out: str = flag("compare.png", "Picture to write (.png, .svg or .pdf); replaced if it exists.")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run's flags, losses and evaluations, from its folder."""

    name: str
    flags: dict[str, Any]
    curve: picture.Curve
    held_out: dict[str, float]  # metrics of the last evaluation, and the "step" of it
    best: tuple[float, int] | None  # lowest held-out loss, and its step
    not_finite: list[int]  # steps whose training or held-out loss is not finite


def main(names: list[str], flags: Flags) -> None:
    # ---- Check before anything is written --------------------------------------------------------
    if not names:
        raise UserError("no run is named; write python -m recipes.compare RUN RUN")
    out = pathlib.Path(flags.out).expanduser()
    if out.suffix not in FORMATS:
        raise UserError(
            f"--out={flags.out} is no picture; use a name ending in {', '.join(FORMATS)}"
        )
    if not out.parent.is_dir():
        raise UserError(f"--out={flags.out}: there is no folder {out.parent}; make it first")
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{twice.pop()} is named twice; name each run once")
    runs = [read(name, short) for name, short in zip(names, short_names(names), strict=True)]

    # ---- The table, what differs, and the picture ------------------------------------------------
    print0(*table(runs))
    for run in runs:
        if run.not_finite:
            count, last = len(run.not_finite), run.not_finite[-1]
            print0(
                "",
                f"{run.name}: {count} losses are not finite, the last at step {last:,}; its row "
                "leaves them out.",
            )
    if lines := differences(runs):
        print0("", *lines)
    if other := [name for name in TEXT if differ(runs, name)]:
        what = " and ".join(f"--{name}" for name in other)
        print0("", f"The runs differ in {what}: their held-out losses are not of the same tokens.")
    with folders.write_errors(out, "out"):
        picture.compare(out, [run.curve for run in runs])
    print0("", f"Losses over steps, {runs[0].curve.unit} and time: {out}")


def short_names(names: list[str]) -> list[str]:
    """The last parts of paths, as many as tell them apart.

    >>> short_names(["runs/a", "runs/b/"]), short_names(["x/a", "y/a"])
    (['a', 'b'], ['x/a', 'y/a'])
    """
    parts = [pathlib.PurePosixPath(name).parts for name in names]
    for count in range(1, max(map(len, parts)) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len({*short}) == len(names):
            return short
    return names


def read(name: str, short: str) -> RunRecord:
    """Reads a run's folder. Raises UserError if it is none, or has no loss yet."""
    path = folders.absolute(folders.to_path(name))
    with folders.user_errors(f"{name} can't be read", "use a run's workdir"):
        if not (path / "metrics.jsonl").exists():
            what = "has no metrics.jsonl" if path.exists() else "does not exist"
            raise UserError(f"{name} {what}; use a run's workdir, such as runs/transformer")
        lines = jsonl.read(path / "metrics.jsonl")
        config = path / "config.json"
        flags = json.loads(config.read_text())["flags"] if config.exists() else {}
    steps, examples, seconds, losses, held_out = [], [0.0], [0.0], [], []
    unit, before, last, best = "examples", 0, {}, None
    for line in lines:
        if "held_out_loss" in line and line["held_out_loss"] is not None:
            last = {key.removeprefix("held_out_"): value for key, value in line.items()}
            best = min(best or (last["loss"], line["step"]), (last["loss"], line["step"]))
            held_out.append((line["step"], examples[-1], seconds[-1], last["loss"]))
        if line.get("loss") is None or "step_seconds" not in line:
            continue
        unit = next(key for key in line if key.endswith("_per_second")).removesuffix("_per_second")
        taken, speed = line["step"] - before, line[f"{unit}_per_second"]
        before = line["step"]
        seconds.append(seconds[-1] + taken * line["step_seconds"])
        examples.append(examples[-1] + taken * speed * line["step_seconds"])
        steps.append(line["step"])
        losses.append(line["loss"])
    if not steps:
        raise UserError(
            f"{name} has no training loss in metrics.jsonl yet; wait for its first steps"
        )
    curve = picture.Curve(
        short, unit, picture.loss_unit(lines), steps, examples[1:], seconds[1:], losses, held_out
    )
    not_finite = [  # metrics.jsonl has null for them
        line["step"]
        for line in lines
        if any(name in line and line[name] is None for name in ("loss", "held_out_loss"))
    ]
    return RunRecord(short, flags, curve, last, best, not_finite)


def table(runs: list[RunRecord]) -> list[str]:
    """A Markdown table with a row for each run; columns that no run has are left out."""
    rows = [cells(run) for run in runs]
    head = [name for name in rows[0] if any(row.get(name) for row in rows)]
    return [
        f"| {' | '.join(head)} |",
        f"|---|{'---:|' * (len(head) - 1)}",
        *(f"| {' | '.join(row.get(name) or '-' for name in head)} |" for row in rows),
    ]


def cells(run: RunRecord) -> dict[str, str]:
    """Column → cell of a run."""
    curve, held_out = run.curve, run.held_out
    losses = curve.losses[-LAST:]
    cells_by_name = {
        "run": run.name,
        "steps": f"{curve.steps[-1]:,}",
        curve.unit: f"{curve.examples[-1]:,.0f}",
        "training": clock(curve.seconds[-1]),
        f"{curve.unit}/s": f"{curve.examples[-1] / curve.seconds[-1]:,.0f}",
        "loss": f"{sum(losses) / len(losses):.4f}",
        "held-out loss": f"{held_out['loss']:.4f}" if held_out else "",
        "bits/byte": f"{held_out['bits_per_byte']:.4f}" if "bits_per_byte" in held_out else "",
        "accuracy": f"{held_out['accuracy']:.4f}" if "accuracy" in held_out else "",
        "at step": f"{held_out['step']:,}" if held_out else "",
    }
    best = run.best and f"{run.best[0]:.4f} at step {run.best[1]:,}"
    return cells_by_name | {"best held-out loss": best or ""}


def differ(runs: list[RunRecord], name: str) -> bool:
    return len({json.dumps(run.flags.get(name)) for run in runs}) > 1


def differences(runs: list[RunRecord]) -> list[str]:
    """A Markdown table of the flags that differ; [] if none do."""
    names = dict.fromkeys(name for run in runs for name in run.flags)
    names = [name for name in names if name not in ASIDE and differ(runs, name)]
    if not names:
        return []
    lines = [f"| flag | {' | '.join(run.name for run in runs)} |", f"|---|{'---|' * len(runs)}"]
    for name in names:
        values = [run.flags.get(name, "-") for run in runs]
        shown = " | ".join(str(value).replace("|", "\\|") or "empty" for value in values)
        lines.append(f"| --{name} | {shown} |")
    return lines


def runs_and_flags(words: list[str]) -> tuple[list[str], list[str]]:
    """Splits the command line: runs are the words that are neither flags nor their values.

    >>> runs_and_flags(["a", "--out", "x.png", "b"]), runs_and_flags(["a", "--out=x.png"])
    ((['a', 'b'], ['--out', 'x.png']), (['a'], ['--out=x.png']))
    """
    runs, flags = [], []
    for before, word in zip(["", *words], words, strict=False):
        is_flag = word.startswith("-") or before == "--out"
        (flags if is_flag else runs).append(word)
    return runs, flags


if __name__ == "__main__":
    named, flags = runs_and_flags(sys.argv[1:])
    sys.argv[1:] = flags
    start(functools.partial(main, named), Flags())
