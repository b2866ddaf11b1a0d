"""MoE: a decoder-only language model whose MLPs are mixtures of experts.

A router sends each position to `experts_per_token` of `num_experts` SwiGLU experts (Shazeer et al.
2017). Experts have a limited capacity, as in GShard (Lepikhin et al. 2020), or are dropless (Gale
et al. 2022). The balance loss is Switch Transformer's (Fedus et al. 2021), the router's z-loss
ST-MoE's (Zoph et al. 2022), the balancing bias DeepSeek's (Wang et al. 2024). The first layers may
have an MLP in place of experts, and experts may be chosen within the best groups, as in DeepSeek V3.
recipes/docs/architectures.md lists the models that this covers. Everything but the experts is the
same as in transformer.py.

Shapes: B batch, T positions, D embed, F hidden width of an expert, V vocab, L layers, E experts, J
experts per position.

    model = MoE(Config.tiny(), rngs=nnx.Rngs(0))  # on a mesh: see transformer.py
    objective_sum, count, metrics = model.loss(tokens, targets)
"""

import dataclasses
import functools

from flax import nnx

from .core.config import bounded, factor, one_of
from .core.decoder import Decoder
from .experts.mixture import (
    EXPERT_REMAT, check_experts, check_groups, even_load, feed_forward, make_experts, position_gate,
)  # fmt: skip
from .core.layers import GatedMLP, AttentionType, RopeScaling, add_output
from .parts.norms import apply_norm
from .core.sharding import Rules, complete_tables
from .experts.expert_strategies import EXPERT_DECODER, expert_rules
from .options import dense_first
from .options.llama_options import LlamaOptions, embed_scaled, make_attention, make_norms


@dataclasses.dataclass(frozen=True)
class Config(LlamaOptions):
    """The architecture, with LlamaOptions. transformer.Config explains the fields
    without a comment.
    """

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int  # F, hidden width of one expert's SwiGLU
    num_experts: int  # E, experts of a layer
    experts_per_token: int  # J, experts that compute each position
    # Slots per row in an expert, as a multiple of an even load. A position that finds no free slot
    # skips the expert. None: dropless, at the cost of a sort.
    capacity: float | None = 1.25
    normalize: bool = True  # the weights of a position's experts sum to 1
    balance_weight: float = 0.01  # weight of the balance loss in the objective
    router_z_weight: float = 1e-3  # weight of the squared log-normalizer of the router's logits
    balance_rate: float = 0.0  # how far a step moves the biases that even the load
    sigmoid: bool = False  # the router's scores are sigmoids, with such biases; else a softmax
    shared_mlp: int = bounded(
        0, least=0
    )  # hidden width of an MLP beside the experts, for all positions; 0: none
    shared_gate: bool = False  # multiplies that MLP's output by a sigmoid of each position
    route_scale: float = factor(1.0)  # of the sum of a position's experts
    groups: int = 1  # G; a position's experts are in its `top_groups` best groups
    top_groups: int = 1
    dense_layers: int = bounded(0, least=0)  # the first ones, which have an MLP in place of experts
    dense_mlp: int = bounded(0, least=0)  # hidden width of that MLP
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_kinds: tuple[AttentionType, ...] = ()
    tie_embeddings: bool = True
    _: dataclasses.KW_ONLY
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o")  # weights with an adapter

    remat: str = one_of("full", EXPERT_REMAT)

    REMAT = EXPERT_REMAT

    def __post_init__(self):
        super().__post_init__()
        check_experts(self)
        check_groups(self)

    @property
    def biased(self) -> bool:
        """Whether the choice of experts has biases."""
        return self.sigmoid or self.balance_rate > 0

    @classmethod
    def tiny(cls) -> "Config":
        """271,680 parameters. 124,224 of them active. For tests: 8 divides every sharded dim."""
        return cls(
            384, 64, 2, num_heads=16, num_kv_heads=8, head_dim=8,
            mlp=64, num_experts=8, experts_per_token=2,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """2,479,232 parameters. 857,216 of them active. The laptop default, with bytes as tokens."""
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


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "mixtral_8x7b": Config.mixtral_8x7b,
    "qwen3_30b_a3b": Config.qwen3_30b_a3b,
}


class Layer(nnx.Module):
    """transformer.Layer with experts, or experts and an MLP, in place of the MLP.

    A dense layer has the MLP alone.
    """

    def __init__(self, config: Config, dense: bool = False, *, rngs: nnx.Rngs):
        self.attention_norm, self.post_attention_norm = make_norms(config)
        self.attention = make_attention(config, rngs=rngs)
        self.mlp_norm, self.post_mlp_norm = make_norms(config)
        self.experts = None if dense else make_experts(config, config.biased, rngs=rngs)
        width = config.dense_mlp if dense else config.shared_mlp
        mlp = functools.partial(GatedMLP, config, width=width, biased=config.mlp_bias)
        self.mlp = mlp(rngs=rngs) if width else None
        gated = config.shared_gate and config.shared_mlp and not dense
        self.mlp_gate = position_gate(config, rngs=rngs) if gated else None
        self.scale = config.residual_scale

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        normed_BTD = apply_norm(self.attention_norm, x_BTD)
        out_BTD, kv = self.attention(normed_BTD, inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD, self.post_attention_norm, self.scale)
        out_BTD, metrics = feed_forward(self, apply_norm(self.mlp_norm, x_BTD), inputs)
        return add_output(x_BTD, out_BTD, self.post_mlp_norm, self.scale), kv, metrics


class MoE(Decoder):
    """Tokens in, next-token logits out. With balance_rate, a call of `loss` also moves the biases."""

    axes = EXPERT_DECODER
    embed_tokens = embed_scaled
    make_layers = dense_first.make_layers
    begin = dense_first.begin
    run_layers = dense_first.run_layers

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, Layer, rngs=rngs)

    @property
    def costs(self) -> dict[str, float]:
        return {"balance": self.config.balance_weight, "router_z": self.config.router_z_weight}

    def update_buffers(self, objective):
        if self.config.balance_rate:
            even_load(objective, self.config.balance_rate, self.layers)


complete = functools.partial(complete_tables, EXPERT_DECODER.logical_axes)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(expert_rules())
