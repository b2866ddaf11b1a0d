"""DeepSeek V3: a decoder-only language model with latent attention and a mixture of experts.

Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): keys and values of all heads come from
one small latent per position, beside one rotary key that all heads share. A cache holds only these
two. The first layers have an MLP, the others experts, of which some are shared by all positions
(Dai et al. 2024). Experts are chosen by sigmoids and biases that even their load, within the best
groups (DeepSeek-AI 2024, DeepSeek-V3); or by a softmax, as in V2. An optional layer predicts the
token after the next one (Gloeckle et al. 2024); see mtp.py.

Shapes: B batch, T positions, D embed, N heads, H = nope + rope head dim of queries and keys, V head
dim of values, C latent of keys and values, P = rope, E experts, G groups of experts, L layers.

    model = DeepSeek(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)  # on a mesh: see transformer.py
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention import (
    Kind, attend, check_config, logits_in_order, positions, read_prompts, read_token,
)  # fmt: skip
from .experts import (
    EP, EXPERT_DECODER, EXPERT_FSDP, EXPERT_FSDP_CP, EXPERT_HSDP, EXPERT_REMAT, FSDP_EP, FSDP_EP_CP,
    GatedExperts, objective_and_loads, scan_experts,
)  # fmt: skip
from .layers import (
    GatedMLP, RMSNorm, adapters, fit_positions, gather, look_up, project, rotate, stack, vocabulary,
    vocabulary_tables,
)  # fmt: skip
from .sharding import Rules, complete_tables, constrain, explicit, param, reshape
from .strategies import CP, DP, FSDP, FSDP_CP, HSDP, PP, SP, TP


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture and how to compute it. moe.Config explains the other fields."""

    vocab_size: int
    embed: int  # D
    num_layers: int  # L, dense ones included
    num_heads: int  # N
    nope_dim: int  # of queries and keys, without rotary embeddings
    rope_dim: int  # P, with rotary embeddings; even
    value_dim: int  # V
    kv_latent: int  # C
    mlp: int  # hidden width of one expert
    num_experts: int  # E
    experts_per_token: int
    shared_experts: int = 1  # that every position goes through, computed as one
    q_latent: int = 0  # low rank of the queries' projection; 0: one matrix
    dense_layers: int = 0  # the first ones, which have an MLP in place of experts
    dense_mlp: int = 0  # hidden width of that MLP
    sigmoid: bool = True  # V3's router, with biases; V2's has a softmax and none
    groups: int = 1  # G; a position's experts are in its `top_groups` best groups
    top_groups: int = 1
    normalize: bool = True
    route_scale: float = 1.0  # of the sum of a position's experts
    capacity: float | None = 1.25  # None: dropless, as the published models
    balance_weight: float = 1e-4
    balance_rate: float = 1e-3
    mtp_depth: int = 0  # 1: a layer that predicts the token after the next one
    mtp_weight: float = 0.3  # of its loss
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: tuple | None = None
    sliding_window: int | None = None
    mscale: float = 0.0  # with YaRN, scores are multiplied by (0.1 · mscale · ln(factor) + 1)²
    tie_embeddings: bool = False
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q", "q_down", "q_up", "kv_down", "kv_up", "o")
    dtype: str = "float32"
    matmul: str = ""
    matmul_backward: str = ""
    remat: str = "full"
    loss_chunk: int = 256
    unroll: int = 1
    attention: str = "auto"
    context: str = "auto"
    pipeline: str = "1f1b"
    pipe_microbatches: int = 0

    layer_kinds = ()  # all layers are alike
    num_kv_heads = property(lambda self: self.num_heads)
    head_dim = property(lambda self: self.nope_dim + self.rope_dim)

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        check_config(self, remat=REMAT, mtp_depth=(0, 1))
        E, J, G, best = self.num_experts, self.experts_per_token, self.groups, self.top_groups
        L, first, capacity = self.num_layers, self.dense_layers, self.capacity or 1.0
        for invalid, message in (
            (self.rope_dim % 2, f"rope_dim={self.rope_dim} must be even"),
            (not 0 <= first < L, f"dense_layers={first} must be less than num_layers={L}"),
            (first and not self.dense_mlp, f"dense_layers={first} need dense_mlp ≥ 1"),
            (self.mscale and not self.rope_scaling, "mscale needs a rope_scaling"),
            (E % G or E < 2 * G > 2, f"groups={G} must divide num_experts={E} into groups of ≥ 2"),
            (best > G, f"top_groups={best} is more than groups={G}"),
            (E // G * best < J, f"experts_per_token={J} is more than the {E // G * best} of"
             f" num_experts={E} in top_groups={best} of groups={G}"),
            (capacity <= 0, f"capacity={capacity} must be > 0, or None for dropless"),
        ):  # fmt: skip
            if invalid:
                raise ValueError(message)

    @classmethod
    def tiny(cls) -> "Config":
        """203,576 parameters. 129,848 of them active. For tests: 8 divides every sharded dim."""
        return cls(
            384, 64, 3, num_heads=8, nope_dim=8, rope_dim=4, value_dim=6, kv_latent=16, mlp=32,
            num_experts=8, experts_per_token=2, q_latent=24, dense_layers=1, dense_mlp=64,
            groups=4, top_groups=2, route_scale=2.0,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """2,284,288 parameters. 966,400 of them active. The laptop default, with bytes as tokens."""
        return cls(
            384, 128, 4, num_heads=8, nope_dim=16, rope_dim=16, value_dim=16, kv_latent=64, mlp=88,
            num_experts=16, experts_per_token=3, q_latent=96, dense_layers=1, dense_mlp=352,
            groups=4, top_groups=2, capacity=2.0, remat="dots",
        )  # fmt: skip

    @classmethod
    def moonlight_16b(cls) -> "Config":
        """15,960,108,544 parameters. 2,914,774,528 of them active. Moonlight 16B-A3B."""
        return cls(
            163_840, 2_048, 27, num_heads=16, nope_dim=128, rope_dim=64, value_dim=128,
            kv_latent=512, mlp=1_408, num_experts=64, experts_per_token=6, shared_experts=2,
            dense_layers=1, dense_mlp=11_264, route_scale=2.446, norm_eps=1e-5, rope_theta=5e4,
            remat="dispatched",
        )  # fmt: skip

    @classmethod
    def deepseek_v3(cls) -> "Config":
        """671,026,404,352 parameters. 37,552,282,624 of them active. DeepSeek V3, R1."""
        return cls(
            129_280, 7_168, 61, num_heads=128, nope_dim=128, rope_dim=64, value_dim=128,
            kv_latent=512, mlp=2_048, num_experts=256, experts_per_token=8, q_latent=1_536,
            dense_layers=3, dense_mlp=18_432, groups=8, top_groups=4, route_scale=2.5,
            rope_scaling=("yarn", 40.0, 32.0, 1.0, 4_096, True, 1.0), mscale=1.0,
            remat="dispatched",
        )  # fmt: skip


SIZES = {"tiny": Config.tiny, "small": Config.small}
SIZES |= {"16b": Config.moonlight_16b, "671b": Config.deepseek_v3}

REMAT = EXPERT_REMAT
ROUTED_AXES, ROUTED_IN_USE, UNEVEN, POSITIONS, WITHIN = EXPERT_DECODER  # see experts.py
LOGICAL_AXES = ROUTED_AXES | {
    "latent": "both",  # a latent, in activations and in weights in use
    "up_latent": "weights",  # of the projections from it, at rest
    "dense_stack": "stack",  # the first layers
}
IN_USE = ROUTED_IN_USE | {"up_latent": "latent"}


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or x + experts(norm(x)) + shared(norm(x))."""

    def __init__(self, config: Config, dense: bool = False, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = LatentAttention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_eps)
        width = config.dense_mlp if dense else config.shared_experts * config.mlp
        self.mlp = GatedMLP(config, width=width, rngs=rngs)
        limited, v3 = config.top_groups < config.groups, config.sigmoid
        limit = functools.partial(in_best_groups, config) if limited else None
        how = v3, config.normalize, v3, limit, config.route_scale
        self.experts: Any = None if dense else GatedExperts(config, *how, rngs=rngs)

    def __call__(self, x_BTD, at, kind, past, *how):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), at, kind, past)
        x_BTD += checkpoint_name(out_BTD, "sublayer")
        normed_BTD, figures = self.mlp_norm(x_BTD), {}
        out_BTD = self.mlp(normed_BTD)
        if self.experts is not None:
            routed_BTD, figures = self.experts(normed_BTD, *how)
            out_BTD += routed_BTD
        return x_BTD + checkpoint_name(out_BTD, "sublayer"), kv, figures


class DeepSeek(nnx.Module):
    """Tokens in, next-token logits out. Its methods are MoE's."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config, first = config, config.dense_layers
        self.embed = vocabulary(config, rngs=rngs)
        if first:
            dense = functools.partial(Layer, config, True)
            self.dense = stack(dense, first, rngs, "dense_stack")
        self.layers = stack(functools.partial(Layer, config), config.num_layers - first, rngs)
        if not config.tie_embeddings:
            self.unembed = vocabulary(config, rngs=rngs)
        self.final_norm = RMSNorm(config.embed, config.norm_eps)
        if config.mtp_depth:
            from .mtp import Further

            layer = Layer(dataclasses.replace(config, lora_rank=0), rngs=rngs)
            self.mtp = Further(config, layer, rngs=rngs)

    __call__ = fit_positions(logits_in_order)
    prefill, decode = read_prompts, read_token

    @fit_positions
    def loss(self, tokens, targets, segment_ids=None):
        """MoE.loss; with mtp_depth, plus mtp_weight · mtp, the loss at the token after the next."""
        total, count, aux, load_LE = objective_and_loads(self, IN_USE, tokens, targets, segment_ids)
        if self.config.sigmoid:
            step_LE = self.config.balance_rate * jnp.sign(count - load_LE)
            self.layers.experts.bias[...] += step_LE[: len(self.layers.experts.bias[...])]
            if self.config.mtp_depth:
                self.mtp.layer.experts.bias[...] += step_LE[-1]
        return total, count, aux

    def trunk(self, tokens_BT, segment_ids_BT, positions_BT=None, cache=None):
        """MoE.trunk; returns all layers' latents and rotary keys in place of keys and values."""
        config, tables, keep = self.config, vocabulary_tables(self), positions_BT is not None
        at = positions(config, tokens_BT, segment_ids_BT, positions_BT, cache)
        x_BTD, first = self._dense(self.embed_tokens(tables, tokens_BT), at, keep)
        past = cache and jnp.arange(config.dense_layers, config.num_layers)
        given = self.layers, IN_USE, config
        x_BTD, (kv, _) = scan_experts(*given, x_BTD, at, jnp.ones_like(tokens_BT), past, keep)
        kv = jax.tree.map(lambda *x: jnp.concatenate(x), first, kv) if first else kv
        return self.final_norm(x_BTD), tables[-1], kv

    def embed_tokens(self, tables, tokens_BT, positions_BT=None):
        return look_up(tables[0], tokens_BT)

    def first_layers(self, x_BTD, tokens_BT, targets_BT, segment_ids_BT):
        """Runs the dense layers in training. In a pipeline they are part of the first stage."""
        return self._dense(x_BTD, positions(self.config, tokens_BT, segment_ids_BT))[0]

    costs = property(lambda self: {"balance": self.config.balance_weight})

    def run(self, x_BTD, tokens_BT, targets_BT, segment_ids_BT):
        at = positions(self.config, tokens_BT, segment_ids_BT)
        given, counted_BT = (self.layers, IN_USE), constrain(targets_BT, "batch", "seq") >= 0
        x_BTD, (_, figures) = scan_experts(*given, self.config, x_BTD, at, counted_BT)
        return x_BTD, figures

    def _dense(self, x_BTD, at, keep=False):
        """Runs the dense layers, if any: (x_BTD, their latents and rotary keys if they are kept)."""
        if not (first := self.config.dense_layers):
            return x_BTD, None
        given, past = (self.dense, IN_USE, self.config), at.cache and jnp.arange(first)
        x_BTD, (kv, _) = scan_experts(*given, x_BTD, at, None, past, keep)
        return x_BTD, kv


class LatentAttention(nnx.Module):
    """Multi-head latent attention. Tensor parallelism splits the heads; every device computes the
    latents and the rotary key, and their gradients are summed over the heads' devices.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, N, H, V = config.embed, config.num_heads, config.head_dim, config.value_dim
        R, C, up = config.q_latent, config.kv_latent, ("up_latent", "heads", "head_dim")
        factor = config.rope_scaling[1] if config.rope_scaling else 1.0
        self.config, self.scale = config, (0.1 * config.mscale * math.log(factor) + 1) ** 2
        if R:
            self.q_down = param(rngs, (D, R), ("embed", "latent"), D**-0.5)
            self.q_norm = RMSNorm(R, 1e-6)  # as in all published models
            self.q_up = param(rngs, (R, N, H), up, R**-0.5)
        else:
            self.q = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), D**-0.5)
        self.kv_down = param(rngs, (D, C + config.rope_dim), ("embed", "latent"), D**-0.5)
        self.kv_norm = RMSNorm(C, 1e-6)
        self.kv_up = param(rngs, (C, N, config.nope_dim + V), up, C**-0.5)
        out_stddev = (N * V * 2 * config.num_layers) ** -0.5
        self.o = param(rngs, (N, V, D), ("heads", "head_dim", "embed"), out_stddev)
        inner = {"q_down": 1, "q_up": 1} if R else {"q": 1}
        self.lora = adapters(self, config, rngs, **inner, kv_down=1, kv_up=1, o=2)

    def __call__(self, x_BTD, at, kind: Kind, past=None):
        """Returns (output to add to the residual, (latents [B, T, 1, C], rotary keys [B, T, 1, P])).

        past: the layer's number in the cache.
        """
        config, turn = self.config, (at.angles[kind], kind.magnitude)
        x_BTD = gather(x_BTD, self.q_down if config.q_latent else self.q)
        if config.q_latent:
            q_BTNH = project(self, "q_up", self.q_norm(project(self, "q_down", x_BTD)))
        else:
            q_BTNH = project(self, "q", x_BTD)
        by_head = "batch", "seq", "heads", None
        q_BTNH = constrain(q_BTNH, *by_head) * self.scale
        q_BTNH, turned_BTNP = jnp.split(q_BTNH, [config.nope_dim], axis=-1)
        turned_BTNP = rotate(turned_BTNP, *turn)
        down_BT1C = constrain(project(self, "kv_down", x_BTD), "batch", "seq", None)[:, :, None]
        latent_BT1C, key_BT1P = jnp.split(down_BT1C, [config.kv_latent], axis=-1)
        latent_BT1C, key_BT1P = self.kv_norm(latent_BT1C), rotate(key_BT1P, *turn)
        if past is None:
            kv_BTNH = project(self, "kv_up", latent_BT1C[:, :, 0])
            k_BTNH, v_BTNV = jnp.split(constrain(kv_BTNH, *by_head), [config.nope_dim], axis=-1)
            # With out_sharding, the transpose sums each device's heads, and gathers none of them.
            where = explicit(*by_head)
            key_BTNP = jnp.broadcast_to(key_BT1P, turned_BTNP.shape, out_sharding=where)
            q_BTNH = jnp.concatenate((q_BTNH, turned_BTNP), axis=-1)
            k_BTNH = jnp.concatenate((k_BTNH, key_BTNP), axis=-1)
            how = kind.window, config.attention, config.context, at.striped
            out_BTNV = attend(q_BTNH, k_BTNH, v_BTNV, at.segments, *how)
        else:
            from .cache import attend_absorbed

            now = q_BTNH, turned_BTNP, latent_BT1C, key_BT1P
            out_BTNV = attend_absorbed(self, *now, at.cache, past, at.seen[kind])
        out_BTD = project(self, "o", out_BTNV, contract=2, seq="residual_seq")
        return out_BTD, (latent_BT1C, key_BT1P)


def in_best_groups(config, scores_BTE) -> jax.Array:
    """The scores, -inf outside of each position's best groups: by the sum of their two best scores
    (V3) or by their best one (V2).
    """
    (B, T, E), G = scores_BTE.shape, config.groups
    scores_BTGE = reshape(scores_BTE, (B, T, G, E // G), "batch", "seq", None, None)
    best_BTG = scores_BTGE.max(axis=-1)
    if config.sigmoid:
        first_BTG1 = jnp.argmax(scores_BTGE, axis=-1, keepdims=True)
        is_first = jnp.arange(E // G)[None, None, None] == first_BTG1
        best_BTG += jnp.where(is_first, -jnp.inf, scores_BTGE).max(axis=-1)
    kept_BTG = jnp.zeros(best_BTG.shape, bool)
    for _ in range(config.top_groups):
        taken_BTG = jnp.arange(G)[None, None] == jnp.argmax(best_BTG, axis=-1, keepdims=True)
        best_BTG, kept_BTG = jnp.where(taken_BTG, -jnp.inf, best_BTG), kept_BTG | taken_BTG
    scores_BTGE = jnp.where(kept_BTG[..., None], scores_BTGE, -jnp.inf)
    return reshape(scores_BTGE, (B, T, E), "batch", "seq", "router")


complete = functools.partial(complete_tables, LOGICAL_AXES)

# ZeRO-3 for experts and for the projections from latents, whose first dim is not D.
ZERO3 = FSDP | EXPERT_FSDP | {"up_latent": "data"}
ZERO3_HSDP = HSDP | EXPERT_HSDP | {"up_latent": "fsdp"}
ZERO3_CP = FSDP_CP | EXPERT_FSDP_CP | {"up_latent": ("data", "seq")}
ZERO3_EP = FSDP_EP | {"up_latent": ("data", "expert")}
ZERO3_EP_CP = FSDP_EP_CP | {"up_latent": ("data", "seq", "expert")}

# Strategy → logical axis → mesh axis, as MoE's. What they cost: strategies.py and experts.py.
RULES: dict[str, Rules] = complete(
    {
        "dp": DP,
        "fsdp": DP | ZERO3,
        "tp_sp": DP | TP | SP,
        "fsdp_tp_sp": DP | ZERO3 | TP | SP,
        "hsdp_tp_sp": ZERO3_HSDP | TP | SP,
        "tp": DP | TP,
        "fsdp_tp": DP | ZERO3 | TP,
        "hsdp_tp": ZERO3_HSDP | TP,
        "cp": DP | CP,
        "fsdp_cp": DP | CP | ZERO3_CP,
        "fsdp_cp_tp": DP | CP | ZERO3_CP | TP,
        "pp": DP | PP,
        "fsdp_pp": DP | ZERO3 | PP,
        "fsdp_pp_tp": DP | ZERO3 | PP | TP,
        "ep": EP,
        "fsdp_ep": EP | ZERO3_EP,
        "fsdp_ep_tp": EP | ZERO3_EP | TP,
        "fsdp_ep_pp": EP | ZERO3_EP | PP,
        "fsdp_ep_cp": EP | CP | ZERO3_EP_CP,
        "fsdp_ep_cp_tp": EP | CP | ZERO3_EP_CP | TP,
    }
)
