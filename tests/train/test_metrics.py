"""Every metric that a run prints or writes, by value: computed here on one device from its definition."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data import digits, synthetic
from data.batches import Dataset, held_out_batches, train_batches
from data.tokenizer import BYTES
from recipes.common import language
from recipes.common.runtime.flags import Run
from recipes.common.sharding.abstract import abstract_model, nested, variables_of
from recipes.common.tasks.classification import few
from recipes.common.train import loop, metrics
from recipes.common.train.metrics import Log
from recipes.common.train.optimizer import LearningRate
from tests.conftest import ROOT, full_except
from tests.support.entries import ENTRIES
from tests.support.quick import quick as quick
from tests.support.runs import TINY, records, state_of
from zoo import dot_relu_dot, mlp
from zoo import llama_relatives as transformer

pytestmark = pytest.mark.promise("watching")

STEPS, BATCH, T = 3, 16, 32
PEAK, WARMUP = 4e-3, 2
FIELDS = ("loss", "grad_norm", "learning_rate")


def state_after(workdir, step: int) -> dict:
    """The parameters of a checkpoint, as nested dicts."""
    saved = state_of(workdir, step)
    return nested({k[7:]: jnp.asarray(v) for k, v in saved.items() if k.startswith("params/")})


def batches(data: Dataset, size: int, count: int) -> list[dict[str, np.ndarray]]:
    feed = iter(train_batches(data, size, seed=0))
    return [next(feed) for _ in range(count)]


def stacked(examples) -> dict[str, np.ndarray]:
    return jax.tree.map(lambda *x: np.stack(x), *(examples[i] for i in range(len(examples))))


def cross_entropy(logits, labels):
    """Mean nats over labels ≥ 0."""
    logs = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    picked = jnp.take_along_axis(logs, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return -(picked * (labels >= 0)).sum() / (labels >= 0).sum()


def train_by_hand(build, mean_loss, feed, vectors: tuple[str, ...]) -> list[tuple]:
    """FIELDS of each step: AdamW by its definition, on means, after clipping to a norm of 1."""
    params, found = jax.jit(lambda: variables_of(build())["params"])(), []
    first = second = jax.tree.map(np.zeros_like, params)
    merge = abstract_model(build).merge
    gradient = jax.jit(jax.value_and_grad(lambda p, b: mean_loss(merge({"params": p}), b)))
    for t, batch in enumerate(feed, 1):
        loss, grads = jax.device_get(gradient(params, batch))
        norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
        rate = float(LearningRate(PEAK, WARMUP, STEPS)(t - 1))
        found.append((float(loss), norm, rate))
        grads = jax.tree.map(lambda g, n=norm: g / max(n, 1.0), grads)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, second, grads)

        def move(path, p, m, v, t=t, rate=rate):
            decay = 0.0 if path[-1].key in vectors else 0.1
            by = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + decay * p
            return p - rate * by

        params = jax.tree_util.tree_map_with_path(move, params, first, second)
    return found


@pytest.mark.parametrize("accumulate", full_except([1, 4], [4]))
def test_metrics_of_a_language_model_s_run(accumulate, inside, quick, book, tmp_path):
    """Step k takes batch k - 1; loss and gradient are means over the targets of the whole batch."""
    done = inside(
        "recipes.transformer", *TINY, book, "--mesh=4x2", f"--steps={STEPS}", "--log_every=1",
        f"--learning_rate={PEAK}", f"--warmup_steps={WARMUP}", f"--accumulate={accumulate}",
        f"--workdir={tmp_path}",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    corpus = language.Text(dataset=book.removeprefix("--dataset="), seq_len=T).load(BYTES, seed=0)

    def build():
        return transformer.Transformer(transformer.Config.tiny(), rngs=nnx.Rngs(0))

    def mean_loss(model, batch):
        logits_BTV = model(batch["tokens"], batch.get("segment_ids"))
        return cross_entropy(logits_BTV, batch["targets"])

    wanted = train_by_hand(build, mean_loss, batches(corpus, BATCH, STEPS), vectors=("scale",))
    np.testing.assert_allclose(records(tmp_path, *FIELDS), wanted, rtol=2e-4)

    # Held out: over all targets, after the last step.
    params, merge = state_after(tmp_path, STEPS), abstract_model(build).merge
    mean = jax.jit(lambda b: mean_loss(merge({"params": params}), b))
    nats = targets = 0.0
    for batch in held_out_batches(corpus, BATCH):
        count = (batch["targets"] >= 0).sum()
        nats += float(mean(batch)) * count
        targets += count
    held_out = ("held_out_loss", "held_out_targets", "held_out_bits_per_byte")
    ((loss, count, bits),) = records(tmp_path, *held_out)
    assert loss == pytest.approx(nats / targets, rel=1e-4)
    assert count == targets
    assert bits == pytest.approx(nats / np.log(2) / corpus.held_out_bytes, rel=1e-4)
    assert f"Held-out loss {loss:.4f} nats/byte, {bits:.4f} bits/byte" in done.out

    # What is printed is what is written; throughput counts every token of a batch.
    for step, loss, seconds, speed, waited in records(
        tmp_path, "step", "loss", "step_seconds", "tokens_per_second", "input_wait_seconds"
    ):
        assert f"\nstep {step}/{STEPS}  loss {loss:.4f}  " in done.out
        assert speed * seconds == pytest.approx(BATCH * T)
        assert 0 <= waited <= seconds


@pytest.mark.full
def test_metrics_of_the_mlp_s_run(inside, quick, tmp_path):
    flags = ("--embed=16", "--hidden=32", "--depth=1", f"--learning_rate={PEAK}")
    done = inside(
        "recipes.mlp", "--mesh=4x2", *flags, f"--steps={STEPS}", "--log_every=1",
        f"--batch_size={BATCH}", f"--warmup_steps={WARMUP}", f"--workdir={tmp_path}",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    images = digits.load()
    config = mlp.Config(**images.config, embed=16, hidden=32, depth=1)

    def build():
        return mlp.MLP(config, rngs=nnx.Rngs(0))

    def mean_loss(model, batch):
        return cross_entropy(model(batch["image"]), batch["label"])

    feed = batches(images, BATCH, STEPS)
    wanted = train_by_hand(build, mean_loss, feed, vectors=("scale", "bias"))
    np.testing.assert_allclose(records(tmp_path, *FIELDS), wanted, rtol=2e-4)
    merge = abstract_model(build).merge
    logits = jax.jit(lambda params, image: merge({"params": params})(image))
    params = variables_of(build())["params"]
    for (accuracy,), batch in zip(records(tmp_path, "accuracy")[:2], feed[:2], strict=True):
        # The learning rate of step 1 is 0.
        right = np.asarray(logits(params, batch["image"])).argmax(-1) == batch["label"]
        assert accuracy == pytest.approx(right.mean())
    held_out = stacked(images.held_out)
    logits_BC = logits(state_after(tmp_path, STEPS), held_out["image"])
    labels_B = held_out["label"]
    right, of = int((np.asarray(logits_BC).argmax(-1) == labels_B).sum()), len(labels_B)
    nats = float(cross_entropy(logits_BC, labels_B))
    ((accuracy, loss),) = records(tmp_path, "held_out_accuracy", "held_out_loss")
    assert accuracy == pytest.approx(right / of)
    assert loss == pytest.approx(nats, rel=1e-4)
    assert (
        f"Held-out accuracy {right / of:.4f}: {right} of {of} images; loss {loss:.4f}" in done.out
    )


@pytest.mark.full
def test_metrics_of_dot_relu_dot_s_run(inside, quick, tmp_path):
    done = inside(
        "recipes.dot_relu_dot", "--mesh=2x4", f"--steps={STEPS}", "--log_every=1",
        f"--batch_size={BATCH}", f"--workdir={tmp_path}",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    config = dot_relu_dot.Config.small()
    teacher = synthetic.load(config.embed, config.hidden, 0)
    model = dot_relu_dot.DotReluDot(config, rngs=nnx.Rngs(0))
    weights = {name: np.asarray(getattr(model, name)[...], np.float64) for name in ("w1", "w2")}

    def outputs(weights, x):
        return np.maximum(np.asarray(x, np.float64) @ weights["w1"], 0) @ weights["w2"]

    (first, *_) = batches(teacher, BATCH, 1)
    ((loss, *_), *_) = records(tmp_path, *FIELDS)
    assert loss == pytest.approx(
        ((outputs(weights, first["x"]) - first["y"]) ** 2).mean(), rel=1e-4
    )
    weights = {k: np.asarray(v, np.float64) for k, v in state_after(tmp_path, STEPS).items()}
    held_out = stacked(teacher.held_out)
    error = ((outputs(weights, held_out["x"]) - held_out["y"]) ** 2).mean()
    share = error / (np.asarray(held_out["y"], np.float64) ** 2).mean()
    ((loss, unexplained),) = records(tmp_path, "held_out_loss", "held_out_unexplained")
    assert loss == pytest.approx(error, rel=1e-4)
    assert unexplained == pytest.approx(share, rel=1e-4)
    assert f"Held-out loss {loss:.6f}: {share:.2%} of the teacher's mean square" in done.out


# ---- the loop and the log ------------------------------------------------------------------------


class Saves:
    """Notes what is saved."""

    def __init__(self):
        self.steps = []

    def save(self, step, state):
        assert state["step"] == step, "a state is saved under its own number"
        self.steps.append(step)

    def wait(self): ...
    def last_good(self): ...


@pytest.mark.parametrize("first", [0, 3])
def test_each_step_takes_the_next_batch_and_none_is_left_out(first, tmp_path):
    """From the state's step on, as `train_batches` yields them: batch k for step k + 1."""
    taken, evaluated, saver = [], [], Saves()

    def step(state, batch):
        assert batch == state["step"], "neither ahead nor behind"
        taken.append(batch)
        return {"step": state["step"] + 1}, {"loss": np.float32(batch)}

    run = Run(steps=8, log_every=1, checkpoint_every=3, eval_every=2)
    log = Log(tmp_path / "metrics.jsonl", first, run, "x", 1)
    feed = ((number, 0.5) for number in range(first, 100))
    last = loop.take_steps(
        step, {"step": first}, feed, run, log, saver, lambda done, _: evaluated.append(done)
    )
    log.close()
    assert last == {"step": 8}
    assert taken == [*range(first, 8)]
    assert saver.steps == [n for n in (3, 6, 8) if n > first]
    assert evaluated == [n for n in (2, 4, 6) if n > first]
    lines = records(tmp_path, "step", "loss", "input_wait_seconds")
    assert lines == [(number + 1, number, 0.5) for number in range(first, 8)]


