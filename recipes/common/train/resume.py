"""How a run begins: from its newest checkpoint, from trained parameters, or with new ones."""

import dataclasses
from collections.abc import Callable

import optax

from recipes.common.checkpoint import RunFolder, WeightSource
from recipes.common.runtime import Run
from recipes.common.sharding import Layout, Tree, paths, shardings
from recipes.common.sharding.abstract import nested, unadapted
from recipes.common.train import state as training_state
from recipes.common.train.beside import beside
from recipes.common.train.step import TrainStep


def messages(folder: RunFolder, run: Run, step: TrainStep) -> list[str]:
    """Where the first state comes from, and what is unusual about it."""
    lines = [
        f"Damaged: {folder.checkpoint(number)}: {bad}. It is moved to {folder.path / 'damaged'}."
        for number, bad in folder.damaged.items()
    ]
    if folder.newest:
        lines.append(f"Resumes at step {folder.step}, from {folder.newest.path}.")
    elif folder.source is None:
        lines.append("Starts at step 0 with new parameters.")
    elif folder.in_use:
        lines.append(f"Starts at step 0 from the parameters of {folder.source.path}.")
    else:
        lines.append(f"Evaluates {folder.source.path}, step {folder.source.step}.")
    if "steps" in folder.changed and run.schedule != "constant":
        before, at = folder.changed["steps"], folder.step
        was = dataclasses.replace(step.lr, steps=before)(at)
        lines.append(
            f"--steps was {before} and is {run.steps}: the learning rate now decays until step "
            f"{run.steps}, and at step {at} it is {step.lr(at):.2e} instead of {was:.2e}."
        )
    return lines


def first_state(
    folder: RunFolder, step: TrainStep, seed: int, abstract: Tree
) -> Callable[[], Tree]:
    """Begins to compile what makes the state to begin with, beside the main thread.

    Returns a function that makes the state. Memory never holds two.

    Args:
      folder: its checkpoint, if any, fits the layout.
      abstract: `step.abstract_state()`.
    """
    layout, optimizer = step.layout, step.optimizer
    newest, source = folder.newest, folder.source
    if newest:
        return lambda: newest.read(abstract)
    if source is None:
        program = beside(
            layout.mesh,
            lambda: training_state.initialization(layout, optimizer, seed, abstract),
        )
        return lambda: program()()
    if not folder.in_use:
        optimizer = optax.identity()  # evaluation needs no moments
        abstract = training_state.abstract_state(layout, optimizer)
    variables = layout.variables()
    make = beside(
        layout.mesh,
        lambda: layout.compile(
            lambda variables: training_state.new_state(layout, optimizer, seed, variables),
            variables,
            donate_argnums=0,
            out_shardings=shardings(abstract),
        ),
    )
    if needs_adapters(source, layout):
        adapters = beside(layout.mesh, lambda: training_state.new_params_program(layout))
        return lambda: make()(read_variables(source, layout, adapters()))
    return lambda: make()(read_variables(source, layout))


def needs_adapters(source: WeightSource, layout: Layout) -> bool:
    """Whether the model has adapters, and the source none."""
    return "base" in layout.model.shapes and "base" not in source.metadata


def read_variables(
    source: WeightSource, layout: Layout, adapters: Callable[[], Tree] | None = None
) -> Tree:
    """The model's variables from a source; new adapters where the source has none.

    Args:
      adapters: makes the new ones; None: is compiled here.
    """
    wanted = layout.variables()
    if not needs_adapters(source, layout):
        return source.read(wanted)
    variables = source.read(unadapted(wanted))
    made = adapters() if adapters else training_state.new_params(layout)
    read, new = paths(variables["params"]), paths(made)
    trained = {path: read.pop(path, value) for path, value in new.items()}
    return variables | {"params": nested(trained), "base": nested(read)}
