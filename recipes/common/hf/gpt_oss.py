"""The family of GPT-OSS (zoo/gpt_oss.py). Attention and norms are as in relative.py.

A layer's experts are one tensor, in which gate and up alternate. The published folders have them in
MXFP4 (mxfp4.py); an export has float32.
"""

import pathlib
from typing import Any

from recipes.common.hf import layer_kinds, relative
from recipes.common.hf.family import GLOBAL, LOCAL, ORIGINAL, ConfigFile, Family
from zoo.core.layers import AttentionType
from zoo.gpt_oss import Config

ENTRY = "gpt_oss"

ARCHITECTURES = {"GptOssForCausalLM": "gpt_oss"}  # theirs → model_type

EXPERTS = "model.layers.{}.mlp.experts"
TENSORS = {
    path: row for path, row in relative.TENSORS.items() if not path.startswith("layers/mlp/")
}
TENSORS |= {
    "layers/attention/o_bias": ("model.layers.{}.self_attn.o_proj.bias", "D", "D"),
    "layers/attention/sinks": ("model.layers.{}.self_attn.sinks", "N", "N"),
    "layers/experts/router": ("model.layers.{}.mlp.router.weight", "DE", "E D"),
    "layers/experts/router_bias": ("model.layers.{}.mlp.router.bias", "E", "E"),
    "layers/experts/gate": (f"{EXPERTS}.gate_up_proj", "EDF", "E D F# 0/2"),
    "layers/experts/up": (f"{EXPERTS}.gate_up_proj", "EDF", "E D F# 1/2"),
    "layers/experts/gate_bias": (f"{EXPERTS}.gate_up_proj_bias", "EF", "E F# 0/2"),
    "layers/experts/up_bias": (f"{EXPERTS}.gate_up_proj_bias", "EF", "E F# 1/2"),
    "layers/experts/down": (f"{EXPERTS}.down_proj", "EFD", "E F D"),
    "layers/experts/down_bias": (f"{EXPERTS}.down_proj_bias", "ED", "E D"),
}

SIZES = relative.SIZES | {
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
UNUSED = {
    "hidden_act": ("silu",),
    "attention_bias": (True,),
    "partial_rotary_factor": (1,),
    "is_causal": (True,),
    "auto_map": (),  # the folder's own code
}
YARN = {  # for files without any rotary settings
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4_096,
}


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our dropless Config for a config.json.

    Raises UserError if our GptOss can't compute the model exactly.
    """
    theirs = ConfigFile(keys, file, ENTRY).with_other_names({"num_experts": "num_local_experts"})
    theirs.refuse(UNUSED)
    keys = theirs.keys
    layers = theirs.number("num_hidden_layers")
    if not keys.get("layer_types"):
        keys = keys | {"layer_types": [LOCAL if n % 2 == 0 else GLOBAL for n in range(layers)]}
    if not keys.get("rope_scaling") and not keys.get("rope_parameters"):
        keys = keys | {"rope_scaling": YARN}
    theirs = ConfigFile(keys, file, ENTRY)
    sizes: dict[str, Any] = theirs.sizes(SIZES, head_dim=64)
    if sizes["experts_per_token"] > sizes["num_experts"]:
        raise theirs.refused("num_experts_per_tok", sizes["experts_per_token"])
    rope = theirs.rope(150_000.0)
    kinds = [AttentionType(window, *rope) for window in theirs.windows(128, mixed=True)]
    return Config(
        **sizes,
        capacity=None,
        swiglu_alpha=theirs.number("swiglu_alpha", 1.702, float),
        swiglu_limit=theirs.number("swiglu_limit", 7.0, float),
        norm_eps=theirs.number("rms_norm_eps", 1e-5, float),
        layer_kinds=layer_kinds.period_of(kinds),
        tie_embeddings=keys.get("tie_word_embeddings") is True,
    )


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json; `context` is the number of positions trained on."""
    kinds = layer_kinds.kinds_of(config)
    theirs = relative.common_json(config, "GptOssForCausalLM", "gpt_oss", SIZES, context)
    return theirs | {
        # Theirs would be YaRN if this were null.
        "rope_scaling": theirs["rope_scaling"] or {"rope_type": "default"},
        "sliding_window": next((kind.window for kind in kinds if kind.window), None),
        "layer_types": layer_kinds.types_of(kinds),
        "attention_bias": True,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
    }


def lost(config: Config) -> list[str]:
    """Kinds of layers that config.json can't say."""
    read = config_from(config_json(config, 1), pathlib.Path("config.json"))
    same = layer_kinds.kinds_of(read) == layer_kinds.kinds_of(config)
    return [] if same else [f"layer_kinds={config.layer_kinds}"]


FAMILY = Family(
    entry=ENTRY,
    architectures=ARCHITECTURES,
    tensors=lambda config: TENSORS,
    config_from=config_from,
    config_json=config_json,
    lost=lost,
    checked=UNUSED,
    formats=("mxfp4",),
)
