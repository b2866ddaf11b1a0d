"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2), of deepseek.py and hybrid.py.

Keys and values of all heads come from one small latent per position, next to one key of P dims that
all heads share. A cache holds only these two. With rotary embeddings, they rotate the P dims alone.

Shapes: B batch, T positions, D embed, N heads, H = nope + P head dim of queries and keys, V head dim of
values, C latent of keys and values, R latent of queries, P rotary dim.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from ..core.layers import AttentionType, RMSNorm, multiply, sublayer_input
from ..core.sharding import AxisNames, constrain, explicit, param
from ..options.cache import attend_absorbed


def with_latents(axes: AxisNames) -> AxisNames:
    """A decoder's AxisNames with those of projections through a latent."""
    return dataclasses.replace(
        axes,
        logical_axes=axes.logical_axes
        | {
            "latent": "both",  # a latent, in activations and in weights in use
            "up_latent": "weights",  # of the projections from it, at rest
        },
        in_use=axes.in_use | {"up_latent": "latent"},
    )


class LatentAttention(nnx.Module):
    """Multi-head latent attention. Tensor parallelism splits the heads; every device computes the
    latents and the rotary key, and their gradients are summed over the heads' devices.

    Args:
      config: with embed, num_heads, head_dim, nope_dim, rope_dim, value_dim, kv_latent and q_latent;
        layers whose AttentionType has no rope_theta leave the rotary dims as they are.
      scale: of scores, in addition to 1 / sqrt(H).
    """

    def __init__(self, config, *, scale: float = 1.0, rngs: nnx.Rngs):
        D, N, H, V = config.embed, config.num_heads, config.head_dim, config.value_dim
        R, C = config.q_latent, config.kv_latent
        up = ("up_latent", "heads", "head_dim")
        self.config = config
        self.scale = scale
        if R:
            self.q_down = param(rngs, (D, R), ("embed", "latent"), D**-0.5)
            self.q_norm = RMSNorm(R, 1e-6)  # as in all published models
            self.q_up = param(rngs, (R, N, H), up, R**-0.5)
        else:
            self.q = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), D**-0.5)
        self.kv_down = param(rngs, (D, C + config.rope_dim), ("embed", "latent"), D**-0.5)
        self.kv_norm = RMSNorm(C, 1e-6)
        self.kv_up = param(rngs, (C, N, config.nope_dim + V), up, C**-0.5)
        out_stddev = (N * V * 2 * config.num_layers) ** -0.5
        self.o = param(rngs, (N, V, D), ("heads", "head_dim", "embed"), out_stddev)
        inner = {"q_down": 1, "q_up": 1} if R else {"q": 1}
        config.add_weights(self, rngs, **inner, kv_down=1, kv_up=1, o=2)

    def __call__(self, x_BTD, inputs, kind: AttentionType, cache_index=None):
        """Returns (output to add to the residual, (latents [B, T, 1, C], rotary keys [B, T, 1, P]))."""
        config = self.config
        by_head = "batch", "seq", "heads", None
        x_BTD = sublayer_input(x_BTD, self.q_down if config.q_latent else self.q)
        if config.q_latent:
            q_BTNH = multiply(self.q_norm(multiply(x_BTD, self.q_down)), self.q_up)
        else:
            q_BTNH = multiply(x_BTD, self.q)
        q_BTNH = constrain(q_BTNH, *by_head) * self.scale
        q_BTNH, turned_BTNP = jnp.split(q_BTNH, [config.nope_dim], axis=-1)
        turned_BTNP = inputs.rotate(turned_BTNP, kind)
        down_BT1C = constrain(multiply(x_BTD, self.kv_down), "batch", "seq", None)[:, :, None]
        latent_BT1C, key_BT1P = jnp.split(down_BT1C, [config.kv_latent], axis=-1)
        latent_BT1C = self.kv_norm(latent_BT1C)
        key_BT1P = inputs.rotate(key_BT1P, kind)
        if cache_index is None:
            kv_BTNH = multiply(latent_BT1C[:, :, 0], self.kv_up)
            k_BTNH, v_BTNV = jnp.split(constrain(kv_BTNH, *by_head), [config.nope_dim], axis=-1)
            # With out_sharding, the transpose sums each device's heads, and gathers none of them; it
            # sums in float32.
            key_BTNP = jnp.broadcast_to(
                key_BT1P.astype(jnp.float32), turned_BTNP.shape, out_sharding=explicit(*by_head)
            ).astype(turned_BTNP.dtype)
            out_BTNV = inputs.attend(
                jnp.concatenate((q_BTNH, turned_BTNP), axis=-1),
                jnp.concatenate((k_BTNH, key_BTNP), axis=-1),
                v_BTNV,
                kind,
            )
        else:
            out_BTNV = attend_absorbed(
                self,
                q_BTNH,
                turned_BTNP,
                latent_BT1C,
                key_BT1P,
                inputs=inputs,
                kind=kind,
                cache_index=cache_index,
            )
        out_BTD = multiply(out_BTNV, self.o, contract=2, seq="residual_seq")
        return out_BTD, (latent_BT1C, key_BT1P)
