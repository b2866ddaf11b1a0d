"""Each platform's attention kernel matches the plain one; one function chooses the kernel.

TPU kernels run here in Pallas' interpret mode: their own programs, block by block, on a CPU.
"""

import dataclasses
import functools
import itertools
import subprocess
import sys
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from data.text import example
from data.tokenizer import BYTES
from recipes.common import entries
from recipes.common.checkpoint import layout_of
from recipes.common.language import Sample, Text, Training, model_config
from recipes.common.report import kernel as kernel_report
from recipes.common.report.kernel import check, report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.flags import Run
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import trace_shape
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.step import TrainStep, gradients
from recipes.instruments.bench import kernels as bench_kernels
from recipes.instruments.bench.common import make_step
from recipes.transformer import MODEL, main
from tests.conftest import ROOT, full_except
from tests.support.absent import H100, MI300, TPU, on
from tests.support.cudnn import use_xla
from tests.support.models import random_variables
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import records
from zoo.core.attention import RowLayout, attend
from zoo.core.strategies import DECODER
from zoo.core.vocabulary import positions_at_once
from zoo.kernels import choice, splash, triton
from zoo.kernels.choice import FLASH_FROM, Choice, blockwise
from zoo.kernels.flash import TILE
from zoo.kernels.shared import TRITON_BLOCK, Settings, block_of
from zoo.kernels.splash import may_see
from zoo.llama_relatives import RULES, Config, Transformer
from zoo.parallel.context import AllToAll
from zoo.sizes import TRANSFORMER as SIZES

pytestmark = pytest.mark.promise("attention")

TINY = Config.tiny()
FEW = {"num_heads": 4, "num_kv_heads": 2}


def plain(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window, soft_cap=None, sinks_N=None, causal=True):
    """Attention by its definition, over the whole square."""
    (_, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, N // K, axis=2) for x in (k_BSKH, v_BSKH))
    age_TS = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    age_TS = age_TS if causal else abs(age_TS)
    seen_BTS = ((age_TS >= 0) & (age_TS < (window or T)))[None]
    if segment_ids_BT is not None:
        seen_BTS &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None]
    logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) / H**0.5
    if soft_cap is not None:
        logits_BNTS = soft_cap * jnp.tanh(logits_BNTS / soft_cap)
    logits_BNTS = jnp.where(seen_BTS[:, None], logits_BNTS, -jnp.inf)
    if sinks_N is not None:  # one more key per head, whose value is zero
        sinks_BNT1 = jnp.broadcast_to(sinks_N[None, :, None, None], (*logits_BNTS.shape[:3], 1))
        logits_BNTS = jnp.concatenate([logits_BNTS, sinks_BNT1], axis=3)
    weights_BNTS = jax.nn.softmax(logits_BNTS)[..., :T]
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)


