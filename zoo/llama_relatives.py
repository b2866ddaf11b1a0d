"""Transformer with options: Llama and its relatives, such as Mistral, Qwen, OLMo, GLM-4 and Granite.

Everything that is not said here is as in transformer.py. LlamaOptions has the relatives' switches, and
ComputeOptions those that change how to compute a model. recipes/docs/architectures.md lists the models
that this covers; sizes.py has their published sizes.

Shapes: B batch, T positions, D embed, V vocab.

    model = Transformer(Config.tiny(), rngs=nnx.Rngs(0))  # on a mesh: see transformer.py
    logits_BTV = model(tokens_BT)
"""

import dataclasses
import functools

from flax import nnx

from . import transformer
from .core.decoder import Decoder
from .core.layers import AttentionType, GatedMLP, add_output
from .parts.norms import apply_norm
from .core.sharding import Rules, complete_tables
from .core.strategies import DECODER, decoder_rules
from .options.llama_options import LlamaOptions, embed_scaled, make_attention, make_norms
from .options.periods import scan_kinds


@dataclasses.dataclass(frozen=True)
class Config(LlamaOptions, transformer.Config):
    """transformer.Config with LlamaOptions."""

    _: dataclasses.KW_ONLY
    sliding_window: int | None = None  # a position sees itself and the window - 1 before it
    # For layers that differ: one period of kinds, repeated over the depth. Each kind has its own
    # window and rotary embeddings, which replace sliding_window, rope_theta and rope_scaling.
    layer_kinds: tuple[AttentionType, ...] = ()


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
    """x + attention(norm(x)), then x + mlp(norm(x)); config.norms may move or double the norms."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm, self.post_attention_norm = make_norms(config)
        self.attention = make_attention(config, rngs=rngs)
        self.mlp_norm, self.post_mlp_norm = make_norms(config)
        self.mlp = GatedMLP(config, biased=config.mlp_bias, rngs=rngs)
        self.scale = config.residual_scale

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        normed_BTD = apply_norm(self.attention_norm, x_BTD)
        out_BTD, kv = self.attention(normed_BTD, inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD, self.post_attention_norm, self.scale)
        out_BTD = self.mlp(apply_norm(self.mlp_norm, x_BTD))
        return add_output(x_BTD, out_BTD, self.post_mlp_norm, self.scale), kv, {}


class Transformer(Decoder):
    """Tokens in, next-token logits out. See the module's docstring."""

    embed_tokens = embed_scaled
    scan = scan_kinds

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, Layer, rngs=rngs)


complete = functools.partial(complete_tables, DECODER.logical_axes)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(decoder_rules())
