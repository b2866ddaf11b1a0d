"""The benchmarks' arithmetic against figures computed by hand; each word once at toy size; meshes.py."""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

from recipes.common.entries import example
from recipes.common.entries import model as model_of
from recipes.common.report import flops, hlo
from recipes.common.runtime.errors import Stopped, UserError
from recipes.common.runtime.mesh import make_mesh, parse
from recipes.common.sharding.compiler_options import COMPILER_OPTIONS
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.bench import common, compiled, gpu, gpu_trace, memory, slices, targets
from recipes.instruments.bench import row as rows
from recipes.instruments.bench.row import Row
from recipes.instruments.plan import compilers as aot
from recipes.instruments.plan import step_memory as analysis_memory
from recipes.instruments.plan.estimate import abstract_mesh, estimate
from recipes.instruments.plan.hardware import parse_devices
from recipes.instruments.plan.step_memory import IN_FLIGHT, memory_parts, on_host
from recipes.instruments.plan.textbook import device_tokens, textbook, transfers, weight_transfers
from tests.conftest import ROOT, full_except
from tests.support.entries import CASES, ENTRIES
from tests.support.known_programs import ACROSS_SLICES
from tests.support.quick import QUICK
from zoo.llama_relatives import RULES, Config, Transformer
from zoo.siglip import Config as Siglip
from zoo.sizes import SIGLIP

pytestmark = pytest.mark.promise("bench")

NOTHING_ON_HOST = {"host_argument_size_in_bytes": 0, "host_temp_size_in_bytes": 0}
PLAIN = Config(512, 32, 3, num_heads=8, num_kv_heads=8, head_dim=4, mlp=64, tie_embeddings=False)


def test_flops_by_hand():
    # A layer: q, k, v, o 32·32 each, three of 32·64; and the unembedding table, 512·32.
    n = 3 * (4 * 32 * 32 + 3 * 32 * 64) + 512 * 32
    assert trace_shape(Transformer, PLAIN).multiplied == n
    tokens, square = 2 * 16, 12 * 3 * 16 * 8 * 4 * 2 * 16
    assert flops.decoder(trace_shape(Transformer, PLAIN), 16, batch_size=2) == {
        "causal": 6 * n * tokens + square / 2,
        "full": 6 * n * tokens + square,
    }
    # A window has the triangle in which it begins, and the band after that.
    for window, share in ((4, (16 * 4 - 4 * 4 / 2) / 16**2), (16, 1 / 2), (99, 1 / 2)):
        config = dataclasses.replace(PLAIN, sliding_window=window)
        found = flops.decoder(trace_shape(Transformer, config), 16, batch_size=2)["causal"]
        assert found == 6 * n * tokens + square * share


def test_matmul_params_are_all_but_norms_and_the_input_embedding():
    for config in (Config.gpt2_124m(), Config.llama_8b()):
        step = common.make_step(config, "dp", make_mesh("1x1"), 1, 8)
        whole = sum(a.size for a in jax.tree.leaves(step.abstract["params"]))
        norms = (2 * config.num_layers + 1) * config.embed
        lookup = 0 if config.tie_embeddings else config.vocab_size * config.embed
        assert step.layout.shape.multiplied == whole - norms - lookup


def test_an_encoder_without_logits_multiplies_no_table():
    """A layer: q, k, v, o of 64 · 64 and two of 64 · 256; masks are filled in by 384 · 64 more."""
    fill = ENTRIES["bert"].config
    found = {
        task: trace_shape(model_of("bert"), dataclasses.replace(fill, task=task, labels=("a", "b")))
        for task in ("fill", "classify", "embed")
    }
    layers = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    assert found["classify"].multiplied == found["embed"].multiplied == layers
    assert found["fill"].multiplied == layers + 384 * 64
    assert {shape.vocab_size for shape in found.values()} == {384}


WIDE = {"embed": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "mlp": 1_024}
WIDE |= {"vocab_size": 2_048, "capacity": 1.0, "image_size": 64, "patch": 8, "dense_layers": 0}
WIDE |= {"global_kv_heads": 4, "global_head_dim": 64, "expert_mlp": 1_024}
LATENT = {"nope_dim": 64, "value_dim": 64, "kv_latent": 128, "q_latent": 128}  # of deepseek
# Siglip has two outputs.
ATTENTIVE = [
    name for name in ENTRIES if hasattr(ENTRIES[name].config, "num_heads") and name != "siglip"
]


@pytest.mark.parametrize("entry", full_except(ATTENTIVE, ATTENTIVE[:1]))
def test_flops_are_those_that_xla_counts(entry):
    """A forward pass is a third of training; XLA also counts norms, softmax and activations."""
    tiny, rows = ENTRIES[entry].config, 4
    fields = {field.name for field in dataclasses.fields(tiny)}
    wide = WIDE | (LATENT if entry == "deepseek" else {})
    changes = {name: value for name, value in wide.items() if name in fields}
    layers = len(tiny.kinds) if "vocab_size" in fields else 1  # XLA counts a scan's body once
    config = dataclasses.replace(tiny, num_layers=layers, **changes)
    layout = make_layout(model_of(entry), config, make_mesh("1x1"), "dp")
    if "vocab_size" in fields:
        given, want = np.zeros((rows, 64), np.int32), flops.decoder(layout.shape, 64, rows)["full"]
    else:
        given = np.zeros((rows, 64, 64, config.channels), np.float32)
        want = rows * flops.encoder(layout)
    forward = layout.lower(lambda v, x: layout.model.merge(v)(x), layout.variables(), given)
    most = 1.1 if entry == "bert" else 1.02  # the dense layer of its head is not counted
    assert 1 < forward.cost_analysis()["flops"] / (want / 3) < most


TABLES = 2 * 512 * 32
LAYERS = 3 * (4 * 32 * 32 + 3 * 32 * 64)
NORMS = 7 * 32
ACTIVATIONS = (4 * 3 + 2) * 4 * 16 * 32  # of 4 sequences, a device's part on 4x2


@pytest.mark.parametrize(
    ("strategy", "mesh", "elements"),
    [
        ("dp", "8", 2 * 7 / 8 * (TABLES + LAYERS + NORMS)),
        ("fsdp", "8", 3 * 7 / 8 * (TABLES + LAYERS) + 2 * 7 / 8 * NORMS),
        ("tp", "4x2", 2 * 3 / 4 * ((TABLES + LAYERS) / 2 + NORMS) + 2 / 2 * ACTIVATIONS),
        ("fsdp_tp", "4x2",
         3 * 3 / 4 * (TABLES + LAYERS) / 2 + 2 * 3 / 4 * NORMS + 2 / 2 * ACTIVATIONS),
        ("hsdp_tp", "2x2x2",
         (3 / 2 + 2 / 2 / 2) * (TABLES + LAYERS) / 2 + 2 * 3 / 4 * NORMS + 2 / 2 * ACTIVATIONS),
    ],
)  # fmt: skip
def test_textbook_by_hand(strategy, mesh, elements):
    step = common.make_step(PLAIN, strategy, make_mesh(mesh), 16, 16)
    assert textbook(step.layout) == pytest.approx(4 * elements)


