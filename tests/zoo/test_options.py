"""Every option of a Config changes what its model computes, so none is ignored or held at one value."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

from recipes.common import entries
from recipes.common.flags.config_flags import COMPUTE
from recipes.common.sharding.abstract import abstract_model
from tests.conftest import full_except
from tests.support.entries import OF_TEXT
from zoo.core.layers import AttentionType
from zoo.options.rope_scaling import Linear, Yarn

pytestmark = pytest.mark.promise("definitions")

DECODERS = [name for name, entry in entries.ENTRIES.items() if entry.data in OF_TEXT]
YARN = Yarn(2.0, 2.0, 1.0, 4, True, 1.2)
# Another value of each option, and what it needs besides. Tuples are tried one after another.
OPTIONS = {
    "norm_eps": 0.3, "rope_theta": 77.0, "rope_scaling": Linear(2.0), "sliding_window": 3,
    "layer_kinds": (AttentionType(3, 50.0),), "tie_embeddings": None, "qkv_bias": True, "o_bias": True,
    "mlp_bias": True, "qk_norm": None, "joint_qk_norm": True, "norms": "after", "rotary_dims": 2,
    "embed_scale": 3.0, "residual_scale": 0.5, "attention_scale": 0.3, "logits_divisor": 2.0,
    "query_growth": 0.5, "query_scalar": 5, "soft_cap": 5.0, "logits_soft_cap": 5.0,
    "capacity": None, "normalize": None, "balance_weight": 0.7, "balance_rate": 0.7,
    "router_z_weight": 0.7, "sigmoid": None, "shared_mlp": 24, "shared_gate": True, "route_scale": 3.0,
    "groups": 2, "top_groups": 1, "dense_layers": 1, "mtp_depth": 1, "mtp_weight": 0.7,
    "swiglu_alpha": 1.0, "swiglu_limit": 1.0, "mscale": 0.7, "lora_rank": 2, "lora_alpha": 3.0,
    "global_window": 3, "keys_as_values": None, "wide_shared_layers": True, "local_rope_theta": 77.0,
    "rotary_fraction": 1.0, "shared_layers": 1,
    "lora_targets": ("q",), "attention_every": 3, "conv_width": 4, "token_types": 0, "modern": True,
    "pattern": "ECM*", "conv_bias": False, "least_step": 0.3, "activation": "relu2", "mamba_norm": False,
    "mamba_scales": (2.0, 3.0, 0.5, 0.7, 1.5), "mamba_out_scale": 3.0, "attention_out_scale": 3.0,
    "key_scale": 3.0, "mlp_scales": (2.0, 3.0), "delta_most_write": 2.0, "delta_norm_eps": 0.3,
    "attention_norms": "after",
}  # fmt: skip
NEEDS = {
    "joint_qk_norm": {"qk_norm": True},
    "query_growth": {"rope_scaling": YARN},
    "mscale": {"rope_scaling": YARN},
    "shared_gate": {"shared_mlp": 24},
    "top_groups": {"groups": 4, "top_groups": 2},
    "groups": {"top_groups": 1},
    "dense_layers": {"dense_mlp": 24, "dense_layers": 0},
    "mlp_bias": {"dense_mlp": 24, "dense_layers": 1},  # experts have none
    "mtp_weight": {"mtp_depth": 1},
    "lora_alpha": {"lora_rank": 2},
    "lora_targets": {"lora_rank": 2},
    "balance_rate": {"sigmoid": True},
    "wide_shared_layers": {"shared_layers": 2},
    "mamba_out_scale": {"pattern": "PE"},
    "attention_out_scale": {"pattern": "PE"},
    "key_scale": {"pattern": "PE"},
    "delta_most_write": {"pattern": "D*E"},
    "delta_norm_eps": {"pattern": "D*E"},
}
# Of Bert: the vectors of texts and their classes, which the loss of masked tokens lacks;
# tests/hf/test_encoders.py has their values.
VECTORS = {"task", "pooling", "normalize", "labels"}
# Fields that shapes of parameters show.
SIZES = {
    "vocab_size", "embed", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp", "num_experts",
    "experts_per_token", "max_positions", "nope_dim", "rope_dim", "value_dim", "kv_latent", "q_latent",
    "shared_experts", "dense_mlp", "global_kv_heads", "global_head_dim", "layer_embed", "expert_mlp",
    "delta_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim", "mamba_heads", "mamba_groups",
    "mamba_head_dim", "mamba_state_dim", "shared_key_dim", "expert_latent",
}  # fmt: skip


def program(entry: str, config) -> tuple:
    """The traced objective of a batch, constants included."""
    model = abstract_model(lambda: entries.model(entry)(config, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((2, 8), "int32")

    def loss(variables, tokens, targets, segment_ids):
        return model.loss(
            model.merge(variables), tokens=tokens, targets=targets, segment_ids=segment_ids
        )

    traced = jax.make_jaxpr(loss)(model.shapes, tokens, tokens, tokens)
    constants = [np.asarray(x).tobytes() for x in traced.consts]
    return re.sub("0x[0-9a-f]+", "", str(traced.jaxpr)), constants


def options(entry: str) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(entries.zoo_file(entry).Config)
        if field.name in OPTIONS and not (entry == "bert" and field.name in VECTORS)
    ]


CASES = [(entry, name) for entry in DECODERS for name in options(entry)]
FAST = [("qwen3_next", "normalize"), ("deepseek", "normalize"), ("moe", "normalize")]


@functools.cache
def base_program(entry: str, needs: tuple):
    config = dataclasses.replace(entries.zoo_file(entry).Config.tiny(), **dict(needs))
    return config, program(entry, config)


@pytest.mark.parametrize(("entry", "name"), full_except(CASES, FAST))
def test_an_option_changes_what_is_computed(entry, name):
    fields = {field.name for field in dataclasses.fields(entries.zoo_file(entry).Config)}
    needs = {key: value for key, value in NEEDS.get(name, {}).items() if key in fields}
    config, wanted = base_program(entry, tuple(needs.items()))
    now = vars(config)[name]
    other = not now if OPTIONS[name] is None and isinstance(now, bool) else OPTIONS[name]
    changed = dataclasses.replace(config, **{name: other})
    assert vars(changed)[name] != now
    assert program(entry, changed) != wanted


@pytest.mark.parametrize("entry", DECODERS)
def test_every_field_is_an_option_a_size_or_says_how_to_compute(entry):
    fields = {field.name for field in dataclasses.fields(entries.zoo_file(entry).Config)}
    vectors = VECTORS if entry == "bert" else set()
    assert fields <= {*OPTIONS, *SIZES, *COMPUTE, *vectors}, "add the new field above"


def test_a_program_is_traced_twice_alike():
    config, wanted = base_program("moe", ())
    assert program("moe", config) == wanted
