"""Patches of images: their embeddings, with which ViT and SigLIP begin, and their pooling.

Shapes: B batch, W image height and width, P patch height and width, G = W / P, C image channels, D
embed, T = G², S key positions, N heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .gelu import GELU, PlainMLP
from .norms import layer_norm
from ..core.layers import add_bias, dot, multiply
from ..core.sharding import AxisNames, constrain, explicit, param, reshape, shards, zeros
from ..core.strategies import DECODER


def embed_patches(
    image_BWWC: jax.Array,
    patch: nnx.Param,
    bias: nnx.Param | None,
    axes: AxisNames,
    config,
) -> jax.Array:
    """Cuts images into patches and multiplies each by `patch` [P, P, C, D]: [B, T, D], row by row.

    Args:
      axes: the model's.
    """
    (B, W, _, C), P = image_BWWC.shape, patch.shape[0]
    G = W // P
    image = constrain(image_BWWC.astype(config.dtype), "batch", None, None, None)
    rows = reshape(image, (B, G, P, G, P, C), "batch", *[None] * 5)
    patches = reshape(rows.swapaxes(2, 3), (B, G * G, P, P, C), "batch", *[None] * 4)
    x_BTD = multiply(patches, config.use_weights(patch, axes), contract=3)
    return constrain(add_bias(x_BTD, bias), "batch", None, "act_embed")


def prepend(token: nnx.Param, x_BTD: jax.Array) -> jax.Array:
    """A token, such as one for the class, in front of all positions: float32 [B, 1 + T, D].

    In float32 its gradient, as that of positions which are then added, is summed over B in float32.
    """
    where = explicit("batch", None, "act_embed")
    token_D = constrain(token[...], "act_embed")
    shape = (len(x_BTD), 1, len(token_D))
    token_B1D = jnp.broadcast_to(token_D[None, None], shape, out_sharding=where)
    return jnp.concatenate([token_B1D, x_BTD.astype(jnp.float32)], axis=1)


class Pooling(nnx.Module):
    """One learned query attends to all positions, and an MLP follows: x_BTD → x_BD."""

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, N, H = config.embed, config.num_heads, config.head_dim
        inner = "embed", "heads", "head_dim"
        weight = functools.partial(param, rngs, (D, N, H), inner, D**-0.5)
        bias = functools.partial(zeros, (N, H), inner[1:])
        self.config = config
        self.probe = param(rngs, (D,), ("norm",), 1.0)
        self.q, self.q_bias = weight(), bias()
        self.k, self.k_bias = weight(), bias()
        self.v, self.v_bias = weight(), bias()
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), D**-0.5)
        self.o_bias = zeros((D,), ("norm",))
        self.norm = layer_norm(D, config.norm_eps, config.dtype)
        self.mlp = PlainMLP(config, GELU[config.activation], rngs=rngs)

    def __call__(self, x_BTD):
        used = self.config.use_weights(self, DECODER)
        probe_D = constrain(used.probe[...], None)
        where = explicit("batch", None, "act_embed")
        # Where rules split positions, one for each part.
        shape = (len(x_BTD), max(shards("seq"), shards("residual_seq")), len(probe_D))
        probe_B1D = jnp.broadcast_to(probe_D[None, None], shape, out_sharding=where)
        q_B1NH = add_bias(multiply(probe_B1D.astype(x_BTD.dtype), used.q), used.q_bias)
        # The bias of keys adds the same to all scores, which the softmax cancels; see vit.py.
        k_BSNH = multiply(x_BTD, used.k)
        v_BSNH = add_bias(multiply(x_BTD, used.v), used.v_bias)
        scores = explicit("batch", "heads", None, None)
        scores_BN1S = dot("BTNH,BSNH->BNTS", q_B1NH * q_B1NH.shape[-1] ** -0.5, k_BSNH, scores)
        weights_BN1S = jax.nn.softmax(scores_BN1S, axis=-1).astype(v_BSNH.dtype)
        heads = explicit("batch", "seq", "heads", "head_dim")
        out_B1NH = jnp.einsum("BNTS,BSNH->BTNH", weights_BN1S, v_BSNH, out_sharding=heads)
        x_B1D = add_bias(multiply(out_B1NH, used.o, contract=2), used.o_bias)
        x_B1D = x_B1D + used.mlp(used.norm(x_B1D))
        return constrain(x_B1D, "batch", None, "act_embed")[:, 0]
