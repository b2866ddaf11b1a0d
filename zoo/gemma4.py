"""Gemma4: Gemma 4's text models: local and global layers of unequal heads, with or without experts.

Of each few layers, all but the last have a sliding window. Global layers have heads, key-value heads
and rotary embeddings of their own, and may have no projection of values: these are the keys before
their norm. Queries and keys are normed with a scale, values without one. A layer has four norms and
ends in a factor, a buffer. The models come in three kinds:

- dense (12B, 31B);
- with experts beside the MLP (26B-A4B), whose router and outputs have norms of their own (normed.py);
- small ones (E2B, E4B), in which every layer reads an embedding of its own of each token
  (layer_embeddings.py), and the last layers attend to keys and values of earlier ones
  (shared_keys.py).

The facts are those of Gemma4TextModel in `transformers` (Google 2026).

Shapes: B batch, T positions, D embed, N heads, K kv heads, H head dim, F mlp, P layer embed, E
experts, V vocab, L layers.

    model = Gemma4(Config.tiny(), rngs=nnx.Rngs(0))
    logits_BTV = model(tokens_BT)  # on a mesh: see transformer.py
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .core.config import Bounds, bounded, factor, one_of
from .core.decoder import Decoder
from .core.layers import (
    AttentionType, GatedMLP, RMSNorm, add_output, multiply, sublayer_input,
)  # fmt: skip
from .core.sharding import Rules, complete_tables, constrain, ones, param, variable
from .experts.expert_strategies import EXPERT_DECODER, expert_rules
from .experts.mixture import EXPERT_REMAT, check_experts
from .experts.normed import NormedExperts, rms_normed
from .kernels.shared import soft_cap
from .options import layer_embeddings, shared_keys, unlike_layers
from .options.cache import ATTENTION, SLIDING
from .options.compute_options import ComputeOptions
from .options.layer_embeddings import COLUMNS, LayerEmbedding
from .options.rope_scaling import Proportional

READS = shared_keys.READS


@dataclasses.dataclass(frozen=True)
class Config(ComputeOptions):
    """The architecture. transformer.Config and moe.Config explain the fields without a comment."""

    vocab_size: int
    embed: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # of sliding layers
    head_dim: int  # of sliding layers
    global_kv_heads: int  # of global layers
    global_head_dim: int  # of global layers; even
    mlp: int  # F, hidden width of the GeGLU
    sliding_window: int  # positions that a sliding layer sees
    attention_every: int = 6  # each layer of this number is global; those between have the window
    keys_as_values: bool = True  # global layers have no projection of values
    shared_layers: int = bounded(
        0, least=0
    )  # the last ones, which have no keys of their own and attend to those of earlier layers
    wide_shared_layers: bool = False  # the MLPs of these are twice as wide
    layer_embed: int = bounded(0, least=0)  # P, of each layer's own embedding of a token; 0: none
    num_experts: int = bounded(0, least=0)  # beside the MLP; 0: none
    experts_per_token: int = bounded(0, least=0)
    expert_mlp: int = bounded(0, least=0)  # hidden width of one expert
    capacity: float | None = 1.25  # None: dropless, as the published model
    balance_weight: float = 1e-3
    logits_soft_cap: float | None = factor(30.0)
    norm_eps: float = 1e-6
    rope_theta: float = 1e6  # of global layers
    local_rope_theta: float = 1e4  # of sliding layers
    rotary_fraction: float = dataclasses.field(
        default=0.25, metadata={"bounds": Bounds(least=1e-6, most=1)}
    )  # of the dims of a global layer's heads
    global_window: int | None = None  # of global layers; the published models have none
    tie_embeddings: bool = True
    _: dataclasses.KW_ONLY

    remat: str = one_of("full", EXPERT_REMAT)

    REMAT = EXPERT_REMAT
    WINDOWS: ClassVar = ("sliding_window", "global_window")

    def __post_init__(self):
        super().__post_init__()
        if self.num_experts:
            check_experts(self)
            if not self.expert_mlp:
                raise ValueError(f"num_experts={self.num_experts} need expert_mlp ≥ 1")
        if self.num_heads % self.global_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by "
                f"global_kv_heads={self.global_kv_heads}"
            )
        if self.global_head_dim % 2:
            raise ValueError(
                f"global_head_dim={self.global_head_dim} must be even: rotary embeddings rotate "
                "pairs of dims"
            )
        if self.num_layers - self.shared_layers < self.attention_every:
            raise ValueError(
                f"num_layers={self.num_layers} without shared_layers={self.shared_layers} is less "
                f"than attention_every={self.attention_every}, so no layer would make global keys"
            )

    @property
    def pattern(self) -> tuple[str, ...]:
        """The stacks of the layers of a period, those that share keys aside."""
        return (SLIDING,) * (self.attention_every - 1) + (ATTENTION,)

    @property
    def period(self) -> tuple[str, ...]:
        """The stacks of layers, in an order that repeats.

        A stage of a pipeline gets whole periods. What layers share can't cross stages, so then one
        period has all layers.
        """
        if not self.shared_layers and not self.layer_embed:
            return self.pattern
        first_shared = self.num_layers - self.shared_layers
        names = [self.pattern[l % self.attention_every] for l in range(self.num_layers)]
        shared = (READS[name] for name in names[first_shared:])
        return (*names[:first_shared], *shared)

    @property
    def kinds(self) -> tuple[AttentionType, ...]:
        local = AttentionType(self.sliding_window, self.local_rope_theta)
        scaling = Proportional(self.global_head_dim, self.rotary_fraction)
        wide = AttentionType(self.global_window, self.rope_theta, scaling)
        return (local,) * (self.attention_every - 1) + (wide,)

    def kv_shape(self, stack: str) -> tuple[int, int]:
        """K and H of the layers of a stack."""
        if stack in (SLIDING, READS[SLIDING]):
            return self.num_kv_heads, self.head_dim
        return self.global_kv_heads, self.global_head_dim

    def finish_logits(self, logits: jax.Array) -> jax.Array:
        return soft_cap(logits, self.logits_soft_cap)

    @classmethod
    def tiny(cls) -> "Config":
        """405,696 parameters. 258,240 of them active. For tests: 8 divides every sharded dim."""
        return cls(
            384, 64, 4, num_heads=16, num_kv_heads=8, head_dim=8, global_kv_heads=8,
            global_head_dim=16, mlp=64, sliding_window=7, attention_every=2, num_experts=8,
            experts_per_token=2, expert_mlp=32,
            # Outputs begin small, and the norms after them amplify rounding: with the published 1e-6,
            # gradients on two meshes differ by 2.3e-6, with this by 1.6e-6.
            norm_eps=0.1,
        )  # fmt: skip

    @classmethod
    def small(cls) -> "Config":
        """1,671,248 parameters. The laptop default, with bytes as tokens."""
        return cls(
            384, 128, 6, num_heads=8, num_kv_heads=4, head_dim=16, global_kv_heads=4,
            global_head_dim=32, mlp=352, sliding_window=32, attention_every=3, shared_layers=3,
            keys_as_values=False, wide_shared_layers=True, layer_embed=16, remat="dots",
        )  # fmt: skip

    @classmethod
    def gemma4_e2b(cls) -> "Config":
        """4,628,569,344 parameters. The text model of Gemma 4 E2B."""
        return cls(
            262_144, 1_536, 35, num_heads=8, num_kv_heads=1, head_dim=256, global_kv_heads=1,
            global_head_dim=512, mlp=6_144, sliding_window=512, attention_every=5,
            keys_as_values=False, shared_layers=20, wide_shared_layers=True, layer_embed=256,
        )  # fmt: skip

    @classmethod
    def gemma4_e4b(cls) -> "Config":
        """7,463,013,376 parameters. The text model of Gemma 4 E4B."""
        return cls(
            262_144, 2_560, 42, num_heads=8, num_kv_heads=2, head_dim=256, global_kv_heads=2,
            global_head_dim=512, mlp=10_240, sliding_window=512, keys_as_values=False,
            shared_layers=18, layer_embed=256,
        )  # fmt: skip

    @classmethod
    def gemma4_12b(cls) -> "Config":
        """11,907,350,272 parameters. The text model of Gemma 4 12B."""
        return cls(
            262_144, 3_840, 48, num_heads=16, num_kv_heads=8, head_dim=256, global_kv_heads=1,
            global_head_dim=512, mlp=15_360, sliding_window=1_024,
        )  # fmt: skip

    @classmethod
    def gemma4_26b_a4b(cls) -> "Config":
        """25,233,141,760 parameters. 3,822,530,560 of them active. Gemma 4 26B-A4B, its text model."""
        return cls(
            262_144, 2_816, 30, num_heads=16, num_kv_heads=8, head_dim=256, global_kv_heads=2,
            global_head_dim=512, mlp=2_112, sliding_window=1_024, num_experts=128,
            experts_per_token=8, expert_mlp=704, capacity=None, remat="dispatched",
        )  # fmt: skip

    @classmethod
    def gemma4_31b(cls) -> "Config":
        """30,697,345,280 parameters. The text model of Gemma 4 31B."""
        return cls(
            262_144, 5_376, 60, num_heads=32, num_kv_heads=16, head_dim=256, global_kv_heads=4,
            global_head_dim=512, mlp=21_504, sliding_window=1_024,
        )  # fmt: skip


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "e2b": Config.gemma4_e2b,
    "e4b": Config.gemma4_e4b,
    "12b": Config.gemma4_12b,
    "26b_a4b": Config.gemma4_26b_a4b,
    "31b": Config.gemma4_31b,
}

AXES = dataclasses.replace(
    EXPERT_DECODER,
    logical_axes=EXPERT_DECODER.logical_axes
    | {
        "layer_embed": "both",  # P
        COLUMNS: "weights",  # of the table of layer embeddings, which is not gathered
    },
)


class LayerScalar(nnx.Variable):
    """A factor of a layer's output: a buffer, which training leaves as it is, as in `transformers`.

    The norms of later layers undo it, so its gradient would be little but rounding.
    """


class Layer(nnx.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), with experts beside the MLP or not;
    then perhaps what the layer's own embeddings add; all of it times a scalar.
    """

    def __init__(self, config: Config, stack: str, *, rngs: nnx.Rngs):
        norm = functools.partial(RMSNorm, config.embed, config.norm_eps)
        reads = stack in READS.values()
        width = config.mlp * 2 if reads and config.wide_shared_layers else config.mlp
        self.attention_norm = norm()
        self.attention = Attention(config, stack, rngs=rngs)
        self.post_attention_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(config, jax.nn.gelu, width, rngs=rngs)  # by tanh
        self.experts = NormedExperts(config, rngs=rngs) if config.num_experts else None
        self.mlp_out_norm: Any = norm() if config.num_experts else None
        self.post_mlp_norm = norm()
        embeds = config.layer_embed > 0
        self.embedding = LayerEmbedding(config, rngs=rngs) if embeds else None
        self.post_embedding_norm = norm() if embeds else None
        self.scalar = ones((), (), LayerScalar)

    def __call__(self, x_BTD, inputs, kind, cache_index=None, shared_kv=None, embedding_BTP=None):
        """A Decoder's layer; for shared_kv and embedding_BTP, see shared_keys.run_layers."""
        normed_BTD = self.attention_norm(x_BTD)
        out_BTD, kv = self.attention(normed_BTD, inputs, kind, cache_index, shared_kv)
        x_BTD = add_output(x_BTD, out_BTD, self.post_attention_norm)
        out_BTD, metrics = self.feed_forward(x_BTD, inputs)
        x_BTD = add_output(x_BTD, out_BTD, self.post_mlp_norm)
        if self.embedding is not None:
            out_BTD = self.embedding(x_BTD, embedding_BTP)
            x_BTD = add_output(x_BTD, out_BTD, self.post_embedding_norm)
        x_BTD = x_BTD * self.scalar[...].astype(x_BTD.dtype)
        return constrain(x_BTD, *STREAM), kv, metrics

    def feed_forward(self, x_BTD, inputs) -> tuple[jax.Array, dict]:
        """The output of the MLP, or of the MLP and the experts, and the experts' metrics."""
        out_BTD = self.mlp(self.mlp_norm(x_BTD))
        if self.experts is None:
            return out_BTD, {}
        routed_BTD, metrics = self.experts(x_BTD, inputs)
        return constrain(self.mlp_out_norm(out_BTD), *STREAM) + routed_BTD, metrics


