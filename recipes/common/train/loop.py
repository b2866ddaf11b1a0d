"""The training loop that every recipe runs: compile, feed, step, log, save, evaluate, stop."""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import grain
import jax

from data.batches import Dataset, train_batches
from data.tokenizer import BYTES, Tokenizer
from recipes.common import checkpoint
from recipes.common.analysis import flops, picture, report
from recipes.common.checkpoint import RunFolder, Saver
from recipes.common.runtime import (
    Run,
    Stopped,
    UserError,
    agreement,
    describe,
    folders,
    preemption,
    print0,
    processes,
)
from recipes.common.sharding import Layout, Tree, elsewhere
from recipes.common.train import tensorboard
from recipes.common.train.evaluation import Evaluation, Extra
from recipes.common.train.feed import process_rows, to_devices
from recipes.common.train.metrics import Log, NonFiniteError
from recipes.common.train.profile import Profile
from recipes.common.train.resume import first_state, origin
from recipes.common.train.step import TrainStep


def fit(
    run: Run,
    folder: RunFolder,
    step: TrainStep,
    data: Dataset,
    tokenizer: Tokenizer = BYTES,
    *,
    extra: Extra | None = None,
    example_flops: float | None = None,
) -> tuple[Tree, Log, Tree]:
    """Takes the steps that are left until run.steps, saves what they lead to, and evaluates it.

    Args:
      tokenizer: is saved with the model.
      extra: what evaluation sums besides the loss's own figures.
      example_flops: of training on one example; None: as if each weight were multiplied once.

    Returns the state, the log, and the state's Evaluation. Raises UserError before anything is
    written, Stopped as `take_steps` does.
    """
    # ---- Checked, and compiled: where everything lies and what a step sends -----------------------
    layout, facts = step.layout, {"seed": run.seed, "batch_size": run.batch_size, **data.facts}
    profile = check(folder, layout, facts, run)
    abstract, compiled = step.abstract_state(), None
    print0(report.headline(layout), report.table(layout, abstract))
    if run.steps > folder.step:
        compiled = step.lower(abstract, data.filler).compile()
        print0(report.step(compiled))

    # ---- The state: resumed, on given parameters, or new; never two of them in memory -------------
    state, begins = first_state(folder, step, run.seed, abstract), origin(folder, run, step)
    print0(*begins)

    # ---- The loop, and an evaluation at its end ---------------------------------------------------
    saver = new_saver(folder, layout, run, facts, tokenizer)
    evaluation = Evaluation(layout, data, extra)
    peak = flops.peak(layout, (example_flops or flops.dense(layout)) / data.units)
    path = folder.path / "metrics.jsonl" if folder.in_use else None
    per_step = run.batch_size * data.units
    log = Log(path, folder.step, run, data.unit, per_step, peak, folder.locks)
    if saver:
        saver.before_commit = log.flush  # a finished checkpoint has the lines of its steps

    def evaluate(done: int, state: Tree) -> Tree:
        start, totals = time.perf_counter(), evaluation(state)
        figures = evaluation.figures(totals)
        log.held_out(done, figures, time.perf_counter() - start)
        if saver and run.keep_best and done:
            saver.keep_best(done, state, figures)
        return totals

    if compiled:
        stopped = folder.step and run.eval_every and folder.step % run.eval_every == 0
        if (
            stopped or folder.source
        ):  # before its evaluation, perhaps; or it begins on a given model
            evaluate(folder.step, state)
        batches = train_batches(data, run.batch_size, run.seed, folder.step, process_rows(layout))
        with profile:
            compiled = profile.around(compiled, folder.step)
            state = take_steps(compiled, state, batches, layout, run, log, saver, evaluate)
    totals = evaluate(int(state["step"]), state)
    if saver:
        saver.close()
    return state, log, totals