def test_times_of_a_run(tmp_path, monkeypatch):
    """A step takes 2 s, the first one 12, and an evaluation of 100 s counts as none."""
    clock = [metrics.STARTED + 5.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    log = Log(tmp_path / "metrics.jsonl", 0, Run(steps=6, log_every=2), "tokens", 64, peak=128)
    for step, seconds, waited in (
        (1, 12, 3),
        (2, 2, 1),
        (3, 2, 0.5),
        (4, 2, 0.5),
        (5, 2, 0),
        (6, 2, 1),
    ):
        log.step(step, {"loss": np.float32(1)}, waited)  # settles the step before
        clock[0] += seconds
        if step == 4:
            log.settle()
            clock[0] += 100
            log.held_out(4, {"loss": 1.0}, 100)
    log.settle()
    fields = ("step", "step_seconds", "input_wait_seconds", "tokens_per_second", "mfu")
    assert records(tmp_path, *fields) == [
        (2, 7, 2, 64 / 7, pytest.approx(64 / 7 / 128)),
        (4, 2, 0.5, 32, 0.25),
        (6, 2, 0.5, 32, 0.25),
    ]
    # The first line's steps, with cold caches, don't count.
    assert log.times() == ("Took 127 s, 17.0 s to the first step; 32 tokens/s  MFU 25.0%.")
    log.before_first_step = {"start and data": 5.0, "compiling": 9.5, "evaluation": 0.0}
    assert "17.0 s to the first step (start and data 5.0, compiling 9.5)" in log.times()
    log.close()


@pytest.mark.parametrize("count", [2, 49, 50, 1000])
def test_an_accuracy_over_few_examples_says_so(count):
    lines = few(count, "texts")
    assert bool(lines) == (count < 50)
    assert all(str(count) in line and f"{1 / count:.1%}" in line for line in lines)


def test_every_metric_of_every_entry_is_tested_by_value():
    """A new metric fails here, until the test of its definition is added to this list."""
    tested = {
        "loss": "test_metrics.py", "grad_norm": "test_metrics.py", "learning_rate": "test_metrics.py",
        "accuracy": "test_metrics.py", "unexplained": "test_metrics.py",
        "balance": "test_moe.py", "router_z": "test_moe.py", "dropped": "test_moe.py",
        "load": "test_moe.py", "mtp": "test_mtp.py",
    }  # fmt: skip
    found = set()
    for entry in ENTRIES.values():
        batch = jax.tree.map(lambda x: x[:8], entry.batches[0])
        _, _, aux = jax.eval_shape(lambda b, e=entry: e.build().loss(**b), batch)
        found |= {re.sub(r"_\d+$", "", name) for name in aux}
    assert found <= tested.keys()
    for file in tested.values():
        assert [*(ROOT / "tests").rglob(file)]