def documents(B: int, T: int) -> np.ndarray:
    """Segment ids of rows that begin and end within documents, some with a single token."""
    starts = np.random.default_rng(0).random((B, T)) < 5 / T
    starts[:, T // 2 : T // 2 + 2] = True
    return np.cumsum(starts, axis=1, dtype=np.int32)


@pytest.mark.parametrize(
    ("kernel", "T", "K", "segments", "window", "extras"),
    full_except(
        [
            *itertools.product(["splash"], [384], [4, 2], [False, True], [None, 40], [""]),
            *itertools.product(["flash"], [200], [4, 2], [False, True], [None, 40], [""]),
            ("splash", 1024, 1, True, 600, ""),  # several blocks, in the window and beyond it
            ("splash", 1536, 2, True, 40, "cap"),  # the window leaves out one of three blocks
            ("splash", 2048, 2, True, None, ""),  # a dQ for each of two blocks of keys
            ("flash", 1024, 1, False, None, ""),  # whole tiles
            ("flash", 1024, 1, False, 600, ""),
            ("flash", 1200, 2, True, None, ""),  # padded to whole tiles
            ("flash", 1300, 4, False, 512, ""),  # a window of one tile, and the tiles beside it
            ("flash", 1300, 2, True, 1, ""),  # a position sees only itself
            *itertools.product(
                ["splash"], [384], [2], [True], [40], ["cap", "sinks", "cap, sinks"]
            ),
            *itertools.product(["flash"], [200], [2], [True], [40], ["cap", "sinks", "cap, sinks"]),
            ("flash", 1300, 1, True, 90, "cap, sinks"),
            ("splash", 1024, 4, False, 600, "cap, sinks"),
            ("splash", 1536, 2, True, None, "both sides"),
            ("splash", 1536, 4, False, 300, "both sides"),
            ("splash", 2048, 1, True, 40, "both sides"),  # windows leave out two of four blocks
            ("flash", 1300, 2, True, None, "both sides"),
            ("flash", 2200, 1, False, 90, "both sides"),  # tiles on one side and on the other
            ("flash", 200, 4, True, 40, "both sides, sinks"),
            ("xla", 300, 2, True, None, "both sides"),
            ("xla", 500, 1, True, 40, "both sides"),
            ("xla", 200, 2, True, None, "cap, sinks"),  # blockwise has neither: flash computes it
            ("triton", 200, 2, True, 40, "cap, sinks"),  # padded to whole blocks
            ("triton", 320, 1, True, None, ""),
            ("triton", 330, 4, False, 90, "both sides"),
        ],
        fast=[
            ("splash", 384, 2, True, 40, "cap, sinks"),
            ("flash", 1200, 2, True, None, ""),
            ("xla", 500, 1, True, 40, "both sides"),
            ("flash", 200, 4, True, 40, "both sides, sinks"),
            ("triton", 200, 2, True, 40, "cap, sinks"),
        ],
    ),
)
def test_a_kernel_matches_the_definition(kernel, T, K, segments, window, extras):
    compare_with_definition(kernel, T, K, segments, window, extras)


def compare_with_definition(kernel, T, K, segments, window, extras):
    """Outputs and gradients, of sinks too. "cap" bends most scores: they are up to 4 or so. "both
    sides": no mask is causal.
    """
    causal = "both sides" not in extras
    shapes = [(2, T, 4, 16), *2 * [(2, T, K, 16)], (2, T, 4, 16), (4,)]
    rng = np.random.default_rng(0)
    *qkv, weight, sinks = (jnp.asarray(rng.standard_normal(x, np.float32)) for x in shapes)
    ids = documents(2, T) if segments else None
    soft_cap = 1.5 if "cap" in extras else None
    given = (*qkv, sinks) if "sinks" in extras else qkv

    def ours(q, k, v, sinks=None):
        more = {"soft_cap": soft_cap, "sinks_N": sinks, "causal": causal}
        return attend(q, k, v, ids, window=window, kernel=kernel, **more)

    def theirs(q, k, v, sinks=None):
        return plain(q, k, v, ids, window, soft_cap, sinks, causal)

    @jax.jit
    def outputs_and_gradients(*given):
        (out, back), (wanted, back_wanted) = jax.vjp(ours, *given), jax.vjp(theirs, *given)
        return (out, *back(weight)), (wanted, *back_wanted(weight))

    for found, wanted in zip(*outputs_and_gradients(*given), strict=True):
        # A sink's gradient is a sum over all rows and positions.
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=1e-5 if found.ndim == 1 else 1e-7)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["flash", "splash", "triton"])
def test_a_kernel_in_bfloat16_is_as_exact_as_bfloat16(kernel):
    """Errors are those of rounding inputs and weights to 8 bits, whatever the number of tiles."""
    shape = bench_kernels.Shape(1, 1_024, 2, 1, 64, segments=True, window=700)
    found = bench_kernels.errors(kernel, shape, "bfloat16")
    assert max(found.values()) < 5e-3, found
    q, k, v, _, ids = bench_kernels.inputs(shape, "bfloat16")
    out = jax.eval_shape(lambda: attend(q, k, v, ids, window=shape.window, kernel=kernel))
    assert out.dtype == jnp.bfloat16


# ---- memory and work -----------------------------------------------------------------------------


def temporaries(kernel: str, T: int) -> int:
    """Bytes of temporary memory of the compiled gradient, on one CPU device."""
    q, k = (jax.ShapeDtypeStruct((1, T, n, 8), jnp.float32) for n in (2, 1))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, v, ids):
        return attend(q, k, v, ids, kernel=kernel).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, ids).compile(QUICK)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_memory_is_linear_in_the_length_of_a_row():
    """Four times as many positions take four times the memory; XLA's attention, up to sixteen."""
    growth = {
        name: temporaries(name, 8_192) / temporaries(name, 2_048) for name in ("flash", "xla")
    }
    assert growth["flash"] <= 4.5, growth
    assert growth["xla"] > 10, "the check would not see scores in memory"


@pytest.mark.full
def test_memory_is_linear_in_a_model():
    """JAX must not compute the masks, which no layer changes, ahead of the loop over layers."""
    config = Config(384, 64, 2, num_heads=2, num_kv_heads=1, head_dim=16, mlp=64, attention="flash")
    held = []
    for T in (8_192, 32_768):
        layout = make_step(config, "dp", make_mesh("1"), 1, T, segments=True).layout
        rows = dict.fromkeys(example(np.zeros(2, np.int32)), jax.ShapeDtypeStruct((T,), np.int32))
        step = functools.partial(gradients, layout)
        given = layout.variables(), layout.abstract_batch(rows)
        compiled = layout.compile(step, *given, compiler_options=QUICK)
        held.append(compiled.memory_analysis().temp_size_in_bytes)
    assert held[1] / held[0] <= 4.2, held


