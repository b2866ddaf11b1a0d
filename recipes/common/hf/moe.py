"""Llama's relatives with experts (zoo/moe.py). Everything but the experts is as in llama.py.

Each expert is a separate tensor in most folders, and a slice of one of our parameters.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

from recipes.common.hf.family import (
    FURTHER,
    GLOBAL,
    LOCAL,
    ConfigFile,
    Selection,
    Table,
    leave_out_layers,
)
from recipes.common.hf.layer_kinds import Layers, types_of, windowed
from recipes.common.hf.llama import ATTENTION_BIAS, JOINT_NORMS, MULTIPLIERS
from recipes.common.hf.relative import SIZES, TENSORS, Relative
from recipes.common.hf.tensors import Stored
from zoo.core.layers import AttentionType
from zoo.moe import Config

OTHERS = {path: row for path, row in TENSORS.items() if not path.startswith("layers/mlp/")}


def experts(
    name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Table:
    """The tensors of a layer's experts, which are `name` in the folder."""
    at = f"model.layers.{{}}.{name}"
    return OTHERS | {
        "layers/experts/router": (f"{at}.gate.weight", "DE", "E D"),
        "layers/experts/gate": (f"{at}.experts.{{}}.{gate}.weight", "DF", "F D"),
        "layers/experts/up": (f"{at}.experts.{{}}.{up}.weight", "DF", "F D"),
        "layers/experts/down": (f"{at}.experts.{{}}.{down}.weight", "FD", "D F"),
    }


MIXTRAL = experts("block_sparse_moe", "w1", "w3", "w2")
QWEN = experts("mlp")
QWEN2 = QWEN | {
    "layers/mlp/gate": ("model.layers.{}.mlp.shared_expert.gate_proj.weight", "DF", "F D"),
    "layers/mlp/up": ("model.layers.{}.mlp.shared_expert.up_proj.weight", "DF", "F D"),
    "layers/mlp/down": ("model.layers.{}.mlp.shared_expert.down_proj.weight", "FD", "D F"),
    "layers/mlp_gate": ("model.layers.{}.mlp.shared_expert_gate.weight", "D", "1 D"),
}
OLMOE = QWEN | JOINT_NORMS
MINIMAX = MIXTRAL | JOINT_NORMS
MINIMAX |= {
    "layers/experts/bias": (
        "model.layers.{}.block_sparse_moe.e_score_correction_bias", "E", "E"),
}  # fmt: skip
GRANITE = OTHERS | {  # all experts of a layer are one tensor, and so are gate and up
    "layers/experts/router": ("model.layers.{}.block_sparse_moe.router.layer.weight", "DE", "E D"),
    "layers/experts/gate": (
        "model.layers.{}.block_sparse_moe.input_linear.weight", "EDF", "E #F D 0/2"),
    "layers/experts/up": (
        "model.layers.{}.block_sparse_moe.input_linear.weight", "EDF", "E #F D 1/2"),
    "layers/experts/down": (
        "model.layers.{}.block_sparse_moe.output_linear.weight", "EFD", "E D F"),
}  # fmt: skip


def with_dense(routed: Table) -> Callable[[Any], Table]:
    """The tensors of a model whose first layers have an MLP in place of experts, by its Config.

    Args:
      routed: the tensors of the other layers.
    """
    dense = {path.replace("layers/", "dense/"): row for path, row in TENSORS.items()}

    def tensors(config: Any) -> Table:
        layer = f".{{:{config.dense_layers}}}"
        return dense | {
            path: (name.replace(".{}", layer, 1), ours, theirs)
            for path, (name, ours, theirs) in routed.items()
        }

    return tensors


SHARED_EXPERTS = "model.layers.{}.mlp.shared_experts"
GLM = QWEN | {
    "layers/experts/bias": ("model.layers.{}.mlp.gate.e_score_correction_bias", "E", "E"),
    "layers/mlp/gate": (f"{SHARED_EXPERTS}.gate_proj.weight", "DF", "F D"),
    "layers/mlp/up": (f"{SHARED_EXPERTS}.up_proj.weight", "DF", "F D"),
    "layers/mlp/down": (f"{SHARED_EXPERTS}.down_proj.weight", "FD", "D F"),
}

PER_TOKEN = {"experts_per_token": "num_experts_per_tok"}
LOCAL_EXPERTS = SIZES | PER_TOKEN | {"num_experts": "num_local_experts"}
QWEN_EXPERTS = SIZES | PER_TOKEN | {"mlp": "moe_intermediate_size", "num_experts": "num_experts"}
DENSE = "first_k_dense_replace"
WIDTH = "moe_intermediate_size"
DENSE_LAYERS = {"dense_layers": DENSE, "dense_mlp": "intermediate_size"}
SHARED = "shared_expert_intermediate_size"


def read_dense(keys: dict[str, Any], count: int) -> dict[str, Any]:
    """Keys with the number of dense layers; without any, intermediate_size means nothing."""
    width = keys.get("intermediate_size") if count else None
    return keys | {DENSE: count or None, "intermediate_size": width}


def write_dense(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"intermediate_size": keys["intermediate_size"] or keys[WIDTH]}


