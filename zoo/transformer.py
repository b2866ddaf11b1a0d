"""Transformer: a Llama, the decoder-only language model (Grattafiori et al. 2024).

RMSNorm before each sublayer (Zhang & Sennrich 2019), rotary position embeddings (Su et al. 2021),
grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020). Layers are stacked and scanned,
so compile time does not grow with depth.

llama_relatives.py has the same model with all options: the switches of Llama's relatives, LoRA, low
precision, and what rules that split positions (`cp`) or layers (`pp`) need. Recipes use that one.

Shapes: B batch, T positions, D embed, N heads, K kv heads, H head dim, F mlp, V vocab, L layers, R
shards of B and T.

Every parameter carries *logical* axis names. They have no effect until sharding rules map them to
mesh axes:

    model = Transformer(Config.tiny(), rngs=nnx.Rngs(0))             # no mesh, no rules, no context
    logits_BTV = model(tokens_BT)

    rules = RULES["fsdp"]                                            # at the end of this file
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        graph, state = nnx.split(model)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))   # each weight at rest
        logits_BTV = jax.jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens_BT)

jax.jit does not notice when the rules change: use a separate jitted function for each strategy.
"""

import dataclasses
import functools
from typing import Self

from flax import nnx

from .core.attention import Attention
from .core.config import Compute
from .core.decoder import Decoder
from .core.layers import GatedMLP, Llama3, RMSNorm, RopeScaling, add_output
from .core.sharding import Rules, complete_tables
from .core.strategies import DECODER, decoder_rules


LLAMA31 = Llama3(8.0, 1.0, 4.0, 8_192)  # from 8,192 to 131,072 positions


@dataclasses.dataclass(frozen=True)
class Config(Compute):
    """The architecture; config.Compute has the fields for how to compute it. Named sizes are
    classmethods.
    """

    vocab_size: int  # V, tokens
    embed: int  # D
    num_layers: int  # L
    num_heads: int  # N, query heads
    num_kv_heads: int  # K, key and value heads; divides num_heads
    head_dim: int  # H, even
    mlp: int  # F, hidden width of the SwiGLU
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    rope_scaling: RopeScaling | None = None  # for longer contexts
    tie_embeddings: bool = True

    @classmethod
    def tiny(cls) -> Self:
        """123,200 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(384, 64, 2, num_heads=16, num_kv_heads=8, head_dim=8, mlp=128)

    @classmethod
    def small(cls) -> Self:
        """853,120 parameters. The laptop default, with bytes as tokens."""
        small = cls(384, 128, 4, num_heads=8, num_kv_heads=8, head_dim=16, mlp=352)
        return dataclasses.replace(small, remat="dots")

    @classmethod
    def medium(cls) -> Self:
        """3,213,568 parameters. With bytes as tokens; published as transformer.stdlib_3m."""
        medium = cls(384, 256, 4, num_heads=8, num_kv_heads=8, head_dim=32, mlp=672)
        return dataclasses.replace(medium, remat="dots")

    @classmethod
    def gpt2_124m(cls) -> Self:
        """123,587,328 parameters. GPT-2's shape, vocabulary padded to a multiple of 128."""
        return cls(50_304, 768, 12, num_heads=12, num_kv_heads=12, head_dim=64, mlp=2_048)

    @classmethod
    def llama_1b(cls) -> Self:
        """1,235,814,400 parameters. Llama 3.2 1B."""
        llama = cls(128_256, 2_048, 16, num_heads=32, num_kv_heads=8, head_dim=64, mlp=8_192)
        scaling = Llama3(32.0, 1.0, 4.0, 8_192)
        return dataclasses.replace(llama, rope_theta=5e5, rope_scaling=scaling)

    @classmethod
    def llama_8b(cls) -> Self:
        """8,030,261,248 parameters. Llama 3 8B."""
        llama = cls(128_256, 4_096, 32, num_heads=32, num_kv_heads=8, head_dim=128, mlp=14_336)
        return dataclasses.replace(llama, rope_theta=5e5, tie_embeddings=False)

    @classmethod
    def llama_70b(cls) -> Self:
        """70,553,706,496 parameters. Llama 3 70B."""
        llama = cls(128_256, 8_192, 80, num_heads=64, num_kv_heads=8, head_dim=128, mlp=28_672)
        return dataclasses.replace(llama, rope_theta=5e5, tie_embeddings=False)

    @classmethod
    def llama31_8b(cls) -> Self:
        """8,030,261,248 parameters. Llama 3.1 8B, for rows of 131,072 tokens."""
        return dataclasses.replace(cls.llama_8b(), rope_scaling=LLAMA31)

    @classmethod
    def llama31_70b(cls) -> Self:
        """70,553,706,496 parameters. Llama 3.1 70B, for rows of 131,072 tokens."""
        return dataclasses.replace(cls.llama_70b(), rope_scaling=LLAMA31)

    @classmethod
    def llama31_405b(cls) -> Self:
        """405,853,388,800 parameters. Llama 3.1 405B, for rows of 131,072 tokens."""
        llama = cls(128_256, 16_384, 126, num_heads=128, num_kv_heads=8, head_dim=128, mlp=53_248)
        scaled = dataclasses.replace(llama, rope_theta=5e5, rope_scaling=LLAMA31)
        return dataclasses.replace(scaled, tie_embeddings=False)


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "medium": Config.medium,
    "124m": Config.gpt2_124m,
    "1b": Config.llama_1b,
    "8b": Config.llama_8b,
    "70b": Config.llama_70b,
    "llama31_8b": Config.llama31_8b,
    "llama31_70b": Config.llama31_70b,
    "llama31_405b": Config.llama31_405b,
}


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_eps)
        self.mlp = GatedMLP(config, rngs=rngs)

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD)
        out_BTD = self.mlp(self.mlp_norm(x_BTD))
        return add_output(x_BTD, out_BTD), kv, {}


class Transformer(Decoder):
    """Tokens in, next-token logits out. See the module's docstring."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, Layer, rngs=rngs)


complete = functools.partial(complete_tables, DECODER.logical_axes)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(decoder_rules())
