"""Buffers, variables that are not parameters: sharded, updated, accumulated, saved, restored."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common import checkpoint
from recipes.common.mesh import make_mesh
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, make_layout
from recipes.common.train.feed import to_devices
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.state import abstract_state, initialize
from recipes.common.train.step import TrainStep, gradients
from tests.support.runs import saving
from zoo.core.sharding import AxisNames

pytestmark = pytest.mark.promise("buffers")

# ---- a minimal zoo file: make_layout reads these from the model's own module ---------------------

RULES = {"tp": {"batch": "data", "embed": None, "hidden": "model"}}


class Seen(nnx.Variable):
    """A buffer."""


@dataclasses.dataclass(frozen=True)
class Config:
    gain: float = 0.0  # how strongly the buffer scales the loss


class Model(nnx.Module):
    """y = x · w, and a running mean of y with the number of updates that made it."""

    axes = AxisNames(
        logical_axes={"batch": "activations", "embed": "weights", "hidden": "both"}, in_use={}
    )

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        w = jax.random.normal(rngs.params(), (8, 16))
        self.gain = config.gain
        self.w = nnx.Param(w, out_sharding=("embed", "hidden"), eager_sharding=False)
        self.mean = Seen(jnp.zeros(16), out_sharding=("hidden",), eager_sharding=False)
        self.updates = Seen(jnp.zeros((), jnp.int32), out_sharding=(), eager_sharding=False)

    def loss(self, x):
        y = x @ self.w[...]
        scale = 1 + self.gain * self.mean[...].sum()
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(y).mean(axis=0)
        self.updates[...] = self.updates[...] + 1
        total, count = scale * jnp.square(y).sum(), jnp.float32(y.size)
        return total, count, {"loss": (total, count)}


LR = LearningRate(1e-2, warmup=0, steps=10)
OPTIMIZER = adamw(LR, weight_decay=0.0, clip_norm=1.0)
ROWS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


def layout_on(mesh: str, gain: float = 0.0) -> Layout:
    return make_layout(Model, Config(gain), make_mesh(mesh), "tp", batch_size=16)


def stepped(layout: Layout, rows=ROWS, microbatches: int = 1, skip: bool = False):
    """(state before, state after, metrics) of one step."""
    step = TrainStep(layout, OPTIMIZER, LR, microbatches, skip_nonfinite=skip)
    abstract = step.abstract_state()
    compiled = step.lower(abstract, {"x": ROWS[0]}).compile()
    state = initialize(layout, OPTIMIZER, 0, abstract)
    before = jax.device_get(state)
    after, metrics = compiled(state, to_devices({"x": rows}, layout))
    return before, after, metrics


def test_the_state_has_buffers_next_to_params():
    layout = layout_on("4x2")
    assert set(layout.model.shapes) == {"params", "buffers"}
    abstract = abstract_state(layout, OPTIMIZER)
    assert set(abstract) == {"params", "buffers", "opt_state", "step", "rngs"}
    assert paths(layout.model.axes["buffers"]) == {"mean": ("hidden",), "updates": ()}
    assert abstract["buffers"]["mean"].sharding.spec == jax.P("model")
    moments = [path for path in paths(abstract["opt_state"]) if "/mu/" in path]
    assert len(moments) == 1, "a buffer has no moments"
    assert "mean" in report.table(layout, abstract)


@pytest.mark.parametrize("mesh", ["4x2", "1x8"])
def test_a_step_takes_their_new_values(mesh):
    before, after, _ = stepped(layout_on(mesh))
    want = 0.1 * (ROWS @ before["params"]["w"]).mean(axis=0)
    np.testing.assert_allclose(after["buffers"]["mean"], want, rtol=1e-5, atol=1e-7)
    assert after["buffers"]["mean"].sharding.spec == jax.P("model")
    assert int(after["buffers"]["updates"]) == 1
    assert not np.array_equal(after["params"]["w"], before["params"]["w"])


def test_microbatches_give_the_same_gradient_and_pass_buffers_on():
    whole, parts = stepped(layout_on("4x2")), stepped(layout_on("4x2"), microbatches=4)
    np.testing.assert_allclose(parts[1]["params"]["w"], whole[1]["params"]["w"], rtol=1e-6)
    np.testing.assert_allclose(parts[2]["grad_norm"], whole[2]["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(parts[2]["loss"], whole[2]["loss"], rtol=1e-6)
    assert int(parts[1]["buffers"]["updates"]) == 4
    mean, w = np.zeros(16, np.float32), parts[0]["params"]["w"]
    for part in range(4):  # row b is in microbatch b % 4
        mean = 0.9 * mean + 0.1 * (ROWS[part::4] @ w).mean(axis=0)
    np.testing.assert_allclose(parts[1]["buffers"]["mean"], mean, rtol=1e-5, atol=1e-7)


def test_each_microbatch_sees_the_buffers_that_the_one_before_left():
    """Here the loss depends on the buffer, so the order of microbatches matters."""
    layout = layout_on("4x2", gain=0.5)
    params = {"w": jnp.asarray(ROWS.T)}
    state = {"params": params, "buffers": {"mean": jnp.zeros(16), "updates": jnp.int32(0)}}
    grads, buffers, means = gradients(layout, state, {"x": jnp.asarray(ROWS)}, 4)
    total, by_hand = 0.0, jnp.zeros((8, 16))
    for part in range(4):
        grad, after, mean = gradients(layout, state, {"x": jnp.asarray(ROWS[part::4])})
        state = state | after
        by_hand, total = by_hand + grad["w"] / 4, total + mean["loss"] / 4
    np.testing.assert_allclose(grads["w"], by_hand, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means["loss"], total, rtol=1e-6)
    for name, value in state["buffers"].items():
        np.testing.assert_allclose(buffers["buffers"][name], value, rtol=1e-6)


def test_a_skipped_update_leaves_buffers_alone():
    before, after, metrics = stepped(layout_on("4x2"), ROWS * np.float32(np.nan), skip=True)
    assert bool(metrics["skipped"])
    for kind in ("params", "buffers", "opt_state"):
        for path, value in paths(before[kind]).items():
            np.testing.assert_array_equal(paths(after[kind])[path], value, err_msg=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with the state after a step on 4x2, and that state."""
    layout = layout_on("4x2")
    _, state, _ = stepped(layout, microbatches=2)
    folder = tmp_path_factory.mktemp("saved")
    with saving(folder, "made_up", checkpoint.metadata("made_up", layout, {})) as saver:
        saver.save(1, state)
    return folder, jax.device_get(state)


