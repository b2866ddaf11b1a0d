"""Rows whose positions lie on several devices: packed rows, windows, and both ways to attend."""

import dataclasses
import functools
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common.checkpoint import layout_of
from recipes.common.entries import model as model_of
from recipes.common.entries import zoo_file
from recipes.common.generation.generator import Generator, Sampling
from recipes.common.report import kernel
from recipes.common.report.hlo import collectives
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.train.step import gradients
from recipes.instruments.bench.common import make_step
from recipes.instruments.plan.textbook import textbook, transfers
from recipes.instruments.prove.comparison import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    compare_gradients,
    largest_relative,
)
from tests.conftest import full_except
from tests.support.models import random_variables
from tests.support.quick import QUICK
from zoo.core import decoder
from zoo.core.attention import RowLayout, attend
from zoo.kernels import splash
from zoo.kernels.shared import Settings
from zoo.options.rope_scaling import LongRope
from zoo.parallel import context

pytestmark = pytest.mark.promise("meshes-agree")

B, T = 8, 64


def batch() -> dict[str, np.ndarray]:
    """Rows, half of them packed: documents end within parts and at their edges; some padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 257, (B, T + 1), np.int32)
    starts = random.random((B, T)) < 5 / T
    starts[:, [T // 2, T // 4, 3 * T // 4 - 1]] = True
    starts[B // 2 :] = False
    targets = np.where(random.random((B, T)) < 0.1, -1, tokens[:, 1:])
    ids = np.cumsum(starts, axis=1, dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": targets, "segment_ids": ids}


def tiny(entry: str, **changes):
    return dataclasses.replace(zoo_file(entry).Config.tiny(), **changes)


@functools.lru_cache(maxsize=4)  # compiled steps take many memory maps
def compiled_step(
    entry: str, config, mesh: str, strategy: str, length: int = T, accumulate: int = 1
):
    """(layout, compiled function of variables and a batch → (loss, gradients))."""
    layout = make_layout(
        model_of(entry), config, make_mesh(mesh), strategy, batch_size=B, seq_len=length
    )

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch, accumulate)
        return means["loss"], grads

    rows = layout.abstract_batch(dict.fromkeys(batch(), jax.ShapeDtypeStruct((length,), np.int32)))
    return layout, layout.compile(both, layout.variables(), rows, compiler_options=QUICK)


@functools.cache
def loss_and_gradients(entry: str, config, mesh: str, strategy: str, accumulate: int = 1):
    layout, step = compiled_step(entry, config, mesh, strategy, accumulate=accumulate)
    rows = jax.device_put(batch(), layout.batch_shardings(batch()))
    loss, grads = step(random_variables(layout), rows)
    return float(loss), {path: np.asarray(x) for path, x in paths(grads).items()}


WINDOW = {"sliding_window": 20}  # ends within parts of 16 and of 8
UNLIKE = {"layer_kinds": ((20, 1e4, None), (None, 1e4, None))}
RING = {"context": "ring"}
LORA = {"lora_rank": 4}
LONG_ROPE = {"rope_scaling": LongRope((1.0, 1.5, 2.0, 3.0), (2.0, 9.0, 5.0, 30.0), 12, 1.2)}
TWICE = {"accumulate": 2}  # microbatches
MODERN = {"modern": True, "max_positions": 0, "token_types": 0, "num_layers": 4}
MODERN |= {"layer_kinds": ((None, 1e4, None), (7, 1e3, None), (7, 1e3, None))}
ODD = {"vocab_size": 389, "num_heads": 6, "num_kv_heads": 3}  # `model` divides neither
NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0, "shared_mlp": 0}
FEW_KEYS = {"num_kv_heads": 2, "delta_key_heads": 2}
CASES = [
    ("transformer", "data=2,seq=4", "fsdp_cp", TWICE),
    ("transformer", "data=2,seq=4", "fsdp_cp", RING | LONG_ROPE),  # in stripes
    ("transformer", "data=2,seq=4", "cp", RING | WINDOW),  # consecutive parts
    ("transformer", "data=2,seq=4", "cp", WINDOW | LORA | {"remat": "none"}),
    ("transformer", "data=1,seq=8", "fsdp_cp", RING | UNLIKE | LORA),
    # Too few heads: a ring.
    ("transformer", "data=1,seq=8", "cp", TWICE | {"num_heads": 4, "num_kv_heads": 2}),
    # Kv heads are repeated.
    ("transformer", "data=1,seq=8", "cp", WINDOW | {"num_heads": 8, "num_kv_heads": 2}),
    ("transformer", "data=2,seq=2,model=2", "fsdp_cp_tp", RING | {"qk_norm": True}),
    ("transformer", "data=2,seq=2,model=2", "fsdp_cp_tp", RING | WINDOW | ODD),
    (
        "transformer",
        "data=2,seq=2,model=2",
        "fsdp_cp_tp",
        WINDOW | {"remat": "dots", "qk_norm": True, "vocab_size": 389},
    ),
    # Kv heads are split over `model` and repeated for `seq`.
    ("transformer", "data=1,seq=4,model=2", "fsdp_cp_tp", {"num_heads": 8, "num_kv_heads": 2}),
    ("transformer", "4x2", "fsdp_tp_sp", {"remat": "gathered"} | ODD | LORA),
    ("moe", "data=2,seq=2,expert=2", "fsdp_ep_cp", {}),
    ("moe", "data=2,seq=2,expert=2", "fsdp_ep_cp", RING),
    ("moe", "data=2,seq=2,expert=2", "fsdp_ep_cp", RING | WINDOW),
    ("moe", "data=2,seq=2,expert=2", "fsdp_ep_cp", WINDOW | {"capacity": None}),
    ("moe", "data=1,seq=2,expert=4", "fsdp_ep_cp", RING | {"capacity": None}),
    ("moe", "data=1,expert=4,model=2", "fsdp_ep_tp", {"capacity": None, "remat": "dispatched"}),
    ("moe", "data=2,seq=4", "fsdp_cp", RING | {"capacity": 0.5}),  # many positions are dropped
    ("moe", "data=1,seq=2,expert=2,model=2", "fsdp_ep_cp_tp", {}),
    ("moe", "4x2", "fsdp_tp_sp", {}),
    # In stripes: learned positions; sinks.
    ("gpt2", "data=2,seq=4", "cp", RING),
    # No causal mask: in stripes, and in windows to both sides.
    ("bert", "data=4,seq=2", "fsdp_cp", RING),
    ("bert", "data=1,seq=8", "cp", RING | MODERN),
    ("gpt_oss", "data=2,seq=4", "fsdp_cp", RING | {"layer_kinds": ((None, 1e4, None),)}),
    # A state travels; beside a ring, positions stay in consecutive order.
    ("qwen3_next", "data=1,seq=8", "cp", NO_EXPERTS | {"remat": "dots"}),
    ("qwen3_next", "data=2,seq=4", "fsdp_cp", RING),
    # `model` divides no keys, and a layer is left over after the periods.
    ("qwen3_next", "data=1,seq=2,model=4", "fsdp_cp_tp", NO_EXPERTS | FEW_KEYS | {"num_layers": 5}),
    (
        "qwen3_next",
        "data=2,expert=2,model=2",
        "fsdp_ep_tp",
        LORA | {"num_layers": 2, "accumulate": 2, "remat": "offload"},
    ),
]


@pytest.mark.parametrize(("entry", "mesh", "strategy", "changes"), full_except(CASES, CASES[1:2]))
def test_losses_and_gradients_are_those_of_one_device(entry, mesh, strategy, changes):
    changes = dict(changes)
    accumulate = changes.pop("accumulate", 1)
    config = tiny(entry, **changes)
    alone = dataclasses.replace(config, context="auto", remat="full")
    want_loss, want = loss_and_gradients(entry, alone, "1x1", "dp")
    loss, found = loss_and_gradients(entry, config, mesh, strategy, accumulate)
    assert loss == pytest.approx(want_loss, rel=LOSS_TOLERANCE)
    assert largest_relative(compare_gradients(found, want)) < GRADIENT_TOLERANCE


# ---- mutations: what the test above must notice --------------------------------------------------


def forget_ids(monkeypatch):
    """Keys that visit another device bring no segment ids."""
    send = context.send

    def without(settings, arrays, hops):
        sent = send(settings, arrays, hops)
        return (*sent[:2], arrays[2]) if len(sent) == 3 else sent

    monkeypatch.setattr(context, "send", without)


def hop_less(monkeypatch):
    """The window ends one position early at the edge of a part."""
    monkeypatch.setattr(context, "hops_of", lambda at: (at.window - 2) // at.positions)


def shift(monkeypatch):
    """Stripes see one key too many."""
    offset = context.offset_of
    monkeypatch.setattr(context, "offset_of", lambda at, hop: offset(at, hop) + (hop > 0))


def keep_order(monkeypatch):
    """Tokens, targets and segments stay in natural order, while rotations and masks are in stripes."""
    monkeypatch.setattr(context.Ring, "reorder", lambda layout, x, *axes, **options: x)


def forget_targets(monkeypatch):
    """The last target of each device's part doesn't count."""
    whole = decoder.cross_entropy

    def fewer(x, table, targets, *rest):
        last = jnp.arange(T) % (T // 4) == T // 4 - 1
        return whole(x, table, jnp.where(last[None], -1, targets), *rest)

    monkeypatch.setattr(decoder, "cross_entropy", fewer)


def wrong_way(monkeypatch):
    """Gradients of keys return to the wrong device."""
    send = context.send
    monkeypatch.setattr(context, "send", lambda at, x, hops: send(at, x, 2 if hops < 0 else hops))


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutate", "changes"),
    [
        (forget_ids, RING),
        (hop_less, RING | {"sliding_window": 18}),
        (shift, RING),
        (wrong_way, RING),
        (keep_order, RING),
        (forget_targets, {}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_mistake_shows(mutate, changes, monkeypatch):
    config = tiny("transformer", **changes)
    alone = dataclasses.replace(config, context="auto")
    _, want = loss_and_gradients("transformer", alone, "1x1", "dp")
    mutate(monkeypatch)
    compiled_step.cache_clear()
    _, found = loss_and_gradients.__wrapped__("transformer", config, "data=2,seq=4", "cp")
    compiled_step.cache_clear()
    assert largest_relative(compare_gradients(found, want)) > 1e-4


def test_a_ring_has_as_many_hops_as_its_window_needs():
    """By definition: the first position of a part of 16 sees window - 1 positions before it."""
    for window in (1, 2, 16, 17, 18, 33, 34, 49, 50, 1_000, None):
        earliest = 0 if window is None else max(0, 16 * 5 - (window - 1))
        settings = Settings(positions=16, window=window, ring=("seq",), devices=6)
        assert context.hops_of(settings) == 5 - earliest // 16, window


def test_on_a_ring_a_window_sees_all_its_keys():
    """A window of 18 reaches two parts of 16 back, for one position: outputs, and gradients of keys."""
    shapes = [(2, T, 2, 8), (2, T, 1, 8), (2, T, 1, 8), (2, T, 2, 8)]
    random = np.random.default_rng(0)
    *qkv, weight = (random.standard_normal(shape, np.float32) for shape in shapes)
    ids = np.repeat(np.arange(T)[None] >= 40, 2, axis=0).astype(np.int32)

    @functools.partial(jax.jit, static_argnames="layout", compiler_options=QUICK)
    def both(q, k, v, weight, ids, layout):
        def ours(*qkv):
            return attend(*qkv, ids, window=18, kernel="flash", layout=layout)

        out, back = jax.vjp(ours, q, k, v)
        return out, *back(weight)

    wanted = jax.device_get(both(*qkv, weight, ids, layout=RowLayout()))
    rules = tuple(zoo_file("transformer").RULES["cp"].items())
    with jax.set_mesh(make_mesh("data=1,seq=4")), nnx.logical_axis_rules(rules):
        found = jax.device_get(both(*qkv, weight, ids, layout=context.Ring()))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6)


@pytest.mark.parametrize(
    ("lengths", "window", "poisoned", "clean"),
    [
        ([128, 256, 128], None, 0, [1, 2, 3]),  # the second and third part see each other
        ([128, 256, 128], None, 3, [0, 1, 2]),
        ([512], 100, 3, [0, 1]),  # keys that came from the end of a row to its beginning
    ],
)
@pytest.mark.full
def test_on_a_ring_splash_computes_no_hop_in_which_nobody_sees_a_key(
    lengths, window, poisoned, clean, monkeypatch
):
    """NaN in a device's keys stays there; and what would be masked changes nothing, bit by bit."""
    shapes = [(1, 512, heads, 16) for heads in (2, 1, 1, 2)]
    random = np.random.default_rng(0)
    *qkv, weight = (random.standard_normal(shape, np.float32) for shape in shapes)
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    part = slice(128 * poisoned, 128 * (poisoned + 1))
    bad_qkv = [x.copy() for x in qkv]
    for x in bad_qkv[1:]:
        x[:, part] = np.nan

    def both():
        @functools.partial(jax.jit, compiler_options=QUICK)
        def compiled(*qkv):
            def ours(*qkv):
                return attend(*qkv, ids, window=window, kernel="splash", layout=context.Ring())

            out, back = jax.vjp(ours, *qkv)
            return out, *back(weight)

        rules = tuple(zoo_file("transformer").RULES["cp"].items())
        with jax.set_mesh(make_mesh("data=1,seq=4")), nnx.logical_axis_rules(rules):
            return jax.device_get([compiled(*qkv), compiled(*bad_qkv)])

    skipped, bad = both()
    monkeypatch.setattr(splash, "may_see", lambda *_: jnp.ones((1, 1), bool))
    computed, worse = both()
    assert np.isnan(bad[0]).any()
    assert np.isnan(worse[1].reshape(4, -1)[clean]).any(), "dQ would not show the poison"
    for ours, theirs, ours_bad in zip(skipped, computed, bad, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        parts = (x.reshape(4, -1)[clean] for x in (ours, ours_bad))
        np.testing.assert_array_equal(*parts)


@pytest.mark.parametrize(
    ("mesh", "strategy", "context", "length"),
    full_except(
        [
            ("data=2,seq=4", "cp", "ring", 32),  # in stripes
            ("data=2,seq=4", "cp", "ring", 36),  # consecutive parts: 16 does not divide it
            ("data=2,seq=4", "cp", "auto", 33),  # not split at all
            ("4x2", "tp_sp", "auto", 33),
        ],
        fast=[("data=2,seq=4", "cp", "ring", 32)],
    ),
)
def test_logits_are_in_natural_order(mesh, strategy, context, length):
    """Also of rows that the mesh does not divide: a call then replicates positions."""
    rows = {name: x[:, :length] for name, x in batch().items()}

    def logits(config, mesh: str, strategy: str):
        layout = make_layout(model_of("transformer"), config, make_mesh(mesh), strategy)

        def run(variables, tokens, ids):
            return layout.model.merge(variables)(tokens, ids)

        of_rows = jax.device_put((rows["tokens"], rows["segment_ids"]), layout.sharding("batch"))
        given = random_variables(layout), *of_rows
        return np.asarray(layout.compile(run, *given, compiler_options=QUICK)(*given))

    found = logits(tiny("transformer", context=context), mesh, strategy)
    np.testing.assert_allclose(found, logits(tiny("transformer"), "1x1", "dp"), atol=2e-5)


# ---- generation, bytes, the report ---------------------------------------------------------------


@functools.cache
def written(entry: str, context: str, mesh: str, strategy: str):
    """(the tokens that four prompts get, what the decode step sends)."""
    config = tiny(entry, context=context)
    layout = make_layout(model_of(entry), config, make_mesh(mesh), strategy, batch_size=4)
    generator = Generator(layout, random_variables(layout), Sampling(), (), 257, rows=4)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 257, n, dtype=np.int32) for n in (3, 17, 30, 9)]
    tokens = np.stack(list(generator(prompts, 24)))
    decode = next(c for key, c in generator._compiled.items() if key[0] == "_decode")
    return tokens, collectives(decode.as_text()), generator.cache_bytes


