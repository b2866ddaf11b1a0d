"""Losses and gradients of models that see, on given rows, with values that use every part."""

from typing import Any

import jax
import numpy as np

from recipes.common.sharding.abstract import paths
from recipes.common.sharding.layout import Layout, shardings
from recipes.common.train.step import gradients
from tests.support.quick import QUICK


def step(layout: Layout, rows: dict[str, np.ndarray]) -> tuple[jax.stages.Compiled, tuple]:
    """(the compiled (variables, rows) → (means, gradients), what to call it with)."""
    random = np.random.default_rng(1)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        size = random.normal(size=leaf.shape) / 16
        if "clips" in name:  # bounds that some numbers exceed
            size = (1 + abs(size)) * (1 if "max" in name else -1)
        mean = 1.0 if "scal" in name or "factor" in name else 0.0
        return (mean + size).astype(np.float32)

    def both(variables, rows):
        grads, _, means = gradients(layout, variables, rows)
        return means, grads

    variables = jax.tree_util.tree_map_with_path(draw, layout.model.shapes)
    given = (
        jax.device_put(variables, shardings(layout.variables())),
        jax.device_put(rows, layout.batch_shardings(rows)),
    )
    return layout.compile(both, *given, compiler_options=QUICK), given


def loss_and_gradients(
    program: jax.stages.Compiled, given: tuple[Any, ...]
) -> tuple[float, dict[str, np.ndarray]]:
    """What a call of `step`'s program returns: the loss, and path → gradient."""
    means, grads = program(*given)
    return float(means["loss"]), {path: np.asarray(x) for path, x in paths(grads).items()}
