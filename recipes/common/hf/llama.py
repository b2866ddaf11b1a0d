"""The Llama family (zoo/transformer.py): Llama 2 and 3, Mistral, Ministral, Qwen 2 and 3, SmolLM."""

import dataclasses
import pathlib
from typing import Any

from recipes.common.hf.family import LLAMA3, YARN, ConfigFile, Family
from recipes.common.runtime.errors import UserError
from zoo.layers import Kind, Linear, Llama3, RopeScaling, Yarn
from zoo.transformer import Config

ENTRY = "transformer"

ARCHITECTURES = {  # theirs → model_type
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",  # Mistral with a window in only some layers
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# The format is explained in tensors.py, the letters in zoo/transformer.py. Their weights are [out,
# in] and merge several of our dims: our q is [D, N, H], their q_proj [N·H, D].
TENSORS = {
    "embed": ("model.embed_tokens.weight", "VD", "V D"),
    "layers/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", "D", "D"),
    "layers/attention/q": ("model.layers.{}.self_attn.q_proj.weight", "DNH", "NH D"),
    "layers/attention/k": ("model.layers.{}.self_attn.k_proj.weight", "DKH", "KH D"),
    "layers/attention/v": ("model.layers.{}.self_attn.v_proj.weight", "DKH", "KH D"),
    "layers/attention/o": ("model.layers.{}.self_attn.o_proj.weight", "NHD", "D NH"),
    "layers/attention/q_bias": ("model.layers.{}.self_attn.q_proj.bias", "NH", "NH"),
    "layers/attention/k_bias": ("model.layers.{}.self_attn.k_proj.bias", "KH", "KH"),
    "layers/attention/v_bias": ("model.layers.{}.self_attn.v_proj.bias", "KH", "KH"),
    "layers/attention/q_norm/scale": ("model.layers.{}.self_attn.q_norm.weight", "H", "H"),
    "layers/attention/k_norm/scale": ("model.layers.{}.self_attn.k_norm.weight", "H", "H"),
    "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/mlp/gate": ("model.layers.{}.mlp.gate_proj.weight", "DF", "F D"),
    "layers/mlp/up": ("model.layers.{}.mlp.up_proj.weight", "DF", "F D"),
    "layers/mlp/down": ("model.layers.{}.mlp.down_proj.weight", "FD", "D F"),
    "final_norm/scale": ("model.norm.weight", "D", "D"),
    "unembed": ("lm_head.weight", "VD", "V D"),
}

SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
}
UNUSED = {  # features that our Transformer lacks → values that leave them off
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # theirs includes a bias on o
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "num_experts": (),
    "num_local_experts": (),
    "auto_map": (),  # the folder's own code
}


def kinds_of(
    windows: list[int | None], theta: float, scaling: RopeScaling | None
) -> dict[str, Any]:
    """Fields of Config: one kind for all layers, or the shortest period of kinds."""
    period = period_of([Kind(window, theta, scaling) for window in windows])
    if len(period) == 1:
        return {"rope_theta": theta, "rope_scaling": scaling, "sliding_window": windows[0]}
    return {"layer_kinds": period}


def period_of(every: list[Kind]) -> tuple[Kind, ...]:
    """The shortest period of the layers' kinds."""
    return tuple(next(every[:p] for p in range(1, len(every) + 1) if every[p:] == every[:-p]))


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for a config.json with one of the model_types above.

    Raises UserError if our Transformer can't compute the model exactly.
    """
    theirs, kind = ConfigFile(keys, file, ENTRY), keys["model_type"]
    theirs.refuse(UNUSED)
    embed, heads = theirs.number("hidden_size"), theirs.number("num_attention_heads")
    sizes = theirs.sizes(
        SIZES,
        num_kv_heads=heads if kind == "llama" else None,
        head_dim=128 if kind == "qwen3" else embed // heads,
    )
    default = None if kind == "llama" else 4_096
    windows = theirs.windows(default, kind != "llama", kind in ("qwen2", "qwen3"))
    return Config(
        **sizes,
        **kinds_of(windows, *theirs.rope()),
        norm_eps=theirs.number("rms_norm_eps", 1e-6, float),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tie_embeddings=keys.get("tie_word_embeddings") is True,
    )


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json, with keys that old and new versions of transformers read.

    `context` is the number of positions trained on. Raises UserError if no architecture fits.
    """
    if config.qkv_bias and config.qk_norm:
        raise UserError(
            "no Hugging Face architecture has both qkv_bias and qk_norm; use a model with only one"
        )
    windows = windows_of(config)
    window, mixed = next(filter(None, windows), None), len({*windows}) > 1
    # Llama is Mistral without a window, but its heads must divide embed.
    mistral = window is not None or config.embed % config.num_heads
    kind = "ministral" if mixed else "mistral" if mistral else "llama"
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else kind
    architecture = next(name for name, k in ARCHITECTURES.items() if k == kind)
    theirs = common_json(config, architecture, kind, SIZES, context)
    if kind != "llama":
        theirs["sliding_window"] = window
    if kind in ("qwen2", "qwen3"):
        full = windows.index(window) if window else 28  # the first layers, without a window
        theirs |= {"use_sliding_window": window is not None, "max_window_layers": full}
    if mixed:
        names = {None: "full_attention", window: "sliding_attention"}
        theirs["layer_types"] = [names[w] for w in windows]
    return theirs


def windows_of(config: Any) -> list[int | None]:
    """Each layer's window. Raises UserError for kinds of layers that no architecture has."""
    period = config.kinds
    for what, values in {
        "rotary embeddings": {kind[1:] for kind in period},
        "sliding windows": {kind.window for kind in period} - {None},
    }.items():
        if len(values) > 1:
            raise UserError(
                f"no Hugging Face architecture of this family has layers with different {what}; use "
                "a model whose layer_kinds share them"
            )
    return [period[layer % len(period)].window for layer in range(config.num_layers)]


def common_json(
    config: Any, architecture: str, model_type: str, sizes: dict[str, str], context: int
) -> dict[str, Any]:
    """The keys that all architectures share.

    Args:
      sizes: a table like SIZES.
    """
    kind = config.kinds[0]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{key: getattr(config, ours) for ours, key in sizes.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": kind.rope_theta,
        "rope_scaling": scaling_json(kind.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": context,
        "torch_dtype": "float32",
    }


def scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Their rope_scaling for ours."""
    match scaling:
        case None:
            return None
        case Linear():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Yarn():
            numbers = dataclasses.astuple(scaling)
            return {"rope_type": "yarn"} | dict(zip(YARN, numbers, strict=True))
        case Llama3():
            numbers = dataclasses.astuple(scaling)
            return {"rope_type": "llama3"} | dict(zip(LLAMA3, numbers, strict=True))


FAMILY = Family(
    entry=ENTRY,
    architectures=ARCHITECTURES,
    tensors=lambda config: TENSORS,
    config_from=config_from,
    config_json=config_json,
    checked=UNUSED,
)
