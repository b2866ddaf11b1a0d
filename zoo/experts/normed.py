"""Experts beside an MLP, whose router and outputs have norms of their own (Gemma 4).

Shapes: B batch, T positions, D embed, F hidden width of an expert, E experts, J experts per position.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.attention import AttentionInputs
from ..core.layers import RMSNorm, gather_positions, multiply
from ..core.sharding import constrain, ones, param
from .mixture import choose, mix
from .replay import Routes


class NormedExperts(nnx.Module):
    """norm(mixture(norm(x))) of GeGLU experts, chosen by a norm of x that has a scale of its own.

    The weights of a position's experts sum to 1, and are then multiplied by a factor of each expert.
    """

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, E, F = config.embed, config.num_experts, config.expert_mlp
        down_stddev = (F * 2 * config.num_layers) ** -0.5
        self.config = config
        self.norm = RMSNorm(D, config.norm_eps)
        self.router_scale = ones((D,), ("norm",))
        self.router = param(rngs, (D, E), ("norm", "router"), 1.0)  # its input is divided by √D
        self.factor = ones((E,), ("router",))
        self.gate = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.up = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.down = param(rngs, (E, F, D), ("expert", "mlp", "expert_embed"), down_stddev)
        self.out_norm = RMSNorm(D, config.norm_eps)
        self.routes = Routes()
        config.add_weights(self, rngs, gate=1, up=1, down=1)

    def __call__(self, x_BTD, inputs: AttentionInputs):
        """Returns what to add to the MLP's output, and the metrics of `mixture.measure`.

        Args:
          x_BTD: the residual stream, before any norm.
        """
        scored_BTD = rms_normed(gather_positions(x_BTD).astype(jnp.float32), self.config.norm_eps)
        out_BTD, metrics = mix(
            self.norm(x_BTD),
            self.config,
            inputs,
            route=self.route,
            expert=geglu,
            weights=(self.gate, self.up, self.down),
            scored_BTD=scored_BTD,
        )
        out_BTD = constrain(self.out_norm(out_BTD), "batch", "residual_seq", "act_embed")
        return out_BTD, metrics

    def route(self, scored_BTD, counted_BT, slots: int, load_limit: float = 0.0):
        """Chooses each position's experts, in float32; see `mixture.choose`."""
        scored_BTD = scored_BTD * self.router_scale[...][None, None] * self.config.embed**-0.5
        with jax.default_matmul_precision("highest"):
            logits_BTE = multiply(scored_BTD, self.router)
        choice, metrics = choose(
            self.config, logits_BTE, counted_BT, slots, load_limit,
            given_BTJ=self.routes.experts_BTJ(),
        )  # fmt: skip
        chosen_BTJE = jax.nn.one_hot(choice.expert_BTJ, self.config.num_experts)
        factor_BTJ = (chosen_BTJE * self.factor[...][None, None, None]).sum(axis=-1)
        return choice._replace(weight_BTJ=choice.weight_BTJ * factor_BTJ), metrics


def rms_normed(x: jax.Array, eps: float) -> jax.Array:
    """Divides x by its rms over the last dim, in float32; returns the dtype of x."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype)


def geglu(product, x, gate, up, down):
    return product(jax.nn.gelu(product(x, gate)) * product(x, up), down)
