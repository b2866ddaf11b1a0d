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
from jax.ad_checkpoint import checkpoint_name

from .attention import (
    Attention, Kind, check_config, kinds, logits_in_order, positions, read_prompts, read_token,
)  # fmt: skip
from .feedforward import GeluMLP, layer_norm
from .layers import (
    REMAT_POLICIES, fit_positions, layer_in_use, look_up, objective, scan_layers, stack,
    table_copies, vocabulary, vocabulary_tables,
)  # fmt: skip
from .sharding import Rules, complete_tables, constrain, param
from .strategies import CP, DECODER, DP, FSDP, FSDP_CP, HSDP, PP, SP, TP


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture and how to compute it. Named sizes are classmethods.

    transformer.Config explains the fields without a comment.
    """

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    mlp: int  # F, hidden width of the MLP
    max_positions: int = 1_024  # P, most tokens of a row
    norm_eps: float = 1e-5
    layer_kinds: tuple[Kind, ...] = (Kind(window=None, rope_theta=None),)  # one for all layers
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "up", "down")
    lora_rank: int = 0
    lora_alpha: float = 16.0
    unroll: int = 1
    loss_chunk: int = 256
    pipe_microbatches: int = 0
    pipeline: str = "1f1b"
    context: str = "auto"
    attention: str = "auto"
    remat: str = "full"
    dtype: str = "float32"
    matmul: str = ""
    matmul_backward: str = ""

    tie_embeddings = True
    mlp_matrices = 2  # up and down, without a gate

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        if self.embed % self.num_heads:
            raise ValueError(f"embed={self.embed} is not divisible by num_heads={self.num_heads}")
        check_config(self, remat=REMAT)

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

REMAT = REMAT_POLICIES  # what a layer keeps for its backward pass

# Axes that rules map; a weight's axis at rest → in use; dims that need not divide evenly.
DENSE_AXES, DENSE_IN_USE, UNEVEN, POSITIONS = DECODER
LOGICAL_AXES = DENSE_AXES | {"positions": "both"}  # P
IN_USE = DENSE_IN_USE


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.embed, config.norm_eps, config.dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config, biases="qkvo", rngs=rngs)
        self.mlp = GeluMLP(config, approximate=True, rngs=rngs)

    def __call__(self, x_BTD, at, kind, past=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), at, kind, past)
        x_BTD += checkpoint_name(out_BTD, "sublayer")
        x_BTD += checkpoint_name(self.mlp(self.mlp_norm(x_BTD)), "sublayer")
        # Rules may split biases; the residual stream stays whole.
        return constrain(x_BTD, "batch", "residual_seq", "act_embed"), kv


class GPT2(nnx.Module):
    """Tokens in, next-token logits out. Its methods are those of Transformer.

    Raises ValueError for rows of more than config.max_positions tokens.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = vocabulary(config, rngs=rngs)
        shape = config.max_positions, config.embed
        self.positions = param(rngs, shape, ("positions", "embed"), config.embed**-0.5)
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs)
        self.final_norm = layer_norm(config.embed, config.norm_eps, config.dtype)

    @fit_positions
    def loss(self, tokens, targets, segment_ids=None):
        """Cross entropy of a batch, in nats: (sum, number of targets, {"loss": both})."""
        return objective(self, (tokens, targets, segment_ids), IN_USE)[:3]

    __call__ = fit_positions(logits_in_order)
    prefill, decode = read_prompts, read_token

    def trunk(self, tokens_BT, segment_ids_BT, positions_BT=None, cache=None):
        tables = vocabulary_tables(self)
        at = positions(self.config, tokens_BT, segment_ids_BT, positions_BT, cache)
        x_BTD = self.embed_tokens(tables, tokens_BT, positions_BT)
        x_BTD, kv = self._layers(x_BTD, at, cache, keep=positions_BT is not None)
        return self.final_norm(x_BTD), tables[-1], kv

    def run(self, x_BTD, tokens_BT, targets_BT, segment_ids_BT):
        at = positions(self.config, tokens_BT, segment_ids_BT)
        return self._layers(x_BTD, at)[0], {}

    def embed_tokens(self, tables, tokens_BT, positions_BT=None):
        """The sum of the embeddings of tokens and of their positions: [B, T, D]."""
        (B, T), P = tokens_BT.shape, self.config.max_positions
        if T > P:
            raise ValueError(f"a row has {T} tokens, and the model has learned {P} positions")
        places_BT = positions(self.config, tokens_BT, None, positions_BT).numbers
        # Left padding has positions below 0.
        places_BT = jnp.broadcast_to(jnp.clip(places_BT, 0, P - 1), (B, T))
        learned = table_copies(self.positions, self.config.dtype)
        return look_up(tables[0], tokens_BT) + look_up(learned, places_BT)

    @property
    def costs(self) -> dict[str, float]:
        return {}

    def _layers(self, x_BTD, at, cache=None, keep=False):
        def layer(x_BTD, given, kind):
            weights = layer_in_use(given[0], IN_USE, self.config)  # inside remat
            x_BTD, kv = weights(x_BTD, at, kind, given[1])
            return x_BTD, kv if keep else None

        given, how = (self.layers, cache and (cache.k, cache.v)), REMAT[self.config.remat]
        return scan_layers(layer, x_BTD, given, kinds(self.config), how, self.config.unroll)


complete = functools.partial(complete_tables, LOGICAL_AXES)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(
    {
        "dp": DP,
        "tp_sp": DP | TP | SP,
        "fsdp_tp_sp": DP | FSDP | TP | SP,
        "hsdp_tp_sp": HSDP | TP | SP,
        "fsdp": DP | FSDP,
        "tp": DP | TP,
        "fsdp_tp": DP | FSDP | TP,
        "hsdp_tp": HSDP | TP,
        "pp": DP | PP,
        "fsdp_pp": DP | FSDP | PP,
        "fsdp_pp_tp": DP | FSDP | PP | TP,
        "cp": DP | CP,
        "fsdp_cp": DP | CP | FSDP_CP,
        "fsdp_cp_tp": DP | CP | FSDP_CP | TP,
    }
)
