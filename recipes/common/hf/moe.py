"""The family of Mixtral and Qwen3-MoE (zoo/moe.py). Everything but the experts is as in llama.py.

Each expert is a separate tensor in the folder, and a slice of one of our parameters.
"""

import pathlib
from typing import Any

from recipes.common.hf import llama
from recipes.common.hf.family import ConfigFile, Family, Table
from recipes.common.runtime.errors import UserError
from zoo.moe import Config

ENTRY = "moe"

ARCHITECTURES = {  # theirs → model_type
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}

OTHERS = {path: row for path, row in llama.TENSORS.items() if not path.startswith("layers/mlp/")}
EXPERTS = {  # model_type → a table like llama.TENSORS
    "mixtral": {
        "layers/experts/router": ("model.layers.{}.block_sparse_moe.gate.weight", "DE", "E D"),
        "layers/experts/gate": ("model.layers.{}.block_sparse_moe.experts.{}.w1.weight", "DF", "F D"),
        "layers/experts/up": ("model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "DF", "F D"),
        "layers/experts/down": ("model.layers.{}.block_sparse_moe.experts.{}.w2.weight", "FD", "D F"),
    },
    "qwen3_moe": {
        "layers/experts/router": ("model.layers.{}.mlp.gate.weight", "DE", "E D"),
        "layers/experts/gate": ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "DF", "F D"),
        "layers/experts/up": ("model.layers.{}.mlp.experts.{}.up_proj.weight", "DF", "F D"),
        "layers/experts/down": ("model.layers.{}.mlp.experts.{}.down_proj.weight", "FD", "D F"),
    },
}  # fmt: skip

SIZES = {  # model_type → field of Config → theirs
    "mixtral": llama.SIZES
    | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    "qwen3_moe": llama.SIZES
    | {"mlp": "moe_intermediate_size"}
    | {"num_experts": "num_experts", "experts_per_token": "num_experts_per_tok"},
}
UNUSED = {
    key: v for key, v in llama.UNUSED.items() if key not in ("num_experts", "num_local_experts")
}
UNUSED |= {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}  # every layer has experts


def tensors(config: Config) -> Table:
    """The parameters' tensors, in the format of tensors.py."""
    return OTHERS | EXPERTS[kind_of(config)]


def kind_of(config: Config) -> str:
    """The model_type to export a Config as."""
    return "qwen3_moe" if config.qk_norm else "mixtral"


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our dropless Config for a config.json with one of the model_types above.

    Raises UserError if our MoE can't compute the model exactly.
    """
    kind, qwen3 = keys["model_type"], keys["model_type"] == "qwen3_moe"
    if qwen3 and keys.get("num_experts") is None:  # newer files use Mixtral's name for it
        keys = keys | {"num_experts": keys.get("num_local_experts")}
    theirs = ConfigFile(keys, file, ENTRY)
    theirs.refuse(UNUSED)
    embed, heads = theirs.number("hidden_size"), theirs.number("num_attention_heads")
    sizes = theirs.sizes(SIZES[kind], head_dim=embed // heads)
    if sizes["experts_per_token"] > sizes["num_experts"]:
        raise theirs.refused("num_experts_per_tok", sizes["experts_per_token"])
    rope = theirs.rope(10_000.0 if qwen3 else 1e6)
    windows = keys.get("use_sliding_window") if qwen3 else True
    windows = theirs.windows(keys.get("sliding_window") if windows else None)
    return Config(
        **sizes,
        capacity=None,
        normalize=not qwen3 or keys.get("norm_topk_prob") is True,
        norm_eps=theirs.number("rms_norm_eps", 1e-6 if qwen3 else 1e-5, float),
        **llama.kinds_of(windows, *rope),
        qk_norm=qwen3,
        tie_embeddings=keys.get("tie_word_embeddings") is True,
    )


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json, with keys that old and new versions of transformers read.

    `context` is the number of positions trained on. Raises UserError if no architecture fits.
    """
    kind = kind_of(config)
    qwen3, windows = kind == "qwen3_moe", llama.windows_of(config)
    for what, has_it in {
        "windows in only some layers": len({*windows}) > 1,
        "qkv_bias": config.qkv_bias,
        "balance_rate, a bias for each expert": config.balance_rate > 0,
        "normalize=False without qk_norm": not (config.normalize or qwen3),
    }.items():
        if has_it:
            raise UserError(
                f"no Hugging Face architecture with experts has {what}; use a model without it"
            )
    architecture = next(name for name, k in ARCHITECTURES.items() if k == kind)
    theirs = llama.common_json(config, architecture, kind, SIZES[kind], context)
    theirs["sliding_window"] = windows[0]
    if qwen3:
        theirs |= {
            "norm_topk_prob": config.normalize,
            "use_sliding_window": windows[0] is not None,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return theirs


FAMILY = Family(
    entry=ENTRY,
    architectures=ARCHITECTURES,
    tensors=tensors,
    config_from=config_from,
    config_json=config_json,
    checked=UNUSED,
)
