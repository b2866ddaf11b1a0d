"""Llama and its relatives (zoo/transformer.py): a row for each architecture; see relative.py.

moe.py has the rows with experts.
"""

import dataclasses
import pathlib
from typing import Any

from recipes.common.hf import vision
from recipes.common.hf.family import ORIGINAL, ConfigFile, Selection, Table
from recipes.common.hf.layer_kinds import (
    Layers,
    read_olmo3,
    read_smollm3,
    windowed,
    write_olmo3,
    write_smollm3,
)
from recipes.common.hf.relative import ATTENTION, TENSORS, Relative
from recipes.common.hf.tensors import Stored
from zoo.llama_relatives import Config

JOINT_NORMS = {  # of all heads
    "layers/attention/q_norm/scale": (f"{ATTENTION}.q_norm.weight", "NH", "NH"),
    "layers/attention/k_norm/scale": (f"{ATTENTION}.k_norm.weight", "KH", "KH"),
}
OLMO2 = TENSORS | JOINT_NORMS
OLMO2 |= {
    "layers/post_attention_norm/scale": (
        "model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/post_mlp_norm/scale": ("model.layers.{}.post_feedforward_layernorm.weight", "D", "D"),
}  # fmt: skip
FUSED_MLP = {
    "layers/mlp/gate": ("model.layers.{}.mlp.gate_up_proj.weight", "DF", "#F D 0/2"),
    "layers/mlp/up": ("model.layers.{}.mlp.gate_up_proj.weight", "DF", "#F D 1/2"),
}


def phi3_tensors(config: Any) -> Table:
    """One tensor has q, k and v, and one has gate and up."""
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    rows = q_rows + 2 * kv_rows
    name = f"{ATTENTION}.qkv_proj.weight"
    return (
        TENSORS
        | FUSED_MLP
        | {
            "layers/attention/q": (name, "DNH", f"NH D +0/{rows}"),
            "layers/attention/k": (name, "DKH", f"KH D +{q_rows}/{rows}"),
            "layers/attention/v": (name, "DKH", f"KH D +{q_rows + kv_rows}/{rows}"),
        }
    )


def glm_tensors(config: Any) -> Table:
    """Rotary pairs are neighbors, and one tensor has gate and up."""
    pairs = f"{config.rotary_dim}~H"
    return (
        TENSORS
        | FUSED_MLP
        | {
            "layers/attention/q": (f"{ATTENTION}.q_proj.weight", "DNH", f"NH D {pairs}"),
            "layers/attention/k": (f"{ATTENTION}.k_proj.weight", "DKH", f"KH D {pairs}"),
            "layers/attention/q_bias": (f"{ATTENTION}.q_proj.bias", "NH", f"NH {pairs}"),
            "layers/attention/k_bias": (f"{ATTENTION}.k_proj.bias", "KH", f"KH {pairs}"),
        }
    )


GLM4_NORMS = {
    "layers/post_attention_norm/scale": (
        "model.layers.{}.post_self_attn_layernorm.weight", "D", "D"),
    "layers/post_mlp_norm/scale": ("model.layers.{}.post_mlp_layernorm.weight", "D", "D"),
}  # fmt: skip

ATTENTION_BIAS = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
LLAMA_BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}
MULTIPLIERS = {
    "embed_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logits_divisor": "logits_scaling",
}

