"""recipes.plan and --plan: every mesh that works, figures near the compiler's, answers in sentences."""

import collections
import csv
import dataclasses
import html
import html.parser
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import types
from typing import Any

import jax
import numpy as np
import PIL.Image
import pytest
from flax import nnx

from recipes.common import entries
from recipes.common.report import contexts, flops
from recipes.common.report.hlo import sent_by_kind
from recipes.common.runtime import UserError, describe, make_mesh
from recipes.common.runtime.slice_groups import across
from recipes.common.sharding import abstract_model, make_layout, paths
from recipes.common.sharding.compiler_options import COMPILER_OPTIONS
from recipes.common.sharding.shape import RecurrenceShape, Shape, trace_shape
from recipes.common.train.optimizer import adamw
from recipes.common.train.step import TrainStep
from recipes.instruments.plan import answer, compilers, step_cycles, step_memory
from recipes.instruments.plan import command as planner
from recipes.instruments.plan import page as plan_page
from recipes.instruments.plan import search as searching
from recipes.instruments.plan.calibration import FACTORS, LOWER_BOUND
from recipes.instruments.plan.estimate import LOGITS, Estimate, abstract_mesh, estimate
from recipes.instruments.plan.hardware import HARDWARE, parse_devices
from recipes.instruments.plan.search import Job, Plan, meshes, search
from recipes.instruments.plan.textbook import Transfer, stage_transfers, transfers
from tests.conftest import ROOT, full_except
from tests.support import plan_estimates
from tests.support.absent import H100, TPU, on
from tests.support.entries import BATCH, ENTRIES, LR
from tests.support.quick import XLA_FLAGS
from tests.support.quick import quick as quick
from zoo import hybrid, moe, qwen3_next
from zoo.experts.mixture import EXPERT_REMAT
from zoo.experts.slots import CAPACITY
from zoo.kernels import splash
from zoo.llama_relatives import Config, Transformer
from zoo.recurrent import delta

pytestmark = pytest.mark.promise("bench")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
QUICK = {"xla_backend_optimization_level": 0}


def small_plan(devices: str = "cpu:8", entry: str = "transformer", rows: int = 16) -> Plan:
    zoo = entries.zoo_file(entry)
    return search(Job(entries.model(entry), zoo.SIZES["tiny"](), rows, 64), parse_devices(devices))


# ---- what is planned ---------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["transformer", "moe"])
def test_every_mesh_that_works_is_planned_and_no_other(entry):
    zoo, model = entries.zoo_file(entry), entries.model(entry)
    found = small_plan(entry=entry)
    planned = {(x.layout.strategy, describe(dict(x.layout.mesh.shape))) for x in found.ranked}
    works = set()
    for strategy, rules in zoo.RULES.items():
        for axes in meshes(8, rules):
            try:
                layout = make_layout(
                    model, zoo.SIZES["tiny"](), make_mesh(describe(axes)), strategy,
                    batch_size=16, seq_len=64,
                )  # fmt: skip
            except UserError:
                continue
            if not any(layout.names.uneven[axis] == "replicated" for axis in layout.uneven):
                works.add((strategy, describe(axes)))
    assert planned == works
    assert len(planned) + sum(found.left_out.values()) == sum(
        len([*meshes(8, rules)]) for rules in zoo.RULES.values()
    )


@pytest.mark.parametrize("entry", ["vit", "siglip"])
def test_a_model_without_rows_of_tokens_is_planned(entry):
    """Its Config may have no schedule of a pipeline."""
    first, *others = small_plan(entry=entry).ranked
    assert first.fits
    assert {first.layout.strategy, *(x.layout.strategy for x in others)} >= {"dp", "fsdp", "tp"}


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A decoder's Config with other names for its sizes, which only its weights show."""

    original: Any
    dtype: str = "float32"
    remat: str = "full"
    attention: str = "auto"
    context: str = "auto"
    loss_chunk: int = 256
    pipeline: str = "1f1b"
    pipe_rounds: int = 2
    pipe_microbatches: int = 0
    experts_per_token: int = 2
    capacity: float = 1.25
    matmul: str = ""
    matmul_backward: str = ""

    REMAT = EXPERT_REMAT


@pytest.mark.parametrize("entry", ["moe", "deepseek"])
def test_a_plan_depends_on_the_weights_and_not_on_names_of_sizes(entry):
    model = entries.model(entry)

    def renamed(config: Renamed, *, rngs):
        return model(config.original, rngs=rngs)

    renamed.__module__ = model.__module__
    config = entries.zoo_file(entry).Config.tiny()
    devices = parse_devices("cpu:8")
    plans = [
        search(Job(of, each, 16, 64), devices)
        for of, each in ((model, config), (renamed, Renamed(config)))
    ]
    ranked, again = ([answer.to_json(x) for x in plan.ranked] for plan in plans)
    assert len(ranked) > 10
    assert again == ranked