@pytest.mark.parametrize(
    ("entry", "context", "mesh", "strategy"),
    [
        ("transformer", "auto", "data=1,seq=8", "fsdp_cp"),
        ("transformer", "ring", "data=1,seq=8", "cp"),
        ("transformer", "auto", "data=2,seq=2,model=2", "fsdp_cp_tp"),
        ("transformer", "auto", "4x2", "fsdp_tp_sp"),
        ("moe", "auto", "data=2,seq=2,expert=2", "fsdp_ep_cp"),
    ],
)
@pytest.mark.full
def test_it_writes_what_one_device_writes(entry, context, mesh, strategy):
    tokens, sent, cache_bytes = written(entry, context, mesh, strategy)
    want, _, all_bytes = written(entry, "auto", "1x1", "dp")
    np.testing.assert_array_equal(tokens, want)
    sizes = dict(make_mesh(mesh).shape)
    assert cache_bytes * sizes.get("seq", 1) * sizes["data"] * sizes.get("expert", 1) * sizes.get(
        "model", 1
    ) == pytest.approx(all_bytes, rel=0.2), "each device has its part of the slots"
    if strategy == "cp":  # weights are everywhere: all that is sent are sums
        assert max(x.bytes for x in sent) < cache_bytes / 8


SENT = [
    # A layer's forward pass, that again, and its backward pass: q and the output, k and v.
    ({}, {("all-to-all", 32_768): 2 * 3 * 2, ("all-to-all", 16_384): 2 * 3 * 2}),
    # k and v visit 3 other devices three times; their gradients also return.
    (RING, {("collective-permute", 16_384): 2 * 2 * (3 * 3 + 4)}),
    # A window of 20 reaches two parts of 16 back.
    (RING | WINDOW, {("collective-permute", 16_384): 2 * 2 * (3 * 2 + 3)}),
]


