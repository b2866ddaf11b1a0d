"""Kimi's delta attention (Kimi Linear, Kimi Team 2025): gated delta networks whose channels decay one by one.

Each head keeps a matrix S, as in delta.py, but each channel of its keys has a decay of its own:

    S ← diag(decay) · S;   S ← S + k · (write · (v - Sᵀk))ᵀ;   out = Sᵀq

Decays and the output's gate are projected through a low rank: K for decays, V for the gate. The
gate is a sigmoid. channel_decays.py computes positions in chunks.

Shapes: B batch, T positions, D embed, N heads, K key dim of a head, V value dim of a head, W width of
the convolution, F channels of it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from . import channel_decays
from .delta import Arrays, axes_of_arrays, on_device
from .state import GROUP, Recurrence
from ..core.layers import RMSNorm, multiply, sublayer_input
from ..core.sharding import constrain, mesh_axes, param, per_device, variable


class KimiDelta(nnx.Module):
    """Kimi's delta attention, of config.delta_heads, delta_key_dim, delta_value_dim and conv_width.

    Tensor parallelism splits the heads and the convolution's channels; every device computes the
    low-rank inputs of decays and gate. The output then costs one all-reduce. Context parallelism
    sends a state's size per head, and W - 1 positions.
    """

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, N, W = config.embed, config.delta_heads, config.conv_width
        K, V = config.delta_key_dim, config.delta_value_dim
        heads = ("heads", "head_dim")
        self.config = config
        self.q = param(rngs, (D, N, K), ("embed", *heads), D**-0.5)
        self.k = param(rngs, (D, N, K), ("embed", *heads), D**-0.5)
        self.v = param(rngs, (D, N, V), ("embed", *heads), D**-0.5)
        self.decay_down = param(rngs, (D, K), ("embed", "latent"), D**-0.5)
        self.decay_up = param(rngs, (K, N, K), ("up_latent", *heads), K**-0.5)
        self.gate_down = param(rngs, (D, V), ("embed", "latent"), D**-0.5)
        self.gate_up = param(rngs, (V, N, V), ("up_latent", *heads), V**-0.5)
        self.write = param(rngs, (D, N), ("embed", "heads"), D**-0.5)
        self.q_kernel = param(rngs, (W, N, K), ("conv_width", *heads), W**-0.5)
        self.k_kernel = param(rngs, (W, N, K), ("conv_width", *heads), W**-0.5)
        self.v_kernel = param(rngs, (W, N, V), ("conv_width", *heads), W**-0.5)
        uniform = jax.random.uniform
        # A position decays a channel by exp(-rate · softplus(bias + decay(x))), slowly at first.
        rate_N = uniform(rngs.params(), (N,), minval=1.0, maxval=16.0)
        least, most = math.log(1e-3), math.log(0.1)
        step_NK = jnp.exp(uniform(rngs.params(), (N, K), minval=least, maxval=most))
        self.log_rate = variable(jnp.log(rate_N), ("heads",))
        self.decay_bias = variable(jnp.log(jnp.expm1(step_NK)), heads)
        self.norm = RMSNorm(V, config.norm_eps)
        self.o = param(rngs, (N, V, D), (*heads, "embed"), (N * V * 2 * config.num_layers) ** -0.5)
        config.add_weights(self, rngs, q=1, k=1, v=1, o=2)

    @property
    def recurrence(self) -> Recurrence:
        """Costs that the weights' shapes don't show."""
        N, W = self.config.delta_heads, self.config.conv_width
        K, V = self.config.delta_key_dim, self.config.delta_value_dim
        channels = N * (2 * K + V)
        C = channel_decays.CHUNK
        block, doublings = channel_decays.BLOCK, math.ceil(math.log2(C))
        in_block = math.ceil(math.log2(block))
        # Products of pairs and sums of decays within a block, and products of blocks.
        pairs = K * (2 * in_block * block + 2 * (in_block + 1) * block + C)
        within = pairs + C * (K + 2 * V) + 2 * doublings * C**2
        # In float32, besides what delta.py counts: rows and keys with the decays of each doubling.
        values = 6 * K + 5 * V + K * V // C + 5 * max(C, 128) + 5 * doublings * K
        return Recurrence(
            work=N * (within + 3 * K * V),
            width=channels + N * (K + V) + 2 * N * V + K + V,
            chunks=2 * N * values,  # with their gradients
            group=GROUP,
            state=N * K * V,
            erase=N * K * K,
            halo=(W - 1) * channels,
        )

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        """Returns (output to add to the residual, (state, last inputs of the convolution)).

        Args:
          cache_index: the layer's state [B, N, K, V] and inputs [B, W - 1, F] of the convolution from
            a cache; None: none.
        """
        dtype = x_BTD.dtype
        x_BTD = sublayer_input(x_BTD, self.q)
        # In float32 whatever the compute dtype is: a decay multiplies the state over and over.
        a_BTNK = multiply(multiply(x_BTD, self.decay_down), self.decay_up).astype(jnp.float32)
        a_BTNK = jax.nn.softplus(a_BTNK + self.decay_bias[...][None, None])
        log_decay_BTNK = -jnp.exp(self.log_rate[...])[None, None, :, None] * a_BTNK
        state, last_inputs = cache_index or (None, None)
        arrays = Arrays(
            q=multiply(x_BTD, self.q),
            k=multiply(x_BTD, self.k),
            v=multiply(x_BTD, self.v),
            log_decay=log_decay_BTNK,
            write=jax.nn.sigmoid(multiply(x_BTD, self.write).astype(jnp.float32)),
            q_kernel=self.q_kernel[...],
            k_kernel=self.k_kernel[...],
            v_kernel=self.v_kernel[...],
            ids=inputs.segment_ids_BT,
            state=state,
            inputs=last_inputs,
        )
        axes = axes_of_arrays("heads")
        axes = axes._replace(log_decay=axes.k)
        seq = mesh_axes("seq", manual=True)
        run = functools.partial(on_device, chunk=channel_decays.chunk)
        results = per_device(
            lambda *arrays: run(Arrays(*arrays), seq, inputs.generates),
            arrays,
            axes,
            [axes.v, axes.state, axes.inputs] if inputs.generates else [axes.v],
            check_vma=False,
        )
        gate_BTNV = multiply(multiply(x_BTD, self.gate_down), self.gate_up)
        out_BTNV = self.norm(results[0].astype(dtype)) * jax.nn.sigmoid(gate_BTNV)
        out_BTNV = constrain(out_BTNV, "batch", "seq", "heads", "head_dim")
        out_BTD = multiply(out_BTNV, self.o, contract=2, seq="residual_seq")
        return out_BTD, tuple(results[1:])
