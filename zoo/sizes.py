"""Published sizes of relatives: of Llama, BERT, SigLIP and hybrids, beside those in the models' files."""

import dataclasses

from .bert import SIZES as BERT_SIZES, Config as BertConfig
from .core.layers import AttentionType
from .hybrid import SIZES as HYBRID_SIZES, Config as HybridConfig
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


# Of hybrids, Granite's other multipliers and all of Falcon's are in their folders alone.


def lfm2(embed: int, num_heads: int, mlp: int) -> HybridConfig:
    """LFM2 of 16 layers, six of which attend."""
    return HybridConfig(
        65_536, embed, 32, num_heads=num_heads, num_kv_heads=8, head_dim=64, mlp=mlp,
        pattern="C-C-*-" * 3 + "C-*-" * 3 + "C-", conv_width=3, qk_norm=True, rope_theta=1e6,
    )  # fmt: skip


def lfm2_350m() -> HybridConfig:
    """354,483,968 parameters. LFM2 350M."""
    return lfm2(embed=1_024, num_heads=16, mlp=4_608)


def lfm2_1b() -> HybridConfig:
    """1,170,340,608 parameters. LFM2 1.2B."""
    return lfm2(embed=2_048, num_heads=32, mlp=8_192)


def lfm2_8b_a1b() -> HybridConfig:
    """8,339,929,856 parameters. 1,557,740,288 of them active. LFM2 8B-A1B."""
    mixers = "CC*" + "CCC*" * 4 + "CC*CC"
    return HybridConfig(
        65_536, 2_048, 48, num_heads=32, num_kv_heads=8, head_dim=64, mlp=1_792,
        pattern="C-C-" + "".join(mixer + "E" for mixer in mixers[2:]), conv_width=3,
        qk_norm=True, rope_theta=1e6, num_experts=32, experts_per_token=4, dense_mlp=7_168,
        sigmoid=True, capacity=None, remat="dispatched",
    )  # fmt: skip


def granite4_h_micro() -> HybridConfig:
    """3,191,396,096 parameters. Granite 4.0 H-Micro."""
    return HybridConfig(
        100_352, 2_048, 80, num_heads=32, num_kv_heads=8, head_dim=64, mlp=8_192,
        pattern="M-" * 5 + "*-" + "M-" * 4, mamba_heads=64, attention_scale=1 / 64,
    )  # fmt: skip


def granite4_h_tiny() -> HybridConfig:
    """6,939,037,248 parameters. 1,465,470,528 of them active. Granite 4.0 H-Tiny."""
    return HybridConfig(
        100_352, 1_536, 80, num_heads=12, num_kv_heads=4, head_dim=128, mlp=512,
        pattern="ME" * 5 + "*E" + "ME" * 4, mamba_heads=48, num_experts=64,
        experts_per_token=6, shared_mlp=1_024, capacity=None, attention_scale=1 / 128,
        remat="dispatched",
    )  # fmt: skip


def granite4_h_small() -> HybridConfig:
    """32,207,337,984 parameters. 8,803,121,664 of them active. Granite 4.0 H-Small."""
    return HybridConfig(
        100_352, 4_096, 80, num_heads=32, num_kv_heads=8, head_dim=128, mlp=768,
        pattern="ME" * 5 + "*E" + "ME" * 4, mamba_heads=128, num_experts=72,
        experts_per_token=10, shared_mlp=1_536, capacity=None, attention_scale=1 / 128,
        remat="dispatched",
    )  # fmt: skip


def falcon_h1_1b() -> HybridConfig:
    """1,554,789,760 parameters. Falcon-H1 1.5B."""
    return HybridConfig(
        65_537, 2_048, 48, num_heads=8, num_kv_heads=2, head_dim=128, mlp=4_608, pattern="P-",
        mamba_heads=48, mamba_state_dim=256, mamba_norm=False, rope_theta=1e11,
        tie_embeddings=False,
    )  # fmt: skip


def falcon_h1_7b() -> HybridConfig:
    """7,585,513,568 parameters. Falcon-H1 7B."""
    return HybridConfig(
        130_048, 3_072, 88, num_heads=12, num_kv_heads=2, head_dim=128, mlp=12_288,
        pattern="P-", mamba_heads=24, mamba_head_dim=128, mamba_state_dim=256,
        mamba_norm=False, rope_theta=1e11, tie_embeddings=False,
    )  # fmt: skip