def test_textbook_reads_the_table_and_no_names():
    """Custom rules with other mesh axes: one splits only the attention, one only the MLP."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("rows", "cols"))
    for split, of_a_layer, weights in (
        ({"heads": "cols", "kv_heads": "cols"}, 4 * 32 * 32, TABLES + LAYERS + NORMS),
        ({"mlp": "cols"}, 3 * 32 * 64, TABLES + LAYERS + NORMS),
    ):
        step = common.make_step(PLAIN, {"batch": "rows"} | split, mesh, 16, 16)
        gradients = weights - 3 * of_a_layer * 3 / 4
        activations = 2 * 3 * 8 * 16 * 32  # forward and backward, layers, a device's 8 sequences
        elements = 2 / 2 * gradients + 2 * 3 / 4 * activations
        assert textbook(step.layout) == pytest.approx(4 * elements)


def test_positions_are_divided_between_devices_like_rows():
    """A quarter of each of four rows costs a device as much as one whole row."""
    config = dataclasses.replace(Config.tiny(), remat="full")
    rows = common.make_step(config, "dp", make_mesh("8"), 8, 64)
    parts = common.make_step(config, "cp", make_mesh("data=2,seq=4"), 8, 64)

    def gradients(step):
        return sum(x.bytes for x in weight_transfers(step.layout))

    assert device_tokens(parts.layout) == device_tokens(rows.layout) == 64
    assert gradients(parts) == gradients(rows), "gradients are summed over both"
    for name in ("parameters", "gradients", "saved activations"):
        assert memory_parts(parts.layout)[name] == memory_parts(rows.layout)[name]
    found = parts.batch()
    assert {x.sharding.shard_shape(x.shape) for x in found.values()} == {(4, 16)}


def test_dp_sends_the_textbook_and_no_more():
    step = common.make_step(PLAIN, "dp", make_mesh("8"), 16, 16)
    sent = hlo.sent_by_kind(step.lower().compile(QUICK).as_text(), 8)
    assert list(sent) == ["all-reduce"]
    assert sent["all-reduce"] == pytest.approx(textbook(step.layout), rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2},{3,4,5}}", 3),
        ("[4,8]<=[32]", 8),
        ("mesh['axis_0'=2,'axis_1'=8] {'axis_1'}", 8),
        ("mesh['axis_0'=2,'axis_1'=8] {'axis_0','axis_1'}", 16),
        ("", 64),
    ],
)
def test_sizes_of_groups(groups, size):
    assert hlo.group_size(groups, 64) == size


# A reduce-scatter as the TPU compiler writes it: a ring of permutes, two on one channel in a loop whose
# unsigned counter grows by two, without a trip count, and one permute after the loop. Shortened.
RING = """
%cond (p: (u32[], bf16[8,4])) -> pred[] {
  %c = u32[]{:T(128)} constant(8), metadata={op_name="x"}
  %p = (u32[], bf16[8,4]) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %c), direction=LT
}

%body (p: (u32[], bf16[8,4])) -> (u32[], bf16[8,4]) {
  %two = u32[]{:T(128)} constant(2)
  %p.1 = (u32[], bf16[8,4]) parameter(0)
  %i.1 = u32[]{:T(128)} get-tuple-element(%p.1), index=0
  %x = bf16[8,4]{1,0} get-tuple-element(%p.1), index=1
  %s = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %d = bf16[8,4]{1,0} collective-permute-done(%s)
  %e = bf16[8,4]{1,0} collective-permute(%d), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %next = u32[]{:T(128)} add(%i.1, %two)
  ROOT %t = (u32[]{:T(128)}, bf16[8,4]{1,0}) tuple(%next, %e)
}

ENTRY %main (a: bf16[8,4]) -> bf16[8,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %zero = u32[]{:T(128)} constant(0)
  %t0 = (u32[], bf16[8,4]) tuple(%zero, %a)
  %w = (u32[], bf16[8,4]) while(%t0), condition=%cond, body=%body
  %y = bf16[8,4]{1,0} get-tuple-element(%w), index=1
  ROOT %r = bf16[8,4]{1,0} collective-permute(%y), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
}
"""


def test_a_ring_that_counts_in_twos():
    found = hlo.collectives(RING)
    assert [(x.kind, x.bytes) for x in found] == [("collective-permute", 64)] * 3
    assert [x.times for x in found] == [4, 4, 1]
    assert hlo.sent_by_kind(RING, 4) == {"collective-permute": 64 * 9}


def test_memory_parts_by_hand():
    config = dataclasses.replace(PLAIN, remat="sublayers")
    parts = memory_parts(common.make_step(config, "fsdp", make_mesh("8"), 16, 16).layout)
    params = 4 * ((TABLES + LAYERS) / 8 + NORMS)
    assert parts["parameters"] == params
    assert parts["optimizer"] == pytest.approx(2 * params, abs=64)  # and counters
    # Layers, rows, T, a layer's input and one more.
    assert parts["saved activations"] == 3 * 2 * 16 * 2 * 32 * 4
    # The layers' backward pass: the table, two layers' weights, q, k, v, mlp and so on of 32 tokens,
    # and 16 × 16 scores of 8 heads.
    table, layer, inside = 512 * 32 * 4, LAYERS / 3 * 4, 32 * (4 * 32 + 3 * 64 + 2 * 32) * 4
    inside += 2 * 8 * 16 * 16 * 4
    loss = table + 32 * 512 * 8  # one chunk: the gradient follows the logits
    layers = 4 * (LAYERS / 8 + NORMS - 32)  # of the norms, the final one is not stacked
    backward = layers + table + 2 * layer + inside
    assert parts["gradients"] + parts["live working set"] == max(loss, backward)


def test_memory_parts_without_what_the_host_holds_by_hand():
    config = dataclasses.replace(PLAIN, remat="offload")
    layout = common.make_step(config, "fsdp", make_mesh("8"), 16, 16).layout
    kept, parts = memory_parts(layout), memory_parts(layout, offload="optimizer")
    inputs = 3 * 2 * 16 * 32 * 4  # layers, rows, T, D
    host = {"optimizer": kept["optimizer"], "saved activations": inputs}
    assert on_host(layout, offload="optimizer") == host
    assert on_host(layout) == {"saved activations": inputs}
    assert parts == kept | {"optimizer": 0}
    assert parts["saved activations"] == IN_FLIGHT * inputs / 3


def kept_by_stacks(step: common.Step, depths: tuple[int, ...]) -> int:
    """Bytes that the forward loops over stacks of these many layers hand to what follows."""
    rows = step.layout.abstract_batch(step.example)
    with step.layout.trace():
        traced = jax.make_jaxpr(step.function)(step.abstract, rows)
    loops = [e for e in traced.jaxpr.eqns if e.primitive.name == "scan"][: len(depths)]
    used = {id(v) for e in traced.jaxpr.eqns for v in e.invars}
    stacks = [
        v.aval
        for loop, depth in zip(loops, depths, strict=True)
        for v in loop.outvars
        if id(v) in used and v.aval.shape[0] == depth
    ]
    return sum(x.size * x.dtype.itemsize for x in stacks)


@pytest.mark.parametrize(
    ("attention", "remat"),
    full_except(
        [
            *itertools.product(["xla"], [x for x in memory.POLICIES if x != "offload"]),
            *itertools.product(["splash", "flash"], ["none", "dots"]),
        ],
        fast=[("xla", "full"), ("xla", "dots"), ("splash", "none"), ("flash", "dots")],
    ),
)
def test_saved_activations_are_what_jax_saves(attention, remat):
    """The estimate against the residuals that JAX's own trace hands from the layers' forward loop to
    their backward loop. All dims differ, so that none is mistaken for another.
    """
    config = Config(512, 96, 5, num_heads=6, num_kv_heads=2, head_dim=20, mlp=280)
    config = dataclasses.replace(config, dtype="bfloat16", remat=remat, attention=attention)
    step = common.make_step(config, "fsdp", make_mesh("1"), 2, 1_024, segments=True)
    kept = kept_by_stacks(step, (5,))
    if remat == "none":  # XLA merges what the trace has thrice, q's, k's and v's input, and twice
        kept -= 3 * 5 * 2 * 1_024 * config.embed * 2
    assert memory_parts(step.layout)["saved activations"] == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_saved_activations_of_two_towers_are_what_jax_saves(remat):
    """Each tower's layers have rows and a width of their own; beside them is what remat leaves alone."""
    towers = {"clip": True, "joint": 24, "text_tower": (80, 3, 4, 200)}
    config = Siglip(32, 2, 264, 48, 96, 5, num_heads=6, mlp=280, remat=remat, **towers)
    step, plain = (
        common.make_step(
            x, "fsdp", make_mesh("1"), 4, 0, model=model_of("siglip"), example=example("siglip", x)
        )
        for x in (config, dataclasses.replace(config, num_layers=1, text_tower=(80, 1, 4, 200)))
    )  # fmt: skip
    planned = [memory_parts(x.layout)["saved activations"] for x in (step, plain)]
    found = kept_by_stacks(step, (5, 3)) - kept_by_stacks(plain, (1, 1))
    assert planned[0] - planned[1] == pytest.approx(found, rel=0.01)


