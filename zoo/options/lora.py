"""LoRA: low-rank adapters of a model's weights (Hu et al. 2021), with config.lora_rank."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.layers import WeightInUse, multiply
from ..core.sharding import param


class Adapter(nnx.Module):
    """A low-rank A · B · scale to add to a weight; B starts at zero, so it initially adds nothing."""

    def __init__(self, weight, contract: int, config, *, rngs: nnx.Rngs):
        rank, axes = config.lora_rank, weight.out_sharding
        inner, outer = weight.shape[:contract], weight.shape[contract:]
        a_axes, stddev = (*axes[:contract], "lora"), math.prod(inner) ** -0.5
        self.a = param(rngs, (*inner, rank), a_axes, stddev, nnx.LoRAParam)
        self.b = param(rngs, (rank, *outer), ("lora", *axes[contract:]), 0.0, nnx.LoRAParam)
        self.scale = config.lora_alpha / rank


def make_adapters(module, config, rngs: nnx.Rngs, contracted: dict[str, int]) -> nnx.Dict:
    """The adapters of a module's weights that config.lora_targets lists, by the weights' names.

    Args:
      contracted: a weight that can have one → how many dims of its input it contracts.
    """
    names = [name for name in contracted if name in config.lora_targets]
    return nnx.Dict(
        {name: Adapter(vars(module)[name], contracted[name], config, rngs=rngs) for name in names}
    )


def adapted(layer):
    """Makes the weights of a layer in use multiply with their adapters. Returns it."""
    modules = dict(nnx.iter_modules(layer))
    for path, adapter in modules.items():
        if isinstance(adapter, Adapter):
            *owner, _, key = path
            module, name = modules[tuple(owner)], str(key)
            weight = vars(module)[name]
            setattr(
                module,
                name,
                AdaptedWeight(
                    weight.get_value(),
                    weight=weight,
                    adapter=adapter,
                    out_sharding=weight.out_sharding,
                    eager_sharding=False,
                ),
            )
    return layer


class AdaptedWeight(WeightInUse):
    """A weight in use to which an adapter adds."""

    weight: nnx.Param  # in use
    adapter: Adapter  # its variables too

    def multiply(self, x, contract: int, seq: str) -> jax.Array:
        y = multiply(x, self.weight, contract, seq)
        if isinstance(self.weight, WeightInUse):
            x = self.weight.exact_input(x)
        low_rank = multiply(x, self.adapter.a, contract)
        y += multiply(low_rank, self.adapter.b, seq=seq) * self.adapter.scale
        return y

    def prepare(self, x_BTD: jax.Array):
        weight = self.weight
        return weight.prepare(x_BTD) if isinstance(weight, WeightInUse) else super().prepare(x_BTD)

    def dense(self) -> jax.Array:
        weight = self.weight
        w = weight.dense() if isinstance(weight, WeightInUse) else weight[...]
        return w + jnp.tensordot(self.adapter.a[...], self.adapter.b[...], 1) * self.adapter.scale
