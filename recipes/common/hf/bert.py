"""The families of zoo/bert.py, each with the head that fills masks in: BERT, RoBERTa and XLM-R, and
ModernBERT.

RoBERTa's table of positions has two more rows in front, for padding; exports have zeros there.
"""

import functools
import pathlib
from typing import Any

from recipes.common.hf.family import GLOBAL, LOCAL, ConfigFile, Family, Table
from recipes.common.runtime.errors import UserError
from zoo.bert import Config
from zoo.config import Compute
from zoo.layers import Kind

ENTRY = "bert"
IN_FRONT = 2  # rows of RoBERTa's table of positions before the first position

LAYER = "encoder.layer.{}"
ENCODER = {  # in the format of tensors.py, without the prefix of all names
    "embed": ("embeddings.word_embeddings.weight", "VD", "V D"),
    "positions": ("embeddings.position_embeddings.weight", "PD", "P D"),
    "token_types": ("embeddings.token_type_embeddings.weight", "KD", "K D"),
    "embed_norm/scale": ("embeddings.LayerNorm.weight", "D", "D"),
    "embed_norm/bias": ("embeddings.LayerNorm.bias", "D", "D"),
    "layers/attention/q": (f"{LAYER}.attention.self.query.weight", "DNH", "NH D"),
    "layers/attention/q_bias": (f"{LAYER}.attention.self.query.bias", "NH", "NH"),
    "layers/attention/k": (f"{LAYER}.attention.self.key.weight", "DNH", "NH D"),
    "layers/attention/k_bias": (f"{LAYER}.attention.self.key.bias", "NH", "NH"),
    "layers/attention/v": (f"{LAYER}.attention.self.value.weight", "DNH", "NH D"),
    "layers/attention/v_bias": (f"{LAYER}.attention.self.value.bias", "NH", "NH"),
    "layers/attention/o": (f"{LAYER}.attention.output.dense.weight", "NHD", "D NH"),
    "layers/attention/o_bias": (f"{LAYER}.attention.output.dense.bias", "D", "D"),
    "layers/attention_norm/scale": (f"{LAYER}.attention.output.LayerNorm.weight", "D", "D"),
    "layers/attention_norm/bias": (f"{LAYER}.attention.output.LayerNorm.bias", "D", "D"),
    "layers/mlp/up": (f"{LAYER}.intermediate.dense.weight", "DF", "F D"),
    "layers/mlp/up_bias": (f"{LAYER}.intermediate.dense.bias", "F", "F"),
    "layers/mlp/down": (f"{LAYER}.output.dense.weight", "FD", "D F"),
    "layers/mlp/down_bias": (f"{LAYER}.output.dense.bias", "D", "D"),
    "layers/mlp_norm/scale": (f"{LAYER}.output.LayerNorm.weight", "D", "D"),
    "layers/mlp_norm/bias": (f"{LAYER}.output.LayerNorm.bias", "D", "D"),
}
# The head's dense layer, its norm and the bias of logits.
BERT_HEAD = ("transform.dense", "transform.LayerNorm", "bias")
ROBERTA_HEAD = ("dense", "layer_norm", "bias")

