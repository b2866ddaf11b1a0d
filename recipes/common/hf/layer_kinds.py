"""How config.json says the kind of each layer of Llama and its relatives: windows, rotary embeddings."""

import dataclasses
from collections.abc import Callable
from typing import Any

from recipes.common.hf.family import GLOBAL, LOCAL, ConfigFile, scaling_json
from zoo.core.layers import AttentionType


@dataclasses.dataclass(frozen=True)
class Layers:
    """How config.json says the kind of each layer."""

    read: Callable[
        [ConfigFile, float, bool], list[AttentionType]
    ]  # the theta of files without one; partial
    write: Callable[[list[AttentionType]], dict[str, Any]] = lambda kinds: {}


def windowed(default: int | None, mixed: bool = False, switched: bool = False) -> Layers:
    """Layers that share their rotary embeddings; for the arguments, see ConfigFile.windows."""

    def read(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
        rope = file.rope(theta, partial, by_length=True)
        return [AttentionType(window, *rope) for window in file.windows(default, mixed, switched)]

    def write(kinds: list[AttentionType]) -> dict[str, Any]:
        windows = [kind.window for kind in kinds]
        window = next(filter(None, windows), None)
        written: dict[str, Any] = {"sliding_window": window}
        if switched:
            full = windows.index(window) if window else 28  # the first layers, without a window
            written |= {"use_sliding_window": window is not None, "max_window_layers": full}
        if mixed and len({*windows}) > 1:
            written["layer_types"] = types_of(kinds)
        return written

    return Layers(read, write)


def types_of(kinds: list[AttentionType]) -> list[str]:
    return [LOCAL if kind.window else GLOBAL for kind in kinds]


ALIKE = Layers(windowed(None).read)  # without windows


def read_olmo3(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
    count = file.number("num_hidden_layers")
    if file.keys.get("layer_types") is None:
        file = file.with_keys(layer_types=[LOCAL if (n + 1) % 4 else GLOBAL for n in range(count)])
    windows = file.windows(4_096, mixed=True)
    # Versions of transformers disagree on another theta of local layers in files with older keys.
    if (
        file.keys.get("rope_parameters") is None
        and file.number("rope_theta", theta, float) != theta
    ):
        raise file.refused("rope_theta", file.keys["rope_theta"])
    ropes = file.ropes({LOCAL: ("rope_theta", theta), GLOBAL: ("rope_theta", theta)})
    return [AttentionType(window, *ropes[LOCAL if window else GLOBAL]) for window in windows]


def write_olmo3(kinds: list[AttentionType]) -> dict[str, Any]:
    windows = [kind.window for kind in kinds]
    written = {
        "sliding_window": next(filter(None, windows), None),
        "layer_types": types_of(kinds),
        "rope_scaling": None,
    }
    ropes = {
        name: {"rope_type": "default", "rope_theta": kind.rope_theta}
        | (scaling_json(kind.rope_scaling) or {})
        for name, kind in zip(types_of(kinds), kinds, strict=True)
    }
    return written | {"rope_parameters": ropes}


def read_smollm3(file: ConfigFile, theta: float, partial: bool) -> list[AttentionType]:
    count = file.number("num_hidden_layers")
    interval = file.number("no_rope_layer_interval", 4)
    rotated = file.keys.get("no_rope_layers")
    if rotated is None:
        rotated = [int((n + 1) % interval != 0) for n in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or not {*rotated} <= {0, 1}:
        raise file.refused("no_rope_layers", rotated)
    window = file.keys.get("sliding_window") if file.keys.get("use_sliding_window") else None
    if file.keys.get("layer_types") is None:
        types = [LOCAL if window and not rotates else GLOBAL for rotates in rotated[:count]]
        file = file.with_keys(layer_types=types)
    rope = file.rope(theta, partial, by_length=True)
    return [
        AttentionType(window, *rope) if rotates else AttentionType(window, None)
        for window, rotates in zip(file.windows(window, mixed=True), rotated, strict=False)
    ]


def write_smollm3(kinds: list[AttentionType]) -> dict[str, Any]:
    window = next(filter(None, (kind.window for kind in kinds)), None)
    return {
        "no_rope_layers": [int(kind.rope_theta is not None) for kind in kinds],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types_of(kinds),
    }


def period_of(kinds: list[AttentionType]) -> tuple[AttentionType, ...]:
    """The shortest period of the layers' kinds."""
    sizes = range(1, len(kinds) + 1)
    return (*next(kinds[:size] for size in sizes if kinds[size:] == kinds[:-size]),)


def layer_fields(kinds: list[AttentionType], config: type) -> dict[str, Any]:
    """Fields of a Config: one kind for all layers, or the shortest period of kinds.

    Args:
      config: its class.
    """
    has_kinds = "layer_kinds" in config.__dataclass_fields__
    if has_kinds and (len({*kinds}) > 1 or kinds[0].rope_theta is None):
        return {"layer_kinds": period_of(kinds)}
    return dict(zip(("sliding_window", "rope_theta", "rope_scaling"), kinds[0], strict=True))


def kinds_of(config: Any) -> list[AttentionType]:
    """The kind of each layer."""
    return [config.kinds[layer % len(config.kinds)] for layer in range(config.num_layers)]
