"""Adapters of the PEFT library: folders with adapter_config.json and adapter_model.safetensors.

Only plain LoRA is supported, W + A·B · lora_alpha / r; errors name the key of any other feature.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
from collections.abc import Collection, Iterator
from typing import Any

import jax
import numpy as np

from data import tokenizer
from recipes.common import entries
from recipes.common.hf import bert, siglip, tensors, vit
from recipes.common.hf.family import Family, Table
from recipes.common.hf.folder import (
    EXPORTABLE,
    FAMILIES,
    add_prefix,
    family_of,
    nearest_family,
    new_folder,
    read_onto,
    shapes_of,
)
from recipes.common.runtime.errors import UserError
from recipes.common.sharding.abstract import Tree, nested, paths
from zoo.options.weights import EXPERT_TARGETS, adaptable

WITHOUT_TASK = (bert.ENTRY, siglip.ENTRY, vit.ENTRY)  # entries whose models generate nothing
CONFIG = "adapter_config.json"
STEM = "adapter_model"  # stem of its tensor files
PREFIX = "base_model.model."  # of its tensors' names

STORED_DTYPES = {"BF16": "bfloat16", "F16": "float16"}  # others are compared in float32
READ = ("r", "lora_alpha", "base_model_name_or_path", "target_parameters")
# Stacked weights of a module of experts, in the order in which its class in `transformers` has them.
# PEFT wraps the module once for each of them that it adapts.
PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
# Names of experts' weights in folders that have a tensor for each, or Granite's modules for all. Their
# classes in `transformers` hold PARAMETERS in a module `experts`, as [E, out, in].
SEPARATE = re.compile(r"(\.experts\.\{\}\.\w+|\.(in|out)put_linear)\.weight$")
WRAPPED = ".base_layer"  # in a tensor's name, once for each later wrapper
# Keys about training, keys that the tensors imply, and options of keys that are refused anyway.
IGNORED_KEYS = {
    *("auto_mapping", "inference_mode", "peft_version", "task_type", "lora_dropout"),
    *("target_modules", "exclude_modules", "megatron_core", "qalora_group_size", "layers_pattern"),
    "layers_to_transform",
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    "fan_in_fan_out",  # PEFT itself corrects it by the kind of module
}
ALLOWED = {  # key → values without effect; other keys must be false or empty
    "peft_type": ("LORA",),
    "bias": ("none",),
    "revision": ("main",),
    # PEFT's other initializations also change the base.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "modules_to_save": ([vit.HEAD],),  # of other models, the tensors are refused
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
    keys: dict[str, Any]  # of adapter_config.json
    family: Family | None = None  # of the base; None: the base is still unknown
    config: Any = None  # of the base with this adapter; None: the base is still unknown
    # Whole weights that PEFT saved along, such as the embedding table: name → (path, tensor).
    copies: dict[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)
    step = 0
    files = ()

    def on(self, base: dict[str, Any], config: Any) -> "Adapter":
        """Returns the adapter checked against its base. Raises UserError if it does not fit.

        Args:
          base: the base's metadata.
          config: the base's Config.
        """
        entry, fix = base["entry"], "the base that it was trained on (--base=PATH)"
        if entry not in EXPORTABLE:
            raise UserError(
                f"{self.path} is not an adapter for {entry!r} models, like its base; use {fix}"
            )
        # A base may have what no family says, such as experts' biases: adapters don't touch it.
        family, _ = nearest_family(entry, config, base.get("architecture") or "")
        known = adaptable(type(config))
        names = {name.removeprefix(PREFIX): tensor for name, tensor in self.stored.items()}
        names = tensors.rename(names, family.canonical, self.path)
        config = family.with_head(config, {name: tensor.shape for name, tensor in names.items()})
        every = dataclasses.replace(config, **self.metadata["config"], lora_targets=known)
        factors = list(_factors(family, every))
        full_name = add_prefix({tensor.name.removeprefix(PREFIX) for tensor in factors})
        names = tensors.rename(names, full_name, self.path)
        stored: dict[str, Any] = {PREFIX + name: tensor for name, tensor in names.items()}
        self._check_modules(stored, factors, fix)
        adapted = {_target(tensor.path) for tensor in factors if tensor.name in stored}
        if not adapted - {None}:
            raise UserError(
                f"{self.path} has no factors of projections that the zoo adapts; use {fix}"
            )
        targets = tuple(name for name in known if name in adapted)
        config = dataclasses.replace(every, lora_targets=targets)
        wanted = {
            tensor.name: tensor
            for tensor in _factors(family, config)
            if _target(tensor.path) or tensor.name in stored  # an adapter may lack a head
        }
        copies = _copies(family, config, stored, wanted)
        stored = {name: tensor for name, tensor in stored.items() if name not in copies}
        stored |= self._zeros(family, config, wanted, stored)
        if (missing := wanted.keys() - stored.keys()) and not stored.keys() - wanted.keys():
            raise UserError(
                f"{self.path} is missing tensor {min(missing)}; copy the missing file, list the "
                f"layers that it adapts as layers_to_transform in {CONFIG}, or use {fix}"
            )
        tensors.check(
            self.path, stored, {name: tensor.shape for name, tensor in wanted.items()},
            f"{CONFIG} and its base imply", fix,
        )  # fmt: skip
        facts = {"entry": entry, "config": entries.config_json(config)}
        facts |= {"context": base.get("context")}
        return dataclasses.replace(
            self, metadata=self.metadata | facts, config=config, stored=stored, family=family,
            copies=copies,
        )  # fmt: skip

    def check_copies(self, base: Any) -> None:
        """Raises UserError if a weight that was saved along is not the base's.

        Args:
          base: the WeightSource of the base.
        """
        shapes, plain = paths(base.shapes()["params"]), self._table()
        for name, (path, tensor) in self.copies.items():
            dtype = STORED_DTYPES.get(tensor.dtype, "float32")
            sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
            leaf = jax.ShapeDtypeStruct(shapes[path].shape, dtype, sharding=sharding)
            table = {path: (name, *plain[path][1:])}
            (wanted,) = (wanted for wanted in tensors.expand(table, {path: leaf}))
            same = tuple(wanted.shape) == tuple(tensor.shape)
            if same:
                abstract = {"params": nested({path: leaf})}
                ours = paths(read_onto({name: tensor}, table, abstract)["params"])[path]
                theirs = paths(base.read(abstract)["params"])[path]
                same = np.array_equal(np.asarray(ours), np.asarray(theirs))
            if not same:
                raise UserError(
                    f"{self.path} has its own {name.removeprefix(PREFIX)}, which differs from its base's, "
                    "and the zoo reads only factors; merge the adapter with PEFT, and use the merged model"
                )

    def _check_modules(
        self, stored: dict[str, Any], factors: list[tensors.Tensor], fix: str
    ) -> None:
        """Raises UserError if the adapter changes modules that the zoo does not adapt."""
        supported = {_module(tensor.name) for tensor in factors if _target(tensor.path)}
        for name in sorted(stored):
            if ".lora_" in name and _module(name) not in supported:
                kinds = sorted({module.rpartition(".")[2] for module in supported})
                raise UserError(
                    f"{self.path} adapts {name.removeprefix(PREFIX).partition('.lora_')[0]}, and the zoo "
                    f"adapts only {', '.join(kinds)} of its base; merge the adapter with PEFT, and use "
                    f"the merged model, or use {fix}"
                )

    def _zeros(
        self,
        family: Family,
        config: Any,
        wanted: dict[str, tensors.Tensor],
        stored: dict[str, Any],
    ) -> dict[str, tensors.Zeros]:
        """Factors of 0, by name, for the layers that adapter_config.json leaves out.

        Raises UserError if such a layer has factors.
        """
        zeros = {}
        for name, factor in wanted.items():
            if name in stored and not self._in_layers(name):
                raise UserError(
                    f"{self.path} has a tensor {name}, which layers_to_transform "
                    f"{self.keys['layers_to_transform']} leaves out; use this adapter's own {CONFIG}"
                )
            if name not in stored and not self._adapts(family, config, factor):
                zeros[name] = tensors.Zeros(self.path, name, factor.shape)
        return zeros

    def _adapts(self, family: Family, config: Any, factor: tensors.Tensor) -> bool:
        """Whether adapter_config.json says that this factor exists, as PEFT reads it."""
        weight = factor.path.replace("/lora/", "/").removesuffix("/a").removesuffix("/b")
        template = table(family, config)[weight][0].removeprefix(PREFIX)
        index = map(tensors.Index, factor.index)
        if not template.endswith(".weight"):  # of experts
            return _matches(self.keys.get("target_parameters") or [], template.format(*index))
        if not self._in_layers(factor.name):
            return False
        targets, others = (self.keys.get(f"{option}_modules") for option in ("target", "exclude"))
        # Versions of transformers differ in the names of ViT's modules.
        names = {template, family.peft_name(template)}
        modules = [
            name.removesuffix(".weight").format(*map(tensors.Index, factor.index)) for name in names
        ]
        if any(_matches(others or [], module) for module in modules):
            return False
        return (
            not targets
            or targets == "all-linear"
            or any(_matches(targets, module) for module in modules)
        )

    def _in_layers(self, name: str) -> bool:
        """Whether layers_to_transform has the layer of a tensor; without it, every layer."""
        layers = self.keys.get("layers_to_transform")
        number = re.search(r"\.(\d+)\.", name)
        return not layers or not number or int(number[1]) in layers

    def shapes(self) -> Tree:
        """Shapes of what is stored: {"params": nested dict of ShapeDtypeStructs}.

        These are all factors, and a head if PEFT has saved one.
        """
        known = self._table()
        trained = paths(shapes_of(self.metadata["entry"], self.config)["params"])
        stored = {p: x for p, x in trained.items() if "/lora/" in p or known[p][0] in self.stored}
        return {"params": nested(stored)}

    def read(self, abstract: Tree) -> Tree:
        """Reads the factors in {"params": nested dict of ShapeDtypeStructs with shardings}."""
        return read_onto(self.stored, self._table(), abstract)

    def _table(self) -> Table:
        assert self.family is not None, "`on` has not been called"
        return table(self.family, self.config)

    def tokenizer(self) -> tokenizer.Tokenizer | None:
        """The folder's tokenizer; None if it has none. Raises DataError if it can't be read."""
        files = tokenizer.read(self.path)
        return tokenizer.from_files(files, str(self.path)) if files else None


def _copies(
    family: Family, config: Any, stored: dict[str, Any], wanted: Collection[str]
) -> dict[str, tuple[str, Any]]:
    """Name → (path, tensor) of whole weights outside of layers in an adapter's files."""
    by_name = {name: path for path, (name, *_) in family.tensors(config).items()}
    tied = family.tied | family.copies(config)
    by_name = {copy: by_name[name] for copy, name in tied.items() if name in by_name} | by_name
    by_plain_name = {name.removeprefix(PREFIX): name for name in stored.keys() - {*wanted}}
    return {name: (by_name[x], stored[name]) for x, name in by_plain_name.items() if x in by_name}


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
    _check_names(keys, path / CONFIG)
    config = {"lora_rank": keys["r"], "lora_alpha": float(keys["lora_alpha"])}
    base = keys.get("base_model_name_or_path") or ""
    metadata = {
        "entry": FAMILIES[0].entry,
        "config": config,
        "step": Adapter.step,
        "data": {},
        "base": {"path": f"hf:{base}", "sha256": None},
    }
    stored = tensors.find(path, STEM)
    stored = tensors.rename(stored, functools.partial(_by_parameter, keys), path)
    _check_left_out(keys, stored, path)
    return Adapter(path, metadata, stored, keys)