# Four tiles: (ids of their segments, window, the poisoned keys, queries that see none of them, keys that
# only such queries see).
UNSEEN = {
    "causal": ([0, 0, 0, 0], None, 3, [0, 1, 2], []),
    "window": ([0, 0, 0, 0], 300, 0, [2, 3], [2, 3]),
    "segments": ([0, 1, 1, 1], None, 0, [1, 2, 3], [1, 2, 3]),
    "segments that come back": ([0, 1, 0, 1], None, 1, [0, 2], [0, 2]),
}


@pytest.mark.parametrize(
    ("kernel", "case"),
    full_except(
        [
            *itertools.product(["flash", "splash"], UNSEEN),
            # It visits all between the first and the last that a query sees.
            *itertools.product(["triton"], [*UNSEEN][:3]),
        ],
        fast=[("flash", "window"), ("flash", "segments that come back")],
    ),
)
def test_tiles_that_nobody_sees_are_skipped(kernel, case):
    """NaN in keys and values reaches every tile that is computed, even where it is masked."""
    segments, window, poisoned, queries, keys = UNSEEN[case]
    tiles = {"flash": TILE, "splash": block_of(4 * TILE, window), "triton": TRITON_BLOCK}
    tile = tiles[kernel]
    window = window and window * tile // TILE
    T = 4 * tile
    rng = np.random.default_rng(0)
    q, k, v, weight = (rng.standard_normal((1, T, heads, 8), np.float32) for heads in (2, 1, 1, 2))
    ids = np.repeat(np.array([segments], np.int32), tile, axis=1)
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[:, poisoned * tile : (poisoned + 1) * tile] = np.nan
    bad_v[:, poisoned * tile : (poisoned + 1) * tile] = np.nan

    @jax.jit
    def outputs_and_gradients(*qkv):
        out, back = jax.vjp(lambda *qkv: attend(*qkv, ids, window=window, kernel=kernel), *qkv)
        return out, *back(weight)

    found, wanted = outputs_and_gradients(q, bad_k, bad_v), outputs_and_gradients(q, k, v)
    assert np.isnan(found[0]).any(), "the poison has no effect"
    for ours, theirs, clean in zip(found, wanted, (queries, queries, keys, keys), strict=True):
        tiles = [np.asarray(x).reshape(4, tile, -1)[clean] for x in (ours, theirs)]
        assert np.isfinite(tiles[0]).all()
        np.testing.assert_array_equal(*tiles)


