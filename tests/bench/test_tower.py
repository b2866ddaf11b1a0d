"""Plans and reports of models that see count the tower, and name what a kernel lacks for pictures."""

import dataclasses
import json

import numpy as np
import PIL.Image
import pytest

from recipes.common.report import kernel
from recipes.common.sharding.layout import make_layout
from recipes.common.sharding.shape import trace_shape
from recipes.instruments.plan.estimate import abstract_mesh, estimate
from recipes.instruments.plan.hardware import Devices
from recipes.instruments.plan.step_memory import memory_parts
from zoo import gemma4, gemma4_vision
from zoo.core.layers import AttentionType
from zoo.gemma3_vision import Config, Gemma3Vision

pytestmark = pytest.mark.promise("bench")

TINY = dataclasses.replace(
    Config.tiny(), num_layers=2, layer_kinds=(AttentionType(None, 1e6),), dtype="bfloat16"
)
ROWS, LENGTH = 16, 1_024


def layout_on(kind: str, **changes):
    devices = Devices(kind, 8)
    config = dataclasses.replace(TINY, **changes)
    mesh = abstract_mesh({"data": 8}, devices)
    return make_layout(Gemma3Vision, config, mesh, "fsdp", batch_size=ROWS, seq_len=LENGTH), devices


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_of_a_picture_are_those_of_its_products(frozen):
    """Two for each weight and position, as many for scores and outputs; backward twice that."""
    config = dataclasses.replace(TINY, freeze_tower=frozen)
    D, F, T, L = config.tower_embed, config.tower_mlp, 16, config.tower_layers
    products = T * (config.patch**2 * config.channels * D + L * (4 * D * D + 2 * D * F))
    products += config.picture_tokens * D * config.embed
    scores_and_outputs = L * 2 * T * T * D
    flops = 2 * (products + scores_and_outputs) * (1 if frozen else 3)
    assert trace_shape(Gemma3Vision, config).tower.flops(5) == 5 * flops


def test_a_plan_counts_the_tower():
    trained, devices = layout_on("v5p")
    frozen, _ = layout_on("v5p", freeze_tower=True)
    large, _ = layout_on("v5p", image_size=32, picture_tokens=16)
    parts = [memory_parts(layout) for layout in (trained, frozen, large)]
    assert (
        parts[1]["saved activations"]
        < parts[0]["saved activations"]
        < parts[2]["saved activations"]
    )
    # Moments of everything but the frozen tower, in float32; it has no gradients either.
    tower = [
        array.size
        for path, (array, _) in trained.model.variables["params"].items()
        if path.startswith("vision/")
    ]
    moments = parts[0]["optimizer"] - parts[1]["optimizer"]
    assert 2 * 4 * sum(tower) / 8 <= moments <= 2 * 4 * sum(tower)
    assert parts[0]["parameters"] == parts[1]["parameters"]
    assert parts[1]["gradients"] < parts[0]["gradients"]
    useful = [estimate(layout, devices).useful for layout in (trained, frozen)]
    difference = trained.shape.tower.flops(ROWS) - frozen.shape.tower.flops(ROWS)
    np.testing.assert_allclose(useful[0] - useful[1], difference, rtol=1e-9)


def test_the_plan_of_a_recipe_counts_the_pictures_of_its_data(tmp_path, inside):
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    row = {"prompt": "<image>a?", "completion": "b", "image": "a.png"}  # 10 tokens
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    for flags, count in (((), 3), (("--pack=false",), 1)):
        dataset = (f"--dataset={tmp_path / 'rows.jsonl'}", "--seq_len=32")
        done = inside("recipes.gemma3_vision", "--plan", "--mesh=1x1", *dataset, *flags)
        assert (done.code, done.err) == (0, "")
        assert f"Pictures of a row that this counts: {count}," in done.out


def test_the_planner_counts_the_pictures_that_it_is_told(inside):
    flags = ("recipes.plan", "--entry=gemma3_vision", "--devices=v5p:4", "--json")
    plans = []
    for count in (1, 3):
        done = inside(*flags, f"--pictures={count}")
        assert (done.code, done.err) == (0, "")
        plans.append(json.loads(done.out)["candidates"])
    for one, three in zip(*(sorted(plan, key=lambda x: x["rules"]) for plan in plans), strict=True):
        assert one["rules"] == three["rules"]
        assert one["seconds"]["compute"] < three["seconds"]["compute"]
    done = inside("recipes.plan", "--pictures=3")
    assert done.code == 2
    assert "--pictures=3 is for models that see, and transformer sees none" in done.err