def test_recurrent_layers_by_hand():
    """Half of a Transformer's layers keep a state in place of keys and values."""
    config = dataclasses.replace(Config.tiny(), num_layers=4)
    layout = make_layout(Transformer, config, make_mesh("4x2"), "tp", batch_size=8, seq_len=16)
    full = dataclasses.replace(layout.shape.layers[0], count=2)
    recurrence = RecurrenceShape(
        weights=7_000,
        work=500,
        width=96,
        chunks=70_000,
        group=16,
        state=1_000,
        erase=500,
        halo=60,
    )
    linear = dataclasses.replace(full, attention=None, recurrence=recurrence)
    shape = dataclasses.replace(layout.shape, layers=(linear, full), period=2)
    attended = full.attention.weights
    assert shape.multiplied == layout.shape.multiplied + 2 * (7_000 - attended)
    tokens, square = 2 * 16, 6 * 16 * full.attention.heads * full.attention.kv_dim
    assert flops.decoder(shape, 16, 2)["full"] == tokens * (
        6 * shape.multiplied + 2 * 6 * 500 + 2 * square
    )

    def parts_of(shape: Shape) -> dict[str, float]:
        hybrid = dataclasses.replace(layout)
        vars(hybrid)["shape"] = shape
        return step_memory.memory_parts(hybrid)

    parts = parts_of(shape)
    assert parts["saved activations"] == 4 * 2 * 16 * 64 * 4  # four layers' inputs of two rows

    def grown(**changes) -> float:
        changed = dataclasses.replace(linear, recurrence=dataclasses.replace(recurrence, **changes))
        larger = parts_of(dataclasses.replace(shape, layers=(changed, full)))
        return larger["live working set"] - parts["live working set"]

    assert grown(chunks=71_000) == 2 * 16 * 1_000 // 2 * 4  # two rows, half of the heads
    assert grown(chunks=142_000, group=8) == grown(chunks=71_000)  # half of the positions at once
    assert grown(width=196) == 2 * 16 * 2 * 100 // 2 * 4  # and their gradients
    kept = parts_of(dataclasses.replace(shape, remat="dots"))
    dots = 4 * (2 * 64 + 2 * 128 // 2) + 2 * (16 * 8 + 2 * 8 * 8) // 2 + 2 * 96 // 2
    assert kept["saved activations"] == dots * 2 * 16 * 4


def test_what_a_recurrence_keeps_by_hand():
    """8 heads of keys of 16, 16 heads of values of 12, a convolution over 3 positions."""
    shape = trace_shape(qwen3_next.Qwen3Next, qwen3_next.Config.tiny())
    recurrence = shape.layers[0].recurrence
    channels = 2 * 8 * 16 + 16 * 12
    assert recurrence.halo == 2 * channels == 896, "the positions before the first one"
    assert recurrence.state == 16 * 16 * 12 == 3_072
    assert recurrence.cached == 3_072 + 896
    assert recurrence.erase == 16 * 16 * 16
    assert recurrence.width == channels + 2 * 16 * 12  # also the gate and the output
    assert recurrence.weights == 64 * (channels + 2 * 16 * 12 + 2 * 16) + 3 * channels


def test_tpus_compute_longer_chunks_of_positions():
    """16 heads of states of 8 × 12 in 8 groups: products of a chunk's pairs grow with its length."""
    work = []
    for layout_on in (on(*TPU), on(*H100)):
        config = dataclasses.replace(hybrid.Config.tiny(), pattern="M*-", num_experts=0)
        layout = make_layout(hybrid.Hybrid, config, layout_on.mesh, "fsdp_tp", batch_size=8)
        work.append(layout.shape.layers[0].recurrence.work)
    by_length = [16 * (C * 12 + 2 * 8 * 12 + C * C) + 8 * C * 8 for C in (128, 64)]
    assert work == by_length


@pytest.mark.parametrize(("schedule", "idle"), [("1f1b", 3 / 8), ("interleaved", 3 / 16)])
def test_a_pipeline_s_bubble_by_hand(schedule, idle):
    """Four stages idle for three of eight microbatches' time, in two rounds for half of that."""
    config = dataclasses.replace(
        Config.tiny(), num_layers=8, pipe_microbatches=8, pipeline=schedule
    )
    mesh = abstract_mesh({"data": 2, "pipe": 4}, parse_devices("h100:8"))
    layout = make_layout(Transformer, config, mesh, "pp", batch_size=16, seq_len=64)
    seconds = estimate(layout, parse_devices("h100:8")).seconds
    assert seconds["bubble"] == pytest.approx(seconds["compute"] * idle)


def test_what_a_pipeline_saves_by_hand():
    """Of 4 stages, 7 microbatches at a stage; in two rounds 15 halves; with GPipe all 16, and one more."""
    mesh = abstract_mesh({"data": 2, "pipe": 4}, parse_devices("h100:8"))
    saved = {}
    for schedule in ("1f1b", "interleaved", "gpipe"):
        config = dataclasses.replace(
            Config.tiny(), num_layers=8, pipe_microbatches=16, pipeline=schedule
        )
        layout = make_layout(Transformer, config, mesh, "pp", batch_size=32, seq_len=64)
        saved[schedule] = step_memory.memory_parts(layout)["saved activations"]
    each = 64 * 64 * 4 * 2  # a row's inputs of two layers
    assert saved == {"1f1b": 7 * each, "interleaved": 7.5 * each, "gpipe": 17 * each}


def test_layers_that_move_for_a_pipeline_s_rounds_by_hand():
    """Of two stages of two chunks, each device hands the other one: bfloat16 there, float32 back."""
    mesh = abstract_mesh({"data": 4, "pipe": 2}, parse_devices("h100:8"))
    sent = {}
    for schedule in ("1f1b", "interleaved"):
        config = dataclasses.replace(
            Config.tiny(), num_layers=4, pipe_microbatches=4, pipeline=schedule, dtype="bfloat16"
        )
        layout = make_layout(Transformer, config, mesh, "fsdp_pp", batch_size=16, seq_len=64)
        sent[schedule] = {x.kind: x.bytes for x in stage_transfers(layout)}["collective-permute"]
    activations = 2 * 64 * 64  # of a microbatch of a row
    matrices = 64 * 8 * (16 + 8 + 8 + 16) + 3 * 64 * 128  # a layer's; each device has a fourth
    norms = 2 * 64  # whole on each, and never cast
    assert sent["1f1b"] == 2 * (4 + 1) * activations
    moved = (2 + 4) * matrices / 4 + (4 + 4) * norms
    assert sent["interleaved"] == 2 * (2 * 4 + 1) * activations + moved


def test_a_plan_chooses_the_rounds_of_a_pipeline():
    """Two slices far apart, a large model and few rows: stages, and the rounds that pay."""
    config = dataclasses.replace(Config.tiny(), num_layers=16, embed=1024, mlp=4096)
    devices = parse_devices("h100:8")
    mesh = abstract_mesh({"data": 2, "pipe": 4}, devices)
    layout = make_layout(Transformer, config, mesh, "fsdp_pp", batch_size=16, seq_len=4096)
    job = Job(Transformer, config, 16, 4096)
    options = [*searching._options(layout, devices, job)]
    best = min((x for x in options if x.fits), key=searching._seconds)
    assert best.layout.config.pipeline == "interleaved"
    v = best.layout.config.pipe_rounds
    assert answer.command("transformer", "tiny", best).endswith(
        f" --pipeline=interleaved --pipe_rounds={v}"
    )
    assert f" fsdp_pp, {v} rounds " in answer.table([best])[-1]
    one_round = min((x for x in options if answer.rounds_of(x) == 1), key=lambda x: x.step)
    assert best.step < one_round.step / searching.TIE


def test_zero1_gathers_updates_in_float32_by_hand():
    """Whatever the compute dtype is: 7/8 of all matrices, which alone are split."""
    config = dataclasses.replace(Config.tiny(), dtype="bfloat16")
    mesh = abstract_mesh({"data": 8}, parse_devices("h100:8"))
    layout = make_layout(Transformer, config, mesh, "zero1", batch_size=16, seq_len=64)
    sent = {x.purpose: x for x in transfers(layout) if x.kind == "all-gather"}
    table, attention, mlp = 384 * 64, 64 * 8 * (16 + 8 + 8 + 16), 3 * 64 * 128
    matrices = table + 2 * (attention + mlp)
    assert sent.keys() == {"updates"}
    assert sent["updates"].bytes == pytest.approx(4 * 7 / 8 * matrices)


def test_reduce_dtype_doubles_the_bytes_of_gradients_alone():
    mesh = abstract_mesh({"data": 8}, parse_devices("h100:8"))
    sent = []
    for reduce_dtype in ("", "float32"):
        config = dataclasses.replace(Config.tiny(), dtype="bfloat16", reduce_dtype=reduce_dtype)
        layout = make_layout(Transformer, config, mesh, "fsdp", batch_size=16, seq_len=64)
        sent.append({x.purpose: x.bytes for x in transfers(layout)})
    assert sent[1] == sent[0] | {"gradients": 2 * sent[0]["gradients"]}


def test_stages_are_ruled_out_for_a_model_with_a_head_after_the_last():
    devices = parse_devices("h100:8")
    for depth, wanted in ((0, ""), (1, "stages")):
        config = dataclasses.replace(qwen3_next.Config.tiny(), mtp_depth=depth)
        job = Job(qwen3_next.Qwen3Next, config, 16, 64)
        model = abstract_model(lambda c=config: qwen3_next.Qwen3Next(c, rngs=nnx.Rngs(0)))
        found = searching._layout(
            job, devices, model, "pp", qwen3_next.RULES["pp"], {"data": 4, "pipe": 2}
        )
        assert (found if isinstance(found, str) else "") == wanted


def test_groups_of_a_recurrence_are_computed_once_more(monkeypatch):
    devices, T, B = parse_devices("b200:8"), 128, 8
    mesh = abstract_mesh({"data": 8}, devices)

    def plan(group: int) -> Estimate:
        monkeypatch.setattr(delta, "GROUP", group)
        config = qwen3_next.Config.tiny()
        layout = make_layout(qwen3_next.Qwen3Next, config, mesh, "dp", batch_size=B, seq_len=T)
        return estimate(layout, devices)

    one, two = plan(T), plan(T // 2)
    work = sum(x.recurrence.work * n for x, n in one.layout.shape.trained_layers if x.recurrence)
    seconds = 2 * work * B * T / 8 / devices.hardware.peak
    grown = two.operations["matmul"] - one.operations["matmul"]
    assert grown == pytest.approx(seconds)


def test_a_head_for_the_second_next_token_by_hand():
    """One more layer that attends, the product that joins its two inputs, and logits of its own."""
    devices, T, B = parse_devices("b200:8"), 128, 8
    mesh = abstract_mesh({"data": 8}, devices)
    D, F, V = 64, 32, 384

    def plan(depth: int) -> Estimate:
        config = dataclasses.replace(
            qwen3_next.Config.tiny(),
            num_experts=0,
            experts_per_token=0,
            remat="dots",
            mtp_depth=depth,
        )
        layout = make_layout(qwen3_next.Qwen3Next, config, mesh, "dp", batch_size=B, seq_len=T)
        return estimate(layout, devices)

    with_head, plain = plan(1), plan(0)
    attention = D * (3 * 16 + 2 * 8) * 8  # queries, their gates and outputs; keys and values
    weights = attention + 3 * D * F + 2 * D * D
    grown = with_head.operations["matmul"] - plain.operations["matmul"]
    assert grown == pytest.approx((6 * weights + 8 * D * V) * T / devices.hardware.peak)
    numbers = 6 * D + 3 * F + (16 + 8) * 2 * 8
    read = 3 * 2 * 4 * numbers * T + LOGITS * 4 * V * T  # three passes; float32
    grown = with_head.seconds["memory"] - plain.seconds["memory"]
    assert grown == pytest.approx(read / devices.hardware.bandwidth)


def test_dense_first_layers_by_hand():
    """They receive nothing for experts, and multiply by their own MLP."""
    config = dataclasses.replace(
        moe.Config.tiny(), num_layers=3, dense_layers=2, dense_mlp=80, capacity=None
    )
    shape = trace_shape(moe.MoE, config)
    first, last = shape.layers
    assert (first.count, first.mlp, first.experts) == (2, 80, None)
    assert (last.count, last.mlp, last.experts.number) == (1, 0, 8)
    table, router, expert = 384 * 64, 64 * 8, 3 * 64 * 64
    mlps = 2 * 3 * 64 * 80 + router + 2 * expert
    assert shape.multiplied == table + 3 * first.attention.weights + mlps
    config = dataclasses.replace(config, remat="dispatched")
    layout = make_layout(moe.MoE, config, make_mesh("4x2"), "tp", batch_size=8, seq_len=16)
    received = 64  # by all of a position's experts
    numbers = 3 * 64 + received
    assert step_memory.memory_parts(layout)["saved activations"] == numbers * 2 * 16 * 4


def test_only_experts_with_a_capacity_compute_empty_slots():
    """As many for each part of a row, where context parallelism splits it. GPUs compute batches."""

    def matmuls(
        capacity: float | None, rules: str, axes: dict[str, int], kind: str = "v5p"
    ) -> float:
        devices = parse_devices(f"{kind}:8")
        config = dataclasses.replace(moe.Config.tiny(), capacity=capacity)
        mesh = abstract_mesh(axes, devices)
        layout = make_layout(moe.MoE, config, mesh, rules, batch_size=8, seq_len=64)
        return estimate(layout, devices).operations["matmul"]

    rows, parts = ("fsdp", {"data": 8}), ("fsdp_cp", {"data": 2, "seq": 4})
    assert matmuls(None, *parts) == pytest.approx(matmuls(None, *rows))
    assert matmuls(1.0, *rows) == pytest.approx(matmuls(None, *rows))
    slots = matmuls(2.0, *rows) - matmuls(1.0, *rows)  # one for each choice
    assert slots > 0
    assert matmuls(1.0, *parts) == pytest.approx(matmuls(1.0, *rows) + 3 * slots)
    assert matmuls(None, *rows, "h100") == pytest.approx(matmuls(CAPACITY, *rows, "h100"))


@pytest.mark.parametrize(
    ("seq_len", "blocks"),
    [(8_192, 8), (4_096, 4), (8_448, 0)],  # the last: 33 blocks of 256, so two kernels
)
def test_a_fused_backward_pass_keeps_a_dq_for_each_block_of_keys(seq_len, blocks, monkeypatch):
    """A layer's products of the MLP are gone by then."""
    config = dataclasses.replace(Config.tiny(), dtype="bfloat16", remat="full")
    mesh = abstract_mesh({"data": 8}, parse_devices("v5p:8"))
    layout = make_layout(Transformer, config, mesh, "dp", batch_size=8, seq_len=seq_len)
    fused = step_memory.memory_parts(layout)["live working set"]
    monkeypatch.setattr(splash, "PARTIAL", 0)
    in_two_kernels = step_memory.memory_parts(layout)["live working set"]
    partials, products = blocks * 16 * 8, 3 * 128
    assert fused - in_two_kernels == max(partials - products, 0) * seq_len * 2


def test_only_outer_axes_cross_slices():
    """Two slices of four devices: model=8 and data=1,pipe=8 would cut a slice, pipe=2 need not."""
    found = small_plan("v5e:4x2")
    assert found.left_out["slices"]
    across = {describe(dict(x.layout.mesh.shape)) for x in found.ranked}
    assert {"8", "2x4", "4x2", "pipe=2,data=4"} <= across
    assert not {"1x8", "data=1,pipe=8"} & across
    assert {"1x8"} <= {describe(dict(x.layout.mesh.shape)) for x in small_plan().ranked}


def test_the_fastest_that_fits_is_first_and_the_simplest_of_equals():
    ranked = small_plan().ranked
    fits = [x.fits for x in ranked]
    assert fits == sorted(fits, reverse=True)
    for one, other in itertools.pairwise(x for x in ranked if x.fits):
        assert one.step <= searching.TIE * other.step
    found = small_plan()
    assert found.best
    order = [*found.best.layout.strategies]
    ties = [x for x in ranked if x.fits and x.step <= searching.TIE * min(y.step for y in ranked)]
    assert searching.simplicity(found.best, order) == min(
        searching.simplicity(x, order) for x in ties
    )


def number_of_parameters(layout) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(layout.model.shapes["params"]))


# ---- figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sent", "inside", "between"),
    [  # 8 devices of two slices of 4: by each device, of an array of 800 bytes
        ("all-gather", 700, 600, 100),  # 3/4 of the array inside, and half of a quarter outside
        ("reduce-scatter", 700, 600, 100),
        ("all-reduce", 1_400, 1_200, 200),
        ("all-to-all", 700, 300, 400),  # to 3 devices of the slice, and 4 others
        ("collective-permute", 800, 800, 800),
    ],
)
def test_bytes_inside_slices_and_between(kind, sent, inside, between):
    transfer = Transfer("weights", kind, frozenset(["data"]), sent)
    assert transfer.over_links({"data": 8}, {"data": 2}) == (inside, between)
    assert transfer.over_links({"data": 8}, {"data": 1}) == (sent, 0)


