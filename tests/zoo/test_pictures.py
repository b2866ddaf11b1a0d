"""Models that see: a tower on all devices, tokens that travel to their rows, and masks of pictures."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.mesh import make_mesh
from recipes.common.report.hlo import collectives
from recipes.common.sharding.layout import make_layout
from tests.conftest import full_except
from tests.support import seeing
from tests.support.models import built
from tests.support.quick import QUICK
from zoo.core.layers import AttentionType
from zoo.gemma3_vision import Config, Gemma3Vision
from zoo.parts.picture_tokens import averaged

pytestmark = [pytest.mark.promise("pictures"), pytest.mark.usefixtures("strict")]

# A window that is less than a picture.
TINY = dataclasses.replace(
    Config.tiny(), num_layers=2, tower_layers=1, tower_mlp=48, layer_kinds=(AttentionType(3, 1e4), AttentionType(None, 1e6))
)  # fmt: skip
K, IMAGE = TINY.picture_tokens, TINY.image_token
B, T, M = 8, 24, 2
# Row → where its pictures begin: at the start, across the border of two shards of 12 positions, at the
# end; most rows have none.
STARTS = {0: [0, 10], 3: [T - K], 5: [6]}


def batch(starts: dict[int, list[int]] = STARTS, slots: int = M) -> dict[str, np.ndarray]:
    """Packed rows with pictures. The second document of a row begins where no picture is cut."""
    random = np.random.default_rng(0)
    tokens_BT = random.integers(0, 257, (B, T), np.int32)
    for row, places in starts.items():
        for place in places:
            tokens_BT[row, place : place + K] = IMAGE
    targets_BT = np.roll(tokens_BT, -1, axis=1)
    targets_BT[:, -1] = -1
    first_B1 = np.full((B, 1), 11)
    first_B1[0] = 14
    return {
        "tokens": tokens_BT,
        "targets": targets_BT,
        "segment_ids": (np.arange(T) >= first_B1).astype(np.int32),
        "images": random.integers(0, 256, (B, slots, 8, 8, 3), np.uint8),
    }


@functools.cache
def compiled(mesh: str, strategy: str, slots: int = M, **changes):
    """(program, its arguments, layout) of a batch's gradients."""
    starts = STARTS if slots == M else {3: [6]}
    config = dataclasses.replace(TINY, **changes)
    rows = batch(starts, slots)
    layout = make_layout(Gemma3Vision, config, make_mesh(mesh), strategy, batch_size=B, seq_len=T)
    return *seeing.step(layout, rows), layout


@functools.cache
def loss_and_gradients(mesh: str, strategy: str, slots: int = M, **changes):
    program, given, _ = compiled(mesh, strategy, slots, **changes)
    return seeing.loss_and_gradients(program, given)


@pytest.mark.parametrize(
    ("mesh", "strategy", "slots", "changes"),
    full_except(
        [
            ("8", "fsdp", M, ()),
            ("8", "fsdp", 1, ()),  # one picture
            ("8", "zero1", M, ()),
            ("4x2", "fsdp_tp", M, ()),
            ("4x2", "fsdp_tp_sp", M, ()),
            ("1x8", "tp", 1, ()),  # eight slots, one picture
            ("2x2x2", "hsdp_tp", M, ()),
            ("data=2,seq=4", "cp", M, ()),
            ("data=2,seq=4", "cp", M, (("context", "ring"),)),
            ("data=2,seq=2,model=2", "fsdp_cp_tp", M, ()),
            ("data=4,pipe=2", "pp", M, (("num_layers", 4),)),
            ("data=4,pipe=2", "pp_zero1", M, (("num_layers", 4),)),
            ("data=2,pipe=2,model=2", "fsdp_pp_tp", M, (("num_layers", 4),)),
            ("data=4,pipe=2", "fsdp_pp", M, (("num_layers", 4), ("pipeline", "gpipe"))),
        ],
        fast=[],
        release=[
            ("8", "fsdp", 1, ()),
            ("8", "zero1", M, ()),
            ("4x2", "fsdp_tp", M, ()),
            ("2x2x2", "hsdp_tp", M, ()),
            ("data=2,seq=4", "cp", M, ()),
            ("data=4,pipe=2", "pp", M, (("num_layers", 4),)),
            ("data=4,pipe=2", "fsdp_pp", M, (("num_layers", 4), ("pipeline", "gpipe"))),
        ],
    ),
)
def test_meshes_train_a_model_that_sees_alike(mesh, strategy, slots, changes):
    own = dict(changes)
    shared = {name: x for name, x in own.items() if name == "num_layers"}
    loss, grads = loss_and_gradients(mesh, strategy, slots, **own)
    one_loss, one_grads = loss_and_gradients("1x1", "dp", slots, **shared)
    assert loss == pytest.approx(one_loss, rel=1e-6)
    for path, wanted in one_grads.items():
        if path.endswith("attention/k_bias"):  # zero by definition: a softmax cancels it
            continue
        assert np.abs(wanted).max() > 0, path
        np.testing.assert_allclose(
            grads[path], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=path
        )


