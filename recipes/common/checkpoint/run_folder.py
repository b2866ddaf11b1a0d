"""A run's folder when the run starts: its checkpoints, its lock, and whether the flags match.

Opening a folder writes nothing; saver.py does.
"""

import dataclasses
import pathlib
from typing import Any

from recipes.common.checkpoint import integrity, lora, parallel_hashing, shared_folder_check, store
from recipes.common.checkpoint.store import Source
from recipes.common.config_flags import changed_setting
from recipes.common.runtime import Run, UserError, folders, lock, processes

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """State of a run's folder when the run starts. Made by `open_run`."""

    entry: str
    path: pathlib.Path
    flags: dict[str, Any]  # this command's; a resumed run keeps its restore_from
    in_use: bool  # whether the run writes here; --steps=0 --restore_from=… doesn't
    newest: Source | None  # the run's own newest checkpoint
    source: Source | None  # --restore_from, if the run has no checkpoint yet
    base: dict[str, str] | None  # lora.describe_base, if the run trains an adapter
    damaged: dict[int, str]  # step → damage of checkpoints newer than `newest`
    changed: dict[str, Any]  # flags that differ from the original run → their values then
    locks: list[Any]  # held lock, on process 0 only; empty until the folder exists

    @property
    def start(self) -> Source | None:
        """The checkpoint that the run starts from, if any."""
        return self.newest or self.source

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.newest.step if self.newest else 0

    @property
    def shown(self) -> pathlib.Path:
        """The path to print: relative to the current folder if it is inside."""
        if folders.in_bucket(self.path):
            return self.path
        here = pathlib.Path.cwd()
        return self.path.relative_to(here) if self.path.is_relative_to(here) else self.path

    def checkpoint(self, step: int) -> pathlib.Path:
        return self.path / "checkpoints" / str(step)

    def last_good(self) -> pathlib.Path | None:
        """The newest finished checkpoint."""
        steps = store.steps_in(self.path / "checkpoints")
        return self.checkpoint(steps[-1]) if steps else None

    def best(self) -> pathlib.Path | None:
        """The checkpoint kept by --keep_best."""
        steps = store.steps_in(self.path / "best")
        return self.path / "best" / str(steps[-1]) if steps else None

    def close(self) -> None:
        """Releases the folder's lock."""
        for held in self.locks:
            held.close()


def open_run(entry: str, run: Run, *groups) -> RunFolder:
    """Finds the checkpoint that the run resumes or starts from; process 0 takes the folder's lock.

    Args:
      groups: the recipe's other flag dataclasses; `base` and `lora_rank` are among their fields if
        it can train adapters.

    Raises UserError if --workdir can't be used for this run, or --restore_from is not a checkpoint
    of the entry.
    """
    given: dict[str, Any] = {}
    for group in (run, *groups):
        given |= dataclasses.asdict(group)
    rank, base = given.get("lora_rank", 0), given.get("base", "")
    path = workdir(entry, run.workdir)
    in_use, locks = not run.plan and (run.steps > 0 or not run.restore_from), []
    start = run.restore_from
    from_hf = start.startswith("hf:")

    def resumed(own: str, hash_files: bool) -> Source:
        own_checkpoint = store.open_checkpoint(folders.to_path(own))
        return store.with_base(own_checkpoint, f"--workdir={path}", hash_files, base)

    def look() -> dict[str, Any]:  # on process 0; all processes share the hashing
        own, damaged = _newest(path, run.verify, locks) if in_use else (None, [])
        found = {"own": own and str(own), "given": start, "base": None, "damaged": damaged}
        if own:
            found["base"] = resumed(found["own"], run.verify).metadata.get("base")
        elif start and (rank or not from_hf):
            source = store.find(start, hash_files=run.verify, base=base)
            found["base"] = lora.describe_base(source, start) if rank else None
            found["given"] = start if from_hf else str(source.path)
        return found

    if in_use:
        shared_folder_check.check(path, "workdir")
    found = parallel_hashing.call_on_first("start", look)

    def sources() -> list[Source | None]:
        newest = resumed(found["own"], hash_files=False) if found["own"] else None
        restore = start and not newest
        return [
            newest,
            store.find(found["given"], hash_files=False, base=base) if restore else None,
        ]

    newest, source = processes.run_on_all(sources)  # a file may be missing on one host
    if rank and not (newest or source):
        raise UserError(
            f"--lora_rank={rank} trains an adapter on a trained model, and there is none; use "
            "--restore_from=… as well, or leave it out"
        )
    for what, begun in (("--workdir", newest), ("--restore_from", source)):
        if begun and begun.metadata["entry"] != entry:
            raise UserError(
                f"{what}={begun.path} has entry {begun.metadata['entry']!r}, not {entry!r}; use a "
                "different one"
            )
    changed = _compare(path, newest.metadata["flags"], run, *groups) if newest else {}
    if newest and not run.restore_from:  # a resumed run keeps the original one
        given["restore_from"] = newest.metadata["flags"].get("restore_from", "")
    damaged = dict(found["damaged"])
    return RunFolder(
        entry, path, given, in_use, newest, source, found["base"], damaged, changed, locks
    )


