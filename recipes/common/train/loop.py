"""The training loop that every recipe runs: compile, feed, step, log, save, stop; and evaluation."""

import pathlib
import time
from collections.abc import Callable
from typing import Protocol

import grain
import jax
import numpy as np
from flax import nnx

from data.batches import Dataset, held_out_batches, train_batches
from data.tokenizer import BYTES, Tokenizer
from recipes.common import checkpoint
from recipes.common.analysis import report
from recipes.common.checkpoint import RunFolder, Saver
from recipes.common.runtime import Run, Stopped, UserError, describe, preemption, print0
from recipes.common.sharding import Layout, Tree, elsewhere
from recipes.common.train.metrics import Log, NonFiniteError
from recipes.common.train.resume import first_state, origin
from recipes.common.train.step import TrainStep


def fit(
    run: Run, folder: RunFolder, step: TrainStep, data: Dataset, tokenizer: Tokenizer = BYTES
) -> tuple[Tree, Log]:
    """Takes the steps that are left until run.steps, and saves what they lead to.

    `tokenizer` is saved with the model.

    Returns the state after them and the log, to which evaluation adds its figures.

    Raises UserError before anything is written, Stopped as `take_steps` does.
    """
    # ---- Checked, and compiled: where everything lies and what a step sends -----------------------
    layout = step.layout
    facts = {"seed": run.seed, "batch_size": run.batch_size, **data.facts}
    if folder.newest and folder.newest.metadata["data"] != facts:
        raise UserError(
            f"--dataset={facts['dataset']} must match the original run, and its content has changed "
            f"(other fingerprint); use a different --workdir (this one is {folder.path})"
        )
    if folder.start:
        checkpoint.check_variables(folder.start, layout)
    abstract, compiled = step.abstract_state(), None
    print0(report.headline(layout), report.table(layout, abstract))
    if run.steps > folder.step:
        compiled = step.lower(abstract, data.filler).compile()
        print0(report.step(compiled))

    # ---- The state: resumed, on given parameters, or new; never two of them in memory -------------
    begins = origin(folder, run, step)
    state = first_state(folder, step, run.seed, abstract)
    print0(*begins)

    # ---- The loop ---------------------------------------------------------------------------------
    saver = None
    if folder.in_use:
        metadata = checkpoint.metadata(folder.entry, layout, folder.flags)
        saver = Saver(folder, run.keep_checkpoints, metadata, facts, tokenizer)
    path = folder.path / "metrics.jsonl" if folder.in_use else None
    log = Log(path, folder.step, run, data.unit, run.batch_size * data.units)
    if compiled:
        rows = process_rows(layout)
        batches = train_batches(data, run.batch_size, run.seed, folder.step, rows)
        state = take_steps(compiled, state, batches, layout, run, log, saver)
    if saver:
        saver.close()
    return state, log


class Saves(Protocol):
    """What the loop wants of a Saver."""

    def save(self, step: int, state: Tree) -> None: ...
    def wait(self) -> None: ...
    def last_good(self) -> pathlib.Path | None: ...


def take_steps(
    step: Callable[[Tree, Tree], tuple[Tree, dict[str, jax.Array]]],
    state: Tree,
    batches: grain.IterDataset,
    layout: Layout,
    run: Run,
    log: Log,
    saver: Saves,
) -> Tree:
    """The state after step run.steps, which is saved.

    Args:
      step: compiled, (state, batch) → (state, metrics); donates the state.
      batches: this process's rows of the batches from the state's step on.
      saver: saves the state every run.checkpoint_every steps and after the last.

    Raises Stopped, with no save in flight: a signal asked for it, a number is not finite, or the last
    save failed.
    """
    first = int(state["step"])
    feed = iter(batches)
    batch = to_devices(next(feed), layout)
    try:
        with preemption.training():
            for done in range(first + 1, run.steps + 1):
                state, metrics = step(state, batch)
                start = time.perf_counter()
                rows = next(feed)
                input_wait = time.perf_counter() - start
                batch = to_devices(rows, layout)  # while the step runs
                # Waits for the step before this one: the device stays busy, and no more than two
                # programs are in flight. More can deadlock simulated devices, which share one small
                # thread pool.
                log.step(done, metrics, input_wait)
                asked = preemption.requested(done)
                if asked or done % run.checkpoint_every == 0 or done == run.steps:
                    log.settle()  # a state whose metrics are not finite is never saved
                    saver.save(done, state)
                if asked and done < run.steps:
                    break
            saver.wait()
    except NonFiniteError as error:
        saver.wait()
        good = saver.last_good()
        raise Stopped(
            f"{error}; "
            + (f"the last good checkpoint is {good}" if good else "nothing is saved yet")
        ) from error
    finally:
        log.pause()
    if done < run.steps:
        raise Stopped(
            f"Stopped by {asked} after step {done}, saved in {saver.last_good()}; the same command "
            "resumes from there.", code=0,
        )  # fmt: skip
    return state


