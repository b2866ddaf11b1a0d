"""DotReluDot: two matmuls and a ReLU, the smallest model that shows every way of sharding.

y = relu(x · W1) · W2 is the model of the Flax guide on scaling to many devices, and the core of a
Transformer's MLP. `tp` splits it like Megatron-LM (Shoeybi et al. 2019).

Shapes: B batch, D embed, F hidden.

Every parameter carries *logical* axis names. They have no effect until sharding rules map them to
mesh axes:

    model = DotReluDot(Config.tiny(), rngs=nnx.Rngs(0))              # no mesh, no rules, no context
    y_BD = model(x_BD)

    rules = RULES["fsdp_tp"]                                         # at the end of this file
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        graph, state = nnx.split(model)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))   # each weight at rest
        y_BD = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x_BD)

jax.jit does not notice when the rules change: use a separate jitted function for each strategy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .core.sharding import (
    AxisNames, Rules, check_rules, complete_tables, constrain, explicit, in_use, param,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture. Named sizes are classmethods; fields' comments are their flags' help."""

    embed: int  # D, width of x and y
    hidden: int  # F, width between the matmuls

    @classmethod
    def tiny(cls) -> "Config":
        """2,048 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(embed=16, hidden=64)

    @classmethod
    def small(cls) -> "Config":
        """8,192 parameters. The recipe's default."""
        return cls(embed=32, hidden=128)


SIZES = {"tiny": Config.tiny, "small": Config.small}

# What sharding rules may name, and whether activations, weights or both have it.
LOGICAL_AXES = {
    "batch": "activations",  # B
    "act_embed": "activations",  # D; also of weights in use
    "embed": "weights",  # D, of weights at rest
    "hidden": "both",  # F
}

# A weight's logical axis at rest → its name in use, so that rules can shard the two differently.
IN_USE = {"embed": "act_embed"}

AXES = AxisNames(logical_axes=LOGICAL_AXES, in_use=IN_USE)


class DotReluDot(nnx.Module):
    """x_BD → y_BD. See the module's docstring."""

    axes = AXES

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, F = config.embed, config.hidden
        self.w1 = param(rngs, (D, F), ("embed", "hidden"), D**-0.5)
        self.w2 = param(rngs, (F, D), ("hidden", "embed"), F**-0.5)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        """On a mesh, B must be divisible by the mesh axes of `batch`."""
        check_rules(LOGICAL_AXES)
        x_BD = constrain(x_BD, "batch", "act_embed")
        hidden_BF = dot(x_BD, in_use(self.w1, IN_USE), "batch", "hidden")
        return dot(jax.nn.relu(hidden_BF), in_use(self.w2, IN_USE), "batch", "act_embed")

    def loss(self, x, y, weight=None):
        """Squared error of a batch.

        Args:
          x: [B, D], inputs.
          y: [B, D], targets.
          weight: [B]; 0 for rows that only pad the batch. None: all rows count.

        Returns: (sum of squared errors, number of outputs, aux), float32 scalars; aux maps a name
          to (sum, count): loss: the mean squared error; unexplained: the same, relative to y².
        """
        weight_B1 = jnp.ones((len(x), 1)) if weight is None else weight[:, None]
        total = (jnp.square(self(x) - y) * weight_B1).sum()
        count = weight_B1.sum() * y.shape[1]
        square = (jnp.square(y) * weight_B1).sum()
        return total, count, {"loss": (total, count), "unexplained": (total, square)}


def dot(x: jax.Array, w: nnx.Param, *axes: str) -> jax.Array:
    """Returns x · w; `axes` are the result's logical axes."""
    return constrain(jnp.dot(x, w[...], out_sharding=explicit(*axes)), *axes)


# What each parallelism splits. A weight [D, F] is stored with axes (embed, hidden) and multiplied
# with (act_embed, hidden). Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X.
DP = {"batch": "data"}  # In[B_data, D] · W1[D, F] → H[B_data, F]: no communication
ZERO1 = {"optimizer_embed": "data"}  # moments of W1[D_data, F]; the updated parts are gathered
FSDP = {"embed": "data"}  # W1[D_data, F] → W1[D, F]: an all-gather, and its transpose
TP = {"hidden": "model"}  # H[B, F_model] · W2[F_model, D] → partial sums: one all-reduce
HSDP = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
}  # gathers over `fsdp`, sums gradients over `data`

complete = functools.partial(complete_tables, LOGICAL_AXES)

RULES: dict[str, Rules] = complete(
    {
        "dp": DP,  # every device has both weights; one all-reduce of gradients per step
        "zero1": DP | ZERO1,  # ZeRO-1: each device stores and updates a part of the moments
        "fsdp": DP | FSDP,  # ZeRO-3: each device stores a part; weights are whole only in use
        "tp": DP | TP,  # Megatron: W1 split by columns, W2 by rows; the ReLU sends nothing
        "fsdp_tp": DP | FSDP | TP,  # W1[D_data, F_model] → W1[D, F_model]: 1/model of the bytes
        "hsdp_tp": HSDP | TP,  # `data` replica groups, each of fsdp × model devices
    }
)
