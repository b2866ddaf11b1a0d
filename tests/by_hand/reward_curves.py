"""Draws what the bare command of `recipes.grpo` learns: recipes/docs/pictures/rewards.svg.

python -m recipes.grpo --workdir=RUN
python -m tests.by_hand.reward_curves RUN
"""

import json
import pathlib
import sys

import matplotlib
from matplotlib.figure import Figure

from tests.conftest import ROOT

# Question → (label, color).
CURVES = {
    "parses": ("parses, does something", "#777777"),
    "uses_parameter": ("uses a parameter", "#0072b2"),
    "names_known": ("names known", "#d55e00"),
    "two_kinds": ("two kinds of statements", "#009e73"),
}


def main(run: pathlib.Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    matplotlib.rcParams["svg.hashsalt"] = "0"
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for question, (label, color) in CURVES.items():
        name = f"held_out_reward_{question}"
        shares = {r["step"]: r[name] for r in records if name in r}
        axes.plot([*shares], [*shares.values()], "o-", color=color, markersize=3, label=label)
    axes.set(xlabel="step", ylabel="share of held-out prompts", ylim=(-0.03, 1.03))
    axes.legend(frameon=False)
    path = ROOT / "recipes" / "docs" / "pictures" / "rewards.svg"
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
