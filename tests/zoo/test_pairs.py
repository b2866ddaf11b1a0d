"""zoo/parts/pairs.py and zoo/siglip.py: losses over all pairs, on every mesh, in microbatches, and what they cost."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from recipes.common.mesh import make_mesh
from recipes.common.report import flops
from recipes.common.report.hlo import collectives
from recipes.common.sharding.abstract import paths, variables_of
from recipes.common.sharding.layout import Tree, make_layout, shardings
from recipes.common.train.step import gradients
from recipes.instruments.prove.comparison import compare_gradients, largest_relative
from tests.support.models import built
from tests.support.quick import QUICK
from zoo.parts.pairs import EXCHANGES, LOSSES, loss_of_pairs
from zoo.siglip import Config, Siglip

pytestmark = pytest.mark.promise("all-pairs")

B, D = 16, 8


def embeddings() -> tuple:
    """(x, y, which rows count, scale, bias)."""
    random = np.random.default_rng(0)
    x_BD, y_BD = random.standard_normal((2, B, D)).astype(np.float32)
    counted_B = np.arange(B) % 5 != 3
    return x_BD, y_BD, counted_B, np.float32(0.7), np.float32(-1.5)


def definition(loss: str) -> float:
    """Over all pairs of rows that count, in float64."""
    x_BD, y_BD, counted_B, scale, bias = embeddings()
    x, y = np.float64(x_BD[counted_B]), np.float64(y_BD[counted_B])
    scores = x @ y.T * scale + bias
    if loss == "sigmoid":
        signs = 2 * np.eye(len(x)) - 1
        return np.log1p(np.exp(-signs * scores)).sum()
    log_sums = sum(np.log(np.exp(scores).sum(axis)).sum() for axis in (0, 1))
    return (log_sums - 2 * np.trace(scores)) / 2


@functools.cache
def compiled(loss: str, exchange: str, mesh: str, rows: int = B):
    """(the compiled function of embeddings → (loss, gradients), its arguments' shardings)."""
    devices = make_mesh(mesh)
    strategy = "hsdp_tp" if "fsdp" in devices.axis_names else "dp"
    layout = make_layout(Siglip, Config.tiny(), devices, strategy, batch_size=rows)
    batch = layout.batch_shardings(np.zeros((rows, D)))
    whole = jax.NamedSharding(devices, jax.P())
    where = (batch, batch, batch.update(spec=jax.P(batch.spec[0])), whole, whole)
    shapes = ((rows, D), (rows, D), (rows,), (), ())
    dtypes = ("float32", "float32", "bool", "float32", "float32")
    abstract = [
        jax.ShapeDtypeStruct(*of, sharding=at)
        for *of, at in zip(shapes, dtypes, where, strict=True)
    ]

    def run(*given):
        return loss_of_pairs(*given, loss=loss, exchange=exchange)

    of_all = jax.value_and_grad(run, (0, 1, 3, 4))
    return layout.compile(of_all, *abstract, compiler_options=QUICK), where


def on(loss: str, exchange: str, mesh: str):
    program, where = compiled(loss, exchange, mesh)
    return jax.device_get(program(*jax.device_put(embeddings(), where)))


CASES = [
    (*case, mesh)
    for mesh in ("8", "2x2x2")
    for case in ((x, y) for x in LOSSES for y in EXCHANGES[:2])
]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_its_definition(loss):
    assert on(loss, "gather", "1")[0] == pytest.approx(definition(loss), rel=1e-6)


@pytest.mark.parametrize(("loss", "exchange", "mesh"), CASES)
def test_all_pairs_meet_on_every_mesh(loss, exchange, mesh):
    """The loss and all gradients are one device's: neither divided by their number nor multiplied."""
    (found, gradients), (wanted, gradients_wanted) = (
        on(loss, exchange, mesh),
        on(loss, "gather", "1"),
    )
    assert found == pytest.approx(wanted, rel=1e-6)
    for ours, theirs in zip(gradients, gradients_wanted, strict=True):
        largest = max(np.abs(theirs).max(), 1)  # softmax's gradient of the bias is 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize("loss", LOSSES)
def test_pairs_of_a_device_alone_are_another_loss(loss):
    assert on(loss, "local", "8")[0] < 0.9 * definition(loss)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bytes_are_the_textbook_s(exchange):
    """Of y there, and of its gradient back: (n - 1)/n · B · D numbers each, on each of n devices."""
    n, rows = 8, 128
    program, _ = compiled("sigmoid", exchange, "8", rows)
    sent = 0
    for found in collectives(program.as_text()):
        for shape in found.shapes:
            if shape[-1:] != (D,):
                continue  # which rows count; sums of single numbers
            size = int(np.prod(shape)) * found.times
            # Numbers that come from other devices.
            sent += {"all-gather": size * (n - 1) // n, "reduce-scatter": size * (n - 1)}.get(
                found.kind, size
            )
    book = 2 * (n - 1) * rows // n * D
    assert sent == (0 if exchange == "local" else book)


def test_the_ring_s_memory_does_not_grow_with_the_devices():
    """A device has B/n × B/n scores at a time. With four times the rows on 8 devices as on 2, blocks are
    as large; gathered, a device has four times as many scores.
    """

    def temporary(exchange, mesh, rows):
        program, _ = compiled("sigmoid", exchange, mesh, rows)
        return program.memory_analysis().temp_size_in_bytes

    rows = 1_024  # on 2 devices: blocks of 512 × 512, a megabyte
    few, many = (temporary("ring", mesh, n * rows // 2) for mesh, n in (("2", 2), ("8", 8)))
    assert many < 1.3 * few
    assert temporary("gather", "8", 4 * rows) > 3 * many


@pytest.mark.parametrize("form", [{}, {"clip": True, "text_tower": (64, 1, 4, 256)}])
def test_flops_are_those_of_both_towers(form):
    """Forward, a third of training, as XLA counts them where no loop hides a layer."""
    wide = {"embed": 128, "mlp": 512, "num_layers": 1, "num_heads": 4, "image_size": 16}
    config = dataclasses.replace(Config.tiny(), max_positions=32, remat="none", **wide, **form)
    model = nnx.eval_shape(lambda: Siglip(config, rngs=nnx.Rngs(0)))
    image = jax.ShapeDtypeStruct((1, 16, 16, 1), "float32")
    tokens = jax.ShapeDtypeStruct((1, 32), "int32")

    def forward(model, image, tokens):
        return model.embed_images(image), model.embed_texts(tokens)

    counted = jax.jit(forward).lower(model, image, tokens).cost_analysis()["flops"]
    found = flops.encoder(make_layout(Siglip, config, make_mesh("1"), batch_size=1)) / 3
    assert found == pytest.approx(counted, rel=0.06)


# ---- the model -----------------------------------------------------------------------------------


@functools.cache
def initial(**form) -> Tree:
    """Initial values, which depend on neither the exchange of pairs nor the dtype."""
    return variables_of(built(Siglip, dataclasses.replace(Config.tiny(), **form)))


@functools.cache
def step(mesh: str, strategy: str, accumulate: int = 1, **changes):
    """(loss, gradients by path) of the tiny model's mean objective."""
    config = dataclasses.replace(Config.tiny(), **changes)
    layout = make_layout(Siglip, config, make_mesh(mesh), strategy, batch_size=2 * B)
    random = np.random.default_rng(0)
    batch = {
        "image": random.standard_normal((2 * B, 8, 8, 1), np.float32),
        "tokens": random.integers(0, 256, (2 * B, 16), np.int32),
        "label": np.where(np.arange(2 * B) == 5, -1, 1).astype(np.int32),
    }

    def both(variables, batch):
        grads, _, means = gradients(layout, variables, batch, accumulate)
        return means["loss"], grads

    form = {name: value for name, value in changes.items() if name in CLIP}
    given = (
        jax.device_put(initial(**form), shardings(layout.variables())),
        jax.device_put(batch, layout.batch_shardings(batch)),
    )
    loss, grads = layout.compile(both, *given, compiler_options=QUICK)(*given)
    return float(loss), {path: np.asarray(x) for path, x in paths(grads).items()}


CLIP = {"loss": "softmax", "clip": True, "activation": "quick"}
CLIP |= {"joint": 24, "text_tower": (16, 3, 8, 32)}
STEPS = [
    ("1x1", "dp", 4, {}, "gather"),
    ("4x2", "fsdp_tp", 2, {}, "ring"),
    ("4x2", "fsdp_tp", 4, CLIP, "gather"),
    ("2x2x2", "hsdp_tp", 1, CLIP, "ring"),
]


@pytest.mark.parametrize(("mesh", "strategy", "accumulate", "form", "pairs"), STEPS)
@pytest.mark.full
def test_microbatches_have_the_loss_of_the_whole_batch(mesh, strategy, accumulate, form, pairs):
    """Not the mean of their own losses, which have fewer pairs; SigLIP and CLIP."""
    want_loss, want = step("1x1", "dp", **form)
    found_loss, found = step(mesh, strategy, accumulate, pairs=pairs, **form)
    assert found_loss == pytest.approx(want_loss, rel=4e-6)
    assert largest_relative(compare_gradients(found, want)) < 4e-6


@pytest.mark.full
def test_clip_in_bfloat16_stays_near_float32_on_a_mesh():
    """The gradient is 1.4% off, and one device's in bfloat16 1.2%."""
    want_loss, want = step("1x1", "dp", **CLIP)
    found_loss, found = step("4x2", "fsdp_tp", 1, pairs="ring", dtype="bfloat16", **CLIP)
    assert found_loss == pytest.approx(want_loss, rel=3e-3)
    error, size = (
        np.sqrt(sum(np.square(x[path]).sum() for path in want))
        for x in ({path: found[path] - want[path] for path in want}, want)
    )
    assert error < 0.018 * size
