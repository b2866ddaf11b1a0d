"""Compares our models with those of `transformers`, live. Needs the extra `hf`.

    python -m tests.by_hand.hf_parity                      # the comparison
    python -m tests.by_hand.hf_parity mixtral odd_qwen3    # of these families
    python -m tests.by_hand.hf_parity --update-golden      # and tests/golden/hf anew, which needs no torch

For each family: a small random model of theirs, read by us, gives their logits on one device and on
2x4, 4x2 and 1x8, which some of their sizes are not divisible by, or on meshes for experts; what we
write is bit-equal to what we read, and gives their logits in `transformers` again. The same for adapters that PEFT made.
"""

import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

import tests.conftest  # noqa: F401, simulates the devices
from recipes.common import checkpoint, hf
from recipes.common.hf.folder import UNIMPORTANT
from recipes.common.mesh import make_mesh
from recipes.common.sharding.abstract import paths
from tests.conftest import ROOT
from tests.support.golden_folders import GOLDEN

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
NOT_GOLDEN = {"qwen3_moe_dense", "phi3_short", "odd_qwen2_moe", "glm"}
NOT_GOLDEN |= {"qwen3_window", "qwen2_window", "odd_mixtral", "odd_qwen3_moe", "qwen2_mixed"}
NOT_GOLDEN |= {"qwen3_mixed", "qwen2_yarn", "mistral_yarn", "mixtral_linear"}
NOT_GOLDEN |= {"siglip_unlike", "clip_older", "odd_gpt2", "odd_gemma3", "odd_gpt_oss", "odd_vit"}
NOT_GOLDEN |= {"deepseek_v2", "odd_deepseek_v3", "odd_deepseek_v2", "distilbert"}

ADAPTERS = {  # golden model → modules with an adapter of PEFT's
    "llama3": [*("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj")],
    "qwen3": ["q_proj", "v_proj", "down_proj"],
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],  # experts have no adapters here
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # q, k and v share an A
    "gemma3": ["q_proj", "k_proj", "o_proj", "gate_proj"],
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
}  # fmt: skip

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
)  # fmt: skip


def make(family: Family, folder: pathlib.Path) -> None:
    """Writes a `transformers` model whose parameters are all random, norms and biases included."""
    import torch
    import transformers

    torch.manual_seed(0)
    options = SIZES | family.options
    if family.config == "ViTConfig":
        options = {
            k: v for k, v in options.items() if k[:3] not in ("voc", "max") and "key" not in k
        }
    if "BertConfig" in family.config or "RobertaConfig" in family.config:
        del options["num_key_value_heads"]
    if family.config in TWO_TOWERS:
        options = family.options
    elif "text_config" in options:  # a model that reads text and images
        options = family.options | {"text_config": SIZES | family.options["text_config"]}
    config = getattr(transformers, family.config)(**options)
    model = loader(config).from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            norm = "norm" in name.lower() or (".ln_" in name and name.endswith("weight"))
            mean = 1.0 if name.endswith("linear_attn.norm.weight") else family.norms * norm
            size = 0.3 if family.config in TWO_TOWERS else 0.15
            mean += 2.0 * (name == "logit_scale")  # scores matter
            weight.copy_(size * torch.randn(weight.shape) + mean)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # large enough to change choices
                buffer.copy_(0.1 * torch.randn(buffer.shape))
    model.to(getattr(torch, family.dtype)).save_pretrained(folder, max_shard_size=family.shard)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if family.config in TWO_TOWERS:
        write_processor(config, folder)
    if family.config == "ViTConfig":
        colors = {
            name: [0.4, 0.5, 0.6][: config.num_channels] for name in ("image_mean", "image_std")
        }
        size = {"height": config.image_size, "width": config.image_size}
        transformers.ViTImageProcessor(size=size, resample=3, **colors).save_pretrained(folder)


def write_processor(config, folder: pathlib.Path) -> None:
    """Says how pictures become the inputs of two towers; CLIP's are cut to a square."""
    import transformers

    W = config.vision_config.image_size
    square = {"height": W, "width": W}
    colors = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "resample": 3}
    if config.model_type == "clip":
        colors |= {"size": {"shortest_edge": W}, "crop_size": square}
        transformers.CLIPImageProcessor(**colors).save_pretrained(folder)
    else:
        transformers.SiglipImageProcessor(size=square, **colors).save_pretrained(folder)