def nemotron_nano_9b() -> HybridConfig:
    """8,888,227,328 parameters. Nemotron Nano 9B v2."""
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    return HybridConfig(
        131_072, 4_480, 56, num_heads=40, num_kv_heads=8, head_dim=128, mlp=15_680,
        pattern=pattern, mamba_heads=128, mamba_groups=8, mamba_head_dim=80,
        activation="relu2", least_step=1e-3, tie_embeddings=False,
    )  # fmt: skip


def nemotron3_nano_30b() -> HybridConfig:
    """31,577,937,344 parameters. 3,580,073,408 of them active. Nemotron 3 Nano 30B-A3B."""
    pattern = "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME"
    return HybridConfig(
        131_072, 2_688, 52, num_heads=32, num_kv_heads=2, head_dim=128, mlp=1_856,
        pattern=pattern, mamba_heads=64, mamba_groups=8, activation="relu2",
        least_step=1e-3, num_experts=128, experts_per_token=6, shared_mlp=3_712,
        sigmoid=True, route_scale=2.5, capacity=None, tie_embeddings=False,
        remat="dispatched",
    )  # fmt: skip


def nemotron3_super_120b() -> HybridConfig:
    """120,668,687,360 parameters. 12,770,216,960 of them active. Nemotron 3 Super 120B."""
    pattern = "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME"
    return HybridConfig(
        131_072, 4_096, 88, num_heads=32, num_kv_heads=2, head_dim=128, mlp=2_688,
        pattern=pattern, mamba_heads=128, mamba_groups=8, activation="relu2",
        least_step=1e-3, num_experts=512, experts_per_token=22, expert_latent=1_024,
        shared_mlp=5_376, sigmoid=True, route_scale=5.0, capacity=None, tie_embeddings=False,
        remat="dispatched",
    )  # fmt: skip


def kimi_linear_48b() -> HybridConfig:
    """49,122,675,072 parameters. 3,484,453,248 of them active. Kimi Linear 48B-A3B."""
    pattern = "K-KEKE*E" + "KEKEKE*E" * 5 + "KEKE*E"
    return HybridConfig(
        163_840, 2_304, 54, num_heads=32, num_kv_heads=32, head_dim=192, mlp=1_024,
        pattern=pattern, delta_heads=32, delta_key_dim=128, delta_value_dim=128, kv_latent=512,
        shared_key_dim=64, value_dim=128, num_experts=256, experts_per_token=8, shared_mlp=1_024,
        dense_mlp=9_216, sigmoid=True, route_scale=2.446, capacity=None, tie_embeddings=False,
        remat="dispatched",
    )  # fmt: skip


def olmo_hybrid_7b() -> HybridConfig:
    """7,430,870,688 parameters. OLMo hybrid 7B."""
    return HybridConfig(
        100_352, 3_840, 64, num_heads=30, num_kv_heads=30, head_dim=128, mlp=11_008,
        pattern="D-D-D-*+", delta_heads=30, delta_key_heads=30, delta_key_dim=96,
        delta_value_dim=192, delta_most_write=2.0, delta_norm_eps=1e-5, attention_norms="after",
        qk_norm=True, joint_qk_norm=True, norm_eps=1e-6, tie_embeddings=False,
    )  # fmt: skip


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

HYBRID = HYBRID_SIZES | {
    "lfm2_350m": lfm2_350m,
    "lfm2_1b": lfm2_1b,
    "lfm2_8b_a1b": lfm2_8b_a1b,
    "granite4_h_micro": granite4_h_micro,
    "granite4_h_tiny": granite4_h_tiny,
    "granite4_h_small": granite4_h_small,
    "falcon_h1_1b": falcon_h1_1b,
    "falcon_h1_7b": falcon_h1_7b,
    "nemotron_nano_9b": nemotron_nano_9b,
    "nemotron3_nano_30b": nemotron3_nano_30b,
    "nemotron3_super_120b": nemotron3_super_120b,
    "kimi_linear_48b": kimi_linear_48b,
    "olmo_hybrid_7b": olmo_hybrid_7b,
}