def _by_parameter(keys: dict[str, Any], name: str) -> str:
    """A tensor's name, with the weight of experts that it adapts in place of its module's wrappers."""
    wrapped, _, factor = name.partition(".lora_")
    module, depth = wrapped.replace(WRAPPED, ""), wrapped.count(WRAPPED)
    targets = keys.get("target_parameters") or []
    adapted = [weight for weight in PARAMETERS if _matches(targets, f"{module}.{weight}")]
    return f"{module}.{adapted[-1 - depth]}.lora_{factor}" if depth < len(adapted) else name


def _wrapped(name: str, parameters: Collection[str]) -> str:
    """The name that PEFT gives a tensor that `_by_parameter` has renamed.

    Args:
      parameters: the weights of experts that the adapter adapts.
    """
    weight, _, factor = name.partition(".lora_")
    if weight not in parameters:
        return name
    module, _, own = weight.rpartition(".")
    later = PARAMETERS[PARAMETERS.index(own) + 1 :]
    depth = sum(f"{module}.{other}" in parameters for other in later)
    return f"{module}{WRAPPED * depth}.lora_{factor}"


def _check_left_out(keys: dict[str, Any], stored: Collection[str], path: pathlib.Path) -> None:
    """Raises UserError for factors of modules that target_modules leaves out, which PEFT doesn't read."""
    targets, others = keys.get("target_modules"), keys.get("exclude_modules")
    parameters = keys.get("target_parameters") or []
    for name in sorted(stored):
        module, is_factor, _ = name.removeprefix(PREFIX).partition(".lora_")
        if _matches(parameters, module):
            continue
        is_target = not targets or targets == "all-linear" or _matches(targets, module)
        if is_factor and (not is_target or _matches(others or [], module)):
            key = "exclude_modules" if is_target else "target_modules"
            raise UserError(
                f"{path} has factors of {module}, which {key} {json.dumps(keys[key])} leaves out; use "
                f"this adapter's own {CONFIG}"
            )


