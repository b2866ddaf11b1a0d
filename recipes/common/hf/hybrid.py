"""Hybrids (zoo/hybrid.py): LFM2, Granite 4, Falcon-H1, Nemotron-H and Nemotron 3, as rows of
relative.py.

A layer of LFM2, Granite or Falcon is two of ours, its mixer and its MLP or experts; one of Nemotron is one.
"""

import dataclasses
import functools
import math
import pathlib
import re
from typing import Any

from recipes.common.hf.family import GLOBAL, ConfigFile, Selection, Table
from recipes.common.hf.layer_kinds import Layers
from recipes.common.hf.llama import ATTENTION_BIAS, MULTIPLIERS
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


def lfm2_tensors(config: Config) -> Table:
    at = "model.layers.{}"
    norm = {"norm/scale": (f"{at}.operator_norm.weight", "D", "D")}
    convolution = {
        "mixer/b": (f"{at}.conv.in_proj.weight", "DF", "#F D 0/3"),
        "mixer/c": (f"{at}.conv.in_proj.weight", "DF", "#F D 1/3"),
        "mixer/x": (f"{at}.conv.in_proj.weight", "DF", "#F D 2/3"),
        "mixer/kernel": (f"{at}.conv.conv.weight", "WF", "F 1 W"),
        "mixer/o": (f"{at}.conv.out_proj.weight", "FD", "D F"),
    }
    norms = {
        "mixer/q_norm/scale": (f"{ATTENTION}.q_layernorm.weight", "H", "H"),
        "mixer/k_norm/scale": (f"{ATTENTION}.k_layernorm.weight", "H", "H"),
    }
    mlp = {
        "norm/scale": (f"{at}.ffn_norm.weight", "D", "D"),
        "mlp/gate": (f"{at}.feed_forward.w1.weight", "DF", "F D"),
        "mlp/up": (f"{at}.feed_forward.w3.weight", "DF", "F D"),
        "mlp/down": (f"{at}.feed_forward.w2.weight", "FD", "D F"),
    }
    routed = f"{at}.feed_forward"
    experts = {
        "norm/scale": (f"{at}.ffn_norm.weight", "D", "D"),
        "experts/router": (f"{routed}.gate.weight", "DE", "E D"),
        "experts/bias": (f"{routed}.expert_bias", "E", "E"),
        "experts/gate": (f"{routed}.experts.{{}}.w1.weight", "DF", "F D"),
        "experts/up": (f"{routed}.experts.{{}}.w3.weight", "DF", "F D"),
        "experts/down": (f"{routed}.experts.{{}}.w2.weight", "FD", "D F"),
    }
    layers = {
        "C": norm | convolution,
        "*": norm | renamed(ATTENDS, "o_proj", "out_proj") | norms,
        "-": mlp,
        "E": experts,
    }
    outside = OUTSIDE | {"final_norm/scale": ("model.embedding_norm.weight", "D", "D")}
    return outside | of_layers(config, layers, per_layer=2)


def granite_tensors(config: Config) -> Table:
    at = "model.layers.{}"
    norm = {"norm/scale": (f"{at}.input_layernorm.weight", "D", "D")}
    mlp = {
        "norm/scale": (f"{at}.post_attention_layernorm.weight", "D", "D"),
        "mlp/gate": (f"{at}.shared_mlp.input_linear.weight", "DF", "#F D 0/2"),
        "mlp/up": (f"{at}.shared_mlp.input_linear.weight", "DF", "#F D 1/2"),
        "mlp/down": (f"{at}.shared_mlp.output_linear.weight", "FD", "D F"),
    }
    routed = f"{at}.block_sparse_moe"
    experts = {
        "experts/router": (f"{routed}.router.layer.weight", "DE", "E D"),
        "experts/gate": (f"{routed}.input_linear.weight", "EDF", "E #F D 0/2"),
        "experts/up": (f"{routed}.input_linear.weight", "EDF", "E #F D 1/2"),
        "experts/down": (f"{routed}.output_linear.weight", "EFD", "E D F"),
    }
    layers = {
        "M": norm | mamba_tensors(config, f"{at}.mamba"),
        "*": norm | ATTENDS,
        "-": mlp,
        "E": mlp | experts,
    }
    return OUTSIDE | of_layers(config, layers, per_layer=2)


