"""NNX's tree mode, which Flax will make the default: recipes compute the same in it."""

import contextlib
import dataclasses

import jax
import pytest
from flax import nnx

from recipes.common.entries import model
from recipes.common.mesh import make_mesh
from recipes.common.sharding.layout import make_layout
from recipes.common.train.state import new_state
from recipes.common.train.step import TrainStep
from tests.conftest import full_except
from tests.support.entries import BATCH, ENTRIES, LR, OPTIMIZER
from tests.support.quick import quick as quick
from tests.support.runs import TINY, assert_bit_equal, records, state_of

# The fast tier checks the newest Flax only, the full tier both.
OLD = [pytest.mark.full] if jax.__version_info__ < (0, 11) else []
pytestmark = [pytest.mark.promise("definitions"), *OLD]

SHORT = ("--mesh=1x2", "--steps=2", "--log_every=1")
RECIPES = {  # those of the other language models differ in the model alone
    "transformer": (*TINY, *SHORT),
    "moe": (*TINY, *SHORT),
    "mlp": SHORT,
    "vit": (*SHORT, "--size=tiny", "--batch_size=16"),
    "dot_relu_dot": SHORT,
}
ENVIRONMENT = {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}


@contextlib.contextmanager
def tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("modes")


@pytest.fixture
def train(place, inside, quick, book):
    """A function that trains once under a name and returns the workdir."""

    def command(recipe, name, *flags):
        work = place / name
        if not work.exists():
            text = (book,) if recipe in ("transformer", "moe") else ()
            done = inside(f"recipes.{recipe}", *flags, *text, f"--workdir={work}")
            assert (done.code, done.err) == (0, "")
        return work

    return command


def assert_equal_runs(a, b):
    assert len(records(a, "step", "loss", "grad_norm")) == 2
    for fields in (("step", "loss", "grad_norm"), ("held_out_loss",)):
        assert records(a, *fields) == records(b, *fields)
    assert_bit_equal(state_of(a, 2), state_of(b, 2))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.full
def test_training_is_bit_equal_in_both_modes(train, recipe):
    in_graph_mode = train(recipe, recipe, *RECIPES[recipe])
    with tree_mode():
        in_tree_mode = train(recipe, f"{recipe}-tree", *RECIPES[recipe])
    assert_equal_runs(in_graph_mode, in_tree_mode)


VARIANTS = [(name, {}) for name in ENTRIES if name not in ("transformer", "moe")]
VARIANTS += [
    ("transformer", {"lora_rank": 2}),
    # The unembedding is made after the layers, from the random numbers that follow theirs.
    ("transformer", {"tie_embeddings": False}),
    ("moe", {"balance_rate": 0.1}),  # has buffers
]
FAST_VARIANTS = [("moe", {"balance_rate": 0.1})]


@pytest.mark.parametrize(("entry", "fields"), full_except(VARIANTS, FAST_VARIANTS))
def test_initialization_and_train_step_are_the_same_programs(entry, fields):
    def programs() -> tuple[str, str]:
        config = dataclasses.replace(ENTRIES[entry].config, **fields)
        layout = make_layout(model(entry), config, make_mesh("4x2"), batch_size=BATCH)
        step = TrainStep(layout, OPTIMIZER, LR)
        init = jax.jit(lambda: new_state(layout, OPTIMIZER, seed=0))
        row = jax.tree.map(lambda x: x[0], ENTRIES[entry].batches[0])
        return init.lower().as_text(), step.lower(step.abstract_state(), row).as_text()

    in_graph_mode = programs()
    with tree_mode():
        assert programs() == in_graph_mode


@pytest.mark.full
def test_a_restored_model_has_the_loss_of_its_run(train, inside, book):
    work = train("transformer", "transformer", *RECIPES["transformer"])
    flags = (*TINY, book, "--mesh=2x1", f"--restore_from={work}", "--steps=0")
    with tree_mode():
        done = inside("recipes.transformer", *flags)
    assert (done.code, done.err) == (0, "")
    ((loss,),) = records(work, "held_out_loss")
    assert f"Held-out loss {loss:.4f}" in done.out


@pytest.mark.full
def test_generation_writes_the_same_text(inside, quick):
    flags = ("--restore_from=transformer.stdlib_3m", "--prompt=def ", "--max_new_tokens=8")
    texts = []
    for mode in (contextlib.nullcontext, tree_mode):
        with mode():
            done = inside("recipes.generate", *flags, "--mesh=1x2")
        assert (done.code, done.err) == (0, "")
        texts.append(done.out.partition("Read ")[0])  # then come timings
    assert texts[0] == texts[1]
    assert "def " in texts[0]


@pytest.mark.full
def test_environment_variables(run, place, book):
    """Flax's switches for a whole process, and a compiler that optimizes."""
    for name, mode in {"graph": {}, "tree": ENVIRONMENT}.items():
        flags = (*RECIPES["transformer"], book, f"--workdir={place / name}")
        done = run("recipes.transformer", *flags, **mode)
        assert (done.code, done.err) == (0, "")
    assert_equal_runs(place / "graph", place / "tree")