def test_memory_of_a_long_batch_of_pairs_is_near_the_compiler_s():
    """SigLIP B/16, 32,768 pairs on 64 v5e: 8.7 GB (jax 0.10.2, libtpu 0.0.42.1)."""
    config = dataclasses.replace(SIGLIP["b16"](), dtype="bfloat16")
    mesh = abstract_mesh({"data": 64}, parse_devices("v5e:64"))
    layout = make_layout(model_of("siglip"), config, mesh, "fsdp", batch_size=32_768)
    assert sum(memory_parts(layout).values()) == pytest.approx(8.7e9, rel=0.15)


@pytest.mark.parametrize(
    ("error", "text", "needed"),
    [
        ("Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm. Exceeded",
         "does not fit: 21.5 GB of 16.9 GB", 20 * 2**30),
        ("memory required for HLO temporaries (512.00M) exceeds available HBM (0.25G).",
         "does not fit: 736.9 MB of 268.4 MB", 2**29 + 2e8),
    ],
)  # fmt: skip
def test_compiler_errors_about_memory_are_parsed(error, text, needed):
    assert aot.too_large(error, arguments=2e8) == (text, needed)


def test_which_policy_recomputes_least_and_fits(monkeypatch, capsys):
    """Uses 8b on 8 H100 and a fake compiler with the estimate's peaks; one policy isn't compiled."""
    asked = []

    def compile_step(step, kind, what):
        asked.append(what)
        peak = sum(memory_parts(step.layout).values())
        fits = types.SimpleNamespace(**NOTHING_ON_HOST, peak_memory_in_bytes=peak)
        program = types.SimpleNamespace(memory_analysis=lambda: fits)
        return program if peak < 40e9 else aot.TooLarge("does not fit: much", peak)

    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    monkeypatch.setattr(memory, "check_targets", lambda *_: None)
    monkeypatch.setattr(memory, "topology", lambda *_: mesh)
    for module in (memory, analysis_memory):
        monkeypatch.setattr(module, "kernel", lambda *_: "flash")
    monkeypatch.setattr(memory, "compile_step", compile_step)
    memory.memory(memory.MemoryFlags(kinds="h100", chips="8", rows=2, which=True))
    assert asked == ["8b dots on 8 h100", "8b sublayers on 8 h100"]
    row = capsys.readouterr().out.splitlines()[2]
    assert row.startswith("| 8b | 8 h100 | flash | sublayers | - | 25.7 GB |")
    assert re.search(r"\| dots: 4\d\.\d GB \|$", row), row


def test_other_compiler_errors_are_not_about_memory():
    assert aot.too_large("INTERNAL: no", arguments=0) is None


# Peaks of 8b by XLA's attention, as in COMPILED below, but of today's programs.
OF_TODAY = [  # policy, chips, GB, within, kernel
    ("none", 16, 114.1, 0.05, "xla"),  # v4, which it doesn't fit
    ("none", 256, 101.1, 0.02, "xla"),  # v5p
]

# While layers compute, the table's gradient is the loss's float32 sum. The programs of the next three tables are from
# when it had 16 bits.
SUM = 2 * 128_256 * 4_096  # bytes more, if no devices share the table

# Peaks of the compiled step (jax 0.10.2, libtpu 0.0.42.1) by XLA's attention, 4,096 tokens per chip: the smallest and the
# largest of all kinds. Three, on 256 chips, are more than 5% off: see recipes/instruments/results/tpu.md.
COMPILED = [  # policy, chips, GB, within
    ("full", 16, 13.2, 0.02),  # v5e
    ("full", 16, 13.9, 0.04),  # v5p
    ("sublayers", 16, 14.1, 0.03),  # v4
    ("sublayers", 16, 15.0, 0.04),  # v5p
    ("dots", 16, 23.1, 0.03),  # v4
    ("dots", 16, 24.1, 0.03),  # v5p
    ("full", 256, 5.1, 0.04),  # v5e
    ("full", 256, 5.6, 0.07),  # v5p
    ("sublayers", 256, 6.0, 0.06),  # v4
    ("sublayers", 256, 6.9, 0.09),  # v5p
    ("dots", 256, 15.0, 0.04),  # v5e
    ("dots", 256, 16.0, 0.04),  # v5p
]


def test_chips_along_mesh_axes_suit_every_strategy(monkeypatch):
    monkeypatch.setattr(targets, "trace_shape", functools.cache(targets.trace_shape))
    for size, chips, strategy in itertools.product(("124m", "1b", "8b"), (16, 256), RULES):
        axes = targets.MeshFlags().axes(size, chips, strategy)
        assert math.prod(axes.values()) == chips
    found = [targets.MeshFlags().axes("8b", chips, "fsdp_cp_tp") for chips in (16, 256)]
    assert [list(axes.values()) for axes in found] == [[1, 4, 4], [8, 4, 8]]


# With segment ids, by the platform's kernel (v5p: jax 0.12, libtpu 0.0.50.1; h100: jax 0.10.2).
BY_KERNELS = [  # policy, chips, GB, within, kernel
    ("full", 16, 11.8, 0.03, "splash"),  # v5p
    ("sublayers", 16, 12.7, 0.05, "splash"),  # v5p
    ("full", 8, 20.3, 0.03, "flash"),  # h100
    ("sublayers", 8, 21.4, 0.03, "flash"),
    ("dots", 8, 30.3, 0.03, "flash"),
    ("none", 8, 72.7, 0.01, "flash"),
    ("dots", 16, 21.6, 0.04, "splash"),
    ("none", 16, 64.7, 0.02, "splash"),
]


@pytest.mark.parametrize(
    ("row", "more"),
    [
        *((row, 0) for row in OF_TODAY),
        *(((*row, "xla"), SUM) for row in COMPILED),
        *((row, SUM) for row in BY_KERNELS),
    ],
    ids=str,
)
def test_memory_of_8b_is_what_the_compiler_says(row, more):
    remat, chips, peak, within, attention = row
    config = Config.llama_8b()
    config = dataclasses.replace(config, dtype="bfloat16", remat=remat, attention=attention)
    mesh = jax.sharding.AbstractMesh((chips,), ("data",))
    step = common.make_step(config, "fsdp", mesh, chips, 4_096, segments=attention != "xla")
    assert sum(memory_parts(step.layout).values()) == pytest.approx(peak * 1e9 + more, rel=within)


