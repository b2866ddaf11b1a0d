"""Memory, from the compiler's own analysis: nothing here is allocated."""

import math
import re

import jax
import pytest

from recipes.common.report.report import bytes_per_device
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from recipes.common.train.optimizer import LearningRate, adamw
from recipes.common.train.state import abstract_state, initialization
from tests.conftest import full_except
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("layouts")

OPTIMIZER = adamw(LearningRate(1e-3, warmup=1, steps=10), weight_decay=0.1, clip_norm=1.0)
CASES = [("8", "fsdp"), ("4x2", "fsdp_tp"), ("1x8", "tp"), ("2x2x2", "hsdp_tp")]


@pytest.mark.parametrize(("mesh", "strategy"), full_except(CASES, CASES[-1:]))
def test_init_of_8b_never_holds_a_whole_parameter_on_a_device(mesh, strategy):
    layout = make_layout(Transformer, Config.llama_8b(), make_mesh(mesh), strategy)
    abstract = abstract_state(layout, OPTIMIZER)
    init = initialization(layout, OPTIMIZER, 0, abstract)
    arrays = jax.tree.leaves(abstract["params"])
    largest_shard = max(math.prod(a.sharding.shard_shape(a.shape)) for a in arrays)
    assert largest_shard < max(a.size for a in arrays) / 3

    dims = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", init.as_text())
    held = max(math.prod(int(d) for d in text.split(",")) for text in dims)
    assert held == largest_shard, "some array on a device is more than a shard"

    memory = init.memory_analysis()
    assert memory.output_size_in_bytes < 1.001 * bytes_per_device(abstract)
    # Random bits and normals of several parameters at a time, shards all of them.
    assert memory.temp_size_in_bytes < 2 * bytes_per_device(abstract["params"])


def test_state_of_8b_is_split_by_fsdp_and_not_by_dp():
    def held(strategy):
        layout = make_layout(Transformer, Config.llama_8b(), make_mesh("8"), strategy)
        return bytes_per_device(abstract_state(layout, OPTIMIZER))

    whole = 3 * 4 * 8_030_261_248  # parameters and two moments
    assert held("dp") == pytest.approx(whole, rel=1e-4)
    assert held("fsdp") == pytest.approx(whole / 8, rel=1e-3)
