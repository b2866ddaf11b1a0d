"""Finds what is at a path: a checkpoint, a Hugging Face model, or an adapter and its base."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import zoo
from recipes.common.checkpoint import adapters, integrity
from recipes.common.checkpoint.store import WeightSource, config_of, open_checkpoint
from recipes.common.runtime import UserError, processes
from recipes.common.storage import folders

# The zoo's own checkpoints, a folder for each name.
PUBLISHED = pathlib.Path(zoo.__file__).parent / "checkpoints"
# Published names whose checkpoints are not in the repository, and the runs that make such models.
MADE_BY = {
    "moe.stdlib_2m": "recipes.moe --mesh=data=2,expert=4 --steps=1500 --learning_rate=0.003",
    "qwen3_next.stdlib_1m": "recipes.qwen3_next --mesh=1x1 --steps=600",
}
PEFT_CONFIG = "adapter_config.json"  # in folders of PEFT's adapters
FIX = "use --base=PATH of the model that it was trained on"


@dataclasses.dataclass(frozen=True)
class Location:
    """A checkpoint or model folder at a path, and the base that must be loaded before it."""

    named: str  # how the user named it: "--restore_from=runs/x"
    folder: str  # where process 0 finds it
    hf_name: str = ""  # of a Hugging Face model or adapter; empty: a checkpoint
    base: "Location | None" = None  # of an adapter
    entry: str = ""  # that reads a model folder, of several that can, or the module of its data

    def open(self) -> WeightSource:
        """The model, or the adapter alone. Raises UserError."""
        if not self.hf_name:
            with folders.user_errors(f"{self.named} can't be read", "use another"):
                return open_checkpoint(folders.to_path(self.folder))
        from recipes.common import hf  # every family; most runs open checkpoints alone

        # Each host has its own copy of a model on the Hub.
        return hf.open_folder(
            pathlib.Path(self.folder) if processes.is_first() else hf.locate(self.hf_name),
            self.entry,
        )


def published() -> list[str]:
    """Names of the checkpoints that come with the zoo."""
    return sorted(path.name for path in PUBLISHED.iterdir()) if PUBLISHED.is_dir() else []


def find(
    path: str | pathlib.Path,
    flag: str = "--restore_from",
    hash_files: bool = True,
    base: str = "",
    entry: str = "",
) -> WeightSource:
    """The checkpoint at a path: a run's workdir (its newest one) or a checkpoint's own folder.

    A bare name that is no folder is a published checkpoint: "mlp.digits". "hf:DIR" is a Hugging
    Face model folder, and "hf:ORG/NAME" one on the Hub. An adapter, PEFT's included (with or without
    "hf:"), is joined with its base: the result is the merged model.

    Every process of a run must call this. Process 0 finds the checkpoint, and all share the hashing.

    Args:
      flag: the flag to name in messages.
      hash_files: whether to hash every file, see integrity.verify.
      base: path of an adapter's base if it has moved.
      entry: that reads a model folder, if several can, or the module of its data; empty: the first of
        them.

    Raises UserError if there is none, or it is damaged.
    """
    location = on_all(lambda: with_base(_locate(str(path), f"{flag}={path}", entry), base))
    _require_intact(location, hash_files)
    return load(location, hash_files)


def on_all(locate: Callable[[], Location]) -> Location:
    """Calls `locate` on process 0; returns its location on all. Each process must call this."""
    fields = processes.broadcast_from_first(lambda: dataclasses.asdict(locate()))
    base = Location(**fields["base"]) if fields["base"] else None
    return Location(**fields | {"base": base})


def with_base(location: Location, base: str) -> Location:
    """Adds the base's location if an adapter is there.

    Args:
      base: see `find`.

    Raises UserError if there is no model at the base.
    """
    named, (recorded, entry) = location.named, _recorded_base(location)
    if not recorded:
        if base:
            raise UserError(f"--base={base} is for adapters, and {named} is not one; leave it out")
        return location
    path = base or recorded
    try:
        base_location = _locate(path, f"--base={path}", entry or location.entry)
    except UserError as error:
        raise _without_base(named, error) from None
    if _recorded_base(base_location)[0]:
        raise UserError(f"{named} is an adapter, and its base --base={path} is one too; {FIX}")
    return dataclasses.replace(location, base=base_location)


def _recorded_base(location: Location) -> tuple[str, str]:
    """(the path of the base of an adapter, its entry if it is known); "" if it is none."""
    if not location.hf_name:
        metadata = open_checkpoint(folders.to_path(location.folder)).metadata
        return (metadata["base"]["path"], metadata["entry"]) if "base" in metadata else ("", "")
    from recipes.common import hf

    folder = pathlib.Path(location.folder)
    path = hf.read_adapter(folder).metadata["base"]["path"] if hf.is_adapter(folder) else ""
    return path, ""


def _without_base(named: str, error: UserError) -> UserError:
    reason = str(error).partition(";")[0]
    return UserError(f"{named} is an adapter without its base ({reason}); {FIX}")


def _locate(path: str, named: str, entry: str = "") -> Location:
    """What is at a path, without an adapter's base. Raises UserError if a file is missing."""
    if path.startswith("hf:"):
        from recipes.common import hf

        name = path.removeprefix("hf:")
        return Location(named, str(hf.locate(name)), name, entry=entry)
    with folders.user_errors(f"{named} can't be read", "use another"):
        folder = folders.to_path(path, named.partition("=")[0])
        if not folder.exists() and path == folder.name:
            folder = PUBLISHED / folder.name
        checkpoint = _newest(folder)
        if not checkpoint and (folder / PEFT_CONFIG).is_file():
            return Location(named, str(folder), str(folder), entry=entry)
        if not checkpoint:
            raise _nothing_there(folder, named)
        if bad := integrity.check_files(checkpoint):
            raise UserError(f"{named}: {bad} in {checkpoint}; use an intact checkpoint")
        return Location(named, str(folders.absolute(checkpoint)), entry=entry)


