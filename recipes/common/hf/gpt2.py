"""GPT-2 (zoo/gpt2.py).

Their projections are stored [in, out], and one tensor holds q, k and v.
"""

import pathlib
from typing import Any

from recipes.common.hf.family import ConfigFile, Family
from zoo.gpt2 import Config

ENTRY = "gpt2"

ARCHITECTURES = {"GPT2LMHeadModel": "gpt2"}  # theirs → model_type
PREFIX = "transformer."  # starts all names in files that transformers writes, not in older ones

TENSORS = {
    "embed": ("wte.weight", "VD", "V D"),
    "positions": ("wpe.weight", "PD", "P D"),
    "layers/attention_norm/scale": ("h.{}.ln_1.weight", "D", "D"),
    "layers/attention_norm/bias": ("h.{}.ln_1.bias", "D", "D"),
    "layers/attention/q": ("h.{}.attn.c_attn.weight", "DNH", "D #NH 0/3"),
    "layers/attention/k": ("h.{}.attn.c_attn.weight", "DNH", "D #NH 1/3"),
    "layers/attention/v": ("h.{}.attn.c_attn.weight", "DNH", "D #NH 2/3"),
    "layers/attention/q_bias": ("h.{}.attn.c_attn.bias", "NH", "#NH 0/3"),
    "layers/attention/k_bias": ("h.{}.attn.c_attn.bias", "NH", "#NH 1/3"),
    "layers/attention/v_bias": ("h.{}.attn.c_attn.bias", "NH", "#NH 2/3"),
    "layers/attention/o": ("h.{}.attn.c_proj.weight", "NHD", "NH D"),
    "layers/attention/o_bias": ("h.{}.attn.c_proj.bias", "D", "D"),
    "layers/mlp_norm/scale": ("h.{}.ln_2.weight", "D", "D"),
    "layers/mlp_norm/bias": ("h.{}.ln_2.bias", "D", "D"),
    "layers/mlp/up": ("h.{}.mlp.c_fc.weight", "DF", "D F"),
    "layers/mlp/up_bias": ("h.{}.mlp.c_fc.bias", "F", "F"),
    "layers/mlp/down": ("h.{}.mlp.c_proj.weight", "FD", "F D"),
    "layers/mlp/down_bias": ("h.{}.mlp.c_proj.bias", "D", "D"),
    "final_norm/scale": ("ln_f.weight", "D", "D"),
    "final_norm/bias": ("ln_f.bias", "D", "D"),
}
TENSORS = {path: (PREFIX + name, ours, theirs) for path, (name, ours, theirs) in TENSORS.items()}

SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
}
UNUSED = {  # key → values that change nothing
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),  # changes only rounding, though by much in bfloat16
    "tie_word_embeddings": (True,),
    "is_causal": (True,),
    "auto_map": (),
}
OTHER_NAMES = {  # of all architectures → GPT-2's own
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def canonical(name: str) -> str:
    """A stored tensor's name, with the prefix that older files lack."""
    return name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for a config.json of GPT-2.

    Raises UserError if our GPT2 can't compute the model exactly.
    """
    theirs = ConfigFile(keys, file, ENTRY).with_other_names(OTHER_NAMES)
    theirs.refuse(UNUSED)
    sizes = {ours: theirs.number(key) for ours, key in SIZES.items()}
    if sizes["embed"] % sizes["num_heads"]:
        raise theirs.refused("n_head", sizes["num_heads"])
    mlp = theirs.number("n_inner", 4 * sizes["embed"])
    return Config(**sizes, mlp=mlp, norm_eps=theirs.number("layer_norm_epsilon", 1e-5, float))


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json, with the number of learned positions in place of `context`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: getattr(config, ours) for ours, key in SIZES.items()},
        "n_ctx": config.max_positions,
        "n_inner": config.mlp,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


FAMILY = Family(
    entry=ENTRY,
    architectures=ARCHITECTURES,
    tensors=lambda config: TENSORS,
    config_from=config_from,
    config_json=config_json,
    checked=UNUSED,
    context="n_positions",
    computed=(".attn.bias", ".attn.masked_bias"),  # masks in old files
    tied={"lm_head.weight": "transformer.wte.weight"},
    canonical=canonical,
    in_out=True,  # as in the class Conv1D
)