def test_the_tower_s_tokens_are_gathered_among_devices_that_share_rows():
    """Its pixels are not sent, and each device runs its part of the slots: the module's textbook."""
    program, given, layout = compiled("4x2", "tp")
    text = program.as_text()
    slots = B * M // layout.mesh.size
    patches = (TINY.image_size // TINY.patch) ** 2
    # Its MLP's hidden activations are the widest: of this device's pictures alone, all of F.
    assert f"f32[{slots * patches},{TINY.tower_mlp}]" in text
    sent = [item for item in collectives(text) if item.kind == "all-gather"]
    tokens = B // 4 * M * K * TINY.embed * 4
    assert tokens in [item.bytes // item.times for item in sent], [vars(x) for x in sent]
    pixels = math.prod(given[1]["images"].shape[1:])
    assert not [item for item in sent if item.bytes // item.times in (pixels, 4 * pixels)]


def test_placeholders_are_no_targets_and_texts_need_no_tower():
    model = built(Gemma3Vision, TINY)
    rows = batch()
    texts = {name: rows[name] for name in ("tokens", "targets", "segment_ids")}
    program = jax.make_jaxpr(lambda rows: model.loss(**rows)[:2])
    hidden = f"f32[{B * M * 16},{TINY.tower_mlp}]"  # of all patches, in the tower's MLP
    assert hidden in str(program(rows))
    assert hidden not in str(program(texts))
    count = jax.jit(lambda rows: model.loss(**rows)[1], compiler_options=QUICK)(texts)
    assert float(count) == ((texts["targets"] >= 0) & (texts["targets"] != IMAGE)).sum()


def test_a_picture_changes_its_own_document_from_its_first_position_on():
    """Also positions of the picture before the one that changes, and nothing else."""
    model = built(Gemma3Vision, TINY)
    rows = batch({0: [2, 16]})
    run = jax.jit(
        lambda images: model(rows["tokens"], rows["segment_ids"], images), compiler_options=QUICK
    )
    images = rows["images"]
    changed = images.copy()
    changed[0, 0, -1, -1] ^= 255  # the last patch of the first picture
    empty = images.copy()
    empty[1:] ^= 255  # slots without a picture
    before, after, same = (np.asarray(run(x)) for x in (images, changed, empty))
    moved_BT = np.abs(after - before).max(axis=-1) > 0
    end = 14  # of the first document
    assert moved_BT[0, 2:end].all()
    moved_BT[0, 2:end] = False
    assert not moved_BT.any()
    assert np.array_equal(before, same)


def test_tokens_are_means_of_squares_of_patches():
    x_PTD = np.random.default_rng(0).normal(size=(2, 36, 3))
    means = x_PTD.reshape(2, 3, 2, 3, 2, 3).mean(axis=(2, 4)).reshape(2, 9, 3)
    found = averaged(jnp.asarray(x_PTD, jnp.float32), 9)
    np.testing.assert_allclose(found, means, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch": 3}, "image_size=8 is not divisible by patch=3"),
        ({"picture_tokens": 9}, "picture_tokens=9 must be the square"),
        ({"mean": (0.5,)}, "must have channels=3 numbers"),
        ({"image_token": 384}, "image_token=384 must be below vocab_size=384"),
        ({"tower_heads": 5}, "embed=32 is not divisible by num_heads=5"),
    ],
)
def test_a_config_that_can_t_be_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TINY, **changes)
