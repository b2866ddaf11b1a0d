"""Folders of sentence-transformers: a model of `transformers`, and how to make a vector of a text.

modules.json lists what follows the model: Pooling, with a config.json in a subfolder, and Normalize.
"""

import json
import pathlib
from typing import Any

from recipes.common.hf import tensors
from recipes.common.runtime.errors import UserError

MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
MODES = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
OTHER_MODES = (
    *("pooling_mode_max_tokens", "pooling_mode_mean_sqrt_len_tokens"),
    *("pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"),
)


def read(config: pathlib.Path) -> dict[str, Any]:
    """Fields of Config from the modules.json beside a config.json; {} without one.

    Raises UserError for modules that the zoo does not implement.
    """
    file = config.with_name(MODULES)
    if not file.exists():
        return {}
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
    keys = tensors.read_json(pooling)
    modes = [mode for mode, key in MODES.items() if keys.get(key)]
    modes += [key for key in OTHER_MODES if keys.get(key)]
    modes = modes or [keys.get("pooling_mode")]
    if len(modes) != 1 or modes[0] not in MODES:
        raise UserError(
            f"{pooling} pools by {' and '.join(map(str, modes))}, which zoo/bert.py does not implement; "
            "use a model that pools by cls or mean"
        )
    return {"pooling": modes[0], "normalize": names[-1] == "Normalize"}


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
