"""Gemma 4's text models (zoo/gemma4.py): also those in folders of models that see and hear.

Layers are stacks of their own by their kind: sliding or global, with keys or reading those of earlier
layers. Newer files have the sizes of global layers in per_layer_config, published ones in keys of
their own, which an export has too.
"""

import dataclasses
import functools
import pathlib
import re
from typing import Any

from recipes.common.hf import relative, vision
from recipes.common.hf.family import GLOBAL, LOCAL, ConfigFile, Family, Selection, Table
from recipes.common.hf.qwen3_next import in_layers
from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError
from zoo.gemma4 import Config
from zoo.options.cache import ATTENTION
from zoo.options.compute_options import ComputeOptions
from zoo.options.shared_keys import READS

ENTRY = "gemma4"
TEXT, UNIFIED = "gemma4_text", "gemma4_unified_text"  # model_type
NAMES = {TEXT: "Gemma4ForCausalLM", UNIFIED: "Gemma4UnifiedForCausalLM"}

# ---- tensors -------------------------------------------------------------------------------------

LAYER = "model.layers.{}"
OF_A_LAYER = {  # path inside a layer → as in tensors.py
    path.removeprefix("layers/"): row
    for path, row in relative.TENSORS.items()
    if path.startswith("layers/")
} | {
    "post_attention_norm/scale": (f"{LAYER}.post_attention_layernorm.weight", "D", "D"),
    "mlp_norm/scale": (f"{LAYER}.pre_feedforward_layernorm.weight", "D", "D"),
    "mlp_out_norm/scale": (f"{LAYER}.post_feedforward_layernorm_1.weight", "D", "D"),
    "post_mlp_norm/scale": (f"{LAYER}.post_feedforward_layernorm.weight", "D", "D"),
    "experts/norm/scale": (f"{LAYER}.pre_feedforward_layernorm_2.weight", "D", "D"),
    "experts/out_norm/scale": (f"{LAYER}.post_feedforward_layernorm_2.weight", "D", "D"),
    "experts/router_scale": (f"{LAYER}.router.scale", "D", "D"),
    "experts/router": (f"{LAYER}.router.proj.weight", "DE", "E D"),
    "experts/factor": (f"{LAYER}.router.per_expert_scale", "E", "E"),
    "experts/gate": (f"{LAYER}.experts.gate_up_proj", "EDF", "E #F D 0/2"),
    "experts/up": (f"{LAYER}.experts.gate_up_proj", "EDF", "E #F D 1/2"),
    "experts/down": (f"{LAYER}.experts.down_proj", "EFD", "E D F"),
    "embedding/gate": (f"{LAYER}.per_layer_input_gate.weight", "DP", "P D"),
    "embedding/out": (f"{LAYER}.per_layer_projection.weight", "PD", "D P"),
    "post_embedding_norm/scale": (f"{LAYER}.post_per_layer_input_norm.weight", "D", "D"),
    "scalar": (f"{LAYER}.layer_scalar", "", "1"),
}
OUTSIDE = {path: row for path, row in relative.TENSORS.items() if not path.startswith("layers/")}
OUTSIDE |= {
    "layer_embeddings/table": ("model.embed_tokens_per_layer.weight", "VC", "V C"),
    "layer_embeddings/projection": ("model.per_layer_model_projection.weight", "DC", "C D"),
    "layer_embeddings/norm/scale": ("model.per_layer_projection_norm.weight", "P", "P"),
}


def tensors(config: Config) -> Table:
    """The variables' tensors."""
    every = config.attention_every
    first_shared = config.num_layers - config.shared_layers
    table = dict(OUTSIDE)
    for first, names in ((0, {name: name for name in READS}), (first_shared, READS)):
        numbers = range(first, first + every)  # of a period from there on
        for kind, stack in names.items():
            own = [l for l in numbers if (l % every == every - 1) == (kind == ATTENTION)]
            if own:
                table |= in_layers(OF_A_LAYER, stack, own, every)
    return table


