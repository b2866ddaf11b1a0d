"""MLP: a residual multilayer perceptron that classifies vectors, such as an image's pixels.

Each residual block (He et al. 2016) is LayerNorm (Ba et al. 2016), a widening Linear, GELU and a
Linear back: the MLP half of a Transformer's layer. A Linear's bias is sharded like the last dim of
its kernel.

Shapes: B batch, I inputs, D embed, F hidden, C classes.

Every parameter carries *logical* axis names. They have no effect until sharding rules map them to
mesh axes:

    model = MLP(Config.tiny(), rngs=nnx.Rngs(0))                     # no mesh, no rules, no context
    logits_BC = model(x_BI)

    rules = RULES["tp"]                                              # at the end of this file
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        graph, state = nnx.split(model)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))   # each weight at rest
        logits_BC = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x_BI)

jax.jit does not notice when the rules change: use a separate jitted function for each strategy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .core.sharding import (
    AxisNames, Rules, check_rules, complete_tables, constrain, explicit, in_use, ones, param, zeros,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture. Named sizes are classmethods; fields' comments are their flags' help."""

    inputs: int = 64  # I, numbers per example; 8 × 8 pixels
    classes: int = 10  # C
    embed: int = 64  # D, width between the blocks
    hidden: int = 256  # F, width inside a block
    depth: int = 3  # blocks
    norm_eps: float = 1e-6

    @classmethod
    def tiny(cls) -> "Config":
        """5,562 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(embed=16, hidden=64, depth=2)

    @classmethod
    def small(cls) -> "Config":
        """104,586 parameters. The recipe's default."""
        return cls()


SIZES = {"tiny": Config.tiny, "small": Config.small}

# What sharding rules may name, and whether activations, weights or both have it.
LOGICAL_AXES = {
    "batch": "activations",  # B
    "inputs": "both",  # I
    "act_embed": "activations",  # D; also of weights in use
    "embed": "weights",  # D, of weights at rest
    "hidden": "both",  # F
    "classes": "both",  # C
    "norm": "weights",  # D, of a norm's scale and bias: too small to be worth a gather
}

# A weight's logical axis at rest → its name in use, so that rules can shard the two differently.
IN_USE = {"embed": "act_embed"}

AXES = AxisNames(logical_axes=LOGICAL_AXES, in_use=IN_USE)


class Block(nnx.Module):
    """x + down(gelu(up(norm(x)))). Tensor parallelism splits `hidden` and costs one all-reduce."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, F = config.embed, config.hidden
        self.norm = LayerNorm(D, config.norm_eps)
        self.up = Linear((D, F), ("embed", "hidden"), rngs=rngs)
        self.down = Linear((F, D), ("hidden", "embed"), rngs=rngs)

    def __call__(self, x_BD):
        hidden_BF = jax.nn.gelu(self.up(self.norm(x_BD), "batch", "hidden"))
        return x_BD + self.down(hidden_BF, "batch", "act_embed")


class MLP(nnx.Module):
    """x_BI → logits_BC. See the module's docstring."""

    axes = AXES

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.stem = Linear((config.inputs, config.embed), ("inputs", "embed"), rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.norm = LayerNorm(config.embed, config.norm_eps)
        self.head = Linear((config.embed, config.classes), ("embed", "classes"), rngs=rngs)

    def __call__(self, x_BI: jax.Array) -> jax.Array:
        """On a mesh, B must be divisible by the mesh axes of `batch`."""
        check_rules(LOGICAL_AXES)
        x_BD = self.stem(constrain(x_BI, "batch", "inputs"), "batch", "act_embed")
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(self.norm(x_BD), "batch", "classes")

    def loss(self, image, label):
        """Cross entropy of a batch, in nats.

        Args:
          image: [B, I].
          label: [B], int; rows with a label below 0 only pad the batch and don't count.

        Returns: (sum over examples, number of examples, aux), float32 scalars; aux maps a name to
          (sum, count): loss: the cross entropy; accuracy: labels that are the most likely class.
        """
        logits_BC, counts_B = self(image), (label >= 0).astype(jnp.float32)
        picked_BC = jnp.arange(logits_BC.shape[1])[None] == label[:, None]
        nats_B = jax.nn.logsumexp(logits_BC, axis=1) - jnp.where(picked_BC, logits_BC, 0).sum(
            axis=1
        )
        total, count = (nats_B * counts_B).sum(), counts_B.sum()
        right = (logits_BC.argmax(axis=1) == label).sum().astype(jnp.float32)
        return total, count, {"loss": (total, count), "accuracy": (right, count)}


class Linear(nnx.Module):
    """x · kernel + bias; `axes` name the kernel's two dims, and the bias has the last of them."""

    def __init__(self, dims: tuple[int, int], axes: tuple[str, str], *, rngs: nnx.Rngs):
        self.kernel = param(rngs, dims, axes, dims[0] ** -0.5)
        self.bias = zeros(dims[1:], axes[1:])

    def __call__(self, x, *out_axes: str):
        weights = in_use(self, IN_USE)
        y = jnp.dot(x, weights.kernel[...], out_sharding=explicit(*out_axes))
        return constrain(y + weights.bias[...][None], *out_axes)


class LayerNorm(nnx.Module):
    """(x - mean) / standard deviation · scale + bias."""

    def __init__(self, dim: int, eps: float):
        self.scale = ones((dim,), ("norm",))
        self.bias = zeros((dim,), ("norm",))
        self.eps = eps

    def __call__(self, x_BD):
        x_BD = x_BD - x_BD.mean(axis=-1, keepdims=True)
        variance_B1 = jnp.square(x_BD).mean(axis=-1, keepdims=True)
        x_BD = x_BD * jax.lax.rsqrt(variance_B1 + self.eps)
        return x_BD * self.scale[...][None] + self.bias[...][None]


# What each parallelism splits. A kernel [D, F] is stored with axes (embed, hidden) and multiplied
# with (act_embed, hidden). Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X.

# Data parallel: every device has every weight; one all-reduce of all gradients per step.
DP = {
    "batch": "data",  # In[B_data, D] · W[D, F] → Out[B_data, F]: no communication
}
# ZeRO-1: each device has every weight and a part of the moments, and updates that part.
ZERO1 = {
    "optimizer_embed": "data",  # a reduce-scatter of the gradient, and an all-gather of the updates
}
# ZeRO-3: each device stores a part of each weight; weights are whole only in use.
FSDP = {
    "embed": "data",  # W[D_data, F] → W[D, F]: an all-gather before each matmul,
    # and its transpose, a reduce-scatter of the gradient
}
# Megatron: `up` is split by columns and `down` by rows, so the GELU needs no communication.
# `classes` is not split: few mesh sizes divide ten.
TP = {
    "hidden": "model",  # H[B, F_model] · W[F_model, D] → partial sums: one all-reduce a block
}
# Hybrid: `data` replica groups, each of fsdp × model devices that share one copy.
HSDP = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",  # gathers stay inside a group; only gradients cross groups
}

complete = functools.partial(complete_tables, LOGICAL_AXES)

RULES: dict[str, Rules] = complete(
    {
        "dp": DP,
        "zero1": DP | ZERO1,
        "fsdp": DP | FSDP,
        "tp": DP | TP,
        "fsdp_tp": DP | FSDP | TP,  # W[D_data, F_model] → W[D, F_model]: 1/model of the bytes
        "hsdp_tp": HSDP | TP,
    }
)