# Rows that chips share, on 16 v5p (jax 0.12, libtpu 0.0.50.1).
SHARED = [  # rules, mesh, tokens of a row, policy, GB, within
    ("fsdp_cp", "data=1,seq=16", 131_072, "full", 13.7, 0.01),
    ("tp", "2x8", 32_768, "full", 27.58, 0.03),
    ("tp_sp", "2x8", 32_768, "full", 20.35, 0.05),
    ("tp_sp", "2x8", 32_768, "gathered", 36.98, 0.02),
    ("fsdp_tp_sp", "2x8", 32_768, "full", 11.35, 0.05),
]


@pytest.mark.parametrize("row", SHARED, ids=str)
def test_memory_of_rows_that_chips_share_is_what_the_compiler_says(row):
    rules, mesh, seq_len, remat, peak, within = row
    config = dataclasses.replace(
        Config.llama_8b(), dtype="bfloat16", remat=remat, attention="splash"
    )
    axes = parse(mesh)
    over = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    step = common.make_step(config, rules, over, axes["data"], seq_len, segments=True)
    peak = peak * 1e9 + SUM / axes.get("model", 1)
    assert sum(memory_parts(step.layout).values()) == pytest.approx(peak, rel=within)


@pytest.mark.full  # in the fast tier: test_no_array_holds_all_logits
def test_no_array_of_all_tokens_by_the_vocabulary():
    """Logits exist one chunk at a time, in the forward and the backward pass."""
    config = dataclasses.replace(PLAIN, loss_chunk=8)
    step = common.make_step(config, "dp", make_mesh("1x1"), 4, 64)
    text = step.lower().compile(QUICK).as_text()
    assert "f32[1,32,512]" in text  # a chunk: 4 sequences × 8 positions
    for dims in ("4,64,512", "256,512", "1,256,512", "1,4,64,512", "8,1,32,512", "8,32,512"):
        assert f"[{dims}]" not in text


@pytest.mark.parametrize("argv", [[], ["gppu", "--toy"]])
def test_no_word(argv, inside):
    done = inside("recipes.bench", *argv)
    assert done.code == 2
    assert done.err.startswith("error: name a benchmark: python -m recipes.bench cpu|host|")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(("kind", "extra"), [("v5e", "tpu-aot"), ("h100", "gpu-aot")])
def test_a_kind_without_its_compiler(monkeypatch, capsys, kind, extra):
    monkeypatch.setattr(targets, "missing_compiler", lambda _: "it is missing")
    with pytest.raises(UserError, match=rf"kind {kind} needs .* pip install -e '\.\[{extra}\]'"):
        compiled.collectives(compiled.CollectivesFlags(kind=kind))
    with pytest.raises(UserError, match=extra):
        memory.memory(memory.MemoryFlags(kinds=f"cpu,{kind}"))
    assert capsys.readouterr().out == "", "the table was started"


def test_unknown_slices(monkeypatch):
    monkeypatch.setattr(targets, "missing_compiler", lambda _: "")
    with pytest.raises(
        UserError, match="--chips has 17, but v5e needs 16 or 256; use one of these"
    ):
        targets.check_targets(["cpu", "v5e"], [16, 17])
    targets.check_targets(["h100", "h200"], [1, 3, 8, 16, 24])
    with pytest.raises(
        UserError, match="--chips has 12, but h200 needs 1 to 8, or nodes of 8; use one of these"
    ):
        targets.check_targets(["h200"], [8, 12])


@pytest.mark.parametrize(
    ("kind", "chips", "described"),
    [
        ("v5e", 256, {"topology_name": "v5e:16x16"}),
        ("v5p", 16, {"topology_name": "v5p:2x2x4"}),
        ("v5p", 256, {"topology_name": "v5p:4x8x8", "wrap": [True] * 3}),  # of 4x4x4 cubes: a torus
        ("v4", 16, {"topology_name": "v4:2x2x4", "chip_config_name": "megacore"}),
        ("v4", 256, {"topology_name": "v4:4x8x8", "chip_config_name": "megacore",
                     "wrap": [True] * 3}),
    ],
)  # fmt: skip
def test_slices_are_described_as_they_are_wired(monkeypatch, kind, chips, described):
    from jax.experimental import topologies

    asked = {}

    def describe(**kwargs):
        asked.update(kwargs)
        return types.SimpleNamespace(devices=jax.devices()[:1] * chips)

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.setattr(aot, "arrange", lambda axes, devices: (axes, len(devices)))
    assert aot.topology(kind, {"data": chips}) == ({"data": chips}, chips)
    assert asked == {"platform": "tpu"} | described


