"""Moving a model between layouts, and the log-probabilities of a generator under other rules."""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from recipes.common.generation.rollouts import sampling_layout
from recipes.common.report.report import bytes_per_device
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.sharding.move import move
from tests.conftest import full_except
from tests.support.models import random_values
from tests.support.quick import QUICK
from zoo.llama_relatives import Config, Transformer
from zoo.options import cache as zoo_cache
from zoo.options import log_probs as zoo_log_probs

pytestmark = pytest.mark.promise("move")

# Strategy → a mesh of eight devices.
LAYOUTS = {
    "dp": "8", "fsdp": "8", "zero1": "8", "tp": "1x8", "fsdp_tp": "4x2", "fsdp_tp_sp": "4x2",
    "hsdp_tp": "2x2x2", "fsdp_cp_tp": "data=2,seq=2,model=2", "fsdp_pp_tp": "data=2,pipe=2,model=2",
}  # fmt: skip
PAIRS = [*itertools.permutations(LAYOUTS, 2)]
FAST = [("fsdp", "tp"), ("fsdp_pp_tp", "fsdp_tp"), ("hsdp_tp", "fsdp_cp_tp")]
GENERATES = [name for name in LAYOUTS if "pp" not in name]


@functools.cache
def layout_of(strategy: str):
    return make_layout(Transformer, Config.tiny(), make_mesh(LAYOUTS[strategy]), strategy)


@functools.cache
def on_host():
    return random_values(layout_of("dp").model.shapes)


def variables_of(strategy: str):
    return jax.device_put(on_host(), shardings(layout_of(strategy).variables()))


@pytest.mark.parametrize(("source", "target"), full_except(PAIRS, FAST))
def test_every_array_arrives_bit_equal(source, target):
    moved = move(variables_of(source), layout_of(source), layout_of(target))
    expected, wanted = paths(on_host()), paths(layout_of(target).variables())
    arrays = paths(moved)
    assert arrays.keys() == expected.keys()
    for path, x in arrays.items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)
        assert x.sharding == wanted[path].sharding, path
        assert x.dtype == wanted[path].dtype


def bytes_alive() -> int:
    """Of arrays on the mesh, on all devices; shards that were looked at are arrays of their own."""
    arrays = [x for x in jax.live_arrays() if isinstance(x.sharding, NamedSharding)]
    return sum(bytes_per_device(x) * len(x.sharding.device_set) for x in arrays)


def test_one_array_is_in_memory_twice_at_most(monkeypatch):
    source, target = layout_of("fsdp"), layout_of("fsdp_tp")
    state = variables_of("fsdp")
    before = bytes_alive()
    largest = max(x.nbytes for x in jax.tree.leaves(state))
    most, put = [before], jax.device_put

    def watched(*arguments, **options):
        moved = put(*arguments, **options)
        most.append(bytes_alive())
        return moved

    monkeypatch.setattr(jax, "device_put", watched)
    moved = move(state, source, target, donate=True)
    assert len(most) - 1 == len(jax.tree.leaves(moved))
    assert max(most) <= before + largest
    assert most[-1] < 1.1 * before, "only replicated arrays are left, which share memory"
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.size > 1000)
    for path, x in paths(moved).items():
        np.testing.assert_array_equal(x, paths(on_host())[path], err_msg=path)


@pytest.mark.parametrize("strategy", ["dp", "tp"])
def test_a_sampler_with_training_s_layout_takes_no_memory_for_weights(strategy):
    """Rules that gather nothing: while answers are written, the weights are the training state's own."""
    layout, state = layout_of(strategy), variables_of(strategy)
    before = bytes_alive()
    moved = move(state, layout, sampling_layout(Transformer, layout))
    assert bytes_alive() == before
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        shards = zip(x.addressable_shards, y.addressable_shards, strict=True)
        assert all(
            a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer() for a, b in shards
        )


