"""Low-precision matmuls train alike on every mesh, and FSDP gathers bytes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from recipes.common.entries import model as model_of
from recipes.common.entries import zoo_file
from recipes.common.report.hlo import collectives
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.train.step import gradients
from tests.conftest import full_except
from tests.support.models import multiplying, random_variables
from tests.support.quick import QUICK

pytestmark = pytest.mark.promise("low-precision")

B, T = 8, 32
LOSS = 2e-3  # relative
GRADIENT = (
    0.1  # |difference| / |gradient|: numbers that are nearly between two may be rounded either way
)


def batch(entry: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    if entry == "vit":
        pictures = random.standard_normal((B, 8, 8, 1), np.float32)
        return {"image": pictures, "label": random.integers(0, 10, B, np.int32)}
    tokens = random.integers(0, 257, (B, T + 1), np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@functools.cache
def run(entry: str, mesh: str, strategy: str, changes: tuple, automatic: bool = False):
    """Returns (loss, path → gradient, the compiled text) of a tiny model's first batch."""
    changes = dict(changes)
    accumulate = changes.pop("accumulate", 1)
    grouped = changes.pop("grouped", False)
    config = dataclasses.replace(zoo_file(entry).Config.tiny(), **changes)
    where = make_mesh(mesh)
    if automatic:
        kinds = (jax.sharding.AxisType.Auto,) * len(where.axis_names)
        where = jax.sharding.Mesh(where.devices, where.axis_names, axis_types=kinds)
    length = 0 if entry == "vit" else T
    layout = make_layout(
        model_of(entry), config, where, strategy, batch_size=B, seq_len=length, microbatches=accumulate
    )  # fmt: skip
    variables = random_variables(layout)
    given = jax.device_put(batch(entry), layout.batch_shardings(batch(entry)))

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch, accumulate)
        return means["loss"], grads

    with multiplying(grouped):
        compiled = layout.compile(both, variables, given, compiler_options=QUICK)
    loss, grads = compiled(variables, given)
    return float(loss), {k: np.asarray(x) for k, x in paths(grads).items()}, compiled.as_text()


INT8, FP8, ONE = {"matmul": "int8"}, {"matmul": "fp8"}, {"num_layers": 1}
SEQ_MODEL, PIPE = "data=2,seq=2,model=2", "data=2,pipe=2,model=2"
CASES = [
    ("transformer", "8", "fsdp", INT8 | ONE),  # the program of a test below
    ("transformer", "4x2", "fsdp_tp", FP8 | ONE | {"remat": "dots"}),
    ("transformer", "8", "fsdp", FP8 | ONE | {"remat": "none", "accumulate": 1}),
    ("transformer", "8", "fsdp", INT8 | ONE | {"matmul_backward": "bfloat16", "remat": "offload"}),
    ("transformer", "1x8", "tp_sp", FP8 | ONE | {"remat": "gathered"}),
    (
        "transformer",
        "2x2x2",
        "hsdp_tp_sp",
        INT8 | ONE | {"num_heads": 6, "num_kv_heads": 1, "remat": "sublayers"},
    ),
    ("transformer", SEQ_MODEL, "fsdp_cp_tp", INT8 | ONE | {"lora_rank": 4}),
    ("transformer", PIPE, "fsdp_pp_tp", FP8),
    ("moe", "data=2,expert=2,model=2", "fsdp_ep_tp", INT8 | ONE | {"remat": "dispatched"}),
    ("moe", "data=2,expert=4", "fsdp_ep", INT8 | ONE | {"capacity": None}),
    ("moe", "data=2,expert=4", "fsdp_ep", FP8 | ONE | {"capacity": None}),
    ("moe", "data=2,expert=4", "fsdp_ep", FP8 | ONE | {"capacity": None, "grouped": True}),
    ("moe", "data=2,seq=2,expert=2", "fsdp_ep_cp", INT8 | ONE),
    ("gpt_oss", "2x2x2", "hsdp_tp_sp", FP8),
    ("deepseek", "data=2,expert=4", "fsdp_ep", INT8 | {"num_layers": 2, "mtp_depth": 1}),
    ("gpt2", "2x2x2", "fsdp_tp_sp", INT8 | ONE),
    ("gemma3", "4x2", "fsdp_tp", INT8 | {"num_layers": 2}),
    ("qwen3_next", SEQ_MODEL, "fsdp_cp_tp", INT8 | {"num_layers": 2}),
    ("hybrid", SEQ_MODEL, "fsdp_cp_tp", INT8 | {"num_layers": 4}),
    ("hybrid", "1x8", "tp", INT8 | {"num_layers": 4, "mamba_heads": 8, "mamba_groups": 2}),
    ("vit", "4x2", "fsdp_tp", INT8 | ONE),
    ("gemma4", "4x2", "fsdp_tp", INT8 | {"num_layers": 4, "shared_layers": 2, "layer_embed": 8}),
]
FAST = [CASES[0]]


@pytest.mark.parametrize(("entry", "mesh", "strategy", "changes"), full_except(CASES, FAST))
def test_losses_and_gradients_are_those_of_one_device(entry, mesh, strategy, changes):
    plain = tuple((changes | {"remat": "full"}).items())
    want_loss, want, _ = run(entry, "1x1", "dp", plain)
    loss, found, _ = run(entry, mesh, strategy, tuple(changes.items()))
    assert loss == pytest.approx(want_loss, rel=LOSS)
    check(found, want)


def check(found, want) -> None:
    for path, w in want.items():
        norm = np.linalg.norm(w)
        if not path.endswith("k_bias"):  # which is zero but for rounding
            assert np.linalg.norm(found[path] - w) <= GRADIENT * norm, path


@pytest.mark.full
def test_auto_axes_give_the_same():
    changes = tuple((INT8 | ONE).items())
    want_loss, want, _ = run("transformer", "1x1", "dp", changes)
    loss, found, _ = run("transformer", "4x2", "fsdp_tp_sp", changes, automatic=True)
    assert loss == pytest.approx(want_loss, rel=LOSS)
    check(found, want)


@pytest.mark.parametrize("matmul", full_except(["int8", "fp8"], ["int8"]))
def test_fsdp_gathers_a_byte_for_each_weight(matmul):
    """And a float32 scale for each column of a weight whose columns are split at rest."""
    changes = {"matmul": matmul} | ONE
    layout = make_layout(
        model_of("transformer"), dataclasses.replace(zoo_file("transformer").Config.tiny(), **changes),
        make_mesh("8"), "fsdp",
    )  # fmt: skip
    matrices = {
        path: axes for path, axes in paths(layout.model.axes["params"]).items()
        if path.startswith("layers") and "embed" in axes
    }  # fmt: skip
    shapes = paths(layout.model.shapes["params"])
    numbers = sum(shapes[path].size for path in matrices)
    scales = sum(shapes[path].shape[-1] for path, axes in matrices.items() if axes[-1] == "embed")
    _, _, text = run("transformer", "8", "fsdp", tuple(changes.items()))
    gathered = [
        x for x in collectives(text) if x.kind == "all-gather" and "/jvp()/while" in x.source
    ]
    forward = sum(x.times * x.bytes for x in gathered if "transpose" not in x.source)
    assert forward == numbers + 4 * scales
    again = sum(x.times * x.bytes for x in gathered if "rematted" in x.source)
    assert again <= forward
