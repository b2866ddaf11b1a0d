"""The proof: every entry × strategy × mesh computes the same and is sharded by its rules."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from recipes.common import checkpoint
from recipes.common.sharding.abstract import abstract_model, paths, variables_of
from recipes.common.sharding.layout import Layout, Tree, shardings
from recipes.common.sharding.rules import used_axes
from recipes.common.train.feed import to_devices
from recipes.common.train.optimizer import (
    OPTIMIZERS,
    LearningRate,
    decaying,
    hidden_matrices,
    make_optimizer,
)
from recipes.common.train.state import abstract_state
from recipes.common.train.update import apply_gradients
from recipes.instruments.prove import run as prove
from recipes.instruments.prove.cases import TOLERANCES, compare_runs
from recipes.instruments.prove.comparison import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    compare_all,
    compare_gradients,
    largest_relative,
    zeros,
)
from tests.conftest import full_except
from tests.support.entries import (
    CASES,
    ENTRIES,
    FAMILY_CASES,
    FAST,
    FAST_CASES,
    FITS,
    FULL_CASES,
    MANY_CASES,
    OPTIMIZER,
    compiled_step,
    parallelisms,
    strategy_on,
    with_case,
)
from tests.support.proof import DIFFERENCES, STATES, TOLERANCES_OF_STATES
from tests.support.quick import QUICK
from tests.support.runs import saving

pytestmark = pytest.mark.promise("meshes-agree")


RELEASE_CASES = [case for case in CASES if case not in FULL_CASES]
# Logical axes of D in weights at rest, and of DeepSeek's latents.
GATHERED = ("embed", "expert_embed", "up_latent")
# On these a family is restored.
FEW_MESHES = ("4x2", "1x8", "2x2x2", "data=2,expert=4")
# On these a model is initialized. Elsewhere it starts from one device's state, but for the cases of a
# release: a program that initializes may take longer to compile than a train step.
INITIALIZED = ("1x1", "4x2", "2x2x2")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The part of a state that each device holds. Layouts with equal parts have the same initialization."""

    parts: str
    layout: Layout = dataclasses.field(compare=False)
    abstract: Tree = dataclasses.field(compare=False)


@functools.cache
def initial_state(entry_name: str, on: Parts):
    """The sharded initialization, on the host. Its program depends on the parts alone."""
    return prove.initial_state(on.layout, OPTIMIZER, on.abstract)


@functools.lru_cache(maxsize=8)  # a restore begins with the run that was compared before
def run(entry_name: str, strategy: str, mesh: str, is_long: bool = False):
    """Five steps with AdamW."""
    entry = ENTRIES[entry_name]
    layout = entry.layout(mesh, strategy)
    abstract = abstract_state(layout, OPTIMIZER)
    step = compiled_step(entry_name, strategy, mesh, is_long)
    is_initialized = mesh in INITIALIZED or (entry_name, strategy, mesh) in RELEASE_CASES
    if not is_initialized:
        first = reference(entry_name).initial
    else:
        first = initial_state(entry_name, parts_of(layout, abstract))
    batches = entry.long_batches if is_long else entry.batches
    return prove.train(layout, step, first, abstract, batches)


def parts_of(layout: Layout, abstract: Tree) -> Parts:
    parts = tuple(
        (path, leaf.dtype, *leaf.sharding.devices_indices_map(leaf.shape).items())
        for path, leaf in paths(abstract).items()
    )
    return Parts(str(parts), layout, abstract)


@functools.cache
def reference(entry_name: str, is_long: bool = False):
    is_long = is_long and entry_name not in FAMILY_CASES
    return run(entry_name, next(iter(ENTRIES[entry_name].rules)), "1x1", is_long)


@pytest.mark.parametrize("entry", ENTRIES)
def test_strategies_fit_the_reviewed_meshes(entry, golden):
    cases = ENTRIES[entry].cases
    golden(FITS.name, "".join(f"{' '.join(case)}\n" for case in cases), part=entry)
    for _, strategy, mesh in cases:  # as names of strategies say
        is_split = bool({"cp", "sp"} & parallelisms(strategy, mesh))
        assert is_split == ENTRIES[entry].is_long(strategy, mesh), (strategy, mesh)
        in_stages = "pp" in parallelisms(strategy, mesh)
        assert in_stages == (ENTRIES[entry].layouts[strategy, mesh].stages > 1), (strategy, mesh)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_pair_of_parallelisms_is_in_the_full_tier(entry):
    """Of all that a release proves; of entries that prove all strategies, every strategy, too."""

    def proven(cases) -> tuple[set, set]:
        of_entry = [(strategy, mesh) for name, strategy, mesh in cases if name == entry]
        active = [sorted(parallelisms(*case)) for case in of_entry]
        pairs = {pair for parts in active for pair in itertools.combinations(parts, 2)}
        return pairs, {strategy for strategy, _ in of_entry if entry in MANY_CASES}

    assert proven(FULL_CASES) == proven(CASES)


