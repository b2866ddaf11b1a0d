"""What a decoder's Config states: its architecture, and how to compute it."""

import dataclasses
import math
from typing import ClassVar

from ..kernels.choice import KERNELS
from .layers import Kind, RopeScaling
from .stack import REMAT_POLICIES

CHOICES = {  # field → its valid values
    "matmul": ("", "int8", "fp8", "int8_weights"),
    "matmul_backward": ("", "bfloat16"),
    "reduce_dtype": ("", "float32"),
    "attention": KERNELS,
    "context": ("auto", "all-to-all", "ring"),
    "pipeline": ("1f1b", "interleaved", "gpipe"),
}
# Fields by which activations are multiplied or divided: from 1e-6 to 1e6, which float32 can bear.
FACTORS = ("embed_scale", "residual_scale", "attention_scale", "logits_divisor", "soft_cap")
FACTORS += ("logits_soft_cap", "route_scale", "swiglu_limit")


class Architecture:
    """The attributes that decoders read of a Config, which declares them as fields or properties.

    Those with a value here are optional.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    layer_kinds: tuple[Kind, ...] = ()  # one period of Kinds, repeated over the depth
    period: tuple[str, ...] = ()  # for layers of unequal shapes: each layer's stack in a period
    tie_embeddings: bool = True
    causal: bool = True  # whether a position attends to earlier ones only
    dense_layers: int = 0  # the first ones, which have an MLP in place of experts
    embed_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_soft_cap: float | None = None
    query_growth: float = 0.0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of one period of layers; layer l has kind l mod len(kinds)."""
        return self.layer_kinds or (Kind(self.sliding_window, self.rope_theta, self.rope_scaling),)

    @property
    def rotary_dim(self) -> int:
        """The dims of a head that rotary embeddings rotate."""
        return self.head_dim

    @property
    def scales_by_length(self) -> bool:
        """Whether attention depends on the length of a row or on places in it, not on distances alone."""
        scalings = (kind.rope_scaling for kind in self.kinds)
        return self.query_growth > 0 or any(x is not None and x.by_length for x in scalings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute(Architecture):
    """How to compute a decoder, and its adapters: fields of every decoder's Config.

    The comment beside a field of a Config is also the help text of its flag in the recipes.
    """

    # LoRA: x·W becomes x·W + (x·A)·B · lora_alpha / lora_rank. W is frozen; only A and B
    # (nnx.LoRAParam) get gradients.
    lora_rank: int = 0  # rank of adapters (LoRA) on frozen weights; 0: none, train all weights
    lora_alpha: float = 16.0  # adapters are scaled by lora_alpha / lora_rank
    # Weights with an adapter.
    lora_targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    # Nothing below changes the parameters.
    dtype: str = "float32"  # dtype of activations and matmuls; parameters, norms and loss: float32
    matmul: str = ""  # format of the layers' matmuls: "int8" or "fp8", with scales; "": dtype
    matmul_backward: str = ""  # format of these matmuls' gradients: "bfloat16"; "": as matmul
    reduce_dtype: str = ""  # in which devices add gradients of weights: "float32"; "": dtype
    remat: str = "full"  # what a layer keeps for its backward pass, see stack.REMAT_POLICIES
    attention: str = "auto"  # one of kernels.KERNELS; "auto": the best for the device
    context: str = "auto"  # how parts of T attend; "auto": all-to-all if there is a head for each
    pipeline: str = "1f1b"  # schedule of stages; "gpipe" keeps more activations and takes as long
    pipe_rounds: int = 2  # v, how often a microbatch visits each stage, with pipeline="interleaved"
    pipe_microbatches: int = 0  # M, parts of a batch in the pipeline; 0: up to 4 per stage
    load_limit: float = 0.0  # most load of a device's dropless experts, 1 if even; 0: drop nothing
    loss_chunk: int = 256  # positions of a sequence with logits at once; see positions_at_once
    unroll: int = 1  # layers per scan iteration; unrolling all: 1 to 6% faster, slower to compile

    ROTARY: ClassVar[str] = "rope_dim"  # the field that rotary_dim comes from, if not head_dim
    REMAT: ClassVar[dict] = REMAT_POLICIES
    # Others are ≥ 1.
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ("lora_rank", "pipe_microbatches", "mtp_depth")

    def __post_init__(self):
        """Raises ValueError if the configuration is invalid."""
        # Saved configs have kinds and rotary scalings as tuples.
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", read_scaling(self.rope_scaling))
        if self.layer_kinds:
            kinds = (Kind(*kind) for kind in self.layer_kinds)
            kinds = tuple(k._replace(rope_scaling=read_scaling(k.rope_scaling)) for k in kinds)
            object.__setattr__(self, "layer_kinds", kinds)
        for name, valid in (CHOICES | {"remat": tuple(self.REMAT)}).items():
            value = vars(self)[name]
            if value not in valid:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(filter(None, valid))}")
        if self.reduce_dtype and self.matmul:
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype} is for matmuls in dtype, and matmul={self.matmul}"
            )
        for kind in self.kinds:
            if kind.rope_theta is not None and not 1 < kind.rope_theta < math.inf:
                raise ValueError(f"rope_theta={kind.rope_theta} must be a finite number > 1")
        self._check_numbers()
        targets = type(self).lora_targets
        for name in self.lora_targets:
            if name not in targets:
                raise ValueError(
                    f"lora_targets has {name!r}, which is not one of {', '.join(targets)}"
                )
        self._check_heads()
        self._check_kinds()

    def _check_numbers(self):
        for name, value in vars(self).items():
            least = 0 if name in self.MAY_BE_ZERO else 1
            if type(value) is int and value < least:
                raise ValueError(f"{name}={value} must be ≥ {least}")
            if type(value) is float and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a finite number ≥ 0")
            if name in FACTORS and value is not None and not 1e-6 <= value <= 1e6:
                raise ValueError(f"{name}={value} must be from 1e-06 to 1e+06")
            if name == "mtp_depth" and value not in (0, 1):
                raise ValueError(f"mtp_depth={value} is not one of 0, 1")

    def _check_heads(self):
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"num_heads={heads} is not divisible by num_kv_heads={kv_heads}")
        if self.rotary_dim % 2 and any(kind.rope_theta is not None for kind in self.kinds):
            name = "head_dim" if self.rotary_dim == self.head_dim else self.ROTARY
            raise ValueError(
                f"{name}={self.rotary_dim} must be even: rotary embeddings rotate pairs of dims"
            )
        for kind in self.kinds:
            if kind.rope_scaling is not None:
                kind.rope_scaling.check(self.rotary_dim // 2)

    def _check_kinds(self):
        kinds = self.layer_kinds
        if kinds and self.sliding_window:
            raise ValueError(
                f"sliding_window={self.sliding_window} and layer_kinds exclude each other; state "
                "each kind's window in layer_kinds"
            )
        if len(kinds) > self.num_layers:
            raise ValueError(
                f"layer_kinds has {len(kinds)} kinds, more than num_layers={self.num_layers}"
            )
        for kind in kinds:
            if kind.window is not None and kind.window < 1:
                raise ValueError(
                    f"layer_kinds has window={kind.window}, which must be ≥ 1, or None"
                )


def read_scaling(stored) -> RopeScaling | None:
    """A rotary scaling, also from its `as_tuple`, as saved configs have it. Raises ValueError."""
    if stored is None or isinstance(stored, RopeScaling):
        return stored
    from ..options.rope_scaling import from_tuple

    return from_tuple(stored)
