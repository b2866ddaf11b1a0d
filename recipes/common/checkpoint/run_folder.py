"""A run's folder when the run starts: its checkpoints, its lock, and whether the flags match.

Opening a folder writes nothing; saver.py does.
"""

import contextlib
import dataclasses
import os
import pathlib
import socket
import tempfile
import time
from typing import Any

from recipes.common.checkpoint import adapters, integrity, locate, store
from recipes.common.checkpoint.store import WeightSource
from recipes.common.flags.config_flags import changed_setting
from recipes.common.runtime import Run, UserError, processes
from recipes.common.storage import folders, lock

CONFIG = "config.json"
PATIENCE_SECONDS = 5  # for a network file system to show what another host has written


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """State of a run's folder when the run starts. Made by `open_run`."""

    entry: str
    path: pathlib.Path
    flags: dict[str, Any]  # this command's; a resumed run keeps its restore_from
    in_use: bool  # whether the run writes here; --steps=0 --restore_from=… doesn't
    newest: WeightSource | None  # the run's own newest checkpoint
    source: WeightSource | None  # --restore_from, if the run has no checkpoint yet
    base: dict[str, str] | None  # adapters.describe_base, if the run trains an adapter
    damaged: dict[int, str]  # step → damage of checkpoints newer than `newest`
    changed: dict[str, Any]  # flags that differ from the original run → their values then
    locks: list[lock.Lock]  # on process 0 only; empty until the folder exists
    recipe: str = ""  # that trains; empty: the entry's own

    @property
    def start(self) -> WeightSource | None:
        """The checkpoint that the run starts from, if any."""
        return self.newest or self.source

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.newest.step if self.newest else 0

    @property
    def shown(self) -> pathlib.Path:
        """The path to print: relative to the current folder if it is inside."""
        here = pathlib.Path.cwd()
        return self.path.relative_to(here) if self.path.is_relative_to(here) else self.path

    def checkpoint(self, step: int) -> pathlib.Path:
        return self.path / "checkpoints" / str(step)

    def last_good(self) -> pathlib.Path | None:
        """The newest finished checkpoint."""
        steps = folders.steps_in(self.path / "checkpoints")
        return self.checkpoint(steps[-1]) if steps else None

    def best(self) -> pathlib.Path | None:
        """The checkpoint kept by --keep_best."""
        steps = folders.steps_in(self.path / "best")
        return self.path / "best" / str(steps[-1]) if steps else None

    def close(self) -> None:
        """Releases the folder's lock."""
        for taken in self.locks:
            taken.close()


def open_run(entry: str, run: Run, *groups, recipe: str = "") -> RunFolder:
    """Finds the checkpoint that the run resumes or starts from; process 0 takes the folder's lock.

    Every process must call this.

    Args:
      groups: the recipe's other flag dataclasses; `base` and `lora_rank` are among their fields if
        it can train adapters.
      recipe: that trains; empty: the entry's own.

    Raises UserError if --workdir can't be used for this run, or --restore_from is not a checkpoint
    of the entry.
    """
    flags: dict[str, Any] = {}
    for group in (run, *groups):
        flags |= dataclasses.asdict(group)
    rank, base_flag = flags.get("lora_rank", 0), flags.get("base", "")
    path = workdir(entry, run.workdir)
    in_use = not run.plan and (run.steps > 0 or not run.restore_from)
    locks: list[lock.Lock] = []
    step, damaged = _open_workdir(path, run.verify, locks) if in_use else (0, {})
    newest = source = base = None
    if step:
        own = locate.Location(
            f"--workdir={path}", str(path / "checkpoints" / str(step)), entry=entry
        )
        location = locate.on_all(lambda: locate.with_base(own, base_flag))
        newest = locate.load(location, run.verify)
        base = newest.metadata.get("base")
        _check_entry(entry, newest, "--workdir")
    elif run.restore_from:
        source = locate.find(run.restore_from, "--restore_from", run.verify, base_flag, entry)
        base = adapters.describe_base(source, run.restore_from) if rank else None
        _check_entry(entry, source, "--restore_from")
    elif rank:
        raise UserError(
            f"--lora_rank={rank} trains an adapter on a trained model, and there is none; use "
            "--restore_from=… as well, or leave it out"
        )
    changed = _compare(path, newest.metadata["flags"], run, *groups) if newest else {}
    if newest and not run.restore_from:  # a resumed run keeps the original one
        flags["restore_from"] = newest.metadata["flags"].get("restore_from", "")
    return RunFolder(
        entry=entry,
        path=path,
        flags=flags,
        in_use=in_use,
        newest=newest,
        source=source,
        base=base,
        damaged=damaged,
        changed=changed,
        locks=locks,
        recipe=recipe,
    )


