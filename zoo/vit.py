"""ViT: a Vision Transformer that classifies images (Dosovitskiy et al. 2021).

An image is cut into square patches, and a matmul embeds each. A learned class token goes in front,
learned positions are added, and the layers attend in both directions: LayerNorm before each
sublayer, biases, exact GELU. The class token's output is classified. LoRA adapters (Hu et al. 2021)
are optional. Layers are stacked and scanned, so compile time does not grow with depth.

Shapes: B batch, T positions (the class token, then patches row by row), S key positions, W image
height and width, P patch height and width, G = W / P, C image channels, D embed, N heads, H head
dim, F mlp, K classes, L layers.

Every parameter carries *logical* axis names. They have no effect until sharding rules map them to
mesh axes:

    model = ViT(Config.tiny(), rngs=nnx.Rngs(0))                     # no mesh, no rules, no context
    logits_BK = model(image_BWWC)

    rules = RULES["fsdp"]                                            # at the end of this file
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(rules.items())):
        graph, state = nnx.split(model)
        state = jax.device_put(state, nnx.get_named_sharding(state, mesh))   # each weight at rest
        logits_BK = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, image_BWWC)

jax.jit does not notice when the rules change: use a separate jitted function for each strategy.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .parts.classes import class_loss
from .parts.gelu import GELU, PlainMLP
from .parts.norms import layer_norm
from .core.layers import add_bias, add_output, dot, multiply, sublayer_input
from .parts.patches import embed_patches, prepend
from .core.sharding import (
    AxisNames, Rules, check_rules, complete_tables, constrain, explicit, in_use, param,
)  # fmt: skip
from .core.config import bounded, check_fields, one_of
from .core.stack import REMAT_POLICIES, fit_rules, scan_layers, stack
from .core.strategies import DECODER
from .parts.encoder_rules import encoder_rules
from .options import weights


@dataclasses.dataclass(frozen=True)
class Config:
    """The architecture and how to compute it. Named sizes are classmethods.

    The comment beside a field is also the help text of its flag in the recipes.
    """

    image_size: int  # W, height and width of pictures in pixels
    patch: int  # P, height and width of a patch in pixels; divides image_size
    embed: int  # D; num_heads divides it
    num_layers: int  # L
    num_heads: int  # N
    mlp: int  # F, hidden width of the MLP
    channels: int = 3  # C, of the image
    classes: int = 1_000  # K
    norm_eps: float = 1e-12
    # LoRA: x·W becomes x·W + (x·A)·B · lora_alpha / lora_rank. W is frozen; only A, B and the head
    # (nnx.LoRAParam) get gradients.
    # rank of adapters (LoRA) on frozen weights; 0: none, train all weights
    lora_rank: int = bounded(0, least=0)
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "up", "down")
    # How to compute it: nothing below changes the parameters.
    dtype: str = "float32"  # dtype of activations and matmuls; parameters, norms and loss: float32
    # format of the layers' matmuls: "int8" or "fp8", with scales; "": dtype
    matmul: str = one_of("", weights.MATMULS)
    # format of these matmuls' gradients: "bfloat16"; "": as matmul
    matmul_backward: str = one_of("", weights.MATMUL_GRADIENTS)
    # in which devices add gradients of weights: "float32"; "": dtype
    reduce_dtype: str = one_of("", weights.REDUCE_DTYPES)
    # what a layer keeps for its backward pass, see stack.REMAT_POLICIES
    remat: str = one_of("full", REMAT_POLICIES)
    unroll: int = 1  # layers per scan iteration; unrolling all: faster, slower to compile
    # How pictures become inputs: saved with the model and read by data pipelines.
    mean: tuple[float, ...] = ()  # of pixel values from 0 to 1, for each channel
    std: tuple[float, ...] = ()  # inputs are (pixel - mean) / std
    resample: str = "bilinear"  # filter that resizes pictures
    labels: tuple[str, ...] = ()  # names of the classes

    @property
    def num_positions(self) -> int:
        """T: the class token and the patches."""
        return (self.image_size // self.patch) ** 2 + 1

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        for name, length, part in (
            ("image_size", self.image_size, self.patch),
            ("embed", self.embed, self.num_heads),
        ):
            if length % part:
                raise ValueError(f"{name} {length} is not divisible by {part}")
        check_fields(self)
        weights.check(self)

    add_weights = weights.add_adapters
    use_layer = weights.use_layer
    use_weights = weights.use_weights

    @classmethod
    def tiny(cls) -> "Config":
        """18,218 parameters. For tests: every sharded dim is divisible by 8."""
        return cls(8, 2, 32, 2, num_heads=8, mlp=64, channels=1, classes=10)

    @classmethod
    def small(cls) -> "Config":
        """202,186 parameters. The laptop default, for 8 × 8 grey pixels."""
        small = cls(8, 2, 64, 4, num_heads=8, mlp=256, channels=1, classes=10)
        return dataclasses.replace(small, remat="none")

    @classmethod
    def ti16(cls) -> "Config":
        """5,717,416 parameters. ViT-Ti/16 (Touvron et al. 2021)."""
        return cls(224, 16, 192, 12, num_heads=3, mlp=768)

    @classmethod
    def s16(cls) -> "Config":
        """22,050,664 parameters. ViT-S/16 (Touvron et al. 2021)."""
        return cls(224, 16, 384, 12, num_heads=6, mlp=1_536)

    @classmethod
    def b16(cls) -> "Config":
        """86,567,656 parameters. ViT-B/16."""
        return cls(224, 16, 768, 12, num_heads=12, mlp=3_072)

    @classmethod
    def l16(cls) -> "Config":
        """304,326,632 parameters. ViT-L/16."""
        return cls(224, 16, 1_024, 24, num_heads=16, mlp=4_096)


SIZES = {
    "tiny": Config.tiny,
    "small": Config.small,
    "ti16": Config.ti16,
    "s16": Config.s16,
    "b16": Config.b16,
    "l16": Config.l16,
}

# The axes of a decoder, and those of what surrounds the layers. An image has few positions, so no
# strategy splits them.
AXES = AxisNames(
    logical_axes=DECODER.logical_axes
    | {
        "patch_rows": "both",  # P
        "patch_columns": "both",  # P
        "channels": "both",  # C
        "positions": "both",  # T, of the table of positions
        "classes": "both",  # K
    },
    in_use=DECODER.in_use,
    uneven=DECODER.uneven | dict.fromkeys(("channels", "positions", "classes"), "replicated"),
    substitutes=DECODER.substitutes,
)


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.embed, config.norm_eps, config.dtype)
        self.attention_norm = norm()
        self.attention = SelfAttention(config, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = PlainMLP(config, GELU["exact"], rngs=rngs)

    def __call__(self, x_BTD):
        out_BTD = self.attention(self.attention_norm(x_BTD))
        x_BTD = add_output(x_BTD, out_BTD)
        x_BTD = add_output(x_BTD, self.mlp(self.mlp_norm(x_BTD)))
        # Rules may split biases; the residual stream stays whole.
        return constrain(x_BTD, "batch", "residual_seq", "act_embed")


class ViT(nnx.Module):
    """image_BWWC → logits_BK. See the module's docstring."""

    axes = AXES

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        P, C, D, K = config.patch, config.channels, config.embed, config.classes
        T = config.num_positions
        axes = ("patch_rows", "patch_columns", "channels", "embed")
        self.patch = param(rngs, (P, P, C, D), axes, (P * P * C) ** -0.5)
        self.patch_bias = param(rngs, (D,), ("norm",), 0.0)
        # Nearly as large as patch embeddings, so that small models soon learn where a patch is.
        self.class_token = param(rngs, (D,), ("norm",), 0.5)
        self.positions = param(rngs, (T, D), ("positions", "embed"), 0.5)
        # Every parameter of the layers starts with dim L, logical axis `layers`.
        self.layers = stack(functools.partial(Layer, config), config.num_layers, rngs)
        self.final_norm = layer_norm(D, config.norm_eps, config.dtype)
        trained = nnx.LoRAParam if config.lora_rank else nnx.Param  # with adapters too
        self.head = param(rngs, (D, K), ("embed", "classes"), D**-0.5, trained)
        self.head_bias = param(rngs, (K,), ("classes",), 0.0, trained)

    def __call__(self, image_BWWC: jax.Array) -> jax.Array:
        """Returns logits [B, K] in float32. On a mesh, B must be divisible by the axes of `batch`."""
        check_rules(AXES.logical_axes)
        return self.classify(self.embed_patches(image_BWWC))

    def loss(self, image, label):
        """Cross entropy of a batch, in nats.

        Args:
          image: [B, W, W, C].
          label: [B], int; rows with a label below 0 only pad the batch and don't count.

        Returns: (sum over examples, number of examples, aux), float32 scalars; aux maps a name to
          (sum, count): loss: the cross entropy; accuracy: labels that are the most likely class.
        """
        return class_loss(self(image), label)

    def embed_patches(self, image_BWWC) -> jax.Array:
        """The class token and embeddings of all patches, with their positions: [B, T, D]."""
        config = self.config
        x_BTD = embed_patches(image_BWWC, self.patch, self.patch_bias, AXES, config)
        x_BTD = prepend(self.class_token, x_BTD)
        positions = config.use_weights(self.positions, AXES)
        positions_TD = constrain(positions[...], None, "act_embed")
        return (x_BTD + positions_TD.astype(jnp.float32)[None]).astype(config.dtype)

    @fit_rules
    def classify(self, x_BTD) -> jax.Array:
        """Runs the layers and classifies the class token: logits [B, K] in float32."""
        config = self.config

        def run_layer(x_BTD, layer):
            layer = config.use_layer(layer, AXES)  # inside remat, which gathers again
            return layer(x_BTD), None

        x_BTD = constrain(x_BTD, "batch", "residual_seq", "act_embed")
        policy = REMAT_POLICIES[config.remat]
        x_BTD, _ = scan_layers(run_layer, x_BTD, self.layers, policy, config.unroll)
        x_BD = constrain(self.final_norm(x_BTD), "batch", None, "act_embed")[:, 0]
        head = in_use(self.head, AXES.in_use)[...]
        logits_BK = dot("BD,DK->BK", x_BD.astype(head.dtype), head, explicit("batch", "classes"))
        # A rule may split K; the loss needs all of a row.
        return constrain(logits_BK + self.head_bias[...][None], "batch", None)


