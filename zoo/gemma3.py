"""Gemma3: a decoder-only language model whose layers are mostly local, as in Gemma 2 and 3.

Gemma 2 (Gemma Team 2024) and 3 (Gemma Team 2025) have norms of scale 1 + w before and after each
sublayer, GeGLU (Shazeer 2020), embeddings times √D, and attention that alternates between a window
and the whole row. Gemma 3 has five local layers for each global one, a longer rotary base in global
layers, and QK-norm. Gemma 2 has one local layer for each global one, and soft caps on scores and
logits (Bello et al. 2017). Everything else is as in transformer.py.

Shapes: B batch, T positions, D embed, N heads, K kv heads, H head dim, F mlp, V vocab, L layers.

    model = Gemma3(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)
    total, count, metrics = model.loss(tokens_BT, targets_BT)

transformer.py shows how to use it on a mesh. RULES are at the end.
"""

import dataclasses
import functools
import math

import jax
from flax import nnx

from .options.general_attention import GeneralAttention
from .options.compute_options import ComputeOptions
from .core.decoder import Decoder
from .core.config import factor
from .core.layers import AttentionType, GatedMLP, RMSNorm, RopeScaling, add_output
from .kernels.shared import soft_cap
from .options.periods import scan_kinds
from .options.rope_scaling import Linear
from .core.sharding import Rules, complete_tables
from .core.strategies import DECODER, decoder_rules


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture. transformer.Config explains the fields without a comment."""

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # need not be embed / num_heads
    mlp: int  # F, hidden width of the GeGLU
    _: dataclasses.KW_ONLY
    # One period of layers, repeated over the depth: local ones, with a window, and a global one.
    layer_kinds: tuple[AttentionType, ...]
    query_scalar: int  # scores are divided by its square root; head_dim in most sizes
    qk_norm: bool = True  # Gemma 3
    soft_cap: float | None = factor(None)  # of scores, in Gemma 2; some kernels lack it
    logits_soft_cap: float | None = factor(None)  # in Gemma 2
    norm_eps: float = 1e-6
    tie_embeddings: bool = True

    def __post_init__(self):
        if not self.layer_kinds:
            raise ValueError("layer_kinds is empty; it needs at least one AttentionType")
        super().__post_init__()

    def finish_logits(self, logits: jax.Array) -> jax.Array:
        return soft_cap(logits, self.logits_soft_cap)

    @classmethod
    def tiny(cls) -> "Config":
        """222,336 parameters. For tests: every sharded dim is divisible by 8."""
        local = AttentionType(7, 1e4)
        wide = AttentionType(None, 1e6, Linear(8.0))
        return cls(
            384, 64, 4, num_heads=16, num_kv_heads=8, head_dim=8, mlp=128,
            layer_kinds=(local, wide), query_scalar=12,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """788,736 parameters. The laptop default, with bytes as tokens."""
        return cls(
            384, 128, 4, num_heads=8, num_kv_heads=4, head_dim=16, mlp=352,
            layer_kinds=(AttentionType(32, 1e4),) * 3 + (AttentionType(None, 1e6),), query_scalar=16, remat="dots",
        )  # fmt: skip

    @classmethod
    def gemma3_1b(cls) -> "Config":
        """999,885,952 parameters. Gemma 3 1B."""
        return cls(
            262_144, 1_152, 26, num_heads=4, num_kv_heads=1, head_dim=256, mlp=6_912,
            layer_kinds=gemma3_period(512), query_scalar=256,
        )  # fmt: skip

    @classmethod
    def gemma3_4b(cls) -> "Config":
        """3,880,263,168 parameters. The text model of Gemma 3 4B."""
        return cls(
            262_208, 2_560, 34, num_heads=8, num_kv_heads=4, head_dim=256, mlp=10_240,
            layer_kinds=gemma3_period(1_024, Linear(8.0)), query_scalar=256,
        )  # fmt: skip

    @classmethod
    def gemma3_12b(cls) -> "Config":
        """11,766,034,176 parameters. The text model of Gemma 3 12B."""
        return cls(
            262_208, 3_840, 48, num_heads=16, num_kv_heads=8, head_dim=256, mlp=15_360,
            layer_kinds=gemma3_period(1_024, Linear(8.0)), query_scalar=256,
        )  # fmt: skip

    @classmethod
    def gemma3_27b(cls) -> "Config":
        """27,009,346,304 parameters. The text model of Gemma 3 27B."""
        return cls(
            262_208, 5_376, 62, num_heads=32, num_kv_heads=16, head_dim=128, mlp=21_504,
            layer_kinds=gemma3_period(1_024, Linear(8.0)), query_scalar=168,
        )  # fmt: skip

    @classmethod
    def gemma2_2b(cls) -> "Config":
        """2,614,341,888 parameters. Gemma 2 2B."""
        return cls(
            256_000, 2_304, 26, num_heads=8, num_kv_heads=4, head_dim=256, mlp=9_216,
            query_scalar=256, **GEMMA2,
        )  # fmt: skip

    @classmethod
    def gemma2_9b(cls) -> "Config":
        """9,241,705,984 parameters. Gemma 2 9B."""
        return cls(
            256_000, 3_584, 42, num_heads=16, num_kv_heads=8, head_dim=256, mlp=14_336,
            query_scalar=256, **GEMMA2,
        )  # fmt: skip

    @classmethod
    def gemma2_27b(cls) -> "Config":
        """27,227,128,320 parameters. Gemma 2 27B."""
        return cls(
            256_000, 4_608, 46, num_heads=32, num_kv_heads=16, head_dim=128, mlp=36_864,
            query_scalar=144, **GEMMA2,
        )  # fmt: skip


GEMMA2 = {
    "layer_kinds": (AttentionType(4_096, 1e4), AttentionType(None, 1e4)),
    "qk_norm": False,
    "soft_cap": 50.0,
    "logits_soft_cap": 30.0,
}

SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "1b": Config.gemma3_1b,
    "4b": Config.gemma3_4b,
    "12b": Config.gemma3_12b,
    "27b": Config.gemma3_27b,
    "gemma2_2b": Config.gemma2_2b,
    "gemma2_9b": Config.gemma2_9b,
    "gemma2_27b": Config.gemma2_27b,
}


class Layer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); four different norms."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, eps=config.norm_eps, zero_centered=True)
        self.attention_norm = norm(config.embed)
        self.attention = GeneralAttention(
            config,
            norm=norm if config.qk_norm else None,
            soft_cap=config.soft_cap,
            scale=math.sqrt(config.head_dim / config.query_scalar),
            rngs=rngs,
        )
        self.post_attention_norm = norm(config.embed)
        self.mlp_norm = norm(config.embed)
        self.mlp = GatedMLP(config, jax.nn.gelu, rngs=rngs)  # by tanh
        self.post_mlp_norm = norm(config.embed)

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD, self.post_attention_norm)
        out_BTD = self.mlp(self.mlp_norm(x_BTD))
        return add_output(x_BTD, out_BTD, self.post_mlp_norm), kv, {}


class Gemma3(Decoder):
    """Tokens in, next-token logits out, within ±logits_soft_cap if there is one."""

    scan = scan_kinds

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        final_norm = RMSNorm(config.embed, config.norm_eps, zero_centered=True)
        super().__init__(config, Layer, final_norm, rngs=rngs)

    def embed_tokens(self, tables, tokens_BT, inputs) -> jax.Array:
        return super().embed_tokens(tables, tokens_BT, inputs) * math.sqrt(self.config.embed)


def gemma3_period(window: int, scaling: RopeScaling | None = None) -> tuple[AttentionType, ...]:
    """Gemma 3's five local layers and a global one."""
    return (*[AttentionType(window, 1e4)] * 5, AttentionType(None, 1e6, scaling))


complete = functools.partial(complete_tables, DECODER.logical_axes)

# Strategy → logical axis → mesh axis; costs: strategies.py. On a ring, a local layer visits only the
# devices that hold its window. A pipeline's stage is a number of whole periods: 12b's eight fit 2, 4
# or 8 stages.
RULES: dict[str, Rules] = complete(decoder_rules())
