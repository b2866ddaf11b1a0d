"""A new entry, added by the five steps of recipes/docs/new_entry.md to a copy of this repository: all tests apply.

It has a buffer, which no other entry has by default.
"""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support.runs import assert_bit_equal, records, state_of, steps_saved

pytestmark = [pytest.mark.promise("new-entry"), pytest.mark.full]
NAME = "made_up"

ZOO_FILE = '''"""MadeUp: y = relu(x · W1) · W2, and a running mean of the hidden activations.

Shapes: B batch, D embed, F hidden.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .core.sharding import (
    AxisNames, Rules, check_rules, complete_tables, constrain, explicit, in_use, param, zeros,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture. Named sizes are classmethods."""

    width: int  # D
    inner: int  # F

    @classmethod
    def tiny(cls) -> "Config":
        """2,112 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(width=16, inner=64)


SIZES = {"tiny": Config.tiny}

AXES = AxisNames(
    logical_axes={
        "batch": "activations",  # B
        "act_embed": "activations",  # D; also of weights in use
        "embed": "weights",  # D, of weights at rest
        "hidden": "both",  # F
    },
    in_use={"embed": "act_embed"},
)


class MadeUp(nnx.Module):
    """x_BD → y_BD."""

    axes = AXES

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, F = config.width, config.inner
        self.w1 = param(rngs, (D, F), ("embed", "hidden"), D**-0.5)
        self.bias = zeros((F,), ("hidden",))
        self.w2 = param(rngs, (F, D), ("hidden", "embed"), F**-0.5)
        self.mean = zeros((F,), ("hidden",), kind=Seen)

    def __call__(self, x_BD):
        return self._hidden(x_BD)[0]

    def _hidden(self, x_BD):
        check_rules(AXES.logical_axes)
        x_BD = constrain(x_BD, "batch", "act_embed")
        hidden_BF = product(x_BD, in_use(self.w1, AXES.in_use), "batch", "hidden")
        hidden_BF = jax.nn.relu(hidden_BF + self.bias[...][None])
        return product(hidden_BF, in_use(self.w2, AXES.in_use), "batch", "act_embed"), hidden_BF

    def loss(self, x, y, weight=None):
        """(sum of squared errors, number of outputs, metrics) of a batch."""
        out_BD, hidden_BF = self._hidden(x)
        seen_F = jax.lax.stop_gradient(hidden_BF).mean(axis=0)
        self.mean[...] = constrain(0.9 * self.mean[...] + 0.1 * seen_F, "hidden")
        weight_B1 = jnp.ones((len(x), 1)) if weight is None else weight[:, None]
        total, count = (jnp.square(out_BD - y) * weight_B1).sum(), weight_B1.sum() * y.shape[1]
        return total, count, {"loss": (total, count)}


class Seen(nnx.Variable):
    """What training has seen; it has no gradient."""


def product(x, w, *axes):
    return constrain(jnp.dot(x, w[...], out_sharding=explicit(*axes)), *axes)


complete = functools.partial(complete_tables, AXES.logical_axes)

DATA = {"batch": "data"}  # one all-reduce of the gradients
SPLIT = {"embed": "data"}  # two all-gathers and a reduce-scatter
COLUMNS = {"hidden": "model"}  # one all-reduce of activations
GROUPS = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
}

RULES: dict[str, Rules] = complete(
    {
        "dp": DATA,
        "fsdp": DATA | SPLIT,
        "tp": DATA | COLUMNS,
        "fsdp_tp": DATA | SPLIT | COLUMNS,
        "hybrid": GROUPS | COLUMNS,
    }
)
'''

RECIPE = '''"""Trains MadeUp to copy a random teacher."""

from data import made_up
from recipes.common import checkpoint
from recipes.common.checkpoint.run_folder import open_run
from recipes.common.runtime import Run, make_mesh, print0
from recipes.common.runtime.start import start
from recipes.common.sharding.layout import make_layout
from recipes.common.train.loop import finish, fit
from recipes.common.train.planned import PlannedStep
from recipes.common.train.step import make_step
from recipes.common.train.training_flags import Training
from zoo.made_up import Config, MadeUp


def main(run: Run, training: Training) -> PlannedStep | None:
    mesh, folder = make_mesh(run.mesh), open_run("made_up", run, training)
    config = checkpoint.config_of(folder.start) if folder.start else Config.tiny()
    layout = make_layout(
        MadeUp, config, mesh, run.rules,
        seed=run.seed, batch_size=run.batch_size, microbatches=training.accumulate,
    )  # fmt: skip
    if run.plan:
        return PlannedStep(layout, training)
    data = made_up.load(config.width, config.inner, run.seed)
    step = make_step(layout, run, training)
    _, log, metrics = fit(run, folder, step, data)
    total, count = metrics["loss"]
    print0(f"Held-out loss {total / count:.6f}.")
    finish(folder, layout, log)


if __name__ == "__main__":
    start(
        main, Run(steps=8, batch_size=64, log_every=1), Training(warmup_steps=2, weight_decay=0.0)
    )
'''

DATA_FILE = '''"""Data for MadeUp: a teacher's answers. Parameters are named like its Config's fields."""

from data import synthetic
from data.batches import Dataset


def load(width: int, inner: int, seed: int) -> Dataset:
    """Makes the teacher of DotReluDot."""
    return synthetic.load(width, inner, seed)
'''