def packed(T: int, *lengths: int) -> np.ndarray:
    """Segment ids of a row for each length, which all its documents have; padding at its end."""
    rows = [np.arange(T, dtype=np.int32) // length + 1 for length in lengths]
    return np.where(np.arange(T) < T - 192, rows, 0).astype(np.int32)


@pytest.mark.parametrize(
    ("T", "lengths", "window"),
    [
        (1_536, (450, 512), None),
        (1_536, (512, 512), 200),
        (2_560, (500, 700), 600),
        (4_608, (400, 900), None),  # a kernel for dQ, and another for dK and dV
    ],
)
@pytest.mark.full
def test_blocks_without_a_common_segment_change_nothing(T, lengths, window, monkeypatch):
    """Outputs and gradients are equal bit by bit if these blocks are computed, and then masked."""
    rng = np.random.default_rng(0)
    shapes = [(2, T, heads, 16) for heads in (2, 1, 1, 2)]
    *qkv, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    ids = packed(T, *lengths)
    needed, causal = (count_blocks(x, block_of(T, window), window) for x in (ids, 0 * ids))
    assert [computed.sum() for _, computed in grids(T, ids, window)] == [needed, needed]
    assert needed < causal

    def outputs_and_gradients(*qkv):
        out, back = jax.vjp(lambda *qkv: attend(*qkv, ids, window=window, kernel="splash"), *qkv)
        return out, *back(weight)

    found = jax.jit(outputs_and_gradients)(*qkv)
    monkeypatch.setattr(splash, "may_see", without_segments)
    for ours, theirs in zip(
        found, jax.jit(lambda *x: outputs_and_gradients(*x))(*qkv), strict=True
    ):
        assert np.isfinite(ours).all()
        np.testing.assert_array_equal(ours, theirs)


def count_blocks(ids_BT: np.ndarray, size: int, window: int | None) -> int:
    """Pairs of blocks in which a query sees a key in some row, by the definition of who sees what."""
    T = ids_BT.shape[1]
    age_TS = np.arange(T)[:, None] - np.arange(T)
    seen_TS = (ids_BT[:, :, None] == ids_BT[:, None]).any(0) & (age_TS >= 0)
    seen_TS &= age_TS < (window or T)
    return int(seen_TS.reshape(T // size, size, T // size, size).any((1, 3)).sum())


def without_segments(window, ids_BT, ids_BS, *rest):
    return may_see(window, 0 * ids_BT, 0 * ids_BS, *rest)


def grids(T: int, ids_BT, window=None, offset: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """What splash loads and whether it computes it, step by step: for outputs, and for dK with dV."""
    settings = Settings(positions=T, window=window)

    @jax.jit
    def loads_and_computes(ids_BT, offset):
        _, (by_query, _, by_key), _ = splash._splash(settings, ids_BT, ids_BT, offset)
        return [(mask.data_next[0], mask.block_mask[0]) for mask in (by_query, by_key)]

    of_queries, of_keys = jax.device_get(loads_and_computes(ids_BT, jnp.int32(offset)))
    return [of_queries, (of_keys[0].T, of_keys[1].T)]


def changes(loads: np.ndarray) -> list[int]:
    """Blocks that a kernel fetches: those that the step before didn't have."""
    flat = loads.ravel()
    return flat[np.append(True, flat[1:] != flat[:-1])].tolist()


def test_documents_of_1000_tokens_need_15_of_36_blocks():
    """Block i of 1,024 has the end of document i and the beginning of the next; then comes padding."""
    ids = packed(8_192, 1_000)
    for loads, computed in grids(8_192, ids):
        pairs = np.argwhere(computed)
        assert len(pairs) == 8 + 7
        assert set(loads[tuple(pairs.T)] - pairs[:, 0]) <= {-1, 0, 1}
        assert changes(loads) == list(range(8)), "each block is fetched once, and no other"
    causal = [computed.sum() for _, computed in grids(8_192, 0 * ids)]
    assert causal == [36, 36]


def test_rows_in_one_call_visit_what_any_of_them_needs():
    """One document, beside many: all blocks. A window of 1,100: the diagonal and two more blocks."""
    ids = np.concatenate([packed(8_192, 1_000), np.ones((1, 8_192), np.int32)])
    assert [computed.sum() for _, computed in grids(8_192, ids)] == [36, 36]
    assert [computed.sum() for _, computed in grids(8_192, ids, 1_100)] == 2 * [8 + 7 + 6]
    assert [computed.sum() for _, computed in grids(8_192, ids[:1], 1_100)] == [15, 15]


def test_a_part_of_a_row_that_came_around_a_ring():
    """Keys of a device that is one part back, and of one that is further on."""
    ids = packed(8_192, 1_000)
    one = np.ones_like(ids)
    assert [computed.sum() for _, computed in grids(8_192, one, None, 8_192)] == [64, 64]
    assert [computed.sum() for _, computed in grids(8_192, one, None, -8_192)] == [0, 0]
    # In stripes, the same positions but for a few.
    assert [computed.sum() for _, computed in grids(8_192, ids, None, -1)] == [15, 15]


@pytest.mark.parametrize("window", [None, 4_096])
def test_programs_for_long_rows_hold_no_masks(window):
    """The program makes splash's masks: its arrays are as small as two per block of queries."""
    T, mesh = 131_072, on(*TPU).mesh
    q, k = (jax.ShapeDtypeStruct((4, T, n, 16), jnp.bfloat16) for n in (4, 2))
    ids = jax.ShapeDtypeStruct((4, T), jnp.int32)

    @jax.jit
    def gradients(q, k, v, ids):
        return jax.grad(lambda *qkv: attend(*qkv, ids, window=window).sum(), (0, 1, 2))(q, k, v)

    start = time.process_time()
    with (
        jax.sharding.use_abstract_mesh(mesh),
        nnx.logical_axis_rules(tuple(RULES["fsdp_tp"].items())),
    ):
        traced = gradients.trace(q, k, k, ids).jaxpr
    assert time.process_time() - start < 10, "masks made on the host took 79 s"
    assert "splash_mha" in str(traced)
    assert sum(x.nbytes for x in constants(traced)) < 100_000


def constants(traced) -> list[np.ndarray]:
    """Arrays that a traced program contains, in all its parts."""
    found = [np.asarray(x) for x in getattr(traced, "consts", ())]
    inner = getattr(traced, "jaxpr", traced)
    for equation in inner.eqns:
        found += [np.asarray(x.val) for x in equation.invars if hasattr(x, "val")]
        parts = jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        found += [x for part in parts if hasattr(part, "eqns") for x in constants(part)]
    return found


# ---- in a model ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "strategy", "mesh", "remat", "changes"),
    full_except(
        [
            ("splash", "fsdp", "8", "none", {}),
            ("splash", "fsdp_tp", "4x2", "sublayers", {"sliding_window": 70}),
            ("splash", "hsdp_tp", "2x2x2", "full", {}),
            ("splash", "tp", "2x4", "dots", {"num_kv_heads": 2}),  # fewer than it has shards
            ("splash", "fsdp_tp", "2x4", "full", {"num_heads": 9, "num_kv_heads": 3}),  # replicated
            ("flash", "fsdp_tp", "4x2", "dots", {}),
            ("flash", "tp", "2x4", "none", {"num_kv_heads": 2, "sliding_window": 70}),
            # Devices with parts of rows: a block of `splash` each on a ring.
            ("splash", "fsdp_cp", "data=4,seq=2", "full", FEW | {"context": "all-to-all"}),
            ("splash", "fsdp_cp", "data=4,seq=2", "full", FEW | {"context": "ring"}),  # in stripes
            (
                "splash",
                "cp",
                "data=2,seq=4",
                "none",
                FEW | {"context": "ring", "sliding_window": 150},
            ),
            ("triton", "fsdp_cp", "data=4,seq=2", "dots", FEW | {"context": "ring"}),
        ],
        fast=[("splash", "fsdp", "8", "none", {})],
    ),
)
def test_on_any_mesh_a_kernel_trains_the_same_model(kernel, strategy, mesh, remat, changes):
    """Compares loss and gradients, inside scan, remat and gathers, with XLA's on one device."""
    config = dataclasses.replace(TINY, **changes)
    given = dataclasses.replace(config, attention=kernel, remat=remat)
    T = 128 * make_mesh(mesh).shape.get("seq", 1)
    (loss, grads), (want, wanted) = loss_and_gradients(given, mesh, strategy, T), by_xla(config, T)
    assert loss == pytest.approx(want, abs=2e-6)
    for path, gradient in grads.items():
        np.testing.assert_allclose(gradient, wanted[path], atol=2e-6, err_msg=path)


def loss_and_gradients(config: Config, mesh: str, strategy: str, T: int) -> tuple[float, dict]:
    B = 8
    tokens = np.random.default_rng(0).integers(0, 257, (B, T + 1), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": documents(B, T)}
    layout = make_layout(Transformer, config, make_mesh(mesh), strategy, batch_size=B, seq_len=T)

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch)
        return means["loss"], grads

    given = random_variables(layout), jax.device_put(batch, layout.batch_shardings(batch))
    loss, grads = layout.compile(both, *given, compiler_options=QUICK)(*given)
    return float(loss), {path: np.asarray(gradient) for path, gradient in paths(grads).items()}


@functools.cache
def by_xla(config: Config, T: int) -> tuple[float, dict]:
    alone = dataclasses.replace(config, attention="xla", context="auto")
    return loss_and_gradients(alone, "1x1", "dp", T)


@pytest.mark.parametrize(
    ("per_pass", "K", "segments", "window", "extras"),
    full_except(
        [
            (0, 2, False, None, ""),
            (0, 4, False, 20, "sinks"),
            (8, 2, True, None, ""),  # all documents in one pass
            (8, 1, True, 20, "sinks"),
            (2, 2, True, None, ""),  # several passes, some of which end within a row
            (3, 4, True, 20, "sinks"),
            (None, 2, True, 20, ""),  # a mask, before Hopper
            (None, 2, True, None, "sinks"),
            (8, 2, False, None, "both sides"),
            (2, 2, True, None, "both sides"),
            (None, 1, True, None, "both sides, sinks"),
        ],
        fast=[
            (0, 2, False, None, ""),
            (3, 4, True, 20, "sinks"),
            (None, 2, True, 20, ""),
            (2, 2, True, None, "both sides"),
        ],
    ),
)
def test_what_cudnn_is_asked_for_is_attention(per_pass, K, segments, window, extras, monkeypatch):
    """XLA in cuDNN's place leaves NaN where the library leaves anything."""
    use_xla(monkeypatch, packs=per_pass is not None, documents=per_pass or 0)
    compare_with_definition("cudnn", 60, K, segments, window, extras)


@pytest.mark.parametrize("kernel", full_except([("cudnn",), ("triton",)], [("cudnn",)]))
def test_values_may_be_narrower_than_keys(kernel, monkeypatch):
    """As in latent attention; cuDNN wants multiples of 8, Triton powers of two."""
    use_xla(monkeypatch)
    dims = (12, 12, 9)
    qkv = [jax.random.normal(jax.random.key(i), (2, 24, 2, H)) for i, H in enumerate(dims)]
    ids = documents(2, 24)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_gradients(kernel, *qkv):
        def ours(*qkv):
            return attend(*qkv, ids, kernel=kernel)

        out, back = jax.vjp(ours if kernel else lambda *qkv: plain(*qkv, ids, None), *qkv)
        return out, *back(jnp.cos(out))

    found, wanted = (outputs_and_gradients(name, *qkv) for name in (kernel, ""))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_config_names_a_kernel_that_there_is():
    with pytest.raises(
        ValueError, match="attention='mosaic' is not one of auto, xla, flash, splash, triton, cudnn"
    ):
        dataclasses.replace(TINY, attention="mosaic")


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("rules", [RULES["fsdp_tp"], {}, {"batch": "data", "seq": "model"}])
def test_a_copied_file_has_its_kernel_on_any_kind_of_mesh(kind, rules):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (4, 128, n, 8)) for i, n in enumerate((4, 2, 2))
    )
    ids = documents(4, 128)
    given = jax.device_put((q, k, v, ids), jax.NamedSharding(mesh, PartitionSpec()))
    rules = dict.fromkeys(DECODER.logical_axes) | rules if rules else {}
    layout = AllToAll() if rules.get("seq") else RowLayout()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        ours = jax.jit(lambda *qkvs: attend(*qkvs, kernel="splash", layout=layout))(*given)
    np.testing.assert_allclose(ours, plain(q, k, v, ids, None), atol=1e-5)
    lies = PartitionSpec(*map(rules.get, ("batch", "seq", "heads")), None)
    assert ours.sharding.is_equivalent_to(jax.NamedSharding(mesh, lies), 4)


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "T", "segments", "changes", "choice"),
    [
        (TPU, 8192, True, {}, Choice("splash", blocks=1024)),
        (TPU, 1536, True, {}, Choice("splash", blocks=512)),
        (TPU, 8192, True, {"sliding_window": 4096, "dtype": "float32"}, Choice("splash", blocks=1024)),
        (TPU, 1920, True, {}, Choice("splash", blocks=384)),
        (TPU, 128, False, {}, Choice("splash", blocks=128)),
        (TPU, 1000, True, {}, Choice("flash", obstacle="1,000 positions, not a multiple of 128")),
        (H100, 1000, True, {}, Choice("cudnn")),
        (H100, 131_072, True, {}, Choice("cudnn")),
        (H100, 1001, False, {"sliding_window": 100}, Choice("cudnn")),
        (H100, 1024, True, {"sliding_window": 100}, Choice("cudnn")),
        (H100, 1024, False, {"head_dim": 20}, Choice("cudnn")),
        (H100, 1024, False, {"head_dim": 264}, Choice("flash", obstacle="a head dim of 264")),
        (H100, 1024, False, {"head_dim": 256}, Choice("cudnn")),
        (H100, 1024, False, {"dtype": "float32"}, Choice("triton", obstacle="float32")),
        (MI300, 1024, False, {}, Choice("flash", obstacle="AMD Instinct MI300X")),
        (("cpu", "cpu"), 1024, True, {}, Choice("xla")),
        (("cpu", "cpu"), FLASH_FROM - 1, True, {}, Choice("xla")),
        (("cpu", "cpu"), FLASH_FROM, True, {}, Choice("flash")),
        (TPU, 8192, True, {"attention": "xla"}, Choice("xla")),
        (("cpu", "cpu"), FLASH_FROM, True, {"attention": "xla"}, Choice("xla")),
        (TPU, 8192, True, {"attention": "flash"}, Choice("flash")),
        (TPU, 1000, True, {"attention": "splash"}, Choice("flash", obstacle="1,000 positions, not a multiple of 128")),
    ],
)  # fmt: skip
def test_the_mesh_in_force_decides_the_kernel(device, T, segments, changes, choice):
    config = dataclasses.replace(TINY, **{"dtype": "bfloat16"} | changes)
    with on(*device).trace():
        assert kernel_of(config, T, segments) == choice
    here = changes.get("attention") or ("xla" if T < FLASH_FROM else "flash")
    of_this_machine = choice if here == "splash" else Choice(here)
    assert kernel_of(config, T, segments) == of_this_machine, "without a mesh"


