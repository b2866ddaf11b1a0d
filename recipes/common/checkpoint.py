"""Checkpoints on disk: what one is, where it lies, and how it comes back onto any mesh.

A checkpoint is a folder with a standard Orbax checkpoint of these items:

    state      {"params", "opt_state", "step", "rngs"}: nested dicts of arrays
    data       JSON: the next batch, and what it is a batch of
    metadata   JSON: entry, config, rules, mesh, logical axes, flags, versions

and hashes.json, the size and SHA-256 of each file: Orbax and TensorStore read flipped bits of an
array without a word.
"""

import concurrent.futures
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import pathlib
import platform
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import Mesh

from recipes.common import sharding
from recipes.common.errors import UserError
from recipes.common.sharding import Layout, Table, Tree, paths

ENTRIES = {"transformer": "Transformer"}  # zoo module → its model


class Checkpoint(NamedTuple):
    """One checkpoint on disk."""

    path: pathlib.Path  # the folder with the items
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return self.metadata["step"]


def find(path: str | pathlib.Path) -> Checkpoint:
    """The checkpoint at a path: a run's workdir (its newest) or a checkpoint's own folder.

    Raises UserError if there is none.
    """
    folder = pathlib.Path(path).expanduser()
    what = f"--restore_from={path}"
    if not folder.exists():
        raise UserError(f"{what} does not exist; give a run's workdir or a checkpoint")
    for inner in (folder / "checkpoints", folder):
        if steps := steps_in(inner):
            folder = inner / str(steps[-1])
            break
    if not (folder / "metadata").exists() and not (folder / "state").exists():
        raise UserError(f"{what} holds no checkpoint; give a run's workdir or a checkpoint")
    if bad := verify(folder):
        raise UserError(f"{what}: {bad} in {folder}; give a checkpoint that is whole")
    return at(folder)


def at(folder: pathlib.Path) -> Checkpoint:
    """The checkpoint whose own folder this is, which `verify` has found whole."""
    text = (folder / "metadata" / "metadata").read_text()
    return Checkpoint(folder.absolute(), json.loads(text))


# ---- whole or damaged --------------------------------------------------------------------------

COMMITTED = "commit_success.txt"  # Orbax's mark of a finished folder
HASHES = "hashes.json"
_NEEDED = [f"{item}{COMMITTED}" for item in ("", "state/", "data/", "metadata/")]
_NEEDED += ["state/_METADATA", "data/metadata", "metadata/metadata"]


def verify(folder: str | pathlib.Path) -> str:
    """What is wrong with a checkpoint's folder, naming the first bad file; "" if it is whole.

    Reads all of it where it has hashes.json, as every checkpoint has that a run of ours saved.
    """
    folder = pathlib.Path(folder)
    for name in _NEEDED:
        if not (folder / name).is_file():
            return f"{name} is missing"
    hashes: dict[str, list] = {}
    try:
        for name in (HASHES, "data/metadata", "metadata/metadata"):
            if name != HASHES or (folder / name).exists():
                content = json.loads((folder / name).read_bytes())
                hashes = content if name == HASHES else hashes
        if missing := {"entry", "config", "step", "flags", "data"} - content.keys():
            return f"metadata/metadata has no {min(missing)!r}"
        found = {name: file.stat().st_size for name, file in _files(folder).items()}
        for name, (size, _) in hashes.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]:,} bytes instead of {size:,}"
        for name, digest in _digests(folder, list(hashes)).items():
            if digest != hashes[name][1]:
                return f"{name} is not what was saved (its SHA-256 differs)"
    except (ValueError, TypeError, AttributeError):
        return f"{name} is not the JSON that was saved"
    except OSError as error:
        return f"{error.filename or name} can't be read ({error.strerror})"
    return ""


def write_hashes(folder: pathlib.Path) -> None:
    """hashes.json of a checkpoint that is about to be committed."""
    # Orbax writes the first two once more as it commits.
    later = {COMMITTED, "_CHECKPOINT_METADATA", HASHES}
    files = {name: file for name, file in _files(folder).items() if name not in later}
    digests = _digests(folder, list(files))
    hashes = {name: [file.stat().st_size, digests[name]] for name, file in files.items()}
    (folder / HASHES).write_text(json.dumps(hashes, indent=0))


def _files(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}