LINE = '    "made_up": Entry("MadeUp", "data.made_up", "mean squared error"),\n'


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of this repository, uncommitted files included, with the new entry added."""
    target = tmp_path_factory.mktemp("clone")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # and not deleted since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)

    # Steps 1 to 4: the zoo file; its data; the recipe; a line in the table of entries.
    (target / "zoo" / f"{NAME}.py").write_text(ZOO_FILE)
    (target / "data" / f"{NAME}.py").write_text(DATA_FILE)
    (target / "recipes" / f"{NAME}.py").write_text(RECIPE)
    table = target / "recipes" / "common" / "entries.py"
    head, start, rest = table.read_text().partition("\nENTRIES = {")
    first, newline, others = rest.partition("\n")
    table.write_text(head + start + first + newline + LINE + others)
    return target


def in_clone(clone: pathlib.Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=clone, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_five_steps_give_it_the_whole_proof(clone):
    # Step 5: its goldens, written by a run of everything that is parametrized over entries.
    assert (
        "`pytest --full -k NAME --update-golden`"
        in (ROOT / "recipes" / "docs" / "new_entry.md").read_text()
    )
    where = f"--basetemp={clone.parent / 'inner'}"
    of_it = ("pytest", "--numprocesses=0", "-vv", where)
    # On four of the seven meshes: these take half a minute.
    some = f"-k={NAME} and not (8x1 or 4x2 or 1x8)"
    proof = in_clone(clone, *of_it, "--full", "--update-golden", some)
    goldens = {path.name for path in (clone / "tests" / "golden").glob(f"{NAME}*")}
    assert f"{NAME}_specs.txt" in goldens
    for what, least in {
        "test_meshes.py::test_same_start_losses_and_gradients": 15,
        "test_meshes.py::test_restore_is_bit_equal_from_any_mesh_to_any_other": 2,
        "test_meshes.py::test_one_device_is_the_module_itself": 1,
        "test_collectives.py::test_a_step_sends_what_its_strategy_promises": 15,
        "test_collectives.py::test_a_gradient_is_sharded_like_its_weight_at_rest": 1,
        "test_structure.py::test_an_entry_has_its_parts": 1,
        "test_structure.py::test_every_variable_names_the_logical_axes_of_its_dims": 1,
        "test_copy.py::test_a_copied_entry_trains_alone": 1,
    }.items():
        passed = [line for line in proof.splitlines() if what in line and "PASSED" in line]
        assert len(passed) >= least, what

    specs = (clone / "tests" / "golden" / f"{NAME}_specs.txt").read_text()
    assert "mean                           (hidden) → (model)" in specs
    for golden in ("mesh_differences.json", "mesh_bytes.json"):
        record = json.loads((clone / "tests" / "golden" / golden).read_text())
        ours = json.loads((ROOT / "tests" / "golden" / golden).read_text())
        assert len(record) - len(ours) == len([name for name in record if name.startswith(NAME)])
    assert f"| {NAME} | " in (clone / "tests" / "PROOF.md").read_text()
    # Again against these goldens, those tests that write them and take no time.
    in_clone(clone, *of_it, "tests/sharding/test_meshes.py", f"-k={NAME} and (fit or reviewed)")


def test_its_recipe_trains_resumes_accumulates_and_is_published(clone):
    def train(workdir: str, *flags: str) -> str:
        return in_clone(clone, f"recipes.{NAME}", f"--workdir=runs/{workdir}", *flags)

    trained = train("whole", "--mesh=4x2")
    train("parts", "--mesh=4x2", "--steps=8", "--checkpoint_every=4", "--keep_checkpoints=9")
    whole, parts = clone / "runs" / "whole", clone / "runs" / "parts"
    assert_bit_equal(state_of(whole, 8), state_of(parts, 8))
    assert {"buffers/mean", "params/bias"} <= set(state_of(whole, 8))
    assert np.abs(state_of(whole, 8)["buffers/mean"]).max() > 0
    assert not np.array_equal(
        state_of(parts, 4)["buffers/mean"], state_of(parts, 8)["buffers/mean"]
    )
    shutil.rmtree(parts / "checkpoints" / "8")
    assert "Resumes at step 4" in train("parts", "--mesh=4x2", "--checkpoint_every=4")
    assert_bit_equal(state_of(whole, 8), state_of(parts, 8))

    # In microbatches: the same gradients, and buffers that differ as they must.
    train("micro", "--mesh=2x2x2", "--accumulate=4")
    got = records(clone / "runs" / "micro", "loss", "grad_norm")
    np.testing.assert_allclose(got, records(whole, "loss", "grad_norm"), rtol=1e-4)
    grown = state_of(clone / "runs" / "micro", 8)["buffers/mean"]  # 32 updates, not 8
    assert grown.sum() > 1.2 * state_of(whole, 8)["buffers/mean"].sum()
    assert steps_saved(clone / "runs" / "micro") == [8]

    # Planned from its shape.
    plan = json.loads(in_clone(clone, "recipes.plan", f"--entry={NAME}", "--size=tiny", "--json"))
    (dp,) = (x for x in plan["candidates"] if x["rules"] == "dp")
    assert dp["memory"]["parameters"] == 4 * (2_112 + 64)
    assert dp["memory"]["saved activations"] == 4 * 16 * (64 + 16)

    # Published and evaluated elsewhere.
    def held_out(output: str) -> str:
        return output.split("Held-out loss ")[1].split()[0]

    in_clone(clone, "recipes.publish", "--source=runs/whole", "--target=runs/published")
    read = train("none", "--restore_from=runs/published", "--steps=0", "--mesh=4x2")
    assert held_out(read) == held_out(trained)
    assert not (clone / "runs" / "none").exists()
