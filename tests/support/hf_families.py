"""Small models of `transformers`, a family each, whose folders tests/golden/hf has.

`python -m tests.by_hand.hf_parity` makes and compares them.
"""

import dataclasses

import numpy as np

from tests.conftest import ROOT

KEYS = ROOT / "tests" / "golden" / "hf_keys.json"  # of config.json, see declared_keys
TOLERANCE = 2e-5  # of a logit, in float32
MESHES = [("1x1", "dp"), ("2x4", "fsdp_tp")]
FURTHER = [("4x2", "fsdp_tp"), ("1x8", "tp")]
FOR_EXPERTS = (
    ("1x1", "dp"),
    ("data=2,expert=2,model=2", "fsdp_ep_tp"),
    ("data=1,expert=4", "ep"),
    ("4x2", "fsdp_tp"),
)
TOKENS_BT = np.random.default_rng(0).integers(0, 64, (2, 24))

TWO_TOWERS = ("SiglipConfig", "CLIPConfig")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # within TOKENS_BT, so that it matters
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A small `transformers` model."""

    config: str  # class in transformers
    options: dict  # of it
    dtype: str = "float32"  # of the file
    shard: str = "1GB"  # largest file
    meshes: tuple = (*MESHES, *FURTHER)
    norms: float = 1.0  # mean of its norms' weights; Gemma adds 1 to them


FAMILIES = {
    "llama2": Family("LlamaConfig", {"num_key_value_heads": 8}, dtype="float16"),
    "llama3": Family(
        "LlamaConfig", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, "bfloat16", "20KB"
    ),
    "mistral": Family("MistralConfig", {"sliding_window": 5}),
    "qwen2": Family("Qwen2Config", {"rope_theta": 1e6}),
    "qwen3": Family("Qwen3Config", {"head_dim": 6, "rope_theta": 1e6}),
    "smollm": Family(
        "LlamaConfig", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}, "bfloat16"
    ),
    # No golden file: only the sliding window of every layer is new in it.
    "qwen3_window": Family(
        "Qwen3Config",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen2_window": Family(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    ),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 8}, "bfloat16", "80KB", FOR_EXPERTS),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        {"head_dim": 6, "rope_theta": 1e6, "moe_intermediate_size": 16}
        | {"num_experts": 8, "num_experts_per_tok": 3},  # whose weights are not normalized
        meshes=FOR_EXPERTS,
    ),
}
ODD = {"hidden_size": 48, "num_attention_heads": 6, "head_dim": 8, "intermediate_size": 200}
FAMILIES |= {  # sizes that no mesh axis divides
    "odd_llama": Family(
        "LlamaConfig", ODD | {"vocab_size": 331, "num_key_value_heads": 2}, "bfloat16"
    ),
    "odd_qwen3": Family(
        "Qwen3Config", ODD | {"vocab_size": 257, "num_key_value_heads": 3}, "bfloat16"
    ),
    "odd_mixtral": Family(
        "MixtralConfig",
        ODD
        | {"vocab_size": 331, "num_key_value_heads": 2, "num_local_experts": 12}
        | {"num_experts_per_tok": 5, "sliding_window": 7, "num_hidden_layers": 3},
        meshes=FOR_EXPERTS,
    ),
    "odd_qwen3_moe": Family(
        "Qwen3MoeConfig",
        ODD
        | {"vocab_size": 257, "num_key_value_heads": 3, "moe_intermediate_size": 20}
        | {"num_experts": 12, "num_experts_per_tok": 4, "tie_word_embeddings": True}
        | {"norm_topk_prob": True},
        meshes=FOR_EXPERTS,
    ),
}
WIDE = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GPT_OSS_YARN = YARN | {"rope_theta": 30.0, "beta_fast": 2.0, "truncate": False}
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
FAMILIES |= {  # unlike layers, and rotary scalings
    "ministral": Family(  # Mistral with unlike layers: two in a period, and one left over
        "MinistralConfig",
        {"num_hidden_layers": 5, "head_dim": 4, "sliding_window": 5}
        | {"layer_types": [SLIDING, FULL] * 2 + [SLIDING]},
        "bfloat16",
    ),
    "qwen2_mixed": Family(  # the first layers full, the later ones not
        "Qwen2Config", WINDOW | {"num_hidden_layers": 5, "max_window_layers": 2}
    ),
    "qwen3_mixed": Family(
        "Qwen3Config",
        WINDOW | {"num_hidden_layers": 7, "head_dim": 8}
        | {"layer_types": [SLIDING, SLIDING, FULL] * 2 + [SLIDING]},
    ),
    "llama_linear": Family(
        "LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, "bfloat16"
    ),
    "qwen2_yarn": Family(
        "Qwen2Config", WIDE | {"rope_theta": 30.0, "rope_scaling": YARN | {"beta_fast": 2.0}}
    ),
    "mistral_yarn": Family(  # an attention factor of its own, dims that are not rounded
        "MistralConfig",
        WIDE | {"rope_theta": 30.0, "sliding_window": None}
        | {"rope_scaling": YARN | {"attention_factor": 1.3, "truncate": False, "beta_slow": 0.5}},
    ),
    "qwen3_yarn": Family(  # and windows, with the scales of DeepSeek
        "Qwen3Config",
        WIDE | WINDOW | {"max_window_layers": 1, "rope_theta": 30.0}
        | {"rope_scaling": YARN | {"mscale": 1.5, "mscale_all_dim": 0.5}},
        "bfloat16",
    ),
    "mixtral_linear": Family(
        "MixtralConfig",
        {"num_local_experts": 8, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        meshes=FOR_EXPERTS,
    ),
}  # fmt: skip
FAMILIES["gpt2"] = Family("GPT2Config", {"num_key_value_heads": 8, "n_inner": 80}, "bfloat16")
FAMILIES["odd_gpt2"] = Family("GPT2Config", {"vocab_size": 67, "hidden_size": 40})
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA3 = {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12}
GEMMA3 |= {  # five local layers, a global one, and one left over
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
        FULL: {"rope_theta": 1e5} | LINEAR,
    }
}
GEMMA2 = {"num_hidden_layers": 3, "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 9}
GEMMA2 |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}  # small: they matter
FAMILIES |= {
    "gemma3": Family("Gemma3TextConfig", GEMMA3, "bfloat16", norms=0.0),
    "gemma2": Family("Gemma2Config", GEMMA2, norms=0.0),
    "odd_gemma3": Family(  # a single kv head, untied; a rotary scaling in local layers too
        "Gemma3TextConfig",
        ODD | GEMMA3 | {"vocab_size": 331, "num_key_value_heads": 1, "tie_word_embeddings": False}
        | {"layer_types": [FULL, SLIDING, SLIDING] * 2 + [FULL], "final_logit_softcapping": 4.0}
        | {"rope_parameters": {SLIDING: LINEAR | {"rope_theta": 1e3}, FULL: {"rope_theta": 1e5}}},
        norms=0.0,
    ),
    "gemma3_vision": Family(
        "Gemma3Config",
        {
            "text_config": GEMMA3 | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
        "bfloat16",
        norms=0.0,
    ),
}  # fmt: skip
GEMMA4 = {"num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 12, "sliding_window": 5}
GEMMA4 |= {
    "rms_norm_eps": 0.01,
    "pad_token_id": 0,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}
GEMMA4 |= {"layer_types": [SLIDING, SLIDING, FULL] * 2, "vocab_size_per_layer_input": 64}
GEMMA4 |= {
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e2},
        FULL: {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    }
}
GEMMA4_DENSE = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
GEMMA4_SMALL = GEMMA4 | {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 3}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
GEMMA4_EXPERTS |= {"moe_intermediate_size": 20}
GEMMA4_TOWERS = {
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16,
    },
    "audio_config": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16,
        "subsampling_conv_channels": [4, 4],
    },
}  # fmt: skip
FAMILIES |= {
    "gemma4": Family(  # as E2B: embeddings of layers, shared keys, wider MLPs there
        "Gemma4TextConfig", GEMMA4_SMALL | {"use_double_wide_mlp": True}, "bfloat16"
    ),
    "gemma4_moe": Family(  # as 26B-A4B: experts beside the MLP, keys as values
        "Gemma4TextConfig",
        GEMMA4_DENSE | GEMMA4_EXPERTS | {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]},
        "bfloat16", "80KB", FOR_EXPERTS,
    ),
    "gemma4_vision": Family(  # as E4B, with towers
        "Gemma4Config",
        {"text_config": GEMMA4_SMALL | {"layer_types": [SLIDING, FULL] * 3}} | GEMMA4_TOWERS,
        "bfloat16",
    ),
    "gemma4_unified": Family(  # as 12B: one global kv head
        "Gemma4UnifiedConfig",
        {"text_config": ODD | GEMMA4_DENSE | {"num_key_value_heads": 2, "num_global_key_value_heads": 1}
         | {"head_dim": 8, "vocab_size": 67},
         "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 8, "patch_size": 4, "model_patch_size": 4, "pooling_kernel_size": 1},
         "audio_config": {"audio_embed_dim": 10}},
        "bfloat16",
    ),
}  # fmt: skip
IMAGES = {"hidden_size": 32, "image_size": 12, "patch_size": 4, "num_labels": 5}
FAMILIES |= {  # image classifiers
    "vit": Family("ViTConfig", IMAGES),
    "odd_vit": Family(
        "ViTConfig",
        IMAGES
        | {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 56, "num_channels": 1}
        | {"num_hidden_layers": 3, "num_labels": 7, "layer_norm_eps": 1e-6},
        "bfloat16",
    ),
}
SIDE = {"hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 5}
SIDE |= {"intermediate_size": 40, "layer_norm_eps": 1e-5}
TEXTS = SIDE | {"vocab_size": 41, "max_position_embeddings": 7}
PIXELS = {"image_size": 9, "patch_size": 3, "hidden_size": 12, "num_attention_heads": 3}
TOWERS = (("1x1", "dp"), ("4x2", "fsdp_tp"), ("1x8", "tp"))
FAMILIES |= {  # two towers, at sizes that no mesh axis divides but the width of MLPs
    "siglip": Family(
        "SiglipConfig",
        {"text_config": TEXTS, "vision_config": SIDE | {"image_size": 9, "patch_size": 3}},
        meshes=TOWERS,
    ),
    "siglip_unlike": Family(  # a smaller tower of images, whose width the texts are projected to
        "SiglipConfig",
        {"text_config": TEXTS | {"projection_size": 12}, "vision_config": SIDE | PIXELS},
        "bfloat16", meshes=TOWERS,
    ),
    "clip": Family(
        "CLIPConfig",
        {"text_config": TEXTS | {"eos_token_id": 40}, "vision_config": SIDE | PIXELS}
        | {"projection_dim": 14},
        meshes=TOWERS,
    ),
    "clip_older": Family(  # the largest token ends a text; exact GELU, as of LAION
        "CLIPConfig",
        {"text_config": TEXTS | {"eos_token_id": 2, "hidden_act": "gelu"}}
        | {"vision_config": SIDE | PIXELS | {"num_hidden_layers": 2, "hidden_act": "gelu"}},
        "bfloat16", meshes=TOWERS,
    ),
}  # fmt: skip
ENCODER = {"vocab_size": 67, "hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 40}
ROBERTA = ENCODER | {"max_position_embeddings": 42, "pad_token_id": 1, "layer_norm_eps": 1e-5}
DISTIL = {"vocab_size": 67, "dim": 24, "n_layers": 2, "n_heads": 6, "hidden_dim": 40}
MODERN = ENCODER | {"num_hidden_layers": 4, "local_attention": 8, "norm_eps": 1e-4}
MODERN |= {
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "pad_token_id": 0,
}
FAMILIES |= {  # encoders of text; sizes that no mesh axis divides
    "bert": Family("BertConfig", ENCODER),
    "roberta": Family("RobertaConfig", ROBERTA | {"type_vocab_size": 1}),
    "xlmr": Family("XLMRobertaConfig", ROBERTA),
    "distilbert": Family("DistilBertConfig", DISTIL),
    "modernbert": Family("ModernBertConfig", MODERN, "bfloat16"),
}
FAMILIES |= {
    "gpt_oss": Family(  # sinks, windows, YaRN, biases, and scores and gates beyond the limit
        "GptOssConfig",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 5}
        | {"num_hidden_layers": 3, "swiglu_limit": 0.5, "rope_parameters": GPT_OSS_YARN},
        "bfloat16", "150KB", FOR_EXPERTS,
    ),
    "odd_gpt_oss": Family(
        "GptOssConfig",
        ODD
        | {"vocab_size": 331, "num_key_value_heads": 2, "num_local_experts": 12}
        | {"num_experts_per_tok": 5, "sliding_window": 7, "layer_types": [FULL, SLIDING]},
        meshes=FOR_EXPERTS,
    ),
}  # fmt: skip
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 10, "num_key_value_heads": 8, "first_k_dense_replace": 1}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
LATENT_YARN = YARN | {"rope_theta": 30.0, "beta_fast": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7}
FAMILIES |= {
    "deepseek_v3": Family(  # groups, biases of the choice, YaRN with both scales, shared experts
        "DeepseekV3Config",
        LATENT | {"n_group": 4, "topk_group": 2, "num_hidden_layers": 3, "n_shared_experts": 2}
        | {"rope_parameters": LATENT_YARN},
        "bfloat16", "80KB", FOR_EXPERTS,
    ),
    "deepseek_v2": Family(  # a softmax; the best groups by their best expert
        "DeepseekV2Config",
        LATENT | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
        | {"routed_scaling_factor": 3.0, "rope_parameters": LATENT_YARN | {"mscale": 0.7}},
        meshes=FOR_EXPERTS,
    ),
    # Its rotary dims tell their order from its inverse, which 4 don't; a group's score, the sum of
    # its two best experts, is not that of all its experts; the head dim is odd.
    "deepseek_odd_head": Family(
        "DeepseekV3Config",
        LATENT | {"qk_nope_head_dim": 7, "qk_rope_head_dim": 6, "head_dim": 6, "q_lora_rank": None}
        | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_hidden_layers": 2}
        | {"rope_parameters": {"rope_theta": 30.0, "rope_type": "default"}},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "odd_deepseek_v3": Family(  # one matrix for queries, no groups, as Moonlight
        "DeepseekV3Config",
        ODD | LATENT | {"head_dim": 4}
        | {"vocab_size": 331, "num_key_value_heads": 6, "q_lora_rank": None, "n_group": 1}
        | {"topk_group": 1, "n_routed_experts": 12, "num_experts_per_tok": 5, "v_head_dim": 6}
        | {"num_hidden_layers": 4, "first_k_dense_replace": 2, "routed_scaling_factor": 2.446},
        meshes=FOR_EXPERTS,
    ),
    "odd_deepseek_v2": Family(  # V2-Lite's greedy choice, and no dense layers
        "DeepseekV2Config",
        ODD | LATENT | {"head_dim": 4}
        | {"vocab_size": 257, "num_key_value_heads": 6, "q_lora_rank": None}
        | {"n_routed_experts": 12, "num_experts_per_tok": 5, "first_k_dense_replace": 0},
        meshes=FOR_EXPERTS,
    ),
}  # fmt: skip
BIASED = {"attention_bias": True, "mlp_bias": True}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
MULTIPLIERS |= {"attention_multiplier": 0.2, "logits_scaling": 0.5}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.5], "long_factor": [2.0, 3.0, 7.0]}
SHARED = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 8}
SMALL = ODD | {"pad_token_id": 0, "intermediate_size": 40}  # an id within the vocabulary
FAMILIES |= {  # Llama's relatives, at sizes that no mesh axis divides
    "llama_biases": Family("LlamaConfig", SMALL | BIASED | {"num_key_value_heads": 3}, "bfloat16"),
    "olmo2": Family("Olmo2Config", SMALL | {"num_key_value_heads": 3}, "bfloat16"),
    "olmo3": Family(
        "Olmo3Config",
        SMALL
        | {"num_key_value_heads": 2, "num_hidden_layers": 5, "sliding_window": 5}
        | {"rope_scaling": YARN | {"beta_fast": 2.0}},
        "bfloat16",
    ),
    "phi3": Family(  # rows beyond the original length; 6 of 8 dims rotate
        "Phi3Config",
        SMALL | {"num_key_value_heads": 2, "original_max_position_embeddings": 16}
        | {"rope_parameters": LONG | {"rope_theta": 30.0, "partial_rotary_factor": 0.75}},
        "bfloat16",
    ),
    "phi3_short": Family(  # and rows within it
        "Phi3Config",
        SMALL | {"num_key_value_heads": 2, "original_max_position_embeddings": 32}
        | {"rope_parameters": LONG | {"rope_theta": 30.0, "partial_rotary_factor": 0.75}}
        | {"sliding_window": 7},
    ),
    "smollm3": Family(
        "SmolLM3Config",
        SMALL | {"num_key_value_heads": 2, "num_hidden_layers": 5, "no_rope_layer_interval": 2}
        | {"use_sliding_window": True, "sliding_window": 7},
        "bfloat16",
    ),
    "mistral3": Family(  # Mistral Small, with a vision tower
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", "num_hidden_layers": 2, "head_dim": 6}
            | {"sliding_window": None, "num_key_value_heads": 2, "rope_theta": 1e6},
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
                "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
            },
            "tie_word_embeddings": False,
        },
        "bfloat16",
    ),
    "ministral3": Family(  # queries that grow with the position
        "Ministral3Config",
        SMALL | {"num_key_value_heads": 2, "head_dim": 12}
        | {"rope_parameters": YARN | {"rope_theta": 30.0, "beta_fast": 2.0, "mscale": 1.0}
           | {"mscale_all_dim": 1.0, "original_max_position_embeddings": 7}
           | {"llama_4_scaling_beta": 0.4}},
        "bfloat16",
    ),
    "granite": Family("GraniteConfig", SMALL | MULTIPLIERS | BIASED | {"num_key_value_heads": 2}, "bfloat16"),
    "glm": Family("GlmConfig", SMALL | {"num_key_value_heads": 2}),
    "glm4": Family(
        "Glm4Config", SMALL | {"num_key_value_heads": 2, "head_dim": 12}, "bfloat16"
    ),
    "seed_oss": Family(
        "SeedOssConfig",
        SMALL | {"num_key_value_heads": 3, "attention_out_bias": True, "mlp_bias": True},
        "bfloat16",
    ),
    "llama_dynamic": Family(  # rows beyond the length
        "LlamaConfig",
        WIDE | {"max_position_embeddings": 16, "rope_theta": 30.0}
        | {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
        "bfloat16",
    ),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        SHARED | {"num_experts_per_tok": 3, "num_hidden_layers": 3, "use_sliding_window": True}
        | {"sliding_window": 5, "max_window_layers": 2},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "odd_qwen2_moe": Family(
        "Qwen2MoeConfig",
        SMALL | SHARED | {"num_key_value_heads": 3, "num_experts": 12, "num_experts_per_tok": 5}
        | {"norm_topk_prob": True, "qkv_bias": False, "vocab_size": 331},
        meshes=FOR_EXPERTS,
    ),
    "olmoe": Family(
        "OlmoeConfig",
        SMALL | {"num_key_value_heads": 3, "num_experts": 8, "num_experts_per_tok": 3}
        | {"intermediate_size": 20},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "granitemoe": Family(
        "GraniteMoeConfig",
        SMALL | MULTIPLIERS | {"num_key_value_heads": 2, "num_local_experts": 8}
        | {"num_experts_per_tok": 3, "intermediate_size": 20},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "minimax_m2": Family(
        "MiniMaxM2Config",
        SMALL | {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 3}
        | {"head_dim": 12, "rotary_dim": 6, "intermediate_size": 20},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "glm4_moe": Family(  # as GLM-4.5: groups, a scale, a dense layer, biases, a norm of each head
        "Glm4MoeConfig",
        SMALL | {"num_key_value_heads": 2, "head_dim": 12, "n_routed_experts": 8}
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_hidden_layers": 3}
        | {"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "kimi_k2": Family(  # one group, YaRN with both scales, a dense layer
        "DeepseekV3Config",
        SMALL | LATENT
        | {"num_key_value_heads": 6, "head_dim": 4, "v_head_dim": 6, "n_group": 1, "topk_group": 1}
        | {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 1}
        | {"num_hidden_layers": 3, "routed_scaling_factor": 2.827}
        | {"rope_parameters": LATENT_YARN | {"beta_fast": 1.0, "mscale_all_dim": 1.0}},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "moonlight": Family(  # one matrix for queries, no rotary scaling, two shared experts
        "DeepseekV3Config",
        SMALL | LATENT
        | {"num_key_value_heads": 6, "head_dim": 4, "v_head_dim": 6, "n_group": 1, "topk_group": 1}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
        | {"q_lora_rank": None, "num_hidden_layers": 3, "routed_scaling_factor": 2.446}
        | {"rope_parameters": {"rope_theta": 30.0, "rope_type": "default"}, "rms_norm_eps": 1e-5},
        "bfloat16", meshes=FOR_EXPERTS,
    ),
    "qwen3_moe_dense": Family(  # first layers without experts
        "Qwen3MoeConfig",
        SMALL | {"num_key_value_heads": 2, "moe_intermediate_size": 20, "num_experts": 8}
        | {"num_experts_per_tok": 3, "num_hidden_layers": 3, "mlp_only_layers": [0, 1]},
        meshes=FOR_EXPERTS,
    ),
}  # fmt: skip
FOR_DELTA = (("4x2", "fsdp_tp"), ("data=2,expert=4", "ep"), ("1x1", "dp"))
DELTA = {"num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 5}
DELTA |= {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}
DELTA |= {"linear_key_head_dim": 7, "linear_value_head_dim": 5, "vocab_size": 67}
DELTA |= {"rope_parameters": {"rope_theta": 30.0, "partial_rotary_factor": 0.5}}
# A document's first output is one value times q · k, which may be near 0; with 1e-6, the norm then
# amplifies rounding: transformers' own float32 logits differ by 2e-5 from its float64.
DELTA |= {"rms_norm_eps": 0.1}
DELTA_EXPERTS = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 24}
DELTA_EXPERTS |= {"num_experts": 8, "num_experts_per_tok": 3}
TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
TOWER |= {"out_hidden_size": 48, "num_position_embeddings": 16, "patch_size": 4}
LINEAR_LAYER = "linear_attention"
FAMILIES |= {  # gated delta networks, at sizes that no mesh axis divides; layers left over
    "qwen3_next": Family(
        "Qwen3NextConfig",
        SMALL | DELTA | DELTA_EXPERTS
        | {"layer_types": [LINEAR_LAYER, LINEAR_LAYER, FULL, LINEAR_LAYER, LINEAR_LAYER]},
        "bfloat16", meshes=FOR_DELTA, norms=0.0,
    ),
    "qwen3_5": Family(
        "Qwen3_5TextConfig", SMALL | DELTA | {"tie_word_embeddings": True},
        "bfloat16", meshes=FOR_DELTA[::2], norms=0.0,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeTextConfig",
        SMALL | DELTA | DELTA_EXPERTS
        | {"num_hidden_layers": 2, "layer_types": [LINEAR_LAYER, FULL]},
        "bfloat16", meshes=FOR_DELTA, norms=0.0,
    ),
    "qwen3_5_vision": Family(
        "Qwen3_5Config",
        {"text_config": SMALL | DELTA | {"num_hidden_layers": 2}
         | {"layer_types": [LINEAR_LAYER, FULL]},
         "vision_config": TOWER},
        "bfloat16", meshes=FOR_DELTA[::2], norms=0.0,
    ),
    "qwen3_5_moe_vision": Family(
        "Qwen3_5MoeConfig",
        {"text_config": SMALL | DELTA | DELTA_EXPERTS | {"num_hidden_layers": 2}
         | {"layer_types": [LINEAR_LAYER, FULL]},
         "vision_config": TOWER},
        "bfloat16", meshes=FOR_DELTA, norms=0.0,
    ),
}  # fmt: skip
HYBRID = {"num_key_value_heads": 2, "vocab_size": 67, "num_hidden_layers": 4}
FAMILIES |= {  # Mamba-2 and short convolutions beside attention; groups that no mesh axis divides
    "lfm2": Family(
        "Lfm2Config",
        SMALL | HYBRID | {"layer_types": ["conv", FULL, "conv", "conv"], "norm_eps": 0.1}
        | {"conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
        "bfloat16", meshes=FOR_DELTA[::2],
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        SMALL | HYBRID
        | {"layer_types": [LINEAR_LAYER, FULL, LINEAR_LAYER, LINEAR_LAYER], "rms_norm_eps": 0.1}
        | {"mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 7, "mamba_d_conv": 3}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 24}
        | {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}
        | {"attention_multiplier": 0.2, "mamba_d_head": 16},
        "bfloat16", meshes=FOR_DELTA,
    ),
    "granitehybrid_dense": Family(  # without experts, with rotary embeddings
        "GraniteMoeHybridConfig",
        SMALL | HYBRID | {"layer_types": [LINEAR_LAYER, FULL] * 2, "rms_norm_eps": 0.1}
        | {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 7, "mamba_d_head": 24}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 24}
        | {"position_embedding_type": "rope", "mamba_conv_bias": False},
        meshes=FOR_DELTA[::2],
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        SMALL | HYBRID
        | {"layers_block_type": [LINEAR_LAYER, "mlp", LINEAR_LAYER, "mlp", FULL, LINEAR_LAYER]}
        | {"mamba_num_heads": 6, "n_groups": 2, "ssm_state_size": 7, "mamba_head_dim": 5}
        | {"conv_kernel": 3, "layer_norm_epsilon": 0.1, "time_step_min": 0.5},
        "bfloat16", meshes=FOR_DELTA[::2],
    ),
    "lfm2_moe": Family(
        "Lfm2MoeConfig",
        SMALL | HYBRID | {"layer_types": ["conv", FULL, "conv", "conv"], "norm_eps": 0.1}
        | {"conv_L_cache": 4, "num_dense_layers": 1, "moe_intermediate_size": 24}
        | {"num_experts": 8, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5},
        "bfloat16", meshes=FOR_DELTA,
    ),
    "falcon_h1": Family(
        "FalconH1Config",
        SMALL | HYBRID | {"num_hidden_layers": 2, "rms_norm_eps": 0.1}
        | {"mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 7, "mamba_d_ssm": 30}
        | {"mamba_d_conv": 3, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3}
        | {"key_multiplier": 0.7, "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.8}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6, "mlp_multipliers": [1.4, 0.5]}
        | {"ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]},
        "bfloat16", meshes=FOR_DELTA,
    ),
    "falcon_norm": Family(  # with a gated norm of Mamba-2's output
        "FalconH1Config",
        SMALL | HYBRID | {"num_hidden_layers": 2, "rms_norm_eps": 0.1, "mamba_rms_norm": True}
        | {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_ssm": 24}
        | {"mamba_norm_before_gate": False, "mamba_conv_bias": False},
        meshes=FOR_DELTA[::2],
    ),
    "nemotron3": Family(
        "NemotronHConfig",
        SMALL | HYBRID
        | {"layers_block_type": [LINEAR_LAYER, "moe", FULL, "mlp", LINEAR_LAYER, "moe"]}
        | {"mamba_num_heads": 6, "n_groups": 3, "ssm_state_size": 7, "mamba_head_dim": 5}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"moe_shared_expert_intermediate_size": 56, "routed_scaling_factor": 2.5}
        | {"layer_norm_epsilon": 0.1, "time_step_min": 0.5},
        "bfloat16", meshes=FOR_DELTA,
    ),
    "nemotron3_latent": Family(  # as Super: experts compute a latent, which no mesh axis divides
        "NemotronHConfig",
        SMALL | HYBRID
        | {"layers_block_type": [LINEAR_LAYER, "moe", FULL, "moe"], "mlp_bias": True}
        | {"mamba_num_heads": 6, "n_groups": 3, "ssm_state_size": 7, "mamba_head_dim": 5}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"moe_latent_size": 20, "moe_shared_expert_intermediate_size": 56}
        | {"layer_norm_epsilon": 0.1, "time_step_min": 0.5},
        "bfloat16", meshes=FOR_DELTA,
    ),
    "kimi_linear": Family(
        "KimiLinearConfig",
        SMALL | HYBRID
        | {"layer_types": [LINEAR_LAYER, LINEAR_LAYER, FULL, LINEAR_LAYER], "rms_norm_eps": 0.1}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "num_key_value_heads": 6}
        | {"linear_num_heads": 6, "linear_head_dim": 8, "linear_conv_kernel_dim": 3}
        | {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
        | {"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
        "bfloat16", meshes=FOR_DELTA,
    ),
    "olmo_hybrid": Family(
        "OlmoHybridConfig",
        SMALL | HYBRID
        | {"layer_types": [LINEAR_LAYER, FULL, LINEAR_LAYER], "num_hidden_layers": 3}
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 10}
        | {"linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "rms_norm_eps": 0.1},
        "bfloat16", meshes=FOR_DELTA[::2],
    ),
}  # fmt: skip
NOT_GOLDEN = {"granitehybrid_dense", "falcon_norm"}
NOT_GOLDEN |= {"qwen3_moe_dense", "phi3_short", "odd_qwen2_moe", "glm"}
NOT_GOLDEN |= {"qwen3_window", "qwen2_window", "odd_mixtral", "odd_qwen3_moe", "qwen2_mixed"}
NOT_GOLDEN |= {"qwen3_mixed", "qwen2_yarn", "mistral_yarn", "mixtral_linear"}
NOT_GOLDEN |= {"siglip_unlike", "clip_older", "odd_gpt2", "odd_gemma3", "odd_gpt_oss", "odd_vit"}
NOT_GOLDEN |= {"deepseek_v2", "odd_deepseek_v3", "odd_deepseek_v2", "distilbert"}

ADAPTERS = {  # golden model → modules with an adapter of PEFT's
    "llama3": [*("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj")],
    "qwen3": ["q_proj", "v_proj", "down_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],  # and experts, as others with experts
    "qwen3_moe": [],  # experts alone
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # q, k and v share an A
    "gemma3": ["q_proj", "k_proj", "o_proj", "gate_proj"],
    "gemma4": ["q_proj", "k_proj", "v_proj", "gate_proj"],  # shared layers have no keys
    "gpt_oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "vit": ["q_proj", "v_proj", "o_proj", "fc2"],  # and a new head
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj"],  # q, k and v share an A; gate and up
    "glm4": ["q_proj", "k_proj", "gate_up_proj", "down_proj"],  # whose rotary pairs are neighbors
    "granite": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "qwen2_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "llama_biases": ["q_proj", "o_proj", "up_proj", "down_proj"],
    "mistral": ["k_proj", "v_proj", "gate_proj"],
    "ministral": ["q_proj", "v_proj", "down_proj"],
    "ministral3": ["q_proj", "k_proj", "o_proj"],
    "olmo2": ["q_proj", "k_proj", "v_proj", "down_proj"],
    "olmo3": ["q_proj", "o_proj", "gate_proj"],
    "smollm3": ["q_proj", "k_proj", "up_proj"],
    "seed_oss": ["v_proj", "o_proj", "gate_proj", "down_proj"],
    "olmoe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "granitemoe": ["q_proj", "v_proj"],
    "minimax_m2": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "glm4_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_5": [  # of a delta layer, q, k and v share an A
        *("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "gate_proj"),
    ],
    "lfm2": ["in_proj"],  # of a convolution, b, c and x share an A
    "granitemoehybrid": [  # of Mamba-2, gate, x, b, c and step share an A; of the MLP, gate and up
        *("q_proj", "o_proj", "in_proj", "shared_mlp.input_linear"),
    ],
    "nemotron_h": ["q_proj", "o_proj", "in_proj", "up_proj"],
    "nemotron3_latent": ["q_proj", "shared_experts.up_proj", "fc1_latent_proj", "fc2_latent_proj"],
    "falcon_h1": ["q_proj", "o_proj", "in_proj", "gate_proj"],
    "gemma4_moe": ["q_proj", "up_proj"],
}  # fmt: skip
# Golden model → weights of experts, stacked in memory, that its adapter has besides.
ADAPTED_EXPERTS = {
    name: ["experts.gate_up_proj", "experts.down_proj"]
    for name in (
        *("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "minimax_m2", "glm4_moe", "deepseek_v3"),
        *("granitemoe", "granitemoehybrid", "gemma4_moe", "gpt_oss"),
    )
} | {"nemotron3_latent": ["experts.up_proj", "experts.down_proj"]}  # without a gate
