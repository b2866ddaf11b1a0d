"""bfloat16, proven: gradients are as exact as the format allows, on every mesh and at every size."""

import dataclasses
import functools
import json
import os

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
from recipes.instruments.prove.comparison import compare_gradients
from tests.conftest import ROOT, full_except
from tests.support.entries import BATCH, ENTRIES, OPTIMIZER
from tests.support.proof import PRECISION
from tests.support.quick import QUICK

pytestmark = pytest.mark.promise("precision")

SMALL = (16, 128)  # rows and tokens of a row
# SigLIP's loss is over pairs: with 16 rows, chance makes the error of its images' queries 1.4 times one
# device's.
ROWS = {"siglip": 120}
LARGE = (64, 256)
ROUNDING = 2.0**-8  # the error of one number in bfloat16
BOUND = 1.25  # times one device's error; times the error of a small batch
STEP_TOLERANCE = 1e-3  # of losses in five steps, relative
# For a strategy with more axes than eight devices can split.
WITHOUT_DATA = "data=1,seq=2,expert=2,model=2"
# Each device along `expert` gets rows, which its experts take in several turns.
DROPLESS = {
    "ep": "data=2,expert=4",
    "fsdp_ep": "data=2,expert=4",
    "fsdp_ep_tp": "data=1,expert=4,model=2",
    "fsdp_ep_cp": "data=1,seq=2,expert=4",
    "fsdp_ep_pp": "data=1,pipe=2,expert=4",
}
ROUNDED = {  # entry → strategies of the golden for Config.matmul "int8" and "fp8"
    "transformer": ("fsdp_tp", "fsdp_tp_sp", "fsdp_cp"),  # pipelines round weights twice
    "moe": ("fsdp_ep", "fsdp_ep_tp"),
    "gpt2": ("fsdp_tp",),
    "gemma3": ("fsdp_tp_sp",),
    "gpt_oss": ("fsdp_ep",),
    "deepseek": ("fsdp_ep",),
    "vit": ("fsdp_tp",),
}


def case_for(name: str, strategy: str) -> tuple[str, str, str]:
    """The first mesh that splits something along most of a strategy's axes."""
    entry = ENTRIES[name.partition(":")[0]]
    used = used_axes(entry.rules[strategy])

    def split_axes(mesh: str) -> int:
        sizes = make_mesh(mesh).shape
        return sum(sizes.get(axis, 1) > 1 for axis in used)

    fits = [mesh for found, mesh in entry.layouts if found == strategy]
    return name, strategy, max(fits or [WITHOUT_DATA], key=split_axes)


def all_pairs() -> list[tuple[str, str, str]]:
    """Every entry that computes in bfloat16 under every strategy, then low precision."""
    names = [name for name, entry in ENTRIES.items() if "dtype" in vars(entry.config)]
    pairs = [case_for(name, strategy) for name in names for strategy in ENTRIES[name].rules]
    pairs += [
        case_for(f"{name}:{matmul}", strategy)
        for name, strategies in ROUNDED.items()
        for matmul in ("int8", "fp8")
        for strategy in strategies
    ]
    return pairs + [("moe:dropless", *where) for where in DROPLESS.items()]


def recorded_pairs() -> list[tuple[str, str, str]]:
    """Those of the golden: finding all takes 4 s of tracing."""
    record = json.loads((ROOT / "tests" / "golden" / PRECISION).read_text())
    pairs = [tuple(case.split()) for case in record]
    return [pair for pair in pairs if pair not in LARGE_CASES]


