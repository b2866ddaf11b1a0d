"""bfloat16, proven: gradients are as exact as the format allows, on every mesh and at every size."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from recipes.common import entries
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, make_layout, shardings
from recipes.common.sharding.rules import used_axes
from recipes.common.train.feed import to_devices
from recipes.common.train.state import abstract_state, initialize
from recipes.common.train.step import gradients
from recipes.instruments.prove import run
from recipes.instruments.prove.compare import compare_gradients
from tests.conftest import full_except
from tests.support.entries import BATCH, ENTRIES, OPTIMIZER
from tests.support.proof import PRECISION
from tests.support.quick import QUICK

pytestmark = pytest.mark.promise("precision")

SMALL = (16, 128)  # rows and tokens of a row
LARGE = (64, 256)
BOUND = 1.25  # times one device's largest error; times the error of a small batch
OF_EACH = (
    2.0  # times one device's error, or its mean error: that of a small vector varies by chance
)
STEP_TOLERANCE = 1e-3  # of losses in five steps, relative


def case_for(name: str, strategy: str) -> tuple[str, str, str]:
    """The first mesh that splits something along each of a strategy's axes."""
    layouts = ENTRIES[name].layouts
    fits = [mesh for found, mesh in layouts if found == strategy]
    sizes = [make_mesh(mesh).shape for mesh in fits]
    used = used_axes(ENTRIES[name].rules[strategy])
    split = [min(size.get(axis, 1) for axis in used) > 1 for size in sizes]
    return name, strategy, fits[split.index(True)]


# XLA's CPU compiler aborts on pipelines of bfloat16 with an axis `model`: its pass that widens
# all-reduces doesn't know the sums that JAX writes there.
ABORTS = ("fsdp_pp_tp", "pp_tp")
ALIKE = ("hsdp_tp", "hsdp_tp_sp", "pp_zero1")  # others compute the same sums
CASES = [
    case_for("transformer", x) for x in ENTRIES["transformer"].rules if x not in (*ABORTS, *ALIKE)
]
CASES += [case_for("moe", x) for x in ("fsdp", "fsdp_ep", "fsdp_ep_cp", "fsdp_ep_pp")]
CASES += [case_for("gpt2", "fsdp_tp"), case_for("gpt2", "fsdp_pp")]
CASES += [case_for("gemma3", "fsdp_tp_sp"), case_for("gpt_oss", "fsdp_ep")]
CASES += [case_for("deepseek", "fsdp_ep"), case_for("qwen3_next", "fsdp_ep_cp")]
CASES += [case_for("vit", "fsdp_tp")]


@functools.cache
def layout_of(name: str, mesh: str, strategy: str, dtype: str, rows: int) -> Layout:
    """An entry with all experts chosen at each position, so that no choice flips at a tie."""
    config = ENTRIES[name].config
    changes = {"dtype": dtype}
    if "num_experts" in vars(config):
        changes["experts_per_token"] = config.num_experts
    if "groups" in vars(config):
        changes |= {"groups": 1, "top_groups": 1}
    config = dataclasses.replace(config, **changes)
    return make_layout(entries.model(name), config, make_mesh(mesh), strategy, batch_size=rows)


@functools.cache
def batch_of(name: str, rows: int, seq_len: int) -> dict[str, np.ndarray]:
    """Tokens as frequent as words of a text (Zipf's law), or noise to classify."""
    random = np.random.default_rng(0)
    config = ENTRIES[name].config
    if name == "vit":
        size = (rows, config.image_size, config.image_size, config.channels)
        labels = random.integers(0, config.classes, rows).astype(np.int32)
        return {"image": random.normal(size=size).astype(np.float32), "label": labels}
    share = 1 / (1 + np.arange(config.vocab_size))
    window = random.choice(config.vocab_size, (rows, seq_len + 1), p=share / share.sum())
    tokens, targets = window[:, :-1].astype(np.int32), window[:, 1:].astype(np.int32)
    return {"tokens": tokens, "targets": targets}


@functools.cache
def first_params(name: str):
    layout = layout_of(name, "1x1", next(iter(ENTRIES[name].rules)), "float32", 8)
    abstract = abstract_state(layout, OPTIMIZER)
    return jax.device_get(initialize(layout, OPTIMIZER, 0, abstract))


