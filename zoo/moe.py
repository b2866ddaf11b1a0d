"""MoE: a decoder-only language model whose MLPs are mixtures of experts.

A router sends each position to `experts_per_token` of `num_experts` SwiGLU experts (Shazeer et al.
2017). Experts have a limited capacity, as in GShard (Lepikhin et al. 2020), or are dropless (Gale
et al. 2022). The balance loss is Switch Transformer's (Fedus et al. 2021), the router's z-loss
ST-MoE's (Zoph et al. 2022), the balancing bias DeepSeek's (Wang et al. 2024). This covers Mixtral
and Qwen3-MoE. Everything but the experts is the same as in transformer.py.

Shapes: B batch, T positions, D embed, F hidden width of an expert, V vocab, L layers, E experts, J
experts per position, U slots per row in an expert, M slots or chosen experts in a row, N rows
before `spread`, R batch shards.

    model = MoE(Config.tiny(), rngs=nnx.Rngs(0))
    objective_sum, count, figures = model.loss(tokens, targets)

transformer.py shows how to use it on a mesh; RULES are at the end of this file.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention import (
    Attention, Kind, check_config, kinds, logits_in_order, positions, read_prompts, read_token,
    stripe,
)  # fmt: skip
from .layers import (
    REMAT_POLICIES, RMSNorm, fit_positions, gather, look_up, multiply, objective, scan_layers,
    stack, vocabulary, vocabulary_tables,
)  # fmt: skip
from .sharding import Rules, auto, complete_tables, constrain, in_use, mesh_axes, param, per_device
from .strategies import CP, DECODER, DP, FSDP, FSDP_CP, HSDP, PP, SP, TP


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture and how to compute it. Named sizes are classmethods.

    Fields without a comment are explained in transformer.Config.
    """

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int  # F, hidden width of one expert's SwiGLU
    num_experts: int  # E
    experts_per_token: int  # J, experts that compute each position
    # Slots per row in an expert, as a multiple of an even load. A position that finds no free slot
    # skips the expert. None: dropless, at the cost of a sort.
    capacity: float | None = 1.25
    normalize: bool = True  # the weights of a position's experts sum to 1
    balance_weight: float = 0.01  # weight of the balance loss in the objective
    router_z_weight: float = 1e-3  # weight of the squared log-normalizer of the router's logits
    balance_rate: float = 0.0  # how far a step moves the biases that even the load; 0: no biases
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: tuple | None = None
    sliding_window: int | None = None
    layer_kinds: tuple[Kind, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o")  # experts have no adapters
    dtype: str = "float32"
    remat: str = "full"
    attention: str = "auto"
    context: str = "auto"
    pipeline: str = "1f1b"
    pipe_microbatches: int = 0
    loss_chunk: int = 256
    unroll: int = 1

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        check_config(self, remat=REMAT)
        J, E = self.experts_per_token, self.num_experts
        if J > E:
            raise ValueError(f"experts_per_token={J} is more than num_experts={E}")
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity={self.capacity} must be > 0, or None for dropless")

    @classmethod
    def tiny(cls) -> "Config":
        """271,680 parameters. 124,224 of them active. For tests: 8 divides every sharded dim."""
        return cls(
            384, 64, 2, num_heads=16, num_kv_heads=8, head_dim=8,
            mlp=64, num_experts=8, experts_per_token=2,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """2,479,232 parameters. 857,216 of them active, about Transformer's small.

        The laptop default, with bytes as tokens.
        """
        return cls(
            384, 128, 4, num_heads=8, num_kv_heads=8, head_dim=16,
            mlp=176, num_experts=8, experts_per_token=2, remat="dots",
            # A row of 128 bytes loads its experts less evenly than one of thousands of tokens.
            capacity=2.0, balance_weight=0.03,
        )  # fmt: skip

    @classmethod
    def mixtral_8x7b(cls) -> "Config":
        """46,702,792,704 parameters. 12,879,925,248 of them active. Mixtral 8x7B."""
        return cls(
            32_000, 4_096, 32, num_heads=32, num_kv_heads=8, head_dim=128,
            mlp=14_336, num_experts=8, experts_per_token=2,
            rope_theta=1e6, tie_embeddings=False, remat="dispatched",
        )  # fmt: skip

    @classmethod
    def qwen3_30b_a3b(cls) -> "Config":
        """30,532,122,624 parameters. 3,353,032,704 of them active. Qwen3 30B-A3B."""
        return cls(
            151_936, 2_048, 48, num_heads=32, num_kv_heads=4, head_dim=128,
            mlp=768, num_experts=128, experts_per_token=8, qk_norm=True, norm_eps=1e-6,
            rope_theta=1e6, tie_embeddings=False, remat="dispatched",
        )  # fmt: skip


REMAT = REMAT_POLICIES | {
    # What experts receive: nothing is sent to them a second time.
    "dispatched": jax.checkpoint_policies.save_only_these_names("dispatched"),
}

SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "mixtral_8x7b": Config.mixtral_8x7b,
    "qwen3_30b_a3b": Config.qwen3_30b_a3b,
}

# What sharding rules may name, and whether activations, weights or both have it.
DENSE_AXES, DENSE_IN_USE, UNEVEN, POSITIONS = DECODER
LOGICAL_AXES = DENSE_AXES | {
    "expert": "weights",  # E; activations travel to the devices of their experts
    "expert_embed": "weights",  # D, of experts at rest
    "router": "weights",  # E, of the router: each device scores all experts
}

# A weight's logical axis at rest → its name in use, so that rules can shard the two differently.
IN_USE = DENSE_IN_USE | {"expert_embed": "act_embed"}

# Logical axis → another one that its mesh axes must split too: positions travel along them.
WITHIN = {"expert": "batch"}


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, norm = config.embed, functools.partial(RMSNorm, eps=config.norm_eps)
        self.attention_norm, self.mlp_norm = norm(D), norm(D)
        how = ("qkv" if config.qkv_bias else "", norm if config.qk_norm else None)
        self.attention = Attention(config, *how, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x_BTD, at, kind, past, counted_BT, capacity):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), at, kind, past)
        x_BTD = x_BTD + checkpoint_name(out_BTD, "sublayer")
        out_BTD, figures = self.experts(self.mlp_norm(x_BTD), counted_BT, capacity)
        return x_BTD + checkpoint_name(out_BTD, "sublayer"), kv, figures


