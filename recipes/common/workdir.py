"""A run's folder: what is in it, whether this run may go on there, and what it saves."""

import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import shutil
import sys
import threading
import time
import warnings
import weakref
from typing import IO, Any

import jax
import optax
import orbax.checkpoint as ocp

from recipes.common import checkpoint, folders, processes, sharding
from recipes.common.checkpoint import Source
from recipes.common.cli import Run
from recipes.common.errors import Stopped, UserError
from recipes.common.mesh import describe
from recipes.common.sharding import Layout, Tree

CONFIG = "config.json"
TEMPORARY = ".orbax-checkpoint-tmp"  # how Orbax calls a checkpoint's folder until it is whole
REMOVED = ".removed"  # and we, from when it goes until it is gone


class Workdir:
    """A run's folder. Nothing is written to it before `begin`."""

    def __init__(self, run: Run, entry: str):
        """Raises UserError if --workdir can't be the folder of this entry's run."""
        self.entry, name = entry, run.workdir or f"runs/{entry}"
        self.path = pathlib.Path(name).expanduser().absolute()
        self.newest: Source | None = None  # this run's own
        self.source: Source | None = None  # another's, to begin from
        self._damaged: dict[int, str] = {}  # step → what is wrong with that checkpoint
        self._lock: IO | None = None  # config.json, which stays open
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        # --steps=0 --restore_from=… evaluates what it is given, and leaves every workdir alone.
        self.in_use = run.steps > 0 or not run.restore_from
        if self.in_use:
            step, damaged = processes.from_first(lambda: self._look(run.verify))
            self._damaged = dict(damaged)
            if step is not None:
                self.newest = checkpoint.at(self._folder(step))
        if run.restore_from and not self.newest:
            if run.restore_from.startswith("hf:"):
                self.source = checkpoint.find(run.restore_from)
            else:  # one process reads all of it, to see that it is whole
                found = processes.from_first(
                    lambda: str(checkpoint.find(run.restore_from, whole=run.verify).path)
                )
                self.source = checkpoint.at(pathlib.Path(found))
        for what, found in (("--workdir", self.newest), ("--restore_from", self.source)):
            if found and found.metadata["entry"] != entry:
                theirs = found.metadata["entry"]
                raise UserError(
                    f"{what}={found.path} is of {theirs!r}, not {entry!r}; give another"
                )

    def _look(self, whole: bool) -> tuple[int | None, list[tuple[int, str]]]:
        """The step of the newest checkpoint that is whole; newer ones and what is wrong with them.

        Runs on the first process only, which takes the workdir's lock.
        """
        there = folders.nearest(self.path)
        if not there.is_dir():
            which = "" if there == self.path else f": {there}"
            raise UserError(f"--workdir={self.path}{which} is a file; give a folder")
        try:
            folders.try_to_write(self.path)
        except OSError as error:
            raise self._cannot_write(error) from None
        if (self.path / CONFIG).exists():
            self._take_lock()
        damaged = []
        for step in reversed(checkpoint.steps_in(self.path / "checkpoints")):
            bad = checkpoint.verify(self._folder(step), whole)
            if not bad:
                return step, damaged
            damaged.append((step, bad))
        if damaged:
            step, bad = damaged[0]
            raise UserError(
                f"--workdir={self.path} has no checkpoint that is whole (step {step}: {bad}); "
                "give a new --workdir"
            )
        return None, []

    def _take_lock(self) -> None:
        """Holds config.json locked for as long as this process lives, however it dies."""
        self._lock = (self.path / CONFIG).open("a")
        weakref.finalize(self, self._lock.close)  # however the run ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--workdir={self.path} is in use by a run that is alive; wait for it, or give "
                "another --workdir"
            ) from None

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(
            f"--workdir={self.path} can't be written ({error.strerror}); give another --workdir"
        )

    def _folder(self, step: int) -> pathlib.Path:
        return self.path / "checkpoints" / str(step)

    @property
    def start(self) -> Source | None:
        """The checkpoint that the run begins from, if any."""
        return self.newest or self.source

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.newest.step if self.newest else 0

    @property
    def shown(self) -> pathlib.Path:
        """The folder, as short as it can be printed."""
        here = pathlib.Path.cwd()
        return self.path.relative_to(here) if self.path.is_relative_to(here) else self.path

    @property
    def metrics(self) -> pathlib.Path | None:
        """metrics.jsonl; None if nothing is to be written."""
        return self.path / "metrics.jsonl" if self.in_use else None

    def check_flags(self, *groups) -> dict[str, Any]:
        """Compares the flags with those that the run had when it was saved.

        Returns what may change and has: {name: value before}. Raises UserError for what may not.
        """
        before = self.newest.metadata["flags"] if self.newest else {}
        changed = {}
        for group in groups:
            for field in dataclasses.fields(group):
                was, now = before.get(field.name), getattr(group, field.name)
                if field.name not in before or was == now:
                    continue
                another_start = field.name == "restore_from" and now
                if another_start or not field.metadata["may_change"]:
                    raise UserError(
                        f"--{field.name}={now} is not what this run began with, {'none' if was == '' else was}; "
                        f"give that, or a new --workdir (this one is {self.path})"
                    )
                changed[field.name] = was
        return changed

    def check_data(self, data: dict[str, Any]) -> None:
        """Notes what the batches are made of; raises UserError if a resumed run had others."""
        self._data = data
        if self.newest and self.newest.metadata["data"] != data:
            raise UserError(
                f"--dataset={data['dataset']} is not what it was when this run began (its "
                f"fingerprint differs); give a new --workdir (this one is {self.path})"
            )

    def first_state(self, layout: Layout, optimizer, seed: int, abstract: Tree) -> Tree:
        """The state to begin with: resumed, on given parameters, or new. Only one is ever made."""
        if self.newest:
            return checkpoint.restore_tree(self.newest, abstract)
        if self.source is None:
            return sharding.initialize(layout, optimizer, seed, abstract)
        if not self.in_use:
            optimizer = optax.identity()  # evaluation needs no moments
            abstract = sharding.abstract_state(layout, optimizer)
        params = checkpoint.restore_params(self.source, layout)
        begin = layout.compile(
            lambda params: sharding.new_state(layout, optimizer, seed, params),
            params,
            donate_argnums=0,
            out_shardings=sharding.shardings(abstract),
        )
        return begin(params)

    def origin(self) -> str:
        """Where the first state comes from, in a sentence; another for each damaged checkpoint."""
        aside = [
            f"Damaged: {self._folder(step)}: {bad}. It goes to {self.path / 'damaged'}."
            for step, bad in self._damaged.items()
        ]
        return "\n".join([*aside, self._origin()])

    def _origin(self) -> str:
        if self.newest:
            return f"Resumes at step {self.step}, from {self.newest.path}."
        if self.source is None:
            return "Starts at step 0, on new parameters."
        if self.in_use:
            return f"Starts at step 0, on the parameters of {self.source.path}."
        return f"Evaluates {self.source.path}, of step {self.source.step}."

    def begin(self, keep: int, metadata: dict[str, Any]) -> None:
        """Makes the folder, writes config.json, puts what is damaged aside."""
        if not self.in_use:
            return
        self._metadata, self._keep = metadata | {"data": self._data}, keep
        self._saving: threading.Thread | None = None
        self._failed = ""  # why the last save did not work
        processes.from_first(self._prepare)
        # All coroutines are Orbax's. Those that a failed save drops before they have begun are no
        # news to a user, who is told of the failure.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.PyTreeCheckpointHandler(
                    type_handler_registry=checkpoint.ANY_MESH,
                    use_compression=False,  # 8% of trained numbers, for 1.5 times a restore
                ),
                data=ocp.JsonCheckpointHandler(),
                metadata=ocp.JsonCheckpointHandler(),
            ),
            # On the first process, between the last byte written and the rename that commits.
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._hash),
        )

    def _prepare(self) -> None:
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            if not self._lock:
                self._take_lock()
            self._lock.truncate(0)
            text = json.dumps({key: self._metadata[key] for key in ("flags", "versions")}, indent=2)
            print(text, file=self._lock, flush=True)
            for step in self._damaged:
                aside = self.path / "damaged" / str(step)
                while aside.exists():
                    aside = aside.with_name(aside.name + "+")
                aside.parent.mkdir(exist_ok=True)
                self._folder(step).rename(aside)
            for path in self._unfinished():
                shutil.rmtree(path)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _unfinished(self) -> list[pathlib.Path]:
        """What a killed or failed save, or a killed removal, has left; nothing that is not ours."""
        checkpoints = self.path / "checkpoints"
        return [*checkpoints.glob(f"*{TEMPORARY}*"), *checkpoints.glob(f"*{REMOVED}")]

    # ---- saves, in the background ----

    def save(self, step: int, state: Tree) -> None:
        """Starts a save; the state may be donated as soon as this returns.

        One that fails harms nothing: it is reported, and the next one is tried as if it were the
        first. With several processes it stops the run.
        """
        self._join()
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            data=ocp.args.JsonSave({"next_batch": step, **self._data}),
            metadata=ocp.args.JsonSave({"step": step, **self._metadata}),
        )
        self._step, self._failed = step, ""
        try:
            self._checkpointer.save(self._folder(step), args=items)
        except Exception as error:
            self._fail(error)
        else:
            self._saving = threading.Thread(target=self._finish)
            self._saving.start()

    def _finish(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
            if processes.is_first():
                self._remove_old()
        except Exception as error:
            self._fail(error)

    def _hash(self) -> None:
        for folder in (self.path / "checkpoints").glob(f"{self._step}{TEMPORARY}*"):
            checkpoint.write_hashes(folder)

    def _remove_old(self) -> None:
        """All but the newest finished checkpoints; each vanishes at once, then its files go."""
        for step in checkpoint.steps_in(self.path / "checkpoints")[: -self._keep]:
            shutil.rmtree(self._folder(step).rename(self._folder(step).with_suffix(REMOVED)))

    def _fail(self, error: Exception) -> None:
        self._failed = reason(error)
        if processes.is_first():
            print(f"warning: the checkpoint of step {self._step} could not be saved ({self._failed}); "
                  "training goes on, and the next one is tried", file=sys.stderr, flush=True)  # fmt: skip
            # Its other arrays are still on their way to the disk, and make its folder anew.
            for _ in range(10):
                for path in self._unfinished():
                    shutil.rmtree(path, ignore_errors=True)
                time.sleep(0.5)
                if not self._unfinished():
                    break

    def _join(self) -> None:
        if self._saving:
            self._saving.join()
            self._saving = None
        if self._failed and processes.count() > 1:
            raise self._not_saved()

    def wait(self) -> None:
        """Waits for the save that is under way. Raises Stopped if the last one has failed."""
        self._join()
        if self._failed:
            raise self._not_saved()

    def _not_saved(self) -> Stopped:
        newest = self.last_good()
        return Stopped(
            f"the checkpoint of step {self._step} could not be saved ({self._failed}); "
            + (f"the newest is {newest}" if newest else "there is none")
            + ", and the same command goes on from there once there is room"
        )

    def last_good(self) -> pathlib.Path | None:
        """The newest finished checkpoint."""
        steps = checkpoint.steps_in(self.path / "checkpoints")
        return self._folder(steps[-1]) if steps else None

    def close(self) -> None:
        """Waits for the save that is under way, and leaves the folder to others."""
        if self._checkpointer:
            self.wait()
            self._checkpointer.close()
        if self._lock:
            self._lock.close()

    def farewell(self, layout: Layout) -> list[str]:
        """Where the checkpoint lies, and a command that restores it on another mesh."""
        newest = self.last_good() if self.in_use else None
        if not newest:
            return []  # nothing was trained
        path = self.shown
        lines = [f"Checkpoint: {path / 'checkpoints' / newest.name}"]
        if other := another_mesh(layout):
            command = (
                f"python -m recipes.{self.entry} --mesh={other} --restore_from={path} --steps=0"
            )
            lines.append(f"On another mesh: {command}")
        return lines


def reason(error: BaseException) -> str:
    """Why writing failed, in a few words: the system's own where there are some."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS):
        if os.strerror(number) in text:
            return os.strerror(number)
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".")


def another_mesh(layout: Layout) -> str | None:
    """As --mesh is written: a mesh of as many devices where the same model lies otherwise."""
    size = 8 if layout.mesh.size == 1 else layout.mesh.size
    for axes in ({"data": 1, "model": size}, {"data": size}, {"data": size // 2, "model": 2}):
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        try:
            strategy = sharding.choose(layout.rules, "", mesh)
            sharding.check(layout.rules, strategy, layout.plan, mesh)
        except UserError:
            continue
        if axes != dict(layout.mesh.shape):
            return describe(axes)
    return None
