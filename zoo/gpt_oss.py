"""GPT-OSS: OpenAI's decoder-only language model with a mixture of experts (OpenAI 2025).

Attention sinks (Xiao et al. 2023): each head has a score that takes part in the softmax and has no
value. Every other layer has a sliding window; all have YaRN (Peng et al. 2023) and biases. A router
sends each position to `experts_per_token` of `num_experts` experts, whose SwiGLU is clamped.

Shapes: B batch, T positions, D embed, F hidden width of an expert, V vocab, E experts.

    model = GptOss(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)  # on a mesh: see transformer.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .options.general_attention import GeneralAttention
from .options.compute_options import ComputeOptions
from .core.config import factor, one_of
from .core.decoder import Decoder
from .experts.mixture import EXPERT_REMAT, check_experts, choose, mix
from .core.layers import AttentionType, RMSNorm, add_bias, add_output, multiply
from .options.periods import scan_kinds
from .options.rope_scaling import Yarn
from .core.sharding import Rules, complete_tables, constrain, param
from .experts.expert_strategies import EXPERT_DECODER, expert_rules
from .experts.replay import Routes

YARN = Yarn(32.0, 32.0, 1.0, 4_096, False, 1.3465735902799727)  # from 4,096 to 131,072


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture. moe.Config explains the fields without a comment.

    All kernels but `xla` have sinks.
    """

    vocab_size: int  # V
    embed: int  # D
    num_layers: int  # L
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int  # F
    num_experts: int  # E
    experts_per_token: int  # J
    capacity: float | None = 1.25  # slots of an expert, as in moe.Config; published: None
    balance_weight: float = 0.01
    router_z_weight: float = 0.0
    swiglu_alpha: float = 1.702  # (up + 1) · gate · sigmoid(alpha · gate)
    swiglu_limit: float = factor(7.0)  # of gate from above, of up on both sides
    norm_eps: float = 1e-5
    # One period of layers; each kind has its own window and rotary embeddings.
    layer_kinds: tuple[AttentionType, ...] = (
        AttentionType(128, 1.5e5, YARN),
        AttentionType(None, 1.5e5, YARN),
    )
    tie_embeddings: bool = False
    _: dataclasses.KW_ONLY
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o")

    remat: str = one_of("full", EXPERT_REMAT)

    REMAT = EXPERT_REMAT

    def __post_init__(self):
        super().__post_init__()
        check_experts(self)

    @classmethod
    def tiny(cls) -> "Config":
        """300,016 parameters. 150,256 of them active. For tests: 8 divides every sharded dim."""
        tiny = cls(384, 64, 2, 16, 8, head_dim=8, mlp=64, num_experts=8, experts_per_token=2)
        kinds = (AttentionType(8, 1e2, YARN),)  # one kind compiles faster
        return dataclasses.replace(tiny, layer_kinds=kinds)

    @classmethod
    def small(cls) -> "Config":
        """2,496,704 parameters. 863,168 of them active. The laptop default, with bytes as tokens."""
        return cls(
            384, 128, 4, num_heads=8, num_kv_heads=8, head_dim=16,
            mlp=176, num_experts=8, experts_per_token=2, capacity=2.0, balance_weight=0.03,
            layer_kinds=(AttentionType(32, 1e4), AttentionType(None, 1e4)), tie_embeddings=True, remat="dots",
        )  # fmt: skip

    @classmethod
    def gpt_oss_20b(cls) -> "Config":
        """20,914,757,184 parameters. 4,187,440,704 of them active. gpt-oss-20b."""
        return cls(
            201_088, 2_880, 24, num_heads=64, num_kv_heads=8, head_dim=64,
            mlp=2_880, num_experts=32, experts_per_token=4, remat="dispatched",
        )  # fmt: skip

    @classmethod
    def gpt_oss_120b(cls) -> "Config":
        """116,829,156,672 parameters. 5,711,982,912 of them active. gpt-oss-120b."""
        return dataclasses.replace(cls.gpt_oss_20b(), num_layers=36, num_experts=128)


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "20b": Config.gpt_oss_20b,
    "120b": Config.gpt_oss_120b,
}


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = GeneralAttention(
            config, biases=("q", "k", "v", "o"), sinks=True, rngs=rngs
        )
        self.mlp_norm = RMSNorm(config.embed, config.norm_eps)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x_BTD, inputs, kind, cache_index=None):
        out_BTD, kv = self.attention(self.attention_norm(x_BTD), inputs, kind, cache_index)
        x_BTD = add_output(x_BTD, out_BTD)
        out_BTD, metrics = self.experts(self.mlp_norm(x_BTD), inputs)
        x_BTD = add_output(x_BTD, out_BTD)
        return constrain(x_BTD, "batch", "residual_seq", "act_embed"), kv, metrics