class MoE(nnx.Module):
    """Tokens in, next-token logits out. See the module's docstring, and Transformer's methods."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = vocabulary(config, rngs=rngs)
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs)
        if not config.tie_embeddings:
            self.unembed = vocabulary(config, rngs=rngs)
        self.final_norm = RMSNorm(config.embed, config.norm_eps)

    @fit_positions
    def __call__(self, tokens_BT, segment_ids_BT=None) -> jax.Array:
        """Returns logits [B, T, V] in float32; position t predicts token t + 1."""
        return logits_in_order(self, tokens_BT, segment_ids_BT)

    @fit_positions
    def loss(self, tokens, targets, segment_ids=None):
        """Training objective of a batch; with balance_rate, the call also moves the biases.

        The objective is the cross entropy in nats, plus balance_weight · balance, plus
        router_z_weight · router_z.

        Args:
          tokens, segment_ids: as in Transformer.loss.
          targets: [B, T], int; targets below 0 are padding and don't count.

        Returns: (sum over targets, count, aux), float32 scalars; aux maps a name to (sum, count):
          loss: the cross entropy alone.
          balance, router_z, dropped, load_0 to load_{E-1}: see `Experts.route`; means over layers.
        """
        config = self.config
        batch = tuple(stripe(config, x) for x in (tokens, targets, segment_ids))
        total, count, aux, layers = objective(self, batch, IN_USE)
        if config.balance_rate:
            step = config.balance_rate * jnp.sign(count - layers["load"])
            self.layers.experts.bias[...] += step
        means = {name: figure.mean(axis=0) for name, figure in layers.items()}
        loads = {f"load_{e}": means["load"][e] for e in range(config.num_experts)}
        figures = {k: v for k, v in means.items() if k != "load"} | loads
        return total, count, aux | {name: (figure, count) for name, figure in figures.items()}

    prefill, decode = read_prompts, read_token  # as Transformer's; experts drop nothing

    def trunk(self, tokens_BT, segment_ids_BT, positions_BT=None, cache=None):
        """Transformer.trunk for experts. In generation they drop nothing, because the padding of a
        prompt must not take slots.
        """
        tables, keep = vocabulary_tables(self), positions_BT is not None
        at = positions(self.config, tokens_BT, segment_ids_BT, positions_BT, cache)
        given = (self.embed_tokens(tables, tokens_BT), at, jnp.ones_like(tokens_BT))
        x_BTD, (kv, _) = self._layers(*given, cache, keep)
        return self.final_norm(x_BTD), tables[-1], kv

    def embed_tokens(self, tables, tokens_BT, positions_BT=None):
        return look_up(tables[0], tokens_BT)

    @property
    def costs(self) -> dict[str, float]:
        return {"balance": self.config.balance_weight, "router_z": self.config.router_z_weight}

    def run(self, x_BTD, tokens_BT, targets_BT, segment_ids_BT):
        """Runs the layers in training; figures are over positions with a target."""
        counted_BT = constrain(targets_BT, "batch", "seq") >= 0
        at = positions(self.config, tokens_BT, segment_ids_BT)
        x_BTD, (_, figures) = self._layers(x_BTD, at, counted_BT)
        return x_BTD, figures

    def _layers(self, x_BTD, at, counted_BT, cache=None, keep=False):
        config = self.config
        capacity = None if keep else config.capacity

        def layer(x_BTD, weights_and_past, kind):
            weights, past = weights_and_past
            weights = in_use(weights, IN_USE, config.dtype)  # inside remat, which gathers again
            x_BTD, kv, figures = weights(x_BTD, at, kind, past, counted_BT, capacity)
            return x_BTD, (kv if keep else None, figures)

        layers = (self.layers, cache and (cache.k, cache.v))
        how = (kinds(config), REMAT[config.remat], config.unroll)
        return scan_layers(layer, x_BTD, layers, *how)


class Balance(nnx.Variable):
    """A bias on the experts' scores before the choice: a buffer, without a gradient."""