def _digests(folder: pathlib.Path, names: list[str]) -> dict[str, str]:
    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # hashing lets go of Python's lock
        return dict(zip(names, pool.map(digest, names), strict=True))


# ---- back onto a mesh --------------------------------------------------------------------------


def steps_in(folder: pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and p.is_dir())


def restore(path: str | pathlib.Path, mesh: Mesh, rules: str | Table | None = None):
    """A trained model on `mesh`, whatever mesh and table it was saved with.

    Args:
      path: a run's workdir, or a checkpoint's own folder.
      rules: a strategy of the entry's RULES, or a table of your own; None: what suits the mesh.

    Returns:
      (model, metadata): an NNX module whose every array lies where `rules` says, and the
      checkpoint's metadata. No device ever holds more than its shards.

    Raises UserError, a ValueError, if there is no checkpoint or the rules don't fit.
    """
    checkpoint = find(path)
    entry = checkpoint.metadata["entry"]
    if entry not in ENTRIES:
        raise UserError(f"checkpoint {path} is of {entry!r}; this zoo has {', '.join(ENTRIES)}")
    zoo = importlib.import_module(f"zoo.{entry}")
    config = config_from(zoo.Config, checkpoint)
    tables, strategy = zoo.RULES, rules or ""
    if isinstance(strategy, dict):
        tables, strategy = zoo.RULES | {"(yours)": strategy}, "(yours)"

    def build() -> nnx.Module:
        return getattr(zoo, ENTRIES[entry])(config, rngs=nnx.Rngs(0))

    layout = sharding.lay_out(build, tables, strategy, mesh)
    return layout.plan.bind(restore_params(checkpoint, layout)), checkpoint.metadata


def config_from(config_class, checkpoint: Checkpoint):
    """The model's Config from a checkpoint's metadata, where JSON has made tuples into lists.

    Raises UserError if there is something in it that this version does not know.
    """
    saved = checkpoint.metadata["config"]
    known = {field.name for field in dataclasses.fields(config_class)}
    for name in saved.keys() - known:
        raise UserError(
            f"checkpoint {checkpoint.path} has {name!r} in its config, which this version's lacks; "
            f"use the version that saved it ({checkpoint.metadata.get('versions', {})})"
        )
    try:
        return config_class(**{k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint {checkpoint.path} has a config of no model ({error}); give another"
        ) from None


def restore_params(checkpoint: Checkpoint, layout: Layout) -> Tree:
    """A checkpoint's parameters, where `layout` says. Raises UserError for another model's."""
    check_params(checkpoint, layout)
    abstract = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        layout.plan.shapes,
        layout.params(),
    )
    return restore_tree(checkpoint, {"params": abstract})["params"]


def restore_tree(checkpoint: Checkpoint, abstract: Tree) -> Tree:
    """The part of a checkpoint's state that `abstract` names, each array where it says.

    Args:
      abstract: nested dict of ShapeDtypeStructs with shardings, e.g. {"params": …}.
    """
    restore_args = jax.tree.map(
        lambda a: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype),
        abstract,
    )
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(checkpoint.path / "state"), args=args)


def check_params(checkpoint: Checkpoint, layout: Layout) -> None:
    """Raises UserError if the checkpoint has other parameters, or other shapes."""
    tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(checkpoint.path / "state")).tree
    saved, wanted = paths(tree["params"]), paths(layout.plan.shapes)
    for path in sorted(saved.keys() ^ wanted.keys()):
        who = "the model" if path in saved else f"checkpoint {checkpoint.path}"
        raise UserError(f"{who} has no parameter {path}; the checkpoint is of another model")
    for path in wanted:
        theirs, ours = list(saved[path].shape), list(wanted[path].shape)
        if theirs != ours:
            raise UserError(
                f"{path} has shape {theirs} in checkpoint {checkpoint.path} and {ours} in this "
                "model; give the flags that the checkpoint was made with"
            )


def metadata(entry: str, config, layout: Layout, flags: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself, but for its step and its data."""
    return {
        "entry": entry,
        "config": dataclasses.asdict(config),
        "rules": {"name": layout.strategy, "table": layout.table},
        "mesh": dict(layout.mesh.shape),
        "logical_axes": {path: list(axes) for path, axes in paths(layout.plan.axes).items()},
        "flags": flags,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}