def loader(config):
    """The class of `transformers` that loads a model with this config."""
    import transformers

    if config.model_type == "vit":
        return transformers.AutoModelForImageClassification
    if "bert" in config.model_type:
        return transformers.AutoModelForMaskedLM
    if config.model_type in ("siglip", "clip"):
        return transformers.AutoModel
    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def inputs(config) -> np.ndarray:
    """Inputs for our or their config: TOKENS_BT, or images [B, W, W, C]."""
    if not hasattr(config, "image_size"):
        is_encoder = "bert" in getattr(config, "model_type", "") or not getattr(
            config, "causal", True
        )
        return (
            np.where(TOKENS_BT == 1, 2, TOKENS_BT) if is_encoder else TOKENS_BT
        )  # 1: RoBERTa's padding
    channels = getattr(config, "num_channels", 0) or config.channels
    shape = (2, config.image_size, config.image_size, channels)
    return np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)


def make_adapter(base: pathlib.Path, modules: list[str], folder: pathlib.Path, **options) -> None:
    """Writes a random PEFT adapter for a `transformers` model. `options`: of PEFT's LoraConfig."""
    import peft
    import torch
    import transformers

    torch.manual_seed(1)
    theirs, classes = transformers.AutoConfig.from_pretrained(base), {}
    if images := theirs.model_type == "vit":
        classes = {"num_labels": 3, "ignore_mismatched_sizes": True}
    model = loader(theirs).from_pretrained(base, dtype=torch.float32, **classes)
    kind = {"modules_to_save": ["classifier"]} if images else {"task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=modules, **kind | options)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(0.3 * torch.randn(weight.shape))
    model.peft_config["default"].base_model_name_or_path = base.name  # not where it was today
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)


def their_logits(folder: pathlib.Path, adapter: pathlib.Path | None = None) -> np.ndarray:
    """[B, T, V] in float32, as `transformers` computes them, with an adapter as PEFT does."""
    import torch
    import transformers

    config, classes = transformers.AutoConfig.from_pretrained(folder), {}
    if adapter and config.model_type == "vit":
        classes = {"num_labels": 3, "ignore_mismatched_sizes": True}
    model, loading = loader(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True,
        **classes,
    )  # fmt: skip
    assert classes or not any(loading.values()), loading
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter)
    if config.model_type in ("siglip", "clip"):
        texts = config.text_config
        sizes = config.vision_config.image_size, texts.max_position_embeddings, texts.vocab_size
        image, tokens = map(torch.tensor, pairs(*sizes))
        with torch.no_grad():
            out = model(input_ids=tokens, pixel_values=image.permute(0, 3, 1, 2))
        return torch.cat([out.image_embeds, out.text_embeds, out.logits_per_image], 1).numpy()
    given = torch.tensor(inputs(config))
    with torch.no_grad():
        return model(given.permute(0, 3, 1, 2) if given.ndim == 4 else given).logits.numpy()


def our_logits(path: str | pathlib.Path, mesh: str, rules: str, base: str = "") -> np.ndarray:
    """Float32 logits [B, T, V] of the model that `checkpoint.restore` reads at `path` onto a mesh."""
    source = checkpoint.find(path, base=base)
    layout = checkpoint.layout_of(source, make_mesh(mesh), rules)
    variables = checkpoint.restore_variables(source, layout)
    if layout.model.phases:
        return our_pairs(layout, variables)
    given = inputs(layout.config)
    rows = np.resize(given, (max(len(given), layout.batch_shards), *given.shape[1:]))
    logits = layout.compile(lambda v, x: layout.model.merge(v)(x), variables, rows)
    return np.asarray(logits(variables, rows))[: len(given)]