class Experts(nnx.Module):
    """A mixture of SwiGLU experts: each position gets the weighted sum of its experts' outputs."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, E, F = config.embed, config.num_experts, config.mlp
        self.config = config
        self.router = param(rngs, (D, E), ("norm", "router"), D**-0.5)
        self.gate = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.up = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        down_stddev = (F * 2 * config.num_layers) ** -0.5
        self.down = param(rngs, (E, F, D), ("expert", "mlp", "expert_embed"), down_stddev)
        if config.balance_rate:
            self.bias = Balance(jnp.zeros(E), out_sharding=("router",), eager_sharding=False)

    def __call__(self, x_BTD, counted_BT, capacity: float | None):
        """Returns the output to add to the residual, and the figures of `route`.

        Experts run inside jax.shard_map, so communication is explicit and the same on any mesh.
        Raises ValueError if rules split experts over a mesh axis that does not split the batch.
        """
        x_BTD = gather(x_BTD)
        E, T = self.config.num_experts, x_BTD.shape[1]
        over = functools.partial(mesh_axes, manual=True)
        split = {axis: over(axis) for axis in ("expert", "mlp", "seq", "residual_seq")}
        if alone := ", ".join(sorted({*split["expert"]} - {*over("batch")})):
            raise ValueError(f"the rules split experts over {alone}, but not the batch")
        slots, compute = T, functools.partial(dropless, split=split)  # enough slots for any choice
        if capacity is not None:
            slots = min(T, math.ceil(capacity * T * self.config.experts_per_token / E))
            compute = functools.partial(by_capacity, num_experts=E, slots=slots, split=split)
        choice, figures = self.route(x_BTD, counted_BT, slots)
        rows, into = ("batch", "seq", None), ("expert", None, "mlp")  # D whole, whatever the rules
        axes = (rows, rows, rows, rows, into, into, ("expert", "mlp", None))
        weights = (w[...].astype(x_BTD.dtype) for w in (self.gate, self.up, self.down))
        out_axes = ("batch", "residual_seq", None)
        out_BTD = per_device(compute, (x_BTD, *choice, *weights), axes, out_axes)
        return constrain(out_BTD, "batch", "residual_seq", "act_embed"), figures

    def route(self, x_BTD, counted_BT, slots: int):
        """Chooses each position's experts, in float32.

        An expert takes the first `slots` positions of a row that chose it, so that no output
        depends on later positions.

        Returns: (expert_BTJ, best first; weight_BTJ; place_BTJ, how many earlier positions of the
          row chose the same expert), and name → sum over the positions in counted_BT:
          balance: E · Σ over experts of (share of a row's choices) · (mean probability); 1 if even.
          router_z: the squared log of the router's normalizer.
          dropped: the share of a position's experts that had no slot left.
          load [E]: whether a position chose this expert, times E/J; 1 if even.
        """
        config, E, J = self.config, self.config.num_experts, self.config.experts_per_token
        with jax.default_matmul_precision("highest"):
            logits_BTE = multiply(x_BTD.astype(jnp.float32), self.router)
        logits_BTE = constrain(logits_BTE, "batch", "seq", "router")
        probs_BTE = jax.nn.softmax(logits_BTE, axis=-1)
        scores_BTE = jax.lax.stop_gradient(probs_BTE)
        if config.balance_rate:
            scores_BTE += self.bias[...][None, None]
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
        if config.normalize:
            weight_BTJ /= weight_BTJ.sum(axis=-1, keepdims=True)

        counted_BT1 = counted_BT.astype(jnp.float32)[..., None]
        taken_BE = (jnp.asarray(taken_BTE, jnp.float32) * counted_BT1).sum(axis=1)
        probs_BE = (probs_BTE * counted_BT1).sum(axis=1)
        count_B1 = jnp.maximum(counted_BT1.sum(1), 1)
        normalizer_BT1 = jax.nn.logsumexp(logits_BTE, axis=-1, keepdims=True)
        figures = {
            "balance": (taken_BE * probs_BE / count_B1).sum() * E / J,
            "router_z": (jnp.square(normalizer_BT1) * counted_BT1).sum(),
            "dropped": jnp.where(place_BTJ < slots, 0, counted_BT1).sum() / J,
            "load": taken_BE.sum(0) * E / J,
        }
        return (expert_BTJ, weight_BTJ, place_BTJ), figures


def by_capacity(
    x_BTD, expert_BTJ, weight_BTJ, place_BTJ, gate, up, down, *, num_experts, slots, split
):
    """Experts with a capacity: each takes the first `slots` positions of a row that chose it.

    Runs on one device: sends its rows to the devices of their experts and back, and applies its own
    experts to the rows it receives. `split`: logical axis → mesh axes. Returns [B, T, D].
    """
    (B, T, J), E, U = expert_BTJ.shape, num_experts, min(slots, x_BTD.shape[1])
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
    hidden_EMF = jax.nn.silu(x_EMD @ gate) * (x_EMD @ up)
    out_EMD = hidden_EMF @ down * weight_EM1.astype(down.dtype)
    out_EBUD = out_EMD.reshape(len(gate), -1, U, out_EMD.shape[-1])
    if split["expert"]:
        out_EBUD = jax.lax.all_to_all(out_EBUD, split["expert"], 1, 0, tiled=True)
    out_BMD = out_EBUD.swapaxes(0, 1).reshape(B, E * U, -1)
    out_BTD = unite(out_BMD, slot_BTJ, token_BM)
    return _sum(out_BTD, split)  # after the weighted sum: J times fewer bytes than before it


def dropless(x_BTD, expert_BTJ, weight_BTJ, place_BTJ, gate, up, down, *, split):
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
    (B, T, J), E = expert_BTJ.shape, len(gate)
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
    hidden_MF = jax.nn.silu(grouped(x_MD, gate)) * grouped(x_MD, up)
    out_MD = grouped(hidden_MF, down) * weight_M1.astype(down.dtype)
    out_BTD = _sum(unite(out_MD[None], slot_1NJ, token_1M).reshape(B, T, -1), split)
    if split["expert"]:
        out_BTD = jax.lax.psum_scatter(out_BTD, split["expert"], tiled=True)
    return out_BTD


def _sum(out_BTD, split):
    """Sums over the shards of `mlp`; each keeps its part of T if the residual stream is split."""
    if not split["mlp"]:
        return out_BTD
    if split["mlp"] == split["residual_seq"]:
        return jax.lax.psum_scatter(out_BTD, split["mlp"], scatter_dimension=1, tiled=True)
    return jax.lax.psum(out_BTD, split["mlp"])


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

    `spread` and `unite` are each other's transposes, so that gradients are gathers. XLA would use
    scatters, which took five times as long to compile for TPUs.
    """
    return _take(x_BND, source_BM)


@jax.custom_vjp
def unite(y_BMD, target_BNJ, source_BM):
    """Returns [B, N, D]: row n is the sum of the rows target[n, :] of y, without negative ones."""
    return jnp.asarray(sum(_take(y_BMD, target_BNJ[..., j]) for j in range(target_BNJ.shape[-1])))


spread.defvjp(
    lambda x, source, target: (spread(x, source, target), (source, target)),
    lambda saved, grad: (unite(grad, saved[1], saved[0]), None, None),
)
unite.defvjp(
    lambda y, target, source: (unite(y, target, source), (source, target)),
    lambda saved, grad: (spread(grad, *saved), None, None),
)


complete = functools.partial(complete_tables, LOGICAL_AXES)

# ZeRO-3 for the experts' [E, D, F]. Their D has its own name, since a mesh axis that splits E can't
# split D as well. Every layer gathers all experts, even those that a device hardly uses.
EXPERT_FSDP = {
    "expert_embed": "data",
}

# Expert parallel: each device along `expert` has E / expert of the experts, and positions travel to
# them and back: four all-to-alls per layer and step, each of capacity · J · D per position.
EP = {
    "batch": ("data", "expert"),
    "expert": "expert",  # Slots[E, B_data_expert, D] → Slots[E_expert, B_data, D]
}

# ZeRO-3 with expert parallelism: experts are split over `expert` and `data`, other weights over all
# devices. A device gathers only its own experts.
FSDP_EP = {
    "embed": ("data", "expert"),
    "expert_embed": "data",
}

# Likewise inside a replica group; and with context parallelism, over `seq` too.
EXPERT_HSDP = {"expert_embed": "fsdp"}
EXPERT_FSDP_CP = {"expert_embed": ("data", "seq")}
FSDP_EP_CP = {"embed": ("data", "seq", "expert")} | EXPERT_FSDP_CP

# Strategy → logical axis → mesh axis. DP, FSDP, HSDP and TP, and what they cost: strategies.py. TP
# splits each expert's hidden dim; its all-reduces don't grow with experts_per_token.
RULES: dict[str, Rules] = complete(
    {
        "dp": DP,
        "fsdp": DP | FSDP | EXPERT_FSDP,
        "tp_sp": DP | TP | SP,
        "fsdp_tp_sp": DP | FSDP | EXPERT_FSDP | TP | SP,
        "hsdp_tp_sp": HSDP | EXPERT_HSDP | TP | SP,
        "tp": DP | TP,
        "fsdp_tp": DP | FSDP | EXPERT_FSDP | TP,
        "hsdp_tp": HSDP | EXPERT_HSDP | TP,
        "cp": DP | CP,
        "fsdp_cp": DP | CP | FSDP_CP | EXPERT_FSDP_CP,
        "fsdp_cp_tp": DP | CP | FSDP_CP | EXPERT_FSDP_CP | TP,
        "pp": DP | PP,
        "fsdp_pp": DP | FSDP | EXPERT_FSDP | PP,
        "fsdp_pp_tp": DP | FSDP | EXPERT_FSDP | PP | TP,
        "ep": EP,
        "fsdp_ep": EP | FSDP_EP,
        "fsdp_ep_tp": EP | FSDP_EP | TP,
        "fsdp_ep_pp": EP | FSDP_EP | PP,
        "fsdp_ep_cp": EP | CP | FSDP_EP_CP,
        "fsdp_ep_cp_tp": EP | CP | FSDP_EP_CP | TP,
    }
)