def falcon_tensors(config: Config) -> Table:
    at = "model.layers.{}"
    both = {"norm/scale": (f"{at}.input_layernorm.weight", "D", "D")}
    for name, tensors in (("attention", ATTENDS), ("mamba", mamba_tensors(config, f"{at}.mamba"))):
        both |= {path.replace("mixer/", f"mixer/{name}/", 1): row for path, row in tensors.items()}
    mlp = {
        "norm/scale": (f"{at}.pre_ff_layernorm.weight", "D", "D"),
        "mlp/gate": (f"{at}.feed_forward.gate_proj.weight", "DF", "F D"),
        "mlp/up": (f"{at}.feed_forward.up_proj.weight", "DF", "F D"),
        "mlp/down": (f"{at}.feed_forward.down_proj.weight", "FD", "D F"),
    }
    outside = OUTSIDE | {"final_norm/scale": ("model.final_layernorm.weight", "D", "D")}
    return outside | of_layers(config, {"P": both, "-": mlp}, per_layer=2)


def nemotron_tensors(config: Config) -> Table:
    at = "backbone.layers.{}"
    norm = {"norm/scale": (f"{at}.norm.weight", "D", "D")}
    mlp = {
        "mlp/up": (f"{at}.mixer.up_proj.weight", "DF", "F D"),
        "mlp/up_bias": (f"{at}.mixer.up_proj.bias", "F", "F"),
        "mlp/down": (f"{at}.mixer.down_proj.weight", "FD", "D F"),
        "mlp/down_bias": (f"{at}.mixer.down_proj.bias", "D", "D"),
    }
    routed = f"{at}.mixer"
    mixture = "experts/mixture" if config.expert_latent else "experts"
    experts = {
        f"{mixture}/router": (f"{routed}.gate.weight", "DE", "E D"),
        f"{mixture}/bias": (f"{routed}.gate.e_score_correction_bias", "E", "E"),
        f"{mixture}/up": (f"{routed}.experts.{{}}.up_proj.weight", "DF", "F D"),
        f"{mixture}/down": (f"{routed}.experts.{{}}.down_proj.weight", "FD", "D F"),
        "experts/latent_down": (f"{routed}.fc1_latent_proj.weight", "DC", "C D"),
        "experts/latent_down_bias": (f"{routed}.fc1_latent_proj.bias", "C", "C"),
        "experts/latent_up": (f"{routed}.fc2_latent_proj.weight", "CD", "D C"),
        "experts/latent_up_bias": (f"{routed}.fc2_latent_proj.bias", "D", "D"),
    }
    layers = {
        "M": norm | mamba_tensors(config, f"{at}.mixer"),
        "*": norm | renamed(ATTENDS, ATTENTION, f"{at}.mixer"),
        "-": norm | mlp,
        "E": norm | experts | renamed(mlp, ".mixer.", ".mixer.shared_experts."),
    }
    outside = OUTSIDE | {
        "embed": ("backbone.embeddings.weight", "VD", "V D"),
        "final_norm/scale": ("backbone.norm_f.weight", "D", "D"),
    }
    return outside | of_layers(config, layers, per_layer=1)


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

# Names of kinds of layers, also older ones → letters of Config.pattern. The first of each letter is
# written.
LFM2_TYPES = {"conv": "C", GLOBAL: "*"}
GRANITE_TYPES = {"mamba": "M", "attention": "*", "linear_attention": "M", GLOBAL: "*"}
NEMOTRON_TYPES = {
    "linear_attention": "M", GLOBAL: "*", "mlp": "-", "moe": "E", "mamba": "M", "attention": "*",
}  # fmt: skip
OVERRIDE = "hybrid_override_pattern"


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


