"""LlamaOptions: what relatives of Llama do differently, as fields of a Config and as parts of a Layer."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
from flax import nnx

from ..core.layers import AttentionType, RMSNorm
from ..core.vocabulary import look_up
from .general_attention import GeneralAttention
from .compute_options import ComputeOptions
from ..core.config import bounded, factor, one_of

NORMS = ("before", "after", "both")  # valid values of LlamaOptions.norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaOptions(ComputeOptions):
    """What relatives of Llama do differently, off by default: fields of LlamaRelative and MoE."""

    # of a sublayer: "before" it, "after" it (OLMo 2) or "both" (GLM-4)
    norms: str = one_of("before", NORMS)
    qkv_bias: bool = False
    o_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False  # QK-norm over all heads together (OLMo 2); needs qk_norm
    rotary_dims: int = bounded(0, least=0)  # the first dims of a head, which rotate; 0: all
    embed_scale: float = factor(1.0)  # factor of embeddings (Granite, as the next three)
    residual_scale: float = factor(1.0)  # factor of what a sublayer adds to the residual
    attention_scale: float | None = factor(None)  # factor of scores; None: 1 / sqrt(head_dim)
    logits_divisor: float = factor(1.0)
    # Queries at position t are multiplied by 1 + query_growth · ln(1 + ⌊t / original length⌋), with
    # the original length of their rotary scaling (Ministral 3).
    query_growth: float = 0.0

    ROTARY: ClassVar[str] = "rotary_dims"

    @property
    def rotary_dim(self) -> int:
        return self.rotary_dims or self.head_dim

    @property
    def attention_kinds(self) -> tuple[AttentionType, ...]:
        """`kinds` without layers that don't attend."""
        return self.kinds

    @property
    def scales_by_length(self) -> bool:
        return self.query_growth > 0 or super().scales_by_length

    def __post_init__(self):
        super().__post_init__()
        if self.joint_qk_norm and not self.qk_norm:
            raise ValueError("joint_qk_norm needs qk_norm")
        if self.query_growth:
            from .rope_scaling import Yarn

            if not all(isinstance(kind.rope_scaling, Yarn) for kind in self.attention_kinds):
                raise ValueError(
                    "query_growth needs rotary embeddings scaled by Yarn in all layers"
                )
        if self.rotary_dims > self.head_dim:
            raise ValueError(
                f"rotary_dims={self.rotary_dims} is more than head_dim={self.head_dim}"
            )

    def finish_logits(self, logits: jax.Array) -> jax.Array:
        return logits if self.logits_divisor == 1 else logits / self.logits_divisor


def make_attention(config, *, rngs: nnx.Rngs) -> GeneralAttention:
    """The attention of a Layer."""
    scale = config.attention_scale  # GeneralAttention's is relative to 1 / sqrt(head_dim)
    return GeneralAttention(
        config,
        biases=("q", "k", "v") * config.qkv_bias + ("o",) * config.o_bias,
        norm=functools.partial(RMSNorm, eps=config.norm_eps) if config.qk_norm else None,
        joint=config.joint_qk_norm,
        scale=1.0 if scale is None else scale * math.sqrt(config.head_dim),
        growth=config.query_growth,
        rngs=rngs,
    )


def make_norms(config, norms: str = "") -> tuple[RMSNorm | None, RMSNorm | None]:
    """The norms before and after a sublayer; norms: where, instead of config.norms."""
    norms = norms or config.norms
    norm = functools.partial(RMSNorm, config.embed, config.norm_eps)
    before = norm() if norms != "after" else None
    return before, norm() if norms != "before" else None


def embed_scaled(self, tables, tokens_BT, inputs) -> jax.Array:
    """`Decoder.embed_tokens` times config.embed_scale."""
    x_BTD = look_up(tables[0], tokens_BT)
    return x_BTD if self.config.embed_scale == 1 else x_BTD * self.config.embed_scale