def test_a_compiler_that_does_not_start_is_one_line(monkeypatch):
    from jax.experimental import topologies

    def describe(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    with pytest.raises(UserError, match=r"does not start without a GPU; run .* JAX_PLATFORMS=cpu"):
        aot.topology("h100", {"data": 8})


@pytest.mark.promise("collectives-counted")
def test_traffic_between_slices_is_a_table(monkeypatch, capfd):
    """Four devices stand for each slice, and the recorded program of two for the compiled step."""
    text = (ROOT / "tests" / "golden" / "two_slices.hlo").read_text()
    asked = []

    def topology(kind, axes, count):
        asked.append((kind, axes, count))
        return make_mesh(",".join(f"{name}={size}" for name, size in axes.items()))

    monkeypatch.setattr(slices, "check_targets", lambda kinds, chips: None)
    monkeypatch.setattr(slices, "topology", topology)
    monkeypatch.setattr(
        common.Step, "compile", lambda step: types.SimpleNamespace(as_text=lambda: text)
    )
    slices.slices(
        slices.SlicesFlags(sizes="tiny", slices="2", chips=4, tokens=64, seq_len=32, model=2)
    )
    assert asked == [
        ("v5e", {"data": 8}, 2),
        ("v5e", {"data": 2, "seq": 4}, 2),
        ("v5e", {"data": 2, "fsdp": 2, "model": 2}, 2),
        ("v5e", {"pipe": 2, "data": 4}, 2),
    ]
    *rows, stages = capfd.readouterr().out.splitlines()[2:6]
    book = 123_200 * 2 / 4  # bfloat16, on one of a slice's four chips
    ratio = f"{sum(ACROSS_SLICES.values()) / book:.2f}"
    assert rows == [
        f"| tiny | 2 | {rules} | {mesh} | 41.0 kB | 61.6 kB | {ratio} | all-reduce 41.0 kB |"
        for rules, mesh in (("dp", "8"), ("cp", "data=2,seq=4"), ("hsdp_tp", "2x2x2"))
    ]
    # 4 microbatches of 32 positions of 64 numbers, 5 each way and 4 · 2 halves; embed and final norm.
    book = (2 * 5 + 4) * 32 * 64 * 2 + 4 * (384 * 64 + 64) / 4
    assert stages.startswith(
        f"| tiny | 2 | fsdp_pp | pipe=2,data=4 | 41.0 kB | {book / 1e3:.1f} kB |"
    )


@pytest.mark.parametrize(
    ("kind", "gpus", "wired", "gigabytes"),
    [("h100", 2, "1x1x2", 84.9), ("h100", 8, "1x1x8", 84.9), ("h200", 32, "4x1x8", 151.4)],
)
def test_nodes_are_groups_joined_by_nvlink(kind, gpus, wired, gigabytes):
    described = aot._nodes(kind, gpus)
    assert (described["platform"], described["topology"]) == ("cuda", wired)
    held = re.search(r"device_memory_size: (\d+)\n", described["target_config"])
    assert int(held[1]) / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert described["target_config"].count("{") == described["target_config"].count("}")


def test_a_gpu_program_that_does_not_fit_is_reported(monkeypatch):
    """NVIDIA's compiler, unlike the TPU's, accepts programs that don't fit."""

    class Program:
        def memory_analysis(self):
            return types.SimpleNamespace(**NOTHING_ON_HOST, peak_memory_in_bytes=100e9)

    step = types.SimpleNamespace(compile=Program)
    found = aot.compile_step(step, "h100", "this")
    assert found == ("does not fit: 100.0 GB of 78.1 GB", 100e9)
    assert isinstance(aot.compile_step(step, "h200", "this"), Program)
    assert isinstance(aot.compile_step(step, "v5e", "this"), Program)


def test_the_limits_of_gpu_programs_are_reported_last():
    assert targets.caveats(["v5e", "cpu"]) == []
    (line,) = targets.caveats(["v5e", "h100"])
    assert "not autotuned" in line
    assert "workspace" in line


# ---- gpu: the parent, with rows that are made up ------------------------------------------------------


@pytest.fixture
def sweep(monkeypatch, capsys):
    """Returns a function of flags and a fake row process: (rows measured, output, error)."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def start(find, torch="2.11", plugin="0.12", **flags):
        asked = []

        def run(row, limit, options):
            asked.append(row)
            return find(row, limit) | {"seconds": 1.0}

        monkeypatch.setattr(gpu, "run", run)
        versions = {"torch": torch, gpu.PLUGINS[0]: plugin}
        monkeypatch.setattr(gpu, "version", lambda name: versions.get(name, ""))
        error = ""
        try:
            gpu.gpu(gpu.GpuFlags(**flags))
        except Stopped as stop:
            error = f"{stop.code}: {stop}"
        return asked, capsys.readouterr().out, error

    return start


def found(row, _=None):
    if row.what == "check":
        return {"error": 3e-3, "ms": 1.5, "device": "NVIDIA H200"}
    kernel = "flash" if row.segments else "cudnn"
    kernel = row.attention if row.attention != "auto" else kernel
    rate = 1000 * row.batch + 500 * (kernel == "cudnn") + 100 * (row.xla == "cuBLASLt")
    return {"ms": 2.0, "tokens_per_s": rate, "kernel": kernel, "device": "NVIDIA H200"}


def test_gpu_rows_that_are_wanted_most_come_first(sweep):
    asked, out, error = sweep(found)
    assert not error
    assert len(asked) == len(set(asked))
    assert [row.attention for row in asked[:4]] == ["cudnn", "triton", "flash", "xla"]
    assert {row.what for row in asked[:4]} == {"check"}
    small, large = (gpu.GUESSES[case][0][0] for case in ("124m:1024", "1b:2048"))
    assert asked[4:16] == [
        Row("step", "124m:1024", segments=True, **small),
        Row("torch", "124m:1024", 32, segments=True),
        Row("step", "124m:1024", **small),
        Row("torch", "124m:1024", 32),
        Row("step", "1b:2048", segments=True, **large),
        Row("torch", "1b:2048", 8, segments=True),
        Row("step", "1b:2048", **large),
        Row("torch", "1b:2048", 8),
        Row("generate", "124m:1024", 32),
        Row("generate", "1b:2048", 32),
        Row("generate", "124m:1024", 1),
        Row("generate", "1b:2048", 1),
    ]
    # Around the best: what is found later starts from what was found before.
    best = dict(attention="cudnn", batch=128, remat="dots", xla="cuBLASLt")
    assert dataclasses.replace(asked[4], **best) in asked
    assert Row("torch", "124m:1024", 64, "cudnn") in asked
    assert out.count("\n| 124m:1024 |") + out.count("\n| 1b:2048 |") == len(asked) - 4
    last = out.splitlines()[-1]
    assert last.startswith("NVIDIA H200; Python ")
    assert last.endswith("No nvidia-smi.")


def test_gpu_says_where_the_time_of_the_fastest_rows_goes(sweep):
    """In a table of its own, of the fastest row with segments and the fastest without."""

    def find(row, _):
        kinds = {"attention": float(row.batch), "no kernel": 0.25}
        return found(row) | ({"kinds": kinds} if row.what == "step" else {})

    _, out, _ = sweep(find, cases="1b:2048", torch="", batches="32")
    assert " | attention 32.0, no kernel 0.2 |\n" in out, "in each row, at once"
    table = out[out.index("| ms of a step |") :].splitlines()
    assert table[0] == "| ms of a step | 1b:2048 cudnn, segments 32 | 1b:2048 cudnn 32 |"
    rows = dict(line.strip("| ").split(" | ", 1) for line in table[2 : 2 + len(gpu_trace.KINDS)])
    assert list(rows) == list(gpu_trace.KINDS)
    assert (rows["attention"], rows["no kernel"], rows["copies"]) == (
        "32.0 | 32.0", "0.2 | 0.2", "0.0 | 0.0"
    )  # fmt: skip


# Of a trace of 124m on an H100, JAX 0.11.2.
KERNELS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*)": "attention",
    "sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize128x256x32_warpgroupsize2x1x1": "matmuls of float32",
    "nvjet_sm90_tss_176x128_64x5_1x2_h_bz_TNN": "matmuls",
    "gemm_fusion_dot_2": "matmuls",
    "loop_dynamic_update_slice_fusion_6": "slices of stacks",
    "memcpy128": "copies",
    "MemcpyD2D": "copies",
    "_attention_dkv": "attention",
    "input_add_reduce_fusion_2": "other kernels",
    "loop_multiply_fusion_23": "other kernels",
}


@pytest.mark.parametrize(("name", "kind"), KERNELS.items())
def test_a_kernel_has_the_kind_that_its_name_says(name, kind):
    assert gpu_trace.kind(name) == kind


def test_times_by_kind_add_up_to_the_time_of_a_step():
    """Kernels that run at once share their time, and between kernels there is none."""
    million = 1e6
    names = ("nvjet_1", "loop_add", "memcpy32", "nvjet_2")
    times = ((0, 4), (2, 5), (3, 4), (7, 11))
    events = [
        gpu_trace.Event(name, start * million, end * million)
        for name, (start, end) in zip(names, times, strict=True)
    ]
    want = {"matmuls": 4.0, "other kernels": 0.5, "copies": 0.0, "no kernel": 1.0}
    assert gpu_trace.kinds(events[::-1], 2) == want
    assert sum(want.values()) == 11 / 2
    assert gpu_trace.kinds([], 2) == {}


TRACE = """
planes { name: "/host:CPU" lines { events { metadata_id: 1 duration_ps: 9000 } }
         event_metadata { key: 1 value { id: 1 name: "dispatch" } } }
planes { name: "/device:GPU:0"
         lines { name: "Stream #14(Compute)" timestamp_ns: 100
                 events { metadata_id: 1 offset_ps: 5000 duration_ps: 2000 } }
         lines { name: "Stream #15(MemcpyD2D)" timestamp_ns: 100
                 events { metadata_id: 2 offset_ps: 6000 duration_ps: 3000 } }
         event_metadata { key: 1 value { id: 1 name: "loop_add_fusion" } }
         event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } } }
planes { name: "/device:GPU:1" lines { events { metadata_id: 1 duration_ps: 9000 } }
         event_metadata { key: 1 value { id: 1 name: "loop_add_fusion" } } }
