"""Finds what is at a path: a checkpoint, a Hugging Face model, or an adapter together with its base."""

import pathlib

import zoo
from recipes.common import hf
from recipes.common.checkpoint import integrity, lora
from recipes.common.checkpoint.store import Source, config_of, open_checkpoint, steps_in
from recipes.common.runtime import UserError, processes
from recipes.common.storage import folders

# The zoo's own checkpoints, a folder for each name.
PUBLISHED = pathlib.Path(zoo.__file__).parent / "checkpoints"


def published() -> list[str]:
    """Names of the checkpoints that come with the zoo."""
    return sorted(path.name for path in PUBLISHED.iterdir()) if PUBLISHED.is_dir() else []


def find(
    path: str | pathlib.Path, flag: str = "--restore_from", hash_files: bool = True, base: str = ""
) -> Source:
    """The checkpoint at a path: a run's workdir (its newest one) or a checkpoint's own folder.

    A bare name that is no folder is a published checkpoint: "mlp.digits". "hf:DIR" is a Hugging
    Face model folder, and "hf:ORG/NAME" one on the Hub. An adapter, PEFT's included (with or without
    "hf:"), is joined with its base: the result is the merged model.

    Every process of a run must call this. Process 0 finds the checkpoint, and all share the hashing.

    Args:
      flag: the flag to name in messages.
      hash_files: whether to hash every file, see integrity.verify.
      base: path of an adapter's base if it has moved.

    Raises UserError if there is none, or it is damaged.
    """
    named = f"{flag}={path}"
    return with_base(_open(str(path), named, hash_files), named, hash_files, base)


def with_base(source: Source, named: str, hash_files: bool, base: str) -> Source:
    """Joins an adapter with its base; returns any other source unchanged.

    Args:
      named: how the user named it, for messages: "--workdir=runs/x".
      hash_files, base: see `find`.

    Raises UserError if the base is missing or has changed, or is a different model.
    """
    if "base" not in source.metadata:
        if base:
            raise UserError(f"--base={base} is for adapters, and {named} is not one; leave it out")
        return source
    recorded = source.metadata["base"]
    where = base or recorded["path"]
    fix = "use --base=PATH of the model that it was trained on"
    try:
        model = _open(where, f"--base={where}", hash_files)
    except UserError as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{named} is an adapter without its base ({reason}); {fix}") from None
    if "base" in model.metadata:
        raise UserError(f"{named} is an adapter, and its base --base={where} is one too; {fix}")
    if not isinstance(source, hf.Adapter):
        # The digest of a Hugging Face folder takes reading all of it.
        unchecked = isinstance(model, hf.Folder) and not hash_files
        digest = recorded["sha256"] if unchecked else lora.content_sha256(model)
        if digest != recorded["sha256"]:
            raise UserError(
                f"{named} is an adapter of a model with SHA-256 {recorded['sha256'][:8]}…, and "
                f"{where} has {digest[:8]}…; {fix}"
            )

    def join() -> lora.Adapted:
        adapter = source
        if isinstance(adapter, hf.Adapter):
            adapter = adapter.on(model.metadata, config_of(model))
        adapted = lora.Adapted(adapter, model, lora.portable_path(model, where))
        adapted.check()
        return adapted

    return processes.run_on_all(join)


def _open(path: str, named: str, hash_files: bool) -> Source:
    """Opens what is at a path; an adapter is not joined with its base. Raises UserError."""
    place = processes.broadcast_from_first(lambda: _place(path, named))
    if place.startswith("hf:"):  # each host has its own copy
        return processes.run_on_all(lambda: hf.open_folder(hf.locate(place.removeprefix("hf:"))))
    folder = folders.to_path(place)
    if bad := integrity.verify_on_all(folder, hash_files):
        raise UserError(f"{named}: {bad} in {folder}; use an intact checkpoint")
    return processes.run_on_all(lambda: open_checkpoint(folder))


def _place(path: str, named: str) -> str:
    """Returns the folder of the checkpoint at a path, or hf:NAME."""
    if path.startswith("hf:"):
        return path
    with folders.user_errors(f"{named} can't be read", "use another"):
        folder = folders.to_path(path, named.partition("=")[0])
        if not folder.exists() and path == folder.name:
            folder = PUBLISHED / folder.name
        for steps_folder in (folder / "checkpoints", folder):
            if steps := steps_in(steps_folder):
                return str(folders.absolute(steps_folder / str(steps[-1])))
        if (folder / "metadata").exists() or (folder / "state").exists():
            return str(folders.absolute(folder))
        if hf.is_adapter(folder):
            return f"hf:{folder}"
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            raise UserError(
                f"{named} is a Hugging Face model folder, not a checkpoint; use hf:{path}"
            )
        fix = "use a run's workdir or a checkpoint"
        if not named.startswith("--source"):  # of recipes.publish, which takes nothing else
            fix = (
                "use a run's workdir, a checkpoint, hf:DIR or hf:ORG/NAME for a Hugging Face model, "
                f"or one of {', '.join(published())}"
            )
        what = "holds no checkpoint" if folder.exists() else "does not exist"
        raise UserError(f"{named} {what}; {fix}")
