"""Qwen3-Next and the text models of Qwen3.5 (zoo/qwen3_next.py), as rows of relative.py.

Every fourth layer attends; the others are gated delta networks, a stack of their own here. Published
folders also have a head for multi-token prediction (`mtp`). Qwen3.5's have a vision tower, which is
left out.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from recipes.common.hf import vision
from recipes.common.hf.family import (
    FURTHER,
    GLOBAL,
    ConfigFile,
    Selection,
    Table,
    leave_out_layers,
)
from recipes.common.hf.moe import QWEN2, QWEN_EXPERTS, SHARED
from recipes.common.hf.relative import SIZES, TENSORS, Relative, in_layers
from recipes.common.hf.tensors import Part, Stored
from zoo.options.cache import ATTENTION
from zoo.qwen3_next import DELTA, Config

ENTRY = "qwen3_next"

DELTA_SIZES = {  # field of Config → theirs
    "delta_heads": "linear_num_value_heads",
    "delta_key_heads": "linear_num_key_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}
INTERVAL = "full_attention_interval"
FURTHER_35 = "mtp_num_hidden_layers"  # Qwen3.5's name for FURTHER
MTP_LAYERS = "mtp.layers"


def next_projections(config: Config) -> Table:
    """Two tensors have all projections of a delta layer, in a block for each key head."""
    key_heads = config.delta_key_heads
    heads = config.delta_heads // key_heads
    keys = config.delta_key_dim
    values = heads * config.delta_value_dim
    qkvz = f"{2 * keys + 2 * values}x{key_heads}"
    ba = f"{2 * heads}x{key_heads}"
    return {
        "q": ("in_proj_qkvz.weight", "DGK", f"GK D +0/{qkvz}"),
        "k": ("in_proj_qkvz.weight", "DGK", f"GK D +{keys}/{qkvz}"),
        "v": ("in_proj_qkvz.weight", "DNV", f"NV D +{2 * keys}/{qkvz}"),
        "gate": ("in_proj_qkvz.weight", "DNV", f"NV D +{2 * keys + values}/{qkvz}"),
        "write": ("in_proj_ba.weight", "DN", f"N D +0/{ba}"),
        "decay": ("in_proj_ba.weight", "DN", f"N D +{heads}/{ba}"),
    }


def qwen35_projections(config: Config) -> Table:
    """One tensor has q, k and v of a delta layer."""
    keys = config.delta_key_heads * config.delta_key_dim
    rows = 2 * keys + config.delta_heads * config.delta_value_dim
    return {
        "q": ("in_proj_qkv.weight", "DGK", f"GK D +0/{rows}"),
        "k": ("in_proj_qkv.weight", "DGK", f"GK D +{keys}/{rows}"),
        "v": ("in_proj_qkv.weight", "DNV", f"NV D +{2 * keys}/{rows}"),
        "gate": ("in_proj_z.weight", "DNV", "NV D"),
        "write": ("in_proj_b.weight", "DN", "N D"),
        "decay": ("in_proj_a.weight", "DN", "N D"),
    }


def delta_tensors(config: Config, projections: Table) -> Table:
    """The tensors of a gated delta network."""
    keys = config.delta_key_heads * config.delta_key_dim
    channels = 2 * keys + config.delta_heads * config.delta_value_dim
    return projections | {
        "q_kernel": ("conv1d.weight", "WGK", f"GK 1 W +0/{channels}"),
        "k_kernel": ("conv1d.weight", "WGK", f"GK 1 W +{keys}/{channels}"),
        "v_kernel": ("conv1d.weight", "WNV", f"NV 1 W +{2 * keys}/{channels}"),
        "log_rate": ("A_log", "N", "N"),
        "decay_bias": ("dt_bias", "N", "N"),
        "norm/scale": ("norm.weight", "V", "V"),
        "o": ("out_proj.weight", "NVD", "D NV"),
    }


def head_tensors(attends: Table) -> Table:
    """The tensors of the MTP head.

    Args:
      attends: those of a layer that attends, as the head's does, by path inside the layer.
    """
    layer = {
        f"mtp/layer/{path}": (name.replace("model.layers.{}", f"{MTP_LAYERS}.0", 1), ours, theirs)
        for path, (name, ours, theirs) in attends.items()
    }
    return layer | {
        "mtp/token_norm/scale": ("mtp.pre_fc_norm_embedding.weight", "D", "D"),
        "mtp/hidden_norm/scale": ("mtp.pre_fc_norm_hidden.weight", "D", "D"),
        "mtp/join": ("mtp.fc.weight", "ED", "D E"),
        "mtp/final_norm/scale": ("mtp.norm.weight", "D", "D"),
    }


def tensors(projections: Callable[[Config], Table], attention: Table) -> Callable[[Any], Table]:
    """The variables' tensors, by Config.

    Args:
      projections: those of a gated delta network.
      attention: the tensors of a model whose layers all attend.
    """
    outside = {path: row for path, row in attention.items() if not path.startswith("layers/")}
    attends = {
        path.removeprefix("layers/").replace("attention", "mixer", 1): row
        for path, row in attention.items()
        if path.startswith("layers/")
    }
    shared = {path: row for path, row in attends.items() if not path.startswith("mixer/")}

    def table(config: Config) -> Table:
        mixer = delta_tensors(config, projections(config))
        delta = shared | {
            f"mixer/{path}": (f"model.layers.{{}}.linear_attn.{name}", ours, theirs)
            for path, (name, ours, theirs) in mixer.items()
        }
        *deltas, attending = range(config.attention_every)
        return (
            outside
            | head_tensors(attends)
            | in_layers(delta, DELTA, deltas, config.attention_every)
            | in_layers(attends, ATTENTION, [attending], config.attention_every)
        )

    return table


def layer_types(layers: int, interval: int) -> list[str]:
    return [GLOBAL if (n + 1) % interval == 0 else "linear_attention" for n in range(layers)]


def read_layers(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys with the interval of layers that attend, and at most one layer for further tokens.

    layer_types says the interval too, and counts if present.
    """
    file = ConfigFile(keys, path, ENTRY)
    interval = file.number(INTERVAL, 4)
    types = keys.get("layer_types")
    if types is not None:
        interval = 1 + [*types, GLOBAL].index(GLOBAL) if isinstance(types, list) else interval
        if types != layer_types(file.number("num_hidden_layers"), interval):
            raise file.refused("layer_types", types)
    further = {
        key: min(file.number(key), 1) if keys.get(key) else None for key in (FURTHER, FURTHER_35)
    }
    return keys | further | {INTERVAL: interval, "layer_types": None}


