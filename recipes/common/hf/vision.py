"""Text models in folders of models that also see: their keys and tensors, without the vision tower."""

from typing import Any

from recipes.common.hf.family import ConfigFile, Selection
from recipes.common.hf.tensors import Stored

# The text model's tensors in such a file, older and newer → their names in a text model's.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# In newer files, after "model.".
VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "visual.")


# The start of the text model's names in memory of newer versions of transformers, and in newer files.
TEXT = "model.language_model."


def text_config(file: ConfigFile) -> dict[str, Any]:
    """The text model's keys in config.json. Raises UserError."""
    file.refuse({"is_causal": (True,)})  # of the text model, too
    text = file.keys.get("text_config")
    if not isinstance(text, dict):
        raise file.refused("text_config", text)
    return text


def in_whole(name: str) -> str:
    """The name of a text model's tensor in a model that also sees."""
    return TEXT + name.removeprefix("model.") if name.startswith("model.") else name


def without_vision(
    stored: dict[str, Stored], config: Any, why: str = "the zoo has the text model"
) -> Selection:
    text = {
        name: tensor
        for name, tensor in stored.items()
        if not name.removeprefix("model.").startswith(VISION_PREFIXES)
    }
    return Selection(text, config, f"The vision tower was left out; {why}.")


def canonical(name: str) -> str:
    """A stored tensor's name, as a text model has it."""
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    return TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