def process_rows(layout: Layout) -> grain.sharding.ShardOptions:
    """Which contiguous part of a batch this process's devices hold, and so which rows it reads.

    ShardByJaxProcess's answer where the processes split the batch; everything where the mesh splits
    something else between them.
    """
    size = layout.batch_size
    slices = layout.batch.addressable_devices_indices_map((size,)).values()
    first = min(part[0].start or 0 for part in slices)
    rows = max(size if part[0].stop is None else part[0].stop for part in slices) - first
    return grain.sharding.ShardOptions(first // rows, size // rows)


def to_devices(rows: Tree, layout: Layout) -> Tree:
    """A process's rows of a batch (a tree of numpy arrays) → global arrays."""

    def put(x: np.ndarray) -> jax.Array:
        whole = (layout.batch_size, *x.shape[1:])
        return jax.make_array_from_process_local_data(layout.batch, x, whole)

    return jax.tree.map(put, rows)


def evaluate(
    layout: Layout,
    state: Tree,
    data: Dataset,
    extra: Callable[[nnx.Module, Tree], Tree] | None = None,
) -> Tree:
    """The figures of the model's loss over all held-out examples: name → (sum, count), in float64.

    Args:
      state: a training state, or the model's variables alone.
      extra: (model, batch) → a dict of further sums.
    """

    def sums(variables: Tree, batch: Tree) -> Tree:
        model = layout.model.merge(variables)
        _, _, aux = model.loss(**batch)
        return aux | (extra(model, batch) if extra else {})

    variables = {kind: state[kind] for kind in layout.model.shapes}
    totals, compiled = None, None
    for rows in held_out_batches(data, layout.batch_size, process_rows(layout)):
        batch = to_devices(rows, layout)
        if compiled is None:
            compiled = layout.compile(sums, variables, batch, out_shardings=layout.replicated)
        values = jax.tree.map(np.float64, jax.device_get(compiled(variables, batch)))
        totals = values if totals is None else jax.tree.map(np.add, totals, values)
    return totals


def finish(folder: RunFolder, layout: Layout, log: Log) -> None:
    """Closes the run's files; prints where its checkpoint is, and a command to restore it elsewhere."""
    log.close()
    folder.close()
    newest = folder.last_good() if folder.in_use else None
    if newest:  # otherwise nothing was trained
        print0(f"Checkpoint: {folder.shown / 'checkpoints' / newest.name}")
        if other := another_mesh(layout):
            command = f"python -m recipes.{folder.entry} --mesh={other}"
            print0(f"On another mesh: {command} --restore_from={folder.shown} --steps=0")
    print0(log.times())


def another_mesh(layout: Layout) -> str | None:
    """As --mesh takes it: a mesh of as many devices that the same model fits, too."""
    size = 8 if layout.mesh.size == 1 else layout.mesh.size
    for axes in ({"data": 1, "model": size}, {"data": size}, {"data": size // 2, "model": 2}):
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        if axes != dict(layout.mesh.shape) and elsewhere(layout, "", mesh):
            return describe(axes)
    return None
