"""Checkpoints on disk: what one is, where it lies, and how it comes back onto any mesh.

A checkpoint is a folder with a standard Orbax checkpoint of these items:

    state      {"params", "opt_state", "step", "rngs"}: nested dicts of arrays
    data       JSON: the next batch, and what it is a batch of
    metadata   JSON: entry, config, rules, mesh, logical axes, flags, versions

and hashes.json, the size and SHA-256 of each file: Orbax and TensorStore read flipped bits of an
array without a word. A published one (recipes.publish) has parameters only, and besides a card,
README.md, and a golden probe. All of it is JSON, Markdown or numbers: nothing in it is ever run.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import Mesh

import zoo
from recipes.common import card, hf, sharding
from recipes.common.errors import UserError
from recipes.common.sharding import Layout, Table, Tree, paths

# Without a note of the shardings it was saved with: they would tie a checkpoint to its mesh, where
# plain `ocp.StandardCheckpointer().restore(path)` else reads it anywhere.
ANY_MESH = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False))
)

ENTRIES = {  # zoo module → its model
    "dot_relu_dot": "DotReluDot",
    "mlp": "MLP",
    "transformer": "Transformer",
}

PUBLISHED = (
    pathlib.Path(zoo.__file__).parent / "checkpoints"
)  # the zoo's own, a folder for each name


class Checkpoint(NamedTuple):
    """One checkpoint on disk."""

    path: pathlib.Path  # the folder with the items
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return self.metadata["step"]


Source = Checkpoint | hf.Folder  # what parameters are restored from


def find(path: str | pathlib.Path, flag: str = "--restore_from", whole: bool = True) -> Source:
    """The checkpoint at a path: a run's workdir (its newest) or a checkpoint's own folder.

    A bare name with nothing at it is a published checkpoint: "mlp.digits". "hf:DIR" is a Hugging
    Face model folder, and "hf:ORG/NAME" one of the Hub. `whole`: see `verify`.

    Raises UserError if there is none, or a damaged one.
    """
    if str(path).startswith("hf:"):
        return hf.Folder(hf.locate(str(path).removeprefix("hf:")))
    folder, what = pathlib.Path(path).expanduser(), f"{flag}={path}"
    fix = "give a run's workdir or a checkpoint"
    if not folder.exists() and str(path) == folder.name:
        folder = PUBLISHED / folder.name
        fix = f"give a run's workdir, a checkpoint, or one of {', '.join(published())}"
    if not folder.exists():
        raise UserError(f"{what} does not exist; {fix}")
    for inner in (folder / "checkpoints", folder):
        if steps := steps_in(inner):
            folder = inner / str(steps[-1])
            break
    if not (folder / "metadata").exists() and not (folder / "state").exists():
        raise UserError(f"{what} holds no checkpoint; {fix}")
    if bad := verify(folder, whole):
        raise UserError(f"{what}: {bad} in {folder}; give a checkpoint that is whole")
    return at(folder)


def at(folder: pathlib.Path) -> Checkpoint:
    """The checkpoint whose own folder this is, which `verify` has found whole."""
    text = (folder / "metadata" / "metadata").read_text()
    return Checkpoint(folder.absolute(), json.loads(text))


def published() -> list[str]:
    """Names of the checkpoints that travel with the zoo."""
    return sorted(path.name for path in PUBLISHED.iterdir()) if PUBLISHED.is_dir() else []


# ---- whole or damaged --------------------------------------------------------------------------

COMMITTED = "commit_success.txt"  # Orbax's mark of a finished folder
HASHES = "hashes.json"
PROBE = "probe.json"  # of a published one: recipes.common.probe
_NEEDED = [f"{item}{COMMITTED}" for item in ("", "state/", "metadata/")]
_NEEDED += ["state/_METADATA", "metadata/metadata"]


def verify(folder: str | pathlib.Path, whole: bool = True) -> str:
    """What is wrong with a checkpoint's folder, naming the first bad file; "" if it is whole.

    Reads all of it where it has hashes.json, as every checkpoint has that a run of ours saved.

    Args:
      whole: False does not, which may take long with a huge one, and compares sizes only.
    """
    folder = pathlib.Path(folder)
    for name in _NEEDED:
        if not (folder / name).is_file():
            return f"{name} is missing"
    hashes: dict[str, list] = {}
    try:
        for name in (HASHES, "data/metadata", "metadata/metadata"):
            if (folder / name).exists():
                content = json.loads((folder / name).read_bytes())
                hashes = content if name == HASHES else hashes
        if missing := {"entry", "config", "step", "flags", "data"} - content.keys():
            return f"metadata/metadata has no {min(missing)!r}"
        found = {name: file.stat().st_size for name, file in _files(folder).items()}
        for name in (HASHES, card.FILE, PROBE) if "published" in content else ():
            if name not in found or (name != HASHES and name not in hashes):
                return f"{name} is missing" + (f" in {HASHES}" if name in found else "")
        for name, (size, _) in hashes.items():
            if name not in found:
                return f"{name} is missing"
            if found[name] != size:
                return f"{name} has {found[name]:,} bytes instead of {size:,}"
        if "published" in content:
            name, said = card.FILE, card.digests((folder / card.FILE).read_text(errors="replace"))
            for other, (_, digest) in hashes.items():
                if other != card.FILE and said.get(other) != digest:
                    return f"{name} and {HASHES} disagree on the SHA-256 of {other}"
        for name, digest in _digests(folder, list(hashes) if whole else []).items():
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
    _write_hashes(folder, hashes_of(folder, _files(folder).keys() - later))


def hashes_of(folder: pathlib.Path, names: Iterable[str]) -> dict[str, list]:
    """Name → [bytes, SHA-256], in the order of names."""
    digests = _digests(folder, sorted(names))
    return {name: [(folder / name).stat().st_size, digest] for name, digest in digests.items()}


def _write_hashes(folder: pathlib.Path, hashes: dict[str, list]) -> None:
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


def restore(
    path: str | pathlib.Path, mesh: Mesh, rules: str | Table | None = None, *, verify: bool = True
):
    """A trained model on `mesh`, whatever mesh and table it was saved with.

    Args:
      path: what `find` takes: a run's workdir, a checkpoint's own folder, a published name, "hf:DIR".
      rules: a strategy of the entry's RULES, or a table of your own; None: what suits the mesh.
      verify: whether to compare every file with its hash first, which takes long with a huge one.

    Returns:
      (model, metadata): an NNX module whose every array lies where `rules` says, and the
      checkpoint's metadata. No device ever holds more than its shards.

    Raises UserError, a ValueError, if there is no checkpoint, it is damaged, or the rules don't fit.
    """
    checkpoint = find(path, whole=verify)
    layout = lay_out(checkpoint, mesh, rules)
    return layout.plan.bind(restore_params(checkpoint, layout)), checkpoint.metadata


def lay_out(source: Source, mesh: Mesh, rules: str | Table | None = None) -> Layout:
    """Where a checkpoint's model lies on `mesh`; nothing is read or allocated. Raises UserError."""
    entry = source.metadata["entry"]
    if entry not in ENTRIES:
        raise UserError(
            f"checkpoint {source.path} is of {entry!r}; this zoo has {', '.join(ENTRIES)}"
        )
    module = importlib.import_module(f"zoo.{entry}")
    config = config_from(module.Config, source)
    tables, strategy = module.RULES, rules or ""
    if isinstance(strategy, dict):
        tables, strategy = module.RULES | {"(yours)": strategy}, "(yours)"

    def build() -> nnx.Module:
        return getattr(module, ENTRIES[entry])(config, rngs=nnx.Rngs(0))

    return sharding.lay_out(build, tables, strategy, mesh)


