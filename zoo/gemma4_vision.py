"""Gemma4Vision: Gemma 4 that sees: rows of tokens with any number of pictures of any height and width.

A picture keeps its aspect ratio: it is a grid of at most K squares of 48² pixels, each of which becomes a
token. In E2B, E4B, 26B-A4B and 31B, a tower (parts/axial_tower.py) runs over patches of 16², whose outputs
are averaged over the squares, normed and projected; 12B has no tower and projects the squares
(parts/square_tokens.py). Tokens take the places of placeholders in the decoder, gemma4.py. Where
`both_ways` says so, positions of a picture see each other in both directions in sliding layers, within
the window; global layers stay causal. options/pictures.py says on which devices what runs.

The facts are those of Gemma4ForConditionalGeneration in `transformers` (Google 2026).

Shapes: B batch, T positions, M slots for pictures of a row, K squares of a picture, S height and width
of a square, C channels, D embed, V vocab.

    model = Gemma4Vision(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT, images=images_BMKSSC, grids=grids_BM2)
    total, count, metrics = model.loss(tokens_BT, targets_BT, images=images_BMKSSC, grids=grids_BM2)

transformer.py shows how to use it on a mesh. RULES are at the end.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from . import gemma4
from .core.config import bounded, factor
from .core.decoder import Decoder
from .core.layers import AttentionType
from .core.sharding import Rules, complete_tables
from .experts.expert_strategies import expert_rules
from .options import layer_embeddings, pictures, shared_keys, unlike_layers
from .options.compute_options import ComputeOptions
from .options.layer_embeddings import COLUMNS
from .parts.axial_tower import TowerConfig
from .parts.square_tokens import ProjectedSquares, SquareTokens, with_squares


@dataclasses.dataclass(frozen=True)
class Config(gemma4.Config):
    """The architecture: gemma4.Config and the tower, which is that of E2B and E4B by default."""

    _: dataclasses.KW_ONLY
    patch: int = 16  # height and width of a patch in pixels
    pooling: int = 3  # patches on a side of a square, which becomes a token
    channels: int = 3  # C
    picture_tokens: int = 280  # K, the most squares of a picture
    places: int = 10_240  # columns and rows that the table of positions has
    tower_embed: int = 768
    tower_layers: int = bounded(16, least=0)  # 0: no tower, and squares are projected
    tower_heads: int = 12
    tower_head_dim: int = 64
    tower_mlp: int = 3_072
    tower_norm_eps: float = 1e-6  # also of the norm before the projection
    tower_theta: float = factor(100.0)
    clipped: bool = True  # whether the tower's linear layers have bounds
    standardized: bool = False  # whether tokens have a mean and a factor
    both_ways: bool = False  # whether positions of a picture see each other in sliding layers
    image_token: int = bounded(258_880, least=0)  # the placeholder
    pad_token: int = bounded(0, least=0)  # what placeholders are for embeddings of layers
    # Tokens before and after a picture's placeholders, for data pipelines.
    picture_begin: int = bounded(255_999, least=0)
    picture_end: int = bounded(258_882, least=0)
    picture_margin: str = ""  # text before and after these
    freeze_tower: bool = False  # the tower and its projection are not trained
    resample: str = "bicubic"  # filter that resizes pictures, for data pipelines

    def __post_init__(self):
        super().__post_init__()
        side = self.picture_tokens * (self.pooling if self.tower_layers else 1)
        if side > self.places:
            raise ValueError(
                f"picture_tokens={self.picture_tokens} in a line have {side} places, and the table "
                f"has places={self.places}"
            )
        for name in ("image_token", "pad_token"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be below vocab_size={self.vocab_size}"
                )
        tower_config(self)

    @property
    def square(self) -> int:
        """S, height and width of a square in pixels."""
        return self.patch * self.pooling

    @property
    def patches(self) -> int:
        """The most patches of a picture."""
        return self.picture_tokens * self.pooling**2

    @property
    def span_kinds(self) -> tuple[AttentionType, ...]:
        """The kinds of layers in which positions of a picture see each other."""
        return self.kinds[:-1] if self.both_ways else ()

    @classmethod
    def tiny(cls) -> "Config":
        """254,784 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(
            384, 64, 4, num_heads=16, num_kv_heads=8, head_dim=8, global_kv_heads=8,
            global_head_dim=16, mlp=64, sliding_window=7, attention_every=2, keys_as_values=False,
            patch=2, pooling=2, picture_tokens=6, places=16, tower_embed=32, tower_layers=2,
            tower_heads=8, tower_head_dim=8, tower_mlp=64, standardized=True, both_ways=True,
            image_token=383, picture_begin=381, picture_end=382,
            # Outputs begin small, and the norms after them amplify rounding: see gemma3_vision.py.
            norm_eps=0.3, tower_norm_eps=0.3,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """213,440 parameters. The laptop default, with bytes as tokens and 8 × 8 pixels."""
        return cls(
            384, 64, 2, num_heads=4, num_kv_heads=4, head_dim=16, global_kv_heads=4,
            global_head_dim=16, mlp=176, sliding_window=32, attention_every=2,
            keys_as_values=False, remat="none",
            patch=2, pooling=2, channels=1, picture_tokens=4, places=8, tower_embed=64,
            tower_layers=2, tower_heads=4, tower_head_dim=16, tower_mlp=128, clipped=False,
            both_ways=True, image_token=383, picture_begin=381, picture_end=382,
        )  # fmt: skip

    @classmethod
    def gemma4_e2b(cls) -> "Config":
        """4,797,113,600 parameters. Gemma 4 E2B without its part that hears."""
        return cls(**vars(gemma4.Config.gemma4_e2b()))

    @classmethod
    def gemma4_e4b(cls) -> "Config":
        """7,632,344,064 parameters. Gemma 4 E4B without its part that hears."""
        return cls(**vars(gemma4.Config.gemma4_e4b()))

    @classmethod
    def gemma4_12b(cls) -> "Config":
        """11,957,272,576 parameters. Gemma 4 12B without its part that hears."""
        return cls(
            **vars(gemma4.Config.gemma4_12b()), tower_layers=0, tower_embed=3_840, places=1_120,
            clipped=False, both_ways=True,
        )  # fmt: skip

    @classmethod
    def gemma4_26b_a4b(cls) -> "Config":
        """25,805,933,872 parameters. 4,395,322,672 of them active. Gemma 4 26B-A4B."""
        return cls(**vars(gemma4.Config.gemma4_26b_a4b()), **LARGE_TOWER)

    @classmethod
    def gemma4_31b(cls) -> "Config":
        """31,273,086,512 parameters. Gemma 4 31B."""
        return cls(**vars(gemma4.Config.gemma4_31b()), **LARGE_TOWER)


LARGE_TOWER = {
    "tower_embed": 1_152, "tower_layers": 27, "tower_heads": 16, "tower_head_dim": 72,
    "tower_mlp": 4_304, "clipped": False, "standardized": True, "both_ways": True,
}  # fmt: skip

SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "e2b": Config.gemma4_e2b,
    "e4b": Config.gemma4_e4b,
    "12b": Config.gemma4_12b,
    "26b_a4b": Config.gemma4_26b_a4b,
    "31b": Config.gemma4_31b,
}


