"""Models that see pictures of any size: squares, their places, and how many devices train them alike."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import full_except
from tests.support import seeing
from tests.support.models import built
from tests.support.quick import QUICK
from zoo.gemma4_vision import Config, Gemma4Vision
from zoo.options.pictures import after_filled_slots
from zoo.parts.square_tokens import patches_of

pytestmark = [pytest.mark.promise("pictures"), pytest.mark.usefixtures("strict")]

# A window that is less than a picture.
TINY = dataclasses.replace(
    Config.tiny(), num_layers=2, tower_layers=1, tower_mlp=48, sliding_window=3, num_heads=8,
    tower_heads=4,
)  # fmt: skip
VARIANTS = {
    "tower": {},
    "squares": {"tower_layers": 0, "places": 8},  # as 12B
    # As E4B: embeddings of layers, and keys of earlier ones; pictures are causal.
    "layer embeddings": {
        "num_layers": 4, "layer_embed": 8, "shared_layers": 2, "both_ways": False, "pad_token": 5,
    },
    "experts": {  # as 26B-A4B
        "num_experts": 8, "experts_per_token": 2, "expert_mlp": 32, "capacity": None,
        "keys_as_values": True,
    },
    "stages": {"num_layers": 4},
}  # fmt: skip
IMAGE, K, S = TINY.image_token, TINY.picture_tokens, TINY.square
B, T, M = 8, 24, 2
# Row → (first position, grid) of its pictures: at the start, across the border of two shards of 12
# positions, at the end; most rows have none.
PLACES = {0: [(0, (1, 5)), (9, (3, 2))], 3: [(T - 4, (2, 2))], 5: [(6, (6, 1))]}


def batch(places=PLACES, slots: int = M) -> dict[str, np.ndarray]:
    """Packed rows with pictures. The second document of a row begins where no picture is cut."""
    random = np.random.default_rng(0)
    tokens_BT = random.integers(0, 257, (B, T), np.int32)
    grids_BM2 = np.zeros((B, slots, 2), np.int32)
    for row, pictures in places.items():
        for slot, (place, grid) in enumerate(pictures):
            tokens_BT[row, place : place + grid[0] * grid[1]] = IMAGE
            grids_BM2[row, slot] = grid
    targets_BT = np.roll(tokens_BT, -1, axis=1)
    targets_BT[:, -1] = -1
    first_B1 = np.full((B, 1), 12)
    first_B1[0] = 15
    return {
        "tokens": tokens_BT,
        "targets": targets_BT,
        "segment_ids": (np.arange(T) >= first_B1).astype(np.int32),
        "images": random.integers(0, 256, (B, slots, K, S, S, 3), np.uint8),
        "grids": grids_BM2,
    }


@functools.cache
def loss_and_gradients(variant: str, mesh: str, strategy: str, slots: int = M, **changes):
    rows = batch(PLACES if slots == M else {3: [(6, (2, 2))]}, slots)
    config = dataclasses.replace(TINY, **VARIANTS[variant], **changes)
    layout = make_layout(Gemma4Vision, config, make_mesh(mesh), strategy, batch_size=B, seq_len=T)
    return seeing.loss_and_gradients(*seeing.step(layout, rows))


CASES = [
    ("tower", "8", "fsdp", M, ()),
    ("tower", "8", "fsdp", 1, ()),  # one picture
    ("tower", "8", "zero1", M, ()),
    ("tower", "4x2", "fsdp_tp_sp", M, ()),
    ("tower", "1x8", "tp", 1, ()),  # eight slots, one picture
    ("tower", "2x2x2", "hsdp_tp", M, ()),
    ("tower", "data=2,seq=4", "cp", M, ()),
    ("tower", "data=2,seq=4", "cp", M, (("context", "ring"),)),
    ("tower", "data=2,seq=2,model=2", "fsdp_cp_tp", M, ()),
    ("squares", "data=2,seq=2,model=2", "fsdp_cp_tp", M, ()),
    ("squares", "8", "fsdp", M, ()),
    ("layer embeddings", "4x2", "fsdp_tp", M, ()),
    ("layer embeddings", "data=2,seq=4", "fsdp_cp", M, ()),
    ("experts", "data=2,expert=4", "fsdp_ep", M, ()),
    ("experts", "data=2,seq=2,expert=2", "fsdp_ep_cp", M, ()),
    ("stages", "data=4,pipe=2", "pp", M, ()),
    ("stages", "data=2,pipe=2,model=2", "fsdp_pp_tp", M, ()),
]
# The other case in --full: entries' own tests prove two meshes.
IN_FULL = [("tower", "data=2,seq=4", "cp", M, (("context", "ring"),))]


@pytest.mark.parametrize(
    ("variant", "mesh", "strategy", "slots", "changes"),
    full_except(CASES, fast=[], release=[case for case in CASES if case not in IN_FULL]),
)
def test_meshes_train_a_model_that_sees_alike(variant, mesh, strategy, slots, changes):
    loss, grads = loss_and_gradients(variant, mesh, strategy, slots, **dict(changes))
    one_loss, one_grads = loss_and_gradients(variant, "1x1", "dp", slots)
    assert loss == pytest.approx(one_loss, rel=1e-6)
    for path, wanted in one_grads.items():
        assert np.abs(wanted).max() > 0, path
        np.testing.assert_allclose(
            grads[path], wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=path
        )


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_picture_changes_its_own_document(both_ways):
    """With spans from the picture's first position on, else from the changed square's on."""
    model = built(Gemma4Vision, dataclasses.replace(TINY, both_ways=both_ways))
    rows = batch({0: [(2, (2, 3)), (17, (1, 4))]})
    run = jax.jit(
        lambda images: model(rows["tokens"], rows["segment_ids"], images, rows["grids"]),
        compiler_options=QUICK,
    )
    images = rows["images"]
    changed = images.copy()
    changed[0, 1, 2, -1, -1] ^= 255  # a corner of the third square of four
    empty = images.copy()
    empty[1:] ^= 255  # slots without a picture
    empty[0, 1, 4:] ^= 255  # squares that this picture has not
    before, after, same = (np.asarray(run(x)) for x in (images, changed, empty))
    moved_T = np.abs(after - before).max(axis=-1)[0] > 0
    # The tower shows a square to all others of the picture.
    assert moved_T.nonzero()[0].tolist() == list(range(17, T))
    assert np.array_equal(before[1:], after[1:])
    assert np.array_equal(before, same)


def test_without_a_tower_a_square_is_seen_by_its_own_token_alone():
    """So what changes says who sees it: with spans, all earlier positions of the picture."""
    rows = batch({0: [(10, (1, 6))]})
    rows["segment_ids"][:] = 0
    changed = rows["images"].copy()
    changed[0, 0, -1] ^= 255  # the last square: position 15
    first_moved = {}
    for both_ways in (True, False):
        config = dataclasses.replace(TINY, tower_layers=0, places=8, both_ways=both_ways)
        model = built(Gemma4Vision, config)
        run = jax.jit(
            lambda images, model=model: model(rows["tokens"], None, images, rows["grids"]),
            compiler_options=QUICK,
        )
        difference = np.abs(np.asarray(run(changed)) - np.asarray(run(rows["images"])))
        first_moved[both_ways] = int((difference.max(axis=-1)[0] > 0).argmax())
    # One sliding layer, whose positions see later ones of their picture, and a causal one.
    assert first_moved == {True: 10, False: 15}


def test_patches_have_the_places_of_their_squares():
    grids = np.array([[2, 3], [0, 0], [1, 6], [6, 1]], np.int32)
    found = patches_of(jnp.asarray(grids), 6, 2)
    for number, (rows, columns) in enumerate(grids.tolist()):
        wanted = [
            (x * 2 + i % 2, y * 2 + i // 2)
            for y in range(rows)
            for x in range(columns)
            for i in range(4)
        ]
        count = len(wanted)
        places = list(
            zip(found.column_PT[number].tolist(), found.row_PT[number].tolist(), strict=True)
        )
        assert places[:count] == wanted
        assert places[count:] == [(0, 0)] * (24 - count)
        assert found.is_padding_PT[number].tolist() == [False] * count + [True] * (24 - count)


def test_placeholders_count_on_in_the_next_slot():
    grids = np.array([[[2, 3], [1, 1], [1, 2]], [[1, 4], [0, 0], [0, 0]]], np.int32)
    numbers = np.stack([np.arange(9), np.minimum(np.arange(9), 3)])
    found = after_filled_slots(jnp.asarray(numbers), jnp.asarray(grids), 6)
    assert found[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 12, 13]
    assert found[1, :4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"picture_tokens": 9}, "picture_tokens=9 in a line have 18 places, and the table has places=16"),
        ({"tower_layers": 0, "places": 5}, "picture_tokens=6 in a line have 6 places"),
        ({"image_token": 384}, "image_token=384 must be below vocab_size=384"),
        ({"pad_token": 384}, "pad_token=384 must be below vocab_size=384"),
        ({"tower_head_dim": 6}, "head_dim=6 of the tower must be a multiple of 4"),
    ],
)  # fmt: skip
def test_a_config_that_can_t_be_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(TINY, **changes)
