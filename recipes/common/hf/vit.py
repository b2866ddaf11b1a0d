"""The family of ViT (zoo/vit.py), and how pictures become inputs, also of SigLIP and CLIP.

processor_config.json says that where a tokenizer is saved along, else preprocessor_config.json; what they
don't state is the default of the class in `transformers` that they name.
"""

import dataclasses
import pathlib
import re
from typing import Any

from recipes.common.hf import tensors as folders
from recipes.common.hf.family import ConfigFile, Family, labels_json
from zoo.vit import Config

ENTRY = "vit"

ARCHITECTURES = {"ViTForImageClassification": "vit"}  # theirs → model_type

LAYER = "vit.encoder.layer.{}"
TENSORS = {  # in the format of tensors.py; X and Y are the rows and columns of a patch
    "class_token": ("vit.embeddings.cls_token", "D", "1 1 D"),
    "positions": ("vit.embeddings.position_embeddings", "TD", "1 T D"),
    "patch": ("vit.embeddings.patch_embeddings.projection.weight", "XYCD", "D C X Y"),
    "patch_bias": ("vit.embeddings.patch_embeddings.projection.bias", "D", "D"),
    "layers/attention_norm/scale": (f"{LAYER}.layernorm_before.weight", "D", "D"),
    "layers/attention_norm/bias": (f"{LAYER}.layernorm_before.bias", "D", "D"),
    "layers/attention/q": (f"{LAYER}.attention.attention.query.weight", "DNH", "NH D"),
    "layers/attention/q_bias": (f"{LAYER}.attention.attention.query.bias", "NH", "NH"),
    "layers/attention/k": (f"{LAYER}.attention.attention.key.weight", "DNH", "NH D"),
    "layers/attention/k_bias": (f"{LAYER}.attention.attention.key.bias", "NH", "NH"),
    "layers/attention/v": (f"{LAYER}.attention.attention.value.weight", "DNH", "NH D"),
    "layers/attention/v_bias": (f"{LAYER}.attention.attention.value.bias", "NH", "NH"),
    "layers/attention/o": (f"{LAYER}.attention.output.dense.weight", "NHD", "D NH"),
    "layers/attention/o_bias": (f"{LAYER}.attention.output.dense.bias", "D", "D"),
    "layers/mlp_norm/scale": (f"{LAYER}.layernorm_after.weight", "D", "D"),
    "layers/mlp_norm/bias": (f"{LAYER}.layernorm_after.bias", "D", "D"),
    "layers/mlp/up": (f"{LAYER}.intermediate.dense.weight", "DF", "F D"),
    "layers/mlp/up_bias": (f"{LAYER}.intermediate.dense.bias", "F", "F"),
    "layers/mlp/down": (f"{LAYER}.output.dense.weight", "FD", "D F"),
    "layers/mlp/down_bias": (f"{LAYER}.output.dense.bias", "D", "D"),
    "final_norm/scale": ("vit.layernorm.weight", "D", "D"),
    "final_norm/bias": ("vit.layernorm.bias", "D", "D"),
    "head": ("classifier.weight", "DK", "K D"),
    "head_bias": ("classifier.bias", "K", "K"),
}
# A layer's modules: names in files → names in newer versions of transformers, and thus in PEFT.
MODULES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
HEAD = "classifier"  # PEFT stores it with an adapter that has it in modules_to_save

SIZES = {  # field of Config → (theirs, the default of an absent key)
    "image_size": ("image_size", 224),
    "patch": ("patch_size", 16),
    "channels": ("num_channels", 3),
    "embed": ("hidden_size", 768),
    "num_layers": ("num_hidden_layers", 12),
    "num_heads": ("num_attention_heads", 12),
    "mlp": ("intermediate_size", 3_072),
}
UNUSED = {  # features that our ViT lacks → values that leave them off
    "hidden_act": ("gelu",),
    "qkv_bias": (True,),
    "auto_map": (),  # the folder's own code
}

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # of transformers 5, with the former as its image_processor
PROCESSORS = (PREPROCESSOR, PROCESSOR)
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # PIL's, by their number
BYTE = 1 / 255  # a pixel's value from 0 to 1


