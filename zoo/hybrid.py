"""Hybrids: decoders of layers with a state or short convolutions, and few layers that attend.

Each layer is one sublayer, x + f(norm(x)), and `Config.pattern` says which f, a letter a layer:

    M  Mamba-2 (Dao & Gu 2024; mamba.py), whose state doesn't grow with T
    P  attention and Mamba-2 side by side, which read one input and are added up (Falcon-H1)
    C  a gated short convolution (LFM2; short_convolution.py)
    K  Kimi's delta attention, whose channels decay one by one (Kimi Linear; kimi_delta.py)
    D  a gated delta network (OLMo hybrid; delta.py)
    *  attention: grouped queries, with or without rotary embeddings; or latent attention (kv_latent)
    -  an MLP: SwiGLU, or squared ReLU without a gate
    +  an MLP with the norms of layers that attend (OLMo hybrid)
    E  experts, with or without an MLP beside them, of the same kind as the MLPs; they may compute
       a latent (Nemotron 3 Super; experts/latent.py)

So Nemotron-H, Nemotron 3, Granite 4, Falcon-H1, LFM2, Kimi Linear and OLMo hybrid are one program.
Nemotron's layers are counted like this; the others count a layer and the MLP or the experts after it
as one. A pattern needs no period: stretches.py.

Shapes: B batch, T positions, D embed, F mlp, E experts, V vocab, L layers; mamba.py has those of Mamba-2.

    model = Hybrid(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)  # on a mesh: see transformer.py
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from .core.config import bounded, factor, one_of
from .core.decoder import Decoder
from .core.layers import AttentionType, GatedMLP, RopeScaling, add_output
from .core.sharding import Rules, complete_tables
from .experts.expert_strategies import EXPERT_DECODER, expert_rules
from .experts.latent import LatentExperts
from .experts.mixture import EXPERT_REMAT, GatedExperts, check_experts, even_load, feed_forward
from .options import stretches, unlike_layers
from .options.cache import ATTENTION, SIDE_BY_SIDE
from .options.llama_options import (
    NORMS, LlamaOptions, embed_scaled, make_attention, make_norms,
)  # fmt: skip
from .parts.gelu import PlainMLP, squared_relu
from .parts.latent_attention import LatentAttention, with_latents
from .parts.norms import apply_norm
from .recurrent.delta import GatedDelta
from .recurrent.kimi_delta import KimiDelta
from .recurrent.mamba import Mamba2, scaled
from .recurrent.short_convolution import ShortConvolution
from .recurrent.state import KEY_HEADS, with_states

MAMBA, CONVOLUTION, KIMI, DELTA = "mamba", "convolution", "kimi_delta", "delta"
MLP, MLP_AFTER, EXPERTS = "mlp", "mlp_after_attention", "experts"
STACKS = {
    **{"M": MAMBA, "P": SIDE_BY_SIDE, "C": CONVOLUTION, "K": KIMI, "D": DELTA, "*": ATTENTION},
    **{"-": MLP, "+": MLP_AFTER, "E": EXPERTS},
}
ATTENDS = "*P"
ACTIVATIONS = ("swiglu", "relu2")


@dataclasses.dataclass(frozen=True)
class Config(LlamaOptions):
    """The architecture, with LlamaOptions. moe.Config explains the fields without a comment."""

    vocab_size: int
    embed: int
    num_layers: int  # sublayers: an MLP counts as one
    num_heads: int  # of attention
    num_kv_heads: int
    head_dim: int
    mlp: int  # hidden width of an MLP, or of one expert
    pattern: str  # a letter for each layer, repeated over the depth
    mamba_heads: int = 1
    mamba_groups: int = 1  # of heads that share B and C; divides mamba_heads
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    conv_width: int = 4  # W, positions that a convolution sees
    conv_bias: bool = True  # of Mamba-2's convolution
    least_step: float = 0.0  # of Mamba-2: the least Δ
    mamba_norm: bool = True  # a gated norm of its output; False: the gate alone
    # Factors of Mamba-2's gate, x, B, C and Δ as projected (Falcon-H1, as the next four); (): none.
    mamba_scales: tuple[float, ...] = ()
    mamba_out_scale: float = factor(1.0)  # in P: of Mamba-2's output
    attention_out_scale: float = factor(1.0)  # in P: of attention's output
    key_scale: float = factor(1.0)  # in P: of keys
    mlp_scales: tuple[float, ...] = ()  # of SwiGLU: of the gate before silu, and of the output
    delta_heads: int = 1  # of K and D: heads of values
    delta_key_heads: int = 1  # of D: of queries and keys; divides delta_heads
    delta_key_dim: int = 64
    delta_value_dim: int = 64
    delta_most_write: float = factor(1.0)  # of D: 2 lets a state's eigenvalues be negative
    delta_norm_eps: float | None = None  # of D's norm; None: norm_eps
    kv_latent: int = bounded(0, least=0)  # of latent attention; 0: grouped queries
    q_latent: int = bounded(0, least=0)  # of its queries, 0: one matrix
    shared_key_dim: int = bounded(0, least=0)  # of a key that its heads share; part of head_dim
    value_dim: int = bounded(0, least=0)  # of its values
    attention_norms: str = one_of("", ("", *NORMS))  # norms of * and +; "": norms
    activation: str = one_of("swiglu", ACTIVATIONS)  # of MLPs and experts
    num_experts: int = bounded(0, least=0)
    experts_per_token: int = bounded(0, least=0)
    expert_latent: int = bounded(0, least=0)  # width of what experts read and write; 0: embed
    shared_mlp: int = bounded(0, least=0)  # hidden width of an MLP beside the experts; 0: none
    dense_mlp: int = bounded(0, least=0)  # hidden width of MLPs of other layers; 0: mlp
    capacity: float | None = 1.25
    normalize: bool = True
    sigmoid: bool = False
    route_scale: float = factor(1.0)
    balance_weight: float = 1e-3
    balance_rate: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float | None = None  # None: no rotary embeddings
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    tie_embeddings: bool = True
    _: dataclasses.KW_ONLY
    lora_targets: tuple[str, ...] = (
        *("q", "k", "v", "o", "gate", "up", "down"), *("x", "b", "c", "step"),
        *("q_down", "q_up", "kv_down", "kv_up"), *("latent_down", "latent_up"),
    )  # fmt: skip

    remat: str = one_of("full", EXPERT_REMAT)

    REMAT = EXPERT_REMAT
    carries_state = True

    @property
    def nope_dim(self) -> int:
        """Of latent attention: of a head's own part of a key."""
        return self.head_dim - self.shared_key_dim

    @property
    def rope_dim(self) -> int:
        return self.shared_key_dim

    @property
    def order(self) -> str:
        """The letter of every layer."""
        return (self.pattern * self.num_layers)[: self.num_layers]

    @property
    def period(self) -> tuple[str, ...]:
        """The stack of each layer of the pattern."""
        return tuple(STACKS[letter] for letter in self.pattern)

    @property
    def attention_kinds(self) -> tuple[AttentionType, ...]:
        return (AttentionType(self.sliding_window, self.rope_theta, self.rope_scaling),)

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        (attends,) = self.attention_kinds
        other = AttentionType(None, None)
        return tuple(attends if letter in ATTENDS else other for letter in self.pattern)

    def __post_init__(self):
        if unknown := {*self.pattern} - {*STACKS}:
            raise ValueError(
                f"pattern={self.pattern!r} has {min(unknown)!r}, which is not one of {' '.join(STACKS)}"
            )
        if not {*self.pattern} & {*ATTENDS}:
            raise ValueError(f"pattern={self.pattern!r} has no layer that attends, * or P")
        for name, count in (("mamba_scales", 5), ("mlp_scales", 2)):
            scales = tuple(getattr(self, name))  # saved configs have lists
            object.__setattr__(self, name, scales)
            if len(scales) not in (0, count):
                raise ValueError(f"{name} has {len(scales)} factors, not {count} or none")
        if self.mlp_scales and (self.activation != "swiglu" or self.mlp_bias):
            raise ValueError("mlp_scales need activation='swiglu' without mlp_bias")
        super().__post_init__()
        # The shortest pattern of this order: equal models have equal Configs.
        order = self.order
        sizes = range(1, len(order) + 1)
        size = next(size for size in sizes if order[size:] == order[:-size])
        if len(self.pattern) <= len(order):
            object.__setattr__(self, "pattern", order[:size])
        if self.num_layers < len(self.pattern):
            raise ValueError(
                f"num_layers={self.num_layers} is less than the {len(self.pattern)} layers of pattern"
            )
        if self.mamba_heads % self.mamba_groups:
            raise ValueError(
                f"mamba_heads={self.mamba_heads} is not divisible by mamba_groups={self.mamba_groups}"
            )
        if self.delta_heads % self.delta_key_heads:
            raise ValueError(
                f"delta_heads={self.delta_heads} is not divisible by "
                f"delta_key_heads={self.delta_key_heads}"
            )
        if self.kv_latent:
            check_latents(self)
        if self.conv_width < 2:
            raise ValueError(f"conv_width={self.conv_width} must be ≥ 2")
        has_experts = "E" in self.pattern
        if has_experts != (self.num_experts > 0):
            raise ValueError(
                f"num_experts={self.num_experts} and pattern={self.pattern!r} "
                f"with{'' if has_experts else 'out'} E exclude each other"
            )
        if has_experts:
            check_experts(self)

    @classmethod
    def tiny(cls) -> "Config":
        """326,560 parameters. 252,832 of them active. For tests: 8 divides every sharded dim."""
        return cls(
            384, 64, 8, num_heads=16, num_kv_heads=8, head_dim=8, mlp=32, pattern="M*CE",
            mamba_heads=16, mamba_groups=8, mamba_head_dim=12, mamba_state_dim=8, conv_width=3,
            num_experts=8, experts_per_token=2, shared_mlp=64, rope_theta=1e4,
            # See qwen3_next.Config.tiny: norms of small numbers amplify rounding.
            norm_eps=0.1,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """992,432 parameters. The laptop default, with bytes as tokens."""
        return cls(
            384, 128, 8, num_heads=8, num_kv_heads=8, head_dim=16, mlp=352, pattern="M-C-M-*-",
            mamba_heads=8, mamba_groups=4, mamba_head_dim=32, mamba_state_dim=32, remat="dots",
        )  # fmt: skip

    @classmethod
    def nemotron_h_8b(cls) -> "Config":
        """8,100,852,736 parameters. Nemotron-H 8B."""
        pattern = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
        return cls(
            131_072, 4_096, 52, num_heads=32, num_kv_heads=8, head_dim=128, mlp=21_504,
            pattern=pattern, mamba_heads=128, mamba_groups=8, activation="relu2",
            least_step=1e-3, tie_embeddings=False,
        )  # fmt: skip


def check_latents(config: Config) -> None:
    """Raises ValueError if a Config's latent attention is invalid."""
    if not 0 < config.shared_key_dim < config.head_dim or not config.value_dim:
        raise ValueError(
            f"kv_latent={config.kv_latent} needs value_dim ≥ 1 and shared_key_dim between 1 and "
            f"head_dim={config.head_dim}; they are {config.value_dim} and {config.shared_key_dim}"
        )
    if "P" in config.pattern or config.num_kv_heads != config.num_heads:
        raise ValueError(
            f"kv_latent={config.kv_latent} needs num_kv_heads={config.num_heads} and no P in the "
            f"pattern; they are {config.num_kv_heads} and {config.pattern!r}"
        )
    names = ("rope_theta", "qk_norm", "qkv_bias", "o_bias", "attention_scale", "query_growth")
    names = (*names, "sliding_window")
    if unused := [name for name in names if getattr(config, name)]:
        raise ValueError(f"kv_latent and {unused[0]} exclude each other")


SIZES = {"tiny": Config.tiny, "small": Config.small, "nemotron_h_8b": Config.nemotron_h_8b}

AXES = with_latents(with_states(EXPERT_DECODER))


class Layer(nnx.Module):
    """x + f(norm(x)): f is a mixer, an MLP or experts; config.norms may move or double the norm."""

    def __init__(self, config: Config, stack: str, *, rngs: nnx.Rngs):
        attends = stack in (ATTENTION, MLP_AFTER)
        self.norm, self.post_norm = make_norms(config, config.attention_norms if attends else "")
        delta = functools.partial(
            GatedDelta, most_write=config.delta_most_write, norm_eps=config.delta_norm_eps
        )
        mixers = {
            MAMBA: Mamba2,
            SIDE_BY_SIDE: SideBySide,
            CONVOLUTION: ShortConvolution,
            KIMI: KimiDelta,
            DELTA: delta,
            ATTENTION: LatentAttention if config.kv_latent else make_attention,
        }
        self.mixer: Any = mixers[stack](config, rngs=rngs) if stack in mixers else None
        self.experts = make_routed(config, rngs=rngs) if stack == EXPERTS else None
        dense = config.dense_mlp or config.mlp
        width = {MLP: dense, MLP_AFTER: dense, EXPERTS: config.shared_mlp}.get(stack)
        self.mlp = make_mlp(config, width, rngs=rngs) if width else None
        self.mlp_gate = None
        self.scale = config.residual_scale

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        normed_BTD = apply_norm(self.norm, x_BTD)
        kept, metrics = None, {}
        if self.mixer is not None:
            out_BTD, kept = self.mixer(normed_BTD, inputs, kind, cache_index)
        else:
            out_BTD, metrics = feed_forward(self, normed_BTD, inputs)
        return add_output(x_BTD, out_BTD, self.post_norm, self.scale), kept, metrics


def make_routed(config: Config, *, rngs: nnx.Rngs) -> GatedExperts | LatentExperts:
    """Experts with config.activation, whose choice has biases as moe.Config says."""
    experts = LatentExperts if config.expert_latent else GatedExperts
    return experts(
        config,
        biased=config.sigmoid or config.balance_rate > 0,
        normalize=config.normalize,
        sigmoid=config.sigmoid,
        scale=config.route_scale,
        activation=None if config.activation == "swiglu" else squared_relu,
        rngs=rngs,
    )


def make_mlp(config: Config, width: int, *, rngs: nnx.Rngs) -> GatedMLP | PlainMLP:
    """An MLP with config.activation."""
    if config.activation == "swiglu":
        activation = jax.nn.silu
        if config.mlp_scales:
            activation = functools.partial(scaled_silu, config.mlp_scales)
        return GatedMLP(config, activation, width, biased=config.mlp_bias, rngs=rngs)
    return PlainMLP(config, squared_relu, width, config.mlp_bias, rngs=rngs)


def scaled_silu(scales: tuple[float, ...], gate_BTF):
    """The gate's factor is before silu; that of the output after it, since the rest is linear."""
    of_gate, of_output = scales
    return jax.nn.silu(gate_BTF * of_gate) * of_output


class SideBySide(nnx.Module):
    """Attention and Mamba-2 that read the same input; returns the weighted sum of their outputs."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.attention = make_attention(config, rngs=rngs)
        self.attention.scale *= config.key_scale
        self.mamba = Mamba2(config, rngs=rngs)

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        """Returns (output to add to the residual, (keys, values, what Mamba2 keeps))."""
        state = None if cache_index is None else cache_index.state
        attended_BTD, (k, v) = self.attention(x_BTD, inputs, kind, cache_index)
        out_BTD, kept = self.mamba(x_BTD, inputs, kind, state)
        out_BTD = scaled(out_BTD, self.config.mamba_out_scale)
        out_BTD += scaled(attended_BTD, self.config.attention_out_scale)
        return out_BTD, (k, v, kept)


class Hybrid(Decoder):
    """Tokens in, next-token logits out. A cache has keys of the layers that attend, and states.

    With balance_rate, a call of `loss` also moves the biases of the experts' choice.
    """

    axes = AXES
    embed_tokens = embed_scaled
    make_layers = unlike_layers.make_layers
    run_layers = stretches.run_layers

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, Layer, rngs=rngs)

    @property
    def costs(self) -> dict[str, float]:
        return {"balance": self.config.balance_weight} if self.config.num_experts else {}

    def update_buffers(self, objective):
        if self.config.balance_rate:
            even_load(objective, self.config.balance_rate, self.layers[EXPERTS])


complete = functools.partial(complete_tables, AXES.logical_axes)

# Strategy → logical axis → mesh axis; see strategies.py. A pipeline's stage is a number of whole
# patterns.
RULES: dict[str, Rules] = complete(expert_rules("up_latent", like_heads=(KEY_HEADS,)))
