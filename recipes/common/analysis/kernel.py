"""The attention kernel that a model's layers run, for reports and benchmarks."""

from typing import Any

from recipes.common.sharding import Layout
from zoo.attention import best_kernel
from zoo.context import way_to_attend
from zoo.sharding import mesh_axes, shards
from zoo.strategies import DECODER_POSITIONS


def report(layout: Layout, seq_len: int, segments: bool) -> list[str]:
    """A line that names the attention kernel; none if it is "xla"."""
    with layout.trace():
        _, described = attention_kernel(layout.config, seq_len, segments)
    return [] if described == "xla" else [f"attention: {described}"]


def attention_kernel(config: Any, seq_len: int, segments: bool) -> tuple[str, str]:
    """Returns (a name as in zoo.attention.best_kernel, a description for a report).

    The active mesh and rules decide, as in a step that is traced now. All kinds of layers have the
    same kernel.

    Args:
      config: zoo/transformer.py's or zoo/moe.py's.
    """
    way = way_to_attend(config.context, config.num_heads)
    facts = (config.attention, seq_len, segments, config.head_dim, config.dtype)
    plain = not (getattr(config, "soft_cap", None) or getattr(config, "sinks", False))
    name, note = best_kernel(*facts, way, plain)
    positions, _ = DECODER_POSITIONS
    across = f"{way} over {' and '.join(mesh_axes(positions))} ({shards(positions)})" if way else ""
    return name, ", ".join(text for text in (across, name, note) if text)
