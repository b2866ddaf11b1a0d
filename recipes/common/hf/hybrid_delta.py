"""Hybrids whose layers with a state obey a delta rule (zoo/hybrid.py): Kimi Linear and OLMo hybrid.

A layer of theirs is two of ours, as in hybrid.py.
"""

import dataclasses
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np

from recipes.common.hf.family import GLOBAL, ConfigFile, Selection, Table
from recipes.common.hf.hybrid import (
    ATTENDS,
    ENTRY,
    OUTSIDE,
    SIZES,
    attends,
    letters,
    of_layers,
    pattern_fields,
    row,
    types_of,
)  # fmt: skip
from recipes.common.hf.layer_kinds import Layers
from recipes.common.hf.llama import ATTENTION_BIAS
from recipes.common.hf.relative import ATTENTION
from recipes.common.hf.tensors import Stored
from zoo.core.layers import AttentionType
from zoo.hybrid import Config

LINEAR = "linear_attention"
AT = "model.layers.{}"
MLP = {
    "mlp/gate": (f"{AT}.mlp.gate_proj.weight", "DF", "F D"),
    "mlp/up": (f"{AT}.mlp.up_proj.weight", "DF", "F D"),
    "mlp/down": (f"{AT}.mlp.down_proj.weight", "FD", "D F"),
}


def kernels(at: str) -> Table:
    """The convolutions of queries, keys and values, which published folders have one by one."""
    return {
        f"mixer/{name}_kernel": (f"{at}.{name}_conv1d.weight", f"W{dims}", f"{dims} 1 W")
        for name, dims in (("q", "GK"), ("k", "GK"), ("v", "NV"))
    }


# ---- Kimi Linear ---------------------------------------------------------------------------------

