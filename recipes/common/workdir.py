"""A run's folder: what is in it, whether this run may go on there, and what it saves."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp

from recipes.common import checkpoint, sharding
from recipes.common.checkpoint import Source
from recipes.common.cli import Run, UserError
from recipes.common.mesh import describe
from recipes.common.sharding import Layout, Tree


class Workdir:
    """A run's folder. Nothing is written to it before `begin`."""

    def __init__(self, run: Run, entry: str):
        """Raises UserError if --workdir can't be the folder of this entry's run."""
        self.entry, name = entry, run.workdir or f"runs/{entry}"
        self.path = pathlib.Path(name).expanduser().absolute()
        self.newest: Source | None = None  # this run's own
        self.source: Source | None = None  # another's, to begin from
        # --steps=0 --restore_from=… evaluates what it is given, and leaves every workdir alone.
        self.in_use = run.steps > 0 or not run.restore_from
        if self.in_use:
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"--workdir={name} is a file; give a folder")
            if steps := checkpoint.steps_in(self.path / "checkpoints"):
                self.newest = checkpoint.find(self.path / "checkpoints" / str(steps[-1]))
        if run.restore_from and not self.newest:
            self.source = checkpoint.find(run.restore_from)
        for what, found in (("--workdir", self.newest), ("--restore_from", self.source)):
            if found and found.metadata["entry"] != entry:
                theirs = found.metadata["entry"]
                raise UserError(
                    f"{what}={found.path} is of {theirs!r}, not {entry!r}; give another"
                )

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
        here = pathlib.Path.cwd()
        return self.path.relative_to(here) if self.path.is_relative_to(here) else self.path

    @property
    def metrics(self) -> pathlib.Path | None:
        """metrics.jsonl; None if nothing is to be written."""
        return self.path / "metrics.jsonl" if self.in_use else None

    def check_flags(self, *groups) -> dict[str, Any]:
        """Compares the flags with those that the run had when it was saved.

        Returns what may change and has: {name: value before}. Raises UserError for what may not.
        """
        before = self.newest.metadata["flags"] if self.newest else {}
        changed = {}
        for group in groups:
            for field in dataclasses.fields(group):
                was, now = before.get(field.name), getattr(group, field.name)
                if field.name not in before or was == now:
                    continue
                another_start = field.name == "restore_from" and now
                if another_start or not field.metadata["may_change"]:
                    raise UserError(
                        f"--{field.name}={now} is not what this run began with, {was or 'none'}; "
                        f"give that, or a new --workdir (this one is {self.path})"
                    )
                changed[field.name] = was
        return changed

    def check_data(self, data: dict[str, Any]) -> None:
        """Notes what the batches are made of; raises UserError if a resumed run had others."""
        self._data = data
        if self.newest and self.newest.metadata["data"] != data:
            raise UserError(
                f"--dataset={data['dataset']} is not what it was when this run began (its "
                f"fingerprint differs); give a new --workdir (this one is {self.path})"
            )

    def first_state(self, layout: Layout, optimizer, seed: int, abstract: Tree) -> Tree:
        """The state to begin with: resumed, on given parameters, or new. Only one is ever made."""
        if self.newest:
            return checkpoint.restore_tree(self.newest, abstract)
        if self.source is None:
            return sharding.initialize(layout, optimizer, seed, abstract)
        if not self.in_use:
            optimizer = optax.identity()  # evaluation needs no moments
            abstract = sharding.abstract_state(layout, optimizer)
        params = checkpoint.restore_params(self.source, layout)
        begin = layout.compile(
            lambda params: sharding.new_state(layout, optimizer, seed, params),
            params,
            donate_argnums=0,
            out_shardings=sharding.shardings(abstract),
        )
        return begin(params)

    def origin(self) -> str:
        """Where the first state comes from, in a sentence."""
        if self.newest:
            return f"Resumes at step {self.step}, from {self.newest.path}."
        if self.source is None:
            return "Starts at step 0, on new parameters."
        if self.in_use:
            return f"Starts at step 0, on the parameters of {self.source.path}."
        return f"Evaluates {self.source.path}, of step {self.source.step}."

    def begin(self, keep: int, metadata: dict[str, Any]) -> None:
        """Makes the folder, writes config.json and opens the checkpoints."""
        if not self.in_use:
            return
        self._metadata = metadata | {"data": self._data}
        self.path.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            text = json.dumps({key: metadata[key] for key in ("flags", "versions")}, indent=2)
            (self.path / "config.json").write_text(text + "\n")
        self._manager = ocp.CheckpointManager(
            self.path / "checkpoints",
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(type_handler_registry=checkpoint.ANY_MESH),
                "data": ocp.JsonCheckpointHandler(),
                "metadata": ocp.JsonCheckpointHandler(),
            },
        )

    def save(self, step: int, state: Tree) -> None:
        """Starts a save; the state may be donated as soon as this returns."""
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(state),
            data=ocp.args.JsonSave({"next_batch": step, **self._data}),
            metadata=ocp.args.JsonSave({"step": step, **self._metadata}),
        )
        self._manager.save(step, args=items)

    def close(self) -> None:
        """Waits for the save that is under way."""
        if self.in_use:
            self._manager.wait_until_finished()
            self._manager.close()

    def farewell(self, layout: Layout) -> list[str]:
        """Where the checkpoint lies, and a command that restores it on another mesh."""
        steps = checkpoint.steps_in(self.path / "checkpoints") if self.in_use else []
        if not steps:
            return []  # nothing was trained
        path = self.shown
        lines = [f"Checkpoint: {path / 'checkpoints' / str(steps[-1])}"]
        if other := another_mesh(layout):
            command = (
                f"python -m recipes.{self.entry} --mesh={other} --restore_from={path} --steps=0"
            )
            lines.append(f"On another mesh: {command}")
        return lines


def another_mesh(layout: Layout) -> str | None:
    """As --mesh is written: a mesh of as many devices where the same model lies otherwise."""
    size = 8 if layout.mesh.size == 1 else layout.mesh.size
    for axes in ({"data": 1, "model": size}, {"data": size}, {"data": size // 2, "model": 2}):
        mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
        try:
            strategy = sharding.choose(layout.rules, "", mesh)
            sharding.check(layout.rules, strategy, layout.plan, mesh)
        except UserError:
            continue
        if axes != dict(layout.mesh.shape):
            return describe(axes)
    return None