@pytest.mark.parametrize(
    ("kernel", "device", "changes", "obstacle"),
    [
        ("splash", TPU, {}, None),
        ("splash", H100, {}, "gpu devices"),
        ("splash", ("cpu", "cpu"), {}, "cpu devices"),
        ("cudnn", H100, {}, None),
        ("cudnn", TPU, {}, "tpu devices"),
        ("cudnn", MI300, {}, "AMD Instinct MI300X"),
        ("cudnn", H100, {"dtype": "float32"}, "float32"),
        ("cudnn", H100, {"head_dim": 264}, "a head dim of 264"),
        ("triton", H100, {}, None),
        ("triton", H100, {"dtype": "float32"}, None),
        ("triton", H100, {"head_dim": 264}, "a head dim of 264"),
        ("triton", TPU, {}, "tpu devices"),
        ("triton", MI300, {}, "AMD Instinct MI300X"),
        ("flash", H100, {"head_dim": 20}, None),
    ],
)
def test_a_kernel_that_the_devices_lack_is_refused(kernel, device, changes, obstacle):
    config = dataclasses.replace(TINY, **{"dtype": "bfloat16", "attention": kernel} | changes)
    layout = make_layout(Transformer, config, on(*device).mesh, "fsdp_tp", batch_size=8)
    if obstacle is None:
        check(layout)
        return
    with pytest.raises(
        UserError, match=f"=attention={kernel} doesn't support {obstacle}; use --set"
    ):
        check(layout)


