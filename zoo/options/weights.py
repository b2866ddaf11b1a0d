"""Weights in use that are rounded, summed in float32 or have adapters: methods of a Config.

compute_options.py has them for decoders, and a Config of another model may take them likewise.
"""

from typing import Any

import jax
from flax import nnx

from ..core.sharding import AxisNames, in_use
from ..core.vocabulary import table_copies

MATMULS = ("", "int8", "fp8", "int8_weights")  # valid values of Config.matmul
MATMUL_GRADIENTS = ("", "bfloat16")  # of Config.matmul_backward
REDUCE_DTYPES = ("", "float32")  # of Config.reduce_dtype


# Experts' weights in lora_targets; no default has them.
EXPERT_TARGETS = ("expert_gate", "expert_up", "expert_down")


def adaptable(config: type) -> tuple[str, ...]:
    """What lora_targets of a class of Configs may list: its default, and weights of experts."""
    has_experts = "num_experts" in config.__dataclass_fields__
    return config.lora_targets + (EXPERT_TARGETS if has_experts else ())


def check(config) -> None:
    """Raises ValueError if a Config's options of weights exclude each other."""
    if config.reduce_dtype and config.matmul:
        raise ValueError(
            f"reduce_dtype={config.reduce_dtype} is for matmuls in dtype, and matmul={config.matmul}"
        )
    targets = adaptable(type(config))
    for name in config.lora_targets:
        if name not in targets:
            raise ValueError(f"lora_targets has {name!r}, which is not one of {', '.join(targets)}")


def add_adapters(self, module: Any, rngs: nnx.Rngs, **contracted: int) -> None:
    """Gives a new module an Adapter (lora.py) for each of its weights that lora_targets lists.

    Args:
      contracted: a weight that can have one → how many dims of its input it contracts.
    """
    if not self.lora_rank:
        return
    from .lora import make_adapters

    module.lora = make_adapters(module, self, rngs, contracted)


def use_layer(self, layer, axes: AxisNames):
    """Config.use_layer: multiplies in `matmul`; devices add gradients in `reduce_dtype`."""
    if self.reduce_dtype:
        used = use_weights(self, layer, axes)
    elif self.matmul:
        from .low_precision import lowered

        used = lowered(layer, in_use(layer, axes.in_use, self.dtype), axes.in_use, self)
    else:
        used = in_use(layer, axes.in_use_by_layers, self.dtype)
    if not self.lora_rank:
        return used
    from .lora import adapted

    return adapted(used)


def use_weights(self, weights, axes: AxisNames):
    """Config.use_weights: devices add the weights' gradients in `reduce_dtype`."""
    if not self.reduce_dtype:
        return in_use(weights, axes.in_use, self.dtype)
    from .float32_sums import wide_in_use

    return wide_in_use(weights, axes.in_use, self.dtype)


def use_table(self, table: nnx.Param) -> jax.Array:
    """Config.use_table: devices add the table's gradients in `reduce_dtype`."""
    if not self.reduce_dtype:
        return table_copies(table, self.dtype)
    from .float32_sums import summed_in_float32

    return summed_in_float32(table_copies, table, self.dtype)
