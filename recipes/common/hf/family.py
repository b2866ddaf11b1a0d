"""Family: how the models of one entry are stored in Hugging Face folders. ConfigFile: a config.json.

folder.py lists all families.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Collection
from typing import Any

from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError
from zoo.layers import Linear, Llama3, RopeScaling, Yarn

Table = dict[str, tuple[str, str, str]]  # see tensors.py

ORIGINAL = "original_max_position_embeddings"
# Their names for the numbers of a rope scaling, in the order of attention.Kind.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
YARN = ("factor", "beta_fast", "beta_slow", ORIGINAL, "truncate", "attention_factor")


@dataclasses.dataclass(frozen=True)
class Selection:
    """The tensors of a folder that its model reads."""

    stored: dict[str, Stored]
    config: Any  # the model's Config, which may depend on the tensors that exist
    left_out: str = ""  # a sentence about the others; empty: there are none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Architectures of `transformers` that an entry computes, and how they are stored.

    `config_from` refuses any config.json that the entry can't compute exactly, and names the key;
    `config_json` refuses any Config that no architecture computes. Both raise UserError.
    """

    entry: str
    architectures: dict[str, str]  # class in transformers → its model_type
    tensors: Callable[[Any], Table]  # of a Config
    config_from: Callable[[dict[str, Any], pathlib.Path], Any]  # keys, file for errors → Config
    config_json: Callable[[Any, int], dict[str, Any]]  # Config, positions trained on → keys
    checked: Collection[str] = ()  # keys that config_from compares and that no Config holds
    context: str = "max_position_embeddings"  # the key for the number of positions trained on
    formats: tuple[str, ...] = ()  # quantization methods that are read
    # Tensors that may be stored although the model lacks them: endings of names of buffers that are
    # computed, and copies, name → the name of the tensor that must equal it.
    computed: tuple[str, ...] = ("rotary_emb.inv_freq",)
    tied: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"}
    )
    copies: Callable[[Any], dict[str, str]] = lambda config: {}  # more copies, by Config
    canonical: Callable[[str], str] = str  # a stored tensor's name → its name in `tensors`
    # For folders with more than a language model: keys, file → the keys for config_from; and which
    # tensors are read.
    text_keys: Callable[[dict[str, Any], pathlib.Path], dict[str, Any]] = lambda keys, file: keys
    select: Callable[[dict[str, Stored], Any], Selection] = Selection
    other_files: Callable[[Any], dict[str, Any]] = lambda config: {}  # name → JSON, by Config
    # For PEFT's adapters:
    in_out: bool = False  # whether projections are stored [in, out]
    peft_name: Callable[[str], str] = str  # a name in `tensors` → its name in an adapter
    head: str = ""  # the module that is stored with an adapter whose run trained a new head
    with_head: Callable[[Any, dict[str, tuple[int, ...]]], Any] = lambda config, shapes: config


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """The keys of a config.json, with transformers' defaults. Methods raise UserError."""

    keys: dict[str, Any]
    path: pathlib.Path
    entry: str  # its zoo file is named in errors

    def with_keys(self, **keys: Any) -> "ConfigFile":
        """Returns the same file with some keys changed."""
        return dataclasses.replace(self, keys=self.keys | keys)

    def refused(self, key: str, value) -> UserError:
        return UserError(
            f"{self.path} has {key} {json.dumps(value)}, which zoo/{self.entry}.py does not "
            "implement; use a different model"
        )

    def refuse(self, unused: dict[str, tuple]) -> None:
        """Raises if a key has another value than the given ones; null counts as absent."""
        for key, values in unused.items():
            if self.keys.get(key) is not None and self.keys[key] not in values:
                raise self.refused(key, self.keys[key])

    def number(self, key: str, default=None, kind: type = int) -> Any:
        """A number > 0; null counts as absent."""
        value: Any = self.keys.get(key)
        value = default if value is None else value
        if type(value) not in (int, kind) or not 0 < value < math.inf:
            raise UserError(
                f"{self.path} has {key} {json.dumps(value)}, which must be a number > 0; use this "
                "model's config.json"
            )
        return kind(value)

    def sizes(self, table: dict[str, str], **defaults: int | None) -> dict[str, int]:
        """Fields of Config, by a table like SIZES; raises if a key without a default is absent."""
        found = {ours: self.number(key, defaults.get(ours)) for ours, key in table.items()}
        if found["head_dim"] % 2:
            raise self.refused("head_dim", found["head_dim"])
        if found["num_heads"] % found["num_kv_heads"]:
            raise self.refused("num_key_value_heads", found["num_kv_heads"])
        return found

    def rope(self, usual: float = 10_000.0) -> tuple[float, RopeScaling | None]:
        """(theta, scaling) from rope_theta and rope_scaling or, in newer files, rope_parameters.

        The scaling has transformers' defaults.

        Args:
          usual: the theta of files without one.
        """
        # If both exist, transformers uses the older one.
        key = "rope_scaling" if self.keys.get("rope_scaling") else "rope_parameters"
        rope = self.keys.get(key) or {}
        if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
            raise self.refused(key, rope)  # for instance, one for each kind of layer
        rope = {"rope_theta": self.keys.get("rope_theta"), "rope_type": rope.get("type")} | rope
        if self.keys.get(ORIGINAL) is not None:
            rope[ORIGINAL] = self.keys[ORIGINAL]
        inner = dataclasses.replace(self, keys=rope)
        types = ("default", "llama3", "linear", "yarn")
        inner.refuse({"partial_rotary_factor": (1,), "rope_type": types})
        theta = inner.number("rope_theta", usual, float)
        match rope["rope_type"]:
            case "linear":
                return theta, Linear(inner.number("factor", None, float))
            case "llama3":
                factor, low, high = (inner.number(name, None, float) for name in LLAMA3[:3])
                original = inner.number(ORIGINAL, self.keys.get("max_position_embeddings"))
                return theta, Llama3(factor, low, high, original)
            case "yarn":
                return theta, inner.yarn(self.keys.get("max_position_embeddings"))
        return theta, None

    def yarn(self, context: int | None) -> Yarn:
        """A YaRN scaling from the keys of rope_scaling; `context` is max_position_embeddings."""
        original = self.number(ORIGINAL, context)
        stated = self.keys.get("factor", 0) is not None  # null means the ratio of the two lengths
        factor = self.number("factor", None if stated or not context else context / original, float)
        fast, slow = self.number("beta_fast", 32, float), self.number("beta_slow", 1, float)
        truncate = self.keys.get("truncate", True)
        if truncate not in (True, False, None):
            raise self.refused("truncate", truncate)

        def longer(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        magnitude, names = longer(1.0), ("mscale", "mscale_all_dim")
        if all(self.keys.get(name) for name in names):
            mscale, all_dim = (self.number(name, None, float) for name in names)
            magnitude = longer(mscale) / longer(all_dim)
        magnitude = self.number("attention_factor", magnitude, float)
        return Yarn(factor, fast, slow, original, bool(truncate), magnitude)

    def windows(
        self, default: int | None, mixed: bool = False, switched: bool = False
    ) -> list[int | None]:
        """Each layer's sliding window, which includes the position itself; None: no window.

        Args:
          default: what an absent sliding_window means; None: this architecture has no windows.
          mixed: whether layer_types may limit windows to some layers.
          switched: whether windows need use_sliding_window and start at layer max_window_layers.
        """
        layers, types = self.number("num_hidden_layers"), self.keys.get("layer_types")
        window = None if default is None else self.keys.get("sliding_window", default)
        if switched and not self.keys.get("use_sliding_window"):
            window = None
        window = None if window is None else self.number("sliding_window", window)
        if types:
            if not isinstance(types, list) or len(types) != layers:
                raise self.refused("layer_types", types)
            known = {"full_attention": None} | ({"sliding_attention": window} if window else {})
            for name in types:
                if not isinstance(name, str) or name not in known:
                    raise self.refused("layer_types", name)
            found = [known[name] for name in types]
            if found != [window] * layers and not mixed:
                raise self.refused("layer_types", types)
            return found
        full = self.keys.get("max_window_layers", 28) if switched and window else 0
        full = min(self.number("max_window_layers", 28), layers) if full else 0  # the first layers
        return [None] * full + [window] * (layers - full)
