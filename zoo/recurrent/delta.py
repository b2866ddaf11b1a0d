"""Gated delta networks (Yang et al. 2024): layers with a state that travels along a sequence.

Each head keeps a matrix S, which maps keys to values. A position decays S, moves the value that S
holds for its key towards its own, and reads S with its query:

    S ← decay · S;   S ← S + k · (write · (v - Sᵀk))ᵀ;   out = Sᵀq

The state's size doesn't depend on T. delta_rule.py computes positions in chunks; state.py has what
layers with a state share.

Shapes: B batch, T positions, D embed, N heads of values, G heads of queries and keys, K key dim of a
head, V value dim of a head, W width of the convolution, F channels of it.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from . import delta_rule
from .chunks import chunk_length
from .delta_rule import run
from .state import (
    GROUP,
    Positions,
    Recurrence,
    Rule,
    copies_of_groups,
    repeat_groups,
    run_positions,
)
from ..core.layers import RMSNorm, multiply, sublayer_input
from ..core.sharding import constrain, mesh_axes, param, per_device, variable


class GatedDelta(nnx.Module):
    """A gated delta network with a short causal convolution before it (`config.conv_width`).

    Tensor parallelism splits the heads and the convolution's channels; the output then costs one
    all-reduce. Context parallelism sends a state's size per head, and W - 1 positions.

    Args:
      most_write: of a position; above 1, a state's eigenvalues may be negative (Grazzi et al. 2025).
      norm_eps: of the output's norm; None: config.norm_eps.
    """

    def __init__(
        self,
        config,
        *,
        most_write: float = 1.0,
        norm_eps: float | None = None,
        rngs: nnx.Rngs,
    ):
        D, N, G = config.embed, config.delta_heads, config.delta_key_heads
        K, V, W = config.delta_key_dim, config.delta_value_dim, config.conv_width
        keys = ("key_heads", "head_dim")
        values = ("heads", "head_dim")
        self.config = config
        self.most_write = most_write
        self.q = param(rngs, (D, G, K), ("embed", *keys), D**-0.5)
        self.k = param(rngs, (D, G, K), ("embed", *keys), D**-0.5)
        self.v = param(rngs, (D, N, V), ("embed", *values), D**-0.5)
        self.gate = param(rngs, (D, N, V), ("embed", *values), D**-0.5)
        self.decay = param(rngs, (D, N), ("embed", "heads"), D**-0.5)
        self.write = param(rngs, (D, N), ("embed", "heads"), D**-0.5)
        self.q_kernel = param(rngs, (W, G, K), ("conv_width", *keys), W**-0.5)
        self.k_kernel = param(rngs, (W, G, K), ("conv_width", *keys), W**-0.5)
        self.v_kernel = param(rngs, (W, N, V), ("conv_width", *values), W**-0.5)
        uniform = functools.partial(jax.random.uniform, shape=(N,))
        # A position decays the state by exp(-rate · softplus(bias + decay(x))), slowly at first.
        rate_N = uniform(rngs.params(), minval=0.01, maxval=16.0)
        step_N = jnp.exp(uniform(rngs.params(), minval=math.log(1e-3), maxval=math.log(0.1)))
        self.log_rate = variable(jnp.log(rate_N), ("heads",))
        self.decay_bias = variable(jnp.log(jnp.expm1(step_N)), ("heads",))
        self.norm = RMSNorm(V, config.norm_eps if norm_eps is None else norm_eps)
        self.o = param(rngs, (N, V, D), (*values, "embed"), (N * V * 2 * config.num_layers) ** -0.5)
        config.add_weights(self, rngs, q=1, k=1, v=1, gate=1, o=2)

    @property
    def recurrence(self) -> Recurrence:
        """Costs that the weights' shapes don't show."""
        N, G = self.config.delta_heads, self.config.delta_key_heads
        K, V = self.config.delta_key_dim, self.config.delta_value_dim
        channels, C = 2 * G * K + N * V, chunk_length()
        within = C * (3 * K + 2 * V) + 2 * math.ceil(math.log2(C)) * C**2
        # In float32: q, k, v and what `Chunks` has of a head; states; products of pairs, of which TPUs
        # pad rows of 64 to 128.
        values = 6 * K + 5 * V + K * V // C + 5 * max(C, 128)
        return Recurrence(
            work=N * (within + 3 * K * V),
            width=channels + 2 * N * V,
            chunks=2 * N * values,  # with their gradients
            group=GROUP,
            state=N * K * V,
            erase=N * K * K,
            halo=(self.config.conv_width - 1) * channels,
        )

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        """Returns (output to add to the residual, (state, last inputs of the convolution)).

        Args:
          cache_index: the layer's state [B, N, K, V] and inputs [B, W - 1, F] of the convolution from
            a cache; None: none.
        """
        dtype = x_BTD.dtype
        x_BTD = sublayer_input(x_BTD, self.q)
        q_BTGK, k_BTGK = (multiply(x_BTD, weight) for weight in (self.q, self.k))
        kernels = self.q_kernel[...], self.k_kernel[...], self.v_kernel[...]
        key_heads = "key_heads"
        if mesh_axes("heads") != mesh_axes("key_heads"):
            # Give each device the keys of its own values, repeated no more than that takes.
            G = self.config.delta_key_heads
            repeat = functools.partial(repeat_groups, times=copies_of_groups(G))
            q_BTGK, k_BTGK = (repeat(x, "batch", "seq") for x in (q_BTGK, k_BTGK))
            kernels = *(repeat(kernel, None) for kernel in kernels[:2]), kernels[2]
            key_heads = "heads"
        # In float32 whatever the compute dtype is: a decay multiplies the state over and over.
        a_BTN = multiply(x_BTD, self.decay).astype(jnp.float32) + self.decay_bias[...][None, None]
        log_decay_BTN = -jnp.exp(self.log_rate[...])[None, None] * jax.nn.softplus(a_BTN)
        write_BTN = jax.nn.sigmoid(multiply(x_BTD, self.write).astype(jnp.float32))
        if self.most_write != 1:
            write_BTN *= self.most_write
        state, last_inputs = cache_index or (None, None)
        arrays = Arrays(
            q=q_BTGK,
            k=k_BTGK,
            v=multiply(x_BTD, self.v),
            log_decay=log_decay_BTN,
            write=write_BTN,
            q_kernel=kernels[0],
            k_kernel=kernels[1],
            v_kernel=kernels[2],
            ids=inputs.segment_ids_BT,
            state=state,
            inputs=last_inputs,
        )
        axes = axes_of_arrays(key_heads)
        seq = mesh_axes("seq", manual=True)
        results = per_device(
            lambda *arrays: on_device(Arrays(*arrays), seq, inputs.generates),
            arrays,
            axes,
            [axes.v, axes.state, axes.inputs] if inputs.generates else [axes.v],
            check_vma=False,
        )
        out_BTNV = self.norm(results[0].astype(dtype))
        out_BTNV = out_BTNV * jax.nn.silu(multiply(x_BTD, self.gate))
        out_BTNV = constrain(out_BTNV, "batch", "seq", "heads", "head_dim")
        out_BTD = multiply(out_BTNV, self.o, contract=2, seq="residual_seq")
        return out_BTD, tuple(results[1:])


class Arrays(NamedTuple):
    """The inputs of `on_device`, arrays or their logical axes."""

    q: Any  # [B, T, G, K]
    k: Any  # [B, T, G, K]
    v: Any  # [B, T, N, V]
    log_decay: Any  # [B, T, N], at least float32; of kimi_delta.py [B, T, N, K]
    write: Any  # likewise
    q_kernel: Any  # [W, G, K], of the convolution
    k_kernel: Any  # [W, G, K]
    v_kernel: Any  # [W, N, V]
    ids: Any  # [B, T], int: segments; None: one per row
    state: Any = None  # [B, N, K, V], from a cache
    inputs: Any = None  # [B, W - 1, F], likewise: of the convolution


def axes_of_arrays(key_heads: str) -> Arrays:
    """The logical axes of Arrays; key_heads: of G."""
    keys = ("batch", "seq", key_heads, None)
    values = ("batch", "seq", "heads", None)
    key_kernel = (None, key_heads, None)
    return Arrays(
        q=keys,
        k=keys,
        v=values,
        log_decay=values[:3],
        write=values[:3],
        q_kernel=key_kernel,
        k_kernel=key_kernel,
        v_kernel=(None, "heads", None),
        ids=("batch", "seq"),
        state=("batch", "heads", None, None),
        inputs=("batch", None, "heads"),
    )


def on_device(
    arrays: Arrays, seq: tuple[str, ...] = (), generates: bool = False, chunk=None
) -> list:
    """One device's part of a GatedDelta, from its projections to [outputs], [B, T, N, V], float32;
    if it `generates`, also what a cache keeps. See `run_positions`.

    Args:
      chunk: as delta_rule.chunk, the default.
    """
    q, k, v, log_decay, write, *kernels, ids_BT, state, inputs = arrays
    B, T, N, V = v.shape
    G, K = q.shape[2:]
    positions = Positions(
        x_BTF=jnp.concatenate([x.reshape(B, T, -1) for x in (q, k, v)], axis=-1),
        kernel_WF=jnp.concatenate([x.reshape(len(x), -1) for x in kernels], axis=-1),
        bias_F=None,
        by_position=(log_decay, write),
        ids_BT=ids_BT,
        state=state,
        inputs=inputs,
    )
    run_group = functools.partial(step, (G, K), (N, V), chunk or delta_rule.chunk)
    rule = Rule(run_group, (N, K, V), map="matrix")
    return run_positions(rule, positions, seq, generates)


def step(keys: tuple, values: tuple, chunk, state, mixed_BTF, by_position, starts_BT):
    """`Rule.step` of the gated delta rule.

    Args:
      keys: (G, K); values: (N, V); chunk: as delta_rule.chunk.
      by_position: logarithms of decays, and writes.
    """
    (G, K), (N, V) = keys, values
    log_decay, write = by_position
    q, k, v = jnp.split(mixed_BTF, (G * K, 2 * G * K), axis=-1)
    q, k = (unit(x.reshape(*x.shape[:2], G, K)) for x in (q, k))
    q, k = (jnp.repeat(x, N // G, axis=2) for x in (q, k))
    v = v.reshape(*v.shape[:2], N, V)
    chunks = chunk(q * K**-0.5, k, v, log_decay, write, starts_BT)
    state, out = run(chunks, state)
    return state, out[:, : starts_BT.shape[1]]


def unit(x, eps: float = 1e-6):
    """Returns x / |x| over the last dim."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + eps)
