"""Qwen3-Next and Qwen3.5: decoders in which most layers carry a state instead of attending.

Three of four layers are gated delta networks (Yang et al. 2024; delta.py), whose state doesn't grow
with T. Each fourth one attends: grouped queries with QK-norm, gated outputs (Qiu et al. 2025), and
rotary embeddings on a part of each head (Su et al. 2021). Norms have the scale 1 + w. Layers have
experts and one shared expert with a gate (Qwen3-Next, Qwen3.5 MoE), or an MLP (Qwen3.5).

Shapes: B batch, T positions, D embed, N heads, K kv heads, H head dim, F mlp, E experts, V vocab, L
layers; delta.py has those of the delta networks.

    model = Qwen3Next(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)  # on a mesh: see transformer.py
"""

import dataclasses
import functools
from typing import Any

from flax import nnx

from .options.general_attention import GeneralAttention
from .options.compute_options import ComputeOptions
from .core.config import Bounds, bounded, one_of
from .core.decoder import Decoder
from .recurrent.delta import GatedDelta
from .recurrent.state import KEY_HEADS, with_states
from .experts.mixture import EXPERT_REMAT, GatedExperts, check_experts, feed_forward, position_gate
from .core.layers import GatedMLP, AttentionType, RMSNorm, RopeScaling, add_output
from .core.sharding import Rules, complete_tables
from .options import unlike_layers
from .options.mtp import MTPHead, objective_with_mtp
from .options.cache import ATTENTION
from .experts.expert_strategies import EXPERT_DECODER, expert_rules