@pytest.mark.parametrize("entry", full_except(ENTRIES, list(ENTRIES)[:1]))
def test_one_device_is_the_module_itself(entry):
    """The 1x1 run, the reference for all others, equals the plain module without a mesh."""
    training = reference(entry)
    first = training.initial
    # Eagerly, or with LLVM's vectors (see train/state.py), the last bit may differ.
    plain = jax.jit(
        lambda: variables_of(ENTRIES[entry].build()),
        compiler_options={"xla_backend_optimization_level": 1},
    )
    kinds = ENTRIES[entry].layout("1x1").model.shapes
    known = {kind: jax.tree.map(jnp.asarray, first[kind]) for kind in kinds}
    variables = known if entry in FAMILY_CASES else plain()
    assert set(first) == {*variables, "opt_state", "step", "rngs"}
    for kind, tree in variables.items():
        for path, value in paths(tree).items():
            np.testing.assert_array_equal(value, paths(first[kind])[path], err_msg=path)

    def mean(params, batch):
        model = abstract_model(ENTRIES[entry].build).merge(variables | {"params": params})
        total, count, aux = model.loss(**batch)
        return total / count, aux["loss"][0] / count

    batch = jax.tree.map(jnp.asarray, ENTRIES[entry].batches[0])
    alone = jax.jit(jax.grad(mean, has_aux=True), compiler_options=QUICK)
    grad, loss = alone(variables["params"], batch)
    np.testing.assert_allclose(training.metrics[0]["loss"], loss, rtol=LOSS_TOLERANCE)
    for path, found in compare_gradients(paths(training.grads[0]), paths(grad)).items():
        assert found.relative < GRADIENT_TOLERANCE, path


@pytest.mark.parametrize(
    ("entry", "strategy", "mesh"), full_except(CASES, FAST_CASES, RELEASE_CASES)
)
def test_same_start_losses_and_gradients(entry, strategy, mesh, golden):
    is_long = ENTRIES[entry].is_long(strategy, mesh)
    one = reference(entry, is_long)
    found = compare_runs(run(entry, strategy, mesh, is_long), one)
    # Adam turns a gradient that is zero but for rounding into steps of any sign.
    not_compared = tuple(f"/{path}" for path in zeros(paths(one.grads[0])))
    found["state"] = {
        path: x for path, x in found["state"].items() if not f"/{path}".endswith(not_compared)
    }
    largest = {
        what: largest_relative(differences) for what, differences in found.items() if differences
    }
    record = {what: largest[what] for what in ("loss", "gradient")}
    golden.rewrite(DIFFERENCES, lambda text: with_case(text, (entry, strategy, mesh), record))
    for what, relative in largest.items():
        assert relative <= TOLERANCES[what], what


@pytest.mark.parametrize("entry", ENTRIES)
def test_differences_are_recorded(entry, golden):
    """The golden has a measurement within tolerance for every case."""
    text = golden.rewrite(DIFFERENCES, lambda text: text)
    record = {k: v for k, v in json.loads(text or "{}").items() if k.split()[0] == entry}
    cases = [" ".join(case) for case in CASES if case[0] == entry]
    if golden.update:  # other workers are still measuring some
        cases = [case for case in cases if case in record]
    assert list(record) == cases, "run with --release --update-golden"
    assert max((case["loss"] for case in record.values()), default=0) < LOSS_TOLERANCE
    assert max((case["gradient"] for case in record.values()), default=0) < GRADIENT_TOLERANCE


# ---- every optimizer ------------------------------------------------------------------------------

# Each kind of mesh axis.
AXES = [("dp", "8"), ("zero1", "8"), ("fsdp", "8"), ("tp", "1x8"), ("hsdp_tp", "2x2x2")]
AXES += [("fsdp_cp", "data=2,seq=4"), ("fsdp_pp", "data=4,pipe=2")]
STATE_CASES = [(entry, *case) for entry in ("transformer", "moe") for case in AXES]
STATE_CASES += [("moe", "fsdp_ep", "data=2,expert=4")]
# Without warmup: updates are 20 times as large as in `run`.
LR = LearningRate(1e-2, warmup=0, steps=10)