LARGE_CASES = [(name, "64×256", "1x1") for name in ("transformer", "transformer:int8")]
# python -m tests.by_hand.precision_table measures all.
PAIRS = all_pairs() if "UPDATE_GOLDEN" in os.environ else recorded_pairs()
# Those that the full tier measures again.
FEW = {
    "moe": ("fsdp", "fsdp_ep", "fsdp_ep_pp", "fsdp_ep_cp_tp"),
    "moe:dropless": ("fsdp_ep",),
    "gpt2": ("fsdp_tp", "fsdp_pp", "cp"),
    "gemma3": ("fsdp_tp_sp",),
    "gemma4_vision": ("fsdp_tp_sp",),
    "gpt_oss": ("fsdp_ep",),
    "deepseek": ("fsdp_ep",),
    "qwen3_next": ("fsdp_ep_cp",),
    "hybrid": ("fsdp_cp",),
    "vit": ("fsdp_tp",),
    "bert": ("fsdp_tp",),
    **{f"{name}:{matmul}": () for name in ROUNDED for matmul in ("int8", "fp8")},
    "transformer:int8": ("fsdp_tp",),
    "moe:fp8": ("fsdp_ep",),
}
CASES = [pair for pair in PAIRS if pair[1] in FEW.get(pair[0], (pair[1],))]


@functools.cache
def layout_of(name: str, mesh: str, strategy: str, dtype: str, rows: int) -> Layout:
    """An entry with all experts chosen at each position, so that no choice flips at a tie."""
    name, _, matmul = name.partition(":")
    config = ENTRIES[name].config
    changes = {"dtype": dtype, "matmul": matmul} if matmul else {"dtype": dtype}
    if matmul == "dropless":  # biases choose the same three at each position
        changes = {"dtype": dtype, "capacity": None, "experts_per_token": 3, "balance_rate": 0.01}
    elif "num_experts" in vars(config):
        changes["experts_per_token"] = config.num_experts
    if "groups" in vars(config):
        changes |= {"groups": 1, "top_groups": 1}
    config = dataclasses.replace(config, **changes)
    return make_layout(entries.model(name), config, make_mesh(mesh), strategy, batch_size=rows)


@functools.cache
def batch_of(name: str, rows: int, seq_len: int) -> dict[str, np.ndarray]:
    """Tokens as frequent as words of a text (Zipf's law); models of other data get their first rows."""
    name = name.partition(":")[0]
    if entries.ENTRIES[name].data != "data.text":
        return jax.tree.map(lambda *x: np.concatenate(x)[:rows], *ENTRIES[name].batches)
    random = np.random.default_rng(0)
    size = ENTRIES[name].config.vocab_size
    share = 1 / (1 + np.arange(size))
    window = random.choice(size, (rows, seq_len + 1), p=share / share.sum())
    tokens, targets = window[:, :-1].astype(np.int32), window[:, 1:].astype(np.int32)
    return {"tokens": tokens, "targets": targets}


@functools.cache
def first_params(name: str):
    layout = layout_of(name, "1x1", first_strategy(name), "float32", 8)
    abstract = abstract_state(layout, OPTIMIZER)
    return jax.device_get(initialize(layout, OPTIMIZER, 0, abstract))


def first_strategy(name: str) -> str:
    return next(iter(ENTRIES[name.partition(":")[0]].rules))


def gradient(name: str, mesh: str, strategy: str, dtype: str, size: tuple) -> dict[str, np.ndarray]:
    """Path → gradient of the mean loss of one batch."""
    rows, seq_len = size
    layout = layout_of(name, mesh, strategy, dtype, rows)
    abstract = abstract_state(layout, OPTIMIZER)
    kinds = layout.model.shapes.keys()
    abstract = {kind: abstract[kind] for kind in kinds}
    params = first_params(name.partition(":")[0])
    state = {kind: params.get(kind) or biases(layout.model.shapes[kind]) for kind in kinds}
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


def biases(shapes):
    """Of three experts of eight, two of which are on one device of four."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype) + 100 * CHOSEN, shapes)


CHOSEN = np.isin(np.arange(8), (2, 6, 7)).astype(np.float32)


@functools.cache
def reference(name: str, size: tuple, dtype: str) -> dict[str, np.ndarray]:
    """One device's gradient."""
    return gradient(name, "1x1", first_strategy(name), dtype, size)


def errors(name: str, found: dict[str, np.ndarray], size: tuple) -> dict[str, float]:
    """Path → relative error of a gradient. What is zero but for rounding is relative to all."""
    exact = reference(name, size, "float32")
    return {path: x.relative for path, x in compare_gradients(found, exact).items()}


