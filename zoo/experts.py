"""Mixtures of experts: the choice of experts, running them on their devices, sharding rules.

Shapes: B batch, T positions, D embed, L layers, E experts, J experts per position, U slots per row
in an expert, M slots or chosen experts in a row, N rows before `spread`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .attention import kinds
from .layers import REMAT_POLICIES, gather, layer_in_use, objective, scan_layers, stripe
from .sharding import auto, constrain, mesh_axes, per_device
from .strategies import DECODER


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
    # Inside a scan over layers, weights are without their axis; D is whole, whatever the rules.
    names = [w.out_sharding[-w[...].ndim :] for w in weights]
    names = [tuple(n if n in ("expert", "mlp") else None for n in axes) for axes in names]
    operands = [w[...].astype(x_BTD.dtype) for w in weights]
    if config.matmul:
        from .low_precision import of_experts

        expert, operands, names = of_experts(expert, split, capacity, weights, names)
    slots, compute = T, functools.partial(dropless, expert, split)  # enough slots for any choice
    if capacity is not None:
        slots = min(T, math.ceil(capacity * T * config.experts_per_token / E))
        compute = functools.partial(by_capacity, expert, split, E, slots)
    choice, *more = route(x_BTD, slots=slots)
    axes = [("batch", "seq", None)] * 4 + names
    out_BTD = per_device(
        compute, (x_BTD, *choice, *operands), axes, ("batch", "residual_seq", None)
    )
    return constrain(out_BTD, "batch", "residual_seq", "act_embed"), *more


def choose(config, logits_BTE, counted_BT, slots: int, bias_E=None, normalize: bool = True):
    """Chooses each position's experts by the router's logits, in float32.

    An expert takes the first `slots` positions of a row that chose it, so that no output depends
    on later positions. bias_E changes the choice alone; normalize: a position's weights sum to 1.

    Returns: (expert_BTJ, best first; weight_BTJ; place_BTJ, how many earlier positions of the row
      chose the same expert), and name → sum over the positions in counted_BT:
      balance: E · Σ over experts of (share of a row's choices) · (mean probability); 1 if even.
      router_z: the squared log of the router's normalizer.
      dropped: the share of a position's experts that had no slot left.
      load [E]: whether a position chose this expert, times E/J; 1 if even.
    """
    E, J = config.num_experts, config.experts_per_token
    logits_BTE = constrain(logits_BTE, "batch", "seq", "router")
    probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
    scores_BTE = jax.lax.stop_gradient(probs_BTE)
    if bias_E is not None:
        scores_BTE += bias_E[None, None]
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
    probs_BE = (probs_BTE * counted_BT1).sum(axis=1)
    count_B1 = jnp.maximum(counted_BT1.sum(1), 1)
    normalizer_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
    return (expert_BTJ, weight_BTJ, place_BTJ), {
        "balance": (taken_BE * probs_BE / count_B1).sum() * E / J,
        "router_z": (jnp.square(normalizer_BT1) * counted_BT1).sum(),
        "dropped": jnp.where(place_BTJ < slots, 0, counted_BT1).sum() / J,
        "load": taken_BE.sum(0) * E / J,
    }


def scan_experts(model, x_BTD, at, counted_BT, cache=None, keep=False):
    """Runs a model's layers: (x_BTD, (keys and values or None, name → figures [L, ...])).

    In generation (`keep`) they drop nothing, because the padding of a prompt must not take slots.
    """
    config, capacity = model.config, None if keep else model.config.capacity

    def layer(x_BTD, weights_and_past, kind):
        weights, past = weights_and_past
        weights = layer_in_use(weights, EXPERT_IN_USE, config)  # inside remat, which gathers again
        x_BTD, kv, figures = weights(x_BTD, at, kind, past, counted_BT, capacity)
        return x_BTD, (kv if keep else None, figures)

    layers, remat = (model.layers, cache and (cache.k, cache.v)), EXPERT_REMAT[config.remat]
    return scan_layers(layer, x_BTD, layers, kinds(config), remat, config.unroll)


def objective_and_loads(model, *batch):
    """(objective's sum, count, aux, load [L, E]) of tokens, targets and segment ids; aux maps the
    loss and the layers' mean figures of `choose` to (sum, count).
    """
    total, count, aux, layers = objective(model, batch, EXPERT_IN_USE)
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
    x_BTD, weight_BTJ = _partial(split["mlp"], x_BTD, weight_BTJ)
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
    return _sum(unite(out_BMD, slot_BTJ, token_BM), split)  # sums J times fewer bytes than before


def dropless(expert, split, x_BTD, expert_BTJ, weight_BTJ, place_BTJ, *weights):
    """Dropless experts (Gale et al. 2022): each takes all positions that chose it, after a sort.

    Runs on one device: gathers the rows of all devices along the axes that split experts, and
    applies its own experts to them. Returns [B, T, D].
    """
    del place_BTJ  # nothing is dropped
    given = _partial(split["mlp"], x_BTD, weight_BTJ)
    if split["expert"]:
        given = [jax.lax.all_gather(x, split["expert"], tiled=True) for x in given]
        expert_BTJ = jax.lax.all_gather(expert_BTJ, split["expert"], tiled=True)
    x_BTD, weight_BTJ = (checkpoint_name(x, "dispatched") for x in given)
    (B, T, J), E = expert_BTJ.shape, len(weights[0])
    first = jax.lax.axis_index(split["expert"]) * E if split["expert"] else 0
    here_M = expert_BTJ.reshape(-1) - first
    here_M = jnp.where((here_M >= 0) & (here_M < E), here_M, E)  # other devices' choices go last
    order_M = jnp.argsort(here_M)
    slot_M = jnp.argsort(order_M)
    sizes_E = (here_M[:, None] == jnp.arange(E)[None]).sum(axis=0).astype(jnp.int32)
    # Mask those choices: ragged_dot's output outside of all groups is undefined.
    slot_M = jnp.where(here_M < E, slot_M, -1)
    order_M = jnp.where(jnp.arange(len(order_M)) < sizes_E.sum(), order_M, -1)
    token_1M, slot_1NJ = order_M[None] // J, slot_M.reshape(1, B * T, J)
    x_MD = spread(x_BTD.reshape(1, B * T, -1), token_1M, slot_1NJ)[0]
    weight_M1 = spread(weight_BTJ.reshape(1, -1, 1), order_M[None], slot_M.reshape(1, -1, 1))[0]
    grouped = functools.partial(jax.lax.ragged_dot, group_sizes=sizes_E)
    out_MD = expert(grouped, x_MD, *weights) * weight_M1.astype(x_MD.dtype)
    out_BTD = _sum(unite(out_MD[None], slot_1NJ, token_1M).reshape(B, T, -1), split)
    own = split["expert"]
    return jax.lax.psum_scatter(out_BTD, own, tiled=True) if own else out_BTD


def _sum(out_BTD, split):
    """Sums over the shards of `mlp`; each keeps its part of T if the residual stream is split."""
    if split["mlp"] and split["mlp"] == split["residual_seq"]:
        return jax.lax.psum_scatter(out_BTD, split["mlp"], scatter_dimension=1, tiled=True)
    return jax.lax.psum(out_BTD, split["mlp"]) if split["mlp"] else out_BTD


def _partial(axes: tuple[str, ...], *arrays):
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
