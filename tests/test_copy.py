"""A zoo file, copied alone into an empty folder, trains there."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from recipes.common import entries
from tests.conftest import ROOT, full_except
from tests.entries import ENTRIES, QUICK

# What someone writes around a copied file, with nothing but jax, flax and numpy.
TRAIN = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
from flax import nnx
from {entry} import RULES, Config, {model}

model = {model}(Config.tiny(), rngs=nnx.Rngs(0))
graph, params, rest = nnx.split(model, nnx.Param, ...)
batch = dict(np.load("batch.npz"))

def train(params, rest, batch, steps=5):
    def mean(params, rest, batch):
        model = nnx.merge(graph, params, rest, copy=True)  # a loss may assign to its buffers
        total, count, _ = model.loss(**batch)
        return total / count
    step = jax.jit(jax.value_and_grad(mean))  # a new one for each table
    losses = []
    for _ in range(steps):
        value, grads = step(params, rest, batch)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        losses.append(float(value))
    return losses

alone = train(params, rest, batch)
assert alone[-1] < alone[0] and np.isfinite(alone).all(), alone

default = jax.make_mesh((4, 2), ("data", "model"))
auto = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
experts = jax.make_mesh((2, 4), ("data", "expert"))
for mesh, strategy in {cases}:
    table = RULES[strategy]
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(table.items())):
        there = [jax.device_put(s, nnx.get_named_sharding(s, mesh)) for s in (params, rest)]
        where = jax.sharding.NamedSharding(mesh, jax.P(table["batch"]))
        losses = train(*there, jax.device_put(batch, where))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        split = [w for w in jax.tree.leaves(there[0]) if not w.sharding.is_fully_replicated]
        assert bool(split) == any(table[axis] for axis in table if axis != "batch"), strategy
assert auto != default

import sys
assert not {{"zoo", "recipes", "data"}} & set(sys.modules)
for package in ("zoo", "recipes", "data"):
    try:
        __import__(package)
    except ImportError:
        continue
    raise AssertionError(f"{{package}} can be imported here")
print("trained", alone)
"""

EVERY = """[(default, "dp"), (default, "fsdp"), (default, "tp"), (default, "fsdp_tp"),
            (auto, "fsdp"), (auto, "fsdp_tp")]"""
SOME = '[(default, "fsdp_tp"), (auto, "fsdp_tp")]'  # of what takes seconds to compile
CASES = {"dot_relu_dot": EVERY, "moe": '[(auto, "fsdp_tp"), (experts, "fsdp_ep")]'}


@pytest.mark.parametrize("entry", full_except(ENTRIES, list(ENTRIES)[:1]))
def test_copied_file_trains_alone(entry, tmp_path):
    shutil.copy(ROOT / "zoo" / f"{entry}.py", tmp_path)
    np.savez(tmp_path / "batch.npz", **ENTRIES[entry].batches[0])
    code = TRAIN.format(
        entry=entry, model=entries.ENTRIES[entry].model, cases=CASES.get(entry, SOME)
    )
    (tmp_path / "use.py").write_text(code)
    quick = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"XLA_FLAGS": quick},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained")
