"""The families of zoo/bert.py, BERT, RoBERTa and XLM-R, and ModernBERT: with the head that fills masks
in, without a head, and with one that classifies; DistilBERT, whose classifier is another one, without.

RoBERTa's table of positions has two more rows in front, for padding; exports have zeros there.
"""

import dataclasses
import functools
import pathlib
from typing import Any

from recipes.common.hf import sentence_transformers
from recipes.common.hf.family import (
    GLOBAL,
    LOCAL,
    ConfigFile,
    Family,
    Selection,
    Table,
    labels_json,
    scaling_json,
)  # fmt: skip
from recipes.common.hf.tensors import Stored
from zoo.bert import Config
from zoo.core.layers import AttentionType
from zoo.options.compute_options import ComputeOptions

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

SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp": "intermediate_size",
}
ROBERTA = ("roberta", "lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
FORMS = {  # model_type → prefix of names; the head's dense layer, its norm and the bias of logits
    "bert": ("bert", *(f"cls.predictions.{x}" for x in ("transform.dense", "transform.LayerNorm", "bias"))),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "distilbert": ("distilbert", "vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
}  # fmt: skip
DISTIL_NUMBERS = {"embed": "dim", "num_layers": "n_layers", "num_heads": "n_heads"}
DISTIL_SIZES = SIZES | DISTIL_NUMBERS | {"mlp": "hidden_dim"}
DISTIL_OTHER_NAMES = {SIZES[field]: key for field, key in DISTIL_NUMBERS.items()}
DISTIL_NAMES = {  # part of a name in ENCODER → DistilBERT's
    "encoder.": "transformer.",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
MODERN_PREFIX = "model"

MODERN = {
    "embed": ("model.embeddings.tok_embeddings.weight", "VD", "V D"),
    "embed_norm/scale": ("model.embeddings.norm.weight", "D", "D"),
    "layers/attention_norm/scale": ("model.layers.{:1}.attn_norm.weight", "D", "D"),
    "output_norm/scale": ("model.final_norm.weight", "D", "D"),
}
MODERN_HEAD = {
    "head/dense": ("head.dense.weight", "DE", "E D"),
    "head/norm/scale": ("head.norm.weight", "D", "D"),
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

UNUSED = {  # features that our Bert lacks → values that leave them off
    "hidden_act": ("gelu",),
    "activation": ("gelu",),  # DistilBERT's
    "sinusoidal_pos_embds": (False,),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "auto_map": (),
}
MODERN_UNUSED = {
    "hidden_activation": ("gelu",),
    "classifier_activation": ("gelu",),
    "classifier_pooling": ("cls", "mean"),
    "norm_bias": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "classifier_bias": (False,),
    "decoder_bias": (True,),
    "tie_word_embeddings": (True,),
    "auto_map": (),
}
OF_HEAD = ("head/", "classifier", "unembed_bias")  # paths of its variables begin so
CHECKED = ("problem_type", "num_labels", "id2label", "label2id")
THETAS = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}


def sizes(file: ConfigFile, keys: dict[str, str] = SIZES) -> dict[str, Any]:
    numbers = {ours: file.number(key) for ours, key in keys.items()}
    if numbers["embed"] % numbers["num_heads"]:
        raise file.refused(keys["num_heads"], numbers["num_heads"])
    return numbers


def lost(config_from, config_json, config: Config) -> list[str]:
    """The fields of a Config that differ when its config.json is read again."""
    try:
        read = config_from(config_json(config, 1), pathlib.Path("config.json"))
    except ValueError:  # a UserError, or the Config's
        return ["its layers"]
    names = config.__dataclass_fields__.keys() - ComputeOptions.__dataclass_fields__.keys()
    if config.task == "embed":
        names -= {"pooling", "normalize"}  # in other files
    return [
        f"{name}={getattr(config, name)!r}"
        for name in sorted(names)
        if getattr(read, name) != getattr(config, name)
    ]


# ---- BERT and RoBERTa ----------------------------------------------------------------------------


def linear(path: str, bias: str, name: str, ours: str, theirs: str) -> Table:
    """A matrix with a bias; `bias` is the path of it."""
    return {
        path: (f"{name}.weight", ours, theirs),
        bias: (f"{name}.bias", ours[-1], theirs.split()[0]),
    }


def without(prefix: str, table: Table) -> Table:
    """A table whose names lack a prefix, as those of models without a head do."""
    return {
        path: (name.removeprefix(f"{prefix}."), ours, theirs)
        for path, (name, ours, theirs) in table.items()
    }


def bert(architecture: str, kind: str, task: str = "fill") -> Family:
    """A family of BERT's form."""
    prefix, dense, norm, bias = FORMS[kind]
    in_front = IN_FRONT if prefix == "roberta" else 0
    distil = kind == "distilbert"
    its_sizes = DISTIL_SIZES if distil else SIZES
    table: Table = {}
    for path, (name, ours, theirs) in ENCODER.items():
        for part, other in DISTIL_NAMES.items() if distil else ():
            name = name.replace(part, other)
        table[path] = (f"{prefix}.{name}", ours, theirs)
    pooler, classifier = f"{prefix}.pooler.dense", "classifier"
    if task == "fill":
        table |= linear("head/dense", "head/bias", dense, "DE", "E D")
        table |= {
            "head/norm/scale": (f"{norm}.weight", "D", "D"),
            "head/norm/bias": (f"{norm}.bias", "D", "D"),
            "unembed_bias": (bias, "V", "V"),
        }
    if task == "classify":
        if in_front:  # RoBERTa's classifier has a pooler of its own
            pooler, classifier = "classifier.dense", "classifier.out_proj"
        table |= linear("classifier", "classifier_bias", classifier, "DK", "K D")
    of_pooler = linear("pooler", "pooler_bias", pooler, "DE", "E D")

    def tensors(config: Config) -> Table:
        entries = table | (of_pooler if config.pooling == "pooler" else {})
        if in_front:
            name, ours, theirs = table["positions"]
            rows = f"{theirs} +{in_front}/{in_front + config.max_positions}"
            entries |= {"positions": (name, ours, rows)}
        return without(prefix, entries) if task == "embed" else entries

    def config_from(keys: dict[str, Any], path: pathlib.Path) -> Config:
        file = ConfigFile(keys, path, ENTRY).with_other_names(DISTIL_OTHER_NAMES if distil else {})
        file.refuse(UNUSED | ({"pad_token_id": (in_front - 1,)} if in_front else {}))
        positions = file.number("max_position_embeddings", 512)
        if positions <= in_front:
            raise file.refused("max_position_embeddings", positions)
        return Config(
            **sizes(file, its_sizes),
            max_positions=positions - in_front,
            token_types=0 if distil else file.number("type_vocab_size", 2),
            norm_eps=1e-12 if distil else file.number("layer_norm_eps", 1e-12, float),
            **of_task(task, file, "cls" if distil else "pooler"),
        )

    def config_json(config: Config, context: int) -> dict[str, Any]:
        """Their config.json, with the number of learned positions in place of `context`."""
        return {
            "architectures": [architecture],
            "model_type": kind,
            **{key: getattr(config, ours) for ours, key in its_sizes.items()},
            "max_position_embeddings": config.max_positions + in_front,
            "activation" if distil else "hidden_act": "gelu",
            **({} if distil else {"type_vocab_size": config.token_types}),
            **({} if distil else {"layer_norm_eps": config.norm_eps}),
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            **({"pad_token_id": in_front - 1} if in_front else {}),
            **labels_json(config.labels),
        }

    embedding = table["embed"][0]
    decoder = f"{bias.removesuffix('.bias')}.decoder"
    return Family(
        entry=ENTRY,
        architectures={architecture: kind},
        tensors=tensors,
        config_from=config_from,
        config_json=config_json,
        lost=functools.partial(lost, config_from, config_json),
        fixed={"modern": False, "layer_kinds": Config.layer_kinds, "task": task},
        checked=(*UNUSED, *CHECKED),
        select=functools.partial(select, architecture),
        other_files=other_files,
        # Heads that pretraining leaves in a file, and numbers of positions.
        computed=(
            *("pooler.dense.weight", "pooler.dense.bias", "position_ids"),
            *("cls.seq_relationship.weight", "cls.seq_relationship.bias"),
        ),
        tied={f"{decoder}.weight": embedding, f"{decoder}.bias": bias} if task == "fill" else {},
        canonical=functools.partial(canonical, prefix if task == "embed" else ""),
    )


def of_task(task: str, file: ConfigFile, own_pooling: str) -> dict[str, Any]:
    """Fields of Config: the task, its classes, and how it pools texts."""
    file.refuse({"problem_type": ("single_label_classification",)})
    if task == "fill":
        return {}
    labels = {"labels": file.labels()} if task == "classify" else {}
    pooling = sentence_transformers.read(file.path) if task == "embed" else {}
    return {"task": task, "pooling": own_pooling} | labels | pooling


def select(architecture: str, stored: dict[str, Stored], config: Config) -> Selection:
    """A model without a head may be stored without a pooler; one with a head has no use for modules
    of sentence-transformers.
    """
    has_pooler = any(name.endswith("pooler.dense.weight") for name in stored)
    if config.task == "embed" and config.pooling == "pooler" and not has_pooler:
        config = dataclasses.replace(config, pooling="cls")
    left_out = ""
    if config.task != "embed" and sentence_transformers.beside(stored):
        left_out = (
            f"Left out {sentence_transformers.MODULES}, which makes vectors of texts: config.json has "
            f"the architecture {architecture}. Name the one without a head there to keep it."
        )
    return Selection(stored, config, left_out)


def lacks_head(family: Family, config: Config, stored: dict[str, Stored]) -> bool:
    """Whether weights have nothing of the head that a family's architecture has."""
    table = family.tensors(config).items()
    head = {name for path, (name, *_) in table if path.startswith(OF_HEAD)}
    return bool(head) and not head & {family.canonical(name) for name in stored}


def other_files(config: Config) -> dict[str, Any]:
    return sentence_transformers.files(config) if config.task == "embed" else {}


def canonical(prefix: str, name: str) -> str:
    """A stored tensor's name without the prefix. Old files have other ones for a norm's vectors."""
    name = name.removeprefix(f"{prefix}.")
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        name = name.replace(old, new)
    return name


# ---- ModernBERT ----------------------------------------------------------------------------------


def modern(architecture: str, task: str = "fill") -> Family:
    table = MODERN | (MODERN_HEAD if task != "embed" else {})
    if task == "fill":
        table |= {"unembed_bias": ("decoder.bias", "V", "V")}
    elif task == "classify":
        table |= linear("classifier", "classifier_bias", "classifier", "DK", "K D")
    else:
        table = without(MODERN_PREFIX, table)
    tied = {"decoder.weight": "model.embeddings.tok_embeddings.weight"}
    config_from = functools.partial(modern_config_from, task)
    config_json = functools.partial(modern_config_json, architecture)
    return Family(
        entry=ENTRY,
        architectures={architecture: "modernbert"},
        tensors=lambda config: table,
        config_from=config_from,
        config_json=config_json,
        lost=functools.partial(lost, config_from, config_json),
        fixed={"modern": True, "task": task},
        checked=(*MODERN_UNUSED, *CHECKED),
        tied=tied if task == "fill" else {},
        canonical=functools.partial(canonical, MODERN_PREFIX if task == "embed" else ""),
        select=functools.partial(select, architecture),
        other_files=other_files,
    )


def modern_config_from(task: str, keys: dict[str, Any], path: pathlib.Path) -> Config:
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
    ropes = file.ropes(THETAS, scaled=(GLOBAL, LOCAL))
    # sliding_window is another name for half of it.
    window = file.number("sliding_window", file.number("local_attention", 128) // 2) + 1
    kinds = tuple(
        AttentionType(window if name == LOCAL else None, *ropes[name]) for name in pattern
    )
    return Config(
        **fields,
        max_positions=0,
        token_types=0,
        norm_eps=file.number("norm_eps", 1e-5, float),
        layer_kinds=kinds,
        modern=True,
        **of_task(task, file, keys.get("classifier_pooling") or "cls"),
    )


def modern_config_json(architecture: str, config: Config, context: int) -> dict[str, Any]:
    wide, *local = config.layer_kinds
    near = local[0] if local else wide
    period = len(config.layer_kinds)
    return {
        "architectures": [architecture],
        "model_type": "modernbert",
        **{key: getattr(config, ours) for ours, key in SIZES.items()},
        "max_position_embeddings": context,
        "global_attn_every_n_layers": period,
        "layer_types": [LOCAL if i % period else GLOBAL for i in range(config.num_layers)],
        "local_attention": 2 * ((near.window or 65) - 1),
        "global_rope_theta": wide.rope_theta,
        "local_rope_theta": near.rope_theta,
        **rope_parameters({GLOBAL: wide, LOCAL: near}),
        "hidden_activation": "gelu",
        "norm_eps": config.norm_eps,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **({"classifier_pooling": config.pooling} if config.task == "classify" else {}),
        **labels_json(config.labels),
    }


def rope_parameters(kinds: dict[str, AttentionType]) -> dict[str, Any]:
    """The newer keys, which older versions of transformers ignore, if there is a rotary scaling."""
    if not any(kind.rope_scaling for kind in kinds.values()):
        return {}
    return {
        "rope_parameters": {
            name: {"rope_theta": kind.rope_theta}
            | (scaling_json(kind.rope_scaling) or {"rope_type": "default"})
            for name, kind in kinds.items()
        }
    }


# The last of a model_type is for a config.json without architectures.
FAMILIES = (
    bert("BertModel", "bert", "embed"),
    bert("BertForSequenceClassification", "bert", "classify"),
    bert("BertForMaskedLM", "bert"),
    bert("RobertaModel", "roberta", "embed"),
    bert("RobertaForSequenceClassification", "roberta", "classify"),
    bert("RobertaForMaskedLM", "roberta"),
    bert("XLMRobertaModel", "xlm-roberta", "embed"),
    bert("XLMRobertaForSequenceClassification", "xlm-roberta", "classify"),
    bert("XLMRobertaForMaskedLM", "xlm-roberta"),
    bert("DistilBertModel", "distilbert", "embed"),
    bert("DistilBertForMaskedLM", "distilbert"),
    modern("ModernBertModel", "embed"),
    modern("ModernBertForSequenceClassification", "classify"),
    modern("ModernBertForMaskedLM"),
)
