"""Parts of layers: matmuls, MLPs, norms, rotary embeddings.

Shapes: B batch, T positions, D embed, F mlp, N heads, H head dim.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .sharding import constrain, explicit, mesh_axes, ones, param, reshape, shards, zeros

# ---- products ------------------------------------------------------------------------------------


class WeightInUse(nnx.Param):
    """A weight that multiplies in its own way, as options/ has some: Config.use_layer makes them of a
    layer's weights. The methods here do what happens to other weights.
    """

    def multiply(self, x, contract: int, seq: str) -> jax.Array:
        """See `multiply`."""
        return lay_out_product(self.product, x, self, contract, seq)

    def product(self, x: jax.Array, contract: int, out_axes: tuple) -> jax.Array:
        """tensordot(x, weight) in x's dtype; out_axes: the result's logical axes."""
        return plain_product(self, x, contract, out_axes)

    def prepare(self, x_BTD: jax.Array) -> Any:
        """See `sublayer_input`."""
        return gather_positions(x_BTD)

    def exact_input(self, x) -> jax.Array:
        """The array that `prepare` made x of, with its positions gathered."""
        return x

    def dense(self) -> jax.Array:
        """The weight's values."""
        return self[...]


def multiply(x, weight: nnx.Param, contract: int = 1, seq: str = "seq") -> jax.Array:
    """Multiplies x[B, T, ...] by a weight in use: x's last `contract` dims with the weight's first.

    In the result, T has the logical axis `seq` and the dims after it have the weight's axes; this
    fixes the layout of every activation in a layer.

    Args:
      x: an array, or what `sublayer_input` made of one.
    """
    if isinstance(weight, WeightInUse):
        return weight.multiply(x, contract, seq)
    return lay_out_product(functools.partial(plain_product, weight), x, weight, contract, seq)


def lay_out_product(product, x, weight: nnx.Param, contract: int, seq: str) -> jax.Array:
    """`multiply` by a function `product` of (x, contract, out_axes).

    B and T are merged into one dim unless T is split: where a gradient contracts two dims at once,
    XLA's CPU backend transposes its operands first, which made the training step 1.6 times slower.
    """
    B, T, *inner = x.shape
    axes = weight.out_sharding[-weight[...].ndim :]
    if shards("seq") > 1 or shards(seq) > 1:
        x = constrain(x, "batch", "seq", *axes[:contract])
        out_axes = ("batch", seq, *axes[contract:])
        return constrain(product(x, contract, out_axes), *out_axes)
    x = reshape(x, (B * T, *inner), "batch", *axes[:contract])
    y = product(x, contract, ("batch", *axes[contract:]))
    return reshape(y, (B, T, *y.shape[1:]), "batch", "seq", *axes[contract:])


def plain_product(weight: nnx.Param, x: jax.Array, contract: int, out_axes: tuple) -> jax.Array:
    """tensordot(x, weight) in x's dtype; out_axes: the result's logical axes."""
    w = weight[...].astype(x.dtype)
    return jnp.tensordot(x, w, contract, out_sharding=explicit(*out_axes))


def sublayer_input(x_BTD: jax.Array, weight: nnx.Param) -> Any:
    """Gathers the positions of a sublayer's input, which sequence-sharded tensor parallelism splits.

    Args:
      weight: one of those that multiply it, which may change it further.
    """
    return weight.prepare(x_BTD) if isinstance(weight, WeightInUse) else gather_positions(x_BTD)


def gather_positions(x_BTD: jax.Array) -> jax.Array:
    """Gathers the positions of the residual stream, if rules split it more than the rest."""
    if mesh_axes("residual_seq") == mesh_axes("seq"):
        return x_BTD
    return checkpoint_name(constrain(x_BTD, "batch", "seq", "act_embed"), "gathered")


def dot(dims: str, x: jax.Array, y: jax.Array, out_sharding=None) -> jax.Array:
    """jnp.einsum with a float32 result."""
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32, out_sharding=out_sharding)


def add_bias(y_BT: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """[B, T, ...] + bias [...]; None: returns y_BT.

    Added in float32, so that the bias's gradient is summed over B and T in float32.
    """
    if bias is None:
        return y_BT
    sum_BT = y_BT.astype(jnp.float32) + bias[...].astype(jnp.float32)[None, None]
    return sum_BT.astype(y_BT.dtype)


# ---- MLPs and norms ------------------------------------------------------------------------------


class GatedMLP(nnx.Module):
    """(activation(x · gate) * (x · up)) · down (Shazeer 2020); SwiGLU with silu, GeGLU with gelu.
    Tensor parallelism splits F, and then the output costs one all-reduce, or with a split residual
    stream one reduce-scatter.

    Args:
      width: F; 0: config.mlp.
      biased: whether each product has a bias.
    """

    def __init__(
        self,
        config,
        activation=jax.nn.silu,
        width: int = 0,
        biased: bool = False,
        *,
        rngs: nnx.Rngs,
    ):
        D = config.embed
        F = width or config.mlp
        self.activation = activation
        self.gate = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.up = param(rngs, (D, F), ("embed", "mlp"), D**-0.5)
        self.down = param(rngs, (F, D), ("mlp", "embed"), (F * 2 * config.num_layers) ** -0.5)
        self.gate_bias = param(rngs, (F,), ("mlp",), 0.0) if biased else None
        self.up_bias = param(rngs, (F,), ("mlp",), 0.0) if biased else None
        self.down_bias = param(rngs, (D,), ("norm",), 0.0) if biased else None
        config.add_weights(self, rngs, gate=1, up=1, down=1)

    def __call__(self, x_BTD):
        x_BTD = sublayer_input(x_BTD, self.up)
        gate_BTF = self.activation(add_bias(multiply(x_BTD, self.gate), self.gate_bias))
        hidden_BTF = gate_BTF * add_bias(multiply(x_BTD, self.up), self.up_bias)
        return add_bias(multiply(hidden_BTF, self.down, seq="residual_seq"), self.down_bias)


class RMSNorm(nnx.Module):
    """x / rms(x) · scale, in float32 (Zhang & Sennrich 2019); at first x / rms(x).

    Args:
      dims: the last dim of x, or several, which are normed together.
      zero_centered: the factor is 1 + scale, so that weight decay pulls it towards 1.
      axes: the logical axes of `dims`.
    """

    def __init__(
        self,
        dims: int | tuple[int, ...],
        eps: float,
        zero_centered: bool = False,
        axes: tuple[str, ...] = ("norm",),
    ):
        dims = (dims,) if isinstance(dims, int) else dims
        self.scale = (zeros if zero_centered else ones)(dims, axes)
        self.eps = eps
        self.zero_centered = zero_centered
        self.rank = len(dims)

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=tuple(range(-self.rank, 0)), keepdims=True)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - self.rank)))
        scale = scale + 1.0 if self.zero_centered else scale
        return (x32 * jax.lax.rsqrt(variance + self.eps) * scale).astype(x.dtype)


