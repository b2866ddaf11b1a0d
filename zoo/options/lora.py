"""LoRA: low-rank adapters of a model's weights.

layers.adapters uses this file if config.lora_rank is not 0, so a model can be copied without it.
"""

import math

from flax import nnx

from ..core.sharding import param


class Adapter(nnx.Module):
    """LoRA (Hu et al. 2021): a low-rank A · B · scale to add to a weight; B starts at zero."""

    def __init__(self, weight, contract: int, config, *, rngs: nnx.Rngs):
        rank, axes = config.lora_rank, weight.out_sharding
        inner, outer = weight.shape[:contract], weight.shape[contract:]
        a_axes, stddev = (*axes[:contract], "lora"), math.prod(inner) ** -0.5
        self.a = param(rngs, (*inner, rank), a_axes, stddev, nnx.LoRAParam)
        self.b = param(rngs, (rank, *outer), ("lora", *axes[contract:]), 0.0, nnx.LoRAParam)
        self.scale = config.lora_alpha / rank