def write_types(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"layer_types": layer_types(keys["num_hidden_layers"], keys[INTERVAL])}


FUSED_EXPERTS = ".mlp.experts."


def separate_experts(stored: dict[str, Stored]) -> dict[str, Any]:
    """Tensors of each expert, in place of those that have all experts of a layer.

    `transformers` reads both and writes the former.
    """
    separate: dict[str, Any] = {}
    for name, tensor in stored.items():
        layer, _, projection = name.partition(FUSED_EXPERTS)
        if projection not in ("gate_up_proj", "down_proj") or len(tensor.shape) != 3:
            separate[name] = tensor
            continue
        experts, rows, _ = tensor.shape
        parts = {"down_proj": slice(0, rows)}
        if projection == "gate_up_proj":
            parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
        for expert in range(experts):
            for part, of_part in parts.items():
                part_name = f"{layer}{FUSED_EXPERTS}{expert}.{part}.weight"
                separate[part_name] = Part(tensor, expert, of_part)
    return separate


def without_further_layers(stored: dict[str, Stored], config: Config) -> Selection:
    """Leaves out layers of the MTP head after its first one. Fused experts become separate ones.

    The Config has the head if the folder has its tensors; many a config.json has no key for it.
    """
    has_head = any(name.startswith("mtp.") for name in stored)
    config = dataclasses.replace(config, mtp_depth=int(has_head))
    return leave_out_layers(separate_experts(stored), config, 1, MTP_LAYERS)


def without_vision(stored: dict[str, Stored], config: Config) -> Selection:
    text = without_further_layers(stored, config)
    selection = vision.without_vision(text.stored, text.config)
    left_out = " ".join(filter(None, (selection.left_out, text.left_out)))
    return dataclasses.replace(selection, left_out=left_out)


row = functools.partial(
    Relative,
    config=Config,
    entry=ENTRY,
    partial=True,
    keys_from=read_layers,
    keys_to=write_types,
    select=without_further_layers,
    # An import is dropless, as transformers computes it.
    training={"capacity": None, "balance_weight": 1e-3, "mtp_weight": 0.3},
)
LAYERS = {"attention_every": INTERVAL, "mtp_depth": FURTHER}
LAYERS_35 = {"attention_every": INTERVAL, "mtp_depth": FURTHER_35}
OWN_TABLES = {"mtp_use_dedicated_embeddings": (False,)}
EXPERT_SIZES = QWEN_EXPERTS | {"shared_mlp": SHARED} | DELTA_SIZES
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}

QWEN35 = row(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    tensors=tensors(qwen35_projections, TENSORS),
    sizes=SIZES | DELTA_SIZES,
    options=LAYERS_35,
    defaults=DEFAULTS | {"num_key_value_heads": 4},
    refused=OWN_TABLES,
)
NEXT = row(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    tensors=tensors(next_projections, QWEN2),
    sizes=EXPERT_SIZES,
    options=LAYERS | {"normalize": "norm_topk_prob"},
    defaults=DEFAULTS,
    refused=OWN_TABLES | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
)
QWEN35_MOE = row(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    tensors=tensors(qwen35_projections, QWEN2),
    sizes=EXPERT_SIZES,
    options=LAYERS_35,
    fixed={"normalize": True},
    defaults=DEFAULTS,
    refused=OWN_TABLES,
)


def text_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The text model's keys; the outer ones say whether its embeddings are tied."""
    text = vision.text_config(ConfigFile(keys, path, ENTRY))
    return text | {"tie_word_embeddings": keys.get("tie_word_embeddings")}


with_vision = functools.partial(
    dataclasses.replace, text_keys=text_keys, select=without_vision, canonical=vision.canonical
)
FAMILIES = (
    *(one.family for one in (QWEN35, NEXT, QWEN35_MOE)),
    with_vision(QWEN35.family, architectures={"Qwen3_5ForConditionalGeneration": "qwen3_5"}),
    with_vision(
        QWEN35_MOE.family, architectures={"Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe"}
    ),
)
