"""Checkpoints on disk: their content, how they are found, and how they are restored onto any mesh.

A checkpoint is a folder with a standard Orbax checkpoint of these items:

    state      {"params", "opt_state", "step", "rngs"}: nested dicts of arrays; also "buffers" if the
               model has variables that are not parameters
    data       JSON: number of the next batch, and facts of the dataset
    metadata   JSON: entry, config, rules, mesh, logical axes, flags, versions

It also has hashes.json (integrity.py) and, unless the tokenizer is bytes, the tokenizer's files in
`tokenizer`. A published checkpoint (recipes.publish) has no optimizer state, but a card, README.md,
and a golden probe. Everything is JSON, Markdown or numbers: loading never executes code (no pickle).
"""

import contextlib
import dataclasses
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
from recipes.common.checkpoint import card, integrity, lora, parallel_hashing
from recipes.common.checkpoint.new_head import NewHead
from recipes.common.config_flags import replace
from recipes.common.runtime import UserError, agreement, folders, processes
from recipes.common.sharding import Layout, Rules, Tree, make_layout, paths
from recipes.common.sharding.abstract import unadapted

# Saves no sharding file: it would tie a checkpoint to its mesh, and keep plain
# `ocp.StandardCheckpointer().restore(path)` from reading it anywhere.
# One device saves each small replicated array. If all saved a slice, each slice would be a program to
# compile, 30 ms each, while the step waits.
ANY_MESH = ocp.type_handlers.create_type_handler_registry(
    (
        jax.Array,
        ocp.type_handlers.ArrayHandler(
            enable_write_sharding_file=False, min_slice_bytes_for_replica_parallel=2**20
        ),
    )
)

# The zoo's own checkpoints, a folder for each name.
PUBLISHED = pathlib.Path(zoo.__file__).parent / "checkpoints"
TOKENIZER = "tokenizer"


class Source(Protocol):
    """A source of a model's variables: a checkpoint or a Hugging Face model folder."""

    @property
    def path(self) -> pathlib.Path: ...

    @property
    def metadata(self) -> dict[str, Any]: ...  # entry, config, step, …

    @property
    def step(self) -> int: ...

    def shapes(self) -> Tree:
        """{"params": …}, and "buffers" if there are any: nested dicts of leaves with a shape."""
        ...

    def read(self, abstract: Tree) -> Tree:
        """Reads the arrays that `abstract` names, each with its sharding.

        Args:
          abstract: nested dict of ShapeDtypeStructs with shardings, {"params": …} for instance.

        Raises UserError if they are damaged.
        """
        ...

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if unknown. Raises DataError if it can't be read."""
        ...


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
        # Imports state whether they have one. Old imports don't; they have no training data either.
        digest = self.metadata.get(TOKENIZER, BYTES.sha256 if self.metadata["data"] else None)
        return BYTES if digest == BYTES.sha256 else None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[epath.Path]:
        """Yields the folder of its arrays. A failed read raises UserError if a file is damaged."""
        try:
            yield epath.Path(self.path / "state")
        except Exception:
            if bad := integrity.verify(self.path):  # it was not hashed, or was damaged since
                raise UserError(f"checkpoint {self.path}: {bad}; use an intact one") from None
            raise


# ---- finding -------------------------------------------------------------------------------------


def find(
    path: str | pathlib.Path, flag: str = "--restore_from", hash_files: bool = True, base: str = ""
) -> Source:
    """The checkpoint at a path: a run's workdir (its newest one) or a checkpoint's own folder.

    A bare name that is no folder is a published checkpoint: "mlp.digits". "hf:DIR" is a Hugging
    Face model folder, and "hf:ORG/NAME" one on the Hub. An adapter, PEFT's included (with or without
    "hf:"), is joined with its base: the result is the merged model.

    Args:
      flag: the flag to name in messages.
      hash_files: whether to hash every file, see integrity.verify.
      base: path of an adapter's base if it has moved.

    Raises UserError if there is none, or it is damaged.
    """
    what = f"{flag}={path}"
    found = _locate(path, what, hash_files)
    if "base" in found.metadata:
        return with_base(found, what, hash_files, base)
    if base:
        raise UserError(f"--base={base} is for adapters, and {what} is not one; leave it out")
    return found


def find_on_all_processes(path: str, hash_files: bool = True, base: str = "") -> Source:
    """`find` for --restore_from, with the same result on all processes; each must call it.

    Process 0 finds the checkpoint, and all share the hashing.
    """
    if processes.count() == 1:
        return find(path, hash_files=hash_files, base=base)

    def look() -> str:
        found = find(path, hash_files=hash_files, base=base)
        return path if path.startswith("hf:") else str(found.path)

    where = parallel_hashing.call_on_first("start", look)
    return processes.run_on_all(lambda: find(where, hash_files=False, base=base))


