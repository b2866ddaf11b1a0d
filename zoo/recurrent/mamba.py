"""Mamba-2 (Dao & Gu 2024): layers with a state that each position decays and adds to.

Each head keeps a matrix S. Δ, B, C and x depend on the position, the rate and the skip on the head:

    S ← exp(-rate · Δ) · S + B · (Δ · x)ᵀ;   out = Sᵀ · C + skip · x

Groups of heads share B and C. A short causal convolution is before x, B and C, and a gated norm over
each group's channels after the recurrence, or the gate alone. ssd.py computes positions in chunks; state.py has what
layers with a state share.

Shapes: B batch, T positions, D embed, N heads, G groups of heads, K state dim (of B and C), V head dim
(of x), W width of the convolution, F channels of it.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from . import ssd
from .chunks import chunk_length
from .maps import ScalarOutputs
from .state import (
    GROUP,
    Positions,
    Recurrence,
    Rule,
    copies_of_groups,
    repeat_groups,
    run_positions,
)
from ..core.layers import multiply, sublayer_input
from ..core.sharding import (
    constrain,
    explicit,
    mesh_axes,
    ones,
    param,
    per_device,
    reshape,
    variable,
)


class Mamba2(nnx.Module):
    """A Mamba-2 layer, of config.mamba_heads, mamba_groups, mamba_head_dim, mamba_state_dim and
    conv_width; mamba_norm: whether it has the norm; mamba_scales: factors of the gate, x, B, C and Δ
    as projected, (): none.

    Tensor parallelism splits the heads and the convolution's channels; the output then costs one
    all-reduce. B and C are split over as many devices as divide the groups. Beyond that, all devices
    compute all of B and C, and the gated norm costs an all-reduce of a number a group and position.
    Context parallelism sends a state a head, and W - 1 positions.
    """

    def __init__(self, config, *, rngs: nnx.Rngs):
        D, N, G = config.embed, config.mamba_heads, config.mamba_groups
        K, V, W = config.mamba_state_dim, config.mamba_head_dim, config.conv_width
        groups = ("key_heads", "head_dim")
        heads = ("heads", "head_dim")
        self.config = config
        self.gate = param(rngs, (D, N, V), ("embed", *heads), D**-0.5)
        self.x = param(rngs, (D, N, V), ("embed", *heads), D**-0.5)
        self.b = param(rngs, (D, G, K), ("embed", *groups), D**-0.5)
        self.c = param(rngs, (D, G, K), ("embed", *groups), D**-0.5)
        self.step = param(rngs, (D, N), ("embed", "heads"), D**-0.5)  # Δ
        self.x_kernel = param(rngs, (W, N, V), ("conv_width", *heads), W**-0.5)
        self.b_kernel = param(rngs, (W, G, K), ("conv_width", *groups), W**-0.5)
        self.c_kernel = param(rngs, (W, G, K), ("conv_width", *groups), W**-0.5)
        biased = config.conv_bias
        self.x_bias: Any = param(rngs, (N, V), heads, 0.0) if biased else None
        self.b_bias: Any = param(rngs, (G, K), groups, 0.0) if biased else None
        self.c_bias: Any = param(rngs, (G, K), groups, 0.0) if biased else None
        uniform = functools.partial(jax.random.uniform, shape=(N,))
        # A position decays the state by exp(-rate · softplus(step_bias + step(x))), slowly at first.
        rate_N = uniform(rngs.params(), minval=1.0, maxval=16.0)
        step_N = jnp.exp(uniform(rngs.params(), minval=math.log(1e-3), maxval=math.log(0.1)))
        self.log_rate = variable(jnp.log(rate_N), ("heads",))
        self.step_bias = variable(jnp.log(jnp.expm1(step_N)), ("heads",))
        self.skip = ones((N,), ("heads",))
        self.norm = GroupNorm(config) if config.mamba_norm else None
        self.o = param(rngs, (N, V, D), (*heads, "embed"), (N * V * 2 * config.num_layers) ** -0.5)
        # Without o: PEFT refuses adapters of it, because kernels fuse it with the recurrence.
        config.add_weights(self, rngs, gate=1, x=1, b=1, c=1, step=1)

    @property
    def recurrence(self) -> Recurrence:
        """Costs that the weights' shapes don't show."""
        N, G = self.config.mamba_heads, self.config.mamba_groups
        K, V = self.config.mamba_state_dim, self.config.mamba_head_dim
        C = chunk_length()
        channels = N * V + 2 * G * K
        # In float32: x, B, C and products of a head; what chunks add, and states before them; decays
        # and scores of pairs, of which TPUs pad rows of 64 to 128.
        values = 5 * V + 2 * K * V // C + 3 * max(C, 128)
        return Recurrence(
            work=N * (C * V + 2 * K * V + C * C) + G * C * K,  # C · C: decays of pairs
            width=channels + 2 * N * V,
            chunks=2 * (N * values + 4 * G * K),  # with their gradients
            group=GROUP,
            state=N * K * V,
            erase=N,
            halo=(self.config.conv_width - 1) * channels,
        )

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        """Returns (output to add to the residual, (state, last inputs of the convolution)).

        Args:
          cache_index: the layer's state [B, N, K, V] and inputs [B, W - 1, F] of the convolution from
            a cache; None: none.
        """
        dtype = x_BTD.dtype
        config = self.config
        scales = config.mamba_scales or (1.0,) * 5
        x_BTD = sublayer_input(x_BTD, self.x)
        weights = self.gate, self.x, self.b, self.c, self.step
        gate_BTNV, x_BTNV, b_BTGK, c_BTGK, step_BTN = (
            scaled(multiply(x_BTD, weight), scale)
            for weight, scale in zip(weights, scales, strict=True)
        )
        kernels = [self.b_kernel[...], self.c_kernel[...]]
        biases = [self.b_bias[...], self.c_bias[...]] if config.conv_bias else [None, None]
        groups = "key_heads"
        if mesh_axes("heads") != mesh_axes("key_heads"):
            # Give each device B and C of its own heads, repeated no more than that takes.
            repeat = functools.partial(repeat_groups, times=copies_of_groups(config.mamba_groups))
            b_BTGK, c_BTGK = (repeat(x, "batch", "seq") for x in (b_BTGK, c_BTGK))
            kernels = [repeat(kernel, None) for kernel in kernels]
            biases = [bias if bias is None else repeat(bias) for bias in biases]
            groups = "heads"
        # In float32 whatever the compute dtype is: a decay multiplies the state over and over.
        step_BTN = step_BTN.astype(jnp.float32) + self.step_bias[...][None, None]
        step_BTN = jnp.maximum(jax.nn.softplus(step_BTN), config.least_step)
        log_decay_BTN = -jnp.exp(self.log_rate[...])[None, None] * step_BTN
        state, last_inputs = cache_index or (None, None)
        arrays = Arrays(
            x=x_BTNV,
            b=b_BTGK,
            c=c_BTGK,
            log_decay=log_decay_BTN,
            step=step_BTN,
            x_kernel=self.x_kernel[...],
            b_kernel=kernels[0],
            c_kernel=kernels[1],
            x_bias=self.x_bias[...] if config.conv_bias else None,
            b_bias=biases[0],
            c_bias=biases[1],
            skip=self.skip[...],
            ids=inputs.segment_ids_BT,
            state=state,
            inputs=last_inputs,
        )
        axes = axes_of_arrays(groups)
        seq = mesh_axes("seq", manual=True)
        results = per_device(
            lambda *arrays: on_device(Arrays(*arrays), seq, inputs.generates),
            arrays,
            axes,
            [axes.x, axes.state, axes.inputs] if inputs.generates else [axes.x],
            check_vma=False,
        )
        if self.norm is None:
            out_BTNV = results[0] * jax.nn.silu(gate_BTNV.astype(jnp.float32))
        else:
            out_BTNV = self.norm(results[0], gate_BTNV)
        out_BTNV = constrain(out_BTNV.astype(dtype), "batch", "seq", "heads", "head_dim")
        out_BTD = multiply(out_BTNV, self.o, contract=2, seq="residual_seq")
        return out_BTD, tuple(results[1:])


def scaled(x, scale: float) -> jax.Array:
    return x if scale == 1 else x * scale


class GroupNorm(nnx.Module):
    """x · silu(gate) / its rms over a group's channels · scale, in float32."""

    def __init__(self, config):
        self.scale = ones((config.mamba_heads, config.mamba_head_dim), ("heads", "head_dim"))
        self.groups = config.mamba_groups
        self.eps = config.norm_eps

    def __call__(self, x_BTNV, gate_BTNV):
        B, T, N, _ = x_BTNV.shape
        G = self.groups
        x_BTNV = x_BTNV.astype(jnp.float32) * jax.nn.silu(gate_BTNV.astype(jnp.float32))
        square_BTN = jnp.square(x_BTNV).mean(axis=-1)
        if mesh_axes("heads") == mesh_axes("key_heads"):
            split = ("batch", "seq", "key_heads", None)
            square_BTGH = reshape(square_BTN, (B, T, G, N // G), *split)
            square_BTG1 = square_BTGH.mean(axis=-1, keepdims=True)
            mean_BTGH = jnp.broadcast_to(square_BTG1, square_BTGH.shape)
            mean_BTN = reshape(mean_BTGH, (B, T, N), "batch", "seq", "heads")
        else:  # heads of a group are on several devices, which add up a number for each group
            is_member_NG = jnp.arange(N)[:, None] // (N // G) == jnp.arange(G)[None]
            is_member_NG = is_member_NG.astype(jnp.float32)
            sums = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
            mean_BTG = sums(
                "BTN,NG->BTG",
                square_BTN,
                constrain(is_member_NG * (G / N), "heads", None),
                out_sharding=explicit("batch", "seq", None),
            )
            mean_BTN = sums(
                "BTG,NG->BTN",
                mean_BTG,
                constrain(is_member_NG, "heads", None),
                out_sharding=explicit("batch", "seq", "heads"),
            )
        x_BTNV = x_BTNV * jax.lax.rsqrt(mean_BTN + self.eps)[..., None]
        return x_BTNV * self.scale[...][None, None]


class Arrays(NamedTuple):
    """The inputs of `on_device`, arrays or their logical axes."""

    x: Any  # [B, T, N, V]
    b: Any  # [B, T, G, K]
    c: Any  # [B, T, G, K]
    log_decay: Any  # [B, T, N], at least float32
    step: Any  # likewise: Δ
    x_kernel: Any  # [W, N, V], of the convolution
    b_kernel: Any  # [W, G, K]
    c_kernel: Any  # [W, G, K]
    x_bias: Any  # [N, V], likewise; None: none
    b_bias: Any  # [G, K]
    c_bias: Any  # [G, K]
    skip: Any  # [N]
    ids: Any  # [B, T], int: segments; None: one per row
    state: Any = None  # [B, N, K, V], from a cache
    inputs: Any = None  # [B, W - 1, F], likewise: of the convolution


def axes_of_arrays(groups: str) -> Arrays:
    """The logical axes of Arrays; groups: of G."""
    heads = ("batch", "seq", "heads", None)
    of_groups = ("batch", "seq", groups, None)
    return Arrays(
        x=heads,
        b=of_groups,
        c=of_groups,
        log_decay=heads[:3],
        step=heads[:3],
        x_kernel=(None, "heads", None),
        b_kernel=(None, groups, None),
        c_kernel=(None, groups, None),
        x_bias=("heads", None),
        b_bias=(groups, None),
        c_bias=(groups, None),
        skip=("heads",),
        ids=("batch", "seq"),
        state=("batch", "heads", None, None),
        inputs=("batch", None, "heads"),
    )


def on_device(arrays: Arrays, seq: tuple[str, ...] = (), generates: bool = False) -> list:
    """One device's part of a Mamba2, from its projections to [outputs], [B, T, N, V], float32; if it
    `generates`, also what a cache keeps. See `run_positions`.
    """
    B, T, N, V = arrays.x.shape
    G, K = arrays.b.shape[2:]
    channels = arrays.x, arrays.b, arrays.c
    kernels = arrays.x_kernel, arrays.b_kernel, arrays.c_kernel
    biases = arrays.x_bias, arrays.b_bias, arrays.c_bias
    positions = Positions(
        x_BTF=jnp.concatenate([x.reshape(B, T, -1) for x in channels], axis=-1),
        kernel_WF=jnp.concatenate([x.reshape(len(x), -1) for x in kernels], axis=-1),
        bias_F=None if biases[0] is None else jnp.concatenate([x.reshape(-1) for x in biases]),
        by_position=(arrays.log_decay, arrays.step),
        ids_BT=arrays.ids,
        state=arrays.state,
        inputs=arrays.inputs,
    )
    step = functools.partial(run_group, (N, V), (G, K), arrays.skip)
    return run_positions(Rule(step, (N, K, V), map="scalar"), positions, seq, generates)


def run_group(heads: tuple, groups: tuple, skip_N, state, mixed_BTF, by_position, starts_BT):
    """`Rule.step` of Mamba-2.

    Args:
      heads: (N, V); groups: (G, K).
      by_position: logarithms of decays, and Δ.
    """
    (N, V), (G, K) = heads, groups
    B, T, _ = mixed_BTF.shape
    log_decay, step = by_position
    x, b, c = jnp.split(mixed_BTF, (N * V, N * V + G * K), axis=-1)
    x = x.reshape(B, T, N, V)
    b, c = (y.reshape(B, T, G, K) for y in (b, c))
    state, outputs = ssd.run(c, b, step[..., None] * x, log_decay, starts_BT, state)
    skipped = skip_N[None, None, :, None] * x
    if isinstance(outputs, ScalarOutputs):  # of a map
        return state, outputs._replace(out=outputs.out + skipped)
    return state, outputs + skipped
