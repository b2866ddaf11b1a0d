"""Orbax checkpoints: save, resume, and restore onto any mesh.

WORKDIR/checkpoints/STEP/ is a standard Orbax checkpoint of three items:

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

from recipes.common import sharding
from recipes.common.cli import UserError
from recipes.common.mesh import describe
from recipes.common.sharding import Layout, Table, Tree, paths

ENTRIES = {"transformer": "Transformer"}  # zoo module → its model


class Checkpoint(NamedTuple):
    """One checkpoint on disk."""

    path: pathlib.Path  # holds the items
    metadata: dict[str, Any]

    @property
    def step(self) -> int:
        return self.metadata["step"]


def find(path: str | pathlib.Path) -> Checkpoint:
    """The checkpoint at a path: a run's workdir (its newest), a step's folder, or a release.

    Raises UserError if there is none.
    """
    folder = pathlib.Path(path).expanduser()
    if not folder.exists():
        raise UserError(
            f"--restore_from={path} does not exist; give a run's workdir or a checkpoint"
        )
    for inner in (folder / "checkpoints", folder):
        if steps := _steps(inner):
            folder = inner / str(steps[-1])
            break
    if not (folder / "metadata" / "metadata").exists():
        raise UserError(
            f"--restore_from={path} holds no checkpoint; give a run's workdir or a checkpoint"
        )
    return Checkpoint(folder.absolute(), json.loads((folder / "metadata" / "metadata").read_text()))


def _steps(folder: pathlib.Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit() and p.is_dir())


class Workdir:
    """A run's folder. Nothing is written to it before `begin`."""

    def __init__(self, path: str, entry: str):
        """Raises UserError if the path can't be a workdir of this entry."""
        self.path = pathlib.Path(path).expanduser().absolute()
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--workdir={path} is a file; give a folder")
        steps = _steps(self.path / "checkpoints")
        self.newest = find(self.path / "checkpoints" / str(steps[-1])) if steps else None
        if self.newest and self.newest.metadata["entry"] != entry:
            theirs = self.newest.metadata["entry"]
            raise UserError(
                f"--workdir={path} is a run of {theirs!r}, not {entry!r}; give another folder"
            )

    def check_flags(self, *groups) -> list[str]:
        """Compares the flags with those of the newest checkpoint.

        Returns a sentence for each changed flag that a resumed run may change and that matters.
        Raises UserError for one that it may not.
        """
        before = self.newest.metadata["flags"] if self.newest else {}
        notes = []
        for group in groups:
            for field in dataclasses.fields(group):
                was, now = before.get(field.name), getattr(group, field.name)
                if field.name not in before or was == now:
                    continue
                if not field.metadata["may_change"]:
                    raise UserError(
                        f"--{field.name}={now} is not what this run began with, {was}; "
                        f"give that, or a new --workdir (this one is {self.path})"
                    )
                notes.append(field.name)
        return notes

    def check_data(self, data: dict[str, Any]) -> None:
        """Notes what the batches are made of; raises UserError if a resumed run had others."""
        self._data = data
        if self.newest and self.newest.metadata["data"] != data:
            raise UserError(
                f"the text of --dataset={data['dataset']} is not what this run began with "
                f"(its fingerprint differs); give a new --workdir (this one is {self.path})"
            )

    def begin(self, keep: int, metadata: dict[str, Any]) -> None:
        """Makes the folder, writes config.json and opens the checkpoints."""
        self._metadata = metadata | {"data": self._data}
        self.path.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            text = json.dumps({key: metadata[key] for key in ("flags", "versions")}, indent=2)
            (self.path / "config.json").write_text(text + "\n")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(self.path / "checkpoints", options=options)

    def save(self, step: int, state: Tree) -> None:
        """Starts a save; the state may be donated as soon as this returns."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=ocp.args.JsonSave({"next_batch": step, **self._data}),
                metadata=ocp.args.JsonSave({"step": step, **self._metadata}),
            ),
        )

    def close(self) -> None:
        """Waits for the save that is under way."""
        self._manager.wait_until_finished()
        self._manager.close()


def metadata(entry: str, config, layout: Layout, flags: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself, but for its step and data."""
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


def restore_tree(checkpoint: Checkpoint, abstract: Tree) -> Tree:
    """The part of a checkpoint's state that `abstract` names, each array where it says.

    Args:
      abstract: nested dict of ShapeDtypeStructs with shardings, e.g. {"params": …}.

    Raises UserError if the checkpoint has other parameters, or other shapes.
    """
    handler, folder = ocp.PyTreeCheckpointHandler(), epath.Path(checkpoint.path / "state")
    tree = handler.metadata(folder).tree
    _check_shapes(checkpoint, paths(_only(tree, abstract)), paths(abstract))
    restore_args = jax.tree.map(
        lambda a: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype),
        abstract,
    )
    return handler.restore(
        folder,
        args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=True),
    )


