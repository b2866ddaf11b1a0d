"""Relative: an architecture of Llama's kind, which a row of llama.py or moe.py describes."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from recipes.common.hf.family import ORIGINAL, ConfigFile, Family, Selection, Table, scaling_json
from recipes.common.hf.layer_kinds import ALIKE, Layers, kinds_of, layer_fields, period_of
from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError
from zoo.llama_relatives import Config
from zoo.options.compute_options import ComputeOptions
from zoo.options.rope_scaling import Dynamic, LongRope

# The format is explained in tensors.py, the letters in zoo/transformer.py. Their weights are [out,
# in] and merge several of our dims: our q is [D, N, H], their q_proj [N·H, D].
ATTENTION = "model.layers.{}.self_attn"
TENSORS = {
    "embed": ("model.embed_tokens.weight", "VD", "V D"),
    "layers/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", "D", "D"),
    "layers/attention/q": (f"{ATTENTION}.q_proj.weight", "DNH", "NH D"),
    "layers/attention/k": (f"{ATTENTION}.k_proj.weight", "DKH", "KH D"),
    "layers/attention/v": (f"{ATTENTION}.v_proj.weight", "DKH", "KH D"),
    "layers/attention/o": (f"{ATTENTION}.o_proj.weight", "NHD", "D NH"),
    "layers/attention/q_bias": (f"{ATTENTION}.q_proj.bias", "NH", "NH"),
    "layers/attention/k_bias": (f"{ATTENTION}.k_proj.bias", "KH", "KH"),
    "layers/attention/v_bias": (f"{ATTENTION}.v_proj.bias", "KH", "KH"),
    "layers/attention/o_bias": (f"{ATTENTION}.o_proj.bias", "D", "D"),
    "layers/attention/q_norm/scale": (f"{ATTENTION}.q_norm.weight", "H", "H"),
    "layers/attention/k_norm/scale": (f"{ATTENTION}.k_norm.weight", "H", "H"),
    "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/mlp/gate": ("model.layers.{}.mlp.gate_proj.weight", "DF", "F D"),
    "layers/mlp/up": ("model.layers.{}.mlp.up_proj.weight", "DF", "F D"),
    "layers/mlp/down": ("model.layers.{}.mlp.down_proj.weight", "FD", "D F"),
    "layers/mlp/gate_bias": ("model.layers.{}.mlp.gate_proj.bias", "F", "F"),
    "layers/mlp/up_bias": ("model.layers.{}.mlp.up_proj.bias", "F", "F"),
    "layers/mlp/down_bias": ("model.layers.{}.mlp.down_proj.bias", "D", "D"),
    "final_norm/scale": ("model.norm.weight", "D", "D"),
    "unembed": ("lm_head.weight", "VD", "V D"),
}

SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
}
UNUSED = {  # features that Transformer lacks, unless a row has them → values that leave them off
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "num_experts": (),
    "num_local_experts": (),
    "is_causal": (True,),  # of embedding models, whose positions attend to later ones too
    "auto_map": (),  # the folder's own code
}


def in_layers(tensors: Table, stack: str, numbers: list[int], period: int) -> Table:
    """The tensors of a stack, whose layers have these numbers in each period.

    Args:
      tensors: by path in a layer.
    """
    layers = f"{{:{','.join(map(str, numbers))}/{period}}}"
    return {
        f"layers/{stack}/{path}": (name.replace("{}", layers, 1), ours, theirs)
        for path, (name, ours, theirs) in tensors.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relative:
    """An architecture that differs from Llama by switches of the Config."""

    architecture: str  # class in transformers
    model_type: str
    config: type = Config
    entry: str = "transformer"
    tensors: Callable[[Any], Table] = lambda config: TENSORS
    layers: Layers = ALIKE
    theta: float = 10_000.0  # of files without one
    partial: bool = False  # whether rotary embeddings may rotate a part of the head dim
    even: bool = False  # whether transformers insists that num_attention_heads divides hidden_size
    sizes: dict[str, str] = dataclasses.field(default_factory=lambda: SIZES)
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of all its Configs
    options: dict[str, str] = dataclasses.field(default_factory=dict)  # other fields → their keys
    # Keys that files may leave out, with transformers' values where these are not None or False.
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # key → another name of it
    # For keys that are not a field's value: keys, file → those that the tables name; and back.
    keys_from: Callable[[dict[str, Any], pathlib.Path], dict[str, Any]] = lambda keys, path: keys
    keys_to: Callable[[dict[str, Any]], dict[str, Any]] = lambda keys: keys
    # For fields that are no number of a key: file → fields of Config; and Config → their keys.
    fields_from: Callable[[ConfigFile], dict[str, Any]] = lambda file: {}
    fields_to: Callable[[Any], dict[str, Any]] = lambda config: {}
    own_code: bool = False  # whether published folders have code too, which computes the same
    refused: dict[str, tuple] = dataclasses.field(default_factory=dict)  # as UNUSED
    formats: tuple[str, ...] = ()  # quantization methods that are read
    # Fields of Config for training, which no config.json holds → the value of an imported model.
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    select: Callable[[dict[str, Stored], Any], Selection] = Selection  # as in Family

    @property
    def unused(self) -> dict[str, tuple]:
        """Keys whose features the architecture lacks → values that leave them off."""
        read = {*self.options.values(), *self.sizes.values(), *self.aliases.values()}
        read |= {"partial_rotary_factor"} if self.partial else set()
        read |= {"auto_map"} if self.own_code else set()
        return {key: values for key, values in UNUSED.items() if key not in read} | self.refused

    def config_from(self, keys: dict[str, Any], path: pathlib.Path) -> Any:
        """Our Config for a config.json. Raises UserError if it would not compute the model exactly."""
        keys = self.defaults | keys
        for key, alias in self.aliases.items():
            if keys.get(key) is None:
                keys |= {key: keys.get(alias)}
        keys = self.keys_from(keys, path)
        file = ConfigFile(keys, path, self.entry)
        file.refuse(self.unused)
        embed = file.number("hidden_size")
        heads = file.number("num_attention_heads")
        if self.even and embed % heads:
            raise file.refused("num_attention_heads", heads)
        sizes = file.sizes(self.sizes, num_kv_heads=heads, head_dim=embed // heads)
        if sizes.get("experts_per_token", 0) > sizes.get("num_experts", 0):
            raise file.refused("num_experts_per_tok", sizes["experts_per_token"])
        rotary = file.rotary_dims(sizes["head_dim"]) if self.partial else 0
        options = {field: self._option(file, field, key) for field, key in self.options.items()}
        kinds = self.layers.read(file, self.theta, self.partial)
        more = self.fields_from(file)
        try:
            return self.config(
                **sizes,
                **layer_fields(kinds, self.config),
                **({"rotary_dims": rotary} if self.partial else {}),
                **options,
                **self.fixed,
                **self.training,
                **more,
                norm_eps=file.number("rms_norm_eps", 1e-6, float),
                tie_embeddings=keys.get("tie_word_embeddings") is True,
            )
        except ValueError as error:
            raise UserError(f"{path} makes no sense: {error}; use its own config.json") from None

    def _option(self, file: ConfigFile, field: str, key: str) -> Any:
        default = self.config.__dataclass_fields__[field].default
        value = file.keys.get(key)
        if value is None:
            return default
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise file.refused(key, value)
            return value
        return file.number(key, None, int if isinstance(default, int) else float)

    def config_json(self, config: Any, context: int) -> dict[str, Any]:
        """Their config.json, with keys that old and new versions of transformers read.

        `lost` names what they can't say.
        """
        written = common_json(config, self.architecture, self.model_type, self.sizes, context)
        options = {key: getattr(config, field) for field, key in self.options.items()}
        written |= {key: value for key, value in options.items() if value is not None}
        if self.partial:
            written["partial_rotary_factor"] = config.rotary_dim / config.head_dim
        return self.keys_to(written | self.layers.write(kinds_of(config)) | self.fields_to(config))

    def lost(self, config: Any) -> list[str]:
        """The fields of a Config that differ when its config.json is read again."""
        written = self.config_json(config, 1)
        try:
            read = self._computed(self.config_from(written, pathlib.Path("config.json")))
        except UserError:
            return [self.architecture]
        computed = self._computed(config)
        return [f"{name}={value!r}" for name, value in computed.items() if read[name] != value]

    def _computed(self, config: Any) -> dict[str, Any]:
        """What a Config computes, by field."""
        kinds = {"layer_kinds", "sliding_window", "rope_theta", "rope_scaling"}
        skipped = {*ComputeOptions.__dataclass_fields__, *self.training} | kinds
        names = config.__dataclass_fields__.keys() - skipped
        return {name: getattr(config, name) for name in sorted(names)} | {
            "layer_kinds": period_of(kinds_of(config))
        }

    @property
    def family(self) -> Family:
        return Family(
            entry=self.entry,
            architectures={self.architecture: self.model_type},
            tensors=self.tensors,
            config_from=self.config_from,
            config_json=self.config_json,
            lost=self.lost,
            formats=self.formats,
            fixed=self.fixed,
            checked=(*self.unused, *self.defaults),
            select=self.select,
        )


def common_json(
    config: Any, architecture: str, model_type: str, sizes: dict[str, str], context: int
) -> dict[str, Any]:
    """The keys that all architectures share.

    Args:
      sizes: a table like SIZES.
    """
    kind = next((kind for kind in config.kinds if kind.rope_theta is not None), config.kinds[0])
    scaling = kind.rope_scaling
    # transformers refuses null, and has a default, which no layer uses.
    theta = {} if kind.rope_theta is None else {"rope_theta": kind.rope_theta}
    original = {}
    if isinstance(scaling, Dynamic):  # its length is the one trained on
        context = scaling.original_length
    elif isinstance(scaling, LongRope):  # Phi-3's older files have it here
        original = {ORIGINAL: scaling.original_length}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{key: getattr(config, ours) for ours, key in sizes.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        **theta,
        "rope_scaling": scaling_json(scaling),
        **original,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": context,
        "torch_dtype": "float32",
    }
