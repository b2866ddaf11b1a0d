"""Draws the error of an embedding's gradient in bfloat16: recipes/docs/pictures/precision.svg.

python -m tests.by_hand.precision_curve
"""

from unittest import mock

import jax
import matplotlib
from matplotlib.figure import Figure

from tests.conftest import ROOT
from tests.sharding.test_bfloat16 import gradient
from zoo.core import vocabulary

ROWS = (4, 16, 64, 256)
SEQ_LEN = 256


def error(rows: int) -> float:
    """The relative error of `embed`, of Transformer tiny on one device."""
    exact, found = (
        gradient("transformer", "1x1", "dp", dtype, (rows, SEQ_LEN))["embed"]
        for dtype in ("float32", "bfloat16")
    )
    return float(jax.numpy.linalg.norm(found - exact) / jax.numpy.linalg.norm(exact))


def main() -> None:
    after = [error(rows) for rows in ROWS]
    # JAX's own transpose of a lookup adds up in the table's dtype.
    with mock.patch.object(vocabulary, "_rows", lambda table_VD, tokens_M: table_VD[tokens_M]):
        before = [error(rows) for rows in ROWS]
    print("tokens", [rows * SEQ_LEN for rows in ROWS], "before", before, "after", after)
    matplotlib.rcParams["svg.hashsalt"] = "0"
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    tokens = [rows * SEQ_LEN for rows in ROWS]
    axes.loglog(tokens, before, "o-", color="#d55e00", label="look-up summed in bfloat16")
    axes.loglog(tokens, after, "o-", color="#0072b2", label="look-up summed in float32")
    axes.set(xlabel="tokens per device", ylabel="error of the embedding's gradient", ylim=(1e-3, 1))
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yticks([1e-3, 1e-2, 1e-1, 1], ["0.1%", "1%", "10%", "100%"])
    axes.legend(frameon=False)
    path = ROOT / "recipes" / "docs" / "pictures" / "precision.svg"
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
