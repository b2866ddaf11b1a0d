"""Checkpoints on disk: what one is, where it lies, and how it comes back onto any mesh.

A checkpoint is a folder with a standard Orbax checkpoint of these items:

    state      {"params", "opt_state", "step", "rngs"}: nested dicts of arrays
    data       JSON: the next batch, and what it is a batch of
    metadata   JSON: entry, config, rules, mesh, logical axes, flags, versions
"""

import dataclasses
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

from recipes.common import hf, sharding
from recipes.common.cli import UserError
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


class Checkpoint(NamedTuple):
    """One checkpoint on disk."""

    path: pathlib.Path  # the folder with the items
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return self.metadata["step"]


Source = Checkpoint | hf.Folder  # what parameters are restored from


def find(path: str | pathlib.Path, flag: str = "--restore_from") -> Source:
    """The checkpoint at a path: a run's workdir (its newest) or a checkpoint's own folder.

    "hf:DIR" is a Hugging Face model folder, and "hf:ORG/NAME" one of the Hub.
    Raises UserError if there is none.
    """
    if str(path).startswith("hf:"):
        return hf.Folder(hf.locate(str(path).removeprefix("hf:")))
    folder = pathlib.Path(path).expanduser()
    what = f"{flag}={path}"
    if not folder.exists():
        raise UserError(f"{what} does not exist; give a run's workdir or a checkpoint")
    for inner in (folder / "checkpoints", folder):
        if steps := steps_in(inner):
            folder = inner / str(steps[-1])
            break
    metadata = folder / "metadata" / "metadata"
    if not metadata.exists():
        raise UserError(f"{what} holds no checkpoint; give a run's workdir or a checkpoint")
    return Checkpoint(folder.absolute(), json.loads(metadata.read_text()))


def steps_in(folder: pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and p.is_dir())


def restore(path: str | pathlib.Path, mesh: Mesh, rules: str | Table | None = None):
    """A trained model on `mesh`, whatever mesh and table it was saved with.

    Args:
      path: what `find` takes: a run's workdir, a checkpoint's own folder, or "hf:DIR".
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


def config_from(config_class, checkpoint: Source):
    """The model's Config from a checkpoint's metadata, where JSON has made tuples into lists."""
    saved = checkpoint.metadata["config"]
    known = {field.name for field in dataclasses.fields(config_class)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items() if k in known}
    return config_class(**values)


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
    """
    if isinstance(checkpoint, hf.Folder):
        return {"params": checkpoint.read(sharding.shardings(abstract["params"]))}
    restore_args = jax.tree.map(
        lambda a: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype),
        abstract,
    )
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=True)
    return ocp.PyTreeCheckpointHandler().restore(epath.Path(checkpoint.path / "state"), args=args)


def check_params(checkpoint: Source, layout: Layout) -> None:
    """Raises UserError if the checkpoint has other parameters, or other shapes."""
    if isinstance(checkpoint, hf.Folder):
        params = checkpoint.shapes
    else:
        state = epath.Path(checkpoint.path / "state")
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


def write(folder: pathlib.Path, params: Tree, metadata: dict[str, Any]) -> None:
    """Writes a checkpoint of parameters alone, beside its place and then moved there whole."""
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
        metadata=ocp.args.JsonSave(metadata),
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.absolute(), args=items)


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