def _locate(path: str | pathlib.Path, what: str, hash_files: bool) -> Source:
    """Finds the source at a path; an adapter is not joined with its base. Raises UserError."""
    if str(path).startswith("hf:"):
        return hf.open_folder(hf.locate(str(path).removeprefix("hf:")))
    with folders.user_errors(f"{what} can't be read", "use another"):
        folder = folders.to_path(path, what.partition("=")[0])
        fix = "use a run's workdir or a checkpoint"
        if not what.startswith("--source"):  # of recipes.publish, which takes nothing else
            fix = (
                "use a run's workdir, a checkpoint, hf:DIR or hf:ORG/NAME for a Hugging Face model, "
                f"or one of {', '.join(published())}"
            )
        if not folder.exists() and str(path) == folder.name:
            folder = PUBLISHED / folder.name
        if not folder.exists():
            raise UserError(f"{what} does not exist; {fix}")
        if hf.is_adapter(folder):
            return hf.open_folder(hf.locate(str(folder)))
        for inner in (folder / "checkpoints", folder):
            if steps := steps_in(inner):
                folder = inner / str(steps[-1])
                break
        if not (folder / "metadata").exists() and not (folder / "state").exists():
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                raise UserError(
                    f"{what} is a Hugging Face model folder, not a checkpoint; use hf:{path}"
                )
            raise UserError(f"{what} holds no checkpoint; {fix}")
        if bad := integrity.verify(folder, hash_files):
            raise UserError(f"{what}: {bad} in {folder}; use an intact checkpoint")
        return open_checkpoint(folder)


def open_checkpoint(folder: pathlib.Path) -> Checkpoint:
    """The checkpoint in a folder that `integrity.verify` found intact."""
    text = (folder / "metadata" / "metadata").read_text()
    return Checkpoint(folders.absolute(folder), json.loads(text))


def with_base(found: Source, what: str, hash_files: bool, base: str = "") -> Source:
    """Joins an adapter with its base; returns any other checkpoint unchanged.

    Args:
      what: how the user named it, for messages: "--workdir=runs/x".
      hash_files, base: see `find`.

    Raises UserError if the base is missing or has changed, or is a different model.
    """
    if "base" not in found.metadata:
        return found
    known = found.metadata["base"]
    where = base or known["path"]
    fix = "use --base=PATH of the model that it was trained on"
    try:
        source = _locate(where, f"--base={where}", hash_files)
    except UserError as error:
        reason = str(error).partition(";")[0]
        raise UserError(f"{what} is an adapter without its base ({reason}); {fix}") from None
    if "base" in source.metadata:
        raise UserError(f"{what} is an adapter, and its base --base={where} is one too; {fix}")
    if isinstance(found, hf.Adapter):  # PEFT names its base without a digest
        found = found.on(source.metadata, config_of(source))
    elif (
        hash_files or not isinstance(source, hf.Folder)
    ) and (  # a model folder is read for its digest
        (digest := lora.content_sha256(source)) != known["sha256"]
    ):
        raise UserError(
            f"{what} is an adapter of a model with SHA-256 {known['sha256'][:8]}…, and {where} has "
            f"{digest[:8]}…, so it has changed or is a different model; {fix}"
        )
    adapted = lora.Adapted(found, source, lora.portable_path(source, where))
    adapted.check()
    return adapted


def published() -> list[str]:
    """Names of the checkpoints that come with the zoo."""
    return sorted(path.name for path in PUBLISHED.iterdir()) if PUBLISHED.is_dir() else []


