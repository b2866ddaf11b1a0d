"""Nemotron-H and Nemotron 3 (zoo/hybrid.py), whose layers are one sublayer each, as a row of relative.py."""

import dataclasses
import pathlib
import re
from typing import Any

from recipes.common.hf.family import GLOBAL, ConfigFile, Selection, Table
from recipes.common.hf.hybrid import (
    ATTENDS,
    OUTSIDE,
    SIZES,
    attends,
    letters,
    mamba_tensors,
    of_layers,
    pattern_fields,
    renamed,
    row,
)
from recipes.common.hf.relative import ATTENTION
from zoo.hybrid import Config

# Names of kinds of layers, also older ones → letters of Config.pattern. The first of each letter is
# written.
NEMOTRON_TYPES = {
    "linear_attention": "M", GLOBAL: "*", "mlp": "-", "moe": "E", "mamba": "M", "attention": "*",
}  # fmt: skip
OVERRIDE = "hybrid_override_pattern"
WIDTH = "moe_intermediate_size"
SHARED = "moe_shared_expert_intermediate_size"
NUMBER = "n_routed_experts"
LATENT = "moe_latent_size"


def nemotron_tensors(config: Config) -> Table:
    at = "backbone.layers.{}"
    norm = {"norm/scale": (f"{at}.norm.weight", "D", "D")}
    mlp = {
        "mlp/up": (f"{at}.mixer.up_proj.weight", "DF", "F D"),
        "mlp/up_bias": (f"{at}.mixer.up_proj.bias", "F", "F"),
        "mlp/down": (f"{at}.mixer.down_proj.weight", "FD", "D F"),
        "mlp/down_bias": (f"{at}.mixer.down_proj.bias", "D", "D"),
    }
    routed = f"{at}.mixer"
    mixture = "experts/mixture" if config.expert_latent else "experts"
    experts = {
        f"{mixture}/router": (f"{routed}.gate.weight", "DE", "E D"),
        f"{mixture}/bias": (f"{routed}.gate.e_score_correction_bias", "E", "E"),
        f"{mixture}/up": (f"{routed}.experts.{{}}.up_proj.weight", "DF", "F D"),
        f"{mixture}/down": (f"{routed}.experts.{{}}.down_proj.weight", "FD", "D F"),
        "experts/latent_down": (f"{routed}.fc1_latent_proj.weight", "DC", "C D"),
        "experts/latent_down_bias": (f"{routed}.fc1_latent_proj.bias", "C", "C"),
        "experts/latent_up": (f"{routed}.fc2_latent_proj.weight", "CD", "D C"),
        "experts/latent_up_bias": (f"{routed}.fc2_latent_proj.bias", "D", "D"),
    }
    layers = {
        "M": norm | mamba_tensors(config, f"{at}.mixer"),
        "*": norm | renamed(ATTENDS, ATTENTION, f"{at}.mixer"),
        "-": norm | mlp,
        "E": norm | experts | renamed(mlp, ".mixer.", ".mixer.shared_experts."),
    }
    outside = OUTSIDE | {
        "embed": ("backbone.embeddings.weight", "VD", "V D"),
        "final_norm/scale": ("backbone.norm_f.weight", "D", "D"),
    }
    return outside | of_layers(config, layers, per_layer=1)


def nemotron_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys with a list of the layers, which older files have as a string."""
    types = keys.get("layers_block_type") or keys.get("layer_types")
    if types is None and isinstance(pattern := keys.get(OVERRIDE), str):
        by_letter = {"M": "linear_attention", "*": GLOBAL, "-": "mlp", "E": "moe"}
        types = [by_letter.get(letter, letter) for letter in pattern]
    eps = keys.get("layer_norm_epsilon", 1e-5)
    return keys | {"layer_types": types, "rms_norm_eps": eps, "num_hidden_layers": None}


def without_mtp(stored: dict[str, Any], config: Config) -> Selection:
    """Drops the layers for multi-token prediction, which Nemotron 3 Super has."""
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    report = "Left out mtp, for multi-token prediction; hybrids have none here."
    return Selection(kept, config, report if len(kept) < len(stored) else "")


def nemotron_fields(file: ConfigFile) -> dict[str, Any]:
    order = letters(file, "layer_types", NEMOTRON_TYPES)
    fields: dict[str, Any] = {"mlp": file.number("intermediate_size")}
    if "E" in order:
        fields = {
            "mlp": file.number(WIDTH),
            "shared_mlp": file.number(SHARED),
            "num_experts": file.number(NUMBER),
            "experts_per_token": file.number("num_experts_per_tok"),
            "normalize": file.keys.get("norm_topk_prob") is not False,
            "route_scale": file.number("routed_scaling_factor", 1.0, float),
            "sigmoid": True,
        }
        if file.keys.get(LATENT) is not None:
            fields["expert_latent"] = file.number(LATENT)
        if "-" in order:
            fields["dense_mlp"] = file.number("intermediate_size")
    # transformers bounds steps from below by this number, which once was for the first values alone.
    fields["least_step"] = file.number("time_step_min", 1e-3, float)
    return fields | pattern_fields(file, order)


def nemotron_json(config: Config) -> dict[str, Any]:
    experts = {}
    if config.num_experts:
        experts = {
            WIDTH: config.mlp,
            SHARED: config.shared_mlp,
            NUMBER: config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.normalize,
            "routed_scaling_factor": config.route_scale,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        }
    if config.expert_latent:
        experts[LATENT] = config.expert_latent
    return experts | {
        "intermediate_size": config.dense_mlp or config.mlp,
        OVERRIDE: config.order,
        "num_hidden_layers": len(config.order),
        "layer_norm_epsilon": config.norm_eps,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "time_step_min": config.least_step,
    }


NEMOTRON = row(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    tensors=nemotron_tensors,
    layers=attends(None),
    sizes=SIZES
    | {
        "mamba_heads": "mamba_num_heads",
        "mamba_head_dim": "mamba_head_dim",
        "mamba_state_dim": "ssm_state_size",
        "mamba_groups": "n_groups",
        "conv_width": "conv_kernel",
    },
    fixed={"activation": "relu2"},
    options={"conv_bias": "use_conv_bias", "mlp_bias": "mlp_bias"},
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21_504,
        "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
        "conv_kernel": 4,
    },
    keys_from=nemotron_keys,
    fields_from=nemotron_fields,
    fields_to=nemotron_json,
    select=without_mtp,
    own_code=True,
    refused={
        "use_bias": (False,), "mamba_proj_bias": (False,), "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",), "sliding_window": (), "n_group": (1,), "topk_group": (1,),
    },
)  # fmt: skip


# Folders say `backbone`, also those that transformers writes; its modules, and so PEFT, say `model`.
def peft_name(name: str) -> str:
    return name.replace("backbone.", "model.", 1)


def in_backbone(name: str) -> str:
    return re.sub(r"\bmodel\.(layers|embeddings|norm_f)\.", r"backbone.\1.", name)


FAMILIES = (
    dataclasses.replace(
        NEMOTRON.family,
        tied={"lm_head.weight": "backbone.embeddings.weight"},
        peft_name=peft_name,
        canonical=in_backbone,
    ),
)
