"""The families of Gemma 4 that sees (zoo/gemma4_vision.py): with a tower, and 12B, which has none.

gemma4.py describes the text model, which the entry gemma4 reads of the same folders. The names of
tensors are those of published folders; newer versions of transformers have others in memory.
"""

import dataclasses
import functools
import pathlib
from typing import Any

from recipes.common.hf import gemma4, vision, vit
from recipes.common.hf.family import ConfigFile, Family, Selection, Table
from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError
from zoo.gemma4_vision import Config
from zoo.parts.axial_tower import LINEAR

ENTRY = "gemma4_vision"
TOWER, UNIFIED = "gemma4", "gemma4_unified"  # model_type
NAMES = {TOWER: "Gemma4ForConditionalGeneration", UNIFIED: "Gemma4UnifiedForConditionalGeneration"}
TEXTS = {TOWER: gemma4.TEXT, UNIFIED: gemma4.UNIFIED}
PROCESSORS = {TOWER: "Gemma4ImageProcessor", UNIFIED: "Gemma4UnifiedImageProcessor"}

# ---- tensors -------------------------------------------------------------------------------------

EMBED = "model.embed_vision.embedding_projection.weight"
LAYER = "model.vision_tower.encoder.layers.{}"
OF_TOWER: Table = {
    "vision/patch": ("model.vision_tower.patch_embedder.input_proj.weight", "XYCD", "D XYC"),
    "vision/positions": (
        "model.vision_tower.patch_embedder.position_embedding_table", "ZXD", "Z X D",
    ),
    "vision/mean": ("model.vision_tower.std_bias", "D", "D"),
    "vision/factor": ("model.vision_tower.std_scale", "D", "D"),
    "vision/projection": (EMBED, "DE", "E D"),
}  # fmt: skip
OF_LAYER: Table = {
    "attention_norm/scale": (f"{LAYER}.input_layernorm.weight", "D", "D"),
    "post_attention_norm/scale": (f"{LAYER}.post_attention_layernorm.weight", "D", "D"),
    "mlp_norm/scale": (f"{LAYER}.pre_feedforward_layernorm.weight", "D", "D"),
    "post_mlp_norm/scale": (f"{LAYER}.post_feedforward_layernorm.weight", "D", "D"),
    "attention/q": (f"{LAYER}.self_attn.q_proj.linear.weight", "DNH", "NH D"),
    "attention/k": (f"{LAYER}.self_attn.k_proj.linear.weight", "DNH", "NH D"),
    "attention/v": (f"{LAYER}.self_attn.v_proj.linear.weight", "DNH", "NH D"),
    "attention/o": (f"{LAYER}.self_attn.o_proj.linear.weight", "NHD", "D NH"),
    "attention/q_norm/scale": (f"{LAYER}.self_attn.q_norm.weight", "H", "H"),
    "attention/k_norm/scale": (f"{LAYER}.self_attn.k_norm.weight", "H", "H"),
    "mlp/gate": (f"{LAYER}.mlp.gate_proj.linear.weight", "DF", "F D"),
    "mlp/up": (f"{LAYER}.mlp.up_proj.linear.weight", "DF", "F D"),
    "mlp/down": (f"{LAYER}.mlp.down_proj.linear.weight", "FD", "D F"),
}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
OF_LAYER |= {
    f"clips/{name}/{bound}": (
        f"{LAYER}.{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj.{bound}", "", "",
    )
    for name in LINEAR
    for bound in BOUNDS
}  # fmt: skip
OF_TOWER |= {f"vision/tower/layers/{path}": row for path, row in OF_LAYER.items()}
OF_SQUARES: Table = {
    "vision/patch": ("model.vision_embedder.patch_dense.weight", "XYCD", "D XYC"),
    "vision/patch_bias": ("model.vision_embedder.patch_dense.bias", "D", "D"),
    "vision/positions": ("model.vision_embedder.pos_embedding", "ZXD", "X Z D"),
    "vision/projection": (EMBED, "DE", "E D"),
}
OF_SQUARES |= {
    f"vision/{ours}/{part}": (f"model.vision_embedder.{theirs}.{name}", "D", "D")
    for ours, theirs in (
        ("pixel_norm", "patch_ln1"), ("patch_norm", "patch_ln2"), ("position_norm", "pos_norm"),
    )
    for part, name in (("scale", "weight"), ("bias", "bias"))
}  # fmt: skip


def tensors(config: Config) -> Table:
    text = {
        path: (vision.in_whole(name), ours, theirs)
        for path, (name, ours, theirs) in gemma4.tensors(config).items()
    }
    return text | (OF_TOWER if config.tower_layers else OF_SQUARES)


IN_MEMORY = {  # of 12B: newer versions' names → published ones
    f"model.embed_vision.{name}": f"model.vision_embedder.{name}"
    for name in ("patch_ln1", "patch_dense", "patch_ln2", "pos_embedding", "pos_norm")
}
IN_MEMORY |= {
    "model.embed_vision.multimodal_embedder.embedding_projection": EMBED.removesuffix(".weight")
}


