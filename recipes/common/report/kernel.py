"""The kernels that a model's layers run, for reports and benchmarks."""

import dataclasses
from typing import Any

from recipes.common.runtime import UserError
from recipes.common.sharding import Layout
from recipes.common.sharding.rules import target_axes
from recipes.common.sharding.shape import AttentionShape
from zoo.core.sharding import device, mesh_axes, shards
from zoo.core.strategies import SEQ
from zoo.experts.exchange import exchanges
from zoo.experts.expert_strategies import EXPERT
from zoo.kernels.choice import RING, SPANS, Choice, Request, choose_kernel
from zoo.options.quantization import has_float8
from zoo.parallel.context import choose_exchange

PLATFORMS = {"splash": "tpu", "triton": "gpu", "cudnn": "gpu"}  # kernel → its only platform


def check(layout: Layout) -> None:
    """Raises UserError if the mesh's devices lack the kernel that a decoder's Config names."""
    config, attention = layout.config, layout.shape.attention
    name = config.attention
    if name not in PLATFORMS or attention is None:
        return
    with layout.trace():
        platform = device().platform
        chosen = attention_kernel(config, attention, layout.seq_len, segments=False)
        automatic = dataclasses.replace(config, attention="auto")
        best = attention_kernel(automatic, attention, layout.seq_len, segments=False)
    obstacle = ""
    if platform != PLATFORMS[name]:
        obstacle = f"{platform} devices"
    elif chosen.kernel == name != best.kernel:
        obstacle = best.obstacle
    if obstacle:
        raise UserError(
            f"--set=attention={name} doesn't support {obstacle}; use "
            "--set=attention=auto, which chooses a kernel that does"
        )


def report(layout: Layout, seq_len: int, segments: bool) -> list[str]:
    """A line that names the attention kernel; none if it is "xla"."""
    attention = layout.shape.attention
    if attention is None:
        return []
    with layout.trace():
        spans = layout.shape.spans
        choice = attention_kernel(layout.config, attention, seq_len, segments, spans)
        words = [choice.kernel]
        if exchange := choose_exchange(layout.config.context, attention.heads):
            words.insert(0, f"{exchange} over {' and '.join(mesh_axes(SEQ))} ({shards(SEQ)})")
    if choice.blocks:
        words.append(f"blocks of {choice.blocks}")
    named = layout.config.attention
    if spans and named not in ("auto", choice.kernel):
        words.append(f"as {named} has no spans that see both ways")
    if choice.obstacle:
        words.append(f"no other kernel for {choice.obstacle}")
    return [] if words == ["xla"] else [f"attention: {', '.join(words)}"]


def attention_kernel(
    config: Any, attention: AttentionShape, seq_len: int, segments: bool, spans: bool = False
) -> Choice:
    """The kernel for all attention of a decoder, as in a step that is traced now.

    The active mesh and rules decide.

    Args:
      segments: whether rows have segment ids.
      spans: whether rows have pictures, whose positions see each other in both directions.
    """
    exchange = choose_exchange(config.context, attention.heads)
    request = Request(
        seq_len=seq_len,
        head_dim=attention.key_dim,
        dtype=config.dtype,
        segments=segments,
        exchange=SPANS if spans and exchange != RING else exchange,
        soft_cap=attention.soft_cap,
        sinks=attention.sinks,
        two_sided=attention.window is not None and not attention.causal,
    )
    return choose_kernel(config.attention, request)


def experts(layout: Layout) -> list[str]:
    """A line about how rows reach dropless experts on other devices, if there are any."""
    names = target_axes(layout.rules.get(EXPERT))
    devices = layout.count_shards(EXPERT) if names else 1
    dropless = [x for x, _ in layout.shape.trained_experts if not x.capacity]
    if devices == 1 or not dropless:
        return []
    choices = dropless[0].per_token
    over = " and ".join(names)
    limit = dropless[0].load_limit
    if exchanges(devices, choices, limit):
        way = f"rows travel to at most {min(choices, devices)} of {devices} devices along {over}"
        way += f", which drop what exceeds {limit:g} times an even load" if limit else ""
    else:
        way = f"{devices} devices along {over} gather all rows"
    return [f"experts: dropless, {way}"]


def matmul(layout: Layout) -> list[str]:
    """A line about low-precision matmuls, if there are any."""
    shape, device = layout.shape, layout.mesh.devices.flat[0]
    if not shape.matmul:
        return []
    backward = shape.matmul_backward or shape.matmul
    emulated = ""
    if device.platform == "cpu":
        emulated = ", emulated: numbers are rounded, and multiplied in float32"
    elif shape.matmul == "fp8" and not has_float8(device.device_kind):
        emulated = ", emulated: numbers are rounded, and multiplied in bfloat16"
    return [f"matmul: layers in {shape.matmul}, their gradients in {backward}{emulated}"]
