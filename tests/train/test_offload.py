"""Optimizer state and layers' inputs in the host's memory: the same values, one layer at a time."""

import dataclasses
import math

import flax.serialization
import jax
import numpy as np
import optax
import pytest

from data.tokenizer import BYTES
from recipes.common import checkpoint
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.train import offload, update
from recipes.common.train.optimizer import (
    LearningRate,
    adamw,
    decaying,
    hidden_matrices,
    make_optimizer,
)
from recipes.common.train.state import abstract_state
from recipes.common.train.step import TrainStep
from recipes.instruments.plan.search import worthwhile
from tests.conftest import full_except
from tests.support.entries import ENTRIES
from tests.support.models import random_values, random_variables
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import TINY, assert_bit_equal, records, saving, state_of
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("optimizers")

OPTIMIZER = adamw(LearningRate(1e-2, warmup=1, steps=10), weight_decay=0.1, clip_norm=1.0)


@pytest.fixture
def streaming(monkeypatch):
    """Makes simulated devices update layer by layer, as those with a memory of their own do."""
    monkeypatch.setattr(offload, "platform", lambda _: "tpu")


# ---- the update ----------------------------------------------------------------------------------


def first(optimizer, abstract):
    """A state with random parameters, and with what the optimizer starts with."""
    state = random_values({kind: tree for kind, tree in abstract.items() if kind != "step"})
    moments = flax.serialization.to_state_dict(optimizer.init(state["params"]))
    state |= {"opt_state": moments, "step": np.int32(0)}
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, abstract))


def updated(entry: str, mesh: str, strategy: str, name: str, offloaded: str, finite=None):
    """The state, by path, after three updates with random gradients."""
    layout = ENTRIES[entry].layout(mesh, strategy)
    given = {"lr": lambda count: 0.01 / (1 + count), "weight_decay": 0.1, "clip_norm": 1.0}
    given |= {"matrices": hidden_matrices(layout), "decays": decaying(layout)}
    optimizer = make_optimizer(name, **given)
    abstract = abstract_state(layout, optimizer, offloaded)
    state = first(optimizer, abstract)

    def step(state, sums):
        grads = jax.tree.map(lambda g: g / 3.0, sums)
        if not offloaded:
            return update.apply_gradients(optimizer, layout, state, grads)
        norm = optax.tree.norm(grads)
        scaled = offload.Gradients(sums, np.float32(3), norm)
        return offload.stream_gradients(optimizer, layout, state, scaled, finite)

    where = jax.tree.map(lambda x: x.sharding, abstract)
    random, compiled = np.random.default_rng(0), None
    for _ in range(3):
        sums = jax.tree.map(lambda x: random.normal(size=x.shape).astype("f"), abstract["params"])
        sums = jax.device_put(sums, where["params"])
        compiled = compiled or layout.compile(
            step, state, sums, donate_argnums=0, out_shardings=where, compiler_options=QUICK
        )
        state = compiled(state, sums)
    kinds = {path: x.sharding.memory_kind for path, x in paths(state["opt_state"]).items()}
    large = {path for path, x in paths(state["opt_state"]).items() if x.size > 3}
    assert {path for path, kind in kinds.items() if kind == "pinned_host"} == (
        large if offloaded else set()
    )
    return jax.tree.map(np.asarray, paths(state))


CASES = [
    ("transformer", "4x2", "fsdp_tp", "lion"),
    ("transformer", "data=2,pipe=2", "fsdp_pp", "sgd"),
    ("moe", "data=2,expert=4", "fsdp_ep", "adamw"),
    ("qwen3_next", "4x2", "fsdp_tp", "adamw"),
    ("transformer", "4x2", "fsdp_tp", "muon"),
    ("transformer", "8", "zero1", "adamw"),
    ("transformer", "8", "zero1", "muon"),
]


@pytest.mark.parametrize(("entry", "mesh", "strategy", "name"), full_except(CASES, CASES[:1]))
def test_layer_by_layer_is_all_at_once(entry, mesh, strategy, name):
    """Exact for Lion. Elsewhere the compiler fuses, divides and sums parts differently from wholes."""
    case = entry, mesh, strategy, name
    whole, parts = updated(*case, ""), updated(*case, "optimizer")
    assert whole.keys() == parts.keys()
    for path, value in whole.items():
        if name == "lion":
            np.testing.assert_array_equal(parts[path], value, err_msg=path)
        else:
            np.testing.assert_allclose(parts[path], value, atol=2e-6, rtol=1e-6, err_msg=path)


