"""Sums over devices of weights' gradients in float32, with config.reduce_dtype.

A gradient has the dtype of its weight, and a weight in use has 16 bits, so that gradients are rounded
before any collective adds them. Here a weight in use is gathered in 16 bits, then held in float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.layers import WeightInUse
from ..core.sharding import device, explicit, in_use


def summed_in_float32(use, weight: nnx.Param, dtype: str) -> jax.Array:
    """use(weight, dtype), with the gradient of use(weight, "float32").

    Args:
      use: casts a weight to a dtype and reshards it.
    """

    @jax.custom_vjp
    def used(weight):
        return use(weight, dtype)

    def backward(weight, grad):
        _, pull = jax.vjp(lambda weight: use(weight, "float32"), weight)
        return pull(grad.astype(jnp.float32))

    used.defvjp(lambda weight: (used(weight), weight), backward)
    return used(weight)


def wide_in_use(layer, names: dict[str, str], dtype: str):
    """sharding.in_use for a layer whose weights' gradients are float32 from their products on."""

    def wide(weight):
        if not jnp.issubdtype(weight.dtype, jnp.floating):
            return weight

        def use(weight, dtype):
            return in_use(weight, names, dtype)[...].astype(jnp.float32)

        axes = in_use(weight, names, dtype).out_sharding
        used = summed_in_float32(use, weight, dtype)
        return Float32Weight(used, out_sharding=axes, eager_sharding=False)

    return jax.tree.map(wide, layer, is_leaf=lambda x: isinstance(x, nnx.Variable))


class Float32Weight(WeightInUse):
    """A weight in use in float32, whose values are those of a dtype of 16 bits."""

    def product(self, x: jax.Array, contract: int, out_axes: tuple) -> jax.Array:
        w = self[...]
        axes = self.out_sharding[-w.ndim :]

        def multiplied(x, w):
            return jnp.tensordot(x, w.astype(x.dtype), contract, out_sharding=explicit(*out_axes))

        if x.dtype == w.dtype:
            return multiplied(x, w)

        def backward(saved, grad):
            x, w = saved
            (grad_x,) = jax.vjp(lambda x: multiplied(x, w), x)[1](grad)
            rows = tuple(range(x.ndim - contract))
            if device().platform == "cpu":  # lacks such a product of 16 bits with a float32 result
                x, grad = x.astype(jnp.float32), grad.astype(jnp.float32)
            grad_w = jax.lax.dot_general(
                x,
                grad,
                ((rows, rows), ((), ())),
                preferred_element_type=jnp.float32,
                out_sharding=explicit(*axes),
            )
            return grad_x, grad_w

        exact = jax.custom_vjp(multiplied)
        exact.defvjp(lambda x, w: (multiplied(x, w), (x, w.astype(x.dtype))), backward)
        return exact(x, w)
