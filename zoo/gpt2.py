"""GPT-2: the decoder-only language model of Radford et al. (2019).

It has LayerNorm before each sublayer (Ba et al. 2016), learned position embeddings, attention with
as many kv heads as heads, an MLP with GELU, and biases everywhere. The token table unembeds too.

Shapes: B batch, T positions, D embed, N heads, H head dim, F mlp, V vocab, L layers, P learned
positions.

    model = GPT2(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)

RULES, at the end of this file, shard it on a mesh; transformer.py shows how.
"""

import dataclasses
import functools

import jax.numpy as jnp
from flax import nnx

from .options.general_attention import GeneralAttention
from .options.compute_options import ComputeOptions
from .options.periods import scan_kinds
from .core.decoder import Decoder
from .parts.gelu import GELU, PlainMLP
from .parts.norms import layer_norm
from .core.layers import AttentionType, add_output
from .core.sharding import Rules, complete_tables, constrain, param
from .core.strategies import DECODER, decoder_rules
from .core.vocabulary import look_up


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture. transformer.Config explains the fields without a comment."""

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    mlp: int  # F, hidden width of the MLP
    max_positions: int = 1_024  # P, most tokens of a row
    norm_eps: float = 1e-5
    layer_kinds: tuple[AttentionType, ...] = (
        AttentionType(window=None, rope_theta=None),
    )  # one for all layers
    _: dataclasses.KW_ONLY
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "up", "down")

    learns_positions = True

    def __post_init__(self):
        if self.embed % self.num_heads:
            raise ValueError(f"embed={self.embed} is not divisible by num_heads={self.num_heads}")
        super().__post_init__()

    @property
    def head_dim(self) -> int:
        return self.embed // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @classmethod
    def tiny(cls) -> "Config":
        """132,864 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(384, 64, 2, num_heads=8, mlp=256, max_positions=128)

    @classmethod
    def small(cls) -> "Config":
        """973,568 parameters. The laptop default, with bytes as tokens."""
        small = cls(384, 128, 4, num_heads=8, mlp=512)
        return dataclasses.replace(small, remat="dots")

    @classmethod
    def gpt2_124m(cls) -> "Config":
        """124,439,808 parameters. GPT-2, the smallest of four."""
        return cls(50_257, 768, 12, num_heads=12, mlp=3_072)

    @classmethod
    def gpt2_medium(cls) -> "Config":
        """354,823,168 parameters. GPT-2 medium."""
        return cls(50_257, 1_024, 24, num_heads=16, mlp=4_096)

    @classmethod
    def gpt2_large(cls) -> "Config":
        """774,030,080 parameters. GPT-2 large."""
        return cls(50_257, 1_280, 36, num_heads=20, mlp=5_120)

    @classmethod
    def gpt2_xl(cls) -> "Config":
        """1,557,611,200 parameters. GPT-2 XL."""
        return cls(50_257, 1_600, 48, num_heads=25, mlp=6_400)


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "124m": Config.gpt2_124m,
    "medium": Config.gpt2_medium,
    "large": Config.gpt2_large,
    "xl": Config.gpt2_xl,
}

# Axes that rules map; a weight's axis at rest → in use; dims that need not divide evenly.
AXES = dataclasses.replace(
    DECODER,
    logical_axes=DECODER.logical_axes | {"positions": "both"},  # P
)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.embed, config.norm_eps, config.dtype)
        self.attention_norm = norm()
        self.attention = GeneralAttention(config, biases=("q", "k", "v", "o"), rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = PlainMLP(config, GELU["tanh"], rngs=rngs)

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD)
        x_BTD = add_output(x_BTD, self.mlp(self.mlp_norm(x_BTD)))
        # Rules may split biases; the residual stream stays whole.
        return constrain(x_BTD, "batch", "residual_seq", "act_embed"), kv, {}


class GPT2(Decoder):
    """Tokens in, next-token logits out.

    Raises ValueError for rows of more than config.max_positions tokens.
    """

    axes = AXES
    scan = scan_kinds

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        final_norm = layer_norm(config.embed, config.norm_eps, config.dtype)
        super().__init__(config, Layer, final_norm, rngs=rngs)

    def make_tables(self, config: Config, rngs: nnx.Rngs) -> None:
        super().make_tables(config, rngs)
        shape = (config.max_positions, config.embed)
        self.positions = param(rngs, shape, ("positions", "embed"), config.embed**-0.5)

    def embed_tokens(self, tables, tokens_BT, inputs):
        """The sum of the embeddings of tokens and of their positions: [B, T, D]."""
        B, T = tokens_BT.shape
        P = self.config.max_positions
        if T > P:
            raise ValueError(f"a row has {T} tokens, and the model has learned {P} positions")
        # Left padding has positions below 0.
        number_BT = jnp.broadcast_to(jnp.clip(inputs.positions_BT, 0, P - 1), (B, T))
        learned_RPD = self.config.use_table(self.positions)
        return look_up(tables[0], tokens_BT) + look_up(learned_RPD, number_BT)


complete = functools.partial(complete_tables, AXES.logical_axes)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(decoder_rules())
