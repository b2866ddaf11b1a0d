"""What a language model's run prints about its layout and its results."""

from typing import Any

import jax.numpy as jnp

from data.batches import Dataset
from recipes.common.flags.config_flags import describe_set
from recipes.common.language.text_flags import Training
from recipes.common.report import kernel
from recipes.common.report.report import size
from recipes.common.sharding import Layout, Tree
from recipes.common.train.checks import rows_of_a_device
from recipes.common.train.evaluation import in_words
from zoo.parallel.pipeline import microbatches, rounds, ticks

LENGTHS = (512, 8_192)  # positions for which the size of a cache is stated


def before_training(layout: Layout, corpus: Dataset, training: Training, flags: Any) -> list[str]:
    """Lines about the text; and about kernels, experts, low precision and stages, if there are any.

    Args:
      flags: of the model.
    """
    is_packed = "segment_ids" in corpus.filler
    return [
        *corpus.notes,
        *kernel.report(layout, layout.seq_len, is_packed),
        *kernel.experts(layout),
        *kernel.matmul(layout),
        *stages(layout, training.accumulate),
        *cache(layout),
        *describe_set(flags),
        *without_effect(layout, flags),
    ]


def without_effect(layout: Layout, flags: Any) -> list[str]:
    """Lines about flags for a mesh that splits positions or layers, on one that does not.

    Args:
      flags: of the model.
    """
    parts = {"context": (layout.seq_shards, "positions"), "pipeline": (layout.stages, "layers")}
    return [
        f"--{name}={vars(flags)[name]} has no effect: rules {layout.strategy!r} split no {what}."
        for name, (count, what) in parts.items()
        if count == 1 and vars(flags)[name] != type(flags).__dataclass_fields__[name].default
    ]


def cache(layout: Layout) -> list[str]:
    """A line about what generation keeps of a row, if layers have states: these don't grow with it."""
    layers = layout.shape.layers
    if not any(layer.recurrence for layer in layers):
        return []
    state = inputs = keys = 0
    for layer in layers:
        if layer.recurrence:
            state += layer.count * layer.recurrence.state
            inputs += layer.count * layer.recurrence.halo
        if layer.attention:
            keys += layer.count * layer.attention.cached
    width = jnp.dtype(layout.config.dtype).itemsize
    states = size(4 * state + width * inputs)
    sizes = [f"{size(width * keys * length)} at {length:,}" for length in LENGTHS]
    return [
        f"cache of a row: states {states} at any length; keys and values {' and '.join(sizes)} positions"
    ]


def stages(layout: Layout, accumulate: int) -> list[str]:
    """A line of the report about the pipeline, if there is one."""
    if (S := layout.stages) == 1:
        return []
    M = microbatches(layout.config, rows_of_a_device(layout, accumulate), S)
    v = rounds(layout.config)
    schedule = layout.config.pipeline + (f" in {v} rounds" if v > 1 else "")
    bubble = 1 - v * M / ticks(M, S, v)
    return [f"pipeline: {schedule}, {S} stages, {M} microbatches, bubble {bubble:.1%}"]


def results(metrics: Tree, corpus: Dataset) -> list[str]:
    """Lines about an evaluation.

    Args:
      metrics: held-out, name → (sum, count).
    """
    lines = [f"Held-out {in_words(metrics, corpus.held_out_bytes)}."]
    return [*lines, use_of_experts(metrics)] if "dropped" in metrics else lines


def use_of_experts(metrics: Tree) -> str:
    """A line on how evenly the experts are used, and on choices that were dropped.

    Args:
      metrics: held-out, name → (sum, count).
    """
    means = {name: float(total / count) for name, (total, count) in metrics.items()}
    loads = [value for name, value in means.items() if name.startswith("load_")]
    each = f" ({', '.join(f'{load:.2f}' for load in loads)})" if len(loads) <= 16 else ""
    return (
        f"Use of the {len(loads)} experts, in even shares: {min(loads):.2f} to {max(loads):.2f}{each}; "
        f"no room for {means['dropped']:.2%} of what was chosen."
    )
