"""The page of architectures that load, and published config.json of Llama's relatives."""

import dataclasses
import functools
import json

import pytest

from recipes.common import entries
from recipes.common.hf import architectures
from recipes.common.hf.folder import FAMILIES
from recipes.common.runtime.errors import UserError
from tests.conftest import ROOT
from tests.support.golden_folders import GOLDEN, config_of
from tests.support.hf_families import KEYS

pytestmark = pytest.mark.promise("hugging-face")

PAGE = ROOT / "recipes" / "docs" / "architectures.md"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def test_the_page_lists_the_architectures_that_load(request):
    if request.config.getoption("--update-golden"):
        PAGE.write_text(architectures.page())
    assert PAGE.read_text() == architectures.page(), "run with --update-golden, and look at it"


def test_no_architecture_is_in_two_families():
    """But for those that one entry reads whole, and another without the tower."""
    whole = [family for family in FAMILIES if family.entry in ("gemma3_vision", "gemma4_vision")]
    names = [name for family in FAMILIES if family not in whole for name in family.architectures]
    assert len(names) == len({*names})
    assert {*names} >= {name for family in whole for name in family.architectures}


KIMI_ROPE = {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0}
KIMI_ROPE |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 131072, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_scaling": KIMI_ROPE, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
MOONLIGHT = KIMI | {
    "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_scaling": None,
    "routed_scaling_factor": 2.446,
}  # fmt: skip
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "head_dim": 128,
    "num_key_value_heads": 8, "num_experts_per_tok": 8, "num_local_experts": 256, "rotary_dim": 64,
    "rope_theta": 5000000, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid", "use_qk_norm": True,
    "qk_norm_type": "per_layer", "use_routing_bias": True, "shared_intermediate_size": 0,
    "vocab_size": 200064, "hidden_act": "silu", "tie_word_embeddings": False,
    "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
}  # fmt: skip
QWEN2_MOE = {  # the rest is transformers' defaults
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048,
    "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 151936, "num_experts": 60,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "rope_theta": 1e6,
    "num_experts_per_tok": 4, "use_sliding_window": False, "sliding_window": 32768,
}  # fmt: skip
GLM45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "use_qk_norm": False,
    "vocab_size": 151552,
}  # fmt: skip
GLM45 = GLM45_AIR | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "first_k_dense_replace": 3, "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 100278, "rms_norm_eps": 1e-6, "rope_theta": 500000,
    "layer_types": ([SLIDING] * 3 + [FULL]) * 8, "sliding_window": 4096,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
                     "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"},
}  # fmt: skip
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "hidden_size": 2048,
    "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "vocab_size": 128256, "rope_theta": 5000000.0, "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
MINISTRAL3 = {  # the rest is transformers' defaults
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 151936,
}  # fmt: skip
QWEN35 = {  # the rest is transformers' defaults
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "vocab_size": 248320, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip
QWEN35_TEXT = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "layer_types": ([LINEAR] * 3 + [FULL]) * 10,
    "full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "moe_intermediate_size": 512, "num_attention_heads": 16,
    "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "shared_expert_intermediate_size": 512, "vocab_size": 248320,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                        "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                        "rope_type": "default"},
}  # fmt: skip
QWEN35_MOE = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": QWEN35_TEXT,
    "tie_word_embeddings": False,
}  # fmt: skip
PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072,
    "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 32064, "rope_scaling": None, "sliding_window": 2047, "rope_theta": 10000.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
}  # fmt: skip


# What the published config.json of other named sizes says about the architecture.
PUBLISHED = json.loads((ROOT / "tests" / "golden" / "published_configs.json").read_text())

OLMO_HYBRID = {  # the defaults of transformers' class, OLMo hybrid 7B
    "architectures": ["OlmoHybridForCausalLM"], "vocab_size": 100_352, "hidden_size": 3_840,
    "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 30,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_parameters": {"rope_theta": None},
}  # fmt: skip

