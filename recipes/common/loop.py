"""The training loop that every recipe runs: feed, step, log, save, stop."""

import time
from collections.abc import Callable, Iterable

import grain
import jax
import numpy as np

from recipes.common import preemption
from recipes.common.cli import Run
from recipes.common.errors import Stopped
from recipes.common.metrics import Log, NonFiniteError
from recipes.common.sharding import Layout, Tree
from recipes.common.workdir import Workdir


def process_rows(layout: Layout, batch_size: int) -> grain.sharding.ShardOptions:
    """Which contiguous part of a batch this process's devices hold, and so which rows it reads.

    ShardByJaxProcess's answer where the processes split the batch; everything where the mesh splits
    something else between them.
    """
    slices = layout.batch.addressable_devices_indices_map((batch_size,)).values()
    first = min(part[0].start or 0 for part in slices)
    rows = max(batch_size if part[0].stop is None else part[0].stop for part in slices) - first
    return grain.sharding.ShardOptions(first // rows, batch_size // rows)


def to_devices(rows: Tree, layout: Layout, batch_size: int) -> Tree:
    """A process's rows of a batch (a tree of numpy arrays) → global arrays."""

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(layout.batch, x, (batch_size, *x.shape[1:]))

    return jax.tree.map(put, rows)


def fit(
    step: Callable[[Tree, Tree], tuple[Tree, dict[str, jax.Array]]],
    state: Tree,
    batches: grain.IterDataset,
    layout: Layout,
    run: Run,
    log: Log,
    work: Workdir,
) -> Tree:
    """Takes the steps that are left until run.steps; returns the state after them, which is saved.

    Args:
      step: compiled, (state, batch) → (state, metrics); donates the state.
      batches: this process's rows of the batches from the state's step on.
      work: where the state is saved, every run.checkpoint_every steps and after the last.

    Raises Stopped, with nothing in the air: a signal asked for it, a number is not finite, or the
    last save failed.
    """
    first = int(state["step"])
    if first >= run.steps:
        return state
    feed = iter(batches)
    batch = to_devices(next(feed), layout, run.batch_size)
    try:
        with preemption.training():
            for done in range(first + 1, run.steps + 1):
                state, metrics = step(state, batch)
                start = time.perf_counter()
                rows = next(feed)
                input_wait = time.perf_counter() - start
                batch = to_devices(rows, layout, run.batch_size)  # while the step runs
                # Waits for the step before this one: the device stays busy, and no more than two
                # programs are in flight. More can deadlock simulated devices, which share one small
                # thread pool.
                log.step(done, metrics, input_wait)
                asked = preemption.requested(done)
                if asked or done % run.checkpoint_every == 0 or done == run.steps:
                    log.settle()  # a state whose metrics are not finite is never saved
                    work.save(done, state)
                if asked and done < run.steps:
                    break
            work.wait()
    except NonFiniteError as error:
        work.wait()
        good = work.last_good()
        raise Stopped(
            f"{error}; "
            + (f"the last good checkpoint is {good}" if good else "nothing is saved yet")
        ) from error
    finally:
        log.pause()
    if done < run.steps:
        raise Stopped(f"Stopped by {asked} after step {done}, saved in {work.last_good()}; "
                      "the same command goes on from there.", code=0)  # fmt: skip
    return state


def evaluate(
    sums: Callable[[Tree, Tree], Tree],
    params: Tree,
    batches: Iterable[Tree],
    layout: Layout,
    batch_size: int,
) -> Tree:
    """`sums(params, batch)` added up over batches, in float64."""
    totals, compiled = None, None
    for rows in batches:
        batch = to_devices(rows, layout, batch_size)
        compiled = compiled or layout.compile(sums, params, batch, out_shardings=layout.replicated)
        values = jax.tree.map(np.float64, jax.device_get(compiled(params, batch)))
        totals = values if totals is None else jax.tree.map(np.add, totals, values)
    return totals
