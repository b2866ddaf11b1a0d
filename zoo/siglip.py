"""SigLIP: two towers, of images and of texts, whose embeddings agree for a pair (Zhai et al. 2023).

Each tower is a Transformer (towers.py) with learned positions that attends in both directions. One
learned query pools the image's patches; the last position stands for the text. The loss compares all
images of the global batch with all texts (pairs.py): SigLIP's sigmoid of each pair, or CLIP's softmax
over each row.

With `clip`, it is CLIP (Radford et al. 2021): a class token stands for the image, a position attends
to earlier ones of its text, whose end token stands for it, and each tower's embedding is projected.

Shapes: B batch, T positions, W image height and width, P patch height and width, C image channels, D
embed of a tower, E joint embedding, N heads, H head dim, F mlp, V vocab, L layers of a tower.

    model = Siglip(Config.tiny(), rngs=nnx.Rngs(0))
    image_BD, text_BD = model.embed_images(image_BWWC), model.embed_texts(tokens_BT)
    similarity_BB = image_BD @ text_BD.T

RULES, at the end of this file, shard it on a mesh; transformer.py shows how.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .parts.classes import unit
from .options.compute_options import ComputeOptions
from .parts.gelu import GELU
from .parts.norms import apply_norm, layer_norm
from .core.layers import AttentionType, dot
from .parts.pairs import EXCHANGES, LOSSES, loss_of_pairs
from .parts.patches import Pooling, embed_patches, prepend
from .core.sharding import (
    Rules, check_rules, complete_tables, constrain, explicit, param, variable, zeros,
)  # fmt: skip
from .core.config import bounded, one_of
from .core.strategies import DECODER
from .parts.encoder_rules import encoder_rules
from .parts.towers import Tower, image_and_text
from .core.vocabulary import look_up


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture of both towers. transformer.Config explains the fields without a comment."""

    image_size: int  # W, height and width of pictures in pixels
    patch: int  # P, height and width of a patch in pixels; divides image_size
    vocab_size: int
    max_positions: int  # T, tokens of a text
    embed: int
    num_layers: int  # of a tower
    num_heads: int
    mlp: int  # F, hidden width of the MLP
    channels: int = 3  # C, of the image
    norm_eps: float = 1e-6
    loss: str = one_of("sigmoid", LOSSES)  # of pairs: sigmoid (SigLIP) or softmax (CLIP)
    # How embeddings of texts meet all images: gather, ring (less memory), or local, which is another
    # loss, of the pairs on a device.
    pairs: str = one_of("gather", EXCHANGES)
    clip: bool = False  # whether the towers are CLIP's
    activation: str = one_of(
        "tanh", GELU
    )  # of the MLPs: GELU, exact, by tanh or quick: x · sigmoid(1.702 x)
    joint: int = bounded(0, least=0)  # E, dims of embeddings; 0: embed, which SigLIP needs
    text_tower: tuple[int, ...] = ()  # embed, num_layers, num_heads and mlp of texts; (): as images
    end_token: int = bounded(
        0, least=0
    )  # of CLIP: the first one stands for a text; 0: the largest number in it
    layer_kinds: tuple[AttentionType, ...] = (AttentionType(window=None, rope_theta=None),)
    # How pictures become inputs: saved with the model and read by data pipelines.
    mean: tuple[float, ...] = ()  # of pixel values from 0 to 1, for each channel
    std: tuple[float, ...] = ()  # inputs are (pixel - mean) / std
    resample: str = "bilinear"  # filter that resizes pictures
    center_crop: bool = False  # whether pictures are cut to a square, instead of stretched
    labels: tuple[str, ...] = ()  # names of the classes, from which captions are made

    causal = False

    def __post_init__(self):
        super().__post_init__()
        if self.image_size % self.patch:
            raise ValueError(f"image_size={self.image_size} is not divisible by patch={self.patch}")
        if not self.clip and self.joint not in (0, self.embed):
            raise ValueError(f"joint={self.joint} is not embed={self.embed}, and clip is off")
        image_and_text(self)

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


