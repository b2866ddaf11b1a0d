"""FLOPs of training, and the peak FLOP/s of chips.

Training takes 6·N per position, where N counts the weights that the position is multiplied with:
two FLOPs each, once forward and twice backward. Recomputation does not count. Causal attention adds
6·T·heads·head dim per layer (the mean of the keys' and the values'), which is half of the T × T
square; a sliding window reduces it further. (Some published figures count the full square and are larger.)

The compiler's cost analysis is of no use here, because it counts a scanned layer once.
"""

import math
import re
from typing import Any

import jax

from recipes.common.sharding import Layout
from zoo.layers import Kind

# Words in JAX's device_kind → FLOP/s of one device in dense bfloat16 with float32 sums; the first
# match counts. Sources: NVIDIA's data sheets (whose "with sparsity" figures are twice these), its
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


def chip(kind: str) -> float | None:
    """Peak FLOP/s of a kind of device; None if unknown, as for CPUs."""
    whole = lambda name: re.search(rf"\b{name}\b", kind)  # noqa: E731 must not match L40S
    return next((rate for name, rate in PEAK.items() if whole(name)), None)


def peak(layout: Layout, flops: float) -> float | None:
    """How many times per second a mesh could do `flops` FLOPs at its peak; None if unknown."""
    rate = chip(layout.mesh.devices.flat[0].device_kind)
    return rate and rate * layout.mesh.size / flops


def dense(layout: Layout) -> float:
    """FLOPs of training on one example, for a model that uses every weight once.

    Frozen weights have no gradients: 4·N.
    """
    each = {"params": 6, "base": 4}
    return sum(
        each.get(kind, 0) * math.prod(x.shape)
        for kind, tree in layout.model.shapes.items()
        for x in jax.tree.leaves(tree)
    )


def encoder(layout: Layout, positions: int) -> float:
    """FLOPs of training on one example of `positions` positions that all attend to each other.

    Counts every weight once a position, as if its few other weights were part of a layer.
    """
    config = layout.config
    return positions * (dense(layout) + 12 * positions * config.num_layers * config.embed)


def matmul_params(config: Any) -> int:
    """N of a decoder: all weights but biases, norms and the lookup in the embedding table.

    With experts: the router and the experts that a token uses, shared ones included. The layer that
    predicts a further token counts too, with its own logits.

    Args:
      config: zoo/transformer.py's or zoo/moe.py's, for instance.
    """
    D, attention = config.embed, attention_params(config)
    router, experts = getattr(config, "num_experts", 0), getattr(config, "experts_per_token", 1)
    experts += getattr(config, "shared_experts", 0)
    matrices = getattr(config, "mlp_matrices", 3)  # gate, up and down
    layer = attention + D * router + experts * matrices * D * config.mlp
    dense, further = getattr(config, "dense_layers", 0), getattr(config, "mtp_depth", 0)
    first = dense * (attention + matrices * D * getattr(config, "dense_mlp", 0))
    table = config.vocab_size * D
    return (
        (config.num_layers - dense) * layer + first + table + further * (layer + 2 * D * D + table)
    )


def attention_params(config: Any) -> int:
    """Weights of a layer's attention: of q, k, v and o, or of latent attention's projections."""
    D, N, H = config.embed, config.num_heads, config.head_dim
    if not hasattr(config, "kv_latent"):
        return 2 * D * H * (N + config.num_kv_heads)
    C, V, low = config.kv_latent, config.value_dim, config.q_latent
    queries = low * (D + N * H) if low else D * N * H
    return queries + D * (C + config.rope_dim) + C * N * (config.nope_dim + V) + N * V * D


def layers_of(config: Any) -> int:
    """A decoder's layers, with the one that predicts a further token."""
    return config.num_layers + getattr(config, "mtp_depth", 0)


def kinds_of_layers(config: Any) -> list[tuple[Kind, int]]:
    """Each kind in a period of a decoder's layers, with the number of its layers."""
    period = config.kinds
    return [
        (kind, len(range(place, layers_of(config), len(period))))
        for place, kind in enumerate(period)
    ]


def decoder(config: Any, seq_len: int, batch_size: int = 1) -> dict[str, float]:
    """FLOPs of training on a batch: "causal" counts half of the attention square, "full" all of it.

    With adapters, the frozen weights have no gradients: 4·N. The adapters themselves, a few percent
    of that, are not counted.
    """
    tokens = batch_size * seq_len
    weights = (4 if getattr(config, "lora_rank", 0) else 6) * matmul_params(config) * tokens
    both = config.head_dim + getattr(config, "value_dim", config.head_dim)
    square = 6 * seq_len * config.num_heads * both * tokens  # per layer
    causal = float(weights)
    for kind, layers in kinds_of_layers(config):
        seen = min(kind.window or seq_len, seq_len) / seq_len  # by the last position of a row
        causal += layers * square * (seen - seen**2 / 2)
    return {"causal": causal, "full": weights + layers_of(config) * square}
