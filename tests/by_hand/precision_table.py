"""Measures gradients in bfloat16 under every strategy: tests/golden/precision.json and PROOF.md.

python -m tests.by_hand.precision_table              # all entries
python -m tests.by_hand.precision_table moe gpt2     # some
python -m tests.by_hand.precision_table --large      # prints the errors of larger batches
"""

import os
import sys
from unittest import mock

import jax

os.environ["UPDATE_GOLDEN"] = "1"  # all pairs, also those that the golden lacks

from tests.conftest import Golden
from tests.sharding import test_bfloat16
from tests.sharding.test_bfloat16 import (
    BOUND,
    LARGE_CASES,
    PAIRS,
    errors,
    gradient,
    measure,
    measure_large,
    with_record,
)
from tests.support import proof

ONE = ("1x1", "dp")
MESHES = [("8", "dp"), ("8", "fsdp"), ("4x2", "fsdp_tp"), ("2x4", "fsdp_tp_sp")]
MESHES += [("data=2,seq=4", "fsdp_cp")]
# (entry, (rows, length)) → meshes and strategies. CPUs take minutes for 64 rows of 1,024.
LARGE = {
    ("gpt2", (32, 128)): [ONE],
    ("transformer", (8, 1024)): [ONE, *MESHES],
    ("moe", (8, 1024)): [ONE],
    ("transformer", (64, 1024)): [ONE, ("8", "dp"), ("8", "fsdp")],
}


def main() -> None:
    if sys.argv[1:] == ["--large"]:
        with mock.patch.object(test_bfloat16, "QUICK", {}):  # running takes longer than compiling
            large_batches()
        return
    names = sys.argv[1:] or [*dict.fromkeys(name for name, _, _ in PAIRS)]
    golden = Golden(update=True)
    for case in (*PAIRS, *LARGE_CASES):
        if case[0] in names:
            record = measure_large(case[0]) if case in LARGE_CASES else measure(*case)
            golden.rewrite(proof.PRECISION, lambda text: with_record(text, case, record))  # noqa: B023
            print(
                *case,
                record,
                "" if record["ratio"] < BOUND else "TOO LARGE",
                flush=True,
            )
    proof.PAGE.write_text(proof.page())


def large_batches() -> None:
    for (name, size), meshes in LARGE.items():
        for mesh, strategy in meshes:
            found = errors(name, gradient(name, mesh, strategy, "bfloat16", size), size)
            shown = {path: f"{error:.2%}" for path, error in found.items()}
            print(name, *size, strategy, mesh, shown, flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
