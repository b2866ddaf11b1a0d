"""Documents with pictures, packed: loss and gradients are those of a row for each, on any mesh."""

import dataclasses
import functools

import numpy as np
import pytest

from data.images import Form
from data.picture_rows import PictureRow
from data.pictured import Pictured, packed
from data.squares import SquareForm
from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import full_except
from tests.support import seeing
from zoo import gemma3_vision, gemma4_vision
from zoo.core.layers import AttentionType

pytestmark = [pytest.mark.promise("pictures"), pytest.mark.usefixtures("strict")]

T, ROWS = 32, 8
MODELS = {  # the window is less than a picture
    "gemma3": dataclasses.replace(
        gemma3_vision.Config.tiny(), num_layers=2, tower_layers=1, tower_mlp=48,
        layer_kinds=(AttentionType(3, 1e4), AttentionType(None, 1e6)),
    ),
    "gemma4": dataclasses.replace(
        gemma4_vision.Config.tiny(), num_layers=2, tower_layers=1, tower_mlp=48, sliding_window=3,
        num_heads=8, tower_heads=4,
    ),
}  # fmt: skip
CLASSES = {"gemma3": gemma3_vision.Gemma3Vision, "gemma4": gemma4_vision.Gemma4Vision}
# Lengths of documents, and the grids of their pictures: two, one or none, fewer than devices.
DOCUMENTS = [
    (30, [(1, 4), (2, 3)]), (25, []), (24, [(2, 2)]), (20, [(1, 4), (1, 1)]), (17, [(5, 1)]), (16, []),
    (14, []), (12, []), (15, [(3, 2)]), (10, []), (9, []), (8, []), (8, []), (7, []), (7, []), (6, []),
    (5, []), (5, []), (5, []),
]  # fmt: skip


def form_of(config):
    if "pooling" in vars(config):
        return SquareForm(config.square, config.picture_tokens, config.channels)
    return Form(config.image_size, config.channels, config.resample)


@functools.cache
def documents(name: str) -> list[PictureRow]:
    """Each picture is behind the fourth token, or behind the one before it and another token."""
    config, random, made = MODELS[name], np.random.default_rng(0), []
    for length, grids in DOCUMENTS:
        tokens, pictures = [1, 2, 3, 4], []
        for rows, columns in grids:
            count, size = config.picture_tokens, (8, 8, 3)
            if "pooling" in vars(config):
                count, size = rows * columns, (rows * config.square, columns * config.square, 3)
            tokens += [
                config.picture_begin, *[config.image_token] * count, config.picture_end, 3,
            ]  # fmt: skip
            pictures.append(random.integers(0, 256, size, np.uint8))
        rest = length - len(tokens)
        is_target = np.append(np.zeros(len(tokens), bool), random.random(rest) < 0.7)
        tokens = np.append(tokens, random.integers(4, 257, rest)).astype(np.int32)
        is_target[-1] = True
        made.append(PictureRow(tokens, is_target, tuple(pictures), ""))
    return made


def batch(name: str, pack: bool) -> dict[str, np.ndarray]:
    every = documents(name)
    rows = packed(every, T) if pack else [[one] for one in every]
    slots = max(sum(len(one.pictures) for one in row) for row in rows)
    source = Pictured(rows, T, slots, form_of(MODELS[name]), "")
    return source.take(np.arange(len(rows)))


@functools.cache
def loss_and_gradients(name: str, mesh: str, strategy: str, pack: bool, **changes):
    rows = batch(name, pack)
    config = dataclasses.replace(MODELS[name], **changes)
    layout = make_layout(
        CLASSES[name], config, make_mesh(mesh), strategy, batch_size=len(rows["tokens"]), seq_len=T
    )
    return seeing.loss_and_gradients(*seeing.step(layout, rows))


CASES = [
    ("gemma3", "1x1", "dp", ()),
    ("gemma3", "8", "fsdp", ()),
    ("gemma3", "4x2", "fsdp_tp", ()),
    ("gemma3", "data=2,seq=4", "cp", ()),
    ("gemma3", "data=2,seq=4", "cp", (("context", "ring"),)),
    ("gemma3", "data=4,pipe=2", "pp", (("num_layers", 4),)),
    ("gemma4", "data=2,seq=4", "fsdp_cp", ()),
    ("gemma4", "2x2x2", "hsdp_tp", ()),
]
IN_FULL = [CASES[4], CASES[6]]


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "changes"),
    full_except(CASES, fast=[], release=[case for case in CASES if case not in IN_FULL]),
)
def test_packed_documents_train_as_those_with_a_row_each(name, mesh, strategy, changes):
    own = dict(changes)
    shared = {key: x for key, x in own.items() if key == "num_layers"}
    loss, grads = loss_and_gradients(name, mesh, strategy, True, **own)
    one_loss, one_grads = loss_and_gradients(name, "1x1", "dp", False, **shared)
    assert loss == pytest.approx(one_loss, rel=1e-6)
    for path, wanted in one_grads.items():
        if path.endswith("attention/k_bias"):  # zero by definition: a softmax cancels it
            continue
        assert np.abs(wanted).max() > 0, path
        np.testing.assert_allclose(
            grads[path], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=path
        )


@pytest.mark.parametrize("name", MODELS)
def test_the_packed_batch_has_what_is_hard(name):
    """A picture across the border of two shards of 8 positions, pictures of several documents in a row, rows
    without pictures, and fewer pictures than devices.
    """
    rows, image = batch(name, True), MODELS[name].image_token
    assert len(rows["tokens"]) == ROWS
    is_picture = rows["tokens"] == image
    borders = is_picture[:, 7:-1:8] & is_picture[:, 8::8]
    assert borders.any()
    pictures = (rows["tokens"] == MODELS[name].picture_begin).sum(axis=1)
    assert pictures.sum() < 8
    assert (pictures == 0).any()
    documents_B = [len({*x.tolist()} - {0}) for x in rows["segment_ids"] * is_picture]
    assert max(documents_B) > 1, "pictures of two documents in a row"
    assert rows["segment_ids"].max() > 2
