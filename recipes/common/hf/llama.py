"""The Llama family (zoo/transformer.py): Llama 2 and 3, Mistral, Ministral, Qwen 2 and 3, SmolLM.

A family is a module listed in folder.py. It has ENTRY, ARCHITECTURES, TIED, COMPUTED, CONTEXT,
canonical, tensors, config_from and config_json; some have more, for adapters and for folders that
hold more than a text model. A family rejects any config.json that its model can't compute exactly,
and names the key; ConfigFile helps all of them with that.
"""

import dataclasses
import json
import math
import pathlib
from typing import Any

from recipes.common.runtime.errors import UserError
from zoo.attention import Kind, kinds
from zoo.transformer import Config

ENTRY = "transformer"

ARCHITECTURES = {  # theirs → model_type
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",  # Mistral with a window in only some layers
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

# The format is explained in tensors.py, the letters in zoo/transformer.py. Their weights are [out,
# in] and merge several of our dims: our q is [D, N, H], their q_proj [N·H, D].
TENSORS = {
    "embed": ("model.embed_tokens.weight", "VD", "V D"),
    "layers/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", "D", "D"),
    "layers/attention/q": ("model.layers.{}.self_attn.q_proj.weight", "DNH", "NH D"),
    "layers/attention/k": ("model.layers.{}.self_attn.k_proj.weight", "DKH", "KH D"),
    "layers/attention/v": ("model.layers.{}.self_attn.v_proj.weight", "DKH", "KH D"),
    "layers/attention/o": ("model.layers.{}.self_attn.o_proj.weight", "NHD", "D NH"),
    "layers/attention/q_bias": ("model.layers.{}.self_attn.q_proj.bias", "NH", "NH"),
    "layers/attention/k_bias": ("model.layers.{}.self_attn.k_proj.bias", "KH", "KH"),
    "layers/attention/v_bias": ("model.layers.{}.self_attn.v_proj.bias", "KH", "KH"),
    "layers/attention/q_norm/scale": ("model.layers.{}.self_attn.q_norm.weight", "H", "H"),
    "layers/attention/k_norm/scale": ("model.layers.{}.self_attn.k_norm.weight", "H", "H"),
    "layers/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", "D", "D"),
    "layers/mlp/gate": ("model.layers.{}.mlp.gate_proj.weight", "DF", "F D"),
    "layers/mlp/up": ("model.layers.{}.mlp.up_proj.weight", "DF", "F D"),
    "layers/mlp/down": ("model.layers.{}.mlp.down_proj.weight", "FD", "D F"),
    "final_norm/scale": ("model.norm.weight", "D", "D"),
    "unembed": ("lm_head.weight", "VD", "V D"),
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # must be equal if embeddings are tied
COMPUTED = ("rotary_emb.inv_freq",)  # name endings of buffers that are computed, not read
CONTEXT = "max_position_embeddings"  # their name for the number of positions trained on

SIZES = {  # field of Config → theirs
    "vocab_size": "vocab_size",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
}
ORIGINAL = "original_max_position_embeddings"
# Their names for the numbers of a rope scaling, in the order of attention.Kind.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)
YARN = ("factor", "beta_fast", "beta_slow", ORIGINAL, "truncate", "attention_factor")
UNUSED = {  # features that our Transformer lacks → values that leave them off
    "hidden_act": ("silu",),
    "attention_bias": (False,),  # theirs includes a bias on o
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "num_experts": (),
    "num_local_experts": (),
    "auto_map": (),  # the folder's own code
}


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

    def rope(self, usual: float = 10_000.0) -> tuple[float, tuple | None]:
        """(theta, scaling) from rope_theta and rope_scaling or, in newer files, rope_parameters.

        The scaling has the form of attention.Kind, with transformers' defaults.

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
                return theta, ("linear", inner.number("factor", None, float))
            case "llama3":
                factor, low, high = (inner.number(name, None, float) for name in LLAMA3[:3])
                original = inner.number(ORIGINAL, self.keys.get("max_position_embeddings"))
                # If low is above high, transformers computes a step at low instead of a ramp.
                return theta, (factor, low, max(low, high), original)
            case "yarn":
                return theta, inner.yarn(self.keys.get("max_position_embeddings"))
        return theta, None

    def yarn(self, context: int | None) -> tuple:
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
        return ("yarn", factor, fast, slow, original, bool(truncate), magnitude)

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


def kinds_of(windows: list[int | None], theta: float, scaling: tuple | None) -> dict[str, Any]:
    """Fields of Config: one kind for all layers, or the shortest period of kinds."""
    period = period_of([Kind(window, theta, scaling) for window in windows])
    if len(period) == 1:
        return {"rope_theta": theta, "rope_scaling": scaling, "sliding_window": windows[0]}
    return {"layer_kinds": period}


def period_of(every: list[Kind]) -> tuple[Kind, ...]:
    """The shortest period of the layers' kinds."""
    return tuple(next(every[:p] for p in range(1, len(every) + 1) if every[p:] == every[:-p]))


