"""ZeRO-1: optimizer state with a layout of its own, in whole train steps and in checkpoints."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, make_layout, shardings
from recipes.common.train.feed import to_devices
from recipes.common.train.optimizer import LearningRate, make_optimizer
from recipes.common.train.state import abstract_state, initialize
from recipes.common.train.step import TrainStep, gradients
from recipes.instruments.prove.comparison import GRADIENT_TOLERANCE, compare_all
from recipes.instruments.prove.run import OPTIMIZER, restored, to_host
from tests.support.entries import ENTRIES
from tests.support.models import random_values
from tests.support.quick import QUICK
from zoo.llama_relatives import Transformer

pytestmark = pytest.mark.promise("optimizers")


def batch() -> dict[str, np.ndarray]:
    return ENTRIES["transformer"].batches[0]


def row() -> dict[str, np.ndarray]:
    return {name: x[0] for name, x in batch().items()}


@pytest.mark.parametrize(("strategy", "mesh"), [("zero1", "8"), ("pp_zero1", "data=4,pipe=2")])
def test_gradients_of_layers_are_summed_in_the_layout_of_their_optimizer_state(strategy, mesh):
    """A TPU scatters the sums then. The CPU backend does that anyway, so this looks at the types."""
    layout = ENTRIES["transformer"].layout(mesh, strategy)
    state = abstract_state(layout, OPTIMIZER)
    with layout.trace():
        made, *_ = jax.eval_shape(
            lambda state, batch: gradients(layout, state, batch),
            state,
            layout.abstract_batch(row()),
        )
    of_optimizer, at_rest = (
        paths(x) for x in (layout.optimizer_shardings(), shardings(layout.variables()["params"]))
    )
    split = {p for p, x in of_optimizer.items() if x != at_rest[p]}
    assert len(split) == 8, "q, k, v, o, gate, up, down, and the table of tokens"
    if strategy == "zero1":  # the table's is summed once, outside of the layers' loop
        split -= {"embed"}
    for path in split:
        assert paths(made)[path].sharding.spec == of_optimizer[path].spec, path


def test_stages_scatter_the_gradients_of_their_layers_and_of_the_ends():
    """Eight matrices, the table of tokens among them: none is summed whole and sliced then."""
    layout = ENTRIES["transformer"].layout("data=4,pipe=2", "pp_zero1")
    arguments = abstract_state(layout, OPTIMIZER), layout.abstract_batch(row())
    with layout.trace():
        traced = jax.make_jaxpr(lambda state, rows: gradients(layout, state, rows))(*arguments)
    over = re.findall(r"reduce_scatter\[[^\]]*axis_name=(\(.*?\))", str(traced))
    assert over.count("('data',)") == 8


def train(layout: Layout, microbatches: int) -> dict[str, np.ndarray]:
    """The state after two steps, by path."""
    lr = LearningRate(1e-2, warmup=0, steps=10)
    # Linear in the gradients: Adam divides one that is nearly zero by its own size.
    optimizer = make_optimizer("sgd", lr, weight_decay=0.1, clip_norm=1.0)
    step = TrainStep(layout, optimizer, lr, microbatches)
    abstract = step.abstract_state()
    compiled = step.lower(abstract, row()).compile(compiler_options=QUICK)
    state = initialize(layout, optimizer, 0, abstract)
    for _ in range(2):
        state, _ = compiled(state, to_devices(batch(), layout))
    return to_host(state)


@pytest.mark.full
@pytest.mark.parametrize(("changes", "microbatches"), [({}, 3), ({"lora_rank": 2}, 1)])
def test_a_step_is_that_of_one_device(changes, microbatches):
    config = dataclasses.replace(ENTRIES["transformer"].config, **changes)
    rows, seq_len = batch()["tokens"].shape
    on_mesh, alone = (
        make_layout(
            Transformer, config, make_mesh(mesh), strategy, batch_size=rows, seq_len=seq_len
        )
        for mesh, strategy in (("8", "zero1"), ("1x1", "dp"))
    )
    found = compare_all(train(on_mesh, microbatches), train(alone, microbatches))
    assert {path for path, x in found.items() if not x.relative <= GRADIENT_TOLERANCE} == set()


@pytest.mark.parametrize(("before", "after"), [("zero1", "fsdp"), ("fsdp", "zero1")])
def test_a_checkpoint_is_restored_onto_the_other_table(before, after):
    saved, target = (
        abstract_state(ENTRIES["transformer"].layout("8", strategy), OPTIMIZER)
        for strategy in (before, after)
    )
    values = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), random_values(saved), saved)
    state = jax.device_put(values, shardings(saved))
    for path, x in restored(state, target).items():
        np.testing.assert_array_equal(x, paths(state)[path], err_msg=path)
