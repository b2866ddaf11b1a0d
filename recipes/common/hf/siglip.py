"""The families of SigLIP and CLIP (zoo/siglip.py): two towers.

preprocessor_config.json says how pictures become inputs, as for ViT.
"""

import dataclasses
import functools
import pathlib
from typing import Any

from recipes.common.hf import vit
from recipes.common.hf.family import ConfigFile, Family, Table
from zoo.parts.towers import image_and_text
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
BOTH: Table = {  # X and Y are the rows and columns of a patch
    "patch": (f"{IMAGE}.embeddings.patch_embedding.weight", "XYCD", "D C X Y"),
    "positions": (f"{IMAGE}.embeddings.position_embedding.weight", "TD", "T D"),
    "image/final_norm/scale": (f"{IMAGE}.post_layernorm.weight", "D", "D"),
    "image/final_norm/bias": (f"{IMAGE}.post_layernorm.bias", "D", "D"),
    "words": (f"{TEXT}.embeddings.token_embedding.weight", "VD", "V D"),
    "text_positions": (f"{TEXT}.embeddings.position_embedding.weight", "TD", "T D"),
    "text/final_norm/scale": (f"{TEXT}.final_layer_norm.weight", "D", "D"),
    "text/final_norm/bias": (f"{TEXT}.final_layer_norm.bias", "D", "D"),
}
for _ours, _theirs in (("image", IMAGE), ("text", TEXT)):
    BOTH |= {
        f"{_ours}/layers/{path}": (f"{_theirs}.encoder.layers.{{}}.{name}", dims, their_dims)
        for path, (name, dims, their_dims) in LAYER.items()
    }
CLIP_TENSORS: Table = BOTH | {
    "class_token": (f"{IMAGE}.embeddings.class_embedding", "D", "D"),
    "image_norm/scale": (f"{IMAGE}.pre_layrnorm.weight", "D", "D"),  # their spelling
    "image_norm/bias": (f"{IMAGE}.pre_layrnorm.bias", "D", "D"),
    "image_head": ("visual_projection.weight", "DE", "E D"),
    "text_head": ("text_projection.weight", "DE", "E D"),
    "log_scale": ("logit_scale", "S", ""),  # a number, without dims
}
TENSORS: Table = BOTH | {
    "patch_bias": (f"{IMAGE}.embeddings.patch_embedding.bias", "D", "D"),
    "pooling/probe": (f"{POOLING}.probe", "D", "1 1 D"),
    "pooling/o": (f"{POOLING}.attention.out_proj.weight", "NHD", "D NH"),
    "pooling/o_bias": (f"{POOLING}.attention.out_proj.bias", "D", "D"),
    "pooling/norm/scale": (f"{POOLING}.layernorm.weight", "D", "D"),
    "pooling/norm/bias": (f"{POOLING}.layernorm.bias", "D", "D"),
    "pooling/mlp/up": (f"{POOLING}.mlp.fc1.weight", "DF", "F D"),
    "pooling/mlp/up_bias": (f"{POOLING}.mlp.fc1.bias", "F", "F"),
    "pooling/mlp/down": (f"{POOLING}.mlp.fc2.weight", "FD", "D F"),
    "pooling/mlp/down_bias": (f"{POOLING}.mlp.fc2.bias", "D", "D"),
    "text_head": (f"{TEXT}.head.weight", "DE", "E D"),
    "text_head_bias": (f"{TEXT}.head.bias", "E", "E"),
    "log_scale": ("logit_scale", "S", "S"),
    "score_bias": ("logit_bias", "S", "S"),
}
for _third, _name in enumerate("qkv"):
    TENSORS |= {
        f"pooling/{_name}": (f"{POOLING}.attention.in_proj_weight", "DNH", f"#NH D {_third}/3"),
        f"pooling/{_name}_bias": (f"{POOLING}.attention.in_proj_bias", "NH", f"#NH {_third}/3"),
    }

TOWER = {  # field of TowerConfig → their key, in both towers
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp": "intermediate_size",
}
OF_TEXTS = {"vocab_size": "vocab_size", "max_positions": "max_position_embeddings"}
OF_IMAGES = {name: vit.SIZES[name][0] for name in ("image_size", "patch", "channels")}
ACTIVATIONS = {"gelu_pytorch_tanh": "tanh", "gelu": "exact", "quick_gelu": "quick"}
UNUSED = {  # features that our towers lack → values that leave them off
    "hidden_act": (*ACTIVATIONS,),
    "vision_use_head": (True,),
    "auto_map": (),
}
# Architecture → what an absent key means.
DEFAULTS: dict[str, Any] = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
DEFAULTS |= {"intermediate_size": 3_072, "image_size": 224, "patch_size": 16, "num_channels": 3}
SIGLIP = DEFAULTS | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
SIGLIP_TEXT = SIGLIP | {"vocab_size": 32_000, "max_position_embeddings": 64}
CLIP = DEFAULTS | {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32}
CLIP_TEXT = CLIP | {"vocab_size": 49_408, "max_position_embeddings": 77, "hidden_size": 512}
CLIP_TEXT |= {"intermediate_size": 2_048, "num_attention_heads": 8, "eos_token_id": 49_407}


