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
    Attention, Kind, check_config, kinds, logits_in_order, positions, read_prompts, read_token,
)  # fmt: skip
from .layers import (
    REMAT_POLICIES, GatedMLP, RMSNorm, fit_positions, layer_in_use, look_up, objective, scan_layers,
    stack, vocabulary, vocabulary_tables,
)  # fmt: skip
from .sharding import Rules, complete_tables
from .strategies import CP, DECODER, DP, FSDP, FSDP_CP, HSDP, PP, SP, TP


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
    matmul: str = ""  # of layers: "int8" or "fp8", see low_precision.py; "": in dtype
    matmul_backward: str = ""  # of gradients: "bfloat16"; "": as `matmul`
    remat: str = "full"  # what a layer keeps for its backward pass: a key of REMAT
    attention: str = "auto"  # "xla", a key of KERNELS, or "auto": the best for the device
    context: str = "auto"  # how to attend if rules split T: see way_to_attend
    pipeline: str = "1f1b"  # the schedule if rules split L, or "gpipe"; see pipeline.py
    pipe_microbatches: int = 0  # M, parts of a batch in the pipeline; 0: see pipeline.microbatches
    loss_chunk: int = 256  # C, positions of a sequence with logits at once; see positions_at_once
    unroll: int = 1  # layers per scan iteration; unrolling all: 1 to 6% faster, slower to compile

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        check_config(self, remat=REMAT)

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
LOGICAL_AXES, IN_USE, UNEVEN, POSITIONS = DECODER


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, eps=config.norm_eps)
        biases, qk_norm = "qkv" if config.qkv_bias else "", norm if config.qk_norm else None
        self.attention_norm = norm(config.embed)
        self.attention = Attention(config, biases, qk_norm, rngs=rngs)
        self.mlp_norm = norm(config.embed)
        self.mlp = GatedMLP(config, rngs=rngs)

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

    @fit_positions
    def __call__(self, tokens_BT, segment_ids_BT=None) -> jax.Array:
        """Returns logits [B, T, V] in float32; position t predicts token t + 1.

        Args:
          tokens_BT: int, below vocab_size. On a mesh, B must be divisible by the axes of `batch`.
          segment_ids_BT: int; positions attend only within their own segment. None: one per row.
        """
        return logits_in_order(self, tokens_BT, segment_ids_BT)

    @fit_positions
    def loss(self, tokens, targets, segment_ids=None):
        """Cross entropy of a batch, in nats.

        Args:
          tokens, segment_ids: as in `__call__`.
          targets: [B, T], int; targets below 0 are padding and don't count.

        Returns: (sum over targets, number of targets, aux), float32 scalars; aux maps a name to
          (sum, count): loss: the cross entropy.
        """
        return objective(self, (tokens, targets, segment_ids), IN_USE)[:3]

    def prefill(self, tokens_BT, lengths_B, slots: int):
        """Reads prompts. Returns next-token logits [B, V] and a Cache with room for more tokens.

        Args:
          tokens_BT: int, left-padded: row b's prompt is its last lengths_B[b] ≥ 1 tokens.
          slots: S ≥ T, the capacity of the cache in tokens, including prompts and padding.
        """
        return read_prompts(self, tokens_BT, lengths_B, slots)

    def decode(self, tokens_B, cache):
        """Reads one more token per row. Returns next-token logits [B, V] and the extended cache.

        A jitted caller should donate the cache, so that one slot is written in place. The cache
        must not be full: length < S.
        """
        return read_token(self, tokens_B, cache)

    def trunk(self, tokens_BT, segment_ids_BT, positions_BT=None, cache=None):
        """Returns the layers' output, normed, [B, T, D] and the table to unembed it, [R, V, D].

        With positions, as in generation, also all layers' keys and values, each [L, B, T, K, H].
        """
        tables = vocabulary_tables(self)
        at = positions(self.config, tokens_BT, segment_ids_BT, positions_BT, cache)
        keep = positions_BT is not None
        x_BTD, kv = self._layers(self.embed_tokens(tables, tokens_BT), at, cache, keep)
        return self.final_norm(x_BTD), tables[-1], kv

    def embed_tokens(self, tables, tokens_BT, positions_BT=None):
        """The layers' input, [B, T, D]; tables: of `vocabulary_tables`."""
        return look_up(tables[0], tokens_BT)

    @property
    def costs(self) -> dict[str, float]:
        return {}  # the objective is the cross entropy alone

    def run(self, x_BTD, tokens_BT, targets_BT, segment_ids_BT):
        """Runs the layers in training; see `objective`."""
        at = positions(self.config, tokens_BT, segment_ids_BT)
        return self._layers(x_BTD, at)[0], {}

    def _layers(self, x_BTD, at, cache=None, keep=False):
        config = self.config

        def layer(x_BTD, weights_and_past, kind):
            weights, past = weights_and_past
            weights = layer_in_use(weights, IN_USE, config)  # inside remat, which gathers again
            x_BTD, kv = weights(x_BTD, at, kind, past)
            return x_BTD, kv if keep else None

        layers, remat = (self.layers, cache and (cache.k, cache.v)), REMAT[config.remat]
        return scan_layers(layer, x_BTD, layers, kinds(config), remat, config.unroll)


complete = functools.partial(complete_tables, LOGICAL_AXES)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(
    {
        "dp": DP,
        "fsdp": DP | FSDP,
        "tp_sp": DP | TP | SP,
        "fsdp_tp_sp": DP | FSDP | TP | SP,
        "hsdp_tp_sp": HSDP | TP | SP,
        "tp": DP | TP,
        "fsdp_tp": DP | FSDP | TP,
        "hsdp_tp": HSDP | TP,
        "cp": DP | CP,
        "fsdp_cp": DP | CP | FSDP_CP,
        "fsdp_cp_tp": DP | CP | FSDP_CP | TP,
        "pp": DP | PP,
        "fsdp_pp": DP | FSDP | PP,
        "fsdp_pp_tp": DP | FSDP | PP | TP,
    }
)
