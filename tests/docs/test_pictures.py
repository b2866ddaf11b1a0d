"""The README's picture equals, byte for byte, the one that the code draws."""

import dataclasses
import xml.etree.ElementTree

import pytest

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import ROOT
from tests.support import strategies_picture as picture
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("readmes")

PANELS = {
    "dp": "8",
    "fsdp": "8",
    "tp": "1x8",
    "fsdp_tp": "4x2",
    "tp_sp": "1x8",
    "cp": "data=2,seq=4",
    "fsdp_cp": "data=2,seq=4",
    "fsdp_cp_tp": "data=2,seq=2,model=2",
    "pp": "data=2,pipe=4",
    "fsdp_pp": "data=2,pipe=4",
    "fsdp_pp_tp": "data=2,pipe=2,model=2",
    "hsdp_tp": "2x2x2",
}
L = 4


def layouts():
    config = dataclasses.replace(Config.tiny(), num_layers=L, embed=64, mlp=128)
    return {
        (rules, mesh): make_layout(Transformer, config, make_mesh(mesh), rules)
        for rules, mesh in PANELS.items()
    }


@pytest.mark.parametrize("background", picture.INK)
def test_the_picture_of_the_strategies_is_up_to_date(background, request):
    path = ROOT / "zoo" / "pictures" / f"strategies-{background}.svg"
    drawn = picture.strategies(layouts(), background)
    if request.config.getoption("--update-golden"):
        path.write_text(drawn)
    assert path.read_text() == drawn, "run with --update-golden, and look at it"
    assert len(drawn.encode()) < 100_000
    xml.etree.ElementTree.fromstring(drawn)


@pytest.mark.parametrize("background", picture.INK)
def test_the_picture_of_a_weight_in_a_step_is_up_to_date(background, request):
    path = ROOT / "recipes" / "docs" / "pictures" / f"weight_in_a_step_{background}.svg"
    meshes = {"dp": "8", "fsdp": "8", "tp": "4x2", "fsdp_tp": "4x2"}
    shown = {
        (rules, mesh): make_layout(Transformer, Config.tiny(), make_mesh(mesh), rules)
        for rules, mesh in meshes.items()
    }
    drawn = picture.weight_in_a_step(shown, background)
    if request.config.getoption("--update-golden"):
        path.write_text(drawn)
    assert path.read_text() == drawn, "run with --update-golden, and look at it"
    labels = [x.text for x in xml.etree.ElementTree.fromstring(drawn) if "over" in str(x.text)]
    assert labels == [
        "all-reduce over data",
        *("all-gather over data", "reduce-scatter over data"),
        "all-reduce over data",
        *("all-gather over data", "reduce-scatter over data"),
    ]


def drawn_boxes(panel) -> list[xml.etree.ElementTree.Element]:
    root = xml.etree.ElementTree.fromstring(picture.strategies(panel, "light"))
    return [x for x in root if x.tag.endswith("rect")]


@pytest.mark.parametrize(
    ("rules", "device", "held"),
    [("fsdp", 5, "0123"), ("fsdp_pp", 5, "1"), ("pp", 3, "3"), ("fsdp_pp_tp", 3, "23")],
)
def test_a_device_s_layers_are_filled(rules, device, held):
    panel = {which: layout for which, layout in layouts().items() if which[0] == rules}
    at = (1 + L + 2 * len(picture.PLACES)) * device + 1
    fills = [x.attrib["fill"] for x in drawn_boxes(panel)[at : at + L]]
    assert (
        "".join(str(i) for i, fill in enumerate(fills) if fill == picture.INK["light"][2]) == held
    )


@pytest.mark.parametrize(
    ("rules", "device", "array", "parts"),
    [  # Starts and sizes of the filled part, as shares of the whole: across, down, width, height.
        ("tp", 3, "up", (3 / 8, 0, 1 / 8, 1)),  # columns 48 to 64 of 128
        ("tp", 3, "activations", (0, 0, 1, 1)),
        ("tp_sp", 3, "activations", (3 / 8, 0, 1 / 8, 1)),
        ("cp", 6, "activations", (2 / 4, 1 / 2, 1 / 4, 1 / 2)),
        ("fsdp_cp", 6, "down", (6 / 8, 0, 1 / 8, 1)),
        ("pp", 6, "down", (0, 0, 1, 1)),
        ("fsdp_pp", 6, "up", (0, 1 / 2, 1, 1 / 2)),
    ],
)
def test_a_device_s_part_is_filled_in_place(rules, device, array, parts):
    panel = {which: layout for which, layout in layouts().items() if which[0] == rules}
    boxes = [
        [float(x.attrib[name]) for name in ("x", "y", "width", "height")]
        for x in drawn_boxes(panel)
    ]
    # A device has a box of its own, one for each layer, and for each array the part that it holds
    # and the outline.
    each = 1 + L + 2 * len(picture.PLACES)
    at = each * device + 1 + L + 2 * list(picture.PLACES).index(array)
    (x, y, width, height), (left, top, *whole) = boxes[at : at + 2]
    found = [(x - left) / whole[0], (y - top) / whole[1], width / whole[0], height / whole[1]]
    assert found == pytest.approx(parts)
    assert len(boxes) == 8 * each + len(picture.LEGEND)
