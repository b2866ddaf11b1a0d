"""Published sizes of relatives: of Llama, BERT and SigLIP, beside those in the models' files."""

import dataclasses

from .bert import SIZES as BERT_SIZES, Config as BertConfig
from .core.layers import AttentionType
from .options.rope_scaling import Yarn
from .moe import SIZES as MOE_SIZES, Config as MoEConfig
from .siglip import SIZES as SIGLIP_SIZES, Config as SiglipConfig
from .llama_relatives import SIZES as TRANSFORMER_SIZES, Config as TransformerConfig

OLMO2 = {
    "num_heads": 32,
    "num_kv_heads": 32,
    "head_dim": 128,
    "norms": "after",
    "qk_norm": True,
    "joint_qk_norm": True,
    "norm_eps": 1e-6,
    "tie_embeddings": False,
}

GLM45 = {
    "vocab_size": 151_552,
    "num_heads": 96,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rotary_dims": 64,
    "qkv_bias": True,
    "experts_per_token": 8,
    "sigmoid": True,
    "rope_theta": 1e6,
    "tie_embeddings": False,
    "remat": "dispatched",
}


def mistral_small_24b() -> TransformerConfig:
    """23,572,403,200 parameters. Mistral Small 3.1, the text model."""
    return TransformerConfig(
        vocab_size=131_072, embed=5_120, num_layers=40, mlp=32_768, num_heads=32,
        num_kv_heads=8, head_dim=128, rope_theta=1e9, tie_embeddings=False,
    )  # fmt: skip


def ministral3_8b() -> TransformerConfig:
    """8,489,553,920 parameters. Ministral 3 8B, the text model."""
    return TransformerConfig(
        vocab_size=131_072, embed=4_096, num_layers=34, mlp=14_336, num_heads=32,
        num_kv_heads=8, head_dim=128, query_growth=0.1, rope_theta=1e6,
        rope_scaling=Yarn(16.0, 32.0, 1.0, 16_384, True, 1.0), tie_embeddings=False,
    )  # fmt: skip


def olmo2_7b() -> TransformerConfig:
    """7,298,617,344 parameters. OLMo 2 7B."""
    return TransformerConfig(
        vocab_size=100_352, embed=4_096, num_layers=32, mlp=11_008, rope_theta=5e5, **OLMO2,
    )  # fmt: skip


def olmo3_7b() -> TransformerConfig:
    """7,298,011,136 parameters. OLMo 3 7B, for rows of 65,536 tokens."""
    return TransformerConfig(
        vocab_size=100_278, embed=4_096, num_layers=32, mlp=11_008,
        layer_kinds=(
            *[AttentionType(4_096, 5e5)] * 3,
            AttentionType(None, 5e5, Yarn(8.0, 32.0, 1.0, 8_192, True, 1.2079441541679836)),
        ),
        **OLMO2,
    )  # fmt: skip


def phi3_mini() -> TransformerConfig:
    """3,821,079,552 parameters. Phi-3-mini-4k."""
    return TransformerConfig(
        vocab_size=32_064, embed=3_072, num_layers=32, mlp=8_192, num_heads=32, num_kv_heads=32,
        head_dim=96, sliding_window=2_047, tie_embeddings=False,
    )  # fmt: skip


def phi4() -> TransformerConfig:
    """14,659,507,200 parameters. Phi-4."""
    return TransformerConfig(
        vocab_size=100_352, embed=5_120, num_layers=40, mlp=17_920, num_heads=40,
        num_kv_heads=10, head_dim=128, rope_theta=250_000.0, tie_embeddings=False,
    )  # fmt: skip


def smollm3_3b() -> TransformerConfig:
    """3,075,098,624 parameters. SmolLM3 3B."""
    return TransformerConfig(
        vocab_size=128_256, embed=2_048, num_layers=36, mlp=11_008, num_heads=16,
        num_kv_heads=4, head_dim=128, norm_eps=1e-6,
        layer_kinds=(*[AttentionType(None, 5e6)] * 3, AttentionType(None, None)),
    )  # fmt: skip


def glm4_9b() -> TransformerConfig:
    """9,400,279,040 parameters. GLM-4 9B."""
    return TransformerConfig(
        vocab_size=151_552, embed=4_096, num_layers=40, mlp=13_696, num_heads=32,
        num_kv_heads=2, head_dim=128, norms="both", qkv_bias=True, rotary_dims=64,
        tie_embeddings=False,
    )  # fmt: skip


def seed_oss_36b() -> TransformerConfig:
    """36,151,104,512 parameters. Seed-OSS 36B."""
    return TransformerConfig(
        vocab_size=155_136, embed=5_120, num_layers=64, mlp=27_648, num_heads=80,
        num_kv_heads=8, head_dim=128, norm_eps=1e-6, qkv_bias=True, rope_theta=1e7,
        tie_embeddings=False,
    )  # fmt: skip


