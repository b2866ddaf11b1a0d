"""The README's picture equals, byte for byte, the one that the code draws."""

import dataclasses
import xml.etree.ElementTree

import pytest

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import ROOT
from tests.support import strategies_picture as picture
from zoo.transformer import Config, Transformer

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
}


def layouts():
    config = dataclasses.replace(Config.tiny(), embed=64, mlp=128)
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


@pytest.mark.parametrize(
    ("rules", "device", "array", "parts"),
    [  # Starts and sizes of the filled part, as shares of the whole: across, down, width, height.
        ("tp", 3, "up", (3 / 8, 0, 1 / 8, 1)),  # columns 48 to 64 of 128
        ("tp", 3, "activations", (0, 0, 1, 1)),
        ("tp_sp", 3, "activations", (3 / 8, 0, 1 / 8, 1)),
        ("cp", 6, "activations", (2 / 4, 1 / 2, 1 / 4, 1 / 2)),
        ("fsdp_cp", 6, "down", (6 / 8, 0, 1 / 8, 1)),
    ],
)
def test_a_device_s_part_is_filled_in_place(rules, device, array, parts):
    panel = {which: layout for which, layout in layouts().items() if which[0] == rules}
    root = xml.etree.ElementTree.fromstring(picture.strategies(panel, "light"))
    boxes = [
        [float(x.attrib[name]) for name in ("x", "y", "width", "height")]
        for x in root
        if x.tag.endswith("rect")
    ]
    # A device has a box of its own, and for each array the part that it holds and the outline.
    at = 7 * device + 1 + 2 * list(picture.PLACES).index(array)
    (x, y, width, height), (left, top, *whole) = boxes[at : at + 2]
    found = [(x - left) / whole[0], (y - top) / whole[1], width / whole[0], height / whole[1]]
    assert found == pytest.approx(parts)
    assert len(boxes) == 8 * 7 + len(picture.LEGEND)
