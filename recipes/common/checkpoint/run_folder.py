"""A run's folder as the run finds it: its checkpoints, its lock, and whether the flags match.

Opening one writes nothing; saver.py does.
"""

import dataclasses
import pathlib
from typing import Any

from recipes.common.checkpoint import adapter, helpers, integrity, shared, store
from recipes.common.checkpoint.store import Source
from recipes.common.runtime import Run, UserError, folders, lock, processes

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """What a run starts with. Made by `open_run`."""

    entry: str
    path: pathlib.Path
    flags: dict[str, Any]  # of this command, or of the one that the run began with
    in_use: bool  # whether the run writes here; --steps=0 --restore_from=… leaves it alone
    newest: Source | None  # this run's own checkpoint
    source: Source | None  # another's, to begin from
    base: dict[str, str] | None  # of a run that trains an adapter: adapter.named
    damaged: dict[int, str]  # step → what is wrong with that checkpoint
    changed: dict[str, Any]  # flag that differs from the original run's → its value then
    locks: list[Any]  # lock.take's, held, on process 0: none before the folder exists

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
        """The checkpoint that --keep_best has kept."""
        steps = store.steps_in(self.path / "best")
        return self.path / "best" / str(steps[-1]) if steps else None

    def close(self) -> None:
        """Leaves the folder to other runs."""
        for held in self.locks:
            held.close()


def open_run(entry: str, run: Run, *groups) -> RunFolder:
    """Finds out what the run resumes or starts from; process 0 takes the folder's lock.

    Args:
      groups: the recipe's other flags, dataclasses as `run` is; where it trains adapters, `base` and
        `lora_rank` are among them.

    Raises UserError if --workdir can't be this run's folder, or --restore_from is no checkpoint of
    the entry.
    """
    given: dict[str, Any] = {}
    for group in (run, *groups):
        given |= dataclasses.asdict(group)
    rank, base = given.get("lora_rank", 0), given.get("base", "")
    path = workdir(entry, run.workdir)
    in_use, locks = run.steps > 0 or not run.restore_from, []
    start = run.restore_from
    theirs = start.startswith("hf:")

    def resumed(own: str, whole: bool) -> Source:
        return store.with_base(store.at(folders.at(own)), f"--workdir={path}", whole, base)

    def look() -> dict[str, Any]:  # on process 0; whole checkpoints are read with the others' help
        own, damaged = _newest(path, run.verify, locks) if in_use else (None, [])
        found = {"own": own and str(own), "given": start, "base": None, "damaged": damaged}
        if own:
            found["base"] = resumed(found["own"], run.verify).metadata.get("base")
        elif start and (rank or not theirs):
            source = store.find(start, whole=run.verify, base=base)
            found["base"] = adapter.named(source, start) if rank else None
            found["given"] = start if theirs else str(source.path)
        return found

    if in_use:
        shared.check(path, "workdir")
    look = helpers.with_help("start", integrity.sha256_of, look)
    found = processes.broadcast_from_first(look)

    def sources() -> list[Source | None]:
        newest = resumed(found["own"], whole=False) if found["own"] else None
        known = start and not newest
        return [newest, store.find(found["given"], whole=False, base=base) if known else None]

    newest, source = processes.together(sources)  # a process may lack what another has
    if rank and not (newest or source):
        raise UserError(
            f"--lora_rank={rank} trains an adapter of a model that has learned something, and there "
            "is none; use --restore_from=… as well, or leave it out"
        )
    for what, start in (("--workdir", newest), ("--restore_from", source)):
        if start and start.metadata["entry"] != entry:
            raise UserError(
                f"{what}={start.path} has entry {start.metadata['entry']!r}, not {entry!r}; use a "
                "different one"
            )
    changed = _compare(path, newest.metadata["flags"], run, *groups) if newest else {}
    if newest and not run.restore_from:  # what the run began with remains what it began with
        given["restore_from"] = newest.metadata["flags"].get("restore_from", "")
    damaged = dict(found["damaged"])
    return RunFolder(
        entry, path, given, in_use, newest, source, found["base"], damaged, changed, locks
    )


def workdir(entry: str, given: str) -> pathlib.Path:
    """The folder that --workdir names."""
    return folders.absolute(folders.at(given or f"runs/{entry}", "--workdir"))


def flags_of(entry: str, given: str) -> dict[str, Any]:
    """The flags of the run in --workdir; {} if there is none, or it can't be read."""
    try:
        path = workdir(entry, given) / "checkpoints"
        newest = path / str(store.steps_in(path)[-1])
        return dict(store.at(newest).metadata["flags"])
    except (*folders.errors(), ValueError, LookupError, TypeError):
        return {}


def cannot_write(path: pathlib.Path, error: Exception) -> UserError:
    return UserError(
        f"--workdir={path} can't be written ({folders.reason(error)}); use a different --workdir"
    )


def _newest(
    path: pathlib.Path, whole: bool, locks: list[Any]
) -> tuple[pathlib.Path | None, list[tuple[int, str]]]:
    """The newest checkpoint that is whole; (step, what is wrong with it) of newer ones.

    Runs on process 0, and adds the folder's lock to `locks`. Raises UserError.
    """
    if not folders.in_bucket(path) and not (existing := folders.nearest(path)).is_dir():
        which = "" if existing == path else f": {existing}"
        raise UserError(f"--workdir={path}{which} is a file; use a folder")
    try:
        folders.try_to_write(path)
        if (path / CONFIG).exists():
            locks.append(lock.take(path, CONFIG))
    except folders.errors() as error:
        raise cannot_write(path, error) from None
    with folders.telling(f"--workdir={path} can't be read", "use a different --workdir"):
        steps = store.steps_in(path / "checkpoints")
    damaged = []
    for step in reversed(steps):
        folder = path / "checkpoints" / str(step)
        bad = integrity.verify(folder, whole)
        if not bad:
            return folder, damaged
        damaged.append((step, bad))
    if damaged:
        step, bad = damaged[0]
        raise UserError(
            f"--workdir={path} has no checkpoint that is whole (step {step}: {bad}); use a "
            "different --workdir"
        )
    return None, []


def _compare(path: pathlib.Path, before: dict[str, Any], *groups) -> dict[str, Any]:
    """The flags that differ from the original run's: name → value then.

    A run that is older than a flag that must match had the flag's default.

    Raises UserError for those that must match it.
    """
    changed = {}
    for group in groups:
        for field in dataclasses.fields(group):
            may_change = field.metadata["may_change"]
            was, now = before.get(field.name, field.default), getattr(group, field.name)
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
