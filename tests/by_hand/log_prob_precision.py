"""Prints how far log-probabilities of long answers in bfloat16 are from those in float32.

    python -m tests.by_hand.log_prob_precision     # the table of recipes/docs/preferences.md

Of rows of Python's standard library, by transformer.stdlib_3m: the mean sum, the mean difference of
sums of bfloat16's log-probabilities, and that of sums in bfloat16, one term after another.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from data import text
from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from zoo.options import log_probs as zoo_log_probs

ROWS = 8


def log_probs(dtype: str, length: int) -> np.ndarray:
    """Of each token of held-out rows, [ROWS, length]."""
    source = checkpoint.find("transformer.stdlib_3m")
    layout = checkpoint.layout_of(source, make_mesh("1"), "", seq_len=length, dtype=dtype)
    variables = checkpoint.restore_variables(source, layout)
    held_out = text.load("stdlib", seq_len=length).held_out
    rows = (held_out[n] for n in range(len(held_out)))
    whole = [*itertools.islice((row for row in rows if (row["targets"] >= 0).all()), ROWS)]
    batch = {name: np.stack([row[name] for row in whole]) for name in ("tokens", "targets")}
    run = lambda variables, batch: zoo_log_probs.log_probs(layout.model.merge(variables), **batch)  # noqa: E731
    return np.asarray(layout.compile(run, variables, batch)(variables, batch))


def main() -> None:
    print("| tokens | log-probability | error in bfloat16 | if added up in bfloat16 |")
    for length in (256, 1024, 4096):
        exact_BT, rounded_BT = (log_probs(dtype, length) for dtype in ("float32", "bfloat16"))
        terms = jnp.asarray(rounded_BT.T, jnp.bfloat16)
        zero = jnp.zeros(ROWS, jnp.bfloat16)
        in_16_bits, _ = jax.lax.scan(lambda total, term: (total + term, None), zero, terms)
        exact, rounded = (x.sum(axis=1, dtype=np.float64) for x in (exact_BT, rounded_BT))
        error, worse = (np.abs(np.float64(x) - exact).mean() for x in (rounded, in_16_bits))
        print(f"| {length:,} | {exact.mean():,.0f} | {error:.2f} | {worse:,.0f} |")


if __name__ == "__main__":
    main()