@pytest.mark.parametrize(("changes", "wanted"), SENT)
@pytest.mark.full
def test_what_attention_sends(changes, wanted):
    """To the number: 2 layers; a device has 4 rows of 16 positions, 16 heads and 8 kv heads of 8."""
    config, found = tiny("transformer", **changes), Counter()
    _, step = compiled_step("transformer", config, "data=2,seq=4", "fsdp_cp")
    for sent in collectives(step.as_text()):
        if sent.kind in ("all-to-all", "collective-permute") and sent.bytes > 1024:  # not ids
            found[sent.kind, sent.bytes] += sent.times
    assert found == wanted


@pytest.mark.full
def test_what_a_state_sends_does_not_grow_with_the_row():
    """The textbook's bytes, and segment ids beside the convolution's inputs."""
    config = tiny("qwen3_next", num_layers=2, **NO_EXPERTS)
    for length in (T, 2 * T):
        layout, step = compiled_step("qwen3_next", config, "data=1,seq=8", "cp", length)
        permutes = [x for x in collectives(step.as_text()) if x.kind == "collective-permute"]
        (states,) = (x.bytes for x in transfers(layout) if x.purpose == "states")
        ids = B * (config.conv_width - 1) * 4
        sent = sum(x.bytes * x.times for x in permutes) - states
        assert sent in (ids, 2 * ids)  # JAX 0.12 sends the ids once for each of the two layers