# In newer files, after "model.".
TOWERS = {
    "vision_tower.": "vision",
    "vision_embedder.": "vision",
    "embed_vision.": "vision",
    "audio_tower.": "audio",
    "embed_audio.": "audio",
}
KEYS_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


def text_tensors(stored: dict[str, Stored], config: Config) -> Selection:
    """Leaves out what the text model doesn't read: towers, and projections of shared layers, which
    published folders have and `transformers` ignores.
    """
    return without(
        TOWERS, stored, config, "--entry=gemma4_vision of recipes.hf reads those for vision too"
    )


def without(
    parts: dict[str, str], stored: dict[str, Stored], config: Config, why: str
) -> Selection:
    """Leaves out parts, by how their names begin, and projections of shared layers."""
    first_shared = config.num_layers - config.shared_layers
    read: dict[str, Stored] = {}
    towers = []
    for name, tensor in stored.items():
        short = name.removeprefix("model.")
        tower = [what for prefix, what in parts.items() if short.startswith(prefix)]
        match = KEYS_OF_LAYER.match(vision.canonical(name))
        if tower:
            towers += tower
        elif match is None or int(match[1]) < first_shared:
            read[name] = tensor
    named = " and ".join(dict.fromkeys(sorted(towers, reverse=True)))
    report = f"The parts for {named} were left out; {why}."
    return Selection(read, config, report if towers else "")


# ---- config.json ---------------------------------------------------------------------------------

SIZES = relative.SIZES
EXPERTS = {  # field of Config → theirs
    "num_experts": "num_experts",
    "experts_per_token": "top_k_experts",
    "expert_mlp": "moe_intermediate_size",
}
UNUSED = {key: values for key, values in relative.UNUSED.items() if key != "hidden_act"}
UNUSED = {key: values for key, values in UNUSED.items() if key != "num_experts"} | {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": ("vision",),  # a text has no pictures
}
TIE = "tie_word_embeddings"
CAP = "final_logit_softcapping"
PER_LAYER = "hidden_size_per_layer_input"
PER_LAYER_VOCABULARY = "vocab_size_per_layer_input"
GLOBAL_HEADS, GLOBAL_DIM = "num_global_key_value_heads", "global_head_dim"
BY_LAYER = "per_layer_config"
DEFAULTS = {  # keys that files may leave out, with transformers' values
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    TIE: True,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    PER_LAYER: 256,
}
UNIFIED_DEFAULTS = {"max_position_embeddings": 262_144, "sliding_window": 1_024, PER_LAYER: 0}
THETAS = {LOCAL: 1e4, GLOBAL: 1e6}
FRACTION = 0.25  # of the dims of global heads, in files without rotary settings


