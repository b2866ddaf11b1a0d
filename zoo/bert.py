"""BERT: an encoder of text, trained to fill masked tokens in (Devlin et al. 2019).

Every position attends to all others of its document. RoBERTa and XLM-R are the same model. With
`modern`, it is ModernBERT (Warner et al. 2024): norms before sublayers instead of after them, rotary
embeddings in place of learned positions, GeGLU, no biases, and windows in two of three layers.

A Decoder has all that remains, from the stack of layers to the loss: here the targets are the masked
tokens themselves, and no mask is causal.

Shapes: B batch, T positions, D embed, N heads, H head dim, F mlp, V vocab, L layers, P learned
positions, K classes or types of tokens.

    model = Bert(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)                # of the token at each position
    x_BTD = model.encode(tokens_BT)              # its representation
    x_BD = model.pool(tokens_BT)                 # one vector for each text

RULES, at the end of this file, shard it on a mesh; transformer.py shows how.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .options.general_attention import GeneralAttention
from .parts.classes import class_loss, dense, pool, unit
from .options.compute_options import ComputeOptions
from .core.decoder import Decoder
from .parts.gelu import GELU, PlainMLP
from .parts.norms import apply_norm, layer_norm
from .core.config import bounded, one_of
from .core.layers import (
    AttentionType, GatedMLP, add_bias, add_output, gather_positions, multiply,
)  # fmt: skip
from .options import dense_first
from .core.sharding import Rules, complete_tables, constrain, param, shards, zeros
from .core.stack import fit_rules
from .core.strategies import DECODER, decoder_rules
from .core.vocabulary import Batch, look_up, table_copies, unembed, vocabulary


TASKS = ("fill", "embed", "classify")
POOLINGS = ("cls", "mean", "pooler")


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture. transformer.Config explains the fields without a comment."""

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    mlp: int  # F, hidden width of the MLP
    max_positions: int = bounded(512, least=0)  # P, most tokens of a row; 0: no learned positions
    token_types: int = bounded(
        2, least=0
    )  # kinds of tokens, such as those of a first and a second text; 0: none
    norm_eps: float = 1e-12
    layer_kinds: tuple[AttentionType, ...] = (AttentionType(window=None, rope_theta=None),)
    modern: bool = False  # norms come first, MLPs are gated, no biases: ModernBERT
    task: str = one_of(
        "fill", TASKS
    )  # what the head is for: fill (masked tokens), embed (no head) or classify
    pooling: str = one_of(
        "cls", POOLINGS
    )  # a text's vector: cls (its first position), mean, or pooler (BERT's own)
    normalize: bool = False  # whether vectors of texts have length 1
    labels: tuple[str, ...] = ()  # names of the classes

    tie_embeddings = True
    causal = False

    def __post_init__(self):
        if self.embed % self.num_heads:
            raise ValueError(f"embed={self.embed} is not divisible by num_heads={self.num_heads}")
        if self.num_layers <= self.dense_layers:
            raise ValueError(
                f"num_layers={self.num_layers} must be ≥ 2 if modern: the first differs"
            )
        super().__post_init__()

    @property
    def head_dim(self) -> int:
        return self.embed // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def learns_positions(self) -> bool:
        return self.max_positions > 0

    @property
    def dense_layers(self) -> int:
        """The first layer of ModernBERT is not like the others: it has no norm before attention."""
        return int(self.modern)

    @classmethod
    def tiny(cls) -> "Config":
        """137,664 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(384, 64, 2, num_heads=8, mlp=256, max_positions=128)

    @classmethod
    def small(cls) -> "Config":
        """722,560 parameters. The laptop default, with bytes as tokens: ModernBERT's form."""
        small = cls._modern(384, 128, 4, num_heads=8, mlp=256, window=17)
        return dataclasses.replace(small, remat="dots")

    @classmethod
    def bert_base(cls) -> "Config":
        """109,514,298 parameters. BERT base, uncased."""
        return cls(30_522, 768, 12, num_heads=12, mlp=3_072)

    @classmethod
    def bert_large(cls) -> "Config":
        """335,174,458 parameters. BERT large, uncased."""
        return cls(30_522, 1_024, 24, num_heads=16, mlp=4_096)

    @classmethod
    def modern_base(cls) -> "Config":
        """149,655,232 parameters. ModernBERT base, for rows of 8,192 tokens."""
        return cls._modern(50_368, 768, 22, num_heads=12, mlp=1_152, window=65)

    @classmethod
    def modern_large(cls) -> "Config":
        """395,881,664 parameters. ModernBERT large, for rows of 8,192 tokens."""
        return cls._modern(50_368, 1_024, 28, num_heads=16, mlp=2_624, window=65)

    @classmethod
    def _modern(cls, *sizes: int, num_heads: int, mlp: int, window: int) -> "Config":
        """A ModernBERT. One layer of three sees the whole row, the others `window` - 1 positions to
        each side.
        """
        local = AttentionType(window=window, rope_theta=10_000.0)
        kinds = (AttentionType(window=None, rope_theta=160_000.0), local, local)
        return cls(
            *sizes, num_heads=num_heads, mlp=mlp, max_positions=0, token_types=0, norm_eps=1e-5,
            layer_kinds=kinds, modern=True,
        )  # fmt: skip


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "bert_base": Config.bert_base,
    "bert_large": Config.bert_large,
    "modern_base": Config.modern_base,
    "modern_large": Config.modern_large,
}

