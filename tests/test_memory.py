"""Memory, from the compiler's own analysis: nothing here is allocated."""

import math
import re

import jax
import pytest
from flax import nnx

from recipes.common import sharding
from recipes.common.mesh import make_mesh
from recipes.common.optimizer import adamw, schedule
from recipes.common.report import bytes_per_device
from zoo.transformer import RULES, Config, Transformer


@pytest.mark.parametrize(
    ("mesh", "strategy"), [("8", "fsdp"), ("4x2", "fsdp_tp"), ("1x8", "tp"), ("2x2x2", "hsdp_tp")]
)
def test_init_of_8b_never_holds_a_whole_parameter_on_a_device(mesh, strategy):
    layout = sharding.lay_out(
        lambda: Transformer(Config.llama_8b(), rngs=nnx.Rngs(0)), RULES, strategy, make_mesh(mesh)
    )
    optimizer = adamw(schedule(1e-3, 1, 10), 0.1, 1.0)
    abstract = sharding.abstract_state(layout, optimizer)
    init = layout.compile(
        lambda: sharding.new_state(layout, optimizer, 0), out_shardings=sharding.shardings(abstract)
    )
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
        build = lambda: Transformer(Config.llama_8b(), rngs=nnx.Rngs(0))  # noqa: E731
        layout = sharding.lay_out(build, RULES, strategy, make_mesh("8"))
        return bytes_per_device(sharding.abstract_state(layout, adamw(schedule(1e-3, 1, 9), 0, 1)))

    whole = 3 * 4 * 8_030_261_248  # parameters and two moments
    assert held("dp") == pytest.approx(whole, rel=1e-4)
    assert held("fsdp") == pytest.approx(whole / 8, rel=1e-3)