"""


def test_a_trace_has_the_kernels_of_all_streams_of_the_first_gpu(tmp_path):
    (tmp_path / "plugins").mkdir()
    file = tmp_path / "plugins" / "host.xplane.pb"
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(TRACE))
    assert gpu_trace.events(tmp_path) == [("loop_add_fusion", 105, 107), ("MemcpyD2D", 106, 109)]


def test_gpu_without_pytorch(sweep):
    asked, out, error = sweep(found, torch="", cases="1b:2048")
    assert (error, {row.what for row in asked}) == ("", {"check", "step", "generate"})
    assert out.startswith("PyTorch is not installed; pip install torch adds its rows.")


def test_gpu_without_jax_s_plug_in_says_so_before_anything(sweep):
    with pytest.raises(
        UserError, match=r"no CUDA plug-in here; .* pip install 'jax\[cuda13\]', or use --toy"
    ):
        sweep(found, plugin="")
    assert {row.what for row in sweep(found, plugin="", toy=True, torch="")[0]} >= {"check", "step"}


def test_gpu_prints_what_it_has_when_time_is_up(sweep, monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    def slow(row, limit):
        assert 0 < limit <= min(180, 540 - now[0])
        now[0] += min(limit, 100)
        return found(row) if limit >= 100 else {"failed": f"no result in {limit:.0f} s"}

    file = tmp_path / "rows"
    asked, out, error = sweep(slow, out=str(file))
    assert (len(asked), out.count("\n| "), error) == (6, 5, "")  # the sixth was cut off
    assert out.splitlines()[-2] == (
        "Time is up after 9 minutes, before 124m:1024 auto, segments 32 PyTorch; "
        "the same command continues."
    )
    assert len(file.read_text().splitlines()) == 5
    again, out, _ = sweep(found, out=str(file))
    assert again[0] == asked[5]
    assert not set(again) & set(asked[:5])
    assert out.count("\n| ") == len(again) + 5, "earlier rows are printed again"


def test_a_gpu_row_that_fails_is_a_row(sweep):
    def find(row, _):
        if row.what == "torch":
            return {"failed": "ended by SIGSEGV"}
        return found(row) if row.batch < 32 else {"failed": "out of memory"}

    asked, out, error = sweep(find, cases="1b:2048")
    assert not error
    assert re.search(
        r"^\| 1b:2048 \| auto \| 8 \| - \| - \| PyTorch \| ended by SIGSEGV \| - ", out, re.M
    )
    assert re.search(r"^\| 1b:2048 \| auto, segments \| 32 \| .* \| out of memory \| - ", out, re.M)
    tried = [row for row in asked if row.what == "step" and row.remat == "none" and row.batch > 16]
    assert {row.batch for row in tried} == {32}, "where 32 do not fit, more do not"


def test_what_compiles_too_slowly_is_not_compiled_for_other_batches(sweep):
    def find(row, _):
        slow = row.what == "torch" or (row.what == "step" and row.unroll == 16)
        return {"failed": rows.TOO_SLOW} if slow else found(row)

    asked, out, error = sweep(find, cases="1b:2048", batches="8,128")
    assert not error
    tried = [row for row in asked if row.what == "torch" or row.unroll == 16]
    assert tried == [
        Row(what, "1b:2048", 8 if what == "torch" else 16, segments=segments, **changes)
        for what, segments, changes in (
            ("step", True, {"unroll": 16}),
            ("torch", True, {}),
            ("step", False, {"unroll": 16}),
            ("torch", False, {}),
        )
    ]
    assert out.count("compiles for more than 60 s") == len(tried)


@pytest.mark.parametrize("leads", [True, False], ids=["run by the sweep", "by hand"])
def test_a_row_ends_while_it_compiles(leads, monkeypatch, capfd):
    """Only what the sweep started is killed with its children."""
    ended, events = threading.Event(), []

    def end(*arguments):
        events.append(arguments)
        ended.set()

    monkeypatch.setattr(rows.os, "getsid", lambda _: os.getpid() if leads else os.getpid() + 1)
    monkeypatch.setattr(rows.os, "killpg", end)
    monkeypatch.setattr(rows.os, "_exit", end)
    with rows.compiling(60):
        pass
    with rows.compiling(0.01):
        assert ended.wait(30)
    assert events[0] == ((os.getpid(), signal.SIGKILL) if leads else (1,))
    assert json.loads(capfd.readouterr().out) == {"failed": "compiles for more than 60 s"}


def test_a_wrong_kernel_is_reported_at_the_end(sweep):
    def find(row, _):
        wrong = row.what == "check" and row.attention == "cudnn"
        return {"failed": "2×512, 4/4 heads of 64: dk off by 3.0e-01"} if wrong else found(row)

    asked, out, error = sweep(find, cases="1b:2048")
    assert len(asked) > 9, "the rest is measured"
    assert (
        "| kernel | cudnn | - | - | - | check | 2×512, 4/4 heads of 64: dk off by 3.0e-01 | - |"
        in out
    )
    assert error == "1: cudnn: the kernel check failed; see its row"


@pytest.mark.parametrize(
    ("script", "result"),
    [
        ("echo notice; echo '{\"ms\": 1.5}'", {"ms": 1.5}),
        ("echo no memory >&2; kill -SEGV $$", {"failed": "ended by SIGSEGV: no memory"}),
        ("exit 7", {"failed": "exit code 7"}),
        ("sleep 60 & echo $! > $PIDS; wait", {"failed": "no result in 1 s"}),
    ],
    ids=["result", "crash", "exit", "hangs"],
)
def test_a_row_has_a_process_group_of_its_own(script, result, tmp_path, monkeypatch):
    program, pids = tmp_path / "python", tmp_path / "pids"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PIDS", str(pids))
    found = rows.run(Row("check", attention="xla"), 1.0, [])
    assert {key: found[key] for key in result} == result
    if pids.exists():
        stat = pathlib.Path(f"/proc/{pids.read_text().strip()}/stat")
        for _ in range(100):  # a busy machine takes a while to end a process that was killed
            if not stat.exists() or stat.read_text().split()[2] == "Z":
                return
            time.sleep(0.1)
        pytest.fail("its children live on")


def test_the_environment_of_a_row(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine=1")
    step = rows.environment(Row("step", xla="cuBLAS only"))
    assert step["XLA_FLAGS"] == "--mine=1 --xla_gpu_enable_triton_gemm=false"
    assert step["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    assert rows.environment(Row("torch"))["JAX_PLATFORMS"] == "cpu"
    for platforms, wanted in (("cuda", "cuda,cpu"), ("cpu", "cpu"), ("", "")):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        assert rows.environment(Row("check"))["JAX_PLATFORMS"] == wanted


def test_figures_of_a_row():
    row = Row("step", "1b:2048", 4)
    n = 16 * (2 * 2048 * 64 * 40 + 3 * 2048 * 8192) + 128_256 * 2048
    causal = (6 * n + 6 * 16 * 2048 * 2048) * 4 * 2048
    rates = rows.rates(row, 0.5, "NVIDIA H200", 90_000_000_000)
    assert rates["tokens_per_s"] == 4 * 2048 / 0.5
    assert rates["mfu_causal"] == pytest.approx(causal / 0.5 / 989e12)
    assert rates["gb"] == 90
    assert rows.rates(row, 0.5, "cpu", None).keys() == {"ms", "tokens_per_s", "device"}


def test_reasons_are_a_few_words():
    xla = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
    assert (
        rows.reason(xla)
        == rows.reason("OutOfMemoryError: CUDA out of memory. Tried")
        == "out of memory"
    )
    assert rows.reason("ValueError: a | b\n  c") == "ValueError: a / b c"
    assert len(rows.reason("x" * 999)) == 100


@pytest.mark.full
@pytest.mark.parametrize(
    "kernel", ["xla", "flash", "triton", "cudnn"] if shutil.which("nvidia-smi") else ["flash"]
)
def test_kernels_on_this_machine(kernel):
    """Runs in a subprocess on a GPU if there is one, and interpreted otherwise."""
    toy = [] if shutil.which("nvidia-smi") else ["--toy"]
    found = rows.run(Row("check", attention=kernel), 300, toy)
    assert "failed" not in found, found


@pytest.mark.parametrize(
    ("flags", "limit", "widest"),
    [
        ("fpu avx2 avx512f amx_tile", "", ", AMX"),
        ("fpu avx2 avx512f", "AVX2", ", AVX-512, limited to AVX2"),
        ("fpu avx2", "", ", AVX2"),
        ("fpu", "", ""),
    ],
)
def test_a_table_names_the_processor_and_its_widest_instructions(flags, limit, widest, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_max_isa={limit}" if limit else "")
    core = f"model name\t: Some CPU\nflags\t\t: {flags}\n"
    assert common.cpu_kind(2 * core) == f"Some CPU, {os.cpu_count()} cores{widest}"


WORDS = {
    "cpu": ["--toy", "--remats=none", "--unrolls=1,2", "--rounds=1", "--batch_size=2", "--seq_len=32"],
    "collectives": ["--sizes=tiny", "--kind=cpu", "--chips=8", "--rules=fsdp", "--tokens=64",
                    "--seq_len=32", "--offload=optimizer"],
    "memory": ["--sizes=tiny", "--kinds=cpu", "--chips=8", "--remats=full", "--seq_len=32"],
    "experts": ["--sizes=tiny", "--remats=dispatched", "--chips=8", "--expert=4", "--kind=cpu", "--seq_len=32"],
    "depth": ["--depths=1,2", "--rounds=1"],
    "cycles": ["--size=tiny", "--devices=v5e:4", "--tokens=1024", "--seq_len=1024",
               f"--program={ROOT}/tests/golden/scan_with_kernel.hlo", f"--dataset={ROOT}/README.md"],
    "roofline": ["--size=tiny", f"--program={ROOT}/tests/golden/gpu_kernels.hlo"],
    "meshes": ["--size=tiny", "--meshes=4x2", "--rules=fsdp", "--seq_len=32", "--batch_size=8", "--rounds=1"],
    "gpu": ["--toy", "--kernels=xla", "--xla=default"],
    "host": ["--sizes=tiny", "--steps=4", "--rounds=1"],
    "data": ["--size=tiny", "--batches=2", "--rounds=1"],
    "checkpoint": ["--megabytes=1", "--steps=2", "--rounds=1"],
    "start": ["--recipe=dot_relu_dot", "--rounds=1"],
}  # fmt: skip


LONG = ("cpu", "host", "checkpoint", "start", "meshes", "data", "experts", "depth", "memory")
LONG += ("collectives",)


@pytest.mark.parametrize("word", full_except(sorted(WORDS.keys() - {"gpu"}), WORDS.keys() - LONG))
def test_a_word_prints_its_table(word, inside, monkeypatch):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", QUICK)
    cache = jax.config.jax_compilation_cache_dir
    done = inside("recipes.bench", word, *WORDS[word])
    jax.config.update("jax_compilation_cache_dir", cache)
    assert done.code == 0, done.err
    tables = re.findall(r"(?:^\|.*\n)+", done.out, re.M)
    assert tables
    for table in map(str.splitlines, tables):
        assert len(table) >= 3
        assert len({row.count("|") for row in table}) == 1


@pytest.mark.parametrize(
    ("entry", "rules", "mesh", "remat", "rows"),
    [
        ("gpt2", "fsdp_cp_tp", {"data": 1, "seq": 2, "model": 4}, "sublayers", 16),
        ("gemma3", "fsdp", {"data": 8}, "full", 16),
        ("gpt_oss", "fsdp_ep", {"data": 2, "expert": 4}, "dispatched", 16),
        ("deepseek", "fsdp_tp", {"data": 1, "model": 8}, "sublayers", 16),
        ("vit", "fsdp_tp", {"data": 1, "model": 8}, "sublayers", 24),  # of 17 positions
    ],
)
def test_collectives_compiles_a_step_of_any_entry_with_attention(
    entry, rules, mesh, remat, rows, monkeypatch
):
    found = []

    def compile_step(step, kind, name):
        found.append(step)
        return aot.TooLarge("does not fit", 0)

    monkeypatch.setattr(compiled, "compile_step", compile_step)
    compiled.collectives(
        compiled.CollectivesFlags(
            entry=entry, rules=rules, sizes="tiny", kind="cpu", chips="8", tokens=64, seq_len=32,
            seq=2, expert=4,
        )
    )  # fmt: skip
    (step,) = found
    config = dataclasses.replace(ENTRIES[entry].config, remat=remat)
    assert (dict(step.layout.mesh.shape), step.config) == (mesh, config)
    assert step.layout.batch_size == rows
    assert step.example.keys() >= ({"image", "label"} if entry == "vit" else {"segment_ids"})


def test_a_vit_s_activations_are_those_of_its_positions():
    """Two all-reduces forward and two backward, of 6 images' 17 positions on a device of 4x2."""
    layout = make_layout(
        model_of("vit"), ENTRIES["vit"].config, make_mesh("4x2"), "tp", batch_size=24
    )
    sent = sum(x.bytes for x in transfers(layout) if x.purpose == "activations")
    assert sent == 2 * 4 * 6 * 17 * 32 * 4


