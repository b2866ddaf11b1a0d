"""The family of Gemma 3 with its tower (zoo/gemma3_vision.py), whole.

gemma.py describes the text model, which the entry gemma3 reads of the same folders. The names of
tensors are those of published folders; newer versions of transformers have others in memory.
"""

import pathlib
from typing import Any

from recipes.common.hf import gemma, siglip, vit
from recipes.common.hf.family import ConfigFile, Family, Selection, Table
from recipes.common.hf.tensors import Stored
from zoo.gemma3_vision import Config

ENTRY = "gemma3_vision"

TEXT, TOWER, PROJECTOR = "language_model.", "vision_tower.", "multi_modal_projector."
INNER = f"{TOWER}vision_model."
HEAD = f"{INNER}head."  # pools patches to a vector, which the model does not read

TENSORS: Table = {
    path: (f"{TEXT}{name}", ours, theirs) for path, (name, ours, theirs) in gemma.TENSORS.items()
}
TENSORS |= {
    "vision/patch": (f"{INNER}embeddings.patch_embedding.weight", "XYCD", "D C X Y"),
    "vision/patch_bias": (f"{INNER}embeddings.patch_embedding.bias", "D", "D"),
    "vision/positions": (f"{INNER}embeddings.position_embedding.weight", "TD", "T D"),
    "vision/tower/final_norm/scale": (f"{INNER}post_layernorm.weight", "D", "D"),
    "vision/tower/final_norm/bias": (f"{INNER}post_layernorm.bias", "D", "D"),
    "vision/norm/scale": (f"{PROJECTOR}mm_soft_emb_norm.weight", "D", "D"),
    "vision/projection": (f"{PROJECTOR}mm_input_projection_weight", "DE", "D E"),
}
TENSORS |= {
    f"vision/tower/layers/{path}": (f"{INNER}encoder.layers.{{}}.{name}", ours, theirs)
    for path, (name, ours, theirs) in siglip.LAYER.items()
}

OF_TOWER = {  # field of Config → their key in vision_config
    "image_size": "image_size",
    "patch": "patch_size",
    "channels": "num_channels",
    "tower_embed": "hidden_size",
    "tower_layers": "num_hidden_layers",
    "tower_heads": "num_attention_heads",
    "tower_mlp": "intermediate_size",
}
OF_TOKENS = {  # field of Config → (their key, transformers' value of an absent one)
    "picture_tokens": ("mm_tokens_per_image", 256),
    "image_token": ("image_token_index", 262_144),
    "picture_begin": ("boi_token_index", 255_999),
    "picture_end": ("eoi_token_index", 256_000),
}
UNUSED = {  # features of a tower that ours lacks → values that leave them off
    "model_type": ("siglip_vision_model",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "auto_map": (),
}
VISION = "vision_config"


def whole_keys(keys: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """The text model's keys, and beside them those of the tower and of both. Raises UserError."""
    own = {key: keys.get(key) for key in (VISION, *(key for key, _ in OF_TOKENS.values()))}
    return gemma.text_keys(keys, file) | own


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for keys of `whole_keys`. Raises UserError if we can't compute the model exactly."""
    text = gemma.config_from({key: x for key, x in keys.items() if key != VISION}, file)
    theirs = ConfigFile(keys, file, ENTRY)
    stated = keys[VISION] or {}
    if not isinstance(stated, dict):
        raise theirs.refused(VISION, stated)
    tower = ConfigFile(siglip.SIGLIP | stated, file, ENTRY)
    tower.refuse(UNUSED)
    fields: dict[str, Any] = {ours: tower.number(key) for ours, key in OF_TOWER.items()}
    fields["tower_norm_eps"] = tower.number("layer_norm_eps", None, float)
    fields |= {ours: theirs.number(key, usual) for ours, (key, usual) in OF_TOKENS.items()}
    for length, part in (("image_size", "patch"), ("tower_embed", "tower_heads")):
        if fields[length] % fields[part]:
            raise tower.refused(OF_TOWER[part], fields[part])
    inputs = vit.inputs(file.parent, fields, ENTRY, vit.OF_GEMMA3)
    return Config(**vars(text), **fields, **inputs)


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json; see gemma.config_json."""
    text = gemma.config_json(config, context)
    del text["architectures"]
    tower = {key: getattr(config, ours) for ours, key in OF_TOWER.items()}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        VISION: {
            "model_type": "siglip_vision_model",
            **tower,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": config.tower_norm_eps,
            "vision_use_head": False,
        },
        **{key: getattr(config, ours) for ours, (key, _) in OF_TOKENS.items()},
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
    }


def canonical(name: str) -> str:
    """A stored tensor's name, as TENSORS has it."""
    name = name.removeprefix("model.")
    if name.startswith("lm_head."):
        return TEXT + name
    if name.startswith(TEXT) and not name.startswith((f"{TEXT}model.", f"{TEXT}lm_head.")):
        return f"{TEXT}model.{name.removeprefix(TEXT)}"
    if name.startswith(TOWER) and not name.startswith(INNER):
        return INNER + name.removeprefix(TOWER)
    return name


def peft_name(name: str) -> str:
    """The name of a tensor of TENSORS in memory of transformers, as PEFT's adapters have it."""
    newer = {f"{TEXT}model.": f"model.{TEXT}", f"{TEXT}lm_head.": "lm_head."}
    newer |= {INNER: f"model.{TOWER}", PROJECTOR: f"model.{PROJECTOR}"}
    for published, in_memory in newer.items():
        if name.startswith(published):
            return in_memory + name.removeprefix(published)
    return name


def without_head(stored: dict[str, Stored], config: Any) -> Selection:
    kept = {name: x for name, x in stored.items() if not canonical(name).startswith(HEAD)}
    left_out = "Left out the head of the vision tower, which Gemma 3 does not read."
    return Selection(kept, config, left_out if len(kept) < len(stored) else "")


FAMILY = Family(
    entry=ENTRY,
    architectures={"Gemma3ForConditionalGeneration": "gemma3"},
    tensors=lambda config: TENSORS,
    config_from=config_from,
    config_json=config_json,
    checked={**gemma.UNUSED, **UNUSED},
    tied={f"{TEXT}lm_head.weight": f"{TEXT}model.embed_tokens.weight"},
    text_keys=whole_keys,
    canonical=canonical,
    peft_name=peft_name,
    select=without_head,
    computed=("rotary_emb.inv_freq", "position_ids"),
    other_files=lambda config: vit.other_files(config, vit.OF_GEMMA3),
)