def test_a_step_of_data_parallelism_by_hand():
    config = dataclasses.replace(Config.tiny(), remat="none", dtype="bfloat16")
    devices, T, B = parse_devices("h100:8"), 64, 16
    mesh = abstract_mesh({"data": 8}, devices)
    layout = make_layout(Transformer, config, mesh, "dp", batch_size=B, seq_len=T)
    found, h100 = estimate(layout, devices), HARDWARE["h100"]
    params = number_of_parameters(layout)
    assert found.links == pytest.approx(2 * 7 / 8 * params * 2), (
        "gradients in bfloat16, all-reduced"
    )
    assert found.network == 0
    assert found.seconds["links"] == pytest.approx(found.links / 450e9)
    assert found.seconds["update"] == pytest.approx(7 * 4 * params / 3.35232e12)
    assert found.seconds["ends"] == found.seconds["links"] / config.num_layers
    assert found.memory["parameters"] == 4 * params
    assert h100.peak == pytest.approx(989e12, rel=1e-3)
    longest = max(found.seconds[part] for part in ("compute", "memory", "links"))
    alone = sum(found.seconds[part] for part in ("ends", "update", "waiting", "bubble"))
    assert found.step == pytest.approx(longest + alone)
    assert found.mfu == pytest.approx(found.useful / found.step / 8 / h100.peak)