MODERN = {
    "embed": ("model.embeddings.tok_embeddings.weight", "VD", "V D"),
    "embed_norm/scale": ("model.embeddings.norm.weight", "D", "D"),
    "layers/attention_norm/scale": ("model.layers.{:1}.attn_norm.weight", "D", "D"),
    "output_norm/scale": ("model.final_norm.weight", "D", "D"),
    "head/dense": ("head.dense.weight", "DE", "E D"),
    "head/norm/scale": ("head.norm.weight", "D", "D"),
    "unembed_bias": ("decoder.bias", "V", "V"),
}
for _stack, _layer in (("dense", "model.layers.{}"), ("layers", "model.layers.{:1}")):
    MODERN |= {
        f"{_stack}/attention/q": (f"{_layer}.attn.Wqkv.weight", "DNH", "#NH D 0/3"),
        f"{_stack}/attention/k": (f"{_layer}.attn.Wqkv.weight", "DNH", "#NH D 1/3"),
        f"{_stack}/attention/v": (f"{_layer}.attn.Wqkv.weight", "DNH", "#NH D 2/3"),
        f"{_stack}/attention/o": (f"{_layer}.attn.Wo.weight", "NHD", "D NH"),
        f"{_stack}/mlp_norm/scale": (f"{_layer}.mlp_norm.weight", "D", "D"),
        f"{_stack}/mlp/gate": (f"{_layer}.mlp.Wi.weight", "DF", "#F D 0/2"),
        f"{_stack}/mlp/up": (f"{_layer}.mlp.Wi.weight", "DF", "#F D 1/2"),
        f"{_stack}/mlp/down": (f"{_layer}.mlp.Wo.weight", "FD", "D F"),
    }

SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp": "intermediate_size",
}
UNUSED = {  # features that our Bert lacks → values that leave them off
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "auto_map": (),
}
MODERN_UNUSED = {
    "hidden_activation": ("gelu",),
    "classifier_activation": ("gelu",),
    "norm_bias": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "classifier_bias": (False,),
    "decoder_bias": (True,),
    "tie_word_embeddings": (True,),
    "auto_map": (),
}
THETAS = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}


def sizes(file: ConfigFile) -> dict[str, Any]:
    found = {ours: file.number(key) for ours, key in SIZES.items()}
    if found["embed"] % found["num_heads"]:
        raise file.refused("num_attention_heads", found["num_heads"])
    return found


def lost(config_from, config_json, config: Config) -> list[str]:
    """The fields of a Config that differ when its config.json is read again."""
    try:
        read = config_from(config_json(config, 1), pathlib.Path("config.json"))
    except UserError:
        return ["its layers"]
    names = config.__dataclass_fields__.keys() - Compute.__dataclass_fields__.keys()
    return [
        f"{name}={getattr(config, name)!r}"
        for name in sorted(names)
        if getattr(read, name) != getattr(config, name)
    ]


# ---- BERT and RoBERTa ----------------------------------------------------------------------------


def bert(
    architecture: str, kind: str, prefix: str, prefix_of_head: str, head: tuple, in_front: int = 0
) -> Family:
    """A family of BERT's form.

    Args:
      head: the names of its parts, as BERT_HEAD.
      in_front: rows of the table of positions before the first position.
    """
    dense, norm, bias = (f"{prefix_of_head}.{name}" for name in head)
    table: Table = {
        path: (f"{prefix}.{name}", ours, theirs) for path, (name, ours, theirs) in ENCODER.items()
    } | {
        "head/dense": (f"{dense}.weight", "DE", "E D"),
        "head/bias": (f"{dense}.bias", "D", "D"),
        "head/norm/scale": (f"{norm}.weight", "D", "D"),
        "head/norm/bias": (f"{norm}.bias", "D", "D"),
        "unembed_bias": (bias, "V", "V"),
    }

    def tensors(config: Config) -> Table:
        if not in_front:
            return table
        name, ours, theirs = table["positions"]
        rows = f"{theirs} +{in_front}/{in_front + config.max_positions}"
        return table | {"positions": (name, ours, rows)}

    def config_from(keys: dict[str, Any], path: pathlib.Path) -> Config:
        file = ConfigFile(keys, path, ENTRY)
        file.refuse(UNUSED | ({"pad_token_id": (in_front - 1,)} if in_front else {}))
        positions = file.number("max_position_embeddings", 512)
        if positions <= in_front:
            raise file.refused("max_position_embeddings", positions)
        return Config(
            **sizes(file),
            max_positions=positions - in_front,
            token_types=file.number("type_vocab_size", 2),
            norm_eps=file.number("layer_norm_eps", 1e-12, float),
        )

    def config_json(config: Config, context: int) -> dict[str, Any]:
        """Their config.json, with the number of learned positions in place of `context`."""
        return {
            "architectures": [architecture],
            "model_type": kind,
            **{key: getattr(config, ours) for ours, key in SIZES.items()},
            "max_position_embeddings": config.max_positions + in_front,
            "type_vocab_size": config.token_types,
            "hidden_act": "gelu",
            "layer_norm_eps": config.norm_eps,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            **({"pad_token_id": in_front - 1} if in_front else {}),
        }

    embedding = table["embed"][0]
    decoder = f"{prefix_of_head}.decoder"
    return Family(
        entry=ENTRY,
        architectures={architecture: kind},
        tensors=tensors,
        config_from=config_from,
        config_json=config_json,
        lost=functools.partial(lost, config_from, config_json),
        fixed={"modern": False, "layer_kinds": Config.layer_kinds},
        checked=UNUSED,
        # Heads that pretraining leaves in a file, and numbers of positions.
        computed=(
            *("pooler.dense.weight", "pooler.dense.bias", "position_ids"),
            *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
        ),
        tied={f"{decoder}.weight": embedding, f"{decoder}.bias": bias},
        canonical=canonical,
    )


