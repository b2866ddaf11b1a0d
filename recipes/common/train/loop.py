"""A training run: `fit` compiles, begins, steps, evaluates and saves; `finish` shows its results."""

import contextlib
import importlib.util
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from data.batches import Dataset, train_batches
from data.tokenizer import BYTES, Tokenizer
from recipes import STARTED
from recipes.common import checkpoint
from recipes.common.checkpoint import RunFolder, Saver
from recipes.common.report import flops, picture, report
from recipes.common.runtime import (
    Run,
    Stopped,
    UserError,
    agreement,
    describe,
    preemption,
    print0,
    processes,
    warn,
)
from recipes.common.runtime.flags import DEFAULTS
from recipes.common.sharding import Layout, Tree, elsewhere
from recipes.common.storage import folders
from recipes.common.train.beside import beside
from recipes.common.train.evaluation import Evaluation, Extra
from recipes.common.train.feed import device_batches
from recipes.common.train.frozen import Frozen
from recipes.common.train.metrics import Log, NonFiniteError
from recipes.common.train.profiled_steps import Profile
from recipes.common.train.resume import first_state, messages
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
    frozen: Frozen | None = None,
    online: "Online | None" = None,
    prepare: Callable[[], object] | None = None,
) -> tuple[Tree, Log, Tree]:
    """Trains until step run.steps, saves, and evaluates the last state.

    Args:
      tokenizer: saved with the model.
      extra: sums that evaluation adds to the loss's own metrics.
      example_flops: FLOPs of training on one example; None: as if each weight were multiplied once.
      frozen: a second model for the loss, "frozen" in the state.
      online: makes the batches from the state, in place of `data`, and evaluates it.
      prepare: begins what the end needs, such as compiling a sample's programs; called once the step
        is compiled.

    Returns (state, log, its Evaluation's totals). Raises UserError before anything is written, and
    Stopped as `take_steps` does.
    """
    began = time.perf_counter()
    # ---- Check and compile; report where everything lies and what a step sends --------------------
    layout, facts = step.layout, {"seed": run.seed, "batch_size": run.batch_size, **data.facts}
    metadata = checkpoint_metadata(folder, layout)
    profile = check(folder, layout, facts, run)
    abstract = step.abstract_state()
    second = {"frozen": frozen.abstract()} if frozen else {}
    print0(report.headline(layout), report.table(layout, abstract, second.get("frozen")))
    make_state = first_state(folder, step, run.seed, abstract)
    compiled = compile_step(step, abstract | second, data) if run.steps > folder.step else None
    evaluation = online or Evaluation(layout, data, extra)
    if isinstance(evaluation, Evaluation):
        evaluation.begin(abstract | second)
    if prepare:
        prepare()
    if compiled:
        beside(layout.mesh, picture.load_matplotlib)  # for `finish`
    compiled_at = time.perf_counter()

    # ---- The state: resumed, from given parameters, or new; never two of them in memory -----------
    lines = messages(folder, run, step)
    state = make_state()
    if frozen:
        state |= {"frozen": frozen.read()}
    print0(*lines)
    ready_at = time.perf_counter()

    # ---- The loop, and an evaluation at its end ---------------------------------------------------
    saver = None
    if folder.in_use:
        saver = Saver(folder, run.keep_checkpoints, metadata, facts, tokenizer)
    peak = flops.peak(layout, (example_flops or flops.dense(layout)) / data.units)
    path = folder.path / "metrics.jsonl" if folder.in_use else None
    per_step = run.batch_size * data.units
    log = Log(path, folder.step, run, data.unit, per_step, peak, folder.locks)
    if saver:
        saver.before_commit = log.flush  # a finished checkpoint has the lines of its steps

    def evaluate(done: int, state: Tree) -> Tree:
        start, totals = time.perf_counter(), evaluation(state)
        metrics = evaluation.metrics(totals)
        log.held_out(done, metrics, time.perf_counter() - start)
        if saver and run.keep_best and done:
            saver.keep_best(done, state, metrics)
        return totals

    if compiled and saver:
        due = run.eval_every and folder.step % run.eval_every == 0
        evaluated_at = time.perf_counter()
        if folder.source or (folder.step and due):  # a given model, or perhaps killed before this
            evaluate(folder.step, state)
        log.before_first_step = {
            "start and data": began - STARTED,
            "compiling": compiled_at - began,
            "parameters": ready_at - compiled_at,
            "evaluation": time.perf_counter() - evaluated_at,
        }
        with profile:
            steps = online.for_any_rows(compiled) if online else compiled
            traced = profile.around(steps, folder.step)
            if online:
                traced, feed = online.around(traced), online.feed(folder.step)
            else:
                batches = train_batches(
                    data, run.batch_size, run.seed, folder.step, layout.process_rows
                )
                feed = device_batches(batches, layout)
            state = take_steps(traced, state, feed, run, log, saver, evaluate)
    totals = evaluate(int(state["step"]), state)
    if saver:
        saver.close()
    return state, log, totals


class Online(Protocol):
    """Batches that the model itself makes: see recipes/common/reinforcement/online.py."""

    def for_any_rows(self, step: Callable) -> Callable: ...
    def feed(self, first: int) -> Iterator[tuple[Any, float]]: ...
    def around(self, step: Callable) -> Callable: ...
    def __call__(self, state: Tree) -> Tree: ...
    def metrics(self, totals: Tree) -> dict[str, float]: ...


def compile_step(step: TrainStep, abstract: Tree, data: Dataset):
    """Compiles the train step, and prints what it sends and needs."""
    print0("Compiling the train step.")  # a minute or more for a large model
    compiled = step.lower(abstract, data.filler).compile()
    print0(report.step(compiled))
    return compiled


