"""The README's picture equals, byte for byte, the one that the code draws."""

import xml.etree.ElementTree

import pytest

from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from tests.conftest import ROOT
from tests.support import strategies_picture as picture
from zoo.dot_relu_dot import Config, DotReluDot

pytestmark = pytest.mark.promise("readmes")

PANELS = [("dp", "8"), ("fsdp", "8"), ("tp", "1x8"), ("fsdp_tp", "4x2")]


def layouts():
    config = Config(embed=64, hidden=128)
    return {
        f"{rules}, --mesh={mesh}": make_layout(DotReluDot, config, make_mesh(mesh), rules)
        for rules, mesh in PANELS
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


def test_a_device_s_part_is_filled_in_place():
    """Under tp on 1x8 device 3 holds columns 48 to 64 of w1, an eighth of its width."""
    panel = {"tp": layouts()["tp, --mesh=1x8"]}
    root = xml.etree.ElementTree.fromstring(picture.strategies(panel, "light"))
    fill = picture.INK["light"][2]
    filled = [x.attrib for x in root if x.tag.endswith("rect") and x.attrib["fill"] == fill]
    outlines = [x.attrib for x in root if x.tag.endswith("rect") and x.attrib["fill"] == "none"]
    assert len(filled) == 16, "two weights on eight devices"
    part = filled[2 * 3]
    device = outlines[3 * 3]  # a device's own box comes before those of its weights
    whole = outlines[3 * 3 + 1]
    assert float(part["width"]) == pytest.approx(float(whole["width"]) / 8)
    assert float(part["height"]) == pytest.approx(float(whole["height"]))
    offset = float(part["x"]) - float(whole["x"])
    assert offset == pytest.approx(3 / 8 * float(whole["width"]))
    assert float(device["width"]) > float(whole["width"])
