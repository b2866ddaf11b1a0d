"""Checkpoints on disk: what one is, where it is, and how it comes back onto any mesh.

A checkpoint is a folder with a standard Orbax checkpoint of these items:

    state      {"params", "opt_state", "step", "rngs"}: nested dicts of arrays; "buffers" where the
               model has variables that are no parameters
    data       JSON: the next batch, and what it is a batch of
    metadata   JSON: entry, config, rules, mesh, logical axes, flags, versions

the files of its tokenizer in the folder `tokenizer`, where that isn't bytes, and hashes.json
(integrity.py). A published one (recipes.publish) has no optimizer state, and in
addition a card, README.md, and a golden probe. All of it is JSON, Markdown or numbers: loading never
executes code (no pickle).
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

import zoo
from data.tokenizer import BYTES, Tokenizer, from_files
from recipes.common import entries, hf
from recipes.common.checkpoint import adapter, card, integrity
from recipes.common.runtime import UserError, folders
from recipes.common.sharding import Layout, Table, Tree, make_layout, paths
from recipes.common.sharding.abstract import unadapted

# Without a note of the shardings it was saved with: they would tie a checkpoint to its mesh, where
# plain `ocp.StandardCheckpointer().restore(path)` otherwise reads it anywhere.
ANY_MESH = ocp.type_handlers.create_type_handler_registry(
    (jax.Array, ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False))
)

# The zoo's own, a folder for each name.
PUBLISHED = pathlib.Path(zoo.__file__).parent / "checkpoints"
TOKENIZER = "tokenizer"


class Source(Protocol):
    """What a model's variables are restored from: a checkpoint, or a Hugging Face model folder."""

    path: pathlib.Path
    metadata: dict[str, Any]  # entry, config, step, …

    @property
    def step(self) -> int: ...

    def shapes(self) -> Tree:
        """{"params": …}, and "buffers" where there are any: nested dicts of what has a shape."""

    def read(self, abstract: Tree) -> Tree:
        """The arrays that `abstract` names, each with the sharding it says.

        Args:
          abstract: nested dict of ShapeDtypeStructs with shardings, {"params": …} for instance.

        Raises UserError if it is damaged and can't be read.
        """

    def tokenizer(self) -> Tokenizer | None:
        """What the model's tokens mean; None if nobody knows. Raises DataError."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk: a Source."""

    path: pathlib.Path  # the folder with the items
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return self.metadata["step"]

    def shapes(self) -> Tree:
        with self._reading() as state:
            tree = ocp.PyTreeCheckpointHandler().metadata(state).tree
        return {kind: tree[kind] for kind in ("params", "buffers") if kind in tree}

    def read(self, abstract: Tree) -> Tree:
        restore_args = jax.tree.map(
            lambda a: ocp.ArrayRestoreArgs(
                sharding=a.sharding, global_shape=a.shape, dtype=a.dtype
            ),
            abstract,
        )
        args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
        with self._reading() as state:
            return ocp.PyTreeCheckpointHandler().restore(state, args=args)

    def tokenizer(self) -> Tokenizer | None:
        files = {path.name: path.read_bytes() for path in (self.path / TOKENIZER).glob("*")}
        if files:
            return from_files(files, str(self.path))
        # Only an import says that it has none; older ones say nothing, and were trained on nothing.
        said = self.metadata.get(TOKENIZER, BYTES.sha256 if self.metadata["data"] else None)
        return BYTES if said == BYTES.sha256 else None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[epath.Path]:
        """The folder of its arrays; an error of reading them is a UserError if they are damaged."""
        try:
            yield epath.Path(self.path / "state")
        except Exception:
            if bad := integrity.verify(self.path):  # not asked before, or it was whole then
                raise UserError(
                    f"checkpoint {self.path}: {bad}; use a checkpoint that is whole"
                ) from None
            raise


# ---- where it is ---------------------------------------------------------------------------------


