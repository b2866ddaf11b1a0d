"""NNX in tree mode, Flax's future default: the recipes compute what they compute in graph mode."""

import contextlib
import re

import jax
import pytest
from flax import nnx

from tests.support.quick import quick as quick
from tests.support.runs import TINY, assert_bit_equal, records, state_of

# Both modes are proven on both Pythons; where time is short, on the newest Flax.
pytestmark = [pytest.mark.full] if jax.__version_info__ < (0, 11) else []

SHORT = ("--mesh=4x2", "--steps=2", "--log_every=1")
RECIPES = {
    "transformer": (*TINY, *SHORT),
    "moe": (*TINY, *SHORT),
    "mlp": SHORT,
    "dot_relu_dot": SHORT,
}
LORA = (*TINY, *SHORT, "--lora_rank=2", "--restore_from={base}")
TREE_MODE = {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}


@contextlib.contextmanager
def tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("modes")


@pytest.fixture
def train(place, inside, quick, book):
    """A function that trains in graph mode once, and returns the workdir."""

    def command(recipe, name, *flags):
        work = place / name
        if not work.exists():
            text = (book,) if recipe in ("transformer", "moe") else ()
            done = inside(f"recipes.{recipe}", *flags, *text, f"--workdir={work}")
            assert (done.code, done.err) == (0, "")
        return work

    return command


def assert_same_run(a, b):
    assert len(records(a, "step", "loss", "grad_norm")) == 2
    for fields in (("step", "loss", "grad_norm"), ("held_out_loss",)):
        assert records(a, *fields) == records(b, *fields)
    assert_bit_equal(state_of(a, 2), state_of(b, 2))


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_bit_equal(train, recipe):
    in_graph_mode = train(recipe, recipe, *RECIPES[recipe])
    with tree_mode():
        in_tree_mode = train(recipe, f"{recipe}-tree", *RECIPES[recipe])
    assert_same_run(in_graph_mode, in_tree_mode)


def test_adapters_are_bit_equal(train):
    flags = [flag.format(base=train("transformer", "transformer", *RECIPES["transformer"])) for flag in LORA]
    in_graph_mode = train("transformer", "lora", *flags)
    with tree_mode():
        in_tree_mode = train("transformer", "lora-tree", *flags)
    assert_same_run(in_graph_mode, in_tree_mode)


def test_a_restored_model_has_the_loss_of_its_run(train, inside, book):
    work = train("transformer", "transformer", *RECIPES["transformer"])
    flags = (*TINY, book, "--mesh=1x8", f"--restore_from={work}", "--steps=0")
    with tree_mode():
        done = inside("recipes.transformer", *flags)
    assert (done.code, done.err) == (0, "")
    ((loss,),) = records(work, "held_out_loss")
    assert f"Held-out loss {loss:.4f}" in done.out


def test_generated_text_is_equal(inside, quick):
    flags = ("--restore_from=transformer.stdlib_3m", "--prompt=def ", "--max_new_tokens=8", "--mesh=4x2")
    in_graph_mode = inside("recipes.generate", *flags)
    with tree_mode():
        in_tree_mode = inside("recipes.generate", *flags)
    assert (in_tree_mode.code, in_tree_mode.err) == (0, "")
    assert in_tree_mode.out == in_graph_mode.out


@pytest.mark.full
def test_environment_variables(run, book, tmp_path):
    """The switch that Flax documents, in a process of its own."""
    outs = []
    for name, mode in {"graph": {}, "tree": TREE_MODE}.items():
        flags = (*RECIPES["transformer"], book, f"--workdir={tmp_path / name}")
        done = run("recipes.transformer", *flags, **mode)
        assert (done.code, done.err) == (0, "")
        outs.append(re.sub(r".*", "", done.out))
    assert_same_run(tmp_path / "graph", tmp_path / "tree")
