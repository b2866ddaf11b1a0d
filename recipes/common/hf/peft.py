"""Adapters of the PEFT library: folders with adapter_config.json and adapter_model.safetensors.

Only plain LoRA is supported, W + A·B · lora_alpha / r; errors name the key of any other feature.
"""

import dataclasses
import json
import pathlib
from typing import Any

from data import tokenizer
from recipes.common.hf import tensors
from recipes.common.hf.folder import ENTRIES, FAMILIES, new_folder, read_onto, shapes_of
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import Tree, paths

CONFIG = "adapter_config.json"
STEM = "adapter_model"  # stem of its tensor files

READ = ("r", "lora_alpha", "base_model_name_or_path")
# Keys about training, keys that the tensors imply, and options of keys that are refused anyway.
IGNORED_KEYS = {
    *("auto_mapping", "inference_mode", "peft_version", "task_type", "lora_dropout"),
    *("target_modules", "exclude_modules", "megatron_core", "qalora_group_size", "layers_pattern"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
}
ALLOWED = {  # key → values without effect; other keys must be false or empty
    "peft_type": ("LORA",),
    "bias": ("none",),
    "revision": ("main",),
    # PEFT's other initializations also change the base.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}


def is_adapter(folder: pathlib.Path) -> bool:
    return (folder / CONFIG).is_file()


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter's folder: a source of A and B, like an adapter's checkpoint at step 0.

    The folder does not contain the base's config; `on` adds it, and with it the shapes.
    """

    path: pathlib.Path
    metadata: dict[str, Any]
    stored: dict[str, tensors.Stored]
    config: Any = None  # of the base with this adapter; None: the base is still unknown
    step = 0

    def on(self, base: dict[str, Any], config: Any) -> "Adapter":
        """Returns the adapter checked against its base. Raises UserError if it does not fit.

        Args:
          base: the base's metadata.
          config: the base's Config.
        """
        entry, fix = base["entry"], "the base that it was trained on (--base=PATH)"
        if entry not in ENTRIES or not hasattr(config, "lora_rank"):
            raise UserError(
                f"{self.path} is not an adapter for {entry!r} models, like its base; use {fix}"
            )
        check_exchange(entry)
        factors, has = table(entry, config), {name.split(".lora_")[0] for name in self.stored}
        targets = [
            path.split("/")[-2] for path, (name, *_) in factors.items()
            if path.endswith("/a") and name.format(0).split(".lora_")[0] in has
        ]  # fmt: skip
        if not targets:
            raise UserError(
                f"{self.path} has no factors of projections that the zoo adapts; use {fix}"
            )
        lora = self.metadata["config"] | {"lora_targets": tuple(targets)}
        config = dataclasses.replace(config, **lora)
        wanted = tensors.expand(factors, paths(shapes_of(entry, config)["params"]))
        tensors.check(
            self.path, self.stored, {tensor.name: tensor.shape for tensor in wanted},
            f"{CONFIG} and its base imply", fix,
        )  # fmt: skip
        facts = {"entry": entry, "config": dataclasses.asdict(config)}
        facts |= {"context": base.get("context")}
        return dataclasses.replace(self, metadata=self.metadata | facts, config=config)

    def shapes(self) -> Tree:
        """Shapes of the factors: {"params": nested dict of ShapeDtypeStructs}."""
        return {"params": shapes_of(self.metadata["entry"], self.config)["params"]}

    def read(self, abstract: Tree) -> Tree:
        """Reads the factors in {"params": nested dict of ShapeDtypeStructs with shardings}."""
        return read_onto(self.stored, table(self.metadata["entry"], self.config), abstract)

    def tokenizer(self) -> tokenizer.Tokenizer | None:
        """The folder's tokenizer; None if it has none. Raises DataError if it can't be read."""
        files = tokenizer.read(self.path)
        return tokenizer.from_files(files, str(self.path)) if files else None


def read_adapter(path: pathlib.Path) -> Adapter:
    """Reads adapter_config.json and the headers of the tensors. Raises UserError."""
    keys = tensors.read_json(path / CONFIG)
    for key, value in keys.items():
        if key not in (*READ, *IGNORED_KEYS) and value and value not in ALLOWED.get(key, ()):
            raise UserError(
                f"{path / CONFIG} has {key} {json.dumps(value)}, which the zoo does not implement; "
                "merge the adapter with PEFT, and use the merged model"
            )
    for key, kind in (("r", int), ("lora_alpha", (int, float))):
        if type(keys.get(key)) is bool or not isinstance(keys.get(key), kind) or keys[key] <= 0:
            raise UserError(
                f"{path / CONFIG} has {key} {json.dumps(keys.get(key))}, which must be a number "
                "> 0; use this adapter's own"
            )
    config = {"lora_rank": keys["r"], "lora_alpha": float(keys["lora_alpha"])}
    base = keys.get("base_model_name_or_path") or ""
    metadata = {
        "entry": FAMILIES[0].ENTRY,
        "config": config,
        "step": Adapter.step,
        "data": {},
        "base": {"path": f"hf:{base}", "sha256": None},
    }
    return Adapter(path, metadata, tensors.find(path, STEM))


def write_adapter(
    folder: pathlib.Path,
    entry: str,
    config: Any,
    base: str | None,
    read,
    tokens: tokenizer.Tokenizer | None = None,
    card: str = "",
) -> None:
    """Writes an adapter's folder next to its destination, then moves it into place.

    Raises UserError if its base has no architecture that PEFT could load it onto.

    Args:
      config: the Config with lora_rank, lora_alpha and lora_targets.
      base: the name by which PEFT finds the base; None if there is none.
      read: a function from a factor's path to its value, a float32 NumPy array.
      tokens, card: tokenizer and README.md to write along.
    """
    check_exchange(entry)
    ENTRIES[entry].config_json(config, context=1)  # raises
    factors = paths(shapes_of(entry, config)["params"])
    expanded = list(tensors.expand(table(entry, config), factors))
    theirs = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({tensor.name.split(".")[-3] for tensor in expanded}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    with new_folder(folder, tokens, card, CONFIG) as beside:
        tensors.write(beside, expanded, read, STEM)
        (beside / CONFIG).write_text(json.dumps(theirs, indent=2) + "\n")


def check_exchange(entry: str) -> None:
    """Raises UserError if PEFT's adapters of this entry's models differ from ours."""
    if reason := ENTRIES[entry].NO_PEFT:
        raise UserError(f"{reason}; merge the adapter, and use the merged model")


def table(entry: str, config: Any) -> dict[str, tuple[str, str, str]]:
    """The factors of every weight that can have an adapter, in the format of tensors.py.

    Their A is [r, in].
    """
    targets, found = type(config).lora_targets, {}  # the default lists all that the entry has
    for path, (name, ours, theirs) in ENTRIES[entry].tensors(config).items():
        module, _, leaf = path.rpartition("/")
        if leaf in targets:
            out, inner = theirs.split()
            name = f"base_model.model.{name.removesuffix('weight')}lora_"
            outer = "".join(dim for dim in ours if dim not in inner)
            found[f"{module}/lora/{leaf}/a"] = (f"{name}A.weight", f"{inner}r", f"r {inner}")
            found[f"{module}/lora/{leaf}/b"] = (f"{name}B.weight", f"r{outer}", f"{out} r")
    return found