def find(
    path: str | pathlib.Path, flag: str = "--restore_from", whole: bool = True, base: str = ""
) -> Source:
    """The checkpoint at a path: a run's workdir (its newest) or a checkpoint's own folder.

    A bare name with nothing at it is a published checkpoint: "mlp.digits". "hf:DIR" is a Hugging
    Face model folder, and "hf:ORG/NAME" one of the Hub. An adapter, one of PEFT with or without
    "hf:", is found with its base, as the merged model.

    Args:
      whole: see integrity.verify.
      base: where the base of an adapter is, if it is not where the adapter says.

    Raises UserError if there is none, or a damaged one.
    """
    what = f"{flag}={path}"
    found = _locate(path, what, whole)
    if "base" in found.metadata:
        return with_base(found, what, whole, base)
    if base:
        raise UserError(f"--base={base} is for adapters, and {what} is none; leave it out")
    return found


def _locate(path: str | pathlib.Path, what: str, whole: bool) -> Source:
    """What is at a path, of an adapter without its base."""
    if str(path).startswith("hf:"):
        return hf.open_folder(hf.locate(str(path).removeprefix("hf:")))
    with folders.telling(f"{what} can't be read", "use another"):
        return _locate_here(path, what, whole)


def _locate_here(path: str | pathlib.Path, what: str, whole: bool) -> Source:
    """The same, of what is not Hugging Face's by its name. Raises `folders.errors`, too."""
    folder = folders.at(path, what.partition("=")[0])
    fix = "use a run's workdir or a checkpoint"
    if not folder.exists() and str(path) == folder.name:
        folder = PUBLISHED / folder.name
        fix = f"use a run's workdir, a checkpoint, or one of {', '.join(published())}"
    if not folder.exists():
        raise UserError(f"{what} does not exist; {fix}")
    if hf.is_adapter(folder):
        return hf.open_folder(hf.locate(str(folder)))
    for inner in (folder / "checkpoints", folder):
        if steps := steps_in(inner):
            folder = inner / str(steps[-1])
            break
    if not (folder / "metadata").exists() and not (folder / "state").exists():
        raise UserError(f"{what} holds no checkpoint; {fix}")
    if bad := integrity.verify(folder, whole):
        raise UserError(f"{what}: {bad} in {folder}; use a checkpoint that is whole")
    return at(folder)


def at(folder: pathlib.Path) -> Checkpoint:
    """The checkpoint in this folder, which `verify` has found whole."""
    text = (folder / "metadata" / "metadata").read_text()
    return Checkpoint(folders.absolute(folder), json.loads(text))


def with_base(found: Source, what: str, whole: bool, base: str = "") -> Source:
    """An adapter with its base; any other checkpoint as it is.

    Args:
      what: the flag with which the user named it, for messages.
      whole, base: as `find` takes them.

    Raises UserError if the base is not there or has changed, or the adapter is of another model.
    """
    if "base" not in found.metadata:
        return found
    said = found.metadata["base"]
    where = base or said["path"]
    fix = "use --base=PATH of the model that it was trained on"
    try:
        source = _locate(where, f"--base={where}", whole)
    except UserError as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{what} is an adapter without its base ({reason}); {fix}") from None
    if "base" in source.metadata:
        raise UserError(f"{what} is an adapter, and its base --base={where} is one too; {fix}")
    if isinstance(found, hf.Adapter):  # PEFT names its base, and knows nothing of its content
        found = found.on(source.metadata, config_of(source))
    elif (whole or not isinstance(source, hf.Folder)) and (  # a folder is read as a whole for it
        (digest := adapter.sha256(source)) != said["sha256"]
    ):
        raise UserError(
            f"{what} is an adapter of a model with SHA-256 {said['sha256'][:8]}…, and {where} has "
            f"{digest[:8]}…, so it has changed or is another; {fix}"
        )
    adapted = adapter.Adapted(found, source, adapter.located(source, where))
    adapted.check()
    return adapted


def published() -> list[str]:
    """Names of the checkpoints that travel with the zoo."""
    return sorted(path.name for path in PUBLISHED.iterdir()) if PUBLISHED.is_dir() else []