def kernel_of(config: Config, seq_len: int, segments: bool) -> Choice:
    attention = trace_shape(Transformer, config).attention
    return kernel_report.attention_kernel(config, attention, seq_len, segments)


def test_a_checkpoint_of_a_tpu_s_kernel_is_used_on_any_device():
    """A kernel is how the run that saved it computed; --set names another."""
    config = entries.config_json(dataclasses.replace(TINY, attention="splash"))
    source: Any = types.SimpleNamespace(
        metadata={"entry": "transformer", "config": config}, path=""
    )
    assert layout_of(source, make_mesh("1")).config.attention == "auto"
    assert layout_of(source, make_mesh("1"), attention="flash").config.attention == "flash"


def test_rules_that_split_heads_have_no_kernel():
    layout = make_layout(
        Transformer, TINY, on(*TPU).mesh, {"batch": "data", "head_dim": "model"}, batch_size=8
    )
    with layout.trace():
        choice = kernel_of(TINY, 1024, True)
    assert choice == Choice("xla", obstacle="rules that split head_dim")
    line = "attention: xla, no other kernel for rules that split head_dim"
    assert report(layout, 1024, True) == [line]


def test_an_older_gpu_is_known_by_its_compute_capability(monkeypatch):
    class Card:
        device_kind, compute_capability = "Tesla V100-SXM2-16GB", "7.0"

    cudnn = Choice("cudnn")
    none = Choice("flash", obstacle="Tesla V100-SXM2-16GB")
    wide = Choice("triton", obstacle="a head dim of 256")
    odd, long = (
        Choice("triton", obstacle=f"{T} positions with segments") for T in ("999", "8,194")
    )
    for capability, head_dim, T, segments, wanted in (
        ("7.0", 64, 1024, False, none), ("gfx942", 64, 1024, False, none),
        ("8.0", 64, 1024, False, cudnn), ("8.0", 128, 16_384, False, cudnn),
        ("8.0", 256, 1024, False, wide), ("9.0", 256, 1024, False, cudnn),
        ("8.0", 64, 1024, True, cudnn), ("8.0", 64, 8_194, True, long),  # a mask of T × T
        ("8.0", 64, 999, True, odd), ("9.0", 64, 8_193, True, cudnn),
    ):  # fmt: skip
        monkeypatch.setattr(Card, "compute_capability", capability)
        monkeypatch.setattr(jax, "devices", lambda: [Card()])
        with on("gpu", Card.device_kind).trace():
            config = dataclasses.replace(TINY, dtype="bfloat16", head_dim=head_dim)
            choice = kernel_of(config, T, segments)
        assert choice == wanted, (capability, head_dim, T, segments)