@dataclasses.dataclass(frozen=True)
class Processor:
    """A class in `transformers` that prepares pictures, and its defaults."""

    name: str
    resample: str
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    crops: bool = False  # whether it cuts pictures to a square instead of stretching them


OF_VIT = Processor("ViTImageProcessor", "bilinear")
OF_SIGLIP = Processor("SiglipImageProcessor", "bicubic")
OF_GEMMA3 = Processor("Gemma3ImageProcessor", "bilinear")
OF_CLIP = Processor(
    "CLIPImageProcessor", "bicubic",
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711), crops=True,
)  # fmt: skip
CLASSES = {processor.name: processor for processor in (OF_VIT, OF_SIGLIP, OF_GEMMA3, OF_CLIP)}


def canonical(name: str) -> str:
    """A stored tensor's name, as TENSORS has it; PEFT's adapters may have the newer names."""
    for module, newer in MODULES.items():
        layer = rf"^vit\.layers\.(\d+)\.{re.escape(newer)}\."
        name = re.sub(layer, rf"vit.encoder.layer.\1.{module}.", name)
    return name


def peft_name(name: str) -> str:
    """The name of a tensor of TENSORS in PEFT's adapters."""
    for module, newer in MODULES.items():
        if name.startswith(f"{LAYER}.{module}."):
            return name.replace(f"{LAYER}.{module}", f"vit.layers.{{}}.{newer}")
    return name


