"""LoRA: low-rank adapters of a model's weights (Hu et al. 2021), with config.lora_rank."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.layers import WeightInUse, multiply
from ..core.sharding import param


EXPERT = "expert"  # the logical axis of stacked experts' weights, and how their lora_targets begin


class Adapter(nnx.Module):
    """A low-rank A · B · scale to add to a weight; B starts at zero, so it initially adds nothing.

    Args:
      contract: how many dims of its input the weight contracts.
      stacked: dims before these, such as that of experts, each of which gets its own A and B.
    """

    def __init__(self, weight, contract: int, config, stacked: int = 0, *, rngs: nnx.Rngs):
        rank, axes = config.lora_rank, weight.out_sharding
        end = stacked + contract
        stack, inner, outer = weight.shape[:stacked], weight.shape[stacked:end], weight.shape[end:]
        a_axes, b_axes = (*axes[:end], "lora"), (*axes[:stacked], "lora", *axes[end:])
        stddev = math.prod(inner) ** -0.5
        self.a = param(rngs, (*stack, *inner, rank), a_axes, stddev, nnx.LoRAParam)
        self.b = param(rngs, (*stack, rank, *outer), b_axes, 0.0, nnx.LoRAParam)
        self.scale = config.lora_alpha / rank


def make_adapters(module, config, rngs: nnx.Rngs, contracted: dict[str, int]) -> nnx.Dict:
    """The adapters of a module's weights that config.lora_targets lists, by the weights' names.

    Args:
      contracted: a weight that can have one → how many dims of its input it contracts.
    """
    adapters = {}
    for name, contract in contracted.items():
        weight = vars(module)[name]
        is_stacked = weight.out_sharding[0] == EXPERT
        if (f"{EXPERT}_{name}" if is_stacked else name) in config.lora_targets:
            adapters[name] = Adapter(weight, contract, config, stacked=int(is_stacked), rngs=rngs)
    return nnx.Dict(adapters)


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


class LowRank(NamedTuple):
    """An expert's weight and its adapter, where mixture.mix has a weight."""

    weight: Any
    a: jax.Array
    b: jax.Array
    scale: float


def with_factors(expert: Callable, weights: Sequence[nnx.Param]) -> tuple[Callable, list]:
    """(a function like `expert` of mixture.mix that adds what adapters add, weights and factors for it)."""
    adapters = {n: w.adapter for n, w in enumerate(weights) if isinstance(w, AdaptedWeight)}
    plain = [w.weight if isinstance(w, AdaptedWeight) else w for w in weights]
    factors = [factor for adapter in adapters.values() for factor in (adapter.a, adapter.b)]

    def compute(product, x, *operands):
        own, remaining = [*operands[: len(plain)]], iter(operands[len(plain) :])
        for n, adapter in adapters.items():
            own[n] = LowRank(own[n], next(remaining), next(remaining), adapter.scale)
        return expert(functools.partial(low_rank_product, product), x, *own)

    return compute, plain + factors


def low_rank_product(product: Callable, x, operand) -> jax.Array:
    """product(x, operand), also of a LowRank."""
    if not isinstance(operand, LowRank):
        return product(x, operand)
    low_rank = product(product(x, operand.a), operand.b)
    return product(x, operand.weight) + low_rank * operand.scale