def test_a_tower_s_activations_are_those_of_its_own_positions():
    """As above, for a text of 8 positions less."""

    def sent(max_positions: int) -> float:
        config = dataclasses.replace(ENTRIES["siglip"].config, max_positions=max_positions)
        layout = make_layout(model_of("siglip"), config, make_mesh("4x2"), "tp", batch_size=24)
        return sum(x.bytes for x in transfers(layout) if x.purpose == "activations")

    assert sent(16) - sent(8) == 2 * 4 * 6 * 8 * 32 * 4


@pytest.mark.parametrize("pairs", ["gather", "ring", "local"])
def test_pairs_meet_by_the_textbook_s_bytes(pairs):
    """2 · (n - 1)/n · B · D numbers; tests/zoo/test_pairs.py counts those of the program."""
    config = dataclasses.replace(ENTRIES["siglip"].config, pairs=pairs)
    layout = make_layout(model_of("siglip"), config, make_mesh("8"), "fsdp", batch_size=24)
    found = {x.kind for x in transfers(layout) if x.purpose == "exchanges"}
    wanted = {"gather": {"all-gather", "reduce-scatter"}, "ring": {"collective-permute"}}
    assert found == wanted.get(pairs, set())
    sent = sum(x.bytes for x in transfers(layout) if x.purpose == "exchanges")
    assert sent == (0 if pairs == "local" else 2 * 7 / 8 * 24 * 32 * 4)


