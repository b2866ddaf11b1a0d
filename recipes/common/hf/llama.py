"""Llama and its relatives (zoo/transformer.py): a row for each architecture, and how a row is read.

moe.py has the rows with experts.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from recipes.common.hf import vision
from recipes.common.hf.family import (
    GLOBAL,
    LOCAL,
    ORIGINAL,
    ConfigFile,
    Family,
    Selection,
    Table,
    scaling_json,
)
from recipes.common.hf.tensors import Stored
from recipes.common.runtime.errors import UserError
from zoo.config import Compute
from zoo.layers import Dynamic, Kind, LongRope
from zoo.transformer import Config

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
JOINT_NORMS = {  # of all heads
    "layers/attention/q_norm/scale": (f"{ATTENTION}.q_norm.weight", "NH", "NH"),
    "layers/attention/k_norm/scale": (f"{ATTENTION}.k_norm.weight", "KH", "KH"),
}
OLMO2 = TENSORS | JOINT_NORMS
OLMO2 |= {
    "layers/post_attention_norm/scale": (
        "model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/post_mlp_norm/scale": ("model.layers.{}.post_feedforward_layernorm.weight", "D", "D"),
}  # fmt: skip
FUSED_MLP = {
    "layers/mlp/gate": ("model.layers.{}.mlp.gate_up_proj.weight", "DF", "#F D 0/2"),
    "layers/mlp/up": ("model.layers.{}.mlp.gate_up_proj.weight", "DF", "#F D 1/2"),
}


def phi3_tensors(config: Any) -> Table:
    """One tensor has q, k and v, and one has gate and up."""
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    rows = q_rows + 2 * kv_rows
    name = f"{ATTENTION}.qkv_proj.weight"
    return (
        TENSORS
        | FUSED_MLP
        | {
            "layers/attention/q": (name, "DNH", f"NH D +0/{rows}"),
            "layers/attention/k": (name, "DKH", f"KH D +{q_rows}/{rows}"),
            "layers/attention/v": (name, "DKH", f"KH D +{q_rows + kv_rows}/{rows}"),
        }
    )


def glm_tensors(config: Any) -> Table:
    """Rotary pairs are neighbors, and one tensor has gate and up."""
    pairs = f"{config.rotary_dim}~H"
    return (
        TENSORS
        | FUSED_MLP
        | {
            "layers/attention/q": (f"{ATTENTION}.q_proj.weight", "DNH", f"NH D {pairs}"),
            "layers/attention/k": (f"{ATTENTION}.k_proj.weight", "DKH", f"KH D {pairs}"),
            "layers/attention/q_bias": (f"{ATTENTION}.q_proj.bias", "NH", f"NH {pairs}"),
            "layers/attention/k_bias": (f"{ATTENTION}.k_proj.bias", "KH", f"KH {pairs}"),
        }
    )


GLM4_NORMS = {
    "layers/post_attention_norm/scale": (
        "model.layers.{}.post_self_attn_layernorm.weight", "D", "D"),
    "layers/post_mlp_norm/scale": ("model.layers.{}.post_mlp_layernorm.weight", "D", "D"),
}  # fmt: skip

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
    "auto_map": (),  # the folder's own code
}


# ---- unlike layers -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layers:
    """How config.json says the kind of each layer."""

    read: Callable[[ConfigFile, float, bool], list[Kind]]  # the theta of files without one; partial
    write: Callable[[list[Kind]], dict[str, Any]] = lambda kinds: {}


def windowed(default: int | None, mixed: bool = False, switched: bool = False) -> Layers:
    """Layers that share their rotary embeddings; for the arguments, see ConfigFile.windows."""

    def read(file: ConfigFile, theta: float, partial: bool) -> list[Kind]:
        rope = file.rope(theta, partial, by_length=True)
        return [Kind(window, *rope) for window in file.windows(default, mixed, switched)]

    def write(kinds: list[Kind]) -> dict[str, Any]:
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


def types_of(kinds: list[Kind]) -> list[str]:
    return [LOCAL if kind.window else GLOBAL for kind in kinds]


ALIKE = Layers(windowed(None).read)  # without windows


def read_olmo3(file: ConfigFile, theta: float, partial: bool) -> list[Kind]:
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
    return [Kind(window, *ropes[LOCAL if window else GLOBAL]) for window in windows]


def write_olmo3(kinds: list[Kind]) -> dict[str, Any]:
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


def read_smollm3(file: ConfigFile, theta: float, partial: bool) -> list[Kind]:
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
        Kind(window, *rope) if rotates else Kind(window, None)
        for window, rotates in zip(file.windows(window, mixed=True), rotated, strict=False)
    ]


def write_smollm3(kinds: list[Kind]) -> dict[str, Any]:
    window = next(filter(None, (kind.window for kind in kinds)), None)
    return {
        "no_rope_layers": [int(kind.rope_theta is not None) for kind in kinds],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": types_of(kinds),
    }


def period_of(kinds: list[Kind]) -> tuple[Kind, ...]:
    """The shortest period of the layers' kinds."""
    sizes = range(1, len(kinds) + 1)
    return (*next(kinds[:size] for size in sizes if kinds[size:] == kinds[:-size]),)


def layer_fields(kinds: list[Kind]) -> dict[str, Any]:
    """Fields of Config: one kind for all layers, or the shortest period of kinds."""
    if len({*kinds}) > 1 or kinds[0].rope_theta is None:
        return {"layer_kinds": period_of(kinds)}
    return dict(zip(("sliding_window", "rope_theta", "rope_scaling"), kinds[0], strict=True))


def kinds_of(config: Any) -> list[Kind]:
    """The kind of each layer."""
    return [config.kinds[layer % len(config.kinds)] for layer in range(config.num_layers)]