@functools.cache
def errors_of_one(name: str, size: tuple) -> dict[str, float]:
    return errors(name, reference(name, size, "bfloat16"), size)


def with_record(text: str, case: tuple[str, ...], record: dict) -> str:
    """The JSON `text` of the golden with this case's record, in the order of PAIRS."""
    found = json.loads(text or "{}") | {" ".join(case): record}
    names = [" ".join(x) for x in (*PAIRS, *LARGE_CASES)]
    return json.dumps({name: found[name] for name in names if name in found}, indent=1) + "\n"


def record_of(name: str, found: dict[str, float], one: dict[str, float]) -> dict:
    """What the golden keeps. `ratio`: of an error to one device's, the largest of all parameters.

    The norm of n independent errors varies by chance by 1/√(2n), and so a ratio by 1/√n. There are two
    thousand ratios, so each is divided by 1 + 3/√n. One device's error counts as at least that of
    rounding one number.
    """
    shapes = paths(
        layout_of(name, "1x1", first_strategy(name), "float32", 8).model.shapes["params"]
    )
    ratios = {
        path: float(error / max(one[path], ROUNDING) / (1 + 3 / shapes[path].size ** 0.5))
        for path, error in found.items()
    }
    path = max(found, key=lambda path: found[path])
    largest = {"error": found[path], "one": max(one.values()), "ratio": max(ratios.values())}
    return {"parameter": path} | largest


def measure(entry: str, strategy: str, mesh: str) -> dict:
    size = (ROWS.get(entry, SMALL[0]), SMALL[1])
    found = errors(entry, gradient(entry, mesh, strategy, "bfloat16", size), size)
    return record_of(entry, found, errors_of_one(entry, size))


@pytest.mark.parametrize(("entry", "strategy", "mesh"), full_except(CASES, []))
def test_a_mesh_is_as_exact_as_one_device(entry, strategy, mesh, golden):
    record = measure(entry, strategy, mesh)
    golden.rewrite(PRECISION, lambda text: with_record(text, (entry, strategy, mesh), record))
    assert record["ratio"] < BOUND, record


def measure_large(entry: str) -> dict:
    """One device's errors for 64 times as many tokens as each of eight devices has in a small batch."""
    return record_of(entry, errors_of_one(entry, LARGE), errors_of_one(entry, SMALL))


@pytest.mark.full
@pytest.mark.parametrize("case", LARGE_CASES)
def test_no_error_grows_with_the_batch(case, golden):
    record = measure_large(case[0])
    golden.rewrite(PRECISION, lambda text: with_record(text, case, record))
    assert record["ratio"] < BOUND, record


@pytest.mark.full
@pytest.mark.parametrize(
    ("entry", "strategy", "mesh"), [case_for("transformer", "fsdp"), case_for("moe", "fsdp_ep")]
)
def test_five_steps_in_bfloat16(entry, strategy, mesh):
    losses = []
    for layout in (
        layout_of(entry, mesh, strategy, "bfloat16", BATCH),
        layout_of(entry, "1x1", first_strategy(entry), "bfloat16", BATCH),
    ):
        batches = ENTRIES[entry].batches
        example = jax.tree.map(lambda x: x[0], batches[0])
        step = run.compile_step(layout, OPTIMIZER, example, **QUICK)
        abstract = abstract_state(layout, OPTIMIZER)
        training = run.train(layout, step, first_params(entry), abstract, batches)
        losses.append([metrics["loss"] for metrics in training.metrics])
    np.testing.assert_allclose(*losses, rtol=STEP_TOLERANCE)
    assert losses[0] != losses[1]  # or nothing was compared


@pytest.mark.full
def test_the_golden_has_every_case(golden):
    record = json.loads(golden.rewrite(PRECISION, lambda text: text) or "{}")
    names = [" ".join(x) for x in (*all_pairs(), *LARGE_CASES)]
    if golden.update:  # other workers are still measuring some
        names = [name for name in names if name in record]
    assert [*record] == names, "run python -m tests.by_hand.precision_table"
    for case, found in record.items():
        assert found["ratio"] < BOUND, case