@pytest.mark.parametrize("context", ["all-to-all", "ring"])
def test_the_textbook_of_bench_is_what_attention_sends(context):
    step = make_step(tiny("transformer", context=context), "cp", make_mesh("data=2,seq=4"), B, T)
    alone = make_step(tiny("transformer"), "dp", make_mesh("8"), B, T)
    sent = 12 * (32_768 + 16_384) * 3 / 4 if context == "all-to-all" else 2 * 2 * 3 * 4 * 16_384
    assert textbook(step.layout) - textbook(alone.layout) == sent


@pytest.mark.full
def test_gathered_inputs_are_not_gathered_again():
    """Each of 2 layers gathers 2 inputs and again as many; the rest are gradients and the loss."""

    def gathers(remat: str) -> int:
        _, step = compiled_step("transformer", tiny("transformer", remat=remat), "4x2", "tp_sp")
        sent = collectives(step.as_text())
        found = (x for x in sent if x.kind == "all-gather" and x.bytes == 32_768)
        return sum(x.times for x in found)

    assert gathers("full") - gathers("gathered") == 2 * 2


def test_a_checkpoint_does_not_say_how_to_attend():
    """Another mesh may have too many devices for the all-to-all of the run that saved it."""
    config = dataclasses.asdict(tiny("transformer", context="all-to-all", pipe_microbatches=3))
    saved = types.SimpleNamespace(metadata={"entry": "transformer", "config": config})
    assert layout_of(saved, make_mesh("1x1")).config.context == "auto"
    assert layout_of(saved, make_mesh("1x1")).config.pipe_microbatches == 0
    assert layout_of(saved, make_mesh("1x1"), context="ring").config.context == "ring"