def test_two_nodes_send_over_the_network_what_one_node_sends_inside():
    layouts = {
        devices: [x for x in small_plan(devices).ranked if x.layout.strategy == "dp"]
        for devices in ("h100:8", "h100:16")
    }
    (one,), (two,) = layouts.values()
    assert one.network == 0 < two.network
    # Nodes sum first inside: each GPU exchanges an eighth of the gradients with the other node.
    gradients = 2 * 4 * number_of_parameters(one.layout)
    assert two.network == pytest.approx(gradients / 8 / 2)


def recorded() -> list[dict]:
    """Figures of the TPU compiler for the cases of tests/by_hand/plan_cases.py."""
    text = (ROOT / "tests" / "golden" / "plan_cases.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


# Where the compiler does something else than the rules ask for: recipes/instruments/results/planner.md says what.
BYTES_OUTSIDE = {
    ("mixtral_8x7b", "v5p:16", "fsdp_ep_cp", "dispatched"): 0.92,
    ("8b", "v5p:256", "fsdp_tp_sp", "full"): 0.95,
    ("80b_a3b", "v5p:16", "fsdp_cp", "full"): 0.75,
}
MEMORY_OUTSIDE = {
    ("8b", "v5p:256", "fsdp", "full"): 0.84,
    ("8b", "v5p:256", "fsdp_cp", "full"): 0.78,
    ("8b", "v6e:64", "fsdp", "full"): 0.90,
    ("1b", "v5e:16", "fsdp", "full"): 1.26,  # Gemma 3, compiled when the loss summed in bfloat16
    ("1b", "h100:8", "dp", "full"): 1.12,
    ("1b", "h100:8", "fsdp", "full"): 0.83,
    ("mixtral_8x7b", "v5p:16", "fsdp_ep", "full"): 1.13,  # dropless, like the next
    ("mixtral_8x7b", "v5p:256", "fsdp_ep_tp", "sublayers"): 1.22,
}


@pytest.mark.parametrize("line", recorded(), ids=lambda line: "-".join(map(str, line["case"][1:5])))
def test_estimates_are_near_the_compiler_s_figures(line):
    case = plan_estimates.Case(*line["case"])
    found, key = plan_estimates.estimated(case), (case.size, case.devices, case.rules, case.remat)
    known = MEMORY_OUTSIDE.get(key)
    ratio = found.peak / line["compiled_memory"]
    assert ratio == pytest.approx(known or 1, abs=0.01 if known else 0.1)
    if sent := line["compiled_sent"]:
        known = BYTES_OUTSIDE.get(key)
        ratio = (found.links + found.network) / sent
        assert ratio == pytest.approx(known or 1, abs=0.01 if known else 0.05)


def timed() -> list[dict]:
    """The TPU compiler's cycles for the cases of tests/by_hand/plan_cycles.py."""
    text = (ROOT / "tests" / "golden" / "plan_cycles.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("line", timed(), ids=lambda line: "-".join(map(str, line["case"][1:6])))
def test_times_are_near_the_compiler_s_cycles(line):
    plan = plan_estimates.estimated(plan_estimates.Case(*line["case"]))
    assert plan_estimates.ratio(plan, line["cycles"]) == pytest.approx(1, abs=0.15)


def on_v5p(axes: dict[str, int], rules: str, seq_len: int, **changes) -> Estimate:
    """The estimate of a tiny Transformer with these changes, on eight v5p, a batch of eight rows."""
    config = dataclasses.replace(Config.tiny(), dtype="bfloat16", **changes)
    devices = parse_devices("v5p:8")
    mesh = abstract_mesh(axes, devices)
    layout = make_layout(Transformer, config, mesh, rules, batch_size=8, seq_len=seq_len)
    return estimate(layout, devices)


@pytest.mark.parametrize(
    ("seq_len", "window", "pairs", "backward"),
    [
        (8_192, None, 36 * 1_024**2, 5),  # the causal half of 8 × 8 blocks
        (16_384, None, 136 * 1_024**2, 7),
        (2_048, 512, 7 * 512**2, 7),  # each block of queries sees itself and the one before
    ],
)
def test_flops_of_attention_s_kernels_by_hand(seq_len, window, pairs, backward):
    """Heads of 8 are padded to 128. The forward kernel has two matmuls, and runs twice."""
    plan = on_v5p({"data": 8}, "dp", seq_len, remat="full", sliding_window=window)
    matmul = 2 * pairs * 16 * 128
    flops = 2 * (2 * 2 + backward) * matmul  # of two layers, for a row
    least = flops / plan.devices.hardware.peak
    assert plan.operations["attention"] == pytest.approx(FACTORS["v5p"].attention * least)


def test_heads_fill_a_matrix_unit():
    """Heads of 8 take as long as those of 128 on v5p, and of 256 on v6e."""

    def least(kind: str) -> float:
        devices = parse_devices(f"{kind}:8")
        layout = make_layout(
            Transformer, Config.tiny(), abstract_mesh({"data": 8}, devices), "dp",
            batch_size=8, seq_len=8_192,
        )  # fmt: skip
        seconds = estimate(layout, devices).operations["attention"]
        return seconds / FACTORS[kind].attention * devices.hardware.peak

    assert least("v6e") == pytest.approx(2 * least("v5p"))


def result_rows(name: str) -> list[list[str]]:
    """The rows of a table of results, without the heading."""
    folder = ROOT / "recipes" / "instruments" / "results" / "tables"
    return list(csv.reader((folder / f"{name}.csv").read_text().splitlines()))[1:]


def test_the_table_of_results_has_the_factors():
    rows = [row for row in result_rows("planner_cycles") if row[0].startswith("factors of ")]
    assert {row[0].split()[-1]: tuple(map(float, row[2:-1])) for row in rows} == {
        kind: factors[:-1]
        for kind, factors in FACTORS.items()  # without `fill`
    }


def test_frozen_weights_have_no_gradients():
    """Forward, again, and the gradients of activations: three of four matmuls."""
    seconds = {
        rank: on_v5p({"data": 8}, "dp", 128, remat="full", lora_rank=rank).operations["matmul"]
        for rank in (0, 8)
    }
    assert seconds[8] == pytest.approx(seconds[0] * 3 / 4)


def test_residual_streams_are_whole_beside_tensor_parallelism():
    """Elementwise operations on them take all of its devices as long as one."""
    in_parts = {"data": 2, "model": 4}
    plans = {
        rules: on_v5p(axes, rules, 1_024, remat="none")
        for rules, axes in (("dp", {"data": 8}), ("tp", in_parts), ("tp_sp", in_parts))
    }
    seconds = {rules: plan.operations["elementwise"] for rules, plan in plans.items()}
    tokens = 1_024  # of a device, of 8 rows over 8 devices
    stream = 2 * 3 * 2 * tokens * 2 * 6 * 64  # bytes of two layers, written and read in 3 passes
    least = 3 * stream / plans["tp"].devices.hardware.bandwidth
    assert seconds["tp_sp"] == pytest.approx(seconds["dp"])
    assert seconds["tp"] - seconds["dp"] == pytest.approx(FACTORS["v5p"].elementwise * least)


def sent_of(found: Estimate) -> dict[str, float]:
    """Kind of collective → bytes of an estimate."""
    mesh = dict(found.layout.mesh.shape)
    parts, sent = across(mesh, found.devices.groups), collections.Counter()
    for transfer in found.transfers:
        sent[transfer.kind] += sum(transfer.over_links(mesh, parts))
    return sent


# Where the TPU's compiler sums some gradients of experts whole.
REDUCED_OUTSIDE = {
    ("mixtral_8x7b", "v5p:16", "fsdp_ep_cp"): 0.78,
    ("80b_a3b", "v5p:16", "fsdp_cp"): 0.51,
}


@pytest.mark.parametrize("line", recorded(), ids=lambda line: "-".join(map(str, line["case"][1:7])))
def test_each_kind_of_collective_is_near_the_compiler_s(line):
    """Gathers and exchanges each; reductions as one, because TPUs write scatters as permutes.

    TPUs write some gathers of `_sp` rules as permutes too, so there they count with the rest.
    """
    if not line["compiled_sent"]:
        return
    case = plan_estimates.Case(*line["case"])
    found, compiled = (
        sent_of(plan_estimates.estimated(case)),
        collections.Counter(line["compiled_by"]),
    )
    alone = ["all-to-all"] if case.rules.endswith("_sp") else ["all-to-all", "all-gather"]
    small = 0.002 * line["compiled_sent"]
    for kind in alone:
        assert found[kind] == pytest.approx(compiled[kind], rel=0.04, abs=small), kind
    rest, real = (sum(n for kind, n in x.items() if kind not in alone) for x in (found, compiled))
    known = REDUCED_OUTSIDE.get((case.size, case.devices, case.rules))
    if real > small:
        assert rest / real == pytest.approx(known or 1, abs=0.01 if known else 0.075)


# Rows of 20 tokens have a whole number of slots.
HEAD = {"mtp_depth": 1, "remat": "dispatched", "capacity": 2.0}


@pytest.mark.parametrize(
    ("entry", "rules", "mesh", "changes"),
    full_except(
        [
            ("transformer", "fsdp", "8", {"remat": "none"}),
            ("transformer", "fsdp", "8", {"remat": "sublayers"}),
            ("transformer", "fsdp_cp", "data=2,seq=4", {"remat": "none"}),
            ("moe", "fsdp_ep", "data=2,expert=4", {"remat": "none"}),
            ("moe", "fsdp_ep", "data=2,expert=4", {"remat": "dispatched"}),
            ("qwen3_next", "fsdp", "8", {"mtp_depth": 1}),
            ("deepseek", "fsdp_ep", "data=2,expert=4", HEAD),
            ("vit", "fsdp", "8", {"remat": "none"}),
            ("vit", "fsdp", "8", {"remat": "full"}),
            ("mlp", "fsdp", "8", {}),
            ("dot_relu_dot", "fsdp", "8", {}),
        ],
        fast=[
            ("mlp", "fsdp", "8", {}),
            ("dot_relu_dot", "fsdp", "8", {}),
        ],
    ),
)
def test_gathers_are_those_of_the_program_under_each_remat_policy(
    entry, rules, mesh, changes, quick
):
    """Compiled here for CPUs: without remat, weights are gathered once."""
    config = dataclasses.replace(ENTRIES[entry].config, **changes)
    row = jax.tree.map(lambda x: x[0], ENTRIES[entry].long_batches[0])
    length = len(row["tokens"]) if "tokens" in row else 0
    layout = make_layout(
        entries.model(entry), config, make_mesh(mesh), rules, batch_size=BATCH, seq_len=length
    )
    step = TrainStep(layout, adamw(LR, 0.1, 1.0), LR)
    program = step.lower(step.abstract_state(), row).compile()
    real = sent_by_kind(program.as_text(), 8)
    found = sent_of(estimate(layout, parse_devices("cpu:8")))
    # XLA's CPU backend keeps the head's experts for its backward pass instead of gathering them again.
    rel = 0.05 if changes.get("mtp_depth") else 0.03
    for kind in ("all-gather", "all-to-all"):
        assert found[kind] == pytest.approx(real.get(kind, 0), rel=rel), kind


# ---- answers -----------------------------------------------------------------------------------


def test_it_answers_with_a_table_reasons_and_the_command(inside):
    done = inside("recipes.plan", "--size=tiny", "--devices=v5e:8", "--batch_tokens=8K", "--top=3")
    assert done.code == 0, done.err
    rows = [line for line in done.out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 3
    first = [cell.strip() for cell in rows[1].split("|")[1:-1]]
    found = dict(zip(answer.HEAD, first, strict=True))
    assert f"{found['rules']} on {found['mesh']} is first" in done.out
    *_, command = done.out.splitlines()
    assert command.startswith("python -m recipes.transformer --size=tiny ")
    assert f"--mesh={found['mesh']} --rules={found['rules']} --batch_size=64" in command
    lost = {line.split(",")[0] for line in done.out.splitlines() if line.startswith("- ")}
    others = {x.layout.strategy for x in small_plan("v5e:8", rows=64).ranked}
    assert lost == {f"- {strategy}" for strategy in others - {found["rules"]}}


def test_the_page_shows_the_table_that_is_printed(inside):
    shown = (ROOT / "recipes" / "docs" / "plan.md").read_text()
    command, after = shown.split("<!-- output: python -m ", 1)[1].split(" -->\n```\n", 1)
    table = after.split("```", 1)[0]
    assert inside(*shlex.split(command)).out.startswith(table)


def test_offload_is_planned_and_in_the_command(inside):
    flags = ("--size=tiny", "--devices=v5e:8", "--batch_tokens=8K", "--top=99", "--json")
    plain, host = (
        next(
            x
            for x in json.loads(inside("recipes.plan", *flags, *more).out)["candidates"]
            if x["rules"] == "fsdp"
        )
        for more in ((), ("--offload=optimizer",))
    )
    assert not plain["host"]
    assert host["host"] == {"optimizer": plain["memory"]["optimizer"]}
    assert host["memory"] == plain["memory"] | {"optimizer": 0}


def test_the_command_that_it_prints_is_one_that_plans_itself(inside, tmp_path):
    done = inside("recipes.plan", "--size=tiny", "--batch_tokens=2K")
    *_, command = done.out.splitlines()
    _, _, module, *flags = command.split()
    planned = inside(
        module, *flags, "--plan", f"--workdir={tmp_path / 'run'}", "--dataset=/nowhere"
    )
    assert planned.code == 0, planned.err
    assert "Nothing was allocated or written" in planned.out
    row = done.out.splitlines()[2].split(" | ")
    again = next(line for line in planned.out.splitlines() if "compute" in line or "%" in line)
    assert row[5:10] == again.split(" | ")[5:10], "memory, bytes, bound and time of the same step"


@pytest.mark.parametrize(
    ("devices", "backward", "faster"), [("v5e", "", 2), ("v4", "", 1), ("v5e", "bfloat16", 6 / 5)]
)
def test_int8_gathers_half_the_bytes_and_computes_at_its_own_rate(devices, backward, faster):
    """Without attention and table, the compute of layers; a bfloat16 backward pass is two thirds."""
    found = {}
    for matmul in ("", "int8"):
        config = dataclasses.replace(
            Config.tiny(), dtype="bfloat16", matmul=matmul, matmul_backward=matmul and backward, remat="none"
        )  # fmt: skip
        mesh = abstract_mesh({"data": 8}, parse_devices(f"{devices}:8"))
        layout = make_layout(Transformer, config, mesh, "fsdp", batch_size=16, seq_len=64)
        found[matmul] = estimate(layout, parse_devices(f"{devices}:8"))
    sent = {
        matmul: sum(x.bytes for x in plan.transfers if x.kind == "all-gather")
        for matmul, plan in found.items()
    }
    shapes = layout.model.shapes["params"]
    layers = sum(x.size for x in jax.tree.leaves(shapes["layers"]) if x.ndim > 2)
    assert sent[""] - sent["int8"] == pytest.approx(7 / 8 * layers)
    tokens, peak = 16 * 64, parse_devices(f"{devices}:8").hardware.peak
    spared = found[""].seconds["compute"] - found["int8"].seconds["compute"]
    factors = FACTORS.get(devices, LOWER_BOUND)
    factor = factors.matmul * (1 + factors.fill / config.embed)
    assert spared == pytest.approx(factor * 6 * layers * tokens / 8 / peak * (1 - 1 / faster))


@pytest.mark.parametrize("entry", entries.ENTRIES)
def test_every_recipe_plans_its_command_and_writes_nothing(entry, inside, tmp_path):
    done = inside(f"recipes.{entry}", "--plan", "--mesh=4x2", f"--workdir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert "| 4x2 | " in done.out
    assert "Nothing was allocated or written; leave --plan out to train." in done.out
    assert not (tmp_path / "run").exists()


def test_json_is_the_only_output_and_has_what_the_table_has(inside):
    done = inside("recipes.plan", "--size=tiny", "--batch_tokens=2K", "--json", "--top=2")
    found = json.loads(done.out)
    assert len(found["candidates"]) == 2
    best = found["candidates"][0]
    assert best["fits"]
    assert found["command"].endswith(f"--remat={best['remat']}")
    assert best["sent_inside"] == pytest.approx(sum(x["bytes"] for x in best["collectives"]))
    assert sum(best["memory"].values()) <= found["usable_bytes"]


class Tags(html.parser.HTMLParser):
    """Counts a page's tags by class, and checks that they close."""

    def __init__(self):
        super().__init__()
        self.seen, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def number(self, tag, name):
        return sum(t == tag and attrs.get("class") == name for t, attrs in self.seen)


def test_the_page_has_bars_a_grid_and_both_color_schemes(inside, tmp_path):
    path = tmp_path / "plan.html"
    done = inside("recipes.plan", "--size=tiny", "--devices=v5e:8", "--batch_tokens=8K", "--top=4",
                  f"--html={path}")  # fmt: skip
    assert done.code == 0, done.err
    page = path.read_text()
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    assert tags.number("div", "row") == 2 * 4, "memory and bytes of four candidates"
    assert tags.number("span", "limit") == 4 + 1, "one for each bar of memory, and the key's"
    assert tags.number("div", "grid") == 1
    assert page.count("<b>") == 8, "a cell for each device"
    assert "prefers-color-scheme: dark" in page
    assert not any(x in page for x in ("http", "<script")), "self-contained"
    for _, attrs in tags.seen:
        if "width:" in attrs.get("style", ""):
            assert 0 <= float(attrs["style"].removeprefix("width:").rstrip("%")) <= 100


def page_of(found: Plan, top: int = 8) -> str:
    return plan_page.page(found, found.ranked[:top], "transformer", "tiny")


def rows_of(page: str) -> list[dict[str, str]]:
    """The page's table: a dict of column → cell for each row."""
    table = re.search("<table>(.*?)</table>", page, re.DOTALL)[1]
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", line) for line in table.splitlines()]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def test_a_unit_never_breaks_from_its_number():
    body = page_of(small_plan("v5e:4x2")).split("</style>")[1]
    assert re.findall("\\d\u00a0(?:[kMG]?B|m?s|µs)", body)
    assert not re.findall(r"\d (?:[kMGT]?B|m?s|µs|ns)\b", body)


def test_columns_that_are_empty_in_all_rows_are_left_out():
    always = ["mesh", "rules", "remat", "accumulate", "memory", "inside", "bound by"]
    always += ["step\u00a0≥", "per second\u00a0≤", "MFU\u00a0≤"]  # times are lower bounds
    one, two = (page_of(small_plan(kind)) for kind in ("v5e:8", "v5e:4x2"))
    assert [*rows_of(one)[0]] == always
    assert [*rows_of(two)[0]] == [*always[:6], "between", *always[6:]]
    assert "between slices</p>" not in one
    assert "between slices</p>" in two


def test_a_replica_axis_of_one_makes_no_row_of_its_own(inside):
    """With hsdp_tp, 1x4x2 is fsdp_tp on 4x2: one is shown, and the rows are filled up."""
    found = small_plan()
    every = len(found.ranked)
    strategies = [(row["rules"], row["mesh"]) for row in rows_of(page_of(found, every))]
    assert ("fsdp_tp", "4x2") in strategies
    assert ("hsdp_tp", "1x4x2") not in strategies
    assert ("hsdp_tp", "2x2x2") in strategies
    assert len(rows_of(page_of(found, 8))) == 8
    hidden = {(x.layout.strategy, x.layout.mesh.shape["data"]) for x in found.ranked}
    hidden -= {
        (x.layout.strategy, x.layout.mesh.shape["data"]) for x in answer.distinct(found.ranked)
    }
    assert {("hsdp_tp", 1), ("hsdp_tp_sp", 1)} <= hidden
    assert all(size == 1 for _, size in hidden)
    done = inside("recipes.plan", "--size=tiny", "--batch_tokens=2K", "--top=40")
    assert "| 1x4x2 | hsdp_tp |" not in done.out


def test_the_page_is_in_the_order_of_times_and_explains_ties():
    found = small_plan(rows=256)  # two are within 3%
    rows = rows_of(page_of(found, len(found.ranked)))
    steps = [row["step\u00a0≥"] for row in rows]
    seconds = [x.step for x in answer.distinct(found.ranked) if x.fits]
    ties = [x for x in seconds if x <= searching.TIE * min(seconds)]
    assert [step.startswith("≈") for step in steps] == [True] * len(ties) + [False] * (
        len(steps) - len(ties)
    )
    assert steps[len(ties) :] == [
        answer.duration(x).replace(" ", "\u00a0") for x in sorted(seconds)[len(ties) :]
    ]
    fastest = answer.duration(min(seconds)).replace(" ", "\u00a0")
    assert f"within 3% of the fastest, {fastest}, less than the estimate's error" in html.unescape(
        page_of(found, len(found.ranked))
    )


def test_times_say_how_far_published_runs_are_from_them():
    """The least and most of the last columns of the tables of published runs."""
    ratios = {"tpu": [], "gpu": []}
    for row in result_rows("planner_published") + result_rows("planner_torchtitan"):
        on_gpus = re.search("H[12]00|the same on", row[0])
        ratios["gpu" if on_gpus else "tpu"].append(float(row[-1]))
    assert {kind: (min(x), max(x)) for kind, x in ratios.items()} == answer.PUBLISHED
    line = (
        "Times follow the compiler's cycles: published runs on TPUs take 0.9 to 1.3 times as long"
    )
    assert line in html.unescape(page_of(small_plan("v5e:8")))
    assert "The devices are simulated, so times are made up." in page_of(small_plan())


def split_dims(array: jax.ShapeDtypeStruct) -> list[int]:
    """The dims of which a device holds a part; two unsplit ones where there are fewer than two."""
    part = array.sharding.shard_shape(array.shape)
    split = [dim for dim in range(len(part)) if part[dim] < array.shape[dim]]
    whole = [dim for dim in range(len(part)) if dim not in split]
    return [*split, *whole[-1:]] if len(split) == 1 else split or whole[-2:]


@pytest.mark.parametrize(
    ("strategy", "axes", "colors"),
    [
        ("fsdp_tp", {"data": 4, "model": 2}, (8, 4)),
        ("dp", {"data": 8}, (1, 8)),
        ("fsdp_pp_tp", {"data": 2, "pipe": 2, "model": 2}, (8, 2)),
    ],
    ids=["fsdp_tp", "dp", "fsdp_pp_tp"],
)
def test_the_picture_colors_what_a_device_holds(strategy, axes, colors):
    """The colored part of each box is that of JAX's own index map; equal parts have equal colors."""
    devices = parse_devices("cpu:8")
    config = dataclasses.replace(Config.tiny(), vocab_size=32)  # layers/mlp has the largest weight
    layout = make_layout(
        Transformer,
        config,
        abstract_mesh(axes, devices),
        strategy,
        batch_size=16,
        seq_len=64,
    )
    cells = re.findall(r"<svg.*?</svg>", plan_page._grid(estimate(layout, devices)))
    assert len(cells) == 8
    real = make_layout(
        Transformer, config, make_mesh(describe(axes)), strategy, batch_size=16, seq_len=64
    )
    weights = paths(real.variables()["params"])
    weight = max(weights.values(), key=lambda x: x.size)
    batch = jax.ShapeDtypeStruct((16, 64), np.int32, sharding=real.sharding(*real.batch_axes))
    drawn = []
    for cell, device in zip(cells, real.mesh.devices.flat, strict=True):
        boxes = [
            dict(re.findall(r'([\w-]+)="([^"]*)"', box)) for box in re.findall("<rect.*?/>", cell)
        ]
        pairs = [*zip(boxes[::2], boxes[1::2], strict=True)]
        third = len(split_dims(weight)) > 2
        assert len(pairs) == 2 + third, "a bar for the layers of a stage"
        for array, (whole, part) in ((weight, pairs[-2]), (batch, pairs[-1])):
            index = array.sharding.devices_indices_map(array.shape)[device]
            *_, down, across = split_dims(array)  # no case splits the last dim alone
            for dim, place, extent in ((down, "y", "height"), (across, "x", "width")):
                start, stop, _ = index[dim].indices(array.shape[dim])
                begin = (float(part[place]) - float(whole[place])) / float(whole[extent])
                share = float(part[extent]) / float(whole[extent])
                size = array.shape[dim]
                assert (begin, share) == pytest.approx(
                    (start / size, (stop - start) / size), abs=0.01
                )
        drawn.append((pairs[0][1]["fill"], pairs[-1][1]["fill"]))
    assert tuple(len({*fills}) for fills in zip(*drawn, strict=True)) == colors


@pytest.mark.full
@pytest.mark.skipif(not BROWSER, reason="needs Chromium, which .ci/run installs")
@pytest.mark.parametrize(("dark", "background"), [(False, (255, 255, 255)), (True, (13, 17, 23))])
def test_a_browser_draws_the_bars_in_both_color_schemes(dark, background, inside, tmp_path):
    path, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    done = inside("recipes.plan", "--size=8b", "--devices=v5p:64", "--batch_tokens=4M", "--top=4",
                  "--seq_len=8192", "--json", f"--html={path}")  # fmt: skip
    subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1280,3000",
         f"--user-data-dir={tmp_path / 'browser'}", f"--screenshot={picture}", path.as_uri()],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    pixels_YXC = np.asarray(PIL.Image.open(picture).convert("RGB")).astype(int)
    assert tuple(pixels_YXC[0, 0]) == background
    assert (pixels_YXC[:, [0, -1]] == background).all(), "nothing is wider than a laptop's window"
    # The colors of the page's key: --a to --e of this scheme.
    scheme = plan_page.STYLE.split("prefers-color-scheme: dark")[dark]
    colors = [
        tuple(bytes.fromhex(re.search(f"--{name}: #(......)", scheme)[1])) for name in "abcde"
    ]
    inside_Y = np.stack([(pixels_YXC == color).all(-1) for color in colors]).sum(-1)
    # A bar is a run of lines of the picture with the same widths; the key's squares are smaller.
    bars = [width for width, run in itertools.groupby(inside_Y.T.tolist()) if len([*run]) >= 15]
    bars = [width for width in bars if sum(width) > 5 * 16]
    plan = json.loads(done.out)
    memory = [list(x["memory"].values()) for x in plan["candidates"]]
    sent = [[x["sent_inside"], x["sent_between"]] for x in plan["candidates"]]
    track = max(map(sum, bars[4:]))  # the most bytes fill the whole width
    expected = np.zeros((8, 5))
    expected[:4] = np.array(memory) / plan["usable_bytes"] * track
    expected[4:, :2] = np.array(sent) / max(map(sum, sent)) * track
    np.testing.assert_allclose(bars, expected, atol=2)


@pytest.mark.full
def test_rows_beyond_the_trained_context_are_named(inside):
    flags = ("--size=8b", "--devices=v5p:64", "--batch_tokens=8M", "--top=1")
    line = (
        "--seq_len=131072 is beyond the 8,192 tokens that the published 8b was trained with: its "
        "wavelengths would have to be scaled (rope_scaling), and the model trained on long rows."
    )
    assert f"\n{line}\n" in inside("recipes.plan", *flags, "--seq_len=131072").out
    long = json.loads(inside("recipes.plan", *flags, "--seq_len=131072", "--json").out)
    assert long["notes"] == [line]
    assert "beyond" not in inside("recipes.plan", *flags, "--seq_len=8192").out
    assert contexts.beyond("transformer", "1b", 131_072) == []
    assert len(contexts.beyond("transformer", "1b", 131_073)) == 1


def test_every_published_size_has_its_context():
    """A new size of a language model is added to report/contexts.py, or to those that nobody published."""
    unpublished = {"tiny", "small", "medium", "124m"}
    for name in entries.ENTRIES:
        zoo = entries.zoo_file(name)
        config = zoo.SIZES["tiny"]()
        if hasattr(config, "vocab_size") and not hasattr(config, "max_positions"):
            assert contexts.TRAINED[name].keys() == entries.sizes(name).keys() - unpublished, name


@pytest.mark.full
def test_if_nothing_fits_it_names_a_change_that_would(inside):
    done = inside("recipes.plan", "--size=8b", "--devices=v5e:4", "--batch_tokens=64K",
                  "--seq_len=2048", "--top=2")  # fmt: skip
    assert done.code == 0
    *_, last = done.out.splitlines()
    assert last.startswith("Nothing fits. The cheapest change: with --devices=v5e:")
    devices = last.split("--devices=")[1].split(",")[0]
    again = inside("recipes.plan", "--size=8b", f"--devices={devices}", "--batch_tokens=64K",
                   "--seq_len=2048", "--top=1")  # fmt: skip
    assert " is first" in again.out


@pytest.mark.full
def test_large_clusters_are_planned_by_arithmetic():
    zoo = entries.zoo_file("transformer")
    config = dataclasses.replace(zoo.SIZES["8b"](), dtype="bfloat16")
    for devices, count in (("v5p:6144", 6_144), ("v5e:256x16", 4_096)):
        found = search(Job(Transformer, config, 2 * count, 8_192), parse_devices(devices))
        assert found.best
        assert found.best.devices.count == count


# ---- the real compiler -------------------------------------------------------------------------


@pytest.mark.full
def test_confirmed_figures_stand_beside_the_estimates(inside, monkeypatch):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", QUICK)
    done = inside("recipes.plan", "--size=tiny", "--batch_tokens=2K", "--confirm=1", "--json")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["confirmed"]
    assert found["compiled_memory"] > 0
    assert found["compiled_sent"] is not None
    assert found["compiled_seconds"] is None, "only TPUs' compiler estimates cycles"
    lines = r"compiling, 1 of 1; Ctrl-C stops\n(.*: still compiling.*\n)*.*: compiled in \d+ s\n$"
    assert re.search(lines, done.err)


@pytest.mark.full
def test_devices_are_simulated_after_planning(run):
    """In a process of its own: once planning had made arrays, there would be one device."""
    flags = ("--size=tiny", "--batch_tokens=2K", "--confirm=1", "--json", "--optimizer=muon")
    done = run("recipes.plan", *flags, XLA_FLAGS=XLA_FLAGS)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["confirmed"]
    assert found["compiled_sent"] > 0


def test_a_tpu_s_step_is_confirmed_by_its_cycles(monkeypatch, tmp_path):
    """A recorded program for 4 v5e in place of the compiler's."""
    text, bundles = step_cycles.read_program(ROOT / "tests" / "golden" / "scan_with_kernel.hlo")
    program = types.SimpleNamespace(as_text=lambda: text)
    monkeypatch.setattr(planner, "compile_step", lambda *_: program)
    monkeypatch.setattr(planner, "make_program", lambda *_: None)
    monkeypatch.setattr(planner, "read_bundles", lambda folder: bundles)
    monkeypatch.setattr(planner.report, "peak_memory", lambda _: 10**6)
    devices = parse_devices("v5e:4")
    flags = planner.Flags(size="tiny", devices="v5e:4", seq_len=128)
    job, abstract, _ = planner.make_job(flags, devices)
    costs = planner._confirm(job.model, search(job, devices, abstract).ranked[0], 0, tmp_path)
    total = step_cycles.count(step_cycles.read_hlo(text, devices, bundles), devices).total
    assert costs["compiled_seconds"] == total / (197e12 / 2**17)
    ratio = costs["seconds"]["step"] / costs["compiled_seconds"]
    assert planner._line(costs).endswith(f" | {ratio:.2f} |")


def test_a_slow_compiler_is_said_to_be_at_work(monkeypatch, capsys):
    monkeypatch.setattr(planner, "SAY_SECONDS", 0.1)
    assert planner._in_background(lambda: time.sleep(1) or 7, "fsdp on 64") == 7
    assert capsys.readouterr().err.startswith("fsdp on 64: still compiling after 0 s\n")


def test_the_tpu_s_library_has_no_host_to_look_for(monkeypatch):
    """It would print five lines about the variables that it misses."""
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    compilers._slice("v5p", 64)
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "localhost"
    assert os.environ["TPU_ACCELERATOR_TYPE"] == "v5p-8"
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"


def test_ctrl_c_prints_what_is_known(monkeypatch, capsys):
    found, calls = small_plan(), []

    def confirm(model, candidate, layers, files):
        calls.append(candidate)
        if len(calls) == 2:
            raise KeyboardInterrupt
        compiled = dict.fromkeys(("compiled_memory", "compiled_sent"), 10**6)
        return answer.to_json(candidate) | compiled | {"compiled_seconds": None}

    monkeypatch.setattr(planner, "_confirm", confirm)
    flags = planner.Flags(confirm=3)
    handler = planner.signal.getsignal(planner.signal.SIGINT)
    try:
        confirmed = planner.confirm(found, flags, print)
    finally:
        planner.signal.signal(planner.signal.SIGINT, handler)
    assert len(confirmed) == 1
    assert "Stopped: 1 of 3 are confirmed." in capsys.readouterr().out


def test_without_a_compiler_it_says_what_is_missing(inside):
    done = inside(
        "recipes.plan", "--size=tiny", "--devices=a100:8", "--batch_tokens=2K", "--confirm=1"
    )
    assert done.code == 0
    assert done.err == "Not confirmed: there is no description of a100 to compile for\n"


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--devices=v5q:8"], "--devices=v5q:8 has kind 'v5q'; use v5p, v5e"),
        (["--devices=v5e"], "--devices=v5e is not a kind and a number; write v5e:8"),
        (["--devices=v5e:24"], "--devices=v5e:24 is not a slice that exists; the nearest are v5e:16 and v5e:32"),
        (["--devices=h100:12"], "--devices=h100:12 can't be formed of nodes of 8 GPUs; use h100:16"),
        (["--devices=v5e:256", "--batch_tokens=2", "--seq_len=2"], "--batch_tokens=2 has 1 row, too few"),
        (["--size=9b"], "--size=9b is not one of tiny, small"),
        (["--batch_tokens=4G"], "--batch_tokens=4G is not a number of tokens; write 4M or 524288"),
        (["--batch_tokens=1000"], "--batch_tokens=1000 is not a whole number of rows of --seq_len=128"),
        (["--html=/nowhere/plan.html"], "--html=/nowhere/plan.html: there is no folder /nowhere"),
        (["--confirm_layers=2"], "--confirm_layers=2 is for --confirm, and there is none"),
        (["--entry=mlp", "--confirm=1"], "--confirm compiles language models, and mlp is none"),
        (["--entry=gpt2", "--size=124m", "--seq_len=2048"], "--seq_len=2048 is more than the 1024 positions"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(flags, sentence, inside):
    done = inside("recipes.plan", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {sentence}")
    assert done.err.count("\n") == 1


# ---- a model of a user's -------------------------------------------------------------------------

DOCS = ROOT / "recipes" / "docs"
MIXER = ["--model=model.py:Mixer", "--loss=model.py:loss", "--batch=model.py:batch"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty folder from which users' files are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - known:
        if str(tmp_path) in str(vars(sys.modules[name]).get("__file__")):
            del sys.modules[name]


@pytest.fixture
def mixer(here):
    """The Mixer of proving.md, which uses Flax alone."""
    text = (
        (DOCS / "proving.md").read_text().split("<!-- python: proving model.py -->\n```python\n")[1]
    )
    (here / "model.py").write_text(text.split("```")[0])


def test_a_copied_model_has_the_plan_of_the_zoo_s(here, inside):
    shutil.copytree(
        ROOT / "zoo", here / "planned", ignore=shutil.ignore_patterns("checkpoints", "__*")
    )
    flags = ["--batch_tokens=2K", "--json", "--top=99"]
    done = inside("recipes.plan", "--model=planned/moe.py:MoE", "--config=tiny", *flags)
    assert (done.code, done.err) == (0, "")
    own = json.loads(done.out)
    ours = json.loads(inside("recipes.plan", "--entry=moe", "--size=tiny", *flags).out)
    assert own["candidates"] == ours["candidates"]
    assert len(own["candidates"]) > 10
    assert (own["command"], own["notes"]) == (None, []), "no recipe trains it; nothing is assumed"


@pytest.mark.usefixtures("mixer")
def test_what_is_assumed_of_a_user_s_model_is_said(inside):
    done = inside("recipes.plan", *MIXER, "--batch_tokens=64", "--json")
    assert (done.code, done.err) == (0, "")
    plan = json.loads(done.out)
    text = (DOCS / "plan.md").read_text().split("<!-- output: planning a Mixer -->\n```\n")[1]
    assert plan["notes"] == text.split("\n```")[0].splitlines()
    by_mesh = {x["rules"] + str(x["mesh"].get("model", 1)): x for x in plan["candidates"]}
    assert by_mesh.keys() == {"dp1", "tp2", "tp4", "tp8"}
    weights = 2 * (16 * 32 * 2 + 32 * 128 * 2) + 12 * 32 + 32 * 8  # two blocks, stem and head
    vectors = 2 * (32 + 16 + 128 + 32 + 2 * 2 * 32) + 32 + 2 * 32 + 8  # biases and norms
    assert by_mesh["dp1"]["memory"]["parameters"] == 4 * (weights + vectors)
    halved = 2 * (16 * 32 * 2 + 32 * 128 * 2 + 32 + 128)  # what has the axis `hidden`
    assert by_mesh["tp2"]["memory"]["parameters"] == 4 * (weights + vectors - halved / 2)
    purposes = {x["purpose"] for x in by_mesh["tp2"]["collectives"]}
    assert purposes == {"gradients", "activations"}


@pytest.mark.usefixtures("mixer")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--config=tiny"], "--config=tiny is for a model of your own; add --model="),
        (["--model=nowhere.py:Net"], "--model=nowhere.py:Net: there is no file nowhere.py"),
        (MIXER[:2], "the loss takes patches, label, and only a batch of tokens"),
        (
            [*MIXER, "--entry=moe"],
            "--entry=moe is for the zoo's models, and --model=model.py:Mixer is",
        ),
        ([*MIXER, "--size=8b"], "--size=8b is for the zoo's models, and --model=model.py:Mixer is"),
        ([*MIXER, "--confirm=1"], "--confirm compiles entries of the zoo, and --model is none"),
        ([*MIXER, "--matmul=int8"], "--matmul=int8 is for models with layers, and Mixer has none"),
    ],
)
def test_mistakes_about_a_user_s_model_are_one_line(flags, sentence, inside):
    done = inside("recipes.plan", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {sentence}")
    assert done.err.count("\n") == 1


def test_sizes_kinds_and_numbers_may_be_in_any_case(inside):
    lower, upper = (
        inside("recipes.plan", f"--size={size}", f"--devices={kind}:8", f"--batch_tokens=8{k}")
        for size, kind, k in (("tiny", "v5e", "K"), ("Tiny", "V5E", "k"))
    )
    assert lower.code == upper.code == 0, upper.err
    assert lower.out == upper.out


def test_every_kind_of_hardware_forms_eight_devices():
    for kind in HARDWARE:
        assert parse_devices(f"{kind}:8").count == 8