def canonical(name: str) -> str:
    """A stored tensor's name, as `tensors` has it."""
    if name.startswith((*vision.TEXT_PREFIXES, "lm_head.")):
        return vision.in_whole(vision.canonical(name))
    name = "model." + name.removeprefix("model.")
    newer = next((start for start in IN_MEMORY if name.startswith(start)), "")
    return IN_MEMORY.get(newer, "") + name.removeprefix(newer)


AUDIO = {prefix: what for prefix, what in gemma4.TOWERS.items() if what == "audio"}


def without_audio(stored: dict[str, Stored], config: Any) -> Selection:
    return gemma4.without(AUDIO, stored, config, "the zoo has none")


# ---- config.json ---------------------------------------------------------------------------------

VISION = "vision_config"
BOTH_WAYS = "use_bidirectional_attention"
OF_BOTH = {"patch": ("patch_size", 16), "pooling": ("pooling_kernel_size", 3)}
SIZES = {  # model_type → field of Config → (their key, transformers' value of an absent one)
    TOWER: OF_BOTH
    | {
        "places": ("position_embedding_size", 10_240),
        "tower_embed": ("hidden_size", 768),
        "tower_layers": ("num_hidden_layers", 16),
        "tower_heads": ("num_attention_heads", 12),
        "tower_head_dim": ("head_dim", 64),
        "tower_mlp": ("intermediate_size", 3_072),
    },
    UNIFIED: OF_BOTH
    | {"places": ("mm_posemb_size", 1_120), "tower_embed": ("mm_embed_dim", 3_840)},
}
OF_TOKENS = {
    "image_token": ("image_token_id", 258_880),
    "picture_begin": ("boi_token_id", 255_999),
    "picture_end": ("eoi_token_id", 258_882),
}
UNUSED = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)}
COUNTS = (70, 140, 280, 560, 1_120)  # the most tokens of a picture that their processor takes
MOST = 280  # its default


