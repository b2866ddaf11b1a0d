"""Sizes that no mesh axis divides: vocabularies are padded in the step, heads are replicated."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from recipes.common import entries
from recipes.common.report import report
from recipes.common.runtime.errors import UserError
from recipes.common.runtime.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import make_layout, shardings
from recipes.common.sharding.rules import used_axes
from recipes.common.train.optimizer import adamw
from recipes.common.train.state import abstract_state, new_params
from tests.conftest import full_except
from tests.support import odd_configs, runs
from tests.support.golden_folders import GOLDEN
from tests.support.models import random_variables
from tests.support.quick import QUICK
from tests.support.quick import quick as quick
from zoo.llama_relatives import Config, Transformer

pytestmark = pytest.mark.promise("uneven-sizes")

SIZES = {
    "neither heads nor kv heads": Config(
        257, 64, 2, num_heads=9, num_kv_heads=3, head_dim=8, mlp=128
    ),
    "heads alone": Config(331, 64, 2, num_heads=16, num_kv_heads=2, head_dim=8, mlp=128),
    "kv heads alone, or neither": Config(
        257, 48, 2, num_heads=6, num_kv_heads=3, head_dim=8, mlp=200
    ),
    "two tables": Config(
        331, 64, 2, num_heads=6, num_kv_heads=2, head_dim=8, mlp=200, tie_embeddings=False
    ),
    "a vocabulary, on a ring": Config(
        293, 64, 2, num_heads=4, num_kv_heads=2, head_dim=8, mlp=128, context="ring"
    ),
}
RING = ("a vocabulary, on a ring", "data=2,seq=2,model=2", "fsdp_cp_tp")
A, B, C = ("4x2", "fsdp_tp"), ("1x8", "tp"), ("2x2x2", "hsdp_tp")
CASES = [
    ("neither heads nor kv heads", *C),
    *(("heads alone", *on) for on in (B, C)),
    *(("kv heads alone, or neither", *on) for on in (A, B)),
    *(("two tables", *on) for on in (A, ("2x4", "tp"), C)),
    RING,
]
FAST = [("heads alone", "1x8", "tp")]
ROWS = 8


def layout_of(size: str, mesh: str, strategy: str):
    return make_layout(Transformer, SIZES[size], make_mesh(mesh), strategy, batch_size=ROWS)


@functools.cache
def computed(size: str, mesh: str, strategy: str):
    """(loss, gradients, logits), as numpy arrays."""
    layout, random = layout_of(size, mesh, strategy), np.random.default_rng(0)
    tokens, targets = random.integers(0, SIZES[size].vocab_size, (2, ROWS, 24), np.int32)
    batch = {"tokens": tokens, "targets": targets, "segment_ids": tokens.cumsum(1) // 4_000}
    where = shardings(layout.variables())
    given = random_variables(layout), jax.device_put(batch, layout.batch_shardings(batch))

    def run(variables, batch):
        def mean(variables):
            total, count, _ = layout.model.merge(variables).loss(**batch)
            return total / count

        logits = layout.model.merge(variables)(batch["tokens"], batch["segment_ids"])
        return *jax.value_and_grad(mean)(variables), logits

    outputs = (layout.replicated, where, None)
    run = layout.compile(run, *given, out_shardings=outputs, compiler_options=QUICK)
    return jax.device_get(run(*given))


@pytest.mark.parametrize(("size", "mesh", "strategy"), full_except(CASES, FAST))
def test_meshes_compute_what_one_device_computes(size, mesh, strategy):
    want_loss, want_grads, want_logits = computed(size, "1x1", "dp")
    loss, grads, logits = computed(size, mesh, strategy)
    assert loss == pytest.approx(want_loss, rel=2e-6)
    for path, grad in paths(grads["params"]).items():
        want = paths(want_grads["params"])[path]
        assert np.linalg.norm(grad - want) <= 2e-5 * np.linalg.norm(want), path
    assert logits.shape == (ROWS, 24, SIZES[size].vocab_size), "what is padded is never sampled"
    np.testing.assert_allclose(logits, want_logits, atol=2e-5)


# ---- two logical axes of one product, of which rules may split one -------------------------------

HEADS = {"delta_heads": 6, "delta_key_heads": 2, "num_heads": 5, "num_kv_heads": 1}
LITTLE = {"vocab_size": 31, "embed": 16, "num_layers": 2, "attention": "flash"}
ONE_OF_TWO = {
    "key_heads alone are split": ("qwen3_next", LITTLE | HEADS, "tp", ""),
    "kv_heads alone are split": (
        "qwen3_next", LITTLE | {"delta_heads": 3, "delta_key_heads": 3, "num_heads": 4, "num_kv_heads": 2},
        "tp", "",
    ),
    "heads alone are split": ("transformer", LITTLE | {"num_heads": 4, "num_kv_heads": 2}, "tp", "kv_heads"),
    "no weight has kv_heads": ("deepseek", LITTLE | {"num_heads": 3}, "tp", ""),
    "residual_seq alone is split": ("moe", LITTLE, "tp_sp", "mlp"),
    "vocab is split, in stages": ("transformer", LITTLE, "fsdp_pp_tp", ""),
}  # fmt: skip
FAST_ONES = [*ONE_OF_TWO][:1]


@pytest.mark.parametrize("pair", full_except(ONE_OF_TWO, FAST_ONES))
def test_two_axes_of_one_product(pair):
    entry, sizes, strategy, whole = ONE_OF_TWO[pair]
    without_experts = {"num_experts": 0} if entry == "qwen3_next" else {}
    config = dataclasses.replace(entries.zoo_file(entry).Config.tiny(), **sizes, **without_experts)
    used = used_axes(entries.zoo_file(entry).RULES[strategy])
    mesh = ",".join(f"{axis}=2" for axis in ("data", "pipe", "model") if axis in used)
    case = odd_configs.Case(entry, config, strategy, mesh, 4, 8, whole)
    assert odd_configs.check(case, logits_only=pair in FAST_ONES) == "equal"


RANDOM = [(entry, seed) for seed in range(4) for entry in odd_configs.ENTRIES]


@pytest.mark.parametrize(("entry", "seed"), full_except(RANDOM, []))
def test_a_random_model_on_a_random_mesh_is_equal_or_refused(entry, seed):
    """By hand, many: python -m tests.by_hand.odd_shapes."""
    result = odd_configs.check(odd_configs.draw_case(entry, seed))
    assert result == "equal" or result.startswith("refused: ")


@pytest.mark.parametrize(("size", "mesh", "strategy"), CASES)
@pytest.mark.full
def test_initial_values_do_not_depend_on_the_mesh(size, mesh, strategy):
    found, alone = (new_params(layout_of(size, *on)) for on in ((mesh, strategy), ("1x1", "dp")))
    jax.tree.map(np.testing.assert_array_equal, found, alone)


@pytest.mark.parametrize("vocabulary", [50_257, 151_669])
def test_known_sizes_fit_sixteen_devices(vocabulary):
    """GPT-2's and Qwen 3's vocabularies and Llama 3's 8 kv heads; nothing is computed."""
    config = Config(vocabulary, 64, 2, num_heads=32, num_kv_heads=8, head_dim=8, mlp=128)
    mesh = jax.sharding.AbstractMesh((1, 16), ("data", "model"))
    layout = make_layout(Transformer, config, mesh, "tp", batch_size=ROWS)
    assert layout.uneven == {"vocab": "model", "kv_heads": "model"}
    found = [layout.rules[axis] for axis in ("vocab", "heads", "kv_heads")]
    assert found == ["model", "model", None], "padded, split, whole"


