"""FLOPs of training, and the peak FLOP/s of chips.

Training takes 6·N per position, where N counts the weights that the position is multiplied with:
two FLOPs each, once forward and twice backward. Recomputation does not count. Causal attention adds
6·T·heads·head dim per layer (the mean of the keys' and the values'), which is half of the T × T
square; a sliding window reduces it further. (Some published numbers count the full square and are
larger.)

The compiler's cost analysis is of no use here, because it counts a scanned layer once.
"""

import math
import re

import jax

from recipes.common.sharding import Layout
from recipes.common.sharding.shape import Shape

# Words in JAX's device_kind → FLOP/s of one device in dense bfloat16 with float32 sums; the first
# match counts. Sources: NVIDIA's data sheets (whose "with sparsity" numbers are twice these), its
# Ada and Ampere GA102 whitepapers for RTX cards, and Google's pages of TPU versions. A TPU7x device
# is half a chip.
PEAK = {
    "GB300": 2500e12,
    "GB200": 2500e12,
    "B300": 2250e12,
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,  # SXM, which JAX calls "NVIDIA H100 80GB HBM3"
    "H20": 148e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 6000 Ada": 364.2e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "TPU7x": 1153.5e12,
    "TPU v6 lite": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}


EACH = {"params": 6, "base": 4}  # kind of weight → FLOPs for a position; base: without gradients
TABLES = {"words", "positions", "text_positions"}  # logical axes of two towers' tables


def chip(kind: str) -> float | None:
    """Peak FLOP/s of a kind of device; None if unknown, as for CPUs."""
    # As a word: L40 must not match L40S.
    return next((rate for name, rate in PEAK.items() if re.search(rf"\b{name}\b", kind)), None)


def peak(layout: Layout, flops: float) -> float | None:
    """How many times per second a mesh could do `flops` FLOPs at its peak; None if unknown."""
    rate = chip(layout.mesh.devices.flat[0].device_kind)
    return rate and rate * layout.mesh.size / flops


def dense(layout: Layout) -> float:
    """FLOPs of training on one example, for a model that uses every weight once.

    Frozen weights have no gradients: 4·N.
    """
    return sum(
        EACH.get(kind, 0) * math.prod(x.shape)
        for kind, tree in layout.model.shapes.items()
        for x in jax.tree.leaves(tree)
    )


def encoder(layout: Layout) -> float:
    """FLOPs of training on one example of a model without tokens, or of two towers on a pair.

    Counts every weight of the first once per position, although a few are used once per example. All
    positions attend to each other.
    """
    shape, total = layout.shape, 0.0
    for kind, each in EACH.items():
        for path, (leaf, axes) in layout.model.variables.get(kind, {}).items():
            if not shape.text_positions or TABLES.isdisjoint(axes):
                total += each * math.prod(leaf.shape) * shape.positions_of(path)
    for layer in shape.layers:
        if layer.attention:
            square = (layer.positions or shape.positions) ** 2
            total += 6 * layer.count * layer.attention.heads * layer.attention.kv_dim * square
    return total


def decoder(shape: Shape, seq_len: int, batch_size: int = 1) -> dict[str, float]:
    """FLOPs of training on a batch: "causal" counts half of the attention square, "full" all of it.

    With adapters, the frozen weights have no gradients: 4·N. The adapters themselves, a few percent
    of that, are not counted.
    """
    tokens = batch_size * seq_len
    weights = (4 if shape.adapters else 6) * shape.multiplied * tokens
    causal = full = float(weights)
    for layer, count in shape.trained_layers:
        if layer.recurrence:
            recurrence = count * 6 * layer.recurrence.work * tokens
            causal += recurrence
            full += recurrence
        if attention := layer.attention:
            square = count * 6 * seq_len * attention.heads * attention.kv_dim * tokens
            seen = min(attention.window or seq_len, seq_len) / seq_len  # by the last position
            both_sides = min(2 * seen, 1.0) if attention.window else 1.0
            causal += square * (seen - seen**2 / 2 if attention.causal else both_sides)
            full += square
    return {"causal": causal, "full": full}
