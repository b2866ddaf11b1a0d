"""The proof: every entry × table × mesh computes the same thing, and lies where the table says."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.common import checkpoint, loop, sharding
from recipes.common.cli import Run
from recipes.common.sharding import paths
from recipes.common.workdir import Workdir
from tests.entries import BATCH, CASES, ENTRIES, MESHES, OPTIMIZER, compiled_step

# Sums over a mesh are taken in another order: float32 then differs in the last bits. Measured
# differences stand in golden/mesh_differences.json; these bounds are some ten times as wide.
LOSS_TOLERANCE = 2e-6  # relative, at each of 5 steps
GRADIENT_TOLERANCE = 2e-5  # |difference| / |gradient|, of each array at each of 5 steps


def run(entry_name: str, strategy: str, mesh: str):
    """(initial state, losses [5], gradients of 5 steps, state after them), on the host."""
    entry = ENTRIES[entry_name]
    layout = entry.layout(mesh, strategy)
    abstract = sharding.abstract_state(layout, OPTIMIZER)

    def put(batch):
        return loop.to_devices(batch, layout, BATCH)

    where = sharding.shardings(abstract)
    step = compiled_step(entry_name, strategy, mesh)
    state = sharding.initialize(layout, OPTIMIZER, 0, abstract)
    for array, promised in zip(jax.tree.leaves(state), jax.tree.leaves(where), strict=True):
        assert array.sharding.is_equivalent_to(promised, array.ndim)
    first, losses, grads = jax.device_get(state), [], []
    for batch in entry.batches:
        state, mean, grad = step(state, put(batch))
        losses.append(float(mean))
        grads.append(jax.device_get(grad))
    return first, losses, grads, state


@functools.cache
def reference(entry_name: str):
    return run(entry_name, "dp", "1x1")


DIFFERENCES: dict[str, dict[str, float]] = {}


def test_the_tables_fit_the_meshes_that_they_should(golden):
    golden("fits.txt", "".join(f"{' '.join(case)}\n" for case in CASES))


@pytest.mark.parametrize("entry", ENTRIES)
def test_one_device_is_the_module_itself(entry):
    """The 1x1 run, which all others are compared with, is the plain module with no mesh."""
    first, losses, grads, _ = reference(entry)
    graph = nnx.split(ENTRIES[entry].build())[0]
    # Eagerly, or with LLVM's vectors (see sharding.initialize), the last bit may differ.
    plain = jax.jit(
        lambda: nnx.state(ENTRIES[entry].build()),
        compiler_options={"xla_backend_optimization_level": 1},
    )
    state = plain()
    for path, value in paths(nnx.to_pure_dict(state)).items():
        np.testing.assert_array_equal(value, paths(first["params"])[path], err_msg=path)

    def mean(state, batch):
        total, count = ENTRIES[entry].loss(nnx.merge(graph, state), batch)
        return total / count

    loss, grad = jax.value_and_grad(mean)(
        state, jax.tree.map(jnp.asarray, ENTRIES[entry].batches[0])
    )
    np.testing.assert_allclose(losses[0], loss, rtol=LOSS_TOLERANCE)
    for path, value in paths(nnx.to_pure_dict(grad)).items():
        assert difference(paths(grads[0])[path], value) < GRADIENT_TOLERANCE, path


@pytest.mark.parametrize(("entry", "strategy", "mesh"), CASES)
def test_same_start_losses_and_gradients(entry, strategy, mesh):
    first, losses, grads, _ = run(entry, strategy, mesh)
    want_first, want_losses, want_grads, _ = reference(entry)
    for path, value in paths(first).items():
        np.testing.assert_array_equal(value, paths(want_first)[path], err_msg=path)
    loss = max(abs(a - b) / b for a, b in zip(losses, want_losses, strict=True))
    grad = max(
        difference(value, paths(want)[path])
        for got, want in zip(grads, want_grads, strict=True)
        for path, value in paths(got).items()
    )
    DIFFERENCES[f"{entry} {strategy} {mesh}"] = {"loss": loss, "gradient": grad}
    assert loss < LOSS_TOLERANCE
    assert grad < GRADIENT_TOLERANCE


def difference(a, b) -> float:
    return float(np.linalg.norm(np.ravel(a - b)) / max(np.linalg.norm(np.ravel(b)), 1e-30))


def test_differences_on_record(request):
    """golden/mesh_differences.json holds what was measured, for every case, within the bounds."""
    path = request.path.parent / "golden" / "mesh_differences.json"
    if len(DIFFERENCES) == len(CASES) and request.config.getoption("--update-golden"):
        path.write_text(json.dumps(DIFFERENCES, indent=1) + "\n")
    record = json.loads(path.read_text())
    assert list(record) == [" ".join(case) for case in CASES], "run with --update-golden"
    assert max(case["loss"] for case in record.values()) < LOSS_TOLERANCE
    assert max(case["gradient"] for case in record.values()) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("entry", ENTRIES)
def test_parameters_lie_as_reviewed(entry, golden):
    """A PartitionSpec for each table and parameter: swapped axes on a square weight show here."""
    lines = []
    for strategy, table in ENTRIES[entry].rules.items():
        mesh = "2x2x2" if "fsdp" in str(table.values()) else "4x2"
        layout = ENTRIES[entry].layout(mesh, strategy)
        lines.append(f"{strategy}")
        for path, where in paths(layout.params()).items():
            spec = ", ".join("-" if part is None else str(part) for part in where.spec)
            axes = ", ".join(paths(layout.plan.axes)[path])
            lines.append(f"  {path:<30} ({axes}) → ({spec})")
    golden(f"{entry}_specs.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize(("entry", "strategy", "mesh"), CASES)
def test_moments_lie_as_their_parameters(entry, strategy, mesh):
    layout = ENTRIES[entry].layout(mesh, strategy)
    abstract = sharding.abstract_state(layout, OPTIMIZER)
    params, moments = paths(abstract["params"]), paths(abstract["opt_state"])
    found = 0
    for path, moment in moments.items():
        head, _, parameter = path.partition("mu/" if "/mu/" in path else "nu/")
        if parameter:
            assert moment.sharding == params[parameter].sharding, path
            assert moment.shape == params[parameter].shape, path
            found += 1
        else:
            assert moment.sharding.is_fully_replicated, head
    assert found == 2 * len(params)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Mesh → (workdir of a run that trained 5 steps there, its state on the host)."""

    @functools.cache
    def save(entry: str, mesh: str):
        strategy = default_strategy(entry, mesh)
        *_, state = run(entry, strategy, mesh)
        work = Workdir(Run(workdir=str(tmp_path_factory.mktemp("saved"))), entry)
        work.check_data({})
        work.begin(1, {"entry": entry, "config": {}, "flags": {}, "versions": {}})
        work.save(5, state)
        work.close()
        return work.path, jax.device_get(state)

    return save


def default_strategy(entry: str, mesh: str) -> str:
    return next(s for e, s, m in reversed(CASES) if (e, m) == (entry, mesh))


@pytest.mark.parametrize("target", MESHES)
@pytest.mark.parametrize("source", MESHES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_restore_is_bit_equal_from_any_mesh_to_any_other(entry, source, target, saved):
    workdir, want = saved(entry, source)
    layout = ENTRIES[entry].layout(target, default_strategy(entry, target))
    abstract = sharding.abstract_state(layout, OPTIMIZER)
    state = checkpoint.restore_tree(checkpoint.find(workdir), abstract)
    assert set(state) == {"params", "opt_state", "step", "rngs"}
    assert int(state["step"]) == 5
    for path, array in paths(state).items():
        assert array.sharding == paths(abstract)[path].sharding, path
        np.testing.assert_array_equal(array, paths(want)[path], err_msg=path)


def test_orbax_alone_reads_the_state(saved, tmp_path):
    """In a process that can import nothing of ours."""
    workdir, want = saved("transformer", "4x2")
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