def _check_names(keys: dict[str, Any], file: pathlib.Path) -> None:
    """Raises UserError if modules or layers are not named in a form that PEFT has."""
    layers = keys.get("layers_to_transform")
    if type(layers) is int:
        keys["layers_to_transform"] = layers = [layers]
    wrong = [] if not layers or _is_list(layers, int) else ["layers_to_transform"]
    if keys.get("target_parameters") and not _is_list(keys["target_parameters"], str):
        wrong.append("target_parameters")
    for key in ("target_modules", "exclude_modules"):
        value = keys.get(key)
        try:
            known = not value or _is_list(value, str) or bool(re.compile(value))
        except (TypeError, re.error):
            known = False
        wrong += [] if known else [key]
    if wrong:
        raise UserError(
            f"{file} has {wrong[0]} {json.dumps(keys[wrong[0]])}, which PEFT does not write; use this "
            "adapter's own"
        )


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _factors(family: Family, config: Any) -> Iterator[tensors.Tensor]:
    """The tensors of an adapter with this config, and of a head that is trained with it."""
    trained = paths(shapes_of(family.entry, config)["params"])
    return tensors.expand(table(family, config), trained)


def _target(path: str) -> str | None:
    """The weight that a factor adapts, as in lora_targets, by the factor's path; None: a head."""
    module, is_factor, factor = path.partition("/lora/")
    return lora_target(module, factor.partition("/")[0]) if is_factor else None