def lfm2_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys with one name for each: older files have other ones, and a list of attending layers."""
    file = ConfigFile(keys, path, ENTRY)
    layers = file.number("num_hidden_layers")
    if keys.get("layer_types") is None:
        attending = keys.get("full_attn_idxs")
        attending = [*range(layers)] if attending is None else attending
        if not isinstance(attending, list):
            raise file.refused("full_attn_idxs", attending)
        keys = keys | {"layer_types": [GLOBAL if n in attending else "conv" for n in range(layers)]}
    width = file.with_other_names({"block_ff_dim": "intermediate_size"}).number("intermediate_size")
    if keys.get("block_auto_adjust_ff_dim", True):
        multiple = file.number("block_multiple_of", 256)
        width = int(2 * width / 3)
        width = int(file.number("block_ffn_dim_multiplier", 1.0, float) * width)
        width = multiple * math.ceil(width / multiple)
    tied = keys.get("tie_embedding", keys.get("tie_word_embeddings"))
    return keys | {
        "intermediate_size": width,
        "tie_word_embeddings": tied is not False,
        "rms_norm_eps": keys.get("norm_eps", 1e-5),
    }


def lfm2_fields(file: ConfigFile) -> dict[str, Any]:
    order = letters(file, "layer_types", LFM2_TYPES)
    return pattern_fields(file, "".join(f"{letter}-" for letter in order), per_layer=2)


def lfm2_json(config: Config) -> dict[str, Any]:
    return {
        "layer_types": types_of(config, LFM2_TYPES),
        "num_hidden_layers": len(config.order) // 2,
        "norm_eps": config.norm_eps,
        "block_auto_adjust_ff_dim": False,
    }


DENSE = "num_dense_layers"


def lfm2_moe_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The keys of `lfm2_keys`; an MLP's width is what it says."""
    return lfm2_keys(keys | {"block_auto_adjust_ff_dim": False}, path)


def lfm2_moe_fields(file: ConfigFile) -> dict[str, Any]:
    mixers = letters(file, "layer_types", LFM2_TYPES)
    dense = file.keys.get(DENSE)
    if type(dense) is not int or not 0 <= dense < len(mixers):
        raise file.refused(DENSE, dense)
    order = "".join(mixer + ("-" if n < dense else "E") for n, mixer in enumerate(mixers))
    dense_mlp = {"dense_mlp": file.number("intermediate_size")} if dense else {}
    return pattern_fields(file, order, per_layer=2) | dense_mlp


def lfm2_moe_json(config: Config) -> dict[str, Any]:
    written = lfm2_json(config)
    del written["block_auto_adjust_ff_dim"]
    return written | {
        DENSE: config.order.count("-"),
        "intermediate_size": config.dense_mlp or config.mlp,
        "use_expert_bias": True,
    }


INFINITY = {"__float__": "Infinity"}  # as transformers writes it
LIMITS = "time_step_limit"
ROUTED = "num_routed_experts"  # our name for Granite's num_local_experts