BETA = "llama_4_scaling_beta"
MINISTRAL3_ROPE = {  # of files without any rotary settings
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


def ministral3_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Ministral 3's keys, with the one of the queries' growth outside of the rotary ones."""
    if not keys.get("rope_scaling") and not keys.get("rope_parameters"):
        keys = keys | {"rope_parameters": MINISTRAL3_ROPE}
    return keys | {BETA: ConfigFile(keys, path, "transformer").rope_keys().get(BETA)}


def ministral3_json(keys: dict[str, Any]) -> dict[str, Any]:
    names = ("rope_theta", BETA)
    rope = (keys.pop("rope_scaling") or {}) | {
        name: keys.pop(name) for name in names if name in keys
    }
    return keys | {"rope_parameters": rope}


GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

ROWS = (  # the first that computes a Config is the one that exports it
    Relative(architecture="LlamaForCausalLM", model_type="llama", even=True, options=LLAMA_BIASES),
    Relative(
        architecture="MistralForCausalLM",
        model_type="mistral",
        layers=dataclasses.replace(windowed(4_096, mixed=True), write=windowed(4_096).write),
        defaults={"num_key_value_heads": 8},
    ),
    Relative(  # Mistral with a window in only some layers
        architecture="MinistralForCausalLM",
        model_type="ministral",
        layers=windowed(4_096, mixed=True),
        defaults={"num_key_value_heads": 8},
    ),
    Relative(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        layers=windowed(4_096, mixed=True, switched=True),
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 32},
    ),
    Relative(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        layers=windowed(4_096, mixed=True, switched=True),
        fixed={"qk_norm": True},
        options=ATTENTION_BIAS,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    Relative(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        tensors=lambda config: OLMO2,
        fixed={"norms": "after", "qk_norm": True, "joint_qk_norm": True},
        options=ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Relative(  # with windows, and a rotary scaling in global layers alone
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        tensors=lambda config: OLMO2,
        layers=Layers(read_olmo3, write_olmo3),
        theta=500_000.0,
        fixed={"norms": "after", "qk_norm": True, "joint_qk_norm": True},
        options=ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Relative(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        tensors=phi3_tensors,
        layers=windowed(4_096),
        partial=True,
        own_code=True,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, ORIGINAL: 4_096},
    ),
    Relative(  # without rotary embeddings in every fourth layer
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        layers=Layers(read_smollm3, write_smollm3),
        theta=2e6,
        options=LLAMA_BIASES,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    Relative(
        architecture="GraniteForCausalLM",
        model_type="granite",
        options=LLAMA_BIASES | MULTIPLIERS,
        defaults={"attention_multiplier": 1.0},
    ),
    Relative(
        architecture="GlmForCausalLM",
        model_type="glm",
        tensors=glm_tensors,
        partial=True,
        options={"qkv_bias": "attention_bias"},
        defaults=GLM_DEFAULTS,
    ),
    Relative(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        tensors=lambda config: glm_tensors(config) | GLM4_NORMS,
        partial=True,
        fixed={"norms": "both"},
        options={"qkv_bias": "attention_bias"},
        defaults=GLM_DEFAULTS,
    ),
    Relative(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        options={
            "qkv_bias": "attention_bias",
            "o_bias": "attention_out_bias",
            "mlp_bias": "mlp_bias",
        },
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    Relative(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        layers=windowed(4_096),
        keys_from=ministral3_keys,
        keys_to=ministral3_json,
        options={"query_growth": BETA},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
        },
    ),
)  # fmt: skip
BY_TYPE = {row.model_type: row for row in ROWS}
MISTRAL = BY_TYPE["mistral"]


def mistral3_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The text model's keys in the config.json of a Mistral that also sees. Raises UserError."""
    text = vision.text_config(ConfigFile(keys, path, MISTRAL.entry))
    ConfigFile(text, path, MISTRAL.entry).refuse({"model_type": ("mistral", "ministral3")})
    return {"model_type": "mistral"} | text


def mistral3_config(keys: dict[str, Any], path: pathlib.Path) -> Config:
    return BY_TYPE[keys["model_type"]].config_from(keys, path)


def mistral3_text(stored: dict[str, Stored], config: Any) -> Selection:
    """The text model, whose embeddings are tied if no head is stored: files don't say it."""
    selection = vision.without_vision(stored, config)
    tied = not any(name.endswith("lm_head.weight") for name in selection.stored)
    return dataclasses.replace(selection, config=dataclasses.replace(config, tie_embeddings=tied))


FAMILIES = (
    *(row.family for row in ROWS),
    dataclasses.replace(
        MISTRAL.family,
        config_from=mistral3_config,
        architectures={"Mistral3ForConditionalGeneration": "mistral3"},
        text_keys=mistral3_keys,
        select=mistral3_text,
        canonical=vision.canonical,
        peft_name=vision.in_whole,
        is_part=True,
    ),
)
