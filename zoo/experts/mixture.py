"""Mixtures of experts: which experts compute a position, and the weighted sum of their outputs.

Shapes: B batch, T positions, D embed, F hidden width of an expert, E experts, J experts per position,
G groups of experts, C width of what experts read: D, or a latent.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.attention import AttentionInputs
from .dispatch import Choice, by_capacity, dropless
from .exchange import over_limit
from .matmul import LocalExperts, gather_experts
from .replay import Routes
from ..core.layers import gather_positions, multiply
from ..core.sharding import auto, constrain, mesh_axes, param, per_device, reshape, zeros
from .slots import varying, varying_axes
from ..core.stack import REMAT_POLICIES

EXPERT_REMAT = REMAT_POLICIES | {  # also: what experts receive, so that nothing is sent twice
    "dispatched": jax.checkpoint_policies.save_only_these_names("dispatched"),
}


def check_experts(config) -> None:
    """Raises ValueError if a Config's experts are invalid."""
    if config.experts_per_token > config.num_experts:
        raise ValueError(
            f"experts_per_token={config.experts_per_token} is more than "
            f"num_experts={config.num_experts}"
        )
    if config.capacity is not None and not 0 < config.capacity < math.inf:
        raise ValueError(f"capacity={config.capacity} must be > 0, or None for dropless")


