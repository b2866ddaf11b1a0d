"""SigLIP: two towers, of images and of texts, whose embeddings agree for a pair (Zhai et al. 2023).

Each tower is a Transformer that attends in both directions: LayerNorm before each sublayer, biases,
learned positions, GELU by tanh. One learned query pools the image's patches; the last position stands
for the text. The loss compares all images of the global batch with all texts (pairs.py): SigLIP's
sigmoid of each pair, or CLIP's softmax over each row (Radford et al. 2021).

Shapes: B batch, T positions, W image height and width, P patch height and width, C image channels, D
embed, also of the joint embeddings, N heads, H head dim, F mlp, V vocab, L layers of a tower.

    model = Siglip(Config.tiny(), rngs=nnx.Rngs(0))
    image_BD, text_BD = model.embed_images(image_BWWC), model.embed_texts(tokens_BT)
    similarity_BB = image_BD @ text_BD.T

RULES, at the end of this file, shard it on a mesh; transformer.py shows how.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import Attention, make_positions
from .classes import unit
from .config import Compute
from .gelu import GeluMLP, layer_norm
from .layers import Kind, add_output, dot
from .pairs import EXCHANGES, LOSSES, loss_of_pairs
from .patches import Pooling, embed_patches
from .sharding import (
    Rules, check_rules, complete_tables, constrain, explicit, in_use, param, variable, zeros,
)  # fmt: skip
from .stack import layer_in_use, scan_layers, stack
from .strategies import DECODER, encoder_rules
from .vocabulary import copies_in_use, look_up


@dataclasses.dataclass(frozen=True)
class Config(Compute):
    """The architecture of both towers. transformer.Config explains the fields without a comment."""

    image_size: int  # W, height and width of pictures in pixels
    patch: int  # P, height and width of a patch in pixels; divides image_size
    vocab_size: int
    max_positions: int  # T, tokens of a text
    embed: int
    num_layers: int  # of each tower
    num_heads: int
    mlp: int  # F, hidden width of the MLP
    channels: int = 3  # C, of the image
    norm_eps: float = 1e-6
    loss: str = "sigmoid"  # of pairs: sigmoid (SigLIP) or softmax (CLIP)
    # How embeddings of texts meet all images: gather, ring (less memory), or local, which is another
    # loss, of the pairs on a device.
    pairs: str = "gather"
    layer_kinds: tuple[Kind, ...] = (Kind(window=None, rope_theta=None),)
    # How pictures become inputs: saved with the model and read by data pipelines.
    mean: tuple[float, ...] = ()  # of pixel values from 0 to 1, for each channel
    std: tuple[float, ...] = ()  # inputs are (pixel - mean) / std
    resample: str = "bilinear"  # filter that resizes pictures
    labels: tuple[str, ...] = ()  # names of the classes, from which captions are made

    causal = False

    def __post_init__(self):
        for name, part in (("image_size", "patch"), ("embed", "num_heads")):
            if (whole := vars(self)[name]) % vars(self)[part]:
                raise ValueError(f"{name}={whole} is not divisible by {part}={vars(self)[part]}")
        for name, valid in (("loss", LOSSES), ("pairs", EXCHANGES)):
            if vars(self)[name] not in valid:
                raise ValueError(f"{name}={vars(self)[name]!r} is not one of {', '.join(valid)}")
        super().__post_init__()

    @property
    def head_dim(self) -> int:
        return self.embed // self.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch) ** 2

    @classmethod
    def tiny(cls) -> "Config":
        """53,506 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(8, 2, 264, 16, 32, 2, num_heads=8, mlp=64, channels=1)

    @classmethod
    def small(cls) -> "Config":
        """373,506 parameters. The laptop default, for 8 × 8 grey pixels and texts in bytes."""
        small = cls(8, 2, 264, 16, 64, 3, num_heads=8, mlp=256, channels=1)
        return dataclasses.replace(small, remat="none")

    @classmethod
    def b16(cls) -> "Config":
        """203,155,970 parameters. SigLIP B/16."""
        return cls(224, 16, 32_000, 64, 768, 12, num_heads=12, mlp=3_072)

    @classmethod
    def so400m(cls) -> "Config":
        """877,360,306 parameters. SigLIP So400m/14."""
        return cls(224, 14, 32_000, 16, 1_152, 27, num_heads=16, mlp=4_304)


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "b16": Config.b16,
    "so400m": Config.so400m,
}

