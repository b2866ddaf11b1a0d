"""Saves a run's state in the background, and keeps the newest checkpoints and the best one.

WORKDIR/best/STEP is a copy of checkpoints/STEP by hard links: it takes no space of its own, appears
complete in one rename, and stays when checkpoints/STEP is removed. Without hard links files are copied.
The previous best is removed after the new one is in place.

In a bucket nothing is renamed: a checkpoint is finished when it has Orbax's mark, commit_success.txt,
which is written last and removed first.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from data.tokenizer import BYTES, Tokenizer
from recipes.common.checkpoint import integrity, parallel_hashing, run_folder, store
from recipes.common.checkpoint.run_folder import RunFolder
from recipes.common.runtime import Stopped, UserError, folders, lock, processes, warn
from recipes.common.sharding import Tree

TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's suffix of an uncommitted checkpoint's folder
REMOVED = ".removed"  # suffix of a checkpoint whose files are being deleted
LINKING = ".linking"  # suffix of a best checkpoint until it is complete
HELD_OUT = "held_out.json"  # held-out figures, in the folder of a best checkpoint


class Saver:
    """Writes a run's checkpoints.

    Making one prepares the folder: writes config.json, moves damaged checkpoints aside, and removes
    what a killed run left unfinished.

    Args:
      keep: number of newest checkpoints to keep.
      metadata: the result of store.metadata.
      data: facts of the dataset, JSON.
      tokenizer: the model's; every checkpoint contains it.

    Raises UserError if the folder can't be written, or another run used it in the meantime.
    """

    def __init__(
        self,
        folder: RunFolder,
        keep: int,
        metadata: dict[str, Any],
        data: dict[str, Any],
        tokenizer: Tokenizer = BYTES,
    ):
        self._folder, self._keep, self._tokenizer = folder, keep, tokenizer
        digest = {store.TOKENIZER: tokenizer.sha256} if tokenizer.files else {}
        self._metadata = metadata | digest | {"data": data, integrity.HASHED: True}
        self._data = data
        self._thread: threading.Thread | None = None  # the save in flight
        self._step, self._failed = folder.step, ""  # the last save's step, and why it failed
        self.before_commit: Callable[[], None] = lambda: None  # called on process 0
        best = processes.broadcast_from_first(self._prepare)
        self._lowest = best[0][0] if best else math.inf  # held-out loss of the best checkpoint
        # Orbax drops coroutines of a failed save. The failure itself is reported.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.PyTreeCheckpointHandler(
                    type_handler_registry=store.ANY_MESH,
                    use_compression=False,  # would save 8% of space, but restore 1.5 times as slowly
                ),
                data=ocp.JsonCheckpointHandler(),
                metadata=ocp.JsonCheckpointHandler(),
            ),
            # Called on process 0 after the last byte, before the rename or mark that commits.
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._finalize),
        )

    def _prepare(self) -> list[tuple[float, int]]:
        """Prepares the folder, and returns `_best()`. Raises UserError."""
        path = self._folder.path
        with folders.user_errors(f"--workdir={path} can't be written", "use a different --workdir"):
            folders.make(path / "checkpoints")
            if not self._folder.locks:
                self._folder.locks.append(lock.take(path, run_folder.CONFIG))
                self._check_unchanged()
            self._folder.locks[0].check()
            facts = {key: self._metadata[key] for key in ("flags", "versions")}
            self._folder.locks[0].write(json.dumps(facts, indent=2))
            for step in self._folder.damaged:
                aside = path / "damaged" / str(step)
                while aside.exists():
                    aside = aside.with_name(aside.name + "+")
                aside.parent.mkdir(parents=True, exist_ok=True)
                folders.move(self._folder.checkpoint(step), aside, integrity.COMMITTED)
            for left in self._unfinished():
                folders.remove(left, integrity.COMMITTED)
            self._remove_former_best()
            return self._best()

    def _check_unchanged(self) -> None:
        """Raises UserError if another run came and went between `open_run` and the lock."""
        path, damaged = self._folder.path, self._folder.damaged
        steps = [step for step in store.steps_in(path / "checkpoints") if step not in damaged]
        if steps and steps[-1] != self._folder.step:
            raise UserError(
                f"--workdir={path} got step {steps[-1]} from another run since this one started; "
                "start this one again to resume from there, or use a different --workdir"
            )

    def _unfinished(self) -> list[pathlib.Path]:
        """Leftovers of killed or failed saves and removals; never a user's own files."""
        checkpoints, best = self._folder.path / "checkpoints", self._folder.path / "best"
        if folders.in_bucket(checkpoints):
            every = [*store.numbered(checkpoints), *store.numbered(best)]
            return [path for path in every if not store.finished(path)]
        left = [*checkpoints.glob(f"*{TEMPORARY}*"), *checkpoints.glob(f"*{REMOVED}")]
        return [*left, *best.glob(f"*{LINKING}"), *best.glob(f"*{REMOVED}")]

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step: int, state: Tree) -> None:
        """Starts a save; the state may be donated as soon as this returns.

        With one process a failed save is reported, leaves other checkpoints intact, and training
        goes on to the next save. With several processes it ends the run. Raises Stopped if another
        run has taken over the folder.
        """
        self._join()
        items = ocp.args.Composite(
            # An adapter's frozen base is not saved; metadata says where it is.
            state=ocp.args.PyTreeSave({k: tree for k, tree in state.items() if k != "base"}),
            data=ocp.args.JsonSave({"next_batch": step, **self._data}),
            metadata=ocp.args.JsonSave({"step": step, **self._metadata}),
        )
        self._step, self._failed = step, ""
        try:
            if processes.is_first():
                self._clear(self._folder.checkpoint(step))
            self._checkpointer.save(self._folder.checkpoint(step), args=items)
        except Exception as error:
            self._fail(error)
            if self._lock_lost():
                raise self._not_saved() from None
        else:
            self._thread = threading.Thread(target=self._finish)
            self._thread.start()
            if not processes.is_first():
                threading.Thread(target=self._help_to_hash, args=[step], daemon=True).start()

    def _clear(self, checkpoint: pathlib.Path) -> None:
        """Makes room for a checkpoint. Raises OSError if another run has taken over the folder."""
        self._folder.locks[0].check()
        # Objects that a previous run wrote until it noticed that this one took over.
        if folders.in_bucket(checkpoint) and not store.finished(checkpoint):
            folders.remove(checkpoint, integrity.COMMITTED)

    def _help_to_hash(self, step: int) -> None:
        with contextlib.suppress(Exception):  # after a failed save nothing is requested
            parallel_hashing.serve(f"save/{step}")

    def _finish(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
            if processes.is_first():  # Orbax's last files, and the rename
                folders.to_disk(self._folder.checkpoint(self._step))
                folders.sync(self._folder.path / "checkpoints")
        except Exception as error:
            self._fail(error)
            return
        if processes.is_first():
            self._remove_old()

    def _finalize(self) -> None:
        self._folder.locks[0].check()  # never write into another run's checkpoint
        self.before_commit()
        checkpoints = self._folder.path / "checkpoints"
        uncommitted = checkpoints.glob(f"{self._step}{TEMPORARY}*")
        if folders.in_bucket(checkpoints):
            uncommitted = [checkpoints / str(self._step)]
        for folder in uncommitted:
            store.write_tokenizer(folder, self._tokenizer.files)
            parallel_hashing.share(
                f"save/{self._step}", lambda folder=folder: integrity.hash_before_commit(folder)
            )
            folders.to_disk(folder)
        self._folder.locks[0].check()

    def _remove_old(self) -> None:
        try:
            self._folder.locks[0].check()
            for step in store.steps_in(self._folder.path / "checkpoints")[: -self._keep]:
                self._remove(self._folder.checkpoint(step))
        except folders.errors() as error:
            warn(
                f"old checkpoints could not be removed ({folders.reason(error)}); training "
                "continues, and the next save tries again"
            )

    @staticmethod
    def _remove(old: pathlib.Path) -> None:
        """Uncommits a checkpoint in one operation, then deletes its files."""
        if not folders.in_bucket(old):
            old = old.rename(old.with_suffix(REMOVED))
        folders.remove(old, integrity.COMMITTED)

    def in_flight(self) -> bool:
        """Whether a save is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def last_good(self) -> pathlib.Path | None:
        """The newest finished checkpoint."""
        return self._folder.last_good()

    def wait(self) -> None:
        """Waits for the save in flight. Raises Stopped if the last save failed."""
        self._join()
        if self._failed:
            raise self._not_saved()

    def close(self) -> None:
        """Waits like `wait`, then frees Orbax's threads."""
        self.wait()
        self._checkpointer.close()

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failed and (processes.count() > 1 or self._lock_lost()):
            raise self._not_saved()

    # ---- the best checkpoint ---------------------------------------------------------------------

    def keep_best(self, step: int, state: Tree, figures: dict[str, float]) -> None:
        """Keeps this state's checkpoint as WORKDIR/best/STEP if its held-out loss is the lowest.

        The state is saved first unless it was the last one saved.

        Args:
          figures: held-out figures; "loss" decides.
        """
        if not figures["loss"] < self._lowest:
            return
        if self._step != step or self._failed:
            self.save(step, state)
        saving, former = self._thread, self._lowest
        self._lowest = figures["loss"]

        def link() -> None:
            if saving:
                saving.join()
            if self._failed:  # a run of one process goes on
                self._lowest = former
            elif processes.is_first():
                self._link(step, figures)

        self._thread = threading.Thread(target=link)
        self._thread.start()

    def _link(self, step: int, figures: dict[str, float]) -> None:
        """Links a finished checkpoint into best/, then removes the previous best."""
        best, saved = self._folder.path / "best", self._folder.checkpoint(step)
        target, beside = best / str(step), best / f"{step}{LINKING}"
        try:
            self._folder.locks[0].check()
            if folders.in_bucket(best):
                if store.finished(target):
                    self._remove(target)
                figures_file = {HELD_OUT: json.dumps(figures).encode()}
                folders.copy(saved, target, integrity.COMMITTED, figures_file)
            else:
                folders.make(best)
                shutil.copytree(saved, beside, copy_function=link_or_copy)
                (beside / HELD_OUT).write_text(json.dumps(figures))
                folders.to_disk(beside)
                if target.exists():  # left from before the run resumed at an earlier step
                    self._remove(target)
                beside.rename(target)
                folders.sync(best)
            self._remove_former_best()
        except folders.errors() as error:
            if not folders.in_bucket(best):
                shutil.rmtree(beside, ignore_errors=True)
            warn(
                f"the checkpoint of step {step} could not be kept as the best one "
                f"({folders.reason(error)}); training continues"
            )

    def _best(self) -> list[tuple[float, int]]:
        """(held-out loss, step) of checkpoints in best/, lowest first; a kill may leave two."""
        best = self._folder.path / "best"
        found = []
        for step in store.steps_in(best):
            # A folder without readable figures is not ours.
            with contextlib.suppress(*folders.errors(), ValueError, KeyError, TypeError):
                figures = json.loads((best / str(step) / HELD_OUT).read_text())
                found.append((float(figures["loss"]), step))
        return sorted(found)

    def _remove_former_best(self) -> None:
        for _, step in self._best()[1:]:
            self._remove(self._folder.path / "best" / str(step))

    # ---- failures --------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Reports a failed save and removes its files; with several processes ends this one."""
        self._failed = folders.reason(error)
        # If another process failed, JAX ends this one.
        if processes.count() > 1 and not isinstance(error, jax.errors.JaxRuntimeError):
            lock.release_all()
            processes.exit_now(f"error: {self._not_saved()}")
        if not processes.is_first():
            return
        then = "training continues, and the next save is tried as usual"
        then = "training stops at the next save" if self._lock_lost() else then
        warn(f"the checkpoint of step {self._step} could not be saved ({self._failed}); {then}")
        if self._lock_lost():
            return
        if processes.count() == 1:
            self._drain_errors()
        # Orbax's other writes are still running, and recreate the folder.
        with contextlib.suppress(*folders.errors()):  # the next start removes the rest
            for _ in range(10):
                for path in self._unfinished():
                    if folders.in_bucket(path):
                        folders.remove(path, integrity.COMMITTED)
                    else:
                        shutil.rmtree(path, ignore_errors=True)
                time.sleep(0.5)
                if not self._unfinished():
                    break

    def _drain_errors(self) -> None:
        """Consumes the other errors of a failed save, which Orbax would raise in the next one."""
        for _ in range(100):
            try:
                return self._checkpointer.wait_until_finished()
            except Exception:
                continue

    def _lock_lost(self) -> bool:
        """Whether another run has taken over the folder."""
        return any(held.lost for held in self._folder.locks)

    def _not_saved(self) -> Stopped:
        what = f"the checkpoint of step {self._step} could not be saved ({self._failed})"
        again = "and the same command resumes from there"
        again += "" if folders.in_bucket(self._folder.path) else " once there is room"
        try:
            newest = self.last_good()
        except folders.errors():  # the bucket can't be reached
            return Stopped(f"{what}; the same command resumes from the newest saved one")
        return Stopped(
            f"{what}; {f'the newest is {newest}' if newest else 'there is none'}, {again}"
        )


def link_or_copy(source: str, target: str) -> None:
    """Makes a hard link, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
