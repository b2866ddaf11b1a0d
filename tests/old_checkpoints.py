"""Writes a small checkpoint for tests/golden/checkpoints, which every later version has to read.

    python -m tests.old_checkpoints tests/golden/checkpoints      # once a release and library set

test_old_checkpoints.py restores each of them. A folder's sums.json says what is in it.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import jax
import numpy as np
from flax import nnx

from recipes.common import checkpoint, sharding
from recipes.common.cli import Run
from recipes.common.mesh import make_mesh
from recipes.common.optimizer import adamw, schedule
from recipes.common.sharding import paths
from recipes.common.workdir import Workdir
from zoo.transformer import RULES, Config, Transformer

VERSION = "v0.1"
CONFIG = Config(32, 16, 2, num_heads=4, num_kv_heads=2, head_dim=4, mlp=32, qkv_bias=True)
STEP = 3


def layout_on(mesh: str, config: Config = CONFIG) -> sharding.Layout:
    return sharding.lay_out(
        lambda: Transformer(config, rngs=nnx.Rngs(0)), RULES, "", make_mesh(mesh)
    )


def optimizer():
    return adamw(schedule(1e-3, 1, 10), 0.1, 1.0)


def sums(state) -> dict[str, list]:
    """Path → shape, dtype, and sums that show which array it is and in which order."""
    found = {}
    for path, array in paths(state).items():
        flat = np.asarray(array, np.float64).ravel()
        weighted = float(flat @ np.arange(1, flat.size + 1))
        found[path] = [list(array.shape), str(array.dtype), float(flat.sum()), weighted]
    return found


def write(folder: pathlib.Path) -> pathlib.Path:
    layout = layout_on("2x2")
    state = sharding.initialize(
        layout, optimizer(), 0, sharding.abstract_state(layout, optimizer())
    )
    # Moments that differ from one another: each is the number of its place.
    numbers = iter(range(1, 10_000))
    state["opt_state"] = jax.tree.map(lambda x: x + next(numbers), state["opt_state"])
    state["step"] = state["step"] + STEP
    with tempfile.TemporaryDirectory() as temporary:
        work = Workdir(Run(workdir=temporary), "transformer")
        work.check_data({"seed": 0, "fingerprint": "none"})
        work.begin(1, checkpoint.metadata("transformer", CONFIG, layout, {"steps": STEP}))
        work.save(STEP, state)
        work.close()
        here = folder / f"transformer-{VERSION}-jax{jax.__version__}"
        shutil.copytree(f"{temporary}/checkpoints/{STEP}", here)
    for marker in here.rglob(checkpoint.COMMITTED):
        marker.write_text("Checkpoint commit was successful\n")  # without this machine's path
    checkpoint.write_hashes(here)
    (here.parent / f"{here.name}.json").write_text(json.dumps(sums(state), indent=1) + "\n")
    return here


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    print(write(pathlib.Path(sys.argv[1])))
