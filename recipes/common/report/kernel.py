"""The kernels that a model's layers run, for reports and benchmarks."""

from typing import Any

from recipes.common.sharding import Layout
from zoo.context import choose_exchange
from zoo.kernels import Choice, Request, choose_kernel
from zoo.quantization import has_float8
from zoo.sharding import mesh_axes, shards
from zoo.strategies import SEQ


def report(layout: Layout, seq_len: int, segments: bool) -> list[str]:
    """A line that names the attention kernel; none if it is "xla"."""
    with layout.trace():
        choice = attention_kernel(layout.config, seq_len, segments)
        exchange = choose_exchange(layout.config.context, layout.config.num_heads)
        parts = [choice.kernel]
        if exchange:
            parts.insert(0, f"{exchange} over {' and '.join(mesh_axes(SEQ))} ({shards(SEQ)})")
    if choice.blocks:
        parts.append(f"blocks of {choice.blocks}")
    if choice.obstacle:
        parts.append(f"no other kernel for {choice.obstacle}")
    return [] if parts == ["xla"] else [f"attention: {', '.join(parts)}"]


def attention_kernel(config: Any, seq_len: int, segments: bool) -> Choice:
    """The kernel for all layers of a decoder, as in a step that is traced now.

    The active mesh and rules decide.
    """
    request = Request(
        seq_len=seq_len,
        head_dim=config.head_dim,
        dtype=config.dtype,
        segments=segments,
        exchange=choose_exchange(config.context, config.num_heads),
        plain=not (getattr(config, "soft_cap", None) or getattr(config, "sinks", False)),
    )
    return choose_kernel(config.attention, request)


def matmul(layout: Layout) -> list[str]:
    """A line about low-precision matmuls, if there are any."""
    config, device = layout.config, layout.mesh.devices.flat[0]
    if not config.matmul:
        return []
    backward = config.matmul_backward or config.matmul
    emulated = ""
    if device.platform == "cpu":
        emulated = ", emulated: numbers are rounded, and multiplied in float32"
    elif config.matmul == "fp8" and not has_float8(device.device_kind):
        emulated = ", emulated: numbers are rounded, and multiplied in bfloat16"
    return [f"matmul: layers in {config.matmul}, their gradients in {backward}{emulated}"]