def with_defaults(keys: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """A text model's config.json with transformers' values for absent keys."""
    unified = UNIFIED_DEFAULTS if keys["model_type"] == UNIFIED else {}
    return DEFAULTS | unified | keys


def text_keys(kind: str, keys: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """The text model's keys in the config.json of a model that sees or hears. Raises UserError."""
    file_keys = ConfigFile(keys, file, ENTRY)
    file_keys.refuse(UNUSED)
    text = vision.text_config(file_keys)
    tied = [config[TIE] for config in (keys, text) if config.get(TIE) is not None]
    if tied and tied[0] != tied[-1]:  # versions of transformers disagree on which one counts
        raise file_keys.refused(TIE, tied[0])
    return with_defaults(text | {"model_type": kind, TIE: (tied or [True])[0]}, file)


def config_from(keys: dict[str, Any], path: pathlib.Path) -> Config:
    """Our dropless Config for keys without gaps.

    Raises UserError if our Gemma4 can't compute the model exactly.
    """
    file = ConfigFile(keys, path, ENTRY)
    file.refuse(UNUSED)
    if keys["model_type"] == UNIFIED:  # its class has neither
        file.refuse({PER_LAYER: (0,), "enable_moe_block": (False,)})
    sizes = file.sizes(SIZES)
    every = period(file)
    same = flag(file, "attention_k_eq_v")
    kv_heads, head_dim = global_heads(file, every, same)
    local_theta, theta, fraction = rotary(file)
    layer_embed = file.number(PER_LAYER) if keys.get(PER_LAYER) else 0
    if layer_embed and file.number(PER_LAYER_VOCABULARY, 262_144) != sizes["vocab_size"]:
        raise file.refused(PER_LAYER_VOCABULARY, keys.get(PER_LAYER_VOCABULARY, 262_144))
    shared = file.number("num_kv_shared_layers") if keys.get("num_kv_shared_layers") else 0
    if shared > sizes["num_layers"] - every:
        raise file.refused("num_kv_shared_layers", shared)
    experts = {}
    if flag(file, "enable_moe_block"):
        experts = {ours: file.number(key) for ours, key in EXPERTS.items()}
        if experts["experts_per_token"] > experts["num_experts"]:
            raise file.refused("top_k_experts", experts["experts_per_token"])
    return Config(
        **sizes,
        global_kv_heads=kv_heads,
        global_head_dim=head_dim,
        sliding_window=file.number("sliding_window"),
        attention_every=every,
        keys_as_values=same,
        shared_layers=shared,
        # Without shared layers, the key means nothing.
        wide_shared_layers=shared > 0 and flag(file, "use_double_wide_mlp"),
        layer_embed=layer_embed,
        **experts,
        capacity=None,
        logits_soft_cap=None if keys.get(CAP) is None else file.number(CAP, None, float),
        norm_eps=file.number("rms_norm_eps", None, float),
        rope_theta=theta,
        local_rope_theta=local_theta,
        rotary_fraction=fraction,
        tie_embeddings=keys[TIE] is True,
    )


def flag(file: ConfigFile, key: str) -> bool:
    value = file.keys.get(key)
    if value not in (True, False, None):
        raise file.refused(key, value)
    return value is True


def layer_types(layers: int, every: int) -> list[str]:
    return [LOCAL if (n + 1) % every else GLOBAL for n in range(layers)]


def period(file: ConfigFile) -> int:
    """Every how many layers there is a global one; the last layer must be one."""
    layers = file.number("num_hidden_layers")
    types = file.keys.get("layer_types")
    if types is None:
        types = [*layer_types(layers, 6)[:-1], GLOBAL]  # as transformers completes it
    every = types.index(GLOBAL) + 1 if isinstance(types, list) and GLOBAL in types else 0
    if not every or layers % every or types != layer_types(layers, every):
        raise file.refused("layer_types", types)
    return every


def global_heads(file: ConfigFile, every: int, same: bool) -> tuple[int, int]:
    """(kv heads, head dim) of global layers."""
    kv_heads = file.number("num_key_value_heads")
    by_layer = file.keys.get(BY_LAYER)
    if by_layer is None:  # transformers reads their kv heads only where keys are values too
        if same and file.keys.get(GLOBAL_HEADS) is not None:
            kv_heads = file.number(GLOBAL_HEADS)
        return kv_heads, file.number(GLOBAL_DIM, 512)
    layers = file.number("num_hidden_layers")
    numbers = {str(n) for n in range(every - 1, layers, every)}
    if by_layer == {}:  # all layers are alike
        return kv_heads, file.number("head_dim")
    if not isinstance(by_layer, dict) or {*by_layer} != numbers:
        raise file.refused(BY_LAYER, by_layer)
    first, *others = by_layer.values()
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(first, dict) or not {*first} <= known or any(x != first for x in others):
        raise file.refused(BY_LAYER, by_layer)
    own = file.with_keys(**first)
    return own.number("num_key_value_heads"), own.number("head_dim")


def rotary(file: ConfigFile) -> tuple[float, float, float]:
    """(theta of sliding layers, theta of global ones, the fraction of their dims that rotates)."""
    ropes = file.keys.get("rope_parameters")
    if ropes is None:
        return THETAS[LOCAL], THETAS[GLOBAL], FRACTION
    if not isinstance(ropes, dict) or not {*ropes} <= {*THETAS}:
        raise file.refused("rope_parameters", ropes)
    inner = {}
    for name, usual in THETAS.items():
        rope = ropes.get(name)
        if not isinstance(rope, dict):
            raise file.refused("rope_parameters", ropes)
        inner[name] = dataclasses.replace(file, keys={"rope_theta": usual} | rope)
    inner[LOCAL].refuse({"rope_type": ("default",), "partial_rotary_factor": (1,)})
    of_global = inner[GLOBAL]
    of_global.refuse({"rope_type": ("proportional", "default"), "factor": (1,)})
    fraction = 1.0
    if of_global.keys.get("rope_type") == "proportional":
        fraction = of_global.number("partial_rotary_factor", 1.0, float)
        if fraction > 1:
            raise of_global.refused("partial_rotary_factor", fraction)
    thetas = (inner[name].number("rope_theta", None, float) for name in THETAS)
    return (*thetas, fraction)


def config_json(kind: str, config: Config, context: int) -> dict[str, Any]:
    """Their config.json, with the keys of published folders. `lost` names what they can't say.

    Args:
      kind: the model_type.
      context: the number of positions trained on.
    """
    theirs = relative.common_json(config, NAMES[kind], kind, SIZES, context)
    for key in ("hidden_act", "rope_theta", "rope_scaling"):
        theirs.pop(key, None)
    theirs |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config.num_layers, config.attention_every),
        "attention_k_eq_v": config.keys_as_values,
        GLOBAL_DIM: config.global_head_dim,
        GLOBAL_HEADS: config.global_kv_heads,
        "num_kv_shared_layers": config.shared_layers,
        "use_double_wide_mlp": config.wide_shared_layers,
        CAP: config.logits_soft_cap,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": config.local_rope_theta},
            GLOBAL: {
                "rope_type": "proportional",
                "rope_theta": config.rope_theta,
                "partial_rotary_factor": config.rotary_fraction,
            },
        },
    }
    if kind == UNIFIED:
        return theirs
    theirs |= {
        PER_LAYER: config.layer_embed,
        PER_LAYER_VOCABULARY: config.vocab_size,
        "enable_moe_block": config.num_experts > 0,
    }
    return theirs | {key: getattr(config, ours) or None for ours, key in EXPERTS.items()}