def gradient(name: str, mesh: str, strategy: str, dtype: str, size: tuple) -> dict[str, np.ndarray]:
    """Path → gradient of the mean loss of one batch."""
    rows, seq_len = size
    layout = layout_of(name, mesh, strategy, dtype, rows)
    abstract = abstract_state(layout, OPTIMIZER)
    kinds = layout.model.shapes.keys()
    abstract = {kind: abstract[kind] for kind in kinds}
    state = {kind: first_params(name)[kind] for kind in kinds}
    batch = batch_of(name, rows, seq_len)
    example = layout.abstract_batch(jax.tree.map(lambda x: x[0], batch))
    step = layout.compile(
        lambda state, batch: gradients(layout, state, batch)[0],
        abstract,
        example,
        compiler_options=QUICK,
    )
    state = jax.device_put(state, shardings(abstract))
    return paths(jax.device_get(step(state, to_devices(batch, layout))))


@functools.cache
def reference(name: str, size: tuple, dtype: str) -> dict[str, np.ndarray]:
    """One device's gradient."""
    return gradient(name, "1x1", next(iter(ENTRIES[name].rules)), dtype, size)


def errors(name: str, found: dict[str, np.ndarray], size: tuple) -> dict[str, float]:
    """Path → relative error of a gradient. What is zero but for rounding is relative to all."""
    exact = reference(name, size, "float32")
    return {path: x.relative for path, x in compare_gradients(found, exact).items()}


@functools.cache
def errors_of_one(name: str, size: tuple) -> dict[str, float]:
    return errors(name, reference(name, size, "bfloat16"), size)


def with_record(text: str, case: tuple[str, ...], record: dict) -> str:
    """The JSON `text` of the golden with this case's record, in the order of CASES."""
    found = json.loads(text or "{}") | {" ".join(case): record}
    names = [" ".join(x) for x in (*CASES, *LARGE_CASES)]
    return json.dumps({name: found[name] for name in names if name in found}, indent=1) + "\n"


def worst(found: dict[str, float]) -> dict[str, str | float]:
    path = max(found, key=lambda path: found[path])
    return {"parameter": path, "error": found[path]}


@pytest.mark.parametrize(("entry", "strategy", "mesh"), full_except(CASES, []))
def test_a_mesh_is_as_exact_as_one_device(entry, strategy, mesh, golden):
    one = errors_of_one(entry, SMALL)
    found = errors(entry, gradient(entry, mesh, strategy, "bfloat16", SMALL), SMALL)
    record = worst(found) | {"one": max(one.values())}
    golden.rewrite(PRECISION, lambda text: with_record(text, (entry, strategy, mesh), record))
    assert max(found.values()) < BOUND * max(one.values())
    mean = np.mean([*one.values()])
    for path, error in found.items():
        assert error < OF_EACH * max(one[path], mean), path


LARGE_CASES = [("transformer", "64×256", "1x1")]


@pytest.mark.full
def test_a_large_batch_is_as_exact_as_a_small_one(golden):
    """64 times as many tokens as in the small batch on a device of 8, and no error grows."""
    small, large = errors_of_one("transformer", SMALL), errors_of_one("transformer", LARGE)
    record = worst(large) | {"one": max(small.values())}
    golden.rewrite(PRECISION, lambda text: with_record(text, LARGE_CASES[0], record))
    for path, error in large.items():
        assert error < BOUND * small[path], path


@pytest.mark.full
@pytest.mark.parametrize(
    ("entry", "strategy", "mesh"), [case_for("transformer", "fsdp"), case_for("moe", "fsdp_ep")]
)
def test_five_steps_in_bfloat16(entry, strategy, mesh):
    losses = []
    for layout in (
        layout_of(entry, mesh, strategy, "bfloat16", BATCH),
        layout_of(entry, "1x1", next(iter(ENTRIES[entry].rules)), "bfloat16", BATCH),
    ):
        batches = ENTRIES[entry].batches
        example = jax.tree.map(lambda x: x[0], batches[0])
        step = run.compile_step(layout, OPTIMIZER, example, **QUICK)
        abstract = abstract_state(layout, OPTIMIZER)
        training = run.train(layout, step, first_params(entry), abstract, batches)
        losses.append([metrics["loss"] for metrics in training.metrics])
    np.testing.assert_allclose(*losses, rtol=STEP_TOLERANCE)
    assert losses[0] != losses[1]  # or nothing was compared


def test_the_golden_has_every_case(golden):
    record = json.loads(golden.rewrite(PRECISION, lambda text: text) or "{}")
    names = [" ".join(x) for x in (*CASES, *LARGE_CASES)]
    if golden.update:  # other workers are still measuring some
        names = [name for name in names if name in record]
    assert [*record] == names, "run with --full --update-golden"
    assert all(x["error"] < BOUND * x["one"] for x in record.values())