def test_triton_s_blocks_are_those_whose_registers_do_not_spill(monkeypatch):
    """By the sizes of compiled kernels' stacks; Ada, 8.9, has little shared memory."""
    sizes = {  # (dtype, head dim) → positions, also those of the forward pass where memory is large
        ("bfloat16", 64): (64, 64),
        ("bfloat16", 128): (64, 64),
        ("bfloat16", 256): (32, 64),
        ("float32", 64): (32, 32),
        ("float32", 128): (32, 32),
        ("float32", 256): (16, 32),
    }
    for capability in (8.0, 8.9, 9.0):
        monkeypatch.setattr(triton, "compute_capability", lambda _, found=capability: found)
        for (dtype, dim), (size, large) in sizes.items():
            q, v = (jax.ShapeDtypeStruct((1, 1, 64, x), dtype) for x in (dim, 16))
            assert triton._block_size(q, v) == size
            assert triton._block_size(v, q, forward=True) == (size if capability == 8.9 else large)


def test_the_loss_takes_more_positions_at_once_on_accelerators():
    """A chunk has up to 1,024 positions for each device, as far as they divide a row."""
    assert TINY.loss_chunk == 256
    for rows, T, tpu, cpu in ((1, 32768, 1024, 256), (8, 2048, 256, 256), (1, 1000, 1000, 250)):
        for device, want in ((TPU, tpu), (H100, tpu), (("cpu", "cpu"), cpu)):
            with on(*device).trace():
                assert positions_at_once(TINY.loss_chunk, rows, T) == want
    with on(*TPU).trace():
        assert positions_at_once(2048, 8, 4096) == 2048, "what is asked for is never narrowed"


def kernels(step: TrainStep, example) -> set[str]:
    """Kernels of KERNELS that a step contains, found by words that only their parts have."""
    with step.layout.trace():
        traced = jax.make_jaxpr(step)(step.abstract_state(), step.layout.abstract_batch(example))
    # flash asks of each tile whether any of it is seen.
    parts = {"splash_mha": "splash", "reduce_or": "flash", "dot_product_attention_fwd": "cudnn"}
    return {name for part, name in parts.items() if part in str(traced)}


@pytest.mark.parametrize(
    "device", full_except([(TPU,), (H100,), (MI300,), (("cpu", "cpu"),)], [(TPU,), (H100,)])
)
def test_bench_and_recipe_have_the_same_kernel(device):
    """Traces the step of each for a mesh of that device."""
    mesh, lr = on(*device).mesh, LearningRate(1e-3, 10, 100)
    flags = dataclasses.replace(MODEL, size="tiny")
    config = model_config("transformer", flags, None, BYTES, mesh.abstract_device)
    layout = make_layout(Transformer, config, mesh, batch_size=8)
    row = example(np.zeros(129, np.int32))
    recipe = kernels(TrainStep(layout, adamw(lr, weight_decay=0.1, clip_norm=1.0), lr), row)
    bench = make_step(config, "fsdp_tp", mesh, 8, 128)
    with layout.trace():
        name = kernel_of(config, 128, True).kernel
    assert recipe == {name} - {"xla"}
    assert kernels(bench.function, row) == recipe