def steps_in(folder: pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first."""
    return sorted(int(p.name) for p in numbered(folder) if finished(p))


def numbered(folder: pathlib.Path) -> list[pathlib.Path]:
    """What is named by a step in a folder. Raises `folders.errors` where a bucket can't be asked.

    It would say that there is no such folder.
    """
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def finished(path: pathlib.Path) -> bool:
    """Whether a checkpoint is committed: in a bucket by its mark, else by having its name."""
    return (path / integrity.COMMITTED).exists() if folders.in_bucket(path) else path.is_dir()


# ---- back onto a mesh ----------------------------------------------------------------------------


def restore(
    path: str | pathlib.Path,
    mesh: Mesh,
    rules: str | Table | None = None,
    *,
    verify: bool = True,
    base: str = "",
):
    """A trained model on `mesh`, whatever mesh and rules it was saved with.

    Args:
      path: what `find` takes: a run's workdir, a checkpoint's own folder, a published name, "hf:DIR".
      rules: a strategy of the entry's RULES, or a table of your own; None: what suits the mesh.
      verify: whether to hash every file first, which takes long with a huge checkpoint.
      base: where the base of an adapter is, if it is not where the adapter says.

    Returns:
      (model, metadata): an NNX module whose every array is sharded as `rules` says, and the
      checkpoint's metadata. No device ever holds more than its shards.

    Raises UserError, a ValueError, if there is no checkpoint, it is damaged, or the rules don't fit.
    """
    source = find(path, whole=verify, base=base)
    layout = layout_of(source, mesh, rules)
    return layout.model.merge(restore_variables(source, layout)), source.metadata


def layout_of(source: Source, mesh: Mesh, rules: str | Table | None = None, **compute) -> Layout:
    """Where a checkpoint's model lies on `mesh`; nothing is read or allocated. Raises UserError.

    Args:
      compute: fields of its Config that say how to compute it, such as dtype.
    """
    config = dataclasses.replace(config_of(source), **compute)
    return make_layout(entries.model(source.metadata["entry"]), config, mesh, rules)


def context(source: Source) -> int:
    """Positions that a model was made for: as its folder says, or those that it was trained on."""
    facts = source.metadata
    return facts.get("context") or facts.get("flags", {}).get("seq_len") or 2_048


def config_of(source: Source) -> Any:
    """The Config of a checkpoint's model. Raises UserError."""
    entry = source.metadata["entry"]
    if entry not in entries.ENTRIES:
        raise UserError(
            f"checkpoint {source.path} has entry {entry!r}; this zoo has "
            f"{', '.join(entries.ENTRIES)}"
        )
    return config_from(entries.zoo_file(entry).Config, source)


def config_from(config_class, source: Source):
    """The model's Config from a checkpoint's metadata, where JSON has made tuples into lists.

    Raises UserError if this version does not know some of it.
    """
    saved = source.metadata["config"]
    known = {field.name for field in dataclasses.fields(config_class)}
    for name in saved.keys() - known:
        raise UserError(
            f"checkpoint {source.path} has {name!r} in its config, which this version lacks; "
            f"use the version that saved it ({source.metadata.get('versions', {})})"
        )
    try:
        return config_class(**{name: _tuples(value) for name, value in saved.items()})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint {source.path} has an invalid model config ({error}); use a different one"
        ) from None


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, nested ones too."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def configure(default, source: Source | None, flags):
    """The model's Config: the checkpoint's or the default one, with the flags that are not 0."""
    base = config_from(type(default), source) if source else default
    given = {name: getattr(flags, name, 0) for name in dataclasses.asdict(base)}
    return dataclasses.replace(base, **{name: value for name, value in given.items() if value})


def restore_variables(source: Source, layout: Layout, dtype: str | None = None) -> Tree:
    """A checkpoint's parameters and buffers, where `layout` says. UserError for another model's.

    Args:
      dtype: of weights that are multiplied, for a model that is not trained; None: float32.
    """
    check_variables(source, layout)
    wanted, in_use = layout.variables(), layout.zoo.IN_USE.keys()
    if dtype:
        wanted = jax.tree.map(
            lambda axes, a: a.update(dtype=jnp.dtype(dtype)) if in_use & set(axes) else a,
            layout.model.axes, wanted, is_leaf=lambda x: isinstance(x, tuple),
        )  # fmt: skip
    return source.read(wanted)


