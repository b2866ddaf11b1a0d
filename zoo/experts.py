"""Mixtures of experts: the choice of experts, running them on their devices, sharding rules.

Shapes: B batch, T positions, D embed, L layers, E experts, J experts per position, U slots per row
in an expert, M slots or chosen experts in a row, N rows before `spread`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention import kinds
from .layers import REMAT_POLICIES, gather, layer_in_use, multiply, objective, scan_layers, stripe
from .sharding import auto, constrain, mesh_axes, param, per_device
from .strategies import DECODER


class Balance(nnx.Variable):
    """A bias on the experts' scores before the choice: a buffer, without a gradient."""


class GatedExperts(nnx.Module):
    """A mixture of SwiGLU experts: each position gets the weighted sum of its experts' outputs.

    Args:
      biased: whether the choice has a Balance bias.
      normalize, sigmoid, limit: see `choose`.
      scale: of the sum.
    """

    def __init__(
        self, config, biased: bool, normalize: bool, sigmoid: bool = False, limit=None,
        scale: float = 1.0, *, rngs: nnx.Rngs,
    ):  # fmt: skip
        D, E, F = config.embed, config.num_experts, config.mlp
        self.config, self.scale, self.how = config, scale, (normalize, sigmoid, limit)
        self.router = param(rngs, (D, E), ("norm", "router"), D**-0.5)
        self.gate = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.up = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        down_stddev = (F * 2 * config.num_layers) ** -0.5
        self.down = param(rngs, (E, F, D), ("expert", "mlp", "expert_embed"), down_stddev)
        if biased:
            self.bias = Balance(jnp.zeros(E), out_sharding=("router",), eager_sharding=False)

    def __call__(self, x_BTD, counted_BT, capacity: float | None):
        """Returns the output to add to the residual, and the figures of `choose`; see `mix`."""
        route = functools.partial(self.route, counted_BT=counted_BT)
        return mix(x_BTD, self.config, capacity, route, swiglu, (self.gate, self.up, self.down))

    def route(self, x_BTD, counted_BT, slots: int):
        """Chooses each position's experts, in float32; see `choose`."""
        with jax.default_matmul_precision("highest"):
            logits_BTE = multiply(x_BTD.astype(jnp.float32), self.router)
        bias_E = self.bias[...] if hasattr(self, "bias") else None
        chosen, figures = choose(self.config, logits_BTE, counted_BT, slots, bias_E, *self.how)
        expert_BTJ, weight_BTJ, place_BTJ = chosen
        weight_BTJ = weight_BTJ * self.scale if self.scale != 1 else weight_BTJ
        return (expert_BTJ, weight_BTJ, place_BTJ), figures


def swiglu(product, x, gate, up, down):
    return product(jax.nn.silu(product(x, gate)) * product(x, up), down)


def mix(x_BTD, config, capacity: float | None, route, expert, weights) -> tuple:
    """Each position's weighted sum of its experts' outputs, and what `route` adds to the choice.

    Experts run inside jax.shard_map, so communication is explicit and the same on any mesh.
    Raises ValueError if rules split experts over a mesh axis that does not split the batch.

    Args:
      capacity: slots per row in an expert, in even shares; None: dropless.
      route: (x_BTD, slots=) → what `choose` returns, and perhaps more.
      expert: (product, x, *weights) → a shard's part of the outputs, which are summed over shards
        of `mlp`. `product` multiplies rows by their experts' part of a weight.
      weights: parameters [E, ...].
    """
    x_BTD, E, T = gather(x_BTD), config.num_experts, x_BTD.shape[1]
    over = functools.partial(mesh_axes, manual=True)
    split = {axis: over(axis) for axis in ("expert", "mlp", "seq", "residual_seq")}
    if alone := ", ".join(sorted({*split["expert"]} - {*over("batch")})):
        raise ValueError(f"the rules split experts over {alone}, but not the batch")
    names = [w.out_sharding[-w[...].ndim :] for w in weights]  # in a scan, without that of layers
    names = [tuple(n if n in ("expert", "mlp") else None for n in axes) for axes in names]
    operands = [w[...].astype(x_BTD.dtype) for w in weights]
    if config.matmul:
        from .low_precision import of_experts

        expert, operands, names = of_experts(expert, split, capacity, weights, names)
    if capacity is None:
        from .dropless import dropless

        slots, compute = T, functools.partial(dropless, expert, split)  # slots for any choice
    else:
        slots = min(T, math.ceil(capacity * T * config.experts_per_token / E))
        compute = functools.partial(by_capacity, expert, split, E, slots)
    choice, *more = route(x_BTD, slots=slots)
    arrays, axes = (x_BTD, *choice, *operands), [("batch", "seq", None)] * 4 + names  # D whole
    out_BTD = per_device(compute, arrays, axes, ("batch", "residual_seq", None))
    return constrain(out_BTD, "batch", "residual_seq", "act_embed"), *more


