"""Transformer: a Llama-style decoder-only language model.

RMSNorm before each sublayer (Zhang & Sennrich 2019), rotary position embeddings (Su et al. 2021),
grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020); optional QK-norm, qkv biases,
sliding windows, tied embeddings, rope scaling and LoRA adapters (Hu et al. 2021). This covers Llama
2/3, Mistral, Qwen 2/3 and SmolLM. Layers are stacked and scanned, so compile time does not grow
with depth.

Shapes: B batch, T positions, S slots of the cache, D embed, N heads, K kv heads, H head dim, F mlp,
V vocab, L layers, R batch shards.

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

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .attention import (
    KERNEL_NAMES,
    Attention,
    Cache,
    Kind,
    fill_cache,
    kinds,
    left_padded,
    positions,
)
from .layers import RMSNorm, SwiGLU, cross_entropy, look_up, table_copies, unembed, vocabulary
from .pipeline import REMAT_POLICIES, check_config, scan_layers, stack
from .sharding import Rules, complete_tables, in_use
from .strategies import DECODER_AXES, DECODER_IN_USE, DECODER_UNEVEN, DP, FSDP, HSDP, TP


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture and how to compute it. Named sizes are classmethods."""

    vocab_size: int  # V, tokens
    embed: int  # D
    num_layers: int  # L
    num_heads: int  # N, query heads
    num_kv_heads: int  # K, key and value heads; divides num_heads
    head_dim: int  # H, even
    mlp: int  # F, hidden width of the SwiGLU
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  # base of the rotary wavelengths
    rope_scaling: tuple | None = None  # for longer contexts; see attention.Kind
    sliding_window: int | None = None  # a position sees itself and the window - 1 before it
    # For layers that differ: one period of kinds, repeated over the depth. Each kind has its own
    # window and rotary embeddings, which replace the three fields above.
    layer_kinds: tuple[Kind, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    # LoRA: x·W becomes x·W + (x·A)·B · lora_alpha / lora_rank. W is frozen; only A and B
    # (nnx.LoRAParam) get gradients.
    lora_rank: int = 0  # columns of A and rows of B; 0: no adapters
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")  # get adapters
    # How to compute it: nothing below changes the parameters.
    dtype: str = "float32"  # of activations and matmuls; parameters, norms and loss stay float32
    remat: str = "full"  # what a layer keeps for its backward pass: a key of REMAT
    attention: str = "auto"  # "xla", a key of KERNELS, or "auto": the best for the device
    loss_chunk: int = 256  # C, positions of a sequence with logits at once; see positions_at_once
    unroll: int = 1  # layers per scan iteration; unrolling all: 1 to 6% faster, slower to compile

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        check_config(self, remat=REMAT, attention=KERNEL_NAMES)

    @classmethod
    def tiny(cls) -> "Config":
        """123,200 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(384, 64, 2, num_heads=16, num_kv_heads=8, head_dim=8, mlp=128)

    @classmethod
    def small(cls) -> "Config":
        """853,120 parameters. The laptop default, with bytes as tokens."""
        small = cls(384, 128, 4, num_heads=8, num_kv_heads=8, head_dim=16, mlp=352)
        return dataclasses.replace(small, remat="dots")

    @classmethod
    def medium(cls) -> "Config":
        """3,213,568 parameters. With bytes as tokens; published as transformer.stdlib_3m."""
        medium = cls(384, 256, 4, num_heads=8, num_kv_heads=8, head_dim=32, mlp=672)
        return dataclasses.replace(medium, remat="dots")

    @classmethod
    def gpt2_124m(cls) -> "Config":
        """123,587,328 parameters. GPT-2's shape, vocabulary padded to a multiple of 128."""
        return cls(50_304, 768, 12, num_heads=12, num_kv_heads=12, head_dim=64, mlp=2_048)

    @classmethod
    def llama_1b(cls) -> "Config":
        """1,235,814,400 parameters. Llama 3.2 1B."""
        llama = cls(128_256, 2_048, 16, num_heads=32, num_kv_heads=8, head_dim=64, mlp=8_192)
        scaling = (32.0, 1.0, 4.0, 8_192)
        return dataclasses.replace(llama, rope_theta=5e5, rope_scaling=scaling)

    @classmethod
    def llama_8b(cls) -> "Config":
        """8,030,261,248 parameters. Llama 3 8B."""
        llama = cls(128_256, 4_096, 32, num_heads=32, num_kv_heads=8, head_dim=128, mlp=14_336)
        return dataclasses.replace(llama, rope_theta=5e5, tie_embeddings=False)

    @classmethod
    def llama_70b(cls) -> "Config":
        """70,553,706,496 parameters. Llama 3 70B."""
        llama = cls(128_256, 8_192, 80, num_heads=64, num_kv_heads=8, head_dim=128, mlp=28_672)
        return dataclasses.replace(llama, rope_theta=5e5, tie_embeddings=False)


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "medium": Config.medium,
    "124m": Config.gpt2_124m,
    "1b": Config.llama_1b,
    "8b": Config.llama_8b,
    "70b": Config.llama_70b,
}

