"""The family of SigLIP (zoo/siglip.py): two towers of one shape.

preprocessor_config.json says how pictures become inputs, as for ViT.
"""

import pathlib
from typing import Any

from recipes.common.hf import vit
from recipes.common.hf.family import ConfigFile, Family, Table
from zoo.siglip import Config

ENTRY = "siglip"

TEXT, IMAGE = "text_model", "vision_model"

LAYER = {  # of a tower, in the format of tensors.py
    "attention_norm/scale": ("layer_norm1.weight", "D", "D"),
    "attention_norm/bias": ("layer_norm1.bias", "D", "D"),
    "attention/q": ("self_attn.q_proj.weight", "DNH", "NH D"),
    "attention/q_bias": ("self_attn.q_proj.bias", "NH", "NH"),
    "attention/k": ("self_attn.k_proj.weight", "DNH", "NH D"),
    "attention/k_bias": ("self_attn.k_proj.bias", "NH", "NH"),
    "attention/v": ("self_attn.v_proj.weight", "DNH", "NH D"),
    "attention/v_bias": ("self_attn.v_proj.bias", "NH", "NH"),
    "attention/o": ("self_attn.out_proj.weight", "NHD", "D NH"),
    "attention/o_bias": ("self_attn.out_proj.bias", "D", "D"),
    "mlp_norm/scale": ("layer_norm2.weight", "D", "D"),
    "mlp_norm/bias": ("layer_norm2.bias", "D", "D"),
    "mlp/up": ("mlp.fc1.weight", "DF", "F D"),
    "mlp/up_bias": ("mlp.fc1.bias", "F", "F"),
    "mlp/down": ("mlp.fc2.weight", "FD", "D F"),
    "mlp/down_bias": ("mlp.fc2.bias", "D", "D"),
}
POOLING = f"{IMAGE}.head"
TENSORS: Table = {  # X and Y are the rows and columns of a patch
    "patch": (f"{IMAGE}.embeddings.patch_embedding.weight", "XYCD", "D C X Y"),
    "patch_bias": (f"{IMAGE}.embeddings.patch_embedding.bias", "D", "D"),
    "positions": (f"{IMAGE}.embeddings.position_embedding.weight", "TD", "T D"),
    "image/final_norm/scale": (f"{IMAGE}.post_layernorm.weight", "D", "D"),
    "image/final_norm/bias": (f"{IMAGE}.post_layernorm.bias", "D", "D"),
    "pooling/probe": (f"{POOLING}.probe", "D", "1 1 D"),
    "pooling/o": (f"{POOLING}.attention.out_proj.weight", "NHD", "D NH"),
    "pooling/o_bias": (f"{POOLING}.attention.out_proj.bias", "D", "D"),
    "pooling/norm/scale": (f"{POOLING}.layernorm.weight", "D", "D"),
    "pooling/norm/bias": (f"{POOLING}.layernorm.bias", "D", "D"),
    "pooling/mlp/up": (f"{POOLING}.mlp.fc1.weight", "DF", "F D"),
    "pooling/mlp/up_bias": (f"{POOLING}.mlp.fc1.bias", "F", "F"),
    "pooling/mlp/down": (f"{POOLING}.mlp.fc2.weight", "FD", "D F"),
    "pooling/mlp/down_bias": (f"{POOLING}.mlp.fc2.bias", "D", "D"),
    "words": (f"{TEXT}.embeddings.token_embedding.weight", "VD", "V D"),
    "text_positions": (f"{TEXT}.embeddings.position_embedding.weight", "TD", "T D"),
    "text/final_norm/scale": (f"{TEXT}.final_layer_norm.weight", "D", "D"),
    "text/final_norm/bias": (f"{TEXT}.final_layer_norm.bias", "D", "D"),
    "text_head": (f"{TEXT}.head.weight", "DE", "E D"),
    "text_head_bias": (f"{TEXT}.head.bias", "E", "E"),
    "log_scale": ("logit_scale", "S", "S"),
    "score_bias": ("logit_bias", "S", "S"),
}
for _ours, _theirs in (("image", IMAGE), ("text", TEXT)):
    TENSORS |= {
        f"{_ours}/layers/{path}": (f"{_theirs}.encoder.layers.{{}}.{name}", dims, their_dims)
        for path, (name, dims, their_dims) in LAYER.items()
    }