def check(folder: RunFolder, layout: Layout, facts: Tree, run: Run) -> Profile:
    """Raises UserError if what the run begins with does not fit, or it can't be watched as asked."""
    agreement.check_data(facts)
    before = folder.newest.metadata["data"] if folder.newest else facts
    if before.get("template") != facts.get("template"):
        raise UserError(
            "--tokenizer has another chat template than the original run was trained with; leave it "
            f"out, or use a different --workdir (this one is {folder.path})"
        )
    if before != facts:
        raise UserError(
            f"--dataset={facts['dataset']} must match the original run, and its content has changed "
            f"(other fingerprint); use a different --workdir (this one is {folder.path})"
        )
    if run.keep_best and not run.eval_every:
        raise UserError("--keep_best needs --eval_every; add it, for example --eval_every=100")
    if run.tensorboard:
        tensorboard.check(folder.path)
    if folder.start:
        checkpoint.check_variables(folder.start, layout)
    return Profile(run, folder)


def new_saver(
    folder: RunFolder, layout: Layout, run: Run, facts: Tree, tokenizer: Tokenizer
) -> Saver | None:
    """None for a run that writes nothing."""
    if not folder.in_use:
        return None
    metadata = checkpoint.metadata(folder.entry, layout, folder.flags)
    metadata |= {"base": folder.base} if folder.base else {}
    if folder.start and "imported" in folder.start.metadata:
        metadata["imported"] = folder.start.metadata["imported"]
    if folder.source and "seq_len" in folder.flags:  # fine-tuning on short texts cuts no context
        most = max(checkpoint.context(folder.source), folder.flags["seq_len"])
        metadata["context"] = most
    elif folder.newest and "context" in folder.newest.metadata:
        metadata["context"] = folder.newest.metadata["context"]
    return Saver(folder, run.keep_checkpoints, metadata, facts, tokenizer)


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
    evaluate: Callable[[int, Tree], object] | None = None,
) -> Tree:
    """The state after step run.steps, which is saved.

    Args:
      step: compiled, (state, batch) → (state, metrics); donates the state.
      batches: this process's rows of the batches from the state's step on.
      saver: saves the state every run.checkpoint_every steps and after the last.
      evaluate: called with (step, state) every run.eval_every steps, but for the last.

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
                if run.eval_every and done % run.eval_every == 0 and done < run.steps:
                    log.settle()
                    evaluate(done, state)
            saver.wait()
    except NonFiniteError as error:
        saver.wait()
        good = saver.last_good()
        saved = f"the last good checkpoint is {good}" if good else "nothing is saved yet"
        raise Stopped(f"{error}; {saved}") from error
    finally:
        log.pause()
    if done < run.steps:
        raise Stopped(
            f"Stopped by {asked} after step {done}, saved in {saver.last_good()}; the same command "
            "resumes from there.", code=0,
        )  # fmt: skip
    return state


def finish(folder: RunFolder, layout: Layout, log: Log) -> None:
    """Closes the run's files; says where its results are, and how to restore it elsewhere."""
    log.close()
    folder.close()
    with results(folder):
        newest = folder.last_good() if folder.in_use else None
        if newest:  # otherwise nothing was trained
            picture.loss(folder.path / "pictures" / "loss.png", folder.path / "metrics.jsonl")
            print0(f"Loss curve: {folder.shown / 'pictures' / 'loss.png'}")
            if best := folder.best():
                print0(f"Best checkpoint: {folder.shown / 'best' / best.name}")
            print0(f"Checkpoint: {folder.shown / 'checkpoints' / newest.name}")
            if other := another_mesh(layout):
                command = f"python -m recipes.{folder.entry} --mesh={other}"
                print0(f"On another mesh: {command} --restore_from={folder.shown} --steps=0")
    print0(log.times())


@contextlib.contextmanager
def results(folder: RunFolder) -> Iterator[None]:
    """In here, all is saved, and pictures are drawn: a disk or bucket that fails now is a warning."""
    try:
        yield
    except folders.errors() as error:
        if processes.is_first():
            print(f"warning: {folder.shown} can't be read or written any more ({folders.reason(error)}); "
                  "the last checkpoint was saved before", file=sys.stderr, flush=True)  # fmt: skip


def another_mesh(layout: Layout) -> str | None:
    """As --mesh takes it: a mesh of as many devices that the same model fits, too."""
    size = 8 if layout.mesh.size == 1 else layout.mesh.size
    for axes in ({"data": 1, "model": size}, {"data": size}, {"data": size // 2, "model": 2}):
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        if axes != dict(layout.mesh.shape) and elsewhere(layout, "", mesh):
            return describe(axes)
    return None