def check_groups(config) -> None:
    """Raises ValueError if a Config's groups of experts or its layers without experts are invalid."""
    E, G = config.num_experts, config.groups
    if E % G or (G > 1 and E // G < 2):
        raise ValueError(f"groups={G} must divide num_experts={E} into groups of ≥ 2")
    if config.top_groups > G:
        raise ValueError(f"top_groups={config.top_groups} is more than groups={G}")
    if (choices := E // G * config.top_groups) < config.experts_per_token:
        raise ValueError(
            f"experts_per_token={config.experts_per_token} is more than the {choices} of "
            f"num_experts={E} in top_groups={config.top_groups} of groups={G}"
        )
    dense = config.dense_layers
    if dense >= config.num_layers:
        raise ValueError(f"dense_layers={dense} must be less than num_layers={config.num_layers}")
    if dense and not config.dense_mlp:
        raise ValueError(f"dense_layers={dense} need dense_mlp ≥ 1")
    if dense and len(config.kinds) > 1:
        raise ValueError(f"dense_layers={dense} and layer_kinds exclude each other")


class Balance(nnx.Variable):
    """A bias on the experts' scores before the choice: a buffer, without a gradient."""


def feed_forward(layer, x_BTD, inputs: AttentionInputs) -> tuple[jax.Array, dict]:
    """What follows attention in a layer: its `mlp`, which `mlp_gate` may scale, its `experts`, or both.

    Returns: (the output to add to the residual, the metrics of `measure`, {} without experts).
    """
    if layer.mlp is None:
        return layer.experts(x_BTD, inputs)
    out_BTD = layer.mlp(x_BTD)
    if layer.mlp_gate is not None:
        out_BTD = gate_by_position(out_BTD, x_BTD, layer.mlp_gate)
    if layer.experts is None:
        return out_BTD, {}
    routed_BTD, metrics = layer.experts(x_BTD, inputs)
    return out_BTD + routed_BTD, metrics


def position_gate(config, *, rngs: nnx.Rngs) -> nnx.Param:
    """The weights of `gate_by_position`, [D]."""
    return param(rngs, (config.embed,), ("norm",), config.embed**-0.5)


def gate_by_position(out_BTD, x_BTD, gate: nnx.Param) -> jax.Array:
    """Multiplies each position by sigmoid(x · gate)."""
    score_BT1 = (x_BTD.astype(jnp.float32) * gate[...][None, None]).sum(axis=-1, keepdims=True)
    # In float32, so that the score's gradient is summed over D in float32.
    return (out_BTD.astype(jnp.float32) * jax.nn.sigmoid(score_BT1)).astype(out_BTD.dtype)


def even_load(objective, rate: float, layers, head=None) -> None:
    """Moves the Balance biases of stacked layers by `rate` towards an even load of their experts.

    Args:
      head: an MTPHead, whose metrics come last.
    """
    step_LE = rate * jnp.sign(objective.count - objective.metrics["load"])
    layers.experts.bias[...] += step_LE[: len(layers.experts.bias[...])]
    if head is not None:
        head.layer.experts.bias[...] += step_LE[-1]


def make_experts(config, biased: bool, *, rngs: nnx.Rngs) -> "GatedExperts":
    """The experts of a Config with groups, such as moe.Config."""
    return GatedExperts(
        config,
        biased=biased,
        normalize=config.normalize,
        sigmoid=config.sigmoid,
        groups=config.groups,
        top_groups=config.top_groups,
        scale=config.route_scale,
        rngs=rngs,
    )


@dataclasses.dataclass(frozen=True)
class Routing:
    """How a router chooses experts and weighs them."""

    normalize: bool = True  # whether a position's weights sum to 1
    sigmoid: bool = False  # whether scores are sigmoids; else a softmax
    groups: int = 1  # of experts; a position's experts are in its `top_groups` best ones
    top_groups: int = 1


class GatedExperts(nnx.Module):
    """A mixture of SwiGLU experts: each position gets the weighted sum of its experts' outputs.

    Args:
      biased: whether the choice has a Balance bias.
      scale: of the sum.
      activation: of experts without a gate, down(activation(up(x))); None: SwiGLU.
      reads: width of what experts read and write; 0: D, which the router reads.
      routing: fields of Routing.
    """

    def __init__(
        self,
        config,
        *,
        biased: bool,
        scale: float = 1.0,
        activation: Callable | None = None,
        reads: int = 0,
        rngs: nnx.Rngs,
        **routing: Any,
    ):
        D, E, F = config.embed, config.num_experts, config.mlp
        C = reads or D
        down_stddev = (F * 2 * config.num_layers) ** -0.5
        self.config = config
        self.scale = scale
        self.routing = Routing(**routing)
        self.router = param(rngs, (D, E), ("norm", "router"), D**-0.5)
        self.activation = activation
        gate = activation is None
        self.gate: Any = (
            param(rngs, (E, C, F), ("expert", "expert_embed", "mlp"), C**-0.5) if gate else None
        )
        self.up = param(rngs, (E, C, F), ("expert", "expert_embed", "mlp"), C**-0.5)
        self.down = param(rngs, (E, F, C), ("expert", "mlp", "expert_embed"), down_stddev)
        self.bias = zeros((E,), ("router",), Balance) if biased else None
        self.routes = Routes()
        gated = {"gate": 1} if gate else {}
        config.add_weights(self, rngs, **gated, up=1, down=1)

    def __call__(self, x_BTD, inputs: AttentionInputs, scored_BTD=None):
        """Returns the output to add to the residual, and the metrics of `measure`; see `mix`.

        Args:
          scored_BTD: what the router reads, whole rows; None: x_BTD.
        """
        expert: Callable = swiglu
        weights = (self.gate, self.up, self.down)
        if self.activation is not None:
            expert = functools.partial(without_gate, self.activation)
            weights = weights[1:]
        return mix(
            x_BTD, self.config, inputs,
            route=self.route, expert=expert, weights=weights, scored_BTD=scored_BTD,
        )  # fmt: skip

    def route(self, x_BTD, counted_BT, slots: int, load_limit: float = 0.0):
        """Chooses each position's experts, in float32; see `choose`."""
        with jax.default_matmul_precision("highest"):
            logits_BTE = multiply(x_BTD.astype(jnp.float32), self.router)
        choice, metrics = choose(
            self.config,
            logits_BTE,
            counted_BT,
            slots,
            load_limit,
            routing=self.routing,
            bias_E=None if self.bias is None else self.bias[...],
            given_BTJ=self.routes.experts_BTJ(),
        )
        if self.scale != 1:
            choice = choice._replace(weight_BTJ=choice.weight_BTJ * self.scale)
        return choice, metrics


def in_best_groups(scores_BTE, routing: Routing) -> jax.Array:
    """The scores, -inf outside of each position's best groups: by the sum of their two best scores
    (V3, with sigmoids) or by their best one (V2).
    """
    B, T, E = scores_BTE.shape
    G = routing.groups
    scores_BTGE = reshape(scores_BTE, (B, T, G, E // G), "batch", "seq", None, None)
    best_BTG = scores_BTGE.max(axis=-1)
    if routing.sigmoid:
        first_BTG1 = jnp.argmax(scores_BTGE, axis=-1, keepdims=True)
        is_first = jnp.arange(E // G)[None, None, None] == first_BTG1
        best_BTG += jnp.where(is_first, -jnp.inf, scores_BTGE).max(axis=-1)
    kept_BTG = jnp.zeros(best_BTG.shape, bool)
    for _ in range(routing.top_groups):
        taken_BTG = jnp.arange(G)[None, None] == jnp.argmax(best_BTG, axis=-1, keepdims=True)
        kept_BTG |= taken_BTG
        best_BTG = jnp.where(taken_BTG, -jnp.inf, best_BTG)
    scores_BTGE = jnp.where(kept_BTG[..., None], scores_BTGE, -jnp.inf)
    return reshape(scores_BTGE, (B, T, E), "batch", "seq", "router")


def swiglu(product, x, gate, up, down):
    return product(jax.nn.silu(product(x, gate)) * product(x, up), down)


def without_gate(activation: Callable, product, x, up, down):
    return product(activation(product(x, up)), down)


def mix(
    x_BTD, config, inputs: AttentionInputs, *, route, expert, weights, scored_BTD=None
) -> tuple:
    """Each position's weighted sum of its experts' outputs, and what `route` adds to the choice.

    Experts run inside jax.shard_map, so communication is explicit and the same on any mesh. In
    generation they drop nothing, because the padding of a prompt must not take slots.
    Raises ValueError if rules split experts over a mesh axis that does not split the batch.

    Args:
      route: (x_BTD, counted_BT, slots, load_limit) → what `choose` returns, and perhaps more.
      expert: (product, x, *weights) → a shard's part of the outputs, which are summed over shards
        of `mlp`. `product` multiplies rows by their experts' part of a weight.
      weights: parameters [E, ...].
      scored_BTD: what `route` reads, whole rows; None: x_BTD.
    """
    if config.lora_rank:
        from ..options.lora import with_factors

        expert, weights = with_factors(expert, weights)
    capacity = None if inputs.generates else config.capacity
    load_limit = 0.0 if inputs.generates or capacity is not None else config.load_limit
    x_BTD = gather_positions(x_BTD)
    E = config.num_experts
    T = x_BTD.shape[1]
    split = {
        axis: mesh_axes(axis, manual=True)
        for axis in ("batch", "expert", "expert_embed", "mlp", "seq", "residual_seq")
    }
    if alone := {*split["expert"]} - {*mesh_axes("batch", manual=True)}:
        over = ", ".join(sorted(alone))
        raise ValueError(f"the rules split experts over {over}, but not the batch")
    axes = [w.out_sharding[-w[...].ndim :] for w in weights]  # in a scan, without that of layers
    kept = ["expert", "mlp"]
    if {*split["expert_embed"]} <= {*split["batch"], *split["seq"]}:  # else all have the same rows
        kept.append("expert_embed")
    axes = at_rest = [tuple(n if n in kept else None for n in names) for names in axes]
    is_wide = bool(config.reduce_dtype)
    operands = [w[...] if is_wide else w[...].astype(x_BTD.dtype) for w in weights]
    if config.matmul:
        from ..options.low_precision import of_experts

        expert, operands, axes = of_experts(expert, split, weights, axes, x_BTD.dtype)
    slots = T  # enough for any choice
    if capacity is not None:
        slots = min(T, math.ceil(capacity * T * config.experts_per_token / E))
    scored_BTD = x_BTD if scored_BTD is None else scored_BTD
    choice, metrics, *more = route(scored_BTD, inputs.counted_BT, slots, load_limit)
    if inputs.generates:
        metrics |= {"chosen": choice.expert_BTJ}

    def compute(x_BTD, expert_BTJ, weight_BTJ, place_BTJ, *weights):
        if is_wide:  # devices add up gradients before this cast's transpose
            weights = varying(varying_axes(x_BTD), *weights)
            weights = tuple(w.astype(x_BTD.dtype) for w in weights)
        if not config.matmul:
            weights = gather_experts(weights, at_rest, split)
        experts = LocalExperts(expert, weights, E, split, sums_gradients=bool(config.matmul))
        choice = Choice(expert_BTJ, weight_BTJ, place_BTJ)
        if capacity is None:
            return dropless(experts, x_BTD, choice, load_limit)
        return by_capacity(experts, slots, x_BTD, choice)

    scattered = split["mlp"] and split["mlp"] == split["residual_seq"]  # see dispatch.sum_shards
    out_BTD = per_device(
        compute,
        (x_BTD, *choice, *operands),
        [("batch", "seq", None)] * 4 + axes,  # D whole
        ("batch", "residual_seq" if scattered else "seq", None),
    )
    return constrain(out_BTD, "batch", "residual_seq", "act_embed"), metrics, *more


def choose(
    config,
    logits_BTE,
    counted_BT,
    slots: int,
    load_limit: float = 0.0,
    routing: Routing = Routing(),
    bias_E=None,
    given_BTJ=None,
) -> tuple[Choice, dict[str, jax.Array]]:
    """Chooses each position's experts by the router's logits, in float32.

    An expert takes the first `slots` positions of a row that chose it, so that no output depends
    on later positions. Weights are the probabilities of a softmax, or sigmoids.

    Args:
      load_limit: see Config.load_limit; a choice beyond it has no slot.
      bias_E: changes the choice alone.
      given_BTJ: the choice, of which only weights and slots are left to find.

    Returns: the Choice, and its metrics, see `measure`.
    """
    E, J = config.num_experts, config.experts_per_token
    logits_BTE = constrain(logits_BTE, "batch", "seq", "router")
    probs_BTE = (
        jax.nn.sigmoid(logits_BTE) if routing.sigmoid else jax.nn.softmax(logits_BTE, axis=-1)
    )
    scores_BTE = jax.lax.stop_gradient(probs_BTE)
    if bias_E is not None:
        scores_BTE += bias_E[None, None]
    if routing.top_groups < routing.groups:
        scores_BTE = in_best_groups(scores_BTE, routing)
    expert, weight, taken = [], [], []
    for j in range(J):  # not top_k, for which XLA may gather all devices' scores
        best_BT = jnp.argmax(scores_BTE, axis=-1) if given_BTJ is None else given_BTJ[..., j]
        expert.append(best_BT.astype(jnp.int32))
        taken.append(expert[-1][..., None] == jnp.arange(E)[None, None])
        scores_BTE = jnp.where(taken[-1], -jnp.inf, scores_BTE)
        weight.append(jnp.where(taken[-1], probs_BTE, 0).sum(axis=-1))
    taken_BTE = sum(best_BTE.astype(jnp.int32) for best_BTE in taken)
    cumsum = functools.partial(jnp.cumsum, axis=1)
    if mesh_axes("seq"):  # devices exchange these small numbers
        cumsum = auto(cumsum, "batch", "seq", "router")
    layout = config.row_layout(logits_BTE.shape[1])
    natural_BTE = layout.reorder(taken_BTE, "router", back=True)
    before_BTE = layout.reorder(cumsum(natural_BTE), "router") - taken_BTE
    place = [jnp.where(best_BTE, before_BTE, 0).sum(axis=-1) for best_BTE in taken]
    expert_BTJ, weight_BTJ, place_BTJ = (jnp.stack(x, -1) for x in (expert, weight, place))
    if load_limit:
        is_over = functools.partial(
            over_limit, number=E, axes=mesh_axes("expert", manual=True), load_limit=load_limit
        )
        over_BTJ = per_device(is_over, [expert_BTJ], [("batch", "seq", None)])
        place_BTJ = jnp.where(over_BTJ, slots, place_BTJ)
    if routing.normalize:
        weight_BTJ /= weight_BTJ.sum(axis=-1, keepdims=True)
    choice = Choice(expert_BTJ, weight_BTJ, place_BTJ)
    if routing.sigmoid:
        probs_BTE /= probs_BTE.sum(axis=-1, keepdims=True)
    return choice, measure(config, choice, slots, logits_BTE, probs_BTE, taken_BTE, counted_BT)


def measure(
    config, choice: Choice, slots: int, logits_BTE, probs_BTE, taken_BTE, counted_BT
) -> dict[str, jax.Array]:
    """Metrics of a choice: name → sum over the positions in counted_BT.

    balance: E · Σ over experts of (share of a row's choices) · (mean probability, or share of the
      sigmoids); 1 if even.
    router_z: the squared log of the router's normalizer.
    dropped: the share of a position's experts that had no slot left.
    load [E]: whether a position chose this expert, times E/J; 1 if even.
    """
    E, J = config.num_experts, config.experts_per_token
    counted_BT1 = counted_BT.astype(jnp.float32)[..., None]
    taken_BE = (jnp.asarray(taken_BTE, jnp.float32) * counted_BT1).sum(axis=1)
    probs_BE = (probs_BTE * counted_BT1).sum(axis=1)
    count_B1 = jnp.maximum(counted_BT1.sum(1), 1)
    normalizer_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
    return {
        "balance": (taken_BE * probs_BE / count_B1).sum() * E / J,
        "router_z": (jnp.square(normalizer_BT1) * counted_BT1).sum(),
        "dropped": jnp.where(choice.place_BTJ < slots, 0, counted_BT1).sum() / J,
        "load": taken_BE.sum(0) * E / J,
    }