def choose(
    config, logits_BTE, counted_BT, slots: int, bias_E=None, normalize: bool = True,
    sigmoid: bool = False, limit=None,
):  # fmt: skip
    """Chooses each position's experts by the router's logits, in float32.

    An expert takes the first `slots` positions of a row that chose it, so that no output depends
    on later positions. Weights are the probabilities of a softmax, or sigmoids.

    Args:
      bias_E: changes the choice alone.
      normalize: whether a position's weights sum to 1.
      limit: a function of the scores to choose by, [B, T, E], that replaces some by -inf.

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
    scores_BTE = limit(scores_BTE) if limit else scores_BTE
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


def scan_experts(layers, names, config, x_BTD, at, counted_BT, past=None, keep=False):
    """Runs stacked layers: (x_BTD, (keys and values or None, name → figures [L, ...])).

    In generation (`keep`) they drop nothing, because the padding of a prompt must not take slots.

    Args:
      names: a weight's logical axis at rest → its name in use.
      past: the layers' part of a cache, arrays [L, ...].
    """
    capacity = None if keep else config.capacity

    def layer(x_BTD, weights_and_past, kind):
        weights, past = weights_and_past
        weights = layer_in_use(weights, names, config)  # inside remat, which gathers again
        x_BTD, kv, figures = weights(x_BTD, at, kind, past, counted_BT, capacity)
        return x_BTD, (kv if keep else None, figures)

    given, remat = (layers, past), EXPERT_REMAT[config.remat]
    return scan_layers(layer, x_BTD, given, kinds(config), remat, config.unroll)


def objective_and_loads(model, names, *batch):
    """(objective's sum, count, aux, load [L, E]) of tokens, targets and segment ids; aux maps the
    loss and the layers' mean figures of `choose` to (sum, count).
    """
    total, count, aux, layers = objective(model, batch, names)
    means = {name: figure.mean(axis=0) for name, figure in layers.items()}
    load_E = means.pop("load")
    means |= {f"load_{e}": load_E[e] for e in range(model.config.num_experts)}
    return total, count, aux | {name: (x, count) for name, x in means.items()}, layers["load"]


def by_capacity(expert, split, E, slots, x_BTD, expert_BTJ, weight_BTJ, place_BTJ, *weights):
    """Experts with a capacity: each takes the first `slots` positions of a row that chose it.

    Runs on one device: sends its rows to the devices of their experts and back, and applies its own
    experts to the rows it receives. `split`: logical axis → mesh axes. Returns [B, T, D].
    """
    (B, T, J), U = expert_BTJ.shape, min(slots, x_BTD.shape[1])
    x_BTD, weight_BTJ = varying(split["mlp"], x_BTD, weight_BTJ)
    if split["seq"]:  # other devices have other positions of the row: these have slots of their own
        taken_BTE = jax.nn.one_hot(expert_BTJ, E, dtype=jnp.int32).sum(axis=2)
        before_BTE, kept_BTJ = jnp.cumsum(taken_BTE, axis=1) - taken_BTE, place_BTJ < slots
        place_BTJ = jnp.where(kept_BTJ, jnp.take_along_axis(before_BTE, expert_BTJ, axis=2), U)
        expert_BTJ = jnp.where(kept_BTJ, expert_BTJ, E)
    slot_BTJ = jnp.where(place_BTJ < U, expert_BTJ * U + place_BTJ, -1)
    # The inverse: which of a row's T · J choices has a slot, -1 if none.
    choices_BM = expert_BTJ.reshape(B, T * J)
    order_BM = jnp.argsort(choices_BM, axis=1, stable=True)
    count_BE = (choices_BM[..., None] == jnp.arange(E)[None, None]).sum(axis=1)
    first_BE1 = (jnp.cumsum(count_BE, axis=1) - count_BE)[..., None]
    slots_11U = jnp.arange(U)[None, None]
    sorted_BM = jnp.minimum(first_BE1 + slots_11U, T * J - 1).reshape(B, E * U)
    used_BM = (slots_11U < count_BE[..., None]).reshape(B, E * U)
    choice_BM = jnp.where(used_BM, jnp.take_along_axis(order_BM, sorted_BM, axis=1), -1)
    token_BM = choice_BM // J

    def send(y_BMD):  # [B, E · U, D] → [E here, M, D], with M slots of all rows that arrive here
        y_EBUD = y_BMD.reshape(B, E, U, -1).swapaxes(0, 1)
        if split["expert"]:
            y_EBUD = jax.lax.all_to_all(y_EBUD, split["expert"], 0, 1, tiled=True)
        return checkpoint_name(y_EBUD.reshape(len(y_EBUD), -1, y_EBUD.shape[-1]), "dispatched")

    x_EMD = send(spread(x_BTD, token_BM, slot_BTJ))
    weight_BM1 = weight_BTJ.reshape(B, T * J, 1)
    # Weights travel too, so that their gradient does not need the outputs that come back.
    weight_EM1 = send(spread(weight_BM1, choice_BM, slot_BTJ.reshape(B, T * J, 1)))
    out_EMD = expert(jnp.matmul, x_EMD, *weights) * weight_EM1.astype(x_EMD.dtype)
    out_EBUD = out_EMD.reshape(len(out_EMD), -1, U, out_EMD.shape[-1])
    if split["expert"]:
        out_EBUD = jax.lax.all_to_all(out_EBUD, split["expert"], 1, 0, tiled=True)
    out_BMD = out_EBUD.swapaxes(0, 1).reshape(B, E * U, -1)
    # Summed after `unite`, J times fewer bytes than before.
    return sum_shards(unite(out_BMD, slot_BTJ, token_BM), split)


def sum_shards(out_BTD, split):
    """Sums over the shards of `mlp`; each keeps its part of T if the residual stream is split."""
    if split["mlp"] and split["mlp"] == split["residual_seq"]:
        return jax.lax.psum_scatter(out_BTD, split["mlp"], scatter_dimension=1, tiled=True)
    return jax.lax.psum(out_BTD, split["mlp"]) if split["mlp"] else out_BTD


def varying(axes: tuple[str, ...], *arrays):
    """Marks arrays as varying along mesh axes, so that their partial gradients are summed here."""
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x in arrays]


def _take(x_BND, index_BM):
    """Rows of each x_ND by index, [B, M, D]; zeros where the index is negative."""
    get = jax.vmap(lambda x_ND, index_M: x_ND.at[index_M].get(mode="promise_in_bounds"))
    return jnp.where(index_BM[..., None] < 0, 0, get(x_BND, jnp.maximum(index_BM, 0)))


@jax.custom_vjp
def spread(x_BND, source_BM, target_BNJ):
    """Returns [B, M, D]: row m is row source[m] of x, or 0. `target` says where x's rows go.

    `spread` and `unite` are each other's transposes, so their gradients are gathers. XLA's would be
    scatters, which took five times as long to compile for TPUs.
    """
    return _take(x_BND, source_BM)


@jax.custom_vjp
def unite(y_BMD, target_BNJ, source_BM):
    """Returns [B, N, D]: row n is the sum of the rows target[n, :] of y, without negative ones."""
    return jnp.asarray(sum(_take(y_BMD, target_BNJ[..., j]) for j in range(target_BNJ.shape[-1])))


spread.defvjp(
    lambda x, *at: (spread(x, *at), at), lambda at, grad: (unite(grad, *at[::-1]), None, None)
)
unite.defvjp(
    lambda y, *at: (unite(y, *at), at), lambda at, grad: (spread(grad, *at[::-1]), None, None)
)

EXPERT_REMAT = REMAT_POLICIES | {  # also: what experts receive, so that nothing is sent twice
    "dispatched": jax.checkpoint_policies.save_only_these_names("dispatched"),
}

# The logical axes of a decoder with experts; see strategies.DECODER.
DENSE_AXES, DENSE_IN_USE, *OTHERS = DECODER
EXPERT_AXES = DENSE_AXES | {
    "expert": "weights",  # E; activations travel to the devices of their experts
    "expert_embed": "weights",  # D, of experts at rest
    "router": "weights",  # E, of the router: each device scores all experts
}
EXPERT_IN_USE = DENSE_IN_USE | {"expert_embed": "act_embed"}

EXPERT_WITHIN = {"expert": "batch"}  # positions travel along the mesh axes that split experts
EXPERT_DECODER = EXPERT_AXES, EXPERT_IN_USE, *OTHERS, EXPERT_WITHIN

# ZeRO-3 for the experts' [E, D, F]. Their D has its own name, since a mesh axis that splits E can't
# split D as well. Every layer gathers all experts, even those that a device hardly uses.
EXPERT_FSDP = {"expert_embed": "data"}
EXPERT_HSDP = {"expert_embed": "fsdp"}  # inside a replica group
EXPERT_FSDP_CP = {"expert_embed": ("data", "seq")}

# Expert parallel: each device along `expert` has E / expert of the experts, and positions travel to
# them and back: Slots[E, B_data_expert, D] → Slots[E_expert, B_data, D]. These are four all-to-alls
# per layer and step, each of capacity · J · D per position.
EP = {"batch": ("data", "expert"), "expert": "expert"}

# ZeRO-3 with expert parallelism: experts are split over `expert` and `data`, other weights over all
# devices. A device gathers only its own experts. FSDP_EP_CP: over `seq` too.
FSDP_EP = {"embed": ("data", "expert")} | EXPERT_FSDP
FSDP_EP_CP = {"embed": ("data", "seq", "expert")} | EXPERT_FSDP_CP
