"""core/attention.py's Attention with what relatives of Llama and other families add to it.

Shapes: B batch, T query positions, D embed, N heads, K kv heads, H head dim.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.attention import AttentionInputs
from ..core.layers import AttentionType, add_bias, multiply, sublayer_input
from ..core.sharding import param


class GeneralAttention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023). Tensor parallelism splits the heads, and then
    the output costs one all-reduce.

    Args:
      biases: the projections that have one, some of "q", "k", "v" and "o".
      norm: makes the norms of queries and keys from H (QK-norm); None: none.
      joint: whether these norm all heads together.
      soft_cap: of scores, see `attention.attend`.
      scale: of scores, in addition to 1 / sqrt(H).
      growth: see `grow`.
      sinks: whether each head has a sink, see `attention.attend`.
      gated: whether each head's output is multiplied by a sigmoid of the input; the gates' weights
        are the second half of `q`, [D, N, 2H].
    """

    def __init__(
        self,
        config,
        *,
        biases: tuple[str, ...] = (),
        norm=None,
        joint: bool = False,
        soft_cap: float | None = None,
        scale: float = 1.0,
        growth: float = 0.0,
        sinks: bool = False,
        gated: bool = False,
        rngs: nnx.Rngs,
    ):
        D, N, K, H = config.embed, config.num_heads, config.num_kv_heads, config.head_dim
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.soft_cap = soft_cap
        self.scale = scale
        self.growth = growth
        self.gated = gated
        self.q = param(rngs, (D, N, 2 * H if gated else H), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.v = param(rngs, (D, K, H), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        bias = functools.partial(param, rngs, stddev=0.0)
        self.q_bias = bias((N, H), ("heads", "head_dim")) if "q" in biases else None
        self.k_bias = bias((K, H), ("kv_heads", "head_dim")) if "k" in biases else None
        self.v_bias = bias((K, H), ("kv_heads", "head_dim")) if "v" in biases else None
        self.o_bias = bias((D,), ("norm",)) if "o" in biases else None
        self.sinks = param(rngs, (N,), ("heads",), 1.0) if sinks else None
        if norm and joint:
            self.q_norm: Any = norm((N, H), axes=("heads", "head_dim"))
            self.k_norm: Any = norm((K, H), axes=("kv_heads", "head_dim"))
        else:
            self.q_norm = norm(H) if norm else None
            self.k_norm = norm(H) if norm else None
        config.add_weights(self, rngs, q=1, k=1, v=1, o=2)

    def __call__(self, x_BTD, inputs: AttentionInputs, kind: AttentionType, cache_index=None):
        """Returns (output to add to the residual, (keys, values))."""
        x_BTD = sublayer_input(x_BTD, self.q)
        q_BTNH = add_bias(multiply(x_BTD, self.q), self.q_bias)
        k_BTKH = add_bias(multiply(x_BTD, self.k), self.k_bias)
        v_BTKH = add_bias(multiply(x_BTD, self.v), self.v_bias)
        if self.gated:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
            k_BTKH = self.k_norm(k_BTKH)
        q_BTNH = inputs.rotate(q_BTNH, kind)
        k_BTKH = inputs.rotate(k_BTKH, kind)
        if self.scale != 1:
            q_BTNH = q_BTNH * self.scale
        if self.growth:
            q_BTNH = grow(q_BTNH, inputs.positions_BT, self.growth, kind)
        out_BTNH = inputs.attend(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            kind,
            cache_index,
            soft_cap=self.soft_cap,
            sinks_N=None if self.sinks is None else self.sinks[...],
        )
        if self.gated:
            out_BTNH = out_BTNH * jax.nn.sigmoid(gate_BTNH)
        out_BTD = multiply(out_BTNH, self.o, contract=2, seq="residual_seq")
        return add_bias(out_BTD, self.o_bias), (k_BTKH, v_BTKH)


def grow(q_BTNH: jax.Array, positions_BT: jax.Array, growth: float, kind: AttentionType):
    """Queries, larger at positions beyond multiples of the original length: by a factor of 1 + growth ·
    ln(1 + ⌊t / original length⌋) at position t (Ministral 3).
    """
    scaling: Any = kind.rope_scaling
    times_BT = jnp.maximum(positions_BT, 0) // scaling.original_length  # padding is before 0
    factor_BT11 = (1 + growth * jnp.log1p(times_BT.astype(jnp.float32)))[..., None, None]
    return q_BTNH * factor_BT11.astype(q_BTNH.dtype)
