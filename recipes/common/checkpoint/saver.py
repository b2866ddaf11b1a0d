"""Saves a run's state in the background, and keeps the newest checkpoints and the best one.

WORKDIR/best/STEP is a copy of checkpoints/STEP, on a disk by hard links: it takes no space of its own,
and stays when checkpoints/STEP is removed. The previous best is removed after the new one is complete.
"""

import contextlib
import functools
import json
import math
import pathlib
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from data.tokenizer import BYTES, Tokenizer
from recipes.common.checkpoint import integrity, run_folder, store
from recipes.common.checkpoint.run_folder import RunFolder
from recipes.common.runtime import Stopped, UserError, processes, warn
from recipes.common.sharding import Tree
from recipes.common.storage import folders, lock

HELD_OUT = "held_out.json"  # held-out metrics, in the folder of a best checkpoint


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
        self._checkpoints = folders.at(folder.path / "checkpoints")
        self._best = folders.at(folder.path / "best")
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
                    handler_impl=_HashingHandler(
                        type_handler_registry=store.ANY_MESH,
                        use_compression=False,  # would save 8% of space, but restore 1.5 times as slowly
                    )
                ),
                data=ocp.JsonCheckpointHandler(),
                metadata=ocp.JsonCheckpointHandler(),
            ),
            # Called on process 0 after the last byte, before the rename or mark that commits.
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._finalize),
        )

    def _prepare(self) -> list[tuple[float, int]]:
        """Prepares the folder, and returns `_kept_as_best()`. Raises UserError."""
        path = self._folder.path
        with folders.user_errors(f"--workdir={path} can't be written", "use a different --workdir"):
            self._checkpoints.make()
            if not self._folder.locks:
                self._folder.locks.append(lock.take(path, run_folder.CONFIG))
                self._check_unchanged()
            self._lock.check()
            facts = {key: self._metadata[key] for key in ("flags", "versions")}
            self._lock.write(json.dumps(facts, indent=2))
            for step in self._folder.damaged:
                aside = path / "damaged" / str(step)
                while aside.exists():
                    aside = aside.with_name(aside.name + "+")
                folders.at(self._folder.checkpoint(step)).move_to(aside)
            self._remove_unfinished()
            for left in self._best.unfinished():
                left.remove()
            self._remove_former_best()
            return self._kept_as_best()

    def _check_unchanged(self) -> None:
        """Raises UserError if another run came and went between `open_run` and the lock."""
        path, damaged = self._folder.path, self._folder.damaged
        steps = [step for step in folders.steps_in(path / "checkpoints") if step not in damaged]
        if steps and steps[-1] != self._folder.step:
            raise UserError(
                f"--workdir={path} got step {steps[-1]} from another run since this one started; "
                "start this one again to resume from there, or use a different --workdir"
            )

    def _remove_unfinished(self) -> None:
        for left in self._checkpoints.unfinished():
            left.remove()

    @property
    def _lock(self) -> lock.Lock:
        """The workdir's lock, on process 0."""
        return self._folder.locks[0]

    # ---- saving ----------------------------------------------------------------------------------

    def save(self, step: int, state: Tree) -> None:
        """Starts a save; the state may be donated as soon as this returns.

        With one process a failed save is reported, leaves other checkpoints intact, and training
        goes on to the next save. With several processes it ends the run. Raises Stopped if another
        run has taken over the folder.
        """
        self._join()
        items = ocp.args.Composite(
            # Frozen models are not saved: an adapter's base, of which metadata says where it is, and
            # a second model, which comes from a flag.
            state=ocp.args.PyTreeSave({k: state[k] for k in state.keys() - {"base", "frozen"}}),
            data=ocp.args.JsonSave({"next_batch": step, **self._data}),
            metadata=ocp.args.JsonSave({"step": step, **self._metadata}),
        )
        self._step, self._failed = step, ""
        try:
            if processes.is_first():
                self._lock.check()
                self._remove_unfinished()  # also what a run that lost its lock wrote in the meantime
            self._checkpointer.save(self._folder.checkpoint(step), args=items)
        except Exception as error:
            self._fail(error)
            if self._lock_lost():
                raise self._not_saved() from None
        else:
            self._thread = threading.Thread(target=self._finish)
            self._thread.start()

    def _finalize(self) -> None:
        self._lock.check()  # never write into another run's checkpoint
        self.before_commit()
        for uncommitted in self._checkpoints.unfinished():
            store.write_tokenizer(uncommitted.path, self._tokenizer.files)
            integrity.hash_before_commit(uncommitted.path, _published_digests(uncommitted.path))
            uncommitted.sync()
        self._lock.check()

    def _finish(self) -> None:
        try:
            self._checkpointer.wait_until_finished()
            if processes.is_first():  # Orbax's last files, and the rename
                folders.at(self._folder.checkpoint(self._step)).sync()
        except Exception as error:
            self._fail(error)
            return
        if processes.is_first():
            self._remove_old()

    def _remove_old(self) -> None:
        try:
            self._lock.check()
            for step in folders.steps_in(self._checkpoints.path)[: -self._keep]:
                folders.at(self._folder.checkpoint(step)).remove()
        except folders.errors() as error:
            warn(
                f"old checkpoints could not be removed ({folders.reason(error)}); training "
                "continues, and the next save tries again"
            )

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

    def keep_best(self, step: int, state: Tree, metrics: dict[str, float]) -> None:
        """Keeps this state's checkpoint as WORKDIR/best/STEP if its held-out loss is the lowest.

        The state is saved first unless it was the last one saved.

        Args:
          metrics: held-out metrics; "loss" decides.
        """
        if not metrics["loss"] < self._lowest:
            return
        if self._step != step or self._failed:
            self.save(step, state)
        saving, former = self._thread, self._lowest
        self._lowest = metrics["loss"]

        def link() -> None:
            if saving:
                saving.join()
            if self._failed:  # a run of one process goes on
                self._lowest = former
            elif processes.is_first():
                self._link(step, metrics)

        self._thread = threading.Thread(target=link)
        self._thread.start()

    def _link(self, step: int, metrics: dict[str, float]) -> None:
        """Links a finished checkpoint into best/, then removes the previous best."""
        try:
            self._lock.check()
            self._best.make()
            files = {HELD_OUT: json.dumps(metrics).encode()}
            folders.at(self._folder.checkpoint(step)).copy_to(self._best.path / str(step), files)
            self._remove_former_best()
        except folders.errors() as error:
            warn(
                f"the checkpoint of step {step} could not be kept as the best one "
                f"({folders.reason(error)}); training continues"
            )

    def _kept_as_best(self) -> list[tuple[float, int]]:
        """(held-out loss, step) of checkpoints in best/, lowest first; a kill may leave two."""
        kept = []
        for step in folders.steps_in(self._best.path):
            # A folder without readable metrics is not ours.
            with contextlib.suppress(*folders.errors(), ValueError, KeyError, TypeError):
                metrics = json.loads((self._best.path / str(step) / HELD_OUT).read_text())
                kept.append((float(metrics["loss"]), step))
        return sorted(kept)

    def _remove_former_best(self) -> None:
        for _, step in self._kept_as_best()[1:]:
            folders.at(self._best.path / str(step)).remove()

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
        for _ in range(10):  # Orbax's other writes are still running, and recreate the folder
            with contextlib.suppress(*folders.errors()):  # the next save removes the rest
                self._remove_unfinished()
            time.sleep(0.5)
            with contextlib.suppress(*folders.errors()):
                if not self._checkpoints.unfinished():
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
        return any(taken.lost for taken in self._folder.locks)

    def _not_saved(self) -> Stopped:
        what = f"the checkpoint of step {self._step} could not be saved ({self._failed})"
        try:
            newest = self.last_good()
        except folders.errors():  # the bucket can't be reached
            return Stopped(f"{what}; the same command resumes from the newest saved one")
        return Stopped(
            f"{what}; {f'the newest is {newest}' if newest else 'there is none'}, and the same "
            "command resumes from there"
        )