def workdir(entry: str, given: str) -> pathlib.Path:
    """The folder that --workdir names. Raises UserError if it is in an unusable bucket."""
    return folders.absolute(folders.to_path(given or f"runs/{entry}", "--workdir"))


def flags_of(entry: str, given: str) -> dict[str, Any]:
    """Flags of the run in --workdir; {} if there is none or it can't be read."""
    try:
        path = workdir(entry, given) / "checkpoints"
        newest = path / str(store.steps_in(path)[-1])
        return dict(store.open_checkpoint(newest).metadata["flags"])
    except (*folders.errors(), ValueError, LookupError, TypeError):
        return {}


def _newest(
    path: pathlib.Path, hash_files: bool, locks: list[Any]
) -> tuple[pathlib.Path | None, list[tuple[int, str]]]:
    """Finds the newest intact checkpoint; runs on process 0 only.

    Args:
      hash_files: see integrity.verify.
      locks: the folder's lock is appended.

    Returns:
      Its folder, or None if there are no checkpoints, and (step, damage) of newer ones.

    Raises UserError if the folder can't be used, or all its checkpoints are damaged.
    """
    if not folders.in_bucket(path) and not (existing := folders.nearest(path)).is_dir():
        which = "" if existing == path else f": {existing}"
        raise UserError(f"--workdir={path}{which} is a file; use a folder")
    with folders.user_errors(f"--workdir={path} can't be written", "use a different --workdir"):
        folders.try_to_write(path)
        if (path / CONFIG).exists():
            locks.append(lock.take(path, CONFIG))
    with folders.user_errors(f"--workdir={path} can't be read", "use a different --workdir"):
        steps = store.steps_in(path / "checkpoints")
    damaged = []
    for step in reversed(steps):
        folder = path / "checkpoints" / str(step)
        bad = integrity.verify(folder, hash_files)
        if not bad:
            return folder, damaged
        damaged.append((step, bad))
    if damaged:
        step, bad = damaged[0]
        raise UserError(
            f"--workdir={path} has no intact checkpoint (step {step}: {bad}); use a different "
            "--workdir"
        )
    return None, []


def _compare(path: pathlib.Path, before: dict[str, Any], *groups) -> dict[str, Any]:
    """Flags that differ from the original run's: name → value then.

    If the run is older than a flag that must match, it had the flag's default.

    Raises UserError for a flag that must match and doesn't.
    """
    changed = {}
    for group in groups:
        for field in dataclasses.fields(group):
            may_change = field.metadata["may_change"]
            was, now = before.get(field.name, field.default), getattr(group, field.name)
            if field.name == "set" and (changed_set := changed_setting(was, now)):
                flag, set_before = changed_set
                raise UserError(
                    f"--{flag} must match the original run, {set_before or 'none'}; use that, or a "
                    f"different --workdir (this one is {path})"
                )
            if was == now or (may_change and field.name not in before):
                continue
            another_start = field.name == "restore_from" and now
            if another_start or not may_change:
                raise UserError(
                    f"--{field.name}={now} must match the original run, "
                    f"{'none' if was == '' else was}; use that, or a different --workdir (this one "
                    f"is {path})"
                )
            changed[field.name] = was
    return changed
