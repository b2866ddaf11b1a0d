"""MoE: a decoder-only language model whose MLPs are mixtures of experts.

A router sends each position to `experts_per_token` of `num_experts` SwiGLU experts (Shazeer et al.
2017). Experts have a limited capacity, as in GShard (Lepikhin et al. 2020), or are dropless (Gale
et al. 2022). The balance loss is Switch Transformer's (Fedus et al. 2021), the router's z-loss
ST-MoE's (Zoph et al. 2022), the balancing bias DeepSeek's (Wang et al. 2024). This covers Mixtral
and Qwen3-MoE. Everything but the experts is the same as in transformer.py.

Shapes: B batch, T positions, D embed, F hidden width of an expert, V vocab, L layers, E experts, J
experts per position.

    model = MoE(Config.tiny(), rngs=nnx.Rngs(0))  # on a mesh: see transformer.py
    objective_sum, count, figures = model.loss(tokens, targets)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention import (
    Attention, Kind, check_config, logits_in_order, positions, read_prompts, read_token,
)  # fmt: skip
from .experts import (
    EP, EXPERT_DECODER, EXPERT_FSDP, EXPERT_FSDP_CP, EXPERT_HSDP, EXPERT_REMAT, FSDP_EP, FSDP_EP_CP,
    GatedExperts, objective_and_loads, scan_experts,
)  # fmt: skip
from .layers import RMSNorm, fit_positions, look_up, stack, vocabulary, vocabulary_tables
from .sharding import Rules, complete_tables, constrain
from .strategies import CP, DP, FSDP, FSDP_CP, HSDP, PP, SP, TP


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture and how to compute it. transformer.Config explains the other fields."""

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
    matmul: str = ""
    matmul_backward: str = ""
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

REMAT = EXPERT_REMAT  # what a layer keeps for its backward pass
LOGICAL_AXES, IN_USE, UNEVEN, POSITIONS, WITHIN = EXPERT_DECODER  # see experts.py


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, norm = config.embed, functools.partial(RMSNorm, eps=config.norm_eps)
        self.attention_norm, self.mlp_norm = norm(D), norm(D)
        how = ("qkv" if config.qkv_bias else "", norm if config.qk_norm else None)
        self.attention = Attention(config, *how, rngs=rngs)
        bias = config.balance_rate > 0
        self.experts = GatedExperts(config, bias, config.normalize, rngs=rngs)

    def __call__(self, x_BTD, at, kind, past, counted_BT, capacity):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), at, kind, past)
        x_BTD = x_BTD + checkpoint_name(out_BTD, "sublayer")
        out_BTD, figures = self.experts(self.mlp_norm(x_BTD), counted_BT, capacity)
        return x_BTD + checkpoint_name(out_BTD, "sublayer"), kv, figures


class MoE(nnx.Module):
    """Tokens in, next-token logits out. Its methods are Transformer's."""

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
        router_z_weight · router_z. Arguments are Transformer.loss's.

        Returns: (sum over targets, count, aux), float32 scalars; aux has the sums and counts of
          loss, the cross entropy alone; and of the layers' means of the figures of `choose`.
        """
        total, count, aux, load_LE = objective_and_loads(self, IN_USE, tokens, targets, segment_ids)
        if self.config.balance_rate:
            step = self.config.balance_rate * jnp.sign(count - load_LE)
            self.layers.experts.bias[...] += step
        return total, count, aux

    prefill, decode = read_prompts, read_token  # as Transformer's; experts drop nothing

    def trunk(self, tokens_BT, segment_ids_BT, positions_BT=None, cache=None):
        """Transformer.trunk for experts, which drop nothing in generation."""
        tables, keep = vocabulary_tables(self), positions_BT is not None
        at = positions(self.config, tokens_BT, segment_ids_BT, positions_BT, cache)
        x_BTD, counted_BT = self.embed_tokens(tables, tokens_BT), jnp.ones_like(tokens_BT)
        given = self.layers, IN_USE, self.config
        x_BTD, (kv, _) = scan_experts(*given, x_BTD, at, counted_BT, cache and cache[:2], keep)
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
        given = self.layers, IN_USE, self.config
        x_BTD, (_, figures) = scan_experts(*given, x_BTD, at, counted_BT)
        return x_BTD, figures


complete = functools.partial(complete_tables, LOGICAL_AXES)

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