@pytest.mark.parametrize("name", ["tower", "squares"])
def test_a_plan_counts_the_pictures_of_a_row(name):
    """FLOPs and what is saved grow by as much with each; texts alone cost nothing more."""
    layout, devices = layout_on("v5p")
    if name == "squares":
        config = dataclasses.replace(gemma4_vision.Config.tiny(), tower_layers=0)
        layout = make_layout(
            gemma4_vision.Gemma4Vision, config, layout.mesh, "fsdp", batch_size=ROWS, seq_len=LENGTH
        )
    counts = (0, 1, 2, 4)
    of_counts = [dataclasses.replace(layout, pictures=count) for count in counts]
    useful = [estimate(one, devices).useful for one in of_counts]
    one = layout.shape.tower.flops(ROWS)
    assert one > 0
    np.testing.assert_allclose(
        np.array(useful) - useful[0], [count * one for count in counts], rtol=1e-9
    )
    saved = np.diff([memory_parts(one)["saved activations"] for one in of_counts])
    np.testing.assert_allclose(saved, [saved[0], saved[0], 2 * saved[0]])


def test_a_picture_for_a_frozen_tower_is_pixels_and_tokens():
    """Pixels in float32 and bfloat16; tokens and their gradients. A device has two rows."""
    layout, _ = layout_on("v5p", freeze_tower=True)
    of_texts = dataclasses.replace(layout, pictures=0)
    with_pictures, without = (memory_parts(one)["saved activations"] for one in (layout, of_texts))
    pixels = TINY.image_size**2 * TINY.channels * (4 + 2)
    tokens = TINY.picture_tokens * TINY.embed * 2
    assert with_pictures - without == 2 * (pixels + 2 * tokens)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("h100", {}, "attention: triton, no other kernel for spans that see both ways"),
        (
            "h100",
            {"attention": "cudnn"},
            "attention: flash, as cudnn has no spans that see both ways",
        ),
        ("v5p", {}, "attention: splash, blocks of 1024"),
    ],
)
def test_a_report_names_the_kernel_of_rows_with_pictures(kind, changes, said):
    layout, _ = layout_on(kind, **changes)
    assert kernel.report(layout, LENGTH, segments=True) == [said]
    assert layout.shape.tower


@pytest.mark.parametrize(
    ("both_ways", "tower_layers", "said"),
    [
        (True, 2, "attention: triton, no other kernel for spans that see both ways"),
        (True, 0, "attention: triton, no other kernel for spans that see both ways"),
        (False, 2, "attention: cudnn"),
    ],
)
def test_a_report_of_gemma_4_names_spans_where_there_are_some(both_ways, tower_layers, said):
    config = dataclasses.replace(
        gemma4_vision.Config.tiny(), both_ways=both_ways, tower_layers=tower_layers, dtype="bfloat16",
        sliding_window=512, head_dim=32, global_head_dim=64,
    )  # fmt: skip
    layout = make_layout(
        gemma4_vision.Gemma4Vision, config, abstract_mesh({"data": 8}, Devices("h100", 8)), "fsdp",
        batch_size=ROWS, seq_len=LENGTH,
    )  # fmt: skip
    assert kernel.report(layout, LENGTH, segments=True) == [said]
    assert layout.shape.tower.layers == tower_layers


def test_flops_of_squares_are_those_of_their_products():
    """Of all K squares of a picture, with three patches a side."""
    config = dataclasses.replace(gemma4_vision.Config.tiny(), pooling=3, places=18)
    D, F, L = config.tower_embed, config.tower_mlp, config.tower_layers
    N, H = config.tower_heads, config.tower_head_dim
    T = config.picture_tokens * 9
    products = T * (config.patch**2 * config.channels * D + L * (4 * D * N * H + 3 * D * F))
    products += config.picture_tokens * D * config.embed
    flops = 6 * (products + L * 2 * T * T * N * H)
    assert trace_shape(gemma4_vision.Gemma4Vision, config).tower.flops(5) == 5 * flops


def test_flops_of_projected_squares_are_those_of_their_products():
    """Of 12B: a square is a patch, multiplied with its weights and with the projection."""
    config = dataclasses.replace(gemma4_vision.Config.tiny(), tower_layers=0, tower_embed=40)
    K, S, D = config.picture_tokens, config.square, config.tower_embed
    products = K * (S * S * config.channels * D + D * config.embed)
    tower = trace_shape(gemma4_vision.Gemma4Vision, config).tower
    assert tower.flops(5) == 5 * 6 * products
    assert trace_shape(gemma4.Gemma4, gemma4.Config.tiny()).tower is None
