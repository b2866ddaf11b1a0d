"""Each platform's attention kernel matches the plain one; one function chooses the kernel.

Kernels run here in Pallas' interpret mode: their own programs, block by block, on a CPU.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

from data.text import example
from data.tokenizer import BYTES
from recipes.bench.common import make_step
from recipes.common.language import Sample, Text, attention, model_config
from recipes.common.runtime.flags import Run
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths, variables_of
from recipes.common.sharding.layout import Layout, make_layout, shardings
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.step import TrainStep, gradients
from recipes.transformer import Flags, main
from tests.conftest import full_except
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from tests.support.runs import records
from zoo.attention import attend, attention_kernels
from zoo.layers import positions_at_once
from zoo.transformer import LOGICAL_AXES, RULES, SIZES, Config, Transformer

pytestmark = pytest.mark.promise("attention")

TINY = Config.tiny()


def plain(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, window):
    """Attention by its definition, over the whole square."""
    (_, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    k_BSNH, v_BSNH = (jnp.repeat(x, N // K, axis=2) for x in (k_BSKH, v_BSKH))
    age_TS = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    seen_BTS = ((age_TS >= 0) & (age_TS < (window or T)))[None]
    if segment_ids_BT is not None:
        seen_BTS &= segment_ids_BT[:, :, None] == segment_ids_BT[:, None]
    logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) / H**0.5
    weights_BNTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], logits_BNTS, -jnp.inf))
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)


def documents(B: int, T: int) -> np.ndarray:
    """Segment ids of rows that begin and end within documents, some with a single token."""
    starts = np.random.default_rng(0).random((B, T)) < 5 / T
    starts[:, T // 2 : T // 2 + 2] = True
    return np.cumsum(starts, axis=1, dtype=np.int32)


@pytest.mark.parametrize(
    ("kernel", "T", "K", "segments", "window"),
    full_except(
        [
            *itertools.product(["splash"], [384], [4, 2], [False, True], [None, 40]),
            *itertools.product(["triton"], [200], [4, 2], [False, True], [None]),
            ("splash", 1024, 1, True, 600),  # several blocks, within the window and beyond it
        ],
        fast=[("splash", 384, 2, True, 40), ("triton", 200, 2, True, None)],
    ),
)
def test_a_kernel_matches_the_definition(kernel, T, K, segments, window):
    shapes = [(2, T, 4, 16), *2 * [(2, T, K, 16)], (2, T, 4, 16)]
    rng = np.random.default_rng(0)
    *qkv, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    ids = documents(2, T) if segments else None

    @jax.jit
    def outputs_and_gradients(*qkv):
        ours, back = jax.vjp(lambda *qkv: attend(*qkv, ids, window, kernel), *qkv)
        theirs, their_back = jax.vjp(lambda *qkv: plain(*qkv, ids, window), *qkv)
        return (ours, *back(weight)), (theirs, *their_back(weight))

    for ours, theirs in zip(*outputs_and_gradients(*qkv), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "strategy", "mesh", "remat", "changes"),
    full_except(
        [
            ("splash", "fsdp", "8", "none", {}),
            ("splash", "fsdp_tp", "4x2", "sublayers", {"sliding_window": 70}),
            ("splash", "hsdp_tp", "2x2x2", "full", {}),
            ("splash", "tp", "2x4", "dots", {"num_kv_heads": 2}),  # fewer than it has shards
            ("splash", "fsdp_tp", "2x4", "full", {"num_heads": 9, "num_kv_heads": 3}),  # replicated
            ("triton", "fsdp_tp", "4x2", "dots", {}),
        ],
        fast=[("splash", "hsdp_tp", "2x2x2", "full", {})],
    ),
)
def test_on_any_mesh_a_kernel_trains_the_same_model(kernel, strategy, mesh, remat, changes):
    """Compares loss and gradients, inside scan, remat and gathers, with XLA's on one device."""
    config = dataclasses.replace(TINY, **changes)
    given = dataclasses.replace(config, attention=kernel, remat=remat)
    (loss, grads), (want, wanted) = loss_and_gradients(given, mesh, strategy), by_xla(config)
    assert loss == pytest.approx(want, abs=2e-6)
    for path, gradient in grads.items():
        np.testing.assert_allclose(gradient, wanted[path], atol=2e-6, err_msg=path)