def lora_target(module: str, weight: str) -> str:
    """A weight's name in lora_targets.

    Args:
      module: its module's path.
    """
    is_expert = module.rpartition("/")[2] in ("experts", "mixture")
    return f"expert_{weight}" if is_expert and f"expert_{weight}" in EXPERT_TARGETS else weight


def _module(name: str) -> str:
    """The module of a factor, with # for the number of its layer."""
    return re.sub(r"\.\d+\.", ".#.", name.partition(".lora_")[0])


def _matches(patterns: str | list[str], module: str) -> bool:
    """Whether PEFT's target_modules, or exclude_modules, name a module."""
    if isinstance(patterns, str):
        return re.fullmatch(patterns, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in patterns)


def write_adapter(
    folder: pathlib.Path,
    entry: str,
    config: Any,
    base: str | None,
    read,
    tokens: tokenizer.Tokenizer | None = None,
    card: str = "",
    architecture: str = "",
) -> None:
    """Writes an adapter's folder next to its destination, then moves it into place.

    Raises UserError if its base has no architecture that PEFT could load it onto.

    Args:
      config: the Config with lora_rank, lora_alpha and lora_targets.
      base: the name by which PEFT finds the base; None if there is none.
      read: a function from a factor's path to its value, a float32 NumPy array.
      tokens, card: tokenizer and README.md to write along.
      architecture: of the base; see `family_of`.
    """
    family = family_of(entry, config, architecture)
    exported = family.config_json(config, 1)  # raises
    if base is None:  # PEFT loads it onto an export of the base, which may be a text model alone
        family = family_of(entry, config, exported["architectures"][0])
    config, read = side_by_side(family, config, read)
    names = {
        path: (PREFIX + family.peft_name(name.removeprefix(PREFIX)), ours, theirs)
        for path, (name, ours, theirs) in table(family, config).items()
    }
    trained = paths(shapes_of(entry, config)["params"])
    expanded = list(tensors.expand(names, trained))
    adapted = {t.name.split(".lora_")[0] for t in expanded if ".lora_" in t.name}
    plain = paths(shapes_of(entry, dataclasses.replace(config, lora_rank=0))["params"])
    weights = {tensor.name for tensor in tensors.expand(names, plain)}
    # In older versions of transformers, experts have modules as in folders.
    stored = tensors.expand(family.tensors(config), plain)
    every = {
        module
        for weight in weights | {PREFIX + family.peft_name(tensor.name) for tensor in stored}
        for module in itertools.accumulate(weight.split(".")[:-1], "{}.{}".format)
    }
    every = None if family.is_part else every
    parameters = adapted & weights  # not modules of their own
    modules = sorted(adapted - parameters)
    expanded = [tensor._replace(name=_wrapped(tensor.name, parameters)) for tensor in expanded]
    theirs = {
        "peft_type": "LORA",
        # PEFT has no class for masks, towers or pictures; None suits every model.
        "task_type": None if family.entry in WITHOUT_TASK else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        "target_modules": target_modules(modules, every),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": family.in_out,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    if parameters:
        theirs["target_parameters"] = sorted(
            {".".join(weight.split(".")[-2:]) for weight in parameters}
        )
    if any(".lora_" not in tensor.name for tensor in expanded):
        theirs["modules_to_save"] = [family.head]
    with new_folder(folder, tokens, card, CONFIG) as beside:
        tensors.write(beside, expanded, read, STEM)
        (beside / CONFIG).write_text(json.dumps(theirs, indent=2) + "\n")


def target_modules(modules: list[str], every: set[str] | None) -> list[str]:
    """PEFT's target_modules: last words of modules' names, or whole names if others end like them.

    Args:
      modules: names of those with an adapter, with PREFIX.
      every: names of all modules of the model, with PREFIX; also of those that hold others, which
        PEFT would replace too: Gemma 4's tower has its projections inside modules of the same names.
        None: not all are known.
    """
    if every is None:
        return sorted(module.removeprefix(PREFIX) for module in modules)
    names = set()
    for module in modules:
        last = module.rpartition(".")[2]
        alike = {other for other in every if other.endswith(f".{last}")}
        names.add(last if alike <= {*modules} else module.removeprefix(PREFIX))
    return sorted(names)


def side_by_side(family: Family, config: Any, read) -> tuple[Any, Any]:
    """(Config, function like `read`) of an adapter whose weights in one tensor of theirs share an A.

    GPT-2's q, k and v are one tensor, so that PEFT's adapter of them has one A. If ours differ, all
    factors get as many times the rank: the A's side by side, and around each B zeros.
    """
    has, groups, ranks = paths(shapes_of(family.entry, config)["params"]), {}, {}
    for path, (name, ours, _) in table(family, config).items():
        ranks[path] = name.count("{") + ours.find("r")  # the dim of the rank
        if path.endswith("/a") and path in has:
            groups.setdefault(name, []).append(path)
    shared = [group for group in groups.values() if len(group) > 1]
    if all(np.array_equal(read(path), read(group[0])) for group in shared for path in group):
        return config, read
    rank, times = config.lora_rank, max(map(len, shared))

    def wider(path: str) -> np.ndarray:
        group = next((g for g in groups.values() if f"{path[:-1]}a" in g), None)
        if group is None:  # a head
            return read(path)
        if path.endswith("/a"):
            parts = [read(other) for other in group]
            parts += [np.zeros_like(parts[0])] * (times - len(parts))
            return np.concatenate(parts, axis=-1)
        value, place = read(path), group.index(f"{path[:-1]}a")
        parts = [np.zeros_like(value)] * times
        parts[place] = value
        return np.concatenate(parts, axis=ranks[path])

    wide = {"lora_rank": times * rank, "lora_alpha": times * config.lora_alpha}
    return dataclasses.replace(config, **wide), wider


def table(family: Family, config: Any) -> Table:
    """All weights and the factors of each that can have an adapter, in the format of tensors.py.

    Their A is [r, in], and of experts [E·r, in].
    """
    targets, rows = adaptable(type(config)), {}
    stored = family.tensors(config)
    for path, row in stored.items():
        module, _, leaf = path.rpartition("/")
        target = lora_target(module, leaf)
        is_expert = target in EXPERT_TARGETS
        name, ours, theirs = in_memory(leaf, row, f"{module}/gate" in stored) if is_expert else row
        rows[path] = (PREFIX + name, ours, theirs)
        if target not in targets:
            continue
        words = theirs.split()
        stack = words.pop(0) if is_expert else ""
        first, second, *order = words
        is_in_out = first == ours[1] if is_expert else family.in_out
        inner, out = (first, second) if is_in_out else (second, first)
        stem = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        outer = out.replace("#", "")
        a = (f"{stem}A.weight", f"{stack}{inner}r", f"{stack}r {inner}")
        b = (f"{stem}B.weight", f"{stack}r{outer}", " ".join((out, f"r{stack}", *order)))
        rows |= {f"{module}/lora/{leaf}/a": a, f"{module}/lora/{leaf}/b": b}
    return rows


def in_memory(leaf: str, row: tuple[str, str, str], has_gate: bool) -> tuple[str, str, str]:
    """The row of an experts' weight as its class in `transformers` holds it, for one as folders have it.

    Args:
      leaf: the weight's name in our module: gate, up or down.
      has_gate: whether these experts have a gate.
    """
    name, *_ = row
    if name.rpartition(".")[2] in PARAMETERS:
        return row
    # Mixtral's module has another name in memory, Granite's has not.
    module = SEPARATE.sub("", name.replace(".block_sparse_moe.experts.", ".mlp.experts."))
    experts = f"{module}.experts"
    if leaf == "down":
        return f"{experts}.down_proj", "EFD", "E D F"
    if not has_gate:
        return f"{experts}.up_proj", "EDF", "E F D"
    half = "0/2" if leaf == "gate" else "1/2"
    return f"{experts}.gate_up_proj", "EDF", f"E #F D {half}"