def config_from(config_class, checkpoint: Source):
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


def configure(default, source: Source | None, flags):
    """The model's Config: the checkpoint's or the default one, with the flags that are not 0."""
    base = config_from(type(default), source) if source else default
    given = {name: getattr(flags, name, 0) for name in dataclasses.asdict(base)}
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value})


def restore_params(checkpoint: Source, layout: Layout) -> Tree:
    """A checkpoint's parameters, where `layout` says. Raises UserError for another model's."""
    check_params(checkpoint, layout)
    abstract = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        layout.plan.shapes,
        layout.params(),
    )
    return restore_tree(checkpoint, {"params": abstract})["params"]


def restore_tree(checkpoint: Source, abstract: Tree) -> Tree:
    """The part of a checkpoint's state that `abstract` names, each array where it says.

    Args:
      abstract: nested dict of ShapeDtypeStructs with shardings, e.g. {"params": …}.

    Raises UserError if it is damaged and can't be read.
    """
    if isinstance(checkpoint, hf.Folder):
        return {"params": checkpoint.read(sharding.shardings(abstract["params"]))}
    restore_args = jax.tree.map(
        lambda a: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype),
        abstract,
    )
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
    with _reading(checkpoint) as state:
        return ocp.PyTreeCheckpointHandler().restore(state, args=args)


@contextlib.contextmanager
def _reading(checkpoint: Checkpoint) -> Iterator[epath.Path]:
    """The folder of its arrays; an error of reading them is a UserError if they are damaged."""
    try:
        yield epath.Path(checkpoint.path / "state")
    except Exception:
        if bad := verify(checkpoint.path):  # which nobody has asked before, or it was well then
            raise UserError(
                f"checkpoint {checkpoint.path}: {bad}; give a checkpoint that is whole"
            ) from None
        raise


def check_params(checkpoint: Source, layout: Layout) -> None:
    """Raises UserError if the checkpoint has other parameters, or other shapes."""
    if isinstance(checkpoint, hf.Folder):
        params = checkpoint.shapes
    else:
        with _reading(checkpoint) as state:
            params = ocp.PyTreeCheckpointHandler().metadata(state).tree["params"]
    saved, wanted = paths(params), paths(layout.plan.shapes)
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


def write(
    folder: pathlib.Path,
    params: Tree,
    metadata: dict[str, Any],
    files: dict[str, str] | None = None,
    readme: Callable[[dict[str, list]], str] | None = None,
) -> None:
    """Writes a checkpoint of parameters alone with its hashes, beside its place, and moves it there.

    Args:
      files: name → text of what else is to stand in the folder.
      readme: function of the hashes of all other files → the text of its card.
    """
    # Else Orbax copies all arrays to this process at one time, and keeps what it has compressed of
    # them until a file of 2 GB is full.
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(
            type_handler_registry=ANY_MESH, save_device_host_concurrent_gb=1
        ),
        metadata=ocp.JsonCheckpointHandler(),
    )
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave({"params": params}, ocdbt_target_data_file_size=2**27),
        metadata=ocp.args.JsonSave({"data": {}, "flags": {}} | metadata),
    )
    beside = folder.absolute().with_name(f".{folder.name}.{os.getpid()}")
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(beside, args=items)
        for marker in beside.rglob(COMMITTED):
            marker.write_text("Checkpoint commit was successful\n")  # without this machine's path
        for name, text in (files or {}).items():
            (beside / name).write_text(text)
        hashes = hashes_of(beside, _files(beside))
        if readme:
            (beside / card.FILE).write_text(readme(hashes))
            hashes |= hashes_of(beside, [card.FILE])
        _write_hashes(beside, hashes)
        beside.rename(folder)
    finally:
        for left in beside.parent.glob(f"{beside.name}*"):
            shutil.rmtree(left)


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
