"""DeepSeek V3: a decoder-only language model with latent attention and a mixture of experts.

Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2): keys and values of all heads come from
one small latent per position, next to one rotary key that all heads share. A cache holds only these
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

from flax import nnx

from .options.compute_options import ComputeOptions
from .core.decoder import Decoder
from .experts.mixture import (
    EXPERT_REMAT, check_experts, check_groups, even_load, feed_forward, make_experts,
)  # fmt: skip
from .core.config import bounded, factor, one_of
from .core.layers import GatedMLP, RMSNorm, RopeScaling, add_output
from .options import dense_first
from .options.mtp import MTPHead, objective_with_mtp
from .options.rope_scaling import Yarn
from .core.sharding import Rules, complete_tables
from .experts.expert_strategies import EXPERT_DECODER, expert_rules
from .parts.latent_attention import LatentAttention, with_latents


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture. moe.Config explains the fields without a comment."""

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
    q_latent: int = bounded(0, least=0)  # low rank of the queries' projection; 0: one matrix
    dense_layers: int = bounded(0, least=0)  # the first ones, which have an MLP in place of experts
    dense_mlp: int = bounded(0, least=0)  # hidden width of that MLP
    sigmoid: bool = True  # V3's router, with biases; V2's has a softmax and none
    groups: int = 1  # G; a position's experts are in its `top_groups` best groups
    top_groups: int = 1
    normalize: bool = True
    route_scale: float = factor(1.0)  # of the sum of a position's experts
    capacity: float | None = 1.25  # slots of an expert, as in moe.Config; published: None
    balance_weight: float = 1e-4
    balance_rate: float = 1e-3
    mtp_depth: int = one_of(0, (0, 1))  # layers that predict the second-next token, 0 or 1
    mtp_weight: float = 0.3  # weight of the second-next token's loss
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    mscale: float = 0.0  # with YaRN, scores are multiplied by (0.1 · mscale · ln(factor) + 1)²
    tie_embeddings: bool = False
    _: dataclasses.KW_ONLY
    lora_targets: tuple[str, ...] = ("q", "q_down", "q_up", "kv_down", "kv_up", "o")

    remat: str = one_of("full", EXPERT_REMAT)

    REMAT = EXPERT_REMAT
    ROTARY = "rope_dim"

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def rotary_dim(self) -> int:
        return self.rope_dim

    @property
    def score_scale(self) -> float:
        scaling: Any = self.rope_scaling  # with mscale, a Yarn
        return (0.1 * self.mscale * math.log(scaling.factor if self.mscale else 1.0) + 1) ** 2

    def __post_init__(self):
        super().__post_init__()
        check_experts(self)
        check_groups(self)
        if self.mscale and not self.rope_scaling:
            raise ValueError("mscale needs a rope_scaling")

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
    def kimi_k2(cls) -> "Config":
        """1,026,408,209,408 parameters. 32,861,477,888 of them active. Kimi K2."""
        return cls(
            163_840, 7_168, 61, num_heads=64, nope_dim=128, rope_dim=64, value_dim=128,
            kv_latent=512, mlp=2_048, num_experts=384, experts_per_token=8, q_latent=1_536,
            dense_layers=1, dense_mlp=18_432, route_scale=2.827, rope_theta=5e4,
            rope_scaling=Yarn(32.0, 1.0, 1.0, 4_096, True, 1.0), mscale=1.0, remat="dispatched",
        )  # fmt: skip

    @classmethod
    def deepseek_v3(cls) -> "Config":
        """671,026,404,352 parameters. 37,552,282,624 of them active. DeepSeek V3, R1."""
        return cls(
            129_280, 7_168, 61, num_heads=128, nope_dim=128, rope_dim=64, value_dim=128,
            kv_latent=512, mlp=2_048, num_experts=256, experts_per_token=8, q_latent=1_536,
            dense_layers=3, dense_mlp=18_432, groups=8, top_groups=4, route_scale=2.5,
            rope_scaling=Yarn(40.0, 32.0, 1.0, 4_096, True, 1.0), mscale=1.0,
            remat="dispatched",
        )  # fmt: skip


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "16b": Config.moonlight_16b,
    "671b": Config.deepseek_v3,
    "kimi_k2": Config.kimi_k2,
}

AXES = with_latents(EXPERT_DECODER)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or x + experts(norm(x)) + shared(norm(x))."""

    def __init__(self, config: Config, dense: bool = False, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = LatentAttention(config, scale=config.score_scale, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_eps)
        width = config.dense_mlp if dense else config.shared_experts * config.mlp
        self.mlp = GatedMLP(config, width=width, rngs=rngs)
        self.mlp_gate = None
        self.experts = None if dense else make_experts(config, config.sigmoid, rngs=rngs)

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD)
        out_BTD, metrics = feed_forward(self, self.mlp_norm(x_BTD), inputs)
        return add_output(x_BTD, out_BTD), kv, metrics


class DeepSeek(Decoder):
    """Tokens in, next-token logits out. With V3's router, a call of `loss` also moves its biases;
    with mtp_depth, the objective adds mtp_weight · mtp, the loss at the token after the next.
    """

    axes = AXES
    make_layers = dense_first.make_layers
    begin = dense_first.begin
    run_layers = dense_first.run_layers
    objective = objective_with_mtp
    mtp: MTPHead | None

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, Layer, rngs=rngs)
        norm = functools.partial(RMSNorm, eps=config.norm_eps)
        self.mtp = MTPHead(config, Layer, norm, rngs=rngs) if config.mtp_depth else None

    @property
    def costs(self) -> dict[str, float]:
        return {"balance": self.config.balance_weight}

    def update_buffers(self, objective):
        if self.config.sigmoid:
            even_load(objective, self.config.balance_rate, self.layers, self.mtp)


complete = functools.partial(complete_tables, AXES.logical_axes)

# Strategy → logical axis → mesh axis; see strategies.py. ZeRO-3 also splits the projections from
# latents, whose first dim is not D.
RULES: dict[str, Rules] = complete(expert_rules("up_latent"))