class _HashingHandler(ocp.BasePyTreeCheckpointHandler):
    """Writes arrays; of several processes, each then hashes the files that it wrote.

    Process 0 gets the digests through JAX's coordination service, because a save runs in the
    background, where collectives are not allowed.
    """

    async def async_save(self, directory, *args, **kwargs):
        writes = await super().async_save(directory, *args, **kwargs)
        if processes.count() == 1:
            return writes
        return [future.ChainedFuture(writes or [], functools.partial(_publish_digests, directory))]


def _publish_digests(arrays: pathlib.Path) -> None:
    """Publishes the digests of the files that this process wrote, when all of them are written."""
    written = folders.to_path(arrays) / f"ocdbt.process_{processes.index()}"
    names = [f"{arrays.name}/{written.name}/{name}" for name in folders.at(written).sizes()]
    digests = integrity.sha256(folders.to_path(arrays.parent), names)
    processes.publish(f"{_key(arrays.parent)}/{processes.index()}", digests)


def _published_digests(uncommitted: pathlib.Path) -> dict[str, str]:
    """The digests that all processes have published: file name → SHA-256."""
    if processes.count() == 1:
        return {}
    digests: dict[str, str] = {}
    for process in range(processes.count()):
        digests |= processes.await_published(f"{_key(uncommitted)}/{process}")
    processes.unpublish(_key(uncommitted))  # a long run saves often
    return digests


def _key(uncommitted: pathlib.Path) -> str:
    """A name for a save, equal on all processes."""
    return f"save/{uncommitted.name.partition('.')[0]}"