def workdir(entry: str, name: str) -> pathlib.Path:
    """The folder that --workdir names. Raises UserError if it is in an unusable bucket."""
    return folders.absolute(folders.to_path(name or f"runs/{entry}", "--workdir"))


def flags_of(entry: str, name: str) -> dict[str, Any]:
    """Flags of the run in the workdir `name`; {} if there is none or it can't be read."""
    try:
        path = workdir(entry, name) / "checkpoints"
        newest = path / str(folders.steps_in(path)[-1])
        return dict(store.open_checkpoint(newest).metadata["flags"])
    except (*folders.errors(), ValueError, LookupError, TypeError):
        return {}


def _open_workdir(
    path: pathlib.Path, hash_files: bool, locks: list[lock.Lock]
) -> tuple[int, dict[int, str]]:
    """Locks the workdir, and finds its newest intact checkpoint.

    Args:
      hash_files: see integrity.verify.
      locks: on process 0, the workdir's lock is appended if the workdir exists.

    Returns:
      Its step, 0 if there are no checkpoints, and step → damage of newer ones.

    Raises UserError if the folder can't be used, or all its checkpoints are damaged.
    """

    def lock_and_check() -> list[tuple[int, str]]:
        fix = "use a different --workdir"
        with folders.user_errors(f"--workdir={path} can't be written", fix):
            folders.at(path).check_writable()
            if (path / CONFIG).exists():
                locks.append(lock.take(path, CONFIG))
        with folders.user_errors(f"--workdir={path} can't be read", fix):
            steps = folders.steps_in(path / "checkpoints")
        return [(n, integrity.check_files(path / "checkpoints" / str(n))) for n in steps]

    _check_shared(path)
    damaged: dict[int, str] = {}
    for step, bad in reversed(processes.broadcast_from_first(lock_and_check)):
        if not bad and hash_files:
            bad = integrity.check_hashes_on_all(path / "checkpoints" / str(step))
        if not bad:
            return step, damaged
        damaged[step] = bad
    if damaged:
        step, bad = max(damaged.items())
        raise UserError(
            f"--workdir={path} has no intact checkpoint (step {step}: {bad}); use a different "
            "--workdir"
        )
    return 0, {}


def _check_shared(path: pathlib.Path) -> None:
    """Raises UserError, on all processes, if one can't see a file that process 0 writes at `path`.

    The empty file is briefly in the folder, or in its nearest existing parent.
    """
    if processes.count() == 1 or folders.at(path).is_shared:
        return

    def require_all(answers: list[tuple[str, bool]]) -> None:
        for number, (host, sees) in enumerate(answers):
            if not sees:
                raise UserError(
                    f"--workdir={path} is not one folder: process {number} ({host}) does not see what "
                    f"process 0 ({answers[0][0]}) writes there; use a file system that all hosts share"
                )

    made = ""
    try:
        if processes.is_first():
            with contextlib.suppress(OSError):  # reported when the run first writes there
                handle, made = tempfile.mkstemp(prefix=".shared-", dir=folders.nearest(path))
                os.close(handle)
        name = processes.decide(made, lambda names: names[0])
        processes.decide([socket.gethostname(), not name or _appears(name)], require_all)
    finally:
        if made:
            os.unlink(made)


def _appears(name: str) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not os.path.exists(name):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _check_entry(entry: str, source: WeightSource, flag: str) -> None:
    if source.metadata["entry"] != entry:
        raise UserError(
            f"{flag}={source.path} has entry {source.metadata['entry']!r}, not {entry!r}; use a "
            "different one"
        )


def _compare(path: pathlib.Path, original: dict[str, Any], *groups) -> dict[str, Any]:
    """Flags that differ from the original run's: name → value then.

    If the run is older than a flag that must match, it had the flag's default.

    Raises UserError for a flag that must match and doesn't.
    """
    changed = {}
    for group in groups:
        for field in dataclasses.fields(group):
            may_change = field.metadata["may_change"]
            before, now = original.get(field.name, field.default), getattr(group, field.name)
            if field.name == "set" and (changed_set := changed_setting(before, now)):
                flag, set_before = changed_set
                raise UserError(
                    f"--{flag} must match the original run, {set_before or 'none'}; use that, or a "
                    f"different --workdir (this one is {path})"
                )
            if isinstance(before, list):  # JSON has no tuples
                before = tuple(before)
            if before == now or (may_change and field.name not in original):
                continue
            another_start = field.name == "restore_from" and now
            if another_start or not may_change:
                raise UserError(
                    f"--{field.name}={now} must match the original run, "
                    f"{'none' if before == '' else before}; use that, or a different --workdir "
                    f"(this one is {path})"
                )
            changed[field.name] = before
    return changed
