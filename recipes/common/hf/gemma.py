"""The Gemma family (zoo/gemma3.py): Gemma 2 and Gemma 3, and the text model of Gemma 3 with vision.

Norms and embeddings are stored as in our model: its norms add 1 to their scale, and its embeddings
are multiplied by √D after the lookup. Everything else is as in relative.py.
"""

import dataclasses
import functools
import pathlib
from typing import Any

from recipes.common.hf import layer_kinds, relative, vision
from recipes.common.hf.family import (
    GLOBAL,
    LOCAL,
    ConfigFile,
    Family,
    scaling_json,
)
from recipes.common.runtime.errors import UserError
from zoo.core.layers import AttentionType
from zoo.gemma3 import Config

ENTRY = "gemma3"

ARCHITECTURES = {  # theirs → model_type
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma2ForCausalLM": "gemma2",
}

TENSORS = relative.TENSORS | {
    "layers/post_attention_norm/scale": (
        "model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/mlp_norm/scale": ("model.layers.{}.pre_feedforward_layernorm.weight", "D", "D"),
    "layers/post_mlp_norm/scale": ("model.layers.{}.post_feedforward_layernorm.weight", "D", "D"),
}  # fmt: skip

SIZES = relative.SIZES | {"query_scalar": "query_pre_attn_scalar"}
CAPS = {"soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
TIE = "tie_word_embeddings"
THETAS = {LOCAL: ("rope_local_base_freq", 1e4), GLOBAL: ("rope_theta", 1e6)}  # Gemma 3's older keys

UNUSED = {key: values for key, values in relative.UNUSED.items() if key != "hidden_act"}
UNUSED |= {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False,)}
# transformers computes no soft caps of scores in Gemma 3, whatever its config.json says.
UNUSED_IN_GEMMA3 = UNUSED | {CAPS["soft_cap"]: ()}

# Keys that published files leave out, with transformers' values.
DEFAULTS = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    TIE: True,
}
GEMMA2_DEFAULTS = DEFAULTS | {
    "vocab_size": 256_000,
    "max_position_embeddings": 8_192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS = DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}


def with_defaults(keys: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """A text model's config.json with transformers' values for absent keys."""
    return (GEMMA2_DEFAULTS if keys["model_type"] == "gemma2" else GEMMA3_DEFAULTS) | keys


def text_keys(keys: dict[str, Any], file: pathlib.Path) -> dict[str, Any]:
    """The text model's keys in the config.json of a model with a vision tower. Raises UserError."""
    file_keys = ConfigFile(keys, file, ENTRY)
    file_keys.refuse(UNUSED)
    text = vision.text_config(file_keys)
    tied = [config[TIE] for config in (keys, text) if config.get(TIE) is not None]
    if tied and tied[0] != tied[-1]:  # versions of transformers disagree on which one counts
        raise file_keys.refused(TIE, tied[0])
    return GEMMA3_DEFAULTS | text | {"model_type": "gemma3_text", TIE: (tied or [True])[0]}


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for keys without gaps.

    Raises UserError if our Gemma3 can't compute the model exactly.
    """
    theirs, gemma3 = ConfigFile(keys, file, ENTRY), keys["model_type"] == "gemma3_text"
    theirs.refuse(UNUSED_IN_GEMMA3 if gemma3 else UNUSED)
    if keys.get("layer_types") is None:
        layers = theirs.number("num_hidden_layers")
        every = theirs.number("sliding_window_pattern", 6) if gemma3 else 2
        types = [LOCAL if layer % every else GLOBAL for layer in range(1, layers + 1)]
        theirs = theirs.with_keys(layer_types=types)
    ropes = theirs.ropes(THETAS) if gemma3 else dict.fromkeys((LOCAL, GLOBAL), theirs.rope())
    windows = theirs.windows(theirs.keys["sliding_window"], mixed=True)
    every = [AttentionType(window, *ropes[LOCAL if window else GLOBAL]) for window in windows]
    caps = {name: key for name, key in CAPS.items() if keys.get(key) is not None}
    return Config(
        **theirs.sizes(SIZES),
        **{name: theirs.number(key, None, float) for name, key in caps.items()},
        layer_kinds=layer_kinds.period_of(every),
        qk_norm=gemma3,
        norm_eps=theirs.number("rms_norm_eps", None, float),
        tie_embeddings=keys[TIE] is True,
    )


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json, with keys that old and new versions of transformers read.

    `context` is the number of positions trained on. Raises UserError if no architecture fits.
    """
    period = config.kinds
    gemma3 = config.qk_norm
    ropes = {LOCAL: {kind[1:] for kind in period if kind.window}}
    ropes[GLOBAL] = {kind[1:] for kind in period if not kind.window}
    windows = [period[layer % len(period)].window for layer in range(config.num_layers)]
    window = next(filter(None, windows), None)
    most = max(map(len, ropes.values())) if gemma3 else len(ropes[LOCAL] | ropes[GLOBAL])
    for what, has_it in {
        "windows of different lengths": len({*windows} - {None}) > 1,
        f"different rotary embeddings{' in layers of one kind' if gemma3 else ''}": most > 1,
        "layers without rotary embeddings": any(kind.rope_theta is None for kind in period),
        "both qk_norm and soft_cap": gemma3 and config.soft_cap is not None,
        "an embed that num_heads does not divide": config.embed % config.num_heads > 0,
    }.items():
        if has_it:
            raise UserError(f"no Hugging Face Gemma has {what}; use a model without it")
    kind = "gemma3_text" if gemma3 else "gemma2"
    architecture = next(name for name, k in ARCHITECTURES.items() if k == kind)
    theirs = relative.common_json(config, architecture, kind, SIZES, context)
    del theirs["hidden_act"]
    theirs |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": window,
        "layer_types": [LOCAL if window else GLOBAL for window in windows],
        **{key: getattr(config, name) for name, key in CAPS.items()},
    }
    if gemma3:
        theirs |= ropes_json({name: next(iter(rope)) for name, rope in ropes.items() if rope})
        if [bool(kind.window) for kind in period] == [True] * (len(period) - 1) + [False]:
            theirs["sliding_window_pattern"] = len(period)  # for versions without layer_types
    return theirs


def ropes_json(ropes: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Gemma 3's rotary keys: the older ones, unless only the newer ones can say it."""
    theta, scaling = ropes.get(GLOBAL, (THETAS[GLOBAL][1], None))
    local_theta, local_scaling = ropes.get(LOCAL, (THETAS[LOCAL][1], None))
    theirs: dict[str, Any] = {"rope_theta": theta, "rope_local_base_freq": local_theta}
    theirs["rope_scaling"] = scaling_json(scaling)
    if local_scaling:
        local = {"rope_theta": local_theta} | (scaling_json(local_scaling) or {})
        theirs["rope_parameters"] = {LOCAL: local, GLOBAL: {"rope_theta": theta}}
    return theirs


FAMILY = Family(
    entry=ENTRY,
    architectures=ARCHITECTURES,
    tensors=lambda config: TENSORS,
    config_from=config_from,
    config_json=config_json,
    checked=UNUSED,
    text_keys=with_defaults,
    canonical=vision.canonical,
)
WITH_VISION = dataclasses.replace(
    FAMILY,
    architectures={"Gemma3ForConditionalGeneration": "gemma3"},
    text_keys=text_keys,
    select=functools.partial(
        vision.without_vision, why="--entry=gemma3_vision of recipes.hf reads it too"
    ),
    peft_name=vision.in_whole,
    is_part=True,
)