def lost(kind: str, config: Config) -> list[str]:
    """The fields of a Config that differ when its config.json is read again."""
    written = with_defaults(config_json(kind, config, 1), pathlib.Path())
    try:
        read = config_from(written, pathlib.Path("config.json"))
    except UserError:  # a last layer with a window
        return [f"num_layers={config.num_layers} with attention_every={config.attention_every}"]
    skipped = {*ComputeOptions.__dataclass_fields__, "capacity", "balance_weight"}
    names = [field.name for field in dataclasses.fields(Config) if field.name not in skipped]
    computed = {name: getattr(config, name) for name in names}
    return [f"{name}={x!r}" for name, x in computed.items() if getattr(read, name) != x]


def family(kind: str, towers: str = "") -> Family:
    """The family of a model_type; towers: the one of folders with more than the text model."""
    architecture = NAMES[kind]
    if towers:
        architecture = architecture.replace("CausalLM", "ConditionalGeneration")
    return Family(
        entry=ENTRY,
        architectures={architecture: towers or kind},
        tensors=tensors,
        config_from=config_from,
        config_json=functools.partial(config_json, kind),
        lost=functools.partial(lost, kind),
        checked=(*UNUSED, BY_LAYER),
        canonical=vision.canonical,
        text_keys=functools.partial(text_keys, kind) if towers else with_defaults,
        select=text_tensors,
        peft_name=vision.in_whole if towers else str,
        is_part=bool(towers),
    )


FAMILIES = (
    *(family(TEXT), family(TEXT, "gemma4")),
    *(family(UNIFIED), family(UNIFIED, "gemma4_unified")),
)