def canonical(name: str) -> str:
    """A stored tensor's name; old files have other ones for the two vectors of a norm."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        name = name.replace(old, new)
    return name


# ---- ModernBERT ----------------------------------------------------------------------------------


def modern_config_from(keys: dict[str, Any], path: pathlib.Path) -> Config:
    file = ConfigFile(keys, path, ENTRY)
    file.refuse(MODERN_UNUSED)
    fields = sizes(file)
    layers = fields["num_layers"]
    every = file.number("global_attn_every_n_layers", 3)
    types = keys.get("layer_types") or [LOCAL if i % every else GLOBAL for i in range(layers)]
    if not isinstance(types, list):
        raise file.refused("layer_types", types)
    period = types[1:].index(GLOBAL) + 1 if GLOBAL in types[1:] else layers
    pattern = [GLOBAL, *[LOCAL] * (period - 1)]
    if types != [pattern[i % period] for i in range(layers)]:
        raise file.refused("layer_types", types)
    ropes = file.ropes(THETAS)
    window = file.number("local_attention", 128) // 2 + 1
    kinds = tuple(Kind(window if name == LOCAL else None, *ropes[name]) for name in pattern)
    return Config(
        **fields,
        max_positions=0,
        token_types=0,
        norm_eps=file.number("norm_eps", 1e-5, float),
        layer_kinds=kinds,
        modern=True,
    )


def modern_config_json(config: Config, context: int) -> dict[str, Any]:
    wide, *local = config.layer_kinds
    near = local[0] if local else wide
    period = len(config.layer_kinds)
    return {
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": "modernbert",
        **{key: getattr(config, ours) for ours, key in SIZES.items()},
        "max_position_embeddings": context,
        "global_attn_every_n_layers": period,
        "layer_types": [LOCAL if i % period else GLOBAL for i in range(config.num_layers)],
        "local_attention": 2 * ((near.window or 65) - 1),
        "global_rope_theta": wide.rope_theta,
        "local_rope_theta": near.rope_theta,
        "hidden_activation": "gelu",
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


FAMILIES = (
    bert("BertForMaskedLM", "bert", "bert", "cls.predictions", BERT_HEAD),
    bert("RobertaForMaskedLM", "roberta", "roberta", "lm_head", ROBERTA_HEAD, IN_FRONT),
    bert("XLMRobertaForMaskedLM", "xlm-roberta", "roberta", "lm_head", ROBERTA_HEAD, IN_FRONT),
    Family(
        entry=ENTRY,
        architectures={"ModernBertForMaskedLM": "modernbert"},
        tensors=lambda config: MODERN,
        config_from=modern_config_from,
        config_json=modern_config_json,
        lost=functools.partial(lost, modern_config_from, modern_config_json),
        fixed={"modern": True},
        checked=MODERN_UNUSED,
        tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    ),
)
