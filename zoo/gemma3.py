"""Gemma3: a decoder-only language model whose layers are mostly local, as in Gemma 2 and 3.

Gemma 2 (Gemma Team 2024) and 3 (Gemma Team 2025) have norms of scale 1 + w before and after each
sublayer, GeGLU (Shazeer 2020), embeddings times √D, and attention that alternates between a window
and the whole row. Gemma 3 has five local layers for each global one, a longer rotary base in global
layers, and QK-norm. Gemma 2 has one local layer for each global one, and soft caps on scores and
logits (Bello et al. 2017). Everything else is as in transformer.py.

Shapes: B batch, T positions, D embed, N heads, K kv heads, H head dim, F mlp, V vocab, L layers.

    model = Gemma3(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)
    total, count, figures = model.loss(tokens_BT, targets_BT)

transformer.py shows how to use it on a mesh. RULES are at the end.
"""

import dataclasses
import functools
import math

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention import (
    Attention, Kind, check_config, kinds, logits_in_order, positions, read_prompts, read_token,
)  # fmt: skip
from .layers import (
    REMAT_POLICIES, GatedMLP, RMSNorm, fit_positions, layer_in_use, look_up, objective, scan_layers,
    stack, vocabulary, vocabulary_tables,
)  # fmt: skip
from .sharding import Rules, complete_tables, constrain
from .strategies import CP, DECODER, DP, FSDP, FSDP_CP, HSDP, PP, SP, TP


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture and how to compute it. transformer.Config explains fields without a comment."""

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # need not be embed / num_heads
    mlp: int  # F, hidden width of the GeGLU
    # One period of layers, repeated over the depth: local ones, with a window, and a global one.
    layer_kinds: tuple[Kind, ...]
    query_scalar: int  # scores are divided by its square root; head_dim in most sizes
    qk_norm: bool = True  # Gemma 3
    soft_cap: float | None = None  # of scores, in Gemma 2; some kernels lack it
    logits_soft_cap: float | None = None  # in Gemma 2
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    dtype: str = "float32"
    remat: str = "full"
    matmul: str = ""
    matmul_backward: str = ""
    attention: str = "auto"
    context: str = "auto"
    pipeline: str = "1f1b"  # each stage runs whole periods
    pipe_microbatches: int = 0
    loss_chunk: int = 256
    unroll: int = 1  # only if all layers are of one kind

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        if not self.layer_kinds:
            raise ValueError("layer_kinds is empty; it needs at least one Kind")
        check_config(self, remat=REMAT)
        for name in ("soft_cap", "logits_soft_cap"):
            cap = getattr(self, name)
            if cap is not None and not 0 < cap < math.inf:
                raise ValueError(f"{name}={cap} must be a number > 0, or None for no cap")

    @classmethod
    def tiny(cls) -> "Config":
        """222,336 parameters. For tests: every sharded dim is divisible by 8."""
        local, wide = Kind(7, 1e4), Kind(None, 1e6, ("linear", 8.0))
        return cls(
            384, 64, 4, num_heads=16, num_kv_heads=8, head_dim=8, mlp=128,
            layer_kinds=(local, wide), query_scalar=12,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """788,736 parameters. The laptop default, with bytes as tokens."""
        return cls(
            384, 128, 4, num_heads=8, num_kv_heads=4, head_dim=16, mlp=352,
            layer_kinds=(Kind(32, 1e4),) * 3 + (Kind(None, 1e6),), query_scalar=16, remat="dots",
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
            layer_kinds=gemma3_period(1_024, ("linear", 8.0)), query_scalar=256,
        )  # fmt: skip

    @classmethod
    def gemma3_12b(cls) -> "Config":
        """11,766,034,176 parameters. The text model of Gemma 3 12B."""
        return cls(
            262_208, 3_840, 48, num_heads=16, num_kv_heads=8, head_dim=256, mlp=15_360,
            layer_kinds=gemma3_period(1_024, ("linear", 8.0)), query_scalar=256,
        )  # fmt: skip

    @classmethod
    def gemma3_27b(cls) -> "Config":
        """27,009,346,304 parameters. The text model of Gemma 3 27B."""
        return cls(
            262_208, 5_376, 62, num_heads=32, num_kv_heads=16, head_dim=128, mlp=21_504,
            layer_kinds=gemma3_period(1_024, ("linear", 8.0)), query_scalar=168,
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
    "layer_kinds": (Kind(4_096, 1e4), Kind(None, 1e4)),
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

REMAT = REMAT_POLICIES

# What sharding rules may name; see strategies.py.
LOGICAL_AXES, IN_USE, UNEVEN, POSITIONS = DECODER


class Layer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); four different norms."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, norm = config.embed, functools.partial(RMSNorm, eps=config.norm_eps, offset=1.0)
        scale = math.sqrt(config.head_dim / config.query_scalar)
        qk_norm = norm if config.qk_norm else None
        self.attention_norm, self.post_attention_norm = norm(D), norm(D)
        self.attention = Attention(config, "", qk_norm, config.soft_cap, scale, rngs=rngs)
        self.mlp_norm, self.post_mlp_norm = norm(D), norm(D)
        self.mlp = GatedMLP(config, jax.nn.gelu, rngs=rngs)  # by tanh

    def __call__(self, x_BTD, at, kind, past=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), at, kind, past)
        x_BTD = x_BTD + normed_output(out_BTD, self.post_attention_norm)
        out_BTD = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + normed_output(out_BTD, self.post_mlp_norm), kv


class Gemma3(nnx.Module):
    """Tokens in, next-token logits out. See the module's docstring, and Transformer's methods."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config, self.embed = config, vocabulary(config, rngs=rngs)
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs)
        if not config.tie_embeddings:
            self.unembed = vocabulary(config, rngs=rngs)
        self.final_norm = RMSNorm(config.embed, config.norm_eps, offset=1.0)

    @fit_positions
    def __call__(self, tokens_BT, segment_ids_BT=None) -> jax.Array:
        """Returns logits [B, T, V] in float32, within ±logits_soft_cap if there is one."""
        return logits_in_order(self, tokens_BT, segment_ids_BT)

    @fit_positions
    def loss(self, tokens, targets, segment_ids=None):
        """Cross entropy of a batch, in nats; arguments and results as in Transformer.loss."""
        batch = tokens, targets, segment_ids
        return objective(self, batch, IN_USE)[:3]

    prefill, decode = read_prompts, read_token  # as Transformer's

    def trunk(self, tokens_BT, segment_ids_BT, positions_BT=None, cache=None):
        """Returns the layers' output, normed, a table to unembed it, and keys and values.

        See Transformer.trunk.
        """
        tables, past = vocabulary_tables(self), cache and (cache.k, cache.v)
        at = positions(self.config, tokens_BT, segment_ids_BT, positions_BT, cache)
        keep, x_BTD = positions_BT is not None, self.embed_tokens(tables, tokens_BT)
        x_BTD, kv = self._layers(x_BTD, at, past, keep)
        return self.final_norm(x_BTD), tables[-1], kv

    def embed_tokens(self, tables, tokens_BT, positions_BT=None):
        """The layers' input, [B, T, D]. Like `transformers`, rounds √D to the compute dtype."""
        return look_up(tables[0], tokens_BT) * math.sqrt(self.config.embed)

    @property
    def costs(self) -> dict[str, float]:
        return {}

    def run(self, x_BTD, tokens_BT, targets_BT, segment_ids_BT):
        """Runs the layers in training; see `objective`."""
        x_BTD, _ = self._layers(x_BTD, positions(self.config, tokens_BT, segment_ids_BT))
        return x_BTD, {}

    def _layers(self, x_BTD, at, past=None, keep=False):
        """Returns (output, keys and values of all layers if they are to be kept)."""
        config = self.config
        layer = functools.partial(run_layer, config=config, at=at, keep=keep)
        how = kinds(config), REMAT[config.remat], config.unroll
        return scan_layers(layer, x_BTD, (self.layers, past), *how)


