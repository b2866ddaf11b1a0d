"""Gemma3Vision: Gemma 3 that sees, from 4B on: rows of tokens with any number of pictures.

A SigLIP tower (siglip.py) makes of a picture of 896² pixels 4,096 patches; they are averaged to 256
tokens, normed and projected (Gemma Team 2025). These take the places of placeholders in the decoder,
gemma3.py. Within a picture, positions see each other in both directions, in all layers; the windows of
local layers still hold. options/pictures.py says on which devices what runs, and options/spans.py how
kernels see spans.

Shapes: B batch, T positions, M slots for pictures of a row, W height and width of a picture, C channels,
D embed, V vocab.

    model = Gemma3Vision(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT, images=images_BMWWC)
    total, count, metrics = model.loss(tokens_BT, targets_BT, images=images_BMWWC)

transformer.py shows how to use it on a mesh. RULES are at the end.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
from flax import nnx

from . import gemma3
from .core.config import bounded
from .core.decoder import Decoder
from .core.layers import AttentionType, RMSNorm
from .core.sharding import Rules, complete_tables
from .core.strategies import DECODER, decoder_rules
from .options import pictures
from .options.compute_options import ComputeOptions
from .options.periods import scan_kinds
from .parts.picture_tokens import PictureTokens, with_tower
from .parts.towers import TowerConfig


@dataclasses.dataclass(frozen=True)
class Config(gemma3.Config):
    """The architecture: gemma3.Config and the tower, which is that of 4B, 12B and 27B by default."""

    _: dataclasses.KW_ONLY
    image_size: int = 896  # W, height and width of pictures in pixels
    patch: int = 14  # height and width of a patch in pixels; divides image_size
    channels: int = 3  # C
    tower_embed: int = 1_152
    tower_layers: int = 27
    tower_heads: int = 16
    tower_mlp: int = 4_304
    tower_norm_eps: float = 1e-6
    picture_tokens: int = 256  # K, the tokens of a picture; a square that divides the patches
    image_token: int = bounded(262_144, least=0)  # the placeholder
    # Tokens before and after a picture's placeholders, for data pipelines.
    picture_begin: int = bounded(255_999, least=0)
    picture_end: int = bounded(256_000, least=0)
    picture_margin: str = "\n\n"  # text before and after these, as in Gemma 3's processor
    freeze_tower: bool = False  # the tower and its projection are not trained
    # How pictures become inputs: saved with the model and read by data pipelines.
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of pixel values from 0 to 1, for each channel
    std: tuple[float, ...] = (0.5, 0.5, 0.5)  # inputs are (pixel - mean) / std
    resample: str = "bilinear"  # filter that resizes pictures

    span_kinds: ClassVar = None  # positions of a picture see each other in layers of all kinds

    @property
    def patches(self) -> int:
        """The patches of a picture."""
        return (self.image_size // self.patch) ** 2

    def __post_init__(self):
        super().__post_init__()
        if self.image_size % self.patch:
            raise ValueError(f"image_size={self.image_size} is not divisible by patch={self.patch}")
        side, patches = math.isqrt(self.picture_tokens), self.image_size // self.patch
        if side**2 != self.picture_tokens or patches % side:
            raise ValueError(
                f"picture_tokens={self.picture_tokens} must be the square of a number that divides "
                f"the {patches} patches on a side"
            )
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(
                f"mean={self.mean} and std={self.std} must have channels={self.channels} numbers"
            )
        if self.image_token >= self.vocab_size:
            raise ValueError(
                f"image_token={self.image_token} must be below vocab_size={self.vocab_size}"
            )
        tower_config(self)

    @classmethod
    def tiny(cls) -> "Config":
        """242,496 parameters. For tests: every sharded dim is divisible by 8."""
        local = AttentionType(7, 1e4)
        return cls(
            384, 64, 4, num_heads=16, num_kv_heads=8, head_dim=8, mlp=128,
            layer_kinds=(local, AttentionType(None, 1e6)), query_scalar=12,
            image_size=8, patch=2, tower_embed=32, tower_layers=2, tower_heads=8, tower_mlp=64,
            picture_tokens=4, image_token=383, picture_begin=381, picture_end=382,
            picture_margin="",
            # Embeddings of patches begin small, and the norms after them amplify rounding: with the
            # published 1e-6, gradients on two meshes differ by 2.2e-6, with these by 1.3e-6.
            norm_eps=0.1, tower_norm_eps=0.1,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """198,144 parameters. The laptop default, with bytes as tokens and 8 × 8 pixels."""
        return cls(
            384, 64, 2, num_heads=4, num_kv_heads=4, head_dim=16, mlp=176,
            layer_kinds=(AttentionType(32, 1e4), AttentionType(None, 1e6)), query_scalar=16,
            remat="none",
            image_size=8, patch=2, channels=1, tower_embed=64, tower_layers=2, tower_heads=4,
            tower_mlp=128, picture_tokens=4, image_token=383, picture_begin=381,
            picture_end=382, picture_margin="", mean=(0.0,), std=(1.0,),
        )  # fmt: skip

    @classmethod
    def gemma3_4b(cls) -> "Config":
        """4,300,079,472 parameters. Gemma 3 4B, whole."""
        return cls(**vars(gemma3.Config.gemma3_4b()))

    @classmethod
    def gemma3_12b(cls) -> "Config":
        """12,187,325,040 parameters. Gemma 3 12B, whole."""
        return cls(**vars(gemma3.Config.gemma3_12b()))

    @classmethod
    def gemma3_27b(cls) -> "Config":
        """27,432,406,640 parameters. Gemma 3 27B, whole."""
        return cls(**vars(gemma3.Config.gemma3_27b()))


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "4b": Config.gemma3_4b,
    "12b": Config.gemma3_12b,
    "27b": Config.gemma3_27b,
}


def tower_config(config: Config) -> TowerConfig:
    """The tower's architecture. Raises ValueError if it can't be."""
    compute = {field.name: vars(config)[field.name] for field in dataclasses.fields(ComputeOptions)}
    compute |= {"lora_rank": 0}  # adapters are the decoder's; the tower is then frozen
    return TowerConfig(
        embed=config.tower_embed,
        num_layers=config.tower_layers,
        num_heads=config.tower_heads,
        mlp=config.tower_mlp,
        norm_eps=config.tower_norm_eps,
        activation="tanh",
        causal=False,
        **compute,
    )


class Gemma3Vision(Decoder):
    """Tokens and pictures in, next-token logits out."""

    axes = with_tower(DECODER)
    # Of images, [B, M, W, W, C]; other arrays of a batch are [B, T].
    batch_axes: ClassVar = {"images": ("batch",)}
    scan = scan_kinds
    picture_table: nnx.Param | None  # see pictures.with_pictures

    __call__ = pictures.call
    loss = pictures.loss
    tables = pictures.tables
    inputs_of = pictures.inputs_of
    frozen = property(pictures.frozen)

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        final_norm = RMSNorm(config.embed, config.norm_eps, zero_centered=True)
        super().__init__(config, gemma3.Layer, final_norm, rngs=rngs)
        self.vision = PictureTokens(config, tower_config(config), rngs=rngs)
        self.picture_table = None

    def embed_tokens(self, tables, tokens_BT, inputs) -> jax.Array:
        scale = math.sqrt(self.config.embed)
        return pictures.embed_tokens(self, tables, tokens_BT, inputs, scale)


complete = functools.partial(complete_tables, Gemma3Vision.axes.logical_axes)

# Strategy → logical axis → mesh axis; costs: strategies.py. At rest the tower's weights are split as
# those of the decoder, but for a pipeline, which leaves them whole.
RULES: dict[str, Rules] = complete(decoder_rules())