def config_from(keys: dict[str, Any], path: pathlib.Path) -> Config:
    """Our Config for a config.json of SigLIP and the preprocessor_config.json beside it.

    Raises UserError if our SigLIP can't compute the model exactly.
    """
    fields, text, _ = _both(keys, path, SIGLIP_TEXT, SIGLIP)
    joint = text.number("projection_size", text.keys["hidden_size"])
    if joint != fields["embed"]:
        raise text.refused("projection_size", joint)
    return Config(**fields, **vit.inputs(path.parent, fields, ENTRY, vit.OF_SIGLIP))


def clip_config_from(keys: dict[str, Any], path: pathlib.Path) -> Config:
    """Our Config for a config.json of CLIP; otherwise as `config_from`."""
    fields, text, _ = _both(keys, path, CLIP_TEXT, CLIP)
    text.refuse({"is_causal": (True,)})  # texts attend to earlier positions alone
    joint = ConfigFile(keys, path, ENTRY).number("projection_dim", 512)
    # Their models with 2, which was wrong, take the largest number, as our 0 does.
    end = text.number("eos_token_id")
    fields |= {"loss": "softmax", "clip": True, "joint": joint, "end_token": end if end != 2 else 0}
    inputs = vit.inputs(path.parent, fields, ENTRY, vit.OF_CLIP, may_crop=True)
    return Config(**fields, **inputs)


def _both(
    keys: dict[str, Any], path: pathlib.Path, texts: dict[str, Any], images: dict[str, Any]
) -> tuple[dict[str, Any], ConfigFile, ConfigFile]:
    """(fields of Config, the keys of the text tower, those of the image tower)."""
    file = ConfigFile(keys, path, ENTRY)
    file.refuse({"auto_map": ()})
    sides = {}
    for name, defaults in (("text_config", texts), ("vision_config", images)):
        inner = {} if keys.get(name) is None else keys[name]
        if not isinstance(inner, dict):
            raise file.refused(name, inner)
        stated = {key: value for key, value in inner.items() if value is not None}
        sides[name] = dataclasses.replace(file, keys=defaults | stated)
        sides[name].refuse(UNUSED)
    text, image = sides["text_config"], sides["vision_config"]
    for key in ("layer_norm_eps", "hidden_act"):
        if image.keys[key] != text.keys[key]:
            raise image.refused(key, image.keys[key])
    fields: dict[str, Any] = {ours: image.number(key) for ours, key in (TOWER | OF_IMAGES).items()}
    fields |= {ours: text.number(key) for ours, key in OF_TEXTS.items()}
    own = tuple(text.number(key) for key in TOWER.values())
    fields["text_tower"] = () if own == tuple(fields[ours] for ours in TOWER) else own
    fields["norm_eps"] = image.number("layer_norm_eps", None, float)
    fields["activation"] = ACTIVATIONS[image.keys["hidden_act"]]
    if fields["image_size"] % fields["patch"]:
        raise image.refused("patch_size", fields["patch"])
    for side in (text, image):
        if side.number("hidden_size") % side.number("num_attention_heads"):
            raise side.refused("num_attention_heads", side.number("num_attention_heads"))
    return fields, text, image


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json. `context` is the length of texts, which the Config has."""
    kind = "clip" if config.clip else "siglip"
    joint = config.joint or config.embed
    (name,) = (name for name, theirs in ACTIVATIONS.items() if theirs == config.activation)
    every = {"hidden_act": name, "layer_norm_eps": config.norm_eps, "attention_dropout": 0.0}
    image, text = (
        {key: getattr(tower, ours) for ours, key in TOWER.items()} | every
        for tower in image_and_text(config)
    )
    text |= {key: getattr(config, ours) for ours, key in OF_TEXTS.items()}
    image |= {key: getattr(config, ours) for ours, key in OF_IMAGES.items()}
    if config.clip:
        text |= {"projection_dim": joint, "eos_token_id": config.end_token or 2}
        image |= {"projection_dim": joint}
    else:
        text |= {"projection_size": joint}
    return {
        "architectures": ["CLIPModel" if config.clip else "SiglipModel"],
        "model_type": kind,
        "text_config": {"model_type": f"{kind}_text_model"} | text,
        "vision_config": {"model_type": f"{kind}_vision_model"} | image,
        **({"projection_dim": joint} if config.clip else {}),
        "torch_dtype": "float32",
    }


def lost(config: Config, clip: bool = False) -> list[str]:
    """SigLIP's loss is the sigmoid of each pair, and CLIP's the softmax of each row."""
    said = {"clip": clip, "loss": "softmax" if clip else "sigmoid"}
    said |= {} if clip else {"center_crop": False}
    others = {name: getattr(config, name) for name in said}
    return [f"{name}={value!r}" for name, value in others.items() if value != said[name]]


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
    other_files=lambda config: vit.other_files(config, vit.OF_SIGLIP),
)
CLIP_FAMILY = dataclasses.replace(
    FAMILY,
    architectures={"CLIPModel": "clip"},
    tensors=lambda config: CLIP_TENSORS,
    config_from=clip_config_from,
    lost=functools.partial(lost, clip=True),
    other_files=lambda config: vit.other_files(config, vit.OF_CLIP),
)
