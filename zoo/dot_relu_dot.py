"""DotReluDot: two matmuls and a ReLU, the smallest model that shows every way of sharding.

y = relu(x · W1) · W2, the model of the Flax guide on scaling to many devices, and the inside of
every Transformer's MLP (Shoeybi et al. 2019, Megatron-LM, split it as `tp` does here).

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

jax.jit does not notice that the rules change: give each table its own jitted function.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AxisType, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture. Named sizes are classmethods."""

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

# What a weight's axis is called while it is multiplied, where rules may shard it differently.
IN_USE = {"embed": "act_embed"}


# ---- kit: the same lines in every zoo file, explained in zoo/README.md ---------------------------


def complete(tables):
    """Strategy → sharding rules for every logical axis; what a table leaves out is replicated."""
    return {name: dict.fromkeys(LOGICAL_AXES) | table for name, table in tables.items()}


def spec(axes: tuple[str | None, ...]) -> PartitionSpec | None:
    """Logical axes → PartitionSpec, by the rules and mesh in force; None where there are none."""
    rules = dict(get_logical_axis_rules() or ())
    if not rules or jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(rules[axis] if axis else None for axis in axes))


def explicit(*axes: str | None) -> PartitionSpec | None:
    """`out_sharding` of an operation that Explicit mesh axes, JAX's default, leave open; else None."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return spec(axes) if AxisType.Explicit in kinds else None


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shards an array by its logical axes. Outside a mesh it does nothing."""
    if (where := explicit(*axes)) is not None:
        return jax.sharding.reshard(x, where)
    if (where := spec(axes)) is not None:
        return jax.lax.with_sharding_constraint(x, where)
    lies = jax.typeof(x).sharding  # no rules say how to share the work: each device does all of it
    if AxisType.Explicit in lies.mesh.axis_types:
        return jax.sharding.reshard(x, lies.update(spec=PartitionSpec()))
    return x


def in_use(weights, dtype=None):
    """Weights as their matmuls want them: in `dtype`, with the axes that IN_USE gives them.

    Takes a module or one variable and returns the same. Under FSDP this is the all-gather, and its
    transpose, on Explicit axes, the reduce-scatter of the gradient. Sharding rules alone don't do
    this: XLA is then free to gather activations and partial sums instead, at ten times the bytes.
    """

    def one(weight):
        w, axes = weight[...], weight.out_sharding
        if IN_USE.keys() & set(axes):  # not a norm's scale, which stays in float32
            w = w if dtype is None else w.astype(dtype)
            axes = axes[-w.ndim :]  # inside a scan over layers, the axis of the layers is gone
            w = constrain(w, *(IN_USE.get(axis, axis) for axis in axes))
        elif spec(()) is None:
            w = constrain(w)
        return weight.replace(w)

    return jax.tree.map(one, weights, is_leaf=lambda x: isinstance(x, nnx.Variable))


# ---- end of the kit ------------------------------------------------------------------------------


def dot(x: jax.Array, w: nnx.Param, *axes: str) -> jax.Array:
    """Product x · w; `axes` are the result's logical axes."""
    return constrain(jnp.dot(x, w[...], out_sharding=explicit(*axes)), *axes)


class DotReluDot(nnx.Module):
    """x_BD → y_BD. See the module's docstring."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, F = config.embed, config.hidden
        w1_DF = jax.random.normal(rngs.params(), (D, F)) * D**-0.5
        w2_FD = jax.random.normal(rngs.params(), (F, D)) * F**-0.5
        # eager_sharding=False: the names wait for rules instead of asking for a mesh.
        self.w1 = nnx.Param(w1_DF, out_sharding=("embed", "hidden"), eager_sharding=False)
        self.w2 = nnx.Param(w2_FD, out_sharding=("hidden", "embed"), eager_sharding=False)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        """On a mesh, B must be divisible by the mesh axes of `batch`."""
        x_BD = constrain(x_BD, "batch", "act_embed")
        hidden_BF = dot(x_BD, in_use(self.w1), "batch", "hidden")
        return dot(jax.nn.relu(hidden_BF), in_use(self.w2), "batch", "act_embed")

    def loss(self, x, y, weight=None):
        """(sum of squared errors, number of outputs, further figures) of a batch.

        Args:
          x, y: [B, D], questions and answers.
          weight: [B]; 0 for rows that only fill up the batch. None: all count.

        Returns: (objective sum, count, aux), float32 scalars; aux maps a name to (sum, count):
          loss: the mean squared error; unexplained: the part of y's square that is not predicted.
        """
        weight_B1 = jnp.ones((len(x), 1)) if weight is None else weight[:, None]
        total = (jnp.square(self(x) - y) * weight_B1).sum()
        count = weight_B1.sum() * y.shape[1]
        square = (jnp.square(y) * weight_B1).sum()
        return total, count, {"loss": (total, count), "unexplained": (total, square)}


# Strategy → logical axis → mesh axis. What a table leaves out is replicated.
# A weight [D, F] rests as (embed, hidden) says, and is multiplied as (act_embed, hidden) says.
# Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X.
RULES: dict[str, dict[str, str | tuple[str, ...] | None]] = complete(
    {
        # Data parallel: every device has both weights; one all-reduce of their gradients a step.
        "dp": {
            "batch": "data",  # In[B_data, D] · W1[D, F] → H[B_data, F]: no communication
        },
        # ZeRO-3: each device keeps a part of each weight; whole weights exist only while in use.
        "fsdp": {
            "batch": "data",
            "embed": "data",  # W1[D_data, F] → W1[D, F]: an all-gather, and its transpose
        },
        # Megatron: W1 is split by columns and W2 by rows, so the ReLU needs no communication.
        "tp": {
            "batch": "data",
            "hidden": "model",  # H[B, F_model] · W2[F_model, D] → partial sums: one all-reduce
        },
        # Both: weights are split over the whole mesh, and gathered over `data` only.
        "fsdp_tp": {
            "batch": "data",
            "embed": "data",  # W1[D_data, F_model] → W1[D, F_model]: 1/model of `fsdp`'s bytes
            "hidden": "model",
        },
        # Hybrid: `data` replica groups, each of fsdp × model devices that share one copy.
        "hsdp_tp": {
            "batch": ("data", "fsdp"),
            "embed": "fsdp",  # gathers stay inside a group; only gradients cross groups
            "hidden": "model",
        },
    }
)
