"""Hybrids (zoo/hybrid.py): what the rows of hybrid_lfm2.py, hybrid_mamba.py, hybrid_nemotron.py and
hybrid_delta.py share.

A layer of LFM2, Granite, Falcon, Kimi Linear or OLMo hybrid is two of ours, its mixer and its MLP or
experts; one of Nemotron is one.
"""

import functools
from typing import Any

from recipes.common.hf.family import ConfigFile, Table
from recipes.common.hf.layer_kinds import Layers
from recipes.common.hf.relative import ATTENTION, Relative, in_layers
from zoo.core.layers import AttentionType
from zoo.hybrid import ATTENDS as ATTENTION_LETTERS
from zoo.hybrid import STACKS, Config

ENTRY = "hybrid"
OUTSIDE = {
    "embed": ("model.embed_tokens.weight", "VD", "V D"),
    "final_norm/scale": ("model.norm.weight", "D", "D"),
    "unembed": ("lm_head.weight", "VD", "V D"),
}
ATTENDS = {
    "mixer/q": (f"{ATTENTION}.q_proj.weight", "DNH", "NH D"),
    "mixer/k": (f"{ATTENTION}.k_proj.weight", "DKH", "KH D"),
    "mixer/v": (f"{ATTENTION}.v_proj.weight", "DKH", "KH D"),
    "mixer/o": (f"{ATTENTION}.o_proj.weight", "NHD", "D NH"),
    "mixer/q_bias": (f"{ATTENTION}.q_proj.bias", "NH", "NH"),
    "mixer/k_bias": (f"{ATTENTION}.k_proj.bias", "KH", "KH"),
    "mixer/v_bias": (f"{ATTENTION}.v_proj.bias", "KH", "KH"),
    "mixer/o_bias": (f"{ATTENTION}.o_proj.bias", "D", "D"),
}


def renamed(tensors: Table, old: str, new: str) -> Table:
    """The tensors of a table under other names."""
    return {
        path: (name.replace(old, new), ours, theirs)
        for path, (name, ours, theirs) in tensors.items()
    }


def mamba_tensors(config: Config, at: str) -> Table:
    """The tensors of a Mamba-2 layer, which are `at` in the folder.

    One has the projections gate, x, B, C and step, another the convolutions of x, B and C.
    """
    heads = config.mamba_heads * config.mamba_head_dim
    groups = config.mamba_groups * config.mamba_state_dim
    rows, channels = 2 * heads + 2 * groups + config.mamba_heads, heads + 2 * groups
    first = {"x": 0, "b": heads, "c": heads + groups}
    table = {
        "mixer/gate": (f"{at}.in_proj.weight", "DNP", f"NP D +0/{rows}"),
        "mixer/step": (f"{at}.in_proj.weight", "DN", f"N D +{2 * heads + 2 * groups}/{rows}"),
        "mixer/log_rate": (f"{at}.A_log", "N", "N"),
        "mixer/step_bias": (f"{at}.dt_bias", "N", "N"),
        "mixer/skip": (f"{at}.D", "N", "N"),
        "mixer/norm/scale": (f"{at}.norm.weight", "NP", "NP"),
        "mixer/o": (f"{at}.out_proj.weight", "NPD", "D NP"),
    }
    for name, row in first.items():
        dims = "NP" if name == "x" else "GK"
        table |= {
            f"mixer/{name}": (f"{at}.in_proj.weight", f"D{dims}", f"{dims} D +{heads + row}/{rows}"),
            f"mixer/{name}_kernel": (
                f"{at}.conv1d.weight", f"W{dims}", f"{dims} 1 W +{row}/{channels}"),
            f"mixer/{name}_bias": (f"{at}.conv1d.bias", dims, f"{dims} +{row}/{channels}"),
        }  # fmt: skip
    return table


def of_layers(config: Config, layers: dict[str, Table], per_layer: int) -> Table:
    """The tensors of all stacks.

    Args:
      layers: letter of the pattern → the tensors of such a layer.
      per_layer: how many of our layers one of theirs is.
    """
    table: Table = {}
    for letter, tensors in layers.items():
        numbers = [n // per_layer for n, other in enumerate(config.order) if other == letter]
        if numbers:
            table |= in_layers(tensors, STACKS[letter], numbers, len(config.order))
    return table


# ---- the pattern of layers -----------------------------------------------------------------------


def letters(file: ConfigFile, key: str, names: dict[str, str]) -> str:
    """The letters of a list of kinds of layers."""
    types = file.keys.get(key)
    if not isinstance(types, list) or not types or not {*map(str, types)} <= {*names}:
        raise file.refused(key, types)
    return "".join(names[name] for name in types)


def types_of(config: Config, names: dict[str, str]) -> list[str]:
    """The kinds of their layers, each of which is two of ours."""
    by_letter = {letter: name for name, letter in reversed(names.items())}
    return [by_letter.get(letter, letter) for letter in config.order[::2]]


def pattern_fields(file: ConfigFile, order: str, per_layer: int = 1) -> dict[str, Any]:
    """The fields of Config for an order of layers."""
    if len(order) != per_layer * file.number("num_hidden_layers", len(order) // per_layer):
        raise file.refused("num_hidden_layers", file.keys["num_hidden_layers"])
    if not {*order} & {*ATTENTION_LETTERS}:
        raise file.refused("layer_types", file.keys.get("layer_types"))
    return {"pattern": order, "num_layers": len(order)}


def attends(usual: float | None) -> Layers:
    """Layers without windows, all alike.

    Args:
      usual: the theta of files without one; None: no rotary embeddings.
    """

    def read(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
        return [
            AttentionType(None, None) if usual is None else AttentionType(None, *file.rope(usual))
        ]

    return Layers(read)


SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
row = functools.partial(
    Relative,
    config=Config,
    entry=ENTRY,
    # An import is dropless, as transformers computes it.
    training={"capacity": None, "balance_weight": 1e-3, "balance_rate": 0.0},
)