def add_output(x_BTD, out_BTD, norm: RMSNorm | None = None, scale: float = 1.0) -> jax.Array:
    """Adds a sublayer's output to the residual stream: x + norm(out) · scale.

    Remat keeps the norm's input, not its output.
    """
    out_BTD = checkpoint_name(out_BTD, "sublayer")
    if norm is not None:
        out_BTD = constrain(norm(out_BTD), "batch", "residual_seq", "act_embed")
    return x_BTD + (out_BTD if scale == 1 else out_BTD * scale)


# ---- rotary embeddings ---------------------------------------------------------------------------


class RopeScaling:
    """Changes rotary wavelengths for longer contexts: Llama3's, and those in options/."""

    magnitude: float  # by which queries and keys are multiplied
    by_length: ClassVar[bool] = False  # whether it depends on the length of a row

    def scale(self, frequency_11H, theta: float, head_dim: int, length):
        """Returns the scaled frequencies; see `rope_angles`."""
        raise NotImplementedError

    def as_tuple(self) -> tuple:
        """The form that saved configs contain."""
        raise NotImplementedError

    def check(self, pairs: int) -> None:
        """Raises ValueError if it is invalid for heads of this many pairs of dims that rotate."""
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                is_positive = isinstance(number, int | float) and 0 < number < math.inf
                if not is_positive and name != "truncate":
                    raise ValueError(f"rope_scaling has {name}={number}, which must be > 0")


@dataclasses.dataclass(frozen=True)
class Llama3(RopeScaling):
    """Stretches the long wavelengths, as Llama 3 (Grattafiori et al. 2024)."""

    factor: float
    low_freq_factor: float  # turns within the original length, below which all is stretched
    high_freq_factor: float  # turns, above which nothing is
    original_length: int

    magnitude = 1.0

    def scale(self, frequency_11H, theta: float, head_dim: int, length):
        turns = self.original_length * frequency_11H / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        if low < high:
            kept = jnp.clip((turns - low) / (high - low), 0, 1)
        else:  # a step, as in `transformers`
            kept = jnp.where(turns < low, 0.0, 1.0)
        return frequency_11H * (kept + (1 - kept) / self.factor)

    def as_tuple(self) -> tuple:
        return dataclasses.astuple(self)


class AttentionType(NamedTuple):
    """The settings of attention that may differ between the layers of a model."""

    window: int | None  # a position sees itself and the window - 1 before it; None: all before it
    rope_theta: float | None  # base of the rotary wavelengths; None: no rotary embeddings
    rope_scaling: RopeScaling | None = None  # for longer contexts

    @property
    def magnitude(self) -> float:
        """The factor by which the rotary scaling multiplies queries and keys."""
        return self.rope_scaling.magnitude if self.rope_scaling else 1.0

    def check(self, name: str, rotary_dim: int) -> None:
        """Raises ValueError if it is invalid for heads of which this many dims rotate.

        Args:
          name: the Config's field that rotary_dim comes from.
        """
        if self.rope_theta is None:
            return
        if not 1 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta} must be a finite number > 1")
        if rotary_dim % 2:
            raise ValueError(
                f"{name}={rotary_dim} must be even: rotary embeddings rotate pairs of dims"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check(rotary_dim // 2)


def rotate(x_BTNH: jax.Array, angles_BTH: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """Rotary embedding (Su et al. 2021); like Hugging Face, dims i and i + H/2 rotate as a pair.

    With fewer angles, only the first dims rotate.
    """
    rotary = 2 * angles_BTH.shape[-1]
    if rotary < x_BTNH.shape[-1]:
        first, rest = jnp.split(x_BTNH, [rotary], axis=-1)
        return jnp.concatenate((rotate(first, angles_BTH, magnitude), rest), axis=-1)
    cos, sin = (f(angles_BTH)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


def rope_angles(
    kind: AttentionType, head_dim: int, positions_BT: jax.Array, length: Any = 0
) -> jax.Array:
    """Angles of each pair of dims: [B, T, H/2], float32 radians.

    Args:
      length: length of the rows, on which some scalings depend, or an array [B, 1, 1]; 0: at most the
        length that the scaling is made for.
    """
    theta: Any = kind.rope_theta
    frequency_H = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    frequency_B1H = frequency_H[None, None]
    if kind.rope_scaling:
        frequency_B1H = kind.rope_scaling.scale(frequency_B1H, theta, head_dim, length)
    return positions_BT.astype(jnp.float32)[:, :, None] * frequency_B1H
