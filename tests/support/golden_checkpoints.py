"""The small checkpoint of tests/golden/checkpoints, which every later version has to read."""

import json
import pathlib
import shutil
import tempfile

import jax
import numpy as np

from recipes.common import checkpoint
from recipes.common.checkpoint import integrity
from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, make_layout
from recipes.common.storage import folders
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.state import abstract_state, initialize
from tests.support.runs import saving
from zoo.llama_relatives import Config, Transformer

VERSION = "v0.1"
CONFIG = Config(32, 16, 2, num_heads=4, num_kv_heads=2, head_dim=4, mlp=32, qkv_bias=True)
STEP = 3


def layout_on(mesh: str, config: Config = CONFIG) -> Layout:
    return make_layout(Transformer, config, make_mesh(mesh))


def optimizer():
    return adamw(LearningRate(1e-3, 1, 10), weight_decay=0.1, clip_norm=1.0)


def sums(state) -> dict[str, list]:
    """Returns path → shape, dtype, and sums that identify the array and its order."""
    found = {}
    for path, array in paths(state).items():
        flat = np.asarray(array, np.float64).ravel()
        weighted = float(flat @ np.arange(1, flat.size + 1))
        found[path] = [list(array.shape), str(array.dtype), float(flat.sum()), weighted]
    return found


def write(folder: pathlib.Path) -> pathlib.Path:
    layout = layout_on("2x2")
    state = initialize(layout, optimizer(), 0, abstract_state(layout, optimizer()))
    # Moments that differ from one another: each is the number of its place.
    numbers = iter(range(1, 10_000))
    state["opt_state"] = jax.tree.map(lambda x: x + next(numbers), state["opt_state"])
    state["step"] = state["step"] + STEP
    facts = checkpoint.metadata("transformer", layout, {"steps": STEP})
    with tempfile.TemporaryDirectory() as temporary:
        workdir = pathlib.Path(temporary)
        with saving(workdir, "transformer", facts, {"seed": 0, "fingerprint": "none"}) as saver:
            saver.save(STEP, state)
        here = folder / f"transformer-{VERSION}-jax{jax.__version__}"
        shutil.copytree(workdir / "checkpoints" / str(STEP), here)
    for marker in here.rglob(folders.COMMITTED):
        marker.write_text("Checkpoint commit was successful\n")  # without this machine's path
    integrity.hash_before_commit(here)
    (here.parent / f"{here.name}.json").write_text(json.dumps(sums(state), indent=1) + "\n")
    return here