for _third, _name in enumerate("qkv"):
    TENSORS |= {
        f"pooling/{_name}": (f"{POOLING}.attention.in_proj_weight", "DNH", f"#NH D {_third}/3"),
        f"pooling/{_name}_bias": (f"{POOLING}.attention.in_proj_bias", "NH", f"#NH {_third}/3"),
    }

TOWER = {  # field of Config → (theirs, in both towers' keys, the default of an absent key)
    "embed": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 12),
    "mlp": ("intermediate_size", 3_072),
}
OF_TEXTS = {"vocab_size": ("vocab_size", 32_000), "max_positions": ("max_position_embeddings", 64)}
OF_IMAGES = {name: vit.SIZES[name] for name in ("image_size", "patch", "channels")}
UNUSED = {  # features that our towers lack → values that leave them off
    "hidden_act": ("gelu_pytorch_tanh",),
    "vision_use_head": (True,),
    "auto_map": (),
}


def config_from(keys: dict[str, Any], path: pathlib.Path) -> Config:
    """Our Config for a config.json and the preprocessor_config.json beside it.

    Raises UserError if our SigLIP can't compute the model exactly: its two towers have one shape.
    """
    file = ConfigFile(keys, path, ENTRY)
    file.refuse({"auto_map": ()})
    sides = {}
    for name in ("text_config", "vision_config"):
        inner = {} if keys.get(name) is None else keys[name]
        if not isinstance(inner, dict):
            raise file.refused(name, inner)
        sides[name] = file.with_keys(**inner)
        sides[name].refuse(UNUSED)
    text, image = sides["text_config"], sides["vision_config"]
    fields: dict[str, Any] = {"norm_eps": text.number("layer_norm_eps", 1e-6, float)}
    fields |= {ours: text.number(*theirs) for ours, theirs in (TOWER | OF_TEXTS).items()}
    fields |= {ours: image.number(*theirs) for ours, theirs in OF_IMAGES.items()}
    for ours, (key, default) in TOWER.items():
        if image.number(key, default) != fields[ours]:
            raise image.refused(key, image.number(key, default))
    if image.number("layer_norm_eps", 1e-6, float) != fields["norm_eps"]:
        raise image.refused("layer_norm_eps", image.keys["layer_norm_eps"])
    if text.number("projection_size", fields["embed"]) != fields["embed"]:
        raise text.refused("projection_size", text.keys["projection_size"])
    if fields["image_size"] % fields["patch"]:
        raise image.refused("patch_size", fields["patch"])
    if fields["embed"] % fields["num_heads"]:
        raise text.refused("num_attention_heads", fields["num_heads"])
    return Config(**fields, **vit.inputs(path.with_name(vit.PREPROCESSOR), fields, ENTRY))


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json. `context` is the length of texts, which the Config has."""
    tower = {key: getattr(config, ours) for ours, (key, _) in TOWER.items()}
    tower |= {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": config.norm_eps}
    tower |= {"attention_dropout": 0.0}
    texts = {key: getattr(config, ours) for ours, (key, _) in OF_TEXTS.items()}
    images = {key: getattr(config, ours) for ours, (key, _) in OF_IMAGES.items()}
    kinds = [{"model_type": f"siglip_{name}_model"} for name in ("text", "vision")]
    return {
        "architectures": ["SiglipModel"],
        "model_type": "siglip",
        "text_config": kinds[0] | tower | texts | {"projection_size": config.embed},
        "vision_config": kinds[1] | tower | images,
        "torch_dtype": "float32",
    }


def lost(config: Config) -> list[str]:
    """SigLIP's loss is the sigmoid of each pair."""
    return [] if config.loss == "sigmoid" else [f"loss={config.loss!r}"]


FAMILY = Family(
    entry=ENTRY,
    architectures={"SiglipModel": "siglip"},
    tensors=lambda config: TENSORS,
    config_from=config_from,
    config_json=config_json,
    lost=lost,
    checked=UNUSED,
    computed=("position_ids",),
    tied={},
    other_files=lambda config: vit.other_files(config, "SiglipImageProcessor"),
)