STREAM = ("batch", "residual_seq", "act_embed")  # of [B, T, D]


class Gemma4(Decoder):
    """Tokens in, next-token logits out, within ±logits_soft_cap if there is one."""

    axes = AXES
    make_tables = layer_embeddings.make_tables
    make_layers = unlike_layers.make_layers
    begin = layer_embeddings.begin
    run_layers = shared_keys.run_layers

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        super().__init__(config, Layer, rngs=rngs)

    def embed_tokens(self, tables, tokens_BT, inputs) -> jax.Array:
        return super().embed_tokens(tables, tokens_BT, inputs) * math.sqrt(self.config.embed)

    @property
    def costs(self) -> dict[str, float]:
        return {"balance": self.config.balance_weight} if self.config.num_experts else {}


class Attention(nnx.Module):
    """Grouped-query attention whose scores are not divided by √H. Tensor parallelism splits the
    heads, and then the output costs one all-reduce.
    """

    def __init__(self, config: Config, stack: str, *, rngs: nnx.Rngs):
        D, N = config.embed, config.num_heads
        K, H = config.kv_shape(stack)
        norm = functools.partial(RMSNorm, H, config.norm_eps)
        has_keys = stack not in READS.values()
        has_values = has_keys and not (config.keys_as_values and stack == ATTENTION)
        kv_axes = ("embed", "kv_heads", "head_dim")
        out_stddev = (N * H * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.eps = config.norm_eps
        self.q = param(rngs, (D, N, H), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = param(rngs, (D, K, H), kv_axes, D**-0.5) if has_keys else None
        self.v = param(rngs, (D, K, H), kv_axes, D**-0.5) if has_values else None
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        self.q_norm = norm()
        self.k_norm: Any = norm() if has_keys else None
        if has_keys:  # scores begin divided by √H, which then is learned
            self.k_norm.scale = variable(jnp.full(H, H**-0.5, jnp.float32), ("norm",))
        of_keys = {"k": 1} if has_keys else {}
        of_values = {"v": 1} if has_values else {}
        config.add_weights(self, rngs, q=1, **of_keys, **of_values, o=2)

    def __call__(
        self, x_BTD, inputs, kind: AttentionType, cache_index=None, shared_kv=None
    ) -> tuple[jax.Array, Any]:
        """Returns (output to add to the residual, (keys, values))."""
        x_BTD = sublayer_input(x_BTD, self.q)
        q_BTNH = inputs.rotate(self.q_norm(multiply(x_BTD, self.q)), kind)
        q_BTNH = q_BTNH * math.sqrt(q_BTNH.shape[-1])  # by which attention divides scores
        k_BTKH, v_BTKH = shared_kv or self.keys_and_values(x_BTD, inputs, kind)
        out_BTNH = inputs.attend(q_BTNH, k_BTKH, v_BTKH, kind, cache_index)
        out_BTD = multiply(out_BTNH, self.o, contract=2, seq="residual_seq")
        return out_BTD, (k_BTKH, v_BTKH)

    def keys_and_values(self, x_BTD, inputs, kind) -> tuple[jax.Array, jax.Array]:
        """The layer's own keys, rotated, and values; x_BTD: from `sublayer_input`."""
        assert self.k is not None, "a layer that shares keys has none of its own"
        k_BTKH = multiply(x_BTD, self.k)
        v_BTKH = rms_normed(k_BTKH if self.v is None else multiply(x_BTD, self.v), self.eps)
        return inputs.rotate(self.k_norm(k_BTKH), kind), v_BTKH


complete = functools.partial(complete_tables, AXES.logical_axes)

# Strategy → logical axis → mesh axis; see strategies.py. Where `model` does not divide the kv heads of
# global layers (12b has one), those of all layers are replicated. A pipeline's stage is a number of
# whole periods; the small models, whose layers share keys, have one period and so one stage.
RULES: dict[str, Rules] = complete(expert_rules(COLUMNS))