# Axes that rules map; a weight's axis at rest → in use; dims that need not divide evenly.
AXES = dataclasses.replace(
    DECODER,
    logical_axes=DECODER.logical_axes
    | {
        "positions": "both",  # P
        "token_types": "both",
        "classes": "both",  # K
        dense_first.DENSE_STACK: "stack",  # the first layer of ModernBERT
    },
)


def norm(config: Config) -> nnx.LayerNorm:
    return layer_norm(config.embed, config.norm_eps, config.dtype, use_bias=not config.modern)


class Layer(nnx.Module):
    """norm(x + attention(x)), then norm(x + mlp(x)); ModernBERT: x + attention(norm(x)), then
    x + mlp(norm(x)).

    Args:
      dense: whether this is ModernBERT's first layer, whose input is normed already.
    """

    def __init__(self, config: Config, dense: bool = False, *, rngs: nnx.Rngs):
        biases = () if config.modern else ("q", "k", "v", "o")
        self.attention_norm = None if dense else norm(config)
        self.attention = GeneralAttention(config, biases=biases, rngs=rngs)
        self.mlp_norm = norm(config)
        if config.modern:
            gelu = functools.partial(jax.nn.gelu, approximate=False)
            self.mlp = GatedMLP(config, activation=gelu, rngs=rngs)
        else:
            self.mlp = PlainMLP(config, GELU["exact"], rngs=rngs)
        self.norms_first = config.modern

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        if self.norms_first:
            normed_BTD = apply_norm(self.attention_norm, x_BTD)
            out_BTD, kv = self.attention(normed_BTD, inputs, kind, cache_index)
            x_BTD = add_output(x_BTD, out_BTD)
            return add_output(x_BTD, self.mlp(self.mlp_norm(x_BTD))), kv, {}
        out_BTD, kv = self.attention(x_BTD, inputs, kind, cache_index)
        x_BTD = apply_norm(self.attention_norm, add_output(x_BTD, out_BTD))
        x_BTD = self.mlp_norm(add_output(x_BTD, self.mlp(x_BTD)))
        # Rules may split biases; the residual stream stays whole.
        return constrain(x_BTD, "batch", "residual_seq", "act_embed"), kv, {}


