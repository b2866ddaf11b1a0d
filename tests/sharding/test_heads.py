"""All-to-all needs a head for each device: a layout says so, whoever makes it."""

import dataclasses

import pytest

from recipes.common.mesh import make_mesh
from recipes.common.runtime.errors import UserError
from recipes.common.sharding import make_layout
from recipes.common.sharding.layout import elsewhere
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("user-errors")


def test_a_layout_with_more_devices_than_heads_is_refused():
    config = dataclasses.replace(Config.tiny(), num_heads=4, num_kv_heads=2, context="all-to-all")
    with pytest.raises(UserError, match="4 heads over 8 devices"):
        make_layout(Transformer, config, make_mesh("data=1,seq=8"), "cp", seq_len=64)
    fitting = make_layout(Transformer, config, make_mesh("data=2,seq=4"), "cp", seq_len=64)
    assert elsewhere(fitting, "cp", make_mesh("data=1,seq=8")) is None
    assert elsewhere(fitting, "cp", make_mesh("data=4,seq=2")) is not None
