"""Qwen3-Next and the text models of Qwen3.5 (zoo/qwen3_next.py), as rows of relative.py.

Every fourth layer attends; the others are gated delta networks, a stack of their own here. Published
folders also have a layer for multi-token prediction, and Qwen3.5's a vision tower: both are left out.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from recipes.common.hf import vision
from recipes.common.hf.family import GLOBAL, ConfigFile, Selection, Table
from recipes.common.hf.moe import QWEN2, QWEN_EXPERTS, SHARED
from recipes.common.hf.relative import SIZES, TENSORS, Relative
from recipes.common.hf.tensors import Part, Stored
from zoo.decoder import ATTENTION
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
            | in_layers(delta, DELTA, deltas, config.attention_every)
            | in_layers(attends, ATTENTION, [attending], config.attention_every)
        )

    return table


def in_layers(tensors: Table, stack: str, numbers: list[int], period: int) -> Table:
    """The tensors of a stack, whose layers have these numbers in each period."""
    layers = f"{{:{','.join(map(str, numbers))}/{period}}}"
    return {
        f"layers/{stack}/{path}": (name.replace("{}", layers, 1), ours, theirs)
        for path, (name, ours, theirs) in tensors.items()
    }


def layer_types(layers: int, interval: int) -> list[str]:
    return [GLOBAL if (n + 1) % interval == 0 else "linear_attention" for n in range(layers)]


def read_types(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys with the interval of layers that attend. layer_types says it too, and counts if present."""
    file = ConfigFile(keys, path, ENTRY)
    interval = file.number(INTERVAL, 4)
    types = keys.get("layer_types")
    if types is not None:
        interval = 1 + [*types, GLOBAL].index(GLOBAL) if isinstance(types, list) else interval
        if types != layer_types(file.number("num_hidden_layers"), interval):
            raise file.refused("layer_types", types)
    return keys | {INTERVAL: interval, "layer_types": None}


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


def without_further_tokens(stored: dict[str, Stored], config: Any) -> Selection:
    """Leaves out the layer that predicts further tokens. Fused experts become separate ones."""
    text = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    left_out = len(text) < len(stored)
    text = separate_experts(text)
    report = "Left out mtp, the layer for multi-token prediction; the zoo's model has none."
    return Selection(text, config, report if left_out else "")


def without_vision(stored: dict[str, Stored], config: Any) -> Selection:
    text = without_further_tokens(stored, config)
    selection = vision.without_vision(text.stored, config)
    left_out = " ".join(filter(None, (selection.left_out, text.left_out)))
    return dataclasses.replace(selection, left_out=left_out)


row = functools.partial(
    Relative,
    config=Config,
    entry=ENTRY,
    partial=True,
    keys_from=read_types,
    keys_to=write_types,
    select=without_further_tokens,
    # An import is dropless, as transformers computes it.
    training={"capacity": None, "balance_weight": 1e-3},
)
PERIOD = {"attention_every": INTERVAL}
EXPERT_SIZES = QWEN_EXPERTS | {"shared_mlp": SHARED} | DELTA_SIZES
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 2, "partial_rotary_factor": 0.25}

QWEN35 = row(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    tensors=tensors(qwen35_projections, TENSORS),
    sizes=SIZES | DELTA_SIZES,
    options=PERIOD,
    defaults=DEFAULTS | {"num_key_value_heads": 4},
)
NEXT = row(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    tensors=tensors(next_projections, QWEN2),
    sizes=EXPERT_SIZES,
    options=PERIOD | {"normalize": "norm_topk_prob"},
    defaults=DEFAULTS,
    refused={"decoder_sparse_step": (1,), "mlp_only_layers": ([],)},
)
QWEN35_MOE = row(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    tensors=tensors(qwen35_projections, QWEN2),
    sizes=EXPERT_SIZES,
    options=PERIOD,
    fixed={"normalize": True},
    defaults=DEFAULTS,
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