def granite_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys whose number of experts may be 0, which other architectures refuse."""
    return keys | {ROUTED: keys.get("num_local_experts", 8), "num_local_experts": None}


def mamba_fields(file: ConfigFile, inner: int) -> dict[str, Any]:
    """Heads, their dim and the least step; inner: heads times their dim. Raises UserError."""
    heads = file.number("mamba_n_heads", 128)
    if file.keys.get("mamba_d_head") in (None, "auto"):
        file = file.with_keys(mamba_d_head=inner // heads)
    head_dim = file.number("mamba_d_head")
    if head_dim * heads != inner:
        raise file.refused("mamba_d_head", head_dim)
    limits = file.keys.get(LIMITS) or [0.0, INFINITY]
    if not isinstance(limits, list | tuple) or limits[1] not in (math.inf, INFINITY):
        raise file.refused(LIMITS, limits)
    return {"mamba_heads": heads, "mamba_head_dim": head_dim, "least_step": float(limits[0])}


def granite_fields(file: ConfigFile) -> dict[str, Any]:
    mixers = letters(file, "layer_types", GRANITE_TYPES)
    shared = file.number("shared_intermediate_size", 1_024)
    inner = file.number("mamba_expand", 2) * file.number("hidden_size")
    feeds = "-"
    fields: dict[str, Any] = {"mlp": shared}
    if file.keys.get(ROUTED):
        feeds = "E"
        fields = {
            "mlp": file.number("intermediate_size"),
            "shared_mlp": shared,
            "num_experts": file.number(ROUTED),
            "experts_per_token": file.number("num_experts_per_tok", 2),
        }
    rope = file.keys.get("position_embedding_type")
    if rope not in (None, "nope", "rope"):
        raise file.refused("position_embedding_type", rope)
    order = "".join(mixer + feeds for mixer in mixers)
    return fields | pattern_fields(file, order, per_layer=2) | mamba_fields(file, inner)


def read_granite(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
    has_rope = file.keys.get("position_embedding_type") == "rope"
    return attends(theta if has_rope else None).read(file, theta, partial)


def granite_json(config: Config) -> dict[str, Any]:
    routed = config.num_experts > 0
    return {
        "layer_types": types_of(config, GRANITE_TYPES),
        "num_hidden_layers": len(config.order) // 2,
        "intermediate_size": config.mlp,
        "shared_intermediate_size": config.shared_mlp if routed else config.mlp,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_expand": config.mamba_heads * config.mamba_head_dim // config.embed,
        "position_embedding_type": "rope" if config.rope_theta is not None else "nope",
        LIMITS: [config.least_step, INFINITY],
    }


def factors(file: ConfigFile, key: str, count: int) -> list[float]:
    """A list of factors, of which files may leave out all."""
    values = file.keys.get(key) or [1.0] * count
    if not isinstance(values, list | tuple) or len(values) != count:
        raise file.refused(key, values)
    for value in values:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise file.refused(key, values)
    return [float(value) for value in values]


def falcon_fields(file: ConfigFile) -> dict[str, Any]:
    number = functools.partial(file.number, default=1.0, kind=float)
    inner = file.keys.get("mamba_d_ssm")
    if inner is None:
        inner = file.number("mamba_expand", 2) * file.number("hidden_size")
    normed = file.keys.get("mamba_rms_norm") is True
    if normed and file.keys.get(BEFORE_GATE) is not False:
        raise file.refused(BEFORE_GATE, file.keys.get(BEFORE_GATE))
    read = number("attention_in_multiplier")
    scales = [number("ssm_in_multiplier") * x for x in factors(file, "ssm_multipliers", 5)]
    of_mlp = factors(file, "mlp_multipliers", 2)
    layers = file.number("num_hidden_layers")
    return (
        pattern_fields(file, "P-" * layers, per_layer=2)
        | mamba_fields(file, inner)
        | {
            "mamba_norm": normed,
            "embed_scale": number("embedding_multiplier"),
            "logits_divisor": inverse(number("lm_head_multiplier")),
            # Queries and keys read the scaled input, and so do values.
            "key_scale": read * read * number("key_multiplier"),
            "attention_out_scale": read * number("attention_out_multiplier"),
            "mamba_out_scale": number("ssm_out_multiplier"),
            "mamba_scales": () if scales == [1.0] * 5 else tuple(scales),
            "mlp_scales": () if of_mlp == [1.0] * 2 else tuple(of_mlp),
        }
    )


def inverse(x: float) -> float:
    """1 / x with twelve digits, so that its inverse is x again."""
    return float(f"{1 / x:.12g}")


def falcon_json(config: Config) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(config.order) // 2,
        "mamba_n_heads": config.mamba_heads,
        "mamba_d_head": config.mamba_head_dim,
        "mamba_d_ssm": config.mamba_heads * config.mamba_head_dim,
        "mamba_rms_norm": config.mamba_norm,
        BEFORE_GATE: False,
        LIMITS: [config.least_step, INFINITY],
        "embedding_multiplier": config.embed_scale,
        "lm_head_multiplier": inverse(config.logits_divisor),
        "attention_in_multiplier": 1.0,
        "key_multiplier": config.key_scale,
        "attention_out_multiplier": config.attention_out_scale,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": config.mamba_out_scale,
        "ssm_multipliers": list(config.mamba_scales or (1.0,) * 5),
        "mlp_multipliers": list(config.mlp_scales or (1.0,) * 2),
    }


BEFORE_GATE = "mamba_norm_before_gate"
WIDTH = "moe_intermediate_size"
SHARED = "moe_shared_expert_intermediate_size"
NUMBER = "n_routed_experts"
LATENT = "moe_latent_size"


def nemotron_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Keys with a list of the layers, which older files have as a string."""
    types = keys.get("layers_block_type") or keys.get("layer_types")
    if types is None and isinstance(pattern := keys.get(OVERRIDE), str):
        by_letter = {"M": "linear_attention", "*": GLOBAL, "-": "mlp", "E": "moe"}
        types = [by_letter.get(letter, letter) for letter in pattern]
    eps = keys.get("layer_norm_epsilon", 1e-5)
    return keys | {"layer_types": types, "rms_norm_eps": eps, "num_hidden_layers": None}


