"""Folders of sentence-transformers: a model of `transformers`, and how to make a vector of a text.

modules.json                       what follows the model: Pooling, with a config.json in a
                                   subfolder, and Normalize
sentence_bert_config.json          most tokens of a text, and whether it is lowercased
config_sentence_transformers.json  prompts, how vectors are compared and cut
"""

import dataclasses
import json
import pathlib
from typing import Any

from recipes.common.hf import tensors
from recipes.common.runtime.errors import UserError

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
OLDER = tuple(  # other names of TRANSFORMER
    f"sentence_{kind}_config.json"
    for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
FILES = (MODULES, SETTINGS, TRANSFORMER, *OLDER)
TOKENIZER = "tokenizer_config.json"
MODES = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
OTHER_MODES = (
    *("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    *("pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"),
)
# What our encoders lack → values that leave it off; an empty object or list always does.
UNUSED: dict[str, dict[str, tuple]] = {
    TRANSFORMER: {
        "transformer_task": ("feature-extraction",),
        "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
        "module_output_name": ("token_embeddings",),
        **dict.fromkeys(("processing_kwargs", "query_length", "document_length", "query_expansion"), ()),
        **dict.fromkeys(("model_args", "tokenizer_args", "config_args"), ()),
        **dict.fromkeys(("model_kwargs", "processor_kwargs", "config_kwargs"), ()),
        "tokenizer_name_or_path": (),
    },
    "Normalize": {
        "module_input_name": ("sentence_embedding",),
        "module_output_name": ("sentence_embedding",),
    },
}  # fmt: skip
READ = ("max_seq_length", "do_lower_case", "unpad_inputs")  # the last one is about speed


@dataclasses.dataclass(frozen=True)
class Sentences:
    """What a folder says about texts and vectors besides its model's Config."""

    max_seq_length: int = 0  # tokens of a text, with those around it; 0: unstated
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)  # name → what precedes a text
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None  # numbers of a vector that are kept
    include_prompt: bool = True  # whether a prompt's tokens count in the pooling

    def files(self) -> dict[str, Any]:
        """Name → JSON of the files that state this. Our tokenizers lowercase texts themselves."""
        settings = {
            "prompts": self.prompts,
            "default_prompt_name": self.default_prompt_name,
            "similarity_fn_name": self.similarity_fn_name or "cosine",
        }
        settings |= {"truncate_dim": self.truncate_dim} if self.truncate_dim else {}
        transformer = {"max_seq_length": self.max_seq_length, "do_lower_case": False}
        return {SETTINGS: settings, TRANSFORMER: transformer}


def of_metadata(metadata: dict[str, Any]) -> Sentences:
    """The Sentences of a checkpoint or folder."""
    return Sentences(**metadata.get("sentences") or {})


def read(config: pathlib.Path) -> dict[str, Any]:
    """Fields of Config from the modules.json beside a config.json; {} without one.

    Raises UserError for modules that the zoo does not implement.
    """
    file = config.with_name(MODULES)
    if not file.exists():
        return {}
    names, keys = _modules(file)
    modes = [mode for mode, key in MODES.items() if keys.get(key)]
    modes += [key for key in OTHER_MODES if keys.get(key)]
    modes = modes or [keys.get("pooling_mode", "mean")]
    if len(modes) != 1 or modes[0] not in MODES:
        raise UserError(
            f"{file.parent} pools by {' and '.join(map(str, modes))}, which zoo/bert.py does not "
            "implement; use a model that pools by cls or mean"
        )
    return {"pooling": modes[0], "normalize": names[-1] == "Normalize"}


def _modules(file: pathlib.Path) -> tuple[list[str], dict[str, Any]]:
    """The classes in a modules.json, and the keys of its Pooling. Raises UserError."""
    try:
        modules = json.loads(file.read_text())
        names = [module["type"].rpartition(".")[2] for module in modules]
        paths = [module["path"] for module in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{file} is not a list of modules; download it again") from None
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{file} has the modules {', '.join(names)}, which zoo/bert.py does not implement; use a "
            "model with Transformer, Pooling and at most Normalize"
        )
    pooling = file.parent / paths[1] / "config.json"
    if not pooling.exists():
        raise UserError(f"{pooling} does not exist; use a complete model folder")
    if len(paths) > 2 and (normalize := file.parent / paths[2] / "config.json").exists():
        _refuse(tensors.read_json(normalize), normalize, "Normalize")
    return names, tensors.read_json(pooling)


def sentences(folder: pathlib.Path) -> Sentences:
    """What the files beside a folder's modules.json say. Raises UserError for what we lack."""
    _, pooling = _modules(folder / MODULES)
    transformer, _ = _transformer(folder)
    settings = _keys(folder / SETTINGS)
    length = transformer.get("max_seq_length")
    if length is None:
        stated = _keys(folder / TOKENIZER).get("model_max_length")
        positions = _keys(folder / "config.json").get("max_position_embeddings")
        stated = [number for number in (stated, positions) if number]
        length = int(min(stated, default=0))
    prompts = {name: text for name, text in (settings.get("prompts") or {}).items() if text}
    default = settings.get("default_prompt_name")
    if default is not None and default not in (settings.get("prompts") or {}):
        raise UserError(
            f"{folder / SETTINGS} has default_prompt_name {default!r}, which is not one of its "
            f"prompts, {', '.join(prompts) or 'none'}; use this model's own"
        )
    return Sentences(
        max_seq_length=length,
        prompts=prompts,
        default_prompt_name=default if default in prompts else None,
        similarity_fn_name=settings.get("similarity_fn_name"),
        truncate_dim=settings.get("truncate_dim"),
        include_prompt=pooling.get("include_prompt", True),
    )


def lowercases(folder: pathlib.Path) -> bool:
    """Whether texts are lowercased before the tokenizer's own normalizer."""
    return (folder / MODULES).exists() and bool(_transformer(folder)[0].get("do_lower_case"))


def lowercased(tokenizer_json: bytes) -> bytes:
    """A tokenizer.json whose texts are lowercased first."""
    keys = json.loads(tokenizer_json)
    normalizer = keys.get("normalizer")
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    if any(step["type"] == "Lowercase" or step.get("lowercase") for step in steps):
        return tokenizer_json
    first = {"type": "Lowercase"}
    keys["normalizer"] = {"type": "Sequence", "normalizers": [first, *steps]} if steps else first
    return json.dumps(keys, ensure_ascii=False).encode()


def _transformer(folder: pathlib.Path) -> tuple[dict[str, Any], pathlib.Path]:
    """The keys of TRANSFORMER, under whichever name, and that file. Raises UserError."""
    file = next((folder / x for x in (TRANSFORMER, *OLDER) if (folder / x).exists()), None)
    if file is None:
        return {}, folder / TRANSFORMER
    keys = tensors.read_json(file)
    _refuse(keys, file, TRANSFORMER)
    unknown = keys.keys() - UNUSED[TRANSFORMER].keys() - {*READ}
    if unknown := sorted(key for key in unknown if keys[key]):
        raise _refused(file, unknown[0], keys[unknown[0]])
    return keys, file


def _keys(file: pathlib.Path) -> dict[str, Any]:
    return tensors.read_json(file) if file.exists() else {}


def _refuse(keys: dict[str, Any], file: pathlib.Path, kind: str) -> None:
    for key, values in UNUSED[kind].items():
        if keys.get(key) and keys[key] not in values:
            raise _refused(file, key, keys[key])


def _refused(file: pathlib.Path, key: str, value: Any) -> UserError:
    return UserError(
        f"{file} has {key} {json.dumps(value)}, which zoo/bert.py does not implement; use a "
        "different model"
    )


def beside(stored: dict[str, tensors.Stored]) -> bool:
    """Whether there is a modules.json beside the files of some tensors."""
    return any(tensor.file.with_name(MODULES).exists() for tensor in stored.values())


def files(config) -> dict[str, Any]:
    """Name → JSON of the files that state a Config's pooling; {} for BERT's own pooler."""
    if config.pooling not in MODES:
        return {}
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules += [("Normalize", "2_Normalize")] if config.normalize else []
    return {
        MODULES: [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (name, path) in enumerate(modules)
        ],
        POOLING: {
            "word_embedding_dimension": config.embed,
            **{key: mode == config.pooling for mode, key in MODES.items()},
            **dict.fromkeys(OTHER_MODES, False),
            "include_prompt": True,
        },
    }
