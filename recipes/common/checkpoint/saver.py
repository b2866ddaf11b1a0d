"""Saves a run's state in the background; keeps the newest and the best, loses none that is finished.

WORKDIR/best/STEP is a copy of checkpoints/STEP as hard links: no byte is written twice, it is whole
from the moment it is there, and it stays when checkpoints/STEP goes. Where a file system has no hard
links the files are copied. A new best one is there before the former goes.

In a bucket nothing is renamed: a checkpoint is finished when it has Orbax's mark, commit_success.txt,
which is written last and removed first.
"""

import contextlib
import errno
import functools
import json
import math
import os
import pathlib
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from data.tokenizer import BYTES, Tokenizer
from recipes.common.checkpoint import helpers, integrity, run_folder, store
from recipes.common.checkpoint.run_folder import RunFolder
from recipes.common.runtime import Stopped, UserError, folders, lock, processes
from recipes.common.sharding import Tree

TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's suffix of a checkpoint's folder until it is whole
REMOVED = ".removed"  # ours, from when a checkpoint is dropped until its files are gone
LINKING = ".linking"  # ours, of a best one until it is whole
HELD_OUT = "held_out.json"  # beside a best one's items: its held-out figures


class Saver:
    """Making one prepares the run's folder: config.json, damaged checkpoints moved aside.

    Args:
      keep: how many checkpoints stay.
      metadata: store.metadata's.
      data: what the batches are made of, JSON.
      tokenizer: the model's, which every checkpoint holds.
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
        said = {store.TOKENIZER: tokenizer.sha256} if tokenizer.files else {}
        self._metadata, self._data = metadata | said | {"data": data}, data
        self._thread: threading.Thread | None = None  # of the save that is in flight
        self._step, self._failed = folder.step, ""  # of the last save, and why it failed
        self.before_commit: Callable[[], None] = lambda: None  # on process 0, of each checkpoint
        best = processes.broadcast_from_first(self._prepare)
        self._lowest = best[0][0] if best else math.inf  # held-out loss of the best checkpoint
        # All coroutines are Orbax's. A failed save drops some before they begin: the user is told
        # of the failure, not of that.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                state=ocp.PyTreeCheckpointHandler(
                    type_handler_registry=store.ANY_MESH,
                    use_compression=False,  # saves 8% of trained numbers, costs 1.5 times a restore
                ),
                data=ocp.JsonCheckpointHandler(),
                metadata=ocp.JsonCheckpointHandler(),
            ),
            # On process 0, between the last byte written and the rename or mark that commits.
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._finalize),
        )

    def _prepare(self) -> list[tuple[float, int]]:
        """Returns what `_best` does. Raises UserError."""
        path = self._folder.path
        try:
            folders.make(path / "checkpoints")
            if not self._folder.locks:
                self._folder.locks.append(lock.take(path, run_folder.CONFIG))
                self._look_again()
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
        except folders.errors() as error:
            raise run_folder.cannot_write(path, error) from None

    def _look_again(self) -> None:
        """Raises UserError if another run came and went between `open_run` and the lock."""
        path, damaged = self._folder.path, self._folder.damaged
        steps = [step for step in store.steps_in(path / "checkpoints") if step not in damaged]
        if steps and steps[-1] != self._folder.step:
            raise UserError(
                f"--workdir={path} has got step {steps[-1]} from another run since this one began; "
                "start this one again to resume from there, or use a different --workdir"
            )

    def _unfinished(self) -> list[pathlib.Path]:
        """What a killed or failed save, or a killed removal, has left; never a user's own files."""
        checkpoints, best = self._folder.path / "checkpoints", self._folder.path / "best"
        if folders.in_bucket(checkpoints):
            every = [*store.numbered(checkpoints), *store.numbered(best)]
            return [path for path in every if not store.finished(path)]
        left = [*checkpoints.glob(f"*{TEMPORARY}*"), *checkpoints.glob(f"*{REMOVED}")]
        return [*left, *best.glob(f"*{LINKING}"), *best.glob(f"*{REMOVED}")]

    def save(self, step: int, state: Tree) -> None:
        """Starts a save; the state may be donated as soon as this returns.

        One that fails harms nothing: it is reported, and the next one is tried as if it were the
        first. With several processes it stops the run.
        """
        self._join()
        items = ocp.args.Composite(
            # The base of an adapter is where it was: metadata says where.
            state=ocp.args.PyTreeSave({k: tree for k, tree in state.items() if k != "base"}),
            data=ocp.args.JsonSave({"next_batch": step, **self._data}),
            metadata=ocp.args.JsonSave({"step": step, **self._metadata}),
        )
        self._step, self._failed = step, ""
        try:
            if processes.is_first():
                self._make_room(self._folder.checkpoint(step))
            self._checkpointer.save(self._folder.checkpoint(step), args=items)
        except Exception as error:
            self._fail(error)
            if self._taken():
                raise self._not_saved() from None
        else:
            self._thread = threading.Thread(target=self._finish)
            self._thread.start()
            if not processes.is_first():
                threading.Thread(target=self._help, args=[step], daemon=True).start()

    def _make_room(self, checkpoint: pathlib.Path) -> None:
        """Raises an error if the folder is another run's by now, which may have a save in flight."""
        self._folder.locks[0].check()
        # What the run before this one may have written there until it heard that it was taken over.
        if folders.in_bucket(checkpoint) and not store.finished(checkpoint):
            folders.remove(checkpoint, integrity.COMMITTED)

    def _help(self, step: int) -> None:
        with contextlib.suppress(Exception):  # a save that has failed asks for nothing
            helpers.help_with(f"save/{step}", integrity.sha256_of)

    def keep_best(self, step: int, state: Tree, figures: dict[str, float]) -> None:
        """Keeps this state's checkpoint as WORKDIR/best/STEP if no loss was lower.

        It is saved first if it is not the one that was saved last.

        Args:
          figures: of the held-out examples; "loss" decides.
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
            if self._failed:  # only a run of one process goes on after that
                self._lowest = former
            elif processes.is_first():
                self._link(step, figures)

        self._thread = threading.Thread(target=link)
        self._thread.start()

    def in_flight(self) -> bool:
        """Whether a save is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def last_good(self) -> pathlib.Path | None:
        """The newest finished checkpoint."""
        return self._folder.last_good()

    def wait(self) -> None:
        """Waits for the save in flight. Raises Stopped if the last one has failed."""
        self._join()
        if self._failed:
            raise self._not_saved()

    def close(self) -> None:
        """Waits for the save in flight. Raises Stopped if the last one has failed."""
        self.wait()
        self._checkpointer.close()

    def _finish(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
            if processes.is_first():  # what Orbax wrote as it committed, and the rename
                folders.to_disk(self._folder.checkpoint(self._step))
                folders.sync(self._folder.path / "checkpoints")
        except Exception as error:
            self._fail(error)
            return
        if processes.is_first():
            self._remove_old()

    def _link(self, step: int, figures: dict[str, float]) -> None:
        """Links a finished checkpoint into best/, then removes the former best."""
        best, saved = self._folder.path / "best", self._folder.checkpoint(step)
        try:
            self._folder.locks[0].check()
            if folders.in_bucket(best):
                self._copy_best(saved, best / str(step), figures)
            else:
                beside = best / f"{step}{LINKING}"
                folders.make(best)
                shutil.copytree(saved, beside, copy_function=link_or_copy)
                (beside / HELD_OUT).write_text(json.dumps(figures))
                folders.to_disk(beside)
                if (best / str(step)).exists():  # of a run that began again before this step
                    self._remove(best / str(step))
                beside.rename(best / str(step))
                folders.sync(best)
            self._remove_former_best()
        except folders.errors() as error:
            if not folders.in_bucket(best):
                shutil.rmtree(best / f"{step}{LINKING}", ignore_errors=True)
            print(f"warning: the checkpoint of step {step} could not be kept as the best one "
                  f"({reason(error)}); training continues", file=sys.stderr, flush=True)  # fmt: skip

    def _copy_best(
        self, saved: pathlib.Path, target: pathlib.Path, figures: dict[str, float]
    ) -> None:
        """As a bucket has no links and renames nothing."""
        if store.finished(target):
            self._remove(target)

        def tell() -> None:
            folders.write(target / HELD_OUT, json.dumps(figures).encode())

        folders.copy(saved, target, integrity.COMMITTED, before_mark=tell)

    def _best(self) -> list[tuple[float, int]]:
        """(held-out loss, step) of the checkpoints in best/, the lowest first; a kill may leave two."""
        best = self._folder.path / "best"
        found = []
        for step in store.steps_in(best):
            # Others are not ours.
            with contextlib.suppress(*folders.errors(), ValueError, KeyError, TypeError):
                figures = json.loads((best / str(step) / HELD_OUT).read_text())
                found.append((float(figures["loss"]), step))
        return sorted(found)

    def _remove_former_best(self) -> None:
        for _, step in self._best()[1:]:
            self._remove(self._folder.path / "best" / str(step))

    def _finalize(self) -> None:
        self._folder.locks[0].check()  # else what follows would overwrite another run's
        self.before_commit()
        checkpoints = self._folder.path / "checkpoints"
        uncommitted = checkpoints.glob(f"{self._step}{TEMPORARY}*")
        if folders.in_bucket(checkpoints):
            uncommitted = [checkpoints / str(self._step)]
        for folder in uncommitted:
            store.write_tokenizer(folder, self._tokenizer.files)
            hashing = functools.partial(integrity.hash_before_commit, folder)
            helpers.with_help(f"save/{self._step}", integrity.sha256_of, hashing)()
            folders.to_disk(folder)
        self._folder.locks[0].check()

    def _remove_old(self) -> None:
        """All but the newest finished checkpoints."""
        try:
            self._folder.locks[0].check()
            for step in store.steps_in(self._folder.path / "checkpoints")[: -self._keep]:
                self._remove(self._folder.checkpoint(step))
        except folders.errors() as error:
            print(f"warning: old checkpoints could not be removed ({reason(error)}); training "
                  "continues, and removing them is tried again", file=sys.stderr, flush=True)  # fmt: skip

    @staticmethod
    def _remove(old: pathlib.Path) -> None:
        """It vanishes at once, then its files go."""
        if not folders.in_bucket(old):
            old = old.rename(old.with_suffix(REMOVED))
        folders.remove(old, integrity.COMMITTED)

    def _fail(self, error: Exception) -> None:
        self._failed = reason(error)
        # Not where it was another process that failed: JAX ends this one.
        if processes.count() > 1 and not isinstance(error, jax.errors.JaxRuntimeError):
            lock.release_all()
            processes.leave(f"error: {self._not_saved()}")
        if processes.is_first():
            then = "training continues, and the next save is tried as usual"
            then = "training stops at the next save" if self._taken() else then
            print(f"warning: the checkpoint of step {self._step} could not be saved ({self._failed}); {then}",
                  file=sys.stderr, flush=True)  # fmt: skip
            if self._taken():
                return
            if processes.count() == 1:
                self._forget_errors()
            # Its other arrays are still being written, and recreate its folder.
            with contextlib.suppress(*folders.errors()):  # the next start removes it
                for _ in range(10):
                    for path in self._unfinished():
                        if folders.in_bucket(path):
                            folders.remove(path, integrity.COMMITTED)
                        else:
                            shutil.rmtree(path, ignore_errors=True)
                    time.sleep(0.5)
                    if not self._unfinished():
                        break

    def _forget_errors(self) -> None:
        """Of this save: Orbax raises each of its small writes' alone, the others in the next save."""
        for _ in range(100):
            try:
                return self._checkpointer.wait_until_finished()
            except Exception:
                continue

    def _taken(self) -> bool:
        """Whether another run has taken over the workdir, where nothing more is ours."""
        return any(held.lost for held in self._folder.locks)

    def _join(self) -> None:
        if self._thread:
            self._thread.join()
            self._thread = None
        if self._failed and (processes.count() > 1 or self._taken()):
            raise self._not_saved()

    def _not_saved(self) -> Stopped:
        what = f"the checkpoint of step {self._step} could not be saved ({self._failed})"
        again = "and the same command resumes from there"
        again += "" if folders.in_bucket(self._folder.path) else " once there is room"
        try:
            newest = self.last_good()
        except folders.errors():  # of a bucket that can't be reached
            return Stopped(f"{what}; the same command resumes from the newest that is saved")
        return Stopped(
            f"{what}; {f'the newest is {newest}' if newest else 'there is none'}, {again}"
        )


def link_or_copy(source: str, target: str) -> None:
    """A hard link, or a copy where there can be none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def reason(error: BaseException) -> str:
    """Why writing failed, in a few words: the system's own where there are some."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS):
        if os.strerror(number) in text:
            return os.strerror(number)
    return folders.reason(error)
