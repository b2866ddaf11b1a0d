"""Mixtures of experts: which experts compute a position, and the weighted sum of their outputs.

Shapes: B batch, T positions, D embed, F hidden width of an expert, E experts, J experts per position,
G groups of experts.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import Positions, stripe
from .dispatch import by_capacity, dropless
from .layers import gather, multiply
from .sharding import auto, constrain, mesh_axes, param, per_device, reshape, zeros
from .stack import REMAT_POLICIES

EXPERT_REMAT = REMAT_POLICIES | {  # also: what experts receive, so that nothing is sent twice
    "dispatched": jax.checkpoint_policies.save_only_these_names("dispatched"),
}


def check_experts(config) -> None:
    """Raises ValueError if a Config's experts, their groups or the layers without are invalid."""
    if config.experts_per_token > config.num_experts:
        raise ValueError(
            f"experts_per_token={config.experts_per_token} is more than "
            f"num_experts={config.num_experts}"
        )
    if config.capacity is not None and not 0 < config.capacity < math.inf:
        raise ValueError(f"capacity={config.capacity} must be > 0, or None for dropless")
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


class GatedExperts(nnx.Module):
    """A mixture of SwiGLU experts: each position gets the weighted sum of its experts' outputs.

    Args:
      biased: whether the choice has a Balance bias.
      normalize, sigmoid: see `choose`.
      scale: of the sum.
    """

    def __init__(
        self,
        config,
        *,
        biased: bool,
        normalize: bool,
        sigmoid: bool = False,
        scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        D, E, F = config.embed, config.num_experts, config.mlp
        down_stddev = (F * 2 * config.num_layers) ** -0.5
        self.config = config
        self.normalize = normalize
        self.sigmoid = sigmoid
        self.scale = scale
        self.router = param(rngs, (D, E), ("norm", "router"), D**-0.5)
        self.gate = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.up = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.down = param(rngs, (E, F, D), ("expert", "mlp", "expert_embed"), down_stddev)
        self.bias = zeros((E,), ("router",), Balance) if biased else None

    def __call__(self, x_BTD, positions: Positions):
        """Returns the output to add to the residual, and the metrics of `choose`; see `mix`."""
        return mix(
            x_BTD,
            self.config,
            positions,
            route=self.route,
            expert=swiglu,
            weights=(self.gate, self.up, self.down),
        )

    def route(self, x_BTD, counted_BT, slots: int):
        """Chooses each position's experts, in float32; see `choose`."""
        with jax.default_matmul_precision("highest"):
            logits_BTE = multiply(x_BTD.astype(jnp.float32), self.router)
        (expert_BTJ, weight_BTJ, place_BTJ), metrics = choose(
            self.config,
            logits_BTE,
            counted_BT,
            slots,
            bias_E=None if self.bias is None else self.bias[...],
            normalize=self.normalize,
            sigmoid=self.sigmoid,
        )
        weight_BTJ = weight_BTJ * self.scale if self.scale != 1 else weight_BTJ
        return (expert_BTJ, weight_BTJ, place_BTJ), metrics


def in_best_groups(config, scores_BTE) -> jax.Array:
    """The scores, -inf outside of each position's best groups: by the sum of their two best scores
    (V3) or by their best one (V2).
    """
    B, T, E = scores_BTE.shape
    G = config.groups
    scores_BTGE = reshape(scores_BTE, (B, T, G, E // G), "batch", "seq", None, None)
    best_BTG = scores_BTGE.max(axis=-1)
    if config.sigmoid:
        first_BTG1 = jnp.argmax(scores_BTGE, axis=-1, keepdims=True)
        is_first = jnp.arange(E // G)[None, None, None] == first_BTG1
        best_BTG += jnp.where(is_first, -jnp.inf, scores_BTGE).max(axis=-1)
    kept_BTG = jnp.zeros(best_BTG.shape, bool)
    for _ in range(config.top_groups):
        taken_BTG = jnp.arange(G)[None, None] == jnp.argmax(best_BTG, axis=-1, keepdims=True)
        kept_BTG |= taken_BTG
        best_BTG = jnp.where(taken_BTG, -jnp.inf, best_BTG)
    scores_BTGE = jnp.where(kept_BTG[..., None], scores_BTGE, -jnp.inf)
    return reshape(scores_BTGE, (B, T, E), "batch", "seq", "router")


def gate_by_position(out_BTD, x_BTD, gate: nnx.Param | None) -> jax.Array:
    """Multiplies each position by sigmoid(x · gate); without a gate [D], returns out_BTD."""
    if gate is None:
        return out_BTD
    score_BT1 = (x_BTD.astype(jnp.float32) * gate[...][None, None]).sum(axis=-1, keepdims=True)
    # In float32, so that the score's gradient is summed over D in float32.
    return (out_BTD.astype(jnp.float32) * jax.nn.sigmoid(score_BT1)).astype(out_BTD.dtype)


def swiglu(product, x, gate, up, down):
    return product(jax.nn.silu(product(x, gate)) * product(x, up), down)


def mix(x_BTD, config, positions: Positions, *, route, expert, weights) -> tuple:
    """Each position's weighted sum of its experts' outputs, and what `route` adds to the choice.

    Experts run inside jax.shard_map, so communication is explicit and the same on any mesh. In
    generation they drop nothing, because the padding of a prompt must not take slots.
    Raises ValueError if rules split experts over a mesh axis that does not split the batch.

    Args:
      route: (x_BTD, counted_BT, slots) → what `choose` returns, and perhaps more.
      expert: (product, x, *weights) → a shard's part of the outputs, which are summed over shards
        of `mlp`. `product` multiplies rows by their experts' part of a weight.
      weights: parameters [E, ...].
    """
    capacity = None if positions.generates else config.capacity
    x_BTD = gather(x_BTD)
    E = config.num_experts
    T = x_BTD.shape[1]
    split = {
        axis: mesh_axes(axis, manual=True) for axis in ("expert", "mlp", "seq", "residual_seq")
    }
    if alone := {*split["expert"]} - {*mesh_axes("batch", manual=True)}:
        over = ", ".join(sorted(alone))
        raise ValueError(f"the rules split experts over {over}, but not the batch")
    axes = [w.out_sharding[-w[...].ndim :] for w in weights]  # in a scan, without that of layers
    axes = [tuple(n if n in ("expert", "mlp") else None for n in names) for names in axes]
    operands = [w[...].astype(x_BTD.dtype) for w in weights]
    if config.matmul:
        from .low_precision import of_experts

        expert, operands, axes = of_experts(expert, split, capacity, weights, axes, x_BTD.dtype)
    if capacity is None:
        slots = T  # enough for any choice
        compute = functools.partial(dropless, expert, split, bool(config.matmul))
    else:
        slots = min(T, math.ceil(capacity * T * config.experts_per_token / E))
        compute = functools.partial(by_capacity, expert, split, E, slots)
    choice, *more = route(x_BTD, positions.counted_BT, slots)
    scattered = split["mlp"] and split["mlp"] == split["residual_seq"]  # see dispatch.sum_shards
    out_BTD = per_device(
        compute,
        (x_BTD, *choice, *operands),
        [("batch", "seq", None)] * 4 + axes,  # D whole
        ("batch", "residual_seq" if scattered else "seq", None),
    )
    return constrain(out_BTD, "batch", "residual_seq", "act_embed"), *more


def choose(
    config,
    logits_BTE,
    counted_BT,
    slots: int,
    *,
    bias_E=None,
    normalize: bool = True,
    sigmoid: bool = False,
):
    """Chooses each position's experts by the router's logits, in float32.

    An expert takes the first `slots` positions of a row that chose it, so that no output depends
    on later positions. Weights are the probabilities of a softmax, or sigmoids.

    Args:
      bias_E: changes the choice alone.
      normalize: whether a position's weights sum to 1.

    Returns: (expert_BTJ, best first; weight_BTJ; place_BTJ, how many earlier positions of the row
      chose the same expert), and name → sum over the positions in counted_BT:
      balance: E · Σ over experts of (share of a row's choices) · (mean probability, or share of the
        sigmoids); 1 if even.
      router_z: the squared log of the router's normalizer.
      dropped: the share of a position's experts that had no slot left.
      load [E]: whether a position chose this expert, times E/J; 1 if even.
    """
    E, J = config.num_experts, config.experts_per_token
    logits_BTE = constrain(logits_BTE, "batch", "seq", "router")
    probs_BTE = jax.nn.sigmoid(logits_BTE) if sigmoid else jax.nn.softmax(logits_BTE, axis=-1)
    scores_BTE = jax.lax.stop_gradient(probs_BTE)
    if bias_E is not None:
        scores_BTE += bias_E[None, None]
    if config.top_groups < config.groups:
        scores_BTE = in_best_groups(config, scores_BTE)
    expert, weight, taken = [], [], []
    for _ in range(J):  # not top_k, for which XLA may gather all devices' scores
        expert.append(jnp.argmax(scores_BTE, axis=-1).astype(jnp.int32))
        taken.append(expert[-1][..., None] == jnp.arange(E)[None, None])
        scores_BTE = jnp.where(taken[-1], -jnp.inf, scores_BTE)
        weight.append(jnp.where(taken[-1], probs_BTE, 0).sum(axis=-1))
    taken_BTE = sum(best_BTE.astype(jnp.int32) for best_BTE in taken)
    cumsum = functools.partial(jnp.cumsum, axis=1)
    if mesh_axes("seq"):  # devices exchange these small numbers
        cumsum = auto(cumsum, "batch", "seq", "router")
    natural_BTE = stripe(config, taken_BTE, "router", back=True)
    before_BTE = stripe(config, cumsum(natural_BTE), "router") - taken_BTE
    place = [jnp.where(best_BTE, before_BTE, 0).sum(axis=-1) for best_BTE in taken]
    expert_BTJ, weight_BTJ, place_BTJ = (jnp.stack(x, -1) for x in (expert, weight, place))
    if normalize:
        weight_BTJ /= weight_BTJ.sum(axis=-1, keepdims=True)

    counted_BT1 = counted_BT.astype(jnp.float32)[..., None]
    taken_BE = (jnp.asarray(taken_BTE, jnp.float32) * counted_BT1).sum(axis=1)
    if sigmoid:
        probs_BTE /= probs_BTE.sum(axis=-1, keepdims=True)
    probs_BE = (probs_BTE * counted_BT1).sum(axis=1)
    count_B1 = jnp.maximum(counted_BT1.sum(1), 1)
    normalizer_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
    return (expert_BTJ, weight_BTJ, place_BTJ), {
        "balance": (taken_BE * probs_BE / count_B1).sum() * E / J,
        "router_z": (jnp.square(normalizer_BT1) * counted_BT1).sum(),
        "dropped": jnp.where(place_BTJ < slots, 0, counted_BT1).sum() / J,
        "load": taken_BE.sum(0) * E / J,
    }