@pytest.mark.parametrize(
    ("size", "mesh", "strategy", "line"),
    [
        ("neither heads nor kv heads", "4x2", "fsdp_tp",
         "Not divisible: vocab 257 by model 2 (padded to 258 in the step, replicated at rest); kv_heads 3 by "
         "model 2 (replicated, computed 2 times); heads 9 by model 2 (replicated, computed 2 times). This "
         "costs each device 20.5 kB for parameters, and 61.5 kB for gradients and optimizer state."),
        ("heads alone", "1x8", "tp",
         "Not divisible: vocab 331 by model 8 (padded to 336 in the step, replicated at rest); kv_heads 2 by "
         "model 8 (replicated, computed 8 times). This costs each device 88.5 kB for parameters, and 265.4 kB "
         "for gradients and optimizer state."),
    ],
)  # fmt: skip
def test_the_report_says_what_they_cost(size, mesh, strategy, line):
    layout = layout_of(size, mesh, strategy)
    variables = layout.variables()
    (short,) = report.uneven(layout, variables)
    assert line.startswith(short[:-1])
    # AdamW keeps two moments, and gradients are a third copy.
    assert report.uneven(layout, abstract_state(layout, adamw(lambda _: 0.1, 0.1, 1.0))) == [line]
    ideal = sum(  # each dim cut by what the table asked for, though it doesn't come out even
        leaf.size * leaf.dtype.itemsize
        / np.prod([n for axis in axes for n in [1, *asked(layout, axis)]])
        for leaf, axes in zip(
            paths(variables["params"]).values(), paths(layout.model.axes["params"]).values(),
            strict=True,
        )
    )  # fmt: skip
    more = report.bytes_per_device(variables) - ideal
    assert line.endswith(
        f"This costs each device {report.size(more)} for parameters, and {report.size(3 * more)} for "
        "gradients and optimizer state."
    )


def asked(layout, axis):
    table = layout.strategies[layout.strategy]
    return [layout.mesh.shape[name] for name in [table[axis]] if name]


def test_other_commands_report_the_cost_too(inside, quick, tmp_path):
    """test_generation.py covers recipes.generate. These commands have no gradients."""
    model, text = runs.talker(tmp_path / "model", 96, num_kv_heads=4), tmp_path / "a.txt"
    text.write_text("some words " * 9)
    for more, command in (
        ("28.7", ("evaluate", f"--restore_from={model}", f"--dataset={text}", "--seq_len=16")),
        ("7.2", ("hf", "import", f"--source={GOLDEN / 'llama3'}", f"--target={tmp_path / 'back'}")),
    ):
        done = inside(f"recipes.{command[0]}", *command[1:], "--mesh=1x8")
        assert (done.code, done.err) == (0, "")
        assert done.out.splitlines()[1] == (
            "Not divisible: kv_heads 4 by model 8 (replicated, computed 8 times). This costs each "
            f"device {more} kB for parameters."
        )


def test_dims_that_divide_are_not_mentioned():
    layout = layout_of("two tables", "8", "fsdp")
    assert report.uneven(layout, layout.variables()) == []


@pytest.mark.parametrize("dim", ["embed", "mlp"])
def test_other_dims_are_still_refused(dim):
    """Silently replicating them would undo the strategy."""
    config = dataclasses.replace(SIZES["heads alone"], **{dim: 60})
    with pytest.raises(UserError, match=f"split dim '{dim}'.* 60 is not divisible by 8"):
        make_layout(Transformer, config, make_mesh("8x1" if dim == "embed" else "1x8"), "fsdp_tp")