# The axes of a decoder, and those of what surrounds the layers. No strategy splits rows of a table.
AXES = dataclasses.replace(
    DECODER,
    logical_axes=DECODER.logical_axes
    | {
        "patch_rows": "both",  # P
        "patch_columns": "both",  # P
        "channels": "both",  # C
        "positions": "both",  # of patches
        "text_positions": "both",  # T
        "words": "both",  # V
        "score": "weights",  # one number, of all scores
    },
    uneven=DECODER.uneven
    | dict.fromkeys(("channels", "positions", "text_positions", "words", "score"), "replicated"),
    positions=(),
)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.embed, config.norm_eps, config.dtype)
        self.attention_norm = norm()
        self.attention = Attention(config, biases=("q", "k", "v", "o"), rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = GeluMLP(config, approximate=True, rngs=rngs)

    def __call__(self, x_BTD, positions, kind):
        out_BTD, _ = self.attention(self.attention_norm(x_BTD), positions, kind)
        x_BTD = add_output(x_BTD, out_BTD)
        x_BTD = add_output(x_BTD, self.mlp(self.mlp_norm(x_BTD)))
        # Rules may split biases; the residual stream stays whole.
        return constrain(x_BTD, "batch", "residual_seq", "act_embed")


class Tower(nnx.Module):
    """x_BTD → x_BTD: stacked layers and a norm."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs)
        self.final_norm = layer_norm(config.embed, config.norm_eps, config.dtype)

    def __call__(self, x_BTD):
        config = self.config
        positions = make_positions(config, jnp.zeros(x_BTD.shape[:2], jnp.int32))

        def run_layer(x_BTD, layer, kind):
            layer = layer_in_use(layer, AXES.in_use, config)  # inside remat, which gathers again
            return layer(x_BTD, positions, kind), None

        remat = config.REMAT[config.remat]
        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        x_BTD, _ = scan_layers(run_layer, x_BTD, self.layers, config.kinds, remat, config.unroll)
        return constrain(self.final_norm(x_BTD), "batch", None, "act_embed")


class Siglip(nnx.Module):
    """Images and texts in, embeddings of length 1 out. See the module's docstring."""

    axes = AXES

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        P, C, D, T = config.patch, config.channels, config.embed, config.max_positions
        axes = ("patch_rows", "patch_columns", "channels", "embed")
        self.patch = param(rngs, (P, P, C, D), axes, (P * P * C) ** -0.5)
        self.patch_bias = zeros((D,), ("norm",))
        self.positions = param(rngs, (config.num_patches, D), ("positions", "embed"), 0.5)
        self.image = Tower(config, rngs=rngs)
        self.pooling = Pooling(config, rngs=rngs)
        self.words = param(rngs, (config.vocab_size, D), ("words", "embed"), 0.5)
        self.text_positions = param(rngs, (T, D), ("text_positions", "embed"), 0.5)
        self.text = Tower(config, rngs=rngs)
        self.text_head = param(rngs, (D, D), ("embed", "norm"), D**-0.5)
        self.text_head_bias = zeros((D,), ("norm",))
        # Scores are x · y · exp(log_scale) + score_bias; at first, most pairs are none.
        self.log_scale = variable(jnp.full(1, math.log(10.0), jnp.float32), ("score",))
        self.score_bias = variable(jnp.full(1, -10.0, jnp.float32), ("score",))

    def embed_images(self, image_BWWC) -> jax.Array:
        """Embeddings of images, [B, D], float32, of length 1."""
        check_rules(AXES.logical_axes)
        dtype = self.config.dtype
        x_BTD = embed_patches(image_BWWC, self.patch, self.patch_bias, AXES.in_use, dtype)
        return unit(self.pooling(self.image(self._add_positions(x_BTD, self.positions))))

    def embed_texts(self, tokens_BT) -> jax.Array:
        """Embeddings of texts, [B, D], float32, of length 1. Padding is a token like others."""
        check_rules(AXES.logical_axes)
        x_BTD = look_up(copies_in_use(self.words, self.config), tokens_BT)
        x_BTD = self.text(self._add_positions(x_BTD, self.text_positions))
        head = in_use(self.text_head, AXES.in_use, x_BTD.dtype)
        x_BD = dot("BD,DE->BE", x_BTD[:, -1], head[...], explicit("batch", None))
        x_BD = (x_BD + self.text_head_bias[...][None]).astype(x_BTD.dtype)
        return unit(constrain(x_BD, "batch", "act_embed"))

    def _add_positions(self, x_BTD, table: nnx.Param) -> jax.Array:
        """Adds learned positions in float32, so that their gradient is summed over B in float32."""
        table_TD = constrain(in_use(table, AXES.in_use, self.config.dtype)[...], None, "act_embed")
        sum_BTD = x_BTD.astype(jnp.float32) + table_TD.astype(jnp.float32)[None]
        return sum_BTD.astype(x_BTD.dtype)

    def embed_pairs(self, image, tokens, label):
        """(embeddings of images and of texts, [B, D], and which rows count, bool [B])."""
        return self.embed_images(image), self.embed_texts(tokens), label >= 0

    def compare(self, image_BD, text_BD, counted_B):
        """The loss of all pairs of the batch: (sum over rows, number of rows, aux)."""
        config = self.config
        total = loss_of_pairs(
            image_BD, text_BD, counted_B, jnp.exp(self.log_scale[0]), self.score_bias[0],
            loss=config.loss, exchange=config.pairs,
        )  # fmt: skip
        count = counted_B.sum().astype(jnp.float32)
        return total, count, {"loss": (total, count)}

    def loss(self, image, tokens, label):
        """The loss of all pairs of a batch, in nats for each row.

        It is no sum over parts of a batch: `embed_pairs` and `compare` are its two phases, by which
        microbatches have the loss of the whole batch.

        Args:
          image: [B, W, W, C].
          tokens: [B, T], int, of each image's text.
          label: [B], int; rows with a label below 0 only pad the batch and are in no pair.

        Returns: as `compare`.
        """
        return self.compare(*self.embed_pairs(image, tokens, label))


complete = functools.partial(complete_tables, AXES.logical_axes)

# What each parallelism splits and costs: strategies.py. Those that split T or L are for decoders.
RULES: dict[str, Rules] = complete(encoder_rules())
