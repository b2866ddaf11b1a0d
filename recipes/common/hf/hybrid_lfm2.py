"""Hybrids of short convolutions (zoo/hybrid.py): LFM2 and LFM2-MoE, as rows of relative.py."""

import math
import pathlib
from typing import Any

from recipes.common.hf.family import GLOBAL, ConfigFile, Table
from recipes.common.hf.hybrid import (
    ATTENDS,
    ENTRY,
    OUTSIDE,
    SIZES,
    attends,
    letters,
    of_layers,
    pattern_fields,
    renamed,
    row,
    types_of,
)
from recipes.common.hf.relative import ATTENTION
from zoo.hybrid import Config

# Names of kinds of layers, also older ones → letters of Config.pattern. The first of each letter is
# written.
LFM2_TYPES = {"conv": "C", GLOBAL: "*"}
DENSE = "num_dense_layers"


def lfm2_tensors(config: Config) -> Table:
    at = "model.layers.{}"
    norm = {"norm/scale": (f"{at}.operator_norm.weight", "D", "D")}
    convolution = {
        "mixer/b": (f"{at}.conv.in_proj.weight", "DF", "#F D 0/3"),
        "mixer/c": (f"{at}.conv.in_proj.weight", "DF", "#F D 1/3"),
        "mixer/x": (f"{at}.conv.in_proj.weight", "DF", "#F D 2/3"),
        "mixer/kernel": (f"{at}.conv.conv.weight", "WF", "F 1 W"),
        "mixer/o": (f"{at}.conv.out_proj.weight", "FD", "D F"),
    }
    norms = {
        "mixer/q_norm/scale": (f"{ATTENTION}.q_layernorm.weight", "H", "H"),
        "mixer/k_norm/scale": (f"{ATTENTION}.k_layernorm.weight", "H", "H"),
    }
    mlp = {
        "norm/scale": (f"{at}.ffn_norm.weight", "D", "D"),
        "mlp/gate": (f"{at}.feed_forward.w1.weight", "DF", "F D"),
        "mlp/up": (f"{at}.feed_forward.w3.weight", "DF", "F D"),
        "mlp/down": (f"{at}.feed_forward.w2.weight", "FD", "D F"),
    }
    routed = f"{at}.feed_forward"
    experts = {
        "norm/scale": (f"{at}.ffn_norm.weight", "D", "D"),
        "experts/router": (f"{routed}.gate.weight", "DE", "E D"),
        "experts/bias": (f"{routed}.expert_bias", "E", "E"),
        "experts/gate": (f"{routed}.experts.{{}}.w1.weight", "DF", "F D"),
        "experts/up": (f"{routed}.experts.{{}}.w3.weight", "DF", "F D"),
        "experts/down": (f"{routed}.experts.{{}}.w2.weight", "FD", "D F"),
    }
    layers = {
        "C": norm | convolution,
        "*": norm | renamed(ATTENDS, "o_proj", "out_proj") | norms,
        "-": mlp,
        "E": experts,
    }
    outside = OUTSIDE | {"final_norm/scale": ("model.embedding_norm.weight", "D", "D")}
    return outside | of_layers(config, layers, per_layer=2)


def lfm2_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys with one name for each: older files have other ones, and a list of attending layers."""
    file = ConfigFile(keys, path, ENTRY)
    layers = file.number("num_hidden_layers")
    if keys.get("layer_types") is None:
        attending = keys.get("full_attn_idxs")
        attending = [*range(layers)] if attending is None else attending
        if not isinstance(attending, list):
            raise file.refused("full_attn_idxs", attending)
        keys = keys | {"layer_types": [GLOBAL if n in attending else "conv" for n in range(layers)]}
    width = file.with_other_names({"block_ff_dim": "intermediate_size"}).number("intermediate_size")
    if keys.get("block_auto_adjust_ff_dim", True):
        multiple = file.number("block_multiple_of", 256)
        width = int(2 * width / 3)
        width = int(file.number("block_ffn_dim_multiplier", 1.0, float) * width)
        width = multiple * math.ceil(width / multiple)
    tied = keys.get("tie_embedding", keys.get("tie_word_embeddings"))
    return keys | {
        "intermediate_size": width,
        "tie_word_embeddings": tied is not False,
        "rms_norm_eps": keys.get("norm_eps", 1e-5),
    }


def lfm2_fields(file: ConfigFile) -> dict[str, Any]:
    order = letters(file, "layer_types", LFM2_TYPES)
    return pattern_fields(file, "".join(f"{letter}-" for letter in order), per_layer=2)


def lfm2_json(config: Config) -> dict[str, Any]:
    return {
        "layer_types": types_of(config, LFM2_TYPES),
        "num_hidden_layers": len(config.order) // 2,
        "norm_eps": config.norm_eps,
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The keys of `lfm2_keys`; an MLP's width is what it says."""
    return lfm2_keys(keys | {"block_auto_adjust_ff_dim": False}, path)


def lfm2_moe_fields(file: ConfigFile) -> dict[str, Any]:
    mixers = letters(file, "layer_types", LFM2_TYPES)
    dense = file.keys.get(DENSE)
    if type(dense) is not int or not 0 <= dense < len(mixers):
        raise file.refused(DENSE, dense)
    order = "".join(mixer + ("-" if n < dense else "E") for n, mixer in enumerate(mixers))
    dense_mlp = {"dense_mlp": file.number("intermediate_size")} if dense else {}
    return pattern_fields(file, order, per_layer=2) | dense_mlp


def lfm2_moe_json(config: Config) -> dict[str, Any]:
    written = lfm2_json(config)
    del written["block_auto_adjust_ff_dim"]
    return written | {
        DENSE: config.order.count("-"),
        "intermediate_size": config.dense_mlp or config.mlp,
        "use_expert_bias": True,
    }


LFM2 = row(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    tensors=lfm2_tensors,
    layers=attends(1e6),
    theta=1e6,
    sizes=SIZES | {"mlp": "intermediate_size", "conv_width": "conv_L_cache"},
    fixed={"qk_norm": True},
    defaults={"conv_L_cache": 3, "num_key_value_heads": 8},
    keys_from=lfm2_keys,
    fields_from=lfm2_fields,
    fields_to=lfm2_json,
    refused={"conv_bias": (False,)},
)
LFM2_MOE = row(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    tensors=lfm2_tensors,
    layers=attends(1e6),
    theta=1e6,
    sizes=SIZES
    | {
        "mlp": "moe_intermediate_size",
        "conv_width": "conv_L_cache",
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    fixed={"qk_norm": True, "sigmoid": True},
    options={"normalize": "norm_topk_prob", "route_scale": "routed_scaling_factor"},
    defaults={
        "conv_L_cache": 3, "num_key_value_heads": 8, "intermediate_size": 7_168,
        "moe_intermediate_size": 1_792, "num_experts": 32, "num_experts_per_tok": 4, DENSE: 2,
    },
    keys_from=lfm2_moe_keys,
    fields_from=lfm2_moe_fields,
    fields_to=lfm2_moe_json,
    refused={"conv_bias": (False,), "use_expert_bias": (True,)},
)  # fmt: skip
FAMILIES = (LFM2.family, LFM2_MOE.family)