def check(folder: RunFolder, layout: Layout, facts: Tree, run: Run) -> Profile:
    """Raises UserError if flags and data do not fit the run's folder or each other.

    Args:
      facts: what the batches depend on.
    """
    agreement.check_data(facts)
    before = folder.newest.metadata["data"] if folder.newest else facts
    if before.get("frozen") != facts.get("frozen"):
        raise UserError(
            "the frozen model, which the run began with as its reference or teacher, has changed; use a "
            f"different --workdir (this one is {folder.path})"
        )
    if before.get("template") != facts.get("template"):
        raise UserError(
            "--tokenizer must have the chat template that the original run was trained with; leave it "
            f"out, or use a different --workdir (this one is {folder.path})"
        )
    if before != facts:
        raise UserError(
            f"--dataset={facts['dataset']} must match the original run, and its content has changed "
            f"(different fingerprint); use a different --workdir (this one is {folder.path})"
        )
    if run.keep_best and not run.eval_every:
        raise UserError("--keep_best needs --eval_every; add it, for example --eval_every=100")
    if run.tensorboard and not folders.at(folder.path).appends:
        raise UserError(
            f"--tensorboard appends to files, and --workdir={folder.path} is in a bucket, where "
            "nothing can be appended; leave it out: metrics.jsonl has the same metrics"
        )
    for flag, library in {"tensorboard": "tensorboardX", "wandb": "wandb"}.items():
        if getattr(run, flag) and importlib.util.find_spec(library) is None:
            raise UserError(f"--{flag} needs {library}; run pip install -e '.[{flag}]'")
    if folder.start:
        checkpoint.check_variables(folder.start, layout)
        if checkpoint.leaves_out_head(folder.start, layout):
            print0(
                "Left out mtp, the checkpoint's head for the second-next token; --mtp_depth=1 keeps it."
            )
    return Profile(run, folder)


def checkpoint_metadata(folder: RunFolder, layout: Layout) -> dict[str, Any]:
    """The metadata of each checkpoint of the run, except for its step and data."""
    metadata = checkpoint.metadata(folder.entry, layout, folder.flags)
    metadata |= {"base": folder.base} if folder.base else {}
    metadata |= {"recipe": folder.recipe} if folder.recipe else {}
    metadata["not_default"] = sorted(
        name for name, value in folder.flags.items() if value != DEFAULTS.get(name)
    )
    if folder.start:
        facts = folder.start.metadata
        metadata |= {
            key: facts[key] for key in ("imported", "architecture", "sentences") if key in facts
        }
    if folder.source and "seq_len" in folder.flags:  # fine-tuning on short texts cuts no context
        metadata["context"] = max(checkpoint.context(folder.source), folder.flags["seq_len"])
        if stated := metadata.get("sentences"):
            longest = max(stated["max_seq_length"], folder.flags["seq_len"])
            metadata["sentences"] = stated | {"max_seq_length": longest}
    elif folder.newest and "context" in folder.newest.metadata:
        metadata["context"] = folder.newest.metadata["context"]
    return metadata


class Saves(Protocol):
    """The part of Saver that the loop uses."""

    def save(self, step: int, state: Tree) -> None: ...
    def wait(self) -> None: ...
    def last_good(self) -> pathlib.Path | None: ...


def take_steps(
    step: Callable[[Tree, Tree], tuple[Tree, dict[str, jax.Array]]],
    state: Tree,
    feed: Iterator[tuple[Tree, float]],
    run: Run,
    log: Log,
    saver: Saves,
    evaluate: Callable[[int, Tree], object] | None = None,
) -> Tree:
    """Trains until step run.steps. Returns the last state, which is saved.

    Args:
      step: compiled, (state, batch) → (state, metrics); donates the state.
      feed: device_batches, from the state's step on.
      saver: saves the state every run.checkpoint_every steps and after the last.
      evaluate: called with (step, state) every run.eval_every steps, except after the last.

    Raises Stopped, with no save in flight: a signal asked for it, a number is not finite, or the last
    save failed.
    """
    first = done = int(state["step"])
    asked, (batch, _) = "", next(feed)
    try:
        with preemption.training():
            for done in range(first + 1, run.steps + 1):
                state, metrics = step(state, batch)
                batch, input_wait = next(feed)  # while the step runs
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
                if evaluate and run.eval_every and done % run.eval_every == 0 and done < run.steps:
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
    """Closes the run's files; prints where its results are and how to restore it elsewhere."""
    log.close()
    folder.close()
    with best_effort(folder):
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
            print0(f"Its layout in pictures: python -m recipes.explore --from={folder.shown}")
    print0(log.times())


@contextlib.contextmanager
def best_effort(folder: RunFolder) -> Iterator[None]:
    """Turns I/O errors into a warning. For showing results, when the run itself is saved."""
    try:
        yield
    except folders.errors() as error:
        if processes.is_first():
            warn(
                f"{folder.shown} can no longer be read or written ({folders.reason(error)}); the last "
                "checkpoint was saved before"
            )


def another_mesh(layout: Layout) -> str | None:
    """Another mesh that the model fits, with as many devices, as --mesh takes it."""
    size = 8 if layout.mesh.size == 1 else layout.mesh.size
    for axes in ({"data": 1, "model": size}, {"data": size}, {"data": size // 2, "model": 2}):
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        if axes != dict(layout.mesh.shape) and elsewhere(layout, "", mesh):
            return describe(axes)
    return None
