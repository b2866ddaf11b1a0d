"""Hybrids of Mamba-2 whose layers have an MLP or experts each (zoo/hybrid.py): Granite 4 and Falcon-H1, as
rows of relative.py.
"""

import functools
import math
import pathlib
from typing import Any

from recipes.common.hf.family import GLOBAL, ConfigFile, Table
from recipes.common.hf.hybrid import (
    ATTENDS,
    OUTSIDE,
    SIZES,
    attends,
    letters,
    mamba_tensors,
    of_layers,
    pattern_fields,
    row,
    types_of,
)
from recipes.common.hf.layer_kinds import Layers
from recipes.common.hf.llama import ATTENTION_BIAS, MULTIPLIERS
from zoo.core.layers import AttentionType
from zoo.hybrid import Config

# Names of kinds of layers, also older ones → letters of Config.pattern. The first of each letter is
# written.
GRANITE_TYPES = {"mamba": "M", "attention": "*", "linear_attention": "M", GLOBAL: "*"}
INFINITY = {"__float__": "Infinity"}  # as transformers writes it
LIMITS = "time_step_limit"
ROUTED = "num_routed_experts"  # our name for Granite's num_local_experts
BEFORE_GATE = "mamba_norm_before_gate"


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


GRANITE = row(
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
)
FALCON = row(
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
)  # fmt: skip
FAMILIES = (GRANITE.family, FALCON.family)