REMAT = REMAT_POLICIES  # what a layer keeps for its backward pass

# Axes that rules map; a weight's axis at rest → in use; dims that need not divide evenly.
LOGICAL_AXES, IN_USE, UNEVEN = DECODER_AXES, DECODER_IN_USE, DECODER_UNEVEN


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_eps)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x_BTD, at, kind, past=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), at, kind, past)
        x_BTD = x_BTD + checkpoint_name(out_BTD, "sublayer")
        return x_BTD + checkpoint_name(self.mlp(self.mlp_norm(x_BTD)), "sublayer"), kv


class Transformer(nnx.Module):
    """Tokens in, next-token logits out. See the module's docstring."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = vocabulary(config, rngs=rngs)
        # Every parameter of the layers starts with dim L, logical axis `layers`.
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs)
        self.final_norm = RMSNorm(config.embed, config.norm_eps)
        if not config.tie_embeddings:
            self.unembed = vocabulary(config, rngs=rngs)

    def __call__(self, tokens_BT, segment_ids_BT=None) -> jax.Array:
        """Returns logits [B, T, V] in float32; position t predicts token t + 1.

        Args:
          tokens_BT: int, below vocab_size. On a mesh, B must be divisible by the axes of `batch`.
          segment_ids_BT: int; positions attend only within their own segment. None: one per row.
        """
        x_BTD, table_RVD, _ = self._trunk(tokens_BT, segment_ids_BT)
        return unembed(x_BTD, table_RVD, self.config.vocab_size)

    def loss(self, tokens, targets, segment_ids=None):
        """Cross entropy of a batch, in nats.

        Args:
          tokens, segment_ids: as in `__call__`.
          targets: [B, T], int; targets below 0 are padding and don't count.

        Returns: (sum over targets, number of targets, aux), float32 scalars; aux maps a name to
          (sum, count): loss: the cross entropy.
        """
        x_BTD, table_RVD, _ = self._trunk(tokens, segment_ids)
        sizes = (self.config.vocab_size, self.config.loss_chunk)
        total, count = cross_entropy(x_BTD, table_RVD, targets, *sizes)
        return total, count, {"loss": (total, count)}

    def prefill(self, tokens_BT, lengths_B, slots: int) -> tuple[jax.Array, Cache]:
        """Reads prompts. Returns next-token logits [B, V] and a cache with room for more tokens.

        Args:
          tokens_BT: int, left-padded: row b's prompt is its last lengths_B[b] ≥ 1 tokens.
          slots: S ≥ T, the capacity of the cache in tokens, including prompts and padding.
        """
        first_B, positions_BT, prompt_BT = left_padded(tokens_BT, lengths_B)
        x_BTD, table_RVD, kv = self._trunk(tokens_BT, prompt_BT, positions_BT)
        logits_B1V = unembed(x_BTD[:, -1:], table_RVD, self.config.vocab_size)
        return logits_B1V[:, 0], fill_cache(kv, first_B, slots)

    def decode(self, tokens_B, cache: Cache) -> tuple[jax.Array, Cache]:
        """Reads one more token per row. Returns next-token logits [B, V] and the extended cache.

        A jitted caller should donate the cache, so that one slot is written in place. The cache
        must not be full: length < S.
        """
        x_B1D, table_RVD, kv = self._trunk(tokens_B[:, None], None, cache.next_B1, cache)
        logits_B1V = unembed(x_B1D, table_RVD, self.config.vocab_size)
        return logits_B1V[:, 0], cache.append(kv)

    def _trunk(self, tokens_BT, segment_ids_BT, positions_BT=None, cache=None):
        """Returns the layers' output, normed, [B, T, D] and the table to unembed it, [R, V, D].

        With positions, as in generation, also all layers' keys and values, each [L, B, T, K, H].
        """
        config, keep = self.config, positions_BT is not None
        table_RVD = table_copies(self.embed, config.dtype)
        at = positions(config, tokens_BT, segment_ids_BT, positions_BT, cache)

        def layer(x_BTD, weights_and_past, kind):
            weights, past = weights_and_past
            weights = in_use(weights, IN_USE, config.dtype)  # inside remat, which gathers again
            x_BTD, kv = weights(x_BTD, at, kind, past)
            return x_BTD, kv if keep else None

        layers = (self.layers, cache and (cache.k, cache.v))
        x_BTD = look_up(table_RVD, tokens_BT)
        remat, unroll = REMAT[config.remat], config.unroll
        x_BTD, kv = scan_layers(layer, x_BTD, layers, kinds(config), remat, unroll)
        if not config.tie_embeddings:
            table_RVD = table_copies(self.unembed, config.dtype)
        return self.final_norm(x_BTD), table_RVD, kv


complete = functools.partial(complete_tables, LOGICAL_AXES)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(
    {
        "dp": DP,
        "fsdp": DP | FSDP,
        "tp": DP | TP,
        "fsdp_tp": DP | FSDP | TP,
        "hsdp_tp": HSDP | TP,
    }
)