def steps_in(folder: pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first."""
    return sorted(int(p.name) for p in numbered(folder) if finished(p))


def numbered(folder: pathlib.Path) -> list[pathlib.Path]:
    """Entries of a folder that are named by a step; [] if there is no such folder.

    Raises `folders.errors` if a bucket can't be listed: its checkpoints must not seem missing.
    """
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def finished(path: pathlib.Path) -> bool:
    """Whether a checkpoint is committed: marked, in a bucket; renamed to its step, on a disk."""
    return (path / integrity.COMMITTED).exists() if folders.in_bucket(path) else path.is_dir()


# ---- restoring -----------------------------------------------------------------------------------


def restore(
    path: str | pathlib.Path,
    mesh: Mesh,
    rules: str | Rules | None = None,
    *,
    verify: bool = True,
    base: str = "",
):
    """Restores a trained model onto `mesh`, whatever mesh and rules it was saved with.

    Args:
      path: as in `find`: a run's workdir, a checkpoint's own folder, a published name, "hf:DIR".
      rules: a strategy of the entry's RULES, or your own table; None: chosen by the mesh.
      verify: whether to hash every file first, which is slow for a huge checkpoint.
      base: path of an adapter's base if it has moved.

    Returns:
      (model, metadata): an NNX module with every array sharded by `rules`, and the checkpoint's
      metadata. No device ever holds more than its shards.

    Raises UserError, a ValueError, if there is no checkpoint, it is damaged, or the rules don't fit.
    """
    source = find(path, hash_files=verify, base=base)
    layout = layout_of(source, mesh, rules)
    return layout.model.merge(restore_variables(source, layout)), source.metadata


def layout_of(
    source: Source, mesh: Mesh, rules: str | Rules | None = None, *, seq_len: int = 0, **compute
) -> Layout:
    """The layout of a checkpoint's model on `mesh`; reads and allocates no arrays.

    Args:
      seq_len: see make_layout.
      compute: fields to replace in its Config, such as dtype.

    Raises UserError if the model is unknown or doesn't fit the mesh.
    """
    config = config_of(source)
    # How the run that saved it computed, on its mesh and devices.
    default = {"context": "auto", "pipeline": "1f1b", "pipe_microbatches": 0}
    default |= {"matmul": "", "matmul_backward": ""}
    default = {name: value for name, value in default.items() if hasattr(config, name)}
    config = replace(config, default | compute)
    return make_layout(
        entries.model(source.metadata["entry"]), config, mesh, rules, seq_len=seq_len
    )


def context(source: Source) -> int:
    """Context length of a model in tokens: the one in its folder, or the one it was trained with.

    Never more than the positions that the model has learned, if it learns them.
    """
    facts = source.metadata
    found = facts.get("context") or facts.get("flags", {}).get("seq_len") or 2_048
    return min(found, facts["config"].get("max_positions", found))


def config_of(source: Source) -> Any:
    """The Config of a checkpoint's model. Raises UserError if this zoo lacks the entry."""
    entry = source.metadata["entry"]
    if entry not in entries.ENTRIES:
        raise UserError(
            f"checkpoint {source.path} has entry {entry!r}; this zoo has "
            f"{', '.join(entries.ENTRIES)}"
        )
    return config_from(entries.zoo_file(entry).Config, source)


def config_from(config_class, source: Source):
    """An instance of `config_class` from a checkpoint's metadata.

    Raises UserError for fields that this version lacks, or invalid values.
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
    """Converts JSON's lists to tuples, recursively."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def restore_variables(source: Source, layout: Layout, dtype: str | None = None) -> Tree:
    """Reads a checkpoint's parameters and buffers, sharded by `layout`.

    Args:
      dtype: dtype of matmul weights, for a model that is not trained; None: float32.

    Raises UserError if the checkpoint belongs to a different model.
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
    """Raises UserError if the checkpoint's variables or their shapes differ from the model's."""
    found = source.shapes()
    adapted = source.source if isinstance(source, NewHead) else source
    if "base" in layout.model.shapes and isinstance(adapted, lora.Adapted):
        adapted.check_config(layout.config)
    model = unadapted(layout.model.shapes)
    for kind in {**found, **model}:
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


# ---- writing -------------------------------------------------------------------------------------


def write(
    folder: pathlib.Path,
    variables: Tree,
    metadata: dict[str, Any],
    files: dict[str, str | bytes] | None = None,
    readme: Callable[[dict[str, list]], str] | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a checkpoint without optimizer state to a temporary folder, then moves it in place.

    Args:
      variables: {"params": …}, and "buffers" if there are any.
      files: name → text or bytes of additional files.
      readme: function of the hashes of all other files → text of the card.
      tokenizer: the model's, if known.

    Raises `folders.errors` if it can't be written.
    """
    # These limits save memory: by default Orbax copies all arrays to the host at once, and buffers
    # compressed data until a file of 2 GB is full.
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(
            type_handler_registry=ANY_MESH, save_device_host_concurrent_gb=1
        ),
        metadata=ocp.JsonCheckpointHandler(),
    )
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(variables, ocdbt_target_data_file_size=2**27),
        # Adapters are written merged, so without their base.
        metadata=ocp.args.JsonSave(
            {"data": {}, "flags": {}}
            | {k: v for k, v in metadata.items() if k != "base"}
            | {integrity.HASHED: True}
        ),
    )
    beside = folders.absolute(folder).with_name(f".{folder.name}.{os.getpid()}")
    folders.make(beside.parent)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            try:
                checkpointer.save(beside, args=items)
            except ValueError as error:  # TensorStore raises it for failed writes
                raise OSError(folders.reason(error)) from error
        for name in folders.sizes(beside):
            if name.endswith(integrity.COMMITTED):  # Orbax writes this machine's path into it
                (beside / name).write_text("Checkpoint commit was successful\n")
        for name, content in (files or {}).items():
            (beside / name).write_bytes(content.encode() if isinstance(content, str) else content)
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
    """Writes a tokenizer's files into an uncommitted checkpoint; the bytes tokenizer has none."""
    if files:
        (folder / TOKENIZER).mkdir(parents=True)
    for name, content in files.items():
        (folder / TOKENIZER / name).write_bytes(content)


def metadata(entry: str, layout: Layout, flags: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's metadata, except for its step and data."""
    return {
        "entry": entry,
        "config": entries.config_json(layout.config),
        "rules": {"name": layout.strategy, "table": layout.rules},
        "mesh": dict(layout.mesh.shape),
        "logical_axes": {k: list(axes) for k, axes in paths(layout.model.axes["params"]).items()},
        "flags": flags,
        "versions": {"python": platform.python_version(), **agreement.library_versions()},
    }