def test_another_state_or_model_is_refused():
    state = variables_of("fsdp")
    with pytest.raises(ValueError, match="is sharded"):
        move(state, layout_of("tp"), layout_of("fsdp"))
    with pytest.raises(ValueError, match="devices that are not the same"):
        move(state, layout_of("fsdp"), make_layout(Transformer, Config.tiny(), make_mesh("1")))
    with pytest.raises(ValueError, match="has shapes"):
        move(state, layout_of("fsdp"), make_layout(Transformer, Config.small(), make_mesh("8")))


# ---- a generator's log-probabilities -------------------------------------------------------------

ROWS, PROMPT, LENGTH = 8, 8, 16
TOKENS_BT = np.random.default_rng(0).integers(0, 257, (ROWS, LENGTH + 1), np.int32)
TOLERANCE = 5e-6  # nats


@functools.cache
def while_training(strategy: str) -> np.ndarray:
    """Log-probabilities of the answers, [B, T]."""
    layout = layout_of(strategy)
    arrays = TOKENS_BT[:, :-1], TOKENS_BT[:, 1:]
    placed = jax.device_put(arrays, layout.batch_shardings(arrays))
    program = layout.compile(
        lambda variables, arrays: zoo_log_probs.log_probs(layout.model.merge(variables), *arrays),
        layout.variables(), placed, compiler_options=QUICK,
    )  # fmt: skip
    return np.asarray(program(variables_of(strategy), placed))[:, PROMPT - 1 :]


@functools.cache
def while_generating(source: str, strategy: str) -> np.ndarray:
    """Those of the model that is trained under `source`, moved to a generator with a cache."""
    target = layout_of(strategy)
    variables = move(variables_of(source), layout_of(source), target)
    prefill, decode = generator(strategy)
    logits_BV, cache = prefill(variables, TOKENS_BT[:, :PROMPT], np.full(ROWS, PROMPT, np.int32))
    found = []
    for t in range(PROMPT, LENGTH + 1):
        log_probs_BV = jax.nn.log_softmax(np.asarray(logits_BV, np.float64))
        found.append(np.take_along_axis(np.asarray(log_probs_BV), TOKENS_BT[:, t : t + 1], 1)[:, 0])
        if t < LENGTH:
            logits_BV, cache = decode(variables, TOKENS_BT[:, t], cache)
    return np.stack(found, axis=1)


@functools.cache
def generator(strategy: str):
    layout = layout_of(strategy)

    def prefill(variables, tokens_BT, lengths_B):
        return zoo_cache.prefill(layout.model.merge(variables), tokens_BT, lengths_B, LENGTH)

    def decode(variables, tokens_B, cache):
        return zoo_cache.decode(layout.model.merge(variables), tokens_B, cache)

    def put(*arrays):
        return jax.device_put(arrays, layout.replicated)

    variables = variables_of(strategy)
    arguments = put(TOKENS_BT[:, :PROMPT], np.full(ROWS, PROMPT, np.int32))
    first = layout.compile(prefill, variables, *arguments, compiler_options=QUICK)
    _, cache = first(variables, *arguments)
    (token_B,) = put(TOKENS_BT[:, 0])
    following = layout.compile(decode, variables, token_B, cache, compiler_options=QUICK)
    return (
        lambda variables, *arrays: first(variables, *put(*arrays)),
        lambda variables, token_B, cache: following(variables, *put(token_B), cache),
    )


def largest_difference(training: str, generating: str) -> float:
    found_BT = while_generating(training, generating)
    return float(np.abs(found_BT - while_training(training)).max())


@pytest.mark.parametrize(
    ("training", "generating"),
    full_except(itertools.product(LAYOUTS, GENERATES), [("fsdp", "tp")]),
)
def test_a_generator_has_the_log_probabilities_of_training(training, generating):
    assert largest_difference(training, generating) < TOLERANCE


def table() -> str:
    """The differences of all pairs."""
    lines = [f"| training \\ generating | {' | '.join(f'`{x}`' for x in GENERATES)} |"]
    lines += ["|---|" + "---:|" * len(GENERATES)]
    for training in LAYOUTS:
        cells = (f"{largest_difference(training, x):.1e}" for x in GENERATES)
        lines.append(f"| `{training}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