KIMI_TYPES = {LINEAR: "K", GLOBAL: "*"}
DELTA_KEYS = "linear_attn_config"  # of published folders; transformers writes other keys
# Its names → those of transformers.
KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
IN_DELTA = {  # keys of DELTA_KEYS → those of transformers
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
DENSE = "first_k_dense_replace"


def kimi_tensors(config: Config) -> Table:
    norm = {"norm/scale": (f"{AT}.input_layernorm.weight", "D", "D")}
    delta = {
        "mixer/q": (f"{ATTENTION}.q_proj.weight", "DNK", "NK D"),
        "mixer/k": (f"{ATTENTION}.k_proj.weight", "DNK", "NK D"),
        "mixer/v": (f"{ATTENTION}.v_proj.weight", "DNV", "NV D"),
        "mixer/decay_down": (f"{ATTENTION}.f_a_proj.weight", "DR", "R D"),
        "mixer/decay_up": (f"{ATTENTION}.f_b_proj.weight", "RNK", "NK R"),
        "mixer/gate_down": (f"{ATTENTION}.g_a_proj.weight", "DR", "R D"),
        "mixer/gate_up": (f"{ATTENTION}.g_b_proj.weight", "RNV", "NV R"),
        "mixer/write": (f"{ATTENTION}.b_proj.weight", "DN", "N D"),
        "mixer/log_rate": (f"{ATTENTION}.A_log", "N", "1 1 N 1"),
        "mixer/decay_bias": (f"{ATTENTION}.dt_bias", "NK", "NK"),
        "mixer/norm/scale": (f"{ATTENTION}.o_norm.weight", "V", "V"),
        "mixer/o": (f"{ATTENTION}.o_proj.weight", "NVD", "D NV"),
    }
    latent = {
        "mixer/q": (f"{ATTENTION}.q_proj.weight", "DNH", "NH D"),
        "mixer/q_down": (f"{ATTENTION}.q_a_proj.weight", "DR", "R D"),
        "mixer/q_norm/scale": (f"{ATTENTION}.q_a_layernorm.weight", "R", "R"),
        "mixer/q_up": (f"{ATTENTION}.q_b_proj.weight", "RNH", "NH R"),
        "mixer/kv_down": (f"{ATTENTION}.kv_a_proj_with_mqa.weight", "DC", "C D"),
        "mixer/kv_norm/scale": (f"{ATTENTION}.kv_a_layernorm.weight", "C", "C"),
        "mixer/kv_up": (f"{ATTENTION}.kv_b_proj.weight", "CNH", "NH C"),
        "mixer/o": (f"{ATTENTION}.o_proj.weight", "NVD", "D NV"),
    }
    routed = f"{AT}.block_sparse_moe"
    experts = {
        "experts/router": (f"{routed}.gate.weight", "DE", "E D"),
        "experts/bias": (f"{routed}.gate.e_score_correction_bias", "E", "E"),
        "experts/gate": (f"{routed}.experts.{{}}.w1.weight", "DF", "F D"),
        "experts/up": (f"{routed}.experts.{{}}.w3.weight", "DF", "F D"),
        "experts/down": (f"{routed}.experts.{{}}.w2.weight", "FD", "D F"),
    }
    shared = {
        path: (name.replace(".mlp.", ".block_sparse_moe.shared_experts."), ours, theirs)
        for path, (name, ours, theirs) in MLP.items()
    }
    norm_2 = {"norm/scale": (f"{AT}.post_attention_layernorm.weight", "D", "D")}
    layers = {
        "K": norm | delta | kernels(ATTENTION),
        "*": norm | latent,
        "-": norm_2 | MLP,
        "E": norm_2 | shared | experts,
    }
    return OUTSIDE | of_layers(config, layers, per_layer=2)


def kimi_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys by transformers' names, with lists of the kinds of layers."""
    stated = keys.get(DELTA_KEYS) or {}
    file = ConfigFile(keys, path, ENTRY).with_other_names(KIMI_NAMES)
    if not isinstance(stated, dict):
        raise file.refused(DELTA_KEYS, stated)
    file = file.with_keys(
        **{key: stated[name] for name, key in IN_DELTA.items() if stated.get(name) is not None}
    )
    layers = file.number("num_hidden_layers")
    types = file.keys.get("layer_types")
    if types is None:
        attending = stated.get("full_attn_layers")  # from 1
        if not isinstance(attending, list):
            attending = [n + 1 for n in range(layers) if n and n % 4 == 0]  # as transformers
        types = [GLOBAL if n + 1 in attending else LINEAR for n in range(layers)]
    feeds = file.keys.get("mlp_layer_types")
    if feeds is None:
        dense = file.keys.get(DENSE, 1)
        feeds = ["dense" if n < dense else "sparse" for n in range(layers)]
    head_dim = file.number("qk_nope_head_dim", 128) + file.number("qk_rope_head_dim", 64)
    known = {"layer_types": types, "mlp_layer_types": feeds, "qk_head_dim": head_dim}
    return file.keys | known | {"num_experts": None}


def kimi_fields(file: ConfigFile) -> dict[str, Any]:
    mixers = letters(file, "layer_types", KIMI_TYPES)
    feeds = letters(file, "mlp_layer_types", {"dense": "-", "sparse": "E"})
    if len(feeds) != len(mixers) or "E" not in feeds:
        raise file.refused("mlp_layer_types", file.keys["mlp_layer_types"])
    order = "".join(mixer + feed for mixer, feed in zip(mixers, feeds, strict=True))
    head_dim = file.number("linear_head_dim", 128)
    latent = file.keys.get("q_lora_rank")
    return pattern_fields(file, order, per_layer=2) | {
        "delta_key_dim": head_dim,
        "delta_value_dim": head_dim,
        "q_latent": 0 if latent is None else file.number("q_lora_rank"),
        "shared_mlp": file.number("n_shared_experts", 1) * file.number("moe_intermediate_size"),
        "dense_mlp": file.number("intermediate_size") if "-" in feeds else 0,
    }


def kimi_names(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys by the names of published folders."""
    names = {name: other for other, name in KIMI_NAMES.items()}
    del keys["qk_head_dim"]
    return {names.get(key, key): value for key, value in keys.items()}


def kimi_json(config: Config) -> dict[str, Any]:
    mixers = config.order[::2]
    numbers = {letter: [n + 1 for n, x in enumerate(mixers) if x == letter] for letter in "K*"}
    feeds = config.order[1::2]
    return {
        "layer_types": types_of(config, KIMI_TYPES),
        "mlp_layer_types": ["dense" if letter == "-" else "sparse" for letter in feeds],
        DELTA_KEYS: {
            "kda_layers": numbers["K"],
            "full_attn_layers": numbers["*"],
            "head_dim": config.delta_key_dim,
            "num_heads": config.delta_heads,
            "short_conv_kernel_size": config.conv_width,
        },
        "num_hidden_layers": len(mixers),
        DENSE: feeds.count("-"),
        "intermediate_size": config.dense_mlp or config.mlp,
        "n_shared_experts": config.shared_mlp // config.mlp,
        "qk_nope_head_dim": config.nope_dim,
        "q_lora_rank": config.q_latent or None,
        "n_group": 1,
        "topk_group": 1,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
    }


# ---- OLMo hybrid ---------------------------------------------------------------------------------

OLMO_TYPES = {LINEAR: "D", GLOBAL: "*"}
NEGATIVE = "linear_allow_neg_eigval"
NO_POSITIONS = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}


def olmo_tensors(config: Config) -> Table:
    at = f"{AT}.linear_attn"
    norm = {"norm/scale": (f"{AT}.attention_layer_norm.weight", "D", "D")}
    delta = {
        "mixer/q": (f"{at}.q_proj.weight", "DGK", "GK D"),
        "mixer/k": (f"{at}.k_proj.weight", "DGK", "GK D"),
        "mixer/v": (f"{at}.v_proj.weight", "DNV", "NV D"),
        "mixer/gate": (f"{at}.g_proj.weight", "DNV", "NV D"),
        "mixer/decay": (f"{at}.a_proj.weight", "DN", "N D"),
        "mixer/write": (f"{at}.b_proj.weight", "DN", "N D"),
        "mixer/log_rate": (f"{at}.A_log", "N", "N"),
        "mixer/decay_bias": (f"{at}.dt_bias", "N", "N"),
        "mixer/norm/scale": (f"{at}.o_norm.weight", "V", "V"),
        "mixer/o": (f"{at}.o_proj.weight", "NVD", "D NV"),
    }
    joint = {
        "mixer/q_norm/scale": (f"{ATTENTION}.q_norm.weight", "NH", "NH"),
        "mixer/k_norm/scale": (f"{ATTENTION}.k_norm.weight", "KH", "KH"),
        "post_norm/scale": (f"{AT}.post_attention_layernorm.weight", "D", "D"),
    }
    layers = {
        "D": norm | delta | kernels(at),
        "*": ATTENDS | joint,
        "-": {"norm/scale": (f"{AT}.feedforward_layer_norm.weight", "D", "D")} | MLP,
        "+": {"post_norm/scale": (f"{AT}.post_feedforward_layernorm.weight", "D", "D")} | MLP,
    }
    return OUTSIDE | of_layers(config, layers, per_layer=2)


def olmo_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys with transformers' defaults, some of which depend on others."""
    file = ConfigFile(keys, path, ENTRY)
    layers, heads = file.number("num_hidden_layers"), file.number("num_attention_heads")
    types = file.keys.get("layer_types")
    if types is None:
        types = [GLOBAL if n % 4 == 3 else LINEAR for n in range(layers)]
        types[-1] = types[-1] if GLOBAL in types else GLOBAL
    of_keys = file.number("linear_num_key_heads", heads)
    key_dim = file.number("linear_key_head_dim", int(0.75 * file.number("hidden_size") / of_keys))
    defaults = {
        "linear_num_key_heads": of_keys,
        "linear_num_value_heads": file.number("linear_num_value_heads", heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": file.number("linear_value_head_dim", 2 * key_dim),
        "layer_types": types,
        "head_dim": None,  # always hidden_size / num_attention_heads
    }
    return keys | defaults


def read_olmo(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
    """Layers rotate, unless a file states null for the theta; without one, transformers has its own."""
    rope = file.keys.get("rope_scaling") or file.keys.get("rope_parameters") or {}
    stated = rope if isinstance(rope, dict) and "rope_theta" in rope else file.keys
    rotates = stated.get("rope_theta", theta) is not None
    return attends(theta if rotates else None).read(file, theta, partial)


def olmo_fields(file: ConfigFile) -> dict[str, Any]:
    feeds = {"D": "-", "*": "+"}
    order = "".join(mixer + feeds[mixer] for mixer in letters(file, "layer_types", OLMO_TYPES))
    negative = file.keys.get(NEGATIVE)
    if negative not in (None, True, False):
        raise file.refused(NEGATIVE, negative)
    return pattern_fields(file, order, per_layer=2) | {
        "delta_most_write": 1.0 if negative is False else 2.0
    }


def olmo_json(config: Config) -> dict[str, Any]:
    return {
        "layer_types": types_of(config, OLMO_TYPES),
        "num_hidden_layers": len(config.order) // 2,
        NEGATIVE: config.delta_most_write == 2,
        **(NO_POSITIONS if config.rope_theta is None else {}),
    }


class RowsOfSeveral(NamedTuple):
    """Like Stored, for rows of tensors that follow each other."""

    tensors: tuple[Stored, ...]
    rows: slice

    @property
    def file(self) -> pathlib.Path:
        return self.tensors[0].file

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows.stop - self.rows.start, *self.tensors[0].shape[1:])

    def read(self, where: tuple[slice, ...]) -> np.ndarray:
        rows, *others = where
        start, stop, _ = rows.indices(self.shape[0])
        start, stop = self.rows.start + start, self.rows.start + stop
        parts = []
        for tensor in self.tensors:
            size = tensor.shape[0]
            rows = slice(max(start, 0), min(stop, size))
            if rows.start < rows.stop:
                parts.append(tensor.read((rows, *others)))
            start, stop = start - size, stop - size
        return np.concatenate(parts)


def published_kernels(stored: dict[str, Any], config: Config) -> dict[str, Any]:
    """The convolutions of queries, keys and values, whose rows transformers cuts in three equal parts;
    the last is shorter if 3 doesn't divide them.
    """
    keys = config.delta_key_heads * config.delta_key_dim
    ends = [keys, 2 * keys, 2 * keys + config.delta_heads * config.delta_value_dim]
    starts = [0, *ends[:2]]
    selected = dict(stored)
    for name in stored:
        names = [name.replace(".q_conv1d.", f".{x}_conv1d.") for x in "qkv"]
        tensors = tuple(stored[other] for other in names if other in stored)
        if ".q_conv1d." not in name or len(tensors) < 3:
            continue
        rows = [tensor.shape[0] for tensor in tensors]
        if len({tensor.shape[1:] for tensor in tensors}) > 1 or sum(rows) != ends[2]:
            continue
        for other, start, end in zip(names, starts, ends, strict=True):
            if rows[:2] != [keys, keys]:
                selected[other] = RowsOfSeveral(tensors, slice(start, end))
    return selected


def published_tensors(stored: dict[str, Stored], config: Config) -> Selection:
    """Published folders name the norms of layers that attend otherwise than transformers writes them."""
    attending = {str(n) for n, letter in enumerate(config.order[::2]) if letter == "*"}

    def renamed(name: str) -> str:
        match = re.fullmatch(r"model\.layers\.(\d+)\.feedforward_layer_norm\.weight", name)
        if match and match[1] in attending:
            return f"model.layers.{match[1]}.post_attention_layernorm.weight"
        return name

    with_kernels = published_kernels(stored, config)
    return Selection({renamed(name): tensor for name, tensor in with_kernels.items()}, config)


KIMI = row(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    tensors=kimi_tensors,
    layers=attends(None),
    sizes=SIZES
    | {
        "head_dim": "qk_head_dim",
        "mlp": "moe_intermediate_size",
        "shared_key_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
        "kv_latent": "kv_lora_rank",
        "delta_heads": "linear_num_heads",
        "conv_width": "linear_conv_kernel_dim",
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    fixed={"sigmoid": True},
    options={"normalize": "norm_topk_prob", "route_scale": "routed_scaling_factor"},
    defaults={
        "linear_num_heads": 32, "linear_conv_kernel_dim": 4, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "kv_lora_rank": 512, "num_local_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 1_024, "routed_scaling_factor": 2.446, "qk_nope_head_dim": 128,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    },
    keys_from=kimi_keys,
    fields_from=kimi_fields,
    fields_to=kimi_json,
    keys_to=kimi_names,
    own_code=True,
    refused={
        "mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",), "moe_layer_freq": (1,),
        "n_group": (1,), "topk_group": (1,), "num_nextn_predict_layers": (0,),
    },
)  # fmt: skip
OLMO = row(
    architecture="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    tensors=olmo_tensors,
    layers=Layers(read_olmo),
    sizes=SIZES
    | {
        "mlp": "intermediate_size",
        "delta_heads": "linear_num_value_heads",
        "delta_key_heads": "linear_num_key_heads",
        "delta_key_dim": "linear_key_head_dim",
        "delta_value_dim": "linear_value_head_dim",
        "conv_width": "linear_conv_kernel_dim",
    },
    fixed={
        "attention_norms": "after", "qk_norm": True, "joint_qk_norm": True, "delta_norm_eps": 1e-5,
    },
    options=ATTENTION_BIAS,
    defaults={"linear_conv_kernel_dim": 4},
    even=True,
    keys_from=olmo_keys,
    fields_from=olmo_fields,
    fields_to=olmo_json,
    select=published_tensors,
)  # fmt: skip


# transformers writes MLPs as it names experts, and reads both; published folders have MLPs' names.
def published(name: str) -> str:
    return re.sub(r"\.block_sparse_moe\.(\w+_proj)\.", r".mlp.\1.", name)


FAMILIES = (
    dataclasses.replace(KIMI.family, canonical=published, context="model_max_length"),
    OLMO.family,
)