class Siglip(nnx.Module):
    """Images and texts in, embeddings of length 1 out. See the module's docstring."""

    axes = AXES
    patch_bias: Any  # None, as others, for a form of model without it
    text_head_bias: Any
    score_bias: Any

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        image, text = image_and_text(config)
        P, C, D, E = config.patch, config.channels, config.embed, config.joint or config.embed
        axes = ("patch_rows", "patch_columns", "channels", "embed")
        self.patch = param(rngs, (P, P, C, D), axes, (P * P * C) ** -0.5)
        self.patch_bias = None if config.clip else zeros((D,), ("norm",))
        self.class_token = param(rngs, (D,), ("norm",), 0.5) if config.clip else None
        shape = (config.num_patches + config.clip, D)
        self.positions = param(rngs, shape, ("positions", "embed"), 0.5)
        self.image_norm = layer_norm(D, config.norm_eps, config.dtype) if config.clip else None
        self.image = Tower(image, rngs=rngs)
        self.pooling = None if config.clip else Pooling(config, rngs=rngs)
        head = functools.partial(param, rngs, axes=("embed", "norm"))
        self.image_head = head((D, E), stddev=D**-0.5) if config.clip else None
        V, T, D = config.vocab_size, config.max_positions, text.embed
        self.words = param(rngs, (V, D), ("words", "embed"), 0.5)
        self.text_positions = param(rngs, (T, D), ("text_positions", "embed"), 0.5)
        self.text = Tower(text, rngs=rngs)
        self.text_head = head((D, E), stddev=D**-0.5)
        self.text_head_bias = None if config.clip else zeros((E,), ("norm",))
        # Scores are x · y · exp(log_scale) + score_bias; at first, most pairs are none.
        scale = 1 / 0.07 if config.clip else 10.0
        self.log_scale = variable(jnp.full(1, math.log(scale), jnp.float32), ("score",))
        bias = None if config.clip else jnp.full(1, -10.0, jnp.float32)
        self.score_bias = None if bias is None else variable(bias, ("score",))

    def embed_images(self, image_BWWC) -> jax.Array:
        """Embeddings of images, [B, E], float32, of length 1."""
        check_rules(AXES.logical_axes)
        config = self.config
        x_BTD = embed_patches(image_BWWC, self.patch, self.patch_bias, AXES, config)
        if self.class_token is not None:
            x_BTD = prepend(self.class_token, x_BTD)
        x_BTD = self._add_positions(x_BTD, self.positions)
        x_BTD = self.image(apply_norm(self.image_norm, x_BTD))
        x_BD = x_BTD[:, 0] if self.pooling is None else self.pooling(x_BTD)
        return unit(x_BD if self.image_head is None else self._project(x_BD, self.image_head, None))

    def embed_texts(self, tokens_BT) -> jax.Array:
        """Embeddings of texts, [B, E], float32, of length 1. Padding is a token like others."""
        check_rules(AXES.logical_axes)
        x_BTD = look_up(self.config.use_table(self.words), tokens_BT)
        x_BTD = self.text(self._add_positions(x_BTD, self.text_positions))
        x_BD = x_BTD[:, -1]
        if self.config.clip:
            end = self.config.end_token
            end_B = (tokens_BT == end if end else tokens_BT).argmax(axis=1)
            is_end_BT = jax.nn.one_hot(end_B, tokens_BT.shape[1], dtype=x_BTD.dtype)
            is_end_BT = constrain(is_end_BT, "batch", None)
            x_BD = dot("BT,BTD->BD", is_end_BT, x_BTD, explicit("batch", "act_embed"))
        return unit(self._project(x_BD.astype(x_BTD.dtype), self.text_head, self.text_head_bias))

    def _project(self, x_BD, head: nnx.Param, bias) -> jax.Array:
        head_DE = self.config.use_weights(head, AXES)[...].astype(x_BD.dtype)
        x_BE = dot("BD,DE->BE", x_BD, head_DE, explicit("batch", None))
        x_BE = x_BE if bias is None else x_BE + bias[...][None]
        return constrain(x_BE.astype(x_BD.dtype), "batch", "act_embed")

    def _add_positions(self, x_BTD, table: nnx.Param) -> jax.Array:
        """Adds learned positions in float32, so that their gradient is summed over B in float32."""
        table = self.config.use_weights(table, AXES)
        table_TD = constrain(table[...], None, "act_embed")
        sum_BTD = x_BTD.astype(jnp.float32) + table_TD.astype(jnp.float32)[None]
        return sum_BTD.astype(self.config.dtype)

    def embed_pairs(self, image, tokens, label):
        """(embeddings of images and of texts, [B, D], and which rows count, bool [B])."""
        return self.embed_images(image), self.embed_texts(tokens), label >= 0

    def compare(self, image_BD, text_BD, counted_B):
        """The loss of all pairs of the batch: (sum over rows, number of rows, aux)."""
        config = self.config
        bias = jnp.float32(0) if self.score_bias is None else self.score_bias[0]
        total = loss_of_pairs(
            image_BD, text_BD, counted_B, jnp.exp(self.log_scale[0]), bias,
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