DELTA = "delta"  # the stack of the layers with a state


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture. moe.Config explains the fields without a comment."""

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int  # of attention
    num_kv_heads: int
    head_dim: int
    rotary_dims: int = dataclasses.field(
        metadata={"bounds": Bounds(least=0)}
    )  # the first dims of a head, which rotate; 0: all
    delta_heads: int  # of values
    delta_key_heads: int  # of queries and keys; divides delta_heads
    delta_key_dim: int
    delta_value_dim: int
    mlp: int  # hidden width of the MLP, or of one expert
    num_experts: int = bounded(0, least=0)  # 0: an MLP
    experts_per_token: int = bounded(0, least=0)
    shared_mlp: int = bounded(0, least=0)  # hidden width of the shared expert; 0: none
    attention_every: int = 4  # each layer of this number attends
    conv_width: int = 4  # W, positions that the convolution before the delta rule sees
    capacity: float | None = 1.25  # None: dropless, as the published models
    normalize: bool = True
    balance_weight: float = 1e-3
    mtp_depth: int = one_of(0, (0, 1))  # layers that predict the second-next token, 0 or 1
    mtp_weight: float = 0.3  # weight of the second-next token's loss
    norm_eps: float = 1e-6
    rope_theta: float = 1e7
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # of attention; the published models have none
    tie_embeddings: bool = False
    _: dataclasses.KW_ONLY
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")

    remat: str = one_of("full", EXPERT_REMAT)

    ROTARY = "rotary_dims"
    REMAT = EXPERT_REMAT
    carries_state = True

    @property
    def rotary_dim(self) -> int:
        return self.rotary_dims or self.head_dim

    @property
    def period(self) -> tuple[str, ...]:
        return (DELTA,) * (self.attention_every - 1) + (ATTENTION,)

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        attends = AttentionType(self.sliding_window, self.rope_theta, self.rope_scaling)
        return (AttentionType(None, None),) * (self.attention_every - 1) + (attends,)

    def __post_init__(self):
        super().__post_init__()
        if self.num_experts:
            check_experts(self)
        if self.delta_heads % self.delta_key_heads:
            raise ValueError(
                f"delta_heads={self.delta_heads} is not divisible by "
                f"delta_key_heads={self.delta_key_heads}"
            )
        if self.rotary_dims > self.head_dim:
            raise ValueError(
                f"rotary_dims={self.rotary_dims} is more than head_dim={self.head_dim}"
            )
        if self.attention_every < 2:
            raise ValueError(f"attention_every={self.attention_every} must be ≥ 2")
        if self.conv_width < 2:
            raise ValueError(f"conv_width={self.conv_width} must be ≥ 2")
        if self.num_layers < self.attention_every:
            raise ValueError(
                f"num_layers={self.num_layers} is less than attention_every={self.attention_every}, "
                "so no layer would attend"
            )

    @classmethod
    def tiny(cls) -> "Config":
        """476,728 parameters. 329,272 of them active. For tests: 8 divides every sharded dim."""
        return cls(
            384, 64, 4, num_heads=16, num_kv_heads=8, head_dim=8, rotary_dims=4, delta_heads=16,
            delta_key_heads=8, delta_key_dim=16, delta_value_dim=12, mlp=32, num_experts=8,
            experts_per_token=2, shared_mlp=64, attention_every=2, conv_width=3,
            # A document's first output is one value times q · k, which may be near 0; norming it then
            # amplifies rounding. With the published 1e-6, gradients on two meshes differ by 2e-5 in
            # float32 and by 3e-14 in float64.
            norm_eps=0.1,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """875,800 parameters. The laptop default, with bytes as tokens."""
        return cls(
            384, 128, 4, num_heads=8, num_kv_heads=8, head_dim=16, rotary_dims=8, delta_heads=4,
            delta_key_heads=4, delta_key_dim=16, delta_value_dim=32, mlp=352, remat="dots",
            tie_embeddings=True,
        )  # fmt: skip

    @classmethod
    def qwen3_next_80b_a3b(cls) -> "Config":
        """79,674,391,296 parameters. 3,874,929,408 of them active. Qwen3-Next 80B-A3B."""
        return cls(
            151_936, 2_048, 48, num_heads=16, num_kv_heads=2, head_dim=256, rotary_dims=64,
            delta_heads=32, delta_key_heads=16, delta_key_dim=128, delta_value_dim=128, mlp=512,
            num_experts=512, experts_per_token=10, shared_mlp=512, capacity=None,
            remat="dispatched",
        )  # fmt: skip

    @classmethod
    def qwen35_9b(cls) -> "Config":
        """8,953,803,264 parameters. The text model of Qwen3.5 9B."""
        # Both sizes of Qwen3.5 are the defaults of transformers' classes, Qwen3_5TextConfig and
        # Qwen3_5MoeTextConfig, except rope_theta, which is Qwen3-Next's here; a folder states its own.
        return cls(
            248_320, 4_096, 32, num_heads=16, num_kv_heads=4, head_dim=256, rotary_dims=64,
            delta_heads=32, delta_key_heads=16, delta_key_dim=128, delta_value_dim=128, mlp=12_288,
        )  # fmt: skip

    @classmethod
    def qwen35_35b_a3b(cls) -> "Config":
        """34,660,610,688 parameters. 3,454,988,928 of them active. Qwen3.5 35B-A3B, its text model."""
        return cls(
            248_320, 2_048, 40, num_heads=16, num_kv_heads=2, head_dim=256, rotary_dims=64,
            delta_heads=32, delta_key_heads=16, delta_key_dim=128, delta_value_dim=128, mlp=512,
            num_experts=256, experts_per_token=8, shared_mlp=512, capacity=None,
            remat="dispatched",
        )  # fmt: skip


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "80b_a3b": Config.qwen3_next_80b_a3b,
    "qwen35_9b": Config.qwen35_9b,
    "qwen35_35b_a3b": Config.qwen35_35b_a3b,
}

AXES = with_states(EXPERT_DECODER)


class Layer(nnx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)), or x + experts(norm(x)) + shared expert(norm(x)).
    The mixer is attention or a gated delta network.
    """

    def __init__(self, config: Config, stack: str, *, rngs: nnx.Rngs):
        D = config.embed
        norm = functools.partial(RMSNorm, eps=config.norm_eps, zero_centered=True)
        self.mixer_norm = norm(D)
        if stack == ATTENTION:
            self.mixer: Any = GeneralAttention(config, norm=norm, gated=True, rngs=rngs)
        else:
            self.mixer = GatedDelta(config, rngs=rngs)
        self.mlp_norm = norm(D)
        routed = functools.partial(GatedExperts, biased=False, normalize=config.normalize)
        self.experts = routed(config, rngs=rngs) if config.num_experts else None
        width = config.shared_mlp if config.num_experts else config.mlp
        self.mlp = GatedMLP(config, width=width, rngs=rngs) if width else None
        gated = config.num_experts and config.shared_mlp
        self.mlp_gate = position_gate(config, rngs=rngs) if gated else None

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        out_BTD, kept = self.mixer(self.mixer_norm(x_BTD), inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD)
        out_BTD, metrics = feed_forward(self, self.mlp_norm(x_BTD), inputs)
        return add_output(x_BTD, out_BTD), kept, metrics


class Qwen3Next(Decoder):
    """Tokens in, next-token logits out. A cache has keys of the layers that attend, and states. With
    mtp_depth, the objective adds mtp_weight · mtp, the loss at the token after the next.
    """

    axes = AXES
    make_layers = unlike_layers.make_layers
    run_layers = unlike_layers.run_layers
    objective = objective_with_mtp
    mtp: MTPHead | None

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, eps=config.norm_eps, zero_centered=True)
        super().__init__(config, Layer, norm(config.embed), rngs=rngs)
        layer = functools.partial(Layer, stack=ATTENTION)
        self.mtp = MTPHead(config, layer, norm, rngs=rngs) if config.mtp_depth else None

    @property
    def costs(self) -> dict[str, float]:
        return {"balance": self.config.balance_weight} if self.config.num_experts else {}


complete = functools.partial(complete_tables, AXES.logical_axes)

# Strategy → logical axis → mesh axis; see strategies.py. A pipeline's stage is a number of whole
# periods: the twelve of 80b_a3b fit 2, 3, 4, 6 or 12 stages.
RULES: dict[str, Rules] = complete(expert_rules(like_heads=(KEY_HEADS,)))