def three_steps(entry_name: str, strategy: str, mesh: str, is_long: bool) -> dict[str, dict]:
    """Optimizer → path → array of the state after three steps.

    Gradients come from the step that `run` runs, with parameters that the optimizer has updated.
    """
    entry = ENTRIES[entry_name]
    layout = entry.layout(mesh, strategy)
    step = compiled_step(entry_name, strategy, mesh, is_long)
    first = reference(entry_name).initial
    adamw_state = jax.device_put(first, shardings(abstract_state(layout, OPTIMIZER)))["opt_state"]
    shapes, of_optimizer = layout.model.shapes["params"], layout.optimizer_shardings()
    grads = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, of_optimizer)
    states = {}
    for name in OPTIMIZERS:
        optimizer = make_optimizer(
            name, LR, weight_decay=0.1, clip_norm=1.0,
            matrices=hidden_matrices(layout), decays=decaying(layout),
        )  # fmt: skip
        abstract = abstract_state(layout, optimizer)
        update = layout.compile(
            functools.partial(apply_gradients, optimizer, layout), abstract, grads,
            out_shardings=shardings(abstract), compiler_options=QUICK,
        )  # fmt: skip
        opt_state = flax.serialization.to_state_dict(optimizer.init(first["params"]))
        state = jax.device_put(first | {"opt_state": opt_state}, shardings(abstract))
        for batch in (entry.long_batches if is_long else entry.batches)[:3]:
            inputs = state | {"opt_state": adamw_state}
            after, _, batch_grads = step(inputs, to_devices(batch, layout))
            buffers = {kind: after[kind] for kind in after.keys() & {"buffers"}}
            state = update(state | buffers, batch_grads)
        states[name] = prove.to_host(state)
    return states


@functools.cache
def states_on_one_device(entry: str, is_long: bool) -> dict[str, dict]:
    return three_steps(entry, next(iter(ENTRIES[entry].rules)), "1x1", is_long)


@pytest.mark.promise("optimizers")
@pytest.mark.parametrize(("entry", "strategy", "mesh"), STATE_CASES)
@pytest.mark.full
def test_every_optimizer_has_one_device_s_state(entry, strategy, mesh, golden):
    is_long = ENTRIES[entry].is_long(strategy, mesh)
    states = three_steps(entry, strategy, mesh, is_long)
    want = states_on_one_device(entry, is_long)
    record = {
        name: largest_relative(compare_all(state, want[name])) for name, state in states.items()
    }
    golden.rewrite(STATES, lambda text: with_case(text, (entry, strategy, mesh), record))
    for name, relative in record.items():
        assert relative <= TOLERANCES_OF_STATES[name], name


def test_differences_of_states_are_recorded(golden):
    """The golden has a measurement within tolerance for every case and optimizer."""
    record = json.loads(golden.rewrite(STATES, lambda text: text) or "{}")
    cases = [" ".join(case) for case in STATE_CASES]
    if golden.update:  # other workers are still measuring some
        cases = [case for case in cases if case in record]
    assert {*record} == {*cases}, "run with --full --update-golden"
    for case, optimizers in record.items():
        assert optimizers.keys() == {*OPTIMIZERS}, case
        for name, relative in optimizers.items():
            assert 0 < relative <= TOLERANCES_OF_STATES[name], (case, name)


@pytest.mark.promise("layouts")
@pytest.mark.parametrize("entry", ENTRIES)
def test_parameters_are_sharded_as_reviewed(entry, golden):
    """Records every PartitionSpec, because shapes alone don't show swapped axes of a square weight."""
    lines = []
    for strategy, table in ENTRIES[entry].rules.items():
        used = used_axes(table)
        mesh = "2x2x2" if "fsdp" in used else "4x2"
        mesh = "data=2,expert=2,model=2" if "expert" in used else mesh
        if "seq" in used:
            mesh = "data=1,seq=2,expert=2,model=2" if "expert" in used else "data=2,seq=2,model=2"
        if "pipe" in used:
            mesh = "data=1,pipe=2,expert=2,model=2" if "expert" in used else "data=2,pipe=2,model=2"
        layout = ENTRIES[entry].layout(mesh, strategy)
        lines.append(f"{strategy}")
        for kind, variables in layout.variables().items():
            for path, variable in paths(variables).items():
                where = variable.sharding.spec
                spec = ", ".join("-" if part is None else str(part) for part in where)
                axes = ", ".join(paths(layout.model.axes[kind])[path])
                lines.append(f"  {path:<30} ({axes}) → ({spec})")
    golden(f"{entry}_specs.txt", "\n".join(lines) + "\n")


@pytest.mark.promise("layouts")
@pytest.mark.parametrize(("entry", "strategy", "mesh"), full_except(CASES, FAST_CASES))
def test_moments_are_sharded_like_their_parameters(entry, strategy, mesh):
    layout = ENTRIES[entry].layout(mesh, strategy)
    abstract = abstract_state(layout, OPTIMIZER)
    params, moments = paths(abstract["params"]), paths(abstract["opt_state"])
    where = {path: leaf.sharding.spec for path, leaf in params.items()}
    if "zero1" in strategy:  # their D is split, and the parameters' is whole
        for path, axes in paths(layout.model.axes["params"]).items():
            pairs = zip(axes, where[path], strict=True)
            where[path] = PartitionSpec(*("data" if a in GATHERED else part for a, part in pairs))
    found = 0
    for path, moment in moments.items():
        head, _, parameter = path.partition("mu/" if "/mu/" in path else "nu/")
        if parameter:
            assert moment.sharding.spec == where[parameter], path
            assert moment.shape == params[parameter].shape, path
            found += 1
        else:
            assert moment.sharding.is_fully_replicated, head
    assert found == 2 * len(params)


