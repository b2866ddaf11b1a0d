"""The one table of zoo entries. Add a line here for a new one: zoo/README.md has the five steps."""

import importlib
import inspect
import types
from typing import Any, NamedTuple


class Entry(NamedTuple):
    model: str  # class in zoo/<entry>.py
    data: str  # module whose `load` makes its dataset
    unit: str  # of its loss, on cards


ENTRIES = {  # the name of its zoo file and of its recipe → what else there is to know
    "dot_relu_dot": Entry("DotReluDot", "data.synthetic", "mean squared error"),
    "mlp": Entry("MLP", "data.digits", "nats an image"),
    "transformer": Entry("Transformer", "data.text", "nats a token"),
    "moe": Entry("MoE", "data.text", "nats a token"),
}


def zoo_file(name: str) -> types.ModuleType:
    """zoo/<name>.py, imported now: Config, SIZES, LOGICAL_AXES, IN_USE, RULES and the model."""
    return importlib.import_module(f"zoo.{name}")


def model(name: str) -> type:
    """The entry's nnx.Module; it takes a config and rngs."""
    return getattr(zoo_file(name), ENTRIES[name].model)


def dataset(name: str, known: dict[str, Any]):
    """The entry's data.Dataset.

    Args:
      known: a run's flags and fields of its model's config; `load` takes those that it names.

    Raises DataError if the data is not here.
    """
    load = importlib.import_module(ENTRIES[name].data).load
    wanted = inspect.signature(load).parameters
    return load(**{key: value for key, value in known.items() if key in wanted})