def without_mtp(stored: dict[str, Any], config: Config) -> Selection:
    """Drops the layers for multi-token prediction, which Nemotron 3 Super has."""
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    report = "Left out mtp, for multi-token prediction; hybrids have none here."
    return Selection(kept, config, report if len(kept) < len(stored) else "")


def nemotron_fields(file: ConfigFile) -> dict[str, Any]:
    order = letters(file, "layer_types", NEMOTRON_TYPES)
    fields: dict[str, Any] = {"mlp": file.number("intermediate_size")}
    if "E" in order:
        fields = {
            "mlp": file.number(WIDTH),
            "shared_mlp": file.number(SHARED),
            "num_experts": file.number(NUMBER),
            "experts_per_token": file.number("num_experts_per_tok"),
            "normalize": file.keys.get("norm_topk_prob") is not False,
            "route_scale": file.number("routed_scaling_factor", 1.0, float),
            "sigmoid": True,
        }
        if file.keys.get(LATENT) is not None:
            fields["expert_latent"] = file.number(LATENT)
        if "-" in order:
            fields["dense_mlp"] = file.number("intermediate_size")
    # transformers bounds steps from below by this number, which once was for the first values alone.
    fields["least_step"] = file.number("time_step_min", 1e-3, float)
    return fields | pattern_fields(file, order)