def with_head(config: Config, shapes: dict[str, tuple[int, ...]]) -> Config:
    """The Config of an adapter with these tensors; its own head may have other classes."""
    count = shapes.get(f"{HEAD}.bias", (config.classes,))[0]
    if count == config.classes:
        return config
    labels = tuple(f"LABEL_{i}" for i in range(count))
    return dataclasses.replace(config, classes=count, labels=labels)


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for a config.json and the preprocessor_config.json beside it.

    Raises UserError if our ViT can't compute the model exactly.
    """
    theirs = ConfigFile(keys, file, ENTRY)
    theirs.refuse(UNUSED)
    sizes = {ours: theirs.number(key, default) for ours, (key, default) in SIZES.items()}
    for name, part in (("image_size", "patch"), ("embed", "num_heads")):
        if sizes[name] % sizes[part]:
            raise theirs.refused(SIZES[part][0], sizes[part])
    labels = theirs.labels()
    return Config(
        **sizes,
        classes=len(labels),
        labels=labels,
        norm_eps=theirs.number("layer_norm_eps", 1e-12, float),
        **inputs(file.parent, sizes, ENTRY, OF_VIT),
    )


def inputs(
    folder: pathlib.Path,
    sizes: dict[str, int],
    entry: str,
    processor: Processor,
    may_crop: bool = False,
) -> dict[str, Any]:
    """Fields of an entry's Config from a folder's PROCESSORS; {} without one.

    Args:
      processor: the architecture's own, for files that name none.
      may_crop: whether the entry's pictures may be cut to a square, the field center_crop.
    """
    file, stored = processor_keys(folder)
    if stored is None:
        return {}
    # null is absent, but for switches, which it turns off.
    keys: dict[str, Any] = {key: value for key, value in stored.items() if value is not None}
    keys |= {key: bool(value) for key, value in stored.items() if key.startswith("do_")}
    theirs = ConfigFile(keys, file, entry)
    named = keys.get("image_processor_type", keys.get("feature_extractor_type"))
    if named is not None:
        name = str(named).removesuffix("Fast").removesuffix("Pil")
        name = name.replace("FeatureExtractor", "ImageProcessor")
        if name not in CLASSES:
            raise theirs.refused("image_processor_type", named)
        processor = CLASSES[name]
    crops = keys.get("do_center_crop", processor.crops)
    if crops and not may_crop:
        raise theirs.refused("do_center_crop", True)
    off = ("do_pad", "use_square_size", "do_pan_and_scan")
    theirs.refuse({"do_resize": (True,), **dict.fromkeys(off, (False,))})
    for key in ("crop_size", "size") if crops else ("size",):
        size = keys.get(key) or sizes["image_size"]
        if isinstance(size, dict):
            height = size.get("height")
            shortest = size.get("shortest_edge") if crops and key == "size" else None
            size = height if height and height == size.get("width") else shortest or size
        if size != sizes["image_size"]:
            raise theirs.refused(key, keys[key])
    number = keys.get("resample", FILTERS.index(processor.resample))
    if number not in range(len(FILTERS)):
        raise theirs.refused("resample", number)
    factor = theirs.number("rescale_factor", BYTE, float) if keys.get("do_rescale", True) else 1.0
    statistics = {}
    of_class = {"image_mean": processor.mean, "image_std": processor.std}
    for key, unnormalized in (("image_mean", 0.0), ("image_std", 1.0)):
        usual = of_class[key][0] if len({*of_class[key]}) == 1 else [*of_class[key]]
        value = keys.get(key, usual) if keys.get("do_normalize", True) else unnormalized
        values = [value] * sizes["channels"] if isinstance(value, (int, float)) else value
        if not isinstance(values, list) or len(values) != sizes["channels"]:
            raise theirs.refused(key, value)
        # Theirs are for pixel · factor, ours for pixel / 255.
        statistics[key] = tuple(float(x) if factor == BYTE else x / (factor / BYTE) for x in values)
    return {
        "mean": statistics["image_mean"],
        "std": statistics["image_std"],
        "resample": FILTERS[number],
        **({"center_crop": crops} if may_crop else {}),
    }


def processor_keys(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any] | None]:
    """The file that says how pictures become inputs, and its keys; None without one."""
    processor = folder / PROCESSOR
    nested = folders.read_json(processor).get("image_processor") if processor.exists() else None
    if isinstance(nested, dict):
        return processor, nested
    file = folder / PREPROCESSOR
    return file, folders.read_json(file) if file.exists() else None


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json. `context` has no meaning for images."""
    names = config.labels or [f"LABEL_{i}" for i in range(config.classes)]
    return {
        "architectures": [*ARCHITECTURES],
        "model_type": ARCHITECTURES["ViTForImageClassification"],
        **{key: getattr(config, ours) for ours, (key, _) in SIZES.items()},
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **labels_json(names),
        "torch_dtype": "float32",
    }


def other_files(config: Any, processor: Processor = OF_VIT) -> dict[str, dict[str, Any]]:
    """Name → content of the JSON files beside config.json.

    Args:
      config: the Config of a model of images.
      processor: what prepares them.
    """
    if not config.mean:
        return {}
    size = {"height": config.image_size, "width": config.image_size}
    resize: dict[str, Any] = {"do_resize": True, "size": size}
    if processor.crops:
        resize |= {"do_center_crop": config.center_crop}
    if processor.crops and config.center_crop:
        resize |= {"size": {"shortest_edge": config.image_size}, "crop_size": size}
    return {
        PREPROCESSOR: {
            "image_processor_type": processor.name,
            **resize,
            "resample": FILTERS.index(config.resample),
            "do_rescale": True,
            "rescale_factor": BYTE,
            "do_normalize": True,
            "image_mean": list(config.mean),
            "image_std": list(config.std),
        }
    }


FAMILY = Family(
    entry=ENTRY,
    architectures=ARCHITECTURES,
    tensors=lambda config: TENSORS,
    config_from=config_from,
    config_json=config_json,
    checked=(*UNUSED, "problem_type", "num_labels"),
    # The classifier does not use the pooler.
    computed=("vit.pooler.dense.weight", "vit.pooler.dense.bias"),
    tied={},
    canonical=canonical,
    other_files=other_files,
    peft_name=peft_name,
    head=HEAD,
    with_head=with_head,
)