@pytest.mark.full
def test_no_deprecated_kernel_is_imported():
    """Traces steps for GPUs and then for a TPU, in a new process where deprecations are errors."""
    code = """
import dataclasses, sys
import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from recipes.instruments.bench.common import make_step
from zoo.parallel.context import AllToAll
from zoo.llama_relatives import Config

def trace(platform, kind):
    config = dataclasses.replace(Config.tiny(), dtype="bfloat16")
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((8,), ("data",), (AxisType.Explicit,), abstract_device=device)
    step = make_step(config, "fsdp", mesh, 8, 128, segments=True)
    with step.layout.trace():
        return str(jax.make_jaxpr(step.function)(step.abstract, step.layout.abstract_batch(step.example)))

assert "dot_product_attention_fwd" in trace("gpu", "NVIDIA H100 80GB HBM3")
print([name for name in sys.modules if name.startswith("jax.experimental.pallas")])
assert "splash_mha" in trace("tpu", "TPU v5e")
print([name for name in sys.modules if ".pallas.ops.gpu" in name])
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("[]\n[]\n", 0), done.stderr


@pytest.mark.full
def test_the_report_names_the_kernel(tmp_path, monkeypatch, capsys, quick):
    """A run whose config names a kernel trains with it and says so."""
    text = tmp_path / "book.txt"
    text.write_text("A page of a book, and another one. " * 100)
    config = dataclasses.replace(TINY, num_layers=1, attention="flash")
    monkeypatch.setitem(SIZES, "tiny", lambda: config)
    run = Run(mesh="1x1", workdir=str(tmp_path / "run"), steps=1, batch_size=2)
    main(
        run,
        Text(dataset=str(text)),
        dataclasses.replace(MODEL, size="tiny"),
        Training(),
        Sample(sample_bytes=0),
    )
    assert "\nattention: flash\n" in f"\n{capsys.readouterr().out}"
    assert records(tmp_path / "run", "loss")


def test_the_report_has_blocks_and_limits():
    assert report(on(*TPU), 256, True) == ["attention: splash, blocks of 256"]
    assert report(on(*TPU), 100, True) == [
        "attention: flash, no other kernel for 100 positions, not a multiple of 128"
    ]
    assert report(on("cpu", "cpu"), 256, True) == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_mask_that_is_added_chooses_bit_by_bit(dtype, monkeypatch):
    """Output and gradients, with segments and a window; only CPUs add it."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (40 * jax.random.normal(key, (2, 24, 2, 8)).astype(dtype) for key in keys)
    ids = jnp.arange(24)[None] // jnp.array([[7], [24]])

    def run():
        return jax.vjp(lambda *qkv: blockwise(*qkv, ids, 5, "kv_heads"), q, k, v)

    def values(output, back):
        return [np.asarray(x.astype(jnp.float32)) for x in (output, *back(v))]

    added = values(*run())
    monkeypatch.setattr(choice, "device", lambda: types.SimpleNamespace(platform="tpu"))
    for found, wanted in zip(added, values(*run()), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("segments", [True, False])
def test_one_row_on_one_device_has_a_mask(segments):
    """Its B has the axis `batch`, though nothing splits it."""
    layout = make_layout(Transformer, Config.tiny(), make_mesh("1x1"), "fsdp_tp")
    row = jax.ShapeDtypeStruct((1, 16), jnp.int32, sharding=layout.sharding("batch", "seq"))

    def logits(variables, tokens_BT, *ids):
        return layout.model.merge(variables)(tokens_BT, *ids)

    lowered = layout.lower(logits, layout.variables(), row, *[row] * segments)
    assert lowered.out_info.shape == (1, 16, Config.tiny().vocab_size)


@pytest.mark.full
def test_gradients_of_short_rows_in_bfloat16_are_as_exact_as_their_inputs():
    """Rounding the weights, but not their sum, would double the errors of q's and k's."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, cotangent = (jax.random.normal(key, (4, 256, 2, 32), jnp.bfloat16) for key in keys)

    def run(dtype):
        arrays = [4 * q.astype(dtype), k.astype(dtype), v.astype(dtype)]  # few weights are large
        _, back = jax.vjp(lambda q, k, v: blockwise(q, k, v, None, None, "kv_heads"), *arrays)
        return back(cotangent.astype(dtype))

    for rounded, exact in zip(run(jnp.bfloat16), run(jnp.float32), strict=True):
        error = jnp.linalg.norm(rounded.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
        assert error < 2**-9 * 1.5