class Head(nnx.Module):
    """norm(gelu(x · dense + bias)), which the table of tokens then unembeds."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D = config.embed
        self.config = config
        self.dense = param(rngs, (D, D), ("embed", "norm"), D**-0.5)
        self.bias = None if config.modern else zeros((D,), ("norm",))
        self.norm = norm(config)

    def __call__(self, x_BTD):
        dense = self.config.use_weights(self.dense, AXES)
        x_BTD = gather_positions(x_BTD)
        x_BTD = add_bias(multiply(x_BTD, dense, seq="residual_seq"), self.bias)
        x_BTD = self.norm(jax.nn.gelu(x_BTD, approximate=False))
        return constrain(x_BTD, "batch", "residual_seq", "act_embed")


class Bert(Decoder):
    """Tokens in, logits of the tokens at the same positions out. See the module's docstring.

    Raises ValueError for rows of more than config.max_positions tokens, if positions are learned.
    """

    axes = AXES
    make_layers = dense_first.make_layers
    begin = dense_first.begin
    run_layers = dense_first.run_layers
    head: Any  # None without a task that needs it, as the others
    pooler_bias: Any
    classifier: Any
    classifier_bias: Any

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        P, K, D = config.max_positions, config.token_types, config.embed
        self.embed = vocabulary(config, rngs=rngs)
        table = functools.partial(param, rngs, stddev=D**-0.5)
        self.positions = table((P, D), ("positions", "embed")) if P else None
        self.token_types = table((K, D), ("token_types", "embed")) if K else None
        self.embed_norm = norm(config)
        self.make_layers(Layer, rngs)
        self.output_norm = norm(config) if config.modern else None
        fills, classifies = config.task == "fill", config.task == "classify"
        # ModernBERT classifies with the head that fills masks in, other models with the pooler.
        self.head = Head(config, rngs=rngs) if fills or (classifies and config.modern) else None
        self.unembed = None
        self.unembed_bias = zeros((config.vocab_size,), ("vocab",)) if fills else None
        pools = config.pooling == "pooler" and not fills
        self.pooler = param(rngs, (D, D), ("embed", "norm"), D**-0.5) if pools else None
        self.pooler_bias = zeros((D,), ("norm",)) if pools else None
        shape = (D, len(config.labels))
        self.classifier = table(shape, ("embed", "classes")) if classifies else None
        self.classifier_bias = zeros(shape[1:], ("classes",)) if classifies else None

    @fit_rules
    def __call__(self, tokens_BT, segment_ids_BT=None, types_BT=None) -> jax.Array:
        """Returns logits [B, T, V] in float32, of the token at each position.

        Args:
          tokens_BT: int, below vocab_size. On a mesh, B must be divisible by the axes of `batch`.
          segment_ids_BT: int; positions attend only within their own segment. None: one per row.
            Padding is a segment of its own.
          types_BT: int, below token_types; None: 0.
        """
        x_BTD = self.head(self.run(tokens_BT, segment_ids_BT, types_BT))
        x_BTD = self.in_order(gather_positions(x_BTD), "act_embed")
        return unembed(x_BTD, self.tables()[-1], self.config, self.bias_copies())

    @fit_rules
    def encode(self, tokens_BT, segment_ids_BT=None, types_BT=None) -> jax.Array:
        """Returns the representation of each position, [B, T, D]; arguments as in `__call__`."""
        x_BTD = self.run(tokens_BT, segment_ids_BT, types_BT)
        return self.in_order(gather_positions(x_BTD), "act_embed")

    @fit_rules
    def pool(self, tokens_BT, segment_ids_BT=None, types_BT=None) -> jax.Array:
        """Returns a vector for each row's text, [B, D], float32; arguments as in `__call__`.

        The text begins at the first position; other segments are padding.
        """
        config, x_BTD = self.config, self.encode(tokens_BT, segment_ids_BT, types_BT)
        x_BD = pool(x_BTD, segment_ids_BT, mean=config.pooling == "mean")
        if self.pooler is not None:
            x_BD = jnp.tanh(dense(x_BD, self.pooler, self.pooler_bias, AXES, config))
        return unit(x_BD) if config.normalize else x_BD

    @fit_rules
    def classify(self, tokens_BT, segment_ids_BT=None, types_BT=None) -> jax.Array:
        """Returns logits of each row's classes, [B, K], float32; arguments as in `pool`."""
        x_BD = self.pool(tokens_BT, segment_ids_BT, types_BT)
        if self.head is not None:
            # Where rules split positions, one for each part.
            x_B1D = jnp.repeat(x_BD[:, None], max(shards("seq"), shards("residual_seq")), axis=1)
            x_B1D = constrain(x_B1D.astype(self.config.dtype), "batch", "residual_seq", "act_embed")
            x_BD = constrain(self.head(x_B1D), "batch", None, "act_embed")[:, 0]
        return dense(x_BD, self.classifier, self.classifier_bias, AXES, self.config)

    def loss(self, tokens, targets=None, segment_ids=None, label=None, types=None):
        """Decoder.loss or, given labels of rows, [B], the loss of classes: see class_loss.

        Args:
          types: of tokens, in rows of two texts with a label.
        """
        if label is None:
            return super().loss(tokens, targets, segment_ids)
        return class_loss(self.classify(tokens, segment_ids, types), label)

    def run(self, tokens_BT, segment_ids_BT, types_BT) -> jax.Array:
        """The layers' output, [B, T, D], with T in the order that it has on the devices."""
        batch = self.on_devices(Batch(tokens_BT, None, segment_ids_BT))
        types_BT = self.config.row_layout(tokens_BT.shape[1]).reorder(types_BT)
        inputs = self.inputs_of(batch)
        x_BTD, _ = self.begin(self.tables(), batch.tokens, inputs, types_BT=types_BT)
        return apply_norm(self.output_norm, self.run_layers(x_BTD, inputs)[0])

    def bias_copies(self) -> jax.Array | None:
        return self.unembed_bias and table_copies(self.unembed_bias, "float32")

    def embed_tokens(self, tables, tokens_BT, inputs, types_BT=None):
        """The normed sum of the embeddings of tokens, positions and types: [B, T, D]."""
        T, P = tokens_BT.shape[1], self.config.max_positions
        x_BTD = look_up(tables[0], tokens_BT)
        if self.positions is not None:
            if T > P:
                raise ValueError(f"a row has {T} tokens, and the model has learned {P} positions")
            number_BT = jnp.broadcast_to(inputs.positions_BT, tokens_BT.shape)
            x_BTD += look_up(self.config.use_table(self.positions), number_BT)
        if self.token_types is not None:
            types_BT = jnp.zeros_like(tokens_BT) if types_BT is None else types_BT
            x_BTD += look_up(self.config.use_table(self.token_types), types_BT)
        return constrain(self.embed_norm(x_BTD), "batch", "residual_seq", "act_embed")

    def final_norm(self, x_BTD) -> jax.Array:
        """What the table unembeds, from the output of the layers."""
        return self.head(apply_norm(self.output_norm, x_BTD))


complete = functools.partial(complete_tables, AXES.logical_axes)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(decoder_rules())
