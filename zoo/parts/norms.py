"""Norms of some entries: LayerNorm, and none."""

import jax
from flax import nnx

from ..core.layers import RMSNorm


def layer_norm(dim: int, eps: float, dtype: str, use_bias: bool = True) -> nnx.LayerNorm:
    """LayerNorm (Ba et al. 2016), computed in float32; returns `dtype`."""
    names = {"out_sharding": ("norm",), "eager_sharding": False}
    metadata = {"scale_metadata": names, "bias_metadata": names}
    options = {"dtype": dtype, "use_fast_variance": False, "rngs": nnx.Rngs(0)}
    return nnx.LayerNorm(dim, epsilon=eps, use_bias=use_bias, **metadata, **options)


def apply_norm(norm: RMSNorm | nnx.LayerNorm | None, x: jax.Array) -> jax.Array:
    """norm(x); without a norm, x."""
    return x if norm is None else norm(x)
