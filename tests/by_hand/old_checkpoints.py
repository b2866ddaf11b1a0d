"""Writes a small checkpoint for tests/golden/checkpoints, which every later version has to read.

    python -m tests.by_hand.old_checkpoints tests/golden/checkpoints      # once a release and library set

test_old_checkpoints.py restores each of them. A folder's sums.json says what is in it.
"""

import pathlib
import sys

import jax

from tests.support.golden_checkpoints import write

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    print(write(pathlib.Path(sys.argv[1])))
