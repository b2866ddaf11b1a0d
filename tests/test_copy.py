"""A zoo file copied alone into an empty folder works there."""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# What a stranger writes around a copied file, with nothing but jax and flax.
USE = {
    "dot_relu_dot": """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from dot_relu_dot import RULES, Config, DotReluDot

model = DotReluDot(Config.tiny(), rngs=nnx.Rngs(0))
x_BD, y_BD = jax.random.normal(jax.random.key(0), (2, 8, 16))
batch = (x_BD, y_BD)
assert model(x_BD).shape == (8, 16)
def loss(model, x_BD, y_BD):
    return jnp.mean((model(x_BD) - y_BD) ** 2)
""",
    "mlp": """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from mlp import MLP, RULES, Config

model = MLP(Config.tiny(), rngs=nnx.Rngs(0))
x_BI = jax.random.normal(jax.random.key(0), (8, 64))
batch = (x_BI, jnp.arange(8))
assert model(x_BI).shape == (8, 10)
def loss(model, x_BI, label_B):
    return -jnp.mean(jax.nn.log_softmax(model(x_BI))[jnp.arange(8), label_B])
""",
    "transformer": """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from transformer import RULES, Config, Transformer

model = Transformer(Config.tiny(), rngs=nnx.Rngs(0))
tokens_BT = jax.random.randint(jax.random.key(0), (8, 32), 0, 257)
batch = (tokens_BT,)
out = model(tokens_BT)
assert out.shape == (8, 32, 384)
def loss(model, tokens_BT):
    nats, count = model.loss(tokens_BT, jnp.roll(tokens_BT, -1, axis=1))
    return nats / count
""",
}

TRAIN = """
graph, state = nnx.split(model)

def train(state, batch, steps=5):
    step = jax.jit(jax.value_and_grad(lambda s, b: loss(nnx.merge(graph, s), *b)))
    losses = []
    for _ in range(steps):
        value, grads = step(state, batch)
        state = jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)
        losses.append(float(value))
    return losses

alone = train(state, batch)
assert alone[-1] < alone[0] and np.isfinite(alone).all(), alone

kinds = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((4, 2), ("data", "model"), kinds)
for strategy in ("dp", "fsdp", "tp", "fsdp_tp"):
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(RULES[strategy].items())):
        on_mesh = jax.device_put(state, nnx.get_named_sharding(state, mesh))
        where = jax.sharding.NamedSharding(mesh, jax.P("data"))
        losses = train(on_mesh, jax.device_put(batch, where))
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
        split = [w for w in jax.tree.leaves(on_mesh) if not w.sharding.is_fully_replicated]
        assert bool(split) == (strategy != "dp"), strategy

import sys
assert not {"zoo", "recipes", "data"} & set(sys.modules)
for package in ("zoo", "recipes", "data"):
    try:
        __import__(package)
    except ImportError:
        continue
    raise AssertionError(f"{package} can be imported here")
print("trained", alone)
"""


@pytest.mark.parametrize("entry", USE)
def test_copied_file_trains_alone(entry, tmp_path):
    shutil.copy(ROOT / "zoo" / f"{entry}.py", tmp_path)
    setup = 'import jax\njax.config.update("jax_num_cpu_devices", 8)\n'
    (tmp_path / "use.py").write_text(setup + USE[entry] + TRAIN)
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("trained")