def tower_config(config: Config) -> TowerConfig | None:
    """The tower's architecture, if there is one. Raises ValueError if it can't be."""
    if not config.tower_layers:
        return None
    names = (field.name for field in dataclasses.fields(ComputeOptions))
    # Adapters are the decoder's; the tower is then frozen.
    compute = {name: vars(config)[name] for name in names if not name.startswith("lora_")}
    compute["remat"] = config.remat if config.remat in TowerConfig.REMAT else "full"
    return TowerConfig(
        embed=config.tower_embed,
        num_layers=config.tower_layers,
        num_heads=config.tower_heads,
        head_dim=config.tower_head_dim,
        mlp=config.tower_mlp,
        norm_eps=config.tower_norm_eps,
        theta=config.tower_theta,
        clips=config.clipped,
        **compute,
    )


class Gemma4Vision(Decoder):
    """Tokens and pictures in, next-token logits out."""

    axes = with_squares(gemma4.AXES)
    # Of images, [B, M, K, S, S, C], and grids, [B, M, 2]; other arrays of a batch are [B, T].
    batch_axes: ClassVar = {"images": ("batch",), "grids": ("batch",)}
    make_tables = layer_embeddings.make_tables
    make_layers = unlike_layers.make_layers
    run_layers = shared_keys.run_layers
    costs = gemma4.Gemma4.costs
    picture_table: nnx.Param | None  # see pictures.with_pictures

    __call__ = pictures.call
    loss = pictures.loss
    tables = pictures.tables
    inputs_of = pictures.inputs_of
    frozen = property(pictures.frozen)

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, gemma4.Layer, rngs=rngs)
        tower = tower_config(config)
        if tower is None:
            self.vision = ProjectedSquares(config, rngs=rngs)
        else:
            self.vision = SquareTokens(config, tower, rngs=rngs)
        self.picture_table = None

    def begin(self, tables, tokens_BT, inputs, **more):
        """`Decoder.begin`; layers embed `pad_token` for placeholders."""
        config = self.config
        is_word_BT = (tokens_BT < config.vocab_size) & (tokens_BT != config.image_token)
        words_BT = jnp.where(is_word_BT, tokens_BT, config.pad_token)
        return layer_embeddings.begin(self, tables, tokens_BT, inputs, words_BT, **more)

    def embed_tokens(self, tables, tokens_BT, inputs) -> jax.Array:
        scale = math.sqrt(self.config.embed)
        return pictures.embed_tokens(self, tables, tokens_BT, inputs, scale)


complete = functools.partial(complete_tables, Gemma4Vision.axes.logical_axes)

# Strategy → logical axis → mesh axis; see gemma4.py. At rest the tower's weights are split as those of
# the decoder, but for a pipeline, which leaves them whole.
RULES: dict[str, Rules] = complete(expert_rules(COLUMNS))