class GptOss(Decoder):
    """Tokens in, next-token logits out. See the module's docstring."""

    axes = EXPERT_DECODER
    scan = scan_kinds

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, Layer, rngs=rngs)

    @property
    def costs(self) -> dict[str, float]:
        return {"balance": self.config.balance_weight, "router_z": self.config.router_z_weight}


class Experts(nnx.Module):
    """A mixture of clamped SwiGLU experts: each position gets the weighted sum of their outputs."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, E, F, L = config.embed, config.num_experts, config.mlp, config.num_layers
        self.config = config
        self.router = param(rngs, (D, E), ("norm", "router"), D**-0.5)
        self.router_bias = param(rngs, (E,), ("router",), 0.0)
        self.gate = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.gate_bias = param(rngs, (E, F), ("expert", "mlp"), 0.0)
        self.up = param(rngs, (E, D, F), ("expert", "expert_embed", "mlp"), D**-0.5)
        self.up_bias = param(rngs, (E, F), ("expert", "mlp"), 0.0)
        self.down = param(rngs, (E, F, D), ("expert", "mlp", "expert_embed"), (2 * L * F) ** -0.5)
        self.down_bias = param(rngs, (E, D), ("router", "norm"), 0.0)
        self.routes = Routes()
        config.add_weights(self, rngs, gate=1, up=1, down=1)

    def __call__(self, x_BTD, inputs):
        """Returns the output to add to the residual, and the metrics of `measure`; see `mix`."""
        weights = (self.gate, self.gate_bias, self.up, self.up_bias, self.down)
        out_BTD, metrics, share_BTE = mix(
            x_BTD, self.config, inputs, route=self.route, expert=self.compute, weights=weights
        )
        # Devices that share out F would each add these biases, so they are outside of `compute`.
        bias_BTD = multiply(share_BTE.astype(out_BTD.dtype), self.down_bias, seq="residual_seq")
        return out_BTD + bias_BTD, metrics

    def route(self, x_BTD, counted_BT, slots: int, load_limit: float = 0.0):
        """Chooses experts by logits in float32; weights are a softmax over those of the chosen.

        Returns: as `choose`, and the experts' weights at each position, [B, T, E].
        """
        with jax.default_matmul_precision("highest"):
            logits_BTE = multiply(x_BTD.astype(jnp.float32), self.router)
        logits_BTE = add_bias(logits_BTE, self.router_bias)
        choice, metrics = choose(
            self.config, logits_BTE, counted_BT, slots, load_limit,
            given_BTJ=self.routes.experts_BTJ(),
        )  # fmt: skip
        expert_BTJ, weight_BTJ, place_BTJ = choice
        kept_BTJ1 = jnp.where(place_BTJ < slots, weight_BTJ, 0)[..., None]
        share_BTE = (jax.nn.one_hot(expert_BTJ, self.config.num_experts) * kept_BTJ1).sum(axis=2)
        return choice, metrics, share_BTE

    def compute(self, product, x, gate, gate_bias, up, up_bias, down):
        """(u + 1) · g · sigmoid(alpha · g) times down, without down's bias; g and u are clamped."""
        alpha = self.config.swiglu_alpha
        limit = self.config.swiglu_limit
        ones = jnp.ones_like(x[..., :1])
        # `product` gives each row the bias of its own expert.
        gate = jnp.minimum(product(x, gate) + product(ones, gate_bias[:, None]), limit)
        up = jnp.clip(product(x, up) + product(ones, up_bias[:, None]), -limit, limit)
        return product((up + 1) * gate * jax.nn.sigmoid(alpha * gate), down)


complete = functools.partial(complete_tables, EXPERT_DECODER.logical_axes)

# Strategy → logical axis → mesh axis. What each parallelism splits and costs: strategies.py.
RULES: dict[str, Rules] = complete(expert_rules())