def test_buffers_are_restored_bit_equal_on_another_mesh(saved):
    workdir, want = saved
    abstract = abstract_state(layout_on("1x8"), OPTIMIZER)
    state = checkpoint.find(workdir).read(abstract)
    assert set(paths(state)) == set(paths(want))
    for path, array in paths(state).items():
        assert array.sharding == paths(abstract)[path].sharding, path
        np.testing.assert_array_equal(array, paths(want)[path], err_msg=path)
    assert int(state["buffers"]["updates"]) == 2


def test_a_model_is_restored_with_its_buffers(saved, monkeypatch):
    from recipes.common import entries

    monkeypatch.setitem(entries.ENTRIES, "made_up", entries.Entry("Model", "no.data", "unit"))
    monkeypatch.setitem(sys.modules, "zoo.made_up", sys.modules[__name__])
    workdir, want = saved
    model, _ = checkpoint.restore(workdir, make_mesh("2x4"), "tp")
    np.testing.assert_array_equal(model.mean[...], want["buffers"]["mean"])
    assert model.mean[...].sharding.spec == jax.P("model")
    assert int(model.updates[...]) == 2


def test_a_checkpoint_without_optimizer_state_has_buffers_too(saved, tmp_path):
    _, want = saved
    variables = {kind: jax.device_put(want[kind]) for kind in ("params", "buffers")}
    metadata = {"entry": "made_up", "config": {}, "step": 1}
    checkpoint.write(tmp_path / "alone", variables, metadata)
    read = checkpoint.restore_variables(checkpoint.find(tmp_path / "alone"), layout_on("8x1"))
    for path, value in paths(variables).items():
        np.testing.assert_array_equal(paths(read)[path], value, err_msg=path)


def test_a_checkpoint_without_buffers_is_refused(saved, tmp_path):
    _, want = saved
    metadata = {"entry": "made_up", "config": {}, "step": 1}
    checkpoint.write(tmp_path / "less", {"params": jax.device_put(want["params"])}, metadata)
    with pytest.raises(UserError) as caught:
        checkpoint.restore_variables(checkpoint.find(tmp_path / "less"), layout_on("8x1"))
    assert str(caught.value) == (
        f"checkpoint {tmp_path / 'less'} has no buffer mean; use a checkpoint of the same model"
    )


def test_a_variable_without_logical_axes_is_named():
    class Bare(Model):
        def __init__(self, config, *, rngs):
            super().__init__(config, rngs=rngs)
            self.mean = Seen(jnp.zeros(16))

    with pytest.raises(
        UserError, match=r"^mean \[16\] has logical axes None; give it out_sharding"
    ):
        make_layout(Bare, Config(), make_mesh("4x2"), "tp")