@pytest.mark.full
@pytest.mark.parametrize("context", ["ring", "all-to-all"])
def test_no_device_has_a_whole_row(context):
    """No array of the compiled step has a whole row's tokens, targets, embeddings or scores."""
    config, length = tiny("transformer", context=context), 192
    _, step = compiled_step("transformer", config, "data=2,seq=4", "cp", length)
    text = step.as_text()
    assert f"f32[4,{length // 4},64]" in text
    assert f"s32[4,{length // 4}]" in text
    assert f"f32[4,{length},64]" not in text
    if context == "ring":  # an all-to-all needs whole rows of segments, and scores of some heads
        assert f"s32[4,{length}]" not in text
        assert f"{length},{length}]" not in text


@pytest.mark.parametrize(
    ("context", "mesh", "line"),
    [
        ("auto", "data=2,seq=4", "attention: all-to-all over seq (4), flash"),
        ("ring", "data=2,seq=4", "attention: ring over seq (4), flash"),
        ("auto", "data=2,seq=2,model=2", "attention: all-to-all over seq (2), flash"),
    ],
)
def test_the_report_names_the_way(context, mesh, line):
    config = tiny("transformer", context=context)
    layout = make_layout(model_of("transformer"), config, make_mesh(mesh), batch_size=8, seq_len=T)
    assert kernel.report(layout, T, True) == [line]