@pytest.mark.full
def test_an_update_that_is_not_finite_changes_only_the_step():
    kept = updated("transformer", "4x2", "fsdp_tp", "adamw", "optimizer", np.array(False))
    layout = ENTRIES["transformer"].layout("4x2", "fsdp_tp")
    before = paths(first(OPTIMIZER, abstract_state(layout, OPTIMIZER)))
    assert kept.keys() == before.keys()
    assert {path for path in kept if not np.array_equal(kept[path], before[path])} == {"step"}


def moved_to_device(jaxpr) -> list[int]:
    """Sizes of the arrays that a program brings from the host's memory, inner programs included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            for before, after in zip(equation.invars, equation.outvars, strict=True):
                spaces = before.aval.memory_space, after.aval.memory_space
                if spaces == (jax.memory.Space.Host, jax.memory.Space.Device):
                    found.append(after.aval.size)
        for inner in jax.tree.leaves([*equation.params.values()]):
            inner = getattr(inner, "jaxpr", inner)
            found += moved_to_device(inner) if hasattr(inner, "eqns") else []
    return found


def test_the_device_holds_the_moments_of_one_layer(streaming):
    """The step brings one of two layers at a time, and 16 of the tables' 384 rows."""
    config = dataclasses.replace(Config.tiny(), tie_embeddings=False)
    layout = make_layout(Transformer, config, make_mesh("4x2"), batch_size=8, seq_len=8)
    step = TrainStep(layout, OPTIMIZER, LearningRate(1e-2, 1, 10), offload="optimizer")
    row = jax.ShapeDtypeStruct((8,), np.int32)
    with layout.trace():
        abstract = step.abstract_state()
        batch = layout.abstract_batch(dict.fromkeys(("tokens", "targets"), row))
        sizes = moved_to_device(jax.make_jaxpr(step)(abstract, batch).jaxpr)
    params = paths(layout.model.shapes["params"])
    want = {p: x.size // (2 if p.startswith("layers/") else 1) for p, x in params.items()}
    want |= {table: 2 * 8 * config.embed for table in ("embed", "unembed")}  # 8 rows of each half
    assert sorted(sizes) == sorted([*want.values()] * 2)


# ---- whole runs ----------------------------------------------------------------------------------

OFFLOAD = ("--offload=optimizer", "--remat=offload")
FLAGS = (*TINY, "--schedule=constant", "--warmup_steps=1", "--log_every=1", "--checkpoint_every=2")


@pytest.fixture
def train(inside, book, quick, tmp_path):
    """Returns a function that trains in a folder of this name and returns the output."""

    def train(name: str, entry: str, *flags: str) -> str:
        workdir = f"--workdir={tmp_path / name}"
        done = inside(f"recipes.{entry}", *FLAGS, book, *flags, workdir)
        assert (done.err, done.code) == ("", 0)
        return done.out

    return train


@pytest.mark.full
def test_a_run_is_bit_equal_to_one_without(train, tmp_path):
    """Also after it resumes without. Its model is what `restore` gives."""
    flags = ("transformer", "--mesh=4x2", "--accumulate=2", "--skip_nonfinite=1")
    train("plain", *flags, "--remat=full", "--steps=4")
    plain, host = tmp_path / "plain", tmp_path / "host"
    out = train("host", *flags, *OFFLOAD, "--steps=2")
    assert " (in the host's memory).\n" in out
    what = "so moments and layers' inputs do not move"
    assert f"Offload: simulated devices have only the host's memory, {what}.\n" in out
    assert_bit_equal(state_of(host, 2), state_of(plain, 2))
    model, facts = checkpoint.restore(host, make_mesh("1x2"))
    assert facts["config"]["remat"] == "offload"
    np.testing.assert_array_equal(model.embed[...], state_of(host, 2)["params/embed"])
    train("host", *flags, "--remat=full", "--steps=4")
    assert_bit_equal(state_of(host, 4), state_of(plain, 4))
    assert records(host, "step", "loss") == records(plain, "step", "loss")


@pytest.mark.full
def test_experts_their_biases_two_stacks_and_rounded_products(train, tmp_path):
    flags = ("deepseek", "--mesh=data=2,expert=4", "--balance_rate=0.1", "--optimizer=lion")
    flags += ("--matmul=int8", "--steps=2")
    train("plain", *flags, "--remat=full")
    train("host", *flags, *OFFLOAD)
    assert_bit_equal(state_of(tmp_path / "host", 2), state_of(tmp_path / "plain", 2))


@pytest.mark.full
def test_adapters(train, tmp_path):
    layout = make_layout(Transformer, Config.tiny(), make_mesh("1"))
    facts = checkpoint.metadata("transformer", layout, {}) | {"step": 0, "context": 32}
    checkpoint.write(tmp_path / "base", random_variables(layout), facts, tokenizer=BYTES)
    lora = (
        "--mesh=4x2",
        "--lora_rank=2",
        "--tokenizer=bytes",
        f"--restore_from={tmp_path / 'base'}",
        "--steps=2",
    )
    train("plain", "transformer", *lora, "--remat=full")
    train("host", "transformer", *lora, *OFFLOAD)
    assert_bit_equal(state_of(tmp_path / "host", 2), state_of(tmp_path / "plain", 2))


def test_moments_are_read_and_written_in_the_hosts_memory(tmp_path, monkeypatch):
    """Each shard goes directly: no device holds a moment on the way."""
    layout = make_layout(Transformer, Config.tiny(), make_mesh("4x2"), batch_size=8)
    abstract = abstract_state(layout, OPTIMIZER)
    values = jax.tree.map(lambda x, y: x.astype(y.dtype), random_values(abstract), abstract)
    state = jax.device_put(values, shardings(abstract))
    with saving(tmp_path / "device") as saver:
        saver.save(1, state)
    puts, put = [], jax.device_put

    def spy(x, device=None, **options):
        where = getattr(device, "sharding", device)
        puts.append((np.shape(x), getattr(where, "memory_kind", "")))
        return put(x, device, **options)

    monkeypatch.setattr(jax, "device_put", spy)
    state = checkpoint.find(tmp_path / "device").read(
        abstract_state(layout, OPTIMIZER, "optimizer")
    )
    read, puts = puts, []
    with saving(tmp_path / "host") as saver:
        saver.save(1, state)
    monkeypatch.undo()

    moments = [x for x in paths(state["opt_state"]).values() if x.ndim]
    assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
    shards = [x.sharding.shard_shape(x.shape) for x in moments]
    on_host = [shape for shape, kind in read if kind == "pinned_host"]
    assert sorted(on_host) == sorted(shape for shape in shards for _ in range(8))
    shares = [x.sharding.shard_shape(x.shape) for x in paths(state["params"]).values()]
    others = sum(math.prod(shape) for shape, kind in read if kind != "pinned_host")
    assert others < 8 * 1.01 * sum(map(math.prod, shares))
    assert not puts, "a save moves nothing"
    assert_bit_equal(state_of(tmp_path / "device", 1), state_of(tmp_path / "host", 1))


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--offload=optimizer", "--remat=offload"])
def test_devices_without_host_memory_are_refused(flag, inside, monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "has_host_memory", lambda _: False)
    workdir = tmp_path / "w"
    done = inside("recipes.transformer", *TINY, "--steps=1", flag, f"--workdir={workdir}")
    fix = {"--offload=optimizer": "leave it out", "--remat=offload": "use --remat=full"}[flag]
    assert done.code == 2
    assert not workdir.exists()
    assert done.err == (
        f"error: {flag} needs devices with the memory kind 'pinned_host', and cpu has device and "
        f"pinned_host and unpinned_host; {fix}\n"
    )


@pytest.mark.parametrize("flag", ["--offload=optimizer", "--matmul=int8"])
def test_a_model_without_layers_has_nothing_to_offload_or_round(
    flag, inside, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = inside("recipes.plan", "--entry=mlp", "--devices=cpu:8", flag)
    assert done.code == 2
    assert done.err == f"error: {flag} is for models with layers, and mlp has none; leave it out\n"
    assert not [*tmp_path.iterdir()]


def test_a_pipeline_keeps_layers_inputs_on_the_device(inside, tmp_path):
    flags = ("--mesh=data=2,pipe=2", "--remat=offload", f"--workdir={tmp_path / 'w'}")
    done = inside("recipes.transformer", *TINY, *flags)
    assert done.code == 2
    assert done.err == (
        "error: --remat=offload is not for a pipeline, and rules 'fsdp_pp' on --mesh=data=2,pipe=2 "
        "have 2 stages; use --remat=full\n"
    )
    assert not [*tmp_path.iterdir()]
    layout = make_layout(Transformer, Config.tiny(), make_mesh("data=2,pipe=2"), batch_size=8)
    assert [remat for remat in Config.REMAT if worthwhile(layout, remat)] == [
        "none", "dots", "sublayers", "full",
    ]  # fmt: skip
