"""Draws the loss of default runs in float32, int8 and fp8: recipes/docs/pictures/low_precision.svg.

Run each command first, with seeds 0, 1 and 2 and each --matmul (empty, int8, fp8):

    python -m recipes.transformer --mesh=1 --sample_bytes=0 --seed=0 --matmul=fp8 --workdir=FOLDER/fp8-0

python -m tests.by_hand.loss_curves FOLDER
"""

import json
import pathlib
import sys

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tests.conftest import ROOT

COLORS = {"float32": "#777777", "int8": "#d55e00", "fp8": "#0072b2"}
SEEDS = (0, 1, 2)
WINDOW = 5  # logged losses in a moving average


def main(folder: pathlib.Path) -> None:
    losses, held_out = {}, {}
    for name in COLORS:
        for seed in SEEDS:
            lines = (folder / f"{name}-{seed}" / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            losses[name, seed] = {r["step"]: r["loss"] for r in records if "loss" in r}
            held_out[name, seed] = records[-1]["held_out_loss"]
    matplotlib.rcParams["svg.hashsalt"] = "0"
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, seed), curve in losses.items():
        steps, loss = [*curve], np.array([*curve.values()])
        label = name if seed == 0 else None
        left.plot(steps, loss, color=COLORS[name], linewidth=0.8, label=label)
        if name != "float32":
            difference = loss - np.array([*losses["float32", seed].values()])
            smooth = np.convolve(difference, np.ones(WINDOW) / WINDOW, "valid")
            right.plot(steps[WINDOW - 1 :], smooth, color=COLORS[name], linewidth=0.8, label=label)
    left.set(xlabel="step", ylabel="training loss, nats/byte", ylim=(1, 4))
    right.set(
        xlabel="step", ylabel=f"difference from float32, mean of {WINDOW}", ylim=(-0.05, 0.05)
    )
    left.legend(frameon=False)
    right.legend(frameon=False)
    path = ROOT / "recipes" / "docs" / "pictures" / "low_precision.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    for name in COLORS:
        print(name, *(f"{held_out[name, seed]:.4f}" for seed in SEEDS))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
