"""Checkpoints: their content, and how they are read and written.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp
from etils import epath

from data.tokenizer import BYTES, Tokenizer, from_files
from recipes.common import entries
from recipes.common.checkpoint import integrity
from recipes.common.runtime import UserError, agreement
from recipes.common.sharding import Layout, Tree, paths
from recipes.common.storage import folders

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

TOKENIZER = "tokenizer"


class WeightSource(Protocol):
    """A source of a model's variables: a checkpoint or a Hugging Face model folder."""

    @property
    def path(self) -> pathlib.Path: ...

    @property
    def metadata(self) -> dict[str, Any]: ...  # entry, config, step, …

    @property
    def step(self) -> int: ...

    @property
    def files(self) -> Sequence[pathlib.Path]: ...  # with the parameters; empty: see hashes.json

    def shapes(self) -> Tree:
        """{"params": …}, and "buffers" if there are any: nested dicts of leaves with a shape."""

    def read(self, abstract: Tree) -> Tree:
        """Reads the arrays that `abstract` names, each with its sharding.

        Args:
          abstract: nested dict of ShapeDtypeStructs with shardings, {"params": …} for instance.

        Raises UserError if they are damaged.
        """

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if unknown. Raises DataError if it can't be read."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk: a WeightSource."""

    path: pathlib.Path  # the folder with the items
    metadata: dict[str, Any]
    files = ()

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
        except Exception as error:
            bad = integrity.verify(self.path)  # it was not hashed, or was damaged since
            is_early = not (self.path / integrity.HASHES).exists()
            if not bad and is_early and isinstance(error, (ValueError, OSError)):
                bad = f"its arrays can't be read ({folders.reason(error)})"
            if bad:
                raise UserError(f"checkpoint {self.path}: {bad}; use an intact one") from None
            raise


def open_checkpoint(folder: pathlib.Path) -> Checkpoint:
    """The checkpoint in a folder that `integrity.verify` found intact."""
    text = (folder / "metadata" / "metadata").read_text()
    return Checkpoint(folders.absolute(folder), json.loads(text))


def config_of(source: WeightSource) -> Any:
    """The Config of a checkpoint's model. Raises UserError if this zoo lacks the entry."""
    entry = source.metadata["entry"]
    if entry not in entries.ENTRIES:
        raise UserError(
            f"checkpoint {source.path} has entry {entry!r}; this zoo has "
            f"{', '.join(entries.ENTRIES)}"
        )
    return config_from(entries.zoo_file(entry).Config, source)


def config_from(config_class, source: WeightSource):
    """An instance of `config_class` from a checkpoint's metadata.

    Raises UserError for fields that this version lacks, or invalid values.
    """
    saved = source.metadata["config"]
    for name in saved.keys() - {field.name for field in dataclasses.fields(config_class)}:
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
    folders.at(beside.parent).make()
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            try:
                checkpointer.save(beside, args=items)
            except ValueError as error:  # TensorStore raises it for failed writes
                raise OSError(folders.reason(error)) from error
        for name in folders.at(beside).sizes():
            if name.endswith(folders.COMMITTED):  # Orbax writes this machine's path into it
                (beside / name).write_text("Checkpoint commit was successful\n")
        for name, content in (files or {}).items():
            (beside / name).write_bytes(content.encode() if isinstance(content, str) else content)
        write_tokenizer(beside, tokenizer.files if tokenizer else {})
        hashes = integrity.hashes_of(beside, folders.at(beside).sizes())
        if readme:
            text = readme(hashes)
            (beside / integrity.CARD).write_text(text)
            hashes |= integrity.hashes_of(beside, {integrity.CARD: len(text.encode())})
        integrity.write_hashes(beside, hashes)
        folders.at(beside).sync()
        folders.at(beside).move_to(folder)
    finally:
        for left in list(beside.parent.glob(f"{beside.name}*")):
            folders.at(left).remove()


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