# ---- restored on another mesh ---------------------------------------------------------------------

# Every entry from each of its meshes to one other, a family between those of FEW_MESHES; parameters
# of one entry between all pairs.
MOST_MESHES = "moe"


def pairs(entry: str) -> dict[str, str]:
    meshes = ENTRIES[entry].meshes
    if entry in FAMILY_CASES:
        meshes = [mesh for mesh in meshes if mesh in FEW_MESHES]
    shift = 5 if len(meshes) > 5 else 2
    return dict(zip(meshes, meshes[shift:] + meshes[:shift], strict=True))


PAIRS = [(entry, *pair) for entry in ENTRIES for pair in pairs(entry).items()]
OTHER_PAIRS = [
    (MOST_MESHES, *pair) for pair in itertools.product(ENTRIES[MOST_MESHES].meshes, repeat=2)
]
FAST_PAIRS = [(entry, FAST, pairs(entry)[FAST]) for entry, *_ in FAST_CASES]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Returns a function of entry and mesh: (workdir with the state after five steps, the state)."""

    @functools.cache
    def save(entry: str, mesh: str):
        strategy = strategy_on(entry, mesh)
        training = run(entry, strategy, mesh, ENTRIES[entry].is_long(strategy, mesh))
        folder = tmp_path_factory.mktemp("saved")
        with saving(folder, entry) as saver:
            saver.save(5, training.state)
        return folder, jax.device_get(training.state)

    return save


@pytest.mark.promise("restore")
@pytest.mark.parametrize(("entry", "source", "target"), full_except(PAIRS, FAST_PAIRS))
def test_restore_is_bit_equal_from_any_mesh_to_any_other(entry, source, target, saved):
    workdir, want = saved(entry, source)
    layout = ENTRIES[entry].layout(target)
    abstract = abstract_state(layout, OPTIMIZER)
    state = checkpoint.find(workdir).read(abstract)
    assert set(state) == {*layout.model.shapes, "opt_state", "step", "rngs"}
    assert int(state["step"]) == 5
    assert set(paths(state)) == set(paths(want))
    for path, array in paths(state).items():
        assert array.sharding == paths(abstract)[path].sharding, path
        np.testing.assert_array_equal(array, paths(want)[path], err_msg=path)


@pytest.mark.release
@pytest.mark.promise("restore")
@pytest.mark.parametrize(
    ("entry", "source", "target"), [pair for pair in OTHER_PAIRS if pair not in PAIRS]
)
def test_parameters_are_restored_from_any_mesh_to_any_other(entry, source, target, saved):
    workdir, want = saved(entry, source)
    abstract = {"params": ENTRIES[entry].layout(target).variables()["params"]}
    found, wanted = paths(checkpoint.find(workdir).read(abstract)), paths(want)
    assert set(found) == {path for path in wanted if path.startswith("params/")}
    for path, array in found.items():
        assert array.sharding == paths(abstract)[path].sharding, path
        np.testing.assert_array_equal(array, wanted[path], err_msg=path)


@pytest.mark.promise("restore")
@pytest.mark.parametrize(
    "entry", full_except([e for e in ENTRIES if e not in FAMILY_CASES], list(ENTRIES)[:1])
)
def test_orbax_alone_reads_the_state(entry, saved, tmp_path):
    """Reads it in a process that imports nothing of this project."""
    workdir, want = saved(entry, FAST)
    code = """
import sys, numpy, orbax.checkpoint as ocp
state = ocp.StandardCheckpointer().restore(sys.argv[1])
assert not {"zoo", "recipes", "data"} & set(sys.modules)
flat = {}
def walk(tree, path):
    for name, value in tree.items():
        walk(value, (*path, name)) if isinstance(value, dict) else flat.update({"/".join((*path, name)): value})
walk(state, ())
numpy.savez(sys.argv[2], **flat)
"""
    folder, out = workdir / "checkpoints" / "5" / "state", tmp_path / "state.npz"
    subprocess.run([sys.executable, "-c", code, folder, out], cwd=tmp_path, check=True)
    read = np.load(out)
    assert set(read) == set(paths(want))
    for path, value in paths(want).items():
        np.testing.assert_array_equal(read[path], value, err_msg=path)