def normed_output(out_BTD, norm: RMSNorm) -> jax.Array:
    """A sublayer's output to add to the residual; remat keeps the norm's input, not its output."""
    out_BTD = norm(checkpoint_name(out_BTD, "sublayer"))
    return constrain(out_BTD, "batch", "residual_seq", "act_embed")


def run_layer(x_BTD, layer_and_past, kind: Kind, config: Config, at, keep: bool):
    """One layer, gathered here, inside remat: the backward pass gathers it again."""
    layer, past = layer_and_past
    x_BTD, kv = layer_in_use(layer, IN_USE, config)(x_BTD, at, kind, past)
    return x_BTD, kv if keep else None


def gemma3_period(window: int, scaling: tuple | None = None) -> tuple[Kind, ...]:
    """Gemma 3's five local layers and a global one."""
    return (*[Kind(window, 1e4)] * 5, Kind(None, 1e6, scaling))


complete = functools.partial(complete_tables, LOGICAL_AXES)

# Strategy → logical axis → mesh axis; costs: strategies.py.
RULES: dict[str, Rules] = complete(
    {
        "dp": DP,
        "fsdp": DP | FSDP,
        # All norms of the residual stream are split over `model` too.
        "tp_sp": DP | TP | SP,
        "fsdp_tp_sp": DP | FSDP | TP | SP,
        "hsdp_tp_sp": HSDP | TP | SP,
        # All devices along `model` compute the only kv head of 1b.
        "tp": DP | TP,
        "fsdp_tp": DP | FSDP | TP,
        "hsdp_tp": HSDP | TP,
        # On a ring, a local layer visits only the devices that hold its window.
        "cp": DP | CP,
        "fsdp_cp": DP | CP | FSDP_CP,
        "fsdp_cp_tp": DP | CP | FSDP_CP | TP,
        # A stage is a number of whole periods: 12b's eight fit 2, 4 or 8 stages.
        "pp": DP | PP,
        "fsdp_pp": DP | FSDP | PP,
        "fsdp_pp_tp": DP | FSDP | PP | TP,
    }
)
