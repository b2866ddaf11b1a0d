"""DotReluDot: two matmuls and a ReLU, the smallest model that shows every way of sharding.

y = relu(x · W1) · W2, the model of the Flax guide on scaling to many devices, and the inside of
every Transformer's MLP (Shoeybi et al. 2019, Megatron-LM, split it as `tp` does here).

Shapes: B batch, D embed, F hidden.

Every parameter carries *logical* axis names. They mean nothing until a table says where they go:

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
import functools

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture. Named sizes are classmethods."""

    embed: int  # D, width of x and y
    hidden: int  # F, width between the matmuls

    @classmethod
    def tiny(cls) -> "Config":
        """2,048 parameters. For tests: every sharded dim divides by 8."""
        return cls(embed=16, hidden=64)

    @classmethod
    def small(cls) -> "Config":
        """8,192 parameters. The recipe's default."""
        return cls(embed=32, hidden=128)


def spec(axes: tuple[str, ...]) -> PartitionSpec | None:
    """Logical axes → PartitionSpec, by the table and mesh in force; None where there are none."""
    table = dict(get_logical_axis_rules() or ())
    if not table or jax.sharding.get_abstract_mesh().empty:
        return None
    return PartitionSpec(*(table[axis] for axis in axes))


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """Lays an activation out as the table says. Outside a mesh it does nothing."""
    where = spec(axes)
    return x if where is None else jax.lax.with_sharding_constraint(x, where)


def in_use(weight: nnx.Param) -> jax.Array:
    """A weight as its matmul wants it: `embed` → `act_embed`. Under FSDP this is the all-gather.

    Without it XLA is free to gather activations instead, at many times the bytes.
    """
    rest = spec(weight.out_sharding)
    use = spec(tuple("act_embed" if axis == "embed" else axis for axis in weight.out_sharding))
    return weight[...] if rest == use else _gather(weight[...], rest, use)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(w, rest, use):
    return jax.lax.with_sharding_constraint(w, use)


# A plain constraint would lay the gradient out as `use` too: whole on every device. This lays it
# out as the weight rests: a reduce-scatter.
_gather.defvjp(
    lambda w, rest, use: (_gather(w, rest, use), None),
    lambda rest, use, _, grad: (jax.lax.with_sharding_constraint(grad, rest),),
)


class DotReluDot(nnx.Module):
    """x_BD → y_BD. See the module's docstring."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, F = config.embed, config.hidden
        w1_DF = jax.random.normal(rngs.params(), (D, F)) * D**-0.5
        w2_FD = jax.random.normal(rngs.params(), (F, D)) * F**-0.5
        # eager_sharding=False: the names wait for a table instead of asking for a mesh.
        self.w1 = nnx.Param(w1_DF, out_sharding=("embed", "hidden"), eager_sharding=False)
        self.w2 = nnx.Param(w2_FD, out_sharding=("hidden", "embed"), eager_sharding=False)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        """On a mesh, B divides by the axes that hold `batch`."""
        x_BD = constrain(x_BD, "batch", "act_embed")
        hidden_BF = constrain(jax.nn.relu(x_BD @ in_use(self.w1)), "batch", "hidden")
        return constrain(hidden_BF @ in_use(self.w2), "batch", "act_embed")


# Strategy → logical axis → mesh axis. None: each device has the whole dim.
#
# A weight [D, F] rests as (embed, hidden) says, and is multiplied as (act_embed, hidden) says.
# Notation: In[B_X, D] is a tensor whose dim B is split over mesh axis X.
RULES: dict[str, dict[str, str | tuple[str, ...] | None]] = {
    # Data parallel: every device has both weights; one all-reduce of their gradients a step.
    "dp": {
        "batch": "data",  # In[B_data, D] · W1[D, F] → H[B_data, F]: no communication
        "act_embed": None,
        "embed": None,
        "hidden": None,
    },
    # ZeRO-3: each device keeps a part of each weight; whole weights exist only while they are used.
    "fsdp": {
        "batch": "data",
        "act_embed": None,  # W1[D_data, F] → W1[D, F]: an all-gather before each matmul
        "embed": "data",  # its transpose: a reduce-scatter of the gradient
        "hidden": None,
    },
    # Megatron: W1 is split by columns and W2 by rows, so the ReLU needs no communication.
    "tp": {
        "batch": "data",
        "act_embed": None,
        "embed": None,
        "hidden": "model",  # H[B, F_model] · W2[F_model, D] → partial sums: one all-reduce
    },
    # Both: weights are split over the whole mesh, and gathered over `data` only.
    "fsdp_tp": {
        "batch": "data",
        "act_embed": None,
        "embed": "data",  # W1[D_data, F_model] → W1[D, F_model]: 1/model of the bytes of `fsdp`
        "hidden": "model",
    },
    # Hybrid: groups of fsdp × model devices share one copy of the weights; `data` copies of it.
    "hsdp_tp": {
        "batch": ("data", "fsdp"),
        "act_embed": None,
        "embed": "fsdp",  # gathers stay inside a group; gradients also cross groups
        "hidden": "model",
    },
}
