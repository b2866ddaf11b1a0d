"""The zoo's entries by name. A new entry adds one line here; recipes/docs/new_entry.md lists the five steps."""

import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from zoo.core.layers import RopeScaling
from zoo.options.compute_options import ComputeOptions


class Entry(NamedTuple):
    model: str  # class in zoo/<entry>.py
    data: str  # module whose `load` makes its dataset
    unit: str  # unit of its loss, for cards
    file: str = ""  # the zoo file that recipes use, if it has another name


ENTRIES = {  # name of the zoo file and of the recipe → Entry
    "dot_relu_dot": Entry("DotReluDot", "data.synthetic", "mean squared error"),
    "mlp": Entry("MLP", "data.digits", "nats an image"),
    "transformer": Entry("Transformer", "data.text", "nats a token", "llama_relatives"),
    "moe": Entry("MoE", "data.text", "nats a token"),
    "gpt2": Entry("GPT2", "data.text", "nats a token"),
    "gemma3": Entry("Gemma3", "data.text", "nats a token"),
    "gemma3_vision": Entry("Gemma3Vision", "data.pictured", "nats a token"),
    "gpt_oss": Entry("GptOss", "data.text", "nats a token"),
    "gemma4": Entry("Gemma4", "data.text", "nats a token"),
    "gemma4_vision": Entry("Gemma4Vision", "data.pictured", "nats a token"),
    "deepseek": Entry("DeepSeek", "data.text", "nats a token"),
    "qwen3_next": Entry("Qwen3Next", "data.text", "nats a token"),
    "hybrid": Entry("Hybrid", "data.text", "nats a token"),
    "vit": Entry("ViT", "data.images", "nats an image"),
    "bert": Entry("Bert", "data.masked", "nats a masked token"),
    "siglip": Entry("Siglip", "data.captions", "nats a pair"),
}


def zoo_file(name: str) -> types.ModuleType:
    """Imports the entry's file of the zoo: Config, SIZES, RULES and the model."""
    return importlib.import_module(f"zoo.{ENTRIES[name].file or name}")


def model(name: str) -> type:
    """The entry's nnx.Module, which takes a config and rngs."""
    return getattr(zoo_file(name), ENTRIES[name].model)


def sizes(name: str) -> dict[str, Callable[[], Any]]:
    """The entry's named sizes: those in its file, and published ones of its relatives."""
    from zoo.sizes import BERT, HYBRID, MOE, SIGLIP, TRANSFORMER

    relatives = {
        "transformer": TRANSFORMER,
        "moe": MOE,
        "hybrid": HYBRID,
        "bert": BERT,
        "siglip": SIGLIP,
    }
    return relatives.get(name) or zoo_file(name).SIZES


def config_json(config) -> dict[str, Any]:
    """A Config's fields as JSON, the architecture before zoo.core.config.ComputeOptions's.

    Rotary scalings are lists, from which Config makes them again.
    """

    def plain(value):
        if isinstance(value, RopeScaling):
            return value.as_tuple()
        return tuple(map(plain, value)) if isinstance(value, tuple) else value

    names = [field.name for field in dataclasses.fields(config)]
    names.sort(key=lambda name: name in ComputeOptions.__dataclass_fields__)
    return {name: plain(getattr(config, name)) for name in names}


def example(name: str, config: Any) -> dict[str, np.ndarray]:
    """A row of a batch of an entry without tokens."""
    filler = vars(importlib.import_module(ENTRIES[name].data)).get("filler")
    if filler is None:
        return dataset(name, vars(config) | {"seed": 0}).filler
    return filler(
        **{field: getattr(config, field) for field in inspect.signature(filler).parameters}
    )


def dataset(name: str, options: dict[str, Any]):
    """The entry's data.Dataset.

    Args:
      options: a run's flags and its config's fields.

    Raises DataError if the data can't be loaded.
    """
    return with_options(importlib.import_module(ENTRIES[name].data).load, options)


def with_options(load: Callable, options: dict[str, Any]):
    """What a module's `load` returns for those of the options that it has parameters for."""
    wanted = inspect.signature(load).parameters
    return load(**{key: value for key, value in options.items() if key in wanted})