# ---- rows ----------------------------------------------------------------------------------------

ATTENTION_BIAS = {"qkv_bias": "attention_bias", "o_bias": "attention_bias"}
LLAMA_BIASES = ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}
MULTIPLIERS = {
    "embed_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logits_divisor": "logits_scaling",
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
        try:
            return self.config(
                **sizes,
                **layer_fields(kinds),
                **({"rotary_dims": rotary} if rotary else {}),
                **options,
                **self.fixed,
                **self.training,
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
        return self.keys_to(written | self.layers.write(kinds_of(config)))

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
        skipped = {*Compute.__dataclass_fields__, *self.training} | kinds
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
        "rope_theta": kind.rope_theta,
        "rope_scaling": scaling_json(scaling),
        **original,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": context,
        "torch_dtype": "float32",
    }


BETA = "llama_4_scaling_beta"


def ministral3_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Ministral 3's keys, with the one of the queries' growth outside of the rotary ones."""
    return keys | {BETA: ConfigFile(keys, path, "transformer").rope_keys().get(BETA)}


def ministral3_json(keys: dict[str, Any]) -> dict[str, Any]:
    names = ("rope_theta", BETA)
    rope = (keys.pop("rope_scaling") or {}) | {name: keys.pop(name) for name in names}
    return keys | {"rope_parameters": rope}


GLM_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

ROWS = (  # the first that computes a Config is the one that exports it
    Relative(architecture="LlamaForCausalLM", model_type="llama", even=True, options=LLAMA_BIASES),
    Relative(
        architecture="MistralForCausalLM",
        model_type="mistral",
        layers=dataclasses.replace(windowed(4_096, mixed=True), write=windowed(4_096).write),
        defaults={"num_key_value_heads": 8},
    ),
    Relative(  # Mistral with a window in only some layers
        architecture="MinistralForCausalLM",
        model_type="ministral",
        layers=windowed(4_096, mixed=True),
        defaults={"num_key_value_heads": 8},
    ),
    Relative(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        layers=windowed(4_096, mixed=True, switched=True),
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 32},
    ),
    Relative(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        layers=windowed(4_096, mixed=True, switched=True),
        fixed={"qk_norm": True},
        options=ATTENTION_BIAS,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
    ),
    Relative(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        tensors=lambda config: OLMO2,
        fixed={"norms": "after", "qk_norm": True, "joint_qk_norm": True},
        options=ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Relative(  # with windows, and a rotary scaling in global layers alone
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        tensors=lambda config: OLMO2,
        layers=Layers(read_olmo3, write_olmo3),
        theta=500_000.0,
        fixed={"norms": "after", "qk_norm": True, "joint_qk_norm": True},
        options=ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    Relative(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        tensors=phi3_tensors,
        layers=windowed(4_096),
        partial=True,
        own_code=True,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, ORIGINAL: 4_096},
    ),
    Relative(  # without rotary embeddings in every fourth layer
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        layers=Layers(read_smollm3, write_smollm3),
        theta=2e6,
        options=LLAMA_BIASES,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    Relative(
        architecture="GraniteForCausalLM",
        model_type="granite",
        options=LLAMA_BIASES | MULTIPLIERS,
        defaults={"attention_multiplier": 1.0},
    ),
    Relative(
        architecture="GlmForCausalLM",
        model_type="glm",
        tensors=glm_tensors,
        partial=True,
        options={"qkv_bias": "attention_bias"},
        defaults=GLM_DEFAULTS,
    ),
    Relative(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        tensors=lambda config: glm_tensors(config) | GLM4_NORMS,
        partial=True,
        fixed={"norms": "both"},
        options={"qkv_bias": "attention_bias"},
        defaults=GLM_DEFAULTS,
    ),
    Relative(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        options={
            "qkv_bias": "attention_bias",
            "o_bias": "attention_out_bias",
            "mlp_bias": "mlp_bias",
        },
        defaults={"attention_bias": True, "num_key_value_heads": 8, "head_dim": 128},
    ),
    Relative(
        architecture="Ministral3ForCausalLM",
        model_type="ministral3",
        layers=windowed(4_096),
        keys_from=ministral3_keys,
        keys_to=ministral3_json,
        options={"query_growth": BETA},
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None,
        },
    ),
)  # fmt: skip
BY_TYPE = {row.model_type: row for row in ROWS}
MISTRAL = BY_TYPE["mistral"]


def mistral3_keys(keys: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The text model's keys in the config.json of a Mistral that also sees. Raises UserError."""
    text = vision.text_config(ConfigFile(keys, path, MISTRAL.entry))
    ConfigFile(text, path, MISTRAL.entry).refuse({"model_type": ("mistral", "ministral3")})
    return {"model_type": "mistral"} | text


def mistral3_config(keys: dict[str, Any], path: pathlib.Path) -> Config:
    return BY_TYPE[keys["model_type"]].config_from(keys, path)


def mistral3_text(stored: dict[str, Stored], config: Any) -> Selection:
    """The text model, whose embeddings are tied if no head is stored: files don't say it."""
    selection = vision.without_vision(stored, config)
    tied = not any(name.endswith("lm_head.weight") for name in selection.stored)
    return dataclasses.replace(selection, config=dataclasses.replace(config, tie_embeddings=tied))


FAMILIES = (
    *(row.family for row in ROWS),
    dataclasses.replace(
        MISTRAL.family,
        config_from=mistral3_config,
        architectures={"Mistral3ForConditionalGeneration": "mistral3"},
        text_keys=mistral3_keys,
        select=mistral3_text,
        canonical=vision.canonical,
    ),
)