def nemotron_json(config: Config) -> dict[str, Any]:
    experts = {}
    if config.num_experts:
        experts = {
            WIDTH: config.mlp,
            SHARED: config.shared_mlp,
            NUMBER: config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "norm_topk_prob": config.normalize,
            "routed_scaling_factor": config.route_scale,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        }
    if config.expert_latent:
        experts[LATENT] = config.expert_latent
    return experts | {
        "intermediate_size": config.dense_mlp or config.mlp,
        OVERRIDE: config.order,
        "num_hidden_layers": len(config.order),
        "layer_norm_epsilon": config.norm_eps,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "time_step_min": config.least_step,
    }


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
ROWS = (
    row(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        tensors=lfm2_tensors,
        layers=attends(1e6),
        theta=1e6,
        sizes=SIZES | {"mlp": "intermediate_size", "conv_width": "conv_L_cache"},
        fixed={"qk_norm": True},
        defaults={"conv_L_cache": 3, "num_key_value_heads": 8},
        keys_from=lfm2_keys,
        fields_from=lfm2_fields,
        fields_to=lfm2_json,
        refused={"conv_bias": (False,)},
    ),
    row(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        tensors=lfm2_tensors,
        layers=attends(1e6),
        theta=1e6,
        sizes=SIZES
        | {
            "mlp": "moe_intermediate_size",
            "conv_width": "conv_L_cache",
            "num_experts": "num_experts",
            "experts_per_token": "num_experts_per_tok",
        },
        fixed={"qk_norm": True, "sigmoid": True},
        options={"normalize": "norm_topk_prob", "route_scale": "routed_scaling_factor"},
        defaults={
            "conv_L_cache": 3, "num_key_value_heads": 8, "intermediate_size": 7_168,
            "moe_intermediate_size": 1_792, "num_experts": 32, "num_experts_per_tok": 4, DENSE: 2,
        },
        keys_from=lfm2_moe_keys,
        fields_from=lfm2_moe_fields,
        fields_to=lfm2_moe_json,
        refused={"conv_bias": (False,), "use_expert_bias": (True,)},
    ),
    row(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        tensors=granite_tensors,
        layers=Layers(read_granite),
        sizes=SIZES,
        fixed={"normalize": True},
        options=ATTENTION_BIAS
        | MULTIPLIERS
        | {
            "mamba_groups": "mamba_n_groups",
            "mamba_state_dim": "mamba_d_state",
            "conv_width": "mamba_d_conv",
            "conv_bias": "mamba_conv_bias",
        },
        defaults={"attention_multiplier": 1.0, "mamba_n_groups": 1, "mamba_d_state": 256},
        keys_from=granite_keys,
        fields_from=granite_fields,
        fields_to=granite_json,
        refused={"mamba_proj_bias": (False,)},
    ),
    row(
        architecture="FalconH1ForCausalLM",
        model_type="falcon_h1",
        tensors=falcon_tensors,
        layers=attends(1e4),
        sizes=SIZES | {"mlp": "intermediate_size"},
        options={
            "mamba_groups": "mamba_n_groups",
            "mamba_state_dim": "mamba_d_state",
            "conv_width": "mamba_d_conv",
            "conv_bias": "mamba_conv_bias",
        },
        defaults={
            "num_key_value_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_ssm": 1_024,
            "rms_norm_eps": 1e-5,
        },
        fields_from=falcon_fields,
        fields_to=falcon_json,
        refused={
            "mamba_proj_bias": (False,), "projectors_bias": (False,), "attention_bias": (False,),
            "mlp_bias": (False,),
        },
    ),
    row(
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        tensors=nemotron_tensors,
        layers=attends(None),
        sizes=SIZES
        | {
            "mamba_heads": "mamba_num_heads",
            "mamba_head_dim": "mamba_head_dim",
            "mamba_state_dim": "ssm_state_size",
            "mamba_groups": "n_groups",
            "conv_width": "conv_kernel",
        },
        fixed={"activation": "relu2"},
        options={"conv_bias": "use_conv_bias", "mlp_bias": "mlp_bias"},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21_504,
            "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
            "conv_kernel": 4,
        },
        keys_from=nemotron_keys,
        fields_from=nemotron_fields,
        fields_to=nemotron_json,
        select=without_mtp,
        own_code=True,
        refused={
            "use_bias": (False,), "mamba_proj_bias": (False,), "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu",), "sliding_window": (), "n_group": (1,), "topk_group": (1,),
        },
    ),
)  # fmt: skip


# Folders say `backbone`, also those that transformers writes; its modules, and so PEFT, say `model`.
def peft_name(name: str) -> str:
    return name.replace("backbone.", "model.", 1)


def in_backbone(name: str) -> str:
    return re.sub(r"\bmodel\.(layers|embeddings|norm_f)\.", r"backbone.\1.", name)


*OTHERS, NEMOTRON = (one.family for one in ROWS)
FAMILIES = (
    *OTHERS,
    dataclasses.replace(
        NEMOTRON,
        tied={"lm_head.weight": "backbone.embeddings.weight"},
        peft_name=peft_name,
        canonical=in_backbone,
    ),
)