def _newest(folder: pathlib.Path) -> pathlib.Path | None:
    """The newest checkpoint of a run's workdir, or a checkpoint's own folder."""
    for parent in (folder / "checkpoints", folder):
        if steps := folders.steps_in(parent):
            return parent / str(steps[-1])
    items = (folder / "metadata", folder / "state")
    return folder if any(item.exists() for item in items) else None


def _nothing_there(folder: pathlib.Path, named: str) -> UserError:
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return UserError(
            f"{named} is a Hugging Face model folder, not a checkpoint; use hf:{folder}"
        )
    if not folder.exists() and folder.name in MADE_BY:
        name, flag = folder.name, named.partition("=")[0]
        return UserError(
            f"{named} does not come with the zoo; make it with `python -m {MADE_BY[name]} "
            f"--workdir=runs/{name}`, then use {flag}=runs/{name}"
        )
    what = "holds no checkpoint" if folder.exists() else "does not exist"
    return UserError(
        f"{named} {what}; use a run's workdir or a checkpoint; the zoo has {', '.join(published())}"
    )


# ---- opening -------------------------------------------------------------------------------------


def load(location: Location, hash_files: bool) -> WeightSource:
    """Opens what is at a location, an adapter joined with its base. Each process must call this.

    Args:
      hash_files: whether to hash the base; what is at the location itself has been.

    Raises UserError if the base is damaged or has changed, or is a different model.
    """
    source: Any = processes.run_on_all(location.open)
    if not location.base:
        return source
    try:
        _require_intact(location.base, hash_files)
        base = processes.run_on_all(location.base.open)
    except UserError as error:
        raise _without_base(location.named, error) from None
    path = location.base.named.partition("=")[2]
    recorded = source.metadata["base"]["sha256"]  # PEFT records none
    # The digest of a Hugging Face folder takes reading all of it.
    if recorded and (hash_files or not location.base.hf_name):
        digest = adapters.content_sha256(base)
        if digest != recorded:
            raise UserError(
                f"{location.named} is an adapter of a model with SHA-256 {recorded[:8]}…, and {path} "
                f"has {digest[:8]}…, so it has changed or is a different model; {FIX}"
            )
    if location.hf_name:  # PEFT's files don't say what their base is
        source = source.on(base.metadata, config_of(base))
        source.check_copies(base)
    adapted = adapters.Adapted(source, base, adapters.portable_path(base, path))
    adapted.check()
    return adapted


def _require_intact(location: Location, hash_files: bool) -> None:
    if not hash_files or location.hf_name:
        return
    if bad := integrity.check_hashes_on_all(folders.to_path(location.folder)):
        raise UserError(f"{location.named}: {bad} in {location.folder}; use an intact checkpoint")
