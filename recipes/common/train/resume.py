"""What a run starts with: the state of its newest checkpoint, given parameters, or new ones."""

import dataclasses

import optax

from recipes.common.checkpoint import RunFolder, Source
from recipes.common.runtime import Run
from recipes.common.sharding import Layout, Tree, shardings
from recipes.common.sharding.abstract import unadapted
from recipes.common.train import state as training_state
from recipes.common.train.step import TrainStep


def first_state(folder: RunFolder, step: TrainStep, seed: int, abstract: Tree) -> Tree:
    """The state to begin with, of a checkpoint that fits the layout. Only one is ever in memory."""
    layout, optimizer = step.layout, step.optimizer
    if folder.newest:
        return folder.newest.read(abstract)
    if folder.source is None:
        return training_state.initialize(layout, optimizer, seed, abstract)
    if not folder.in_use:
        optimizer = optax.identity()  # evaluation needs no moments
        abstract = training_state.abstract_state(layout, optimizer)
    variables = given(folder.source, layout)
    begin = layout.compile(
        lambda variables: training_state.new_state(layout, optimizer, seed, variables),
        variables,
        donate_argnums=0,
        out_shardings=shardings(abstract),
    )
    return begin(variables)


def given(source: Source, layout: Layout) -> Tree:
    """The model's variables from a source; adapters that it has none of are new."""
    wanted = layout.variables()
    if "base" not in wanted or "base" in source.metadata:
        return source.read(wanted)
    variables = source.read(unadapted(wanted))
    return variables | {
        "params": training_state.new_params(layout),
        "base": variables["params"],
    }


def origin(folder: RunFolder, run: Run, step: TrainStep) -> list[str]:
    """Lines that say where the first state comes from, and what is unusual about it."""
    lines = [
        f"Damaged: {folder.checkpoint(number)}: {bad}. It is moved to {folder.path / 'damaged'}."
        for number, bad in folder.damaged.items()
    ]
    if folder.newest:
        lines.append(f"Resumes at step {folder.step}, from {folder.newest.path}.")
    elif folder.source is None:
        lines.append("Starts at step 0, on new parameters.")
    elif folder.in_use:
        lines.append(f"Starts at step 0, on the parameters of {folder.source.path}.")
    else:
        lines.append(f"Evaluates {folder.source.path}, of step {folder.source.step}.")
    if "steps" in folder.changed and run.schedule != "constant":
        before, at = folder.changed["steps"], folder.step
        was = dataclasses.replace(step.lr, steps=before)(at)
        lines.append(
            f"--steps was {before} and is {run.steps}: the learning rate now decays until step "
            f"{run.steps}, and at step {at} it is {step.lr(at):.2e} instead of {was:.2e}."
        )
    return lines
