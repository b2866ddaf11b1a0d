"""The family of DeepSeek V3 and V2 (zoo/deepseek.py). Each expert is a tensor of its own.

Rotary dims are pairs of neighbors in the folder. V3's published weights are float8 (float8.py); an
export has float32. The layers after the last one are for multi-token prediction.
"""

import dataclasses
import math
from typing import Any

from recipes.common.hf import relative
from recipes.common.hf.family import (
    FURTHER,
    ConfigFile,
    Family,
    Selection,
    Table,
    leave_out_layers,
)
from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError
from zoo.deepseek import Config
from zoo.options.rope_scaling import Linear, Yarn

ENTRY = "deepseek"

ARCHITECTURES = {  # theirs → model_type
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
}

SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "kv_latent": "kv_lora_rank",
    "mlp": "moe_intermediate_size",
    "num_experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "dense_mlp": "intermediate_size",
}
MAY_BE_ABSENT = {"q_latent": "q_lora_rank", "groups": "n_group", "top_groups": "topk_group"}
DENSE = "first_k_dense_replace"
OTHER_NAMES = {  # by model_type
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
}
UNUSED = {  # features that our DeepSeek lacks → values that leave them off
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
    "partial_rotary_factor": (1,),
    "is_causal": (True,),
    "index_topk": (),  # V3.2's sparse attention
    "index_n_heads": (),
    "index_head_dim": (),
}
SCORES = "scoring_func"
METHOD = "topk_method"
DEFAULTS = {  # transformers' values of keys that files may leave out, where not None or False
    "deepseek_v2": {"q_lora_rank": 1_536, METHOD: "greedy"},
    "deepseek_v3": {
        "q_lora_rank": 1_536,
        "n_group": 8,
        "topk_group": 4,
        DENSE: 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}


def tensors(config: Config) -> Table:
    """The variables' tensors, in the format of tensors.py."""
    pairs, first = config.rope_dim, config.dense_layers

    def layer(path: str, at: str, dense: bool) -> Table:
        tensors = {
            "attention_norm/scale": ("input_layernorm.weight", "D", "D"),
            "attention/q": ("self_attn.q_proj.weight", "DNH", f"NH D H~{pairs}"),
            "attention/q_down": ("self_attn.q_a_proj.weight", "DR", "R D"),
            "attention/q_norm/scale": ("self_attn.q_a_layernorm.weight", "R", "R"),
            "attention/q_up": ("self_attn.q_b_proj.weight", "RNH", f"NH R H~{pairs}"),
            "attention/kv_down": ("self_attn.kv_a_proj_with_mqa.weight", "DC", f"C D C~{pairs}"),
            "attention/kv_norm/scale": ("self_attn.kv_a_layernorm.weight", "C", "C"),
            "attention/kv_up": ("self_attn.kv_b_proj.weight", "CNH", "NH C"),
            "attention/o": ("self_attn.o_proj.weight", "NHD", "D NH"),
            "mlp_norm/scale": ("post_attention_layernorm.weight", "D", "D"),
        }
        shared = "mlp" if dense else "mlp.shared_experts"
        for ours, theirs, dims, inner in (
            ("gate", "gate_proj", "DF", "F D"),
            ("up", "up_proj", "DF", "F D"),
            ("down", "down_proj", "FD", "D F"),
        ):
            tensors[f"mlp/{ours}"] = (f"{shared}.{theirs}.weight", dims, inner)
            tensors[f"experts/{ours}"] = (f"mlp.experts.{{}}.{theirs}.weight", dims, inner)
        tensors["experts/router"] = ("mlp.gate.weight", "DE", "E D")
        tensors["experts/bias"] = ("mlp.gate.e_score_correction_bias", "E", "E")
        return {f"{path}/{ours}": (f"{at}.{row[0]}", *row[1:]) for ours, row in tensors.items()}

    after = f"model.layers.{config.num_layers}"
    return {
        "embed": ("model.embed_tokens.weight", "VD", "V D"),
        **layer("dense", "model.layers.{}", dense=True),
        **layer("layers", f"model.layers.{{:{first}}}", dense=False),
        **layer("mtp/layer", after, dense=False),
        "mtp/token_norm/scale": (f"{after}.enorm.weight", "D", "D"),
        "mtp/hidden_norm/scale": (f"{after}.hnorm.weight", "D", "D"),
        "mtp/join": (f"{after}.eh_proj.weight", "ED", "D E"),
        "mtp/final_norm/scale": (f"{after}.shared_head.norm.weight", "D", "D"),
        "final_norm/scale": ("model.norm.weight", "D", "D"),
        "unembed": ("lm_head.weight", "VD", "V D"),
    }


def copies(config: Config) -> dict[str, str]:
    """Tensors of the layer after the last one that must equal the model's."""
    after = f"model.layers.{config.num_layers}"
    table = "model.embed_tokens.weight"
    return {
        f"{after}.embed_tokens.weight": table,
        f"{after}.shared_head.head.weight": table if config.tie_embeddings else "lm_head.weight",
    }


def without_further_layers(stored: dict[str, Stored], config: Config) -> Selection:
    """Drops all MTP layers but the first, which the Config has if the folder has its tensors."""
    after = f"model.layers.{config.num_layers}."
    has_layer = any(name.startswith(after) for name in stored)
    config = dataclasses.replace(config, mtp_depth=min(config.mtp_depth, has_layer))
    return leave_out_layers(stored, config, config.num_layers + config.mtp_depth)


def config_from(keys: dict[str, Any], file) -> Config:
    """Our dropless Config for a config.json with one of the model_types above.

    Raises UserError if our DeepSeek can't compute the model exactly.
    """
    v3 = keys["model_type"] == "deepseek_v3"
    keys = {FURTHER: keys.get("num_mtp_layers")} | DEFAULTS[keys["model_type"]] | keys
    theirs = ConfigFile(keys, file, ENTRY).with_other_names(OTHER_NAMES[keys["model_type"]])
    score = ("sigmoid",) if v3 else ("softmax",)
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    theirs.refuse(UNUSED | {SCORES: score, METHOD: methods})
    if not v3 and keys.get("norm_topk_prob"):  # transformers does not compute it
        raise theirs.refused("norm_topk_prob", True)
    sizes = {ours: theirs.number(key) for ours, key in SIZES.items()}
    sizes |= {
        ours: theirs.number(key) for ours, key in MAY_BE_ABSENT.items() if keys.get(key) is not None
    }
    if keys.get(METHOD) == "greedy":  # among all experts
        sizes |= {"groups": 1, "top_groups": 1}
    for key, ours in (("num_key_value_heads", "num_heads"), ("head_dim", "rope_dim")):
        if theirs.number(key, sizes[ours]) != sizes[ours]:
            raise theirs.refused(key, keys[key])
    theta, scaling = theirs.rope()
    if scaling and not isinstance(scaling, Linear | Yarn):
        raise theirs.refused("rope_scaling", keys.get("rope_scaling") or keys["rope_parameters"])
    rope = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    dense = theirs.number(DENSE, kind=int) if keys.get(DENSE) else 0
    further = theirs.number(FURTHER) if keys.get(FURTHER) else 0
    try:
        return Config(
            **sizes,
            dense_layers=dense,
            sigmoid=v3,
            normalize=keys.get("norm_topk_prob") is True,
            route_scale=theirs.number("routed_scaling_factor", 1.0, float),
            capacity=None,
            balance_rate=0.0,
            mtp_depth=min(further, 1),
            norm_eps=theirs.number("rms_norm_eps", 1e-6, float),
            rope_theta=theta,
            rope_scaling=scaling,
            mscale=float(rope.get("mscale_all_dim") or 0)
            if scaling and scaling.factor > 1
            else 0.0,
            tie_embeddings=keys.get("tie_word_embeddings") is True,
        )
    except ValueError as error:
        raise UserError(f"{file} makes no sense: {error}; use this model's config.json") from None


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json, with keys that old and new versions of transformers read.

    `context` is the number of positions trained on. Raises UserError if no architecture fits.
    """
    v3, limited = config.sigmoid, config.top_groups < config.groups
    if not v3 and config.normalize:
        raise UserError(
            "no Hugging Face DeepSeek has normalized weights of a softmax (sigmoid=False and "
            "normalize=True); use a model with only one"
        )
    kind = "deepseek_v3" if v3 else "deepseek_v2"
    architecture = next(name for name, k in ARCHITECTURES.items() if k == kind)
    theirs = relative.common_json(config, architecture, kind, SIZES, context)
    if config.mscale:
        theirs["rope_scaling"] |= mscales(config)
    method = "noaux_tc" if v3 else "group_limited_greedy" if limited else "greedy"
    return theirs | {
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_latent or None,
        "n_group": config.groups,
        "topk_group": config.top_groups,
        DENSE: config.dense_layers,
        FURTHER: config.mtp_depth,
        "moe_layer_freq": 1,
        SCORES: "sigmoid" if v3 else "softmax",
        METHOD: method,
        "norm_topk_prob": config.normalize,
        "routed_scaling_factor": config.route_scale,
        "attention_bias": False,
    }


def mscales(config: Config) -> dict[str, float]:
    """Their two keys that scale scores: YaRN's magnitude is the ratio of what they stand for."""
    scaling: Any = config.rope_scaling
    magnitude = scaling.magnitude
    step = 0.1 * math.log(scaling.factor)
    mscale = (magnitude * (step * config.mscale + 1) - 1) / step
    return {"mscale": round(mscale, 12), "mscale_all_dim": config.mscale}


FAMILY = Family(
    entry=ENTRY,
    architectures=ARCHITECTURES,
    tensors=tensors,
    config_from=config_from,
    config_json=config_json,
    checked=UNUSED,
    formats=("fp8",),
    copies=copies,
    select=without_further_layers,
)