def read_mlp_only(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Qwen lists the layers without experts, which must be the first ones."""
    file = ConfigFile(keys, path, "moe")
    listed = keys.get("mlp_only_layers") or []
    layers = range(file.number("num_hidden_layers"))
    dense = [layer for layer in layers if isinstance(listed, list) and layer in listed]
    if not isinstance(listed, list) or dense != [*range(len(dense))]:
        raise file.refused("mlp_only_layers", listed)
    return read_dense(keys, len(dense))


def write_mlp_only(keys: dict[str, Any]) -> dict[str, Any]:
    dense = [*range(keys.pop(DENSE))]
    return write_dense(keys) | {"mlp_only_layers": dense}


def read_glm(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Shared experts have a number, and the width of the others."""
    file = ConfigFile(keys, path, "moe")
    shared = file.number("n_shared_experts") * file.number(WIDTH)
    return read_dense(keys, keys.get(DENSE) or 0) | {SHARED: shared}


def write_glm(keys: dict[str, Any]) -> dict[str, Any]:
    number = keys.pop(SHARED) // keys[WIDTH]
    return write_dense(keys) | {"n_shared_experts": number, FURTHER: 0}


def without_further_layers(stored: dict[str, Stored], config: Config) -> Selection:
    return leave_out_layers(stored, config, config.num_layers)


def read_switched(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
    """Reads layers with a window if use_sliding_window is set."""
    if not file.keys.get("use_sliding_window"):
        file = file.with_keys(sliding_window=None)
    return windowed(4_096).read(file, theta, partial)


def write_switched(kinds: list[AttentionType]) -> dict[str, Any]:
    return {"use_sliding_window": kinds[0].window is not None, "sliding_window": kinds[0].window}


def read_qwen2(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
    """Reads layers of which every other one up to max_window_layers has a window."""
    if not file.keys.get("use_sliding_window"):
        return read_switched(file, theta, partial)
    if file.keys.get("layer_types") is None:
        most = file.number("max_window_layers", 28)
        types = [
            GLOBAL if layer % 2 or layer >= most else LOCAL
            for layer in range(file.number("num_hidden_layers"))
        ]
        file = file.with_keys(layer_types=types)
    return windowed(4_096, mixed=True).read(file, theta, partial)


def write_mixed(kinds: list[AttentionType]) -> dict[str, Any]:
    window = next((kind.window for kind in kinds if kind.window), None)
    switch = {"use_sliding_window": window is not None, "sliding_window": window}
    return switch | {"layer_types": types_of(kinds)}


row = functools.partial(
    Relative,
    config=Config,
    entry="moe",
    # An import is dropless, as transformers computes it.
    training={
        "capacity": None,
        "balance_weight": 0.01,
        "router_z_weight": 1e-3,
        "balance_rate": 0.0,
    },
)

ROWS = (
    row(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        tensors=lambda config: MIXTRAL,
        sizes=LOCAL_EXPERTS,
        layers=windowed(4_096),
        theta=1e6,
        fixed={"normalize": True},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
    ),
    row(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        tensors=with_dense(QWEN),
        sizes=QWEN_EXPERTS,
        layers=Layers(read_switched, write_switched),
        keys_from=read_mlp_only,
        keys_to=write_mlp_only,
        fixed={"qk_norm": True},
        options=ATTENTION_BIAS | DENSE_LAYERS | {"normalize": "norm_topk_prob"},
        defaults={"num_key_value_heads": 4, "norm_topk_prob": False},
        aliases={"num_experts": "num_local_experts"},  # in newer files
        refused={"decoder_sparse_step": (1,)},
    ),
    row(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        tensors=with_dense(QWEN2),
        sizes=QWEN_EXPERTS | {"shared_mlp": SHARED},
        layers=Layers(read_qwen2, write_mixed),
        keys_from=read_mlp_only,
        keys_to=write_mlp_only,
        fixed={"shared_gate": True},
        options=DENSE_LAYERS | {"qkv_bias": "qkv_bias", "normalize": "norm_topk_prob"},
        defaults={"num_key_value_heads": 16, "qkv_bias": True, "norm_topk_prob": False},
        refused={"decoder_sparse_step": (1,)},
    ),
    row(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        tensors=lambda config: OLMOE,
        sizes=SIZES | PER_TOKEN | {"num_experts": "num_experts"},
        fixed={"qk_norm": True, "joint_qk_norm": True},
        options=ATTENTION_BIAS | {"normalize": "norm_topk_prob"},
        defaults={"rms_norm_eps": 1e-5, "norm_topk_prob": False},
        refused={"clip_qkv": ()},
    ),
    row(
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        tensors=lambda config: GRANITE,
        sizes=LOCAL_EXPERTS,
        fixed={"normalize": True},
        options=ATTENTION_BIAS | MULTIPLIERS,
        defaults={"attention_multiplier": 1.0},
    ),
    row(
        architecture="MiniMaxM2ForCausalLM",
        model_type="minimax_m2",
        tensors=lambda config: MINIMAX,
        sizes=LOCAL_EXPERTS,
        theta=5e6,
        partial=True,
        fixed={"sigmoid": True, "normalize": True, "qk_norm": True, "joint_qk_norm": True},
        defaults={"head_dim": 128, "num_key_value_heads": 8},
        formats=("fp8",),
        own_code=True,
        refused={
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "shared_intermediate_size": (0,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
        },
    ),
    row(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        tensors=with_dense(GLM),
        sizes=SIZES
        | PER_TOKEN
        | {"mlp": WIDTH, "num_experts": "n_routed_experts", "shared_mlp": SHARED},
        partial=True,
        keys_from=read_glm,
        keys_to=write_glm,
        fixed={"sigmoid": True},
        options=DENSE_LAYERS
        | {
            "qkv_bias": "attention_bias",
            "qk_norm": "use_qk_norm",
            "normalize": "norm_topk_prob",
            "route_scale": "routed_scaling_factor",
            "groups": "n_group",
            "top_groups": "topk_group",
        },
        defaults={
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, DENSE: 1,
        },
        select=without_further_layers,
    ),
)  # fmt: skip
FAMILIES = tuple(one.family for one in ROWS)