def whole_keys(kind: str, keys: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """The text model's keys, and beside them those of the tower and of both. Raises UserError."""
    own = {key: keys.get(key) for key in (VISION, *(key for key, _ in OF_TOKENS.values()))}
    return gemma4.text_keys(TEXTS[kind], keys, file) | own


def config_from(kind: str, keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for keys of `whole_keys`. Raises UserError if we can't compute the model exactly."""
    text, fields = fields_from(kind, keys, file)
    return Config(**vars(text), **fields, **of_processor(kind, file.parent, fields))


def fields_from(
    kind: str, keys: dict[str, Any], file: pathlib.Path
) -> tuple[gemma4.Config, dict[str, Any]]:
    """(the text model's Config, fields that config.json states besides). Raises UserError."""
    text = gemma4.config_from({key: x for key, x in keys.items() if key != VISION}, file)
    theirs = ConfigFile(keys, file, ENTRY)
    stated = keys[VISION]
    if not isinstance(stated, dict):
        raise theirs.refused(VISION, stated)
    tower = ConfigFile(stated, file, ENTRY)
    tower.refuse({"model_type": (f"{kind}_vision",)})
    fields: dict[str, Any] = {
        ours: tower.number(key, usual) for ours, (key, usual) in SIZES[kind].items()
    }
    fields["tower_norm_eps"] = tower.number("rms_norm_eps", 1e-6, float)
    if kind == TOWER:
        fields |= of_tower(tower, fields)
    else:
        side = fields["patch"] * fields["pooling"]
        tower.refuse({"model_patch_size": (side,)})
        width = tower.number("output_proj_dims", 3_840)
        if width != fields["tower_embed"]:
            raise tower.refused("output_proj_dims", width)
        fields |= {"tower_layers": 0, "clipped": False}
    fields |= {ours: theirs.number(key, usual) for ours, (key, usual) in OF_TOKENS.items()}
    pad = 0 if keys.get("pad_token_id") is None else keys["pad_token_id"]
    if type(pad) is not int or not 0 <= pad < text.vocab_size:
        raise theirs.refused("pad_token_id", pad)
    both_ways = keys.get(BOTH_WAYS, "vision" if kind == UNIFIED else None) == "vision"
    return text, fields | {"pad_token": pad, "both_ways": both_ways}


def of_tower(tower: ConfigFile, fields: dict[str, Any]) -> dict[str, Any]:
    """More fields of a tower. Raises UserError."""
    tower.refuse(UNUSED | {"num_key_value_heads": (fields["tower_heads"],)})
    if tower.keys.get("num_key_value_heads") is None and fields["tower_heads"] != 12:
        raise tower.refused("num_key_value_heads", None)  # transformers' value is 12
    if fields["tower_head_dim"] % 4:
        raise tower.refused("head_dim", fields["tower_head_dim"])
    rope = tower.keys.get("rope_parameters")
    if not isinstance(rope, dict | None):
        raise tower.refused("rope_parameters", rope)
    rotary = dataclasses.replace(tower, keys=rope or {})
    rotary.refuse({"rope_type": ("axial", "default")})
    return {
        "tower_theta": rotary.number("rope_theta", 100.0, float),
        "clipped": gemma4.flag(tower, "use_clipped_linears"),
        "standardized": gemma4.flag(tower, "standardize"),
    }


def of_processor(kind: str, folder: pathlib.Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that a folder's processor of pictures states. Raises UserError."""
    file, stored = vit.processor_keys(folder)
    theirs = ConfigFile(stored or {}, file, ENTRY)
    named = theirs.keys.get("image_processor_type")
    known = [PROCESSORS[kind] + ending for ending in ("", "Fast", "Pil")]
    if named is not None and named not in known:
        raise theirs.refused("image_processor_type", named)
    off = {
        "do_resize": (True,),
        "do_rescale": (True,),
        "do_normalize": (False,),
        "do_pad": (False,),
    }
    theirs.refuse(off | {OF_BOTH[name][0]: (fields[name],) for name in OF_BOTH})
    factor = theirs.number("rescale_factor", vit.BYTE, float)
    if factor != vit.BYTE:
        raise theirs.refused("rescale_factor", factor)
    most = theirs.number("max_soft_tokens", MOST)
    if most not in COUNTS:
        raise theirs.refused("max_soft_tokens", most)
    number = theirs.keys.get("resample", vit.FILTERS.index("bicubic"))
    if number not in range(len(vit.FILTERS)):
        raise theirs.refused("resample", number)
    return {"picture_tokens": most, "resample": vit.FILTERS[number]}


def config_json(kind: str, config: Config, context: int) -> dict[str, Any]:
    """Their config.json; see gemma4.config_json. `lost` names what it can't say."""
    text = gemma4.config_json(TEXTS[kind], config, context)
    del text["architectures"]
    text |= {BOTH_WAYS: "vision" if config.both_ways else None, "pad_token_id": config.pad_token}
    seeing = {key: getattr(config, ours) for ours, (key, _) in SIZES[kind].items()}
    if kind == TOWER:
        seeing |= {
            "num_key_value_heads": config.tower_heads,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_type": "axial", "rope_theta": config.tower_theta},
            "use_clipped_linears": config.clipped,
            "standardize": config.standardized,
        }
    else:
        seeing |= {"output_proj_dims": config.tower_embed, "model_patch_size": config.square}
    return {
        "architectures": [NAMES[kind]],
        "model_type": kind,
        "text_config": text,
        VISION: {"model_type": f"{kind}_vision", **seeing, "rms_norm_eps": config.tower_norm_eps},
        "audio_config": None,
        **{key: getattr(config, ours) for ours, (key, _) in OF_TOKENS.items()},
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": "float32",
    }


def other_files(kind: str, config: Config) -> dict[str, dict[str, Any]]:
    """Name → content of the JSON files beside config.json."""
    return {
        vit.PREPROCESSOR: {
            "image_processor_type": PROCESSORS[kind],
            "do_resize": True,
            "do_rescale": True,
            "rescale_factor": vit.BYTE,
            "do_normalize": False,
            "max_soft_tokens": config.picture_tokens,
            **{key: getattr(config, ours) for ours, (key, _) in OF_BOTH.items()},
            "resample": vit.FILTERS.index(config.resample),
        }
    }


def lost(kind: str, config: Config) -> list[str]:
    """The fields of a Config that differ when its folder is read again."""
    text = gemma4.lost(TEXTS[kind], config)
    if text:
        return text
    own = [f"channels={config.channels}"] if config.channels != 3 else []
    if (kind == UNIFIED) == (config.tower_layers > 0):
        own.append(f"tower_layers={config.tower_layers}")
    if config.picture_tokens not in COUNTS:
        own.append(f"picture_tokens={config.picture_tokens}")
    if own:
        return own
    written = whole_keys(kind, config_json(kind, config, 1), pathlib.Path())
    try:
        _, read = fields_from(kind, written, pathlib.Path("config.json"))
    except UserError as error:
        return [str(error)]
    computed = {name: getattr(config, name) for name in read}
    return [f"{name}={x!r}" for name, x in computed.items() if read[name] != x]


def family(kind: str) -> Family:
    """The family of a model_type."""
    return Family(
        entry=ENTRY,
        architectures={NAMES[kind]: kind},
        tensors=tensors,
        config_from=functools.partial(config_from, kind),
        config_json=functools.partial(config_json, kind),
        lost=functools.partial(lost, kind),
        checked=(*gemma4.UNUSED, *UNUSED, gemma4.BY_LAYER),
        tied={"lm_head.weight": f"{vision.TEXT}embed_tokens.weight"},
        text_keys=functools.partial(whole_keys, kind),
        canonical=canonical,
        select=without_audio,
        other_files=functools.partial(other_files, kind),
    )


FAMILIES = (family(TOWER), family(UNIFIED))