class SelfAttention(nnx.Module):
    """Multi-head attention (Vaswani et al. 2017) of every position to every other. Tensor
    parallelism splits the heads, and then the output costs one all-reduce. XLA computes it on all
    platforms, with all scores of a head in memory.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        D, N = config.embed, config.num_heads
        H = D // N
        inner = "embed", "heads", "head_dim"
        weight = functools.partial(param, rngs, (D, N, H), inner, D**-0.5)
        bias = functools.partial(param, rngs, (N, H), inner[1:], 0.0)
        self.q, self.q_bias = weight(), bias()
        self.k, self.k_bias = weight(), bias()
        self.v, self.v_bias = weight(), bias()
        out_stddev = (D * 2 * config.num_layers) ** -0.5  # 2L sublayers add to one residual
        self.o = param(rngs, (N, H, D), ("heads", "head_dim", "embed"), out_stddev)
        self.o_bias = param(rngs, (D,), ("norm",), 0.0)
        config.add_weights(self, rngs, q=1, k=1, v=1, o=2)

    def __call__(self, x_BTD):
        x_BTD = sublayer_input(x_BTD, self.q)
        q, k, v = (multiply(x_BTD, weight) for weight in (self.q, self.k, self.v))
        # k_bias adds the same to all scores of a query, which the softmax cancels. Computing that
        # would train it on rounding errors; it is a parameter because published models have it.
        q, v = add_bias(q, self.q_bias), add_bias(v, self.v_bias)
        all_positions = "batch", None, "heads", "head_dim"  # every query sees all positions
        k, v = constrain(k, *all_positions), constrain(v, *all_positions)
        scores = explicit("batch", "heads", "seq", None)
        scores_BNTS = dot("BTNH,BSNH->BNTS", q * q.shape[-1] ** -0.5, k, scores)
        weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1).astype(v.dtype)
        heads = explicit("batch", "seq", "heads", "head_dim")
        out_BTNH = jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v, out_sharding=heads)
        out_BTD = multiply(out_BTNH, self.o, contract=2, seq="residual_seq")
        return add_bias(out_BTD, self.o_bias)


complete = functools.partial(complete_tables, AXES.logical_axes)

# What each parallelism splits and costs: strategies.py. Those that split T or L are for decoders.
RULES: dict[str, Rules] = complete(encoder_rules())