def pairs(image_size: int, length: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs of two towers: images [B, W, W, C] and tokens [B, T], which the largest one ends."""
    random, rows = np.random.default_rng(0), 8
    image_BWWC = random.normal(size=(rows, image_size, image_size, 3)).astype(np.float32)
    tokens_BT = random.integers(3, vocab_size - 1, (rows, length)).astype(np.int32)
    tokens_BT[np.arange(rows), random.integers(1, length, rows)] = vocab_size - 1
    tokens_BT[0, -1] = vocab_size - 1  # a second one, as padding is for CLIP
    return image_BWWC, tokens_BT


def our_pairs(layout, variables) -> np.ndarray:
    """[B, 2E + B]: the embeddings of images and texts, and their scores."""
    import jax.numpy as jnp

    config = layout.config
    given = pairs(config.image_size, config.max_positions, config.vocab_size)

    def run(variables, image_BWWC, tokens_BT):
        model = layout.model.merge(variables)
        image_BE, text_BE = model.embed_images(image_BWWC), model.embed_texts(tokens_BT)
        bias = 0.0 if model.score_bias is None else model.score_bias[...]
        return image_BE, text_BE, jnp.exp(model.log_scale[...]), bias

    image_BE, text_BE, scale, bias = map(
        np.asarray, layout.compile(run, variables, *given)(variables, *given)
    )
    return np.concatenate([image_BE, text_BE, image_BE @ text_BE.T * scale + bias], 1)


def params_of(path: str | pathlib.Path) -> dict[str, np.ndarray]:
    """Returns variable's path → array for the model that `checkpoint.restore` reads at `path`."""
    model, _ = checkpoint.restore(path, make_mesh("1"), "dp")
    return paths(nnx.to_pure_dict(nnx.state(model)))


def export(source: str, target: pathlib.Path) -> None:
    """Writes a folder with our export; `source` is "hf:DIR"."""
    folder, params = checkpoint.find(source), params_of(source)
    context = folder.metadata["context"]
    entry = folder.metadata["entry"]
    hf.write(
        target, entry, folder.config, context, lambda path: np.asarray(params[path]),
        architecture=folder.metadata["architecture"],
    )  # fmt: skip


def compare(name: str, work: pathlib.Path) -> None:
    """Prints the comparison; raises AssertionError where our logits and theirs differ."""
    theirs, back, meshes = work / name, work / f"{name}_back", FAMILIES[name].meshes
    make(FAMILIES[name], theirs)
    wanted = their_logits(theirs)
    found = [np.abs(our_logits(f"hf:{theirs}", *on) - wanted).max() for on in meshes]
    export(f"hf:{theirs}", back)
    again = np.abs(their_logits(back) - wanted).max()
    here = [f"{mesh} {error:.1e}" for (mesh, _), error in zip(meshes, found, strict=True)]
    print(f"{name:<14} logits to {np.abs(wanted).max():.1f}; ours differ by", *here, end="; ")
    print(f"exported, theirs differ by {again:.1e}")
    assert max(*found, again) < TOLERANCE, name
    a, b = params_of(f"hf:{theirs}"), params_of(f"hf:{back}")
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


def compare_adapter(name: str, work: pathlib.Path) -> None:
    """Compares an adapter of a golden model: PEFT's merged by us, and ours loaded by PEFT."""
    base, theirs, back = GOLDEN / name, work / f"{name}_lora", work / f"{name}_lora_back"
    make_adapter(base, ADAPTERS[name], theirs)
    wanted, without = their_logits(base, theirs), their_logits(base)
    meshes = FAMILIES[name].meshes
    found = [np.abs(our_logits(theirs, *on, f"hf:{base}") - wanted).max() for on in meshes]
    adapter = checkpoint.find(theirs, base=f"hf:{base}").adapter
    entry, factors = adapter.metadata["entry"], params_of_adapter(adapter)
    hf.write_adapter(
        back, entry, adapter.config, str(base), lambda path: factors[path],
        architecture=checkpoint.find(f"hf:{base}").metadata["architecture"],
    )  # fmt: skip
    again = np.abs(their_logits(base, back) - wanted).max()
    change = np.abs(wanted).max() if name == "vit" else np.abs(wanted - without).max()
    print(
        f"{name}_lora: the adapter changes logits by {change:.1f}; merged, ours differ by "
        f"{max(found):.1e}; exported, PEFT's by {again:.1e}"
    )
    assert max(*found, again) < TOLERANCE, name
    ours, own = (
        safetensors.numpy.load_file(f / "adapter_model.safetensors") for f in (back, theirs)
    )
    assert ours.keys() == own.keys()
    for tensor in own:
        np.testing.assert_array_equal(ours[tensor], own[tensor], err_msg=tensor)


def compare_some_layers(work: pathlib.Path) -> None:
    """Compares PEFT's adapter of one layer of two with ours, merged."""
    base, theirs = GOLDEN / "llama3", work / "some_layers"
    for only in ({"layers_to_transform": [1]}, {"exclude_modules": r"model\.layers\.0\..*"}):
        make_adapter(base, ["q_proj", "down_proj"], theirs, **only)
        wanted = their_logits(base, theirs)
        error = np.abs(our_logits(theirs, "1x1", "dp", f"hf:{base}") - wanted).max()
        change = np.abs(wanted - their_logits(base)).max()
        print(f"llama3_lora of a layer changes logits by {change:.1f}; ours differ by {error:.1e}")
        assert error < TOLERANCE
        shutil.rmtree(theirs)


def compare_side_by_side(work: pathlib.Path) -> None:
    """Compares our adapter of GPT-2, whose q, k and v each have an A, with what PEFT makes of it."""
    base, out, merged = GOLDEN / "gpt2", work / "side_by_side", work / "merged"
    plain = checkpoint.find(f"hf:{base}").config
    config, random = (
        dataclasses.replace(plain, lora_rank=2, lora_alpha=6.0),
        np.random.default_rng(2),
    )
    factors = {
        path: random.normal(0, 0.3, leaf.shape).astype(np.float32)
        for path, leaf in paths(hf.folder.shapes_of("gpt2", config)["params"]).items()
    }
    hf.write_adapter(out, "gpt2", config, str(base), lambda path: factors[path])

    def added(path: str):
        module, _, name = path.rpartition("/")
        pair = [factors.get(f"{module}/lora/{name}/{factor}") for factor in "ab"]
        found = params[path]
        if pair[0] is not None:
            found = found + np.stack([np.tensordot(*ab, 1) for ab in zip(*pair, strict=True)]) * 3
        return found

    params = params_of(f"hf:{base}")
    hf.write(merged, "gpt2", plain, 64, added)
    wanted = our_logits(f"hf:{merged}", "1x1", "dp")
    error = np.abs(their_logits(base, out) - wanted).max()
    print(f"gpt2, an A for each of q, k and v: PEFT's logits differ by {error:.1e}")
    assert error < TOLERANCE


def compare_further(work: pathlib.Path) -> None:
    """Compares the logits of the layer that predicts the token after the next one."""
    import torch
    import transformers
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    from tests.support.further_token import further_logits
    from zoo.deepseek import Config, DeepSeek

    config = dataclasses.replace(Config.tiny(), mtp_depth=1, capacity=None, balance_rate=0.0)
    graph, state = nnx.split(DeepSeek(config, rngs=nnx.Rngs(0)))
    random, folder = np.random.default_rng(0), work / "further"
    state = jax.tree.map(lambda x: 0.2 * random.normal(size=x.shape).astype(np.float32), state)
    of_tokens = jax.jit(lambda state: further_logits(nnx.merge(graph, state), TOKENS_BT))
    ours = np.asarray(of_tokens(state))[:, :-1]
    params = paths(nnx.to_pure_dict(state))
    hf.write(folder, "deepseek", config, 64, lambda path: params[path])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # By default it finds these tensors in layer 61 alone.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config.num_layers}.*"]
    further = MtpModel.from_pretrained(model)
    cache = MtpCache(config=model.config.get_mtp_config())
    tokens, places = torch.tensor(TOKENS_BT), torch.arange(1, TOKENS_BT.shape[1])[None]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        hidden = further.forward_layer(0, hidden, places, cache, input_ids=tokens[:, 1:])
        theirs = model.lm_head(hidden).numpy()
    error = np.abs(ours - theirs).max()
    print(
        f"deepseek       the further token's logits to {np.abs(theirs).max():.1f}; ours differ by {error:.1e}"
    )
    assert error < TOLERANCE
    again = params_of(f"hf:{folder}")
    assert again.keys() == params.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(again[path], array, err_msg=path)


HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # models with a head for the token after the next


def compare_head(name: str, work: pathlib.Path) -> None:
    """Compares the logits of a head that `transformers` leaves out, built here from its own parts."""
    import torch
    import transformers
    from transformers.masking_utils import create_causal_mask

    from tests.support.further_token import further_logits
    from zoo.qwen3_next import Qwen3Next

    folder, back = work / f"{name}_head", work / f"{name}_head_back"
    make(FAMILIES[name], folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    config = model.config
    module = sys.modules[type(model).__module__]
    prefix = type(model).__name__.removesuffix("ForCausalLM")
    norm = getattr(module, f"{prefix}RMSNorm")
    layer = getattr(module, f"{prefix}DecoderLayer")
    D = config.hidden_size
    head = torch.nn.ModuleDict({
        "pre_fc_norm_embedding": norm(D, eps=config.rms_norm_eps),
        "pre_fc_norm_hidden": norm(D, eps=config.rms_norm_eps),
        "fc": torch.nn.Linear(2 * D, D, bias=False),
        "layers": torch.nn.ModuleList([layer(config, config.layer_types.index(FULL))]),
        "norm": norm(D, eps=config.rms_norm_eps),
    })  # fmt: skip
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(0.15 * torch.randn(weight.shape))
        tokens = torch.tensor(TOKENS_BT)
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        places = torch.arange(hidden.shape[1])[None]
        read = head["pre_fc_norm_embedding"](model.get_input_embeddings()(tokens[:, 1:]))
        joined = head["fc"](torch.cat([read, head["pre_fc_norm_hidden"](hidden)], dim=-1))
        mask = create_causal_mask(
            config=config, inputs_embeds=joined, attention_mask=None, cache=None,
            position_ids=places,
        )  # fmt: skip
        out = head["layers"][0](
            joined, position_embeddings=model.model.rotary_emb(joined, places), attention_mask=mask
        )
        theirs = model.lm_head(head["norm"](out)).numpy()
    (file,) = folder.glob("*.safetensors")
    stored = safetensors.numpy.load_file(file)
    stored |= {f"mtp.{key}": weight.numpy() for key, weight in head.state_dict().items()}
    safetensors.numpy.save_file(stored, file)

    params = params_of(f"hf:{folder}")
    graph, state = nnx.split(Qwen3Next(hf.Folder(folder).config, rngs=nnx.Rngs(0)))
    state = jax.tree.map_with_path(
        lambda path, _: params["/".join(str(part.key) for part in path[:-1])], state
    )
    of_tokens = jax.jit(lambda state: further_logits(nnx.merge(graph, state), TOKENS_BT))
    error = np.abs(np.asarray(of_tokens(state))[:, :-1] - theirs).max()
    print(
        f"{name:<14} the further token's logits to {np.abs(theirs).max():.1f}; ours differ by {error:.1e}"
    )
    assert error < TOLERANCE
    export(f"hf:{folder}", back)
    again = params_of(f"hf:{back}")
    assert again.keys() == params.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(again[path], array, err_msg=path)


def params_of_adapter(adapter: hf.Adapter) -> dict[str, np.ndarray]:
    """Factor's path → array."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: s.update(sharding=one), adapter.shapes())
    return {path: np.asarray(x) for path, x in paths(adapter.read(abstract)["params"]).items()}


def declared_keys() -> dict[str, dict]:
    """Architecture → key that its config class declares → default, without those of all classes."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of_all = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    of_all -= {"tie_word_embeddings"}
    keys = {}
    for family in hf.folder.FAMILIES:
        for name, kind in family.architectures.items():
            default = CONFIG_MAPPING[kind]()
            keys[name] = own_keys(default, of_all)
            for tower in ("text_config", "vision_config") if family.entry == "siglip" else ():
                inner = own_keys(getattr(default, tower), of_all)
                keys[name] |= {f"{tower}.{key}": value for key, value in inner.items()}
            if keys[name].get("rope_parameters", ...) is None:  # its default is made by code
                keys[name]["rope_parameters"] = default.rope_parameters
    return keys


def own_keys(config, of_all: set[str]) -> dict:
    """Key that a config class declares → default, without those of all classes."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(config)
        if field.name not in of_all and not any(part in field.name for part in UNIMPORTANT)
    }


def main() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    asked = [word for word in sys.argv[1:] if not word.startswith("--")]
    if "--update-golden" in sys.argv and "keys" in (asked or ["keys"]):
        rows = (f"{json.dumps(name)}: {json.dumps(keys)}" for name, keys in declared_keys().items())
        KEYS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    with tempfile.TemporaryDirectory() as work:
        for name in [name for name in asked if name in FAMILIES] if asked else FAMILIES:
            compare(name, pathlib.Path(work))
            if "--update-golden" in sys.argv and name not in NOT_GOLDEN:
                target = GOLDEN / name
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(pathlib.Path(work) / name, target)
                np.save(target / "logits.npy", their_logits(pathlib.Path(work) / name))
        if not asked or "further" in asked:
            compare_further(pathlib.Path(work))
            for name in HEADS:
                compare_head(name, pathlib.Path(work))
        for name in asked or ADAPTERS:
            if name not in ADAPTERS:
                continue
            compare_adapter(name, pathlib.Path(work))
            if "--update-golden" in sys.argv:
                target = GOLDEN / f"{name}_lora"
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(pathlib.Path(work) / f"{name}_lora", target)
                logits = their_logits(GOLDEN / name, pathlib.Path(work) / f"{name}_lora")
                np.save(GOLDEN / f"{name}_lora" / "logits.npy", logits)
        if "some_layers" in (asked or ["some_layers"]):
            compare_some_layers(pathlib.Path(work))
        if "gpt2" in (asked or FAMILIES):
            compare_side_by_side(pathlib.Path(work))
    print(f"transformers {transformers.__version__}: all within {TOLERANCE}, all bit-equal back.")


if __name__ == "__main__":
    main()