def qwen15_moe_a3b() -> MoEConfig:
    """14,315,784,192 parameters. 2,689,173,504 of them active. Qwen1.5-MoE A2.7B."""
    return MoEConfig(
        vocab_size=151_936, embed=2_048, num_layers=24, mlp=1_408, num_heads=16,
        num_kv_heads=16, head_dim=128, norm_eps=1e-6, num_experts=60, experts_per_token=4,
        normalize=False, qkv_bias=True, shared_mlp=5_632, shared_gate=True, rope_theta=1e6,
        tie_embeddings=False, remat="dispatched",
    )  # fmt: skip


def qwen2_57b_a14b() -> MoEConfig:
    """57,408,658,944 parameters. 14,249,270,784 of them active. Qwen2 57B-A14B."""
    return MoEConfig(
        vocab_size=151_936, embed=3_584, num_layers=28, mlp=2_560, num_heads=28, num_kv_heads=4,
        head_dim=128, norm_eps=1e-6, num_experts=64, experts_per_token=8, normalize=False,
        qkv_bias=True, shared_mlp=20_480, shared_gate=True, rope_theta=1e6,
        tie_embeddings=False, remat="dispatched",
    )  # fmt: skip


def olmoe_7b_a1b() -> MoEConfig:
    """6,919,161,856 parameters. 1,282,017,280 of them active. OLMoE 1B-7B."""
    return MoEConfig(
        vocab_size=50_304, embed=2_048, num_layers=16, mlp=1_024, num_heads=16, num_kv_heads=16,
        head_dim=128, num_experts=64, experts_per_token=8, normalize=False, qk_norm=True,
        joint_qk_norm=True, tie_embeddings=False, remat="dispatched",
    )  # fmt: skip


def minimax_m2() -> MoEConfig:
    """228,689,748,992 parameters. 11,030,537,216 of them active. MiniMax-M2."""
    return MoEConfig(
        vocab_size=200_064, embed=3_072, num_layers=62, mlp=1_536, num_heads=48, num_kv_heads=8,
        head_dim=128, norm_eps=1e-6, num_experts=256, experts_per_token=8, sigmoid=True,
        qk_norm=True, joint_qk_norm=True, rotary_dims=64, rope_theta=5e6, tie_embeddings=False,
        remat="dispatched",
    )  # fmt: skip


def glm45_air() -> MoEConfig:
    """106,852,245,504 parameters. 13,424,123,904 of them active. GLM-4.5-Air."""
    return MoEConfig(
        embed=4_096, num_layers=46, num_experts=128, mlp=1_408, shared_mlp=1_408,
        dense_layers=1, dense_mlp=10_944, **GLM45,
    )  # fmt: skip


def glm45() -> MoEConfig:
    """352,797,814,784 parameters. 33,632,251,904 of them active. GLM-4.5."""
    return MoEConfig(
        embed=5_120, num_layers=92, num_experts=160, mlp=1_536, shared_mlp=1_536,
        dense_layers=3, dense_mlp=12_288, route_scale=2.5, qk_norm=True, **GLM45,
    )  # fmt: skip


CLIP = {"norm_eps": 1e-5, "loss": "softmax", "clip": True, "activation": "quick"}


def clip_b32() -> SiglipConfig:
    """151,277,313 parameters. CLIP ViT-B/32."""
    return SiglipConfig(
        224, 32, 49_408, 77, 768, 12, num_heads=12, mlp=3_072, joint=512,
        text_tower=(512, 12, 8, 2_048), **CLIP,
    )  # fmt: skip


def clip_l14() -> SiglipConfig:
    """427,616,513 parameters. CLIP ViT-L/14."""
    return SiglipConfig(
        224, 14, 49_408, 77, 1_024, 24, num_heads=16, mlp=4_096, joint=768,
        text_tower=(768, 12, 12, 3_072), **CLIP,
    )  # fmt: skip


def roberta_base() -> BertConfig:
    """124,695,897 parameters. RoBERTa base."""
    sizes = {"vocab_size": 50_265, "token_types": 1, "norm_eps": 1e-5}
    return dataclasses.replace(BertConfig.bert_base(), **sizes)


def xlmr_base() -> BertConfig:
    """278,293,650 parameters. XLM-R base."""
    return dataclasses.replace(roberta_base(), vocab_size=250_002)


TRANSFORMER = TRANSFORMER_SIZES | {
    "mistral_small_24b": mistral_small_24b,
    "ministral3_8b": ministral3_8b,
    "olmo2_7b": olmo2_7b,
    "olmo3_7b": olmo3_7b,
    "phi3_mini": phi3_mini,
    "phi4": phi4,
    "smollm3_3b": smollm3_3b,
    "glm4_9b": glm4_9b,
    "seed_oss_36b": seed_oss_36b,
}

MOE = MOE_SIZES | {
    "qwen15_moe_a3b": qwen15_moe_a3b,
    "qwen2_57b_a14b": qwen2_57b_a14b,
    "olmoe_7b_a1b": olmoe_7b_a1b,
    "minimax_m2": minimax_m2,
    "glm45_air": glm45_air,
    "glm45": glm45,
}

BERT = BERT_SIZES | {"roberta_base": roberta_base, "xlmr_base": xlmr_base}
SIGLIP = SIGLIP_SIZES | {"clip_b32": clip_b32, "clip_l14": clip_l14}