def check_variables(source: Source, layout: Layout) -> None:
    """Raises UserError if the checkpoint has other variables, or other shapes."""
    found = source.shapes()
    if "base" in layout.model.shapes and isinstance(source, adapter.Adapted):
        source.check_config(layout.config)
    model = unadapted(layout.model.shapes)
    for kind in found | model:
        saved, wanted = paths(found.get(kind, {})), paths(model.get(kind, {}))
        for path in sorted(saved.keys() ^ wanted.keys()):
            what = f"{kind[:-1].replace('param', 'parameter')} {path}"
            if path in wanted:
                raise UserError(
                    f"checkpoint {source.path} has no {what}; use a checkpoint of the same model"
                )
            raise UserError(
                f"the model has no {what}, and checkpoint {source.path} has one; leave out the flags "
                "of the model, or use those that the checkpoint was made with"
            )
        for path in wanted:
            theirs, ours = list(saved[path].shape), list(wanted[path].shape)
            if theirs != ours:
                raise UserError(
                    f"{path} has shape {theirs} in checkpoint {source.path} and {ours} in this "
                    "model; use the flags that the checkpoint was made with"
                )


# ---- written -------------------------------------------------------------------------------------


def write(
    folder: pathlib.Path,
    variables: Tree,
    metadata: dict[str, Any],
    files: dict[str, str] | None = None,
    readme: Callable[[dict[str, list]], str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a checkpoint without optimizer state beside its place, and moves it there whole.

    Args:
      variables: {"params": …}, and "buffers" where there are any.
      files: name → text of what else belongs in the folder.
      readme: function of the hashes of all other files → the text of its card.
      tokenizer: the model's, if it is known.

    Raises `folders.errors` if it can't be written.
    """
    # Otherwise Orbax copies all arrays to this process at once, and keeps what it has compressed of
    # them until a file of 2 GB is full.
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(
            type_handler_registry=ANY_MESH, save_device_host_concurrent_gb=1
        ),
        metadata=ocp.JsonCheckpointHandler(),
    )
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(variables, ocdbt_target_data_file_size=2**27),
        # What is written is whole, whatever its parameters were made of.
        metadata=ocp.args.JsonSave(
            {"data": {}, "flags": {}} | {k: v for k, v in metadata.items() if k != "base"}
        ),
    )
    beside = folders.absolute(folder).with_name(f".{folder.name}.{os.getpid()}")
    folders.make(beside.parent)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            try:
                checkpointer.save(beside, args=items)
            except ValueError as error:  # TensorStore's, whatever has failed
                raise OSError(folders.reason(error)) from error
        for name in folders.sizes(beside):
            if name.endswith(integrity.COMMITTED):  # without this machine's path
                (beside / name).write_text("Checkpoint commit was successful\n")
        for name, text in (files or {}).items():
            (beside / name).write_text(text)
        write_tokenizer(beside, tokenizer.files if tokenizer else {})
        hashes = integrity.hashes_of(beside, folders.sizes(beside))
        if readme:
            text = readme(hashes)
            (beside / card.FILE).write_text(text)
            hashes |= integrity.hashes_of(beside, {card.FILE: len(text.encode())})
        integrity.write_hashes(beside, hashes)
        folders.to_disk(beside)
        folders.move(beside, folder, integrity.COMMITTED)
    finally:
        for left in list(beside.parent.glob(f"{beside.name}*")):
            folders.remove(left, integrity.COMMITTED)


def write_tokenizer(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    """The files of a tokenizer into a checkpoint that is not committed yet; bytes have none."""
    if files:
        (folder / TOKENIZER).mkdir(parents=True)
    for name, content in files.items():
        (folder / TOKENIZER / name).write_bytes(content)


def metadata(entry: str, layout: Layout, flags: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself, except for its step and its data."""
    return {
        "entry": entry,
        "config": dataclasses.asdict(layout.config),
        "rules": {"name": layout.strategy, "table": layout.table},
        "mesh": dict(layout.mesh.shape),
        "logical_axes": {k: list(axes) for k, axes in paths(layout.model.axes["params"]).items()},
        "flags": flags,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}