@pytest.mark.parametrize(
    ("accumulate", "remat", "passes"), [(1, "none", 3), (1, "full", 4), (2, "full", 5)]
)
def test_towers_compute_what_remat_and_the_two_passes_repeat(accumulate, remat, passes):
    """A forward pass is a third of training."""
    config = dataclasses.replace(SIGLIP["b16"](), dtype="bfloat16", remat=remat)
    devices = parse_devices("h100:8")
    mesh = abstract_mesh({"data": 8}, devices)
    layout = make_layout(model_of("siglip"), config, mesh, "fsdp", batch_size=64)
    found = estimate(layout, devices, accumulate)
    plain = dataclasses.replace(layout, config=dataclasses.replace(config, remat="none"))
    once = estimate(plain, devices)
    assert found.useful == once.useful == 64 * flops.encoder(layout)
    assert found.operations["matmul"] == pytest.approx(once.operations["matmul"] * passes / 3)


ABSENT = ("grain", "datasets", "matplotlib", "safetensors", "huggingface_hub",
          "tokenizers", "jinja2")  # fmt: skip
ACCELERATOR = ("gpu", "collectives", "memory")  # the first makes no devices, the others eight


@pytest.mark.parametrize(
    "commands",
    [
        [[word, "--help"] for word in (*ACCELERATOR, "slices")] + [["gpu", "--toy", "--minutes=0"]],
        pytest.param([[word, *WORDS[word]] for word in ACCELERATOR], marks=pytest.mark.full),
    ],
    ids=["imports", "runs"],
)
def test_words_for_accelerators_need_no_data_libraries(commands, tmp_path):
    """Some machines with accelerators have neither Grain nor `datasets`."""
    absent = f"import sys; sys.modules |= dict.fromkeys({ABSENT})"  # importing these fails
    (tmp_path / "sitecustomize.py").write_text(absent)
    code = f"""
import runpy, sys
from jax._src import xla_bridge
for command in {commands}:
    sys.argv[1:] = command
    runpy.run_module("recipes.bench", run_name="__main__")
    assert command[0] != "gpu" or not xla_bridge._backends, "it has made its devices"
"""
    quick = {"XLA_FLAGS": " ".join(f"--{name}={value}".lower() for name, value in QUICK.items())}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | quick | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    helped = sum("--help" in command for command in commands)
    assert done.stdout.count("\nrun:\n") + done.stdout.count("|---|") == (helped or len(commands))
    assert "failed" not in done.stdout


@pytest.mark.parametrize(
    ("word", "flag", "sentence"),
    [
        ("cpu", "--unrolls=1,x", "--unrolls=1,x must be whole numbers ≥ 1; try --unrolls=1,2"),
        ("cpu", "--remats=half", "--remats has 'half', which is not one of none, dots, sublayers, gathered, full"),
        ("host", "--sizes=tiny,huge", "--sizes has 'huge', which is not one of tiny, small, medium, 124m"),
        ("depth", "--depths=0,8", "--depths=0,8 must be whole numbers ≥ 1; try --depths=1,2"),
        ("meshes", "--rules=zero", "--rules has 'zero', which is not one of dp, zero1, fsdp, tp_sp"),
        ("gpu", "--cases=124m:1024,1b", "--cases has '1b'; write size:tokens, for example 124m:1024"),
        ("gpu", "--batches=8,0", "--batches=8,0 must be whole numbers ≥ 1; try --batches=1,2"),
        ("gpu", "--kernels=cudnn,mosaic", "--kernels has 'mosaic', which is not one of xla, flash, splash, triton, cudnn"),
        ("gpu", "--xla=fast", "--xla has 'fast', which is not one of default, cuBLAS only"),
        ("gpu", "--minutes=-1", "--minutes=-1 must be ≥ 0.0; try 9.0"),
        ("gpu", "--out=README.md", "--out=README.md has lines that are not rows; use a new file"),
        ("gpu", "--out=no/such/rows", "--out=no/such/rows can't be written; use a file in a writable folder"),
        ("gpu", '--row={"what": "step"}', '--row={"what": "step"} is not a line of an --out file'),
        ("gpu", '--row={"what": "check"}', "JAX finds no GPU here; use --toy to try the command without one"),
        ("collectives", "--chips=", "--chips= must be whole numbers ≥ 1; try --chips=1,2"),
        ("collectives", "--model=3", "--chips=16 is not divisible by --model=3 (rules 'tp_sp'); use a different --model"),
        ("collectives", "--group=6", "--chips=16 is not divisible by --group=6 times --model=1 (rules 'hsdp_tp_sp'); use a different --group"),
        ("collectives", "--model=32", "--chips=16 is not divisible by --model=32 (rules 'tp_sp'); use a different --model"),
        ("collectives", "--entry=mlp", "--entry=mlp is not one of transformer, moe"),
        ("slices", "--slices=1,2", "--slices=1,2 must be whole numbers ≥ 2; try --slices=2,4"),
        ("slices", "--tokens=64", "--tokens=64 is not divisible by --seq_len=256; try --tokens=256"),
        ("slices", "--model=3", "--chips=16 is not divisible by --group=5 times --model=3 (rules 'hsdp_tp'); use a different --model"),
        ("slices", "--seq=3", "--chips=16 is not divisible by --seq=3 (rules 'cp'); use a different --seq"),
        ("experts", "--expert=3", "--chips has 16, not divisible by --expert=3; use a divisor"),
        ("memory", "--rules=ep", "--rules=ep is not one of dp, zero1, fsdp, tp_sp"),
        ("cycles", "--devices=h100:8", "--devices=h100:8 is not one slice of TPUs, whose compiler estimates cycles; use --devices=v5p:16"),
        ("cycles", "--mesh=4x2", "--mesh=4x2 has 8 devices, but --devices=v5p:16 has 16; try --mesh=16"),
        ("cycles", "--tokens=100", "--tokens=100 on 16 chips is not a whole number of rows of --seq_len=8192; try --tokens=8192"),
        ("cycles", "--save=no/a.hlo", "--save=no/a.hlo: there is no folder no; make it first"),
        ("roofline", "--program=no.hlo", "--program=no.hlo: there is no such file; write one with --save"),
        ("roofline", "--save=no/a.hlo", "--save=no/a.hlo: there is no folder no; make it first"),
        ("cycles", "--program=no.hlo", "--program=no.hlo: there is no such file; write one with --save"),
        ("memory", "--kinds=v9", "--kinds has 'v9', which is not one of v4, v5e, v5p, v6e, h100, h200, cpu"),
    ],
)  # fmt: skip
def test_mistakes(word, flag, sentence, inside):
    done = inside("recipes.bench", word, flag)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {sentence}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("entry", "meshes"),
    full_except(
        [("dot_relu_dot", ["4x2"]), ("transformer", ["8", "4x2"])], [("dot_relu_dot", ["4x2"])]
    ),
)
def test_recipes_meshes_compares_them_for_any_entry(entry, meshes, inside, monkeypatch):
    monkeypatch.setitem(COMPILER_OPTIONS, "cpu", QUICK)
    flags = (f"--entry={entry}", "--size=tiny", f"--meshes={','.join(meshes)}")
    done = inside("recipes.meshes", *flags)
    assert done.code == 0, done.err
    table, left_out = done.out.split("\nLeft out:\n")
    _, _, *rows = table.splitlines()
    pairs = [(entry, rules, mesh) for rules in ENTRIES[entry].rules for mesh in meshes]
    fitting = [[f"| {rules}", mesh] for _, rules, mesh in pairs if (entry, rules, mesh) in CASES]
    assert [row.split(" | ")[:2] for row in rows] == fitting
    assert left_out.count("- rules") == len(pairs) - len(fitting)


def test_recipes_meshes_with_a_size_that_the_entry_lacks(inside):
    done = inside("recipes.meshes", "--entry=mlp", "--size=8b")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --size=8b is not one of tiny, small\n"
