"""Family: how the models of one entry are stored in Hugging Face folders. ConfigFile: a config.json.

folder.py lists all families.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError
from zoo.core.layers import Llama3, RopeScaling
from zoo.options.rope_scaling import Dynamic, Linear, LongRope, Yarn

Table = dict[str, tuple[str, str, str]]  # see tensors.py

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # kinds of layers

ORIGINAL = "original_max_position_embeddings"
PARTIAL = "partial_rotary_factor"
FURTHER = "num_nextn_predict_layers"
# Their names for the numbers of a rope scaling, in the order of their fields.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
YARN = ("factor", "beta_fast", "beta_slow", ORIGINAL, "truncate", "attention_factor")


@dataclasses.dataclass(frozen=True)
class Selection:
    """The tensors of a folder that its model reads."""

    stored: dict[str, Stored]
    config: Any  # the model's Config, which may depend on the tensors that exist
    left_out: str = ""  # a sentence about the others; empty: there are none


def leave_out_layers(
    stored: dict[str, Stored], config: Any, kept: int, stack: str = "model.layers"
) -> Selection:
    """Drops the layers from number `kept` on: MTP layers.

    Args:
      stack: the start of their names.
    """
    layer = re.compile(rf"{re.escape(stack)}\.(\d+)\.")
    numbers = {name: int(match[1]) for name in stored if (match := layer.match(name))}
    left = sorted({number for number in numbers.values() if number >= kept})
    stored = {name: tensor for name, tensor in stored.items() if numbers.get(name, 0) < kept}
    names = " and ".join(f"{stack}.{number}" for number in left)
    report = f"Left out {names}, for multi-token prediction; the zoo has at most one such layer."
    return Selection(stored, config, report if left else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Architectures of `transformers` that an entry computes, and how they are stored.

    `config_from` refuses any config.json that the entry can't compute exactly, and names the key.
    `config_json` may refuse a Config too, if `lost` does not name what can't be said. Both raise
    UserError.
    """

    entry: str
    architectures: dict[str, str]  # class in transformers → its model_type
    tensors: Callable[[Any], Table]  # of a Config
    config_from: Callable[[dict[str, Any], pathlib.Path], Any]  # keys, file for errors → Config
    config_json: Callable[[Any, int], dict[str, Any]]  # Config, positions trained on → keys
    lost: Callable[[Any], list[str]] = lambda config: []  # what of a Config these keys can't say
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of all its Configs
    checked: Collection[str] = ()  # keys that config_from reads although no export has them
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
    is_part: bool = False  # whether their model has modules that ours lacks, such as a tower
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

    def with_other_names(self, names: dict[str, str]) -> "ConfigFile":
        """Returns the same file with keys under one name.

        Args:
          names: a second name → the key, which it replaces in `transformers` where a file has both.
        """
        stated = {key: self.keys.get(other) for other, key in names.items()}
        return self.with_keys(**{key: x for key, x in stated.items() if x is not None})

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

    def labels(self) -> tuple[str, ...]:
        """Names of the classes; one that stands for two (ImageNet's crane) gets their numbers.

        Raises UserError if the model does not choose one of them.
        """
        self.refuse({"problem_type": ("single_label_classification",)})
        by_number = self.keys.get("id2label") or {}
        count = len(by_number) or self.number("num_labels", 2)
        numbers = {str(i) for i in range(count)}
        if not isinstance(by_number, dict) or (by_number and {*by_number} != numbers):
            raise UserError(
                f"{self.path} has an id2label without a name for each class from 0; use this model's "
                "config.json"
            )
        if count == 1 and self.keys.get("problem_type") is None:
            raise UserError(  # as transformers reads it
                f"{self.path} has one label and no problem_type, which is a regression (a reranker, for "
                f"example), and zoo/{self.entry}.py classifies; use a model with two or more labels"
            )
        names = [str(by_number.get(str(i), f"LABEL_{i}")) for i in range(count)]
        return tuple(
            name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)
        )

    def sizes(self, table: dict[str, str], **defaults: int | None) -> dict[str, int]:
        """Fields of Config, by a table like SIZES; raises if a key without a default is absent."""
        fields = {ours: self.number(key, defaults.get(ours)) for ours, key in table.items()}
        if fields["head_dim"] % 2:
            raise self.refused("head_dim", fields["head_dim"])
        if fields["num_heads"] % fields["num_kv_heads"]:
            raise self.refused("num_key_value_heads", fields["num_kv_heads"])
        return fields

    def rope_keys(self) -> dict[str, Any]:
        """Rotary settings: rope_scaling or, in newer files, rope_parameters, completed."""
        # If both exist, transformers uses the older one.
        key = "rope_scaling" if self.keys.get("rope_scaling") else "rope_parameters"
        rope = self.keys.get(key) or {}
        if not isinstance(rope, dict) or any(isinstance(v, dict) for v in rope.values()):
            raise self.refused(key, rope)  # for instance, one for each kind of layer
        outer = {name: self.keys.get(name) for name in ("rope_theta", PARTIAL)}
        rope = outer | {"rope_type": rope.get("type")} | rope
        if self.keys.get(ORIGINAL) is not None:
            rope[ORIGINAL] = self.keys[ORIGINAL]
        return rope

    def rotary_dims(self, head_dim: int) -> int:
        """How many dims of a head rotate; 0: all."""
        rope = dataclasses.replace(self, keys=self.rope_keys())
        usual = self.number("rotary_dim", head_dim) / head_dim  # MiniMax's older key
        dims = int(head_dim * rope.number(PARTIAL, usual, float))
        return 0 if dims == head_dim else dims

    def rope(
        self, usual: float = 10_000.0, partial: bool = False, by_length: bool = False
    ) -> tuple[float, RopeScaling | None]:
        """Returns (theta, scaling). The scaling has transformers' defaults.

        Args:
          usual: the theta of files without one.
          partial: whether a part of a head's dims may rotate.
          by_length: whether a scaling may depend on the length of rows.
        """
        rope = self.rope_keys()
        context = self.keys.get("max_position_embeddings")
        inner = dataclasses.replace(self, keys=rope)
        types = ("default", "llama3", "linear", "yarn")
        inner.refuse({"rope_type": types + ("dynamic", "longrope", "su") * by_length})
        if not partial:
            inner.refuse({PARTIAL: (1,)})
        theta = inner.number("rope_theta", usual, float)
        match rope["rope_type"]:
            case "linear":
                return theta, Linear(inner.number("factor", None, float))
            case "dynamic":
                original = self.number("max_position_embeddings")
                return theta, Dynamic(inner.number("factor", None, float), original)
            case "llama3":
                factor, low, high = (inner.number(name, None, float) for name in LLAMA3[:3])
                return theta, Llama3(factor, low, high, inner.number(ORIGINAL, context))
            case "yarn":
                return theta, inner.yarn(context)
            case "longrope" | "su":
                return theta, inner.longrope(context)
        return theta, None

    def ropes(
        self, thetas: dict[str, tuple[str, float]], scaled: Collection[str] = (GLOBAL,)
    ) -> dict[str, tuple[float, RopeScaling | None]]:
        """Returns kind of layer → (theta, scaling), from older keys or rope_parameters for each kind.

        An older rope_scaling replaces keys of the newer ones.

        Args:
          thetas: kind of layer → (the older key of its theta, the theta of files without one).
          scaled: the kinds of layers that an older rope_scaling is for.
        """
        newer, scaling = (self.keys.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
        if not isinstance(newer, dict) or not {*newer} <= {*thetas}:
            raise self.refused("rope_parameters", newer)
        # Versions of transformers disagree on the key `type`.
        if not isinstance(scaling, dict) or ("type" in scaling and "rope_type" not in scaling):
            raise self.refused("rope_scaling", scaling)
        by_kind = {}
        for name, (key, usual) in thetas.items():
            rope = newer.get(name) or {}
            if not isinstance(rope, dict):
                raise self.refused("rope_parameters", newer)
            rope = rope | (scaling if name in scaled else {})
            only = {"rope_theta": self.keys.get(key), "rope_scaling": None, "rope_parameters": rope}
            by_kind[name] = self.with_keys(**only, **{ORIGINAL: None}).rope(usual)
        return by_kind

    def longrope(self, context: int | None) -> LongRope:
        """A LongRope from the keys of rope_scaling; `context` is max_position_embeddings."""
        original = self.number(ORIGINAL, context)
        factor = self.number("factor", context / original if context else None, float)
        factors = {}
        for key in ("short_factor", "long_factor"):
            values = self.keys.get(key)
            if not isinstance(values, list) or not all(
                type(x) in (int, float) and 0 < x < math.inf for x in values
            ):
                raise self.refused(key, values)
            factors[key] = tuple(map(float, values))
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        magnitude = self.number("attention_factor", usual, float)
        return LongRope(factors["short_factor"], factors["long_factor"], original, magnitude)

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
            of_layers = [known[name] for name in types]
            if of_layers != [window] * layers and not mixed:
                raise self.refused("layer_types", types)
            return of_layers
        full = self.keys.get("max_window_layers", 28) if switched and window else 0
        full = min(self.number("max_window_layers", 28), layers) if full else 0  # the first layers
        return [None] * full + [window] * (layers - full)


def labels_json(labels: Sequence[str]) -> dict[str, Any]:
    """Their keys for the names of classes."""
    return {
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
    }


def scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Their rope_scaling for ours."""
    match scaling:
        case None:
            return None
        case Linear():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Dynamic():
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case LongRope():
            factors = {"short_factor": [*scaling.short], "long_factor": [*scaling.long]}
            others = {ORIGINAL: scaling.original_length, "attention_factor": scaling.magnitude}
            return {"rope_type": "longrope"} | factors | others
        case Yarn():
            numbers = dataclasses.astuple(scaling)
            return {"rope_type": "yarn"} | dict(zip(YARN, numbers, strict=True))
        case Llama3():
            numbers = dataclasses.astuple(scaling)
            return {"rope_type": "llama3"} | dict(zip(LLAMA3, numbers, strict=True))