def loss_and_gradients(config: Config, mesh: str, strategy: str) -> tuple[float, dict]:
    B, T = 8, 128
    tokens = np.random.default_rng(0).integers(0, 257, (B, T + 1), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": documents(B, T)}
    layout = make_layout(Transformer, config, make_mesh(mesh), strategy, batch_size=B)

    def both(batch):
        variables = variables_of(layout.build())
        variables = jax.sharding.reshard(variables, shardings(layout.variables()))
        grads, _, means = gradients(layout.model, variables, batch)
        return means["loss"], grads

    batch = jax.device_put(batch, layout.batch)
    loss, grads = layout.compile(both, batch, compiler_options=QUICK)(batch)
    return float(loss), {path: np.asarray(gradient) for path, gradient in paths(grads).items()}


@functools.cache
def by_xla(config: Config) -> tuple[float, dict]:
    return loss_and_gradients(dataclasses.replace(config, attention="xla"), "1x1", "dp")


def test_a_config_names_a_kernel_that_there_is():
    with pytest.raises(
        ValueError, match="attention='flash' is not one of auto, xla, splash, triton, cudnn"
    ):
        dataclasses.replace(TINY, attention="flash")


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
    rules = dict.fromkeys(LOGICAL_AXES) | rules if rules else {}
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        ours = jax.jit(lambda *qkvs: attend(*qkvs, window=None, kernel="splash"))(*given)
    np.testing.assert_allclose(ours, plain(q, k, v, ids, None), atol=1e-5)
    lies = PartitionSpec(rules.get("batch"), None, rules.get("heads"), None)
    assert ours.sharding.is_equivalent_to(jax.NamedSharding(mesh, lies), 4)


# ---- the choice ----------------------------------------------------------------------------------


def on(platform: str, kind: str) -> Layout:
    """Layout of the tiny model on 4x2 devices of this kind, which need not exist."""
    mesh = AbstractMesh(
        (4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2,
        abstract_device=AbstractDevice(device_kind=kind, num_cores=None, platform=platform),
    )  # fmt: skip
    return make_layout(Transformer, TINY, mesh, "fsdp_tp", batch_size=8)


TPU, H100, MI300 = (
    ("tpu", "TPU v5e"),
    ("gpu", "NVIDIA H100 80GB HBM3"),
    ("gpu", "AMD Instinct MI300X"),
)


@pytest.mark.parametrize(
    ("device", "T", "segments", "changes", "told"),
    [
        (TPU, 8192, True, {}, "splash, blocks of 512"),
        (TPU, 8192, True, {"sliding_window": 4096, "dtype": "float32"}, "splash, blocks of 512"),
        (TPU, 1920, True, {}, "splash, blocks of 384"),
        (TPU, 128, False, {}, "splash, blocks of 128"),
        (TPU, 1000, True, {}, "xla, no kernel for 1,000 positions, not a multiple of 128"),
        (H100, 1000, True, {}, "triton"),
        (H100, 1001, False, {"sliding_window": 100}, "cudnn"),
        (H100, 1024, True, {"sliding_window": 100}, "xla, no kernel for segments and a sliding window together"),
        (H100, 1024, True, {"head_dim": 256}, "xla, no kernel for a head dim of 256"),
        (H100, 1024, False, {"head_dim": 256}, "cudnn"),
        (H100, 1024, True, {"dtype": "float32"}, "xla, no kernel for float32"),
        (MI300, 1024, True, {}, "xla, no kernel for AMD Instinct MI300X"),
        (("cpu", "cpu"), 1024, True, {}, "xla"),
        (TPU, 8192, True, {"attention": "xla"}, "xla"),
    ],
)  # fmt: skip
def test_the_mesh_in_force_decides_the_kernel(device, T, segments, changes, told):
    config = dataclasses.replace(TINY, **{"dtype": "bfloat16"} | changes)
    with on(*device).trace():
        assert attention_kernels(config, T, segments) == [(told.partition(",")[0], told)]
    assert attention_kernels(config, T, segments) == [("xla", "xla")], (
        "without a mesh, of this machine"
    )


def test_rules_that_split_a_row_have_no_kernel():
    mesh = on(*TPU).mesh
    for axis in ("seq", "head_dim"):
        layout = make_layout(
            Transformer, TINY, mesh, {"batch": "data", axis: "model"}, batch_size=8
        )
        with layout.trace():
            ((name, told),) = attention_kernels(TINY, 1024, True)
        assert (name, told) == ("xla", f"xla, no kernel for rules that split {axis}")


def test_an_older_gpu_is_known_by_its_compute_capability(monkeypatch):
    class Card:
        device_kind, compute_capability = "Tesla V100-SXM2-16GB", "7.0"

    for capability, wanted in (("7.0", "xla"), ("8.0", "triton"), ("gfx942", "xla")):
        monkeypatch.setattr(Card, "compute_capability", capability)
        monkeypatch.setattr(jax, "devices", lambda: [Card()])
        with on("gpu", Card.device_kind).trace():
            config = dataclasses.replace(TINY, dtype="bfloat16")
            ((name, _),) = attention_kernels(config, 1024, True)
        assert name == wanted, capability


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
    """Kernels of KERNELS that a step contains, found by the names of their parts."""
    with step.layout.trace():
        traced = jax.make_jaxpr(step)(step.abstract_state(), step.layout.abstract_batch(example))
    parts = {"splash_mha": "splash", "mha_forward": "triton", "dot_product_attention_fwd": "cudnn"}
    return {name for part, name in parts.items() if part in str(traced)}


@pytest.mark.parametrize("device", [TPU, H100, MI300, ("cpu", "cpu")])
def test_bench_and_recipe_have_the_same_kernel(device):
    """Traces the step of each for a mesh of that device."""
    mesh, lr = on(*device).mesh, LearningRate(1e-3, 10, 100)
    flags = Flags(size="tiny")
    config = model_config("transformer", flags, None, BYTES, device[0])
    layout = make_layout(Transformer, config, mesh, batch_size=8)
    row = example(np.zeros(129, np.int32))
    recipe = kernels(TrainStep(layout, adamw(lr, weight_decay=0.1, clip_norm=1.0), lr), row)
    bench = make_step(config, "fsdp_tp", mesh, 8, 128)
    with layout.trace():
        ((name, _),) = attention_kernels(config, 128, True)
    assert recipe == {name} - {"xla"}
    assert kernels(bench.function, row) == recipe


@pytest.mark.full
def test_the_report_names_the_kernel(tmp_path, monkeypatch, capsys, quick):
    """A run whose config names a kernel trains with it and says so."""
    text = tmp_path / "book.txt"
    text.write_text("A page of a book, and another one. " * 100)
    config = dataclasses.replace(TINY, num_layers=1, attention="splash")
    monkeypatch.setitem(SIZES, "tiny", lambda: config)
    run = Run(mesh="1x1", workdir=str(tmp_path / "run"), steps=1, batch_size=2)
    main(run, Text(dataset=str(text)), Flags(size="tiny"), Sample(sample_bytes=0))
    assert "\nattention: splash\n" in f"\n{capsys.readouterr().out}"
    assert records(tmp_path / "run", "loss")


def test_the_report_has_blocks_and_limits():
    assert attention(on(*TPU), 256, True) == ["attention: splash, blocks of 256"]
    assert attention(on(*TPU), 100, True) == [
        "attention: xla, no kernel for 100 positions, not a multiple of 128"
    ]
    assert attention(on("cpu", "cpu"), 256, True) == []