def restore_params(checkpoint: Checkpoint, layout: Layout) -> Tree:
    """A checkpoint's parameters, where `layout` says."""
    abstract = jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where),
        layout.plan.shapes,
        layout.params(),
    )
    return restore_tree(checkpoint, {"params": abstract})["params"]


def first_state(
    work: "Workdir", source: Checkpoint | None, layout: Layout, optimizer, seed: int, abstract: Tree
) -> Tree:
    """The state that training begins with: resumed, on given parameters, or new.

    Exactly one of the three is ever made.
    """
    if work.newest:
        return restore_tree(work.newest, abstract)
    if source is None:
        return sharding.initialize(layout, optimizer, seed, abstract)
    params = restore_params(source, layout)
    begin = layout.compile(
        lambda params: sharding.new_state(layout, optimizer, seed, params),
        params,
        donate_argnums=0,
        out_shardings=sharding.shardings(abstract),
    )
    return begin(params)


def _only(tree, like):
    """The items of `tree` whose top-level names `like` has."""
    return {name: tree.get(name, {}) for name in like}


def _check_shapes(checkpoint, saved, wanted):
    for path in wanted:
        if path not in saved:
            raise UserError(
                f"checkpoint {checkpoint.path} has no array {path}; it is another model's"
            )
        theirs, ours = tuple(saved[path].shape), tuple(wanted[path].shape)
        if theirs != ours:
            raise UserError(
                f"{path} has shape {list(theirs)} in checkpoint {checkpoint.path} and {list(ours)} in "
                "this model; give the flags that the checkpoint was made with"
            )
    for path in saved.keys() - wanted.keys():
        raise UserError(f"checkpoint {checkpoint.path} has an array {path} that this model lacks")


def origin(work: Workdir, source: Checkpoint | None) -> str:
    """Where the first state comes from, in a sentence."""
    if work.newest:
        return f"Resumes at step {work.newest.step}, from {work.newest.path}."
    if source:
        return f"Starts at step 0, on the parameters of {source.path}."
    return "Starts at step 0, on new parameters."


def farewell(work: Workdir, layout: Layout) -> list[str]:
    """Where the checkpoint lies, and a command that restores it on another mesh."""
    newest = find(work.path)
    other = next(
        describe(axes)
        for axes in ({"data": 1, "model": 8}, {"data": 8})
        if axes != dict(layout.mesh.shape)
    )
    return [
        f"Checkpoint: {newest.path}",
        f"On another mesh: python -m recipes.{newest.metadata['entry']} --mesh={other} "
        f"--restore_from={_short(work.path)} --workdir={_short(work.path)}-{other} --steps=0",
    ]


def _short(path: pathlib.Path) -> str:
    """Relative to the working directory where that is shorter."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def restore(path: str | pathlib.Path, mesh: Mesh, rules: str | Table | None = None):
    """A trained model on `mesh`, whatever mesh and table it was saved with.

    Args:
      path: a run's workdir, a step's folder, or a release.
      rules: a strategy of the entry's RULES, or a table of your own; None: what suits the mesh.

    Returns:
      (model, metadata): an NNX module whose every array lies where `rules` says, and the
      checkpoint's metadata. No device ever holds more than its shards.

    Raises UserError, a ValueError, if there is no checkpoint or the rules don't fit.
    """
    checkpoint = find(path)
    entry = checkpoint.metadata["entry"]
    zoo = importlib.import_module(f"zoo.{entry}") if entry in ENTRIES else None
    if zoo is None:
        raise UserError(f"checkpoint {path} is of {entry!r}; this zoo has {', '.join(ENTRIES)}")
    config = config_from(zoo.Config, checkpoint.metadata["config"])
    tables, strategy = zoo.RULES, rules or ""
    if isinstance(strategy, dict):
        tables, strategy = zoo.RULES | {"(yours)": rules}, "(yours)"
    layout = sharding.lay_out(
        lambda: getattr(zoo, ENTRIES[entry])(config, rngs=nnx.Rngs(0)), tables, strategy, mesh
    )
    return layout.plan.bind(restore_params(checkpoint, layout)), checkpoint.metadata


def config_from(cls, saved: dict):
    """A Config from its JSON, where tuples have become lists."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if name in known})