NAMED = [
    (KIMI, "deepseek", "kimi_k2"),
    (MOONLIGHT, "deepseek", "16b"),
    (MINIMAX, "moe", "minimax_m2"),
    (GLM45_AIR, "moe", "glm45_air"),
    (GLM45, "moe", "glm45"),
    (QWEN2_MOE, "moe", "qwen15_moe_a3b"),
    (OLMO3, "transformer", "olmo3_7b"),
    (SMOLLM3, "transformer", "smollm3_3b"),
    (PHI3, "transformer", "phi3_mini"),
    (QWEN3_NEXT, "qwen3_next", "80b_a3b"),
    (QWEN35, "qwen3_next", "qwen35_9b"),
    (QWEN35_MOE, "qwen3_next", "qwen35_35b_a3b"),
    (MINISTRAL3, "transformer", "ministral3_8b"),
    (OLMO_HYBRID, "hybrid", "olmo_hybrid_7b"),
    *((keys, *name.split()) for name, keys in PUBLISHED.items()),
]


@pytest.mark.parametrize(
    ("keys", "entry", "size"), NAMED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_published_relatives_are_their_named_sizes(keys, entry, size):
    training = {"remat": "full"} | ({} if entry == "transformer" else {"capacity": None})
    training |= {"balance_rate": 0.0} if entry == "deepseek" else {}
    wanted = dataclasses.replace(entries.sizes(entry)[size](), **training)
    assert config_of(keys) == wanted


@pytest.mark.parametrize("entry", ["transformer", "moe", "gemma4", "qwen3_next", "hybrid"])
def test_every_published_size_is_compared_with_its_config_json(entry):
    ours = {"tiny", "small", "medium", "124m"}
    compared = {size for _, of, size in NAMED if of == entry}
    assert entries.sizes(entry).keys() - ours == compared


# ---- keys of config.json -------------------------------------------------------------------------

DECLARED = json.loads(KEYS.read_text())  # architecture → key → transformers' default
# Keys that change no logits: of training and generation, of the parts that are left out, and the one
# for layers that may be left out.
WITHOUT_EFFECT = {
    *("max_position_embeddings", "n_positions", "pretraining_tp", "num_mtp_layers"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    *("encoder_stride", "pooler_output_size", "pooler_act", "image_token_index", "vision_config"),
    *("boi_token_index", "eoi_token_index", "mm_tokens_per_image", "multimodal_projector_bias"),
    *("projector_hidden_act", "spatial_merge_size", "vision_feature_layer"),
    *("initializer_cutoff_factor", "classifier_pooling", "deterministic_flash_attn"),
    *("sparse_prediction", "sparse_pred_ignore_index"),
    *("initializer_factor", "logit_scale_init_value"),
    *("audio_config", "eoa_token_index"),
    # CLIPModel projects both towers to its own projection_dim.
    *("text_config.projection_dim", "vision_config.projection_dim"),
    *("text_config.initializer_factor", "vision_config.initializer_factor"),
}
DERIVED = {"head_dim", "num_experts"}  # from other keys, if absent
MATTER = {  # architecture → changes of its golden config.json, so that more keys matter
    "Qwen2ForCausalLM": {"layer_types": None, "use_sliding_window": True, "sliding_window": 5}
    | {"max_window_layers": 1},
    "Qwen3MoeForCausalLM": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "mlp_only_layers": [0],
    },
    "Qwen2MoeForCausalLM": {"layer_types": None},
    "SmolLM3ForCausalLM": {"no_rope_layers": None, "layer_types": None},
    "Lfm2ForCausalLM": {
        "layer_types": None,
        "full_attn_idxs": [1],
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 2,
    },
    "GraniteMoeHybridForCausalLM": {"position_embedding_type": "rope"},
    "KimiLinearForCausalLM": {  # by the names of transformers, not of published folders
        **dict.fromkeys(("moe_renormalize", "num_experts", "num_expert_group")),
        **dict.fromkeys(("num_experts_per_token", "num_shared_experts", "model_max_length")),
        **{"num_local_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1},
        **{"norm_topk_prob": True, "n_group": 1, "max_position_embeddings": 64},
    },
    "FalconH1ForCausalLM": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "DeepseekV2ForCausalLM": {"norm_topk_prob": False, "topk_method": "group_limited_greedy"},
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
MATTER["Gemma4ForCausalLM"] = GEMMA4_EXPERTS | {"moe_intermediate_size": 20}
MATTER["Gemma4UnifiedForCausalLM"] = {"hidden_size_per_layer_input": 0}
MATTER["Qwen3ForCausalLM"] = MATTER["Qwen2ForCausalLM"]
NEAR = {
    "Gemma4UnifiedForCausalLM": "gemma4",
    "GlmForCausalLM": "glm4",
    "DeepseekV2ForCausalLM": "deepseek_v3",
}  # golden models
EXCEPTIONS = {
    "Mistral3ForConditionalGeneration": {"tie_word_embeddings"},  # the stored tensors say it
    "Qwen2MoeForCausalLM": {"intermediate_size"},  # of layers without experts, beside windows
    "Qwen3NextForCausalLM": {"intermediate_size"},  # likewise, and such layers are refused
    "NemotronHForCausalLM": {  # without effect in transformers
        *("moe_shared_expert_overlap", "n_shared_experts"),
        *("mtp_layers_block_type", "num_nextn_predict_layers", "num_logits_to_keep", "chunk_size"),
        *("expand", "mamba_ssm_cache_dtype", "residual_in_fp32", "rescale_prenorm_residual"),
        *("time_step_floor", "time_step_limit", "time_step_max", "use_mamba_kernels"),
    },
    "GraniteMoeHybridForCausalLM": {"mamba_chunk_size"},
    "FalconH1ForCausalLM": {  # of sizes that others state, of kernels and of generation
        *("mamba_expand", "mamba_chunk_size", "num_logits_to_keep"),
    },
    "KimiLinearForCausalLM": {"output_router_logits", "pretraining_tp"},
    "OlmoHybridForCausalLM": {  # of first values
        *("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor"),
        *("linear_dt_max", "linear_dt_min"),
    },
    "ModernBertForMaskedLM": {"local_attention"},  # halved, without a remainder
    "ModernBertModel": {"local_attention"},
    "ModernBertForSequenceClassification": {"local_attention"},
}


@functools.cache
def keys_with_effect(architecture: str) -> dict:
    """A config.json in which every declared key matters."""
    files = sorted(GOLDEN.glob(f"{NEAR.get(architecture, '*')}/config.json"))
    every = [json.loads(file.read_text()) for file in files]
    keys = next(k for k in every if architecture in NEAR or k["architectures"] == [architecture])
    return keys | {"architectures": [architecture]} | MATTER.get(architecture, {})


def another(value):
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
    return 7


def changed(keys: dict, key: str, *value) -> dict:
    """A config.json with another value of a key, or without it; "text_config.x" is inside."""
    inside, _, name = key.rpartition(".")
    content = keys[inside] if inside else keys
    content = {other: old for other, old in content.items() if other != name}
    content |= {name: value[0]} if value else {}
    return keys | {inside: content} if inside else content


@pytest.mark.parametrize("architecture", DECLARED)
def test_every_key_that_transformers_declares_is_read_or_refused(architecture):
    keys = keys_with_effect(architecture)
    before = config_of(keys)
    unread = []
    for key, default in DECLARED[architecture].items():
        inside, _, name = key.rpartition(".")
        value = (keys[inside] if inside else keys).get(name, default)
        try:
            if config_of(changed(keys, key, another(value))) == before:
                unread.append(key)
        except UserError:
            pass
    assert {*unread} <= WITHOUT_EFFECT | EXCEPTIONS.get(architecture, set())


@pytest.mark.parametrize("architecture", DECLARED)
def test_an_absent_key_means_transformers_default(architecture):
    keys = keys_with_effect(architecture)
    for key, default in DECLARED[architecture].items():
        if default is None or key in DERIVED:
            continue
        absent = changed(keys, key)
        try:
            configs = config_of(absent), config_of(changed(keys, key, default))
        except UserError:
            continue  # the key is required, or the default is too large for this small model
        assert configs[0] == configs[1], key


@pytest.mark.parametrize(
    "entry", ["transformer", "moe", "gemma4", "qwen3_next", "hybrid", "siglip"]
)
def test_every_named_size_is_exported_exactly(entry):
    for size, make in entries.sizes(entry).items():
        if entry == "hybrid" and size in ("tiny", "small"):
            continue  # layers of several families
        config = make()
        exact = [f for f in FAMILIES if f.entry == entry and not f.lost(config)]
        assert exact, size
        read = exact[0].config_from(exact[0].config_json(config, 64), ROOT / "config.json")
        assert not exact[0].lost(read)
        assert read.embed == config.embed