def canonical(name: str) -> str:
    """A stored tensor's name, as `tensors` has it."""
    return name


def tensors(config: Config) -> dict[str, tuple[str, str, str]]:
    """TENSORS; all of these architectures have the same."""
    return TENSORS


def config_from(keys: dict[str, Any], file: pathlib.Path) -> Config:
    """Our Config for a config.json with one of the model_types above.

    Raises UserError if our Transformer can't compute the model exactly.
    """
    theirs, kind = ConfigFile(keys, file, ENTRY), keys["model_type"]
    theirs.refuse(UNUSED)
    embed, heads = theirs.number("hidden_size"), theirs.number("num_attention_heads")
    sizes = theirs.sizes(
        SIZES,
        num_kv_heads=heads if kind == "llama" else None,
        head_dim=128 if kind == "qwen3" else embed // heads,
    )
    default = None if kind == "llama" else 4_096
    windows = theirs.windows(default, kind != "llama", kind in ("qwen2", "qwen3"))
    return Config(
        **sizes,
        **kinds_of(windows, *theirs.rope()),
        norm_eps=theirs.number("rms_norm_eps", 1e-6, float),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tie_embeddings=keys.get("tie_word_embeddings") is True,
    )


def config_json(config: Config, context: int) -> dict[str, Any]:
    """Their config.json, with keys that old and new versions of transformers read.

    `context` is the number of positions trained on. Raises UserError if no architecture fits.
    """
    if config.qkv_bias and config.qk_norm:
        raise UserError(
            "no Hugging Face architecture has both qkv_bias and qk_norm; use a model with only one"
        )
    windows = windows_of(config)
    window, mixed = next(filter(None, windows), None), len({*windows}) > 1
    # Llama is Mistral without a window, but its heads must divide embed.
    mistral = window is not None or config.embed % config.num_heads
    kind = "ministral" if mixed else "mistral" if mistral else "llama"
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else kind
    architecture = next(name for name, k in ARCHITECTURES.items() if k == kind)
    theirs = common_json(config, architecture, kind, SIZES, context)
    if kind != "llama":
        theirs["sliding_window"] = window
    if kind in ("qwen2", "qwen3"):
        full = windows.index(window) if window else 28  # the first layers, without a window
        theirs |= {"use_sliding_window": window is not None, "max_window_layers": full}
    if mixed:
        names = {None: "full_attention", window: "sliding_attention"}
        theirs["layer_types"] = [names[w] for w in windows]
    return theirs


def windows_of(config: Any) -> list[int | None]:
    """Each layer's window. Raises UserError for kinds of layers that no architecture has."""
    period = kinds(config)
    for what, values in {
        "rotary embeddings": {kind[1:] for kind in period},
        "sliding windows": {kind.window for kind in period} - {None},
    }.items():
        if len(values) > 1:
            raise UserError(
                f"no Hugging Face architecture of this family has layers with different {what}; use "
                "a model whose layer_kinds share them"
            )
    return [period[layer % len(period)].window for layer in range(config.num_layers)]


def common_json(
    config: Any, architecture: str, model_type: str, sizes: dict[str, str], context: int
) -> dict[str, Any]:
    """The keys that all architectures share.

    Args:
      sizes: a table like SIZES.
    """
    kind = kinds(config)[0]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        **{key: getattr(config, ours) for ours, key in sizes.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": kind.rope_theta,
        "rope_scaling": scaling_json(kind.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": context,
        "torch_dtype": "float32",
    }


def scaling_json(scaling: tuple | None) -> dict[str, Any] | None:
    """Their rope_scaling for that of an attention.Kind."""
    match scaling:
        case None:
            return None
        case ("linear", factor):
            return {"rope_type": "linear", "factor": factor}
        case ("yarn", *numbers):
            return {"rope_type": "yarn"} | dict(zip(YARN, numbers, strict=True))
        case numbers:
            return {"rope_type": "llama3"} | dict(zip(LLAMA3, numbers, strict=True))
